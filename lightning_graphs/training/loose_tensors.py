"""Tensors that a step may write and that no table of a module has: attributes, dicts, globals."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lightning_graphs.core.buffers import StateSnapshot
from lightning_graphs.core.torch_private import tables_of, version_of
from lightning_graphs.core.values import entries
from lightning_graphs.training.held_values import held_in


class LooseTensors:
    """Tensors that are neither parameters nor buffers of a module, and how often they were written.

    Code changes them as it changes buffers, and a verification has to put them back. The buffers
    of modules that are not registered count as written: BatchNorm's kernels do not say so.
    """

    def __init__(self, module: nn.Module) -> None:
        self._known = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
        self._buffers: dict[str, Tensor] = {}
        self._named: list[tuple[str, Tensor]] = []
        self._versions: list[int] = []
        self._kept: list[StateSnapshot] | None = None
        for name, value in held_in(module):
            self.add(name, value)

    def add(self, name: str, value: Any) -> None:
        """Look at the tensors that are directly in a value."""
        found: list[Tensor] = []
        if isinstance(value, nn.Module):
            for key, buffer in value.named_buffers(recurse=False):
                if id(buffer) not in self._known:
                    self._buffers[f"{name}.{key}"] = buffer
                    found.append(buffer)
        for label, tensor in _tensors_in(value):
            if id(tensor) not in self._known and _counts_writes(tensor):
                self._known.add(id(tensor))
                self._named.append((name + label, tensor))
                self._versions.append(version_of(tensor))
                found.append(tensor)
        if self._kept is not None and found:
            self._kept.append(StateSnapshot(found))

    @property
    def tensors(self) -> list[Tensor]:
        """All of them."""
        return [*self._buffers.values(), *(tensor for _, tensor in self._named)]

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Put all of them back after the body, also those that are added while it runs."""
        self._kept = [StateSnapshot(self.tensors)]
        try:
            yield
        finally:
            kept, self._kept = self._kept, None
            for snapshot in kept:
                snapshot.restore()

    def written(self) -> dict[str, Tensor]:
        """Those that were written since this was asked last, by name."""
        before, self._versions = self._versions, [version_of(tensor) for _, tensor in self._named]
        triples = zip(self._named, before, self._versions, strict=True)
        found = {name: tensor for (name, tensor), then, now in triples if then != now}
        return {**self._buffers, **found}


def _tensors_in(value: Any) -> Iterator[tuple[str, Tensor]]:
    """Label and tensor of what is directly in a value."""
    if isinstance(value, Tensor):
        yield "", value
    elif isinstance(value, nn.Module):
        for table in (vars(value), *tables_of(value)[:2]):
            yield from ((f".{k}", held) for k, held in table.items() if isinstance(held, Tensor))
    else:
        for label, _, held in entries(value) or []:
            if isinstance(held, Tensor):
                yield label, held


def _counts_writes(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not (tensor.is_inference() or tensor.is_nested)
