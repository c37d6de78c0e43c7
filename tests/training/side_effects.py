"""Steps that do something outside of their module, and what a fit of them has done there."""

from __future__ import annotations

import collections
import contextlib
import functools
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import rich
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import nn

from tests.training.fits import Net, TrainingContext

LOGGER = logging.getLogger("tests.side_effects")
FILE = Path()
STEPS: list[int] = []
COUNTS: dict[str, list[int]] = collections.defaultdict(list)
BOARD = SimpleNamespace(seen=set())
LAST: Any = None
counter = 0


class Printing(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        print("a step")
        return self.loss(batch)


class PrintingByLightning(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.print("a step")
        return self.loss(batch)


class PrintingInAHelper(Net):
    def loss(self, batch: Any) -> Any:
        for _ in range(2):
            print("a loss")
        return super().loss(batch)


class PrintingBehindAnExcept(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with contextlib.suppress(Exception):
            print("a step")
        return self.loss(batch)


class WritingToTheConsole(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        sys.stdout.write("a step\n")
        return self.loss(batch)


class PrintingByRich(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        rich.print("a step")
        return self.loss(batch)


class LoggingOfPython(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        LOGGER.warning("a step of %d samples", len(batch["x"]))
        return self.loss(batch)


class LoggingOnRankZero(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        rank_zero_info("a step")
        return self.loss(batch)


class Writing(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with open(FILE, "a", encoding="utf-8") as file:
            file.write("a step\n")
        return self.loss(batch)


class WritingAPath(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with FILE.open("a", encoding="utf-8") as file:
            file.write("a step\n")
        return self.loss(batch)


class LoggingToTheLogger(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.logger.log_metrics({"samples": len(batch["x"])})
        return self.loss(batch)


class LoggingToTheExperiment(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.logger.experiment.log_metrics({"samples": len(batch["x"])})
        return self.loss(batch)


class LoggingToTheTrainersLoggers(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        for logger in self.trainer.loggers:
            logger.log_metrics({"samples": len(batch["x"])})
        return self.loss(batch)


class LoggingToTheTrainersLogger(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.trainer.logger.log_metrics({"samples": len(batch["x"])})
        return self.loss(batch)


class Appending(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        STEPS.append(len(batch["x"]))
        return self.loss(batch)


class AppendingInAComprehension(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        [STEPS.append(size) for size in (1, 2)]
        return self.loss(batch)


def note(size: int) -> None:
    COUNTS["sizes"].append(size)


note.calls = 0


def noting(step: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(step)
    def noted(self: Any, batch: Any, batch_idx: int) -> Any:
        note(len(batch["x"]))
        return step(self, batch, batch_idx)

    return noted


class AppendingInADecorator(Net):
    @noting
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)


class CountingInAFunction(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        note.calls += 1
        return self.loss(batch)


class AddingToAnObject(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        BOARD.seen.add(f"step {len(BOARD.seen)}")
        return self.loss(batch)


class Counting(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        global counter
        counter += 1
        return self.loss(batch)


class Keeping(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        global LAST
        loss = self.loss(batch)
        LAST = loss.detach()
        return loss


class InASubmodule(Net):
    class Layer(nn.Linear):
        def forward(self, x: Any) -> Any:
            STEPS.append(len(x))
            return super().forward(x)

    def __init__(self) -> None:
        super().__init__()
        self.net[4] = self.Layer(16, 3)


class CountingInTheClass(Net):
    calls = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        type(self).calls += 1
        return self.loss(batch)


class CountingInTheNamedClass(Net):
    calls = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        CountingInTheNamedClass.calls += 1
        return self.loss(batch)


class AppendingToTheClass(Net):
    sizes: list[int] = []  # noqa: RUF012

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.sizes.append(len(batch["x"]))
        return self.loss(batch)


def enclosed() -> LightningModule:
    """A module whose step stores in variables of the function that made it."""
    calls = 0
    COUNTS["enclosed"] = sizes = []

    class Enclosed(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            nonlocal calls
            calls += 1
            sizes.append(calls)
            return self.loss(batch)

    return Enclosed()


REFUSED = [
    (Printing, 'print is used at .* in training_step: print\\("a step"\\)'),
    (PrintingByLightning, "self.print is used at .* in training_step"),
    (PrintingInAHelper, "print is used at .* in loss"),
    (PrintingBehindAnExcept, "print is used at .* in training_step"),
    (WritingToTheConsole, "sys.stdout.write is used at .* in training_step: sys"),
    (PrintingByRich, "rich.console.Console.print is used at .* in training_step: rich"),
    (LoggingOfPython, "a logger of Python is used at .* in training_step"),
    (LoggingOnRankZero, "a logger of Python is used at .* in training_step"),
    (Writing, "open is used at .* in training_step"),
    (WritingAPath, "open is used at .* in training_step"),
    (LoggingToTheLogger, "trainer.logger is used at .* in training_step: self.logger"),
    (LoggingToTheExperiment, "trainer.logger is used at .* in training_step: self.logger"),
    (LoggingToTheTrainersLoggers, "trainer.loggers is used at .* in training_step: for"),
    (LoggingToTheTrainersLogger, "trainer.logger is used at .* in training_step: self.trainer"),
    (Appending, "training_step changes STEPS, named at .* in training_step: STEPS.append"),
    (AppendingInAComprehension, "training_step changes STEPS"),
    (AppendingInADecorator, r"changes COUNTS\['sizes'\], named at .* in note: COUNTS"),
    (CountingInAFunction, "training_step changes note.calls, named at .* in training_step: note"),
    (AddingToAnObject, "changes BOARD.seen, named at .* in training_step: BOARD.seen.add"),
    (Counting, "training_step changes counter, named at .* in training_step: counter "),
    (Keeping, "training_step changes LAST, named at .* in training_step: LAST ="),
    (InASubmodule, "training_step changes STEPS, named at "),
    (CountingInTheClass, r"changes CountingInTheClass.calls, named at .*: type\(self\).calls"),
    (CountingInTheNamedClass, "changes CountingInTheNamedClass.calls, named at .*: Counting"),
    (AppendingToTheClass, "changes AppendingToTheClass.sizes, named at .*: self.sizes.app"),
    (enclosed, "changes calls, sizes, named at .* in training_step: calls "),
]


class Effects:
    """Everything that a fit has done outside of its module."""

    def __init__(self, capsys: Any, caplog: Any, root: Path) -> None:
        self._capsys, self._caplog, self._root = capsys, caplog, root

    def of(self, fit: TrainingContext, name: str) -> dict[str, Any]:
        """Run a fit, beginning from nothing, and take what it has left."""
        global FILE, LAST, counter
        FILE, LAST, counter = self._root / f"{name}.txt", None, 0
        STEPS.clear()
        COUNTS.pop("sizes", None)
        COUNTS.get("enclosed", []).clear()
        BOARD.seen = set()
        CountingInTheClass.calls = CountingInTheNamedClass.calls = note.calls = 0
        AppendingToTheClass.sizes.clear()
        self._caplog.clear()
        self._capsys.readouterr()
        fit.run()
        lines = self._capsys.readouterr().out.splitlines()
        texts = [record.getMessage() for record in self._caplog.records]
        return {
            "printed": [line for line in lines if line in ("a step", "a loss")],
            "logged": [text for text in texts if text.startswith("a step")],
            "written": FILE.read_text() if FILE.exists() else "",
            "rows": fit.csv,
            "stored": [
                [*STEPS], {k: [*v] for k, v in COUNTS.items()}, sorted(BOARD.seen), counter,
                note.calls, None if LAST is None else LAST.item(), CountingInTheClass.calls,
                CountingInTheNamedClass.calls, [*AppendingToTheClass.sizes],
            ],
        }  # fmt: skip


@contextlib.contextmanager
def effects_of_fits(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> Iterator[Effects]:
    """Take what fits do, with the loggers of Lightning set to show what they are given."""
    lightning = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    fabric = logging.getLogger("lightning.fabric.utilities.rank_zero")
    before = (lightning.level, fabric.level)
    for logger in (lightning, fabric):
        logger.setLevel(logging.INFO)
        logger.addHandler(caplog.handler)
    with caplog.at_level(logging.INFO):
        yield Effects(capsys, caplog, tmp_path)
    for logger, level in zip((lightning, fabric), before, strict=True):
        logger.setLevel(level)
        logger.removeHandler(caplog.handler)
    COUNTS.clear()
