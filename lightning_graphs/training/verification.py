"""A captured step against the eager one: the same batch from the same state, tensor by tensor."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from lightning_graphs.core.buffers import StaticInputs
from lightning_graphs.core.fingerprints import Fingerprint, Fingerprinter
from lightning_graphs.core.tree import substitute
from lightning_graphs.errors import VerificationError
from lightning_graphs.training.body import StepBody
from lightning_graphs.training.differences import (
    NONE,
    Difference,
    Result,
    Tolerance,
    difference,
    size,
)
from lightning_graphs.training.frozen import rates_exchanged
from lightning_graphs.training.logs import LogRecorder
from lightning_graphs.training.optimizers import CapturableOptimizer
from lightning_graphs.training.precision import without_autocast_cache
from lightning_graphs.training.python_state import nothing_left_behind
from lightning_graphs.training.state import StepState, outputs
from lightning_graphs.training.step import StepPlan

_RULE = "A replay computes what the eager step computes, to the bit or within its rounding."
_REMEDY = (
    "look for Python values that the step reads and that change between steps (a global, a "
    "closure, the content of a container): make them tensors or attributes of the module"
)
_ARITHMETIC = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
_MIB = 2**20


class Verification:
    """Runs captured steps both ways from one state, and compares.

    A check runs the step eagerly, keeps a fingerprint of everything that it computed and changed,
    goes back, replays, and compares: two steps' time and one copy of the state. Where bits differ,
    it runs the step eagerly once or twice more and replays once more, now with copies of the
    tensors that differ, and asks :class:`~lightning_graphs.training.differences.Tolerance`.
    Afterwards everything is as before the check. Hooks do not run, logs do not reach Lightning and
    metrics are not updated. What the step does to the world outside of module, optimizer and
    generators (a file that it writes, a global that it counts up) it does once more for each run.

    Args:
        trainer: The trainer.
        module: Its module.
        body: What a step computes.
        optimizer: The trainer's optimizer.
        capturable: Makes its step capturable; None if it is not captured.
    """

    def __init__(
        self,
        trainer: Trainer,
        module: LightningModule,
        body: StepBody,
        optimizer: Optimizer,
        capturable: CapturableOptimizer | None,
    ) -> None:
        self._trainer = trainer
        self._module = module
        self._body = body
        self._optimizer = optimizer
        self._capturable = capturable
        self._device = module.device
        self._said = False
        precision = str(trainer.precision_plugin.precision)
        self._tolerance = Tolerance(self._device.type, _ARITHMETIC.get(precision))

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
        """
        state = StepState(self._trainer, self._module, self._optimizer)
        missing = _missing_memory(self._device, state.nbytes)
        if not missing:
            try:
                with state.kept():
                    self._compare(plan, args, state)
                return
            except torch.OutOfMemoryError as error:
                missing = str(error).partition("\n")[0]
            finally:
                plan.inputs.copy_in(self._tensors(plan, args))
                if self._device.type == "cuda":
                    torch.cuda.empty_cache()  # of the eager step and the copy of the state
        self._leave_proof(plan, args, missing)

    # ------------------------------------------------------------------ everything

    def _compare(self, plan: StepPlan, args: tuple[Any, ...], state: StepState) -> None:
        prints = Fingerprinter()
        expected = self._eager(plan, args, state)
        names = [result.name for result in expected]
        known = prints.of([result.value for result in expected])
        del expected
        state.restore()
        found = self._replayed(plan, args, state)
        self._same_names(names, [result.name for result in found])
        now = prints.of([result.value for result in found])
        del found
        differing = {n for n, a, b in zip(names, known, now, strict=True) if a != b}
        if differing:
            state.restore()
            self._compare_values(plan, args, state, differing, (prints, names, known))

    def _compare_values(
        self,
        plan: StepPlan,
        args: tuple[Any, ...],
        state: StepState,
        differing: set[str],
        first: tuple[Fingerprinter, list[str], list[Fingerprint]],
    ) -> None:
        """Ask the rule about the tensors whose bits differ."""
        prints, names, known = first
        again = self._eager(plan, args, state)
        now = prints.of([result.value for result in again])
        steady = [r.name for r in again] == names and now == known
        held = {r.name: r.value.detach().clone() for r in self._fitting(again, differing)}
        if len(held) < len(differing):
            self._say_once("not every tensor of a captured step was verified: no memory for copies")
        updates = {r.name: state.moved(r.value) for r in again if r.name in held and r.gradient}
        gradients = math.hypot(*(size(r.value) for r in again if r.is_gradient))
        del again
        noise: dict[str, Difference] = {}
        if not steady:
            state.restore()
            third = self._eager(plan, args, state)
            noise = {r.name: difference(r.value, held[r.name]) for r in third if r.name in held}
            del third
        state.restore()
        rule, unjudged = self._tolerance, set()
        for result in self._replayed(plan, args, state):
            eager = held.get(result.name)
            if eager is None or result.gradient in unjudged:
                continue
            apart = difference(result.value, eager)
            runs = noise.get(result.name, NONE)
            if result.gradient in differing:
                allowed = rule.allowed_of_update(eager, runs.norm, updates[result.name])
            else:
                allowed = rule.allowed(eager, runs.norm, gradients if result.is_gradient else 0.0)
            if not apart.norm <= allowed:
                raise self._mismatch(result.name, apart, runs)
            if result.is_gradient and rule.is_rounding(eager, apart):
                unjudged.add(result.name)

    def _fitting(self, results: Sequence[Result], wanted: set[str]) -> Iterator[Result]:
        """The first of the wanted results, with as much memory left free as their copies take."""
        needed = 0
        for result in results:
            if result.name in wanted:
                needed += result.value.numel() * result.value.element_size()
                if _missing_memory(self._device, needed):
                    return
                yield result

    def _same_names(self, eager: list[str], replayed: list[str]) -> None:
        for name in (*eager, *replayed):
            if name not in eager or name not in replayed:
                where = "the eager step" if name in eager else "the replay"
                raise VerificationError(_RULE, f"{self._step()}, only {where} has {name}", _REMEDY)

    def _mismatch(self, name: str, apart: Difference, eager: Difference) -> VerificationError:
        observed = (
            f"{self._step()}, {name} differs by up to {apart.largest:.3g}; two eager runs differ "
            f"by up to {eager.largest:.3g}"
        )
        return VerificationError(_RULE, observed, _REMEDY)

    def _step(self) -> str:
        return f"at step {self._trainer.global_step}"

    # ------------------------------------------------------------------ the two ways

    def _eager(self, plan: StepPlan, args: tuple[Any, ...], state: StepState) -> list[Result]:
        """Run the step eagerly; what it computed, and what it changed, in place."""
        if not plan.adds:
            for group in self._optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None
        recorder = LogRecorder(self._module)
        arguments = self._arguments(plan, args)
        with self._surroundings(recorder):
            output = self._body.run(arguments, plan.phase, recorder)
        output.finish_capture()
        return state.results(output.hand_out())

    def _replayed(self, plan: StepPlan, args: tuple[Any, ...], state: StepState) -> list[Result]:
        """The same of a replay."""
        plan.inputs.copy_in(self._tensors(plan, args))
        if self._capturable is not None:
            self._capturable.refresh(plan.numbers)
        for graph in plan.graphs:
            if (graph is plan.forward and plan.backward is None) or graph is plan.backward:
                plan.adopt()
            graph.replay()
        plan.attach()
        return state.results(plan.outputs.hand_out())

    @contextlib.contextmanager
    def _surroundings(self, recorder: LogRecorder) -> Iterator[None]:
        """What a capture has around it, but for the stand-ins: here every value is real."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(nothing_left_behind(self._module))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(recorder.recording())
            stack.enter_context(without_autocast_cache(self._trainer.precision_plugin))
            if self._capturable is not None:  # kernels round a rate on the device otherwise
                rates = self._capturable.live_rates()
                stack.enter_context(rates_exchanged(self._trainer, self._optimizer, rates))
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
        state = StepState(self._trainer, self._module, self._optimizer, forward_only=True)
        runs = []
        try:
            with state.kept():
                for _ in range(2):
                    recorder, arguments = LogRecorder(self._module), self._arguments(plan, args)
                    with self._surroundings(recorder), torch.no_grad():
                        output, _ = self._body.forward(arguments, recorder)
                    runs.append(outputs(output.hand_out()))
                    state.restore()
        except torch.OutOfMemoryError:
            self._say_once(f"a captured step was not verified: {missing}")
            return
        self._say_once(f"of a captured step only the forward pass was verified: {missing}")
        plan.proof = partial(self._prove, *runs)

    def _say_once(self, line: str) -> None:
        if not self._said:
            self._said = True
            rank_zero_warn(f"GraphCapture: {line}")

    def _prove(self, eager: list[Result], again: list[Result], returned: Any) -> None:
        replayed = outputs(returned)
        self._same_names([r.name for r in eager], [r.name for r in replayed])
        for first, second, now in zip(eager, again, replayed, strict=True):
            noise = difference(second.value, first.value)
            apart = difference(now.value, first.value)
            if not apart.norm <= self._tolerance.allowed(first.value, noise.norm):
                raise self._mismatch(now.name, apart, noise)


def _missing_memory(device: torch.device, needed: int) -> str:
    """Why there is no room for so many bytes; empty if there is."""
    if device.type != "cuda":
        return ""
    if torch.cuda.mem_get_info(device)[0] <= needed:
        torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info(device)[0]
    if free > needed:
        return ""
    return f"a copy of the state takes {needed // _MIB} MiB, and {free // _MIB} MiB are free"
