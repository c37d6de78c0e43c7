"""The captured steps of a fit, found by a batch and by the conditions under which it comes."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any

from torch import Tensor

from lightning_graphs.core.cache import PlanCache, Worth
from lightning_graphs.core.signature import Signature
from lightning_graphs.training.conditions import Conditions
from lightning_graphs.training.plan import StepPlan


class StepPlans(PlanCache[Signature, StepPlan]):
    """A cache that is asked with batches.

    Args:
        copies: Tells what the host has of the tensors of a batch.

    Attributes:
        last: The plan that was found last.
    """

    def __init__(
        self,
        worth: Worth,
        release: Callable[[StepPlan], None],
        capacity: int | None,
        copies: Callable[[Sequence[Tensor]], Sequence[Tensor | None]],
    ) -> None:
        super().__init__(
            worth, attrgetter("uses"), release, capacity=capacity, shape=_without_values
        )
        self._copies = copies
        self.last: StepPlan | None = None

    def find(self, batch: Any, conditions: Conditions) -> StepPlan | None:
        """The plan for a batch, which is copied in; None if there is none."""
        last = self.last
        if last is not None and self._fill(last, batch, conditions):
            return last
        for plan in self.plans():
            if plan is not last and self._fill(plan, batch, conditions):
                self.last = self.get(plan.call.signature)
                return plan
        return None

    def _fill(self, plan: StepPlan, batch: Any, conditions: Conditions) -> bool:
        """Copy the batch in, if it and the fit are what the plan was captured from."""
        captured: Conditions = plan.call.signature.extra[0]  # type: ignore[assignment]
        if not captured.holds(conditions):
            return False
        tensors = plan.call.match((batch,), {})
        if tensors is None:
            return False
        if plan.places is not None and not plan.places.take():
            return False
        if plan.host is not None and not plan.run_host(partial(self._copies, tensors)):
            return False
        plan.inputs.copy_in(tensors)
        return True

    def add(self, key: Signature, plan: StepPlan) -> None:
        """Keep a captured plan; see :meth:`PlanCache.add`."""
        super().add(key, plan)
        self.last = plan

    def drop_all(self) -> None:
        """Release every plan; how often each step was seen stays known."""
        for key in self.keys():
            self.drop(key)

    def drop(self, key: Signature) -> None:
        """Release one plan."""
        self.last = None
        super().drop(key)


def _without_values(signature: Signature) -> Hashable:
    """What of a signature comes back where the values that a step reads move on."""
    conditions: Conditions = signature.extra[0]  # type: ignore[assignment]
    return replace(signature, extra=(conditions.phase, conditions.gradients))
