"""Code and data that a hook exchanges in the middle of a fit: the next step is the new one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from tests.programs.table import Promises, row
from tests.training.fits import Net, batches

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


def stepping(how: Any) -> Any:
    """Of a class of its own, so that what is set in it is set for this module alone."""
    block = type("OwnBlock", (Block,), {"how": staticmethod(how)})

    def __init__(self: Any) -> None:
        Stepping.__init__(self)
        self.block = block()

    return type("OwnStepping", (Stepping,), {"__init__": __init__})()


@contextmanager
def as_before() -> Iterator[None]:
    """Nothing is exchanged, before and after."""
    put_back()
    yield
    put_back()


def put_back() -> None:
    global ENCLOSING, WEIGHT
    WEIGHT = 1.0
    HERE.compute = once  # type: ignore[attr-defined]
    LOSSES["main"] = once
    Losses.compute = staticmethod(once)  # type: ignore[method-assign]
    named_by_itself.inner = once  # type: ignore[attr-defined]
    ENCLOSING = enclosing()


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
    """Code that reads a global and an attribute where no capture follows it."""

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


class ThroughUnseen(Stepping):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.block = Unseen(kind)  # type: ignore[assignment]
        if kind in ("compiled", "attribute"):
            self.block.compile(backend="eager")


class Reading(Net):
    """Reads a setting of the data."""

    def __init__(self, read: Callable[[Any], Any]) -> None:
        super().__init__()
        self.read = [read]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch.get("main", batch)) * self.read[0](self.trainer)


@contextmanager
def profiled() -> Iterator[None]:
    before = sys.getprofile()
    sys.setprofile(lambda *_: None)
    try:
        with as_before():
            yield
    finally:
        sys.setprofile(before)


class Switching(Net):
    """Two kinds of batches, whose steps run other code."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return weighted(self.loss(batch)) if len(batch["x"]) == 8 else compute(self.loss(batch))


USUAL = {"around": as_before, "found": None, "validation": 0}
OF_BLOCK = {"modules": ("block",), "below": "", "capture": {"verify": False}, "max_epochs": 3}


def at(change: Callable[[Any], object]) -> Callable[[], list[Callback]]:
    return lambda: [At(change)]


ROWS = {
    what: row(partial(stepping, how), replayed=20, callbacks=at(change), **OF_BLOCK, **USUAL)
    for what, (how, change) in EXCHANGES.items()
}
# No step calls the module any more that the captured ones have called.
ROWS["block"] = replace(ROWS["block"], below="call no graphed module")
# What is exchanged before the first graph drops none.
ROWS |= {
    f"{what}, early": row(
        partial(stepping, EXCHANGES[what][0]), graphs=1, replayed=11, max_epochs=3,
        callbacks=at(EXCHANGES[what][1]), capture={"min_repeats": 14}, **USUAL,
    )
    for what in ("forward of a layer", "class of a block", "block")
}  # fmt: skip
ROWS |= {
    what: row(
        partial(Reading, read), graphs=2, data=data, capture={"verify": False}, max_epochs=3,
        callbacks=at(lambda module, change=change: change(module.trainer)), resumes=False, **USUAL,
    )
    for what, (data, read, change) in SETTINGS.items()
}  # fmt: skip
# The emulated backend captures nothing that is compiled; the compiler looks into hooks.
UNSEEN = {**OF_BLOCK, **USUAL, "below": None, "said": None, "ignored": ".*"}
ROWS |= {
    f"unseen, {kind}": row(partial(ThroughUnseen, kind), callbacks=at(_weigh), **UNSEEN)
    for kind in ("backward", "compiled", "attribute", "compiled function", "hook")
}
ROWS["unseen, profiled"] = row(
    partial(ThroughUnseen, "profiled"), callbacks=at(_weigh), **{**UNSEEN, "around": profiled}
)
# What one graph depends on is no matter of another.
ROWS["Switching"] = row(Switching, graphs=2, data=lambda: batches(6) + batches(6, 4), **USUAL)


class TestExchanged(Promises):
    rows = ROWS
