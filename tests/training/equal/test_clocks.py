"""Clocks in a step: logged and stored anew by every replay, and nothing else."""

from __future__ import annotations

import datetime
import itertools
import time
from pathlib import Path
from time import thread_time
from typing import Any

import pytest
from torch import Tensor, nn

from tests.training.fits import Fit, Net, compare, prepare

pytestmark = pytest.mark.filterwarnings("ignore:GraphCapture")

Batch = dict[str, Tensor]


class Timer:
    def __enter__(self) -> Timer:
        self.began = time.thread_time()
        return self

    def __exit__(self, *_: object) -> None:
        self.elapsed = time.thread_time() - self.began


def net(step: Any) -> type[Net]:
    class Stepping(Net):
        training_step = step

        def __init__(self) -> None:
            super().__init__()
            self.samples, self.began, self.average = 8, 0.5, 0.0
            self.times: list[float] = []
            self.later = Later()

    return Stepping


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


def _fit(captured: bool, patch: pytest.MonkeyPatch, *given: Any, **options: Any) -> Fit:
    """With clocks that count how often they were read."""
    for name, kind in (("thread_time", float), ("process_time_ns", int)):
        ticks = itertools.count(1)
        patch.setattr(time, name, lambda t=ticks, kind=kind: kind(next(t) ** 2))
    return prepare(*given, captured, **options).run()


@pytest.mark.parametrize("scope", ["step", "modules"])
@pytest.mark.parametrize("step", [rate, since_the_last, averaged, counted])
def test_a_clock_is_read_as_often_as_in_eager_steps(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: Any, scope: str
) -> None:
    given, options = (monkeypatch, backend, tmp_path), {"module": net(step)}
    eager = _fit(False, *given, **options)
    captured = _fit(True, *given, **options, capture={"scope": scope})
    compare(eager, captured)
    assert captured.statistics.replayed > 12
    for name in ("samples", "began", "average", "times"):
        assert getattr(captured.module, name) == getattr(eager.module, name)
        assert type(captured.module.average) is float


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


REFUSED = [as_a_weight, in_a_branch, by_another_name, by_default, of_a_date, inside]


@pytest.mark.parametrize("scope", ["auto", "modules"])
@pytest.mark.parametrize("step", REFUSED)
def test_a_clock_in_the_arithmetic_of_a_step(
    backend: str, tmp_path: Path, step: Any, scope: str
) -> None:
    options: dict[str, Any] = {"module": net(step), "max_epochs": 3}
    eager = prepare(backend, tmp_path, False, **options).run()
    capture = {"scope": scope, "on_failure": "eager"}
    captured = prepare(backend, tmp_path, True, **options, capture=capture).run()
    compare(eager, captured, replayed=False)
    assert captured.statistics.replayed > 12
    said = captured.statistics.fallbacks
    if scope == "auto" or step is inside:
        assert "A graph would freeze a clock" in said[0]
        assert "test_clocks.py" in said[0]
        assert "# read" in said[0]
    else:
        assert said == []
    watched = prepare(backend, tmp_path, True, **options, capture={"diagnose": True}).run()
    (row,) = watched.capture.report.diagnosis.obstacles
    assert (row.rule, row.effect) == ("A graph would freeze a clock.", "eager step")
    assert row.source.endswith("# read")
