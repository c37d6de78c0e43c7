"""A whole training step: its capture."""

from __future__ import annotations

import contextlib
import enum
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_graphs.autograd.graphed import Stores
from lightning_graphs.device.graph import Backend, CUDAGraph, GraphPool
from lightning_graphs.device.rules import AFTERMATH, DRAWN, NOT_RECORDED, with_known_remedy
from lightning_graphs.errors import CaptureError, GraphError, NoRoomError
from lightning_graphs.private.callsite import (
    LIBRARIES,
    NO_LINE,
    add_line,
    calls_observed,
    definition_of,
)
from lightning_graphs.private.engine import (
    backward_passes_observed,
    renew_gradient_nodes,
)
from lightning_graphs.private.generators import CapturedDropout
from lightning_graphs.private.torch import (
    capture_unseen,
    hooks_registered,
    version_of,
)
from lightning_graphs.regions.behind import Behind, HeadMissed, KeyOf, StepHead
from lightning_graphs.regions.body import Given, StepBody
from lightning_graphs.regions.conditions import (
    Observers,
    Phase,
    ReplayGuards,
    conditions_of,
    refuse_new_seeds,
)
from lightning_graphs.regions.context import CaptureFacts, Recorder, TrainingContext
from lightning_graphs.regions.gradients import (
    BatchGradients,
    BucketReduction,
    GradientTargets,
    PersistentGradients,
    reduction_of,
)
from lightning_graphs.regions.optimizer import CapturableOptimizer, OptimizerNumbers, state_undone
from lightning_graphs.regions.own_gradients import OwnGradients
from lightning_graphs.regions.plan import StepPlan
from lightning_graphs.values.memory import OutputPlan, StaticInputs
from lightning_graphs.values.signature import Signature
from lightning_graphs.watch.assertions import Assertions
from lightning_graphs.watch.batch import UnreadValues, objects_undone, of_host, written_tensors
from lightning_graphs.watch.containers import PlaceUsedError
from lightning_graphs.watch.environment import (
    Environment,
    RaisedInCapture,
    Readings,
    clocks_exchanged,
    code_captured,
)
from lightning_graphs.watch.host import HostProgram
from lightning_graphs.watch.host_trace import (
    ArenaFull,
    HostTracer,
    draws_recorded,
    draws_refused,
)
from lightning_graphs.watch.mirrors import FollowedState, held_numbers
from lightning_graphs.watch.numbers import StepNumbers
from lightning_graphs.watch.reads import AttributeGuards
from lightning_graphs.watch.side_effects import LeftBehindError, SideEffects
from lightning_graphs.watch.tracers import (
    Conversion,
    DrawingFunction,
    calls_followed,
)

# ------------------ Graphs of one step


class Segments:
    """The graphs of one step: one, or more if the capture was cut."""

    def __init__(self, pool: GraphPool, reads: AttributeGuards) -> None:
        self._pool = pool
        self._reads = reads
        self._open = contextlib.ExitStack()
        self.graphs: dict[str, CUDAGraph] = {}
        self.stores: dict[str, Stores] = {}

    @contextlib.contextmanager
    def capturing(self, name: str) -> Iterator[None]:
        with self._open:
            self.cut(name)
            yield

    def cut(self, name: str) -> None:
        self._open.close()
        self._open.push(partial(self._ended, name))
        self._captured = self._open.enter_context(self._pool.capture())

    def _ended(self, name: str, error: type[BaseException] | None, *_: object) -> None:
        if error is None:
            self.graphs[name] = self._captured
            if stores := self._reads.stored():
                self.stores[name] = stores

    @property
    def dropout(self) -> CapturedDropout | None:
        """cuDNN's random state, if any of the graphs draws from it."""
        return next((graph.dropout for graph in self.graphs.values() if graph.dropout), None)

    def abandon(self) -> None:
        while self.graphs:
            self._pool.release(self.graphs.popitem()[1])


# ------------------ Capture of a step


