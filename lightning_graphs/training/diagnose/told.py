"""Python values of a batch that tell when a step under observation reads them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Set
from types import MethodDescriptorType, WrapperDescriptorType
from typing import Any

from lightning_graphs.core.arguments.tree import MAPPINGS, item_label, leaves_of
from lightning_graphs.core.callsite import CallSite, CallSiteFinder
from lightning_graphs.errors import CaptureError
from lightning_graphs.reporting.diagnosis import Diagnosis, Effect
from lightning_graphs.training.diagnose.watched import Observer
from lightning_graphs.training.guards.own_batch import BATCH_CHANGED, BATCH_VALUE, objects_of
from lightning_graphs.training.host.batch import BatchChanges


class Told:
    """A value that it is in all respects; C code reads it unseen."""

    name: str
    value: Any
    on_read: Callable[[str], object]

    def read(self) -> Any:
        """The value itself, for somebody who looks at it."""
        self.on_read(self.name)
        return self.value

    def __reduce__(self) -> tuple[type, tuple[Any]]:
        return type(self.value), (self.value,)


def _telling(plain: Callable[..., Any]) -> Callable[..., Any]:
    return lambda told, *args, **kwargs: plain(told.read(), *args, **kwargs)


def _kind(kind: type) -> Any:
    """A class of such values."""
    methods = (WrapperDescriptorType, MethodDescriptorType)
    own: dict[str, Any] = {n: f for n, f in vars(kind).items() if isinstance(f, methods)}
    own.pop("__getattribute__", None)  # inherited from Python 3.13 on
    if kind in (str, bytes):  # what the other operand, float and int do with them
        own |= {"__radd__": lambda value, other: other + value, "__float__": float, "__int__": int}
    return type(kind.__name__, (Told, kind), {name: _telling(f) for name, f in own.items()})


_KINDS = {kind: _kind(kind) for kind in (str, bytes, int, float)}


class BatchReads:
    """What the observed steps read of the Python values in their batches."""

    def __init__(self, observer: Observer, sites: CallSiteFinder) -> None:
        self._observer = observer
        self._sites = sites
        self._first: dict[str, CallSite] = {}  # where each of them is read
        self._given: list[dict[str, Any]] = []  # the values in the batch of each step
        self._is_over = False
        self._changed: list[str] = []  # what no replay does to its batch

    @property
    def way(self) -> Hashable:
        """What the last step has read: another one may go another way."""
        return tuple((name, self._given[-1].get(name)) for name in self._first)

    @contextlib.contextmanager
    def of_step(self, batch: Any) -> Iterator[Any]:
        """A batch whose values tell, for a step that the body runs.

        Its lists and dicts stay the same ones: hooks find there what the step does to them.
        """
        self._given.append({})
        self._is_over = False
        told = _each(batch, "batch", self._telling)
        containers, objects = BatchChanges(told), objects_of(told)
        try:
            yield told
        finally:
            self._is_over = True
            self._changed += objects.changed()
            try:
                containers.look()
            except CaptureError as error:
                self._changed.append(error.observed.removeprefix("training_step changes "))
            _each(batch, "batch", lambda _, leaf: leaf.value if isinstance(leaf, Told) else leaf)

    def _telling(self, name: str, value: Any) -> Any:
        if type(value) not in _KINDS:
            return value
        self._given[-1][name] = value
        told = _KINDS[type(value)](value)
        told.name, told.value, told.on_read = name, value, self._note
        return told

    def _note(self, name: str) -> None:
        silent = self._is_over or self._observer.silent
        if not silent and (site := self._sites.here()).line:
            self._first.setdefault(name, site)

    def kept(self, value: Any, site: CallSite) -> None:
        """Note what a step stores or returns: a replay would have to read that."""
        for told in leaves_of(value, Told):
            self._first.setdefault(told.name, site)

    def unseen(self, step: int, site: CallSite) -> bool:
        """Whether code of C may have read numbers of the batch, others than in that step."""
        then, now = self._given[step], self._given[-1]
        numbers = [name for name, value in now.items() if type(value) in (int, float)]
        moved = [name for name in numbers if then.get(name, now[name]) != now[name]]
        self._first = {**dict.fromkeys(moved, site), **self._first}
        return bool(moved)

    def judge(self, diagnosis: Diagnosis, moved: Set[str], step: CallSite) -> None:
        """Name what no replay does to a batch, and values that were others where a step reads one.

        Args:
            moved: The names of values that were others in other batches.
            step: The step itself.
        """
        for name in dict.fromkeys(self._changed):
            diagnosis.add(BATCH_CHANGED, name, step)
        read = [name for name in self._first if name in moved]
        ways = [tuple(map(given.get, read)) for given in self._given]
        is_new = len(set(ways)) == len(ways) > 2
        of_read: Effect = "eager step" if is_new else "further graph"
        of_others: Effect = "left out unless it is read"
        for names, effect in ((read, of_read), (sorted(moved - {*read}), of_others)):
            if names:
                further = f"likewise {len(names) - 1} more" if names[1:] else ""
                site = self._first.get(names[0])
                diagnosis.add(BATCH_VALUE, names[0], site, observed=further, effect=effect)


def _each(value: Any, name: str, change: Callable[[str, Any], Any]) -> Any:
    """A value with everything in its tuples, lists and dicts changed, the latter two in place."""
    if type(value) is tuple:
        return tuple(_each(held, f"{name}[{i}]", change) for i, held in enumerate(value))
    if type(value) not in (list, *MAPPINGS):
        return change(name, value)
    for key in range(len(value)) if type(value) is list else list(value):
        value[key] = _each(value[key], name + item_label(key), change)
    return value
