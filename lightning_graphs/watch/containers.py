"""Lists, dicts and clocks that captured code uses.

While a step is captured, the functions of ``time`` give stand-ins. A replay reads the first of them
ahead of its graph, and the others behind it, in their order.
"""

from __future__ import annotations

import abc
import operator
import sys
import threading
import time
import timeit
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial, wraps
from types import ModuleType
from typing import Any, ClassVar, NoReturn

from torch import Tensor

from lightning_graphs.device.rules import CLOCK, FILLED
from lightning_graphs.errors import CaptureError
from lightning_graphs.private.callsite import CallSiteFinder
from lightning_graphs.private.exchange import Absence, bind, exchanged, in_slot
from lightning_graphs.values.guards import attributes_of, slots_of
from lightning_graphs.watch.host import Draw
from lightning_graphs.watch.numbers import StepNumbers
from lightning_graphs.watch.operators import FOR_A_WHILE
from lightning_graphs.watch.reads import NUMBERS
from lightning_graphs.watch.tracers import Disguised, Tracer
from lightning_graphs.watch.user_code import UserCode

# ------------------ Readings of clocks in a captured step: taken anew by every replay, to be logge

Read = Callable[[str, Callable[..., Any]], Any]
"""Stands for a clock that is read: its name, and what reads it."""

_APART = 0.001  # seconds, at least, between the times that captured code sees


class Readings:
    """The readings of clocks in one step."""

    def __init__(self) -> None:
        self._taken: list[Draw] = []

    def __len__(self) -> int:
        return len(self._taken)

    def reading(self, numbers: StepNumbers, name: str, function: Callable[..., Any]) -> Any:
        """A further one, while code is captured: the author's function is not called."""
        reading = Draw(function)
        reading.value = self._apart(name)
        self._taken.append(reading)
        return numbers.number(numbers.unique(name), partial(getattr, reading, "value"), CLOCK)

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

    def repeated(self, own: UserCode) -> AbstractContextManager[None]:
        """Let the body, the captured code, see the last readings again."""
        values = iter([reading.value for reading in self._taken])
        return clocks_exchanged(own, lambda name, _: next(values, self._apart(name)))


def clocks_exchanged(own: UserCode, read: Read) -> AbstractContextManager[None]:
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


def _modules(own: UserCode) -> list[ModuleType]:
    """Those that the author's code is from."""
    found = map(sys.modules.get, filter(own.has_module, list(sys.modules)))
    return [module for module in found if isinstance(module, ModuleType)]


# ------------------ Places where something is kept, and lists that captured steps fill without loo

_FILLED = (list, deque, set)
_ABSENT = Absence.ABSENT


@dataclass(eq=False)
class Place(abc.ABC):
    """Where something is kept."""

    name: str  # what messages call it

    counted: ClassVar[tuple[type, ...]] = ()
    """The types of numbers that are counted there."""

    @abc.abstractmethod
    def now(self) -> Any:
        """What is there."""

    @abc.abstractmethod
    def put(self, value: Any) -> None:
        """Keep this there."""

    def is_still(self, now: Any, given: Any) -> bool:
        """Whether what is there is what was put there."""
        return now is given


@dataclass(eq=False)
class Entry(Place):
    """An attribute, or an entry of what attributes hold, levels deep."""

    owner: Any  # the module, or a table of its parameters or buffers
    keys: tuple[Any, ...]  # of the attribute, of the entry in what it holds, and so on
    is_used: bool = False  # steps compute with the list that they fill there

    @property
    def holder(self) -> Any:
        """What it is an entry of."""
        holder = self.owner
        for key in self.keys[:-1]:
            holder = held_at(holder, key)
        return holder

    def now(self) -> Any:
        return held_at(self.holder, self.keys[-1])

    def put(self, value: Any) -> None:
        put_at(self.holder, self.keys[-1], value)

    def is_inside(self, other: Place) -> bool:
        """Whether it is in what another place holds."""
        if not isinstance(other, Entry) or isinstance(other, Order):
            return False
        if other.owner is not self.owner:
            return False
        own, count = len(self.keys), len(other.keys)
        return own > count and self.keys[:count] == other.keys

    def is_filled(self) -> bool:
        """Whether there is a list now, or the like, that steps fill and do not compute with."""
        return not self.is_used and type(self.now()) in _FILLED


class Number(Entry):
    """A number of Python's that steps count."""

    counted = (int, float)


class Order(Entry):
    """The order of the keys of a dict."""

    def is_filled(self) -> bool:
        return False

    def is_of(self, other: Place) -> bool:
        """Whether the dict is what another place holds."""
        if not isinstance(other, Entry) or isinstance(other, Order):
            return False
        return other.owner is self.owner and other.keys == self.keys

    def now(self) -> Any:
        table = super().now()
        return tuple(table) if isinstance(table, dict) else _ABSENT

    def put(self, value: Any) -> None:
        table = super().now()
        if isinstance(table, dict) and value != tuple(table):
            for key in value:
                table[key] = table.pop(key)

    def is_still(self, now: Any, given: Any) -> bool:
        return bool(now == given)


