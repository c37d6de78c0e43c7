"""Undoes what code has written in memory that is older than it, wherever that is held."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor, UntypedStorage
from torch.autograd.graph import Node

from lightning_graphs.device.trace import KnownStorage, Operation, Recorder
from lightning_graphs.private.torch import out_of_sight
from lightning_graphs.values.memory import bytes_of


class UndoingRecorder(Recorder):
    """Copies older memory ahead of the first write to it."""

    def __init__(self, generators: Sequence[torch.Generator] = (), *, strict: bool = True) -> None:
        super().__init__(generators, strict=strict)
        self._saved: dict[int, tuple[UntypedStorage, UntypedStorage]] = {}

    @out_of_sight()  # of a function that is traced while it is captured, as ``linearize`` does
    def before_write(self, tensor: Tensor, known: KnownStorage) -> None:
        if not known.born and known.id not in self._saved:
            storage = tensor.untyped_storage()
            # A GPU's allocator may be giving out memory of a graph, which its replay overwrites
            copy = storage.clone() if storage.device.type == "cpu" else storage.cpu()
            self._saved[known.id] = storage, copy

    def restore(self) -> None:
        """Give every storage that was written its value back; may be called again."""
        for known in self.storages:
            known.note_release()
        # Backwards: where two storages share memory, the first one saved has the oldest value.
        for key, (storage, value) in reversed(self._saved.items()):
            if self.storages[key].address is None:
                continue
            if storage.nbytes() < value.nbytes():
                storage.resize_(value.nbytes())
            # A storage that an ``out=`` made larger stays so: its tensors have the new shape.
            bytes_of(storage)[: value.nbytes()].copy_(bytes_of(value))


class WriteWatch(UndoingRecorder):
    """Watches code run for what it writes; what that computes is to be thrown away.

    A dispatch mode changes formulas of torch, and compiled code runs eagerly under one.
    """

    def __init__(self, left_out: Collection[int]) -> None:
        super().__init__(strict=False)
        self._left_out = left_out  # addresses of storages whose values others keep

    def keep(self, operation: Operation) -> None:
        """Keep nothing."""

    def takes_other_formula(self, node: Node) -> None:
        """The one that it takes reads nothing on the host, and writes the same tensors."""

    def before_write(self, tensor: Tensor, known: KnownStorage) -> None:
        if known.address not in self._left_out:
            super().before_write(tensor, known)

    def found(self) -> list[UntypedStorage]:
        """The storages that it has copied."""
        return [storage for storage, _ in self._saved.values()]
