"""What a push publishes loads by subfolder, bit for bit, with the lines that the card prints."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hub_runs import make_run
from tests.hub_stand_in import serve
from tests.tiny_model import write_tiny_model

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("peft")

COMPARE = """
import json, sys, torch
from pathlib import Path
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

repo, folders = sys.argv[1], json.loads(sys.argv[2])
for subfolder, local in folders.items():
    there = AutoModelForCausalLM.from_pretrained(repo, subfolder=subfolder)
    here = AutoModelForCausalLM.from_pretrained(local)
    pairs = zip(there.state_dict().items(), here.state_dict().items(), strict=True)
    assert all(a == b and torch.equal(x, y) for (a, x), (b, y) in pairs), subfolder
    assert there.dtype == here.dtype
    text = "print('a')"
    ids = [AutoTokenizer.from_pretrained(*where)(text).input_ids for where in [(local,)]]
    ids.append(AutoTokenizer.from_pretrained(repo, subfolder=subfolder)(text).input_ids)
    assert ids[0] == ids[1] and len(ids[0]) > 5
    generation = GenerationConfig.from_pretrained(repo, subfolder=subfolder)
    assert generation.to_dict() == GenerationConfig.from_pretrained(local).to_dict()
print(len(folders))
"""


def write_adapter(base: Path, folder: Path) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base)
    wrapped = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear"))
    wrapped.peft_config["default"].base_model_name_or_path = None
    wrapped.save_pretrained(str(folder))


def shard(folder: Path) -> None:
    """Save the model of a folder again in several files."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(str(folder), max_shard_size="20KB")
    assert len(list(folder.glob("model-*-of-*.safetensors"))) > 1


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = write_tiny_model(tmp_path_factory.mktemp("base") / "tiny")
    (folder / "README.md").write_text("---\nlicense: mit\n---\n")
    return folder


def python(code: str, *arguments: str, env: dict[str, str]) -> str:
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(
        command, env={**os.environ, **env, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft calls a deprecated property
@pytest.mark.parametrize("xet", [False, True], ids=["lfs", "xet"])
def test_every_pushed_checkpoint_loads_bit_equal_and_the_snippets_run(tmp_path, base, xet):
    run = make_run(tmp_path / "runs", steps=(), path=str(base), license=None)
    for step in (30, 60):
        write_tiny_model(run / f"global_step_{step}", seed=step, dtype="bfloat16", tied=False)
    shard(run / "global_step_60")
    write_adapter(base, run / "global_step_60" / "adapter")
    hub = serve(tmp_path / "hub", page_size=7)
    env = hub.environment(xet=xet)
    push = [sys.executable, "-m", "rlfe", "push", run, "--repo", "my-org/series", "--yes"]
    done = subprocess.run(
        push, env={**os.environ, **env}, capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert "verified" in done.stdout
    other = hub.environment(xet=xet, home=tmp_path / "elsewhere")
    folders = {f"{run.name}/global_step_{n}": str(run / f"global_step_{n}") for n in (30, 60)}
    card = hub.tree("my-org/series")["README.md"].data.decode()
    blocks = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    assert len(blocks) == 4
    # the adapter's base model is a local folder: the card can only name it
    code = "\n".join(blocks).replace('from_pretrained("tiny")', f"from_pretrained({str(base)!r})")
    code += "\nassert (__import__('pathlib').Path(path) / 'config.json').is_file()"
    code += "\nassert generate('a', max_new_tokens=2)[0]['generated_text'].startswith('a')"
    code += "\nfrom rlfe.engines.source import model_folder"
    code += "\nfolder = model_folder(f'hf://{repo}/{subfolder}@main')"
    code += "\nassert (folder / 'tokenizer.json').is_file() and folder.name == 'global_step_60'"
    code += "\nassert type(adapted).__name__.startswith('PeftModel')"
    assert python(COMPARE + code, "my-org/series", json.dumps(folders), env=other) == "2\n"
    hub.close()
