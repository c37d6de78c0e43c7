"""What a precision plugin does to a step, inside of a capture."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch.plugins.precision import Precision


@contextlib.contextmanager
def without_autocast_cache(plugin: Precision) -> Iterator[None]:
    """Keep autocast from caching the casts of weights, whatever the plugin says.

    A cached cast would be made by one graph and read by another, or by eager code.
    """
    manager = getattr(plugin, "autocast_context_manager", None)
    if manager is None:
        yield
        return

    @contextlib.contextmanager
    def uncached() -> Iterator[None]:
        with manager():
            torch.set_autocast_cache_enabled(False)
            yield

    vars(plugin)["autocast_context_manager"] = uncached
    try:
        yield
    finally:
        del vars(plugin)["autocast_context_manager"]


def scaler_of(plugin: Precision) -> torch.amp.GradScaler | None:
    """The gradient scaler of ``precision="16-mixed"``."""
    scaler: Any = getattr(plugin, "scaler", None)
    return scaler if isinstance(scaler, torch.amp.GradScaler) else None
