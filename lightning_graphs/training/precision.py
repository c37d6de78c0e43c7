"""What a precision plugin does to a step, inside of a capture."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch.plugins.precision import Precision
from torch.optim import Optimizer

from lightning_graphs.core.torch_private import scaling_states
from lightning_graphs.training.interception import replaced

_UNSCALES_ITSELF = "_step_supports_amp_scaling"
"""The attribute by which torch's GradScaler and Lightning know a fused optimizer."""


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

    with replaced(plugin, "autocast_context_manager", uncached):
        yield


def scaler_of(plugin: Precision) -> torch.amp.GradScaler | None:
    """The gradient scaler of ``precision="16-mixed"``."""
    scaler: Any = getattr(plugin, "scaler", None)
    return scaler if isinstance(scaler, torch.amp.GradScaler) else None


def unscales(plugin: Precision, optimizer: Optimizer) -> bool:
    """Whether the plugin divides gradients by the loss scale, before hooks and clipping.

    An optimizer that was made fused unscales its gradients itself, and its hooks see scaled ones.
    """
    return scaler_of(plugin) is not None and not getattr(optimizer, _UNSCALES_ITSELF, False)


def scaling_state(plugin: Precision, optimizer: Optimizer) -> dict[str, Any]:
    """What the scaler knows of a step that is under way; nothing where there is none.

    A capture asks first, and fails where torch does not tell.
    """
    scaler = scaler_of(plugin)
    return {} if scaler is None else dict(scaling_states(scaler)[id(optimizer)])


def resume_scaling(plugin: Precision, optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Let the scaler go on from what :func:`scaling_state` gave."""
    scaler = scaler_of(plugin)
    if scaler is not None:
        scaling_states(scaler)[id(optimizer)] = dict(state)


def unscale(plugin: Precision, optimizer: Optimizer) -> None:
    """Divide the gradients by the loss scale, where the plugin does."""
    scaler = scaler_of(plugin)
    if scaler is not None and unscales(plugin, optimizer):
        scaler.unscale_(optimizer)


@contextlib.contextmanager
def stepping_on_the_device(optimizer: Optimizer) -> Iterator[None]:
    """Let the scaler hand ``found_inf`` to the fused kernel instead of reading it.

    It does so for optimizers that were constructed with ``fused=True``; for those that we made
    fused it would call ``.item()``, which ends a capture.
    """
    before = getattr(optimizer, _UNSCALES_ITSELF, False)
    setattr(optimizer, _UNSCALES_ITSELF, True)
    try:
        yield
    finally:
        setattr(optimizer, _UNSCALES_ITSELF, before)
