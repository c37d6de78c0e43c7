"""Calls that run eagerly, and what would refuse their capture: ``capture(..., diagnose=True)``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch.optim import Optimizer

from lightning_graphs.loops.function_runner import EvaluationCalls, FunctionSteps
from lightning_graphs.loops.program import Program
from lightning_graphs.loops.remedies import CONFIGURATION, OPTIMIZER
from lightning_graphs.private.callsite import definition_of
from lightning_graphs.regions.judged import Findings, JudgedSteps
from lightning_graphs.regions.optimizer import Kernel, capture_obstacle
from lightning_graphs.report.diagnosis import Diagnosis
from lightning_graphs.report.messages import Statistics


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
