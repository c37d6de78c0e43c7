"""Two captures side by side: where they part first, and what else differs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lightning_graphs.core.info import Edge, GraphInfo, GraphNode

_FIELDS = ("kind", "name", "bytes", "grid", "block", "scope")
_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first place where two captures part.

    Attributes:
        index: The node's index, or None where the graphs as a whole differ (their backend).
        field: The field of the node, ``"node"`` where one graph has ended, or ``"backend"``.
        left: The first capture's value; None where it has no such node.
        right: The second capture's value; likewise.
    """

    index: int | None
    field: str
    left: object
    right: object

    def __str__(self) -> str:
        place = self.field if self.index is None else f"node {self.index}, {self.field}"
        return f"{place}: {self.left!r} -> {self.right!r}"


@dataclass(frozen=True, slots=True)
class GraphDiff:
    """What differs between two captures; falsy when nothing does.

    Attributes:
        first: The first divergence; None when all nodes agree.
        missing_edges: Edges of the first capture that the second lacks.
        extra_edges: Edges of the second capture that the first lacks.
        counts: Kinds of node that occur unequally often, with both numbers.
        kernels: Kernel names that occur unequally often, with both numbers.
    """

    first: Divergence | None
    missing_edges: tuple[Edge, ...]
    extra_edges: tuple[Edge, ...]
    counts: Mapping[str, tuple[int, int]]
    kernels: Mapping[str, tuple[int, int]]

    def __bool__(self) -> bool:
        # Unequal counts are a consequence of unequal nodes and need no check of their own.
        return self.first is not None or bool(self.missing_edges or self.extra_edges)

    def __str__(self) -> str:
        if not self:
            return "the captures are equal"
        lines = []
        if self.first is not None:
            lines.append(f"first divergence: {self.first}")
        for title, numbers in (("count", self.counts), ("launches", self.kernels)):
            lines.extend(
                f"{title} of {name}: {left} -> {right}"
                for name, (left, right) in list(numbers.items())[:_SHOWN]
            )
        for title, edges in (("missing", self.missing_edges), ("extra", self.extra_edges)):
            if edges:
                shown = ", ".join(f"{before} -> {after}" for before, after in edges[:_SHOWN])
                more = f" and {len(edges) - _SHOWN} more" if len(edges) > _SHOWN else ""
                lines.append(f"{title} edges: {shown}{more}")
        return "\n".join(lines)


def compare(a: GraphInfo, b: GraphInfo) -> GraphDiff:
    """Compare two captures node by node, in order of capture."""
    left, right = set(a.edges), set(b.edges)
    return GraphDiff(
        first=_first_divergence(a, b),
        missing_edges=tuple(sorted(left - right)),
        extra_edges=tuple(sorted(right - left)),
        counts=_unequal(a.counts, b.counts),
        kernels=_unequal(a.kernels, b.kernels),
    )


def _first_divergence(a: GraphInfo, b: GraphInfo) -> Divergence | None:
    if a.backend != b.backend:
        return Divergence(None, "backend", a.backend, b.backend)
    for left, right in zip(a.nodes, b.nodes, strict=False):
        for field in _FIELDS:
            if getattr(left, field) != getattr(right, field):
                return Divergence(left.index, field, getattr(left, field), getattr(right, field))
    shared = min(len(a.nodes), len(b.nodes))
    if len(a.nodes) == len(b.nodes):
        return None
    return Divergence(shared, "node", _name_at(a.nodes, shared), _name_at(b.nodes, shared))


def _name_at(nodes: tuple[GraphNode, ...], index: int) -> str | None:
    return nodes[index].name if index < len(nodes) else None


def _unequal(left: Mapping[str, int], right: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    return {
        name: (left.get(name, 0), right.get(name, 0))
        for name in dict.fromkeys((*left, *right))
        if left.get(name, 0) != right.get(name, 0)
    }
