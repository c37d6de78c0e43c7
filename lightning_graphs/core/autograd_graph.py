"""What autograd has recorded behind the outputs of a call, and the gradients that it gives."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node

from lightning_graphs.core.torch_private import stale_gradient_nodes_tolerated, without_hooks


def leaves_behind(outputs: Sequence[Tensor]) -> list[Tensor]:
    """The leaves of autograd that these outputs depend on, themselves among them."""
    found = dict.fromkeys(output for output in outputs if output.grad_fn is None)
    found |= {leaf: None for node in nodes_behind(outputs) if (leaf := leaf_of(node)) is not None}
    return list(found)


def nodes_behind(outputs: Sequence[Tensor]) -> Iterator[Node]:
    """Every node behind these outputs, once."""
    seen: set[Node] = set()
    pending = [output.grad_fn for output in outputs]
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        pending.extend(parent for parent, _ in node.next_functions)


def leaf_of(node: Node) -> Tensor | None:
    """The leaf whose gradient this node accumulates; None for other nodes."""
    if type(node).__name__ != "AccumulateGrad":  # `name()` is a Function's own to overwrite
        return None
    leaf: Tensor | None = getattr(node, "variable", None)
    return leaf


def has_python_nodes(outputs: Sequence[Tensor]) -> bool:
    """Whether the backward pass of these outputs goes through a ``torch.autograd.Function``."""
    return any(isinstance(node, BackwardCFunction) for node in nodes_behind(outputs))


def gradients_behind(
    outputs: Sequence[Tensor],
    # Whose gradients are asked for; None for those that no output depends on.
    targets: Sequence[Tensor | GradientEdge],
    given: Sequence[Tensor],
    *,
    # Tensors whose own hooks do not run: autograd runs them on what is replayed.
    hooked: Sequence[Tensor],
    # Leaves whose gradients are copied in time; see :func:`gradients_kept_apart`.
    apart: Sequence[Tensor] = (),
) -> tuple[Tensor | None, ...]:
    """``torch.autograd.grad`` as part of a capture, or of the warm-up before it."""
    wanted: Any = targets  # the annotation of torch forgets that the two kinds may be mixed
    with contextlib.ExitStack() as stack:
        # Backward passes run outside of torch.autocast, whatever the forward pass ran in.
        stack.enter_context(torch.autocast(outputs[0].device.type, enabled=False))
        stack.enter_context(without_hooks(hooked))
        stack.enter_context(gradients_kept_apart(apart))
        stack.enter_context(stale_gradient_nodes_tolerated())
        found: tuple[Tensor | None, ...]
        found = torch.autograd.grad(outputs, wanted, given, allow_unused=True)
        return found


@contextlib.contextmanager
def gradients_kept_apart(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Let ``torch.autograd.grad`` in the body return copies of the gradients of these tensors.

    Autograd gives one tensor to all who need it, and some hooks write into theirs. What goes to
    ``.grad`` is copied before a later hook can write into it; ``torch.autograd.grad`` returns what
    is in the tensor at the end.
    """
    handles = [tensor.register_hook(_copy) for tensor in tensors if tensor.requires_grad]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _copy(gradient: Tensor | None) -> Tensor | None:
    return None if gradient is None else gradient.clone()
