"""Runs what a training step computes, as a capture records and a verification repeats it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_graphs.device.generators import Generators
from lightning_graphs.device.rules import OLD_GRADIENTS
from lightning_graphs.errors import CaptureError
from lightning_graphs.private.callsite import LIBRARIES, add_line, calls_observed, returned_by
from lightning_graphs.private.exchange import replaced
from lightning_graphs.private.torch import scaling_states
from lightning_graphs.regions.conditions import Observers, Phase
from lightning_graphs.regions.context import Recorder, TrainingContext
from lightning_graphs.regions.gradients import drop_gradients
from lightning_graphs.regions.optimizer import CapturableOptimizer
from lightning_graphs.values.memory import OutputPlan
from lightning_graphs.watch.side_effects import Places
from lightning_graphs.watch.tracers import refuse_stand_ins

_UNSCALES_ITSELF = "_step_supports_amp_scaling"
"""The attribute by which torch's GradScaler and Lightning know an optimizer that was made fused: it
divides gradients by the loss scale itself, and its hooks see scaled ones."""


@dataclass(eq=False)
class StepBody:
    """The step of one fit, without the hooks of its client."""

    fit: TrainingContext
    optimizer: Optimizer
    capturable: CapturableOptimizer | None
    observers: Observers

    def __post_init__(self) -> None:
        self.module, self.client = self.fit.module, self.fit.watch
        self._scaler = self.client.scaler

    @contextlib.contextmanager
    def surrounded(
        self,
        recorder: Recorder,
        places: Places,
        generators: Generators,
        listed: Callable[[Sequence[str]], str] = ", ".join,  # tells the author's line of names, too
    ) -> Iterator[None]:
        """What is around a step that is captured, or compared with its graphs."""
        with (
            places.left(generators, listed),
            self.fit.watch.around_step(),
            recorder.recording(),
            torch.enable_grad(),
        ):
            yield

    @calls_observed
    def run(
        self,
        arguments: tuple[Any, ...],
        phase: Phase,
        recorder: Recorder,
        *,
        # Called with the name of the next part, where somebody looks in between
        cut: Callable[[str], None] = lambda _: None,
        keep: Callable[[], None] = lambda: None,  # called after the backward pass
    ) -> OutputPlan:
        """Forward, loss, backward, clipping, update; the gradients are set up by the caller."""
        output, loss = self.forward(arguments, recorder)
        loss = loss / phase.window
        if phase.zeroing and not self.observers.own_zero_grad:
            self._zero_grad()
        if self.observers.before_backward:
            cut("backward")
        self._backward(loss)
        keep()
        if phase.stepping and self.capturable is not None:
            self.update(cut)
        return output

    def forward(self, arguments: tuple[Any, ...], recorder: Recorder) -> tuple[OutputPlan, Tensor]:
        """What the step returns, and the loss in it."""
        returned = self.client.run(*arguments)
        try:
            refuse_stand_ins(returned)
            output = OutputPlan(returned, static=False)
            loss = self.fit.watch.loss_of(returned)
        except CaptureError as error:
            add_line(error, "returned at", returned_by(self.client.function))
            raise
        recorder.finish()
        return output, loss

    def _zero_grad(self) -> None:
        """Drop the gradients of a backward pass of the step's own code, as Lightning does."""
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        hooks = self.observers.before_backward
        if hooks and any(p.grad is not None for p in parameters):
            seen = (
                f"{LIBRARIES.step} runs a backward pass of its own, and {hooks[0]} may look at it"
            )
            raise OLD_GRADIENTS.refused(seen)
        drop_gradients(parameters)

    def _backward(self, loss: Tensor) -> None:
        if self._scaler is not None:
            loss = self._scaler.scale(loss)
        self.client.backward(loss, self.optimizer)

    @calls_observed
    def update(self, cut: Callable[[str], None] = lambda _: None) -> None:
        """Unscaling and clipping of the gradients, and the optimizer step; see :meth:`run`."""
        if self._scaler is not None and not getattr(self.optimizer, _UNSCALES_ITSELF, False):
            if self.observers.before_step:
                cut("unscale")
            self._scaler.unscale_(self.optimizer)
        if self.observers.before_step:
            cut("step")
        else:
            self.client.clip(self.optimizer)
        self._step()

    def _step(self) -> None:
        scaler = self._scaler
        if scaler is None:
            self.optimizer.step()
            return
        # For optimizers that we made fused it would read `found_inf` on the host.
        with replaced(self.optimizer, _UNSCALES_ITSELF, True):
            scaler.step(self.optimizer)
        scaler.update()

    def scaling(self) -> dict[str, Any]:
        """What the scaler knows of a step that is under way; nothing where there is none.

        A capture asks first, and fails where torch does not tell.
        """
        scaler = self._scaler
        return {} if scaler is None else dict(scaling_states(scaler)[id(self.optimizer)])

    def step_eagerly(self, scaling: dict[str, Any]) -> None:
        """Take the optimizer step from where :meth:`scaling` was asked, on what hooks left."""
        if self._scaler is not None:
            scaling_states(self._scaler)[id(self.optimizer)] = dict(scaling)
        self._step()
