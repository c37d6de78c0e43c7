"""Captures and replays the optimizer step by itself, when submodules are graphs."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from itertools import chain
from operator import is_, itemgetter
from typing import Any

import torch
from torch.optim import Optimizer

from lightning_graphs.errors import (
    CaptureError,
    GraphError,
    VerificationError,
    first_line,
    is_out_of_memory,
    no_room,
)
from lightning_graphs.policy.worth import HyperParameterChurn
from lightning_graphs.private.callsite import calls_observed
from lightning_graphs.private.engine import require_plain_gradients
from lightning_graphs.private.exchange import nothing, replaced
from lightning_graphs.regions.body import StepBody
from lightning_graphs.regions.context import TrainingContext
from lightning_graphs.regions.gradients import GradientBuffers, PersistentGradients
from lightning_graphs.regions.lifecycle import Lifecycle, Region
from lightning_graphs.regions.optimizer import (
    CapturableOptimizer,
    StateAwaited,
    UpdateRefused,
    capture_obstacle,
    follow_moving,
    state_undone,
    why_cycles_stay,
)
from lightning_graphs.regions.plan import Plan, PlanPart
from lightning_graphs.regions.verify import Verification, Verifier
from lightning_graphs.values.memory import AddressGuard
from lightning_graphs.values.tree import parameters_of
from lightning_graphs.watch.environment import code_captured, rates_exchanged
from lightning_graphs.watch.numbers import StepNumbers
from lightning_graphs.watch.reads import AttributeGuards

_members = itemgetter("params")


class _GoesOtherWays(CaptureError):
    """Numbers lead the step on its way that its key did not tell."""


class CapturedUpdate(Region[Hashable, Plan]):
    """Takes the optimizer steps of a fit as graph launches; a region whose calls bring nothing."""

    def __init__(
        self, context: TrainingContext, gradients: PersistentGradients, verifier: Verifier
    ) -> None:
        self.optimizer: Optimizer = context.watch.optimizers[0]
        # The last step had no graph before it: no other step has run next to its memory.
        self.is_new = False
        self.capturable: CapturableOptimizer | None = None
        self._context = context
        self._pool = context.pool.beside()
        self._gradients = gradients
        self._verifier = verifier
        self._observers = context.watch.observers()
        self._churn = HyperParameterChurn(why_cycles_stay(context))
        self._awaited = StateAwaited()
        # What reads the numbers by which captured steps have gone their way
        self._ways: dict[str, Callable[[], Any]] = {}
        self._life = Lifecycle[Hashable, Plan](self, context, verifier)
        self._bind()

    def _bind(self) -> None:
        client, device_type = self._context.watch, self._pool.backend.device_type
        module, kernel = self._context.module, self._context.options.optimizer_kernel
        obstacle = capture_obstacle(module, self.optimizer, device_type, kernel)
        if client.scaler is not None and self._observers.before_step:
            obstacle = obstacle or "hooks look at gradients between unscaling and the step"
        if said := obstacle or self._churn.obstacle:
            self._context.messages.note(f"the optimizer step runs eagerly: {said}")
        if obstacle is not None:
            return
        try:
            made = CapturableOptimizer(self.optimizer, module.device, kernel)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self.refuse(no_room("A captured optimizer step", first_line(error)))
            return
        self.capturable = made.announced(self._context.messages.runs_fused)
        self._parameters = parameters_of(self.optimizer)
        self._guard = AddressGuard([("", {str(i): p for i, p in enumerate(self._parameters)})])
        self._body = StepBody(self._context, {self.optimizer: self.capturable}, self._observers)
        self._checks = Verification(self._verifier, self._body)

    @property
    def takes_closure_once(self) -> bool:
        """Whether its closure may run ahead of the step, as that is known to do itself."""
        return self.capturable is None or self.capturable.takes_closure_once

    def refuse_closure(self) -> None:
        """Leave the step eager if the last one has used its closure otherwise; said once."""
        error = None if self.capturable is None else self.capturable.closure_refused()
        if error is not None and not self._churn.obstacle:
            self.refuse(error)

    def follow(self, optimizer: Optimizer) -> None:
        """Go on with another optimizer, if it is now the trainer's only one."""
        if self._context.watch.optimizers == [optimizer]:
            self.optimizer = optimizer
            self._rebind("the optimizer was replaced")

    def step(self) -> bool:
        """Take the step on the present gradients, with the hooks before it."""
        if self.capturable is None or self._churn.obstacle:
            return False
        hooked = bool(self._observers.before_step)
        if hooked:  # first: they may remove gradients, and move what a graph freezes
            self._context.watch.call_gradient_hooks(self.optimizer)
        self.is_new = False
        plan = self._plan_for(self.capturable)
        self.is_new |= plan is None
        if plan is None:
            if hooked:
                self.optimizer.step(*self.capturable.closure_ahead)
            return hooked
        if not hooked:
            self._context.watch.announce_optimizer_step(self.optimizer)
        self._churn.replays += 1
        plan.uses += 1
        if plan.is_launched:
            plan.is_launched = False
        else:
            plan.replay("step")
        return True

    def _plan_for(self, capturable: CapturableOptimizer) -> Plan | None:
        reason = capturable.guard.changed(self._context.watch.epoch)
        if not (reason or self._guard.is_in_place() or self._guard.bring_back()):
            reason = "a parameter has moved"
        members = chain.from_iterable(map(_members, capturable.guard.groups))
        if not (reason or all(map(is_, members, self._parameters))):
            reason = "a parameter group has other parameters"
        numbers = capturable.guard.numbers()
        if reason or self._churn.are_too_many(numbers):
            if self._churn.obstacle:
                follow_moving([capturable], self._churn)
            self._rebind(reason)
            return None
        with_gradient = tuple([p.grad is not None for p in self._parameters])
        if not any(with_gradient):
            return None  # there would be nothing in the graph
        ways = tuple([read() for read in self._ways.values()]) if self._ways else ()
        return self._life.plan_for((numbers, self._context.watch.clipping, with_gradient, ways))

    # ------------------------------------------------------------------ the region

    def is_ready(self, key: Hashable) -> bool:
        return self.capturable is not None and self.capturable.has_stepped

    def capture(self, call: Hashable, key: Hashable) -> Plan:
        assert self.capturable is not None
        with self._context.policy.spending(), self._gradients.capturing():
            return self._captured(self.capturable, key)

    @calls_observed
    @code_captured("A captured optimizer step")
    def _captured(self, capturable: CapturableOptimizer, key: Hashable) -> Plan:
        with_gradient = [p for p in self._parameters if p.grad is not None]
        require_plain_gradients([p.grad for p in with_gradient])
        others = [p for p in self._parameters if p.grad is None]
        gradients = GradientBuffers(with_gradient, self._gradients.of(with_gradient), others)
        numbers = StepNumbers(AttributeGuards(), self._context.module.device)
        undone = state_undone([self.optimizer], self._parameters, self._context.watch.scaler)
        with undone, torch.no_grad():
            rates = capturable.live_rates(numbers.number)
            with rates_exchanged(self._context.watch.schedulers, self.optimizer, rates):
                gradients.bind()
                with self._pool.capture() as captured:
                    self._body.update()
        known, self._ways = self._ways, {**self._ways, **numbers.ways}
        if not known.keys() >= self._ways.keys():
            raise _GoesOtherWays("", "", "")
        capturable.guard.remember()
        counters = capturable.counters
        return Plan(
            key=key,
            checks=tuple(counters.checks if counters else ()),
            parts={
                # It unscales and clips them if no hook runs in between, and takes the step.
                "step": PlanPart.of(
                    captured,
                    (
                        capturable.refreshing,
                        *[number.refresh for number in numbers.filled.values()],
                        partial(self._gradients.bring_in, gradients),
                    ),
                    (gradients.take_out, *filter(None, [counters.advance] if counters else ())),
                )
            },
        )

    def compare(self, plan: Plan, call: Hashable) -> bool:
        self._gradients.has_external_references()  # first: the comparison keeps them itself
        with replaced(self._gradients, "has_external_references", nothing):
            plan.is_launched = self._checks.check_update(partial(plan.replay, "step"))
        return True

    def may_succeed(self, key: Hashable, error: GraphError) -> bool:
        if isinstance(error, _GoesOtherWays):  # the coming keys tell them apart
            return True
        if isinstance(error, UpdateRefused) and error.may_succeed:
            self._rebind()
            return True
        return self._awaited.may_come(key, error, self.optimizer)

    def refuse(self, error: GraphError) -> None:
        if self._context.options.on_failure == "raise" and isinstance(error, VerificationError):
            raise error
        self._context.messages.note("the optimizer step runs eagerly", error)
        if isinstance(error, UpdateRefused):
            self._churn.obstacle = error.observed

    def discard(self, plan: Plan) -> None:
        self._pool.release(plan.parts["step"].graph)

    def enter(self, plan: Plan, call: Hashable) -> None:
        """Note that no eager step has run next to its memory."""
        self.is_new = True

    # ------------------------------------------------------------------ rebinding

    def _rebind(self, reason: str = "") -> None:
        self._ways = {}
        if reason:
            self._context.messages.recaptured(
                f"recapturing the optimizer step, because {reason}", reason
            )
        self.close()
        self._bind()

    def close(self) -> None:
        self._life.cache.clear()
        if self.capturable is not None:
            self.capturable.restore()
            self.capturable = None
