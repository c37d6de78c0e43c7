"""A whole training step: its capture, in attempts that learn of each other."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_graphs.device.rules import DRAWN, USED_BEHIND, are_noted, stopping
from lightning_graphs.errors import CaptureError, GraphError, NoRoomError
from lightning_graphs.private.callsite import (
    LIBRARIES,
    NO_LINE,
    add_line,
    calls_observed,
    definition_of,
)
from lightning_graphs.private.engine import backward_passes_observed, renew_gradient_nodes
from lightning_graphs.private.torch import (
    capture_unseen,
    deepcopies_cloned,
    hooks_registered,
    parameters_in,
    version_of,
)
from lightning_graphs.regions.behind import Behind, HeadMissed, KeyOf, StepHead
from lightning_graphs.regions.body import Given, OptimizerNumbers, StepBody, unseen_steps_refused
from lightning_graphs.regions.conditions import (
    Observers,
    Phase,
    ReplayGuards,
    conditions_of,
    refuse_new_seeds,
)
from lightning_graphs.regions.context import CaptureFacts, Notes, StepRecorder, TrainingContext
from lightning_graphs.regions.forked import CapturedForks, Forked
from lightning_graphs.regions.gradients import GradientTargets, PersistentGradients, StepGradients
from lightning_graphs.regions.optimizer import CapturableOptimizer, UpdateRefused, state_undone
from lightning_graphs.regions.own_gradients import OwnGradients, uses_refused
from lightning_graphs.regions.plan import (
    BatchGradients,
    Present,
    Segments,
    StepOutputs,
    StepPlan,
    UpdateBehind,
    batch_written,
)
from lightning_graphs.regions.reduction import BucketReduction, reduction_of
from lightning_graphs.values.memory import StaticInputs
from lightning_graphs.values.signature import Signature
from lightning_graphs.values.snapshot import Snapshot
from lightning_graphs.values.tree import parameters_of
from lightning_graphs.watch.batch import UnreadValues, objects_undone, of_host, written_tensors
from lightning_graphs.watch.environment import Environment, RaisedInCapture, code_captured
from lightning_graphs.watch.filled import PlaceUsedError
from lightning_graphs.watch.head import Head
from lightning_graphs.watch.host_trace import ArenaFull
from lightning_graphs.watch.kept import LATE_RULES, first_read
from lightning_graphs.watch.mechanism import Mechanism, Watcher
from lightning_graphs.watch.numbers import Followed
from lightning_graphs.watch.places import LeftBehindError, NumberMovedError
from lightning_graphs.watch.reads import UnusedTensors
from lightning_graphs.watch.side_effects import SetData, SideEffects
from lightning_graphs.watch.user_code import held_elsewhere


class Attempts(StepBody):
    """Attempts to capture training steps of one fit; each goes on from what others have met."""

    def __init__(
        self,
        context: TrainingContext,
        facts: CaptureFacts,
        optimizers: Mapping[Optimizer, CapturableOptimizer | None],
        observers: Observers,
    ) -> None:
        super().__init__(context, optimizers, observers)
        self._facts = facts
        self.persistent = PersistentGradients()  # the gradients that outlive a replay
        self._asked: list[str] = []
        given = context.module, context.watch, facts, context.compiled, context.assertions
        self._followed = Followed(*given, context.pool.backend.refusal)
        self._unread: UnreadValues | None = None  # the unguarded values of what is captured
        self._has_several_passes = False  # the capture has seen a backward pass inside of its own
        self._unforeseen: list[Parameter] = []  # lacked memory for a gradient
        self._behind: list[UpdateBehind] = []
        self.gives_way: Callable[[CaptureError], bool] = lambda _: False  # to a head
        self.notes = Notes()
        self._units = context.ranks.units
        # Surrounds what a graph captures
        self.seeing: Callable[[], AbstractContextManager[object]] = nullcontext
        # Of the present capture
        self._inside = contextlib.ExitStack()  # surrounds the step's own code
        self._numbers: OptimizerNumbers
        self._reduction: BucketReduction | None = None  # in place of DDP's own
        self._hooks, self._registers_hooks = 0, False
        self._forks: CapturedForks | None = None  # where it may fork

    def _attempts(
        self,
        attempt: Callable[[], StepPlan],  # captures once
        call: Sequence[Tensor] | None = None,  # what the plan takes in now; None: it comes later
    ) -> StepPlan | None:
        """Capture until nothing more is learned."""
        self._unread = None
        if self._facts.forks.is_on:
            self._facts.forks.begin_step()
        goes_on = self.context.policy.goes_on if self.context.ranks.are_one else lambda: True
        while (plan := self._attempted(attempt, call)) is None:
            if not goes_on():
                return None
        return plan

    def _attempted(
        self, attempt: Callable[[], StepPlan], call: Sequence[Tensor] | None
    ) -> StepPlan | None:
        """Capture the step once; None: another attempt may succeed, with what was learned.

        Raises:
            CaptureError: It is refused, whatever was learned.
        """
        self._asked.clear()
        self.context.policy.tries_again()
        compiled, had_program = self.context.compiled.runs, self._facts.has_host_program
        try:
            plan = attempt()
            if are_noted():
                self.notes.take(())
            goes = call is None or plan.forked is None or are_noted() or self._goes(plan, call)
            return plan if goes else None
        except CaptureError as raised:
            error = raised if isinstance(raised, UpdateRefused) else first_read(raised)
            self.context.policy.met = error.observed
            refused, forks = raised.others or (raised,), self._facts.forks
            if forks.taken:
                if self._learns_on_way(error):
                    forks.learned()
                    return None
                if forks.turn(error):
                    return None
                error = forks.first_refusal or error  # those of other ways say nothing of this one
                refused = error.others or (error,)
            try:
                learned = self._learns_of(error, compiled=compiled) or self._followed.reads_bare()
                if learned:
                    forks.learned()
                elif are_noted() or not self.gives_way(error):
                    learned = self._learns_of_reads(error)
                if are_noted():
                    asks_host = self._facts.has_host_program and not had_program
                    learned = learned or self._learns_of_noted(refused[1:])
                    learned |= self.notes.take(refused, asks_host=asks_host)
                if learned:
                    return None
                if compiled and error.rule == DRAWN.rule:
                    self._refuse_draws(attempt)
                if error is raised:
                    raise
                raise error from raised
            finally:
                del error, refused  # its traceback refers to this frame, and to gradients

    def _learns_on_way(self, error: CaptureError) -> bool:
        """Learn from a refusal on a way that steps may not even go."""
        if self._learns() or self.client.learns():
            return True
        reads = self._followed.reads
        return error.rule in LATE_RULES and self.client.keeps_back(error, reads)

    def _learns_of_reads(self, error: CaptureError) -> bool:
        """Let captures keep back what one is refused for reading of the device, or follow forks."""
        facts = self._facts
        if self.client.keeps_back(error, self._followed.reads):
            facts.is_unseen = True  # once more as an eager step, to begin with
            facts.forks.learned()
            return True
        may = error.rule in LATE_RULES and self.context.ranks.are_one
        if not (may and facts.forks.switch_on()):
            return False
        facts.has_host_program, facts.is_unseen = False, True
        return True

    def _goes(self, plan: StepPlan, call: Sequence[Tensor]) -> bool:
        """Whether a step goes the way of a plan that was captured with it.

        It learns from that what the graphs ahead of forks write, and undoes them.
        """
        assert plan.forked is not None, "it has forks"
        for load in plan.loads_ahead:
            load()
        state = {*self.state_written(self.context.watch.environment()), *plan.loose.values()}
        before = Snapshot(state, room=self.context.budget.room_for)
        if goes := plan.take(call):
            plan.forked.learn(before, state)
            plan.cancel()
        before.restore()
        if not goes:
            self._release(plan)
            self._facts.forks.went(plan.forked.missed, now=True)
        return goes

    def _release(self, plan: StepPlan) -> None:
        for graph in plan.captured:
            self.context.pool.release(graph)

    def _learns_of_noted(self, refused: Iterable[CaptureError]) -> bool:
        """Learn what further refusals of an attempt show, which were noted."""
        noted, compiled = [e for e in refused if e.is_noted], self.context.compiled.runs
        known, reads = [self._learns_of(e, compiled=compiled) for e in noted], self._followed.reads
        return any(known) or any([self.client.keeps_back(error, reads) for error in noted])

    def _learns_of(self, error: CaptureError, *, compiled: bool) -> bool:
        """Learn what a failed attempt shows of the step; tell whether another one may succeed."""
        facts, raised = self._facts, isinstance(error, RaisedInCapture)
        waits = self.client.waits_for_gradients()
        # C code says of a tracer that it is no list
        if raised and facts.places.are_used() and not waits:
            return True
        if isinstance(error, HeadMissed):
            return False
        if self._unread is not None:
            self._unread.refuse_read(error.observed if raised else "")
        if NO_LINE in error.observed:
            add_line(error, "in the code of", definition_of(self.client.function))
        if isinstance(error, ArenaFull):
            self._followed.room_on_device = error.needed
        if raised or waits or isinstance(error, NoRoomError):
            return False
        if compiled != self.context.compiled.runs:
            return True  # it was followed as if none of it was compiled
        if isinstance(error, PlaceUsedError):
            if not (error.place.is_late and self.client.keeps_back(error, self._followed.reads)):
                facts.places.are_used(error.place)
            return True
        if isinstance(error, NumberMovedError) and self._followed.learn_moved(error.number):
            return True
        if self._behind and error.rule == USED_BEHIND.rule and not facts.steps_between:
            facts.steps_between = True
            return True
        if isinstance(error, ArenaFull) or self._learns() or self.client.learns():
            return True
        follows = isinstance(error, UpdateRefused) and error.may_succeed
        if follows or isinstance(error, LeftBehindError):
            return False
        if not (facts.has_host_program or compiled):
            facts.has_host_program = True
            self.context.policy.follows_host()
            return True
        if facts.is_unseen and self._asked:
            facts.is_unseen = facts.has_host_program = False
            return True
        return False

    def _refuse_draws(self, captured: Callable[[], StepPlan]) -> None:
        """Refuse the first draw on the host of a step that draws there, with its line."""
        self._followed.finds_draws = True
        try:
            plan = captured()
        except GraphError as error:
            if error.rule == DRAWN.rule:
                raise
        else:
            self._release(plan)
        finally:
            self._followed.finds_draws = False

    def _learns(self) -> bool:
        """Whether there are new places to store in, or calls to follow."""
        places = self._facts.places
        if places.learn(places.found):
            return True
        if self._unforeseen:
            self.persistent.of(self._unforeseen)
            self._unforeseen.clear()
            return True
        if self._has_several_passes and not self._facts.has_several_passes:
            self._facts.has_several_passes = True
            return True
        return self._followed.learn()

    def was_in_a_branch(self) -> bool:
        """Whether the first refusal may hold only for the present numbers of the trainer."""
        return self._followed.was_in_a_branch()

    def _passes_counted(self, *, adds: bool) -> AbstractContextManager[None]:
        """Capture again if each of several backward passes adds to gradients by itself."""
        passes = itertools.count(1)

        @stopping()
        def begun(*_: object) -> None:
            if not self.client.optimizes_itself:
                self._facts.forks.ends = None  # hooks and updates follow, which see gradients
            if next(passes) > 1 and adds and not self._facts.has_several_passes:
                self._has_several_passes = True
                raise CaptureError(
                    "A captured step must add the gradients of each backward pass by itself.",
                    "a backward pass runs inside of another one, or of the step",
                    "use torch.utils.checkpoint(..., use_reentrant=False)",
                )

        return backward_passes_observed(begun)


class _Begun(NamedTuple):
    """A capture that has begun."""

    signature: Signature
    tensors: Sequence[Tensor]
    arguments: Sequence[Any]
    inputs: StaticInputs
    versions: Sequence[int]  # of the static inputs, before
    written: list[int]  # which of them the step has changed in place, known at the end
    asked: BatchGradients
    effects: SideEffects
    environment: Environment
    targets: GradientTargets | OwnGradients
    present: Present

    def finish(self) -> None:
        """Find what the step has done to its batch."""
        self.written.extend(written_tensors(self.tensors, self.inputs.tensors, self.versions))
        self.asked.finish_capture()


class _Results(NamedTuple):
    """What the code of a captured step has left."""

    output: StepOutputs
    gradients: StepGradients
    scaling: dict[str, Any]  # of the scaler, as its optimizers step


class StepCapture(Attempts):
    """Captures training steps of one fit."""

    @calls_observed
    def capture(
        self,
        arguments: Sequence[Any],  # of the step, the batch first
        tensors: Sequence[Tensor],  # the tensor leaves of the batch, in the order of the signature
        signature: Signature,  # of ``(batch,)``, under the conditions of the step
        watch: ReplayGuards,  # reads what it depends on next to its batch
    ) -> StepPlan | None:
        """Capture the step of this batch; nothing executes.

        The capture is hidden from libraries, which do what they do in eager steps. If that is
        refused, it is repeated with a record of what the step computes on the host, and after that
        both ways without hiding it. The way that succeeds is the first one of the next capture. If
        none does, all is as before, but for a gradient reducer that waits for the rest of a
        backward pass. None: it could be captured, but costs more than it saves.
        """
        numbers = self.numbers_of(arguments[0], signature)
        step = definition_of(self.client.function)
        given = Given(arguments, tensors, signature, step, numbers=numbers)
        if self._units is not None and self.observers.before_backward:
            raise CaptureError(
                "A captured step under FSDP2 cannot show parameters between forward and backward.",
                f"{', '.join(self.observers.before_backward)} may read them",
                "read parameters in on_after_backward or later",
            )
        attempt = partial(self._captured, given, conditions_of(signature).phase, watch)
        return self._attempts(attempt, tensors)

    def numbers_of(self, batch: Any, signature: Signature) -> Mapping[str, Callable[[], Any]]:
        """Return readers of numbers at the top of a batch that stay live, by their keys."""
        return {}

    @calls_observed
    def capture_behind(
        self,
        head: StepHead,
        arguments: Sequence[Any],  # of the step, the batch first
        key_of: KeyOf,  # gives the key of the rest of the step
        phase: Phase,
        watch: ReplayGuards,
    ) -> StepPlan | None:
        """Capture what follows the head of a step; see :meth:`capture`.

        Each attempt runs the head on a batch of its own, and undoes what it does.
        """
        given = Behind(head, arguments, key_of, definition_of(self.client.function))
        return self._attempts(partial(self._captured, given, phase, watch))

    def _targets(self, phase: Phase, environment: Environment) -> GradientTargets | OwnGradients:
        """Choose where gradients of the coming capture go, and what sums them over ranks."""
        ddp = self.client.ddp
        if self.client.optimizes_itself:
            inside = parameters_of(*self.optimizers)
            found = (*self.module.parameters(), *inside, *environment.leaves)
            return OwnGradients(found, self.persistent, self._unforeseen)
        trained = [p for p in parameters_in(self.module) if p.requires_grad]
        targets = GradientTargets(
            self.optimizer,
            [*trained, *environment.leaves],
            self.persistent,
            phase,
            self.observers,
            in_place=self._facts.has_several_passes or (ddp is not None and phase.stepping),
        )
        self._reduction = (
            reduction_of(ddp, adds=targets.adds) if ddp is not None and phase.stepping else None
        )
        return targets

    @code_captured("A captured step")
    def _captured(self, given: Given | Behind, phase: Phase, watch: ReplayGuards) -> StepPlan:
        self._segments = Segments(self.context.pool, self._facts.reads, self.seeing)
        self._behind, self._forks = [], None
        self._facts.forks.taken.clear()
        self._facts.forks.ends = None
        recorder, watchers = self.client.recorder(), list[Watcher]()
        try:
            with given.around():
                results = self._record(given, phase, recorder, watchers)
        except BaseException:  # KeyboardInterrupt and the like, too
            self._segments.abandon()
            if self._units is not None:
                self._units.forget_step()
            raise
        finally:
            self._facts.places.settle()
            before, self._facts.places.last = self._facts.places.last, None
        if [*self._facts.places]:  # other values stood there
            before = None
        return self._planned(given.head, phase, recorder, watchers, watch, results, before)

    def _record(
        self,
        given: Given | Behind,
        phase: Phase,
        recorder: StepRecorder,
        watchers: list[Watcher],  # to which those of this capture are added
    ) -> _Results:
        """Run the step's code once, which its segments capture, under all that is watched."""
        around, capturing = contextlib.ExitStack(), contextlib.ExitStack()
        scaling: dict[str, Any] = {}

        def cut(name: str) -> None:
            if name == "step":
                scaling.update(self.scaling())
            self._begun.effects.look(self._facts.places.adopt)
            self._segments.cut(name)

        def begin(given: Given) -> Sequence[Any]:
            """Begin to capture, at the end of the head if there is one."""
            self._begun = begun = self._begin(given, phase, recorder)
            watchers.extend(self._watched(begun, given, recorder, self._segments))
            for watcher in watchers:
                around.enter_context(watcher.around())
            begun.targets.begin()
            renew_gradient_nodes(begun.targets.parameters)
            capturing.enter_context(self._segments.capturing("forward"))
            capturing.enter_context(self._passes_counted(adds=begun.targets.adds))
            for watcher in watchers:
                self._inside.enter_context(watcher.inside())
            if self._facts.forks.is_on:
                self._follow_forks(begun.environment)
            self._hooks = hooks_registered()  # those of the capture itself are no user's
            return begun.arguments

        with around:
            with capturing:
                code, keep = partial(given.run, begin), lambda: self._begun.targets.keep()
                output = self.run((code,), phase, recorder, cut=cut, keep=keep)
                effects, targets = self._begun.effects, self._begun.targets
                effects.look(self._facts.places.adopt)
                self._sets.refuse_kept((*output.tensors, *effects.left))
            gradients = targets.found(copied=self._facts.kept.are_copied)
        for watcher in watchers:
            watcher.finish()
        return _Results(output, gradients, scaling)

    def _follow_forks(self, environment: Environment) -> None:
        """Let the captured code go several ways, from here to the end of its forward pass."""
        forks, state = self._facts.forks, self.state_written(environment)
        ends = self._segments.fork, self._numbers.fork
        self._forks = CapturedForks(forks, ends, state, self._followed.refuse)
        forks.ends = self._forks.end
        self._inside.enter_context(forks.quiet())
        if not self.context.compiled.runs:  # it would be compiled again
            self._inside.enter_context(self._forks.seeing)

    def _planned(
        self,
        head: Head | None,
        phase: Phase,
        recorder: StepRecorder,
        watchers: Sequence[Watcher],
        watch: ReplayGuards,
        results: _Results,
        before: Any,  # the contents of the places that the step stores to, if they still hold
    ) -> StepPlan:
        """Make the plan of what was captured."""
        begun, segments, (output, gradients, scaling) = self._begun, self._segments, results
        effects, environment = begun.effects, begun.environment
        for capturable in self.in_graphs:
            capturable.guard.remember()
        stores = {n: effects.without_places(found) for n, found in segments.stores.items()}
        environment.outside.read_into(self._facts.reads)
        output.finish_capture()
        effects.finish_capture()
        mechanisms = [m for w in watchers if (m := w.mechanism()) is not None]
        forked: Forked | None = None
        if self._forks is not None and segments.ahead:
            mechanisms.append(Mechanism(key=(self._facts.forks.reads,)))
            forked = self._forks.replayed(segments.ahead, self.module)
        conditions = replace(conditions_of(begun.signature), attributes=watch.attributes())
        read = itertools.chain.from_iterable(mechanism.key for mechanism in mechanisms)
        return StepPlan(
            key=replace(begun.signature, extra=(conditions, *read)),
            mechanisms=mechanisms,
            guards=watch.checks(conditions, reads_old=gradients.reads_old),
            are_kept=self._facts.kept.has_external_references,
            effects=effects,
            outputs=output,
            logged=recorder.logged,
            gradients=gradients.inside,
            outside=gradients.outside,
            replaced=gradients.replaced,
            visible=gradients.visible,
            dropped=gradients.dropped,
            graphs=segments.graphs,
            steps=phase.stepping and bool(self.in_graphs),
            adds=begun.targets.adds,
            written=environment.loose.written(),
            stores=stores,
            scaling=scaling,
            present=begun.present,
            head=head,
            forked=forked,
            between=segments.between,
            behind=self._behind,
            surroundings=(environment.held, before, environment.small),
        )

    def _begin(self, given: Given, phase: Phase, recorder: StepRecorder) -> _Begun:
        """Prepare a capture of this call."""
        (batch, *rest), tensors = given.arguments, given.tensors
        present = Present(batch=batch)
        passed = partial(getattr, present, "batch")
        self._unread = unread = UnreadValues(given.signature, given.step, passed)
        inputs = StaticInputs(tensors, given.given)
        versions, asked = list(map(version_of, inputs.tensors)), BatchGradients(inputs, tensors)
        self._followed.begin(tensors, inputs)
        number = self._followed.numbers.number
        static: Sequence[Tensor] = inputs.tensors
        if self._followed.tracer is None:
            static = of_host(inputs.tensors, self.module.device)
        own = unread.left_out(batch, static, given.name)
        for key, read in given.numbers.items():
            own[key] = number(key, read)
        effects = SideEffects(*self._facts.places.prepared(), own)
        arguments = (own, *self.context.watch.arguments(rest, number))
        environment = self.context.watch.environment()
        environment.outside.assume_running(given.frames)
        self._facts.places.loose = environment.loose.memory
        if self.client.stores_outside:
            self._facts.places.outside = environment.outside.contents
        targets = self._targets(phase, environment)
        recorder.live = self._followed.numbers.logged
        return _Begun(
            given.signature, tensors, arguments, inputs, versions, [], asked, effects, environment,
            targets, present,
        )  # fmt: skip

    def _watched(
        self, begun: _Begun, given: Given, recorder: StepRecorder, segments: Segments
    ) -> list[Watcher]:
        """List what is watched for, from the outside to the inside."""
        effects, environment, targets = begun.effects, begun.environment, begun.targets
        inputs, present = begun.inputs, begun.present
        assert self._unread is not None, "made as the capture begins"
        number, listed = self._followed.numbers.number, environment.outside.listed
        surrounding = self._facts.places, environment.held, environment.generators, listed
        unused = UnusedTensors(environment.held, environment.outside.words)
        loose = environment.in_attributes
        self._sets = SetData(targets.parameters, self.module, loose, effects.inputs)
        known = held_elsewhere(self.module)
        self._numbers = rates = OptimizerNumbers(self.optimizers, self.client.schedulers, number)
        old: Callable[[], AbstractContextManager[None]]
        if isinstance(targets, OwnGradients):  # there they are what an eager step has
            old = targets.watched
        else:
            old = partial(environment.old_gradients, effects.own)
        return [
            Watcher(finish=self._unread.refuse_read),
            Watcher(
                finish=begun.finish,
                mechanism=partial(batch_written, inputs, begun.written, begun.asked, present),
            ),
            Watcher(partial(state_undone, self.optimizers, targets.parameters, self._scaler), old),
            Watcher(self.context.compiled.watching),
            Watcher(
                partial(effects.exchanged, number, recorder, self.client.own),
                finish=lambda: effects.refuse_untouched(environment.outside.codes),
                mechanism=partial(effects.mechanism, present),
            ),
            # Ahead of the watched classes: asking a new class whether it is a metric takes long.
            Watcher(
                partial(self.surrounded, recorder, *surrounding),
                mechanism=partial(_logged, recorder),
            ),
            Watcher(partial(environment.reading, self._facts.reads, number)),
            Watcher(
                rates.rates,
                rates.traced,
                finish=unseen_steps_refused(self.optimizers, self.context.compiled),
                mechanism=self._refreshed,
            ),
            Watcher(partial(environment.refusing, LIBRARIES.step)),
            Watcher(partial(objects_undone, begun.arguments[0], listed, known)),
            Watcher(inside=self._unseen),
            Watcher(inside=nullcontext if self._reduction is None else self._reduction.unprepared),
            Watcher(inside=deepcopies_cloned),
            Watcher(inside=self._sets.setting, mechanism=self._sets.mechanism),
            Watcher(inside=unused.watching, finish=partial(unused.tell, self._facts.reads)),
            *self._followed.watchers(environment),
            Watcher(
                finish=lambda: refuse_new_seeds(segments.dropout), mechanism=segments.mechanism
            ),
            Watcher(inside=given.inside),
            Watcher(inside=lambda: recorder.keeping(by_methods=self.context.compiled.runs)),
            Watcher(mechanism=lambda: Mechanism(takes=(inputs.copy_in,))),
        ]

    def _refreshed(self) -> Mechanism | None:
        found = [capturable.refreshing for capturable in self.in_graphs]
        counters = [one.counters for one in self.in_graphs if one.counters is not None]
        after = [one.advance for one in counters if one.advance is not None]
        checks = [check for one in counters for check in one.checks]
        made = partial(Mechanism, checks=checks, before_update=found, after=after)
        if settings := self._numbers.settings:  # once all that was there before is read
            own = (one for one in self.in_graphs if one.has_rates)
            fills = [partial(one.refresh, anew=True) for one in own]
            return made(noted=[settings.apply, *fills], last=[settings.end])
        return made(before=found) if found else None

    def schedule(
        self, recorder: StepRecorder, scheduler: Any, own: Callable[..., Any], *given: Any, **k: Any
    ) -> None:
        self._numbers.schedule(scheduler, given, k)
        recorder.at_end(partial(own, *given, **k))

    def step_behind(self, recorder: StepRecorder, optimizer: Optimizer) -> None:
        targets = self._begun.targets
        assert isinstance(targets, OwnGradients), "the step's own code takes steps"
        shown = targets.shown()
        self._behind.append(update := UpdateBehind(optimizer, shown, self._begun.present))
        if not (self._facts.steps_between and self._segments.step(update)):
            targets.used_behind(shown)
            recorder.at_end(update.take)
            self._inside.enter_context(uses_refused(optimizer, shown))

    def rates_given(self, optimizer: Optimizer) -> AbstractContextManager[None]:
        return self._numbers.rates_of(optimizer)

    def forward(
        self, arguments: tuple[Any, ...], recorder: StepRecorder
    ) -> tuple[StepOutputs, Tensor | None]:
        with contextlib.ExitStack() as self._inside:
            result = super().forward(arguments, recorder)
            self._followed.look_behind(result[1])
            self._facts.forks.ends = None
            self._registers_hooks = hooks_registered() != self._hooks
        return result

    def _call(self, arguments: Sequence[Any]) -> Any:
        (code,) = arguments
        return code(self.client.run)

    def _backward(self, loss: Tensor) -> None:
        watch, reduction = self.context.watch, self._reduction
        casts: AbstractContextManager[None] = nullcontext()
        if reduction is not None and not self._registers_hooks and watch.is_backward_unseen(loss):
            casts = reduction.reducing(loss)
        elif reduction is not None:
            reduction.leave_to_ddp()
        elif not self._registers_hooks:
            casts = watch.cast_unseen(loss)
        tracer = self._followed.tracer
        host = tracer if tracer is not None and tracer.in_backward else nullcontext()
        with casts, self._unseen(), host:
            super()._backward(loss)

    def _unseen(self) -> AbstractContextManager[None]:
        return capture_unseen(self._asked) if self._facts.is_unseen else nullcontext()


def _logged(recorder: StepRecorder) -> Mechanism:
    last = recorder.last
    return Mechanism(after=(recorder.reissue,), last=() if last is None else (last,))
