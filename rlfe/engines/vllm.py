"""Sampling with vLLM: one engine for a whole run, new weights in place.

What: the engine starts at the first use; `load` hands it a learner's snapshot from memory or a
folder's tensors, checks that they arrived, and resets the prefix cache; `generate` yields
requests as they finish, so that judging overlaps generation. Every request has its own seed; the
CPU build has none, there each call is seeded from its requests (`seeds` says which). Results
agree with a fresh engine's but are not bit-exact across batches. Not here: how vLLM is started
(`vllm_settings.py`), what happens beside the model (`vllm_worker.py`). Guide: docs/vllm.md.
Try it: `VllmSampler("model").generate([Request(...)])`.
"""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlfe.engines.base import Snapshot
from rlfe.engines.source import model_folder, read_json
from rlfe.engines.tokenizer import HfTokenizer
from rlfe.engines.vllm_requests import completions, reason, refusals, sampling_params
from rlfe.engines.vllm_settings import (
    Compilation,
    Settings,
    engine_arguments,
    fits,
    may_share_process,
    need_vllm,
    starting,
)
from rlfe.errors import RlfeError
from rlfe.naming import step_of
from rlfe.randomness import derive
from rlfe.types import Completion, Request

if TYPE_CHECKING:
    from rlfe.engines.weights import Lora

RESET_TRIES, RESET_PAUSE_SECONDS = 100, 0.02
WEIGHTS, CACHE = "weights", "kv_cache"  # vLLM's names of what it puts to sleep


