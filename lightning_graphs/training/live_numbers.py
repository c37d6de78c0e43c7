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

import ast
import functools
import linecache
import math
import operator
import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_graphs.core.callsite import CallSite, CallSiteFinder
from lightning_graphs.core.torch_private import out_of_sight
from lightning_graphs.core.values import Absence
from lightning_graphs.errors import CaptureError
from lightning_graphs.training.frozen import COUNTER, FrozenNumber, refuse_stand_ins
from lightning_graphs.training.python_state import AttributeReads

_ROOM = 64  # numbers on the device, in one step
_LONGEST = 300  # characters of an expression; loops make longer ones
_PLAIN = (int, float, bool)


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
    """The numbers of the trainer in the capture of one step.

    Args:
        reads: Learns what the step has made of them, and compares that before every step.
        device: Where the step runs.

    Attributes:
        on_device: Those that a replay must refresh.
    """

    def __init__(self, reads: AttributeReads, device: torch.device) -> None:
        self._reads = reads
        # A graph's own memory is written by what ran before, in every replay.
        self._room = torch.empty(_ROOM, dtype=torch.float64, device=device)
        self._known: dict[tuple[str, torch.dtype], NumberOnDevice] = {}
        self._bare: list[_Bare] = []
        self._bounds: list[Any] = []
        self._sites = CallSiteFinder()

    @property
    def on_device(self) -> list[NumberOnDevice]:
        return list(self._known.values())

    def number(self, name: str, read: Callable[[], Any], *, lasts: bool = False) -> Any:
        """What stands for a number of the trainer.

        Args:
            name: What messages call it.
            read: Gives the present one.
            lasts: It is the same for many steps.
        """
        value = read()
        if type(value) is bool:
            return self.guarded(name, read, value)
        if type(value) not in _PLAIN:
            return FrozenNumber(name, read)
        return LiveNumber(self, name, read, value, lasts)

    def counter(self, name: str, read: Callable[[], Any]) -> Any:
        """What stands for a counter of the trainer."""
        return self.number(name, read, lasts=name == "trainer.current_epoch")

    def guarded(self, name: str, read: Callable[[], Any], value: Any) -> Any:
        """A value that the captured code sees: it is for steps that would see the same."""
        self._reads.add(name, functools.partial(_present, read), name, self._reads)
        return value

    def bounded(self, bound: float) -> None:
        """Note what a number is compared with: ``min`` and ``max`` may return this very object."""
        self._bounds.append(bound)

    def bare(self, number: LiveNumber) -> float:
        """A plain float for code that asks for one, as ``self.log("step", float(step))`` does."""
        frame = sys._getframe(2)
        if not is_logged_at_once(frame):
            return float(number.seen(number.value))
        value = float(repr(float(number.value)))  # an object of its own
        self._bare.append(_Bare(value, number.now, frame.f_code, self._sites.here(), number.name))
        return value

    def logged(self, value: Any) -> Callable[[], Any] | None:
        """What gives the present value of something that is logged; None if it is no such number.

        To be called by what stands for ``LightningModule.log``.
        """
        if any(bound is value for bound in self._bounds):  # so it is by the outcome of a guard
            return lambda: value
        for bare in self._bare:
            if bare.value is value and self._caller() is bare.code:
                self._bare.remove(bare)
                return bare.now
        return None

    def _caller(self) -> CodeType | None:
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and self._sites.is_library(frame.f_code.co_filename):
            frame = frame.f_back
        return None if frame is None else frame.f_code

    def finish(self) -> None:
        """To be called at the end of the step's code.

        Raises:
            CaptureError: a bare number went elsewhere than to the log.
        """
        for bare in self._bare:
            observed = f"{bare.name} is read at {bare.site.describe()}"
            raise CaptureError(COUNTER.rule, observed, COUNTER.remedy)

    def with_tensor(self, name: str, tensor: Tensor, number: LiveNumber) -> Tensor:
        """An operator of a tensor and a number, as the eager one rounds it.

        For a tensor of 32 or 64 bits all kernels have the number in the tensor's own type, whether
        they get it from the host or from the device; but CUDA multiplies with the reciprocal of a
        divisor from the host (``BinaryDivTrueKernel.cu``). Others round a tensor's number first.
        """
        exact = type(tensor) in (Tensor, Parameter) and tensor.device == self._room.device
        if not exact or tensor.dtype not in (torch.float32, torch.float64):
            number.refuse()
        memory = self._memory(number, tensor.dtype)
        result: Tensor
        if name == "__rdiv__":
            return tensor.reciprocal() * memory  # as torch's own does
        if name in _DIVISIONS and tensor.is_cuda:
            name, memory = _DIVISIONS[name], memory.reciprocal()
        result = getattr(tensor, name)(memory)
        return result

    def _memory(self, number: LiveNumber, dtype: torch.dtype) -> Tensor:
        known = self._known.get((number.name, dtype))
        if known is not None:
            return known.memory
        place = len(self._known)
        if place == _ROOM:
            number.refuse()
        with out_of_sight():
            memory = self._room[place : place + 1].view(dtype)[0].data  # autograd counts its writes
            self._known[number.name, dtype] = NumberOnDevice(memory, number.now)
            if not memory.is_cuda:  # there the captured code runs
                memory.fill_(number.value)
        return memory


