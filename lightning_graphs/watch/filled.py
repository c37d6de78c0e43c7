"""Lists, deques and sets that steps fill, and of which they read no more than the end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from operator import itemgetter
from types import FrameType, ModuleType
from typing import Any, NoReturn

from lightning_graphs.device.rules import FILLED
from lightning_graphs.errors import CaptureError
from lightning_graphs.private.callsite import CallSiteFinder
from lightning_graphs.private.exchange import exchanged, standing_in
from lightning_graphs.values.guards import REALS
from lightning_graphs.watch.forms import MakeNumber
from lightning_graphs.watch.late import LateValue
from lightning_graphs.watch.tracers import Tracer


class PlaceUsedError(CaptureError):
    """Raised if a captured step computes with a list that it fills, or reads what others store."""

    place: Any  # where that is kept


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
        observed = f"{name} is used at {CallSiteFinder().here().describe()}"
        error = PlaceUsedError(FILLED.rule, observed, FILLED.remedy)
        error.place = self._place
        raise error

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


def lengths_followed(modules: Iterable[ModuleType]) -> AbstractContextManager[None]:
    """Let ``len`` in these modules, of user code, give a number of the step for such a list."""

    def length(_: FrameType, container: Any) -> Any:
        return container.applied(len, ()) if type(container) is ListAppend else len(container)

    instead = standing_in(len, length)
    return exchanged((module, "len", instead) for module in modules)


def perform(operations: Operations, container: Any) -> None:
    for method, args in operations:
        getattr(container, method)(*args)
