"""Clocks that code reads: a graph would freeze what they show."""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from lightning_graphs.core.obstacles import Obstacle

CLOCK = Obstacle(
    "A graph would freeze a clock.",
    "only log or store what a function of `time` gives, or numbers that follow from it, in "
    "training_step, which replays read anew; compute or decide with it in a hook",
    kind="python-state",
    code="def on_train_batch_start(self, batch, batch_idx):\n"
    "    self.share.fill_(time.monotonic() - self.began)  # a buffer, for the step",
)

_NAMES = ("time", "perf_counter", "monotonic", "process_time", "thread_time")
NUMBERS: Mapping[str, Callable[[], Any]] = {
    name: getattr(time, name) for kind in _NAMES for name in (kind, f"{kind}_ns")
}
"""Functions of ``time`` that give a number, by their names."""

_OTHERS = (time.ctime, time.gmtime, time.localtime, time.strftime, time.clock_gettime, os.times)
_KNOWN: Mapping[Any, str] = {
    **{function: f"time.{name}" for name, function in NUMBERS.items()},
    **{function: f"{function.__module__}.{function.__name__}" for function in _OTHERS},
}
_OF_DATES = frozenset({"now", "utcnow", "today"})


def clock_named(function: Any) -> str:
    """The name of a function of C, if that reads a clock; else an empty one."""
    owner = getattr(function, "__self__", None)
    if isinstance(owner, type) and issubclass(owner, datetime.date):
        name = function.__name__
        return f"{owner.__name__}.{name}" if name in _OF_DATES else ""
    return _KNOWN.get(function, "") if type(function) is _OF_C else ""


_OF_C = type(time.time)
