"""Chooses what becomes graphs: whole steps, submodules, or what turns out to work."""

from __future__ import annotations

from functools import partial

import torch
from lightning.pytorch import LightningModule, Trainer

from lightning_graphs.training.fit import Fit
from lightning_graphs.training.guards.uncapturable import obstacle_in
from lightning_graphs.training.modules.runner import ModuleRunner
from lightning_graphs.training.retry import Runner
from lightning_graphs.training.step.runner import StepRunner


def runner_for(fit: Fit) -> Runner:
    """The runner that the options ask for.

    By default that of whole steps. Submodules follow, from the next step on, where that turns out
    to fail: where the first capture is refused, and where attributes take new values too often.
    """
    if fit.options.scope == "step":
        return StepRunner(fit)
    if fit.options.by_submodules:
        return ModuleRunner(fit, fit.options.warmup_steps)
    reason = why_no_whole_step(fit.trainer, fit.module)
    if reason:
        fit.statistics.note(f"capturing submodules, not the whole step: {reason}")
        return ModuleRunner(fit, fit.options.warmup_steps)
    return StepRunner(fit, partial(ModuleRunner, fit, 0))


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
