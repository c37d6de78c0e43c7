"""The calls of a captured function: each runs eagerly, is captured, or is replayed."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_graphs.device.rules import COUNTER, speaking
from lightning_graphs.errors import GraphError, first_line
from lightning_graphs.loops.processes import OWN_COLLECTIVE
from lightning_graphs.loops.program import (
    CONFIGURATION,
    OPTIMIZER,
    OUTSIDE,
    WORDS,
    Program,
    ProgramWatch,
    Several,
    argument_name,
)
from lightning_graphs.policy.worth import MemoryBudget
from lightning_graphs.private.callsite import LIBRARIES, calls_observed, definition_of
from lightning_graphs.regions.conditions import CaptureKey, ClientGuards, Phase
from lightning_graphs.regions.context import TrainingContext
from lightning_graphs.regions.judged import Findings, JudgedSteps
from lightning_graphs.regions.lifecycle import EAGER, Ranks
from lightning_graphs.regions.optimizer import Kernel, capture_obstacle
from lightning_graphs.regions.plan import StepOutputs, StepPlan
from lightning_graphs.regions.recovery import MemoryRecovery, StateBefore
from lightning_graphs.regions.reduction import Collectives
from lightning_graphs.regions.step import StepCapture
from lightning_graphs.regions.verify import Verifier
from lightning_graphs.regions.whole_step import BY_HAND, EvaluationSteps, StepRegion
from lightning_graphs.report.diagnosis import Diagnosis
from lightning_graphs.report.messages import Statistics
from lightning_graphs.values.guards import REALS
from lightning_graphs.values.signature import Signature
from lightning_graphs.values.snapshot import OptimizerState, PythonSnapshot
from lightning_graphs.values.tree import Unread, parameters_of
from lightning_graphs.watch.batch import BatchValueRead, refuse_iterator


class FunctionCapture(StepCapture):
    """Captures calls of a function that trains."""

    client: Any

    def numbers_of(self, batch: Any, signature: Signature) -> Mapping[str, Callable[[], Any]]:
        """Return readers of numbers among several arguments that differ from call to call."""
        if not isinstance(batch, Several):
            return {}
        pairs = zip(signature.names, signature.leaves, strict=True)
        unread = {name for name, leaf in pairs if isinstance(leaf, Unread)}
        return {
            key: partial(self.client.number_now, key)
            for key, value in batch.items()
            if type(value) in REALS and argument_name(key) in unread
        }

    def _outputs(self, returned: Any) -> StepOutputs:
        own = {id(p) for p in self.module.parameters()}  # which callers may go on to write
        return StepOutputs(returned, own=own)


class FunctionSteps(StepRegion):
    """Runs the calls of a function that trains."""

    step = "call"
    captures = FunctionCapture
    shares_heads = False
    no_update = OPTIMIZER
    _ranks: Ranks
    _recovery: CallRecovery

    def __init__(
        self,
        context: TrainingContext,
        verifier: Verifier,
        # Surrounds what is no replay
        around: Callable[[], AbstractContextManager[object]],
        recovery: CallRecovery,
    ) -> None:
        self._name, self._around = context.module.name, around
        self._client = cast(Any, context.watch)
        self._is_apart = self._client.processes.are_apart
        self._collectives = Collectives()
        owners: list[Any] = context.module.owners
        self._bound = tuple(owners)  # read once: captures note what is read of the module
        super().__init__(context, recovery, verifier)
        recovery.runner = self
        self._may_give_up = False
        program = context.module
        self._own = partial(program.arguments.call, program.function)
        self._run_step = self._begun
        saved = partial(_saved, weakref.ref(self))  # an optimizer may outlive the function
        hooked = [one.register_state_dict_post_hook(saved) for one in self._optimizers]
        self._saving = [handle.remove for handle in hooked]

    def close(self) -> None:
        for remove in self._saving:
            remove()
        super().close()

    def run(
        self,
        given: Any,  # stands for the arguments
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Run, capture or replay a call."""
        call, life, recovery = (given,), self._life, self._recovery
        if recovery.is_open and recovery.begin_step():
            return self._module.function(*args, **kwargs)
        self._client.given = given
        self._client.calls += 1
        before = self._statistics.eager, self._statistics.replayed
        try:
            if self._warmup_left > 0 or self._policy.is_over or not self._ranks.ready:
                with self._around():
                    return self._wait(call, args, kwargs)
            if self._head.now is not None:
                with self._around():
                    return self._run_head(call)
            plan = life.find(call)
            if plan is None or not (self._ranks.are_one and life.is_ready(plan)):
                with self._around():
                    with self._speaking():
                        plan = self._agreed(call, plan)
                    if plan is None:
                        return self._run_eagerly(args, kwargs)
                    plan.present.batch = given
                    return self._replay(plan)
            plan.present.batch = given
            return self._replay(plan)
        except Exception as error:
            if not recovery.repeats_after(error):
                raise
        # The error's traceback, and what it refers to, is released
        recovery.undo()
        self._statistics.eager, self._statistics.replayed = before
        self._statistics.ran_eagerly()
        return self._module.function(*args, **kwargs)

    def _wait(self, call: tuple[Any, ...], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run a call ahead of the first that may be captured."""
        ranks = self._ranks
        with self._speaking():
            self._count_key(call)
        if self._warmup_left <= 0:
            ranks.are_ready()
        self._leave_if_needed()
        ranks.agree(EAGER, False)
        return self._run_eagerly(args, kwargs)

    def _leave_if_needed(self) -> None:
        """Switch all ranks to eager calls if this one must."""
        if not self._ranks.are_one and (reason := self._client.processes.why_to_leave()):
            self._ranks.leave(f"calls run eagerly from now on: {reason}")

    def _agreed(self, call: tuple[Any, ...], found: StepPlan | None) -> StepPlan | None:
        """Return the plan that replays a call, captured if need be; None: it runs eagerly."""
        self._leave_if_needed()
        if self._ranks.lost:
            self._rebind(self._ranks.lost)
            found = None
        return self._life.plan_for(call, found)

    def _run_eagerly(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if self._warmup_left > 0:
            self._warmup_left -= 1
            is_last = not self._warmup_left and self._policy.is_likely
            foreseeing = self._facts.foreseeing() if is_last else nullcontext()
            with self._fit.compiled.watching(), foreseeing:
                return self._eager(args, kwargs)
        return self._eager(args, kwargs)

    @calls_observed
    def _eager(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        self._recovery.begin_eagerly((self._client.given,))
        self._statistics.ran_eagerly()
        if not self._is_apart or self._client.processes.sync():
            return self._module.function(*args, **kwargs)
        with self._collectives.observing():
            return self._module.function(*args, **kwargs)

    @calls_observed
    def _begun(self, given: Any) -> Any:
        """Run a call that may begin with a head."""
        self._recovery.begin_eagerly((given,))
        return self._own(given)

    def _without_head(self, args: tuple[Any, ...]) -> Any:
        self._statistics.ran_eagerly()
        return self._run_step(*args)

    def _finds_head(self, error: GraphError) -> bool:
        return not self._is_apart and super()._finds_head(error)

    def _plan_behind(self, leaving: dict[str, Any]) -> StepPlan | None:
        with self._speaking():
            return super()._plan_behind(leaving)

    def _capture_behind(self, args: tuple[Any, ...]) -> None:
        with self._speaking():
            super()._capture_behind(args)

    @contextlib.contextmanager
    def _speaking(self) -> Iterator[None]:
        """Let messages about the body speak of plain loops."""
        with LIBRARIES.calling(self._name), speaking(WORDS), on_behalf_of_graphs():
            yield

    # ------------------------------------------------------------------ what the engine asks for

    def _signature_of(
        self, args: tuple[Any, ...], conditions: CaptureKey
    ) -> tuple[Signature, list[Tensor]]:
        several = args[0].values() if isinstance(args[0], Several) else ()
        for value in (*self._bound, *several):
            refuse_iterator(value)
        signature, tensors = super()._signature_of(args, conditions)
        if torch.is_grad_enabled() and any(t.grad_fn is not None for t in tensors):
            raise OUTSIDE.refused("an argument has a graph of autograd behind it")
        return signature, tensors

    def key(self, call: tuple[Any, ...]) -> Signature | None:
        if self._is_apart and self._client.processes.sync():
            return None  # DDP sends buffers to all ranks, of which each decides by itself
        return super().key(call)

    def capture(self, call: tuple[Any, ...], key: Signature) -> StepPlan | None:
        if self._collectives.are_called:
            raise OWN_COLLECTIVE.refused("its eager calls exchange data with other processes")
        return super().capture(call, key)

    def may_succeed(self, key: Signature, error: GraphError) -> bool:
        """Whether a capture may succeed with a graph for each value of a number."""
        names = self._client.used_in(error)
        if error.rule == COUNTER.rule and names:
            used = BatchValueRead(error.rule, error.observed, error.remedy)
            used.names = names
            self._values.read(used)
            return True
        return super().may_succeed(key, error)

    def _present(self) -> list[Optimizer]:
        return [*self._client.optimizers]

    def _phase(self) -> Phase:
        return BY_HAND

    def _client_guards(self) -> ClientGuards:
        client = self._client
        synced = client.processes.key if client.processes.wrappers else bool
        return ClientGuards(self._phase, lambda: client.epoch, (bool, synced), ())


def _saved(
    steps: weakref.ref[FunctionSteps], optimizer: Optimizer, state: dict[str, Any]
) -> dict[str, Any]:
    """Return a saved state of an optimizer as that of an eager loop."""
    present = steps()
    capturable = None if present is None else present.capturables.get(optimizer)
    return state if capturable is None else capturable.neutral(state)


class EvaluationCalls(EvaluationSteps, FunctionSteps):
    """Runs the calls of a function that evaluates."""

    def _phase(self) -> Phase:
        return Phase(zeroing=False, stepping=False, window=1)


_depth = 0


def is_on_behalf_of_graphs() -> bool:
    """Whether a call runs now that is captured or compared: others inside are plain then."""
    return _depth > 0


@contextlib.contextmanager
def on_behalf_of_graphs() -> Iterator[None]:
    global _depth
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1


# ------------------ Calls that find no memory


class CallRecovery(MemoryRecovery):
    """Undoes all that a call has done, optimizer steps among it, and lets it run again."""

    step = "call"

    def __init__(
        self,
        program: Program,
        watch: ProgramWatch,
        statistics: Statistics,
        budget: MemoryBudget,
        ranks: Ranks,
        *,
        raises: bool,
    ) -> None:
        super().__init__(program, statistics, budget, ranks, raises=raises)
        self._watch = watch
        self.who = f"capture({program.name})"

    def _snapshot(self, args: tuple[Any, ...], *, gradients: bool = False) -> StateBefore:
        watch = self._watch
        states = [OptimizerState(one, watch.scaler) for one in watch.optimizers]
        groups = [group for one in watch.optimizers for group in one.param_groups]
        kept = chain.from_iterable(state.tensors for state in states)
        # A scheduler sets rates in the groups
        named = [
            (f"scheduler or group {i}", one) for i, one in enumerate([*watch.schedulers, *groups])
        ]
        environment = watch.environment()
        outside = environment.outside
        outside.assume(self._module.inner)  # it runs unfollowed
        found = StateBefore(
            self._module,
            args,
            self._budget,
            gradients=True,
            tensors=[*self._module.parameters(), *parameters_of(*watch.optimizers), *kept],
            outside=[PythonSnapshot(named), outside.contents, environment.generators],
        )
        for state in states:
            found.add(state)
        return found

    def repeats_after(self, error: Exception) -> bool:
        """Whether a call may run again after an error: graphs have caused it."""
        self._error = first_line(error)
        return self._may_repeat(error)

    def undo(self) -> None:
        """Put back the state before the call, if its code has begun, and release the graphs."""
        if self._begin is not None:
            self._begin.restore()
        self._give_up(self._error)


# ------------------ Calls that only show what would refuse their capture


class JudgedCalls(JudgedSteps, FunctionSteps):
    """Captures the first calls of a function that trains, undoes that, and tells what was refused.

    All calls run eagerly. The first one, which fills caches and makes the optimizer's state, is not
    judged: none is captured as the first one.
    """

    has_stepped = True  # an optimizer that has no state yet is not told
    findings: Findings | None = None  # None: they are told
    told: Statistics  # of the function
    calls = 0  # that are to be judged

    def run(self, given: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Judge a call, and run it."""
        self._client.given = given
        self._client.calls += 1
        self.told.ran_eagerly()
        if self.findings is None:
            return self._module.function(*args, **kwargs)
        if self._client.calls > 1:
            self.findings.diagnosis.steps += 1
            with self._speaking():
                self.findings.judge(self, (given,))
        self._warmup_left = 1
        returned = self._run_eagerly(args, kwargs)
        if self.findings.diagnosis.steps == self.calls:
            self._conclude()
        return returned

    def close(self) -> None:
        self._conclude()
        super().close()

    def _conclude(self) -> None:
        """Judge all calls together, and print what was found."""
        findings, self.findings = self.findings, None
        if findings is not None:
            with self._speaking():
                findings.add_change(findings.judge_all(self))
            print(findings.diagnosis)


class JudgedEvaluation(JudgedCalls, EvaluationCalls):
    """Captures the first calls of a function that evaluates."""


def diagnosis_of(program: Program, statistics: Statistics, reason: str) -> Diagnosis:
    """Begin the diagnosis of a function; with why no call can be captured, print it.

    Args:
        reason: The reason in words; empty if calls can.
    """
    statistics.fallbacks.append("diagnose=True: calls are observed, and none is captured")
    statistics.diagnosis = diagnosis = Diagnosis(kind="", who=f"capture({program.name})")
    if reason:
        diagnosis.add(CONFIGURATION, "capture()", observed=reason)
        print(diagnosis)
    return diagnosis


def judge_optimizers(
    diagnosis: Diagnosis,
    optimizers: Iterable[Optimizer],
    program: Program,
    device_type: str,
    kernel: Kernel,
) -> None:
    """Add the optimizers that no graph can step; the rest of the function may be captured."""
    for optimizer in optimizers:
        if why := capture_obstacle(program, optimizer, device_type, kernel):
            row = OPTIMIZER, type(optimizer).__name__, definition_of(program.function)
            diagnosis.add(*row, observed=why, effect="eager optimizer step")
