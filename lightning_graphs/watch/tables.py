"""Arrays and lists of numbers, of which captured code reads one by a number that changes.

Schedules of learning rates, decays and momenta are such: ``momentum_schedule[self.global_step]``.
Code in C reads them, and asks for the bare index. While code is captured, others stand in their
places, which follow it.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterable, Iterator
from typing import Any

import numpy

from lightning_graphs.private.exchange import replaced
from lightning_graphs.values.guards import REALS
from lightning_graphs.values.snapshot import Change, PythonSnapshot
from lightning_graphs.watch.places import put_at, value_at
from lightning_graphs.watch.reads import GlobalReads
from lightning_graphs.watch.tracers import ScalarTracer


class _Table:
    name = "an array"
    original: Any = None  # none of the result of a computation

    def __getitem__(self, key: Any) -> Any:
        if not isinstance(key, ScalarTracer) or getattr(self, "ndim", 1) != 1:
            return super().__getitem__(key)  # type: ignore[misc]
        held: Any = self
        held = held.view(numpy.ndarray) if self.original is None else self.original
        return key.computed(f"{self.name}[{key.name}]", operator.getitem, held, key)


class _Array(_Table, numpy.ndarray):
    pass


class _List(_Table, list[Any]):
    pass


def _table_of(name: str, value: Any) -> Any:
    """Return what stands for a table of numbers; None for other values."""
    made: Any
    if type(value) is numpy.ndarray and value.ndim == 1 and value.dtype.kind in "fiu":
        made = value.view(_Array)
    elif type(value) is list and value and {*map(type, value)} <= {*REALS}:
        made = _List(value)
    else:
        return None
    made.name, made.original = name, value
    return made


class Tables:
    """Exchanges the tables of numbers that code under capture finds.

    Args:
        held: What modules hold, by name.
        outside: Finds what functions refer to.
    """

    def __init__(self, held: Iterable[tuple[str, Any]], outside: GlobalReads) -> None:
        self._held, self._outside = held, outside
        self._made: dict[int, Any] = {}  # by the ``id`` of what they stand for, in all its places
        self._places: list[tuple[Any, Any, Any]] = []  # a holder, a key, and what stands there

    @contextlib.contextmanager
    def exchanged(self) -> Iterator[None]:
        """Let stand-ins be there in the body, code under capture."""
        self._look([*PythonSnapshot(self._held).entries(), *self._outside.contents.entries()])
        try:
            with replaced(self._outside, "on_found", self._look):
                yield
        finally:
            for holder, key, made in reversed(self._places):
                if isinstance(made, _List) and made != made.original:  # the body has changed it
                    made.original[:] = made
                if value_at(holder, key) is made:
                    put_at(holder, key, made.original)

    def _look(self, found: Iterable[Change]) -> None:
        for name, _, holder, key, _, value in found:
            made = self._made.get(id(value))
            made = _table_of(name, value) if made is None else made
            if made is not None and not isinstance(holder, tuple):
                self._made[id(value)] = made
                self._places.append((holder, key, made))
                put_at(holder, key, made)
