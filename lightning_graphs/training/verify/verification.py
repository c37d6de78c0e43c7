"""Captured steps, and captured optimizer steps by themselves, against the eager ones."""

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
from lightning_graphs.training.interception import replaced
from lightning_graphs.training.ranks import ONE_RANK, Ranks
from lightning_graphs.training.step.body import StepBody
from lightning_graphs.training.step.optimizers import CapturableOptimizer
from lightning_graphs.training.step.plan import StepPlan
from lightning_graphs.training.verify.agreement import Agreement, BothWays
from lightning_graphs.training.verify.differences import Result
from lightning_graphs.training.verify.state import Kept, StepState


class Verification:
    """Runs captured steps both ways from one state, and optimizer steps by themselves."""

    def __init__(
        self,
        agreement: Agreement,
        body: StepBody,
        capturable: CapturableOptimizer | None,
        ranks: Ranks = ONE_RANK,
        places: Places | None = None,
    ) -> None:
        self._places = places
        self._agreement = agreement
        self._module = agreement.root
        self._trainer = agreement.root.trainer
        self._optimizer = body.optimizer
        self._body = body
        self._capturable = capturable
        self._ranks = ranks

    def _state(self, written: dict[str, Tensor]) -> StepState:
        return StepState(self._trainer, self._module, self._optimizer, written)

    def _rates(self) -> Any:
        """While this is open, rates are on the device: kernels round others otherwise."""
        rates = None if self._capturable is None else self._capturable.live_rates()
        return rates_exchanged(self._trainer, self._optimizer, rates)

    # ------------------------------------------------------------------ a whole step

    def check(self, plan: StepPlan, args: tuple[Any, ...]) -> None:
        """Verify a plan with the batch that is about to be trained on."""
        batch, together = self._tensors(plan, args), self._ranks.together
        plan.rewind_host()
        for name in plan.stores:  # another step may have set them otherwise
            plan.store(name)
        state, budget = self._state(plan.loose), self._agreement.budget

        def keep() -> Kept:
            others = () if plan.host is None else (plan.host,)
            # The gradients of the graph lie where the eager step would compute
            return state.keep(lambda size: budget.room_for(size, plan.gradients.held), *others)

        ways = BothWays(
            partial(together, partial(self._eager, plan, args, state), exchanges=True),
            partial(together, partial(self._replayed, plan, args, state), exchanges=True),
            partial(together, keep),
        )
        with budget.nothing_kept():
            self._agreement.compare(ways, "a captured step was not verified")
        plan.fill(batch)

    def _eager(self, plan: StepPlan, args: tuple[Any, ...], state: StepState) -> list[Result]:
        """Run the step eagerly; what it computed, and what it changed, in place."""
        if not plan.adds:
            for group in self._optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None
        recorder = LogRecorder(self._module)
        own = StaticInputs(self._tensors(plan, args)).tensors  # it may change its batch in place
        arguments = (substitute(args[0], own), *args[1:])
        memory = self._agreement.budget.memory_of(plan.graphs["forward"])
        # They are the graph's own, and not lent: somebody may keep them
        gradients = plan.gradients.taking_over() if self._ranks.are_one else nullcontext()
        assert self._places is not None, "whole steps have places"
        seen = None if plan.host is None else plan.host.generators
        generators = Generators(self._module, seen=seen)
        with (
            self._body.surrounded(recorder, self._places, generators),
            # But for the stand-ins of a capture: here every value is real
            replaced(self._body, "update", self._update),
            memory,
            gradients,
        ):
            before = [] if plan.places is None else plan.places.present()
            output = self._body.run(arguments, plan.conditions.phase, recorder)
            stored = [] if plan.places is None else plan.places.results_of(before)
        output.finish_capture()
        return state.results(output.hand_out()) + stored

    def _replayed(self, plan: StepPlan, args: tuple[Any, ...], state: StepState) -> list[Result]:
        """The same of a replay."""
        batch = self._tensors(plan, args)
        plan.fill(batch)
        if self._capturable is not None:
            self._capturable.refresh()
        for number in plan.numbers:
            number.refresh()
        for name, graph in plan.graphs.items():
            if name == ("backward" if "backward" in plan.graphs else "forward"):
                plan.adopt()
            graph.replay()
        plan.attach()
        stored = [] if plan.places is None else plan.places.results()
        return state.results(plan.outputs.hand_out()) + stored

    def _update(self, *args: Any) -> None:
        with self._rates():
            StepBody.update(self._body, *args)

    @staticmethod
    def _tensors(plan: StepPlan, args: tuple[Any, ...]) -> Sequence[Tensor]:
        tensors: Sequence[Tensor] | None = plan.call.match((args[0],), {})
        assert tensors is not None, "the plan was found for this batch"
        return tensors

    # ------------------------------------------------------------------ an optimizer step

    def check_update(self, replay: Callable[[], None]) -> None:
        """Verify a captured optimizer step on the gradients that there are."""
        if not self._agreement.is_on:
            return
        state, python = self._state({}), (Attributes(self._module), Generators(self._module))

        def eager() -> list[Result]:
            with self._rates():
                self._body.update()
            return state.results(None)

        def replayed() -> list[Result]:
            replay()
            return state.results(None)

        ways = BothWays(
            eager, replayed, lambda: state.keep(self._agreement.budget.room_for, *python)
        )
        self._agreement.compare(ways, "the captured optimizer step was not verified")
