"""The doctor: captures the first steps of a fit, and lists all that is refused in these captures.

The steps themselves stay eager. Each is captured as without the doctor, but on a backend that
undoes everything and keeps nothing, and code goes on where it is refused, as far as it can.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from traceback import walk_tb
from types import CodeType
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn

from lightning_graphs.device.emulated import UndoingBackend
from lightning_graphs.device.rules import MOVING_VALUE, noting
from lightning_graphs.errors import CaptureError, GraphError
from lightning_graphs.lightning import words
from lightning_graphs.lightning.evaluation_runner import (
    EvaluationRunner,
    EvaluationWatch,
    name_evaluation,
)
from lightning_graphs.lightning.fit import fit_context
from lightning_graphs.lightning.oom import OomRecovery
from lightning_graphs.lightning.private import is_lightnings_closure
from lightning_graphs.lightning.runner import ModuleRunner, StepRunner
from lightning_graphs.lightning.strategy import NAMES, calls_of
from lightning_graphs.lightning.trainer import LightningContext
from lightning_graphs.policy.options import Options
from lightning_graphs.policy.worth import MemoryBudget
from lightning_graphs.private.callsite import add_line, definition_of, named_at
from lightning_graphs.private.exchange import nothing, replaced
from lightning_graphs.regions.calls import CallRefused, CapturedStep, StepCall
from lightning_graphs.regions.conditions import Values, moved_values
from lightning_graphs.regions.judged import Findings, JudgedSteps, options_of_notes
from lightning_graphs.regions.submodules import ModuleGraphs
from lightning_graphs.report.diagnosis import Diagnosis, Effect
from lightning_graphs.report.messages import Messages, Statistics, listed

_BETWEEN: Effect = "stays eager between them"

# ------------------ What is captured


class Judge(JudgedSteps, StepRunner):
    """Captures training steps as whole graphs, undoes that, and tells what was refused."""

    def observing(self) -> contextlib.AbstractContextManager[None]:
        """Observe the body, an eager step, as one of a warm-up."""
        return self._observing(is_last=True)

    def _obstacle_of(self, optimizer: Any) -> str | None:
        return super()._obstacle_of(optimizer) if self.has_stepped else "it has no state yet"


class EvaluationJudge(Judge, EvaluationRunner):
    """Captures steps of an evaluation."""


class JudgedModules(ModuleGraphs):
    """Captures the calls of submodules that it has observed, and releases the graphs."""

    calls_any = False  # there is a submodule that could be a graph

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self._values: list[Values] = []  # what captures have read
        self._codes: Sequence[CodeType] = ()

    def capture(self, call: StepCall, key: Any) -> CapturedStep | None:
        assert call.observation is not None
        self.calls_any |= bool(call.observation.calls)
        with noting(), contextlib.suppress(CaptureError):
            plan = super().capture(call, key)
            if plan is not None:
                self._values.append(plan.guards.values)
                self._codes = plan.guards.environment.outside.codes
                self.discard(plan)
        return None

    def diagnose(self) -> None:
        """Capture what the last step has shown."""
        if self._observed is not None:
            self._look_back(self._observed)

    def changes(self) -> CaptureError | None:
        """Return the refusal of values that calls read, and that have changed in each step."""
        moved = [moved_values(*pair) for pair in pairwise(self._values)]
        if len(set(self._values)) < len(self._values) or len(moved) < 2 or not all(moved):
            return None
        return MOVING_VALUE.refused(listed(moved[-1]) + named_at(moved[-1][0], self._codes))


class JudgedSubmodules(ModuleRunner):
    """Observes steps, and captures what submodules they call."""

    graphs = JudgedModules
    updates = False
    _graphs: JudgedModules

    @property
    def judged(self) -> JudgedModules:
        return self._graphs


class Refusals(Messages):
    """Keeps why submodules cannot be captured; nothing is said."""

    def __init__(self) -> None:
        super().__init__(Statistics(), say=nothing, warn=nothing)
        self.of_modules: list[CaptureError] = []

    def note(self, reason: str, error: GraphError | None = None, *, after: str = "") -> None:
        what, _, remedy = reason.partition("; ")
        if what.startswith("calls of "):
            self.of_modules.append(CaptureError(_CALLS, what, remedy))

    def refused(self, name: str, error: GraphError) -> None:
        assert isinstance(error, CallRefused)
        own = getattr(error.__cause__, "others", ()) or [error]
        for each in own:
            add_line(each, "in the code of", definition_of(error.call.original))
        self.of_modules += own


# ------------------ What is told

_CALLS = "A graph of a submodule must be able to stand for its calls."


def _is_inside(error: CaptureError, root: nn.Module) -> bool:
    """Return whether an error arose in the forward of a submodule."""
    for frame, _ in walk_tb(error.__traceback__):
        owner = frame.f_locals.get("self") if frame.f_code.co_name == "forward" else None
        if isinstance(owner, nn.Module) and owner is not root:
            return True
    return False


class FindingsBetween(Findings):
    """Those of steps whose submodules become graphs: what stays eager between them."""

    def __init__(self, diagnosis: Diagnosis, root: nn.Module) -> None:
        super().__init__(diagnosis)
        self._root = root

    def effect_of(self, error: CaptureError) -> Effect | None:
        return None if _is_inside(error, self._root) else _BETWEEN

    effect_of_answered = effect_of


class EvaluationFindings(Findings):
    """Those of an evaluation.

    Args:
        name: The method of strategy and module.
    """

    def __init__(self, diagnosis: Diagnosis, name: str) -> None:
        super().__init__(diagnosis)
        self._name = name

    def add(self, error: CaptureError, effect: Effect | None = "eager step") -> None:
        name_evaluation(error, self._name)
        super().add(error, effect)


class Doctor:
    """Judges training steps at the begin of a fit, which run eagerly and train as without it.

    It takes the place of the strategy's methods until :meth:`finish`. The first step, which fills
    caches and makes the optimizer's state, is not judged: none is captured as the first one.

    Args:
        options: The callback's options; ``warmup_steps`` steps are judged.
        reason: Why the fit is not captured at all; empty if it may be.
        no_whole_step: Why its steps are no whole graphs; empty if they may be.
    """

    names: Sequence[str] = NAMES
    kind = "training"

    def __init__(
        self,
        trainer: Trainer,
        module: LightningModule,
        options: Options,
        reason: str = "",
        no_whole_step: str = "",
    ) -> None:
        self.diagnosis = Diagnosis(kind=self.kind)
        self._trainer, self._module, self._all = trainer, module, options.warmup_steps
        self._begun, self._finished = False, False
        self._is_whole = not (reason or no_whole_step)  # steps can be judged as whole ones
        no_whole_step = "" if options.by_submodules else no_whole_step
        falls_back = bool(no_whole_step) and options.scope != "step"
        self._only_submodules = options.by_submodules or falls_back
        self._open = contextlib.ExitStack()
        self._calls = calls_of(trainer.strategy, self.names[0])
        self._refusals = Refusals()
        self._findings = self._into(self.diagnosis)
        with contextlib.ExitStack() as stack:
            fit = self._context(options, stack)
            self._judge = self._judged(fit)
            self._submodules = JudgedSubmodules(fit, 0, True) if self._only_submodules else None
            fit.recovery.runner = self._submodules or self._judge
            given = reason, no_whole_step, self._only_submodules, options.backend == "emulated"
            self._judge_fit(*given, options.optimizer_kernel)
            for name in self.names:
                stack.enter_context(replaced(trainer.strategy, name, getattr(self, name)))
            self._open = stack.pop_all()

    def _context(self, options: Options, stack: contextlib.ExitStack) -> LightningContext:
        device, statistics = self._trainer.strategy.root_device, Statistics()
        given = options_of_notes(options)
        backend = UndoingBackend(device, is_rehearsal=options.backend == "emulated")
        fit = fit_context(self._trainer, self._module, given, statistics, None, stack, backend)
        budget = MemoryBudget(torch.device("cpu"))  # of a GPU nothing is kept
        parts = statistics, budget, fit.ranks
        recovery = OomRecovery(self._trainer, self._calls, *parts, raises=True)
        return replace(fit, budget=budget, recovery=recovery, messages=self._refusals)

    def _judged(self, fit: LightningContext) -> Judge:
        return Judge(fit)

    def _into(self, diagnosis: Diagnosis) -> Findings:
        if self._only_submodules:
            return FindingsBetween(diagnosis, self._module)
        return Findings(diagnosis)

    def _judge_fit(self, *given: Any) -> None:
        words.judge_fit(self.diagnosis, self._trainer, *given)

    def finish(self) -> None:
        """Give the strategy back and print what was found; may be called again."""
        if self._finished:
            return
        self._finished = True
        self._judge_all()
        if self._submodules is not None:
            self._submodules.close()
        self._judge.close()
        self._open.close()
        is_told = self.diagnosis.kind == "training" or self.diagnosis.findings
        if self._trainer.is_global_zero and is_told:
            print(self.diagnosis)

    # ------------------------------------------------------------------ strategy methods

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Judge a step, and run it; after the last one, finish."""
        step = self._calls.training_step
        if self._finished:
            return step(*args, **kwargs)
        self._judge_calls()
        if self.diagnosis.steps == self._all:
            self.finish()
            return step(*args, **kwargs)
        if self._begun:
            self.diagnosis.steps += 1
            self._judge_step(args)
            if self._submodules is not None:
                return self._submodules.training_step(*args, **kwargs)
        self._begun = True
        with self._judge.observing():
            return step(*args, **kwargs)

    def backward(self, closure_loss: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run the backward pass of a step."""
        runner = self._calls if self._submodules is None else self._submodules
        return runner.backward(closure_loss, *args, **kwargs)

    def optimizer_step(
        self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        """Take an optimizer step, whose closure runs the step that is judged."""
        self._judge._stepping = is_lightnings_closure(closure)
        try:
            return self._calls.optimizer_step(optimizer, closure, model, **kwargs)
        finally:
            self._judge._stepping, self._judge.has_stepped = False, True

    # ------------------------------------------------------------------ judging

    def _judge_calls(self) -> None:
        """Judge the calls of submodules that the last step has made."""
        if self._submodules is not None:
            self._submodules.judged.diagnose()
            self._findings.begin()
            for error in self._refusals.of_modules:  # each module is tried until it is refused
                self._findings.add(error)

    def _judge_step(self, args: tuple[Any, ...]) -> None:
        if self._is_whole:
            self._findings.judge(self._judge, args)

    def _judge_all(self) -> None:
        """Judge all steps together."""
        if self._submodules is not None:
            found = self._submodules.judged.changes()
            if self.diagnosis.steps and not self._submodules.judged.calls_any:
                self.diagnosis.add(words.NO_SUBMODULE, "scope='modules'")
        else:
            found = self._findings.judge_all(self._judge)
        self._findings.add_change(found)


class EvaluationDoctor(Doctor):
    """Judges the first steps of an evaluation; its findings are told if there are any.

    Args:
        name: The method of strategy and module, one of
            :data:`~lightning_graphs.lightning.evaluation_runner.EVALUATIONS`.
    """

    def __init__(
        self, trainer: Trainer, module: LightningModule, options: Options, name: str
    ) -> None:
        self.names, self.kind = (name,), name.removesuffix("_step")
        setattr(self, name, self.training_step)
        whole = replace(options, scope="step", modules=None, exclude=())
        super().__init__(trainer, module, whole)

    def _judged(self, fit: LightningContext) -> Judge:
        watch = EvaluationWatch(self._trainer, self._module, self.names[0])
        return EvaluationJudge(replace(fit, watch=watch), watch)

    def _into(self, diagnosis: Diagnosis) -> Findings:
        return EvaluationFindings(diagnosis, self.names[0])

    def _judge_fit(self, *_: Any) -> None:
        """Leave out what hinders every step: it is of training."""

    def _judge_step(self, args: tuple[Any, ...]) -> None:
        assert isinstance(self._judge, EvaluationJudge)
        self._judge.client.given = args
        super()._judge_step(args)
