"""Tensors that a step writes and that no module has in a table: attributes, dicts, globals."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_graphs.watch.user_code import CompiledCode
from tests.programs.table import Promises, row
from tests.training.fits import Net, named

RUNNING: dict[str, Tensor] = {}


class Average:
    """A running mean in an object of its own."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


class Averaging(nn.Module):
    """Keeps a running mean of what it sees, where ``place`` says, and divides by it."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.place = place
        self.norms = [nn.BatchNorm1d(8)]
        self.kept: list[Any] = []

    def mean(self) -> Tensor:
        """The running mean."""
        if not self.kept:
            value = torch.ones((), device=self.linear.weight.device)
            self.norms[0].to(value.device)
            RUNNING.clear()
            RUNNING["mean"] = value
            self.kept.append(value)
            if self.place == "dict":
                self.kept.append({"mean": value})
            elif self.place == "object":
                self.kept.append(Average(value))
            elif self.place == "attribute":
                self.value = value
        if self.place == "global":
            return RUNNING["mean"]
        if self.place == "dict":
            found: Tensor = self.kept[1]["mean"]
            return found
        if self.place == "object":
            held: Tensor = self.kept[1].value
            return held
        return self.value if self.place == "attribute" else self.kept[0]

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.linear(x)
        if self.place == "module in a list":
            return hidden + self.norms[0](hidden)
        mean = self.mean()
        mean.mul_(0.9).add_(0.1 * hidden.detach().abs().mean())
        return hidden / mean


class Averaged(Net):
    """A block with a running mean ahead of the network."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.block = Averaging(place)

    def on_train_start(self) -> None:
        self.block.mean()

    @property
    def seen(self) -> Any:
        return self.block.kept[0], dict(self.block.norms[0].named_buffers())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step({**batch, "x": self.block(batch["x"])}, batch_idx)


DRAWING = np.random.default_rng(0)


class Jittered(Net):
    """Draws from a generator of NumPy in a global variable."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step({**batch, "x": self.jitter(batch["x"])}, batch_idx)

    def jitter(self, x: Tensor) -> Tensor:
        return x + float(DRAWING.normal())


@contextmanager
def compiled() -> Iterator[None]:
    """Something was compiled: then a capture begins with a pass of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CompiledCode, "runs", True)
        yield


@contextmanager
def seeded() -> Iterator[None]:
    DRAWING.bit_generator.state = np.random.default_rng(7).bit_generator.state
    yield


ROWS = {
    place: row(
        partial(Averaged, place),
        modules=("block",),
        below="",
        validation=0,
        also="unverified; verified; modules, unverified; modules, verified",
    )
    for place in ("attribute", "list", "dict", "object", "global", "module in a list")
}
ROWS |= {
    f"{place}, compiled": row(
        partial(Averaged, place),
        capture=named("block", verify=False),
        around=compiled,
        validation=0,
    )
    for place in [*ROWS]
}
ROWS["Jittered"] = row(Jittered, said="draws from", also="unverified", around=seeded, validation=0)


class TestTensors(Promises):
    rows = ROWS
