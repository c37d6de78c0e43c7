"""Lists, deques and sets that steps fill, and what steps may do with them besides."""

from __future__ import annotations

import builtins
import operator
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from operator import itemgetter
from types import FrameType, ModuleType
from typing import Any, NoReturn, Protocol

import numpy
from torch import Tensor

from lightning_graphs.device.rules import FILLED
from lightning_graphs.errors import CaptureError, stop
from lightning_graphs.private.callsite import CallSiteFinder
from lightning_graphs.private.exchange import exchanged, standing_in
from lightning_graphs.values.guards import REALS
from lightning_graphs.values.memory import Given
from lightning_graphs.values.tree import leaves_of
from lightning_graphs.watch.forms import MakeNumber
from lightning_graphs.watch.late import Keep, LatePolicy, LateValue, kept_if_late
from lightning_graphs.watch.tracers import Tracer


class PlaceUsedError(CaptureError):
    """Raised if a captured step computes with a list that it fills, or reads what others store."""

    place: Any  # where that is kept


def _refuse(place: Any, name: str) -> NoReturn:
    observed = f"{name} is used at {CallSiteFinder().here().describe()}"
    error = PlaceUsedError(FILLED.rule, observed, FILLED.remedy)
    error.place = place
    stop(error)


def follow_use(place: Any) -> None:
    """Let captures follow what steps compute with the list that they fill in a place.

    A list of numbers, as most often some that the steps have read, is used behind the graph, unless
    they need what they compute there; any other is state.
    """
    held = place.now()
    are_numbers = isinstance(held, (list, deque)) and all(type(v) in REALS for v in held)
    place.is_late = are_numbers and not place.is_late
    place.is_used = not place.is_late


class Recorder(Protocol):
    """Keeps calls back; see :class:`~lightning_graphs.regions.context.StepRecorder`."""

    @property
    def keep(self) -> Keep:
        """What keeps them back."""

    def at_end(self, instruction: Callable[[], object]) -> None:
        """Let a replay do this in the end."""


class LateList:
    """A list with which user code computes no more than what is logged or stored.

    All that it does with the list is done behind the graph, with the list itself. How long that is
    is known ahead of the graph: a number of the step.

    Attributes:
        tracer: Stands for the list while the code is captured.
    """

    def __init__(
        self,
        place: Any,
        number: MakeNumber,
        recorder: Recorder,
        is_own: Callable[[FrameType], bool],  # whether a frame runs user code
    ) -> None:
        self._place, self._number, self._recorder = place, number, recorder
        self._held = place.now()
        self._room = getattr(self._held, "maxlen", None)
        self._bound: dict[int, tuple[str, LateValue]] = {}  # methods, by the ``id`` of the tracer
        self._changes: list[int | None] = []  # of its length by calls of these, if that is known
        # How long it was ahead of the present replay, while calls behind that are made
        self._before: list[int] = []
        policy = LatePolicy(place.name, partial(_refuse, place), is_own, self._keep)
        self.tracer = recorder.keep(self._begin, ((), {}), policy)
        self.tracer.length = self._length
        recorder.at_end(self._before.clear)

    def _begin(self) -> Any:
        now = self._place.now()
        self._before[:] = [len(now)]
        return now

    def _now(self) -> int:
        if self._before:
            return self._before[0]
        return len(self._held if (now := self._place.now()) is self.tracer else now)

    def _keep(self, function: Callable[..., Any], given: Given, policy: LatePolicy) -> Any:
        (first, *rest), _ = given
        is_attribute = function is getattr and first is self.tracer
        if is_attribute and rest == ["maxlen"]:
            return self._room
        method = self._bound[id(first)][0] if id(first) in self._bound else ""
        if method or function in _OPERATORS:
            method = method or function.__name__
            adds = method in ("extend", "iadd") and type(rest[0]) in (list, tuple)
            by_slice = method in ("setitem", "delitem") and type(rest[0]) is not int
            known = None if by_slice else _CHANGES.get(method)
            self._changes.append(len(rest[0]) if adds else known)
        if any(tensor.requires_grad for tensor in leaves_of(given, Tensor)):
            self.tracer.refuse()  # the list would hold its history
        late = self._recorder.keep(function, given, policy)
        if is_attribute:
            self._bound[id(late)] = rest[0], late
        return late

    def _length(self) -> Any:
        length = self._number(f"len({self._place.name})", self._now)
        for change in self._changes:
            if change is None:
                self.tracer.refuse()
            length = length + change
            if self._room is not None and length > self._room:
                length = self._room
        return length


_OPERATORS = (operator.iadd, operator.setitem, operator.delitem)
_CHANGES = {"append": 1, "appendleft": 1, "pop": -1, "popleft": -1, "setitem": 0, "delitem": -1}
_CHANGES |= dict.fromkeys(("copy", "count", "index", "reverse", "rotate", "sort"), 0)
"""By how much these methods and operators change the length of a list or deque."""


