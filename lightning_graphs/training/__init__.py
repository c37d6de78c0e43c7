"""Graph capture under Lightning's Trainer: policy and hooks over the graph core."""
