"""Loading a configuration: recipes < RLFE_* environment < --set < named flags, with origins.

Every value knows where it came from, and every refusal names the key, the value and that place.
What the keys mean: `rlfe.schema` and docs/algorithms.md. What settings may not stand together is
`check`. Try: `load(["tiny"], sets=["optim.lr=6e-6"]).values()`.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple, get_args

from pydantic import BaseModel, ValidationError

from rlfe.errors import NotFoundError, RequestError
from rlfe.recipe_checks import check
from rlfe.schema import EvalTask, Recipe
from rlfe.suggestions import nearest, nearest_key
from rlfe.toml import dumps, key_lines, parse_key, read_toml

__all__ = ["Resolved", "Setting", "check", "dump", "flat", "load", "read_run_config", "shipped"]

ENVIRONMENT_PREFIX = "RLFE_"
FLAGS = {
    "engine.sampler": "--engine",
    "engine.learner": "--engine",
    "run.seed": "--seed",
    "model.path": "--model",
}
OPEN = {"eval": 1, "matrix": 0, "data.columns": 0}  # sections whose keys the user names


class Setting(NamedTuple):
    """One value from one place. `Setting(("optim", "lr"), 6e-6, "tiny.toml:4")`"""

    path: tuple[str, ...]
    value: Any
    origin: str

    @property
    def key(self) -> str:
        return ".".join(self.path)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """A recipe and where each value came from ("default" where nothing was given)."""

    recipe: Recipe
    origins: dict[str, str]

    def values(self) -> dict[str, Any]:
        """Dotted key -> value, in the schema's order."""
        return flat(self.recipe)


class Key(NamedTuple):
    """A key of the schema. `KEYS()["optim.lr"].about == "learning rate"`"""

    default: Any
    about: str
    annotation: Any


@cache
def keys() -> dict[str, Key]:
    """All keys of the schema but those that the user names (`eval.<task>.*`, `matrix.*`)."""
    return dict(_walk(Recipe, ""))


def _walk(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, Key]]:
    for name, field in model.model_fields.items():
        key = prefix + (field.alias or name)
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from _walk(kind, key + ".")
        else:
            yield key, Key(field.default, field.description or "", kind)


def task_keys() -> dict[str, Key]:
    """The keys of one `[eval.<task>]` table."""
    return dict(_walk(EvalTask, ""))


def load(
    recipes: Sequence[str],
    sets: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    flags: Mapping[str, Any] | None = None,
) -> Resolved:
    """Resolve a configuration, weakest first: recipes left to right, environment, sets, flags.

    Args:
        recipes: Names of shipped recipes or TOML files.
        sets: `KEY=VALUE` texts; a value is TOML, a bare word is text.
        environment: The process environment; `RLFE_OPTIM__LR` sets `optim.lr`.
        flags: Dotted key -> value of named options; None means not given.

    Raises:
        RequestError: Bad TOML, an unknown key, or a value out of its range, with the place.
    """
    settings = [
        *(setting for name in recipes for setting in _recipe_settings(name)),
        *_environment_settings(environment or {}),
        *(_set_setting(text) for text in sets),
        *_flag_settings(flags or {}),
    ]
    return _resolve([_checked(setting) for setting in settings])


def shipped() -> list[str]:
    """Names of the shipped recipes."""
    folder = resources.files("rlfe") / "recipes"
    names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    return sorted(name.removesuffix(".toml") for name in names if name.endswith(".toml"))


def recipe_text(name: str) -> tuple[str, str]:
    """(shown file name, text) of a shipped recipe or a TOML file.

    Raises:
        RequestError: There is no such recipe or file.
    """
    if name in shipped():
        return f"{name}.toml", (resources.files("rlfe") / "recipes" / f"{name}.toml").read_text()
    path = Path(name)
    try:
        return str(path), path.read_text(encoding="utf-8")
    except (FileNotFoundError, IsADirectoryError):
        guess = nearest(path.name.removesuffix(".toml"), shipped())
        raise RequestError(
            f'no recipe "{name}"' + (f'; did you mean "{guess}"?' if guess else ""),
            hint=f"Shipped recipes: {', '.join(shipped())}. Or give a TOML file.",
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"cannot read recipe {name}: {error}") from error


