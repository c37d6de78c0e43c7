"""What containers and objects hold, to notice and undo that code changes it."""

from __future__ import annotations

import contextlib
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from operator import is_
from types import FunctionType
from typing import Any, NamedTuple

from torch import nn

from lightning_graphs.core.torch_private import tables_of
from lightning_graphs.core.values import (
    Absence,
    ArrayValue,
    attributes_of,
    in_slot,
    is_object,
    is_plain,
    is_small_array,
    slots_of,
)

_CHANGEABLE = (list, OrderedDict, dict, set, deque)


class Change(NamedTuple):
    """What code has changed.

    Attributes:
        name: What messages call it.
        owner: A module, an object or a container.
        table: The container of what is in it; another value where there is no such.
        key: Where in there; None: all of it.
        before: What it was.
        now: What it is.
    """

    name: str
    owner: Any
    table: Any
    key: Any
    before: Any
    now: Any


class Contents:
    """What containers and objects hold.

    Containers are lists, dicts, sets and NumPy arrays of up to 64 KiB.

    Args:
        held: Name and value of each; of modules, the attributes count. Other values are left out.
    """

    def __init__(self, held: Iterable[tuple[str, Any]] = ()) -> None:
        self._containers: list[tuple[str, Any, Any, Any]] = []
        self._arrays: list[tuple[str, Any, Any]] = []
        self._slots: list[tuple[str, Any, str, Any]] = []
        self.classes: dict[type, dict[str, Any]] = {}
        self._tables: set[int] = set()
        for name, value in held:
            self.add(name, value)

    def add(self, name: str, value: Any) -> None:
        """Look at one more, as it is now."""
        if isinstance(value, nn.Module):
            self._tables.update(map(id, tables_of(value)))
        if isinstance(value, (nn.Module, FunctionType, *_CHANGEABLE)) or is_object(value):
            table = value if isinstance(value, _CHANGEABLE) else attributes_of(value)
            self._containers.append((name, value, table, _copy(table)))
            if is_object(value):
                for key in slots_of(type(value)):
                    self.add_place(f"{name}.{key}", value, key)
        elif is_small_array(value):
            self._arrays.append((name, value, value.copy()))

    def add_place(self, name: str, owner: Any, key: str) -> None:
        """Look at what a key is bound to; see :func:`bound`."""
        self._slots.append((name, owner, key, bound(owner, key)))

    def add_class(self, kind: type) -> None:
        """Look at everything that a class itself has; known ones stay as they are."""
        self.classes.setdefault(kind, dict(vars(kind)))

    def _places(self) -> Iterator[tuple[str, Any, str, Any]]:
        """Name, owner, key and value of what is bound outside of containers."""
        yield from self._slots
        for kind, before in self.classes.items():
            for key in {**before, **vars(kind)}:
                if not key.startswith("__"):
                    yield f"{kind.__name__}.{key}", kind, key, before.get(key, Absence.ABSENT)

    def changed(self) -> list[str]:
        """The names of what is no longer as it was."""
        return sorted({change.name for change in self.changes()})

    def changes(self) -> Iterator[Change]:
        """What is no longer as it was."""
        for name, owner, table, before in self._containers:
            if not isinstance(table, dict):
                if not _same(table, before):
                    yield Change(name, owner, table, None, before, _copy(table))
            elif not _holds_the_same(table, before):
                for key in {**before, **table}:
                    if _differs(table, before, key):
                        pair = (held.get(key, Absence.ABSENT) for held in (before, table))
                        yield Change(f"{name}{self._label(owner, key)}", owner, table, key, *pair)
        for name, array, before in self._arrays:
            if _is_written(array, before):
                yield Change(name, array, array, None, before, array)
        for name, owner, key, before in self._places():
            if not is_still(now := bound(owner, key), before):
                yield Change(name, owner, owner, key, before, now)

    def is_table(self, value: Any) -> bool:
        """Whether this is where a module has its parameters, buffers or submodules."""
        return id(value) in self._tables

    def _label(self, owner: Any, key: Any) -> str:
        entry = isinstance(owner, dict) and not self.is_table(owner)
        return f"[{key!r}]" if entry else f".{key}"

    def holder_of(self, value: Any) -> tuple[Any, Any] | None:
        """What holds this very value first, and its key in there; None if nothing does."""
        for _, owner, table, _ in self._containers:
            if isinstance(table, (dict, list, deque)):
                pairs = table.items() if isinstance(table, dict) else enumerate(table)
                for key, held in pairs:
                    if held is value:
                        return owner, key
        return None

    @contextlib.contextmanager
    def left(self, refuse: Callable[[str], object]) -> Iterator[None]:
        """Undo what the body changes, and refuse it.

        Args:
            refuse: Raises, given the names of what was changed.
        """
        try:
            yield
        finally:
            changed = self.changed()
            self.restore()
        if changed:
            refuse(", ".join(changed[:3]))

    def restore(self) -> None:
        """Put everything back."""
        for _, _, container, before in self._containers:
            if isinstance(container, dict):
                if any(_differs(container, before, key) for key in {**before, **container}):
                    _refill(container, before)
            elif not _same(container, before):
                _refill(container, before)
        for _, array, before in self._arrays:
            if _is_written(array, before):
                array[...] = before
        for _, owner, key, before in list(self._places()):
            if not is_still(bound(owner, key), before):
                _bind(owner, key, before)


def _copy(container: Any) -> Any:
    if isinstance(container, dict):
        return dict(container)
    return set(container) if isinstance(container, set) else list(container)


def _refill(container: Any, before: Any) -> None:
    """Put everything back, past methods of its own: some containers forbid their own change."""
    kind: Any = next(kind for kind in _CHANGEABLE if isinstance(container, kind))
    kind.clear(container)
    (kind.extend if kind in (list, deque) else kind.update)(container, before)


def _holds_the_same(now: dict[Any, Any], before: dict[Any, Any]) -> bool:
    """Whether a dict holds the very objects of before; a quick look that may say no of equals."""
    return (
        len(now) == len(before)
        and all(map(is_, now.values(), before.values()))
        and all(map(is_, now, before))
    )


def _differs(now: dict[Any, Any], before: dict[Any, Any], key: Any) -> bool:
    if key not in now or key not in before:
        return True
    return not is_still(now[key], before[key])


def is_still(now: Any, before: Any) -> bool:
    """Whether a value is the one from before: the very object, or a plain one that equals it."""
    return now is before or (is_plain(now) and type(now) is type(before) and bool(now == before))


def _same(now: Any, before: Any) -> bool:
    if isinstance(now, set):
        return bool(now == before)
    return len(now) == len(before) and all(map(is_, now, before))


def _is_written(now: Any, before: Any) -> bool:
    return ArrayValue.of(now) != ArrayValue.of(before)


def bound(owner: Any, key: Any) -> Any:
    """What is in a dict or a class under a key, or in a slot of an object, as a closure's cell."""
    if isinstance(owner, (dict, type)):
        return (owner if isinstance(owner, dict) else vars(owner)).get(key, Absence.ABSENT)
    return in_slot(owner, key)


def _bind(owner: Any, key: Any, value: Any) -> None:
    """Put it back, past the ``__setattr__`` of a frozen class."""
    kind: Any = type if isinstance(owner, type) else object
    if isinstance(owner, dict):
        owner.pop(key, None)
        if value is not Absence.ABSENT:
            owner[key] = value
    elif value is Absence.ABSENT:
        kind.__delattr__(owner, key)
    else:
        kind.__setattr__(owner, key, value)
