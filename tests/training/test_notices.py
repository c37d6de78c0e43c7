"""What is said of shapes that take turns, and of attributes that keep changing."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.training.fits import Net, compare, fit_twice
from tests.training.test_batches import lengths

INFO = logging.getLogger("lightning.pytorch.utilities.rank_zero")
Lines = Callable[[str], list[str]]


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Lines:
    """The lines of the log that contain a text."""
    caplog.set_level(logging.INFO, logger=INFO.name)
    return lambda part: [r.getMessage() for r in caplog.records if part in r.getMessage()]


def taking_turns(*sizes: int, max_graphs: int, **options: Any) -> dict[str, Any]:
    capture = {"max_graphs": max_graphs, "capture_after": 0, "warmup_steps": 1}
    return {"data": lengths(*sizes), "capture": {**capture, **options}}


@pytest.mark.filterwarnings("ignore:GraphCapture. steps run eagerly. max_graphs")
def test_shapes_that_take_turns_in_too_few_graphs(
    backend: str, tmp_path: Path, lines: Lines
) -> None:
    options = taking_turns(4, 8, 12, 16, 20, max_graphs=2)
    eager, captured = fit_twice(backend, tmp_path, max_epochs=8, **options)
    compare(eager, captured, replayed=False)
    statistics = captured.statistics
    assert statistics.captures == 2
    assert statistics.replayed >= 2 * 7
    assert len(lines("captured another graph")) == 1
    (reason,) = statistics.fallbacks
    assert reason.startswith("steps run eagerly: max_graphs=2 allows no more graphs; raise it")


def test_enough_graphs_for_all_shapes(backend: str, tmp_path: Path, lines: Lines) -> None:
    options = taking_turns(*range(4, 16), max_graphs=12)
    eager, captured = fit_twice(backend, tmp_path, max_epochs=16, **options)
    compare(eager, captured)
    assert captured.statistics.captures == 12
    assert len(captured.statistics.recaptures) == 11
    said = lines("captured another graph")
    assert len(said) == 8
    assert said[-1].endswith("further ones are listed in the report")


class Thawing(Net):
    """A parameter moves before every epoch, so that all graphs are dropped."""

    def on_train_epoch_start(self) -> None:
        self.net[0].weight.data = self.net[0].weight.data.clone()


@pytest.mark.parametrize(("steps", "captures"), [(2, 9), (30, 12)])
def test_graphs_that_are_dropped_must_have_been_repaid(
    backend: str, tmp_path: Path, steps: int, captures: int
) -> None:
    options = taking_turns(*[4] * steps, max_graphs=2, on_failure="eager")
    eager, captured = fit_twice(
        backend, tmp_path, module=Thawing, max_epochs=12, validation=0, **options
    )
    compare(eager, captured, replayed=captures == 12)
    assert captured.statistics.captures == captures


class Stepwise(Net):
    """Reads an attribute that moves on after every so many batches."""

    every = 1

    def on_train_batch_start(self, *_: Any) -> None:
        self.share = 0.5 + 2.0 ** -(
            1 + self.trainer.fit_loop.epoch_loop.total_batch_idx // type(self).every
        )

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) * self.share


def moving(every: int) -> type[Stepwise]:
    return type("Stepwise", (Stepwise,), {"every": every})


KEEPS_CHANGING = r"a step runs eagerly: (?s:.*)gets no graph(?s:.*)self\.share: \d\.\d+ -> 0\.\d+"


@pytest.mark.parametrize("every", [1, 4])
def test_an_attribute_that_keeps_changing_is_named_once(
    backend: str, tmp_path: Path, lines: Lines, every: int
) -> None:
    options: dict[str, Any] = {
        "module": moving(every),
        "data": lambda: lengths(*[8] * (50 if every == 1 else 120))(),
        "capture": {"warmup_steps": 1, "on_failure": "eager"},
    }
    with pytest.warns(UserWarning, match=KEEPS_CHANGING):
        eager, captured = fit_twice(backend, tmp_path, max_epochs=1, **options)
    compare(eager, captured, replayed=False)
    (reason,) = captured.statistics.fallbacks
    assert "keep the value in a buffer that a hook fills" in reason
    assert len(lines("captured another graph")) <= 8
    assert captured.statistics.captures == (1 if every == 1 else 10)


def test_an_attribute_that_moves_after_many_replays(backend: str, tmp_path: Path) -> None:
    capture = {"max_graphs": 1, "warmup_steps": 1, "capture_after": 0}
    eager, captured = fit_twice(
        backend, tmp_path, module=moving(21), data=lambda: lengths(*[4] * 100)(), max_epochs=1,
        capture=capture,
    )  # fmt: skip
    compare(eager, captured)
    assert captured.statistics.captures == 5