class VllmSampler:
    """A sampler that holds one vLLM engine.

    Args:
        path: Model folder or Hub id.
        dtype: What it computes in; None: float32 on a CPU, bfloat16 elsewhere.
        device: `auto`, `cpu`, `cuda`, or `cuda:1` for an engine of its own on that GPU.
        max_len: Prompt plus completion, tokens, at most the model's; None: the model's.
        gpu_share: Share of the GPU's memory for weights and cache.
        max_batched_tokens: Tokens of one pass; None: vLLM's default.
        sequences: Sequences decoded at a time; None: 512, on a CPU vLLM's default.
        tensor_parallel: GPUs that share the weights.
        compilation: `eager`, `graphs` or `full` (`vllm_settings.Settings`).
        sleep: Give the memory of weights and cache back after each `generate`, until they are
            needed: the weights first, so that new ones arrive before the cache takes its share.
        float_head: Keep logits in float32 (the weights stay as they are).
        thinking: The chat template's switch; None: not passed.
        lora: LoRA settings; snapshots are then adapters and are served as such.
        same_process: Run the engine core in this process. None: on one GPU of a run in one
            process; else a process of its own, which leaves our torch (threads, process group)
            as it is and can be started again, but takes as long again to hand over every token.
    """

    name = "vllm"
    exact = False

    def __init__(
        self,
        path: Path | str,
        *,
        dtype: str | None = None,
        device: str = "auto",
        max_len: int | None = None,
        gpu_share: float = 0.9,
        max_batched_tokens: int | None = None,
        sequences: int | None = None,
        tensor_parallel: int = 1,
        compilation: Compilation = "graphs",
        sleep: bool = False,
        float_head: bool = True,
        thinking: bool | None = None,
        revision: str | None = None,
        lora: Lora | None = None,
        same_process: bool | None = False,
    ) -> None:
        need_vllm()
        from rlfe.engines.weights import device_of

        on_cpu = device_of(device).type == "cpu"
        if same_process is None:
            same_process = may_share_process(device, on_cpu, tensor_parallel)
        self._folder, self._thinking, self._lora = model_folder(path, revision), thinking, lora
        self._settings = Settings(
            dtype=dtype or ("float32" if on_cpu else "bfloat16"),
            on_cpu=on_cpu,
            same_process=same_process,
            max_len=max_len,
            gpu_share=gpu_share,
            max_batched_tokens=max_batched_tokens,
            sequences=sequences,
            tensor_parallel=tensor_parallel,
            compilation=compilation,
            sleep=sleep and not on_cpu,
            float_head=float_head,
            lora_rank=0 if lora is None else lora.rank,
            device=device,
        )
        self.tokenizer = HfTokenizer(self._folder, thinking=thinking)
        self.engine_starts = 0
        self._llm: Any = None
        self._policy_step = step_of(self._folder.name) or 0
        self._asleep: set[str] = set()
        self._adapter: Any = None
        self._adapter_folder: Any = None

    @property
    def seeds(self) -> str:
        """`request`: each request has its own seed; `call`: one for the requests of a call."""
        return "call" if self._settings.on_cpu else "request"

    def load(self, source: Snapshot | Path) -> str:
        """Switch weights; returns the fingerprint of what arrived.

        Raises:
            RlfeError: The engine does not hold what it was given, or cannot be started.
        """
        if not isinstance(source, Snapshot):
            return self._load_folder(model_folder(source))
        self._ready(WEIGHTS)
        found = self._take_adapter(source) if self._lora else self._take_weights(source)
        self._policy_step = source.version
        return found

    def generate(self, requests: Sequence[Request]) -> Iterator[tuple[str, list[Completion]]]:
        """Yield (request id, completions in order) as the requests finish.

        Raises:
            RlfeError: vLLM refuses a request, or stopped while sampling.
        """
        assert len({request.id for request in requests}) == len(requests), "ids have to differ"
        self._ready(WEIGHTS, CACHE)
        if self.seeds == "call" and requests:
            seed = derive(0, "call", *(request.sampling.seed for request in requests))
            self._ask("rlfe_seed", seed)
        waiting = self._enqueued(requests)
        try:
            while waiting:
                for output in self._step():
                    if output.finished:
                        request = waiting.pop(output.request_id)[0]
                        yield (
                            request.id,
                            completions(request, output, self.tokenizer, self._policy_step),
                        )
        finally:  # also when the caller stops half-way
            self._abort([internal for _, internal in waiting.values()])
            self._sleep()

    def restart(self) -> None:
        """Start a fresh engine on the folder whose weights were loaded last."""
        self._stop()
        self._start()

    def verify_reload(self, requests: Sequence[Request]) -> tuple[str, ...]:
        """Ids of requests whose greedy tokens differ from those of a fresh engine.

        Call it after `load(folder)`; the fresh engine stays. Only where the engine computes in
        float32 are ties between tokens rare enough for "no difference" to be sure.
        """
        greedy = [
            replace(r, sampling=replace(r.sampling, temperature=0.0, top_p=1.0, n=1))
            for r in requests
        ]
        kept = dict(self.generate(greedy))
        self.restart()
        fresh = dict(self.generate(greedy))
        return tuple(r.id for r in greedy if kept[r.id][0].token_ids != fresh[r.id][0].token_ids)

    def float_head(self, on: bool) -> None:
        """Keep logits in float32, or round them as vLLM does by default; for the loaded engine."""
        self._ready()
        self._ask("rlfe_float_head", on)

    def free_bytes(self) -> int:
        """Free memory of the engine's GPU; 0 on a CPU."""
        self._ready()
        return int(self._ask("rlfe_free_bytes")[0])

    def close(self) -> None:
        self._stop()
        if self._adapter_folder is not None:
            self._adapter_folder.cleanup()
            self._adapter_folder = None

    # weights

    def _load_folder(self, folder: Path) -> str:
        in_place = self._llm is not None and self._lora is None and fits(self._folder, folder)
        if not in_place:
            self._stop()
        self._folder, self._policy_step = folder, step_of(folder.name) or 0
        self.tokenizer = HfTokenizer(folder, thinking=self._thinking)
        self._ready(WEIGHTS)
        if in_place:
            return self._verified("rlfe_load_folder", str(folder))
        if self._settings.tensor_parallel > 1 or self._lora is not None:
            return str(self._ask("rlfe_check_folder", str(folder))[0]["fingerprint"])
        return self._verified("rlfe_check_folder", str(folder))

    def _take_weights(self, snapshot: Snapshot) -> str:
        from rlfe.engines.handover import packed

        same = self._settings.same_process and self._settings.tensor_parallel == 1
        kind, payload = packed(snapshot.weights, same_process=same)
        return self._verified("rlfe_load", kind, payload)

    def _verified(self, method: str, *arguments: Any) -> str:
        """Change the weights, reset the prefix cache, and check what the engine holds.

        An engine that took them in part is stopped: the next use starts a fresh one.
        """
        try:
            answers = self._ask(method, *arguments)
            self._wake(CACHE)
            reset = self._reset_prefix_cache()
        except Exception as error:
            self._stop()
            raise RlfeError(
                f"vLLM cannot take the new weights: {reason(error)}",
                hint="Compare both config.json; --engine-per-checkpoint starts a new engine.",
            ) from error
        lacks = sorted({name for answer in answers for name in answer["differs"]})
        if not all(answer["compared"] for answer in answers):
            lacks = ["no parameter could be read back"]
        if lacks or not reset:
            self._stop()
            raise RlfeError(
                "vLLM does not hold the weights that it was given: "
                + ", ".join(lacks or ["its prefix cache was not reset"]),
                hint="Use --engine-per-checkpoint, or --engine transformers.",
            )
        return str(answers[0]["fingerprint"])

    def _take_adapter(self, snapshot: Snapshot) -> str:
        """Serve a LoRA snapshot as an adapter of its own id, in memory-backed files."""
        from vllm.lora.request import LoRARequest

        from rlfe.engines.adapter import write_adapter

        if self._adapter_folder is None:
            memory = Path("/dev/shm")
            place = str(memory) if memory.is_dir() else None
            self._adapter_folder = tempfile.TemporaryDirectory(prefix="rlfe-lora-", dir=place)
        folder = Path(self._adapter_folder.name) / "adapter"
        assert self._lora is not None
        file = write_adapter(snapshot.weights, self._lora, folder)
        number = 1 if self._adapter is None else self._adapter.lora_int_id + 1
        if self._adapter is not None:
            self._llm.llm_engine.remove_lora(self._adapter.lora_int_id)
        self._adapter = LoRARequest(f"version-{number}", number, str(folder))
        if not self._llm.llm_engine.add_lora(self._adapter):
            raise RlfeError("vLLM did not take the LoRA adapter")
        self._wake(CACHE)
        if not self._reset_prefix_cache():
            raise RlfeError("vLLM did not reset its prefix cache after a new adapter")
        return str(self._ask("rlfe_check_adapter", str(file))[0]["fingerprint"])

    def _reset_prefix_cache(self) -> bool:
        """Drop cached keys and values; aborted requests may hold some for a moment."""
        for _ in range(RESET_TRIES):
            if self._llm.reset_prefix_cache():
                return True
            time.sleep(RESET_PAUSE_SECONDS)
        return False

    # requests

    def _enqueued(self, requests: Sequence[Request]) -> dict[str, tuple[Request, str]]:
        """vLLM's number of each request -> (request, the engine's own name of it)."""
        waiting: dict[str, tuple[Request, str]] = {}
        own_seed = self.seeds == "request"
        for request in requests:
            prompt = {"prompt_token_ids": list(request.prompt_ids)}
            params = sampling_params(request.sampling, self.tokenizer, own_seed=own_seed)
            lora = {} if self._adapter is None else {"lora_request": self._adapter}
            try:
                (name,) = self._llm.enqueue([prompt], params, use_tqdm=False, **lora)
            except refusals() as error:
                self._abort([internal for _, internal in waiting.values()])
                raise RlfeError(
                    f"vLLM refuses request {request.id} ({len(request.prompt_ids)} prompt tokens, "
                    f"max_tokens {request.sampling.max_tokens}): {reason(error)}",
                    hint="Prompt and max_tokens have to fit model.max_len.",
                ) from error
            waiting[name.partition("-")[0]] = (request, name)
        return waiting

    def _step(self) -> list[Any]:
        try:
            return list(self._llm.llm_engine.step())
        except Exception as error:
            self._llm = None  # a dead engine answers nothing
            raise RlfeError(
                f"vLLM stopped while sampling: {reason(error)}",
                hint="If its memory ran out: lower engine.gpu_share or engine.max_batched_tokens.",
            ) from error

    def _abort(self, names: list[str]) -> None:
        if names and self._llm is not None:
            self._llm.llm_engine.abort_request(names, internal=True)

    # the engine

    def _ready(self, *awake: str) -> None:
        """Start the engine if there is none; wake what is needed of it."""
        if self._llm is None:
            self._start()
        self._wake(*awake)

    def _wake(self, *parts: str) -> None:
        wanted = [part for part in parts if part in self._asleep]
        if wanted:
            _give_back()
            self._llm.wake_up(tags=wanted)
            self._asleep.difference_update(wanted)

    def _sleep(self) -> None:
        """Level 1 keeps the weights in host memory: `generate` may come again without a load."""
        if self._settings.sleep and self._llm is not None and not self._asleep:
            self._llm.sleep(level=1)
            self._asleep = {WEIGHTS, CACHE}

    def _start(self) -> None:
        context = (read_json(self._folder / "config.json") or {}).get("max_position_embeddings")
        limits = [limit for limit in (self._settings.max_len, context) if limit]
        settings = replace(self._settings, max_len=min(limits, default=None))
        arguments = engine_arguments(self._folder, settings)
        try:
            with starting(settings):
                from vllm import LLM

                self._llm = LLM(**arguments)
        except (RuntimeError, ValueError) as error:
            raise RlfeError(
                f"vLLM does not start on {self._folder}: {reason(error)}",
                hint="See its log above; engine.gpu_share and model.max_len can be lowered.",
            ) from error
        if settings.same_process:
            # Its many small objects make the collector run often; what is there now stays anyway.
            gc.collect()
            gc.freeze()
        self.engine_starts += 1
        self._adapter = None
        self.float_head(self._settings.float_head)

    def _stop(self) -> None:
        if self._llm is None:
            return
        engine, self._llm, self._asleep = self._llm.llm_engine, None, set()
        engine.engine_core.shutdown()
        del engine
        if self._settings.same_process:
            gc.unfreeze()
        gc.collect()

    def _ask(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of `vllm_worker.Weights` in every worker."""
        return list(self._llm.collective_rpc(method, args=arguments))


def _give_back() -> None:
    """Return what torch keeps of the learner's freed tensors: the engine takes it from the GPU."""
    import torch

    torch.cuda.empty_cache()  # does nothing where CUDA is not in use
