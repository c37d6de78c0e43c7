"""Finds the hooks that run within a step: its graph is cut where they look."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from lightning_graphs.core.autograd.nodes import cast_together, has_python_nodes, leaves_behind
from lightning_graphs.core.private.torch import has_gradient_hooks
from lightning_graphs.training.guards.own_code import is_lightnings

BEFORE_BACKWARD = ("on_before_zero_grad", "on_before_backward")
BEFORE_STEP = ("on_after_backward", "on_before_optimizer_step")

_BASES = ("callbacks.callback", "core.hooks", "core.module", "plugins.precision.precision")


@dataclass(frozen=True, slots=True)
class Observers:
    """Names of the overridden hooks that run between two parts of a step."""

    before_backward: tuple[str, ...]  # they run after the forward pass and before the backward pass
    before_step: tuple[str, ...]  # they run after the backward pass and before the optimizer step
    own_zero_grad: bool  # the module decides by itself how gradients are zeroed

    @classmethod
    def of(cls, trainer: Trainer, module: LightningModule) -> Observers:
        """Find the overridden hooks of the module and of every callback."""
        own_zero_grad = overrides(module, "optimizer_zero_grad")
        before = _observers(trainer, module, BEFORE_BACKWARD)
        if own_zero_grad:
            before.append(f"{type(module).__name__}.optimizer_zero_grad")
        after = _observers(trainer, module, BEFORE_STEP)
        if overrides(module, "configure_gradient_clipping"):
            after.append(f"{type(module).__name__}.configure_gradient_clipping")
        # Who looks before the backward pass may also move what the optimizer step reads.
        return cls(tuple(before), tuple(after or before), own_zero_grad)


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


def _observers(trainer: Trainer, module: LightningModule, hooks: tuple[str, ...]) -> list[str]:
    owners = [*trainer.callbacks, module]  # type: ignore[attr-defined]
    return [f"{type(o).__name__}.{hook}" for hook in hooks for o in owners if overrides(o, hook)]


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
