"""Steps that begin with a head: it runs as it is, and what follows it by graphs."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any

from torch import Tensor

from lightning_graphs.errors import CaptureError, GraphError, VerificationError
from lightning_graphs.regions.behind import HeadMissed, StepHead, shape_of
from lightning_graphs.regions.conditions import CaptureKey, Observers, Phase, ReplayGuards
from lightning_graphs.regions.context import CaptureFacts, TrainingContext
from lightning_graphs.regions.lifecycle import EAGER, Lifecycle, PlanCache, Ranks, Region
from lightning_graphs.regions.plan import StepPlan
from lightning_graphs.regions.step import StepCapture
from lightning_graphs.regions.verify import Verification, Verifier
from lightning_graphs.report.messages import Statistics
from lightning_graphs.values.signature import Signature
from lightning_graphs.watch.batch import BatchValues
from lightning_graphs.watch.head import VARIABLES, HeadEnded, is_callers

_TRIES, _PAUSE, _LONGEST = 4, 8, 512
"""How often the capture of a step is tried, and finds that it is another one; how many steps later
several ranks try again, and how many at most."""


class HeadedSteps(Region[tuple[Any, ...], StepPlan]):
    """What a region of whole steps does for those with a head.

    To the life cycle such a step is what leaves its head. Its plan is looked for when the head has
    ended; where there is none, the step goes on eagerly from there. A capture or a verification
    runs the head by itself, and undoes what it does, so both come ahead of a step.
    """

    _begins_with_head = False  # the coming step does
    _is_in_head = False  # and runs it now
    _unverified: StepPlan | None = None  # to be verified ahead of a step
    _call: tuple[Any, ...] = ()  # what a capture is of
    shares_heads = True  # on several ranks, which then come to the end of their heads together
    # Of captures, equal on all ranks: in so many steps of a phase one is tried, in none of the next
    # so many steps, and in none of so many after that
    _tries: dict[Phase, int]
    _rest, _pause = 0, _PAUSE
    _idle = 0  # so many steps in a row had no replay
    _gave_way: bool | None = None  # whether a capture has given way to a head; False: to none
    _coming_key: Signature | None = None  # what a capture is for on this rank

    _fit: TrainingContext
    _statistics: Statistics
    _life: Lifecycle[tuple[Any, ...], StepPlan]
    _cache: PlanCache[Any, StepPlan]
    _facts: CaptureFacts
    _head: StepHead
    _watch: ReplayGuards
    _values: BatchValues
    _active: StepPlan | None
    _verification: Verification
    _verifier: Verifier
    _capture: StepCapture
    _ranks: Ranks
    _observers: Observers
    _by_hand: bool
    verifies: type[Verification]
    _run_step: Callable[..., Any]  # runs the step's own code eagerly
    is_undivided: bool

    @abstractmethod
    def _phase(self) -> Phase: ...

    @abstractmethod
    def _signature_of(
        self, args: tuple[Any, ...], conditions: CaptureKey
    ) -> tuple[Signature, list[Tensor]]: ...

    @abstractmethod
    def _eager(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...

    def _without_head(self, args: tuple[Any, ...]) -> Any:
        """Run a step eagerly that has no head any more."""
        return self._eager(args, {})

    def _begin_eagerly(self) -> None:
        """Note that the coming step begins with code that runs eagerly."""

    @abstractmethod
    def _replay(self, plan: StepPlan) -> Any: ...

    @property
    def captures_later(self) -> bool:  # type: ignore[override]
        """Whether the head of a call runs now."""
        return self._is_in_head

    def _finds_head(self, error: GraphError) -> bool:
        """Whether a capture with a head may succeed: at another statement, or for another batch."""
        if isinstance(error, HeadMissed):
            return True
        if self._ranks.are_one and self._learns_head(error):
            return True
        if not self._gave_way:
            return False
        self._gave_way = False  # to a head that is none
        return True

    def _gives_way(self, error: CaptureError) -> bool:
        """Whether a capture is to be given up for a head, before it is tried in further ways."""
        may = self._gave_way is None and self._ranks.are_one
        if may and self._head.is_behind(error, self._call):
            self._gave_way = True
        return may and bool(self._gave_way)

    def _foresee_head(self, args: tuple[Any, ...], error: CaptureError) -> None:
        """Look for a head ahead of the first capture, which would be refused by this error."""
        self._call, self._facts.foreseen.shape = args, None
        with self._fit.policy.spending():
            if self._gives_way(error):
                self._finds_head(error)

    def _learns_head(self, error: GraphError) -> bool:
        if not self._head.learn(error, self._call):
            if self._head.now is None and self._values.name == VARIABLES:
                self._values = BatchValues(self._fit.watch.function)
            return False
        self._values = BatchValues(
            self._fit.watch.function, VARIABLES, is_callers
        )  # of what leaves the head from now on
        self._cache.clear()
        self._facts.has_host_program, self._facts.is_unseen = self._facts.foreseen.makes_late, True
        return True

    def _key_behind(self, leaving: dict[str, Any]) -> tuple[Signature, list[Tensor]]:
        """Return the key of what follows the head of the step that is captured, and its tensors.

        Raises:
            VerificationError: It is not that of the step which is captured.
        """
        with self._head.modes():
            signature, tensors = self._signature_of((leaving,), self._watch.conditions())
        if self._coming_key is None or shape_of(signature) != shape_of(self._coming_key):
            raise unlike()
        self._head.refuse_bound(signature.tensor_names, tensors)
        return signature, tensors

    def _plan_of(self, leaving: dict[str, Any]) -> StepPlan | None:
        """Return a plan for what follows a head that is undone, of which nothing is prepared."""
        self._facts.kept.count()  # what is put back holds gradients, which no user code keeps
        plans = self._cache.plans()
        return next((p for p in plans if p.may_fit((leaving,)) and p.holds()), None)

    def _bind_head(self) -> None:
        """Take note of the present parameters, guards and capture."""
        body = self._capture, self._facts.places, self._head
        self._verification = self.verifies(self._verifier, *body)
        self._verification.fits = self._watch.are_as_in
        self._head.look_again()
        self._capture.gives_way = self._gives_way
        is_alone = self._ranks.are_one and not (self._ranks.wrappers or self._by_hand)
        # Nothing but a head and one graph runs between the batch and the end of the step
        is_alone &= not self._observers
        self.is_undivided = is_alone and self._fit.watch.scaler is None

    def _gives_up_head(self) -> bool:
        """Whether too many steps in a row had no graph for what left their head."""
        if not self._ranks.are_one:  # the others keep theirs
            return False
        error = self._head.missed()
        if error is not None:
            self.refuse(error)
        return error is not None

    def _put_off(self, plan: StepPlan) -> bool:
        """Verify a plan with the next step, since the head of this one runs already."""
        self._unverified = plan
        return True

    def _run_head(self, args: tuple[Any, ...]) -> Any:
        """Run the head of a step; replay what follows it, or go on eagerly from there."""
        self._begins_with_head = False
        self._capture_behind(args)
        head = self._head.now
        if head is None:
            self._ranks.agree(EAGER, False)
            return self._without_head(args)
        self._begin_eagerly()
        started, ended = perf_counter(), False

        def at_end(leaving: dict[str, Any]) -> None:
            nonlocal ended
            ended = True
            plan = self._active = self._plan_behind(leaving)
            if plan is not None:
                plan.present.batch = leaving
                self._statistics.ran_ahead((perf_counter() - started) * 1e3)
                raise HeadEnded

        self._is_in_head, self._active = True, None
        returned, is_over = None, False
        try:
            returned = head.run_ahead(partial(self._run_step, *args), at_end)
        except HeadEnded:
            is_over = True  # what its frames hold is free by the replay
        finally:
            self._is_in_head = False
        if is_over:
            return self._replay_behind()
        if not ended:
            self._ranks.agree(EAGER, False)
        self._statistics.ran_eagerly()
        return returned

    def _replay_behind(self) -> Any:
        assert self._active is not None, "its graph was found"
        self._head.misses = self._idle = 0
        return self._replay(self._active)

    @property
    def _captures_ahead(self) -> bool:
        """Whether something of the coming step may be captured or verified ahead of its head."""
        return self._unverified is not None or any(self._tries.values())

    def _plan_behind(self, leaving: dict[str, Any]) -> StepPlan | None:
        """Find the plan for what follows the head of a step, given what leaves that."""
        return self._life.plan_for((leaving,))

    def _capture_later(self, key: Signature) -> None:
        """Note that a coming step is to be captured, since the head of this one runs already."""
        self._head.due.add(shape_of(key))
        if self._rest <= 0 and not self._tries.get(phase := self._phase()):
            self._tries[phase] = _TRIES

    def _capture_behind(self, args: tuple[Any, ...]) -> None:
        """Capture or verify what follows the head of the coming step, if that is due."""
        self._rest -= 1
        self._idle += 1
        plan, self._unverified, phase = self._unverified, None, self._phase()
        if plan is not None and plan.conditions.phase != phase:
            self._unverified, plan = plan, None
        captures = self._tries.get(phase, 0) > 0
        if plan is None and not captures:
            return
        self._facts.kept.has_external_references()  # that the step before has left
        key, found = self._coming(args)
        if plan is not None and not self._ranks.any(found is not plan):
            self._life.verified(plan, args)
        if not captures:
            return
        self._tries[phase] -= 1
        if not (self._tries[phase] or self._ranks.are_one):
            self._rest, self._pause = self._pause, min(2 * self._pause, _LONGEST)
        # A plan that is replayed time and again stays where others have one beside it
        is_wanted = key is not None and (found is None or self._idle > _PAUSE)
        if self._ranks.any(not is_wanted) or key is None:
            return
        self._coming_key = key
        if self._life.capture(args, key) is not None:
            self._tries[phase], self._rest, self._pause = 0, 0, _PAUSE
        self._head.due.discard(shape_of(key))
        self._coming_key = None

    def _coming(self, args: tuple[Any, ...]) -> tuple[Signature | None, StepPlan | None]:
        """Run the head of the coming step, and undo that; return its key and its plan.

        There is no key if it does not end, or is not to be captured.
        """
        key: Signature | None = None
        found: StepPlan | None = None
        uses = self._head.uses()  # of a step that goes another way: it is not undone from there on

        def at_end(leaving: dict[str, Any]) -> None:
            nonlocal key, found
            uses.allow()
            with self._head.modes(), contextlib.suppress(CaptureError):
                key, _ = self._signature_of((leaving,), self._watch.conditions())
                found = self._plan_of(leaving)
            raise HeadEnded

        with self._head.undone(args) as undone, contextlib.suppress(HeadEnded), uses.ending():
            assert self._head.now is not None, "steps have one"
            self._head.now.run(partial(self._head.step, undone.arguments), at_end)
        is_known = key is not None and (found is not None or shape_of(key) in self._head.due)
        return (key if is_known else None), found

    # ------------------------------------------------------------------ on several ranks

    def _may_have_head(self, error: GraphError, *, known: bool) -> bool:
        """Whether a refused capture may succeed; all ranks ask, and begin to have heads together.

        Args:
            error: The refusal.
            known: It may on this rank, whatever its head is.
        """
        wants = not known and self.shares_heads and self._head.may_learn(error)
        if self._ranks.any(not wants):
            return known
        found = self._learns_head(error)
        if not self._ranks.any(not found):
            return True
        self._head.forget()
        self._values = BatchValues(self._fit.watch.function)
        return False


def unlike() -> VerificationError:
    """Return the error for a head that gives something else than at the capture."""
    return VerificationError(
        "The head of a step must give the same each time that it runs from one state.",
        "it gave other shapes or values",
        "draw from generators of torch, Python and NumPy, or from those in attributes",
    )
