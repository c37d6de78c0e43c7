"""Copies of batches to the device beside the running step, not after it."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from lightning.pytorch.strategies import Strategy
from torch import Tensor

from lightning_graphs.core.tree import leaves_of


class BatchTransfer:
    """Runs ``strategy.batch_to_device`` on a stream of its own.

    The loop asks for the next batch while the GPU still replays the last step. On the stream of
    the steps the copy would wait for it. Where the CPU is far ahead it waits here, so that batches
    do not pile up in memory.

    Args:
        strategy: The trainer's strategy.
        device: Its CUDA device.
    """

    def __init__(self, strategy: Strategy, device: torch.device) -> None:
        self._strategy = strategy
        self._transfer = strategy.batch_to_device
        self._stream = torch.cuda.Stream(device)
        self._launched: deque[torch.cuda.Event] = deque()

    def install(self) -> None:
        """Take the place of the strategy's method."""
        vars(self._strategy)["batch_to_device"] = self._batch_to_device

    def remove(self) -> None:
        """Give it back; may be called again."""
        vars(self._strategy).pop("batch_to_device", None)

    def _batch_to_device(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        steps = torch.cuda.current_stream()
        if any(map(_needs_the_step_stream, leaves_of(batch))):
            return self._transfer(batch, *args, **kwargs)
        self._wait_for_steps(steps)
        with torch.cuda.stream(self._stream):
            moved = self._transfer(batch, *args, **kwargs)
        steps.wait_stream(self._stream)
        for leaf in leaves_of(moved):
            if isinstance(leaf, Tensor) and leaf.is_cuda:
                leaf.record_stream(steps)
        return moved

    def _wait_for_steps(self, steps: torch.cuda.Stream) -> None:
        """Let at most so many steps be unfinished as batches may lie ready for them."""
        if len(self._launched) == _AHEAD:
            event = self._launched.popleft()
            event.synchronize()
        else:
            event = torch.cuda.Event()
        event.record(steps)
        self._launched.append(event)


_AHEAD = 2
"""Steps that the CPU may be ahead of the GPU."""


def _needs_the_step_stream(leaf: Any) -> bool:
    """Whether a leaf must not be copied beside the step.

    What computed a tensor on the GPU may still run. The tensors inside an object that moves itself
    (``to``) cannot be recorded as in use by the step, and their memory would be given away early.
    """
    return leaf.is_cuda if isinstance(leaf, Tensor) else hasattr(leaf, "to")
