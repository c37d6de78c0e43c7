"""What modules hold: the values of their attributes, and what is inside of these."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import nn

from lightning_graphs.core.values import DEPTH, MOST_INSIDE, entries, is_plain

_CONTAINERS = (list, tuple, dict, set, frozenset, deque)  # an author's __len__ may do anything
_TABLES = ("_parameters", "_buffers", "_modules")

# `log` and `forward` are exchanged in instances while a step or a module is captured; the state
# is that of toggle_optimizer().
OF_ALL_MODULES = frozenset(
    {*vars(LightningModule()), "__dict__", "log", "forward", "_param_requires_grad_state"}
)
"""Attributes of modules that are no values of their author's."""


def held_in(root: nn.Module) -> Iterator[tuple[str, Any]]:
    """Name and value of every module in a tree, and of what their attributes hold, levels deep.

    Of what every module has, only the tables of its parameters, buffers and submodules.
    """
    modules = list(root.named_modules())
    seen = {id(module) for _, module in modules}
    for path, module in modules:
        yield from _held_in_module(f"self.{path}" if path else "self", module, DEPTH, seen)


def _held_in_module(
    name: str, module: nn.Module, depth: int, seen: set[int]
) -> Iterator[tuple[str, Any]]:
    if isinstance(module, torch.jit.ScriptModule):  # it holds nothing of Python's
        return
    yield name, module
    for key, value in vars(module).items():
        if key in _TABLES:
            yield name, value
        elif key not in OF_ALL_MODULES:
            yield from held_in_value(f"{name}.{key}", value, seen, depth)


def held_in_value(
    name: str, value: Any, seen: set[int], depth: int = DEPTH
) -> Iterator[tuple[str, Any]]:
    """Name and value of what a value holds, levels deep, itself first; plain values left out.

    Args:
        name: What the value is called.
        value: The value.
        seen: Identities of what is not to be visited; what is visited is added.
        depth: How many levels.
    """
    if is_plain(value) or isinstance(value, torch.Tensor):
        return
    if isinstance(value, nn.Module):  # one that is not registered
        for path, module in value.named_modules():
            if id(module) not in seen:
                seen.add(id(module))
                own = f"{name}.{path}" if path else name
                yield from _held_in_module(own, module, depth - 1, seen)
        return
    if id(value) in seen:
        return
    seen.add(id(value))
    yield name, value
    if depth > 0 and not (isinstance(value, _CONTAINERS) and len(value) > MOST_INSIDE):
        for label, _, held in entries(value) or []:
            yield from held_in_value(name + label, held, seen, depth - 1)
