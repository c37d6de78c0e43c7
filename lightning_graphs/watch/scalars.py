"""Numbers that an optimizer keeps in tensors of the host: ``state["step"] += 1``.

torch's own optimizers count so, and many of others. A captured step finds stand-ins in their place,
which C++ takes for such tensors, and which compute with the tracers of their numbers: what the step
makes of a number on the host, each replay makes of the present one by the same operators of torch.
Where a stand-in meets a tensor of the device, its number is an argument of that kernel.

What such a step reads of the device (``param.norm().item()``) is a number there.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from lightning_graphs.device.rules import COUNTER
from lightning_graphs.device.trace import FunctionMode
from lightning_graphs.private.callsite import OURS, outside_of
from lightning_graphs.private.exchange import Member, exchanged
from lightning_graphs.private.torch import of_class, out_of_sight, version_of
from lightning_graphs.values.tree import leaves_of
from lightning_graphs.watch.both_ways import BothWays
from lightning_graphs.watch.forms import of_single, one_by_one, plain_value, tensor_of_numbers
from lightning_graphs.watch.on_device import DeviceNumber, is_scalar, of_two
from lightning_graphs.watch.tracers import (
    Asks,
    Conversion,
    Question,
    ScalarTracer,
    calls_followed,
    refuse_tracers,
    tensors_asked,
)

_DTYPES = (torch.float32, torch.float64, torch.int64, torch.int32)
_LOOKS = frozenset(
    {"dim", "ndimension", "numel", "nelement", "size", "stride", "element_size", "__len__"}
    | {"is_floating_point", "is_complex", "is_contiguous", "get_device", "__get__", "__hash__"}
)
"""Functions that look at a tensor, and not at its number."""
_SAME = frozenset({"detach", "cpu", "contiguous"})
"""Functions that return the same tensor of a CPU, or one with its memory."""


def holds_number(value: Any) -> bool:
    """Return whether a value is a tensor of a CPU with one number, which a replay can write."""
    return (
        type(value) is Tensor
        and value.device.type == "cpu"
        and value.numel() == 1
        and value.dtype in _DTYPES
        and not (value.requires_grad or value.is_inference())
    )


class HostScalar(Tensor):
    """Stands for a tensor of the host, while a step is captured that computes with its number."""

    takes_numbers = True
    number: Any  # that of the present: a tracer, or a constant

    @staticmethod
    def of(tensor: Tensor, number: Any) -> HostScalar:
        """Make one with the dtype and the shape of a tensor."""
        with out_of_sight():
            made: Any = of_class(HostScalar, tensor.detach())
        made.number = number
        return made  # type: ignore[no-any-return]

    @staticmethod
    def called(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call a function of torch, which does not ask for one in the place of a number."""
        if not leaves_of((args, kwargs), HostScalar):
            return function(*args, **kwargs)
        return HostScalar.__torch_function__(function, (), args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Refuse what C++ does with its memory; lists of tensors detach what they group."""
        if function is not torch.ops.aten.detach.default:
            _refuse(next(iter(leaves_of((args, kwargs or {}), HostScalar))))
            return function(*_as_numbers(args), **_as_numbers(kwargs or {}))
        return args[0]

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given, name = (args, kwargs or {}), getattr(function, "__name__", "")
        if name.startswith("_foreach_"):
            return one_by_one(name, *given)
        first = args[0] if args and isinstance(args[0], HostScalar) else None
        if first is not None and name in _LOOKS:
            if function == Tensor.data.__get__:  # type: ignore[attr-defined]
                return first
            with out_of_sight():
                return function(*args, **given[1])
        if first is not None and name in _SAME:
            return first
        if first is not None and name in ("to", "cuda") and (moved := _moved(first, given)):
            return moved[0]
        others = [t for t in leaves_of(given, Tensor) if not isinstance(t, HostScalar)]
        if others:
            if first is not None and _is_in_place(name):
                _refuse(first)  # a value of the device goes into it
            return function(*_as_numbers(args), **_as_numbers(given[1]))
        if first is not None and name in _READS:
            return _READS[name](first.number)
        return _on_host(function, *given)


@contextlib.contextmanager
def scalars_followed(
    numbers: Any, conversions: Collection[Conversion], modules: Iterable[str], ways: BothWays
) -> Iterator[None]:
    """Let functions of torch and of Python take stand-ins in the body, a step of an optimizer.

    Args:
        numbers: The :class:`~lightning_graphs.watch.numbers.StepNumbers` of the capture.
        conversions: Those of modules that take them.
        modules: Names of modules whose ``max`` and ``min`` take numbers of the device.
        ways: Answers where the step asks the device.
    """

    def answer(question: Question) -> Any:
        tensor = question.tensors[0]
        if isinstance(tensor, HostScalar):
            return tensor.number
        is_read = question.asks in (Asks.ITEM, Asks.NUMBER) and tensor.numel() == 1
        if not (is_read and is_scalar(number := tensor.detach().reshape(()), numbers.device)):
            return ways.answer(question)
        return DeviceNumber(numbers, number.double(), owner=ways)

    larger_or_smaller = [of_two(numbers, function) for function in (max, min)]
    following = [(sys.modules[m], f.__name__, f) for m in modules for f in larger_or_smaller]
    with (
        exchanged([*_functions_followed(numbers), *following]),
        FunctionMode(HostScalar.called),
        tensors_asked(answer),
        calls_followed(conversions),
        ways.followed(numbers),
    ):
        yield


def _converted(kind: Any) -> Callable[[Any], Any]:
    def convert(number: Any) -> Any:
        if isinstance(number, ScalarTracer):
            frame = outside_of(sys._getframe(1), OURS, "torch.")  # which pass on what code asks for
            return number.converted(kind, frame.f_globals.get("__name__", ""))
        return kind(number)

    return convert


_READS: dict[str, Callable[[Any], Any]] = {
    "item": lambda number: number,
    "__bool__": bool,
    "__float__": _converted(float),
    "__int__": _converted(int),
}


def _is_in_place(name: str) -> bool:
    return name.startswith("__i") or (name.endswith("_") and not name.endswith("__"))


def _as_numbers(value: Any) -> Any:
    """Return arguments of a kernel of the device, with the numbers of stand-ins."""

    def number(scalar: HostScalar) -> Any:
        if scalar.dtype not in (torch.float32, torch.float64) or scalar.dim():
            _refuse(scalar)  # the type of the result would be another one
        return scalar.number

    return tree_map_only(HostScalar, number, value)


def _refuse(scalar: HostScalar, name: str = "a tensor of the host") -> None:
    number = scalar.number
    COUNTER.refuse_here(f"{number.name if isinstance(number, ScalarTracer) else name} is read")


def _moved(scalar: HostScalar, given: Any) -> list[Tensor]:
    """Return a copy of the number on the device, if it is moved there."""
    places = [*leaves_of(given, torch.device), *leaves_of(given, str)]
    number = scalar.number
    if not any(place != "cpu" for place in places) or not isinstance(number, ScalarTracer):
        return []
    dtype = next(iter(leaves_of(given, torch.dtype)), scalar.dtype)
    return [number.numbers.tensor_of(number, dtype).clone()]


def _on_host(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Compute with numbers of the host, as each replay does with the present ones."""
    leaves, names, kinds = [*args, *kwargs.values()], [*kwargs], []
    for items in leaves:
        if isinstance(items, (list, tuple, dict)):  # as of torch.stack
            for scalar in leaves_of(items, HostScalar):
                _refuse(scalar)
            refuse_tracers(items)
    for leaf in leaves:  # what each replay has anew: of a tensor dtype and shape
        with out_of_sight():
            kinds.append((leaf.shape, leaf.dtype) if isinstance(leaf, HostScalar) else None)

    def run(*values: Any) -> tuple[list[Any], Any]:
        pairs = zip(kinds, values, strict=True)
        found = [v if kind is None else torch.full(kind[0], v, dtype=kind[1]) for kind, v in pairs]
        named = dict(zip(names, found[len(args) :], strict=True))
        return found, function(*found[: len(args)], **named)

    def compute(*values: Any) -> Any:
        with out_of_sight(), torch.no_grad():
            return run(*values)[1].item()

    operands = list(map(_number, leaves))
    with out_of_sight(), torch.no_grad():
        found, result = run(*map(plain_value, operands))
        if not (holds_number(result) or _is_flag(result)) or result._is_view():
            _refuse(next(leaf for leaf in leaves if isinstance(leaf, HostScalar)))
            return result
        own = next((leaf for leaf, t in zip(leaves, found, strict=True) if t is result), None)
        if own is not None and version_of(result) == 0:
            return own
    tracer = next((o for o in operands if isinstance(o, ScalarTracer)), None)
    name = f"{function.__name__}({', '.join(map(_name, operands))})"
    number = compute(*operands) if tracer is None else tracer.computed(name, compute, *operands)
    if own is None:
        return HostScalar.of(result, number)
    own.number = number
    return own


def _is_flag(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype is torch.bool and value.numel() == 1


def _number(leaf: Any) -> Any:
    return leaf.number if isinstance(leaf, HostScalar) else leaf


def _name(leaf: Any) -> str:
    return leaf.name if isinstance(leaf, ScalarTracer) else repr(leaf)


def _functions_followed(numbers: Any) -> Iterator[Member]:
    """List functions of torch with those that take tracers: over lists, and of a number."""
    for name in filter(of_single, dir(torch)):
        yield torch, name, _taking_tracers(name, getattr(torch, name))
    for name in ("tensor", "as_tensor"):
        yield torch, name, _making_scalars(getattr(torch, name), numbers)


def _making_scalars(own: Callable[..., Any], numbers: Any) -> Callable[..., Any]:
    def tensor(data: Any, **kwargs: Any) -> Any:
        if (made := tensor_of_numbers(numbers, data, **kwargs)) is not None:
            return made
        is_number = type(data) in (int, float) or isinstance(data, ScalarTracer)
        if not is_number or kwargs.get("device") not in (None, "cpu"):
            return own(data, **kwargs)

        def compute(value: Any) -> Any:
            with out_of_sight():
                return own(value, **kwargs).item()

        with out_of_sight():
            made = own(plain_value(data), **kwargs)
        if not holds_number(made):
            return made
        if isinstance(data, ScalarTracer):
            return HostScalar.of(made, data.computed(f"tensor({data.name})", compute, data))
        return HostScalar.of(made, compute(data))

    return tensor


def _taking_tracers(name: str, own: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        given = (*args, *kwargs.values())
        lists = (arg for arg in given if isinstance(arg, (list, tuple)))
        if any(isinstance(item, ScalarTracer) for items in lists for item in items):
            return one_by_one(name, args, kwargs)
        return own(*args, **kwargs)

    return call
