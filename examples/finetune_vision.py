"""A vision transformer, or a small ResNet, that learns handwritten digits with and without graphs.

Both fits start from the same seed; a table at the end shows whether they agree and, on a GPU, what
a step costs.

    python examples/finetune_vision.py
    python examples/finetune_vision.py --model resnet --epochs 8
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch
from helpers.comparison import EXIT_STATUS, Comparison, add_flags, compare, on_gpu, run, say
from helpers.digits import CLASSES, digits
from helpers.tensors import Batch, InMemory
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy
from transformers import ViTConfig, ViTForImageClassification


class VisionTransformer(nn.Module):
    """A ViT from transformers with random weights, over patches of 2x2 pixels."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        config = ViTConfig(
            image_size=8,
            patch_size=2,
            num_channels=1,
            num_labels=CLASSES,
            hidden_size=width,
            num_hidden_layers=depth,
            initializer_range=width**-0.5,
            num_attention_heads=width // 32,
            intermediate_size=4 * width,
        )
        self.vit = ViTForImageClassification(config)

    def forward(self, images: Tensor) -> Tensor:
        return self.vit(images).logits


class Block(nn.Module):
    """Two convolutions around which the input is added back."""

    def __init__(self, channels: int, new_channels: int) -> None:
        super().__init__()
        stride = 1 if channels == new_channels else 2
        self.layers = nn.Sequential(
            nn.Conv2d(channels, new_channels, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(new_channels),
            nn.ReLU(),
            nn.Conv2d(new_channels, new_channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(new_channels),
        )
        self.shortcut = nn.Identity() if stride == 1 else nn.Conv2d(channels, new_channels, 1, 2)

    def forward(self, features: Tensor) -> Tensor:
        return torch.relu(self.layers(features) + self.shortcut(features))


def resnet(width: int, depth: int) -> nn.Module:
    """Three stages of ``depth`` blocks, each with twice the channels of the one before."""
    layers: list[nn.Module] = [nn.Conv2d(1, width, 3, padding=1)]
    channels = width
    for stage in range(3):
        for _ in range(depth):
            layers.append(Block(channels, width << stage))
            channels = width << stage
    return nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, CLASSES)
    )


def make_model(name: str, gpu: bool) -> nn.Module:
    """The network by name: of a usual depth where a GPU trains it, otherwise a small one."""
    if name == "vit":
        return VisionTransformer(384, 12) if gpu else VisionTransformer(64, 3)
    return resnet(64, 3) if gpu else resnet(8, 1)


class ImageClassifier(LightningModule):
    """An ordinary module: nothing in it knows of graphs."""

    def __init__(self, model: nn.Module, learning_rate: float) -> None:
        super().__init__()
        self.model = model
        self.learning_rate = learning_rate
        # Checking the labels of every batch would read them on the host.
        self.accuracy = MulticlassAccuracy(CLASSES, average="micro", validate_args=False)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self.model(batch["images"]), batch["labels"])
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.accuracy(self.model(batch["images"]), batch["labels"])
        self.log("val_accuracy", self.accuracy, prog_bar=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.learning_rate, fused=True)
        steps = int(self.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


def train(options: argparse.Namespace) -> Comparison:
    """Trains twice, as the flags say."""
    gpu = on_gpu(options)
    train_rows, validation_rows = digits()
    say(f"{len(train_rows)} images to train on, {len(validation_rows)} to validate on")
    return compare(
        lambda: ImageClassifier(make_model(options.model, gpu), 5e-4 if gpu else 2e-3),
        lambda: InMemory(train_rows, validation_rows, options),
        options,
    )


def flags() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Train an image classifier with and without captured training steps. "
        f"{EXIT_STATUS}"
    )
    parser.add_argument(
        "--model",
        choices=("vit", "resnet"),
        default="vit",
        help="a vision transformer (default) or a residual network, with random weights",
    )
    add_flags(parser)
    return parser


def main() -> int:
    return run(flags(), train)


if __name__ == "__main__":
    sys.exit(main())
