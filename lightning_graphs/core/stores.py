"""Attributes that captured code sets: a replay runs none of it, and sets them again."""

from __future__ import annotations

from typing import Any

from torch import nn

Stores = tuple[tuple[nn.Module, str, Any], ...]
"""Module, name and value of each attribute; the values are plain ones."""


def set_again(stores: Stores) -> None:
    """Set these attributes, past whatever the module makes of it: that has run at capture."""
    for module, name, value in stores:
        vars(module)[name] = value
