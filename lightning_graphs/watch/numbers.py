"""Numbers of the trainer in a captured step: inputs of it, and what Python arithmetic makes of
them.

Counters, learning rates and other numbers of the optimizer are other ones in other steps. While a
step is captured its code gets tracers for them, which record computations. Where one is compared,
the outcome is a value that the step has read: steps for which it turns out otherwise are not this
graph's. Where one is logged, every replay logs its own. Where one meets a tensor, it is a number on
the device that every replay fills. Code that asks for the bare number cannot be followed further.
"""

from __future__ import annotations

import abc
import math
import operator
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from numbers import Real
from typing import Any, NoReturn

import numpy
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from lightning_graphs.device.rules import CLOCK, COUNTER, DRAWN, Obstacle
from lightning_graphs.errors import CaptureError, GraphError
from lightning_graphs.private.callsite import CallSiteFinder
from lightning_graphs.private.exchange import Absence
from lightning_graphs.private.torch import out_of_sight, version_of
from lightning_graphs.values.guards import is_plain
from lightning_graphs.values.tree import leaves_of
from lightning_graphs.watch.host import HostTape
from lightning_graphs.watch.reads import AttributeGuards
from lightning_graphs.watch.tracers import (
    Conversion,
    DrawingFunction,
    OpaqueTracer,
    TracedValue,
    Tracer,
    constants_around,
    form_of,
    refuse_tracers,
    used,
)

_ROOM = 64  # numbers on the device, in one step
_LONGEST = 300  # characters of an expression; loops make longer ones
WAYS = 8.0  # which draws may lead a step, at most: so many graphs there are for one batch
_PLAIN = (int, float, bool)
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


class Numbers(abc.ABC):
    """The numbers of one step under watch: makes their tracers, and says what a use comes to."""

    tape: HostTape | None  # has what the step draws

    @abc.abstractmethod
    def kind_of(self, value: Any, obstacle: Obstacle | None = None) -> Callable[..., Any] | None:
        """The class of tracers for a value; None: user code gets the value itself.

        Without an obstacle it is for what user code computes from other tracers.
        """

    @abc.abstractmethod
    def refuse(self, obstacle: Obstacle, name: str) -> object:
        """Refuse a use that no replay can follow; where this returns, the use goes on."""

    @abc.abstractmethod
    def guarded(self, name: str, read: Callable[[], Any], value: Any, obstacle: Obstacle) -> Any:
        """A value that user code sees: a captured step is for steps that would see it, too."""

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


def item_of(read: Callable[[], Any], index: int) -> Callable[[], Any]:
    return lambda: read()[index]


class StepNumbers(Numbers):
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

    def kind_of(self, value: Any, obstacle: Obstacle | None = None) -> Callable[..., Any] | None:
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

    def refuse(self, obstacle: Obstacle, name: str) -> NoReturn:
        if obstacle is DRAWN:
            self.refused |= self.drawing
        raise used(obstacle, name)

    def logged(self, value: Any) -> Callable[[], Any] | None:
        """Return a reader for a logged float that a guard fixes; None for other values.

        To be called by the replacement of a logging function.
        """
        # A float literal reached by a guarded branch is constant for this graph.
        is_ours = type(value) is float and self.has_guards
        if is_ours and any(b is value for b in (*self.bounds, *constants_around())):
            return lambda: value
        return None

    def tensor_of(self, number: ScalarTracer, dtype: torch.dtype) -> Tensor:
        """A number of this step in a tensor; see :class:`Given`."""
        known = self.on_device.get((number.name, dtype))
        if known is not None:
            return known.memory
        place = len(self.on_device)
        if place == _ROOM or number.obstacle is CLOCK:
            number.refuse()
        with out_of_sight():
            memory = self._room[place : place + 1].view(dtype)[0].data  # autograd counts its writes
            self.on_device[number.name, dtype] = NumberOnDevice(memory, number.now)
            if not memory.is_cuda:  # there the captured code runs
                memory.fill_(number.value)
        return memory

    def read_only(self, name: str, *tensors: Tensor) -> None:
        """Refuse the step at its end if it has written to one of these; see :class:`Given`."""
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
                raise COUNTER.refused(observed)
        self._read_only.clear()
        self.note_guards()


def numbers_ahead(data: Any) -> list[ScalarTracer]:
    """The numbers in data, which replays have ahead of their graph; others are refused."""
    found = leaves_of(data, ScalarTracer)
    for number in found:
        if number.obstacle is CLOCK:
            number.refuse()
    return found


class _HasNoLength(CaptureError):
    """Raised for torch, which asks for an index's length, goes on without, and makes no data."""

    def __init__(self, *given: str) -> None:
        GraphError.__init__(self, *given)  # what goes on is not refused


