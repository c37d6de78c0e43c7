"""What a step does outside of its module: a replay would not do it again, so it is refused."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from lightning.pytorch import LightningModule, Trainer

from lightning_graphs.core.callsite import CallSite
from lightning_graphs.core.obstacles import Obstacle
from lightning_graphs.errors import CaptureError
from lightning_graphs.training.guards.outside import OutsideValues
from lightning_graphs.training.guards.own_code import OwnCode
from lightning_graphs.training.interception import patched, subclassed

SIDE_EFFECT = Obstacle(
    "A captured step runs no Python code: what it prints, writes and logs by itself would stop.",
    "do it in on_train_batch_end, with what training_step returns; self.log stays where it is",
    kind="python-state",
    code="def on_train_batch_end(self, outputs, batch, batch_idx):\n"
    "    print(outputs['loss'])  # what training_step returns",
)
STORED_OUTSIDE = Obstacle(
    "A captured step runs no Python code: what it stores in global or enclosing variables and in "
    "classes would stand still.",
    "store it from on_train_batch_end, from the values that training_step returns",
    kind="python-state",
    code="def on_train_batch_end(self, outputs, batch, batch_idx):\n"
    "    LOSSES.append(outputs['loss'])  # what training_step returns",
)

_CALLS = (
    *("builtins.print", "builtins.open", "io.open", "sys.stdout.write", "sys.stderr.write"),
    *("logging.Logger.handle", "rich.console.Console.print", "rich.console.Console.log"),
    *("wandb.log", "mlflow.log_metric", "mlflow.log_metrics"),
)
_NAMES = {"builtins.print": "print", "builtins.open": "open", "io.open": "open"}  # pathlib calls it
_NAMES["logging.Logger.handle"] = "a logger of Python"
_LOGGERS = ("logger", "loggers")
_PASSING_ON = ("logging", "pathlib", "lightning_utilities", "rich", "tqdm")
"""Packages that print, write and log for whoever calls them."""

_RANK_ZERO = ".rank_zero"  # modules of Lightning that do so as well


@contextlib.contextmanager
def effects_refused(
    trainer: Trainer, own: OwnCode, values: OutsideValues, what: str
) -> Iterator[None]:
    """Refuse what the body, code under capture, does or stores outside of its module; undo it."""
    refused: list[CaptureError] = []

    def refuse(name: str, site: CallSite) -> None:
        refused.append(SIDE_EFFECT.refused(f"{name} is used at {site.describe()}"))
        raise refused[-1]

    try:
        with effects_watched(trainer, own, refuse), values.followed():
            yield
    finally:
        values.empty_caches()
        if changed := values.changed():
            values.restore()
    if refused:  # caught in an `except` of the code's own
        raise refused[-1]
    if changed:
        names = ", ".join([*changed][:3])
        line = next(iter(changed.values())).describe()
        raise STORED_OUTSIDE.refused(f"{what} changes {names}, named at {line}")


@contextlib.contextmanager
def effects_watched(
    trainer: Trainer, own: OwnCode, on_effect: Callable[[str, CallSite], object]
) -> Iterator[None]:
    """Watch for prints, opened files, Python's loggers and Lightning's, in this thread.

    Only lines of the step's author count: libraries warn and log on their own account.
    """
    thread = threading.get_ident()

    def used(what: str, frame: FrameType | None) -> None:
        if frame is not None and threading.get_ident() == thread:
            code = frame.f_code
            if own.has(code.co_filename, frame.f_globals.get("__name__", "")):
                on_effect(what, CallSite(code.co_filename, frame.f_lineno, code.co_name))

    with contextlib.ExitStack() as stack:
        for owner, name, what in list(_present()):
            stack.enter_context(_call_watched(owner, name, what, used))
        stack.enter_context(_loggers_watched(trainer, used))
        yield


def _present() -> Iterator[tuple[Any, str, str]]:
    """Owner, name and name in messages of what there is at present of all these."""
    yield LightningModule, "print", "self.print"
    for path in _CALLS:
        module, *outer, name = path.split(".")
        owner = functools.reduce(lambda o, n: getattr(o, n, None), outer, sys.modules.get(module))
        if hasattr(owner, "__dict__") and hasattr(owner, name):  # some programs have no console
            yield owner, name, _NAMES.get(path, path)


_Used = Callable[[str, FrameType | None], None]


@contextlib.contextmanager
def _call_watched(owner: Any, name: str, what: str, used: _Used) -> Iterator[None]:
    original = getattr(owner, name)

    @functools.wraps(original)
    def watched(*args: Any, **kwargs: Any) -> Any:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and _passes_on(frame.f_globals.get("__name__", "")):
            frame = frame.f_back
        used(what, frame)
        return original(*args, **kwargs)

    with patched(owner, **{name: watched}):
        yield


def _passes_on(module_name: str) -> bool:
    return module_name.partition(".")[0] in _PASSING_ON or module_name.endswith(_RANK_ZERO)


@contextlib.contextmanager
def _loggers_watched(trainer: Trainer, used: _Used) -> Iterator[None]:
    """Watch ``trainer.logger`` and ``trainer.loggers``, which the module's own ones read."""
    original = type(trainer)

    def watching(name: str) -> property:
        plain = getattr(original, name)

        def read(owner: Trainer) -> Any:
            value = plain.__get__(owner)
            if value:  # without a logger, nothing is done with it
                used(f"trainer.{name}", _reader(sys._getframe(1)))
            return value

        return property(read, plain.__set__)

    with subclassed(trainer, {name: watching(name) for name in _LOGGERS}):
        yield


def _reader(frame: FrameType | None) -> FrameType | None:
    """The frame that asks for a logger, behind properties and what else watches their owners."""
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        watches = module.startswith("lightning_graphs.") and module != __name__
        if not (watches or frame.f_code.co_name in _LOGGERS):
            break
        frame = frame.f_back
    return frame
