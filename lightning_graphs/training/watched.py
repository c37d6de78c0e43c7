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

Note = Callable[[str], object]

_BINARY = ["add", "sub", "mul", "mod", "floordiv", "truediv", "pow", "divmod"]
_BINARY += ["and", "or", "xor", "lshift", "rshift"]
_OTHER = ["neg", "pos", "abs", "invert", "round", "trunc", "floor", "ceil", "hash", "bool", "int"]
_OTHER += ["float", "str", "repr", "format", "eq", "ne", "lt", "le", "gt", "ge"]
_OPERATIONS = [*_BINARY, *(f"r{name}" for name in _BINARY), *_OTHER]
_STATE_OF_A_GENERATOR = ("getstate", "setstate", "seed", "get_state", "set_state")


class WatchedInt(int):
    """The number that it stands for, in all respects; says so when Python computes with it.

    C code reads it unseen: of torch's functions the observer sees the arguments, and of
    ``range`` and indexing it sees that the operators of two steps differ.
    """

    note: Note
    name: str

    def __new__(cls, value: int, name: str, note: Note) -> WatchedInt:
        """Stand for ``value``; ``note`` is called with ``name``."""
        number = super().__new__(cls, value)
        number.name, number.note = name, note
        return number

    def used(self) -> None:
        """Tell that the value is used."""
        self.note(self.name)

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        return int, (int.__int__(self),)


def _operation(name: str) -> Callable[..., Any]:
    plain = getattr(int, name)

    def operation(self: WatchedInt, *args: Any) -> Any:
        self.used()
        return plain(self, *args)

    return operation


for _name in _OPERATIONS:
    setattr(WatchedInt, f"__{_name}__", _operation(f"__{_name}__"))


def watched_in(value: Any) -> Iterator[WatchedInt]:
    """The watched numbers in the arguments of a call, also in slices."""
    if isinstance(value, WatchedInt):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from watched_in(item)
    elif isinstance(value, dict):
        yield from watched_in(list(value.values()))
    elif isinstance(value, slice):
        yield from watched_in([value.start, value.stop, value.step])


def watched_counter(note: Note, name: str, read: Callable[[], Any]) -> Any:
    """The value of a counter that is read, which tells when it is used."""
    value = read()
    if type(value) is int:
        return WatchedInt(value, name, note)
    note(name)
    return value


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