def _recipe_settings(name: str) -> list[Setting]:
    shown, text = recipe_text(name)
    return list(_text_settings(text, shown))


def _text_settings(text: str, shown: str) -> Iterator[Setting]:
    lines = key_lines(text)
    for path, value in _leaves(read_toml(text, shown), ()):
        places = [path[:size] for size in range(len(path), 0, -1)]
        line = next((lines[place] for place in places if place in lines), None)
        yield Setting(path, value, shown if line is None else f"{shown}:{line}")


def _leaves(
    table: Mapping[str, Any], path: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, value in table.items():
        here = (*path, name)
        if isinstance(value, dict) and value:
            yield from _leaves(value, here)
        elif not isinstance(value, dict):
            yield here, value


def _environment_settings(environment: Mapping[str, str]) -> Iterator[Setting]:
    for name in sorted(environment):
        if name.startswith(ENVIRONMENT_PREFIX):
            path = tuple(name.removeprefix(ENVIRONMENT_PREFIX).lower().split("__"))
            yield Setting(path, _Text(environment[name].strip()), name)


class _Text(str):
    """A value as typed, still to be read as TOML."""


def _set_setting(text: str) -> Setting:
    name, sign, value = text.partition("=")
    name, value = name.strip(), value.strip()
    if not sign or not name:
        raise RequestError(
            f'--set "{text}" is not KEY=VALUE', hint="Write for example --set optim.lr=6e-6."
        )
    if not value:
        raise RequestError(f'--set "{text}" gives no value', hint='For an empty text write KEY=""')
    return Setting(parse_key(name), _Text(value), "--set")


def _flag_settings(flags: Mapping[str, Any]) -> Iterator[Setting]:
    for key, value in flags.items():
        if value is not None:
            yield Setting(tuple(key.split(".")), value, FLAGS.get(key, f"the option for {key}"))


def _checked(setting: Setting) -> Setting:
    """The setting with a known path and a value read from its text."""
    path = setting.path
    if path[0] == "matrix" and len(path) > 1:
        path = ("matrix", ".".join(path[1:]))
    key = _schema_key(setting)
    value = setting.value
    if path[0] == "matrix":
        _check_matrix(setting, path[-1])
    if isinstance(value, _Text):
        value = _typed(str(value), key)
    if value == "none" and key is not None and _takes_none(key.annotation):
        value = None
    return Setting(path, value, setting.origin)


def _check_matrix(setting: Setting, name: str) -> None:
    """A matrix entry lists values of a key, or tables of keys that change together."""
    value = _typed(str(setting.value), None) if isinstance(setting.value, _Text) else setting.value
    if not isinstance(value, list) or not value:
        raise RequestError(
            f"{setting.origin}: matrix.{name} is not a list",
            hint='Write for example "optim.lr" = [6e-6, 1e-6].',
        )
    tables = [entry for entry in value if isinstance(entry, dict)]
    named = [key for entry in tables for key in entry] if len(tables) == len(value) else [name]
    for key in named:
        _schema_key(Setting(parse_key(key), None, setting.origin))


def _schema_key(setting: Setting) -> Key | None:
    """The schema's entry of a path; None where the user names the key freely."""
    known, key = keys(), setting.key
    if key in known:
        return known[key]
    if setting.path[0] == "matrix" or key.startswith("data.columns."):
        return None
    if setting.path[0] == "eval" and len(setting.path) == 3:
        if setting.path[2] in task_keys():
            return task_keys()[setting.path[2]]
        guess = nearest_key(setting.path[2], {n: k.about for n, k in task_keys().items()})
        full = f"eval.{setting.path[1]}.{guess}" if guess else None
    else:
        full = nearest_key(key, {name: entry.about for name, entry in known.items()})
    suggestion = f'; did you mean "{full}"?' if full else ""
    section = any(name.startswith(key + ".") for name in known)
    what = f'"{key}" is a section, not a key' if section else f'unknown key "{key}"{suggestion}'
    raise RequestError(f"{setting.origin}: {what}", hint="All keys: rlfe config show.")


def _typed(text: str, key: Key | None) -> Any:
    """A text from the command line: TOML, else the text itself."""
    try:
        value = tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        return text
    if (
        key is not None
        and str in _kinds(key.annotation)
        and not isinstance(value, str | list | dict)
    ):
        return text  # a revision 1234567 or a name 2026-01-01 is text
    return value


def _kinds(annotation: Any) -> tuple[Any, ...]:
    return (annotation, *get_args(annotation))


def _takes_none(annotation: Any) -> bool:
    return type(None) in _kinds(annotation)


def _resolve(settings: Sequence[Setting]) -> Resolved:
    table: dict[str, Any] = {}
    given: dict[str, Setting] = {}
    for setting in settings:
        _put(table, setting)
        given[setting.key] = setting
    try:
        recipe = Recipe.model_validate(table)
    except ValidationError as error:
        raise _refusal(error, given) from None
    origins = {key: given[key].origin if key in given else "default" for key in flat(recipe)}
    return Resolved(recipe=recipe, origins=origins)


def _put(table: dict[str, Any], setting: Setting) -> None:
    for name in setting.path[:-1]:
        table = table.setdefault(name, {})
    table[setting.path[-1]] = setting.value


def _refusal(error: ValidationError, given: Mapping[str, Setting]) -> RequestError:
    """One line for each refused value: key, value, place, reason."""
    lines: dict[str, str] = {}
    for problem in error.errors():
        parts = [str(part) for part in problem["loc"]]
        sizes = range(len(parts), 0, -1)
        key = next((".".join(parts[:n]) for n in sizes if ".".join(parts[:n]) in given), "")
        reason = problem["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
        if key not in lines and key:
            setting = given[key]
            shown = json.dumps(setting.value, default=str, ensure_ascii=False)
            lines[key] = f"{setting.origin}: {key} = {shown}: should be {reason}"
            if problem["type"] == "value_error":
                lines[key] = f"{setting.origin}: {key} = {shown}: {reason}"
    assert lines, error
    key = next(iter(lines))
    about = keys()[key].about if key in keys() else ""
    return RequestError("\n".join(lines.values()), hint=f"{key}: {about}." if about else "")


def flat(recipe: Recipe) -> dict[str, Any]:
    """Dotted key -> value of every key, in the schema's order; aliases as in recipes."""
    return dict(_flatten(recipe, ""))


def _flatten(model: BaseModel, prefix: str) -> Iterator[tuple[str, Any]]:
    for name, field in type(model).model_fields.items():
        key, value = prefix + (field.alias or name), model.__dict__[name]
        if isinstance(value, BaseModel):
            yield from _flatten(value, key + ".")
        elif isinstance(value, dict):
            for inner, item in value.items():
                if isinstance(item, BaseModel):
                    yield from _flatten(item, f"{key}.{inner}.")
                else:
                    yield f"{key}.{inner}", item
        else:
            yield key, value


def dump(recipe: Recipe) -> str:
    """The whole recipe as TOML; reading it back gives the same recipe."""
    return dumps(recipe.model_dump(by_alias=True))


def read_run_config(path: Path) -> Recipe:
    """The recipe of a run: its config.toml, or the run folder that holds it.

    Raises:
        NotFoundError: There is no such file.
        RequestError: It is damaged or holds keys that this version does not know.
    """
    file = path / "config.toml" if path.is_dir() else path
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise NotFoundError(
            f"{file} does not exist", hint="A run folder holds the config.toml it was started with."
        ) from None
    except UnicodeDecodeError as error:
        raise RequestError(
            f"{file} is no UTF-8 text: {error.reason} at byte {error.start}",
            hint="The file was damaged from outside.",
        ) from None
    return _resolve([_checked(setting) for setting in _text_settings(text, str(file))]).recipe
