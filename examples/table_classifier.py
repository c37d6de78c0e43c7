"""A residual network that learns a table, with all that a training script has around the step.

Validation with metrics, a learning rate that warms up and falls, gradient clipping, dropout, batch
normalization, and a checkpoint of the best epoch: a small network whose kernels take a fraction of
the time in which Python launches them. The script trains twice, compares every loss and both
checkpoints bit by bit, and prints how long both fits took, everything included.

    python examples/table_classifier.py
    python examples/table_classifier.py --epochs 30 --depth 24
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from helpers.comparison import EXIT_STATUS, Comparison, add_flags, compare, on_gpu, run, say
from helpers.tensors import Batch, InMemory, Rows
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torchmetrics.classification import BinaryAccuracy, BinaryAUROC

NUMBERS = 24
CATEGORIES = (8, 16, 32, 5)
"""How many values each category has."""

WARM_UP = 0.1
"""The part of the steps in which the learning rate rises."""


class Block(nn.Module):
    """Two layers around which the input is added back."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.BatchNorm1d(width),
            nn.Linear(width, 2 * width),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Linear(2 * width, width),
            nn.Dropout(0.1),
        )

    def forward(self, features: Tensor) -> Tensor:
        return features + self.layers(features)


class TableNet(nn.Module):
    """A residual network over numbers and embedded categories (arXiv 2106.11959)."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.embeddings = nn.ModuleList(nn.Embedding(count, 8) for count in CATEGORIES)
        self.first = nn.Linear(NUMBERS + 8 * len(CATEGORIES), width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(depth)))
        self.last = nn.Sequential(nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 1))

    def forward(self, numbers: Tensor, categories: Tensor) -> Tensor:
        embedded = [
            embedding(column)
            for embedding, column in zip(self.embeddings, categories.unbind(1), strict=True)
        ]
        features = self.first(torch.cat([numbers, *embedded], dim=1))
        return self.last(self.blocks(features)).squeeze(1)


class TableClassifier(LightningModule):
    """An ordinary module: nothing in it knows of graphs."""

    def __init__(self, net: TableNet, learning_rate: float) -> None:
        super().__init__()
        self.net = net
        self.learning_rate = learning_rate
        # Checking the labels of every batch would read them on the host.
        self.accuracy = BinaryAccuracy(validate_args=False)
        self.auroc = BinaryAUROC(thresholds=64, validate_args=False)

    def forward(self, batch: Batch) -> Tensor:
        return self.net(batch["numbers"], batch["categories"])

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        scores = self(batch)
        loss = nn.functional.binary_cross_entropy_with_logits(scores.float(), batch["labels"])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        scores, labels = self(batch).float().sigmoid(), batch["labels"].long()
        self.accuracy(scores, labels)
        self.auroc(scores, labels)
        self.log("val_accuracy", self.accuracy, prog_bar=True)
        self.log("val_auroc", self.auroc)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(
            self.parameters(), lr=self.learning_rate, weight_decay=0.01, fused=True
        )
        scheduler = torch.optim.lr_scheduler.OneCycleLR(
            optimizer,
            self.learning_rate,
            int(self.trainer.estimated_stepping_batches),
            pct_start=WARM_UP,
            cycle_momentum=False,
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


def table(rows: int, seed: int) -> Rows:
    """Rows with a label that follows from numbers, their products, and a category.

    ``numbers`` f32[rows, 24], ``categories`` i64[rows, 4], ``labels`` f32[rows].
    """
    draw = torch.Generator().manual_seed(seed)
    numbers = torch.randn(rows, NUMBERS, generator=draw)
    columns = [torch.randint(0, count, (rows,), generator=draw) for count in CATEGORIES]
    score = numbers[:, 0] * numbers[:, 1] + numbers[:, 2].abs() - 0.8
    score += numbers[:, 4] - numbers[:, 5]
    score += (columns[0] % 3 - 1.0) * numbers[:, 3] + 0.3 * torch.randn(rows, generator=draw)
    return Rows(numbers=numbers, categories=torch.stack(columns, 1), labels=(score > 0).float())


def train(options: argparse.Namespace) -> Comparison:
    """Trains twice, as the flags say, and compares the checkpoints."""
    gpu = on_gpu(options)
    width, depth, rows = (128, options.depth, 2**16) if gpu else (32, 2, 2**12)
    train_rows, validation_rows = table(rows, 0), table(rows // 8, 1)
    say(f"{len(train_rows)} rows to train on, {len(validation_rows)} to validate on")
    with TemporaryDirectory() as folder:
        saved: list[ModelCheckpoint] = []

        def callbacks() -> list[Callback]:
            path = Path(folder) / str(len(saved))
            saved.append(ModelCheckpoint(path, monitor="val_accuracy", mode="max"))
            return [saved[-1]]

        result = compare(
            lambda: TableClassifier(TableNet(width, depth), 2e-3),
            lambda: InMemory(train_rows, validation_rows, options),
            options,
            callbacks=callbacks,
            trainer={"gradient_clip_val": 1.0},
        )
        best = [best_of(one.best_model_path) for one in saved[-2:]]
        if all(best):
            result.same_checkpoint = equal(*best)
    return result


def best_of(path: str) -> dict[str, Any]:
    """What a checkpoint has of the network and of the optimizer; nothing without one."""
    if not Path(path).is_file():  # the fit has ended ahead of the first validation
        return {}
    saved = torch.load(path, weights_only=True, map_location="cpu")
    states = saved["optimizer_states"][0]["state"]
    return {**saved["state_dict"], **{f"{i}.{k}": v for i in states for k, v in states[i].items()}}


def equal(first: dict[str, Any], second: dict[str, Any]) -> bool:
    """Whether both have the same tensors under the same names."""
    pairs = ((first[name], second[name]) for name in first)
    return first.keys() == second.keys() and all(torch.equal(a, b) for a, b in pairs)


def flags() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Train a residual network over a table with and without captured steps, and "
        f"time both fits. {EXIT_STATUS}"
    )
    parser.add_argument(
        "--depth", type=int, default=16, help="blocks on a GPU (default: %(default)s)"
    )
    add_flags(parser)
    # Lightning clips no gradients of a fused optimizer in mixed precision
    parser.set_defaults(epochs=10, batch_size=512, precision="32-true")
    return parser


def main() -> int:
    return run(flags(), train)


if __name__ == "__main__":
    sys.exit(main())
