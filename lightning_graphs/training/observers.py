"""Who looks at a step while it is under way, and so where its graph must be cut."""

from __future__ import annotations

from dataclasses import dataclass

from lightning.pytorch import LightningModule, Trainer

from lightning_graphs.training.own_code import is_lightnings

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
    callbacks: list[object] = list(trainer.callbacks)  # type: ignore[attr-defined]
    found = [
        f"{type(callback).__name__}.{hook}"
        for hook in hooks
        for callback in callbacks
        if overrides(callback, hook)
    ]
    found += [f"{type(module).__name__}.{hook}" for hook in hooks if overrides(module, hook)]
    return found
