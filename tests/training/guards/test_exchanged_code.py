"""Code and data that a hook exchanges in the middle of a fit: the next step is the new one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from tests.training.fits import Net, batches, compare, fit_twice
from tests.training.modules.test_equal import named

HERE = sys.modules[__name__]


def once(loss: Any) -> Any:
    return loss * 1.0


def twice(loss: Any) -> Any:
    return loss * 2.0


compute = once
LOSSES = {"main": once}


class Losses:
    """Functions that the author keeps in a class."""

    @staticmethod
    def compute(loss: Any) -> Any:
        return once(loss)


def enclosing() -> SimpleNamespace:
    """A function, and one that exchanges another which it closes over."""
    inner = once

    def scaled(loss: Any) -> Any:
        return inner(loss)

    def change() -> None:
        nonlocal inner
        inner = twice

    return SimpleNamespace(scaled=scaled, change=change)


ENCLOSING = enclosing()


def named_by_itself(loss: Any) -> Any:
    return named_by_itself.inner(loss)  # type: ignore[attr-defined]


class Block(nn.Module):
    """A layer that computes by way of everything that can be exchanged."""

    how: Callable[[Any, Any], Any]

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.kept = once
        self.table, self.row = {"main": once}, [once]

    def method(self, x: Tensor) -> Tensor:
        return once(x)

    def other(self, x: Tensor) -> Tensor:
        return twice(x)

    def forward(self, x: Tensor) -> Tensor:
        return type(self).how(self, self.linear(x))


class OtherBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        return 2.0 * super().forward(x)


class Stepping(Net):
    """A step through a block, and what may take its place."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.criterion(batch)

    def criterion(self, batch: Any) -> Any:
        return self.loss({**batch, "x": self.block(batch["x"])})

    def second(self, batch: Any) -> Any:
        return 2.0 * self.loss({**batch, "x": self.block(batch["x"])})

    def stage_two(self, batch: Any, batch_idx: int) -> Any:
        return self.second(batch)


class OtherStepping(Stepping):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.second(batch)


def _double(forward: Any) -> Any:
    return lambda x: 2.0 * forward(x)


def _other_forward(layer: Any) -> None:
    layer.forward = _double(type(layer).forward.__get__(layer))


def _doubled(self: Any, *args: Any) -> Any:
    return 2.0 * Stepping.training_step(self, *args)


def same(_: Any, x: Tensor) -> Tensor:
    return x


# How the block computes, and what exchanges something of that or of the module.
EXCHANGES: dict[str, tuple[Any, Callable[[Any], object]]] = {
    "training_step": (same, lambda m: setattr(m, "training_step", m.stage_two)),
    "training_step of the class": (
        same, lambda m: setattr(type(m), "training_step", _doubled),
    ),
    "method": (same, lambda m: setattr(m, "criterion", m.second)),
    "method of the class": (same, lambda m: setattr(type(m), "criterion", type(m).second)),
    "class": (same, lambda m: setattr(m, "__class__", OtherStepping)),
    "forward": (same, lambda m: _other_forward(m.block)),
    "forward of a layer": (same, lambda m: _other_forward(m.block.linear)),
    "forward of the class": (
        same, lambda m: setattr(type(m.block), "forward", lambda b, x: 2.0 * b.linear(x)),
    ),
    "class of a block": (
        same,
        lambda m: setattr(m.block, "__class__", type("Doubled", (OtherBlock, type(m.block)), {})),
    ),
    "class of a layer": (
        same,
        lambda m: setattr(
            m.block.linear, "__class__",
            type("Doubled", (nn.Linear,), {"forward": lambda s, x: 2.0 * nn.Linear.forward(s, x)}),
        ),
    ),
    "block": (same, lambda m: setattr(m, "block", _moved(m.block))),
    "method of a block": (lambda b, x: b.method(x), lambda m: setattr(m.block, "method", twice)),
    "bound method of a block": (
        lambda b, x: b.method(x), lambda m: setattr(m.block, "method", m.block.other),
    ),
    "method of the block's class": (
        lambda b, x: b.method(x), lambda m: setattr(type(m.block), "method", Block.other),
    ),
    "attribute": (lambda b, x: b.kept(x), lambda m: setattr(m.block, "kept", twice)),
    "entry of a dict": (
        lambda b, x: b.table["main"](x), lambda m: m.block.table.update(main=twice),
    ),
    "entry of a list": (
        lambda b, x: b.row[0](x), lambda m: m.block.row.__setitem__(0, twice),
    ),
    "global": (lambda b, x: compute(x), lambda _: setattr(HERE, "compute", twice)),
    "global of a module": (
        lambda b, x: HERE.compute(x), lambda _: setattr(HERE, "compute", twice),
    ),
    "entry of a global": (lambda b, x: LOSSES["main"](x), lambda _: LOSSES.update(main=twice)),
    "static method": (
        lambda b, x: Losses.compute(x),
        lambda _: setattr(Losses, "compute", staticmethod(twice)),
    ),
    "enclosing variable": (lambda b, x: ENCLOSING.scaled(x), lambda _: ENCLOSING.change()),
    "attribute of a function": (
        lambda b, x: named_by_itself(x), lambda _: setattr(named_by_itself, "inner", twice),
    ),
}  # fmt: skip


