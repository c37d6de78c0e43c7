"""Notices and undoes what code changes in containers and objects."""

from __future__ import annotations

import contextlib
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from operator import is_
from types import FunctionType
from typing import Any, NamedTuple

from torch import nn

from lightning_graphs.core.arguments.values import (
    ArrayValue,
    attributes_of,
    entries,
    has_attributes,
    is_object,
    is_plain,
    is_small_array,
    label_of,
    slots_of,
    walk,
)
from lightning_graphs.core.private.torch import tables_of
from lightning_graphs.errors import CaptureError
from lightning_graphs.exchange import Absence, bind, bound

_CHANGEABLE = (list, OrderedDict, dict, set, deque)


class Change(NamedTuple):
    """What code has changed."""

    name: str  # what messages call it
    owner: Any  # a module, an object or a container
    table: Any  # the container of what is in it; another value where there is no such
    key: Any  # where in there; ABSENT: all of it
    before: Any
    now: Any


class Binding(NamedTuple):
    """Where a name is bound to a value: in a dict, in a slot of an object, in a cell."""

    name: str
    owner: Any
    key: str
    before: Any


class Contents:
    """What containers and objects hold, and modules in their attributes, given with their names.

    Containers are lists, dicts, sets and NumPy arrays of up to 64 KiB; other values are left out.
    """

    def __init__(self, held: Iterable[tuple[str, Any]] = ()) -> None:
        self._containers: list[tuple[str, Any, Any, Any]] = []
        self.bindings: dict[tuple[int, str], Binding] = {}
        self.classes: dict[type, dict[str, Any]] = {}
        self._tables: set[int] = set()
        for name, value in held:
            self.add(name, value)

    def add(self, name: str, value: Any) -> None:
        if isinstance(value, nn.Module):
            self._tables.update(map(id, tables_of(value)))
        if isinstance(value, (nn.Module, FunctionType, *_CHANGEABLE)) or has_attributes(value):
            table = value if isinstance(value, _CHANGEABLE) else attributes_of(value)
            self._containers.append((name, value, table, _copy(table)))
            if is_object(value):
                for key in slots_of(type(value)):
                    self.add_place(f"{name}.{key}", value, key)
        elif is_small_array(value):
            self._containers.append((name, value, value, value.copy()))

    def add_place(self, name: str, owner: Any, key: str) -> Binding:
        """Look at what a key is bound to, as it is now or was when that was asked first."""
        found = Binding(name, owner, key, bound(owner, key))
        return self.bindings.setdefault((id(owner), key), found)

    def add_class(self, kind: type) -> None:
        """Look at everything that a class itself has; known ones stay as they are."""
        self.classes.setdefault(kind, dict(vars(kind)))

    def _places(self) -> Iterator[tuple[str, Any, str, Any]]:
        """Name, owner, key and value of what is bound outside of containers."""
        yield from self.bindings.values()
        for kind, before in self.classes.items():
            for key in {**before, **vars(kind)}:
                if not key.startswith("__"):
                    yield f"{kind.__name__}.{key}", kind, key, before.get(key, Absence.ABSENT)

    def changed(self) -> list[str]:
        return sorted({change.name for change in self.changes()})

    def changes(self) -> Iterator[Change]:
        """What is no longer as it was."""
        for held in self._containers:
            yield from self._changes_in(*held)
        for name, owner, key, before in self._places():
            if not is_still(now := bound(owner, key), before):
                yield Change(name, owner, owner, key, before, now)

    def _changes_in(self, name: str, owner: Any, table: Any, before: Any) -> Iterator[Change]:
        if not isinstance(table, dict):
            if not _same(table, before):
                yield Change(name, owner, table, Absence.ABSENT, before, _copy(table))
            return
        for key in {**before, **table}:
            was, now = before.get(key, Absence.ABSENT), table.get(key, Absence.ABSENT)
            if now is not was and not is_still(now, was):
                yield Change(f"{name}{self.label(owner, key)}", owner, table, key, was, now)
        if table is owner and not self.is_table(owner) and not _is_grown(table, before):
            order = tuple(before), tuple(table)
            yield Change(f"the order of {name}", owner, table, Absence.ABSENT, *order)

    def entries(self) -> Iterator[Change]:
        """What is in the containers, as if each were a change."""
        for name, owner, table, _ in self._containers:
            pairs = enumerate(table) if isinstance(table, (list, deque)) else ()
            for key, held in table.items() if isinstance(table, dict) else pairs:
                yield Change(f"{name}{self.label(owner, key)}", owner, table, key, held, held)

    def is_table(self, value: Any) -> bool:
        """Whether this is where a module has its parameters, buffers or submodules."""
        return id(value) in self._tables

    def label(self, owner: Any, key: Any) -> str:
        """What follows the name of what holds something under a key."""
        if not isinstance(owner, (dict, list, deque)) or self.is_table(owner):
            return f".{key}"
        ids = [*map(id, owner), id(key)] if isinstance(owner, dict) else [id(key)]
        return label_of(key, ids.index(id(key)))

    def name_of(self, owner: Any) -> str:
        return next(name for name, held, *_ in self._containers if held is owner)

    def holder_of(self, value: Any) -> tuple[Any, Any] | None:
        """What held this very value first, and its key in there; None if nothing did."""
        for _, owner, table, before in self._containers:
            if isinstance(table, (dict, list, deque)):
                pairs = before.items() if isinstance(table, dict) else enumerate(before)
                for key, held in pairs:
                    if held is value:
                        return owner, key
        for _, owner, key, held in self.bindings.values():  # slots of objects
            if held is value:
                return owner, key
        return None

    @contextlib.contextmanager
    def left(self, refuse: Callable[[Sequence[str]], object]) -> Iterator[None]:
        """Undo what the body changes, and refuse it by its names."""
        try:
            yield
        finally:
            changed = self.changed()
            self.restore()
        if changed:
            refuse(changed)

    def restore(self) -> None:
        for name, owner, container, before in self._containers:
            if any(True for _ in self._changes_in(name, owner, container, before)):
                refill(container, before)
        for _, owner, key, before in list(self._places()):
            if not is_still(bound(owner, key), before):
                bind(owner, key, before)


