"""Verifies captured steps, and captured optimizer steps by themselves, against the eager ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

from torch import Tensor

from lightning_graphs.core.arguments.buffers import StaticInputs
from lightning_graphs.core.arguments.tree import substitute
from lightning_graphs.training.guards.frozen import rates_exchanged
from lightning_graphs.training.guards.held_values import Generators
from lightning_graphs.training.guards.python_state import Attributes
from lightning_graphs.training.host.logs import LogRecorder
from lightning_graphs.training.host.places import Places
from lightning_graphs.training.step.body import StepBody
from lightning_graphs.training.step.plan import StepPlan
from lightning_graphs.training.verify.agreement import Agreement, BothWays
from lightning_graphs.training.verify.differences import Result
from lightning_graphs.training.verify.state import Kept, StepState


class Verification(StepBody):
    """Runs captured steps both ways from one state, and optimizer steps by themselves."""

    def __init__(
        self,
        agreement: Agreement,
        body: StepBody,
        places: Places | None = None,
    ) -> None:
        super().__init__(body.fit, body.optimizer, body.capturable, body.observers)
        self._places = places
        self._agreement = agreement

    def _state(self, written: dict[str, Tensor]) -> StepState:
        return StepState(self.trainer, self.module, self.optimizer, written)

    def update(self, cut: Callable[[str], None] = lambda _: None) -> None:
        """With rates on the device: kernels round others otherwise."""
        rates = None if self.capturable is None else self.capturable.live_rates()
        with rates_exchanged(self.trainer, self.optimizer, rates):
            super().update(cut)

    # ------------------------------------------------------------------ a whole step

    def check(self, plan: StepPlan, args: tuple[Any, ...]) -> None:
        """Verify a plan with the batch that is about to be trained on."""
        batch = plan.call.match((args[0],), {})
        assert batch is not None, "the plan was found for this batch"
        plan.rewind_host()
        for name in plan.stores:  # another step may have set them otherwise
            plan.store(name)
        state, budget = self._state(plan.loose), self._agreement.budget

        def keep() -> Kept:
            others = () if plan.host is None else (plan.host.restore,)
            # The gradients of the graph lie where the eager step would compute
            return state.keep(lambda size: budget.room_for(size, plan.gradients.held), *others)

        ways = BothWays(
            partial(self._eager, plan, args, batch, state),
            partial(self._replayed, plan, batch, state),
            keep,
        )
        with budget.nothing_kept():
            self._agreement.compare(ways, "a captured step was not verified")
        plan.fill(batch)

    def _eager(
        self, plan: StepPlan, args: tuple[Any, ...], batch: Sequence[Tensor], state: StepState
    ) -> list[Result]:
        """Run the step eagerly; what it computed, and what it changed, in place."""
        if not plan.adds:
            for group in self.optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None
        recorder = LogRecorder(self.module)
        own = StaticInputs(batch).tensors  # it may change its batch in place
        arguments = (substitute(args[0], own), *args[1:])
        memory = self._agreement.budget.memory_of(plan.graphs["forward"])
        # They are the graph's own, and not lent: somebody may keep them
        gradients = plan.gradients.taking_over() if self._agreement.ranks.are_one else nullcontext()
        assert self._places is not None, "whole steps have places"
        seen = None if plan.host is None else plan.host.generators
        generators = Generators(self.module, seen=seen)
        with (
            # But for the stand-ins of a capture: here every value is real
            self.surrounded(recorder, self._places, generators),
            memory,
            gradients,
        ):
            results = list if plan.places is None else plan.places.eager_results()
            output = self.run(arguments, plan.conditions.phase, recorder)
            stored = results()
        output.finish_capture()
        return state.results(output.hand_out()) + stored

    def _replayed(self, plan: StepPlan, batch: Sequence[Tensor], state: StepState) -> list[Result]:
        """The same of a replay."""
        plan.fill(batch)
        for number in plan.numbers:
            number.refresh()
        for name, graph in plan.graphs.items():
            if name == ("backward" if "backward" in plan.graphs else "forward"):
                plan.adopt()
            graph.replay()
        plan.attach()
        stored = [] if plan.places is None else plan.places.results()
        return state.results(plan.outputs.hand_out()) + stored

    # ------------------------------------------------------------------ an optimizer step

    def check_update(self, replay: Callable[[], None]) -> None:
        """Verify a captured optimizer step on the gradients that there are."""
        if not self._agreement.is_on:
            return
        state, room = self._state({}), self._agreement.budget.room_for
        python = Attributes(self.module).restore, Generators(self.module).restore

        def results(step: Callable[[], None]) -> list[Result]:
            step()
            return state.results(None)

        runs = partial(results, self.update), partial(results, replay)
        ways = BothWays(*runs, partial(state.keep, room, *python))
        self._agreement.compare(ways, "the captured optimizer step was not verified")
