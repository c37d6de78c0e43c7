"""Graphs of several shapes take the memory of one: gradients of one lie where others compute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_graphs import GraphCapture

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:.*does not have many workers")]
MIB = 2**20
WIDTH, LAYERS = 1536, 8
GRADIENTS = LAYERS * WIDTH * WIDTH * 4


class Wide(LightningModule):
    """72 MiB of gradients, beside which activations are small."""

    sizes = (4, 4, 4, 4, 4, 4, 6, 6, 6, 8, 8, 8, 4, 6, 8, 8, 6, 4, 5, 4, 6)

    def __init__(self) -> None:
        super().__init__()
        layers = [[nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh()] for _ in range(LAYERS)]
        self.net = nn.Sequential(*(part for layer in layers for part in layer))
        self.seen: list[tuple[float, float]] = []
        self.reserved: list[int] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(batch).square().mean()
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        norms = [p.grad.double().sum() for p in self.parameters() if p.grad is not None]
        self.seen.append((float(outputs["loss"]), float(torch.stack(norms).sum())))
        self.reserved.append(torch.cuda.memory_reserved())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=2**-4)


class InPairs(Wide):
    sizes = (4,) * 10 + (6,) * 6 + (8,) * 6 + (4, 4, 6, 6, 8, 8, 8, 8, 4, 4, 6, 6)


class Large(Wide):
    """800 MiB of activations."""

    sizes = (8192,) * 8


def fit(path: Path, *callbacks: GraphCapture, kind: type[Wide] = Wide, **options: Any) -> Wide:
    seed_everything(1, verbose=False)
    module = kind()
    trainer = Trainer(
        accelerator="gpu",
        devices=1,
        max_epochs=1,
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=path,
        **options,
    )
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    batches = [torch.randn(size, WIDTH) for size in kind.sizes]
    trainer.fit(module, DataLoader(batches, batch_size=None))
    return module


@pytest.mark.parametrize(
    "options", [{}, {"kind": InPairs, "accumulate_grad_batches": 2}], ids=["each", "two"]
)
def test_shapes_in_turn_leave_the_gradients_of_eager_steps(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    graphs = GraphCapture(scope="step", only_if_faster=False)
    eager, captured = fit(tmp_path, **options), fit(tmp_path, graphs, **options)
    assert graphs._statistics.captures >= 3
    assert captured.seen == eager.seen
    for ours, theirs in zip(captured.parameters(), eager.parameters(), strict=True):
        assert torch.equal(ours, theirs)
        assert ours.grad is not None
        assert theirs.grad is not None
        assert torch.equal(ours.grad, theirs.grad)  # the graphs are gone


def test_a_further_shape_takes_no_gradients_of_its_own(tmp_path: Path) -> None:
    graphs = GraphCapture(scope="step", only_if_faster=False, verify=False)
    captured = fit(tmp_path, graphs)
    assert graphs._statistics.captures == 3
    first = captured.reserved[5]  # after the first shape was replayed
    assert captured.reserved[17] - first < GRADIENTS // 2


def test_a_check_takes_the_memory_of_the_graphs(tmp_path: Path) -> None:
    eager = fit(tmp_path, kind=Large)
    peak = torch.cuda.max_memory_reserved()
    graphs = GraphCapture(scope="step", only_if_faster=False)
    captured = fit(tmp_path, graphs, kind=Large)
    assert captured.seen == eager.seen
    assert graphs._statistics.captures == 1
    assert torch.cuda.max_memory_reserved() < 1.35 * peak
