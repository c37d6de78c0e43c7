"""Batches on their way to the device: the short way, and who must not miss the long one."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.profilers import SimpleProfiler
from torch import Tensor
from torch.nn import Parameter

from lightning_graphs.lightning.strategy import open_simple_batch
from tests.training.fits import prepare

Pair = namedtuple("Pair", ["x", "y"])
A, B = torch.ones(2), torch.zeros(3)


class Columns:
    """An object that is not moved to a device."""


MIXED = {"x": A, "n": 3, "y": [(A, B), "name", None, Columns()]}


@pytest.mark.parametrize("batch", [A, (A, B), [A, B], {"a": A, 3: B}, (A, A), (), {}, MIXED])
def test_a_simple_batch_is_built_again(batch: Any) -> None:
    parts = open_simple_batch(batch)
    assert parts is not None
    tensors, build = parts
    assert all(isinstance(tensor, Tensor) for tensor in tensors)
    built = build(tensors)
    assert type(built) is type(batch)
    assert built is batch or built == batch  # the very tensors: compared by identity first


@pytest.mark.parametrize(
    "batch",
    [
        Pair(A, B),
        OrderedDict(a=A),
        [(A, Pair(A, B))],
        (Parameter(A),),
        (A.to("meta"),),
        (A.to_sparse(),),
        "text",
        None,
    ],
    ids=lambda batch: type(batch).__name__,
)
def test_any_other_batch_takes_the_long_way(batch: Any) -> None:
    assert open_simple_batch(batch) is None


def test_a_profiler_sees_the_hooks_of_every_transfer(backend: str, tmp_path: Path) -> None:
    seen = []
    for captured in (False, True):
        profiler = SimpleProfiler()
        prepare(backend, tmp_path, captured, profiler=profiler).run()
        durations = profiler.recorded_durations
        seen.append({k: len(v) for k, v in durations.items() if "transfer_batch" in k})
    assert seen[0] == seen[1] != {}
