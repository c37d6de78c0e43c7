"""The steps of a client as regions: their keys, captures, comparisons, refusals; evaluations."""

from __future__ import annotations

import contextlib
import re
from abc import abstractmethod
from collections.abc import Collection, Iterable, MutableMapping, Sequence
from functools import lru_cache
from operator import is_
from types import CodeType
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_graphs.device.graph import without_garbage_collection
from lightning_graphs.device.rules import GRADIENTS_CHANGED, Obstacle, may_follow_values
from lightning_graphs.errors import CaptureError, GraphError, NoRoomError, VerificationError
from lightning_graphs.policy.worth import HyperParameterChurn, MemoryKept
from lightning_graphs.private.callsite import LIBRARIES
from lightning_graphs.regions.behind import Behind, HeadMissed, StepHead
from lightning_graphs.regions.body import Given, NoOptimizer
from lightning_graphs.regions.conditions import (
    NO_OBSERVERS,
    READ_OTHERWISE,
    CaptureKey,
    ClientGuards,
    NewSeeds,
    Phase,
    ReplayGuards,
    conditions_of,
    key_changes,
    moving,
    numbers_moved,
    signature_in_words,
    without_values,
)
from lightning_graphs.regions.context import CaptureFacts, TrainingContext
from lightning_graphs.regions.gradients import GradientTargets
from lightning_graphs.regions.headed import HeadedSteps, unlike
from lightning_graphs.regions.lifecycle import Lifecycle
from lightning_graphs.regions.optimizer import (
    CapturableOptimizer,
    NoStateError,
    StateAwaited,
    UpdateRefused,
    capture_obstacle,
    follow_moving,
    rounded_otherwise,
    why_cycles_stay,
)
from lightning_graphs.regions.overlapped import Overlap
from lightning_graphs.regions.own_gradients import why_not_behind
from lightning_graphs.regions.plan import StepPlan
from lightning_graphs.regions.recovery import MemoryRecovery
from lightning_graphs.regions.step import StepCapture
from lightning_graphs.regions.verify import Verification, Verifier
from lightning_graphs.report.messages import FEW, PATIENCE, capture_cost, listed, padding_for
from lightning_graphs.values.signature import Modes, Signature, Steady
from lightning_graphs.values.snapshot import Gradients, RegionState
from lightning_graphs.values.tree import parameters_of
from lightning_graphs.watch.batch import BatchValueRead, BatchValues, refuse_iterator
from lightning_graphs.watch.environment import Environment, RaisedInCapture

_KEEPS = "code of a step keeps tensors that it has computed"
BY_HAND = Phase(zeroing=False, stepping=True, window=1)
"""The phase of a step whose own code optimizes: it may add to gradients, and may step."""