class TracedNumber(TracedValue):
    """Tracer for a number of a step under watch, or for an expression of such numbers."""

    def __init__(
        self,
        numbers: Any,  # the :class:`Numbers` of the step, which say what a use comes to
        name: str,  # what messages call it: an expression
        read: Callable[[], Any],  # gives the present value
        value: Any,  # its value in the watched step
        lasts: bool,  # code that needs the bare value may have it, as a guard
        obstacle: Obstacle,  # what stands in the way of other uses; see :meth:`Numbers.number`
    ) -> None:
        self.numbers, self.name, self.value = numbers, name, value
        self.lasts, self.obstacle = lasts, obstacle
        self._read = read

    def now(self) -> Any:
        return self._read()

    def refuse(self) -> object:
        """Refuse a use of it, or note that and return."""
        return self.numbers.refuse(self.obstacle, self.name)

    def named(self, expression: str) -> str:
        """Return the name in messages for an expression of it."""
        if len(expression) > _LONGEST:
            self.refuse()
        return expression

    def seen(self, function: Callable[..., Any], *args: Any) -> Any:
        """Apply a function to the bare value, for code that cannot be traced."""
        if not self.lasts:
            self.refuse()
            return function(self.value, *args)
        if self.obstacle is DRAWN:
            name = f"{function.__name__}({self.name})"
            return self._guarded(name, *self.follow(function, self, *args), DRAWN)
        self.guarded()
        return function(self.value, *args)

    def bare(self) -> Any:
        return self.seen(operator.index if type(self.value) is int else float)

    def follow(self, function: Callable[..., Any], *operands: Any) -> tuple[Callable[[], Any], Any]:
        """Return a reader of a function's value over it and other operands, and the value now."""
        value = function(*(n.value if isinstance(n, TracedNumber) else n for n in operands))
        if value is None:  # it has written one of them
            self.refuse()
        # Guards outlive the capture, and hold nothing of it.
        reads = [n._read if isinstance(n, TracedNumber) else _constant(n) for n in operands]
        return partial(_computed, function, reads), value

    def computed(self, name: str, function: Callable[..., Any], *operands: Any) -> Any:
        """Return the tracer for a function of it and of other operands."""
        name, numbers = self.named(name), _numbers_among(operands)
        read, value = self.follow(function, *operands)
        lasts, obstacle = all(n.lasts for n in numbers), _obstacle_of(numbers)
        kind = self.numbers.kind_of(value)
        return kind(self.numbers, name, read, value, lasts, obstacle) if kind else value

    def outcome(self, name: str, function: Callable[..., Any], *operands: Any) -> Any:
        """Return a function's value to Python, as a guard."""
        obstacle = _obstacle_of(_numbers_among(operands))
        return self._guarded(name, *self.follow(function, *operands), obstacle)

    def guarded(self) -> Any:
        """Return the bare value, and guard it."""
        return self._guarded(self.name, self.now, self.value, self.obstacle)

    def _guarded(self, name: str, read: Callable[[], Any], value: Any, obstacle: Obstacle) -> Any:
        name = self.named(name)
        if obstacle is CLOCK:
            self.numbers.refuse(obstacle, name)
        return self.numbers.guarded(name, read, value, obstacle)

    def applied(self, function: Callable[..., Any], args: Sequence[Any]) -> Any:
        if function in _PLAIN and type(self.value) is function:
            return self
        if not any(argument is self for argument in args):  # in a list
            self.refuse()
        given = ", ".join(map(_operand, args))
        return self.computed(f"{function.__name__}({given})", function, *args)

    def converted(self, kind: type, module: str) -> Any:
        """Convert it as ``float`` or ``int`` of a module does."""
        asked = module, kind
        self.numbers.asked.add(asked)
        if self.obstacle is not DRAWN and self.numbers.could_follow(asked):
            self.refuse()
        return self.seen(kind)

    def __bool__(self) -> Any:
        return self.outcome(f"bool({self.name})", bool, self)


def _numbers_among(operands: Sequence[Any]) -> list[TracedNumber]:
    return [operand for operand in operands if isinstance(operand, TracedNumber)]


def _obstacle_of(numbers: Sequence[TracedNumber]) -> Obstacle:
    """Return the obstacle of an expression; a clock wins, since it is read last."""
    found = [number.obstacle for number in numbers]
    return next((obstacle for obstacle in (CLOCK, DRAWN) if obstacle in found), COUNTER)


