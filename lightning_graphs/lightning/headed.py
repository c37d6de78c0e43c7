"""Steps that begin with a head: it runs as it is, and what follows it by graphs."""

from __future__ import annotations

from abc import abstractmethod
from functools import partial
from typing import Any

from torch import Tensor

from lightning_graphs.errors import GraphError, VerificationError
from lightning_graphs.lightning.ranks import Ranks
from lightning_graphs.lightning.strategy import StrategyCalls
from lightning_graphs.lightning.trainer import LightningContext
from lightning_graphs.regions.behind import HeadMissed, StepHead
from lightning_graphs.regions.conditions import CaptureKey, Observers, Phase, ReplayGuards
from lightning_graphs.regions.context import CaptureFacts
from lightning_graphs.regions.lifecycle import Lifecycle, PlanCache, Region
from lightning_graphs.regions.plan import StepPlan
from lightning_graphs.regions.step import StepCapture, refuse_iterator
from lightning_graphs.regions.verified import Verification
from lightning_graphs.regions.verify import Verifier
from lightning_graphs.report.messages import Statistics
from lightning_graphs.values.signature import Modes, Signature
from lightning_graphs.watch.batch import BatchValues
from lightning_graphs.watch.head import VARIABLES, HeadEnded, is_callers


class HeadedSteps(Region[tuple[Any, ...], StepPlan]):
    """What the runner of whole steps does for those with a head.

    To the life cycle such a step is what leaves its head. Its plan is looked for when the head has
    ended; where there is none, the step goes on eagerly from there. A capture or a verification
    runs the head by itself, and undoes what it does, so both come ahead of a step.
    """

    _begins_with_head = False  # the coming step does
    _is_in_head = False  # and runs it now
    _unverified: StepPlan | None = None  # to be verified ahead of a step
    _call: tuple[Any, ...] = ()  # what a capture is of

    _fit: LightningContext
    _calls: StrategyCalls
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
    is_undivided: bool

    @abstractmethod
    def _phase(self) -> Phase: ...

    def _signature_of(
        self, args: tuple[Any, ...], conditions: CaptureKey
    ) -> tuple[Signature, list[Tensor]]:
        refuse_iterator(args[0])
        modes = Modes.current(self._fit.pool.backend.device_type)
        extra = (conditions, *self._facts.places.signature())
        return self._values.signature(args[0], modes, extra)

    @abstractmethod
    def _eager(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...

    @abstractmethod
    def _replay(self, plan: StepPlan) -> Any: ...

    def _finds_head(self, error: GraphError) -> bool:
        """Whether a capture with a head may succeed: at another statement, or for another batch."""
        if isinstance(error, HeadMissed):
            return True
        if not self._head.learn(error, self._call):
            return False
        self._values = BatchValues(
            self._fit.module.training_step, VARIABLES, is_callers
        )  # of what leaves the head from now on
        self._cache.clear()
        self.is_undivided = False
        self._facts.has_host_program, self._facts.is_unseen = False, True
        return True

    def _key_behind(self, leaving: dict[str, Any]) -> tuple[Signature, list[Tensor]]:
        """Return the key of what follows the head of the step that is captured, and its tensors.

        Raises:
            HeadMissed: No capture of such a step is due.
        """
        signature, tensors = self._signature_of((leaving,), self._watch.conditions())
        self._head.take_due(signature)
        self._head.refuse_bound(signature.tensor_names, tensors)
        return signature, tensors

    def _bind_head(self) -> None:
        """Take note of the present parameters, guards and capture."""
        body = self._capture, self._facts.places, self._head
        self._verification = Verification(self._verifier, *body)
        self._verification.fits = self._watch.are_as_in
        self._head.look_again()
        is_alone = self._ranks.are_one and self._ranks.ddp is None and not self._by_hand
        # Nothing but one graph runs between the batch and the end of the step
        is_alone &= not self._observers and self._head.now is None
        self.is_undivided = is_alone and self._fit.watch.scaler is None

    def _gives_up_head(self) -> bool:
        """Whether too many steps in a row had no graph for what left their head."""
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
            return self._eager(args, {})
        if self._fit.progress is not None:
            self._fit.progress.mirrored = frozenset()

        def at_end(leaving: dict[str, Any]) -> None:
            plan = self._active = self._life.plan_for((leaving,))
            if plan is not None:
                plan.present.batch = leaving
                raise HeadEnded

        self._is_in_head = True
        try:
            returned = head.run(partial(self._calls.training_step, *args), at_end)
        except HeadEnded:
            assert self._active is not None, "its graph was found"
            self._head.was_served()
            return self._replay(self._active)
        finally:
            self._is_in_head = False
        self._statistics.ran_eagerly()
        return returned

    def _capture_behind(self, args: tuple[Any, ...]) -> None:
        """Capture or verify what follows the head of the coming step, if that is due."""
        plan, self._unverified = self._unverified, None
        if plan is not None and plan.key in self._cache.by_key:
            if plan.conditions.phase == self._phase():
                self._life.verified(plan, args)
            else:
                self._unverified = plan
        key = self._head.due_key(self._phase())
        if key is not None:
            self._life.capture(args, key)
            self._head.end_capture()


def refuse_unlike(plan: StepPlan) -> bool:
    """Refuse a plan that was just captured, if the head of its step gives something else now.

    Another one may be right: returns False, since it is not known to be.
    """
    if plan.unverified:
        raise VerificationError(
            "The head of a step must give the same each time that it runs from one state.",
            "it gave other shapes or values",
            "draw from generators of torch, Python and NumPy, or from those in attributes",
        )
    return False
