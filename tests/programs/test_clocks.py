"""Clocks in a step: logged and stored again by every replay, and nothing else."""

from __future__ import annotations

import datetime
import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from time import thread_time
from typing import Any

import pytest
from torch import Tensor, nn

from tests.programs.table import Promises, stepping
from tests.training.fits import Net

Batch = dict[str, Tensor]


class Timer:
    def __enter__(self) -> Timer:
        self.began = time.thread_time()
        return self

    def __exit__(self, *_: object) -> None:
        self.elapsed = time.thread_time() - self.began


class Timed(Net):
    """What the steps below store."""

    def __init__(self) -> None:
        super().__init__()
        self.samples, self.began, self.average = 8, 0.5, 0.0
        self.times: list[float] = []
        self.later = Later()

    @property
    def seen(self) -> Any:
        return self.samples, self.began, self.average, isinstance(self.average, float), self.times


# ------------------------------------------------------------------ logged and stored


def rate(self: Any, batch: Batch, batch_idx: int) -> Tensor:
    began = time.thread_time()
    loss = self.loss(batch)
    self.log("rate", self.samples / (time.thread_time() - began), prog_bar=True)
    self.log_dict({"loss": loss, "ns": float(time.process_time_ns() / 1e9)})
    return loss


def since_the_last(self: Any, batch: Batch, batch_idx: int) -> Tensor:
    now = time.thread_time()
    self.log("between", now - self.began)
    self.began = now
    return self.loss(batch)


def averaged(self: Any, batch: Batch, batch_idx: int) -> Tensor:
    with Timer() as timer:
        loss = self.loss(batch)
    self.average = 0.9 * self.average + 0.1 * timer.elapsed
    self.log("average", self.average)
    self.log("steps", self.global_step / (timer.elapsed + self.global_step))
    self.times.append(time.thread_time())
    return loss


def counted(self: Any, batch: Batch, batch_idx: int) -> Tensor:
    """Without a clock: a number that is read and set."""
    self.log("steps", float(self.global_step - self.samples))
    self.samples = self.global_step
    return self.loss(batch)


@contextmanager
def ticking() -> Iterator[None]:
    """Clocks count how often they were read."""
    with pytest.MonkeyPatch.context() as patch:
        for name, kind in (("thread_time", float), ("process_time_ns", int)):
            ticks = itertools.count(1)
            patch.setattr(time, name, lambda t=ticks, kind=kind: kind(next(t) ** 2))
        yield


# ------------------------------------------------------------------ refused


class Later(nn.Module):
    """Part of one of the steps below."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * (1 + 0 * time.time())  # read


def as_a_weight(self: Any, batch: Batch, batch_idx: int) -> Tensor:
    began = time.monotonic()
    loss = self.loss(batch)
    return loss * (1 + 0 * (time.monotonic() - began) / 36000)  # read


def in_a_branch(self: Any, batch: Batch, batch_idx: int) -> Tensor:
    if time.perf_counter() - self.began < 0:  # read
        self.log("early", 1.0)
    return self.loss(batch)


def by_another_name(self: Any, batch: Batch, batch_idx: int) -> Tensor:
    return self.loss(batch) * (1 + 0 * thread_time())  # read


def by_default(self: Any, batch: Batch, batch_idx: int, clock: Any = time.time) -> Tensor:
    return self.loss(batch) * (1 + 0 * clock())  # read


def of_a_date(self: Any, batch: Batch, batch_idx: int) -> Tensor:
    return self.loss(batch) * (1 + 0 * datetime.datetime.now().second)  # read


def inside(self: Any, batch: Batch, batch_idx: int) -> Tensor:
    loss: Tensor = self.later(self.net(batch["x"])).square().mean()
    return loss


ROWS = stepping(
    Timed, rate, since_the_last, averaged, counted, below="", around=ticking, replayed=13
) | stepping(
    Timed, as_a_weight, in_a_branch, by_another_name, by_default, of_a_date, inside,
    said="A graph would freeze a clock", max_epochs=3,
)  # fmt: skip


class TestClocks(Promises):
    rows = ROWS
