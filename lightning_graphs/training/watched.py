"""Python values of a real step that tell when they are used."""

from __future__ import annotations

import contextlib
import functools
import random
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from lightning_graphs.training.interception import replaced
from lightning_graphs.training.live_numbers import LASTING
from lightning_graphs.training.logged_floats import LoggedFloats

Note = Callable[[str], object]

_ARITHMETIC = ["add", "sub", "mul", "mod", "floordiv", "truediv", "pow"]
_ARITHMETIC += ["and", "or", "xor", "lshift", "rshift"]
_ARITHMETIC += [f"r{name}" for name in _ARITHMETIC]
_ARITHMETIC += ["neg", "pos", "abs", "invert", "round", "trunc", "floor", "ceil"]
_COMPARISONS = ["eq", "ne", "lt", "le", "gt", "ge", "bool"]
_ESCAPES = ["hash", "int", "str", "repr", "format", "divmod", "rdivmod"]
_STATE_OF_A_GENERATOR = ("getstate", "setstate", "seed", "get_state", "set_state")


class WatchedNumbers:
    """Makes numbers that tell when they are used.

    Args:
        used: Called with the name of a number with which a captured step could follow Python.
        escaped: Called with the name of one whose bare value is taken.
    """

    def __init__(self, used: Note, escaped: Note) -> None:
        self.used = used
        self.escaped = escaped
        self._logged = LoggedFloats()

    def number(self, name: str, value: Any, *, lasts: bool = False) -> Any:
        """Stand for a number; other values stay what they are."""
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

    def bare(self, number: Any, value: float) -> float:
        """A plain float for code that asks for one."""
        made = self._logged.made(number.name, value, lambda: value, sys._getframe(2))
        if made is None:
            number.escapes()
            return value
        self.used(number.name)
        return made

    def is_live(self, value: Any) -> bool:
        """Whether it is a number that a captured step would log anew."""
        return isinstance(value, Watched) or self._logged.logged(value) is not None


class Watched:
    """A number that it stands for, in all respects; says so when Python does something with it.

    C code reads it unseen: of torch's functions the observer sees the arguments, and of
    ``range`` and indexing it sees that the operators of two steps differ.
    """

    numbers: WatchedNumbers
    name: str
    lasts: bool

    @property
    def plain(self) -> Any:
        """The number itself."""
        return (int if isinstance(self, int) else float).__pos__(self)  # type: ignore[arg-type]

    def escapes(self) -> None:
        """Tell that the bare value is taken."""
        (self.numbers.used if self.lasts else self.numbers.escaped)(self.name)

    def __float__(self) -> float:
        return self.numbers.bare(self, float(self.plain))

    def __reduce__(self) -> tuple[type, tuple[Any]]:
        return type(self.plain), (self.plain,)


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


@contextlib.contextmanager
def draws_watched(note: Note) -> Iterator[None]:
    """Tell when a function of ``random`` or ``numpy.random`` draws from the shared generator."""
    numpy: Any = sys.modules.get("numpy")
    with contextlib.ExitStack() as stack:
        _watch_draws(stack, random, random.Random, note)
        if numpy is not None:
            _watch_draws(stack, numpy.random, numpy.random.RandomState, note)
        yield


def _watch_draws(
    stack: contextlib.ExitStack, module: ModuleType, generator: type, note: Note
) -> None:
    for name, function in list(vars(module).items()):
        shared = isinstance(getattr(function, "__self__", None), generator)
        if shared and name not in _STATE_OF_A_GENERATOR:
            watched = _told(function, f"{module.__name__}.{name}", note)
            stack.enter_context(replaced(module, name, watched))


def _told(function: Callable[..., Any], name: str, note: Note) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        note(name)
        return function(*args, **kwargs)

    return call
