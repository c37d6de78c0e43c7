"""Readings of clocks in a captured step: taken anew by every replay, to be logged and stored.

While a step is captured, the functions of ``time`` give stand-ins. A replay reads the first of them
ahead of its graph, and the others behind it, in their order.
"""

from __future__ import annotations

import sys
import threading
import time
import timeit
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial, wraps
from types import ModuleType
from typing import Any, NoReturn

from lightning_graphs.core.host.half import Draw
from lightning_graphs.exchange import exchanged
from lightning_graphs.training.guards.clocks import CLOCK, NUMBERS
from lightning_graphs.training.guards.own_code import OwnCode
from lightning_graphs.training.host.followed import FOR_A_WHILE
from lightning_graphs.training.host.live_numbers import LiveNumber, StepNumbers

Read = Callable[[str, Callable[..., Any]], Any]
"""Stands for a clock that is read: its name, and what reads it."""

_APART = 0.001  # seconds, at least, between the times that captured code sees


class ClockNumber(LiveNumber):
    """Stands for what a clock shows, or what follows: nothing ahead of the graph may need it."""

    kept_only = True

    def refuse(self) -> NoReturn:
        raise CLOCK.refused_here(f"{self.name} is used")

    def guarded(self) -> NoReturn:
        self.refuse()


class Readings:
    """The readings of clocks in one step."""

    def __init__(self) -> None:
        self._taken: list[Draw] = []

    def __len__(self) -> int:
        return len(self._taken)

    def reading(self, numbers: StepNumbers, name: str, function: Callable[..., Any]) -> ClockNumber:
        """A further one, while code is captured: the author's function is not called."""
        reading = Draw(function)
        reading.value = self._apart(name)
        self._taken.append(reading)
        value = partial(getattr, reading, "value")
        return ClockNumber(numbers, numbers.unique(name), value, reading.value, lasts=False)

    def _apart(self, name: str) -> Any:
        now, apart = NUMBERS[name.removeprefix("time.")](), len(self) * _APART
        return now + int(apart * 1e9) if isinstance(now, int) else now + apart

    def begin(self) -> None:
        """Ahead of a replay."""
        self._taken[0]()

    def end(self) -> None:
        """Behind it."""
        for reading in self._taken[1:]:
            reading()

    def repeated(self, own: OwnCode) -> AbstractContextManager[None]:
        """Let the body, the captured code, see the last readings again."""
        values = iter([reading.value for reading in self._taken])
        return clocks_exchanged(own, lambda name, _: next(values, self._apart(name)))


def clocks_exchanged(own: OwnCode, read: Read) -> AbstractContextManager[None]:
    """Let something else stand for clocks in this thread, where the author's code reads them.

    Packages read clocks on their own account, some whenever Python collects garbage. Compiled code
    must see none of it.
    """
    thread = threading.get_ident()

    def standing(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*args: Any) -> Any:
            follows = threading.get_ident() == thread and own.runs_in(sys._getframe(1))
            return read(f"time.{name}", partial(function, *args)) if follows else function(*args)

        vars(call)[FOR_A_WHILE] = True
        return call

    stand_ins: dict[int, Callable[..., Any]] = {}
    for name, known in NUMBERS.items():
        function = vars(time)[name]
        stand_ins[id(known)] = stand_ins[id(function)] = standing(name, function)
    return exchanged(
        [
            (module, key, stand_ins[id(value)])
            for module in (time, timeit, *_modules(own))
            for key, value in vars(module).items()
            if id(value) in stand_ins
        ]
    )


def _modules(own: OwnCode) -> list[ModuleType]:
    """Those that the author's code is from."""
    found = map(sys.modules.get, filter(own.has_module, list(sys.modules)))
    return [module for module in found if isinstance(module, ModuleType)]
