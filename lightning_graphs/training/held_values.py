"""What modules hold: the values of their attributes, and what is inside of these."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import nn

from lightning_graphs.core.values import DEPTH, walk

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
    seen: dict[int, Any] = {id(module): module for _, module in modules}
    for path, module in modules:
        yield from _of_module(f"self.{path}" if path else "self", module, seen, DEPTH)


def held_in_value(name: str, value: Any, seen: dict[int, Any]) -> Iterator[tuple[str, Any]]:
    """The same of a value, itself first; modules that nobody has registered are gone into."""
    return walk(name, value, seen, modules=_of_tree)


def _of_tree(
    name: str, root: nn.Module, seen: dict[int, Any], depth: int
) -> Iterator[tuple[str, Any]]:
    for path, module in root.named_modules():
        if id(module) not in seen:
            seen[id(module)] = module
            yield from _of_module(f"{name}.{path}" if path else name, module, seen, depth - 1)


def _of_module(
    name: str, module: nn.Module, seen: dict[int, Any], depth: int
) -> Iterator[tuple[str, Any]]:
    if isinstance(module, torch.jit.ScriptModule):  # it holds nothing of Python's
        return
    yield name, module
    for key, value in vars(module).items():
        if key in _TABLES:
            yield name, value
        elif key not in OF_ALL_MODULES:
            yield from walk(f"{name}.{key}", value, seen, depth, modules=_of_tree)
