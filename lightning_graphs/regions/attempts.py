"""Attempts to capture a training step, which learn of each other."""

from __future__ import annotations

import contextlib
import enum
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_graphs.device.rules import AFTERMATH, DRAWN, are_noted
from lightning_graphs.errors import CaptureError, GraphError, NoRoomError
from lightning_graphs.private.callsite import (
    NO_LINE,
    add_line,
    definition_of,
    site_in,
)
from lightning_graphs.private.engine import backward_passes_observed
from lightning_graphs.regions.behind import HeadMissed
from lightning_graphs.regions.body import OptimizerNumbers, StepBody
from lightning_graphs.regions.conditions import Observers
from lightning_graphs.regions.context import CaptureFacts, TrainingContext
from lightning_graphs.regions.gradients import PersistentGradients
from lightning_graphs.regions.optimizer import CapturableOptimizer, UpdateRefused
from lightning_graphs.regions.plan import (
    StepPlan,
    UpdateBehind,
)
from lightning_graphs.regions.reduction import BucketReduction
from lightning_graphs.values.snapshot import Snapshot
from lightning_graphs.watch.batch import UnreadValues
from lightning_graphs.watch.environment import RaisedInCapture
from lightning_graphs.watch.host_trace import ArenaFull
from lightning_graphs.watch.late import LATE_RULES
from lightning_graphs.watch.numbers import Followed
from lightning_graphs.watch.places import LeftBehindError, PlaceUsedError


class Outcome(enum.Enum):
    """What a failed attempt to capture a step comes to."""

    LEARNED = enum.auto()  # another one may succeed, with what was learned of the step
    REFUSED = enum.auto()


class Notes:
    """What attempts refuse, where :func:`~lightning_graphs.device.rules.noting` is entered."""

    def __init__(self) -> None:
        self.last: Sequence[CaptureError] = ()  # what the last attempt has refused
        self.answered: list[CaptureError] = []  # what a host program does in place of the graph
        self._asked: Sequence[CaptureError] = ()  # perhaps the next attempt's program does that

    def take(self, refused: Sequence[CaptureError], *, asks_host: bool = False) -> bool:
        """Take note of an attempt; return whether another one may go further in the code."""
        before, self.last = self.last, refused
        self.answered += [e for e in self._asked if not any(map(partial(_is_alike, e), refused))]
        self._asked = refused if asks_host else ()
        texts = [[(e.rule, e.observed) for e in found] for found in (before, refused)]
        return bool(refused) and not refused[-1].is_noted and texts[0] != texts[1]


