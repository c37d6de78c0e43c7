"""A captured step against the eager one: the same batch from the same state, tensor by tensor."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from lightning_graphs.core.buffers import StaticInputs
from lightning_graphs.core.tree import substitute
from lightning_graphs.training.agreement import Agreement, BothWays, tolerance_of
from lightning_graphs.training.body import StepBody
from lightning_graphs.training.ddp import unseen_by_ddp
from lightning_graphs.training.differences import Result, difference
from lightning_graphs.training.frozen import rates_exchanged
from lightning_graphs.training.generators import Generators
from lightning_graphs.training.logs import LogRecorder
from lightning_graphs.training.memory import (
    MemoryBudget,
    first_line,
    is_out_of_memory,
)
from lightning_graphs.training.optimizers import CapturableOptimizer
from lightning_graphs.training.plan import StepPlan
from lightning_graphs.training.precision import without_autocast_cache
from lightning_graphs.training.python_state import nothing_left_behind
from lightning_graphs.training.ranks import Ranks
from lightning_graphs.training.state import StepState, outputs
from lightning_graphs.training.transfer import copies_on_host
from lightning_graphs.training.warned import stacklevel_of_user


class Verification:
    """Runs captured steps both ways from one state, and compares.

    A check runs the step eagerly, keeps a fingerprint of everything that it computed and changed,
    goes back, replays, and compares: two steps' time and one copy of the state, and the memory of
    the graphs serves the eager step as well. Where bits differ, it runs the step eagerly once or
    twice more and replays once more, now with copies of the tensors that differ, and asks
    :class:`~lightning_graphs.training.differences.Tolerance`. Afterwards everything is as before
    the check. Hooks do not run, logs do not reach Lightning and metrics are not updated. What the
    step does to the world outside of module, optimizer and generators (a file that it writes, a
    global that it counts up) it does once more for each run.

    Args:
        trainer: The trainer.
        module: Its module.
        body: What a step computes.
        optimizer: The trainer's optimizer.
        capturable: Makes its step capturable; None if it is not captured.
        budget: What memory may be taken.
        ranks: All of them verify together.
    """

    def __init__(
        self,
        trainer: Trainer,
        module: LightningModule,
        body: StepBody,
        optimizer: Optimizer,
        capturable: CapturableOptimizer | None,
        budget: MemoryBudget,
        ranks: Ranks,
    ) -> None:
        self._ranks = ranks
        self._trainer = trainer
        self._module = module
        self._body = body
        self._optimizer = optimizer
        self._capturable = capturable
        self._budget = budget
        self._device = module.device
        self._said = False
        self._tolerance = tolerance_of(trainer)

    def check(self, plan: StepPlan, args: tuple[Any, ...]) -> None:
        """Verify a plan with the batch that is about to be trained on.

        Where memory allows no copy of the state, ``plan.proof`` is left to look at what the
        coming replay hands out, and a line says so.

        Args:
            plan: The captured step; nothing of it has run for this batch.
            args: Of ``training_step``.

        Raises:
            VerificationError: names the first tensor that differs.
            GraphError: the eager step does by now what a captured one cannot do.
            MemoryKept: the eager step leaves tensors in the memory of the graphs.
        """
        batch, missing = self._tensors(plan, args), ""
        plan.rewind_host()
        for name in plan.stores:  # another step may have set them otherwise
            plan.store(name)
        state = StepState(
            self._trainer,
            self._module,
            self._optimizer,
            plan.written,
            budget=self._budget,
            zeroed=plan.gradients.parameters if plan.gradients.in_pool else (),
        )
        with self._budget.nothing_kept():
            try:
                self._ranks.together(state.keep)
                with state.restored():
                    self._compare(plan, args, state)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                missing = first_line(error)
            finally:
                plan.inputs.copy_in(batch)
                if self._device.type == "cuda":
                    torch.cuda.empty_cache()  # of the eager step and the copy of the state
        if missing:
            self._leave_proof(plan, args, missing)
        plan.run_host(partial(copies_on_host, self._trainer, batch))

    # ------------------------------------------------------------------ everything

    def _compare(self, plan: StepPlan, args: tuple[Any, ...], state: StepState) -> None:
        together = partial(self._ranks.together, exchanges=True)
        self._agreement().require(
            BothWays(
                partial(together, partial(self._eager, plan, args, state)),
                partial(together, partial(self._replayed, plan, args, state)),
                state.restore,
                state.moved,
            )
        )

    def _agreement(self) -> Agreement:
        where = f"at step {self._trainer.global_step}"
        return Agreement(self._tolerance, self._budget, where, self._say_once, self._ranks)

    # ------------------------------------------------------------------ the two ways

    def _eager(self, plan: StepPlan, args: tuple[Any, ...], state: StepState) -> list[Result]:
        """Run the step eagerly; what it computed, and what it changed, in place."""
        if not plan.adds:
            for group in self._optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None
        recorder = LogRecorder(self._module)
        arguments = self._arguments(plan, args)
        own = self._budget.memory_of(plan.forward) if self._ranks.are_one else nullcontext()
        with self._surroundings(plan, recorder), own:
            output = self._body.run(arguments, plan.phase, recorder)
        output.finish_capture()
        return state.results(output.hand_out())

    def _replayed(self, plan: StepPlan, args: tuple[Any, ...], state: StepState) -> list[Result]:
        """The same of a replay."""
        batch = self._tensors(plan, args)
        plan.inputs.copy_in(batch)
        plan.run_host(partial(copies_on_host, self._trainer, batch))
        if self._capturable is not None:
            self._capturable.refresh()
        for graph in plan.graphs:
            if (graph is plan.forward and plan.backward is None) or graph is plan.backward:
                plan.adopt()
            graph.replay()
        plan.attach()
        return state.results(plan.outputs.hand_out())

    @contextlib.contextmanager
    def _surroundings(self, plan: StepPlan, recorder: LogRecorder) -> Iterator[None]:
        """What a capture has around it, but for the stand-ins: here every value is real."""
        with contextlib.ExitStack() as stack:
            generators = Generators(self._module, torch_too=plan.host is None)
            stack.enter_context(nothing_left_behind(self._module, generators))
            stack.enter_context(unseen_by_ddp(self._trainer))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(recorder.recording())
            stack.enter_context(without_autocast_cache(self._trainer.precision_plugin))
            if self._capturable is not None:  # kernels round a rate on the device otherwise
                rates = self._capturable.live_rates()
                stack.enter_context(rates_exchanged(self._trainer, self._optimizer, rates))
            if self._ranks.units is not None:  # a forward pass alone leaves some gathered
                stack.callback(self._ranks.units.shard)
            yield

    def _arguments(self, plan: StepPlan, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments with a batch of the step's own, which it may change in place."""
        own = StaticInputs(self._tensors(plan, args)).tensors
        return (substitute(args[0], own), *args[1:])

    def _tensors(self, plan: StepPlan, args: tuple[Any, ...]) -> Sequence[Tensor]:
        tensors: Sequence[Tensor] | None = plan.call.match((args[0],), {})
        assert tensors is not None, "the plan was found for this batch"
        return tensors

    # ------------------------------------------------------------------ a smaller check

    def _leave_proof(self, plan: StepPlan, args: tuple[Any, ...], missing: str) -> None:
        """Compute what ``training_step`` returns; the coming replay is compared with it."""
        state = StepState(
            self._trainer,
            self._module,
            self._optimizer,
            plan.written,
            budget=self._budget,
            forward_only=True,
        )

        def forward() -> list[Result]:
            recorder, arguments = LogRecorder(self._module), self._arguments(plan, args)
            with self._surroundings(plan, recorder), torch.no_grad():
                output, _ = self._body.forward(arguments, recorder)
            state.restore()
            return outputs(output.hand_out())

        try:
            self._ranks.together(state.keep)
            with state.restored():
                runs = [self._ranks.together(forward, exchanges=True) for _ in range(2)]
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self._say_once(f"a captured step was not verified: {missing}")
            return
        self._say_once(f"of a captured step only the forward pass was verified: {missing}")
        plan.proof = partial(self._prove, *runs)

    def _say_once(self, line: str) -> None:
        if not self._said:
            self._said = True
            rank_zero_warn(f"GraphCapture: {line}", stacklevel=stacklevel_of_user())

    def _prove(self, eager: list[Result], again: list[Result], returned: Any) -> None:
        agreement, replayed = self._agreement(), outputs(returned)
        agreement.require_names([r.name for r in eager], [r.name for r in replayed])
        for first, second, now in zip(eager, again, replayed, strict=True):
            noise = difference(second.value, first.value)
            apart = difference(now.value, first.value)
            if not apart.norm <= self._tolerance.allowed(first.value, noise.norm):
                raise agreement.mismatch(now.name, apart, noise)