def _moved(block: Block) -> Block:
    other: Any = type("Doubled", (OtherBlock, type(block)), {})()
    other.to(block.linear.weight.device).load_state_dict(block.state_dict())
    other.linear = block.linear  # whose parameters the optimizer has
    return other


class At(Callback):
    """Exchanges something after the twelfth batch."""

    def __init__(self, change: Callable[[Any], object]) -> None:
        self.change = change

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if trainer.global_step == 12:
            self.change(pl_module)


@pytest.fixture
def as_before() -> Iterator[Callable[[], None]]:
    def put_back() -> None:
        global ENCLOSING
        HERE.compute = once  # type: ignore[attr-defined]
        LOSSES["main"] = once
        Losses.compute = staticmethod(once)  # type: ignore[method-assign]
        named_by_itself.inner = once  # type: ignore[attr-defined]
        ENCLOSING = enclosing()

    yield put_back
    put_back()


def stepping(how: Any) -> Any:
    """A class of its own, so that what is set in it is nobody else's."""
    block = type("OwnBlock", (Block,), {"how": staticmethod(how)})

    def __init__(self: Any) -> None:
        Stepping.__init__(self)
        self.block = block()

    return type("OwnStepping", (Stepping,), {"__init__": __init__})


@pytest.mark.filterwarnings("ignore:GraphCapture")
@pytest.mark.parametrize("scope", ["step", "modules"])
@pytest.mark.parametrize("what", EXCHANGES)
def test_exchanged(
    backend: str, tmp_path: Path, as_before: Callable[[], None], what: str, scope: str
) -> None:
    how, change = EXCHANGES[what]

    def module() -> Any:
        as_before()
        return stepping(how)()

    capture = {"scope": "step"} if scope == "step" else named("block")
    eager, captured = fit_twice(
        backend, tmp_path, module=module, callbacks=lambda: [At(change)],
        capture={**capture, "verify": False}, validation=0, max_epochs=3,
    )  # fmt: skip
    compare(eager, captured)
    assert captured.statistics.replayed >= 20


@pytest.mark.parametrize("what", ["forward of a layer", "class of a block", "block"])
def test_what_is_exchanged_before_the_first_graph_drops_none(
    backend: str, tmp_path: Path, as_before: Callable[[], None], what: str
) -> None:
    how, change = EXCHANGES[what]
    eager, captured = fit_twice(
        backend, tmp_path, module=lambda: stepping(how)(), callbacks=lambda: [At(change)],
        capture={"min_repeats": 14}, validation=0, max_epochs=3,
    )  # fmt: skip
    compare(eager, captured)
    assert captured.statistics.captures == 1
    assert captured.statistics.replayed > 10


class Noisy(Dataset[Any]):
    """Batches, and a setting that the step reads."""

    noise = 1.0

    def __init__(self) -> None:
        self.batches, self.scale = batches(), 1.0

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> Any:
        return self.batches[index]


class Data(LightningDataModule):
    """A data module with settings of its own."""

    ratio = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.dataset = Noisy()

    def train_dataloader(self) -> Any:
        return DataLoader(self.dataset, batch_size=None)


SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], object]]] = {
    "dataset of the loader": (
        lambda: DataLoader(Noisy(), batch_size=None),
        lambda t: t.train_dataloader.dataset.scale,
        lambda t: setattr(t.train_dataloader.dataset, "scale", 2.0),
    ),
    "class of the dataset": (
        lambda: DataLoader(Noisy(), batch_size=None),
        lambda t: t.train_dataloader.dataset.noise,
        lambda t: setattr(t.train_dataloader.dataset, "noise", 2.0),
    ),
    "loader in a dict": (
        lambda: {"main": DataLoader(Noisy(), batch_size=None)},
        lambda t: t.train_dataloader["main"].dataset.scale,
        lambda t: setattr(t.train_dataloader["main"].dataset, "scale", 2.0),
    ),
    "data module": (
        Data, lambda t: t.datamodule.ratio, lambda t: setattr(t.datamodule, "ratio", 2.0),
    ),
    "dataset of the data module": (
        Data,
        lambda t: t.datamodule.dataset.scale,
        lambda t: setattr(t.datamodule.dataset, "scale", 2.0),
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", SETTINGS)
def test_settings_of_the_data(backend: str, tmp_path: Path, what: str) -> None:
    data, read, change = SETTINGS[what]

    class Reading(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.loss(batch.get("main", batch)) * read(self.trainer)

    eager, captured = fit_twice(
        backend, tmp_path, module=Reading, callbacks=lambda: [At(lambda m: change(m.trainer))],
        data=data, capture={"verify": False}, validation=0, max_epochs=3,
    )  # fmt: skip
    compare(eager, captured)
    assert captured.statistics.captures == 2


WEIGHT = 1.0


def weighted(x: Tensor) -> Tensor:
    return x * WEIGHT


class Weighting(torch.autograd.Function):
    """Its backward reads a global, on a GPU in a thread of autograd's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return weighted(gradient)


class Unseen(nn.Module):
    """Code that reads a global and an attribute where nobody follows it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear, self.kind, self.weight = nn.Linear(8, 8), kind, 1.0
        self.compiled = torch.compile(weighted, backend="eager")
        if kind == "hook":
            self.linear.weight.register_hook(weighted)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x)
        if self.kind == "backward":
            found: Tensor = Weighting.apply(hidden)
        elif self.kind == "compiled function":
            found = self.compiled(hidden)
        elif self.kind == "attribute":
            found = hidden * self.weight
        elif self.kind == "hook":
            found = hidden
        else:
            found = weighted(hidden)
        return found


def _weigh(module: Any) -> None:
    global WEIGHT
    if module.block.kind == "attribute":
        module.block.weight = 2.0
    else:
        WEIGHT = 2.0


@pytest.mark.filterwarnings("ignore")  # the compiler looks into hooks and graphs, and says so
@pytest.mark.parametrize("scope", ["step", "modules"])
@pytest.mark.parametrize(
    "kind", ["backward", "compiled", "attribute", "compiled function", "hook", "profiled"]
)
def test_values_of_code_that_runs_unseen(
    backend: str, tmp_path: Path, kind: str, scope: str
) -> None:
    class Module(Stepping):
        def __init__(self) -> None:
            global WEIGHT
            WEIGHT = 1.0
            super().__init__()
            self.block = Unseen(kind)  # type: ignore[assignment]
            if kind in ("compiled", "attribute"):
                self.block.compile(backend="eager")

    capture = {"scope": "step"} if scope == "step" else named("block")
    before = sys.getprofile()
    if kind == "profiled":
        sys.setprofile(lambda *_: None)
    try:
        eager, captured = fit_twice(
            backend, tmp_path, module=Module, callbacks=lambda: [At(_weigh)],
            capture={**capture, "verify": False, "on_failure": "eager"}, validation=0, max_epochs=3,
        )  # fmt: skip
    finally:
        sys.setprofile(before)
    # The emulated backend captures nothing that is compiled.
    compiled = kind in ("compiled", "attribute", "compiled function")
    compare(eager, captured, replayed=backend == "cuda" or not compiled)


class Switching(Net):
    """Two kinds of batches, whose steps run other code."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return weighted(self.loss(batch)) if len(batch["x"]) == 8 else compute(self.loss(batch))


def test_what_one_graph_depends_on_is_no_matter_of_another(backend: str, tmp_path: Path) -> None:
    eager, captured = fit_twice(
        backend, tmp_path, module=Switching, data=lambda: batches(6) + batches(6, 4), validation=0
    )
    compare(eager, captured)
    assert captured.statistics.captures == 2
