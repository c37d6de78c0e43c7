"""Numbers of the trainer in a captured step: inputs of it, and what Python's arithmetic makes of
them.

Counters, learning rates and other numbers of the optimizer are other ones in other steps. While a
step is captured its code gets stand-ins for them, which remember what is computed from them. Where
one is compared, the outcome is a value that the step has read: steps for which it turns out
otherwise are not this graph's. Where one is logged, every replay logs its own. Where one meets a
tensor, it is a number on the device that every replay fills. Code that asks for the bare number
cannot be followed further.
"""

from __future__ import annotations

import functools
import math
import operator
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NoReturn

import torch
from lightning.pytorch import Trainer
from torch import Tensor
from torch.utils._pytree import tree_map_only

from lightning_graphs.errors import CaptureError, GraphError
from lightning_graphs.private.callsite import CallSiteFinder
from lightning_graphs.private.exchange import Absence
from lightning_graphs.private.torch import out_of_sight, version_of
from lightning_graphs.values.tree import leaves_of
from lightning_graphs.watch.host import HostTape
from lightning_graphs.watch.operators import (
    Conversion,
    DrawingFunction,
    Followed,
    constants_around,
    form_of,
)
from lightning_graphs.watch.reads import DRAWN, AttributeGuards
from lightning_graphs.watch.tracers import COUNTER, OpaqueTracer, Tracer, refuse_stand_ins

_ROOM = 64  # numbers on the device, in one step
_LONGEST = 300  # characters of an expression; loops make longer ones
WAYS = 8.0  # which draws may lead a step, at most: so many graphs there are for one batch
_PLAIN = (int, float, bool)
LASTING = "trainer.current_epoch"
"""It is the same for many steps: code that needs its bare value may have it, as a guard."""


class NumberOnDevice:
    """A scalar on the device that every replay fills with the present value of a number."""

    def __init__(self, memory: Tensor, read: Callable[[], Any]) -> None:
        self.memory = memory
        self._read = read
        self._filled: Any = math.nan

    def refresh(self) -> None:
        """Fill it; no work while the number stands still."""
        value = self._read()
        if value != self._filled or not value:  # zeros have a sign
            self._filled = value
            self.memory.fill_(value)


class StepNumbers:
    """The numbers of the trainer in the capture of one step."""

    def __init__(
        self,
        trainer: Trainer,
        reads: AttributeGuards,
        device: torch.device,
        tape: HostTape | None = None,  # has what the step draws
        # Whether the next capture could follow this where it is refused in this one
        could_follow: Callable[[Conversion], bool] = lambda _: False,
    ) -> None:
        self.could_follow = could_follow
        self._told: set[str] = set()  # what was drawn and has led the step on its way
        self.has_guards = False  # the step has gone a way that these numbers decide
        self._guards: list[tuple[str, Callable[[Any], Any]]] = []
        self._tape = tape
        self._ways = 1.0
        self._names: Counter[str] = Counter()
        self._trainer = trainer
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

    def number(self, name: str, read: Callable[[], Any]) -> Any:
        value = read()
        if type(value) is bool:
            return self.guarded(name, read, value)
        if type(value) not in _PLAIN:
            return OpaqueTracer(name, read)
        return ScalarTracer(self, name, read, value, lasts=name == LASTING)

    def argument(self, value: Any) -> Any:
        """What ``training_step`` gets for an argument beside the batch."""
        if type(value) is not int:
            return value
        loop = self._trainer.fit_loop.epoch_loop
        return self.number("batch_idx", lambda: loop.batch_idx)

    # ------------------------------------------------------------------ what becomes of it

    def unique(self, name: str) -> str:
        """A name that nothing else has in this step."""
        self._names[name] += 1
        return f"{name}#{self._names[name]}" if self._names[name] > 1 else name

    def guarded(
        self, name: str, read: Callable[[], Any], value: Any, *, drawn: bool = False
    ) -> Any:
        """A value that the captured code sees: it is for steps that would see the same."""
        self.has_guards = True
        if not drawn:
            self._guards.append((name, functools.partial(_present, read)))
            return value
        if name not in self._told:
            assert self._tape is not None
            self._ways *= self._tape.told(functools.partial(_present, read, None))
            self._told.add(name)
        if self._ways > WAYS:
            self.refuse_drawn(f"{name}, on which the way of the step depends,")
        return value

    def refuse_drawn(self, name: str) -> NoReturn:
        """Raise for something that is drawn on the host, and used as no replay can follow."""
        self.refused |= self.drawing
        raise DRAWN.refused_here(f"{name} is used")

    def logged(self, value: Any) -> Callable[[], Any] | None:
        """What gives the present value of a plain number that is logged; None if it is not ours.

        To be called by what stands for ``LightningModule.log``.
        """
        # What the code has in its text is what it is by the outcome of a guard.
        is_ours = type(value) is float and self.has_guards
        if is_ours and any(b is value for b in (*self.bounds, *constants_around())):
            return lambda: value
        return None

    def tensor_of(self, number: ScalarTracer, dtype: torch.dtype) -> Tensor:
        """A number of this step in a tensor; see :class:`Given`."""
        if number.kept_only:
            number.refuse()
        known = self.on_device.get((number.name, dtype))
        if known is not None:
            return known.memory
        place = len(self.on_device)
        if place == _ROOM:
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
        """Refuse what only the end of the step shows, and note what it is for."""
        for observed, tensor, version in self._read_only:
            if version_of(tensor) != version:
                raise COUNTER.refused(observed)
        self._read_only.clear()
        self.note_guards()


