"""The house's order: imports point down, starting is light, functions and files stay small."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "rlfe"
FILES = sorted(PACKAGE.rglob("*.py"))
ROOMS = ("training", "eval", "hub")
ENGINES = ("engines", "tasks", "sandbox")
BOTTOM = ("types", "errors")
HEAVY = ("torch", "vllm", "transformers", "datasets", "pandas", "pyarrow", "matplotlib", "ray")
# Exceptions, each with its reason.
PRINTS = {"precompute.py"}  # a maintenance script, run by hand to rewrite packaged data
# vLLM and Ray take some settings, and CUDA its visible devices, in no other way; a service's
# address and key are in no setting, so that no record holds them.
READS_ENVIRONMENT = {
    *("vllm_settings.py", "devices.py", "ray_cluster.py", "tinker_service.py"),
    "environment.py",  # sets it for the first two of these and for ranks
    "launching.py",  # what a rank inherits
}
# What each kind of room may import of rlfe, beside itself.
BASE = {
    path.stem for path in PACKAGE.glob("*.py") if path.stem not in (*BOTTOM, "__main__", "__init__")
}


def room(path):
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def allowed(name):
    """The rooms that a room may import."""
    if name in BOTTOM:
        return set(BOTTOM)
    if name in BASE:
        return {*BASE, *BOTTOM}
    if name in ENGINES:
        return {*ENGINES, *BASE, *BOTTOM}
    if name in ROOMS:
        return {name, *ENGINES, *BASE, *BOTTOM}
    return {"cli", *ROOMS, *ENGINES, *BASE, *BOTTOM}


def imported_modules(path):
    """Names of modules that a file imports, wherever the import stands."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            if node.module == "rlfe":
                yield from (f"rlfe.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down(path):
    rooms = {name.split(".")[1] for name in imported_modules(path) if name.startswith("rlfe.")}
    known = {*BOTTOM, *BASE, *ENGINES, *ROOMS, "cli"}
    assert rooms & known <= allowed(room(path))


@pytest.mark.parametrize("name", BOTTOM)
def test_types_and_errors_need_the_standard_library_only(name):
    tree = ast.parse((PACKAGE / f"{name}.py").read_text())
    typing_only = {
        alias.name
        for branch in ast.walk(tree)
        if isinstance(branch, ast.If) and ast.unparse(branch.test) == "TYPE_CHECKING"
        for node in ast.walk(branch)
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    names = set(imported_modules(PACKAGE / f"{name}.py")) - typing_only
    assert {module.split(".")[0] for module in names} <= sys.stdlib_module_names


def test_the_command_line_starts_without_heavy_imports():
    code = f"import sys, rlfe.cli.main; print([n for n in {HEAVY!r} if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


LIGHT = [
    ["--help"],
    ["recipes", "list"],
    ["config", "show"],
    ["completion", "bash"],
    ["sweep", "lag-staleness"],
    ["push", "--help"],
    ["train", "--help"],
    ["eval", "--help"],
]


@pytest.mark.parametrize("arguments", LIGHT, ids=lambda words: " ".join(words))
def test_light_commands_do_not_import_torch_or_other_heavy_packages(arguments, tmp_path):
    module = PACKAGE / "cli" / f"{arguments[0]}.py"
    if not arguments[0].startswith("-") and not module.exists():
        pytest.skip(f"{module.name} is not there")
    code = (
        "import sys; from rlfe.cli.main import run; "
        f"code = run({arguments!r}, {{}}); "
        f"print([n for n in {HEAVY!r} if n in sys.modules], code, file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert done.stderr.splitlines()[-1] == "[] 0"


def test_help_takes_less_than_0_3_seconds_of_cpu_time():
    code = (
        "import subprocess, resource, sys; "
        "subprocess.run([sys.executable, '-m', 'rlfe', '--help'], stdout=-3, check=True); "
        "used = resource.getrusage(resource.RUSAGE_CHILDREN); print(used.ru_utime + used.ru_stime)"
    )
    seconds = [
        float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout)
        for _ in range(3)  # the quickest of three: the machine may be busy
    ]
    assert min(seconds) < 0.3


def functions(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node.end_lineno - node.lineno + 1


def test_no_function_is_longer_than_60_lines():
    long = [
        f"{path.relative_to(PACKAGE)}: {name} has {lines} lines"
        for path in FILES
        for name, lines in functions(path)
        if lines > 60
    ]
    assert long == []


def test_no_file_is_longer_than_450_lines():
    long = [str(path) for path in FILES if len(path.read_text().splitlines()) > 450]
    assert long == []


def test_only_the_output_module_prints():
    prints = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path in FILES
        if path.name not in {"output.py", *PRINTS} and "inside" not in path.parts
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("print", "click.echo")
    ]
    assert prints == []


def test_the_environment_is_read_in_one_place():
    readers = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path in FILES
        if path.name not in {"main.py", *READS_ENVIRONMENT} and "inside" not in path.parts
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ("os.environ", "os.getenv")
    ]
    assert readers == []
