"""The client of PyTorch Lightning: its callback, and all that speaks of a Trainer."""
