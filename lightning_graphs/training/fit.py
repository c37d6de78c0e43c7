"""The context of a fit: what every runner is made of, and what it learns of its steps."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from lightning.pytorch import LightningModule, Trainer

from lightning_graphs.core.graph import GraphPool
from lightning_graphs.core.private.torch import compiled_code_noticed
from lightning_graphs.training.costs.investment import Investment
from lightning_graphs.training.costs.memory import MemoryBudget
from lightning_graphs.training.guards.python_state import AttributeReads
from lightning_graphs.training.host.logs import LoggedNumbers
from lightning_graphs.training.host.places import Places
from lightning_graphs.training.host.progress import ProgressValues
from lightning_graphs.training.interception import StrategyCalls
from lightning_graphs.training.options import Options
from lightning_graphs.training.ranks import Ranks
from lightning_graphs.training.retry import OomRecovery
from lightning_graphs.training.statistics import Statistics
from lightning_graphs.training.step.gradients import KeptGradients


class CompiledCode:
    """Whether the steps of a fit call what ``torch.compile`` has made.

    Such code has no host half, checks the functions and classes that it was compiled with, and is
    compiled anew where these are others. What the rest of the process has compiled does not count.
    """

    runs = False

    def watching(self) -> AbstractContextManager[None]:
        """Look at the body, an eager step or the capture of one, until that is known."""
        return nullcontext() if self.runs else compiled_code_noticed(self._note)

    def _note(self) -> None:
        self.runs = True


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
    own: StrategyCalls  # the strategy's own methods
    budget: MemoryBudget  # what memory may be taken
    recovery: OomRecovery  # repeats a step that finds no memory
    ranks: Ranks  # does whole steps the same way on all ranks
    compiled: CompiledCode = field(default_factory=CompiledCode)


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
