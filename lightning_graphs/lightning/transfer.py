"""Copies batches to the device beside the running step, not after it."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from operator import itemgetter
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import Strategy
from torch import Tensor

from lightning_graphs.lightning.private import is_profiled
from lightning_graphs.private.exchange import replaced
from lightning_graphs.private.torch import is_strided, version_of
from lightning_graphs.values.guards import is_object
from lightning_graphs.values.tree import leaves_of


class BatchTransfer:
    """Runs ``strategy.batch_to_device`` on a stream of its own.

    The loop asks for the next batch while the GPU still replays the last step. On the stream of
    the steps the copy would wait for it. Where the CPU is far ahead it waits here, so that batches
    do not pile up in memory.

    Nobody must override the hooks that move a batch. A tensor, or a tuple, list or dict of tensors,
    then takes a short way to what Lightning would make of it; its own costs 0.1 ms of CPU time.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._strategy = strategy = trainer.strategy
        self._device = strategy.root_device
        self._transfer = strategy.batch_to_device
        self._stream = torch.cuda.Stream(self._device)
        self._moved = torch.cuda.Event()
        self._launched: deque[torch.cuda.Event] = deque()
        self._copied: deque[list[tuple[weakref.ref[Tensor], Tensor]]] = deque(maxlen=_AHEAD + 1)
        unchanged = getattr(self._transfer, "__func__", None) is Strategy.batch_to_device
        self._is_short = unchanged and not is_profiled(trainer)

    def installed(self) -> AbstractContextManager[None]:
        return replaced(self._strategy, "batch_to_device", self._batch_to_device)

    def _batch_to_device(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        steps = torch.cuda.current_stream(self._device)
        is_elsewhere = bool(args) or kwargs.get("device") is not None
        parts = taken_apart(batch) if self._is_short and not is_elsewhere else None
        if parts is None:
            return self._long_way(steps, batch, *args, **kwargs)
        tensors, build = parts
        self._wait_for_steps(steps)
        torch.cuda.set_stream(self._stream)
        try:
            moved = [tensor.to(self._device, non_blocking=True) for tensor in tensors]
        finally:
            torch.cuda.set_stream(steps)
        self._hand_over(steps, moved)
        self._copied.append(list(zip(map(weakref.ref, moved), tensors, strict=True)))
        return build(moved)

    def on_host(self, tensor: Tensor) -> Tensor | None:
        """What one of the last batches' tensors was copied from; None if it was changed since."""
        for copied in self._copied:
            for moved, source in copied:
                if moved() is tensor and version_of(tensor) == 0:
                    return source
        return None

    def _long_way(self, steps: torch.cuda.Stream, batch: Any, *args: Any, **kwargs: Any) -> Any:
        before = leaves_of(batch)  # a batch that moves itself may be moved in place
        if any(map(_needs_the_step_stream, before)):
            return self._transfer(batch, *args, **kwargs)
        self._wait_for_steps(steps)
        with torch.cuda.stream(self._stream):
            moved = self._transfer(batch, *args, **kwargs)
        leaves = leaves_of(moved)
        if len(leaves) == len(before):
            pairs = [(t, b) for t, b in zip(leaves, before, strict=True) if isinstance(t, Tensor)]
            self._copied.append([(weakref.ref(t), b) for t, b in pairs if t.is_cuda])
        self._hand_over(steps, [t for t in leaves if isinstance(t, Tensor) and t.is_cuda])
        return moved

    def _hand_over(self, steps: torch.cuda.Stream, moved: Sequence[Tensor]) -> None:
        """Let the steps wait for the copies, and the copies' memory for the steps."""
        self._moved.record(self._stream)
        steps.wait_event(self._moved)
        for tensor in moved:
            tensor.record_stream(steps)

    def _wait_for_steps(self, steps: torch.cuda.Stream) -> None:
        """Let at most so many steps be unfinished as batches may lie ready for them."""
        if len(self._launched) == _AHEAD:
            event = self._launched.popleft()
            event.synchronize()
        else:
            event = torch.cuda.Event()
        event.record(steps)
        self._launched.append(event)


def copies_on_host(trainer: Trainer, batch: Sequence[Tensor]) -> list[Tensor | None]:
    """What the host has of each tensor of a batch; None where that is nothing."""
    transfer = getattr(vars(trainer.strategy).get("batch_to_device"), "__self__", None)
    if isinstance(transfer, BatchTransfer):
        return [transfer.on_host(tensor) for tensor in batch]
    return [tensor if tensor.device.type == "cpu" else None for tensor in batch]


_AHEAD = 2
"""Steps that the CPU may be ahead of the GPU."""


def _needs_the_step_stream(leaf: Any) -> bool:
    """Whether a leaf must not be copied beside the step.

    What computed a tensor on the GPU may still run. Sparse and nested tensors, and those inside an
    object, cannot be recorded as in use by the step, and their memory would be given away early.
    """
    if isinstance(leaf, Tensor):
        return leaf.is_cuda or not is_strided(leaf)
    return hasattr(leaf, "to") or is_object(leaf)


def taken_apart(batch: Any) -> tuple[list[Tensor], Callable[[list[Tensor]], Any]] | None:
    """The tensors of a simple batch, and what builds one like it; None for any other batch.

    A simple one is a strided tensor of the CPU, or a tuple, list or dict of nothing but such.
    """
    kind = type(batch)
    tensors: list[Any]
    build: Callable[[list[Tensor]], Any]
    if kind is Tensor:
        tensors, build = [batch], itemgetter(0)
    elif kind is tuple or kind is list:
        tensors, build = list(batch), kind
    elif kind is dict:
        tensors, build = list(batch.values()), lambda moved: dict(zip(batch, moved, strict=True))
    else:
        return None
    if all([type(t) is Tensor and t.device.type == "cpu" and is_strided(t) for t in tensors]):
        return tensors, build
    return None
