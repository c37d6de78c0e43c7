"""Which part of a step becomes graphs: the whole, chosen submodules, or what turns out to work."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer

from lightning_graphs.training.fit import Fit
from lightning_graphs.training.guards.uncapturable import obstacle_in
from lightning_graphs.training.modules.runner import ModuleRunner
from lightning_graphs.training.retry import Runner
from lightning_graphs.training.step.optimizers import CapturableOptimizer
from lightning_graphs.training.step.runner import StepRunner


def _module_runner(fit: Fit, *, warmed_up: bool = False) -> ModuleRunner:
    fit.ranks.close()  # submodules exchange nothing
    if fit.progress is not None:
        fit.progress.follows = True
    return ModuleRunner(fit, warmup_steps=0 if warmed_up else fit.options.warmup_steps)


def runner_for(fit: Fit) -> Runner:
    """The runner that the options ask for."""
    if fit.options.scope == "step":
        return StepRunner(fit)
    if fit.options.by_submodules:
        return _module_runner(fit)
    reason = why_no_whole_step(fit.trainer, fit.module)
    if reason:
        fit.statistics.note(f"capturing submodules, not the whole step: {reason}")
        return _module_runner(fit)
    return AutoRunner(fit)


def why_no_whole_step(trainer: Trainer, module: LightningModule) -> str:
    """Why the steps of a fit are no whole graphs, in one sentence; empty if they may be."""
    obstacle = obstacle_in(module)
    if obstacle is not None:
        return obstacle
    if not module.automatic_optimization:
        return "the module optimizes manually, and scope='step' needs automatic optimization"
    if len(trainer.optimizers) != 1:
        return f"scope='step' needs one optimizer, and there are {len(trainer.optimizers)}"
    if isinstance(trainer.optimizers[0], torch.optim.LBFGS):
        return "LBFGS calls the training step several times for each update"
    return ""


class AutoRunner:
    """Whole steps as graphs; submodules, from the next step on, where that turns out to fail.

    It fails where the first capture is refused, and where attributes take new values too often.
    """

    def __init__(self, fit: Fit) -> None:
        self._fit = fit
        self._runner: StepRunner | ModuleRunner = StepRunner(fit)

    @property
    def capturable(self) -> CapturableOptimizer | None:
        return self._runner.capturable

    @property
    def held(self) -> str:
        return self._runner.held

    def close(self) -> None:
        self._runner.close()

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        runner = self._runner
        if isinstance(runner, StepRunner) and runner.has_failed:  # here alone the scope changes
            runner.close()
            self._runner = _module_runner(self._fit, warmed_up=True)
        return self._runner.optimizer_step(*args, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._runner.training_step(*args, **kwargs)

    def backward(self, *args: Any, **kwargs: Any) -> Any:
        return self._runner.backward(*args, **kwargs)
