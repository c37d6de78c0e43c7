"""Which tensors of a rehearsal would be the host's on a machine with a GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from lightning_graphs.device.rules import HOST_COPY, HOST_READ, Obstacle
from lightning_graphs.device.trace import KnownStorage, OperatorCall
from lightning_graphs.private.exchange import default_device
from lightning_graphs.private.torch import has_memory

FACTORIES = frozenset(
    {"arange", "empty", "eye", "full", "linspace", "logspace"}
    | {"ones", "rand", "randint", "randn", "randperm", "scalar_tensor", "zeros"}
)
"""Functions that make a host tensor unless a device is given."""
COPYING_SCALARS = frozenset({torch.ops.aten.where.self})
"""Operators whose kernels copy one number of the host to the device; others read it in place.

Backward passes have them, too: that of a power with an exponent of the host.
"""
_OF_PYTHON = frozenset({"tensor", "as_tensor", "asarray"})
_MOVING = frozenset({"cuda", "type_as"})


def makes_on_host(name: str, kwargs: Mapping[str, object]) -> bool:
    """Return whether a factory that is called so makes a tensor of the host.

    A device that is given as an object is that of the module, which rehearsals have on the CPU, and
    so is the one that a program has set for all factories.
    """
    return name in FACTORIES and _names_host(kwargs)


def _names_host(kwargs: Mapping[str, object]) -> bool:
    device = kwargs.get("device")
    return device == "cpu" or (device is None and default_device() is None)


def given_on_host(name: str, args: Sequence[object], kwargs: Mapping[str, object]) -> bool | None:
    """Return whether a function gives a tensor of the host; None: as the tensors that it has."""
    given = (*args[1:], *kwargs.values())
    as_another = name == "to" and any(isinstance(value, Tensor) for value in given)
    if as_another or name in _MOVING or any(isinstance(v, torch.device) for v in given):
        return False
    of_python = name in _OF_PYTHON and not any(isinstance(data, Tensor) for data in args[:1])
    return True if (of_python or name in FACTORIES) and _names_host(kwargs) else None


def is_of_host(call: OperatorCall, know: Callable[[Tensor], KnownStorage]) -> bool:
    """Return whether an operator has tensors of the host, and none of the device."""
    return any(on_host := _residences(call.inputs, know)) and all(on_host)


def copies_between(call: OperatorCall, know: Callable[[Tensor], KnownStorage]) -> Obstacle | None:
    """Return the obstacle if an operator copies from device to host, or one number back."""
    if all(on_host := _residences(call.inputs, know)):
        return None
    if any(known.on_host for known in map(know, filter(has_memory, call.written))):
        return HOST_READ
    return HOST_COPY if call.func in COPYING_SCALARS and any(on_host) else None


def _residences(tensors: Sequence[Tensor], know: Callable[[Tensor], KnownStorage]) -> list[bool]:
    """Return which tensors are on the host; of numbers that torch makes tensors nothing tells."""
    pairs = [(tensor, know(tensor)) for tensor in filter(has_memory, tensors)]
    return [
        known.on_host
        for tensor, known in pairs
        if known.on_host or (not known.constant and (known.born or tensor.dim()))
    ]
