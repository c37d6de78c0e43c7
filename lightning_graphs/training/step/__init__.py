"""A whole training step: its capture, its graphs, and the way of a step through them."""
