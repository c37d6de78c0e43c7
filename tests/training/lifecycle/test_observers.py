"""Who looks at a step while it is under way, and who takes part in moving its batch."""

from __future__ import annotations

from typing import Any

import pytest
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer

from lightning_graphs.lightning.words import moves_batches_itself, observers_of
from tests.training.fits import Net


class Augmenting(Net):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch


class Moving(LightningDataModule):
    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        return batch


class Looking(Callback):
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Looks at gradients."""


class Zeroing(Net):
    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)


def _trainer(*callbacks: Callback) -> Trainer:
    return Trainer(
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=list(callbacks),
    )


@pytest.mark.parametrize(
    ("module", "data", "expected"),
    [(Net, None, False), (Augmenting, None, True), (Net, Moving, True)],
)
def test_code_of_the_user_that_moves_batches(module: Any, data: Any, expected: bool) -> None:
    trainer = _trainer()
    if data is not None:
        trainer.datamodule = data()
    assert moves_batches_itself(trainer, module()) is expected


def test_observers_are_named_with_their_hooks() -> None:
    none = observers_of(_trainer(), Net())
    assert (none.before_backward, none.before_step, none.own_zero_grad) == ((), (), False)
    found = observers_of(_trainer(Looking()), Zeroing())
    assert found.before_backward == ("Zeroing.optimizer_zero_grad",)
    assert found.before_step == ("Looking.on_after_backward",)
    assert found.own_zero_grad
