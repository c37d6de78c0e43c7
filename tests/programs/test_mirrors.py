"""Numbers in buffers that a step reads on the host and advances itself, as queues have them."""

from __future__ import annotations

import random
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from tests.programs.table import Promises, stepping, table
from tests.training.fits import Net


class Queue(Net):
    """As MoCo: a queue of keys, and where the next ones go."""

    size = 64

    def __init__(self) -> None:
        super().__init__()
        self.net[3] = nn.Identity()
        self.register_buffer("queue", torch.randn(16, self.size))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))
        self.register_buffer("ready", torch.tensor(False))

    def against(self, batch: Any) -> Tensor:
        """A loss of the batch against the queue."""
        hidden = self.net[0](batch["x"])
        return self.loss(batch) + (hidden @ self.queue.clone().detach()).float().logsumexp(1).mean()


def of_moco(self: Any, batch: Any, batch_idx: int) -> Tensor:
    loss: Tensor = self.against(batch)
    with torch.no_grad():
        keys = self.net[0](batch["x"])
        pointer = int(self.pointer)
        assert self.size % len(keys) == 0
        self.queue[:, pointer : pointer + len(keys)] = keys.T
        pointer = (pointer + len(keys)) % self.size
        self.pointer[0] = pointer
    return loss


def of_lightly(self: Any, batch: Any, batch_idx: int) -> Tensor:
    """As its memory bank, which begins again where a batch does not fit."""
    loss: Tensor = self.against(batch)
    with torch.no_grad():
        keys, size = self.net[0](batch["x"]), self.size
        pointer = int(self.pointer)
        if pointer + len(keys) >= size:
            self.queue[:, pointer:] = keys.T[:, : size - pointer].detach()
            self.pointer.zero_()
        else:
            self.queue[:, pointer : pointer + len(keys)] = keys.T.detach()
            self.pointer[0] = pointer + len(keys)
    return loss


def of_an_item(self: Any, batch: Any, batch_idx: int) -> Tensor:
    """Its pointer is added to, and logged."""
    loss: Tensor = self.loss(batch) * self.queue[:, : self.pointer.item() % 2 + 4].square().mean()
    self.log("pointer", float(self.pointer.item()))
    self.pointer += 1
    self.pointer.remainder_(3)
    return loss


def of_a_flag(self: Any, batch: Any, batch_idx: int) -> Tensor:
    """As layers that are initialized by their first batch."""
    if not self.ready:
        self.queue.copy_(self.net[0](batch["x"]).detach().T.repeat(1, 8))
        self.ready.fill_(True)
    return self.against(batch)  # type: ignore[no-any-return]


class Reset(Queue):
    """Code around the step writes the number, and the state is what a step has left."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx % 4 == 3:
            self.pointer.fill_(8)

    training_step = of_moco
    body = of_moco


class Held(Queue):
    """A queue whose next place is an attribute, and a history of losses."""

    def __init__(self) -> None:
        super().__init__()
        self.place = self.count = 0
        self.is_filled = False
        self.register_buffer("history", torch.zeros(4, 3, 5))


def of_an_attribute(self: Any, batch: Any, batch_idx: int) -> Tensor:
    loss: Tensor = self.against(batch)
    keys = self.net[0](batch["x"]).detach()
    self.queue[:, self.place : self.place + len(keys)] = keys.T
    self.place = (self.place + len(keys)) % self.size
    return loss


def of_a_range(self: Any, batch: Any, batch_idx: int) -> Tensor:
    """As cross-batch memory: indices that begin where the last batch has ended."""
    loss: Tensor = self.against(batch)
    keys = self.net[0](batch["x"]).detach()
    places = torch.arange(self.place, self.place + len(keys), device=keys.device) % self.size
    self.queue[:, places] = keys.T
    self.places = places
    self.place = (self.place + len(keys)) % self.size
    if not self.is_filled and self.place == 0:
        self.is_filled = True
    return loss


def of_a_history(self: Any, batch: Any, batch_idx: int) -> Tensor:
    """Single entries and rows of a table, of any number of dimensions."""
    loss: Tensor = self.loss(batch)
    self.history[self.count % 4, 1, batch_idx % 5] = loss.detach()
    self.history[2, :, self.count % 5] = self.count
    self.history[-1 - self.count % 4, :2] = 0.5
    self.count += 1
    row = self.history[:, self.count % 3]
    return loss * (1 + row.mean() + self.history[self.count % 4, 0, 1:].sum())


def of_a_crop(self: Any, batch: Any, batch_idx: int) -> Tensor:
    """As augmentation does it, with a start that is drawn on the host."""
    x, start = batch["x"].clone(), random.randint(0, 60)
    loss: Tensor = self.loss({**batch, "x": x + self.queue.T[start : start + 4].mean()})
    column = numpy.random.randint(8)
    x[:, column : column + 1] = 0.0
    return loss + self.net(x).square().mean()


ALSO = "cut; accumulated; verified; bf16"
ROWS = {
    **stepping(Queue, of_moco, graphs=range(1, 3), also=ALSO),
    **stepping(Queue, of_lightly, of_a_flag, of_an_item, also=ALSO),
    **stepping(Held, of_an_attribute, of_a_range, of_a_history, of_a_crop, graphs=range(1, 4)),
    **table(Reset),
}


class TestMirrors(Promises):
    rows = ROWS
