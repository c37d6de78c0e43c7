"""What a training step computes: the body that a capture records and a verification runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor
from torch.optim import Optimizer

from lightning_graphs.core.arguments.outputs import OutputPlan
from lightning_graphs.core.private.torch import scaling_states
from lightning_graphs.errors import CaptureError
from lightning_graphs.training.guards.conditions import Phase
from lightning_graphs.training.guards.frozen import refuse_stand_ins
from lightning_graphs.training.guards.observers import Observers
from lightning_graphs.training.host.logs import LogRecorder
from lightning_graphs.training.interception import StrategyCalls, replaced
from lightning_graphs.training.step.optimizers import CapturableOptimizer

_UNSCALES_ITSELF = "_step_supports_amp_scaling"
"""The attribute by which torch's GradScaler and Lightning know a fused optimizer."""


@contextlib.contextmanager
def without_autocast_cache(plugin: Precision) -> Iterator[None]:
    """Keep autocast from caching the casts of weights, whatever the plugin says.

    A cached cast would be made by one graph and read by another, or by eager code.
    """
    manager = getattr(plugin, "autocast_context_manager", None)
    if manager is None:
        yield
        return

    @contextlib.contextmanager
    def uncached() -> Iterator[None]:
        with manager():
            torch.set_autocast_cache_enabled(False)
            yield

    with replaced(plugin, "autocast_context_manager", uncached):
        yield


def scaler_of(plugin: Precision) -> torch.amp.GradScaler | None:
    """The gradient scaler of ``precision="16-mixed"``."""
    scaler: Any = getattr(plugin, "scaler", None)
    return scaler if isinstance(scaler, torch.amp.GradScaler) else None


def unscales(plugin: Precision, optimizer: Optimizer) -> bool:
    """Whether the plugin divides gradients by the loss scale, before hooks and clipping.

    An optimizer that was made fused unscales its gradients itself, and its hooks see scaled ones.
    """
    return scaler_of(plugin) is not None and not getattr(optimizer, _UNSCALES_ITSELF, False)


def scaling_state(plugin: Precision, optimizer: Optimizer) -> dict[str, Any]:
    """What the scaler knows of a step that is under way; nothing where there is none.

    A capture asks first, and fails where torch does not tell.
    """
    scaler = scaler_of(plugin)
    return {} if scaler is None else dict(scaling_states(scaler)[id(optimizer)])


def resume_scaling(plugin: Precision, optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Let the scaler go on from what :func:`scaling_state` gave."""
    scaler = scaler_of(plugin)
    if scaler is not None:
        scaling_states(scaler)[id(optimizer)] = dict(state)


def unscale(plugin: Precision, optimizer: Optimizer) -> None:
    """Divide the gradients by the loss scale, where the plugin does."""
    scaler = scaler_of(plugin)
    if scaler is not None and unscales(plugin, optimizer):
        scaler.unscale_(optimizer)


@contextlib.contextmanager
def stepping_on_the_device(optimizer: Optimizer) -> Iterator[None]:
    """Let the scaler hand ``found_inf`` to the fused kernel instead of reading it.

    It does so for optimizers that were constructed with ``fused=True``; for those that we made
    fused it would call ``.item()``, which ends a capture.
    """
    before = getattr(optimizer, _UNSCALES_ITSELF, False)
    setattr(optimizer, _UNSCALES_ITSELF, True)
    try:
        yield
    finally:
        setattr(optimizer, _UNSCALES_ITSELF, before)


@dataclass(eq=False)
class StepBody:
    """The step of one fit as Lightning does it, without the hooks."""

    trainer: Trainer
    module: LightningModule
    calls: StrategyCalls
    optimizer: Optimizer
    capturable: CapturableOptimizer | None
    observers: Observers

    def __post_init__(self) -> None:
        self._plugin = self.trainer.precision_plugin

    def run(
        self,
        arguments: tuple[Any, ...],
        phase: Phase,
        recorder: LogRecorder,
        *,
        # Called with the name of the next part, where somebody looks in between
        cut: Callable[[str], None] = lambda _: None,
        keep: Callable[[], None] = lambda: None,  # called after the backward pass
    ) -> OutputPlan:
        """Forward, loss, backward, clipping, update; the gradients are set up by the caller."""
        output, loss = self.forward(arguments, recorder)
        loss = loss / phase.window
        if self.observers.before_backward:
            cut("backward")
        self._backward(loss)
        keep()
        if phase.stepping and self.capturable is not None:
            self.update(cut)
        return output

    def forward(
        self, arguments: tuple[Any, ...], recorder: LogRecorder
    ) -> tuple[OutputPlan, Tensor]:
        """What ``training_step`` returns, and the loss in it."""
        returned = self.calls.training_step(*arguments)
        refuse_stand_ins(returned)
        output = OutputPlan(returned, static=False)
        loss = loss_of(returned)
        recorder.finish()
        return output, loss

    def _backward(self, loss: Tensor) -> None:
        scaler = scaler_of(self._plugin)
        if scaler is not None:
            loss = scaler.scale(loss)
        self._plugin.backward(loss, self.module, self.optimizer)

    def update(self, cut: Callable[[str], None] = lambda _: None) -> None:
        """Unscaling and clipping of the gradients, and the optimizer step; see :meth:`run`."""
        if self.observers.before_step and unscales(self._plugin, self.optimizer):
            cut("unscale")
        unscale(self._plugin, self.optimizer)
        if self.observers.before_step:
            cut("step")
        else:
            self.module.configure_gradient_clipping(
                self.optimizer,
                gradient_clip_val=self.trainer.gradient_clip_val,
                gradient_clip_algorithm=self.trainer.gradient_clip_algorithm,
            )
        self.step()

    def step(self) -> None:
        """Take the optimizer step, through the gradient scaler where there is one."""
        scaler = scaler_of(self._plugin)
        if scaler is None:
            self.optimizer.step()
            return
        with stepping_on_the_device(self.optimizer):
            scaler.step(self.optimizer)
        scaler.update()


def loss_of(returned: Any) -> Tensor:
    loss = returned.get("loss") if isinstance(returned, Mapping) else returned
    if not isinstance(loss, Tensor):
        raise CaptureError(
            "A captured training_step returns the loss, or a dict with it under 'loss'.",
            f"it returned {type(returned).__qualname__}"
            + (f" with loss={loss!r}" if isinstance(returned, Mapping) else ""),
            "return a loss for every batch; a step that is sometimes skipped cannot be captured",
        )
    return loss
