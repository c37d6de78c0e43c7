"""A real step under the rules of a capture: what that would refuse is noted, and it goes on."""

from __future__ import annotations

import contextlib
import difflib
import math
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_graphs.core.callsite import CallSite, CallSiteFinder
from lightning_graphs.core.collectives import is_collective
from lightning_graphs.core.obstacles import (
    COLLECTIVE,
    COMPILED,
    FUNCTION_RULES,
    REHEARSED,
    Obstacle,
    with_known_remedy,
)
from lightning_graphs.core.recorder import Operation, OperatorCall, Recorder
from lightning_graphs.core.tree import leaves_of
from lightning_graphs.training.followed import Followed
from lightning_graphs.training.live_numbers import LASTING

_NUMBERS = (bool, int, float)


class Call(NamedTuple):
    """An operator with the Python numbers that a capture would bake into it."""

    operator: str
    numbers: tuple[float, ...]
    site: CallSite


class Change(NamedTuple):
    """How two runs of the same code differ, though their inputs have the same shapes."""

    operator: str
    what: str  # the two numbers, or that it is missing in one of the runs
    site: CallSite
    whole: bool  # whether it may follow from a shape: whole numbers, or a missing operator


def changes(before: Sequence[Call], now: Sequence[Call]) -> Iterator[Change]:
    """The operators that only one of the runs calls, and those that get other Python numbers."""
    a_keys, b_keys = ([(call.operator, call.site) for call in calls] for calls in (before, now))
    matcher = difflib.SequenceMatcher(None, a_keys, b_keys, autojunk=False)
    for tag, i, i_end, j, j_end in matcher.get_opcodes():
        if tag != "equal":
            call = now[j] if j < j_end else before[i]
            yield Change(call.operator, "not in every step", call.site, True)
            continue
        for first, second in zip(before[i:i_end], now[j:j_end], strict=True):
            pairs = zip(first.numbers, second.numbers, strict=False)
            differing = [(a, b) for a, b in pairs if a == a and b == b and a != b]
            if differing:
                a, b = differing[0]
                what = f"{a!r} in one step, {b!r} in another"
                whole = isinstance(a, int) and isinstance(b, int)
                yield Change(second.operator, what, second.site, whole)


