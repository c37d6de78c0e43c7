"""scikit-learn's handwritten digits: 1797 images of 8x8 pixels, which come with the package."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits

from helpers.tensors import Rows

CLASSES = 10
VALIDATION_EVERY = 4
"""One image of so many is for validation; the data set is in no order."""


def digits() -> tuple[Rows, Rows]:
    """Images to train and to validate on, as ``images`` f32[N, 1, 8, 8] in -1..1, ``labels``."""
    loaded = load_digits()
    images = torch.from_numpy(loaded.images).float()[:, None] / 8.0 - 1.0
    labels = torch.from_numpy(loaded.target).long()
    held_out = torch.arange(len(labels)) % VALIDATION_EVERY == VALIDATION_EVERY - 1
    train, validation = (
        Rows(images=images[part], labels=labels[part]) for part in (~held_out, held_out)
    )
    return train, validation
