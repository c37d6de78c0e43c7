"""Values outside of modules that hooks change: globals, classes, closures, defaults."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from tests.programs.table import Promises, row, table
from tests.training.fits import Net, named

SCALE = 1.0
SETTINGS = {"weights": [1.0, 2.0]}
COUNT = 0


def scaled(loss: Any) -> Any:
    return loss * SCALE


class ReadingGlobals(Net):
    """A method and a function read what a hook changes twice; another hook counts every step."""

    def weighted(self, loss: Any) -> Any:
        return scaled(loss) * SETTINGS["weights"][1]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.weighted(self.loss(batch))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        global COUNT, SCALE
        COUNT += 1
        if COUNT == 12:
            SCALE = 3.0
        if COUNT == 16:
            SETTINGS["weights"][1] = 4.0


class BlockReadingGlobals(nn.Module):
    """A graphed submodule that reads a global, and one through a function."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Any) -> Any:
        return scaled(self.linear(x)) * SETTINGS["weights"][1]


class WithReadingBlock(ReadingGlobals):
    def __init__(self) -> None:
        super().__init__()
        self.block = BlockReadingGlobals()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss({**batch, "x": self.block(batch["x"])})


def weighted(loss: Any) -> Any:
    return loss * weighted.weight


class ReadingAFunction(Net):
    """A hook changes an attribute of a function that the step calls."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return weighted(self.loss(batch))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        weighted.weight = 1.0 + (self.trainer.global_step >= 12)


class Defaults:
    ratio = 1.0
    weights = [1.0]  # noqa: RUF012


class Settings(Defaults):
    """What a hook changes is the class's, or that of the class it is derived from."""

    scale = 1.0


SETTINGS_OBJECT = Settings()


class ReadingAClass(Net):
    scaled: Any = staticmethod(lambda loss: loss * Settings.scale)

    def change(self) -> None:
        Settings.scale = 2.0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.scaled(self.loss(batch))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.global_step == 12:
            self.change()


class ReadingABaseClass(ReadingAClass):
    scaled = staticmethod(lambda loss: loss * Settings.ratio)

    def change(self) -> None:
        Defaults.ratio = 2.0


class ReadingAListOfAClass(ReadingAClass):
    scaled = staticmethod(lambda loss: loss * Settings.weights[0])

    def change(self) -> None:
        Defaults.weights[0] = 2.0


class ReadingAnObject(ReadingAClass):
    scaled = staticmethod(lambda loss: loss * SETTINGS_OBJECT.scale)


class HoldingAnObject(ReadingAClass):
    def __init__(self) -> None:
        super().__init__()
        self.settings = Settings()

    def scaled(self, loss: Any) -> Any:
        return loss * self.settings.ratio

    def change(self) -> None:
        Defaults.ratio = 2.0


class HoldingAListOfTheClass(HoldingAnObject):
    def scaled(self, loss: Any) -> Any:
        return loss * self.settings.weights[0]

    def change(self) -> None:
        Settings.weights = [2.0]  # which hides that of the base class


class Slotted:
    """An object without a ``__dict__``, and the only one of its class."""

    __slots__ = ("scale",)
    only: Any = None

    def __new__(cls) -> Any:
        if cls.only is None:
            cls.only = super().__new__(cls)
            cls.only.scale = 1.0
        return cls.only

    def scaled(self, loss: Any) -> Any:
        return loss * self.scale * SCALE


class HoldingSlots(ReadingAClass):
    def __init__(self) -> None:
        super().__init__()
        self.slotted = Slotted()
        self.slotted.scale = 1.0

    def scaled(self, loss: Any) -> Any:
        return self.slotted.scaled(loss)

    def change(self) -> None:
        self.slotted.scale = 2.0


class HoldingAMethod(HoldingSlots):
    def __init__(self) -> None:
        super().__init__()
        self.scaled = self.slotted.scaled  # type: ignore[method-assign]


class ReadingGlobalsInAHelper(HoldingSlots):
    def change(self) -> None:
        global SCALE
        SCALE = 2.0


class OfItsOwnClass(ReadingAClass):
    ratio = 1.0

    def scaled(self, loss: Any) -> Any:
        return loss * type(self).ratio

    def change(self) -> None:
        type(self).ratio = 2.0


class Deep(ReadingAClass):
    def __init__(self) -> None:
        super().__init__()
        self.settings = {"loss": {"weights": {"ce": Settings()}}}
        self.settings["loss"]["weights"]["ce"].scale = 1.0

    def scaled(self, loss: Any) -> Any:
        return loss * self.settings["loss"]["weights"]["ce"].scale

    def change(self) -> None:
        self.settings["loss"]["weights"]["ce"].scale = 2.0


def defaulting(loss: Any, weights: list[float] = [1.0]) -> Any:  # noqa: B006
    return loss * weights[0]


class WithADefault(ReadingAClass):
    def scaled(self, loss: Any) -> Any:
        return defaulting(loss)

    def change(self) -> None:
        assert defaulting.__defaults__ is not None
        defaulting.__defaults__[0][0] = 2.0


