"""``DistributedDataParallel`` around the module of a fit: what a capture asks of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch.nn.parallel import DistributedDataParallel

_SETTLED = 10
"""The last iteration of the first ones in which DDP's reducer takes times (torch's reducer.cpp)."""


def why_no_ranks(trainer: Trainer) -> str:
    """Why a fit on several devices is not captured, in one sentence; empty if it is."""
    if trainer.world_size == 1 or type(trainer.strategy) is DDPStrategy:
        return ""
    name = type(trainer.strategy).__name__
    return f"it captures on one device, or with strategy='ddp', and this is {name}"


def _wrapper_of(trainer: Trainer) -> DistributedDataParallel | None:
    model = trainer.strategy.model
    return model if isinstance(model, DistributedDataParallel) else None


def is_wrapped(trainer: Trainer) -> bool:
    """Whether gradients are reduced over ranks as the backward pass goes on."""
    return _wrapper_of(trainer) is not None


def is_warm(trainer: Trainer) -> bool:
    """Whether the gradient reducer takes no times any more and has built its buckets anew."""
    ddp = _wrapper_of(trainer)
    return ddp is None or int(ddp._get_ddp_logging_data().get("iteration", 0)) >= _SETTLED


def syncs(trainer: Trainer) -> bool:
    """Whether the coming forward pass gets the buffers of rank 0.

    It does after a step that has reduced gradients; not within an accumulation window, nor right
    after a validation, which has got them.
    """
    ddp = _wrapper_of(trainer)
    return ddp is not None and bool(ddp.modules_buffers) and ddp.require_forward_param_sync


def note_sync(trainer: Trainer, reduced: bool) -> None:
    """Let DDP know, after a replay, whether it has reduced gradients."""
    ddp = _wrapper_of(trainer)
    if ddp is not None:
        ddp.require_forward_param_sync = reduced


@contextlib.contextmanager
def unsynced(trainer: Trainer) -> Iterator[None]:
    """DDP forgets the forward and backward passes of the body, also one that it has not ended."""
    ddp = _wrapper_of(trainer)
    if ddp is None:
        yield
        return
    before = ddp.require_forward_param_sync
    try:
        yield
    except BaseException:
        ddp.reducer._reset_state()
        raise
    finally:
        ddp.require_forward_param_sync = before
