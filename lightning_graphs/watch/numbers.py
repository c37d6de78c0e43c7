"""Numbers of the trainer in a captured step, and what becomes of their uses.

Counters, learning rates and other numbers of the optimizer are other ones in other steps. While a
step is captured its code gets tracers for them, which record computations. Where one is compared,
the outcome is a value that the step has read: steps for which it turns out otherwise are not this
graph's. Where one is logged, every replay logs its own. Where one meets a tensor, it is a number on
the device that every replay fills. Code that asks for the bare number cannot be followed further.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from numbers import Real
from typing import Any

import numpy
import torch
from torch import Tensor

from lightning_graphs.device.rules import CLOCK, COUNTER, DRAWN, Obstacle, refuse
from lightning_graphs.private.callsite import CallSiteFinder
from lightning_graphs.private.exchange import Absence
from lightning_graphs.private.torch import captured_code_runs, out_of_sight, version_of
from lightning_graphs.values.guards import is_plain
from lightning_graphs.watch.forms import Form, form_of
from lightning_graphs.watch.host import HostTape
from lightning_graphs.watch.reads import AttributeGuards
from lightning_graphs.watch.tracers import (
    ArrayTracer,
    Conversion,
    DrawingFunction,
    OpaqueTracer,
    ScalarTracer,
    constants_around,
    used,
)

_ROOM = 64  # numbers on the device, in one step
WAYS = 8.0  # which draws may lead a step, at most: so many graphs there are for one batch
LASTING = "trainer.current_epoch"
"""Constant for many steps: code that needs the bare value may have it, as a guard."""


class NumberOnDevice:
    """A scalar on the device that every replay fills with the present value of a number."""

    def __init__(self, memory: Tensor, read: Callable[[], Any]) -> None:
        self.memory = memory
        self._read = read
        self._filled: Any = math.nan

    def refresh(self, _: object = None) -> None:
        """Write the present value; do nothing while the number is unchanged."""
        value = self._read()
        if value != self._filled or not value:  # zeros have a sign
            self._filled = value
            self.memory.fill_(value)


def item_of(read: Callable[[], Any], index: int) -> Callable[[], Any]:
    return lambda: read()[index]


def _present(read: Callable[[], Any], _: object) -> Any:
    """Value for a guard; ``ABSENT``, which no capture has seen, if reading it raises."""
    try:
        return read()
    except (ArithmeticError, LookupError, TypeError, ValueError):
        return Absence.ABSENT


class StepNumbers:
    """The numbers of the trainer, and those that are drawn, in the capture of one step."""

    def __init__(
        self,
        reads: AttributeGuards,
        device: torch.device,
        tape: HostTape | None = None,
        # Whether the next capture could follow this where it is refused in this one
        could_follow: Callable[[Conversion], bool] = lambda _: False,
    ) -> None:
        self.could_follow = could_follow
        self._led: set[str] = set()  # what was drawn and has led the step on its way
        self.has_guards = False  # the step has gone a way that these numbers decide
        self._guards: list[tuple[str, Callable[[Any], Any]]] = []
        self.tape = tape
        self._ways = 1.0
        self._names: Counter[str] = Counter()
        self._reads = reads
        self.device = device
        # What a graph allocates itself is written by what ran before, in every replay.
        self._room = torch.empty(_ROOM, dtype=torch.float64, device=device)
        # Those that a replay must refresh
        self.on_device: dict[tuple[str, torch.dtype], NumberOnDevice] = {}
        # What a number is compared with: `min` and `max` may return this very object
        self.bounds: list[float] = []
        self.asked: set[Conversion] = set()  # where code asks for bare numbers
        self.drawing: set[DrawingFunction] = set()  # functions that have drawn
        self.refused: set[DrawingFunction] = set()  # those, where what they drew was refused
        self._read_only: list[tuple[str, Tensor, int]] = []

    # ------------------------------------------------------------------ what code gets

    def number(self, name: str, read: Callable[[], Any], obstacle: Obstacle = COUNTER) -> Any:
        """Return the tracer for a value that changes between steps; lists get one for each entry.

        Args:
            name: What messages call it.
            read: Gives the present value.
            obstacle: ``COUNTER`` of what the trainer changes, ``DRAWN`` of what is drawn on the
                host, which replays have ahead of their graph, ``CLOCK`` of what they have after it.
        """
        value, drawn = read(), obstacle is DRAWN
        if drawn and type(value) in (list, tuple):
            items = range(len(value))
            return type(value)(
                [self.number(f"{name}[{i}]", item_of(read, i), DRAWN) for i in items]
            )
        kind = self.kind_of(value, obstacle)
        if kind is not None:
            return kind(self, name, read, value, drawn or name == LASTING, obstacle)
        if drawn and not is_plain(value):
            self.refuse(DRAWN, name)
        return self.guarded(name, read, value, obstacle) if is_plain(value) else value

    def ways_of(self, read: Callable[[], Any]) -> float:
        """Count the branches that a step may take by what Python reads of its draws."""
        assert self.tape is not None
        return self.tape.count_ways(partial(_present, read, None))

    def kind_of(self, value: Any, obstacle: Obstacle | None = None) -> Callable[..., Any] | None:
        """Return the class of tracers for a value; None: user code gets the value itself.

        Without an obstacle it is for what user code computes from other tracers.
        """
        kind, drawn = type(value), obstacle is DRAWN
        if kind is numpy.ndarray and (drawn or obstacle is None):
            return ArrayTracer
        if obstacle is None or kind in (int, float):
            return ScalarTracer
        if kind is bool:
            return None
        if drawn:
            return ScalarTracer if isinstance(value, Real) else None
        return lambda _, name, read, *__: OpaqueTracer(name, read)

    # ------------------------------------------------------------------ what becomes of it

    def unique(self, name: str) -> str:
        """Return a name that is unique in this step."""
        self._names[name] += 1
        return f"{name}#{self._names[name]}" if self._names[name] > 1 else name

    def guarded(self, name: str, read: Callable[[], Any], value: Any, obstacle: Obstacle) -> Any:
        """Return a value that user code sees; the graph is for steps that would see it, too."""
        self.has_guards = True
        if obstacle is not DRAWN:
            self._guards.append((name, partial(_present, read)))
            return value
        if name not in self._led:
            self._ways *= self.ways_of(read)
            self._led.add(name)
        if self._ways > WAYS:
            self.refuse(DRAWN, f"{name}, on which the way of the step depends,")
        return value

    def refuse(self, obstacle: Obstacle, name: str) -> None:
        """Refuse a use that no replay can follow; where this returns, the use goes on."""
        if obstacle is DRAWN:
            self.refused |= self.drawing
        refuse(used(obstacle, name))

    def logged(self, value: Any) -> Callable[[], Any] | None:
        """Return a reader for a logged float that a guard fixes; None for other values.

        To be called by the replacement of a logging function.
        """
        # A float literal reached by a guarded branch is constant for this graph.
        is_ours = type(value) is float and self.has_guards
        if is_ours and any(b is value for b in (*self.bounds, *constants_around())):
            return lambda: value
        return None

    def form_of(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Form | None:
        """Return how to compute a torch call with tracers; None if unsupported."""
        return form_of(function, args, kwargs, self.device)

    def tensor_of(self, number: ScalarTracer, dtype: torch.dtype) -> Tensor:
        """A number of this step in a tensor."""
        known = self.on_device.get((number.name, dtype))
        if known is not None:
            return known.memory
        place = len(self.on_device)
        if place == _ROOM or number.obstacle is CLOCK:
            number.refuse()
        with out_of_sight():
            memory = self._room[place : place + 1].view(dtype)[0].data  # autograd counts its writes
            self.on_device[number.name, dtype] = NumberOnDevice(memory, number.now)
            if captured_code_runs(memory.device):
                memory.fill_(number.value)
        return memory

    def read_only(self, name: str, *tensors: Tensor) -> None:
        """Refuse the step at its end if it has written to one of these."""
        observed = f"{name} is used at {CallSiteFinder().here().describe()}"
        self._read_only += [(observed, tensor, version_of(tensor)) for tensor in tensors]

    def note_guards(self) -> None:
        """Let steps be compared by these; not where a further capture may need none of them."""
        for name, read in self._guards:
            self._reads.add(name, read, name, self._reads)
        self._guards.clear()

    def finish(self) -> None:
        """Refuse what shows only at the end of the step, and note which values guard the graph."""
        for observed, tensor, version in self._read_only:
            if version_of(tensor) != version:
                COUNTER.refuse(observed)
        self._read_only.clear()
        self.note_guards()
