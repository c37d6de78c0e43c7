"""Steps that ask the device which way to go on, where the way is no choice of values."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tests.programs.table import Promises, stepping
from tests.training.fits import Fit, Net, batches


class Forking(Net):
    """Has state that a forward pass moves: statistics, a counter, draws of the device."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.seen: list[Any] = []

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
    Forking, skips, goes_both_ways, several, uses_numbers,
    also="verified; cut; accumulated; bf16; unverified", max_epochs=3, data=lambda: batches(8),
    check=tells_its_waits,
) | stepping(
    Forking, skips_some, also="verified; cut; accumulated", said=None, found=None, max_epochs=3,
    data=lambda: batches(8), replayed=2,
)  # fmt: skip


class TestForks(Promises):
    rows = ROWS
