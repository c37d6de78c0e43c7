"""Lists, deques and sets that steps fill without reading them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

from lightning_graphs.device.rules import FILLED
from lightning_graphs.errors import CaptureError
from lightning_graphs.private.callsite import CallSiteFinder
from lightning_graphs.watch.late import LateValue
from lightning_graphs.watch.tracers import Tracer


class PlaceUsedError(CaptureError):
    """Raised if a captured step computes with a list that it fills."""

    place: Any  # where that is kept


Operations = Sequence[tuple[str, tuple[Any, ...]]]
"""Names of methods, and their arguments."""


class ListAppend(Tracer):
    """Tracer for a list, deque or set that a captured step fills and does not read.

    It records operations, and each replay applies them to the real one, whatever that holds.
    """

    may_be_kept = False

    def __init__(self, place: Any) -> None:
        super().__init__(place.name, place.now, self._used, type(place.now()))
        self._place = place
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


def perform(operations: Operations, container: Any) -> None:
    for method, args in operations:
        getattr(container, method)(*args)
