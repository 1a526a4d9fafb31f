"""A loss of ours as the gradient that a Tinker-API server applies.

The formulas stay on this side: the server gives the log-probabilities of the rows, the loss is
computed here with torch, and its derivative by each of them goes back as per-token weights of a
loss that is linear in them. Full-vocabulary quantities (entropy) do not come over the wire.

Two ways to send the weights, for servers reduce differently (`service.reduction`):
`sum`   the client's custom-loss call: cross-entropy summed over rows and tokens, as documented
        for the API; checked against the sum that the server reports.
`mean`  importance sampling at ratio 1 on rows padded to one length, weights times rows x length:
        SkyRL's JAX backend divides by both (`skyrl/backends/jax.py` of skyrl 0.3.0), and its
        cross-entropy divides by the sum of the weights, which has no meaning for signed ones.

Shapes: B rows, L tokens. A token's log-probability stands at the token's own position; in a
datum it stands one place earlier, at the token that predicts it.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from rlfe.engines.base import LossFunction
from rlfe.errors import RlfeError
from rlfe.types import Batch

# Of the reported against the expected sum, relative to the sum of absolute terms: servers score
# in bf16 and score again for the backward pass.
SUM_TOLERANCE = 0.02
PAD = 0


def lengths(batch: Batch) -> list[int]:
    """Tokens of each row up to its last masked one; at least 2, so that one is predicted."""
    width = batch.mask_BL.shape[1]
    last_B = np.where(batch.mask_BL.any(axis=1), width - np.argmax(batch.mask_BL[:, ::-1], 1), 0)
    return [max(2, int(last)) for last in last_B]


def datums(batch: Batch) -> list[Any]:
    """The rows as `tinker.types.Datum`, weights 0: to be scored."""
    from tinker import types

    pairs = zip(batch.ids_BL, lengths(batch), strict=True)
    return [
        types.Datum(
            model_input=types.ModelInput.from_ints(ids_L[: length - 1].tolist()),
            loss_fn_inputs=_inputs(
                target_tokens=ids_L[1:length], weights=np.zeros(length - 1, np.float32)
            ),
        )
        for ids_L, length in pairs
    ]


def placed(rows: Sequence[Any], batch: Batch) -> np.ndarray:
    """Log-probabilities of datums as an array [B, L], 0 outside the mask.

    `rows`: one value per predicted token; a server may leave out the first token or give none
    for it, so values count from the end.
    """
    logp_BL = np.zeros(batch.ids_BL.shape, np.float32)
    for row, (values, length) in enumerate(zip(rows, lengths(batch), strict=True)):
        values = np.array([math.nan if value is None else value for value in values], np.float32)
        if len(values) < length - 1:
            raise RlfeError(f"the service scored {len(values)} of {length - 1} tokens of a row")
        logp_BL[row, 1:length] = values[len(values) - (length - 1) :]
    return np.where(batch.mask_BL, logp_BL, np.float32(0))


class ClientLoss:
    """A `LossFunction` in the form that the client's custom-loss call takes.

    After the call: `logp_BL`, `sums`, `weights` (per row, what goes to the server), `expected`
    (the sum that a summing server reports), `finite`; `scored` is set then.
    """

    def __init__(self, batch: Batch, loss: LossFunction) -> None:
        self._batch, self._loss, self._lengths = batch, loss, lengths(batch)
        self.scored = threading.Event()
        self.logp_BL = np.zeros(batch.ids_BL.shape, np.float32)
        self.sums: Mapping[str, float] = {}
        self.weights: list[np.ndarray] = []
        self.expected = self.scale = 0.0
        self.finite = True

    def __call__(
        self, data: Sequence[Any], logprobs: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """(loss, metrics); a loss that is not finite becomes one without gradient."""
        logp_BL = self._stacked(logprobs)
        value, sums = self._loss(self._batch, logp_BL, None)
        self.sums = {name: float(share) for name, share in sums.items()}
        self.logp_BL = logp_BL.detach().numpy()
        grads = self._gradients(value, logprobs)
        self.finite = bool(torch.isfinite(value)) and all(g.isfinite().all() for g in grads)
        if not self.finite:
            grads = [torch.zeros_like(row) for row in logprobs]
        pairs = list(zip(grads, logprobs, strict=True))
        terms = [grad * row.detach() for grad, row in pairs]
        self.expected = float(sum(term.sum() for term in terms))
        self.scale = float(sum(term.abs().sum() for term in terms))
        self.weights = [-grad.numpy() for grad in grads]
        self.scored.set()
        # The client differentiates what it is given: give it the linear loss itself.
        linear = sum((grad * row).sum() for grad, row in pairs)
        assert isinstance(linear, torch.Tensor)
        return linear, {}

    def digest(self) -> str:
        """What is sent: ids and weights."""
        found = hashlib.sha256()
        for ids_L, length, weights in zip(
            self._batch.ids_BL, self._lengths, self.weights, strict=True
        ):
            found.update(ids_L[:length].tobytes() + weights.tobytes())
        return found.hexdigest()

    def averaged(self) -> list[Any]:
        """Rows for a server that averages over tokens and rows (`mean`)."""
        from tinker import types

        width = max(self._lengths) - 1
        factor = np.float32(width * len(self._lengths))

        def padded(values: np.ndarray) -> np.ndarray:
            return np.pad(values, (0, width - len(values)), constant_values=PAD)

        rows = []
        for row, (ids_L, length) in enumerate(zip(self._batch.ids_BL, self._lengths, strict=True)):
            inputs = _inputs(
                target_tokens=padded(ids_L[1:length]),
                logprobs=padded(self._raw[row]),
                advantages=padded(self.weights[row] * factor),
            )
            ids = padded(ids_L[: length - 1]).tolist()
            rows.append(
                types.Datum(model_input=types.ModelInput.from_ints(ids), loss_fn_inputs=inputs)
            )
        return rows

    def _stacked(self, logprobs: Sequence[torch.Tensor]) -> torch.Tensor:
        """[B, L], each token's at its own position, 0 outside the mask."""
        width = self._batch.ids_BL.shape[1]
        self._raw = [row.detach().numpy() for row in logprobs]
        rows = []
        for row, length in zip(logprobs, self._lengths, strict=True):
            if len(row) != length - 1:
                raise RlfeError(f"the service scored {len(row)} of {length - 1} tokens of a row")
            rows.append(torch.nn.functional.pad(row, (1, width - length)))
        logp_BL = torch.stack(rows)
        return torch.where(torch.as_tensor(self._batch.mask_BL), logp_BL, 0.0)

    @staticmethod
    def _gradients(value: torch.Tensor, logprobs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        if not value.requires_grad:  # no row asks for one
            return [torch.zeros_like(row) for row in logprobs]
        return torch.autograd.grad(value, list(logprobs))


def check_sum(metrics: Mapping[str, float], loss: ClientLoss) -> None:
    """The server summed exactly what it was sent.

    Raises:
        RlfeError: It reports no sum or another one: its custom losses are not those of the API.
    """
    names = ("surrogate_loss:sum", "loss:sum", "total_loss:sum")
    reported = next((metrics[name] for name in names if name in metrics), None)
    if reported is None:
        raise no_custom_losses("it reports no loss:sum for a weighted cross-entropy")
    if abs(reported - loss.expected) > SUM_TOLERANCE * loss.scale + 1e-6:
        raise no_custom_losses(
            f"the weighted cross-entropy sums to {loss.expected:.6g}, it reports {reported:.6g}"
        )


def check_mean(metrics: Mapping[str, float]) -> None:
    """RlfeError if a server that is said to average reports a sum."""
    sums = sorted(name for name in metrics if name.endswith("loss:sum"))
    if sums:
        raise RlfeError(
            f'service.reduction = "mean", but the service reports {sums[0]}: it sums',
            hint="Leave service.reduction at sum.",
        )


def no_custom_losses(why: str) -> RlfeError:
    return RlfeError(
        f"the service does not take custom losses as the API has them: {why}",
        hint='A server that averages (SkyRL\'s JAX backend) needs service.reduction = "mean".',
    )


def _inputs(**arrays: np.ndarray) -> dict[str, Any]:
    from tinker import types

    return {
        name: types.TensorData(
            data=array.tolist(),
            dtype="int64" if name == "target_tokens" else "float32",
            shape=list(array.shape),
        )
        for name, array in arrays.items()
    }