class StepRegion(HeadedSteps):
    """Whole steps of a client; a runner of the client calls and replays them."""

    scope = step = "step"  # of its graphs, in the report; and what the user calls it
    captures: type[StepCapture] = StepCapture
    verifies: type[Verification] = Verification
    has_backward = True  # something may run beside the rest of it
    no_update: ClassVar[Obstacle]  # what an optimizer is whose steps no graph can take

    def __init__(
        self,
        fit: TrainingContext,
        recovery: MemoryRecovery,
        verifier: Verifier,
        head_rules: tuple[str, ...] = (),  # see :class:`StepHead`
    ) -> None:
        self._fit, self._recovery, self._verifier = fit, recovery, verifier
        self._module = fit.module
        self._statistics, self._messages = fit.statistics, fit.messages
        self._ranks, self._policy = fit.ranks, fit.policy
        options = fit.options
        # An eager step asks for the part of a key without values several times.
        self._life: Lifecycle[tuple[Any, ...], StepPlan]
        self._life = Lifecycle(self, fit, verifier, lru_cache(without_values))
        self._cache = self._life.cache
        # Those of the present
        self.plans: MutableMapping[Signature, StepPlan] = self._cache.by_key
        self._notices = StepMessages(fit, self.step)
        self._captures_unseen = True
        self._moved = ""
        self._ways_refused = 0  # so many steps went a way that cannot be captured
        self._steady = Steady()
        self._moves = 0  # so many steps in a row waited, and found other numbers
        self._warmup_left = options.warmup_steps
        self._facts = CaptureFacts(fit, self.forget_plans, recovery.gradients_held)
        self._overlap = Overlap.of(fit, self._facts, self) if self.has_backward else None
        self._head = StepHead(fit, self._facts.places, head_rules, trains=self.has_backward)
        self._tries = {}
        self._kept = self._facts.kept
        self._values = BatchValues(fit.watch.function)
        self._seeds = NewSeeds.of(fit.module, fit.module.device)
        self._active: StepPlan | None = None
        self._waits = True  # steps ran eagerly that a message may be about
        # Whether the last refusal may be due to a shape that follows from values
        self.may_follow_values = False
        self._may_give_up = options.scope == "auto" and not fit.ranks.whole_steps_only
        # Lets graphs step each optimizer; None for one that cannot be captured
        self.capturables: dict[Optimizer, CapturableOptimizer | None] = {}
        self._by_hand = fit.watch.optimizes_itself
        self._churn = HyperParameterChurn(why_cycles_stay(fit))
        self._awaited = StateAwaited()
        self._optimizers: list[Optimizer] = []
        self._left: dict[Optimizer, str] = {}  # those that step eagerly, and why
        self._awaiting = -1  # entries of their state, while more of it is awaited
        self._bind()

    # ------------------------------------------------------------------ what a client supplies

    @abstractmethod
    def _present(self) -> list[Optimizer]:
        """List the optimizers that steps call."""

    @abstractmethod
    def _client_guards(self) -> ClientGuards:
        """List what of the program around steps their graphs depend on."""

    # ------------------------------------------------------------------ what they are bound to

    def _bind(self) -> None:
        """Make guards and captures for the present optimizers, parameters and modules."""
        if not self._are_present():
            self._optimizers, self._left = self._present(), {}
        self._observers = self._fit.watch.observers()
        kernel = self._fit.options.optimizer_kernel
        self.capturables = dict.fromkeys(self._optimizers)
        for optimizer in self._optimizers:
            # An optimizer step that ran eagerly stays eager: this may be in the middle of it.
            if why := self._left.get(optimizer) or self._obstacle_of(optimizer):
                self._left[optimizer] = why
                continue
            may_follow = not self._observers.before_step
            made = CapturableOptimizer(
                optimizer, self._module.device, kernel, may_follow=may_follow
            )
            self.capturables[optimizer] = made.announced(self._messages.runs_fused)
        obstacle = self._churn.obstacle or next(iter(self._left.values()), None)
        if obstacle:
            self._messages.note(f"the optimizer step runs eagerly: {obstacle}")
        in_graphs = dict.fromkeys(self._optimizers) if self._churn.obstacle else self.capturables
        self._capture = self.captures(self._fit, self._facts, in_graphs, self._observers)
        guards = [one.guard for one in self._capture.in_graphs]
        # Gradients of earlier steps that it may read: if its own code optimizes, all of them
        old = parameters_of(*self._optimizers) if guards or self._by_hand else []
        if self._by_hand:
            old = [*dict.fromkeys([*old, *self._module.parameters()])]
        own = self._client_guards()
        self._watch = ReplayGuards(self._module, guards, old, self._facts, own)
        self._bind_head()

    def _obstacle_of(self, optimizer: Optimizer) -> str | None:
        """Why the step of an optimizer cannot be captured; None if it can."""
        device_type, kernel = self._fit.pool.backend.device_type, self._fit.options.optimizer_kernel
        return capture_obstacle(self._module, optimizer, device_type, kernel)

    def _are_present(self) -> bool:
        """Whether they are those that graphs were made for."""
        now = self._present()
        return len(now) == len(self._optimizers) and all(map(is_, now, self._optimizers))

    def _rebind(self, reason: str = "") -> None:
        """Drop every graph and make new guards; say the reason, if there is one."""
        self._ranks.lost = ""
        if reason:
            self._messages.recaptured(f"recapturing, because {reason}", reason)
        self._cache.clear()
        for capturable in filter(None, self.capturables.values()):
            capturable.restore()
        self._bind()

    def forget_plans(self) -> None:
        """Drop every graph, which lacks a place found later; keep the counts of keys."""
        self._cache.drop_all()
        self._watch.look_again()

    def release(self, plan: StepPlan) -> None:
        if plan.trial is not None and self._overlap is not None:
            self._overlap.leave(plan)
        self._kept.track(None)
        self._statistics.released(plan.captured[0])
        if plan is self._active:  # its step is not over: the pool keeps its graphs
            return
        self.discard(plan)

    def discard(self, plan: StepPlan) -> None:
        for graph in plan.captured:
            self._fit.pool.release(graph)

    @property
    def held(self) -> str:
        return "graphs" if len(self._cache) else ""

    def lend_memory(self) -> bool:
        """Whether graphs of other code over the same pool may run ahead of the next step.

        What they may overwrite is of no use by then: all that a step hands out is copied, but for
        its gradients.
        """
        return self._kept.leave_memory()

    def close(self) -> None:
        self._active = None
        done = self._statistics
        done.padding = padding_for(self._cache.shapes(), done) or done.padding
        self._cache.clear()
        self._kept.track(None)
        self._capture.persistent.clear()
        for capturable in filter(None, self.capturables.values()):
            capturable.restore()
        self.capturables.clear()

    def _count_key(self, args: tuple[Any, ...]) -> None:
        """Count the key of a warm-up batch, so that captures begin with the keys that return."""
        with contextlib.suppress(CaptureError):
            signature, _ = self._signature_of(args, self._watch.conditions())
            if self._policy.measures:
                self._cache.see(signature)

    # ------------------------------------------------------------------ the region

    def _signature_of(
        self, args: tuple[Any, ...], conditions: CaptureKey
    ) -> tuple[Signature, list[Tensor]]:
        refuse_iterator(args[0])
        modes = Modes.current(self._fit.pool.backend.device_type)
        extra = (conditions, *self._facts.places.signature())
        return self._values.signature(args[0], modes, extra)

    def key(self, call: tuple[Any, ...]) -> Signature | None:
        """Return the key of a batch in the coming step; None if it begins with a new seed."""
        self._conditions = self._current_conditions(has_graphs=len(self._cache) > 0)
        if self._seeds is not None and self._seeds.are_used_by_next_step():
            return None
        return self._signature_of(call, self._conditions)[0]

    def wait(self, key: Signature) -> None:
        self._waits = True
        if self._follows_numbers(key):
            return
        why, is_new = self._moved or self._cache.why_not, self._cache.is_new(key)
        step = key, why, self._values.why, self._facts.reads.codes, self._cache.by_key.values()
        if self._gives_up_head():
            return
        self._steady.steps += 1
        if is_new and self._steady.see(key, PATIENCE):
            self._fail()
        if self._notices.explain_wait(*step, is_new=is_new, at_once=self._cache.is_full):
            self._fail()

    def _follows_numbers(self, key: Signature) -> bool:
        """Let numbers that keep changing be inputs of graphs, as those that steps count are."""
        before = self._notices.last
        names = [] if before is None else numbers_moved(before, key)
        self._moves = self._moves + 1 if names else 0
        return self._moves == FEW and self._facts.places.learn_named(names)

    def is_ready(self, key: Signature) -> bool:
        # Libraries choose and load their kernels for a shape in its first step.
        if self._is_unseen(key) and (torch.backends.cudnn.benchmark or not self._captures_unseen):
            return False
        forks = self._facts.forks
        if len(self._cache) and forks.is_refused():
            self._ways_refused += 1
            if self._ways_refused == FEW and forks.why_eager is not None:
                self._notices.say_refused(forks.why_eager, has_graphs=True)
            return False
        steps = self._conditions.phase.stepping and not self._by_hand  # by hand only some may step
        return not steps or all(one.has_stepped for one in self._capture.in_graphs)

    def _is_unseen(self, signature: Signature) -> bool:
        return self._policy.measures and self._cache.is_new(signature)

    @without_garbage_collection()  # from the look at what surrounds the step on
    def capture(self, call: tuple[Any, ...], key: Signature) -> StepPlan | None:
        if self._is_in_head:
            self._capture_later(key)
            return None
        in_graphs = self._capture.optimizers if self._by_hand else {}
        for optimizer in [each for each, one in in_graphs.items() if one is None]:
            if why := why_not_behind(self._module, optimizer, self._fit.watch.scaler):
                raise self.no_update.refused(why)
        self._call = call
        if not len(self._cache):
            self._conditions = self._current_conditions(has_graphs=True)
        first = self._fit.pool.is_empty
        cost = capture_cost(self._fit.pool.backend, first=first)
        with self._policy.timing_capture(), cost as self._cost:
            self._recovery.before_capture(call)
            for plan in self._cache.plans():
                plan.gradients.release_ownership()
            self._kept.count()
            if self._head.now is not None:
                parts = self._key_behind, self._phase(), self._watch
                return self._capture.capture_behind(self._head, call, *parts)
            signature, tensors = self._signature_of(call, self._conditions)
            return self._capture.capture(call, tensors, signature, self._watch)

    def enter(self, plan: StepPlan, call: tuple[Any, ...]) -> bool:
        self._policy.succeeded()
        self._notices.captured(plan.key, self._facts.moved)
        self._facts.moved.clear()
        words = signature_in_words(plan.key)
        plan.record = self._statistics.captured(words, plan.captured, self._cost, scope=self.scope)
        plan.record.waits = [] if plan.forked is None else plan.forked.lines
        self._admit(plan)
        if self._overlap is not None:
            self._overlap.enter(plan)
        return plan.take_call(call)

    def _admit(self, plan: StepPlan) -> None:
        self._kept.count()
        for mechanism in plan.mechanisms:
            if mechanism.enter is not None:
                mechanism.enter()

    def judge(self, plan: StepPlan, call: tuple[Any, ...]) -> StepPlan | None:
        return None if self._overlap is None else self._overlap.judge(plan, call)

    @property
    def capturing(self) -> StepCapture:
        return self._capture

    def verify(self, plan: StepPlan, beside: StepPlan, call: tuple[Any, ...]) -> bool:
        """Verify a plan that is to stand beside another one; its replay may be the step then."""
        plan.record, plan.number = beside.record, next(self._ranks.numbers)
        self._admit(plan)
        plan.take_call(call)
        self._recovery.forget_gradients(plan)
        self._kept.bound = None
        try:
            if self._verifier.is_on:
                self._verification.check(plan, call)
        except MemoryKept:
            self._rebind(_KEEPS)
            return False
        return True

    def compare(self, plan: StepPlan, call: tuple[Any, ...]) -> bool:
        if self._is_in_head:
            return self._put_off(plan)
        self._recovery.forget_gradients(plan)
        self._kept.bound = None
        return self._is_equal(plan, call)

    def _is_equal(self, plan: StepPlan, call: tuple[Any, ...]) -> bool:
        try:
            self._verification.check(plan, call)
        except MemoryKept:
            self._rebind(_KEEPS)
            return False
        except HeadMissed:
            if plan.forked is not None and plan.forked.missed:
                self._cache.drop(plan.key)
                self._facts.forks.missed(plan.forked.missed)
                return False
            if plan.unverified:  # it was just captured; else another one may be right
                raise unlike() from None
            return False
        except VerificationError as error:
            follows = any(one.follows for one in self._capture.in_graphs)
            if self._fit.options.on_failure == "raise" or not (follows and self._ranks.are_one):
                raise
            self._leave_update(rounded_otherwise(error))
            return False
        return True

    def may_succeed(self, key: Signature, error: GraphError) -> bool:
        known = self._may_succeed(key, error)
        return known if self._ranks.are_one else self._may_have_head(error, known=known)

    def _may_succeed(self, key: Signature, error: GraphError) -> bool:
        if isinstance(error, BatchValueRead):
            if not self._finds_head(error):
                self._values.read(error)
            return True
        if self._is_unseen(key):
            self._captures_unseen = False
            return True
        if isinstance(error, UpdateRefused):
            if error.may_succeed:
                self._rebind()
            else:
                self._leave_update(error)
            return True
        if self._facts.forks.may_turn_later(error):
            return True
        if self._awaited.may_come(key, error, *self._optimizers) or self._finds_head(error):
            return True
        if isinstance(error, NoStateError) and (hooks := self._observers.before_step):
            self._await_state(f"{hooks[0]} takes gradients away, and {error.observed}")
            return True
        return False

    def _await_state(self, why: str) -> None:
        """Let optimizers step eagerly until they have made more state."""
        self._awaiting = sum(len(optimizer.state) for optimizer in self._optimizers)
        self._left |= dict.fromkeys(self._optimizers, why)
        self._rebind()

    def _take_back_updates(self) -> None:
        """Let graphs step the optimizers again, if they have made the state that was missing."""
        if 0 <= self._awaiting < sum(len(optimizer.state) for optimizer in self._optimizers):
            self._awaiting, self._left = -1, {}
            self._rebind("the optimizer has made the state that was missing")

    def _leave_update(self, error: UpdateRefused) -> None:
        """Let the optimizer step be eager; the rest of the step may be captured."""
        own = [error.optimizer] if error.optimizer is not None else self._optimizers
        self._left |= dict.fromkeys(own, error.observed)
        self._rebind()

    def refuse(self, error: GraphError) -> None:
        self.may_follow_values = may_follow_values(error)
        # If a whole step finds no memory, observing its submodules would find none.
        is_branch = self._capture.was_in_a_branch()
        if not (len(self._cache) or is_branch or isinstance(error, NoRoomError)):
            self._fail()
        self._notices.refused(error, has_graphs=not self._life.is_failing)

    def _fail(self) -> None:
        """Give up whole steps, so that submodules are captured; only with scope='auto'."""
        if self._may_give_up:
            self._life.give_up()

    # ------------------------------------------------------------------ replayed

    def _replay(self, plan: StepPlan) -> Any:
        if self._waits:
            self._waits = False
            self._messages.replayed()
        self._churn.replays += 1
        returned = plan.run(self._recovery.hand_out_without_copies)
        if self._by_hand:
            self._active = None
            plan.attach()
            self._kept.track(plan.visible)
        self._statistics.replayed += 1
        return returned

    def _current_conditions(self, *, has_graphs: bool) -> CaptureKey:
        """Return the conditions of the coming step; graphs that they make wrong are dropped."""
        self._moved = reason = self._watch.reason_to_rebind(has_graphs=has_graphs)
        if reason:
            self._rebind(reason)
        conditions = self._watch.conditions()
        if self._churn.are_too_many(conditions.hyper_parameters):
            follow_moving(self._capture.in_graphs, self._churn)
            self._rebind()
            conditions = self._watch.conditions()
        return conditions


