"""Trainers of ``pytorch_lightning``: its own class, and that of ``lightning.pytorch``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_graphs
from lightning_graphs.lightning.runner import StepRunner
from lightning_graphs.lightning.words import moves_batches_itself, observers_of
from lightning_graphs.regions.conditions import Observers
from tests.training.fits import batches, close

pl = pytest.importorskip("pytorch_lightning")

from lightning_graphs.pytorch_lightning import GraphCapture  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning")


class Net(pl.LightningModule):  # type: ignore[misc, name-defined]
    """A classifier with dropout on ``{"x": f32[N, 8], "y": i64[N]}``."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.25), nn.Linear(16, 3))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self.net(batch["x"]), batch["y"])
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=2**-7, fused=True)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(batches(), batch_size=None)  # type: ignore[arg-type]


def fit(backend: str, root: Path, callbacks: Any) -> Any:
    """A fitted trainer."""
    pl.seed_everything(1, verbose=False)
    trainer = pl.Trainer(
        max_epochs=2,
        accelerator="gpu" if backend == "cuda" else "cpu",
        devices=1,
        logger=False,
        log_every_n_steps=1,
        gradient_clip_val=0.5,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=str(root),
        callbacks=callbacks,
    )
    trainer.fit(Net())
    return trainer


@pytest.mark.parametrize("kind", [GraphCapture, lightning_graphs.GraphCapture])
def test_a_fit_equals_the_eager_one(
    backend: str, tmp_path: Path, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    replayed: list[object] = []
    replay = StepRunner.replay
    monkeypatch.setattr(
        StepRunner, "replay", lambda *a, **k: replayed.append(replay(*a, **k)) or replayed[-1]
    )
    eager = fit(backend, tmp_path, [])
    graphs = kind(backend=backend, on_failure="raise")
    captured = fit(backend, tmp_path, [graphs])
    done = graphs.report
    assert (done.replayed, done.fallbacks) == (15, ())
    assert captured.global_step == eager.global_step == 20
    assert backend == "cuda" or len([r for r in replayed if r is not None]) > 2  # its loop is short
    close(captured.lightning_module.state_dict(), eager.lightning_module.state_dict(), 0, "module")
    close(dict(captured.callback_metrics), dict(eager.callback_metrics), 0, "metrics")


def test_it_is_a_callback_of_both() -> None:
    graphs = GraphCapture(max_graphs=3)
    assert isinstance(graphs, pl.Callback)
    assert isinstance(graphs, lightning_graphs.GraphCapture)
    assert graphs.options.max_graphs == 3
    # Without a list, a trainer takes callbacks of its own class only.
    assert graphs in pl.Trainer(accelerator="cpu", logger=False, callbacks=graphs).callbacks


def test_its_command_line_takes_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("jsonargparse")
    from pytorch_lightning.cli import LightningCLI

    # Lightning 2.6 names an instantiator as newer versions of jsonargparse no longer do.
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
    monkeypatch.setattr(sys, "argv", ["train.py"])
    arguments = [
        "--trainer.accelerator=cpu",
        "--trainer.logger=false",
        f"--trainer.default_root_dir={tmp_path}",
        "--trainer.callbacks+=lightning_graphs.pytorch_lightning.GraphCapture",
        "--trainer.callbacks.max_graphs=3",
    ]
    cli = LightningCLI(Net, args=arguments, run=False, seed_everything_default=0)
    [graphs] = [one for one in cli.trainer.callbacks if isinstance(one, GraphCapture)]
    assert graphs.options.max_graphs == 3


def test_its_base_classes_do_not_look_at_a_step(tmp_path: Path) -> None:
    trainer = pl.Trainer(accelerator="cpu", logger=False, default_root_dir=str(tmp_path))
    assert observers_of(trainer, Net()) == Observers((), (), own_zero_grad=False)
    assert not moves_batches_itself(trainer, Net())
