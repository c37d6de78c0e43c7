"""Captures and replays the optimizer step by itself, where submodules are graphs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from lightning_graphs.core.arguments.buffers import AddressGuard
from lightning_graphs.core.autograd.backward import refuse_sparse_gradients
from lightning_graphs.core.callsite import calls_observed
from lightning_graphs.core.graph import CUDAGraph
from lightning_graphs.core.private.torch import same_pointers
from lightning_graphs.errors import GraphError, VerificationError
from lightning_graphs.training.costs.cache import PlanCache
from lightning_graphs.training.costs.investment import Moves
from lightning_graphs.training.fit import Fit
from lightning_graphs.training.guards.frozen import rates_exchanged
from lightning_graphs.training.guards.hooks import Observers
from lightning_graphs.training.guards.side_effects import code_captured
from lightning_graphs.training.lightning_private import announce_optimizer_step, call_gradient_hooks
from lightning_graphs.training.step.body import StepBody
from lightning_graphs.training.step.capture import StateAwaited, state_as_known
from lightning_graphs.training.step.gradients import (
    AttachedGradients,
    PersistentGradients,
    gradients_set_aside,
)
from lightning_graphs.training.step.optimizers import (
    CapturableOptimizer,
    capture_obstacle,
    scaler_of,
)
from lightning_graphs.training.verify.agreement import Agreement
from lightning_graphs.training.verify.verification import Verification


@dataclass(slots=True)
class UpdatePlan:
    """A captured optimizer step."""

    gradients: AttachedGradients  # the gradients that it reads
    graph: CUDAGraph  # unscales and clips them where nobody looks in between, and takes the step
    uses: int = 0  # how often it was replayed


class CapturedUpdate:
    """Takes the optimizer steps of a fit as graph launches."""

    def __init__(self, fit: Fit, gradients: PersistentGradients, agreement: Agreement) -> None:
        self.optimizer: Optimizer = fit.trainer.optimizers[0]
        # The last step had no graph before it: no other step has run beside its memory.
        self.is_new = False
        self.capturable: CapturableOptimizer | None = None
        self._fit = fit
        self._pool = fit.pool.beside()
        self._gradients = gradients
        self._agreement = agreement
        self._observers = Observers.of(fit.trainer, fit.module)
        self._moves = Moves(fit.trainer)
        self._awaited = StateAwaited()
        self._cache: PlanCache[Any, UpdatePlan] = PlanCache(
            fit.investment,
            lambda plan: self._pool.release(plan.graph),
            capacity=fit.options.max_graphs,
        )
        self._bind()

    def _bind(self) -> None:
        plugin, device_type = self._fit.trainer.precision_plugin, self._pool.backend.device_type
        obstacle = capture_obstacle(self._fit.module, self.optimizer, device_type, plugin)
        if scaler_of(plugin) is not None and self._observers.before_step:
            obstacle = obstacle or "hooks look at gradients between unscaling and the step"
        if said := obstacle or self._moves.obstacle:
            self._fit.statistics.note(f"the optimizer step runs eagerly: {said}")
        if obstacle is not None:
            return
        self.capturable = CapturableOptimizer(self.optimizer, self._fit.module.device)
        if self.capturable.runs_other_kernel:
            self._fit.statistics.runs_fused(type(self.optimizer).__name__)
        groups = self.optimizer.param_groups
        self._parameters = [p for group in groups for p in group["params"]]
        self._guard = AddressGuard([("", {str(i): p for i, p in enumerate(self._parameters)})])
        self._body = StepBody(self._fit, self.optimizer, self.capturable, self._observers)
        self._checks = Verification(self._agreement, self._body)

    def follow(self, optimizer: Optimizer) -> None:
        """Go on with another optimizer, if it is now the trainer's only one."""
        if self._fit.trainer.optimizers == [optimizer]:
            self.optimizer = optimizer
            self._rebind("the optimizer was replaced")

    def step(self) -> bool:
        """Take the step on the gradients that there are, with the hooks before it."""
        if self.capturable is None or self._moves.obstacle:
            return False
        hooked = bool(self._observers.before_step)
        if hooked:  # first: they may remove gradients, and move what a graph freezes
            call_gradient_hooks(self._fit.trainer, self._fit.module, self.optimizer)
        plan = self._plan(self.capturable)
        if plan is None:
            if hooked:
                self.optimizer.step()
            return hooked
        if not hooked:
            announce_optimizer_step(self._fit.trainer, self.optimizer)
        self._moves.replays += 1
        self._replay(self.capturable, plan)
        return True

    def _replay(
        self, capturable: CapturableOptimizer, plan: UpdatePlan, *, looks: bool = True
    ) -> None:
        plan.uses += 1
        capturable.refresh()
        with self._gradients.brought_in(plan.gradients, looks=looks):
            plan.graph.replay()

    def _plan(self, capturable: CapturableOptimizer) -> UpdatePlan | None:
        reason = capturable.reason_to_rebind(self._fit.trainer.current_epoch)
        if not (reason or same_pointers(*self._guard.places) or self._guard.bring_back()):
            reason = "a parameter has moved"
        if reason:
            self._rebind(reason)
            return None
        numbers = capturable.hyper_parameters()
        if self._moves.are_too_many(numbers):
            self._rebind()
            return None
        trainer = self._fit.trainer
        with_gradient = tuple([p.grad is not None for p in self._parameters])
        if not any(with_gradient):
            return None  # there would be nothing in the graph
        clipping = trainer.gradient_clip_val, trainer.gradient_clip_algorithm
        key = (numbers, clipping, with_gradient)
        plan = self._cache.get(key)
        is_new = self.is_new = plan is None
        if is_new and not (self._cache.is_due(key) and capturable.has_stepped):
            return None
        try:
            if plan is None:
                with self._gradients.capturing():
                    plan = self._capture(capturable)
                self._cache.add(key, plan)
            if is_new or self._agreement.is_due:
                self._gradients.look()  # ahead of the check, which keeps them itself
                replay = partial(self._replay, capturable, plan, looks=False)
                self._checks.check_update(replay)
        except GraphError as error:
            if self._fit.options.on_failure == "raise" and isinstance(error, VerificationError):
                raise
            if self._awaited.may_come(key, error, self.optimizer):
                return None
            self._cache.refuse(key)
            self._fit.statistics.note("the optimizer step runs eagerly", error)
            return None
        return plan

    @calls_observed
    @code_captured("A captured optimizer step")
    def _capture(self, capturable: CapturableOptimizer) -> UpdatePlan:
        with_gradient = [p for p in self._parameters if p.grad is not None]
        refuse_sparse_gradients([p.grad for p in with_gradient])
        others = [p for p in self._parameters if p.grad is None]
        gradients = AttachedGradients(with_gradient, self._gradients.of(with_gradient), others)
        with gradients_set_aside(self._parameters), state_as_known(self.optimizer), torch.no_grad():
            rates = capturable.live_rates()
            with rates_exchanged(self._fit.trainer, self.optimizer, rates):
                gradients.attach()
                with self._pool.capture() as captured:
                    self._body.update()
        capturable.remember_state()
        return UpdatePlan(gradients, captured)

    def _rebind(self, reason: str = "") -> None:
        if reason:
            self._fit.statistics.recaptured(
                f"recapturing the optimizer step, because {reason}", reason
            )
        self.close()
        self._bind()

    def close(self) -> None:
        self._cache.clear()
        if self.capturable is not None:
            self.capturable.restore()
            self.capturable = None
