"""Verifies captured steps, and captured optimizer steps by themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from lightning_graphs.autograd.graphed import set_again
from lightning_graphs.device.generators import Generators, RandomState
from lightning_graphs.lightning.logs import LogRecorder
from lightning_graphs.regions.body import StepBody
from lightning_graphs.regions.gradients import drop_gradients
from lightning_graphs.regions.plan import StepPlan
from lightning_graphs.regions.verify import Comparison, Verifier
from lightning_graphs.values.memory import StaticInputs
from lightning_graphs.values.snapshot import (
    Part,
    PythonSnapshot,
    RegionState,
    Result,
    results_in,
)
from lightning_graphs.values.tree import substitute
from lightning_graphs.watch.batch import new_results
from lightning_graphs.watch.object_graph import UnregisteredTensors, iter_objects
from lightning_graphs.watch.side_effects import Places
from lightning_graphs.watch.tracers import rates_exchanged


class Verification(StepBody):
    """Compares captured steps, and captured optimizer steps, with what Lightning runs."""

    def __init__(self, verifier: Verifier, body: StepBody, places: Places | None = None) -> None:
        super().__init__(body.fit, body.optimizer, body.capturable, body.observers)
        self._places = places
        self._verifier = verifier

    def _state(self, written: dict[str, Tensor], others: Sequence[Tensor] = ()) -> RegionState:
        unseen = UnregisteredTensors(self.module, iter_objects(self.module)).small
        parts = self.module, self.optimizer, self._scaler
        return RegionState.of_step(*parts, written=written, unseen=unseen, others=others)

    def update(self, cut: Callable[[str], None] = lambda _: None) -> None:
        """With rates on the device: kernels round others otherwise."""
        rates = None if self.capturable is None else self.capturable.live_rates()
        with rates_exchanged(self.fit.watch.schedulers, self.optimizer, rates):
            super().update(cut)

    def check(self, plan: StepPlan, args: tuple[Any, ...]) -> None:
        """Verify a plan with the batch that is about to be trained on."""
        batch = plan.call.match((args[0],), {})
        assert batch is not None, "the plan was found for this batch"
        plan.cancel()
        for stores in plan.stores.values():  # another step may have set them otherwise
            set_again(stores)
        parts: list[Part] = [self._random()] if plan.host is None else [plan.host, self._random()]
        ways = Comparison(
            self._state(plan.loose, plan.outside.parameters),
            partial(self._eager, plan, args, batch),
            partial(self._replayed, plan, args, batch),
            parts,
            self._verifier.written[plan.conditions],
            plan.gradients.buffers,
            plan.gradients.held,  # they lie where the eager step would compute
        )
        with self._verifier.budget.nothing_kept():
            self._verifier.compare(ways, "a captured step was not verified")
        plan.take(batch)

    def _random(self) -> RandomState:
        return RandomState(self.module.device, self.module.modules())

    def _eager(
        self, plan: StepPlan, args: tuple[Any, ...], batch: Sequence[Tensor]
    ) -> list[Result]:
        """Run the step eagerly; return what it computed besides its state."""
        if not plan.adds:
            for group in self.optimizer.param_groups:
                drop_gradients(group["params"])
        recorder = LogRecorder(self.module)
        own = StaticInputs(batch).tensors  # it may change its batch in place
        arguments = (substitute(args[0], own), *args[1:])
        memory = self._verifier.budget.memory_of(plan.graphs["forward"])
        # The graph's own buffers, and not given away: user code may keep them
        gradients = plan.gradients.taking_over() if self._verifier.ranks.are_one else nullcontext()
        assert self._places is not None, "whole steps have places"
        seen = None if plan.host is None else plan.host.generators
        generators = Generators(iter_objects(self.module), self.module.device, seen=seen)
        clocks: AbstractContextManager[None] = nullcontext()
        if plan.clocks is not None:
            clocks = plan.clocks.repeated(self.fit.watch.own)
        with (
            # But for the stand-ins of a capture: here every value is real
            self.surrounded(recorder, self._places, generators),
            memory,
            gradients,
            clocks,
        ):
            results = list if plan.places is None else plan.places.eager_results()
            output = self.run(arguments, plan.conditions.phase, recorder)
            stored = results()
        if plan.changes is not None:
            stored += new_results(arguments[0], own)
        output.finish_capture()
        return _returned(output.hand_out()) + stored

    def _replayed(
        self, plan: StepPlan, args: tuple[Any, ...], batch: Sequence[Tensor]
    ) -> list[Result]:
        """Replay the step; the results of :meth:`_eager`, under their names."""
        plan.take(batch)
        for refresh in plan.refreshes:
            refresh()
        for name, graph in plan.graphs.items():
            if name == plan.first_backward:
                for adopt in plan.adopts():
                    adopt()
            graph.replay()
        plan.attach()
        stored = [] if plan.places is None else plan.places.results()
        if plan.changes is not None:
            own = StaticInputs(batch).tensors
            changed = substitute(args[0], own)
            plan.changes.apply(changed, copies=False)
            stored += new_results(changed, own)
        return _returned(plan.outputs.hand_out()) + stored

    def check_update(self, replay: Callable[[], None]) -> None:
        """Verify a captured optimizer step on the gradients that there are."""
        held = list(iter_objects(self.module))
        parts = PythonSnapshot(held), Generators(held, self.module.device), self._random()
        written = self._verifier.written["update"]
        ways = Comparison(self._state({}), self.update, replay, parts, written)
        self._verifier.compare(ways, "the captured optimizer step was not verified")


_LOSSES = ("output", "output['loss']", 'output["loss"]')


def _returned(value: Any) -> list[Result]:
    """What a step has returned."""
    return [
        replace(output, name="the loss") if output.name in _LOSSES else output
        for output in results_in(value, "output")
    ]
