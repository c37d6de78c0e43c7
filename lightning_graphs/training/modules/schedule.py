"""When graphs of submodules are verified, again and again where that was asked for."""

from __future__ import annotations

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_warn

from lightning_graphs.training.memory import MemoryBudget
from lightning_graphs.training.options import Options
from lightning_graphs.training.warned import stacklevel_of_user


class Schedule:
    """Which steps are verified, and what could not be; one for all checks of a fit.

    Args:
        root: The user's module, attached to its trainer.
        options: The callback's options.
        budget: What memory may be taken.
    """

    def __init__(self, root: LightningModule, options: Options, budget: MemoryBudget) -> None:
        self.root = root
        self.budget = budget
        self.is_on = options.verify != "off"
        self._every = options.verify if isinstance(options.verify, int) else 0
        self._said: set[str] = set()

    @property
    def where(self) -> str:
        """The present step, in words."""
        return f"at step {self.root.global_step}"

    @property
    def is_due(self) -> bool:
        """Whether graphs that were verified before are verified again in this step."""
        return self._every > 0 and self.root.global_step % self._every == 0

    def say(self, line: str, reason: str = "") -> None:
        """Warn, once in a fit for each line, that a check was smaller than it should be."""
        if line not in self._said:
            self._said.add(line)
            rank_zero_warn(
                f"GraphCapture: {line}{reason and f': {reason}'}", stacklevel=stacklevel_of_user()
            )
