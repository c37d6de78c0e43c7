"""Tells what no graph can hold, before anything is captured: whole steps, and modules."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn

from lightning_graphs.core.private.torch import makes_own_graphs, module_hooks
from lightning_graphs.training.interception import replaced

_OWN_GRAPHS = (
    "is compiled to CUDA graphs of its own, which no graph can hold; write torch.compile(...) "
    "without mode, or mode='max-autotune-no-cudagraphs'"
)
_OWN_DROPOUT = (
    "draws the dropout between its layers from a random state inside of cuDNN, which no graph can "
    "hold; write dropout=0, and layers of their own with nn.Dropout between them"
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
    for name, inner in module.named_modules():
        if has_own_dropout(inner):
            return f"`{name or type(inner).__name__}` {_OWN_DROPOUT}"
    return None


def has_own_dropout(module: nn.Module) -> bool:
    """Whether a module is a recurrent layer of cuDNN's that draws numbers.

    Their random state is the library's: neither a replay nor ``torch.manual_seed`` sets it.
    """
    return (
        isinstance(module, nn.RNNBase)
        and module.training
        and module.dropout > 0
        and module.num_layers > 1
        and computed_by_cudnn(module)
    )


def computed_by_cudnn(layer: nn.RNNBase) -> bool:
    """Whether cuDNN computes a recurrent layer; torch's own kernels draw from torch's state."""
    return bool(torch.backends.cudnn.is_acceptable(next(layer.parameters())))


@contextlib.contextmanager
def flattened_once() -> Iterator[None]:
    """Let recurrent layers stay where they are when they are flattened again.

    cuDNN wants their weights in one piece of memory. Models flatten them in each forward, as
    ``nn.DataParallel`` demands, and each time the weights move, which no graph can follow.
    """
    original = nn.RNNBase.flatten_parameters

    def flatten(layer: nn.RNNBase) -> None:
        if len({weight.untyped_storage().data_ptr() for weight in layer.parameters()}) > 1:
            original(layer)

    with replaced(nn.RNNBase, "flatten_parameters", flatten):
        yield


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
