"""Tracers: what stands for Python values while code is captured, and functions that accept them.

A use of one is refused, or followed: a number remembers what Python's arithmetic makes of it. To
the doctor, which lets code go on, a refusal is a note.
"""

from __future__ import annotations

import contextlib
import enum
import math
import operator
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial, wraps
from numbers import Integral
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from lightning_graphs.device.rules import CLOCK, COUNTER, DRAWN, Obstacle, refuse, with_known_remedy
from lightning_graphs.errors import CaptureError, GraphError
from lightning_graphs.private.callsite import OURS, CallSiteFinder
from lightning_graphs.private.exchange import FOR_A_WHILE, Member, exchanged, nothing, standing_in
from lightning_graphs.private.torch import PLAIN_TENSORS, is_wrapped
from lightning_graphs.values.tree import leaves_of

# ------------------ Tracers that refuse every use


class Kind(enum.Enum):
    """Kinds of operations on a value."""

    ARITHMETIC = enum.auto()
    COMPARISON = enum.auto()
    UNARY = enum.auto()
    CONVERSION = enum.auto()  # to a number of Python
    BARE = enum.auto()  # of the number itself
    TRUTH = enum.auto()
    OTHER = enum.auto()


class Tracer:
    """Tracer for a value that a captured step does not have: passed on and logged, never used.

    It is empty, and no ``int`` or ``float``: C++ would read the value of one without asking.

    Args:
        name: What messages call the value.
        read: Gives the present value, at a replay.
        on_use: Refuses a use, given the name.
        kind: The class that user code sees; None: its own.
    """

    may_be_kept = True  # a call behind the graph may be given its value

    def __init__(
        self,
        name: str,
        read: Callable[[], Any],
        on_use: Callable[[str], object],
        kind: type | None = None,
    ) -> None:
        self._name, self._read, self._on_use = name, read, on_use
        self._kind = kind or type(self)

    def refuse(self) -> object:
        """Refuse a use of the value; where this returns, it goes on."""
        return self._on_use(self._name)

    def now(self) -> Any:
        """Return the present value, at a replay."""
        return self._read()

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return self.class_for(sys._getframe(1))

    def class_for(self, frame: Any) -> type:
        """Return the class that code finds which asks for it."""
        while frame.f_globals.get("__name__") == "abc":  # which asks for abstract classes
            frame = frame.f_back
        ours = frame.f_globals.get("__name__", "").startswith(OURS)
        return type(self) if ours else self._kind

    def use(self, method: Method, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Refuse what a special method would do, or else let the value itself do it."""
        self.refuse()
        return getattr(self.now(), method.name)(*args, **kwargs)

    def _refuse(self, *_: Any, **__: Any) -> Any:
        self.refuse()
        return self.now()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # torch and copy ask whether there is such a protocol
            raise AttributeError(name)
        self.refuse()
        return getattr(self.now(), name)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Refuse torch operators, which ask for this method before they read the value."""
        refuse_tracers((args, kwargs))
        return function(*present(args), **present(kwargs or {}))


class Method(NamedTuple):
    """What a special method of a value does."""

    name: str  # of the method
    kind: Kind = Kind.OTHER
    function: Callable[..., Any] = nothing  # does so
    symbol: str = ""  # between two operands
    is_swapped: bool = False  # the value is the second one


MAKES_TEXT = (format, str, repr)
MakesText = Callable[[Tracer, Callable[..., Any], Sequence[Any], FrameType], "str | None"]
"""Gives the text that one of these functions makes of a tracer for a frame; None: it cannot."""
_makes_text: list[MakesText] = []


@contextlib.contextmanager
def texts_made(make: MakesText) -> Iterator[None]:
    """Let a function make the texts of tracers that code of the body asks for."""
    _makes_text.append(make)
    try:
        yield
    finally:
        _makes_text.pop()


def special(method: Method) -> Callable[..., Any]:
    """Make a special method of tracers."""
    is_text = method.function in MAKES_TEXT

    def use(self: Tracer, *args: Any, **kwargs: Any) -> Any:
        if is_text and _makes_text:
            text = _makes_text[-1](self, method.function, args, sys._getframe(1))
            if text is not None:
                return text
        return self.use(method, args, kwargs)

    return use


_SYMBOLS = {"add": "+", "sub": "-", "mul": "*", "truediv": "/", "floordiv": "//", "mod": "%"}
_SYMBOLS |= {"lshift": "<<", "rshift": ">>", "and": "&", "or": "|", "xor": "^", "pow": "**"}
_SYMBOLS |= {"matmul": "@", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}
_UNARY: Sequence[Any] = (operator.neg, operator.pos, operator.invert, abs, round)
_UNARY = (*_UNARY, math.trunc, math.floor, math.ceil)
_BARE = operator.index, hash, str, repr, format
_OTHERS = "divmod rdivmod iter getitem len array array_ufunc"


def _methods() -> Iterator[Method]:
    for name, symbol in _SYMBOLS.items():
        function = pow if name == "pow" else vars(operator)[f"__{name}__"]
        is_comparison = symbol[0] in "<>=!" and symbol not in ("<<", ">>")
        kind = Kind.COMPARISON if is_comparison else Kind.ARITHMETIC
        yield Method(f"__{name}__", kind, function, symbol)
        if not is_comparison:
            yield Method(f"__r{name}__", kind, function, symbol, is_swapped=True)
    for kind, functions in ((Kind.UNARY, _UNARY), (Kind.BARE, _BARE)):
        yield from (Method(f"__{f.__name__}__", kind, f) for f in functions)
    yield from (Method(f"__{f.__name__}__", Kind.CONVERSION, f) for f in (float, int))
    yield Method("__bool__", Kind.TRUTH, bool)
    for name in _OTHERS.split():
        yield Method(f"__{name}__", function=getattr(operator, name, nothing))


METHODS = {method.name: method for method in _methods()}
"""What tracers see of the use of a value, by the names of methods."""
for _method in METHODS.values():
    if _method.name != "__rmatmul__":  # a tensor is asked first
        setattr(Tracer, _method.name, special(_method))


class Nothing:
    """Stands for what an effect returns that is not done, where the code goes on."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *_: Any, **__: Any) -> Nothing:
        return self

    __enter__ = __call__

    def __exit__(self, *_: object) -> None:
        """Do nothing."""


class OpaqueTracer(Tracer):
    """Tracer for a Python value that changes with every step."""

    def __init__(self, name: str, read: Callable[[], Any]) -> None:
        super().__init__(name, read, lambda name: refuse(used(COUNTER, name)))


class LateTracer(OpaqueTracer):
    """Tracer for a number that the step has moved: a replay has it at its end, to log it."""

    may_be_kept = False

    def now(self) -> Any:
        self.refuse()  # it is stored, which a replay does earlier
        return self._read()

    @property
    def at_end(self) -> Callable[[], Any]:
        """What gives the present value, to be called at the end of a replay."""
        return self._read


def used(obstacle: Obstacle, name: str) -> CaptureError:
    """Return the error for a value that the user's current line uses."""
    is_read = obstacle is COUNTER
    return with_known_remedy(obstacle).refused_here(f"{name} is {'read' if is_read else 'used'}")


def refuse_tracers(value: Any) -> None:
    """Refuse a value with a tracer in it."""
    for leaf in leaves_of(value, Tracer):
        leaf.refuse()


def present(value: Any) -> Any:
    """Replace the tracers in a value by their present values."""
    return tree_map_only(Tracer, lambda stand_in: stand_in.now(), value)


# ------------------ Numbers that are followed

_LONGEST = 1000  # characters of an expression; loops make longer ones
_FEW = 8  # values of a number, of which each may have a graph
_PLAIN = (int, float, bool)
_ROUNDING = (int, round, math.floor, math.ceil, math.trunc)


class NumberUses:
    """What the tracers of one capture note of the uses of their numbers."""

    def __init__(self, device: torch.device) -> None:
        self.device = device  # where the numbers are, if they are in tensors
        # What a number is compared with: `min` and `max` may return this very object
        self.bounds: list[float] = []
        self.comparing: set[str] = set()  # modules whose code compares numbers
        self.asked: set[Conversion] = set()  # where code asks for bare numbers
        self.are_bare = False  # code needs one that the device has
        self.are_places = False  # it asks for one as an index
        self.drawing: set[DrawingFunction] = set()  # functions that have drawn
        self._names: Counter[str] = Counter()

    def unique(self, name: str) -> str:
        """Return a name that is unique in this capture."""
        self._names[name] += 1
        return f"{name}#{self._names[name]}" if self._names[name] > 1 else name

    def refuse(self, obstacle: Obstacle, name: str) -> None:
        """Refuse a use that no replay can follow; where this returns, the use goes on."""
        refuse(used(obstacle, name))


class ScalarTracer(Tracer):
    """Tracer for a number of a step under watch, or for an expression of such numbers.

    Its arithmetic is followed, and comparisons are guards; other uses are refused.
    """

    is_of_device = False
    """Whether the graph computes it; else each replay does, ahead of the graph."""

    def __init__(
        self,
        numbers: Any,  # the :class:`StepNumbers` of the step, which say what a use comes to
        name: str,  # what messages call it: an expression
        read: Callable[[], Any],  # gives the present value
        value: Any,  # its value in the watched step
        lasts: bool,  # code that needs the bare value may have it, as a guard
        obstacle: Obstacle,  # what stands in the way of other uses; see :meth:`StepNumbers.number`
    ) -> None:
        super().__init__(name, read, nothing)
        self.numbers, self.name, self.value = numbers, name, value
        self.lasts, self.obstacle = lasts, obstacle
        self.stays = False  # few values (batch_idx % 2) or long ones (step // 99): guards

    def class_for(self, frame: Any) -> type:
        """Return the number's class, for which ``F.interpolate`` asks of sizes."""
        return type(self.value)

    def use(self, method: Method, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Follow what a special method does."""
        kind, function = method.kind, method.function
        if kind in (Kind.ARITHMETIC, Kind.COMPARISON) and function is not operator.matmul:
            other, *rest = args
            if not (type(other) in _PLAIN or isinstance(other, ScalarTracer)):
                return NotImplemented
            pair = (other, self) if method.is_swapped else (self, other)
            name = f" {method.symbol} ".join(map(_operand, pair))
            own = next((n for n in _numbers_among(pair) if n.is_of_device), self)
            if kind is Kind.ARITHMETIC:
                return own.computed(name, function, *pair, *rest)
            self.numbers.comparing.add(sys._getframe(2).f_globals.get("__name__", ""))
            if type(other) is float:
                self.numbers.bounds.append(other)
            return own.outcome(name, function, *pair)
        if kind is Kind.UNARY:
            return self.applied(function, (self, *args))
        if kind is Kind.CONVERSION:
            module = sys._getframe(2).f_globals.get("__name__", "")
            return self.converted(method.function, module)  # type: ignore[arg-type]
        if kind is Kind.BARE:
            return self.seen(function, *args)
        if kind is Kind.TRUTH:
            return self.outcome(f"bool({self.name})", bool, self)
        return super().use(method, args, kwargs)

    def __len__(self) -> int:
        if self.obstacle is DRAWN:
            raise TypeError("a number has no len()")
        observed = f"{self.name} is read at {CallSiteFinder().here().describe()}"
        raise _HasNoLength(COUNTER.rule, observed, COUNTER.remedy)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Operators of torch: of a tensor and one number, or of bare ones, as those of a size."""
        if torch.compiler.is_compiling():
            refuse_tracers((args, kwargs))
        if any(getattr(kind, "takes_numbers", False) for kind in types):
            return NotImplemented
        given = args, kwargs or {}
        for number in leaves_of(given, ScalarTracer)[:1]:
            form = number.numbers.form_of(function, *given)
            if form is not None:
                return form(number.numbers)
        args, kwargs = tree_map_only(ScalarTracer, ScalarTracer.bare, given)
        refuse_tracers((args, kwargs))
        return function(*present(args), **present(kwargs))

    def refuse(self) -> object:
        """Refuse a use of it, or note that and return."""
        return self.numbers.refuse(self.obstacle, self.name)

    def in_graph(self, dtype: torch.dtype) -> Tensor | None:
        """Return it as a tensor that the graph computes; None: replays fill it in."""
        return None

    def named(self, expression: str) -> str:
        """Return the name in messages for an expression of it."""
        if len(expression) > _LONGEST:
            self.refuse()
        return expression

    def seen(self, function: Callable[..., Any], *args: Any) -> Any:
        """Apply a function to the bare value, for code that cannot be traced."""
        self.numbers.are_places |= function is operator.index
        is_place = function is operator.index and not self.numbers.finds_places
        if not self.lasts and (is_place or not self.stays):
            self.refuse()
            return function(self.value, *args)
        if self.obstacle is DRAWN:
            name = f"{function.__name__}({self.name})"
            return self._guarded(name, *self.follow(function, self, *args), DRAWN)
        self.guarded()
        return function(self.value, *args)

    def bare(self) -> Any:
        return self.seen(operator.index if isinstance(self.value, Integral) else float)

    def follow(self, function: Callable[..., Any], *operands: Any) -> tuple[Callable[[], Any], Any]:
        """Return a reader of a function's value over it and other operands, and the value now."""
        for number in _numbers_among(operands):
            if number.is_of_device:
                number.refuse()
        value = function(*(n.value if isinstance(n, ScalarTracer) else n for n in operands))
        if value is None:  # it has written one of them
            self.refuse()
        # Guards outlive the capture, and hold nothing of it.
        reads = [n._read if isinstance(n, ScalarTracer) else _constant(n) for n in operands]
        return partial(_computed, function, reads), value

    def computed(self, name: str, function: Callable[..., Any], *operands: Any) -> Any:
        """Return the tracer for a function of it and of other operands."""
        name, numbers = self.named(name), _numbers_among(operands)
        read, value = self.follow(function, *operands)
        lasts, obstacle = all(n.lasts for n in numbers), _obstacle_of(numbers)
        kind = self.numbers.kind_of(value)
        if not kind:
            return value
        found = kind(self.numbers, name, read, value, lasts, obstacle)
        found.stays = all(n.stays for n in numbers) or _is_coarse(function, operands)
        return found

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

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        """Functions of NumPy."""
        if method != "__call__" or kwargs:
            return NotImplemented
        return self.applied(ufunc, inputs)

    def __array_function__(
        self, function: Any, types: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Functions of NumPy that are made of others."""
        return self.__array_ufunc__(function, "__call__", *args, **kwargs)


class ArrayTracer(ScalarTracer):
    """Tracer for an array that is drawn, or for an expression of it."""

    def computed(self, name: str, function: Callable[..., Any], *operands: Any) -> Any:
        numbers_ahead(operands)
        read, _ = self.follow(function, *operands)
        return self.numbers.number(self.numbers.unique(name), read, DRAWN)

    outcome = computed  # of a comparison it is an array of them

    def __getitem__(self, key: Any) -> Any:
        return self.computed(self.name, operator.getitem, self, key)

    def __len__(self) -> int:
        name, count = f"len({self.name})", len(self.value)
        found: int = self.numbers.guarded(name, lambda: len(self.now()), count, DRAWN)
        return found

    def __iter__(self) -> Iterator[Any]:
        return iter([self[i] for i in range(len(self))])

    def __getattr__(self, name: str) -> Any:
        method = getattr(type(self.value), name, None)
        if not callable(method) or name.startswith("__"):
            return super().__getattr__(name)
        return partial(self.computed, f"{self.name}.{name}", method, self)

    __iadd__ = __isub__ = __imul__ = __itruediv__ = Tracer._refuse


class _HasNoLength(CaptureError):
    """Raised for torch, which asks for an index's length, goes on without, and makes no data."""

    def __init__(self, *given: str) -> None:
        GraphError.__init__(self, *given)  # what goes on is not refused


def numbers_ahead(data: Any) -> list[ScalarTracer]:
    """The numbers in data, which replays have ahead of their graph; others are refused."""
    found = leaves_of(data, ScalarTracer)
    for number in found:
        if number.obstacle is CLOCK or number.is_of_device:
            number.refuse()
    return found


def _numbers_among(operands: Sequence[Any]) -> list[ScalarTracer]:
    return [operand for operand in operands if isinstance(operand, ScalarTracer)]


def _obstacle_of(numbers: Sequence[ScalarTracer]) -> Obstacle:
    """Return the obstacle of an expression: a clock's is read last, counters are read first."""
    found = [number.obstacle for number in numbers]
    others = [obstacle for obstacle in found if obstacle is not COUNTER]
    return next((o for o in (CLOCK, DRAWN) if o in others), (others or found)[0])


def _is_coarse(function: Callable[..., Any], operands: Sequence[Any]) -> bool:
    """Return whether a function gives few values, or the same one for many of its operand."""
    if function in (operator.mod, operator.floordiv) and type(by := operands[1]) is int:
        return 0 < by <= _FEW if function is operator.mod else by > _FEW
    value = getattr(operands[0], "value", None)
    return function in _ROUNDING and len(operands) == 1 and isinstance(value, float)


def _operand(value: Any) -> str:
    name = value.name if isinstance(value, ScalarTracer) else repr(value)
    return f"({name})" if " " in name else name


def _constant(value: Any) -> Callable[[], Any]:
    return lambda: value


def _computed(function: Callable[..., Any], reads: Sequence[Callable[[], Any]]) -> Any:
    return function(*[read() for read in reads])


# ------------------ Functions of Python that accept them

Conversion = tuple[str, type]
"""A module's name, and ``float`` or ``int``."""

DrawingFunction = tuple[str, str, str]
"""The name of a module, of a function in it, and of the generator that this draws from."""


def calls_followed(conversions: Collection[Conversion] = ()) -> AbstractContextManager[None]:
    """Let ``math`` and these functions accept tracers, unseen by compiled code."""
    converting = ((sys.modules[m], kind.__name__, _CONVERSIONS[kind]) for m, kind in conversions)
    return exchanged([*_OF_MATH, *converting])


def _following(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        for argument in args:
            applied = getattr(type(argument), "applied", None)
            if isinstance(argument, Tracer) and applied is not None:
                return applied(argument, function, args)
        return function(*args, **kwargs)

    return call


_OF_MATH: list[Member] = [
    (math, name, _following(function))
    for name, function in vars(math).items()
    if callable(function) and not name.startswith("__")
]


def _conversion(kind: Any) -> type:
    """Replacement for ``float`` or ``int`` in a module; torch does not know it as a dtype."""
    following = _following(kind)

    class Meta(type):
        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            if _answers and args and isinstance(args[0], Tensor):
                found = _answered(_asked_for(Asks.NUMBER)(sys._getframe(1), args[0]))
                args = args if found is None else (found, *args[1:])
            return following(*args, **kwargs)

        def __instancecheck__(cls, value: Any) -> bool:
            if issubclass(type(value), Tracer):
                return issubclass(value.class_for(sys._getframe(1)), kind)
            return isinstance(value, kind)

        def __eq__(cls, other: object) -> bool:
            return other is kind or other is cls

        def __hash__(cls) -> int:
            return hash(kind)

    return Meta(kind.__name__, (kind,), {FOR_A_WHILE: True})


_CONVERSIONS: dict[type, type] = {kind: _conversion(kind) for kind in (float, int)}


# ------------------ What code asks of tensors


class Asks(enum.Enum):
    """How code asks tensors for a plain truth or number."""

    TRUTH = enum.auto()  # Python does, for an `if` or the like
    ITEM = enum.auto()
    EQUALITY = enum.auto()  # of two tensors
    INT = enum.auto()  # code in C needs a plain number
    FLOAT = enum.auto()
    NUMBER = enum.auto()  # a function that accepts tracers does


class Question(NamedTuple):
    """What code asks of tensors."""

    frame: FrameType  # that asks
    asks: Asks
    tensors: Sequence[Tensor]
    condition: Callable[[], Tensor]  # computes it on the device

    @property
    def is_called(self) -> bool:
        """Whether code calls what asks; else Python asks for the truth of a tensor itself."""
        return self.asks is not Asks.TRUTH


Answer = Callable[[Question], Any]
"""Answers a question; None if it cannot."""

_answers: list[Answer] = []


def _answered(asked: Question) -> Any:
    return next((a for each in reversed(_answers) if (a := each(asked)) is not None), None)


@contextlib.contextmanager
def tensors_asked(answer: Answer) -> Iterator[None]:
    """Let a function answer where the body asks tensors; what it does not, earlier ones do.

    What none of them answers, torch does.
    """
    with contextlib.nullcontext() if _answers else computed_instead(list(_asking())):
        _answers.append(answer)
        try:
            yield
        finally:
            _answers.pop()


def _asking() -> Iterator[Member]:
    """Yield what answers for the functions by which code asks tensors."""

    def answering(question: Callable[..., Question]) -> Callable[..., Any]:
        def answer(frame: FrameType, *args: Any, **kwargs: Any) -> Any:
            if args and type(args[0]) in PLAIN_TENSORS and not is_wrapped(args[0]):
                return _answered(question(frame, *args, **kwargs))
            return None

        return answer

    ways = {"__bool__": Asks.TRUTH, "item": Asks.ITEM, "__int__": Asks.INT, "__float__": Asks.FLOAT}
    for name, asks in ways.items():
        yield Tensor, name, answering(_asked_for(asks))
    for owner in (torch, Tensor):
        yield owner, "equal", answering(_asked_if_equal)
        yield owner, "allclose", answering(_asked_if_close)


def computed_instead(functions: Sequence[Member]) -> AbstractContextManager[None]:
    """Let functions compute for torch's, given the frame; where one gives None, it does."""

    def member(owner: Any, name: str, compute: Callable[..., Any]) -> Member:
        own = getattr(owner, name)

        def instead(frame: FrameType, *args: Any, **kwargs: Any) -> Any:
            found = compute(frame, *args, **kwargs)
            return own(*args, **kwargs) if found is None else found

        return owner, name, standing_in(own, instead, is_of_others)

    return exchanged([member(*each) for each in functions])


def is_of_others(frame: FrameType) -> bool:
    """Return whether a frame runs code of others than this package."""
    return not frame.f_globals.get("__name__", "").startswith(OURS)


def _asked_for(asks: Asks) -> Callable[[FrameType, Tensor], Question]:
    return lambda frame, tensor: Question(frame, asks, [tensor], lambda: tensor)


def _asked_if_equal(frame: FrameType, one: Tensor, other: Tensor) -> Question:
    def are_equal() -> Tensor:
        if one.shape != other.shape:  # which `==` would broadcast
            return one.new_zeros((), dtype=torch.bool)
        return (one == other).all()

    return Question(frame, Asks.EQUALITY, [one, other], are_equal)


def _asked_if_close(frame: FrameType, one: Tensor, other: Tensor, *how: Any, **by: Any) -> Question:
    def are_close() -> Tensor:
        return one.isclose(other, *how, **by).all()

    return Question(frame, Asks.EQUALITY, [one, other], are_close)
