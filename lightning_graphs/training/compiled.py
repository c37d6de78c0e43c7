"""Compiled code that captures CUDA graphs by itself, and so cannot be part of another graph."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from lightning_graphs.core.torch_private import makes_own_graphs

REMEDY = "write torch.compile(...) without mode, or mode='max-autotune-no-cudagraphs'"


def with_own_graphs(module: nn.Module) -> Iterator[str]:
    """Qualified names of the submodules and attributes that ``torch.compile`` gave own graphs.

    Args:
        module: Its submodules are searched, and the functions that they hold as attributes.
    """
    for name, inner in module.named_modules():
        if makes_own_graphs(inner):
            yield name or type(inner).__name__
            continue
        for attribute, value in vars(inner).items():
            if callable(value) and not isinstance(value, nn.Module) and makes_own_graphs(value):
                where = name if attribute == "_compiled_call_impl" else f"{name}.{attribute}"
                yield where.strip(".") or type(inner).__name__