# ------------------ Messages about whole steps

_ARGUMENT = re.compile(r'\bbatch\["(\w+)"\]')


class StepMessages:
    """Tells of captured and refused whole steps."""

    def __init__(self, fit: TrainingContext, step: str) -> None:
        self._fit, self._messages = fit, fit.messages
        self._step = step  # what the user calls it
        self._is_refused = False  # a capture was
        self.latest: Signature | None = None  # of the last captured step
        # What a step is compared with: that, or the last one after a refused capture
        self.last: Signature | None = None

    def captured(self, signature: Signature, moved: Sequence[str]) -> None:
        """Count a capture, and say what tells it from the last one, or what it follows now."""
        self._fit.statistics.captures += 1
        before, self.latest, self.last = self.latest, signature, signature
        if before is None or not (changes := self._differences(before, signature) or [*moved]):
            return
        phases = [conditions_of(key).phase for key in (before, signature)]
        if len(changes) == 1 and phases[0] != phases[1]:
            self._messages.recaptured(f"captured another graph, for the {phases[1]}", changes[0])
        else:
            change = listed(changes)
            self._messages.recaptured(f"captured another graph, as this changed: {change}", change)

    def _differences(self, before: Signature, after: Signature) -> list[str]:
        """Describe what tells two steps apart; arguments of a call are no entries of a batch."""
        lines = key_changes(before, after)
        return [_ARGUMENT.sub(r"\1", each) for each in lines] if self._step == "call" else lines

    def explain_wait(
        self,
        signature: Signature,  # of the step
        why_not: str,  # why it is not captured
        # What reads a value of the batch that was another one before, if anything
        read: CaptureError | None,
        codes: Iterable[CodeType],  # what captured steps have run
        plans: Collection[StepPlan],  # those that are there
        *,
        is_new: bool,  # no step before had a batch like this one
        at_once: bool,  # do not wait for more of them
    ) -> bool:
        """Say once why steps run eagerly, after many in a row."""
        before = self.last
        if self._is_refused and self.latest is None:
            self.last = signature
        moved = moving(before, signature, codes) if before is not None else None
        read = read or (_read_on_host(signature, plans) if plans else None)
        say = read is None and moved is None
        is_time = self._messages.waits(
            signature, why_not, self._differences, is_new=is_new, at_once=at_once, say=say
        )
        if moved is not None and is_time:
            read = moved
        if read is None or not is_time:
            return False
        self.say_refused(read, has_graphs=False)
        return True

    def refused(self, error: GraphError, *, has_graphs: bool) -> None:
        """Warn, or raise with ``on_failure="raise"``, that a step cannot be captured."""
        if self._fit.options.on_failure == "raise":
            raise (error.__cause__ or error) if isinstance(error, RaisedInCapture) else error
        self._is_refused = True
        self.say_refused(error, has_graphs=has_graphs)

    def say_refused(self, error: GraphError, *, has_graphs: bool) -> None:
        if self._fit.options.scope == "auto" and not has_graphs:
            self._messages.note(
                "cannot capture the whole step; capturing submodules instead",
                error,
                after=f"a {self._step} runs eagerly",
            )
        else:
            self._messages.note(f"a {self._step} runs eagerly", error)


