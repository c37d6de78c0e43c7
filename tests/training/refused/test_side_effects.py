"""What a step does outside of its module: refused while capturing, and then equal to eager."""

from __future__ import annotations

import builtins
import contextlib
import functools
import importlib
import io
import logging
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn

from lightning_graphs.lightning.trainer import TrainerWatch
from tests.training import side_effects
from tests.training.fits import Net, batches, compare, fit_twice, prepare
from tests.training.side_effects import (
    LOGGER,
    REFUSED,
    STEPS,
    Appending,
    Counting,
    Effects,
    InASubmodule,
    Keeping,
    effects_of_fits,
)


@pytest.fixture
def effects(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> Iterator[Effects]:
    with effects_of_fits(capsys, caplog, tmp_path) as found:
        yield found


@pytest.mark.parametrize(
    ("module", "reason"), REFUSED, ids=lambda value: getattr(value, "__name__", "")
)
def test_refused_with_its_line_and_done_at_every_step(
    backend: str, tmp_path: Path, effects: Effects, module: Any, reason: str
) -> None:
    options: dict[str, Any] = {"module": module, "capture": {"on_failure": "eager"}}
    eager = prepare(backend, tmp_path, False, **options)
    expected = effects.of(eager, "eager")
    captured = prepare(backend, tmp_path, True, **options)
    with pytest.warns(UserWarning, match=f"a step runs eagerly: (?s:.*){reason}"):
        assert effects.of(captured, "captured") == expected
    compare(eager, captured, replayed=False)
    assert captured.statistics.replayed == 0


@pytest.mark.parametrize(
    ("module", "reason"),
    [case for case in REFUSED if case[0] is not InASubmodule],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_done_at_every_step_between_graphs_of_submodules(
    backend: str, tmp_path: Path, effects: Effects, module: Any, reason: str
) -> None:
    options: dict[str, Any] = {
        "module": module, "capture": {"scope": "auto", "on_failure": "eager"},
    }  # fmt: skip
    eager = prepare(backend, tmp_path, False, **options)
    expected = effects.of(eager, "eager")
    captured = prepare(backend, tmp_path, True, **options)
    with pytest.warns(
        UserWarning,
        match=f"cannot capture the whole step; capturing submodules instead: (?s:.*){reason}",
    ):
        assert effects.of(captured, "captured") == expected
    compare(eager, captured, replayed=False)
    assert captured.statistics.replayed > 0


LIBRARY = """
import logging, warnings
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
        print("a step")
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
    backend: str, tmp_path: Path, library: Any, effects: Effects
) -> None:
    options: dict[str, Any] = {"module": library.Base, "capture": {"on_failure": "eager"}}
    eager = prepare(backend, tmp_path, False, **options)
    expected = effects.of(eager, "eager")
    captured = prepare(backend, tmp_path, True, **options)
    with pytest.warns(UserWarning, match="print is used at .*a_library.py"):
        assert effects.of(captured, "captured") == expected
    compare(eager, captured, replayed=False)


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
    asked, done, over = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        while asked.wait() and not over.is_set():
            asked.clear()
            print("a worker")
            LOGGER.warning("a worker")
            done.set()

    class Waiting(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            done.clear()
            asked.set()
            done.wait(10)
            return super().training_step(batch, batch_idx)

    worker = threading.Thread(target=work)
    worker.start()
    try:
        compare(*fit_twice(backend, tmp_path, module=Waiting))
    finally:
        over.set()
        asked.set()
        worker.join()
    assert "a worker" in capsys.readouterr().out


class Quiet(Net):
    """Reads what the others change, asks for loggers that are not there, logs below the level."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        LOGGER.debug("not shown")
        if self.logger is not None and self.trainer.loggers:
            self.logger.log_metrics({"samples": 1.0})
        return super().training_step(batch, batch_idx) * (1.0 + len(STEPS) + side_effects.counter)


def test_what_has_no_effect_is_captured(backend: str, tmp_path: Path) -> None:
    compare(*fit_twice(backend, tmp_path, module=Quiet, logger=False))


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
    STEPS[:], side_effects.counter, side_effects.LAST = [1], 7, known
    batch = batches()[0]
    environment = TrainerWatch(fit.trainer, fit.module).environment()
    with contextlib.suppress(ZeroDivisionError), environment.refusing("training_step"):
        for step in (Counting.training_step, Keeping.training_step, Appending.training_step):
            step(fit.module, batch, 0)
        assert (side_effects.counter, STEPS) == (8, [1, 8])
        assert side_effects.LAST is not known
        assert builtins.print is not originals[0]
        raise ZeroDivisionError
    assert (side_effects.counter, STEPS) == (7, [1])
    assert side_effects.LAST is known
    assert type(fit.trainer) is kind
    assert originals == (
        builtins.print, builtins.open, io.open, logging.Logger.handle, LightningModule.print,
    )  # fmt: skip
    STEPS.clear()
    side_effects.counter, side_effects.LAST = 0, None


class Tracking(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        import wandb  # type: ignore[import-not-found]

        wandb.log({"samples": len(batch["x"])})
        return self.loss(batch)


def test_a_tracker_that_is_called_by_itself_is_refused(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracker: Any = ModuleType("wandb")
    rows: list[dict[str, int]] = []
    tracker.log = rows.append
    monkeypatch.setitem(sys.modules, "wandb", tracker)
    found = []
    for graphs in (False, True):
        fit = prepare(backend, tmp_path, graphs, module=Tracking, capture={"on_failure": "eager"})
        with pytest.warns(UserWarning, match="wandb") if graphs else contextlib.nullcontext():
            fit.run()
        found.append((fit, rows.copy()))
        rows.clear()
    (eager, expected), (captured, seen) = found
    compare(eager, captured, replayed=False)
    assert seen == expected
    assert len(expected) > 0
    assert any("wandb.log is used at" in line for line in captured.statistics.fallbacks)
    assert tracker.log == rows.append


@functools.lru_cache(maxsize=1)
def ramp(size: int, device: torch.device) -> torch.Tensor:
    return torch.linspace(0.5, 1.5, size, device=device)[:, None]


class Caching(Net):
    """Validation with another size empties the cache before steps are captured."""

    def loss(self, batch: Any) -> Any:
        return super().loss({**batch, "x": batch["x"] * ramp(len(batch["x"]), self.device)})

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        ramp(5, self.device)


class CachingAndRefused(Caching):
    """The capture fills the cache and is given up."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        return loss * (2.0 if loss.item() > 1.0 else 1.0)


class CachingLayer(nn.Linear):
    def forward(self, x: Any) -> Any:
        return super().forward(x * ramp(len(x), x.device))


class ReadingLayer(nn.Linear):
    def forward(self, x: Any) -> Any:
        return super().forward(x) * (2.0 if x.sum().item() > 0 else 1.0)


class CachingInSubmodules(Caching):
    """The capture of one submodule fills the cache, and that of the next one is refused."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(CachingLayer(8, 16), nn.ReLU(), ReadingLayer(16, 3))


@pytest.mark.parametrize(
    ("module", "scope"),
    [
        (Caching, "step"),
        (CachingAndRefused, "auto"),
        (CachingAndRefused, "step"),
        (CachingInSubmodules, "modules"),
    ],
)
@pytest.mark.filterwarnings("ignore:GraphCapture")
def test_a_cache_holds_no_memory_of_a_capture(
    backend: str, tmp_path: Path, module: Any, scope: str
) -> None:
    fits = []
    for graphs in (False, True):
        ramp.cache_clear()
        capture = {"scope": scope, "on_failure": "eager"}
        options: dict[str, Any] = {"module": module, "capture": capture, "max_epochs": 3}
        fits.append(prepare(backend, tmp_path, graphs, data=lambda: batches(6), **options).run())
    compare(*fits, replayed=False)
    assert (fits[1].statistics.replayed > 0) is ((module, scope) != (CachingAndRefused, "step"))


SCALE = 1.0
SETTINGS = {"weights": [1.0, 2.0]}
COUNT = 0


def scaled(loss: Any) -> Any:
    return loss * SCALE


class ReadingGlobals(Net):
    """A method and a function read what a hook changes twice; another hook counts every step."""

    def weighted(self, loss: Any) -> Any:
        return scaled(loss) * SETTINGS["weights"][1]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.weighted(self.loss(batch))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        global COUNT, SCALE
        COUNT += 1
        if COUNT == 12:
            SCALE = 3.0
        if COUNT == 16:
            SETTINGS["weights"][1] = 4.0


def test_globals_that_hooks_change_are_conditions(backend: str, tmp_path: Path) -> None:
    global COUNT, SCALE
    fits = []
    for graphs in (False, True):
        COUNT, SCALE, SETTINGS["weights"] = 0, 1.0, [1.0, 2.0]
        options: dict[str, Any] = {"module": ReadingGlobals, "capture": {"scope": "step"}}
        fits.append(prepare(backend, tmp_path, graphs, **options).run())
    compare(*fits)
    changes = fits[1].statistics.recaptures
    assert [change.partition(":")[0] for change in changes] == ["SCALE", "SETTINGS['weights'][1]"]


class BlockReadingGlobals(nn.Module):
    """A graphed submodule that reads a global, and one through a function."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Any) -> Any:
        return scaled(self.linear(x)) * SETTINGS["weights"][1]


class WithReadingBlock(ReadingGlobals):
    def __init__(self) -> None:
        super().__init__()
        self.block = BlockReadingGlobals()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss({**batch, "x": self.block(batch["x"])})


def test_globals_that_a_graphed_submodule_reads_are_conditions(
    backend: str, tmp_path: Path
) -> None:
    global COUNT, SCALE
    fits = []
    for graphs in (False, True):
        COUNT, SCALE, SETTINGS["weights"] = 0, 1.0, [1.0, 2.0]
        options: dict[str, Any] = {"module": WithReadingBlock}
        options["capture"] = {"scope": "modules", "modules": ["block"], "verify": False}
        fits.append(prepare(backend, tmp_path, graphs, **options).run())
    compare(*fits)
    changes = fits[1].statistics.recaptures
    assert [change.partition(":")[0] for change in changes] == ["SCALE", "SETTINGS['weights'][1]"]


def weighted(loss: Any) -> Any:
    return loss * weighted.weight


class ReadingAFunction(Net):
    """A hook changes an attribute of a function that the step calls."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return weighted(self.loss(batch))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        weighted.weight = 1.0 + (self.trainer.global_step >= 12)


def test_an_attribute_of_a_function_is_a_condition(backend: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"module": ReadingAFunction, "capture": {"scope": "step"}}
    _, captured = fits = [
        prepare(backend, tmp_path, graphs, **options).run() for graphs in (False, True)
    ]
    compare(*fits)
    assert captured.statistics.recaptures == ["weighted.weight: 1.0 -> 2.0"]


class Defaults:
    ratio = 1.0
    weights = [1.0]  # noqa: RUF012


class Settings(Defaults):
    """What a hook changes is the class's, or that of the class it is derived from."""

    scale = 1.0


SETTINGS_OBJECT = Settings()


class ReadingAClass(Net):
    scaled: Any = staticmethod(lambda loss: loss * Settings.scale)

    def change(self) -> None:
        Settings.scale = 2.0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.scaled(self.loss(batch))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.global_step == 12:
            self.change()


class ReadingABaseClass(ReadingAClass):
    scaled = staticmethod(lambda loss: loss * Settings.ratio)

    def change(self) -> None:
        Defaults.ratio = 2.0


class ReadingAListOfAClass(ReadingAClass):
    scaled = staticmethod(lambda loss: loss * Settings.weights[0])

    def change(self) -> None:
        Defaults.weights[0] = 2.0


class ReadingAnObject(ReadingAClass):
    scaled = staticmethod(lambda loss: loss * SETTINGS_OBJECT.scale)


class HoldingAnObject(ReadingAClass):
    def __init__(self) -> None:
        super().__init__()
        self.settings = Settings()

    def scaled(self, loss: Any) -> Any:
        return loss * self.settings.ratio

    def change(self) -> None:
        Defaults.ratio = 2.0


class HoldingAListOfTheClass(HoldingAnObject):
    def scaled(self, loss: Any) -> Any:
        return loss * self.settings.weights[0]

    def change(self) -> None:
        Settings.weights = [2.0]  # which hides that of the base class


class Slotted:
    """An object without a ``__dict__``, and the only one of its class."""

    __slots__ = ("scale",)
    only: Any = None

    def __new__(cls) -> Any:
        if cls.only is None:
            cls.only = super().__new__(cls)
            cls.only.scale = 1.0
        return cls.only

    def scaled(self, loss: Any) -> Any:
        return loss * self.scale * SCALE


class HoldingSlots(ReadingAClass):
    def __init__(self) -> None:
        super().__init__()
        self.slotted = Slotted()
        self.slotted.scale = 1.0

    def scaled(self, loss: Any) -> Any:
        return self.slotted.scaled(loss)

    def change(self) -> None:
        self.slotted.scale = 2.0


class HoldingAMethod(HoldingSlots):
    def __init__(self) -> None:
        super().__init__()
        self.scaled = self.slotted.scaled  # type: ignore[method-assign]


class ReadingGlobalsInAHelper(HoldingSlots):
    def change(self) -> None:
        global SCALE
        SCALE = 2.0


class OfItsOwnClass(ReadingAClass):
    ratio = 1.0

    def scaled(self, loss: Any) -> Any:
        return loss * type(self).ratio

    def change(self) -> None:
        type(self).ratio = 2.0


class Deep(ReadingAClass):
    def __init__(self) -> None:
        super().__init__()
        self.settings = {"loss": {"weights": {"ce": Settings()}}}
        self.settings["loss"]["weights"]["ce"].scale = 1.0

    def scaled(self, loss: Any) -> Any:
        return loss * self.settings["loss"]["weights"]["ce"].scale

    def change(self) -> None:
        self.settings["loss"]["weights"]["ce"].scale = 2.0


def defaulting(loss: Any, weights: list[float] = [1.0]) -> Any:  # noqa: B006
    return loss * weights[0]


class WithADefault(ReadingAClass):
    def scaled(self, loss: Any) -> Any:
        return defaulting(loss)

    def change(self) -> None:
        assert defaulting.__defaults__ is not None
        defaulting.__defaults__[0][0] = 2.0


class HoldingFunctions(ReadingAClass):
    def __init__(self) -> None:
        super().__init__()
        self.schedules = {"loss": lambda loss: loss * SCALE}

    def scaled(self, loss: Any) -> Any:
        return self.schedules["loss"](loss)

    def change(self) -> None:
        global SCALE
        SCALE = 2.0


class HoldingAFunction(ReadingAClass):
    def __init__(self) -> None:
        super().__init__()
        self.scaled = lambda loss: loss * SCALE

    def change(self) -> None:
        global SCALE
        SCALE = 2.0


@pytest.mark.parametrize(
    ("module", "change"),
    [
        (ReadingAClass, "Settings.scale: 1.0 -> 2.0"),
        (ReadingABaseClass, "Settings.ratio: 1.0 -> 2.0"),
        (ReadingAListOfAClass, "Settings.weights[0]: 1.0 -> 2.0"),
        (ReadingAnObject, "SETTINGS_OBJECT.scale: 1.0 -> 2.0"),
        (HoldingAnObject, "self.settings.ratio: 1.0 -> 2.0"),
        (HoldingAListOfTheClass, "self.settings.weights[0]: 1.0 -> 2.0"),
        (HoldingSlots, "self.slotted.scale: 1.0 -> 2.0"),
        (HoldingAMethod, "self.scaled.__self__.scale: 1.0 -> 2.0"),
        (ReadingGlobalsInAHelper, "SCALE: 1.0 -> 2.0"),
        (OfItsOwnClass, "OfItsOwnClass.ratio: 1.0 -> 2.0"),
        (Deep, "self.settings['loss']['weights']['ce'].scale: 1.0 -> 2.0"),
        (WithADefault, "defaulting's defaults[0][0]: 1.0 -> 2.0"),
        (HoldingFunctions, "SCALE: 1.0 -> 2.0"),
        (HoldingAFunction, "SCALE: 1.0 -> 2.0"),
    ],
)
def test_a_value_of_a_class_or_behind_an_attribute_is_a_condition(
    backend: str, tmp_path: Path, module: type[Net], change: str
) -> None:
    global SCALE
    fits = []
    for graphs in (False, True):
        SCALE, Settings.scale, Defaults.ratio, Defaults.weights[:] = 1.0, 1.0, 1.0, [1.0]
        OfItsOwnClass.ratio, defaulting.__defaults__ = 1.0, ([1.0],)
        if "weights" in vars(Settings):
            del Settings.weights
        options: dict[str, Any] = {"module": module, "capture": {"scope": "step", "verify": False}}
        fits.append(prepare(backend, tmp_path, graphs, **options).run())
    compare(*fits)
    (found,) = fits[1].statistics.recaptures
    assert change in found


def closing_over() -> Net:
    weight = 1.0

    class Closing(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.loss(batch) * weight

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            nonlocal weight
            weight = 1.0 + (self.trainer.global_step >= 12)

    return Closing()


class Unfilled(nn.Module):
    """A variable that it closes over has no value as long as its branch is not taken."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.special = nn.Linear(8, 8), False

        def scaled(x: Any) -> Any:
            return x * scale if self.special else x

        self.call = scaled
        if self.special:
            scale = 2.0

    def forward(self, x: Any) -> Any:
        return self.call(self.linear(x))


def test_an_enclosing_variable_without_a_value(backend: str, tmp_path: Path) -> None:
    class WithUnfilled(WithReadingBlock):
        def __init__(self) -> None:
            super().__init__()
            self.block = Unfilled()  # type: ignore[assignment]

        def forward(self, x: Any) -> Any:
            return self.block(x)

    capture = {"scope": "modules", "modules": ["block"]}
    compare(*fit_twice(backend, tmp_path, module=WithUnfilled, capture=capture, validation=0))


def closing(scale: float) -> Any:
    class Closing(nn.Linear):
        def forward(self, x: Any) -> Any:
            return super().forward(x) * scale

        @staticmethod
        def change(value: float) -> None:
            nonlocal scale
            scale = value

    return Closing


@pytest.mark.parametrize("which", [0, 1])
def test_variables_of_one_name_are_conditions_each(
    backend: str, tmp_path: Path, which: int
) -> None:
    kinds: list[Any] = []

    class Both(Net):
        def __init__(self) -> None:
            super().__init__()
            kinds[:] = closing(1.0), closing(1.0)
            self.blocks = nn.Sequential(kinds[0](8, 8), kinds[1](8, 8))

        def loss(self, batch: Any) -> Any:
            return super().loss({**batch, "x": self.blocks(batch["x"])})

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if self.trainer.global_step == 12:
                kinds[which].change(2.0)

    capture = {"scope": "modules", "modules": ["blocks.*"], "verify": False}
    options: dict[str, Any] = {"module": Both, "capture": capture}
    _, captured = fits = [
        prepare(backend, tmp_path, graphs, **options).run() for graphs in (False, True)
    ]
    compare(*fits)
    assert captured.statistics.recaptures == ["scale: 1.0 -> 2.0"]


def test_an_enclosing_variable_that_a_hook_changes_is_a_condition(
    backend: str, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"module": closing_over, "capture": {"scope": "step"}}
    _, captured = fits = [
        prepare(backend, tmp_path, graphs, **options).run() for graphs in (False, True)
    ]
    compare(*fits)
    assert captured.statistics.recaptures == ["weight: 1.0 -> 2.0"]
