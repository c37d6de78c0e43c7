"""What stands for an object that is compared by what it is, not by what is in it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import torch


class Identity:
    """An object that is only equal to itself, and that is not kept alive for being known."""

    __slots__ = ("_count", "_hash", "_name", "_object", "is_tensor")

    def __init__(self, value: Any, count: int | None = None) -> None:
        self._object: Callable[[], Any]
        try:
            self._object = weakref.ref(value)
        except TypeError:
            self._object = lambda: value
        self._count = count
        self.is_tensor = isinstance(value, torch.Tensor)
        self._hash = hash((id(value), count))
        named = isinstance(value, (type, FunctionType, BuiltinFunctionType, ModuleType))
        self._name = value.__name__ if named else type(value).__qualname__
        if self.is_tensor:
            shape = "x".join(map(str, value.shape)) or "scalar"
            self._name += f" {str(value.dtype).removeprefix('torch.')}[{shape}]"

    def matches(self, value: Any) -> bool:
        return value is not None and value is self._object()

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Identity) or self._count != other._count:
            return False
        return self.matches(other._object())

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return self._name if self._count is None else f"{self._name} of {self._count}"


def is_tensor(value: Any) -> bool:
    """Whether this stands for a tensor."""
    return isinstance(value, Identity) and value.is_tensor