class _HasNoLength(CaptureError):
    """Told to torch, which asks whether an index is a sequence and goes on, and makes no data."""

    def __init__(self, *given: str) -> None:
        GraphError.__init__(self, *given)  # what goes on is not refused


class ScalarTracer(Followed, Tracer):
    """Stands for a number of the trainer while a whole step is captured, or for what follows."""

    kept_only: ClassVar[bool] = False
    """It is known behind a replay: it may be logged and stored."""

    def __init__(
        self,
        numbers: StepNumbers,
        name: str,  # what messages call it: an expression
        read: Callable[[], Any],  # gives the present value
        value: Any,  # what it is in the step that is captured
        lasts: bool,  # it is the same for many steps: code that needs the bare value may have it
        drawn: bool = False,  # from a generator of the host: it is known ahead of each replay
    ) -> None:
        self.name = name
        self.drawn = drawn
        self.numbers = numbers
        self.value = value
        self.lasts = lasts
        self._read = read

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """What Python code finds that asks for its kind, as ``F.interpolate`` does of sizes."""
        return type(self.value)

    def __len__(self) -> int:  # type: ignore[override]
        if self.drawn:
            raise TypeError("a number has no len()")
        observed = f"{self.name} is read at {CallSiteFinder().here().describe()}"
        raise _HasNoLength(COUNTER.rule, observed, COUNTER.remedy)

    def refuse(self) -> NoReturn:
        if self.drawn:
            self.numbers.refuse_drawn(self.name)
        raise COUNTER.refused_here(f"{self.name} is read")

    def now(self) -> Any:
        return self._read()

    def seen(self, function: Callable[..., Any], *args: Any) -> Any:
        """What a function makes of the bare value, for code that cannot be followed."""
        if not self.lasts:
            self.refuse()
        value = function(self.value, *args)
        if self.drawn:
            read, _ = self.follow(function, self, *args)
            name = f"{function.__name__}({self.name})"
            return self.numbers.guarded(name, read, value, drawn=True)
        self.guarded()
        return value

    def bare(self) -> Any:
        return self.seen(operator.index if type(self.value) is int else float)

    def follow(self, function: Callable[..., Any], *operands: Any) -> tuple[Callable[[], Any], Any]:
        """What gives a function of it and of other operands, and what that is in this step."""
        value = function(*(n.value if isinstance(n, ScalarTracer) else n for n in operands))
        if value is None:  # it has written one of them
            self.refuse()
        # Guards outlive the capture, and hold nothing of it.
        reads = [n._read if isinstance(n, ScalarTracer) else _constant(n) for n in operands]
        return functools.partial(_computed, function, reads), value

    def computed(self, name: str, function: Callable[..., Any], *operands: Any) -> Any:
        if len(name) > _LONGEST:
            self.refuse()
        numbers = [n for n in operands if isinstance(n, ScalarTracer)]
        lasts, drawn = all(n.lasts for n in numbers), any(n.drawn for n in numbers)
        kind = next((type(n) for n in numbers if n.kept_only), ScalarTracer)
        return kind(self.numbers, name, *self.follow(function, *operands), lasts, drawn)

    def __bool__(self) -> Any:
        return self.outcome(f"bool({self.name})", bool, self)

    def outcome(self, name: str, function: Callable[..., Any], *operands: Any) -> Any:
        """What Python is told, which is a guard."""
        return self.computed(name, function, *operands).guarded()

    def guarded(self) -> Any:
        """The bare value, for steps in which it is the same."""
        return self.numbers.guarded(self.name, self.now, self.value, drawn=self.drawn)

    def applied(self, function: Callable[..., Any], args: Sequence[Any]) -> Any:
        if function in _PLAIN and type(self.value) is function:
            return self
        if not any(argument is self for argument in args):  # in a list
            self.refuse()
        given = ", ".join(map(_operand, args))
        return self.computed(f"{function.__name__}({given})", function, *args)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Operators of torch: of a tensor and one number, or of bare ones, as those of a size."""
        if torch.compiler.is_compiling():
            refuse_stand_ins((args, kwargs))
        given = args, kwargs or {}
        for number in leaves_of(given, ScalarTracer)[:1]:
            form = form_of(function, args, kwargs, number.numbers.device)
            if form is not None:
                return form(number.numbers)
        args, kwargs = tree_map_only(ScalarTracer, ScalarTracer.bare, given)
        refuse_stand_ins((args, kwargs))
        return function(*args, **kwargs)


def _operand(value: Any) -> str:
    name = value.name if isinstance(value, ScalarTracer) else repr(value)
    return f"({name})" if " " in name else name


def _infix(left: Any, symbol: str, right: Any) -> str:
    return f"{_operand(left)} {symbol} {_operand(right)}"


def _constant(value: Any) -> Callable[[], Any]:
    return lambda: value


def _computed(function: Callable[..., Any], reads: Sequence[Callable[[], Any]]) -> Any:
    return function(*[read() for read in reads])


def _present(read: Callable[[], Any], _: object) -> Any:
    """What a guard compares: nothing that the captured code has seen, where there is no value."""
    try:
        return read()
    except (ArithmeticError, LookupError, TypeError, ValueError):
        return Absence.ABSENT


def _of_numbers(method: Callable[[ScalarTracer, Any], Any]) -> Callable[[ScalarTracer, Any], Any]:
    """A binary operation that leaves tensors, and all else, to the other operand."""

    def operation(self: ScalarTracer, other: Any) -> Any:
        if type(other) in _PLAIN or isinstance(other, ScalarTracer):
            return method(self, other)
        return NotImplemented

    return operation


def _both_ways(symbol: str, function: Callable[..., Any]) -> tuple[Any, Any]:
    def forth(self: ScalarTracer, other: Any) -> Any:
        return self.computed(_infix(self, symbol, other), function, self, other)

    def back(self: ScalarTracer, other: Any) -> Any:
        return self.computed(_infix(other, symbol, self), function, other, self)

    return _of_numbers(forth), _of_numbers(back)


def _comparing(symbol: str, function: Callable[..., Any]) -> Any:
    def compare(self: ScalarTracer, other: Any) -> Any:
        if type(other) is float:
            self.numbers.bounds.append(other)
        return self.outcome(_infix(self, symbol, other), function, self, other)

    return _of_numbers(compare)


def _converted(kind: type) -> Any:
    def convert(number: ScalarTracer) -> Any:
        asked = sys._getframe(1).f_globals.get("__name__", ""), kind
        number.numbers.asked.add(asked)
        if not number.drawn and number.numbers.could_follow(asked):
            number.refuse()
        return number.seen(kind)

    return convert


def _applied(function: Callable[..., Any]) -> Any:
    return lambda self, *digits: self.applied(function, (self, *digits))


def _seen(function: Callable[..., Any]) -> Any:
    return lambda self, *args: self.seen(function, *args)


ARITHMETIC = {"+": "add", "-": "sub", "*": "mul", "/": "truediv", "//": "floordiv", "%": "mod"}
ARITHMETIC |= {"**": "pow", "<<": "lshift", ">>": "rshift", "&": "and", "|": "or", "^": "xor"}
COMPARISONS = {"<": "lt", "<=": "le", ">": "gt", ">=": "ge", "==": "eq", "!=": "ne"}
for _symbol, _name in ARITHMETIC.items():
    _forth, _back = _both_ways(_symbol, getattr(operator, f"__{_name}__"))
    setattr(ScalarTracer, f"__{_name}__", _forth)
    setattr(ScalarTracer, f"__r{_name}__", _back)
for _symbol, _name in COMPARISONS.items():
    setattr(ScalarTracer, f"__{_name}__", _comparing(_symbol, getattr(operator, _name)))
_APPLIED = operator.neg, operator.pos, abs, round, math.trunc, math.floor, math.ceil
_BARE = operator.index, hash, str, repr, format
_function: Any
for _functions, _make in ((_APPLIED, _applied), (_BARE, _seen), ((float, int), _converted)):
    for _function in _functions:
        setattr(ScalarTracer, f"__{_function.__name__}__", _make(_function))