class _Bare:
    """A float that was made of a number, and where."""

    def __init__(
        self, value: float, now: Callable[[], Any], code: CodeType, site: CallSite, name: str
    ) -> None:
        self.value = value
        self.now = now
        self.code = code
        self.site = site
        self.name = name


class LiveNumber(FrozenNumber):
    """Stands for a number of the trainer while a whole step is captured, or for what follows.

    Args:
        numbers: Those of the step.
        name: What messages call it: an expression.
        read: Gives the present value.
        value: What it is in the step that is captured.
        lasts: It is the same for many steps: code that needs the bare value may have it.
    """

    def __init__(
        self,
        numbers: StepNumbers,
        name: str,
        read: Callable[[], Any],
        value: Any,
        lasts: bool,
    ) -> None:
        super().__init__(name, read)
        self._numbers = numbers
        self.value = value
        self._lasts = lasts

    def seen(self, value: Any) -> Any:
        """The bare value, for code that cannot be followed."""
        if not self._lasts:
            self.refuse()
        self._numbers.guarded(self.name, self.now, self.value)
        return value

    def computed(self, name: str, function: Callable[..., Any], *others: Any) -> Any:
        """What a function of Python makes of it and of other numbers."""
        if len(name) > _LONGEST:
            self.refuse()
        numbers = (self, *others)
        lasts = all(n._lasts for n in numbers if isinstance(n, LiveNumber))
        value = function(*(n.value if isinstance(n, LiveNumber) else n for n in numbers))
        return LiveNumber(
            self._numbers, name, functools.partial(_computed, function, numbers), value, lasts
        )

    def compared(self, symbol: str, function: Callable[..., Any], other: Any) -> Any:
        """The outcome of a comparison, which is a guard."""
        if type(other) is float:
            self._numbers.bounded(other)
        found = self.computed(_infix(self, symbol, other), function, other)
        return self._numbers.guarded(found.name, found.now, found.value)

    def __bool__(self) -> bool:
        return bool(self._numbers.guarded(f"bool({self.name})", self._is_true, bool(self.value)))

    def _is_true(self) -> bool:
        return bool(self.now())

    def __float__(self) -> float:
        return self._numbers.bare(self)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Operators of torch with one number in them."""
        name = getattr(function, "__name__", "")
        if name in _EXACT and not kwargs and len(args) == 2 and not torch.compiler.is_compiling():
            tensor, number = args
            if isinstance(tensor, Tensor) and isinstance(number, LiveNumber):
                return number._numbers.with_tensor(name, tensor, number)
        refuse_stand_ins((args, kwargs))
        return NotImplemented


_DIVISIONS = {"div": "mul", "div_": "mul_", "true_divide": "mul", "divide": "mul"}
_EXACT = frozenset({"mul", "mul_", "multiply", "add", "add_", "sub", "sub_", "subtract"}) | {
    "__rsub__",
    "__rdiv__",
    *_DIVISIONS,
}


def _operand(value: Any) -> str:
    name = value.name if isinstance(value, LiveNumber) else repr(value)
    return f"({name})" if " " in name else name


def _infix(left: Any, symbol: str, right: Any) -> str:
    return f"{_operand(left)} {symbol} {_operand(right)}"


def _computed(function: Callable[..., Any], numbers: tuple[Any, ...]) -> Any:
    return function(*(n.now() if isinstance(n, LiveNumber) else n for n in numbers))


def _present(read: Callable[[], Any], _: object) -> Any:
    """What a guard compares: nothing that the captured code has seen, where there is no value."""
    try:
        return read()
    except (ArithmeticError, LookupError, TypeError, ValueError):
        return Absence.ABSENT


def _swapped(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda a, b: function(b, a)


def _of_numbers(method: Callable[[LiveNumber, Any], Any]) -> Callable[[LiveNumber, Any], Any]:
    """A binary operation that leaves tensors, and all else, to the other operand."""

    def operation(self: LiveNumber, other: Any) -> Any:
        if type(other) in _PLAIN or isinstance(other, LiveNumber):
            return method(self, other)
        return NotImplemented

    return operation


def _both_ways(symbol: str, function: Callable[..., Any]) -> tuple[Any, Any]:
    def forth(self: LiveNumber, other: Any) -> Any:
        return self.computed(_infix(self, symbol, other), function, other)

    def back(self: LiveNumber, other: Any) -> Any:
        return self.computed(_infix(other, symbol, self), _swapped(function), other)

    return _of_numbers(forth), _of_numbers(back)


def _comparing(symbol: str, function: Callable[..., Any]) -> Any:
    return _of_numbers(lambda self, other: self.compared(symbol, function, other))


def _alone(function: Callable[..., Any]) -> Any:
    def method(self: LiveNumber, *digits: Any) -> Any:
        given = ", ".join([self.name, *map(repr, digits)])
        return self.computed(f"{function.__name__}({given})", function, *digits)

    return method


def _seen(function: Callable[..., Any]) -> Any:
    return lambda self, *args: self.seen(function(self.value, *args))


_ARITHMETIC = {"+": "add", "-": "sub", "*": "mul", "/": "truediv", "//": "floordiv", "%": "mod"}
_ARITHMETIC |= {"**": "pow", "<<": "lshift", ">>": "rshift", "&": "and", "|": "or", "^": "xor"}
for _symbol, _name in _ARITHMETIC.items():
    _forth, _back = _both_ways(_symbol, getattr(operator, f"__{_name}__"))
    setattr(LiveNumber, f"__{_name}__", _forth)
    setattr(LiveNumber, f"__r{_name}__", _back)
for _symbol, _name in {
    "<": "lt",
    "<=": "le",
    ">": "gt",
    ">=": "ge",
    "==": "eq",
    "!=": "ne",
}.items():
    setattr(LiveNumber, f"__{_name}__", _comparing(_symbol, getattr(operator, _name)))
for _name in ("neg", "pos", "abs"):
    setattr(LiveNumber, f"__{_name}__", _alone(getattr(operator, _name)))
for _function in (round, math.trunc, math.floor, math.ceil):
    setattr(LiveNumber, f"__{_function.__name__}__", _alone(_function))
for _name, _function in {"int": int, "index": operator.index, "hash": hash, "str": str,
                         "repr": repr, "format": format}.items():  # fmt: skip
    setattr(LiveNumber, f"__{_name}__", _seen(_function))


def is_logged_at_once(frame: FrameType) -> bool:
    """Whether the statement that runs hands every ``float(...)`` in it to a log, and nowhere else.

    It is ``self.log(name, float(...), ...)``, or ``self.log_dict({name: float(...)}, ...)``.
    """
    lines = linecache.getlines(frame.f_code.co_filename, frame.f_globals)
    try:
        tree = ast.parse("".join(lines))
    except SyntaxError:
        return False
    found = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.stmt) and _covers(node, frame.f_lineno)
    ]
    return any(map(_logs_floats, found)) and not any(map(_uses_floats, found))


def _covers(node: ast.stmt, line: int) -> bool:
    if hasattr(node, "body"):  # its own expressions; what is inside is another statement
        return node.lineno == line
    return node.lineno <= line <= (node.end_lineno or node.lineno)


def _logs_floats(node: ast.stmt) -> bool:
    return bool(_logged_in(node) & _floats_in(node))


def _uses_floats(node: ast.stmt) -> bool:
    return bool(_floats_in(node) - _logged_in(node))


def _floats_in(node: ast.AST) -> set[ast.AST]:
    calls = (inner for inner in ast.walk(node) if isinstance(inner, ast.Call))
    return {c for c in calls if isinstance(c.func, ast.Name) and c.func.id == "float"}


def _logged_in(node: ast.stmt) -> set[ast.AST]:
    """What a statement hands to a log, if that is all that it does."""
    call = node.value if isinstance(node, ast.Expr) else None
    if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)):
        return set()
    if call.func.attr not in ("log", "log_dict"):
        return set()
    given: list[ast.AST] = [*call.args, *(keyword.value for keyword in call.keywords)]
    return {*given, *(v for each in given if isinstance(each, ast.Dict) for v in each.values)}
