"""Python values of a real step that tell when they are used."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from lightning_graphs.training.followed import Followed
from lightning_graphs.training.live_numbers import LASTING

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
