"""Attributes that are not there at a capture, and appear later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import Callback
from torch import Tensor, nn

from tests.programs.table import Program, Promises, row
from tests.training.fits import Net, named


def by_hasattr(owner: Any) -> Any:
    return owner.boost if hasattr(owner, "boost") else 1.0


def by_default(owner: Any) -> Any:
    return getattr(owner, "boost", 1.0)


def by_exception(owner: Any) -> Any:
    try:
        return owner.boost
    except AttributeError:
        return 1.0


class Layer(nn.Module):
    """A submodule that looks for an attribute of its own."""

    def __init__(self, look: Callable[[Any], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 3)
        self.look = look

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.look(self)


def looking(look: Callable[[Any], Any]) -> type[Net]:
    class Looking(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.loss(batch) * look(self)

    return Looking


def looking_inside(look: Callable[[Any], Any]) -> type[Net]:
    class LookingInside(Net):
        def __init__(self) -> None:
            super().__init__()
            self.net = Layer(look)  # type: ignore[assignment]

    return LookingInside


class Change(Callback):
    """Changes something at the beginning of the second epoch, and of the third."""

    def __init__(self, *changes: Callable[[Any], object]) -> None:
        self.changes = changes

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if 0 < trainer.current_epoch <= len(self.changes):
            self.changes[trainer.current_epoch - 1](pl_module)


def set_boost(module: Any) -> None:
    module.boost = 3.0


def move(module: Any) -> None:
    module.boost = 5.0


def remove(module: Any) -> None:
    del module.boost


def register(module: Any) -> None:
    module.register_buffer("boost", torch.full((), 3.0, device=module.device))


def register_parameter(module: Any) -> None:
    boost = torch.full((), 3.0, device=module.device)
    module.boost = nn.Parameter(boost, requires_grad=False)


class Holding(Net):
    """An attribute that was None and goes."""

    def __init__(self) -> None:
        super().__init__()
        self.boost: Any = None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        factor = getattr(self, "boost", 3.0)
        return self.loss(batch) * (1.0 if factor is None else factor)


class Computing(Net):
    """An attribute that a property misses."""

    @property
    def boost(self) -> Any:
        return self.wanted

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) * getattr(self, "boost", 1.0)


def changed(module: Any, *changes: Callable[[Any], object], **expected: Any) -> Program:
    """A program that something changes at the beginning of the second epoch, and of each later."""
    expected = {"graphs": 1 + len(changes), "resumes": False, **expected}
    return row(
        module, callbacks=lambda: [Change(*changes)], validation=0, max_epochs=len(changes) + 1,
        **expected,
    )  # fmt: skip


def inside(module: Any) -> None:
    set_boost(module.net)


APPEARS, APPEARS_INSIDE = ("self.boost: absent -> 3.0",), ("self.net.boost: absent -> 3.0",)
ROWS = {
    **{
        look.__name__: changed(looking(look), set_boost, changes=APPEARS)
        for look in (by_hasattr, by_default, by_exception)
    },
    **{
        f"inside, {look.__name__}": changed(looking_inside(look), inside, changes=APPEARS_INSIDE)
        for look in (by_hasattr, by_default, by_exception)
    },
    "of a graphed submodule": changed(
        looking_inside(by_default), inside, capture=named("net"), changes=APPEARS_INSIDE
    ),
    "comes, moves and goes": changed(  # what was known comes back
        looking(by_default), set_boost, move, remove, set_boost, graphs=3
    ),
    "was None": changed(Holding, remove),
    "of the class": changed(
        lambda: looking(by_default)(), lambda module: set_boost(type(module)), changes=APPEARS
    ),
    "a buffer": changed(looking(by_default), register),
    "a parameter": changed(looking(by_default), register_parameter),
    "of a property": changed(
        Computing, lambda m: setattr(m, "wanted", 3.0), changes=("self.wanted: absent -> 3.0",)
    ),
}


class TestAbsent(Promises):
    rows = ROWS
