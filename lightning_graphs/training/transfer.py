"""Copies of batches to the device beside the running step, not after it."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.strategies import Strategy
from torch import Tensor
from torch.utils._pytree import tree_leaves


class BatchTransfer:
    """Runs ``strategy.batch_to_device`` on a stream of its own.

    The loop asks for the next batch while the GPU still replays the last step. On the stream of
    the steps the copy would wait for it.

    Args:
        strategy: The trainer's strategy.
        device: Its CUDA device.
    """

    def __init__(self, strategy: Strategy, device: torch.device) -> None:
        self._strategy = strategy
        self._transfer = strategy.batch_to_device
        self._stream = torch.cuda.Stream(device)

    def install(self) -> None:
        """Take the place of the strategy's method."""
        vars(self._strategy)["batch_to_device"] = self._batch_to_device

    def remove(self) -> None:
        """Give it back; may be called again."""
        vars(self._strategy).pop("batch_to_device", None)

    def _batch_to_device(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        steps = torch.cuda.current_stream()
        if any(isinstance(leaf, Tensor) and leaf.is_cuda for leaf in tree_leaves(batch)):
            # What computed it may still run; a batch that is there needs no copy beside the step.
            return self._transfer(batch, *args, **kwargs)
        with torch.cuda.stream(self._stream):
            moved = self._transfer(batch, *args, **kwargs)
        steps.wait_stream(self._stream)
        for leaf in tree_leaves(moved):
            if isinstance(leaf, Tensor) and leaf.is_cuda:
                leaf.record_stream(steps)
        return moved
