"""Tells what no graph can hold, before anything is captured: whole steps, and modules."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn

from lightning_graphs.core.private.torch import makes_own_graphs, module_hooks

_OWN_GRAPHS = (
    "is compiled to CUDA graphs of its own, which no graph can hold; write torch.compile(...) "
    "without mode, or mode='max-autotune-no-cudagraphs'"
)


def why_no_whole_step(trainer: Trainer, module: LightningModule) -> str:
    """Why the steps of a fit are no whole graphs, in one sentence; empty if they may be."""
    if (obstacle := obstacle_in(module)) is not None:
        return obstacle
    if not module.automatic_optimization:
        return "the module optimizes manually, and scope='step' needs automatic optimization"
    if len(trainer.optimizers) != 1:
        return f"scope='step' needs one optimizer, and there are {len(trainer.optimizers)}"
    if isinstance(trainer.optimizers[0], torch.optim.LBFGS):
        return "LBFGS calls the training step several times for each update"
    return ""


def obstacle_in(module: nn.Module) -> str | None:
    """Why no graph can hold a module, or one inside of it, in a sentence; None if one can."""
    for owner in with_own_graphs(module):
        return f"`{owner}` {_OWN_GRAPHS}"
    return None


def with_own_graphs(module: nn.Module) -> Iterator[str]:
    """Qualified names of the submodules and attributes that ``torch.compile`` gave own graphs."""
    for name, inner in module.named_modules():
        if makes_own_graphs(inner):
            yield name or type(inner).__name__
            continue
        for attribute, value in vars(inner).items():
            if callable(value) and not isinstance(value, nn.Module) and makes_own_graphs(value):
                where = name if attribute == "_compiled_call_impl" else f"{name}.{attribute}"
                yield where.strip(".") or type(inner).__name__


def bound_by_hooks(root: nn.Module) -> dict[str, str]:
    """Weights that old hooks of ``torch.nn.utils`` bind anew in each call, and what to do.

    ``weight_norm``, ``spectral_norm`` and pruning set a plain attribute, ahead of the forward.
    """
    found: dict[str, str] = {}
    for path, inner in root.named_modules():
        for hook in module_hooks(inner):
            name = getattr(hook, "name", None) or getattr(hook, "_tensor_name", None)
            library, _, kind = type(hook).__module__.rpartition(".")
            if library == "torch.nn.utils" and name:
                new = "prune.remove" if kind == "prune" else f"parametrizations.{kind}"
                found[f"{path}.{name}".lstrip(".")] = f"{library}.{new}"
    return found
