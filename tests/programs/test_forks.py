"""Steps that ask the device which way to go on, where the way is no choice of values."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.programs.table import Promises, stepping, table
from tests.programs.test_draws import LEFT
from tests.training.fits import Fit, Net, batches


class Forking(Net):
    """Has state that a forward pass moves: statistics, a counter, draws of the device."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.seen: list[Any] = []
        self.clipped = 0

    def loss(self, batch: Any) -> Tensor:
        self.count += 1
        return super().loss(batch)


def skips(self: Any, batch: Any, batch_idx: int) -> Any:
    """No step of the fit is skipped."""
    loss = self.loss(batch)
    if not torch.isfinite(loss):
        self.log("skipped", 1.0)
        return None
    self.log("loss", loss)
    return loss


def skips_some(self: Any, batch: Any, batch_idx: int) -> Any:
    loss = self.loss(batch)
    if loss > 1.1:
        return None
    self.log("loss", loss, on_epoch=True)
    return loss


def goes_both_ways(self: Any, batch: Any, batch_idx: int) -> Any:
    """What is read is a number; each way has a graph."""
    loss = self.loss(batch)
    if loss.item() * 2 > 2.6:
        self.seen.append(batch_idx)
        self.log("penalty", 0.01)  # constants that branches log in turn
        loss = loss + self.net[0].weight.square().sum() * 0.01
    else:
        self.log("penalty", 0.0)
    return loss


def tells_on_its_way(self: Any, batch: Any, batch_idx: int) -> Any:
    """What one way alone counts, logs and shows."""
    loss = self.loss(batch)
    if loss.item() > 1.1:
        self.clipped += 1
        self.log("clipped", float(self.clipped))
        self.log("large", loss.item() / 2, on_epoch=True)
        print(f"{loss.item():.4f} at {batch_idx}")
        loss = loss * 0.5
    else:
        self.log("small", loss.item())
    self.seen.append(self.clipped)
    return loss


def asks_its_teacher(self: Any, batch: Any, batch_idx: int) -> Any:
    """What decides is made in inference mode, where autograd counts no writes."""
    with torch.inference_mode():
        goal = self.loss(batch)
        if goal > 1.1:
            goal.mul_(0.5)
            self.log("large", goal.item())
    return self.loss(batch) * goal.clone()


def several(self: Any, batch: Any, batch_idx: int) -> Any:
    loss, largest = self.loss(batch), batch["x"].amax()
    total = loss
    while total < 3.0:
        total = total + loss
    if bool(largest > 1e9) or torch.equal(largest, loss):
        self.seen.append("never")
        return None
    return total


def uses_numbers(self: Any, batch: Any, batch_idx: int) -> Any:
    """What is read is compared, logged, returned, and a part of the loss."""
    loss = self.loss(batch)
    value, count = float(loss.detach()), int((batch["x"] * self.net[0].weight.mean() > 0).sum())
    if math.isnan(value) or value / 3 + self.trainer.global_step > 1e3:  # of the host
        return None
    if count > 1000:
        loss = loss * 2
    self.log("value", value, on_step=True, on_epoch=True, prog_bar=True)
    return {"loss": loss / loss.item() + loss * value * 0.5, "count": count + 1}


def tells_its_waits(fit: Fit) -> bool:
    lines = [line for record in fit.capture.report.graphs for line in record.waits]
    return bool(lines) and all(f"{__file__}:" in line for line in lines)


ROWS = stepping(
    Forking, skips, goes_both_ways, tells_on_its_way, asks_its_teacher, several, uses_numbers,
    also="verified; cut; accumulated; bf16; unverified", max_epochs=3, data=lambda: batches(8),
    check=tells_its_waits,
) | stepping(
    Forking, skips_some, also="verified; cut; accumulated", said=None, found=None, max_epochs=3,
    data=lambda: batches(8), replayed=2,
)  # fmt: skip


# ------------------------------------------------------------------ behind a backward pass


