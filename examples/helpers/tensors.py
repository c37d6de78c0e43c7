"""Data that is a few tensors in memory, handed out in whole batches."""

from __future__ import annotations

import argparse
from functools import partial

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from helpers.comparison import on_gpu

Batch = dict[str, Tensor]


class Rows(Dataset[Batch]):
    """Named tensors of one length, indexed by whole batches."""

    def __init__(self, **tensors: Tensor) -> None:
        self.tensors = tensors

    def __len__(self) -> int:
        return len(next(iter(self.tensors.values())))

    def __getitems__(self, indices: list[int]) -> Batch:
        return {name: tensor[indices] for name, tensor in self.tensors.items()}


class InMemory(LightningDataModule):
    """Loaders over both parts; the order of the batches depends on the seed alone."""

    def __init__(self, train: Rows, validation: Rows, options: argparse.Namespace) -> None:
        super().__init__()
        self._train, self._validation = train, validation
        self._generator = torch.Generator().manual_seed(options.seed)
        self._loader = partial(
            DataLoader,
            batch_size=options.batch_size,
            collate_fn=_as_it_is,
            pin_memory=on_gpu(options),
        )

    def train_dataloader(self) -> DataLoader[Batch]:
        return self._loader(self._train, shuffle=True, generator=self._generator)

    def val_dataloader(self) -> DataLoader[Batch]:
        return self._loader(self._validation)


def _as_it_is(batch: Batch) -> Batch:
    return batch
