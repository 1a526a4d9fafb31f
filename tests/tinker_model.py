"""The computing half of the loopback Tinker server: LoRA models on a tiny base, plainly in torch.

Written without rlfe's learner, so that comparing the two says something: log-probabilities by a
whole log-softmax, one row at a time; sampling without a cache. Only the place of LoRA layers and
their first draw are shared (`rlfe.engines.weights.with_lora`), so that both can start alike.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlfe.engines.weights import Lora, load_model, save_adapter

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
ALPHA = 32


class Model:
    """One LoRA model with its gradients and its optimiser."""

    def __init__(self, base: Path, *, rank: int, seed: int, attention: bool, mlp: bool) -> None:
        targets = (ATTENTION if attention else ()) + (MLP if mlp else ())
        self.facts = {"rank": rank, "seed": seed, "attention": attention, "mlp": mlp}
        self.base, self.lora = base, Lora(rank=rank, alpha=ALPHA, targets=targets, seed=seed)
        self.inner = load_model(base, torch.float32, torch.device("cpu"), self.lora)
        self.weights = {n: p for n, p in self.inner.named_parameters() if p.requires_grad}
        self.optimizer = torch.optim.AdamW(self.weights.values(), lr=0.0)

    def logprobs(self, ids: list[int], targets: list[int]) -> torch.Tensor:
        """Log-probability of each target after the ids up to its place."""
        logits = self.inner(input_ids=torch.tensor([ids])).logits[0]
        place = torch.arange(len(targets))
        return torch.log_softmax(logits, dim=-1)[place, torch.tensor(targets)]

    def step(self, params: Any) -> float:
        """One AdamW step with the request's numbers; returns the norm before clipping."""
        for weight in self.weights.values():
            weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
        limit = params.grad_clip_norm or float("inf")
        norm = torch.nn.utils.clip_grad_norm_(list(self.weights.values()), limit)
        self.optimizer.param_groups[0] |= {
            "lr": params.learning_rate,
            "betas": (params.beta1, params.beta2),
            "eps": params.eps,
            "weight_decay": params.weight_decay,
        }
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(norm)

    def sample(self, prompt: list[int], params: Any, seed: int, decode: Any) -> tuple[Any, ...]:
        """(tokens, log-probabilities at temperature 1, whether a stop ended it)."""
        generator, tokens, logprobs = np.random.default_rng(seed), [], []
        strings, ends = _stops(params.stop)
        for _ in range(params.max_tokens):
            with torch.no_grad():
                logits = self.inner(input_ids=torch.tensor([prompt + tokens])).logits[0, -1]
            token = _drawn(logits, params, generator.random())
            tokens.append(token)
            logprobs.append(float(torch.log_softmax(logits, -1)[token]))
            if token in ends or any(text in decode(tokens) for text in strings):
                return tokens, logprobs, True
        return tokens, logprobs, False

    def save(self, folder: Path, *, optimizer: bool) -> None:
        folder.mkdir(parents=True)
        state = {"weights": {n: p.detach() for n, p in self.weights.items()}}
        if optimizer:
            state["optimizer"] = self.optimizer.state_dict()
        torch.save(state, folder / "state.pt")
        (folder / "facts.json").write_text(json.dumps(self.facts))

    def save_adapter(self, folder: Path) -> None:
        folder.parent.mkdir(parents=True, exist_ok=True)
        save_adapter(self.inner, self.lora, str(self.base), folder)

    @classmethod
    def load(cls, base: Path, folder: Path) -> Model:
        model = cls(base, **json.loads((folder / "facts.json").read_text()))
        state = torch.load(folder / "state.pt", weights_only=True)
        with torch.no_grad():
            for name, weight in model.weights.items():
                weight.copy_(state["weights"][name])
        if "optimizer" in state:
            model.optimizer.load_state_dict(state["optimizer"])
        return model


def weighted_loss(name: str, logp: torch.Tensor, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """The token losses of the API: -w log p, or -exp(log p - log q) A."""
    if name == "cross_entropy":
        return -inputs["weights"] * logp
    assert name == "importance_sampling", name
    return -torch.exp(logp - inputs["logprobs"]) * inputs["advantages"]


def _stops(stop: Any) -> tuple[list[str], set[int]]:
    found = [stop] if isinstance(stop, str) else list(stop or [])
    strings = [each for each in found if isinstance(each, str)]
    return strings, {each for each in found if isinstance(each, int)}


def _drawn(logits: torch.Tensor, params: Any, uniform: float) -> int:
    if params.temperature == 0:
        return int(logits.argmax())
    chances, order = torch.softmax(logits.double() / params.temperature, -1).sort(descending=True)
    keep = chances.cumsum(-1) - chances < params.top_p
    if params.top_k > 0:
        keep[params.top_k :] = False
    total = (chances * keep).cumsum(-1)
    place = int(torch.searchsorted(total, uniform * total[-1], right=True))
    return int(order[min(place, int(keep.sum()) - 1)])
