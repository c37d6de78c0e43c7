"""Signature -> captured plan: least recently used ones go."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Plan = TypeVar("Plan")


class PlanCache(Generic[Key, Plan]):
    """Captured plans by key, at most ``capacity`` of them.

    Args:
        capacity: Number of plans; adding one more releases the least recently used.
        capture_after: How often a key must have been seen before it is worth a capture.
        release: Called with a plan that leaves the cache.
    """

    def __init__(self, capacity: int, capture_after: int, release: Callable[[Plan], None]) -> None:
        self._capacity = capacity
        self._capture_after = capture_after
        self._release = release
        self._plans: OrderedDict[Key, Plan] = OrderedDict()
        self._seen: OrderedDict[Key, int] = OrderedDict()
        self._refused: OrderedDict[Key, None] = OrderedDict()
        self._displaced: OrderedDict[Key, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._plans)

    def plans(self) -> list[Plan]:
        """The plans, most recently used first."""
        return list(reversed(self._plans.values()))

    def keys(self) -> list[Key]:
        """The keys of the plans, most recently used first."""
        return list(reversed(self._plans))

    def get(self, key: Key) -> Plan | None:
        """The plan of ``key``, which becomes the most recently used one; None if there is none."""
        plan = self._plans.get(key)
        if plan is None:
            return None
        self._plans.move_to_end(key)
        return plan

    def is_due(self, key: Key) -> bool:
        """Count a sighting of ``key``; whether it was seen often enough before to be captured."""
        if key in self._refused:
            return False
        seen = self._seen.pop(key, 0)
        self._seen[key] = seen + 1
        self._forget_oldest(self._seen)
        return seen >= self._capture_after

    def forget(self, key: Key) -> None:
        """Forget how often ``key`` was seen."""
        self._seen.pop(key, None)

    def add(self, key: Key, plan: Plan) -> None:
        """Keep a captured plan, releasing the one before and, beyond capacity, the least recent."""
        if key in self._plans:
            self._release(self._plans.pop(key))
        self._seen.pop(key, None)
        self._displaced.pop(key, None)
        self._plans[key] = plan
        while len(self._plans) > self._capacity:
            displaced, oldest = self._plans.popitem(last=False)
            self._displaced[displaced] = None
            self._forget_oldest(self._displaced)
            self._release(oldest)

    def was_displaced(self, key: Key) -> bool:
        """Whether the plan of ``key`` was released to make room for another one."""
        return key in self._displaced

    def wanted(self) -> int:
        """How many plans there would be if none had been released to make room."""
        return len(self._plans) + len(self._displaced)

    def refuse(self, key: Key) -> None:
        """Never find ``key`` due again: its capture failed, or its plan, which goes, is wrong."""
        self._refused[key] = None
        self._forget_oldest(self._refused)
        if key in self._plans:
            self._release(self._plans.pop(key))

    def is_refused(self, key: Key) -> bool:
        """Whether :meth:`refuse` was called with ``key``."""
        return key in self._refused

    def _forget_oldest(self, book: OrderedDict[Key, Any]) -> None:
        """Shapes without end must not make a book of keys grow without end."""
        while len(book) > 64 * self._capacity:
            book.popitem(last=False)

    def clear(self) -> None:
        """Release every plan and forget every sighting; refusals stay."""
        while self._plans:
            _, plan = self._plans.popitem()
            self._release(plan)
        self._seen.clear()
        self._displaced.clear()
