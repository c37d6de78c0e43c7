"""Leaves of autograd that are alive, or that code can reach; which of its nodes are older."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterable, Iterator
from functools import partial
from types import CellType, CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from lightning_graphs.private.callsite import is_library, package_of
from lightning_graphs.private.torch import out_of_sight

_PLAIN = (Tensor, nn.Parameter)


def leaves_alive() -> Iterator[Tensor]:
    """Yield every tensor known to Python that may be a leaf of autograd; the look takes 40 ms."""
    # What refers to these classes is found in half the time of a look at all objects.
    found = gc.get_referrers(*_PLAIN)
    yield from [tensor for tensor in found if type(tensor) in _PLAIN]


_LEAF_LOOKS = 4096
"""Objects that are looked at one by one at most: a look at all that there are takes no longer."""

_HAS_NO_LEAF = frozenset({type(None), bool, int, float, complex, str, bytes, slice, range})
_OF_MODULES = frozenset(vars(nn.Module())) - {"_parameters", "_buffers", "_modules"}


def leaves_in_reach(frame: FrameType | None) -> Iterator[Tensor]:
    """Yield the tensors that may be leaves of autograd, and that a frame and its callers can reach.

    By variables, closures, containers, and attributes of objects. Where that is much, those are all
    that are alive. What is missing, CUDA refuses.
    """
    pending: list[Any] = []
    while frame is not None:
        if _is_of_author(frame.f_code):
            pending += (frame.f_locals, frame.f_globals)
        frame = frame.f_back
    found: dict[int, Tensor] = {}
    seen: set[int] = set()
    while pending:
        value = pending.pop()
        if id(value) in seen or type(value) in _HAS_NO_LEAF:
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            found[id(value)] = value
        elif len(seen) > _LEAF_LOOKS:
            yield from leaves_alive()
            return
        else:
            pending += _held_by(value)
    yield from found.values()


def _held_by(value: Any) -> Iterable[Any]:
    """List what a value refers to."""
    if isinstance(value, nn.Module):
        return [held for key, held in vars(value).items() if key not in _OF_MODULES]
    if isinstance(value, dict):
        return [*value, *value.values()]
    if isinstance(value, (list, tuple, set, frozenset)):
        return value
    if isinstance(value, partial):
        return value.func, value.args, value.keywords
    if isinstance(value, MethodType):
        return value.__self__, value.__func__
    if isinstance(value, FunctionType):
        if not _is_of_author(value.__code__):
            return ()
        return value.__closure__ or (), value.__defaults__, value.__kwdefaults__, value.__globals__
    if isinstance(value, CellType):
        with contextlib.suppress(ValueError):  # it is not filled yet
            return (value.cell_contents,)
    table = None if isinstance(value, (type, ModuleType)) else getattr(value, "__dict__", None)
    return table.values() if isinstance(table, dict) else ()


def _is_of_author(code: CodeType) -> bool:
    return not package_of(code.co_filename) and not is_library(code.co_filename)


# ------------------ The age of nodes


def sequence_number(node: Node) -> int:
    """Return a number that is larger for each further node of a thread, and largest for leaves."""
    number: int = node._sequence_nr()
    return number


def next_sequence_number() -> int:
    """Return the number of a node that is made now, and soon gone."""
    with out_of_sight(), torch.enable_grad(), torch.inference_mode(False):
        node = torch.zeros((), requires_grad=True).view(()).grad_fn
    return 0 if node is None else sequence_number(node)
