"""Chosen submodules as graphs of their own: what ``scope="modules"`` does."""
