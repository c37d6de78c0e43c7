"""Gradients of captured calls: where they live, and who may have them."""
