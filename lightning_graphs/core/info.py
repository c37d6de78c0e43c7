"""A captured graph as plain data: nodes, edges, and the figures that follow from them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lightning_graphs.core.names import short_name
from lightning_graphs.errors import GraphError

Edge = tuple[int, int]

KINDS = ("kernel", "memcpy", "memset", "host", "child", "event", "empty", "alloc", "free")
"""What a node can be. Conditional nodes count as ``child``; semaphores and batched stream memory
operations, which order work and compute nothing, as ``event``."""


@dataclass(frozen=True, slots=True)
class GraphNode:
    """One node of a captured graph.

    Attributes:
        index: Its position in the graph's nodes, in order of capture.
        kind: One of :data:`KINDS`.
        name: The kernel's demangled name, or the operator's.
        bytes: Bytes that are copied, set, allocated, or (recorded operators) written; else 0.
        grid: Blocks of a kernel launch; None where that is unknown or meaningless.
        block: Threads per block; likewise.
        scope: The Python scopes that launched it, or the user's line; may be empty.
    """

    index: int
    kind: str
    name: str
    bytes: int = 0
    grid: tuple[int, int, int] | None = None
    block: tuple[int, int, int] | None = None
    scope: str = ""


@dataclass(frozen=True, slots=True)
class GraphInfo:
    """A captured graph as data that outlives the graph.

    Attributes:
        backend: ``"cuda"`` or ``"emulated"``.
        nodes: The nodes; ``nodes[i].index == i``.
        edges: Pairs (before, after) of node indices, ascending.
    """

    backend: str
    nodes: tuple[GraphNode, ...]
    edges: tuple[Edge, ...]

    @property
    def counts(self) -> dict[str, int]:
        """Nodes by kind; kinds that do not occur are absent."""
        found = Counter(node.kind for node in self.nodes)
        return {kind: found[kind] for kind in KINDS if kind in found}

    @property
    def kernels(self) -> dict[str, int]:
        """Launches by kernel name, the most frequent first."""
        return dict(Counter(n.name for n in self.nodes if n.kind == "kernel").most_common())

    @property
    def bytes_copied(self) -> int:
        """Bytes that one replay moves in memcpy nodes."""
        return sum(node.bytes for node in self.nodes if node.kind == "memcpy")

    @property
    def bytes_set(self) -> int:
        """Bytes that one replay sets in memset nodes."""
        return sum(node.bytes for node in self.nodes if node.kind == "memset")

    def to_json(self) -> dict[str, Any]:
        """A dictionary of JSON types that :meth:`from_json` reads back."""
        nodes = []
        for node in self.nodes:
            record = asdict(node)
            record["grid"] = node.grid and list(node.grid)
            record["block"] = node.block and list(node.block)
            nodes.append(record)
        return {"backend": self.backend, "nodes": nodes, "edges": [list(e) for e in self.edges]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> GraphInfo:
        """The graph that :meth:`to_json` wrote.

        Raises:
            GraphError: ``data`` is something else.
        """
        try:
            nodes = tuple(_node_from_json(record) for record in data["nodes"])
            edges = tuple((int(before), int(after)) for before, after in data["edges"])
            backend = str(data["backend"])
            if any(node.index != at for at, node in enumerate(nodes)):
                raise ValueError("the nodes are not numbered from 0")
            if any(not (0 <= end < len(nodes)) for edge in edges for end in edge):
                raise ValueError("an edge leads to a node that is not there")
        except (KeyError, TypeError, ValueError) as error:
            raise GraphError(
                "GraphInfo.from_json reads what GraphInfo.to_json wrote.",
                f"{type(error).__name__}: {error}",
                "pass the dictionary unchanged",
            ) from error
        return cls(backend, nodes, edges)

    def summary(self) -> str:
        """A few lines for a log: size, nodes by kind, the most frequent kernels."""
        sizes = {"memcpy": self.bytes_copied, "memset": self.bytes_set}
        kinds = [
            f"{count} {kind}" + (f" ({sizes[kind]:,d} bytes)" if kind in sizes else "")
            for kind, count in self.counts.items()
        ]
        lines = [
            f"{self.backend} graph: {len(self.nodes)} nodes, {len(self.edges)} edges",
            f"  {', '.join(kinds) or 'empty'}",
        ]
        frequent = list(self.kernels.items())[:5]
        lines.extend(f"  {count:>6} x {short_name(name)}" for name, count in frequent)
        return "\n".join(lines)


def _node_from_json(record: Mapping[str, Any]) -> GraphNode:
    kind = str(record["kind"])
    if kind not in KINDS:
        raise ValueError(f"a node of unknown kind {kind!r}")
    return GraphNode(
        index=int(record["index"]),
        kind=kind,
        name=str(record["name"]),
        bytes=int(record["bytes"]),
        grid=_triple(record["grid"]),
        block=_triple(record["block"]),
        scope=str(record["scope"]),
    )


def _triple(value: Sequence[Any] | None) -> tuple[int, int, int] | None:
    if value is None:
        return None
    x, y, z = value
    return int(x), int(y), int(z)