def _is_alike(one: CaptureError, other: CaptureError) -> bool:
    return one.rule == other.rule and site_in(one.observed) == site_in(other.observed)


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
        self._units = context.ranks.units
        self._hooks, self._registers_hooks = 0, False
        self._asked: list[str] = []
        given = context.module, context.watch, facts, context.compiled, context.assertions
        self._followed = Followed(*given, context.pool.backend.refusal)
        self._reduction: BucketReduction | None = None  # in place of DDP's own
        self._unread: UnreadValues | None = None  # the unguarded values of what is captured
        self._inside = contextlib.ExitStack()  # surrounds the step's own code
        self._has_several_passes = False  # the capture has seen a backward pass inside of its own
        self._in_optimizers: OptimizerNumbers | None = None  # of the coming capture
        self._unforeseen: list[Parameter] = []  # lacked memory for a gradient
        self._behind: list[UpdateBehind] = []
        self._versions: list[tuple[Tensor, int]] = []  # of state, as the capture begins
        self._written_ahead: list[Tensor] = []  # state that graphs ahead of forks write
        # Surrounds what a graph captures
        self.seeing: Callable[[], AbstractContextManager[object]] = nullcontext
        self.notes = Notes()

    def _attempts(
        self, attempt: Callable[[], StepPlan], call: Sequence[Tensor] | None = None
    ) -> StepPlan | None:
        """Capture until nothing more is learned.

        Args:
            attempt: Captures once.
            call: What the plan takes in of the step that is captured; None: that comes later.
        """
        self._unread = None
        if self._facts.forks.is_on:
            self._facts.forks.begin_step()
        goes_on = self.context.policy.goes_on if self.context.ranks.are_one else lambda: True
        while (outcome := self._attempted(attempt, call)) is Outcome.LEARNED:
            if not goes_on():
                return None
        assert not isinstance(outcome, Outcome), "it is raised if it is refused"
        return outcome

    def _attempted(
        self, attempt: Callable[[], StepPlan], call: Sequence[Tensor] | None
    ) -> StepPlan | Outcome:
        """Capture the step once.

        Raises:
            CaptureError: It is refused, whatever was learned.
        """
        self._asked.clear()
        self._followed.caught.clear()
        self.context.policy.tries_again()
        compiled, had_program = self.context.compiled.runs, self._facts.has_host_program
        try:
            plan = attempt()
            self.notes.take(())
            if call is None or plan.forked is None or are_noted() or self._goes(plan, call):
                return plan
            return Outcome.LEARNED
        except CaptureError as raised:
            # Others follow the first one
            caught = self._followed.caught
            error = caught[0] if caught and AFTERMATH in raised.observed else raised
            refused, forks = raised.others or (raised,), self._facts.forks
            if forks.taken:
                if self._learns_in(error):
                    forks.learned()
                    return Outcome.LEARNED
                if forks.turn(error):
                    return Outcome.LEARNED
                error = forks.first_refusal or error  # those of other ways say nothing of this one
                refused = error.others or (error,)
            try:
                outcome = self._outcome_of(error, compiled=compiled)
                if outcome is Outcome.REFUSED and self.client.keeps_back(
                    error, self._followed.reads
                ):
                    self._facts.is_unseen = True  # once more as an eager step, to begin with
                    outcome = Outcome.LEARNED
                if outcome is Outcome.REFUSED and self._forks_on(error):
                    outcome = Outcome.LEARNED
                elif outcome is Outcome.LEARNED:
                    forks.learned()
                if are_noted():
                    asks_host = self._facts.has_host_program and not had_program
                    if outcome is Outcome.REFUSED and self._learns_of(refused[1:]):
                        outcome = Outcome.LEARNED
                    if self.notes.take(refused, asks_host=asks_host):
                        outcome = Outcome.LEARNED
                if outcome is Outcome.REFUSED and compiled and error.rule == DRAWN.rule:
                    self._refuse_draws(attempt)
                if outcome is Outcome.REFUSED and error is raised:
                    raise
                if outcome is Outcome.REFUSED:
                    raise error from raised
                return outcome
            finally:
                del error, refused  # its traceback refers to this frame, and to gradients

    def _learns_in(self, error: CaptureError) -> bool:
        """Learn from a refusal on a way that steps may not even go."""
        if self._learns() or self.client.learns():
            return True
        reads = self._followed.reads
        return error.rule in LATE_RULES and self.client.keeps_back(error, reads)

    def _forks_on(self, error: CaptureError) -> bool:
        """Let captures follow forks, if one is refused for what it reads of the device."""
        facts = self._facts
        if error.rule not in LATE_RULES or not self.context.ranks.are_one:
            return False
        if not facts.forks.switch_on():
            return False
        facts.has_host_program, facts.is_unseen = False, True
        return True

    def _goes(self, plan: StepPlan, call: Sequence[Tensor]) -> bool:
        """Whether a step goes the way of a plan that was captured with it.

        It learns from that what the graphs ahead of forks write, and undoes them.
        """
        assert plan.forked is not None, "it has forks"
        loose = self.context.watch.environment().in_attributes
        state = {*self.module.parameters(), *self.module.buffers(), *plan.loose.values(), *loose}
        before = Snapshot(state, room=self.context.budget.room_for)
        goes = plan.take(call)
        if goes:
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

    def _learns_of(self, refused: Iterable[CaptureError]) -> bool:
        """Learn what further refusals of an attempt show, which were noted."""
        noted = [error for error in refused if error.is_noted]
        compiled = self.context.compiled.runs
        outcomes = [self._outcome_of(error, compiled=compiled) for error in noted]
        if Outcome.LEARNED in outcomes:
            return True
        reads = self._followed.reads
        return any([self.client.keeps_back(error, reads) for error in noted])

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
            self._followed.room_on_device = error.needed
        if raised or waits or isinstance(error, NoRoomError):
            return Outcome.REFUSED
        if compiled != self.context.compiled.runs:
            return Outcome.LEARNED  # it was followed as if none of it was compiled
        if isinstance(error, PlaceUsedError):
            facts.places.are_used(error.place)
            return Outcome.LEARNED
        if isinstance(error, ArenaFull) or self._learns() or self.client.learns():
            return Outcome.LEARNED
        follows = isinstance(error, UpdateRefused) and error.may_succeed
        if follows or isinstance(error, LeftBehindError):
            return Outcome.REFUSED
        if not (facts.has_host_program or compiled):
            facts.has_host_program = True
            self.context.policy.follows_host()
            return Outcome.LEARNED
        if facts.is_unseen and self._asked:
            facts.is_unseen = facts.has_host_program = False
            return Outcome.LEARNED
        return Outcome.REFUSED

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

    @contextlib.contextmanager
    def _passes_counted(self, *, adds: bool) -> Iterator[None]:
        """Capture again if each of several backward passes adds to gradients by itself."""
        passes = itertools.count(1)

        def begun(*_: object) -> None:
            self._facts.forks.ends = None  # gradients cannot be put back
            if next(passes) > 1 and adds and not self._facts.has_several_passes:
                self._has_several_passes = True
                raise CaptureError(
                    "A captured step must add the gradients of each backward pass by itself.",
                    "a backward pass runs inside of another one, or of the step",
                    "use torch.utils.checkpoint(..., use_reentrant=False)",
                )

        with backward_passes_observed(begun):
            yield
