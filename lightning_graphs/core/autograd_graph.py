"""What autograd has recorded behind the outputs of a call: leaves, and casts in front of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from lightning_graphs.core.torch_private import casts_floats


def leaves_behind(outputs: Sequence[Tensor]) -> list[Tensor]:
    """The leaves of autograd that these outputs depend on, themselves among them."""
    found = dict.fromkeys(output for output in outputs if output.grad_fn is None)
    found |= {leaf: None for node in _nodes(outputs) if (leaf := _leaf_of(node)) is not None}
    return list(found)


def ahead_of_casts(
    outputs: Sequence[Tensor], parameters: Sequence[Tensor]
) -> list[Tensor | GradientEdge]:
    """Where to ask autograd for the gradients of parameters, for who copies them anyway.

    Autocast casts a parameter for each use, and the backward pass casts its gradient back, in a
    kernel of its own. Where a parameter is used once, the gradient is taken ahead of that, and
    ``copy_`` gives the same values: it casts in the same way.

    Args:
        outputs: Of the call.
        parameters: The parameters.

    Returns:
        For each, the input of that cast; itself where there is none, or several uses.
    """
    users: dict[Tensor, list[Node]] = {parameter: [] for parameter in parameters}
    for node in _nodes(outputs):
        for parent, _ in node.next_functions:
            leaf = None if parent is None else _leaf_of(parent)
            if leaf in users:
                users[leaf].append(node)
    return [
        GradientEdge(nodes[0], 0) if len(nodes) == 1 and casts_floats(nodes[0], leaf) else leaf
        for leaf, nodes in users.items()
    ]


def _nodes(outputs: Sequence[Tensor]) -> Iterator[Node]:
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


def _leaf_of(node: Node) -> Tensor | None:
    leaf = getattr(node, "variable", None)
    return leaf if isinstance(leaf, Tensor) and leaf.is_leaf else None
