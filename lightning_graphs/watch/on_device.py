"""Numbers that captured code reads of the device, and that stay there.

``loss.item()`` and ``param.norm().item()`` give a tracer. What code computes with it, the graph
computes in 64 bits, as Python does; where it meets a tensor, it is a number of the device; only how
a comparison turns out may have to be known on the host.
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
from lightning_graphs.private.exchange import standing_in
from lightning_graphs.private.torch import PLAIN_TENSORS, out_of_sight
from lightning_graphs.values.tree import leaves_of
from lightning_graphs.watch.forms import Numbers, inverse, plain_value
from lightning_graphs.watch.tracers import Kind, Method, Question, ScalarTracer


class Owner(Protocol):
    """The capture that answers how comparisons turn out."""

    is_captured: bool
    """Whether it has ended."""

    def holds(self, truth: Tensor, frame: FrameType) -> bool | None:
        """Answer whether a comparison is true; None if that is not known."""


class DeviceNumber(ScalarTracer):
    """The number of a tensor, or how a comparison of it turns out.

    Its operations are exact, or rounded as Python rounds them; others are refused.

    Args:
        numbers: Those of the capture.
        tensor: A scalar of the device.
        owner: Answers how comparisons turn out; without one they are refused.
        is_positive: It cannot be nought, by which Python divides with an error.
    """

    is_of_device = True

    def __init__(
        self,
        numbers: Numbers,
        tensor: Tensor,
        *,
        owner: Owner | None = None,
        is_positive: bool = False,
    ) -> None:
        value, name = 0.0 if tensor.is_floating_point() else 0, "a number of the device"
        super().__init__(numbers, numbers.unique(name), self.refuse, value, False, HOST_READ)
        self.tensor, self._owner, self._is_positive = tensor, owner, is_positive

    def in_graph(self, dtype: torch.dtype) -> Tensor:
        return self.tensor.to(dtype)

    def refuse(self) -> None:
        self.numbers.are_bare = True
        HOST_READ.refuse_here("a number of the device is read")

    def now(self) -> Any:
        """Return the number, behind a replay; a capture has none yet."""
        is_captured = self._owner is not None and self._owner.is_captured
        return self.tensor.item() if is_captured else self.value

    def use(self, method: Method, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if method.kind is not Kind.TRUTH:
            return super().use(method, args, kwargs)
        found = None if self._owner is None else self._owner.holds(self.tensor, sys._getframe(2))
        return self.seen(bool) if found is None else found

    def seen(self, function: Callable[..., Any], *args: Any) -> Any:
        self.refuse()
        return function(_bare(self), *args)

    def converted(self, kind: type, module: str) -> Any:
        self.numbers.asked.add((module, kind))  # the next capture may follow that
        return self.seen(kind)

    def computed(self, name: str, function: Callable[..., Any], *operands: Any) -> Any:
        compute = _EXACT.get(function) or _ROUNDED.get(function)
        if compute is None or (function is operator.truediv and not _divides(operands[1])):
            self.refuse()
            return function(*map(_bare, operands))
        is_positive = function is max and any(type(o) in (int, float) and o > 0 for o in operands)
        in_double = function in _ROUNDED
        return self._computed(compute, operands, in_double=in_double, is_positive=is_positive)

    def outcome(self, name: str, function: Callable[..., Any], *operands: Any) -> Any:
        return self._computed(function, operands)

    def applied(self, function: Callable[..., Any], args: Sequence[Any]) -> Any:
        if function in _TESTS:
            return self.outcome("", _TESTS[function], *args)
        if function is type(self.value) and len(args) == 1:
            return self
        return self.computed("", function, *args)

    def _computed(
        self,
        function: Callable[..., Tensor],
        operands: Sequence[Any],
        *,
        in_double: bool = False,  # also where all are whole
        is_positive: bool = False,
    ) -> DeviceNumber:
        is_real = in_double or any(type(plain_value(operand)) is float for operand in operands)
        dtype = torch.float64 if is_real else torch.int64
        with torch.no_grad():
            found = function(*[self._tensor_of(operand, dtype) for operand in operands])
        return DeviceNumber(self.numbers, found, owner=self._owner, is_positive=is_positive)

    def _tensor_of(self, operand: Any, dtype: torch.dtype) -> Tensor:
        if isinstance(operand, ScalarTracer):
            return self.numbers.tensor_of(operand, dtype)  # type: ignore[no-any-return]
        # CUDA divides by numbers of the host as it multiplies with their inverse
        return torch.full((), operand, dtype=dtype, device=self.tensor.device)


def _bare(operand: Any) -> Any:
    """Return a plain number, while captures that only take notes watch."""
    if isinstance(operand, DeviceNumber):
        dtype = torch.float64 if type(operand.value) is float else torch.int64
        return number_in(operand.in_graph(dtype))
    return plain_value(operand)


def _divides(divisor: Any) -> bool:
    """Return whether Python surely divides by a value without an error."""
    if isinstance(divisor, DeviceNumber):
        return divisor._is_positive
    return bool(divisor != 0.0)  # a guard, of what replays have


_EXACT: dict[Any, Callable[..., Tensor]] = {
    operator.add: torch.add,
    operator.sub: torch.sub,
    operator.mul: torch.mul,
    operator.neg: torch.neg,
    abs: torch.abs,
}
_ROUNDED: dict[Any, Callable[..., Tensor]] = {
    operator.truediv: torch.div,
    inverse: lambda a: torch.ones_like(a) / a,
    math.sqrt: torch.sqrt,
    float: lambda a: a,
    max: lambda a, b: torch.where(b > a, b, a),
    min: lambda a, b: torch.where(b < a, b, a),
}
_TESTS: dict[Callable[..., Any], Callable[..., Tensor]] = {
    getattr(module, name): getattr(torch, name)
    for module in (math, numpy)
    for name in ("isnan", "isinf", "isfinite")
}


def truth_of(asked: Question) -> Tensor | None:
    """Compute whether what code asks of tensors is true; None of several values, as torch says."""
    with torch.no_grad():
        truth = asked.condition().detach()
    return truth.reshape(()) if truth.numel() == 1 else None


def number_in(tensor: Tensor) -> Any:
    """Read a number while captures that only take notes watch."""
    with out_of_sight():
        return tensor.item()


# ------------------ The larger or smaller of two


class Either(DeviceNumber):
    """The larger or smaller of a number and a tensor with one, of which Python has one.

    What code computes with it the graph computes with both, and chooses where that meets a tensor.
    """

    def __init__(self, numbers: Numbers, is_tensor: Tensor, tensor: Any, number: Any) -> None:
        super().__init__(numbers, tensor)
        self._is_tensor, self._number = is_tensor, number

    def in_graph(self, dtype: torch.dtype) -> Tensor:
        with torch.no_grad():
            number = self._tensor_of(self._number, torch.float64).to(dtype)
            return torch.where(self._is_tensor, self.tensor.to(dtype), number)

    def computed(self, name: str, function: Callable[..., Any], *operands: Any) -> Any:
        others = [operand for operand in operands if operand is not self]
        if function not in _BOTH_WAYS or leaves_of(others, DeviceNumber):
            self.refuse()
            return function(*map(_bare, operands))
        with torch.no_grad():
            found = [
                function(*[own if o is self else o for o in operands])
                for own in (self.tensor, self._number)
            ]
        return Either(self.numbers, self._is_tensor, *found)


_BOTH_WAYS = (operator.add, operator.sub, operator.mul, operator.neg)


def of_two(numbers: Numbers, function: Any) -> Callable[..., Any]:
    """Return what stands for ``max`` or ``min`` in a module."""

    def larger_or_smaller(_: FrameType, *args: Any, **kwargs: Any) -> Any:
        if len(args) != 2 or kwargs:
            return function(*args, **kwargs)
        if any(isinstance(arg, DeviceNumber) for arg in args):
            number = next(arg for arg in args if isinstance(arg, DeviceNumber))
            return number.computed(function.__name__, function, *args)
        tensors = [arg for arg in args if is_scalar(arg, numbers.device)]
        others = [a for a in args if type(a) in (int, float) or isinstance(a, ScalarTracer)]
        if (len(tensors), len(others)) != (1, 1):
            return function(*args, **kwargs)
        second = args[1] > args[0] if function is max else args[1] < args[0]
        is_tensor = second if args[1] is tensors[0] else second.logical_not()
        return Either(numbers, is_tensor, *tensors, *others)

    return standing_in(function, larger_or_smaller)


def is_scalar(value: Any, device: torch.device) -> bool:
    """Return whether a value is a real tensor of the device with one number, and no dimension."""
    is_here = type(value) in PLAIN_TENSORS and value.device == device
    return is_here and value.dim() == 0 and value.dtype.is_floating_point
