"""Decides for every batch whether the step runs eagerly, is captured or replayed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from operator import methodcaller
from typing import Any

import torch
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor
from torch.optim import Optimizer

from lightning_graphs.device.rules import may_follow_values
from lightning_graphs.errors import CaptureError, GraphError
from lightning_graphs.lightning.context import CaptureFacts, TrainingContext
from lightning_graphs.lightning.private import (
    announce_optimizer_step,
    call_gradient_hooks,
    is_lightnings_closure,
    skips_backward,
    takes_no_closure,
)
from lightning_graphs.lightning.ranks import NOT_REDUCED
from lightning_graphs.policy.budget import MemoryKept, NoRoomError
from lightning_graphs.policy.worth import HyperParameterChurn
from lightning_graphs.private.exchange import nothing
from lightning_graphs.regions.cache import PlanCache
from lightning_graphs.regions.conditions import CaptureKey, NewSeeds, Observers, signature_in_words
from lightning_graphs.regions.gradients import KEPT_LATE
from lightning_graphs.regions.lifecycle import CAPTURE, EAGER, GIVE_UP
from lightning_graphs.regions.notices import StepMessages
from lightning_graphs.regions.optimizer import (
    CapturableOptimizer,
    StateAwaited,
    capture_obstacle,
)
from lightning_graphs.regions.plan import StepPlan, without_values
from lightning_graphs.regions.replay_guards import ReplayGuards
from lightning_graphs.regions.step import StepCapture, refuse_iterator
from lightning_graphs.regions.verified_steps import Verification
from lightning_graphs.report.statistics import capture_cost
from lightning_graphs.values.signature import CallPlan, Modes, Signature
from lightning_graphs.watch.batch import BatchValueRead, BatchValues

_WRAPPED = (
    "the optimizer step runs eagerly: optimizer_step hands a closure of its own to the optimizer, "
    "which may change gradients; configure_gradient_clipping or on_before_optimizer_step may do so "
    "in a captured step"
)


class StepRunner:
    """Runs the steps of a fit as a whole."""

    def __init__(self, fit: TrainingContext) -> None:
        self._fit = fit
        self._recovery = fit.recovery
        self._trainer = fit.trainer
        self._module = fit.module
        self._calls = fit.recovery.calls
        self._statistics, self._messages = fit.statistics, fit.messages
        self._ranks = fit.ranks
        self._investment = fit.investment
        options = fit.options
        self._verifier = fit.verifier()
        self._cache: PlanCache[Signature, StepPlan] = PlanCache(
            fit.investment,
            self._release,
            capacity=options.max_graphs,
            shape=lru_cache(without_values),  # which is asked for time and again in an eager step
        )
        self._notices = StepMessages(options, fit.statistics, fit.messages)
        self._captures_unseen = True
        self._moved = ""
        self._warmup_left = options.warmup_steps
        self._learned = CaptureFacts(fit.module, self._forget_plans)
        self._kept = self._learned.kept
        self._values = BatchValues()
        self._seeds = NewSeeds.of(fit.module, fit.module.device)
        self._active: StepPlan | None = None
        self._stepping = False
        # After a refusal no graph of a step is left; or attributes move on too often
        self._failing = self.has_failed = False
        # Perhaps because of a shape that follows from values
        self.may_follow_values = False  # not the error, which holds what was captured
        self._may_give_up = options.scope == "auto" and not fit.ranks.whole_steps_only
        # What keeps the optimizer capturable; None if it cannot be captured
        self.capturable: CapturableOptimizer | None = None
        self._moves = HyperParameterChurn(fit.trainer)
        self._awaited = StateAwaited()
        self._optimizer: Optimizer = fit.trainer.optimizers[0]
        self._obstacle: str | None = None
        self._bind()

    def _bind(self) -> None:
        """Look at the optimizer, parameters and modules as they are now."""
        if self._trainer.optimizers[0] is not self._optimizer:
            self._optimizer, self._obstacle = self._trainer.optimizers[0], None
        self._observers = Observers.of(self._trainer, self._module)
        given = self._fit.pool.backend.device_type, self._trainer.precision_plugin
        # Once eager it stays so: it may be in the middle of its own step.
        obstacle = self._obstacle or capture_obstacle(self._module, self._optimizer, *given)
        self._obstacle = obstacle
        self.capturable = None
        if obstacle is None:
            self.capturable = CapturableOptimizer(self._optimizer, self._module.device)
            if self.capturable.runs_other_kernel:
                self._messages.runs_fused(type(self._optimizer).__name__)
        obstacle = obstacle or self._moves.obstacle
        if obstacle:
            self._messages.note(f"the optimizer step runs eagerly: {obstacle}")
        self._in_graph = None if obstacle else self.capturable
        self._capture = StepCapture(
            self._fit, self._learned, self._optimizer, self._in_graph, self._observers
        )
        self._verification = Verification(self._verifier, self._capture, self._learned.places)
        self._watch = ReplayGuards(self._module, self._capture, self._learned)

    def _forget_plans(self) -> None:
        """Drop every graph, and not how often steps were seen: none copies in from a new place."""
        self._cache.drop_all()
        self._watch.look_again()

    def _release(self, plan: StepPlan) -> None:
        self._kept.track(None)
        self._statistics.released(plan.graphs["forward"])
        if plan is self._active:  # the rest of its step is still to come: the pool keeps it
            return
        self._release_graphs(plan)

    def _release_graphs(self, plan: StepPlan | None) -> None:
        for graph in () if plan is None else plan.graphs.values():
            self._fit.pool.release(graph)

    @property
    def held(self) -> str:
        return "graphs" if len(self._cache) else ""

    def close(self) -> None:
        self._active = None
        self._cache.clear()
        self._kept.track(None)
        self._capture.persistent.clear()
        vars(self._optimizer).pop("zero_grad", None)
        if self.capturable is not None:
            self.capturable.restore()
            self.capturable = None

    # ------------------------------------------------------------------ strategy methods

    def optimizer_step(
        self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        """Run a stepping micro-batch: the closure, then whatever no graph has done yet."""
        if optimizer is not self._optimizer:
            if optimizer is not self._trainer.optimizers[0]:
                return self._calls.optimizer_step(optimizer, closure, model, **kwargs)
            self._rebind(self._watch.reason_to_rebind() or "")  # ahead of its step, not within it
        # Another closure may change gradients after Lightning's own, or call it twice, as SAM does.
        own = is_lightnings_closure(closure)
        if not own and not takes_no_closure(closure) and self._in_graph is not None:
            self._messages.note(_WRAPPED)
        self._stepping = own
        try:
            if self.capturable is None or not own:
                return self._calls.optimizer_step(optimizer, closure, model, **kwargs)
            result = closure()
        finally:
            self._stepping = False
            plan, self._active = self._active, None
        unscales = plan is not None and "unscale" in plan.graphs
        if plan is None or not plan.steps or (unscales and not plan.gradients.complete()):
            return self._calls.optimizer_step(optimizer, lambda: result, model, **kwargs)
        if self._observers.before_step:
            if unscales:
                plan.gradients.load()
                plan.graphs["unscale"].replay()
                plan.gradients.bind()  # copies follow in place
            call_gradient_hooks(self._trainer, self._module, optimizer)
            self._step_after_hooks(plan)
        else:
            announce_optimizer_step(self._trainer, optimizer)
        return result

    def _step_after_hooks(self, plan: StepPlan) -> None:
        """Replay the optimizer step on the gradients that the hooks left."""
        assert self._in_graph is not None
        moved = self._in_graph.hyper_parameters() != plan.conditions.hyper_parameters
        replaced = self._in_graph.replaced(self._trainer.current_epoch)
        if moved or replaced or not plan.gradients.complete():
            self._capture.step_eagerly(plan.scaling)
            return
        self._in_graph.refresh()
        # A fused step unscales by itself what no hook has unscaled before it
        plan.gradients.bring_in(self._kept.are_held)
        plan.graphs["step"].replay()
        plan.gradients.take_out()
        plan.store("step")

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Call the hooks of a backward pass; replay it where it is a graph of its own."""
        plan = self._active
        if plan is None:
            return self._calls.backward(closure_loss, optimizer, *args, **kwargs)
        vars(self._optimizer).pop("zero_grad", None)
        plugin = self._trainer.precision_plugin
        if self._observers.before_backward:  # they see the loss as the plugin has scaled it
            closure_loss = plugin.pre_backward(closure_loss, self._module)
        else:  # the base class only calls the hooks; the scale may have moved on in the graph
            Precision.pre_backward(plugin, closure_loss, self._module)
        if "backward" in plan.graphs:
            if self._kept.are_held():
                self._messages.note(KEPT_LATE)
            plan.adopt()
            plan.graphs["backward"].replay()
            plan.store("backward")
        # Where the backward pass is no graph of its own, nobody can have changed it since.
        unseen = "backward" not in plan.graphs and self._kept.bound is plan.gradients
        plan.attach(bound=unseen)
        self._kept.track(plan.gradients)
        closure_loss = Precision.post_backward(plugin, closure_loss, self._module)
        if not self._stepping:
            self._active = None
        return closure_loss

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Decide for this batch, and run, capture or replay it."""
        plan = self._plan_for(args, kwargs)
        self._active = plan
        if plan is None:
            return self._eager(args, kwargs)
        if plan.changes is not None:
            plan.loaded = args[0]
        return self._replay(plan)

    # ------------------------------------------------------------------ the three phases

    def _plan_for(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StepPlan | None:
        is_outside = bool(kwargs) or skips_backward(self._trainer) or self._investment.is_over
        ranks = self._ranks
        if is_outside or self._warmup_left > 0 or not (ranks.ready or ranks.are_ready()):
            if not is_outside:
                self._look_ahead(args)
            ranks.settle(EAGER, False)
            return None
        if ranks.units is not None and not ranks.units.shard():
            ranks.leave(NOT_REDUCED)
        conditions = self._conditions()
        plan = self._cache.find(methodcaller("fits", args[0], conditions))
        if plan is not None:
            choice, wish = plan.number, plan.unverified and self._investment.affords_verification
        else:
            choice, wish = CAPTURE if self._is_due(args, conditions) else EAGER, False
        choice, verify = GIVE_UP if self._failing else choice, wish
        if not ranks.are_one:
            choice, verify = ranks.settle(choice, wish)
        self.has_failed |= choice == GIVE_UP
        if plan is not None and choice <= CAPTURE:
            plan.rewind_host()
        if choice == CAPTURE:
            if plan is not None:  # another rank has lost it
                self._cache.drop(plan.call.signature)
            if not len(self._cache):
                conditions = self._conditions(captures=True)
            return self._captured(args, conditions)
        if choice <= EAGER or plan is None:
            return None
        again = self._verifier.every and self._verifier.is_due
        return self._verified(plan, args) if verify or again else plan

    def _look_ahead(self, args: tuple[Any, ...]) -> None:
        """Count a batch of the warm-up, so that the first capture knows what comes back."""
        with contextlib.suppress(CaptureError):
            conditions = self._watch.conditions(self._stepping)
            signature, _ = self._signature_of(args, conditions)
            if self._investment.measures:
                self._cache.see(signature)

    def _is_due(self, args: tuple[Any, ...], conditions: CaptureKey) -> bool:
        """Whether the step of this batch is to be captured."""
        if self._seeds is not None and self._seeds.are_used_by_next_step():
            return False
        try:
            signature, _ = self._signature_of(args, conditions)
        except CaptureError as error:
            self._refused(None, error)
            return False
        cache = self._cache
        if not cache.is_due(signature):
            if cache.why_not:
                why, is_new = self._moved or cache.why_not, cache.is_new(signature)
                step = signature, why, self._values.why, self._learned.reads.codes
                self._fails(self._notices.waiting(*step, is_new=is_new, at_once=cache.is_full))
            return False
        # Libraries choose and load their kernels for a shape when it comes for the first time.
        if self._is_unseen(signature) and (
            torch.backends.cudnn.benchmark or not self._captures_unseen
        ):
            return False
        return not (conditions.phase.stepping and self._in_graph and not self._in_graph.has_stepped)

    def _signature_of(
        self, args: tuple[Any, ...], conditions: CaptureKey
    ) -> tuple[Signature, list[Tensor]]:
        refuse_iterator(args[0])
        modes = Modes.current(self._fit.pool.backend.device_type)
        extra = (conditions, *self._learned.places.signature())
        return self._values.signature(args[0], modes, extra)

    def _is_unseen(self, signature: Signature) -> bool:
        return self._investment.measures and self._cache.is_new(signature)

    def _captured(self, args: tuple[Any, ...], conditions: CaptureKey) -> StepPlan | None:
        """Capture the step of this batch; None: it cannot be captured, run it eagerly."""
        signature, tensors = self._signature_of(args, conditions)

        def capture() -> StepPlan | None:
            self._recovery.before_capture(args)
            for plan in self._cache.plans():
                plan.gradients.release_ownership()
            self._kept.count()
            if self._in_graph is not None and not len(self._cache):
                self._in_graph.gather_state()
            return self._capture.capture(args[0], tensors, args[1:], signature, conditions.phase)

        try:
            with self._investment.paying(), capture_cost(self._fit.pool.backend) as cost:
                plan = self._ranks.together(capture, self._release_graphs)
        except GraphError as error:
            if isinstance(error, BatchValueRead):
                self._values.read(error)
            elif self._is_unseen(signature):
                self._captures_unseen = False
            elif not self._awaited.may_come(signature, error, self._optimizer):
                self._refused(signature, error)
            return None
        if plan is None:
            return None
        conditions = replace(conditions, attributes=self._watch.attributes())
        signature = replace(signature, extra=(conditions, *plan.told))
        plan.call, plan.conditions = CallPlan(signature, check_modes=True), conditions
        plan.number = next(self._ranks.numbers)
        self._notices.captured(signature)
        self._statistics.captured(signature_in_words(signature), [*plan.graphs.values()], cost)
        self._cache.add(signature, plan)
        self._kept.count()
        plan.fill(tensors)
        plan.unverified = self._verifier.is_on
        is_too_much = self._ranks.any(not self._investment.affords_verification)
        return plan if is_too_much else self._verified(plan, args)

    def _verified(self, plan: StepPlan, args: tuple[Any, ...]) -> StepPlan | None:
        """The plan if it computes what the eager step does; None: it is dropped, run eagerly."""
        if self._verifier.is_on:
            plan.unverified = False
            self._recovery.forget_gradients(plan)
            self._kept.bound = None
            try:
                with self._investment.verifying():
                    self._verification.check(plan, args)
            except MemoryKept:
                self._rebind("code of a step keeps tensors that it has computed")
                return None
            except GraphError as error:
                self._refused(plan.call.signature, error)
                return None
        return plan

    def _eager(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._statistics.eager += 1
        if self._fit.progress is not None:
            self._fit.progress.mirrored = frozenset()
        if self._warmup_left > 0:
            self._warmup_left -= 1
            watching = self._learned.logged.watching(self._module)
            with watching, self._fit.compiled.watching():
                return self._calls.training_step(*args, **kwargs)
        return self._calls.training_step(*args, **kwargs)

    def _replay(self, plan: StepPlan) -> Any:
        forward = plan.graphs["forward"]
        plan.uses += 1
        self._messages.replayed()
        self._moves.replays += 1
        for number in plan.numbers:
            number.refresh()
        if "backward" not in plan.graphs:
            plan.adopt()
        if plan.clocks is not None:
            plan.clocks.begin()
        forward.replay()
        if (ddp := self._ranks.ddp) is not None:  # reduced by then
            ddp.require_forward_param_sync = plan.conditions.phase.stepping
        if not self._observers.own_zero_grad:
            # Lightning zeroes after the forward pass; the graph has done it and written anew.
            vars(self._optimizer)["zero_grad"] = nothing
        try:
            returned = plan.hand_out()
        except Exception as error:
            returned = self._recovery.handed_out(plan, error)
        self._statistics.count_replay(forward)
        return returned

    def _conditions(self, *, captures: bool = False) -> CaptureKey:
        """The conditions of the coming step, and no graph left that they have made wrong."""
        has_graphs = captures or len(self._cache) > 0
        reason = self._watch.reason_to_rebind(has_graphs=has_graphs) or self._ranks.lost
        self._moved = reason
        if reason:
            self._rebind(reason)
        conditions = self._watch.conditions(self._stepping)
        if self._moves.are_too_many(conditions.hyper_parameters):
            self._rebind()
            conditions = self._watch.conditions(self._stepping)
        return conditions

    def _rebind(self, reason: str = "") -> None:
        """Drop every graph, and look at the fit anew; the reason, where there is one, is said."""
        if reason:
            self._messages.recaptured(f"recapturing, because {reason}", reason)
        self._ranks.lost = ""
        self._cache.clear()
        if self.capturable is not None:
            self.capturable.restore()
        self._bind()

    def _refused(self, signature: Signature | None, error: GraphError) -> None:
        if signature is not None:
            self._cache.refuse(signature)
        self.may_follow_values = may_follow_values(error)
        # What finds no memory as a whole finds none for the arguments of its submodules.
        is_branch = self._capture.was_in_a_branch()
        self._fails(not (len(self._cache) or is_branch or isinstance(error, NoRoomError)))
        self._notices.refused(error, has_graphs=not self._failing)

    def _fails(self, failing: bool) -> None:
        """Note that graphs of whole steps come to nothing here: in the end all ranks give up."""
        self._failing |= failing and self._may_give_up
        self.has_failed |= self._failing and self._ranks.are_one
