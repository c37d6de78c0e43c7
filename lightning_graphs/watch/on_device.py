"""Numbers that captured code reads of the device, and that stay there.

``loss.item()`` gives a tracer. What code computes with it, the graph computes in 64 bits, as Python
does; where it meets a tensor, it is a number of the device; only how a comparison turns out may
have to be known on the host.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any, Protocol

import numpy
import torch
from torch import Tensor

from lightning_graphs.device.rules import HOST_READ
from lightning_graphs.private.torch import out_of_sight
from lightning_graphs.watch.forms import Form, form_of, inverse
from lightning_graphs.watch.tracers import Kind, Operation, ScalarTracer


class Owner(Protocol):
    """The capture that numbers are read in."""

    is_captured: bool
    """Whether it has ended."""

    def holds(self, truth: Tensor, frame: FrameType) -> bool:
        """Answer whether a comparison is true."""


class _Numbers:
    """Numbers of the device, as operators of torch ask for them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.bounds: list[float] = []

    def form_of(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Form | None:
        return form_of(function, args, kwargs, self.device)

    def tensor_of(self, number: ScalarTracer, dtype: torch.dtype) -> Tensor:
        if not isinstance(number, NumberOfDevice):
            number.refuse()
            raise HOST_READ.refused_here("a number of the host meets one of the device")
        return number.tensor.to(dtype)

    def read_only(self, name: str, *tensors: Tensor) -> None:
        """Do nothing: a read number is a copy."""


class NumberOfDevice(ScalarTracer):
    """The number of a tensor, or how a comparison of it turns out."""

    def __init__(self, owner: Owner, tensor: Tensor) -> None:
        value = 0.0 if tensor.is_floating_point() else 0
        numbers = _Numbers(tensor.device)
        super().__init__(numbers, "the number", lambda: None, value, False, HOST_READ)
        self._owner, self.tensor = owner, tensor

    def use(self, operation: Operation, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if operation.kind is Kind.TRUTH:
            return self._owner.holds(self.tensor, sys._getframe(2))
        return super().use(operation, args, kwargs)

    def refuse(self) -> None:
        HOST_READ.refuse_here("a number of the device is read")

    def now(self) -> Any:
        """Return the number, behind a replay; a capture has none yet."""
        return self.tensor.item() if self._owner.is_captured else self.value

    def seen(self, function: Callable[..., Any], *args: Any) -> Any:
        self.refuse()
        return function(number_in(self.tensor), *args)

    def converted(self, kind: type, module: str) -> Any:
        return self.seen(kind)

    def _on_device(self, function: Callable[..., Any], operands: Sequence[Any]) -> NumberOfDevice:
        """Compute with Python's numbers, which have 64 bits."""
        given = [each.tensor if isinstance(each, NumberOfDevice) else each for each in operands]
        if any(isinstance(each, ScalarTracer) for each in given):
            self.refuse()
        real = any(map(_is_real, given))
        found = [
            (each.double() if real else each.long()) if isinstance(each, Tensor) else each
            for each in given
        ]
        with torch.no_grad():
            return NumberOfDevice(self._owner, function(*found))

    def computed(self, name: str, function: Callable[..., Any], *operands: Any) -> Any:
        if function is operator.truediv and _is_divisor(operands[1]):
            return self._on_device(lambda a, b: a.double() / b, operands)
        if function is inverse:
            return self._on_device(lambda a: a.double().reciprocal(), operands)
        if function not in _EXACT:
            self.refuse()
            given = (o.tensor if isinstance(o, NumberOfDevice) else o for o in operands)
            return function(*(number_in(o) if isinstance(o, Tensor) else o for o in given))
        return self._on_device(function, operands)

    def outcome(self, name: str, function: Callable[..., Any], *operands: Any) -> Any:
        return self._on_device(function, operands)

    def applied(self, function: Callable[..., Any], args: Sequence[Any]) -> Any:
        if function in _TESTS:
            return self.outcome("", _TESTS[function], *args)
        if function is type(self.value) and len(args) == 1:
            return self
        if function is float and len(args) == 1:
            return self._on_device(Tensor.double, args)
        return self.computed("", function, *args)


def _is_real(value: Any) -> bool:
    return value.is_floating_point() if isinstance(value, Tensor) else type(value) is float


def _is_divisor(value: Any) -> bool:
    """Return whether Python divides by a value without an error."""
    return type(value) in (int, float) and bool(value)


_EXACT = (operator.add, operator.sub, operator.mul, operator.neg, abs)
_TESTS: dict[Callable[..., Any], Callable[..., Tensor]] = {
    getattr(module, name): getattr(torch, name)
    for module in (math, numpy)
    for name in ("isnan", "isinf", "isfinite")
}


def number_in(tensor: Tensor) -> Any:
    """Read a number while captures that only take notes watch."""
    with out_of_sight():
        return tensor.item()
