"""The context of a fit under Lightning: what its runners have besides the regions."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from lightning.pytorch import Trainer

from lightning_graphs.lightning import words as words  # whose import tells the engine
from lightning_graphs.lightning.oom import OomRecovery
from lightning_graphs.lightning.progress import ProgressValues
from lightning_graphs.lightning.trainer import TrainerWatch
from lightning_graphs.regions.context import TrainingContext
from lightning_graphs.regions.tolerance import Tolerance
from lightning_graphs.regions.verify import Verifier

_ARITHMETIC = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
"""What autocast computes in, by the name of a precision."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LightningContext(TrainingContext):
    """What every runner is made of."""

    trainer: Trainer
    recovery: OomRecovery  # repeats a step that finds no memory
    watch: TrainerWatch
    progress: ProgressValues | None  # mirror of the values for the progress bar; None without a GPU

    def verifier(self) -> Verifier:
        """What compares graphs of this fit with eager runs."""
        arithmetic = _ARITHMETIC.get(str(self.trainer.precision_plugin.precision))
        tolerance = Tolerance(self.module.device.type, arithmetic)
        parts = self.budget, self.ranks, self.messages
        return Verifier(self.options.verify, tolerance, *parts, lambda: self.module.global_step)