class HoldingFunctions(ReadingAClass):
    def __init__(self) -> None:
        super().__init__()
        self.schedules = {"loss": lambda loss: loss * SCALE}

    def scaled(self, loss: Any) -> Any:
        return self.schedules["loss"](loss)

    def change(self) -> None:
        global SCALE
        SCALE = 2.0


class HoldingAFunction(ReadingAClass):
    def __init__(self) -> None:
        super().__init__()
        self.scaled = lambda loss: loss * SCALE

    def change(self) -> None:
        global SCALE
        SCALE = 2.0


def closing_over() -> Net:
    weight = 1.0

    class Closing(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.loss(batch) * weight

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            nonlocal weight
            weight = 1.0 + (self.trainer.global_step >= 12)

    return Closing()


class Unfilled(nn.Module):
    """A variable that it closes over has no value as long as its branch is not taken."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.special = nn.Linear(8, 8), False

        def scaled(x: Any) -> Any:
            return x * scale if self.special else x

        self.call = scaled
        if self.special:
            scale = 2.0

    def forward(self, x: Any) -> Any:
        return self.call(self.linear(x))


def closing(scale: float) -> Any:
    class Closing(nn.Linear):
        def forward(self, x: Any) -> Any:
            return super().forward(x) * scale

        @staticmethod
        def change(value: float) -> None:
            nonlocal scale
            scale = value

    return Closing


class WithUnfilled(WithReadingBlock):
    def __init__(self) -> None:
        super().__init__()
        self.block = Unfilled()  # type: ignore[assignment]

    def forward(self, x: Any) -> Any:
        return self.block(x)


class Both(Net):
    """Variables of one name, of two functions; one of them changes."""

    which = 0

    def __init__(self) -> None:
        super().__init__()
        self.kinds = closing(1.0), closing(1.0)
        self.blocks = nn.Sequential(*(kind(8, 8) for kind in self.kinds))

    def loss(self, batch: Any) -> Any:
        return super().loss({**batch, "x": self.blocks(batch["x"])})

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.global_step == 12:
            self.kinds[self.which].change(2.0)


class BothOther(Both):
    which = 1


@contextmanager
def as_before() -> Iterator[None]:
    """Everything has the value that it had at first."""
    global COUNT, SCALE
    COUNT, SCALE, SETTINGS["weights"] = 0, 1.0, [1.0, 2.0]
    Settings.scale, Defaults.ratio, Defaults.weights[:] = 1.0, 1.0, [1.0]
    OfItsOwnClass.ratio, defaulting.__defaults__ = 1.0, ([1.0],)
    if "weights" in vars(Settings):
        del Settings.weights
    yield


CHANGES = {
    ReadingGlobals: ("SCALE: ", "SETTINGS['weights'][1]: "),
    ReadingAFunction: ("weighted.weight: 1.0 -> 2.0",),
    closing_over: ("weight: 1.0 -> 2.0",),
    ReadingAClass: ("Settings.scale: 1.0 -> 2.0",),
    ReadingABaseClass: ("Settings.ratio: 1.0 -> 2.0",),
    ReadingAListOfAClass: ("Settings.weights[0]: 1.0 -> 2.0",),
    ReadingAnObject: ("SETTINGS_OBJECT.scale: 1.0 -> 2.0",),
    HoldingAnObject: ("self.settings.ratio: 1.0 -> 2.0",),
    HoldingAListOfTheClass: ("self.settings.weights[0]: 1.0 -> 2.0",),
    HoldingSlots: ("self.slotted.scale: 1.0 -> 2.0",),
    HoldingAMethod: ("self.scaled.__self__.scale: 1.0 -> 2.0",),
    ReadingGlobalsInAHelper: ("SCALE: 1.0 -> 2.0",),
    OfItsOwnClass: ("OfItsOwnClass.ratio: 1.0 -> 2.0",),
    Deep: ("self.settings['loss']['weights']['ce'].scale: 1.0 -> 2.0",),
    WithADefault: ("defaulting's defaults[0][0]: 1.0 -> 2.0",),
    HoldingFunctions: ("SCALE: 1.0 -> 2.0",),
    HoldingAFunction: ("SCALE: 1.0 -> 2.0",),
}
BLOCK = named("block", verify=False)


class InTurn(Net):
    """Looks up a table that a capture may be the first to make, which no hook has cleared."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) + tabled(3 + batch_idx % 2, batch["x"].device).sum()


@functools.lru_cache(maxsize=8)
def tabled(count: int, device: torch.device) -> torch.Tensor:
    return torch.arange(count, device=device) / 8


@contextmanager
def emptied() -> Iterator[None]:
    tabled.cache_clear()
    yield


ROWS = {
    kind.__name__: row(kind, changes=changes, around=as_before, capture={"verify": False})
    for kind, changes in CHANGES.items()
} | {
    "WithReadingBlock": row(
        WithReadingBlock, changes=CHANGES[ReadingGlobals], around=as_before, capture=BLOCK
    ),
    **table(WithUnfilled, around=as_before, capture=named("block"), validation=0),
    **table(InTurn, around=emptied, graphs=2, max_epochs=3),
    **table(
        Both, BothOther, capture=named("blocks.*", verify=False), changes=("scale: 1.0 -> 2.0",)
    ),
}  # fmt: skip


class TestGlobals(Promises):
    rows = ROWS