class Observer(Recorder):
    """Notes every obstacle of the code that runs under it, and lets the code run.

    On a CPU, where all memory is the host's, copies from there are not seen.

    Args:
        note: Called with operator, obstacle and the user's line.
        look: Called with every Python function of torch and its arguments; the numbers that it
            returns are no part of the capture, here and in the backward pass.
    """

    raises = False

    def __init__(
        self,
        note: Callable[[str, Obstacle, CallSite], None],
        look: Callable[[Any, Any, Any], Iterable[float]],
        generators: Sequence[torch.Generator],
        *,
        until: types.CodeType,
        rehearsal: bool,
    ) -> None:
        super().__init__(generators)
        self.calls: list[Call] = []
        self._note = note
        self._look = look
        self._sites = CallSiteFinder(until)
        self._rehearsal = rehearsal
        self._silent = False
        self._forbidden: dict[int, Obstacle] = {}
        self._anew: set[float] = set()

    def begin(self) -> None:
        """Begin another step."""
        self.calls = []
        self._anew.clear()

    def here(self) -> CallSite:
        """The user's line that is being executed."""
        return self._sites.here()

    @property
    def silent(self) -> bool:
        """Whether nothing is noted at the moment."""
        return self._silent

    @contextlib.contextmanager
    def looking_away(self) -> Iterator[None]:
        """Note nothing that the body does."""
        before, self._silent = self._silent, True
        try:
            yield
        finally:
            self._silent = before

    def forbid(self, value: Any, obstacle: Obstacle) -> None:
        """Note ``obstacle`` wherever a tensor in ``value`` is used."""
        for leaf in leaves_of(value):
            if isinstance(leaf, Tensor):
                self._forbidden[self.know(leaf, born=True).id] = obstacle

    def refuse(self, operator: str, obstacle: Obstacle) -> None:
        # Compiled code runs eagerly under a dispatch mode, and so in full sight.
        hidden = obstacle is COMPILED or (obstacle.rehearsal and not self._rehearsal)
        if not self._silent and not hidden:
            self._note(operator, with_known_remedy(obstacle), self._sites.here())

    def call(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        name = getattr(func, "__name__", "")
        if not self._silent:
            self._anew.update(self._look(func, args, kwargs))
        rule = FUNCTION_RULES.get(name)
        obstacle = rule(args, kwargs) if rule is not None else None
        if obstacle is not None:
            self.refuse(name, obstacle)
            with self.looking_away():  # the operators inside of it are the same obstacle
                return func(*args, **kwargs)
        return REHEARSED.get(func, func)(*args, **kwargs)

    def keep(self, operation: Operation) -> None:
        if not self._silent:
            values = (*operation.args, *operation.kwargs.values())
            found = [v for v in values if type(v) in _NUMBERS]
            numbers = tuple(math.nan if v in self._anew else v for v in found)
            self.calls.append(Call(operation.name, numbers, operation.site))

    def _meet_constant(self, tensor: Tensor) -> None:
        super()._meet_constant(tensor)
        if not self._silent and tensor.dim() == 0 and tensor.device.type == "cpu":
            number: float = tensor.item()
            self.calls.append(Call("a tensor of a Python number", (number,), self._sites.here()))

    def _check(self, call: OperatorCall) -> None:
        super()._check(call)
        if is_collective(call.func):
            self.refuse(str(call.func), COLLECTIVE)
        if self._forbidden:
            for tensor in call.inputs:
                strided = tensor.layout is torch.strided
                if strided and (found := self._forbidden.get(self.know(tensor).id)):
                    self.refuse(str(call.func), found)


Note = Callable[[str], object]

_ARITHMETIC = ["add", "sub", "mul", "mod", "floordiv", "truediv", "pow"]
_ARITHMETIC += ["and", "or", "xor", "lshift", "rshift"]
_ARITHMETIC += [f"r{name}" for name in _ARITHMETIC]
_ARITHMETIC += ["neg", "pos", "abs", "invert", "round", "trunc", "floor", "ceil"]
_COMPARISONS = ["eq", "ne", "lt", "le", "gt", "ge", "bool"]
_ESCAPES = ["hash", "str", "repr", "format", "divmod", "rdivmod"]


class WatchedNumbers:
    """Makes numbers that tell when they are used.

    Args:
        used: Called with the name of a number with which a captured step could follow Python.
        escaped: Called with the name of one whose bare value is taken.
    """

    def __init__(self, used: Note, escaped: Note) -> None:
        self.used = used
        self.escaped = escaped
        self._made: list[float] = []

    def number(self, name: str, value: Any, *, lasts: bool = False) -> Any:
        """Stand for a number; other values stay what they are."""
        numpy: Any = sys.modules.get("numpy")
        if numpy is not None and isinstance(value, numpy.number):
            value = value.item()
        kind = _KINDS.get(type(value))
        if kind is None:
            return value
        number = kind(value)
        number.numbers, number.name, number.lasts = self, name, lasts
        return number

    def counter(self, name: str, read: Callable[[], Any]) -> Any:
        """Stand for a counter that is read."""
        value = read()
        if type(value) is bool:
            self.used(name)
        return self.number(name, value, lasts=name == LASTING)

    def bare(self, number: Any) -> float:
        """A plain float, an object of its own that is known again."""
        self.used(number.name)
        self._made.append(float(repr(float(number.value))))
        return self._made[-1]

    def is_live(self, value: Any) -> bool:
        """Whether it is a number that a captured step would follow."""
        return isinstance(value, Watched) or any(value is made for made in self._made)


class Watched(Followed):
    """A number that it stands for, in all respects; says so when Python does something with it.

    C code reads it unseen: of torch's functions the observer sees the arguments, and of
    ``range`` and indexing it sees that the operators of two steps differ.
    """

    numbers: WatchedNumbers
    name: str
    lasts: bool

    @property
    def value(self) -> Any:
        """The number itself."""
        return (int if isinstance(self, int) else float).__pos__(self)  # type: ignore[arg-type]

    def escapes(self) -> None:
        """Tell that the bare value is taken."""
        (self.numbers.used if self.lasts else self.numbers.escaped)(self.name)

    def applied(self, function: Callable[..., Any], args: Sequence[Any]) -> Any:
        """What a function makes of arguments, of which this is one."""
        self.numbers.used(self.name)
        found = function(*(a.value if isinstance(a, Watched) else a for a in args))
        lasts = all(a.lasts for a in args if isinstance(a, Watched))
        return self.numbers.number(self.name, found, lasts=lasts)

    def __float__(self) -> float:
        return self.numbers.bare(self)

    def __reduce__(self) -> tuple[type, tuple[Any]]:
        return type(self.value), (self.value,)


class WatchedInt(Watched, int):
    """A whole number."""


class WatchedFloat(Watched, float):
    """Another number."""


_KINDS: dict[type, Any] = {int: WatchedInt, float: WatchedFloat}


def _operation(plain: Callable[..., Any], *, follows: bool, escapes: bool) -> Callable[..., Any]:
    def operation(self: Any, *args: Any) -> Any:
        if escapes:
            self.escapes()
        else:
            self.numbers.used(self.name)
        found = plain(self, *args)
        if not follows or type(found) not in _KINDS:
            return found
        lasts = all(arg.lasts for arg in (self, *args) if isinstance(arg, Watched))
        return self.numbers.number(self.name, found, lasts=lasts)

    return operation


for _kind, _watched in _KINDS.items():
    for _name in (*_ARITHMETIC, *_COMPARISONS, *_ESCAPES):
        if (_plain := getattr(_kind, f"__{_name}__", None)) is not None:
            _made = _operation(_plain, follows=_name in _ARITHMETIC, escapes=_name in _ESCAPES)
            setattr(_watched, f"__{_name}__", _made)


def watched_in(value: Any) -> Iterator[Watched]:
    """The watched numbers in the arguments of a call, also in slices."""
    if isinstance(value, Watched):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from watched_in(item)
    elif isinstance(value, dict):
        yield from watched_in(list(value.values()))
    elif isinstance(value, slice):
        yield from watched_in([value.start, value.stop, value.step])
