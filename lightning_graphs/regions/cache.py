"""Keeps captured plans by key, and counts how often each key is seen."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from operator import attrgetter
from typing import Any, Generic, Protocol, TypeVar

from lightning_graphs.policy.worth import CapturePolicy

Key = TypeVar("Key", bound=Hashable)
Plan = TypeVar("Plan", bound="Used")

_KEYS = 512
"""How many keys are remembered: shapes without end must not make a book grow without end."""
_VALUES = 8
"""How many plans there are for one shape, at most: values that move on may never come back."""
_RECENT = 1024
"""Sightings after which older ones count half."""


class Used(Protocol):
    """A plan."""

    uses: int  # how often it was replayed


class PlanCache(Generic[Key, Plan]):
    """Captured plans by key; none is ever dropped for one that is used less."""

    def __init__(
        self,
        investment: CapturePolicy,
        release: Callable[[Plan], None],  # called with a plan that leaves the cache
        capacity: int | None = None,  # number of plans at most; None: as many as are worth it
        # What of a key comes back, where the rest are values that may move on
        shape: Callable[[Key], Hashable] = lambda key: key,
    ) -> None:
        self._investment = investment
        self._release = release
        self._capacity = float("inf") if capacity is None else capacity
        self._shape = shape
        self.by_key: dict[Key, Plan] = {}  # the one that was used last comes last
        self._counted: dict[Key, int] = {}
        self._seen: OrderedDict[Key, int] = OrderedDict()
        self._shapes: OrderedDict[Hashable, float] = OrderedDict()
        self._refused: OrderedDict[Key, int] = OrderedDict()
        # Why the last key that was asked about is not due yet; empty if it is, or never will be
        self.why_not = ""
        self.is_full = False  # it would have been, if there had been room for one more plan
        self._captures = 0
        self._past_uses = 0

    def __len__(self) -> int:
        return len(self.by_key)

    def plans(self) -> list[Plan]:
        return list(reversed(self.by_key.values()))

    def get(self, key: Key) -> Plan | None:
        """The plan of ``key``, which becomes the most recently used one; None if there is none."""
        if key in self.by_key:
            self.by_key[key] = self.by_key.pop(key)
        return self.by_key.get(key)

    # ------------------------------------------------------------------ what is worth a plan

    def see(self, key: Key) -> int:
        """Count a sighting of ``key``, for which there is no plan; how many there were."""
        _count(self._shapes, self._shape(key))
        _count(self._seen, key)
        return self._seen[key]

    def is_new(self, key: Key) -> bool:
        """Whether no step of this shape came before the one that was counted last."""
        return self._shapes.get(self._shape(key), 0.0) <= 1.0

    def is_due(self, key: Key) -> bool:
        """Count a sighting of ``key``; whether it is worth a capture now."""
        self.why_not = ""
        if key in self._refused:
            return False
        seen = self.see(key)
        shape = self._shape(key)
        share = self._share(shape)
        shapes = {self._shape(other) for other in self.by_key}
        # How many were refused or dropped, or gave way to another one of their shape
        lost = self._captures - len(shapes)
        uses = self._past_uses + sum(map(attrgetter("uses"), self.by_key.values()))
        moved = shape in shapes  # there are plans for it, for other values
        self.why_not = self._investment.why_not(seen, share, lost, uses, moved=moved)
        self.is_full = not self.why_not and not self._has_room(shape)
        if self.is_full:
            self.why_not = f"max_graphs={self._capacity} allows no more graphs; raise it, or pad"
        return not self.why_not

    def _share(self, shape: Hashable) -> float:
        """What part of the coming steps is expected to have this shape.

        The part of sightings that were single ones estimates how many steps will bring something
        new. Of a shape that came once, those that came twice tell how often such ones come back
        (Good, "The population frequencies of species", Biometrika 1953).
        """
        self._count_uses()
        counts = self._shapes.values()
        total, count = sum(counts), self._shapes.get(shape, 0.0)
        single = sum(1 for other in counts if other <= 1.0)
        share = (1.0 - single / total) * count / total
        if 0.0 < count <= 1.0:
            twice = sum(1 for other in counts if 1.0 < other <= 2.0)
            share = max(share, min(2.0 * twice / single, total / len(counts)) / total)
        return share

    def _count_uses(self) -> None:
        for key, plan in self.by_key.items():
            uses, shape = plan.uses, self._shape(key)
            self._shapes[shape] = self._shapes.get(shape, 0.0) + uses - self._counted[key]
            self._counted[key] = uses
        if sum(self._shapes.values()) > _RECENT:
            for shape in self._shapes:
                self._shapes[shape] /= 2.0

    def _has_room(self, shape: Hashable) -> bool:
        """Whether a plan may be added, in the place of one that is used much less if need be."""
        other = self._in_the_way(shape)
        if other is None or self._shape(other) == shape:
            return True
        least = self._shapes.get(self._shape(other), 0.0)
        return self._shapes[shape] >= 2.0 * least + self._investment.break_even

    def _in_the_way(self, shape: Hashable) -> Key | None:
        """Whose plan gives way to one of this shape: the oldest of its own, or the least used."""
        is_full = len(self.by_key) >= self._capacity
        same = [key for key in self.by_key if self._shape(key) == shape]
        if same:
            return same[0] if is_full or len(same) >= _VALUES else None
        least = min(self.by_key, key=lambda k: self._shapes.get(self._shape(k), 0.0), default=None)
        return least if is_full else None

    def add(self, key: Key, plan: Plan) -> None:
        """Keep a captured plan, releasing the one before and, beyond capacity, the least used."""
        if key in self.by_key:
            self.drop(key)
        other = self._in_the_way(self._shape(key))
        if other is not None:
            self.drop(other)
        self._seen.pop(key, None)
        self._captures += 1
        self.by_key[key] = plan
        self._counted[key] = plan.uses + 1  # the coming one has been seen already

    def drop(self, key: Key) -> None:
        plan = self.by_key.pop(key)
        self._past_uses += plan.uses
        del self._counted[key]
        self._release(plan)

    def refuse(self, key: Key) -> None:
        """Never find ``key`` due again: its capture failed, or its plan, which goes, is wrong."""
        _count(self._refused, key)
        if key in self.by_key:
            self.drop(key)
        else:
            self._captures += 1

    def drop_all(self) -> None:
        """Release every plan; how often each key was seen stays known."""
        for key in reversed([*self.by_key]):
            self.drop(key)

    def clear(self) -> None:
        """Release every plan and forget every sighting; refusals stay."""
        self.drop_all()
        self._seen.clear()
        self._shapes.clear()


def _count(book: OrderedDict[Any, Any], key: Any) -> None:
    book[key] = book.pop(key, 0) + 1
    while len(book) > _KEYS:
        book.popitem(last=False)
