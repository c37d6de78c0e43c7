"""Backward passes through nodes of autograd that are older than the code that runs them."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from lightning_graphs.private.engine import exchanged_engine, leaf_of, nodes_from
from lightning_graphs.private.torch import nodes_recorded, number_of, out_of_sight

_IN = "lightning_graphs: recorded in"


def _metadata(node: Node) -> dict[str, Any]:
    found: Any = node.metadata  # a property, which torch declares as a method
    return cast("dict[str, Any]", found)


class Recording:
    """Tells the nodes that autograd records from now on from older ones.

    Autograd numbers the nodes of each thread apart. A pass with ``create_graph`` records nodes too,
    on a GPU in the thread of the device, where numbers say nothing: these are marked when it ends.
    """

    def __init__(self) -> None:
        self._begin = nodes_recorded()

    def lacks(self, node: Node) -> bool:
        """Return whether a node is older, or of another thread and not marked."""
        number, end = number_of(node), nodes_recorded() or sys.maxsize
        if self._begin <= number < end or number >= sys.maxsize:  # those of leaves are the largest
            return False
        return _metadata(node).get(_IN) is not self

    def add(self, nodes: Iterable[Node]) -> None:
        """Mark nodes as recorded since."""
        for node in filter(self.lacks, nodes):
            _metadata(node)[_IN] = self  # which keeps no node alive, as a set of them would


def _asks(name: str) -> Callable[[Tensor], bool]:
    found: Callable[[Tensor], bool] = getattr(torch._C._functorch, name, lambda tensor: False)
    return found


_is_wrapped, _is_batched = _asks("is_functorch_wrapped_tensor"), _asks("is_legacy_batchedtensor")
"""Whether a tensor is one of a transform of ``torch.func``, or of ``is_grads_batched``.

Both are private to torch, as what they wrap. Without them double backward passes of such code are
refused on a GPU.
"""


def _inside(tensor: Tensor) -> Tensor | None:
    """Return what a tensor wraps that stands for it in a transform, if it is one."""
    if _is_wrapped(tensor):
        wrapped: Tensor = torch._C._functorch.get_unwrapped(tensor)
        return wrapped
    if _is_batched(tensor):
        level = torch._C._vmapmode_increment_nesting() - 1
        torch._C._vmapmode_decrement_nesting()
        return torch._remove_batch_dim(tensor, level, 1, 0)
    return None


def _nodes_behind(tensors: Iterable[Tensor | GradientEdge | None]) -> Iterator[Node]:
    """Yield every node behind these, once, also behind what they wrap in transforms."""
    found: list[Node | None] = []
    for tensor in tensors:
        if isinstance(tensor, GradientEdge):
            found.append(tensor.node)
            continue
        inner = tensor
        while inner is not None:
            found.append(inner.grad_fn)
            inner = _inside(inner)
    return nodes_from(found)


@contextlib.contextmanager
def backward_passes_noted(goes_outside: Callable[[], object]) -> Iterator[list[object]]:
    """Yield a list that is empty until code in the body runs a backward pass, or ``grad``.

    Where torch has another engine the list is not empty. ``goes_outside`` is called ahead of a pass
    through nodes from before the body, which it frees.
    """
    passes: list[object] = []
    recorded, is_inside = Recording(), False

    def run(
        engine: Callable[..., Any], roots: Sequence[Any], gradients: Any, keep: Any, create: Any,
        *rest: Any, **kwargs: Any,
    ) -> Any:  # fmt: skip
        nonlocal is_inside
        if is_inside:  # as of reentrant checkpointing: perhaps in the thread of the device
            return engine(roots, gradients, keep, create, *rest, **kwargs)
        with out_of_sight():
            nodes = list(_nodes_behind(roots))
            goes_on = any(map(recorded.lacks, nodes))
        if goes_on:
            goes_outside()
        passes.append(engine)
        leaves = [leaf for node in nodes if create and (leaf := leaf_of(node)) is not None]
        with out_of_sight():  # what the graph of a gradient consists of next to what the pass makes
            parts = [*gradients, *(leaf.grad for leaf in leaves)] if create else []
            older = set(filter(recorded.lacks, _nodes_behind(parts)))
        del nodes
        is_inside = True
        try:
            found = engine(roots, gradients, keep, create, *rest, **kwargs)
        finally:
            is_inside = False
        if create:
            with out_of_sight():
                made = _nodes_behind([*(found or ()), *(leaf.grad for leaf in leaves)])
                recorded.add(node for node in made if node not in older)
        return found

    exchanged = exchanged_engine(run)
    if isinstance(exchanged, contextlib.nullcontext):
        passes.append(exchanged)
    with exchanged:
        yield passes