@dataclass(eq=False)
class Memory(Place):
    """The memory of a parameter or buffer, which ``tensor.data = ...`` exchanges."""

    tensor: Tensor

    def now(self) -> Any:
        return self.tensor.detach()

    def put(self, value: Any) -> None:
        self.tensor.data = value

    def is_still(self, now: Any, given: Any) -> bool:
        return bool(now.data_ptr() == given.data_ptr() and now.stride() == given.stride())


def held_at(holder: Any, key: Any) -> Any:
    """What a container or an object holds under a key."""
    if isinstance(holder, dict):
        return dict.get(holder, key, _ABSENT)
    if isinstance(holder, (list, deque)):
        return holder[key] if type(key) is int and key < len(holder) else _ABSENT
    table = attributes_of(holder)
    if key in table or holder is _ABSENT:
        return table.get(key, _ABSENT)
    return in_slot(holder, key) if key in slots_of(type(holder)) else _ABSENT


def put_at(holder: Any, key: Any, value: Any) -> None:
    """Let a container or an object hold this; nothing where there is no such holder."""
    if isinstance(holder, (list, deque)):
        if type(key) is int and key < len(holder):
            holder[key] = value
    elif isinstance(holder, dict):
        bind(holder, key, value)
    elif holder is not _ABSENT and not isinstance(holder, Tracer):
        bind(holder if key in slots_of(type(holder)) else attributes_of(holder), key, value)


class PlaceUsedError(CaptureError):
    """A captured step computes with a list that it fills."""

    place: Entry  # where that is kept


Operations = Sequence[tuple[str, tuple[Any, ...]]]
"""Names of methods, and their arguments."""


class ListAppend(Disguised):
    """A list, deque or set that a captured step fills and does not look into.

    What is done to it is noted, and done to the real one by each replay, whatever is in that.
    """

    def __init__(self, place: Entry) -> None:
        self._place, self._kind = place, type(place.now())
        self.operations: list[tuple[str, tuple[Any, ...]]] = []

    def refuse(self) -> NoReturn:
        observed = f"{self._place.name} is used at {CallSiteFinder().here().describe()}"
        error = PlaceUsedError(FILLED.rule, observed, FILLED.remedy)
        error.place = self._place
        raise error

    def now(self) -> Any:
        return self._place.now()

    def _note(self, method: str, *args: Any) -> None:
        if not hasattr(self._kind, method):
            raise AttributeError(f"{self._kind.__name__!r} object has no attribute {method!r}")
        self.operations.append((method, args))

    def append(self, value: Any) -> None:
        self._note("append", value)

    def appendleft(self, value: Any) -> None:
        self._note("appendleft", value)

    def extend(self, values: Iterable[Any]) -> None:
        self._note("extend", list(values))

    def extendleft(self, values: Iterable[Any]) -> None:
        self._note("extendleft", list(values))

    def insert(self, index: Any, value: Any) -> None:
        if self._kind is not list:  # a full deque raises an error
            self.refuse()
        self._note("insert", index, value)

    def clear(self) -> None:
        self._note("clear")

    def reverse(self) -> None:
        self._note("reverse")

    def rotate(self, count: Any = 1) -> None:
        self._note("rotate", count)

    def add(self, value: Any) -> None:
        self._note("add", value)

    def discard(self, value: Any) -> None:
        self._note("discard", value)

    def update(self, *values: Iterable[Any]) -> None:
        self._note("update", *map(list, values))

    def __iadd__(self, values: Iterable[Any]) -> ListAppend:  # type: ignore[override, misc]
        self.extend(values)
        return self

    def __ior__(self, values: Iterable[Any]) -> ListAppend:  # type: ignore[override, misc]
        self.update(values)
        return self

    def __setitem__(self, key: Any, values: Iterable[Any]) -> None:
        self._note("__setitem__", self._all_of(key), list(values))

    def __delitem__(self, key: Any) -> None:
        self._note("__delitem__", self._all_of(key))

    def _all_of(self, key: Any) -> slice:
        """A slice, which is in every list; an index may be in none."""
        if self._kind is not list or not isinstance(key, slice) or key.step not in (None, 1):
            self.refuse()
        for bound in (key.start, key.stop):
            if isinstance(bound, Tracer):
                bound.refuse()
        return key

    __contains__ = __copy__ = __deepcopy__ = __reduce_ex__ = Tracer._refuse


def perform(operations: Operations, container: Any) -> None:
    for method, args in operations:
        getattr(container, method)(*args)


def content_of(value: Any) -> tuple[Any, ...] | frozenset[Any] | None:
    """What a list or the like holds; None for everything else."""
    if isinstance(value, (list, deque)):
        return tuple(value)
    return frozenset(value) if isinstance(value, set) else None


def is_same_content(now: Any, before: Any) -> bool:
    """Whether two of :func:`content_of` are the same."""
    if isinstance(now, tuple) and isinstance(before, tuple):
        return len(now) == len(before) and all(map(operator.is_, now, before))
    return bool(now == before)


def is_container(value: Any) -> bool:
    """Whether others may change what is in it."""
    return isinstance(value, (list, dict)) or content_of(value) is not None
