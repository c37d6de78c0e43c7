"""Optimizer state that warm-up steps have strewn over the GPU's memory is moved together."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from lightning_graphs.regions.recovery import defragment

pytestmark = pytest.mark.gpu
MIB = 2**20


@pytest.fixture
def strewn() -> Iterator[list[Tensor]]:
    """Every second one of forty tensors of 3 MiB; the others are gone."""
    gc.collect()
    torch.cuda.empty_cache()
    tensors = [torch.full((3 * MIB // 4,), float(i), device="cuda") for i in range(40)]
    kept = tensors[::2]
    del tensors
    yield kept
    gc.collect()
    torch.cuda.empty_cache()


def test_what_is_moved_keeps_its_values_and_leaves_no_gaps(strewn: list[Tensor]) -> None:
    before = torch.cuda.memory_reserved()
    addresses = [tensor.data_ptr() for tensor in strewn]
    known = list(map(id, strewn))
    defragment(strewn)
    assert torch.cuda.memory_reserved() < before - 30 * MIB
    assert list(map(id, strewn)) == known
    assert all(a != tensor.data_ptr() for a, tensor in zip(addresses, strewn, strict=True))
    assert [tensor[-1].item() for tensor in strewn] == [2.0 * i for i in range(20)]


def test_memory_with_other_users_stays_where_it_is(strewn: list[Tensor]) -> None:
    view = strewn[3][:5]
    address = strewn[3].data_ptr()
    defragment(strewn)
    assert strewn[3].data_ptr() == address == view.data_ptr()
    strewn[3].fill_(7.0)
    assert view.tolist() == [7.0] * 5


def test_the_memory_is_given_back_with_the_tensors(strewn: list[Tensor]) -> None:
    defragment(strewn)
    before = torch.cuda.memory_reserved()
    strewn.clear()
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before - 60 * MIB
