"""``DistributedDataParallel`` around the module of a fit: what captures and replays ask of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch.nn.parallel import DistributedDataParallel

from lightning_graphs.core.torch_private import reducer_is_warm, take_no_more_times
from lightning_graphs.training.lightning_private import ddp_built_on


def why_no_ranks(trainer: Trainer) -> str:
    """Why a fit on several devices is not captured, in one sentence; empty if it is."""
    if trainer.world_size == 1 or wrapper_of(trainer) is not None:
        return ""
    name = type(trainer.strategy).__name__
    return f"it captures on one device, or with strategy='ddp', and this is {name}"


def wrapper_of(trainer: Trainer) -> DistributedDataParallel | None:
    """The module in its wrapper, which reduces gradients over ranks; None if there is none."""
    model = trainer.strategy.model
    return model if isinstance(model, DistributedDataParallel) else None


def capture_stream(trainer: Trainer, stack: contextlib.ExitStack) -> torch.cuda.Stream:
    """The stream on which a fit is captured; a strategy that uses DDP makes it there, too.

    Args:
        trainer: The trainer, whose strategy has not been set up.
        stack: Gives the strategy back.
    """
    stream = torch.cuda.Stream(trainer.strategy.root_device)
    if isinstance(trainer.strategy, DDPStrategy):
        stack.enter_context(ddp_built_on(trainer.strategy, stream))
    return stream


def is_warm(trainer: Trainer) -> bool:
    """Whether the gradient reducer leaves steps alone: it takes no times any more."""
    ddp = wrapper_of(trainer)
    if ddp is not None:
        if not reducer_is_warm(ddp):
            return False
        take_no_more_times(ddp)
    return True


def syncs(trainer: Trainer) -> bool:
    """Whether the coming forward pass gets the buffers of rank 0.

    It does after a step that has reduced gradients; not within an accumulation window, nor right
    after a validation, which has got them.
    """
    ddp = wrapper_of(trainer)
    return ddp is not None and bool(ddp.modules_buffers) and ddp.require_forward_param_sync


@contextlib.contextmanager
def unseen_by_ddp(trainer: Trainer) -> Iterator[None]:
    """Let DDP forget the forward passes of the body."""
    ddp = wrapper_of(trainer)
    if ddp is None:
        yield
        return
    before = ddp.require_forward_param_sync
    try:
        yield
    finally:
        ddp.require_forward_param_sync = before
