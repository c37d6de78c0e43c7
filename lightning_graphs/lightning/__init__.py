"""The client of PyTorch Lightning: its callback, and all that speaks of a Trainer."""

from lightning_graphs.lightning import words as words
