"""What was written by an earlier version of the package goes on working: checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_graphs import GraphCapture

WRITTEN = Path(__file__).with_name("checkpoint.json")
"""A checkpoint of the module below after an epoch with graphs, as the package wrote it before its
folders were exchanged (e1c67be), and the module's state after two more epochs there."""


class Written(LightningModule):
    """The module of the checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(2, 1)
        self.register_buffer("seen", torch.zeros(()))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.net(batch).square().mean()
        self.seen.add_(1)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=2**-4)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return [optimizer], [{"scheduler": scheduler, "interval": "epoch"}]


def read(value: Any) -> Any:
    """A part of the file, as it was before it became text."""
    if isinstance(value, list):
        return list(map(read, value))
    if not isinstance(value, dict):
        return value
    [(kind, inside)] = value.items()
    if kind == "tensor":
        return torch.tensor(inside)
    if kind == "tuple":
        return tuple(map(read, inside))
    return {key: read(entry) for key, entry in inside}


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.parametrize("captured", [True, False], ids=["with graphs", "without"])
def test_a_checkpoint_resumes(backend: str, tmp_path: Path, captured: bool) -> None:
    written = {name: read(part) for name, part in json.loads(WRITTEN.read_text("utf-8")).items()}
    torch.save(written["checkpoint"], path := tmp_path / "written.ckpt")
    graphs = GraphCapture(backend=backend, on_failure="raise", min_repeats=2)  # type: ignore[arg-type]
    trainer = Trainer(
        max_epochs=3,
        accelerator="cpu" if backend == "emulated" else "gpu",
        devices=1,
        callbacks=[graphs] if captured else [],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module, batches = Written(), torch.stack([torch.arange(i, i + 4) for i in range(0, 16, 2)])
    loader = DataLoader(batches.reshape(8, 2, 2) / 8, batch_size=None)
    trainer.fit(module, loader, ckpt_path=path, weights_only=False)
    assert trainer.global_step == 24
    assert graphs.report.replayed == (11 if captured else 0)
    for name, value in module.state_dict().items():
        torch.testing.assert_close(value.cpu(), written["after"][name], rtol=1e-5, atol=1e-6)
