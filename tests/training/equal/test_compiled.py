"""Compiled code: captured in the default mode, refused where it makes graphs of its own."""

from __future__ import annotations

import math
import random
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn.attention.flex_attention import flex_attention

from lightning_graphs import CaptureError, GraphCapture
from lightning_graphs.watch.draws import draws_refused
from lightning_graphs.watch.user_code import CompiledCode, with_own_graphs
from tests.training.fits import (
    Net,
    assert_nothing_left,
    batches,
    compare,
    examined,
    fit_twice,
    line,
    prepare,
    rows,
)

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


@pytest.fixture
def elsewhere() -> None:
    """Something else of the process has been compiled, and runs."""
    compiled(lambda x: x * 2)(torch.ones(2))


class Drawing(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch) * random.random()  # draws
        self.log("loss", loss)
        return loss


class Counting(Net):
    """Functions of ``math`` are followed."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) * (1 + math.cos(math.pi * self.global_step / 100))


class Deciding(Net):
    """A draw decides, as in transformers' layerdrop."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        return loss if random.random() < 0.5 else loss * 2


class Holding(Drawing):
    """Holds compiled code that its steps do not call."""

    def __init__(self) -> None:
        super().__init__()
        self.judge = compiled(nn.Linear(3, 3))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.judge(self.net(batch["x"]).float()).mean())


@pytest.mark.parametrize("module", [Drawing, Counting, Deciding, Holding])
@pytest.mark.parametrize("scope", ["auto", "step"])
@pytest.mark.usefixtures("elsewhere")
def test_what_is_compiled_elsewhere_is_no_matter_of_a_step(
    backend: str, tmp_path: Path, module: type[Net], scope: str
) -> None:
    fits = []
    for is_captured in (False, True):
        random.seed(5)
        options = {"scope": scope, "evaluation": False}  # a rehearsal captures no compiled one
        given: dict[str, Any] = {"module": module, "capture": options, "max_epochs": 4}
        fits.append(prepare(backend, tmp_path, is_captured, **given).run())
    compare(*fits)
    assert {record.scope for record in fits[1].statistics.graphs} == {"step"}
    assert fits[1].statistics.replayed > 20


class DrawingLate(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        assert random is not None
        loss = self.loss(batch)
        return loss * random.random()  # draws


class DrawingNumPy(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        assert np.random is not None
        loss = self.loss(batch)
        return loss * float(np.random.rand())  # draws


@pytest.mark.filterwarnings("ignore:GraphCapture")
@pytest.mark.parametrize("module", [DrawingLate, DrawingNumPy])
def test_draws_beside_compiled_code_are_refused_with_their_line(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: type[Net]
) -> None:
    monkeypatch.setattr(CompiledCode, "runs", True)  # which a rehearsal refuses before any draw
    fits = []
    for is_captured in (False, True):
        random.seed(5)
        capture = {"on_failure": "eager"}
        fits.append(prepare(backend, tmp_path, is_captured, module=module, capture=capture).run())
    compare(*fits, replayed=False)
    (reason,) = fits[1].statistics.fallbacks
    here = line(module.training_step, "draws")
    assert f"draws on the host, next to compiled code, at {__file__}:{here} in" in reason


def test_a_draw_of_torchs_on_the_host_is_refused_with_its_line() -> None:
    said = rf"rand.* draws on the host, .* at {__file__}:\d+ in"
    gpu = torch.device("meta")  # stands for one
    with pytest.raises(CaptureError, match=said), draws_refused(gpu):
        torch.rand(2)
    with draws_refused(gpu):
        torch.rand(2, device="meta")
        torch.zeros(2)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # the compiler's, without graphs, too
@pytest.mark.usefixtures("elsewhere")
def test_the_doctor_knows_what_a_step_calls(backend: str, tmp_path: Path) -> None:
    (row,) = rows(examined(backend, tmp_path / "plain", module=Drawing), "python-state") or (None,)
    assert row is None

    class Compiled(Drawing):
        def loss(self, batch: Any) -> Tensor:
            return doubled(super().loss(batch))

    doubled = compiled(lambda x: x * 2)
    (row,) = rows(examined(backend, tmp_path / "compiled", module=Compiled), "python-state")
    assert row is not None
    assert row.line == line(Drawing.training_step, "draws")


def flexible(x: Tensor) -> Tensor:
    heads = x.expand(1, 2, 16, 16)
    attended: Tensor = flex_attention(heads, heads, heads)
    return attended


def in_place(x: Tensor) -> Tensor:
    layer = nn.Linear(16, 16)
    layer.compile(backend="eager")
    called: Tensor = layer(x)
    return called


def elsewhere_called(x: Tensor) -> Tensor:
    """Another thread calls it, as a loader does."""
    thread = threading.Thread(target=compiled(lambda y: y * 2), args=(x,))
    thread.start()
    thread.join()
    return x


CALLS: dict[str, tuple[Callable[[Tensor], Any], bool]] = {
    "a function": (lambda x: compiled(lambda y: y * 2)(x), True),
    "a module": (lambda x: compiled(nn.Linear(16, 16))(x), True),
    "a module in place": (in_place, True),
    "flex_attention": (flexible, True),
    "cond": (lambda x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)), True),
    "nothing of it": (lambda x: nn.Linear(16, 16)(x), False),
    "what is kept from it": (lambda x: torch.compiler.disable(torch.sin)(x), False),
    "an optimizer": (lambda x: torch.optim.SGD([x], lr=0.1).step(), False),
    "another thread": (elsewhere_called, False),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.filterwarnings("ignore:.*without torch.compile:UserWarning")
@pytest.mark.usefixtures("elsewhere")
def test_every_way_to_call_compiled_code_is_noticed(call: str) -> None:
    torch.compiler.reset()
    function, expected = CALLS[call]
    watched = CompiledCode()
    with torch.no_grad(), watched.watching():
        function(torch.ones(16, 16))
    assert watched.runs is expected


def test_code_that_is_told_to_be_eager_is_none_that_is_compiled() -> None:
    watched = CompiledCode()
    with torch.compiler.set_stance("force_eager"), watched.watching():
        compiled(lambda x: x * 2)(torch.ones(2))
    assert not watched.runs


def test_another_compiler_than_torchs_present_one_is_noticed_by_what_was_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr("torch._dynamo.eval_frame._callback_from_stance")
    counters.clear()
    for found in (False, True):
        watched = CompiledCode()
        with watched.watching():
            pass
        assert watched.runs is found
        counters["frames"]["ok"] = 1


class Logging(BoringModel):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.step(batch)
        self.log("loss", loss)
        return loss


@pytest.mark.filterwarnings("ignore:GraphCapture")  # a rehearsal refuses what is compiled
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # the compiler's, without graphs, too
@pytest.mark.filterwarnings("ignore:.*does not have many workers")
def test_the_compiler_sees_nothing_of_logs(backend: str, tmp_path: Path) -> None:
    """It would look into what stands for ``self.log`` where the whole module is compiled.

    From there it comes to Lightning's own, which torch 2.13 cannot compile.
    """
    torch.compiler.reset()
    kind = "gpu" if backend == "cuda" else "cpu"
    own = GraphCapture(backend=backend, only_if_faster=False)
    trainer = Trainer(
        accelerator=kind, devices=1, fast_dev_run=True, logger=False, callbacks=[own],
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=tmp_path,
    )  # fmt: skip
    trainer.fit(torch.compile(Logging(), backend="eager"))  # type: ignore[arg-type]
    assert set(trainer.callback_metrics) == {"loss"}
