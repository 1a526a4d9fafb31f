"""How much GPU memory a training run needs, from its recipe and the model's config.json alone.

What: weights, their copies in lower precision, gradients, AdamW's moments, activations of a
forward pass, the workspace of logits, snapshots, reference model and sampler; what would save how
much. Formulas: docs/training.md, "Memory". Without torch; a number for planning, within a tenth or
two of what is used. Not here: what happens when memory runs out (`recompute.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rlfe.engines.source import read_json
from rlfe.errors import RlfeError
from rlfe.schema import Recipe

BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
CHUNK_BYTES = 2**30  # of logits in float32 at a time (`head.CHUNK_NUMBERS`)
GPU_BUDGET = 16384  # tokens of a pass (`microbatches.TOKEN_BUDGET`)
OVERHEAD = 2 * 10**9  # CUDA context, libraries' workspaces, fragments
QUERY_KEY_NORMS = ("qwen3", "qwen3_moe", "gemma3_text", "olmo2")
GB = 1e9


@dataclass(frozen=True)
class Shape:
    """A decoder's sizes. `queries`, `keys`: width of all heads; `mlp`: width that a token meets."""

    layers: int
    hidden: int
    queries: int
    keys: int
    mlp: int
    mlp_stored: int  # of all experts together
    vocabulary: int
    tied: bool
    query_key_norms: bool

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Shape | None:
        """From config.json; None for an architecture whose keys are others."""
        text = {**config, **(config.get("text_config") or {})}
        wanted = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")
        mlp = text.get("moe_intermediate_size") or text.get("intermediate_size")
        if mlp is None or any(text.get(name) is None for name in wanted):
            return None
        heads = text["num_attention_heads"]
        size = text.get("head_dim") or text["hidden_size"] // heads
        experts = text.get("num_experts") or text.get("num_local_experts") or 1
        return cls(
            layers=text["num_hidden_layers"],
            hidden=text["hidden_size"],
            queries=heads * size,
            keys=(text.get("num_key_value_heads") or heads) * size,
            mlp=mlp * (text.get("num_experts_per_tok") or 1 if experts > 1 else 1),
            mlp_stored=mlp * experts,
            vocabulary=text["vocab_size"],
            tied=bool(text.get("tie_word_embeddings")),
            query_key_norms=text.get("model_type") in QUERY_KEY_NORMS,
        )

    @cached_property
    def parameters(self) -> int:
        """Weights of matrices and norms."""
        h, norms = self.hidden, 2 * self.hidden
        layer = h * (2 * self.queries + 2 * self.keys + 3 * self.mlp_stored) + norms
        heads = 1 if self.tied else 2
        return self.layers * layer + heads * self.vocabulary * h + h

    def adapter(self, rank: int, targets: str | tuple[str, ...]) -> int:
        """Weights of LoRA layers."""
        h, q, k, f = self.hidden, self.queries, self.keys, self.mlp_stored
        ends = {"q_proj": h + q, "k_proj": h + k, "v_proj": h + k, "o_proj": q + h}
        ends |= {"gate_proj": h + f, "up_proj": h + f, "down_proj": f + h}
        named = ends if isinstance(targets, str) else [name for name in targets if name in ends]
        return self.layers * rank * sum(ends[name] for name in named)

    def activations(self, size: int, *, checkpointing: bool, compiled: bool = False) -> int:
        """Bytes per token that wait for the backward pass; `size`: of a number as computed."""
        layer = self._compiled_layer(size) if compiled else self._layer(size)
        if checkpointing:  # every layer its input, one layer everything
            return 4 * self.hidden * self.layers + layer
        return layer * self.layers

    def _layer(self, size: int) -> int:
        """Two norms keep their input and their result in float32, and each of the five products
        behind them a copy of its own; attention its three factors and its output (with norms on
        queries and keys their inputs too); the MLP four times its width.
        """
        attention = 2 * size * (self.queries + self.keys)
        if self.query_key_norms:
            attention += (4 + size) * (self.queries + self.keys)
        return (16 + 5 * size) * self.hidden + attention + 4 * size * self.mlp

    def _compiled_layer(self, size: int) -> int:
        """The inputs of the two norms in float32 and their results once, attention as above, of
        the MLP three times its width: what is element-wise is computed again.
        """
        attention = 2 * size * (self.queries + self.keys)
        if self.query_key_norms:
            attention += size * (self.queries + self.keys)
        return (8 + 2 * size) * self.hidden + attention + 3 * size * self.mlp


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Bytes on one GPU by what they are for; `sampler_share` of a GPU comes on top (vLLM)."""

    parts: Mapping[str, int]
    sampler_share: float

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    def needed(self, device_bytes: int) -> int:
        """With the sampler's share of a GPU of this size."""
        return self.total + int(self.sampler_share * device_bytes)

    def fits(self, device_bytes: int) -> bool:
        return self.needed(device_bytes) <= device_bytes


