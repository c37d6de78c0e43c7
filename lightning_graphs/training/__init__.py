"""Graph capture under Lightning's Trainer; docs/design.md says what lives where."""

from lightning_graphs.training import words as words
