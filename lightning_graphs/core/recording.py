"""What an emulated capture leaves behind: operators over storages, ready to be run again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from lightning_graphs.core.collectives import is_collective, wait_for
from lightning_graphs.core.obstacles import MOVED_STORAGE
from lightning_graphs.core.recorder import (
    KnownStorage,
    Operation,
    OperatorCall,
    Recorder,
    bytes_of,
    mapped,
    tensors_in,
)
from lightning_graphs.errors import ReplayError

_NO_KERNEL = frozenset(
    {
        torch.ops.aten.empty.memory_format,
        torch.ops.aten.empty_like.default,
        torch.ops.aten.empty_permuted.default,
        torch.ops.aten.empty_strided.default,
        torch.ops.aten.new_empty.default,
        torch.ops.aten.new_empty_strided.default,
    }
)
"""Allocations: on CUDA they launch nothing, so a replay leaves their memory as it is."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """How a tensor looks at its storage."""

    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]
    conj: bool
    neg: bool

    @classmethod
    def of(cls, tensor: Tensor) -> Geometry:
        """The geometry of ``tensor``."""
        return cls(
            tensor.dtype,
            int(tensor.storage_offset()),
            tensor.shape,
            tensor.stride(),
            tensor.is_conj(),
            tensor.is_neg(),
        )

    def over(self, storage: UntypedStorage) -> Tensor:
        """A tensor that shares nothing but the memory with the one this was read from.

        It has a version counter of its own, as a replay on a GPU leaves autograd's counters alone,
        and is no inference tensor, which could not be written outside of inference mode.
        """
        with torch.inference_mode(False):
            tensor = torch.empty(0, dtype=self.dtype, device=storage.device)
            tensor.set_(storage, self.offset, self.size, self.stride)
            if self.conj:
                tensor = tensor.conj()
            return torch._neg_view(tensor) if self.neg else tensor


@dataclass(frozen=True, slots=True)
class ExternalTensor:
    """A tensor over a storage that existed before the capture, held weakly.

    A CUDA graph keeps the addresses of its inputs and not the inputs; neither does a recording.
    """

    storage: KnownStorage
    geometry: Geometry

    def resolve(self) -> Tensor:
        """The tensor."""
        storage = self.storage.storage()
        self.storage.note_release()
        if storage is None or self.storage.address not in (None, storage.data_ptr()):
            raise ReplayError(
                "Every tensor that a graph reads must live, at its address, until the last replay.",
                describe_dead(self.storage),
                "keep a reference to the tensor beside the graph, and copy new values into it",
            )
        return self.geometry.over(storage)


def describe_dead(storage: KnownStorage) -> str:
    """The tensor that a replay misses, where it was met and where it was freed."""
    freed = f", freed at {storage.freed.describe()}" if storage.freed is not None else ", moved"
    return f"{storage.first}, first used at {storage.site.describe()}{freed}"


def _resolve(value: Any) -> Any:
    if isinstance(value, ExternalTensor):
        return value.resolve()
    if isinstance(value, list):
        return [_resolve(v) for v in value]
    return value


def _fill_with_sentinel(storage: UntypedStorage, dtype: torch.dtype) -> None:
    # A tensor of its own over the storage: the version counters of the user's tensors stay.
    view = torch.empty(0, dtype=dtype, device=storage.device).set_(storage)
    if dtype.is_floating_point or dtype.is_complex:
        view.fill_(float("nan"))
    elif dtype is torch.bool:
        view.fill_(True)
    else:
        view.fill_(torch.iinfo(dtype).min if dtype.is_signed else torch.iinfo(dtype).max)


class GraphMemory:
    """The storages that were born in a capture; they live as long as a graph may be replayed."""

    def __init__(self, born: Sequence[tuple[UntypedStorage, torch.dtype]]) -> None:
        self._born = born
        self._hidden: list[UntypedStorage] | None = None

    def poison(self) -> None:
        """Overwrite what the capture computed, so that a missing replay shows."""
        self._hidden = [storage.clone() for storage, _ in self._born]
        for storage, dtype in self._born:
            _fill_with_sentinel(storage, dtype)

    def reveal(self) -> None:
        """Bring the values back that :meth:`poison` hid."""
        for (storage, _), value in zip(self._born, self._hidden or (), strict=False):
            storage.copy_(value)

    def forget_hidden(self) -> None:
        """Drop the values of the capture: a replay has computed real ones."""
        self._hidden = None


class Recording:
    """Operators in order over the memory that was born with them.

    Attributes:
        operations: What :meth:`run` executes, in this order.
        memory: The storages that the operators allocated.
    """

    def __init__(self, operations: list[Operation], memory: GraphMemory) -> None:
        self.operations = operations
        self.memory = memory

    def snapshot(self) -> Recording:
        """A recording of its own over the same memory; later edits of this one do not reach it."""
        return Recording(list(self.operations), self.memory)

    def launched(self) -> list[Operation]:
        """The operations that launch work; allocations do not."""
        return [operation for operation in self.operations if operation.func not in _NO_KERNEL]

    def run(self) -> None:
        """Execute every operator once and write its results into the recorded storages."""
        with (
            torch.inference_mode(False),
            torch.autocast("cpu", enabled=False),
        ):
            for operation in self.launched():
                with torch.set_grad_enabled(operation.grad_mode):
                    result = operation.func(
                        *[_resolve(a) for a in operation.args],
                        **{k: _resolve(v) for k, v in operation.kwargs.items()},
                    )
                if is_collective(operation.func):
                    wait_for(result)
                if operation.result is not None:
                    _write_back(operation, result)


def _own_view(tensor: Tensor) -> Tensor:
    return Geometry.of(tensor).over(tensor.untyped_storage())


def _write_back(operation: Operation, result: Any) -> None:
    for recorded, computed in zip(tensors_in(operation.result), tensors_in(result), strict=True):
        if recorded.shape != computed.shape:
            raise ReplayError(
                "A replayed operator must return the shapes that it returned at capture.",
                f"{operation.name} at {operation.site}: {tuple(recorded.shape)} -> "
                f"{tuple(computed.shape)}",
                "keep shapes independent of values inside the captured code",
            )
        if recorded.data_ptr() != computed.data_ptr():
            recorded.copy_(computed)


class RecordingCapture(Recorder):
    """The recorder of an emulated capture: it keeps what a replay needs and undoes the writes."""

    def __init__(self, generators: Sequence[torch.Generator]) -> None:
        super().__init__(generators)
        self._saved: dict[int, tuple[UntypedStorage, UntypedStorage]] = {}
        self._born: list[tuple[UntypedStorage, torch.dtype]] = []
        self._born_ids: set[int] = set()

    def before_write(self, tensor: Tensor, known: KnownStorage) -> None:
        if not known.born and known.id not in self._saved:
            storage = tensor.untyped_storage()
            self._saved[known.id] = storage, storage.clone()

    def _run(self, call: OperatorCall) -> Any:
        """Run the operator; refuse memory that moves."""
        result = super()._run(call)
        for known in map(self.know, call.written):
            if known.id in self._saved:
                storage, value = self._saved[known.id]
                if storage.nbytes() != value.nbytes():
                    self.refuse(str(call.func), MOVED_STORAGE)
        return result

    def keep(self, operation: Operation) -> None:
        for tensor in tensors_in(operation.result):
            known = self.know(tensor)
            if known.born and known.id not in self._born_ids:
                self._born_ids.add(known.id)
                self._born.append((tensor.untyped_storage(), tensor.dtype))
        operation.args = tuple(mapped(a, self._reference) for a in operation.args)
        operation.kwargs = {k: mapped(v, self._reference) for k, v in operation.kwargs.items()}
        operation.result = mapped(operation.result, _own_view)
        self.operations.append(operation)

    def _reference(self, tensor: Tensor) -> Tensor | ExternalTensor:
        known = self.know(tensor)
        if known.born:
            return _own_view(tensor)
        return ExternalTensor(known, Geometry.of(tensor))

    def restore_world(self) -> None:
        """Give every storage that existed before the capture its value back."""
        # Backwards: where two storages share memory, the first one saved has the oldest value.
        for known in self.storages:
            known.note_release()
        for key, (storage, value) in reversed(self._saved.items()):
            if self.storages[key].address is None:
                continue
            if storage.nbytes() < value.nbytes():
                storage.resize_(value.nbytes())
            # A storage that an ``out=`` made larger stays so: its tensors have the new shape.
            bytes_of(storage)[: value.nbytes()].copy_(bytes_of(value))
        self._saved.clear()

    def finish(self) -> Recording:
        """The recording of everything since the capture began."""
        return Recording(self.operations, GraphMemory(self._born))
