"""Finds the hooks of Lightning that run within a step, and what they may see."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from lightning_graphs.autograd.nodes import cast_together, has_python_nodes, leaves_behind
from lightning_graphs.private.torch import has_gradient_hooks
from lightning_graphs.regions.conditions import Observers
from lightning_graphs.watch.user_code import is_lightnings

_BEFORE_BACKWARD = ("on_before_zero_grad", "on_before_backward", "optimizer_zero_grad")
_BEFORE_STEP = ("on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping")

_BASES = ("callbacks.callback", "core.hooks", "core.module", "plugins.precision.precision")


def observers_of(trainer: Trainer, module: LightningModule) -> Observers:
    """The overridden hooks of callbacks and of the module."""
    before = _observers(trainer, module, _BEFORE_BACKWARD)
    after = _observers(trainer, module, _BEFORE_STEP)
    # Who looks before the backward pass may also move what the optimizer step reads.
    return Observers(before, after or before, overrides(module, "optimizer_zero_grad"))


def moves_batches_itself(trainer: Trainer, module: LightningModule) -> bool:
    """Whether the user's own code runs while a batch is moved to the device.

    It may read what the running step writes, so it must wait for the step.
    """
    hooks = ("transfer_batch_to_device", "on_after_batch_transfer")
    owners = [module, *filter(None, [getattr(trainer, "datamodule", None)])]
    return any(overrides(owner, hook) for owner in owners for hook in hooks)


def overrides(instance: object, method: str) -> bool:
    """Whether anything but Lightning's base classes defines the method."""
    if method in vars(instance):
        return True
    own = getattr(type(instance), method, None)
    return own is not None and not is_lightnings(own, *_BASES)


def _observers(
    trainer: Trainer, module: LightningModule, hooks: tuple[str, ...]
) -> tuple[str, ...]:
    owners = [*trainer.callbacks, module]  # type: ignore[attr-defined]
    pairs = ((owner, hook) for hook in hooks for owner in owners if overrides(owner, hook))
    return tuple(f"{type(owner).__name__}.{hook}" for owner, hook in pairs)


def is_backward_unseen(trainer: Trainer, module: LightningModule, loss: Tensor) -> bool:
    """Whether nobody sees ``.grad`` in the backward pass: autograd's own operators alone run."""
    return (
        not overrides(module, "backward")
        and not overrides(trainer.precision_plugin, "backward")
        and not has_python_nodes([loss], compiled=False)
        and not any(map(has_gradient_hooks, leaves_behind([loss])))
    )


def cast_unseen(
    trainer: Trainer, module: LightningModule, loss: Tensor
) -> AbstractContextManager[None]:
    """Around a backward pass that nobody sees, on one device: cast gradients together.

    Those that wait for their cast are not in ``.grad`` yet.
    """
    is_alone = is_lightnings(type(trainer.strategy), "strategies.single_device") and not (
        torch.distributed.is_available() and torch.distributed.is_initialized()
    )
    if not (is_alone and is_backward_unseen(trainer, module, loss)):
        return contextlib.nullcontext()
    return cast_together([loss], [p for p in module.parameters() if p.requires_grad])
