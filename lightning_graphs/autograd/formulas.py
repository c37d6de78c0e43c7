"""Lets a real step under a dispatch mode compute what it computes without one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from torch.autograd.graph import Node

from lightning_graphs.autograd.nodes import nodes_from
from lightning_graphs.device.rules import WITH_TWO_FORMULAS
from lightning_graphs.private.engine import backward_passes_within
from lightning_graphs.private.torch import hide_modes


def eager_formulas(
    hidden: Callable[[Node], object],  # called with each node ahead of its run
) -> contextlib.AbstractContextManager[None]:
    """Run the nodes of backward passes that have another formula under a mode out of its sight."""
    return backward_passes_within(partial(_hiding, hidden))


@contextlib.contextmanager
def _hiding(hidden: Callable[[Node], object], outputs: Sequence[Any]) -> Iterator[None]:
    shown: list[Callable[[], None]] = []

    def hide(node: Node, _: Any) -> None:
        hidden(node)
        shown.append(hide_modes())

    def show(*_: Any) -> None:
        shown.pop()()

    found = [getattr(output, "node", None) or output.grad_fn for output in outputs]
    nodes = [n for n in nodes_from(found) if type(n).__name__ in WITH_TWO_FORMULAS]
    handles = [node.register_prehook(partial(hide, node)) for node in nodes]
    handles += [node.register_hook(show) for node in nodes]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        while shown:  # a node has raised
            shown.pop()()