def _read_on_host(key: Signature, plans: Iterable[StepPlan]) -> CaptureError | None:
    """Return the error for a step that reads otherwise on the host than those of its shape did."""
    shape = without_values(key)
    found = [plan.why_missed for plan in plans if without_values(plan.key) == shape]
    why = next(filter(None, reversed(found)), "")
    if not why:
        return None
    return READ_OTHERWISE.refused(why)


# ------------------ Steps of an evaluation


class EvaluationCapture(StepCapture):
    """Captures steps of one evaluation, of which there is the step's own code alone."""

    trains = False

    def _captured(self, given: Given | Behind, phase: Phase, watch: ReplayGuards) -> StepPlan:
        gradients = Gradients(self.module.parameters())
        try:
            plan = super()._captured(given, phase, watch)
            changed = gradients.changed()
        finally:
            gradients.restore()
        if changed:
            self._release(plan)
            raise GRADIENTS_CHANGED.refused(
                f"{LIBRARIES.step} runs a backward pass that reaches them"
            )
        return plan

    def _targets(self, phase: Phase, environment: Environment) -> GradientTargets:
        """Choose no gradients: those of training stay where they are."""
        whole = Phase(zeroing=True, stepping=True, window=1)
        return GradientTargets(
            NoOptimizer(), [], self.persistent, whole, NO_OBSERVERS, in_place=False
        )