class _Begun(NamedTuple):
    """A capture that has begun."""

    signature: Signature
    tensors: Sequence[Tensor]
    arguments: Sequence[Any]
    inputs: StaticInputs
    versions: Sequence[int]  # of the static inputs, before
    asked: BatchGradients
    effects: SideEffects
    environment: Environment
    targets: GradientTargets | OwnGradients

    def written(self) -> list[int]:
        return written_tensors(self.tensors, self.inputs.tensors, self.versions)


_ROOM_ON_DEVICE = 2**20  # bytes for what the host hands to the graph, to begin with


def _note_refusal(backend: Backend, found: list[CaptureError], error: RuntimeError) -> None:
    """Note an operator that CUDA refuses, while the user's line runs that calls it."""
    if not found and (refusal := backend.refusal(error)) is not None:
        if refusal.rule == NOT_RECORDED.rule:
            refusal.remedy = with_known_remedy(NOT_RECORDED).remedy
        found.append(refusal)


class Outcome(enum.Enum):
    """What a failed attempt to capture a step comes to."""

    LEARNED = enum.auto()  # another one may succeed, with what was learned of the step
    TOO_DEAR = enum.auto()  # another one would cost more than it saves
    REFUSED = enum.auto()


class Attempts(StepBody):
    """Attempts to capture training steps of one fit, which learn of each other."""

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
        self._copies = self.client.copies_on_host
        self._units = context.ranks.units
        self._hooks, self._registers_hooks = 0, False
        self._asked: list[str] = []
        self._room_on_device = _ROOM_ON_DEVICE
        self._host_tracer: HostTracer | None = None
        self._numbers = StepNumbers(facts.reads, self.module.device)
        self._has_branched = self._finds_draws = False
        self._clocks = Readings()
        self._conversions: frozenset[Conversion] = frozenset()
        self._functions: frozenset[DrawingFunction] = frozenset()
        self._reduction: BucketReduction | None = None  # in place of DDP's own
        self._unread: UnreadValues | None = None  # the unguarded values of what is captured
        self._inside = contextlib.ExitStack()  # surrounds the step's own code
        self._has_several_passes = False  # the capture has seen a backward pass inside of its own
        self._old_gradients: AbstractContextManager[None] = nullcontext()
        self._in_optimizers: OptimizerNumbers | None = None  # of the coming capture
        self._unforeseen: list[Parameter] = []  # lacked memory for a gradient
        self._caught: list[CaptureError] = []  # CUDA's refusals of operators, which code may catch
        self._assertions: Assertions | None = None  # what the coming capture reads only to raise
        self._state: FollowedState  # numbers that it reads and writes in tensors
        self._advance: Callable[[], None] | None = None

    def _attempts(self, attempt: Callable[[], StepPlan]) -> StepPlan | None:
        self._unread = None
        while (outcome := self._attempted(attempt)) is Outcome.LEARNED:
            pass
        return None if isinstance(outcome, Outcome) else outcome

    def _attempted(self, attempt: Callable[[], StepPlan]) -> StepPlan | Outcome:
        """Capture the step once.

        Raises:
            CaptureError: It is refused, whatever was learned.
        """
        self._asked.clear()
        self._caught.clear()
        self.context.policy.tries_again()
        compiled = self.context.compiled.runs
        try:
            return attempt()
        except CaptureError as raised:
            # Others follow the first one
            error = self._caught[0] if self._caught and AFTERMATH in raised.observed else raised
            outcome = self._outcome_of(error, compiled=compiled)
            if outcome is Outcome.REFUSED and self.client.keeps_back(error):
                self._facts.is_unseen = True  # once more as an eager step, to begin with
                return Outcome.LEARNED
            if outcome is Outcome.REFUSED and compiled and error.rule == DRAWN.rule:
                self._refuse_draws(attempt)
            if outcome is Outcome.REFUSED and error is raised:
                raise
            if outcome is Outcome.REFUSED:
                raise error from raised
            return outcome

    def _outcome_of(self, error: CaptureError, *, compiled: bool) -> Outcome:
        """Judge a failed attempt, and learn what it shows of the step."""
        facts, raised = self._facts, isinstance(error, RaisedInCapture)
        waits = self.client.waits_for_gradients()
        # C code says of a tracer that it is no list
        if raised and facts.places.are_used() and not waits:
            return Outcome.LEARNED
        if isinstance(error, HeadMissed):
            return Outcome.REFUSED
        if self._unread is not None:
            self._unread.refuse_read(error.observed if raised else "")
        if NO_LINE in error.observed:
            add_line(error, "in the code of", definition_of(self.client.function))
        if isinstance(error, ArenaFull):
            self._room_on_device = error.needed
        if raised or waits or isinstance(error, NoRoomError):
            return Outcome.REFUSED
        if compiled != self.context.compiled.runs:
            return Outcome.LEARNED  # it was followed as if none of it was compiled
        if isinstance(error, PlaceUsedError):
            facts.places.are_used(error.place)
            return Outcome.LEARNED
        if isinstance(error, ArenaFull) or self._learns() or self.client.learns():
            return Outcome.LEARNED
        if isinstance(error, LeftBehindError):
            return Outcome.REFUSED
        if not (facts.has_host_program or compiled):
            facts.has_host_program = True
            goes_on = not self.context.ranks.are_one or self.context.policy.goes_on_with_host()
            return Outcome.LEARNED if goes_on else Outcome.TOO_DEAR
        if facts.is_unseen and self._asked:
            facts.is_unseen = facts.has_host_program = False
            return Outcome.LEARNED
        return Outcome.REFUSED

    def _refuse_draws(self, captured: Callable[[], StepPlan]) -> None:
        """Refuse the first draw on the host of a step that draws there, with its line."""
        self._finds_draws = True
        try:
            plan = captured()
        except GraphError as error:
            if error.rule == DRAWN.rule:
                raise
        else:
            for graph in plan.graphs.values():
                self.context.pool.release(graph)
        finally:
            self._finds_draws = False

    def _learns(self) -> bool:
        """Whether there are new places to store in, or calls to follow.

        Conversions to bare numbers are followed if user code, or a package's, has asked for them;
        functions that draw are followed if a use of what they drew was refused.
        """
        places = self._facts.places
        if places.learn(places.found):
            return True
        learned = self._facts.mirrors.learn()
        if self._unforeseen:
            self.persistent.of(self._unforeseen)
            self._unforeseen.clear()
            return True
        if self._has_several_passes and not self._facts.has_several_passes:
            self._facts.has_several_passes = True
            return True
        known = self._conversions, self._functions
        self._conversions |= set(filter(self._could_follow, self._numbers.asked))
        self._functions |= self._numbers.refused
        return learned or known != (self._conversions, self._functions)

    @contextlib.contextmanager
    def _passes_counted(self, *, adds: bool) -> Iterator[None]:
        """Capture again if each of several backward passes adds to gradients by itself."""
        passes = itertools.count(1)

        def begun(*_: object) -> None:
            if next(passes) > 1 and adds and not self._facts.has_several_passes:
                self._has_several_passes = True
                raise CaptureError(
                    "A captured step must add the gradients of each backward pass by itself.",
                    "a backward pass runs inside of another one, or of the step",
                    "use torch.utils.checkpoint(..., use_reentrant=False)",
                )

        with backward_passes_observed(begun):
            yield

    def _could_follow(self, asked: Conversion) -> bool:
        own = self.context.watch.own
        is_new = asked not in self._conversions and not self.context.compiled.runs
        return is_new and (own.has_module(asked[0]) or own.has_installed(asked[0]))


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
        given = Given(arguments, tensors, signature, definition_of(self.client.function))
        if self._units is not None and self.observers.before_backward:
            raise CaptureError(
                "A captured step under FSDP2 cannot show parameters between forward and backward.",
                f"{', '.join(self.observers.before_backward)} may read them",
                "read parameters in on_after_backward or later",
            )
        return self._attempts(partial(self._captured, given, conditions_of(signature).phase, watch))

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

    def _follow_host(self, tensors: Sequence[Tensor], inputs: StaticInputs) -> None:
        """Prepare to trace what the coming capture computes on the host."""
        self._host_tracer, self._clocks = None, Readings()
        device = self.module.device
        if self._facts.has_host_program and not self.context.compiled.runs:
            copies, room = self._copies(tensors), self._room_on_device
            self._host_tracer = HostTracer(device, inputs.tensors, copies, room)
            note = partial(_note_refusal, self.context.pool.backend, self._caught)
            self._host_tracer.on_error = note
        tape = None if self._host_tracer is None else self._host_tracer.tape
        self._assertions = Assertions(device, (lambda _: False) if tape is None else tape.knows)
        parts = self._facts.reads, device, tape, self._could_follow
        self._numbers = StepNumbers(*parts)
        named = ((f"self.{name}", buffer) for name, buffer in self.module.named_buffers())
        self._state = FollowedState(
            self._facts.mirrors,
            held_numbers(named),
            self._numbers,
            self._assertions,
            is_synced=self.client.ddp is not None,
        )

    def _refuse_recorded_beside_compiled(self) -> None:
        if self._host_tracer is not None and self.context.compiled.runs:
            raise CaptureError(  # and once more without: it runs eagerly while that is done
                "A capture cannot record what the host computes beside compiled code.",
                "the step calls code that torch.compile has made",
                "move what is compiled, or what the host computes, out of the step",
            )

    def _targets(self, phase: Phase, environment: Environment) -> GradientTargets | OwnGradients:
        """Choose where gradients of the coming capture go, and what sums them over ranks."""
        ddp = self.client.ddp
        if self.client.optimizes_itself:
            groups = (group for optimizer in self.optimizers for group in optimizer.param_groups)
            inside = (parameter for group in groups for parameter in group["params"])
            found = (*self.module.parameters(), *inside, *environment.leaves)
            own = OwnGradients(found, self.persistent, self._unforeseen)
            self._old_gradients = own.watched()
            return own
        trained = [p for p in self.module.parameters() if p.requires_grad]
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
        segments = Segments(self.context.pool, self._facts.reads)
        scaling: dict[str, Any] = {}
        recorder = self.client.recorder()
        around, capturing = contextlib.ExitStack(), contextlib.ExitStack()

        def cut(name: str) -> None:
            if name == "step":
                scaling.update(self.scaling())
            self._begun.effects.look()
            segments.cut(name)

        def begin(given: Given) -> Sequence[Any]:
            """Begin to capture, at the end of the head if there is one."""
            self._begun = begun = self._begin(given, phase, recorder, around)
            capturing.enter_context(segments.capturing("forward"))
            capturing.enter_context(self._passes_counted(adds=begun.targets.adds))
            self._watch_code(self._inside)
            self._inside.enter_context(given.inside())
            self._inside.enter_context(recorder.keeping())
            self._hooks = hooks_registered()  # those of the capture itself are no user's
            return begun.arguments

        try:
            with given.around():
                with around:
                    with capturing:
                        code, keep = partial(given.run, begin), lambda: self._begun.targets.keep()
                        output = self.run((code,), phase, recorder, cut=cut, keep=keep)
                        begun = self._begun
                        begun.effects.look()
                    copied = self._facts.kept.are_copied
                    gradients = begun.targets.found(copied=copied)
                host = self._finish(begun, segments)
            written = begun.written()
            begun.asked.finish_capture()
        except BaseException:  # KeyboardInterrupt and the like, too
            segments.abandon()
            if self._units is not None:
                self._units.forget_step()
            raise
        effects, environment = begun.effects, begun.environment
        captured = [one for one in self.optimizers.values() if one is not None]
        for capturable in captured:
            capturable.guard.remember()
        stores = {n: effects.without_numbers(found) for n, found in segments.stores.items()}
        environment.outside.read_into(self._facts.reads)
        output.finish_capture()
        effects.finish_capture()
        assert self._assertions is not None, "made ahead of the capture"
        refreshes = [capturable.refreshing for capturable in captured]
        refreshes += [number.refresh for number in self._numbers.on_device.values()]
        conditions = replace(conditions_of(begun.signature), attributes=watch.attributes())
        read = (*effects.signature, *([] if host is None else [host.read]))
        return StepPlan(
            key=replace(begun.signature, extra=(conditions, *read)),
            guards=watch.checks(conditions, reads_old=gradients.reads_old),
            are_kept=self._facts.kept.has_external_references,
            inputs=begun.inputs,
            writes_batch=written,
            asked=begun.asked,
            effects=effects,
            outputs=output,
            logs=recorder.reissue,
            logged=recorder.logged,
            last=recorder.last,
            gradients=gradients.inside,
            outside=gradients.outside,
            replaced=gradients.replaced,
            visible=gradients.visible,
            graphs=segments.graphs,
            copies=self._copies,
            steps=phase.stepping and bool(captured),
            adds=begun.targets.adds,
            written=environment.loose.written(),
            stores=stores,
            scaling=scaling,
            host=host,
            dropout=segments.dropout,
            clocks=self._clocks or None,
            advance=self._advance,
            assertions=self._assertions.pending(self.context.assertions),
            refreshes=refreshes,
            head=given.head,
        )

    def _finish(self, begun: _Begun, segments: Segments) -> HostProgram | None:
        """Refuse what shows only at the end of a capture; return what its code does on the host."""
        assert self._unread is not None, "made as the capture began"
        self._unread.refuse_read()
        refuse_new_seeds(segments.dropout)
        self._refuse_recorded_beside_compiled()
        self._numbers.finish()
        if "type" in begun.environment.outside.words:
            begun.effects.refuse_untouched()
        return None if self._host_tracer is None else self._host_tracer.finish()

    def _begin(
        self, given: Given, phase: Phase, recorder: Recorder, around: contextlib.ExitStack
    ) -> _Begun:
        """Prepare a capture of this call, and enter what surrounds it."""
        (batch, *rest), tensors = given.arguments, given.tensors
        self._unread = unread = UnreadValues(given.signature, given.step)
        inputs = StaticInputs(tensors, given.given)
        versions, asked = list(map(version_of, inputs.tensors)), BatchGradients(inputs, tensors)
        self._follow_host(tensors, inputs)
        static: Sequence[Tensor] = inputs.tensors
        if self._host_tracer is None:
            static = of_host(inputs.tensors, self.module.device)
        own = unread.left_out(batch, static, given.name)
        for key, read in given.numbers.items():
            own[key] = self._numbers.number(key, read)
        effects = self._facts.places.capturing(own)
        arguments = (own, *self.context.watch.arguments(rest, self._numbers.number))
        environment = self.context.watch.environment()
        environment.outside.assume_running(given.frames)
        targets = self._targets(phase, environment)
        recorder.live = self._numbers.logged
        around.enter_context(state_undone(self.optimizers, targets.parameters))
        around.enter_context(self.context.compiled.watching())
        around.enter_context(self._surrounded(environment, recorder, effects))
        around.enter_context(objects_undone(own, environment.outside.listed))
        targets.begin()
        renew_gradient_nodes(targets.parameters)
        return _Begun(
            given.signature, tensors, arguments, inputs, versions, asked, effects, environment,
            targets,
        )  # fmt: skip

    def was_in_a_branch(self) -> bool:
        """Whether the first refusal may hold only for the present numbers of the trainer."""
        first = not self._has_branched
        self._numbers.note_guards()
        self._has_branched |= self._numbers.has_guards
        return first and self._has_branched

    @contextlib.contextmanager
    def _surrounded(
        self, environment: Environment, recorder: Recorder, effects: SideEffects
    ) -> Iterator[None]:
        if not self.client.optimizes_itself:  # there they are what an eager step has
            self._old_gradients = environment.old_gradients(effects.own)
        number, listed = self._numbers.number, environment.outside.listed
        parts = self.optimizers, self.client.schedulers, number
        self._in_optimizers = numbers = OptimizerNumbers(*parts)
        with (
            effects.exchanged(number),
            # Ahead of the watched classes: asking a new class whether it is a metric takes long.
            self.surrounded(recorder, self._facts.places, environment.generators, listed),
            environment.reading(self._facts.reads, number),
            numbers.rates(),
            environment.refusing(LIBRARIES.step),
        ):
            yield

    def schedule(
        self, recorder: Recorder, scheduler: Any, own: Callable[..., Any], *given: Any, **k: Any
    ) -> None:
        assert self._in_optimizers is not None, "made ahead of the capture"
        self._in_optimizers.schedule(scheduler, given, k)
        recorder.at_end(partial(own, *given, **k))

    def rates_given(self, optimizer: Optimizer) -> AbstractContextManager[None]:
        assert self._in_optimizers is not None, "made ahead of the capture"
        return self._in_optimizers.rates_of(optimizer)

    def forward(
        self, arguments: tuple[Any, ...], recorder: Recorder
    ) -> tuple[OutputPlan, Tensor | None]:
        with contextlib.ExitStack() as self._inside:
            result = super().forward(arguments, recorder)
            self._registers_hooks = hooks_registered() != self._hooks
        return result

    def _call(self, arguments: Sequence[Any]) -> Any:
        (code,) = arguments
        return code(self.client.run)

    def _watch_code(self, around: contextlib.ExitStack) -> None:
        """Enter what surrounds the step's own code."""
        around.enter_context(self._old_gradients)
        assert self._in_optimizers is not None, "made ahead of the capture"
        around.enter_context(self._in_optimizers.traced())
        around.enter_context(self._unseen())
        if not self.context.compiled.runs:
            around.enter_context(calls_followed(self._conversions))
            reading = partial(self._clocks.reading, self._numbers)
            around.enter_context(clocks_exchanged(self.context.watch.own, reading))
        if self._finds_draws:
            around.enter_context(draws_refused(self.module.device))
        elif self._host_tracer is not None:
            parts = self._numbers, self._host_tracer, self._functions
            around.enter_context(draws_recorded(*parts))
        if self._reduction is not None:
            around.enter_context(self._reduction.unprepared())
        assert self._assertions is not None, "made ahead of the capture"
        around.enter_context(self._finishing(self._assertions))

    @contextlib.contextmanager
    def _finishing(self, assertions: Assertions) -> Iterator[None]:
        with self._state.watching(), assertions.watching():
            yield
        self._advance = self._state.instruction()
        assertions.finish()

    def _backward(self, loss: Tensor) -> None:
        watch, reduction = self.context.watch, self._reduction
        casts: AbstractContextManager[None] = nullcontext()
        if reduction is not None and not self._registers_hooks and watch.is_backward_unseen(loss):
            casts = reduction.reducing(loss)
        elif reduction is not None:
            reduction.leave_to_ddp()
        elif not self._registers_hooks:
            casts = watch.cast_unseen(loss)
        tracer = self._host_tracer
        host = tracer if tracer is not None and tracer.in_backward else nullcontext()
        with casts, self._unseen(), host:
            super()._backward(loss)

    def _unseen(self) -> AbstractContextManager[None]:
        return capture_unseen(self._asked) if self._facts.is_unseen else nullcontext()


def refuse_iterator(batch: Any) -> None:
    if isinstance(batch, Iterator):
        raise CaptureError(
            "A captured step cannot take its batch from an iterator.",
            f"{LIBRARIES.step} takes an iterator, a {type(batch).__qualname__}",
            "take a batch as the argument of the step",
        )
