"""What a training step computes: the body that a capture records and a verification runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer

from lightning_graphs.core.outputs import OutputPlan
from lightning_graphs.errors import CaptureError
from lightning_graphs.training.conditions import Phase
from lightning_graphs.training.frozen import refuse_stand_ins
from lightning_graphs.training.interception import StrategyCalls
from lightning_graphs.training.logs import LogRecorder
from lightning_graphs.training.observers import Observers
from lightning_graphs.training.optimizers import CapturableOptimizer
from lightning_graphs.training.precision import (
    scaler_of,
    stepping_on_the_device,
    unscale,
    unscales,
)


class StepBody:
    """The step of one fit as Lightning does it, without the hooks."""

    def __init__(
        self,
        trainer: Trainer,
        module: LightningModule,
        calls: StrategyCalls,
        optimizer: Optimizer,
        capturable: CapturableOptimizer | None,
        observers: Observers,
    ) -> None:
        self._trainer = trainer
        self._module = module
        self._calls = calls
        self.optimizer = optimizer
        self.capturable = capturable
        self.observers = observers
        self._plugin = trainer.precision_plugin

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
        returned = self._calls.training_step(*arguments)
        refuse_stand_ins(returned)
        output = OutputPlan(returned, static=False)
        loss = loss_of(returned)
        recorder.finish()
        return output, loss

    def _backward(self, loss: Tensor) -> None:
        scaler = scaler_of(self._plugin)
        if scaler is not None:
            loss = scaler.scale(loss)
        self._plugin.backward(loss, self._module, self.optimizer)

    def update(self, cut: Callable[[str], None] = lambda _: None) -> None:
        """Unscaling and clipping of the gradients, and the optimizer step; see :meth:`run`."""
        if self.observers.before_step and unscales(self._plugin, self.optimizer):
            cut("unscale")
        unscale(self._plugin, self.optimizer)
        if self.observers.before_step:
            cut("step")
        else:
            self._clip()
        self.step()

    def _clip(self) -> None:
        trainer = self._trainer
        self._module.configure_gradient_clipping(
            self.optimizer,
            gradient_clip_val=trainer.gradient_clip_val,
            gradient_clip_algorithm=trainer.gradient_clip_algorithm,
        )

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
