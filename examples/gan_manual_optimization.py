"""A GAN with manual optimization that draws handwritten digits, with and without graphs.

Two networks, two optimizers and a training step that calls each of them itself: forward and
backward passes of both networks and the steps of both optimizers become one graph.

    python examples/gan_manual_optimization.py
    python examples/gan_manual_optimization.py --epochs 40 --batch-size 128
"""

from __future__ import annotations

import argparse
import sys

import torch
from helpers.comparison import EXIT_STATUS, Comparison, add_flags, compare, on_gpu, run, say
from helpers.digits import digits
from helpers.tensors import Batch, InMemory
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torchmetrics.classification import BinaryAccuracy

PIXELS = 64
NOISE = 32


def perceptron(inputs: int, width: int, outputs: int) -> nn.Sequential:
    """Two hidden layers."""
    return nn.Sequential(
        nn.Linear(inputs, width),
        nn.LeakyReLU(0.2),
        nn.Linear(width, width),
        nn.LeakyReLU(0.2),
        nn.Linear(width, outputs),
    )


class GAN(LightningModule):
    """An ordinary module: nothing in it knows of graphs."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(perceptron(NOISE, width, PIXELS), nn.Tanh())
        self.discriminator = perceptron(PIXELS, width, 1)
        self.accuracy = BinaryAccuracy(validate_args=False)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        real = batch["images"].flatten(1)
        generator, discriminator = self.optimizers()

        self.toggle_optimizer(discriminator)
        drawn = self.generator(self._noise(real)).detach()
        loss = _judged(self.discriminator(real), 1.0) + _judged(self.discriminator(drawn), 0.0)
        discriminator.zero_grad()
        self.manual_backward(loss)
        discriminator.step()
        self.untoggle_optimizer(discriminator)

        self.toggle_optimizer(generator)
        fooled = _judged(self.discriminator(self.generator(self._noise(real))), 1.0)
        generator.zero_grad()
        self.manual_backward(fooled)
        generator.step()
        self.untoggle_optimizer(generator)

        self.log_dict({"discriminator": loss, "generator": fooled}, prog_bar=True)
        return loss.detach()

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """How often the discriminator tells real from drawn: a half, if the drawings are good."""
        real = batch["images"].flatten(1)
        for images, is_real in ((real, 1), (self.generator(self._noise(real)), 0)):
            verdict = self.discriminator(images)[:, 0]
            self.accuracy(verdict, torch.full_like(verdict, is_real, dtype=torch.long))
        self.log("val_accuracy", self.accuracy, prog_bar=True)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [
            torch.optim.Adam(part.parameters(), lr=1e-3, betas=(0.5, 0.999), fused=True)
            for part in (self.generator, self.discriminator)
        ]

    def _noise(self, images: Tensor) -> Tensor:
        return torch.randn(len(images), NOISE, device=images.device)


def _judged(verdict: Tensor, truth: float) -> Tensor:
    return binary_cross_entropy_with_logits(verdict, torch.full_like(verdict, truth))


def train(options: argparse.Namespace) -> Comparison:
    """Trains twice, as the flags say."""
    train_rows, validation_rows = digits()
    say(f"{len(train_rows)} images to train on, {len(validation_rows)} to validate on")
    return compare(
        lambda: GAN(1024 if on_gpu(options) else 128),
        lambda: InMemory(train_rows, validation_rows, options),
        options,
    )


def flags() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=f"Train a GAN with manual optimization, with and without graphs. {EXIT_STATUS}"
    )
    add_flags(parser)
    return parser


def main() -> int:
    return run(flags(), train)


if __name__ == "__main__":
    sys.exit(main())