class ScalarTracer(TracedNumber, Tracer):
    """Tracer for a number while a whole step is captured; other uses than these are refused."""

    numbers: StepNumbers

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The number's class, for Python code that asks, as ``F.interpolate`` does of sizes."""
        return type(self.value)

    def __len__(self) -> int:  # type: ignore[override]
        if self.obstacle is DRAWN:
            raise TypeError("a number has no len()")
        observed = f"{self.name} is read at {CallSiteFinder().here().describe()}"
        raise _HasNoLength(COUNTER.rule, observed, COUNTER.remedy)

    def refuse(self) -> NoReturn:
        self.numbers.refuse(self.obstacle, self.name)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Operators of torch: of a tensor and one number, or of bare ones, as those of a size."""
        if torch.compiler.is_compiling():
            refuse_tracers((args, kwargs))
        given = args, kwargs or {}
        for number in leaves_of(given, ScalarTracer)[:1]:
            form = form_of(function, args, kwargs, number.numbers.device)
            if form is not None:
                return form(number.numbers)
        args, kwargs = tree_map_only(ScalarTracer, ScalarTracer.bare, given)
        refuse_tracers((args, kwargs))
        return function(*args, **kwargs)


def _operand(value: Any) -> str:
    name = value.name if isinstance(value, TracedNumber) else repr(value)
    return f"({name})" if " " in name else name


def _infix(left: Any, symbol: str, right: Any) -> str:
    return f"{_operand(left)} {symbol} {_operand(right)}"


def _constant(value: Any) -> Callable[[], Any]:
    return lambda: value


def _computed(function: Callable[..., Any], reads: Sequence[Callable[[], Any]]) -> Any:
    return function(*[read() for read in reads])


def _present(read: Callable[[], Any], _: object) -> Any:
    """Value for a guard; ``ABSENT``, which no capture has seen, if reading it raises."""
    try:
        return read()
    except (ArithmeticError, LookupError, TypeError, ValueError):
        return Absence.ABSENT


def _of_numbers(method: Callable[..., Any]) -> Callable[..., Any]:
    """Make a binary operation that defers to the other operand unless that is a number."""

    def operation(self: TracedNumber, other: Any, *rest: Any) -> Any:
        if type(other) in _PLAIN or isinstance(other, TracedNumber):
            return method(self, other, *rest)
        return NotImplemented

    return operation


def _both_ways(symbol: str, function: Callable[..., Any]) -> tuple[Any, Any]:
    def forth(self: TracedNumber, other: Any, *rest: Any) -> Any:
        return self.computed(_infix(self, symbol, other), function, self, other, *rest)

    def back(self: TracedNumber, other: Any, *rest: Any) -> Any:
        return self.computed(_infix(other, symbol, self), function, other, self, *rest)

    return _of_numbers(forth), _of_numbers(back)


def _comparing(symbol: str, function: Callable[..., Any]) -> Any:
    def compare(self: TracedNumber, other: Any) -> Any:
        if type(other) is float:
            self.numbers.bounds.append(other)
        return self.outcome(_infix(self, symbol, other), function, self, other)

    return _of_numbers(compare)


def _converted(kind: type) -> Any:
    return lambda self: self.converted(kind, sys._getframe(1).f_globals.get("__name__", ""))


def _applied(function: Callable[..., Any]) -> Any:
    return lambda self, *digits: self.applied(function, (self, *digits))


def _seen(function: Callable[..., Any]) -> Any:
    return lambda self, *args: self.seen(function, *args)


_ARITHMETIC = {"+": "add", "-": "sub", "*": "mul", "/": "truediv", "//": "floordiv", "%": "mod"}
_ARITHMETIC |= {"<<": "lshift", ">>": "rshift", "&": "and", "|": "or", "^": "xor", "**": "pow"}
_COMPARISONS = {"<": "lt", "<=": "le", ">": "gt", ">=": "ge", "==": "eq", "!=": "ne"}
for _symbol, _name in _ARITHMETIC.items():
    _forth, _back = _both_ways(_symbol, pow if _name == "pow" else vars(operator)[f"__{_name}__"])
    setattr(TracedNumber, f"__{_name}__", _forth)
    setattr(TracedNumber, f"__r{_name}__", _back)
for _symbol, _name in _COMPARISONS.items():
    setattr(TracedNumber, f"__{_name}__", _comparing(_symbol, vars(operator)[_name]))
_APPLIED = (
    operator.neg,
    operator.pos,
    operator.invert,
    abs,
    round,
    math.trunc,
    math.floor,
    math.ceil,
)
_BARE = operator.index, hash, str, repr, format
_function: Any
for _functions, _make in ((_APPLIED, _applied), (_BARE, _seen), ((float, int), _converted)):
    for _function in _functions:
        setattr(TracedNumber, f"__{_function.__name__}__", _make(_function))


class ArrayTracer(ScalarTracer):
    """Tracer for an array that is drawn, or for an expression of it."""

    def computed(self, name: str, function: Callable[..., Any], *operands: Any) -> Any:
        numbers_ahead(operands)
        read, _ = self.follow(function, *operands)
        return self.numbers.number(self.numbers.unique(name), read, DRAWN)

    outcome = computed  # of a comparison it is an array of them

    def __getitem__(self, key: Any) -> Any:
        return self.computed(self.name, operator.getitem, self, key)

    def __len__(self) -> int:  # type: ignore[override]
        name, count = f"len({self.name})", len(self.value)
        found: int = self.numbers.guarded(name, lambda: len(self.now()), count, DRAWN)
        return found

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return iter([self[i] for i in range(len(self))])

    def __getattr__(self, name: str) -> Any:
        method = getattr(type(self.value), name, None)
        if not callable(method) or name.startswith("__"):
            return super().__getattr__(name)
        return partial(self.computed, f"{self.name}.{name}", method, self)

    __iadd__ = __isub__ = __imul__ = __itruediv__ = Tracer._refuse
