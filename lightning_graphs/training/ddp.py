"""``DistributedDataParallel`` around the module of a fit: what captures and replays ask of it."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, nullcontext

import torch
from lightning.pytorch import Trainer
from torch.nn.parallel import DistributedDataParallel

from lightning_graphs.core.private.distributed import is_within_backward
from lightning_graphs.exchange import replaced
from lightning_graphs.training.guards.own_code import is_lightnings
from lightning_graphs.training.lightning_private import ddp_built_on, ddp_options
from lightning_graphs.training.options import Options

_REFUSED = {
    "fsdp": "FSDP frees the memory of parameters within a step, which a graph has the address of",
    "deepspeed": "DeepSpeed runs steps in an engine of its own",
    "xla": "XLA compiles steps for devices of its own",
}
"""Files of Lightning's strategies, and what of theirs cannot be captured."""

_WITH_STATE = ("powerSGD_hook", "post_localSGD_hook")
"""Modules of torch with communication hooks that count steps in Python."""


def why_not_captured(trainer: Trainer, options: Options) -> str:
    """Why the trainer's strategy has no steps that are captured, and the remedy; empty if it has.

    Nothing of the strategy has been set up, or all of it.
    """
    strategy = trainer.strategy
    for file, reason in _REFUSED.items():
        if _is(strategy, file):
            return f"{reason}; write Trainer(strategy='ddp') if the model fits on one device"
    if is_model_parallel(trainer) and options.by_submodules:
        return (
            "FSDP2 gathers the parameters of submodules to new addresses in every step; write "
            "GraphCapture() for whole steps"
        )
    if is_model_parallel(trainer) or (trainer.world_size == 1 and not is_ddp(strategy)):
        return ""
    if not is_ddp(strategy):
        return f"{type(strategy).__name__} is not DDP; write Trainer(strategy='ddp')"
    given, hook = ddp_options(strategy)
    if given.get("find_unused_parameters"):
        return (
            "find_unused_parameters=True reads on the host, in every step, which parameters have a "
            "gradient; write strategy='ddp', and requires_grad_(False) on what the loss leaves out"
        )
    if getattr(hook, "__module__", "").rpartition(".")[2] in _WITH_STATE:
        return (
            f"the communication hook {getattr(hook, '__name__', hook)} counts steps, which a graph "
            "does not; leave ddp_comm_hook out, or use bf16_compress_hook"
        )
    return ""


def is_model_parallel(trainer: Trainer) -> bool:
    """Whether the strategy is Lightning's for FSDP2 and tensor parallelism."""
    return _is(trainer.strategy, "model_parallel")


def is_ddp(strategy: object) -> bool:
    return _is(strategy, "ddp")


def _is(strategy: object, file: str) -> bool:
    """Whether it is from a file of Lightning's, or one that an author has derived from that."""
    return any(is_lightnings(kind, f"strategies.{file}") for kind in type(strategy).__mro__)


def wrapper_of(trainer: Trainer) -> DistributedDataParallel | None:
    """The module in its wrapper, which reduces gradients over ranks; None if there is none."""
    model = trainer.strategy.model
    return model if isinstance(model, DistributedDataParallel) else None


def capture_stream(trainer: Trainer, stack: ExitStack) -> torch.cuda.Stream:
    """The stream on which a fit is captured; a strategy that uses DDP makes it there, too."""
    stream = torch.cuda.Stream(trainer.strategy.root_device)
    if is_ddp(trainer.strategy):
        stack.enter_context(ddp_built_on(trainer.strategy, stream))
    return stream


def waits_for_gradients(trainer: Trainer) -> bool:
    """Whether a backward pass has failed, and the reducer has yet to forget it, on all ranks."""
    ddp = wrapper_of(trainer)
    return ddp is not None and is_within_backward(ddp)


def syncs(trainer: Trainer) -> bool:
    """Whether the coming forward pass gets the buffers of rank 0.

    It does after a step that has reduced gradients; not within an accumulation window, nor right
    after a validation, which has got them.
    """
    ddp = wrapper_of(trainer)
    return ddp is not None and bool(ddp.modules_buffers) and ddp.require_forward_param_sync


def unseen_by_ddp(trainer: Trainer) -> AbstractContextManager[None]:
    """Let DDP forget the forward passes of the body."""
    ddp, name = wrapper_of(trainer), "require_forward_param_sync"
    return nullcontext() if ddp is None else replaced(ddp, name, getattr(ddp, name))
