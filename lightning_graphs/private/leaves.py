"""Leaves of autograd that are alive, or that code can reach."""

from __future__ import annotations

import contextlib
import gc
from collections import deque
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import islice
from types import CellType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_graphs.private.callsite import is_library, package_of, variables_of

_PLAIN = (Tensor, nn.Parameter)


def leaves_alive() -> Iterator[Tensor]:
    """Yield every tensor known to Python that may be a leaf of autograd; the look takes 40 ms."""
    # What refers to these classes is found in half the time of a look at all objects.
    found = gc.get_referrers(*_PLAIN)
    yield from [tensor for tensor in found if type(tensor) in _PLAIN]


_LOOKS, _DEPTH, _ENTRIES, _DATA = 2048, 4, 512, 2**14
"""Objects that are looked into at most, how deep inside of others, and of how many in a container;
and where in one of more there are tensors. A look at all that there are takes no longer."""

_HAS_NONE = frozenset({type(None), bool, int, float, str, bytes, type, ModuleType})


def _is_tensor(value: object) -> bool:
    return issubclass(type(value), Tensor)  # what it says to be its class may be another one


def leaves_in_reach(frame: FrameType | None) -> Iterator[Tensor]:
    """Yield the tensors that may be leaves of autograd, and that an author's frames can reach.

    By variables, closures, containers, modules, and attributes of objects. Where these are many, it
    yields all that are alive. What is missing, CUDA refuses.
    """
    pending: deque[tuple[int, Any]] = deque()
    while frame is not None:
        file = frame.f_code.co_filename
        if not (is_library(file) or package_of(file)):
            pending += [(0, variables_of(frame)), (0, frame.f_globals)]
        frame = frame.f_back
    found: dict[int, Tensor] = {}
    seen: dict[int, Any] = {}  # with each, so that an ``id`` stays its own
    while pending:
        depth, value = pending.popleft()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        if issubclass(type(value), nn.Module):
            pending += [(depth, child) for child in value._modules.values() if child is not None]
        for held in _held_by(value):
            if _is_tensor(held):
                found[id(held)] = held
            elif depth < _DEPTH and type(held) not in _HAS_NONE:
                pending.append((depth + 1, held))
        if len(seen) > _LOOKS:
            yield from leaves_alive()
            return
    yield from found.values()


def _held_by(value: Any) -> Iterable[Any]:
    """List what a value refers to; of modules, tensors alone."""
    kind = type(value)
    if issubclass(kind, nn.Module):
        held = (*value._parameters.values(), *vars(value).values())
        return filter(_is_tensor, held)
    if issubclass(kind, Optimizer):
        return [parameter for group in value.param_groups for parameter in group["params"]]
    if issubclass(kind, (dict, list, tuple, set)):
        entries = value.values() if issubclass(kind, dict) else value
        is_short = len(value) <= _ENTRIES
        return entries if is_short else filter(_is_tensor, islice(entries, _DATA))
    if kind is FunctionType:
        return value.__closure__ or ()
    if kind is MethodType:
        return value.__self__, value.__func__
    if kind is partial:
        return value.func, value.args, value.keywords
    if issubclass(kind, (type, ModuleType)):
        return ()
    with contextlib.suppress(AttributeError, ValueError):  # there is none; a cell is not filled yet
        if kind is CellType:
            return (value.cell_contents,)
        table = object.__getattribute__(value, "__dict__")
        return table.values() if type(table) is dict else ()
    return ()
