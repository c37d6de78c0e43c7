"""What a captured call binds: attributes of its modules, and entries of dicts that it is given."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import getitem
from typing import Any

from torch import Tensor, nn

from lightning_graphs.private.exchange import Absence, bind
from lightning_graphs.values.guards import is_plain

Given = tuple[Sequence[Any], Mapping[str, Any]]
"""Positional and keyword arguments of a call."""


@dataclass(frozen=True, slots=True)
class Bound:
    """An attribute or entry that a call has bound to a tensor or a plain value, or has deleted."""

    name: str
    key: Any
    value: Any  # ABSENT: it was deleted
    owner: nn.Module | None  # whose attribute it is
    path: tuple[Any, ...] = ()  # leads from the arguments to a dict of the caller's

    def _table(self, given: Given) -> dict[Any, Any]:
        if self.owner is not None:
            return vars(self.owner)
        table: dict[Any, Any] = reduce(getitem, self.path, given)  # type: ignore[arg-type]
        return table

    def now(self, given: Given) -> Any:
        """Return what is bound now, given the arguments."""
        return self._table(given).get(self.key)

    def put(self, given: Given, value: Any) -> None:
        """Bind another value of the same kind."""
        if value is Absence.ABSENT:
            self._table(given).pop(self.key, None)
        else:
            self._table(given)[self.key] = value


_Change = tuple[str, Any, Any, Any, Any, Any]
"""Its name, owner, table and key, and the values before and now."""


def take_attributes(changes: Iterable[_Change]) -> list[Bound]:
    """List attributes of modules that are bound to other tensors, and bind them as before."""
    found = []
    for name, owner, table, key, before, now in list(changes):
        if isinstance(owner, nn.Module) and isinstance(now, Tensor):
            found.append(Bound(name.removeprefix("."), key, now, owner))
            bind(table, key, before)
    return found


def entries_bound(changes: Iterable[_Change], given: Given) -> list[Bound]:
    """List entries of dicts among the arguments that were bound or deleted.

    The list is empty if any of them was bound to something else than a tensor or a plain value.
    """
    found: list[Bound] = []
    if not are_apart(given):
        return found
    for name, owner, table, key, _, now in changes:
        path = _path(given, owner) if type(table) is dict and table is owner else None
        is_value = isinstance(now, Tensor) or now is Absence.ABSENT or is_plain(now)
        if path is None or key is Absence.ABSENT or not is_value:
            return []
        found.append(Bound(name, key, now, None, path))
    return found


def _path(given: Any, table: object) -> tuple[Any, ...] | None:
    """Return the keys that lead to a dict; None if it is not among the arguments."""
    return next((path for path, held in _dicts(given, ()) if held is table), None)


def _dicts(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if type(value) is dict:
        yield path, value
    if type(value) in (dict, tuple, list):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        for key, held in pairs:
            yield from _dicts(held, (*path, key))


def are_apart(given: Given) -> bool:
    """Return whether each dict among the arguments is in one place."""
    dicts = [id(held) for _, held in _dicts(given, ())]
    return len(set(dicts)) == len(dicts)
