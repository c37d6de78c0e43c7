"""What a callable must not be, hold or do if it is to be graphed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_graphs.core.graphed import GraphedCallable
from lightning_graphs.core.held import Held
from lightning_graphs.errors import CaptureError


def original_of(function: Callable[..., Any]) -> Callable[..., Any]:
    """What a callable runs.

    Raises:
        CaptureError: it is a graph already.
    """
    forward = function.forward if isinstance(function, nn.Module) else function
    if isinstance(forward, GraphedCallable):
        raise CaptureError(
            "A callable is graphed once.",
            f"{type(function).__qualname__} has a graphed forward already",
            "call .forward.reset() on the module (or .reset() on the function) first",
        )
    return forward


def refuse_unfit_state(held: Held) -> None:
    """Look at what a callable holds before anything of it runs.

    Raises:
        CaptureError: a part of it is a graph already, a buffer is trainable, or a parameter has no
            memory yet.
    """
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
    """Refuse a call that has written its arguments.

    Args:
        names: Of the tensors among its arguments.
        written: Which of them it has written.

    Raises:
        CaptureError: names the first one.
    """
    name = next((n for n, is_written in zip(names, written, strict=True) if is_written), None)
    if name is not None:
        raise CaptureError(
            "A graphed callable must not change its arguments: a replay would change our "
            "static inputs instead of the caller's tensors.",
            f"{name} is written in place",
            "work on a copy (x = x + 1 instead of x += 1), or return the new value",
        )


def same_values(tensor: Tensor, before: Tensor) -> bool:
    """Whether all elements are equal, NaN counted as equal to NaN."""
    now = tensor.detach()
    return bool(((now == before) | ((now != now) & (before != before))).all())
