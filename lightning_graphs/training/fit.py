"""What a fit has in common for all that runs its steps."""

from __future__ import annotations

from dataclasses import dataclass

from lightning.pytorch import LightningModule, Trainer

from lightning_graphs.core.pool import GraphPool
from lightning_graphs.training.investment import Investment
from lightning_graphs.training.options import Options
from lightning_graphs.training.progress import ProgressValues
from lightning_graphs.training.ranks import Ranks
from lightning_graphs.training.retry import EagerRetry
from lightning_graphs.training.statistics import Statistics


@dataclass(frozen=True, slots=True)
class Fit:
    """What every runner is made of."""

    trainer: Trainer
    module: LightningModule
    options: Options
    pool: GraphPool  # owner of graphs, memory and stream
    statistics: Statistics  # where decisions are counted
    progress: ProgressValues | None  # mirror of the values for the progress bar; None without a GPU
    investment: Investment  # decides what is worth a capture
    retry: EagerRetry  # has the strategy's own methods, and repeats a step that finds no memory
    ranks: Ranks  # does whole steps the same way on all ranks
