"""Steps that begin with work on their batch which no graph can hold: it runs in every replay."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_graphs.policy.worth import MemoryBudget
from tests.programs.table import Promises, assert_as_expected, run, stepping, table
from tests.programs.test_draws import LEFT
from tests.training.fits import Fit, Net

Batch = dict[str, Tensor]

# ------------------------------------------------------------------ windows, as in forecasting


class Windows(Net):
    """Filters by value, draws a fixed number of windows, and normalizes them in a module."""

    def __init__(self) -> None:
        super().__init__()
        self.scaler = Scaler()
        self.seen: list[float] = []

    def windows(self, batch: Batch) -> Batch:
        condition = batch["x"].sum(1) > -2.0
        x, y = batch["x"][condition], batch["y"][condition]
        if condition.sum() == 0:
            raise RuntimeError("no window is available")
        count = len(x)
        chosen = np.random.choice(count, size=6, replace=count < 6)
        return {"x": self.scaler(x[chosen]), "y": y[chosen]}

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        windows = self.windows(batch)
        windows["x"][:, 0] = 0.0
        logits = self.net(windows["x"]) * self.scaler.scale
        loss = F.cross_entropy(logits, windows["y"])
        self.log("loss", loss, on_epoch=True)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(float(self.scaler.scale))


class Scaler(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        self.shift, self.scale = x.mean(), 1.0 + x.std()
        return (x - self.shift) / self.scale


class InAFunction(Windows):
    """The code of all stages, and what leaves its head, is in a function that the step calls."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = self.shared(batch, "train")
        self.log("size", float(len(batch["y"])))
        return loss

    def shared(self, batch: Batch, stage: str) -> Tensor:
        windows = self.windows(batch)
        loss = F.cross_entropy(self.net(windows["x"]), windows["y"])
        self.log(f"{stage}_loss", loss)
        return loss


class InAModule(Net):
    """The head ends inside of a module that the step calls; the step goes on with its batch."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Cropping(self.net)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        logits = self.model(batch["x"])
        loss = F.cross_entropy(logits, batch["y"])
        self.log("loss", loss)
        return loss


class Cropping(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        first, count = (torch.rand(2) * 4).long().tolist()
        x = torch.cat([x[:, first:], x[:, :first]], 1)
        x = x.masked_fill(torch.arange(8, device=x.device) < count, 0.0)
        return self.net(x)


# ------------------------------------------------------------------ other heads


def asserts(self: Any, batch: Batch, batch_idx: int) -> Tensor:
    assert (batch["x"].abs() < 100.0).all()
    self.log("mean", batch["x"].mean())
    with torch.no_grad():
        x = (batch["x"] - batch["x"].mean().item()) / batch["x"].std().item()
    if self.training:
        x = x + 0.1 * torch.randn_like(x)
    return F.cross_entropy(self.net(x), batch["y"])


def counts(self: Any, batch: Batch, batch_idx: int) -> Tensor:
    """A number of the head is used behind it."""
    kept = batch["x"][:, 0] > -1.0
    count = int(kept.sum())
    self.steps = getattr(self, "steps", 0) + 1
    losses = F.cross_entropy(self.net(batch["x"]), batch["y"], reduction="none")
    if batch_idx % 7 == 3:
        self.log("seventh", losses.mean())
    self.log("count", float(count))
    return (losses * kept).sum() / max(count, 1)


def by_an_operator(self: Any, batch: Batch, batch_idx: int) -> Tensor:
    """No module is called, but a parameter used."""
    rows = torch.nonzero(batch["x"][:, 0] > -3.0).flatten()
    rows = rows[np.random.permutation(len(rows))[:4]]
    x = batch["x"][rows] @ self.net[0].weight.t()
    return F.cross_entropy(self.net[4](x), batch["y"][rows])


def held_by_a_call(self: Any, batch: Batch, batch_idx: int) -> Tensor:
    """A call has read an argument already when the head ends inside of the next one."""
    y = batch["y"]
    return weighted(y, drawn_logits(self, batch["x"]))


def drawn_logits(self: Any, x: Tensor) -> Tensor:
    factor = random.choice([0.5, 1.0, 2.0])
    x = x * torch.tensor([factor for _ in range(8)], device=x.device)
    return self.net(x)


def weighted(y: Tensor, logits: Tensor) -> Tensor:
    return F.cross_entropy(logits, y) * 2.0


# ------------------------------------------------------------------ in other steps than training's


class Validated(Windows):
    """Draws windows in its validation as well, and counts what it has seen there."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[Any] = []

    def validation_step(self, batch: Batch, batch_idx: int) -> Tensor:
        windows = self.windows(batch)
        self.log("first", windows["x"][0, 0])
        loss = F.cross_entropy(self.net(windows["x"]) * self.scaler.scale, windows["y"])
        self.log("val", loss)
        self.outputs.append(loss)
        return loss

    def on_validation_epoch_end(self) -> None:
        self.seen.append(torch.stack(self.outputs).tolist())
        self.outputs.clear()


