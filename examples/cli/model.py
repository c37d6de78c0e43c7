"""A small convolutional network and scikit-learn's handwritten digits, as Lightning has them."""

from __future__ import annotations

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class DigitClassifier(LightningModule):
    """Two convolutions and a head.

    Args:
        width: Channels of the convolutions.
        learning_rate: Of AdamW.
    """

    def __init__(self, width: int = 32, learning_rate: float = 2e-3) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        self.layers = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(16 * width, 10),
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        loss = nn.functional.cross_entropy(self.layers(images), labels)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        images, labels = batch
        correct = self.layers(images).argmax(1) == labels
        self.log("val_accuracy", correct.float().mean(), prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate, fused=True)


class DigitImages(LightningDataModule):
    """1797 images of 8x8 pixels, every fourth one for validation.

    Args:
        batch_size: Images in a batch.
    """

    def __init__(self, batch_size: int = 32) -> None:
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        digits = load_digits()
        images = torch.from_numpy(digits.images).float()[:, None] / 8.0 - 1.0
        labels = torch.from_numpy(digits.target).long()
        held_out = torch.arange(len(labels)) % 4 == 3
        self.training = TensorDataset(images[~held_out], labels[~held_out])
        self.validation = TensorDataset(images[held_out], labels[held_out])

    def train_dataloader(self) -> DataLoader[list[Tensor]]:
        return DataLoader(self.training, self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[list[Tensor]]:
        return DataLoader(self.validation, self.batch_size)