class EvaluationVerification(Verification):
    """Compares captured steps of an evaluation with eager ones, also in what they log."""

    trains = False

    def _state(self, plan: StepPlan | None = None) -> RegionState:
        """Describe what steps may change: no parameters, as far as none was seen to be written."""
        unseen = self._look(plan)
        written = {} if plan is None else plan.loose
        tensors = {f"buffer `{name}`": buffer for name, buffer in self.module.named_buffers()}
        tensors |= {f"tensor `{name}`": tensor for name, tensor in written.items()}
        return RegionState(tensors, {}, unseen)

    def _drop_gradients(self) -> None:
        """Leave them: those of training may be adding up."""


class EvaluationSteps(StepRegion):
    """The steps of an evaluation as regions, which leave gradients alone."""

    verifies = EvaluationVerification
    has_backward = False

    def _bind(self) -> None:
        """Make guards and captures for the present parameters and modules."""
        self._observers = NO_OBSERVERS
        self._optimizers = self._present()
        optimizers = dict.fromkeys(self._optimizers or [NoOptimizer()])
        self._capture = EvaluationCapture(self._fit, self._facts, optimizers, NO_OBSERVERS)
        guards = self._facts, self._client_guards()
        self._watch = ReplayGuards(self._module, [], [], *guards)
        self._bind_head()

    def compare(self, plan: StepPlan, call: tuple[Any, ...]) -> bool:
        return self._put_off(plan) if self._is_in_head else self._is_equal(plan, call)