class ByHand(Windows):
    """Zeroes gradients ahead of its draws, and optimizes by its own code."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        windows = self.windows(batch)
        loss = F.cross_entropy(self.net(windows["x"]), windows["y"])
        self.manual_backward(loss)
        if batch_idx % 2:
            loss = loss * 2.0
        optimizer.step()
        self.log("loss", loss)


class Frozen(ByHand):
    """Freezes a part of it in each step, and accumulates gradients over two of them."""

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        windows = self.windows(batch)
        self.net[0].requires_grad_(False)
        loss = F.cross_entropy(self.net(windows["x"]), windows["y"])
        self.manual_backward(loss)
        self.net[0].requires_grad_(True)
        if batch_idx % 2:
            self.optimizers().step()
            self.optimizers().zero_grad(set_to_none=False)


class Keeping(ByHand):
    """Keeps the gradients of a step until the next one is over."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Any] = []

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen += [float(gradient.double().sum()) for gradient in self.kept]
        self.kept = [parameter.grad for parameter in self.parameters()]


def keeps_nothing(fit: Fit) -> bool:
    """No code keeps gradients: a snapshot for a step that may find no memory is none of it."""
    return not any("is kept" in reason for reason in fit.statistics.recaptures)


def replays_validations(fit: Fit) -> bool:
    found = fit.capture.report.evaluation["validation_step"]
    assert not found.fallbacks, found.fallbacks
    return found.replayed >= 8


# ------------------------------------------------------------------ no graph begins there


def inside_of_try(self: Any, batch: Batch, batch_idx: int) -> Tensor:
    try:
        factor = 2.0 if batch["x"].mean().tolist() > 0.0 else 1.0  # read
        return self.loss(batch) * factor
    finally:
        self.tried = True


def computed_before(self: Any, batch: Batch, batch_idx: int) -> Tensor:
    return int(batch["x"].sum()) * drawn_logits(self, batch["x"]).mean()  # read


def behind(self: Any, batch: Batch, batch_idx: int) -> Tensor:
    loss = self.loss(batch)
    return loss if loss.tolist() > 1.0 else loss * 2.0  # read


SCALES = itertools.cycle([1.0, 0.5])
GENERATOR = np.random.default_rng(0)
BEFORE = GENERATOR.bit_generator.state
SEEN: list[int] = []


@contextlib.contextmanager
def begun_again() -> Iterator[None]:
    GENERATOR.bit_generator.state = BEFORE
    SEEN.clear()
    yield


def of_an_iterator(self: Any, batch: Batch, batch_idx: int) -> Tensor:
    """Each run takes one more value: a run that is undone, too."""
    rows = torch.nonzero(batch["x"][:, 0] > -3.0).flatten()
    return F.cross_entropy(self.net(batch["x"][rows] * next(SCALES)), batch["y"][rows])


def counts_outside(self: Any, batch: Batch, batch_idx: int) -> Tensor:
    rows = torch.nonzero(batch["x"][:, 0] > -3.0).flatten()
    SEEN.append(len(rows))
    return F.cross_entropy(self.net(batch["x"][rows]) * len(SEEN), batch["y"][rows])


def draws_outside(self: Any, batch: Batch, batch_idx: int) -> Tensor:
    rows = torch.nonzero(batch["x"][:, 0] > -3.0).flatten()
    rows = rows[GENERATOR.permutation(len(rows))[:4]]
    return F.cross_entropy(self.net(batch["x"][rows]), batch["y"][rows])


OUTSIDE = of_an_iterator, counts_outside, draws_outside
REFUSED = dict.fromkeys((inside_of_try, computed_before, behind), "A capture cannot")

MANY = "verified; unverified; bf16; accumulated; cut"
ROWS = (
    table(
        Validated, max_epochs=3, validation=6, replayed=9, check=replays_validations,
        also="verified; bf16", **LEFT,
    )
    | table(
        ByHand, Frozen, max_epochs=3, replayed=9, check=keeps_nothing, also="verified; bf16",
        **LEFT,
    )
    | table(Keeping, max_epochs=3, validation=0, **LEFT)
    | table(Windows, InAFunction, InAModule, also=MANY, max_epochs=3, replayed=9, **LEFT)
    | stepping(
        Net, asserts, counts, by_an_operator, held_by_a_call, max_epochs=3, also="verified",
        replayed=9, **LEFT,
    )
    | stepping(Net, each=REFUSED, **LEFT)
    | stepping(Net, each=dict.fromkeys(OUTSIDE, "A "), around=begun_again, found=None)
)  # fmt: skip
# A head shows in further steps that its numbers move
ROWS["counts"] = replace(ROWS["counts"], found=None)


class TestHeads(Promises):
    rows = ROWS


def test_gradients_that_are_put_back_are_kept_by_no_user(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU with room, where no step has a snapshot for the case that it finds no memory."""
    monkeypatch.setattr(MemoryBudget, "is_roomy", True)
    assert_as_expected(ROWS["Frozen"], run(ROWS["Frozen"], backend, tmp_path, True).fit)