def estimate(
    recipe: Recipe, config: Mapping[str, Any], *, ranks: int = 1, **changes: Any
) -> Estimate | None:
    """Of a recipe on each of its GPUs, as it is or with other settings of `[compute]`.

    `ranks` hold a share each of weights, gradients and moments, and whole layers only while they
    are computed with. None where the architecture is not one that `Shape` reads.
    """
    shape = Shape.of(config)
    if shape is None:
        return None
    compute = recipe.compute.model_copy(update=changes)
    size, count, lora = BYTES[recipe.model.dtype], shape.parameters, recipe.lora
    trained = shape.adapter(lora.rank, lora.targets) if lora.rank else count
    tokens = _tokens(recipe, compute.token_budget)
    again = compute.gradient_checkpointing is True
    vllm = recipe.engine.sampler == "vllm"
    parts = {
        "weights": 4 * count // ranks,
        "copies in lower precision": size * count if size < 4 and ranks == 1 else 0,
        "whole layers": _gathered(shape, size) if ranks > 1 else 0,
        "gradients": 4 * trained // ranks,
        "AdamW": 8 * trained // ranks,
        "activations": tokens
        * shape.activations(size, checkpointing=again, compiled=compute.compile),
        "logits": _logits(shape, tokens, compute.logits, full=lora.rank == 0),
        "snapshots": size * trained * (recipe.lag.steps + 1),
        "reference": size * count if recipe.kl.beta > 0 and lora.rank == 0 else 0,
        "sampler": 0 if vllm else size * count,
        "overhead": OVERHEAD,
    }
    share = recipe.engine.gpu_share if vllm and not recipe.engine.sleep else 0.0
    return Estimate(parts={name: n for name, n in parts.items() if n}, sampler_share=share)


def _gathered(shape: Shape, size: int) -> int:
    """Embedding and head with their gradient in float32, and two layers."""
    outside = (1 if shape.tied else 2) * shape.vocabulary * shape.hidden
    return 8 * outside + 2 * size * (shape.parameters - outside) // shape.layers


def _tokens(recipe: Recipe, budget: int | None) -> int:
    """Tokens of the largest pass: one row is always taken, however long."""
    rows = recipe.train.micro_batch_rollouts
    if rows is not None:
        return rows * recipe.model.max_len
    return max(budget or GPU_BUDGET, recipe.model.max_len)


def _logits(shape: Shape, tokens: int, way: str, *, full: bool) -> int:
    """Logits with their softmax and gradient, and two sums of the head's gradient."""
    head = 8 * shape.vocabulary * shape.hidden if full else 0
    whole = 4 * tokens * shape.vocabulary
    return (4 * whole if way == "full" else 3 * min(CHUNK_BYTES, whole)) + head


def ways_out(
    recipe: Recipe, config: Mapping[str, Any], device_bytes: int, *, ranks: int = 1
) -> list[str]:
    """Settings that make the run fit into a GPU, or save something, with what they save."""
    now = estimate(recipe, config, ranks=ranks)
    if now is None or now.fits(device_bytes):
        return []
    found = []
    if recipe.compute.gradient_checkpointing is not True:
        again = estimate(recipe, config, ranks=ranks, gradient_checkpointing=True)
        found += _saves("compute.gradient_checkpointing=true", now, again)
        if not recipe.compute.compile:
            found += _saves(
                "compute.compile=true", now, estimate(recipe, config, ranks=ranks, compile=True)
            )
    budget = recipe.compute.token_budget or GPU_BUDGET
    if recipe.train.micro_batch_rollouts is None and budget // 2 >= recipe.model.max_len:
        half = estimate(recipe, config, ranks=ranks, token_budget=budget // 2)
        found += _saves(f"compute.token_budget={budget // 2}", now, half)
    elif (recipe.train.micro_batch_rollouts or 1) > 1:
        found.append("a smaller train.micro_batch_rollouts")
    if now.sampler_share:
        room = int(100 * (device_bytes - now.total) / device_bytes) / 100
        saved = now.sampler_share * device_bytes / GB
        found.append(f"engine.sleep=true (saves {saved:.1f} GB while the learner works)")
        if room >= 0.1:
            found.append(f"engine.gpu_share={room:g}")
    if recipe.lora.rank == 0:
        found.append("lora.rank=32")
    return found


def _saves(setting: str, now: Estimate, then: Estimate | None) -> list[str]:
    """The setting with what it saves; nothing if that is under a hundredth."""
    assert then is not None, "the same shape"
    saved = now.total - then.total
    return [f"{setting} (saves {saved / GB:.1f} GB)"] if saved > now.total / 100 else []


def needs_checkpointing(recipe: Recipe) -> bool:
    """What `compute.gradient_checkpointing = "auto"` means here; torch is loaded.

    Raises:
        RlfeError: Nothing is known about this model's sizes.
    """
    from rlfe.engines.source import model_folder
    from rlfe.engines.weights import device_of

    device = device_of(recipe.engine.device)
    if device.type != "cuda":
        return False
    import torch

    config = read_json(model_folder(recipe.model.path, recipe.model.revision) / "config.json") or {}
    found = estimate(recipe, config, gradient_checkpointing=False)
    if found is None:
        raise RlfeError(
            'compute.gradient_checkpointing = "auto": the sizes of this architecture are not known',
            hint="Say --set compute.gradient_checkpointing=true or false.",
        )
    return not found.fits(torch.cuda.get_device_properties(device).total_memory)
