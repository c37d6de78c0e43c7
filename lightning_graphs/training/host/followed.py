"""Functions of Python that numbers go through: ``float``, ``int`` and those of ``math``.

They ask for a bare number. While code is watched, such a number gets the call.
"""

from __future__ import annotations

import abc
import functools
import math
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from types import FunctionType
from typing import Any

from lightning_graphs.core.callsite import frames_from, is_library
from lightning_graphs.exchange import Member, exchanged


class Followed(abc.ABC):
    """A number that code under watch computes with."""

    value: Any
    """What it is in this step."""

    @abc.abstractmethod
    def applied(self, function: Callable[..., Any], args: Sequence[Any]) -> Any:
        """What a function makes of arguments, of which this is one."""

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


Conversion = tuple[str, type]
"""A module's name, and ``float`` or ``int``."""

DrawingFunction = tuple[str, str, str]
"""The name of a module, of a function in it, and of the generator that this draws from."""


def calls_followed(conversions: Collection[Conversion] = ()) -> AbstractContextManager[None]:
    """Let functions of ``math``, and these, follow numbers; compiled code must see none of it."""
    converting = ((sys.modules[m], kind.__name__, _CONVERSIONS[kind]) for m, kind in conversions)
    return exchanged([*_OF_MATH, *converting])


def _following(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        for argument in args:
            if isinstance(argument, Followed):
                return argument.applied(function, args)
        return function(*args, **kwargs)

    return call


_OF_MATH: list[Member] = [
    (math, name, _following(function))
    for name, function in vars(math).items()
    if callable(function) and not name.startswith("__")
]


def _conversion(kind: Any) -> type:
    """What stands for ``float`` or ``int`` in a module; torch does not know it as a dtype."""
    following = _following(kind)

    class Meta(type):
        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            return following(*args, **kwargs)

        def __instancecheck__(cls, value: Any) -> bool:
            return isinstance(value.value if isinstance(value, Followed) else value, kind)

        def __eq__(cls, other: object) -> bool:
            return other is kind or other is cls

        def __hash__(cls) -> int:
            return hash(kind)

    return Meta(kind.__name__, (kind,), {FOR_A_WHILE: True})


FOR_A_WHILE = "_stands_for_a_while"
"""An attribute of functions and classes that are taken away again at the end of the capture."""

_CONVERSIONS: dict[type, type] = {kind: _conversion(kind) for kind in (float, int)}


def stands_for_a_while(value: Any) -> bool:
    """Whether this stands for ``float``, ``int`` or a function while code is followed."""
    return isinstance(value, (FunctionType, type)) and FOR_A_WHILE in vars(value)


def constants_around() -> Iterator[Any]:
    """The constants in the text of the author's functions that are running."""
    for frame in frames_from(sys._getframe(1)):
        if not is_library(frame.f_code.co_filename):
            yield from frame.f_code.co_consts
