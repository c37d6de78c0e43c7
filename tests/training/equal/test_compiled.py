"""Compiled code: captured in the default mode, refused where it makes graphs of its own."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from lightning_graphs import CaptureError
from lightning_graphs.training.guards.uncapturable import with_own_graphs
from tests.training.fits import Net, batches, compare, fit_twice, prepare
from tests.training.leftovers import assert_nothing_left

# What torch says while it imports its compiler.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

OWN = "is compiled to CUDA graphs of its own, which no graph can hold; write torch.compile"


class Holder(nn.Module):
    """Compiled parts in every form, with a mode each."""

    def __init__(self, mode: str | None) -> None:
        super().__init__()
        self.wrapped = torch.compile(nn.Linear(2, 2), mode=mode)
        self.inner = nn.Sequential(nn.Linear(2, 2))
        self.inner[0].compile(mode=mode)
        self.function = torch.compile(torch.nn.functional.gelu, mode=mode)
        self.plain = torch.nn.functional.gelu


@pytest.mark.parametrize("mode", [None, "default", "max-autotune-no-cudagraphs"])
def test_other_modes_make_no_graphs(mode: str | None) -> None:
    assert list(with_own_graphs(Holder(mode))) == []


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_those_that_make_graphs_are_named(mode: str) -> None:
    assert sorted(with_own_graphs(Holder(mode))) == ["function", "inner.0", "wrapped"]


class Reducing(Net):
    """Its network is compiled to graphs of its own; nothing runs compiled in these tests."""

    def __init__(self) -> None:
        super().__init__()
        self.compiled = torch.compile(nn.Linear(2, 2), mode="reduce-overhead")


@pytest.mark.parametrize("scope", ["step", "auto", "modules"])
def test_reduce_overhead_is_refused_with_the_remedy(
    backend: str, tmp_path: Path, scope: str
) -> None:
    options: dict[str, Any] = {
        "module": Reducing,
        "capture": {"scope": scope, "on_failure": "eager"},
    }
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        fits = fit_twice(backend, tmp_path, **options)
    compare(*fits, replayed=False)
    if scope == "step":
        assert any(OWN in str(w.message) for w in said)
        assert fits[1].statistics.replayed == 0
    else:  # the other submodules have graphs
        assert fits[1].statistics.replayed > 0


def test_reduce_overhead_raises_where_asked_to(backend: str, tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match=r"`compiled` is compiled to CUDA graphs of its own"):
        prepare(backend, tmp_path, True, module=Reducing, capture={"scope": "step"}).run()


class Layer(nn.Module):
    """Two layers, which the compiler makes one graph of."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.other = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.other(torch.relu(self.inner(x)))


def compiled(call: Any) -> Any:
    """Compiled so that anything which the compiler cannot look into raises."""
    return torch.compile(call, backend="eager", fullgraph=True)


class Compiling(Net):
    """Compiles a part of it in one of many ways: in ``__init__``, in a hook, or in its step.

    Args:
        way: Which.
    """

    def __init__(self, way: str) -> None:
        super().__init__()
        self.block, self.second = Layer(), Layer()
        self.way = way
        # No attribute that torch would register.
        self.calls: list[Any] = []
        if way == "in place":
            self.block.compile(backend="eager", fullgraph=True)
        elif way == "wrapped":
            self.block = compiled(self.block)
        elif way == "called":
            self.calls.append(compiled(self.block))
        elif way == "function":
            self.calls.append(compiled(lambda x: self.second(self.block(x))))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        block = self.calls[0] if self.way == "called" else self.block
        x = self.calls[0](batch["x"]) if self.way == "function" else self.second(block(batch["x"]))
        return super().training_step({**batch, "x": x}, batch_idx)

    def on_train_batch_end(self, *_: Any) -> None:
        if self.global_step == 10 and self.way == "in place, later":
            self.block.compile(backend="eager", fullgraph=True)
        if self.global_step == 10 and self.way == "wrapped, later":
            self.block = compiled(self.block)


WAYS = {
    "in place": ["block", "second", "net"],
    "wrapped": ["block", "second", "net"],
    "called": ["second", "net"],
    "function": ["net"],
    "in place, later": ["block", "second", "net"],
    "wrapped, later": ["block", "second", "net"],
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.filterwarnings("ignore:GraphCapture")  # a rehearsal refuses what is compiled
def test_the_compiler_sees_nothing_of_graphs(backend: str, tmp_path: Path, way: str) -> None:
    torch.compiler.reset()
    counters.clear()
    fits = fit_twice(
        backend, tmp_path, module=lambda: Compiling(way), capture={"scope": "modules"},
        data=lambda: batches(30), max_epochs=1,
    )  # fmt: skip
    compare(*fits, replayed=False)
    assert_nothing_left(fits[1])
    assert not counters["graph_break"]
    statistics = fits[1].statistics
    assert statistics.replayed > 15
    refused = backend == "emulated" and way in ("in place", "wrapped")
    assert statistics.modules == [name for name in WAYS[way] if name != "block" or not refused]
    replays = {record.scope: record.replays for record in statistics.graphs}
    assert all(replays[f"module {n}"] > 15 for n in statistics.modules if n != "block"), replays


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # the compiler's, without graphs, too
@pytest.mark.filterwarnings("ignore:GraphCapture")
def test_hooks_that_are_compiled_run(backend: str, tmp_path: Path) -> None:
    class Hooked(Compiling):
        def __init__(self) -> None:
            super().__init__("in place")
            self.block.register_forward_hook(lambda module, args, output: output * 2)

    torch.compiler.reset()
    fits = fit_twice(backend, tmp_path, module=Hooked, capture={"scope": "modules"})
    compare(*fits, replayed=False)
    assert fits[1].statistics.modules == ["second", "net"]
    (reason,) = fits[1].statistics.fallbacks
    assert reason.startswith("`block` is not graphed: it has a hook inside of what is compiled")
