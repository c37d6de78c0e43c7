"""What a callable must not be, hold or do if it is to be graphed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_graphs.core.autograd_graph import nodes_behind
from lightning_graphs.core.graphed import GraphedCallable
from lightning_graphs.core.held import Held
from lightning_graphs.core.torch_private import recorded_before
from lightning_graphs.errors import CaptureError


def original_of(function: Callable[..., Any]) -> Callable[..., Any]:
    """What a callable runs."""
    forward = function.forward if isinstance(function, nn.Module) else function
    if isinstance(forward, GraphedCallable):
        raise CaptureError(
            "A callable is graphed once.",
            f"{type(function).__qualname__} has a graphed forward already",
            "call .forward.reset() on the module (or .reset() on the function) first",
        )
    return forward


def refuse_unfit_state(held: Held) -> None:
    """Look at what a callable holds before anything of it runs."""
    forwards = (vars(module).get("forward") for module in held.submodules())
    if any(isinstance(forward, GraphedCallable) for forward in forwards):
        raise CaptureError(
            "A graphed callable cannot be part of another one.",
            "a module in it has a graphed forward already",
            "call .forward.reset() on that module first, or keep it outside",
        )
    buffers = held.named_buffers()
    trainable = next((name for name, buffer in buffers if buffer.requires_grad), None)
    if trainable is not None:
        raise CaptureError(
            "Only parameters of a graphed module may be trainable.",
            f"buffer `{trainable}` requires grad",
            "make it an nn.Parameter, or call requires_grad_(False) on it",
        )
    named = (*held.named_parameters(), *buffers)
    lazy = next((name for name, tensor in named if is_lazy(tensor)), None)
    if lazy is not None:
        raise CaptureError(
            "A graph is captured over memory that exists.",
            f"`{lazy}` is not initialized yet",
            "call the module once before",
        )


def refuse_written_arguments(names: Sequence[str], written: Sequence[bool]) -> None:
    """Refuse a call that has written its arguments."""
    name = next((n for n, is_written in zip(names, written, strict=True) if is_written), None)
    if name is not None:
        raise CaptureError(
            "A graphed callable must not change its arguments: a replay would change our "
            "static inputs instead of the caller's tensors.",
            f"{name} is written in place",
            "work on a copy (x = x + 1 instead of x += 1), or return the new value",
        )


def refuse_history_of_others(outputs: Sequence[Tensor], start: int) -> None:
    """Refuse outputs that depend on what autograd recorded before the call."""
    earlier = (node for node in nodes_behind(outputs) if recorded_before(node, start))
    node = next(earlier, None)
    if node is not None:
        raise CaptureError(
            "A graphed callable gets what requires a gradient as an argument, or holds it as a "
            "parameter: a replay follows nothing else back.",
            f"an output depends on a tensor that {type(node).__name__.partition('Backward')[0]} "
            "computed before the call, found in an attribute, a variable or an object",
            "pass that tensor as an argument, or detach it",
        )


def refuse_rebound_tensors(names: Sequence[str]) -> None:
    """Refuse a call that binds names of its modules to other tensors."""
    if names:
        raise CaptureError(
            "A graphed callable changes the tensors of its modules in place only: a replay "
            "writes the memory it was captured with and binds no names.",
            f"`{names[0]}` is bound to another tensor in every call",
            "write `self.x.copy_(new)` instead of `self.x = new`, or return the new tensor",
        )


def refuse_sparse_gradients(gradients: Sequence[Tensor | None]) -> None:
    """Refuse gradients that have no fixed addresses."""
    if any(g is not None and g.layout is not torch.strided for g in gradients):
        raise CaptureError(
            "The gradients of a graphed callable are dense: they need fixed addresses.",
            "a sparse gradient",
            "nn.Embedding(..., sparse=False)",
        )


def is_changed(tensor: Tensor, before: Tensor) -> Tensor:
    """Whether any bit of a plain strided tensor is another one: a bool on its device."""
    # Kernels outside of torch, and ``x.data``, write a tensor and leave its version as it is.
    return (_bits(tensor) != _bits(before)).any()


_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _bits(tensor: Tensor) -> Tensor:
    if tensor.dtype is torch.bool:  # a byte of it may be any number but zero
        return tensor.detach()
    numbers = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return numbers.detach().view(_WORDS[numbers.itemsize])
