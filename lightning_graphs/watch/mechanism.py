"""The instructions of a plan, which watchers of captured code give it: compute, compare, emit."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from lightning_graphs.private.exchange import nothing
from lightning_graphs.values.snapshot import SnapshotPart

Check = tuple[Callable[[], Any], Any]
"""Compare: a function that reads something, and what it has given at the capture."""

Instruction = Callable[[], object]
"""Compute, copy in or emit: a call without arguments, prepared at the capture."""

Take = Callable[[Sequence[Tensor]], object]
"""Take in what the tensors of a batch bring; False: the code would go another way than the graph.
"""


@dataclass(frozen=True, eq=False, kw_only=True)
class Mechanism:
    """What a plan does about one kind of thing that its code does: as a rule, a few of these.

    Mechanisms are nested as contexts are: ``takes`` and ``before`` run in their order, ``after`` in
    reverse. All but ``before_update`` are around the forward part.
    """

    key: tuple[Hashable, ...] = ()  # what tells the plan from others, in addition
    checks: Sequence[Check] = ()
    takes: Sequence[Take] = ()
    cancel: Instruction | None = None  # undoes what ``takes`` have done, since there is no replay
    why_missed: Callable[[], str] | None = None  # why ``takes`` gave False last; empty if they fit
    before: Sequence[Instruction] = ()
    noted: Sequence[Instruction] = ()  # after ``before``, once the step is known to be replayed
    before_update: Sequence[Instruction] = ()  # ahead of the optimizer step, if that is a part
    after: Sequence[Instruction] = ()
    last: Sequence[Instruction] = ()  # after those of all mechanisms, in their order
    enter: Instruction | None = None  # called as soon as all ranks have the plan

    # Where both ways are compared:
    state: SnapshotPart | None = None  # what each of them is to begin with
    draws: Sequence[Any] | None = None  # generators that are a part of that
    # Lets the eager way have what the last replay had, of which there is no other one: ``before``
    # does not run
    repeated: Callable[[], AbstractContextManager[None]] | None = None


class Watcher(NamedTuple):
    """One kind of thing that captured code does, as its capture watches for it."""

    around: Callable[[], AbstractContextManager[object]] = nullcontext  # surrounds the capture
    inside: Callable[[], AbstractContextManager[object]] = nullcontext  # and the step's own code
    finish: Instruction = nothing  # refuses what shows only at the end
    mechanism: Callable[[], Mechanism | None] = nothing  # what replays do about it
