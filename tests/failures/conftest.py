"""What every test of a failure shares: the scope it runs in, and a check of what it leaked."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_graphs import CaptureError
from lightning_graphs.device.graph import CUDAGraph, graph
from tests.failures.support import SCOPES, forget_workspaces
from tests.training.fits import prepare

_DESCRIPTORS = Path("/proc/self/fd")


@pytest.fixture(params=SCOPES)
def scope(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The callback's options under test: whole steps as graphs, or the submodule ``net``."""
    return SCOPES[request.param]


@pytest.fixture(scope="module", autouse=True)
def _warm(tmp_path_factory: pytest.TempPathFactory) -> None:
    """One fit makes what a process keeps for good; what is frozen here is not counted later."""
    prepare("emulated", tmp_path_factory.mktemp("first"), True).run()
    if torch.cuda.is_available():
        prepare("cuda", tmp_path_factory.mktemp("first"), True).run()
        # Below torch 2.14 the graph of a refused capture lives on, and the generators' state in it.
        with pytest.raises(CaptureError, match="capture"), graph(CUDAGraph(backend="cuda")):
            torch.ones(1, device="cuda").item()
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _signals_as_before() -> Iterator[None]:
    """Lightning ignores SIGINT after a KeyboardInterrupt, and so does what a shell backgrounds."""
    kinds = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(kind) for kind in kinds]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for kind, handler in zip(kinds, before, strict=True):
        signal.signal(kind, handler)


@pytest.fixture
def tracing_as_before() -> Iterator[None]:
    """A test sets a trace function, and an error may end it before that is put back."""
    before = sys.gettrace()
    yield
    sys.settrace(before)


@pytest.fixture(autouse=True)
def _nothing_leaked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fails a test after which graphs, tensors, GPU memory, open files or new files remain."""
    directory = tmp_path / "working directory"
    directory.mkdir()
    monkeypatch.chdir(directory)
    before = _held()
    yield
    after = _held()
    left = {key: (before[key], after[key]) for key in before if after[key] > before[key]}
    assert not left, f"the test left more than it found (before, after): {left}"
    assert list(directory.iterdir()) == []


def _is_of_a_generator(thing: object) -> bool:
    return (
        type(thing) is Tensor
        and thing.is_cuda
        and (thing.dtype, thing.shape)
        == (
            torch.int64,
            (1,),
        )
    )


def _held() -> dict[str, int]:
    """How much of everything there is, once what has no references is gone."""
    gc.collect()
    # Below torch 2.14 the graph of a refused capture lives on, with seed and offset of a generator,
    # which a dispatch mode of a test makes known to Python.
    kinds = [type(thing) for thing in gc.get_objects() if not _is_of_a_generator(thing)]
    held = {
        "graphs": sum(issubclass(kind, CUDAGraph) for kind in kinds),
        "tensors": sum(issubclass(kind, Tensor) for kind in kinds),
        "open files": len(os.listdir(_DESCRIPTORS)) if _DESCRIPTORS.exists() else 0,
    }
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        forget_workspaces()
        torch.cuda.empty_cache()
        held["bytes allocated"] = torch.cuda.memory_allocated()
        held["bytes reserved"] = torch.cuda.memory_reserved()
    return held
