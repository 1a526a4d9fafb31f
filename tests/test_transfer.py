"""Copies from a device to the host: right in every piece, and a memory of their own."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlfe.engines import transfer
from rlfe.engines.transfer import host_copy

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.int64])


@given(shape=st.lists(st.integers(0, 5), max_size=3), size=st.integers(1, 40), dtype=DTYPES)
def test_a_copy_in_pieces_is_the_tensor_in_the_asked_dtype(
    shape: list[int], size: int, dtype: torch.dtype
) -> None:
    tensor = torch.randn(shape) * 100
    buffer, waits = torch.full((size,), -1, dtype=dtype), []
    copy = transfer._copied_through(buffer, tensor, lambda: waits.append(1))
    assert torch.equal(copy, tensor.to(dtype))
    assert copy.shape == tensor.shape
    assert len(waits) == max(1, -(-tensor.numel() // size))


def test_no_piece_is_taken_before_it_arrived() -> None:
    buffer, tensor = torch.zeros(2), torch.arange(5.0)
    arrived = iter([[10.0, 11.0], [12.0, 13.0], [14.0, 15.0]])

    def wait() -> None:
        buffer[:] = torch.tensor(next(arrived))

    assert transfer._copied_through(buffer, tensor, wait).tolist() == [10, 11, 12, 13, 14]


def test_a_transposed_tensor_is_copied_as_it_reads() -> None:
    tensor = torch.arange(12.0).reshape(3, 4).t()
    copy = transfer._copied_through(torch.empty(5), tensor, lambda: None)
    assert torch.equal(copy, tensor)
    assert copy.is_contiguous()


def test_a_copy_on_a_cpu_does_not_change_with_its_source() -> None:
    source = torch.ones(3)
    copy = host_copy(source, torch.float32)
    source += 1
    assert copy.tolist() == [1, 1, 1]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_copy_from_cuda_is_the_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "PIECE_BYTES", 1000)
    tensor = torch.randn(77, 33, device="cuda")
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(host_copy(tensor, dtype), tensor.to(dtype).cpu())
