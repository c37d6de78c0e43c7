"""Fingerprints: equal for equal bits, different for any other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_graphs.values import snapshot as fingerprints
from lightning_graphs.values.snapshot import fingerprints_of

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64,
    torch.complex128, torch.int64, torch.int32, torch.int16, torch.uint8, torch.bool,
]  # fmt: skip


def values(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.arange(24, device=device).reshape(4, 6).remainder(2).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_changed_element_shows(device: torch.device, dtype: torch.dtype) -> None:
    tensor = values(dtype, device)
    changed = [tensor.clone() for _ in range(tensor.numel())]
    for i, one in enumerate(changed):
        flat = one.view(-1)
        flat[i] = ~flat[i] if dtype is torch.bool else flat[i] + 1
    prints = fingerprints_of([tensor, tensor.clone(), *changed])
    assert prints[0] == prints[1]
    assert len(set(prints)) == 25


def test_the_least_difference_of_two_floats_shows(device: torch.device) -> None:
    tensor = torch.full((5,), 1.0, device=device)
    other = tensor.clone()
    other[3] = torch.nextafter(other[3], other[3] + 1)
    zeros = torch.zeros(5, device=device)
    prints = fingerprints_of([tensor, other, zeros, -zeros])
    assert len(set(prints)) == 4


def test_the_order_of_elements_counts_and_strides_do_not(device: torch.device) -> None:
    tensor = torch.rand(4, 6, device=device)
    swapped = tensor.clone()
    swapped[0, 0], swapped[1, 1] = tensor[1, 1], tensor[0, 0]
    strided = torch.empty(6, 4, device=device).t().copy_(tensor)
    first, second, third = fingerprints_of([tensor, swapped, strided])
    assert first != second
    assert first == third


def test_chunks_of_a_large_tensor_are_told_apart(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(fingerprints._CHUNK, device.type, 4)
    tensor = torch.rand(10, device=device)
    swapped = torch.cat([tensor[4:8], tensor[:4], tensor[8:]])
    first, second, third = fingerprints_of([tensor, swapped, tensor])
    assert first == third
    assert len(first) == 3
    assert second == (first[1], first[0], first[2])


def test_small_tensors_share_a_fingerprint(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(fingerprints._CHUNK, device.type, 8)
    tensors = [torch.rand(size, device=device) for size in (3, 0, 4, 20, 3)]
    known = fingerprints_of(tensors, together=True)
    assert known == fingerprints_of([t.clone() for t in tensors], together=True)
    assert known[0] == known[1] == known[2] != known[4]
    assert len(known[3]) == 3
    for i, tensor in enumerate(tensors):
        if tensor.numel():
            others = [*tensors[:i], tensor + 1, *tensors[i + 1 :]]
            now = fingerprints_of(others, together=True)
            shared = {0, 1, 2} if i < 3 else {i}
            assert {k for k in range(5) if now[k] != known[k]} == shared


@pytest.mark.parametrize("tensors", [[], [torch.empty(0)], [torch.tensor(3.0)]])
def test_nothing_and_scalars(tensors: Any) -> None:
    assert len(fingerprints_of(tensors)) == len(tensors)


def test_a_sparse_tensor_is_that_of_its_values(device: torch.device) -> None:
    dense = torch.tensor([[0.0, 2.0], [3.0, 0.0]], device=device)
    first, second = fingerprints_of([dense, dense.to_sparse()])
    assert first == second


def test_small_tensors_are_copied_a_chunk_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A check of a large model has no memory for a copy of all of them."""
    size, beside, alive = fingerprints._CHUNK["cpu"], fingerprints.flattened, []
    copies: list[StorageWeakRef] = []

    def flattened(tensors: Sequence[Tensor]) -> Tensor:
        copy = beside(tensors)
        assert copy.numel() <= size
        alive.append(sum(not known.expired() for known in copies))
        copies.append(StorageWeakRef(copy.untyped_storage()))
        return copy

    monkeypatch.setattr(fingerprints, "flattened", flattened)
    fingerprints_of([torch.rand(size // 2) for _ in range(10)], together=True)
    assert len(alive) == 5
    assert max(alive) <= 1
