"""Walks through what modules hold, and follows the tensors among it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lightning_graphs.private.torch import (
    accumulation_hooks,
    gradient_hooks,
    is_strided,
    module_hooks,
    tables_of,
    version_of,
)
from lightning_graphs.values.guards import DEPTH, entries, is_plain, walk
from lightning_graphs.values.snapshot import Snapshot

_TABLES = ("_parameters", "_buffers", "_modules")

OF_ALL_MODULES = {*vars(nn.Module()), "__dict__", "forward"}
"""Attributes of modules that are no values of their author's."""

BASES: list[type[nn.Module]] = [nn.Module]
"""Classes of libraries from which those of authors derive."""

HELD_ELSEWHERE: list[Callable[[nn.Module], Iterable[Any]]] = []
"""Functions that give objects into which :func:`iter_objects` does not look, of the root module."""


def know_base(kind: type[nn.Module], *names: str) -> None:
    """Let a client's class be a base of modules, and these its attributes beside its own."""
    BASES.append(kind)
    OF_ALL_MODULES.update(vars(kind()), names)


def iter_objects(root: nn.Module) -> Iterator[tuple[str, Any]]:
    """Name and value of every module in a tree, and of what their attributes hold, levels deep.

    Of what every module has, only the tables of its parameters, buffers and submodules.
    """
    seen: dict[int, Any] = {id(one): one for find in HELD_ELSEWHERE for one in find(root)}
    return _of_tree("self", root, seen, DEPTH + 1)


def held_in_value(name: str, value: Any, seen: dict[int, Any]) -> Iterator[tuple[str, Any]]:
    """The same of a value, itself first; modules that nobody has registered are gone into."""
    return walk(name, value, seen, modules=_of_tree)


def _of_tree(
    name: str, root: nn.Module, seen: dict[int, Any], depth: int
) -> Iterator[tuple[str, Any]]:
    modules = [(path, m) for path, m in root.named_modules() if id(m) not in seen]
    seen.update((id(module), module) for _, module in modules)
    for path, module in modules:
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
            for label, tensor in value.items() if key != "_modules" else ():
                yield from _of_tensor(f"{name}.{label}", tensor, seen, depth)
        elif key not in OF_ALL_MODULES and not is_plain(value):
            yield from walk(f"{name}.{key}", value, seen, depth, modules=_of_tree)
    for hook in module_hooks(module):
        yield from walk(f"{name}.{_name_of(hook)}", hook, seen, depth, modules=_of_tree)


def _of_tensor(
    name: str, tensor: Tensor | None, seen: dict[int, Any], depth: int
) -> Iterator[tuple[str, Any]]:
    """What is in the attributes of a parameter or buffer, and in its hooks."""
    if tensor is None:
        return
    yield from walk(name, tensor, seen, depth, modules=_of_tree)
    for table in (gradient_hooks(tensor), accumulation_hooks(tensor)):
        for hook in table.values() if isinstance(table, dict) else ():
            yield from walk(f"{name}.{_name_of(hook)}", hook, seen, depth, modules=_of_tree)


def _name_of(hook: Any) -> str:
    return getattr(hook, "__name__", type(hook).__name__)


_MOST_BYTES = 2**28


class UnregisteredTensors:
    """Tensors that are neither parameters nor buffers of a module, and how often they were written.

    Code changes them as it changes buffers, and a verification has to put them back. The buffers
    of modules that are not registered count as written: BatchNorm's kernels do not say so.
    """

    def __init__(self, module: nn.Module, held: Iterable[tuple[str, Any]]) -> None:
        self._known = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
        self._buffers: set[str] = set()  # names of those that count as written
        self._named: list[tuple[str, Tensor]] = []
        self._versions: list[int] = []
        # Where it is set, tensors that are found late are put back with it, too
        self.snapshot: Snapshot | None = None
        for name, value in held:
            self.add(name, value)

    def add(self, name: str, value: Any) -> None:
        """Look at the tensors that are directly in a value."""
        found: list[Tensor] = []
        buffers = tables_of(value)[1].keys() if isinstance(value, nn.Module) else ()
        self._buffers.update(f"{name}.{key}" for key in buffers)
        for label, tensor in _tensors_in(value):
            counts_writes = is_strided(tensor) and not tensor.is_inference()
            if id(tensor) not in self._known and counts_writes:
                self._known.add(id(tensor))
                self._named.append((name + label, tensor))
                self._versions.append(version_of(tensor))
                found.append(tensor)
        if self.snapshot is not None and found:
            self.snapshot.add(Snapshot(found))

    @property
    def tensors(self) -> list[Tensor]:
        return [tensor for _, tensor in self._named]

    @property
    def small(self) -> list[Tensor]:
        """Those that are no data: kernels outside of torch may write them unnoticed."""
        return [t for t in self.tensors if t.untyped_storage().nbytes() <= _MOST_BYTES]

    def written(self) -> dict[str, Tensor]:
        """Those that were written since this was asked last, by name."""
        before, self._versions = self._versions, [version_of(tensor) for _, tensor in self._named]
        triples = zip(self._named, before, self._versions, strict=True)
        return {n: t for (n, t), then, now in triples if then != now or n in self._buffers}


def _tensors_in(value: Any) -> Iterator[tuple[str, Tensor]]:
    """Label and tensor of what is directly in a value."""
    if isinstance(value, Tensor):
        yield "", value
    if isinstance(value, nn.Module):
        for table in (vars(value), *tables_of(value)[:2]):
            yield from ((f".{k}", held) for k, held in table.items() if isinstance(held, Tensor))
    else:
        for label, _, held in entries(value) or []:
            if isinstance(held, Tensor):
                yield label, held
