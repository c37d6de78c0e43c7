"""The life of captured regions: due, captured, verified, replayed, refused, released."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from lightning_graphs.errors import CaptureError, GraphError
from lightning_graphs.policy.options import Options
from lightning_graphs.policy.worth import CapturePolicy
from lightning_graphs.regions.cache import PlanCache
from lightning_graphs.regions.plan import Plan
from lightning_graphs.regions.verify import Ranks, Verifier

GIVE_UP, EAGER, CAPTURE = -1, 0, 1
"""What becomes of a call; larger numbers are those of plans, which replay it."""


Call = TypeVar("Call")
P = TypeVar("P", bound=Plan)


class Region(ABC, Generic[Call, P]):
    """Code that a life cycle captures; a call is one run of it, with what it is given."""

    def key(self, call: Call) -> Any:
        """What tells the call from others; None: it runs eagerly, and is not counted.

        Raises:
            CaptureError: No graph could be for this call.
        """
        return call

    def wait(self, call: Call, key: Any) -> None:
        """Note that the call is not worth a capture yet; the cache says why."""

    def is_ready(self, call: Call, key: Any) -> bool:
        """Whether all is there that a capture of the call needs."""
        return True

    @abstractmethod
    def capture(self, call: Call, key: Any) -> P | None:
        """Capture the call; None: that would cost more than it saves.

        Raises:
            GraphError: It cannot be captured.
        """

    def enter(self, plan: P, call: Call) -> None:
        """Note that a captured plan is in the cache, and prepare it for its first replay."""

    def compare(self, plan: P, call: Call) -> bool:
        """Run the call both ways from one state, and leave all as it was before.

        False: the call runs eagerly, for another reason than its results.

        Raises:
            GraphError: The replay computes something else.
        """
        return True

    def may_succeed(self, key: Any, error: GraphError) -> bool:
        """Whether a capture that failed so may succeed in a later call."""
        return False

    @abstractmethod
    def refuse(self, error: GraphError) -> None:
        """Tell that such calls run eagerly, or raise."""

    @abstractmethod
    def discard(self, plan: P) -> None:
        """Release the graphs of a plan."""

    def release(self, plan: P) -> None:
        """Let a plan go that was entered."""
        self.discard(plan)


class Context(Protocol):
    """What all regions of a fit share."""

    @property
    def investment(self) -> CapturePolicy: ...
    @property
    def ranks(self) -> Ranks: ...
    @property
    def options(self) -> Options: ...


class Lifecycle(Generic[Call, P]):
    """Finds, captures and verifies the plans of a region; its owner replays them."""

    def __init__(
        self,
        region: Region[Call, P],
        context: Context,
        verifier: Verifier | None,  # None: a capture has verified what it made
        # What of a key comes back, where the rest are values that may move on
        shape: Callable[[Any], Hashable] = lambda key: key,
    ) -> None:
        self._region = region
        self._policy, self._ranks = context.investment, context.ranks
        self._verifier = verifier
        capacity = context.options.max_graphs
        self.cache = PlanCache[Any, P](self._policy, region.release, capacity, shape)
        self.is_failing = False  # this rank gives up as soon as all do
        self.has_failed = False  # all ranks gave up

    def plan_for(self, call: Call) -> P | None:
        """The plan for a replay of this call, captured and verified on the way if it is due.

        None: the call runs eagerly.
        """
        region, key, plan = self._region, None, self._find(call)
        if plan is not None:
            choice, wish = plan.number, plan.unverified and self._policy.affords_verification
        else:
            key = self._due_key(call)
            choice, wish = EAGER if key is None else CAPTURE, False
        if self.is_failing:
            choice = GIVE_UP
        if not self._ranks.are_one:
            choice, wish = self._ranks.settle(choice, wish)
        self.has_failed |= choice == GIVE_UP
        if plan is not None and choice <= CAPTURE:
            plan.cancel()
        if choice == CAPTURE:
            if plan is not None:  # another rank has lost it
                self.cache.drop(plan.key)
            return self.capture(call, region.key(call) if key is None else key)
        if choice <= EAGER or plan is None:
            return None
        verifier = self._verifier
        again = verifier is not None and verifier.every > 0 and verifier.is_due
        return self._verified(plan, call) if wish or again else plan

    def _find(self, call: Call) -> P | None:
        """The first plan that fits, from the one that was used last on."""
        plans = self.cache.by_key
        for place, (key, plan) in enumerate(reversed(plans.items())):
            if plan.fits(call):
                if place:
                    plans[key] = plans.pop(key)
                return plan
        return None

    def _due_key(self, call: Call) -> Hashable | None:
        """The key of a call that is to be captured now; None for any other."""
        try:
            key = self._region.key(call)
        except CaptureError as error:
            self._refuse(None, error)
            return None
        if key is None:
            return None
        if not self.cache.is_due(key):
            if self.cache.why_not:
                self._region.wait(call, key)
            return None
        return key if self._region.is_ready(call, key) else None

    def capture(self, call: Call, key: Hashable) -> P | None:
        """Capture and verify a call whose key was due; None where that fails."""
        region = self._region
        try:
            plan = self._ranks.together(partial(region.capture, call, key), self._undo)
        except GraphError as error:
            if not region.may_succeed(key, error):
                self._refuse(key, error)
            return None
        if plan is None:
            return None
        plan.number = next(self._ranks.numbers)
        plan.unverified = self._verifier is not None and self._verifier.is_on
        self.cache.add(plan.key, plan)
        region.enter(plan, call)
        is_too_much = self._ranks.any(not self._policy.affords_verification)
        return plan if is_too_much else self._verified(plan, call)

    def _undo(self, plan: P | None) -> None:
        if plan is not None:  # another rank has none
            self._region.discard(plan)

    def _verified(self, plan: P, call: Call) -> P | None:
        """The plan if it computes what the eager call does; else it is dropped."""
        if self._verifier is None or not self._verifier.is_on:
            return plan
        plan.unverified = False
        try:
            with self._policy.verifying():
                return plan if self._region.compare(plan, call) else None
        except GraphError as error:
            self._refuse(plan.key, error)
            return None

    def _refuse(self, key: Hashable, error: GraphError) -> None:
        if key is not None:
            self.cache.refuse(key)
        self._region.refuse(error)

    def give_up(self) -> None:
        """Let no call have graphs any more: at once if there is one rank, else when all do."""
        self.is_failing = True
        self.has_failed |= self._ranks.are_one
