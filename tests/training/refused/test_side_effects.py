"""What a step does outside of its module: refused while capturing, and then equal to eager."""

from __future__ import annotations

import builtins
import contextlib
import importlib
import io
import logging
import sys
import threading
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule

from lightning_graphs.lightning.trainer import TrainerWatch
from tests.programs import table
from tests.programs import test_effects as effects
from tests.programs.test_effects import LOGGER, STEPS, Appending, Counting, Keeping
from tests.training.fits import Net, batches, compare, fit_twice, prepare

LIBRARY = """
import logging, sys, warnings
from tests.training.fits import Net

calls = 0


def warn():
    global calls
    calls += 1
    logging.getLogger("library").warning("a library says %d", calls)
    print("a library prints")
    open(__file__).close()


class Base(Net):
    def training_step(self, batch, batch_idx):
        sys.stdout.write("a step\\n")
        return self.loss(batch)
"""


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A package as an installer would leave it."""
    root = tmp_path / "site-packages"
    root.mkdir()
    (root / "a_library.py").write_text(LIBRARY, encoding="utf-8")
    monkeypatch.syspath_prepend(root)
    yield importlib.import_module("a_library")
    del sys.modules["a_library"]


def test_libraries_may_print_and_log_on_their_own_account(
    backend: str, tmp_path: Path, library: Any
) -> None:
    class Using(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            library.warn()
            return super().training_step(batch, batch_idx)

    compare(*fit_twice(backend, tmp_path, module=Using))


def test_a_module_of_an_installed_package_is_its_authors_own(
    backend: str, tmp_path: Path, library: Any
) -> None:
    program = table.row(library.Base, **effects.NOTED)
    expected = table.run(program, backend, tmp_path, False)
    with table.quiet("sys.stdout.write is used at .*a_library.py"):
        table.assert_equal(expected, table.run(program, backend, tmp_path, True))


def test_what_is_stored_in_another_file_of_the_author(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_helpers.py").write_text("calls = 0\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    helpers = importlib.import_module("own_helpers")
    monkeypatch.setitem(globals(), "own_helpers", helpers)
    options: dict[str, Any] = {"module": CountingElsewhere, "capture": {"on_failure": "eager"}}
    eager = prepare(backend, tmp_path, False, **options).run()
    expected, helpers.calls = helpers.calls, 0
    captured = prepare(backend, tmp_path, True, **options)
    with pytest.warns(UserWarning, match="training_step changes own_helpers.calls, named at "):
        captured.run()
    del sys.modules["own_helpers"]
    assert helpers.calls == expected == 20
    compare(eager, captured, replayed=False)


class CountingElsewhere(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        own_helpers.calls += 1  # type: ignore[name-defined]  # noqa: F821
        return self.loss(batch)


def test_other_threads_may_print(
    backend: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the workers of a data loader do, at any time."""
    over = threading.Event()

    def work() -> None:
        while not over.wait(0.001):
            print("a worker")
            LOGGER.warning("a worker")

    class Waiting(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            time.sleep(0.01)  # captures, too, let the other thread go on here
            return super().training_step(batch, batch_idx)

    worker = threading.Thread(target=work)
    worker.start()
    try:
        compare(*fit_twice(backend, tmp_path, module=Waiting))
    finally:
        over.set()
        worker.join()
    assert "a worker" in capsys.readouterr().out


def test_what_runs_between_two_graphs_may_print(
    backend: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Clipping(Net):
        def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
            print("clipping")

    eager, captured = fit_twice(backend, tmp_path, module=Clipping)
    compare(eager, captured)
    printed = capsys.readouterr().out.splitlines()
    assert printed.count("clipping") == 2 * eager.trainer.global_step


def test_everything_is_put_back_after_an_exception(backend: str, tmp_path: Path) -> None:
    fit = prepare(backend, tmp_path, False, module=Counting)
    kind, known = type(fit.trainer), torch.ones(())
    originals = (
        builtins.print, builtins.open, io.open, logging.Logger.handle, LightningModule.print,
    )  # fmt: skip
    STEPS[:], effects.counter, effects.LAST = [1], 7, known
    batch = batches()[0]
    environment = TrainerWatch(fit.trainer, fit.module).environment()
    with contextlib.suppress(ZeroDivisionError), environment.refusing("training_step"):
        for step in (Counting.training_step, Keeping.training_step, Appending.training_step):
            step(fit.module, batch, 0)
        assert (effects.counter, STEPS) == (8, [1, 8])
        assert effects.LAST is not known
        assert builtins.print is not originals[0]
        raise ZeroDivisionError
    assert (effects.counter, STEPS) == (7, [1])
    assert effects.LAST is known
    assert type(fit.trainer) is kind
    assert originals == (
        builtins.print, builtins.open, io.open, logging.Logger.handle, LightningModule.print,
    )  # fmt: skip
    STEPS.clear()
    effects.counter, effects.LAST = 0, None


class Tracking(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        import wandb  # type: ignore[import-not-found]

        wandb.log({"samples": len(batch["x"])})
        return self.loss(batch)


def test_a_tracker_that_is_called_by_itself_is_called_behind_replays(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracker: Any = ModuleType("wandb")
    rows: list[dict[str, int]] = []
    tracker.log = rows.append
    monkeypatch.setitem(sys.modules, "wandb", tracker)
    found = []
    for graphs in (False, True):
        fit = prepare(backend, tmp_path, graphs, module=Tracking).run()
        found.append((fit, rows.copy()))
        rows.clear()
    (eager, expected), (captured, seen) = found
    compare(eager, captured)
    assert seen == expected
    assert len(expected) > 0
    assert tracker.log == rows.append