Operations = Sequence[tuple[str, tuple[Any, ...]]]
"""Names of methods, and their arguments."""


class ListAppend(Tracer):
    """Tracer for a list, deque or set that a captured step fills, and hardly reads.

    It records operations, and each replay applies them to the real one, whatever that holds. Read
    are what was appended last, and how long it is: these are numbers of the step.
    """

    may_be_kept = False

    def __init__(self, place: Any, number: MakeNumber) -> None:
        super().__init__(place.name, place.now, self._used, type(place.now()))
        self._place, self._number, self._held = place, number, place.now()
        self.operations: list[tuple[str, tuple[Any, ...]]] = []

    def _used(self, name: str) -> NoReturn:
        _refuse(self._place, name)

    def _note(self, method: str, *args: Any) -> None:
        if not hasattr(self._kind, method):
            raise AttributeError(f"{self._kind.__name__!r} object has no attribute {method!r}")
        self.operations.append((method, args))

    def __getitem__(self, key: Any) -> Any:
        if self.operations:
            method, args = self.operations[-1]
            if key == -1 and method == "append":
                return args[0]
        elif key == -1 and self._kind is not set and self._held and type(self._held[-1]) in REALS:
            return self._number(f"{self._name}[-1]", self._reading(itemgetter(-1)))
        return self._refuse()

    def _reading(self, of: Callable[[Any], Any]) -> Callable[[], Any]:
        """Return what applies a function to the list itself, also while this stands there."""
        place, held = self._place, self._held
        return lambda: of(held if isinstance(now := place.now(), ListAppend) else now)

    def applied(self, function: Callable[..., Any], args: Sequence[Any]) -> Any:
        """Return its length, as a number of the step; other functions are refused."""
        appended = sum(method == "append" for method, _ in self.operations)
        if function is not len or self._kind is not list or appended < len(self.operations):
            return self._refuse()
        length = self._number(f"len({self._name})", self._reading(len))
        return length + appended if appended else length

    def __bool__(self) -> bool:
        return bool(self.applied(len, (self,)) > 0)

    def __iadd__(self, values: Iterable[Any]) -> ListAppend:
        self._note("extend", _all_in(values))
        return self

    def __ior__(self, values: Iterable[Any]) -> ListAppend:
        self._note("update", _all_in(values))
        return self

    def __setitem__(self, key: Any, values: Iterable[Any]) -> None:
        self._note("__setitem__", self._all_of(key), _all_in(values))

    def __delitem__(self, key: Any) -> None:
        self._note("__delitem__", self._all_of(key))

    def _all_of(self, key: Any) -> Any:
        """Return a slice as it is and refuse an index, which some lists may lack."""
        if self._kind is not list or not isinstance(key, slice) or key.step not in (None, 1):
            self.refuse()
        for bound in (key.start, key.stop):
            if isinstance(bound, Tracer):
                bound.refuse()
        return key

    __contains__ = __copy__ = __deepcopy__ = __reduce_ex__ = Tracer._refuse


def _all_in(values: Iterable[Any]) -> Any:
    """Go through an iterable, which is possible once; what comes late a replay goes through."""
    return values if isinstance(values, LateValue) else list(values)


def _filling(method: str, *, many: bool) -> Callable[..., None]:
    def fill(tracer: ListAppend, *args: Any) -> None:
        if method == "insert" and tracer._kind is not list:  # a full deque raises an error
            tracer.refuse()
        tracer._note(method, *(map(_all_in, args) if many else args))

    return fill


_OF_ONE = ("append", "appendleft", "insert", "clear", "reverse", "rotate", "add", "discard")
_OF_MANY = ("extend", "extendleft", "update")  # an iterable is gone through once
for _method in (*_OF_ONE, *_OF_MANY):
    setattr(ListAppend, _method, _filling(_method, many=_method in _OF_MANY))


def functions_followed(modules: Iterable[ModuleType]) -> AbstractContextManager[None]:
    """Let these modules, of user code, give tracers for lists to functions in C."""

    def following(function: Callable[..., Any]) -> Callable[..., Any]:
        late = kept_if_late(function)

        def call(frame: FrameType, *args: Any, **kwargs: Any) -> Any:
            if args and type(args[0]) is ListAppend:
                return args[0].applied(function, args)
            if function in (max, min) or (args and isinstance(args[0], LateValue)):
                return late(frame, *args, **kwargs)  # it asks tensors which is less
            return function(*args, **kwargs)

        return standing_in(function, call)

    instead = {name: following(getattr(builtins, name)) for name in _OF_LISTS}
    own = ((m, name, function) for m in modules for name, function in instead.items())
    arrays = ((numpy, name, following(getattr(numpy, name))) for name in ("array", "asarray"))
    return exchanged((*own, *arrays))


_OF_LISTS = ("len", "sum", "max", "min", "sorted")


def perform(operations: Operations, container: Any) -> None:
    for method, args in operations:
        getattr(container, method)(*args)
