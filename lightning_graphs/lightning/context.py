"""The context of a fit: what every runner is made of, and what it learns of its steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from lightning.pytorch import LightningModule, Trainer

from lightning_graphs.device.graph import GraphPool
from lightning_graphs.lightning import words as words  # whose import tells the engine
from lightning_graphs.lightning.logs import LoggedNumbers
from lightning_graphs.lightning.oom import OomRecovery
from lightning_graphs.lightning.progress import ProgressValues
from lightning_graphs.lightning.ranks import Ranks
from lightning_graphs.lightning.strategy import StrategyCalls
from lightning_graphs.lightning.trainer import TrainerWatch
from lightning_graphs.policy.budget import MemoryBudget
from lightning_graphs.policy.options import Options
from lightning_graphs.policy.worth import CapturePolicy
from lightning_graphs.regions.gradients import KeptGradients
from lightning_graphs.regions.tolerance import Tolerance
from lightning_graphs.regions.verify import Verifier
from lightning_graphs.report.messages import Messages
from lightning_graphs.report.statistics import Statistics
from lightning_graphs.watch.reads import AttributeGuards
from lightning_graphs.watch.side_effects import Places
from lightning_graphs.watch.user_code import CompiledCode

_ARITHMETIC = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
"""What autocast computes in, by the name of a precision."""


@dataclass(frozen=True, slots=True)
class TrainingContext:
    """What every runner is made of."""

    trainer: Trainer
    module: LightningModule
    options: Options
    pool: GraphPool  # owner of graphs, memory and stream
    statistics: Statistics  # where decisions are counted
    messages: Messages  # tells the user
    progress: ProgressValues | None  # mirror of the values for the progress bar; None without a GPU
    investment: CapturePolicy  # decides what is worth a capture
    own: StrategyCalls  # the strategy's own methods
    budget: MemoryBudget  # what memory may be taken
    recovery: OomRecovery  # repeats a step that finds no memory
    ranks: Ranks  # does whole steps the same way on all ranks
    watch: TrainerWatch  # makes the environments of captures
    no_whole_step: str  # why its steps are no whole graphs; empty if they may be
    compiled: CompiledCode = field(default_factory=CompiledCode)

    def verifier(self) -> Verifier:
        """What compares graphs of this fit with eager runs."""
        arithmetic = _ARITHMETIC.get(str(self.trainer.precision_plugin.precision))
        tolerance = Tolerance(self.module.device.type, arithmetic)
        parts = self.budget, self.ranks, self.messages
        return Verifier(self.options.verify, tolerance, *parts, lambda: self.module.global_step)


class CaptureFacts:
    """What a fit has learned of its steps: it stays when their graphs are dropped."""

    def __init__(self, module: LightningModule, on_change: Callable[[], object]) -> None:
        self.reads = AttributeGuards()  # attributes that captured steps read
        self.places = Places(  # where steps store something
            module, self.reads, on_change, lambda: module.trainer.optimizers
        )
        self.logged = LoggedNumbers()  # Python numbers that change from step to step
        self.has_host_half = False  # captures record what steps compute on the host
        self.has_several_passes = False  # steps run backward passes inside of their own
        self.is_unseen = True  # libraries are not told of captures
        self.kept = KeptGradients()  # whether somebody keeps gradients past their step