class ByHand(Forking):
    """Optimizes by its own code, with an optimizer that has state."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.critic = torch.nn.Linear(3, 1)

    def configure_optimizers(self) -> Any:
        adam = partial(torch.optim.Adam, lr=1e-2, fused=True)
        return adam(self.net.parameters()), adam(self.critic.parameters())

    def backward_of(self, loss: Tensor) -> torch.optim.Optimizer:
        optimizer = self.optimizers()[0]
        optimizer.zero_grad()
        self.manual_backward(loss)
        return optimizer


def steps_if_finite(self: Any, batch: Any, batch_idx: int) -> None:
    optimizer = self.backward_of(self.loss(batch))
    norm = torch.nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
    if torch.isfinite(norm):
        optimizer.step()
    else:
        self.seen.append("never")
    self.log("norm", norm)


def steps_if_small(self: Any, batch: Any, batch_idx: int) -> None:
    """Gradients of several steps add up, and are zeroed where they are."""
    loss = self.loss(batch)
    self.manual_backward(loss)
    if loss.item() < 1.2:
        optimizer = self.optimizers()[0]
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    self.log("loss", loss)


def ends_its_epochs(self: Any, batch: Any, batch_idx: int) -> None:
    """Updates parameters and state of the optimizer ahead of the question."""
    before = self.net(batch["x"]).log_softmax(-1).detach()
    for _ in range(3):
        loss = self.loss(batch)
        optimizer = self.backward_of(loss)
        optimizer.step()
        moved = (self.net(batch["x"]).log_softmax(-1) - before).abs().mean()
        if moved > 0.02:
            break
    self.log("moved", moved)


def plays(self: Any, batch: Any, batch_idx: int) -> None:
    _, second = self.optimizers()
    judged = self.critic(self.net(batch["x"]).detach()).sigmoid().mean()
    second.zero_grad()
    self.manual_backward(judged)
    if judged.item() > 0.45:
        second.step()
    loss = self.loss(batch) - self.critic(self.net(batch["x"])).mean() * 0.1
    self.backward_of(loss).step()
    self.log_dict({"loss": loss, "judged": judged})


def looks_at_each(self: Any, batch: Any, batch_idx: int) -> None:
    """Asks about each parameter, as published code does that perturbs them."""
    optimizer = self.backward_of(self.loss(batch))
    for parameter in self.net.parameters():
        norm = parameter.grad.norm()
        if norm != 0 and not torch.isnan(norm):
            parameter.data.add_(0.01 * parameter.grad / norm)
    optimizer.step()


ROWS |= stepping(
    ByHand, steps_if_finite, ends_its_epochs, plays, looks_at_each, steps_if_small,
    also="verified; unverified", said=None, found=None, max_epochs=3, data=lambda: batches(8),
    replayed=4, check=tells_its_waits,
)  # fmt: skip


class Refused(Net):
    """Goes a way in each step that no graph can hold, behind a head."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        rows = batch["x"].sum(1) > -2.0
        x, y = batch["x"][rows], batch["y"][rows]
        chosen = np.random.choice(len(x), size=4)
        loss = self.loss({"x": x[chosen], "y": y[chosen]})
        is_positive = (loss > 0.0).item()
        if is_positive:
            loss = loss * self.net[0].weight.detach().unique().numel()  # read
        return loss


ROWS |= table(
    Refused, said="A capture cannot contain an .*unique", found=None,  # CUDA says it by itself
    max_epochs=3, data=lambda: batches(12), **LEFT,
)  # fmt: skip


class RefusedOneWay(Forking):
    """One of the ways logs a number that captures cannot tell from one that moves."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        if loss > 1.1:
            self.clipped += 1
        else:
            self.clipped = 0
        self.log("in a row", float(self.clipped))  # read
        return loss


ROWS |= table(
    RefusedOneWay, said="'in a row', ...\\) logged different numbers", replayed=1, found=None,
    max_epochs=3, data=lambda: batches(12), **LEFT,
)  # fmt: skip


class Guarded(Net):
    """Checks all that it makes, and a handler acts on whatever fails."""

    def __init__(self) -> None:
        super().__init__()
        self.failed: list[str] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        try:
            loss = self.loss(batch)
            for part in [loss, *self.net(batch["x"])[:, :2].reshape(-1)]:
                if not torch.isfinite(part):
                    raise ValueError(f"{part} is not finite")
            assert loss < 1e9
            self.log("loss", float(loss.detach()))
            return loss
        except Exception as error:
            self.failed.append(str(error))
            self.trainer.callbacks.clear()
            raise


def runs_no_handler(fit: Fit) -> bool:
    return not fit.module.failed and fit.capture in fit.trainer.callbacks


ROWS |= table(
    Guarded, also="unverified; verified", found=None, graphs=1, check=runs_no_handler
)  # fmt: skip


class TestForks(Promises):
    rows = ROWS
