"""The :class:`~lightning_graphs.GraphCapture` that an environment variable adds to a trainer."""

from __future__ import annotations

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from typing_extensions import override

from lightning_graphs.training.callback import GraphCapture
from lightning_graphs.training.plugins import VARIABLE


class EnvironmentCapture(GraphCapture):
    """Leaves the trainer to one that the program names itself.

    A class of its own, because a trainer's other callbacks are known only once it is set up.
    """

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        others = [one for one in trainer.callbacks if one is not self]  # type: ignore[attr-defined]
        if any(isinstance(one, GraphCapture) for one in others):
            # Lightning goes on with the list that it has begun, and finds this one in the next.
            trainer.callbacks = others  # type: ignore[attr-defined]
            rank_zero_info(
                f"{VARIABLE} is set, and the trainer has a GraphCapture of its own: that one is "
                "used."
            )
            return
        super().setup(trainer, pl_module, stage)
