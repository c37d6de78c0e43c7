"""Signals and exceptions in captured functions, and in the loop that a fit has between replays.

| at / what              | exception | SIGINT | SIGTERM |
| ---------------------- | --------- | ------ | ------- |
| function: warm-up      | yes       | yes    | yes     |
| function: capture      | yes       | yes    | yes     |
| function: verification | yes       | yes    | yes     |
| function: at replay    | yes       | yes    | yes     |
| fit: next batch        | yes       | yes    | yes     |
| fit: logger            | yes       | yes    | yes     |

A captured function goes on where its loop does: with the next call, which is what it is in a loop
that was interrupted at the same call. Signals in Lightning's hooks: ``test_interruptions.py``.
"""

from __future__ import annotations

import copy
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from tests.failures.support import STEPS, Trip, Tripwire, assert_nothing_lost, run_again
from tests.failures.test_any_line import Interruption
from tests.failures.test_interruptions import ENDS, terminate
from tests.loops.test_training import adamw, training
from tests.loops.twice import Lab, assert_same, twice
from tests.training.fits import Fit, Table, batches, compare, prepare


class Terminated(BaseException):
    """What a program makes of SIGTERM."""


def _terminated(*_: object) -> None:
    raise Terminated


def _net(lab: Lab, trip: Trip) -> nn.Module:
    parts = [nn.Linear(8, 16), Tripwire(trip, "forward"), nn.GELU(), nn.Dropout(0.25)]
    return nn.Sequential(*parts, nn.Linear(16, 3)).to(lab.device)


KINDS = {"exception": ZeroDivisionError, "SIGINT": KeyboardInterrupt, "SIGTERM": Terminated}


def divide_by_zero() -> None:
    raise ZeroDivisionError


ACTIONS: dict[str, Callable[[], None]] = {
    "exception": divide_by_zero,
    "SIGINT": ENDS["SIGINT"][0],
    "SIGTERM": terminate,
}
# Call of the code in the eager loop, and in the captured one; what only a capture raises is refused
PHASES = {"warm-up": (2, 2), "capture": (6, 6), "verification": (6, 7)}
CELLS = [
    (phase, end) for phase in PHASES for end in KINDS if (phase, end) != ("capture", "exception")
]


@pytest.mark.parametrize(("phase", "end"), CELLS)
def test_in_a_captured_function(backend: str, device: torch.device, phase: str, end: str) -> None:
    signal.signal(signal.SIGTERM, _terminated)

    def loop(lab: Lab) -> Any:
        at = PHASES[phase][lab.options is not None]
        model = _net(lab, Trip(at, ACTIONS[end]))
        step = lab.capture(*_training(model))
        losses = []
        for batch in lab.batches(16):
            try:
                losses.append(step(batch))
            except KINDS[end]:
                losses.append(None)
        return losses

    assert twice(loop, backend, device).replayed > 5


def _training(model: nn.Module) -> tuple[Callable[[Any], Any], nn.Module, torch.optim.Optimizer]:
    optimizer = adamw(model)
    return training(model, optimizer, Tensor.detach), model, optimizer


@pytest.mark.usefixtures("tracing_as_before")
@pytest.mark.parametrize(
    ("calls", "line"),
    [(5, 10), (5, 300), (5, 1500), (5, 4000), (9, 10), (9, 40), (9, 70), (9, 100)],
)
def test_calls_go_on_from_where_an_interrupt_has_left_them(
    backend: str, device: torch.device, calls: int, line: int
) -> None:
    """Between any two lines of a capture and its verification, or of replays."""
    lab, interruption = Lab(backend, device, {}), Interruption(line)
    train_step, model, optimizer = _training(lab.net())
    step = lab.capture(train_step, model, optimizer)
    batches = [*lab.batches(16)]
    for batch in batches[:calls]:
        step(batch)
    interruption.armed = True
    sys.settrace(interruption)
    with pytest.raises(KeyboardInterrupt):
        [step(batch) for batch in batches * 9]
    sys.settrace(None)
    state = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
    drawn = torch.get_rng_state(), backend == "cuda" and torch.cuda.get_rng_state(device)
    losses = [step(batch) for batch in batches]

    eagerly, other, stepped = _training(Lab(backend, device).net())
    other.load_state_dict(state[0])
    stepped.load_state_dict(state[1])
    torch.set_rng_state(drawn[0])
    if backend == "cuda":
        torch.cuda.set_rng_state(drawn[1], device)
    assert_same([eagerly(batch) for batch in batches], losses)
    assert_same(
        [other.state_dict(), stepped.state_dict()], [model.state_dict(), optimizer.state_dict()]
    )
    assert step.report.replayed > 10


class Taken(IterableDataset[Any]):
    """Batches that a fit takes, with a trip at one of them."""

    def __init__(self, trip: Trip) -> None:
        self.trip = trip

    def __iter__(self) -> Iterator[Any]:
        for batch in batches(STEPS):
            self.trip.call()
            yield batch


class Breaking(Table):
    """A logger with a trip."""

    trip: Trip

    def log_metrics(self, metrics: Any, step: Any = None) -> None:
        self.trip.call()
        super().log_metrics(metrics, step)


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("place", ["next batch", "logger"])
def test_between_replays(backend: str, tmp_path: Path, place: str, end: str) -> None:
    action, kind, match = ENDS[end]

    def fit(*, graphs: bool) -> Fit:
        logger = Breaking(str(tmp_path / str(graphs)), name="logs")
        logger.trip = Trip(10 if place == "logger" else 0, action)
        taken = Taken(Trip(10 if place == "next batch" else 0, action))
        data = DataLoader(taken, batch_size=None)
        return prepare(backend, tmp_path, graphs, validation=0, data=lambda: data, logger=logger)

    eager, captured = fit(graphs=False), fit(graphs=True)
    for one in (eager, captured):
        with pytest.raises(kind, match=match):
            one.run()
    assert captured.statistics.replayed > 0
    assert_nothing_lost(eager, captured)
    run_again(eager, captured)
    compare(eager, captured)
