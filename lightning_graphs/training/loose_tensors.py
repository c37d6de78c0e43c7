"""Tensors that a step may write and that no table of a module has: attributes, dicts, globals."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lightning_graphs.core.torch_private import tables_of, version_of
from lightning_graphs.core.values import entries


class LooseTensors:
    """Tensors that are neither parameters nor buffers of a module, and how often they were written.

    Code changes them as it changes buffers, and a verification has to put them back. The buffers
    of modules that are not registered count as written: BatchNorm's kernels do not say so.

    Args:
        module: The module.
        held: Name and value of what is in attributes of its tree, and of what its code names
            outside of it.
    """

    def __init__(self, module: nn.Module, held: Iterable[tuple[str, Any]]) -> None:
        known = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
        found: dict[int, tuple[str, Tensor]] = {}
        self._buffers: dict[str, Tensor] = {}
        for name, value in held:
            if isinstance(value, nn.Module):
                buffers = value.named_buffers(recurse=False)
                self._buffers |= {f"{name}.{k}": b for k, b in buffers if id(b) not in known}
            for label, tensor in _tensors_in(value):
                if id(tensor) not in known and _counts_writes(tensor):
                    found.setdefault(id(tensor), (name + label, tensor))
        self._named = list(found.values())
        self._versions = self._now()

    @property
    def tensors(self) -> list[Tensor]:
        """All of them."""
        return [*self._buffers.values(), *(tensor for _, tensor in self._named)]

    def _now(self) -> list[int]:
        return [version_of(tensor) for _, tensor in self._named]

    def written(self) -> dict[str, Tensor]:
        """Those that were written since this was asked last, by name."""
        before, self._versions = self._versions, self._now()
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
