"""The context of a fit: what every runner is made of, and what it learns of its steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lightning.pytorch import LightningModule, Trainer

from lightning_graphs.core.graph import GraphPool
from lightning_graphs.training.costs.investment import Investment
from lightning_graphs.training.guards.python_state import AttributeReads
from lightning_graphs.training.host.logs import LoggedNumbers
from lightning_graphs.training.host.places import Places
from lightning_graphs.training.host.progress import ProgressValues
from lightning_graphs.training.options import Options
from lightning_graphs.training.ranks import Ranks
from lightning_graphs.training.retry import EagerRetry
from lightning_graphs.training.statistics import Statistics
from lightning_graphs.training.step.gradients import KeptGradients


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


class Learned:
    """What a fit has learned of its steps: it stays when their graphs are dropped."""

    def __init__(self, module: LightningModule, on_change: Callable[[], object]) -> None:
        self.reads = AttributeReads()  # attributes that captured steps read
        self.places = Places(module, self.reads, on_change)  # where steps store something
        self.logged = LoggedNumbers()  # Python numbers that change from step to step
        self.has_host_half = False  # captures record what steps compute on the host
        self.has_several_passes = False  # steps run backward passes inside of their own
        self.is_unseen = True  # libraries are not told of captures
        self.kept = KeptGradients()  # whether somebody keeps gradients past their step