def _is_grown(table: dict[Any, Any], before: dict[Any, Any]) -> bool:
    """Whether keys of before are in the same order, and new ones follow them."""
    kept = [key for key in before if key in table]
    return kept == list(table)[: len(kept)]


def _copy(container: Any) -> Any:
    if isinstance(container, dict):
        return dict(container)
    if is_small_array(container):
        return container.copy()
    return set(container) if isinstance(container, set) else list(container)


def refill(container: Any, before: Any) -> None:
    """Let a container hold this, and nothing else."""
    # Past methods of its own: some containers forbid their own change.
    if is_small_array(container):
        container[...] = before
        return
    kind: Any = next(kind for kind in _CHANGEABLE if isinstance(container, kind))
    kind.clear(container)
    (kind.extend if kind in (list, deque) else kind.update)(container, before)


def is_still(now: Any, before: Any) -> bool:
    """Whether a value is the one from before: the very object, or a plain one that equals it.

    What only passes for a plain value is not compared, since that may tell its number.
    """
    if now is before:
        return True
    kind = type(now)
    is_itself = now.__class__ is kind and type(before) is kind and is_plain(now)
    return is_itself and bool(now == before)


def _same(now: Any, before: Any) -> bool:
    if is_small_array(now):
        return ArrayValue.of(now) == ArrayValue.of(before)
    if isinstance(now, set):
        return bool(now == before)
    return len(now) == len(before) and all(map(is_, now, before))


def contents_left(args: Sequence[Any], kwargs: Mapping[str, Any]) -> AbstractContextManager[None]:
    """Undo and refuse what the body, the capture of a call, changes in its arguments."""
    remedy = "return the new value, and let the caller store it"
    if any(map(_is_of_transformers, [*args, *kwargs.values()])):
        remedy = "set config.use_cache = False: training needs no cache of keys and values"

    def refuse(names: Sequence[str]) -> None:
        raise CaptureError(
            "A graphed callable must not change its arguments, because a replay leaves containers "
            "and objects of the caller as they are.",
            f"the call changes {', '.join(names[:3])}",
            remedy,
        )

    return contents_of(args, kwargs).left(refuse)


def contents_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Contents:
    named = [(f"args[{i}]", value) for i, value in enumerate(args)]
    named += [(f'kwargs["{key}"]', value) for key, value in kwargs.items()]
    return Contents(held_in_all(named))


def held_in_all(named: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Name and value of the containers and objects in some values, levels deep, these first."""
    seen: dict[int, Any] = {}
    for name, value in named:
        yield from walk(name, value, seen, inside=_inside)


def _inside(value: Any) -> list[tuple[str, Any, Any]]:
    """What is in an argument.

    Of objects of transformers, which are no author's own, the tables of attributes: the layers of a
    model fill those of a cache.
    """
    if _is_of_transformers(value):
        return [("", "", attributes_of(value))]
    return entries(value) or []


def _is_of_transformers(value: Any) -> bool:
    kind = type(value)
    return kind.__module__.startswith("transformers.") and not issubclass(kind, (dict, nn.Module))
