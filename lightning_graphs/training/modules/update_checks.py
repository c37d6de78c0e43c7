"""Captured optimizer steps against the eager ones, before training relies on them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from lightning.pytorch import Trainer
from torch.optim import Optimizer

from lightning_graphs.training.agreement import Agreement, BothWays, tolerance_of
from lightning_graphs.training.body import StepBody
from lightning_graphs.training.differences import Result
from lightning_graphs.training.frozen import rates_exchanged
from lightning_graphs.training.generators import Generators
from lightning_graphs.training.memory import first_line, is_out_of_memory
from lightning_graphs.training.modules.schedule import Schedule
from lightning_graphs.training.optimizers import CapturableOptimizer
from lightning_graphs.training.python_state import Attributes
from lightning_graphs.training.state import StepState

_UNVERIFIED = "the captured optimizer step was not verified"


class UpdateChecks:
    """Takes a captured optimizer step both ways from one state, and compares.

    Args:
        schedule: Which steps are verified.
        trainer: The trainer.
        body: What the step computes.
        optimizer: The trainer's optimizer.
        capturable: Keeps it capturable.
    """

    def __init__(
        self,
        schedule: Schedule,
        trainer: Trainer,
        body: StepBody,
        optimizer: Optimizer,
        capturable: CapturableOptimizer,
    ) -> None:
        self._schedule = schedule
        self._trainer = trainer
        self._body = body
        self._optimizer = optimizer
        self._capturable = capturable

    @property
    def is_due(self) -> bool:
        """Whether this step is to be verified once more."""
        return self._schedule.is_due

    def check(self, replay: Callable[[], None]) -> None:
        """Verify a captured step on the gradients that there are.

        Gradients, parameters, the optimizer's state and the loss scale are compared, and are
        afterwards as before.

        Args:
            replay: Takes the captured step.

        Raises:
            VerificationError: names the first tensor that differs.
        """
        if not self._schedule.is_on:
            return
        root, say, budget = self._schedule.root, self._schedule.say, self._schedule.budget
        state = StepState(self._trainer, root, self._optimizer, {}, budget=budget)
        attributes, python = Attributes(root), Generators(root)

        def restore() -> None:
            state.restore()
            attributes.restore()
            python.restore()

        def eager() -> list[Result]:
            # Kernels round a rate on the device otherwise.
            rates = self._capturable.live_rates()
            with rates_exchanged(self._trainer, self._optimizer, rates):
                self._body.update()
            return state.results(None)

        def replayed() -> list[Result]:
            replay()
            return state.results(None)

        agreement = Agreement(tolerance_of(self._trainer), budget, self._schedule.where, say)
        try:
            state.keep()
            with state.restored():
                try:
                    agreement.require(BothWays(eager, replayed, restore, state.moved))
                finally:
                    attributes.restore()
                    python.restore()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            say(_UNVERIFIED, first_line(error))
        finally:
            if root.device.type == "cuda":
                torch.cuda.empty_cache()  # of the copy of the state
