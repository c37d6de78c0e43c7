"""Which tensors of a rehearsal would be the host's on a machine with a GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lightning_graphs.private.exchange import default_device

FACTORIES = frozenset(
    {"arange", "empty", "eye", "full", "linspace", "logspace"}
    | {"ones", "rand", "randint", "randn", "randperm", "scalar_tensor", "zeros"}
)
"""Functions that make a host tensor unless a device is given."""
_MOVING = frozenset({"cuda", "type_as"})


def makes_on_host(name: str, kwargs: Mapping[str, object]) -> bool:
    """Return whether a factory that is called so makes a tensor of the host.

    A device that is given as an object is that of the module, which rehearsals have on the CPU, and
    so is the one that a program has set for all factories.
    """
    device = kwargs.get("device")
    return name in FACTORIES and (device == "cpu" or (device is None and default_device() is None))


def given_on_host(name: str, args: Sequence[object], kwargs: Mapping[str, object]) -> bool | None:
    """Return whether a function gives a tensor of the host; None: as the tensors that it has."""
    given = (*args[1:], *kwargs.values())
    as_another = name == "to" and any(isinstance(value, Tensor) for value in given)
    if as_another or name in _MOVING or any(isinstance(v, torch.device) for v in given):
        return False
    return True if makes_on_host(name, kwargs) else None
