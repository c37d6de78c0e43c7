"""What a captured graph consists of: reading it from the driver or from a recording, comparing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from lightning_graphs.core import driver
from lightning_graphs.core.comparison import Divergence, GraphDiff, compare
from lightning_graphs.core.info import KINDS, Edge, GraphInfo, GraphNode
from lightning_graphs.core.names import demangle, short_name

__all__ = [
    "KINDS",
    "Divergence",
    "GraphDiff",
    "GraphInfo",
    "GraphNode",
    "Inspectable",
    "Operation",
    "demangle",
    "diff",
    "from_cuda",
    "from_recording",
    "inspect",
    "short_name",
]

_COPIES = frozenset({"copy_", "copy", "_to_copy", "clone"})
_FILLS = frozenset(
    {"fill_", "fill", "zero_", "zero", "zeros", "ones", "full"}
    | {f"{name}_like" for name in ("zeros", "ones", "full")}
    | {f"new_{name}" for name in ("zeros", "ones", "full")}
)


class Operation(Protocol):
    """What is read of a recorded operator.

    Attributes:
        name: Qualified name, such as ``aten.mm.default``.
        reads: Ids of the storages it read, unique per allocation.
        writes: Ids of the storages it wrote or allocated.
        nbytes: Bytes written.
        scope: The Python scopes around the call.
        site: The user's line, printable as ``file.py:12``.
    """

    @property
    def name(self) -> str: ...
    @property
    def reads(self) -> tuple[int, ...]: ...
    @property
    def writes(self) -> tuple[int, ...]: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def scope(self) -> str: ...
    @property
    def site(self) -> object: ...


class Inspectable(Protocol):
    """A captured graph that can say what it consists of."""

    def inspection(self) -> GraphInfo: ...


def inspect(graph: Inspectable) -> GraphInfo:
    """What a captured graph consists of.

    Args:
        graph: A :class:`~lightning_graphs.core.graph.CUDAGraph` after its capture; on CUDA one
            that was made with ``keep_graph=True``.
    """
    return graph.inspection()


def diff(a: GraphInfo, b: GraphInfo) -> GraphDiff:
    """Compare two captures, node by node in order of capture.

    Returns:
        The differences, the first divergence named; falsy when there are none.
    """
    return compare(a, b)


def from_cuda(raw_graph: int, scopes: Mapping[int, str] | None = None) -> GraphInfo:
    """Read a graph through the CUDA driver.

    Args:
        raw_graph: The ``CUgraph`` handle, as ``raw_cuda_graph()`` gives it.
        scopes: The Python scope of a node, by the node's handle.

    Raises:
        UnsupportedError: cuda-python is missing, or the driver is older than CUDA 12.3.
        GraphError: The driver refuses the handle.
    """
    records, edges = driver.walk(raw_graph)
    named = scopes or {}
    names = {name: demangle(name) for name in {record["name"] for record in records}}
    nodes = tuple(
        GraphNode(
            index=index,
            kind=record["kind"],
            name=names[record["name"]],
            bytes=record["bytes"],
            grid=record["grid"],
            block=record["block"],
            scope=named.get(record["handle"], ""),
        )
        for index, record in enumerate(records)
    )
    return GraphInfo("cuda", nodes, tuple(sorted(edges)))


def from_recording(operations: Sequence[Operation]) -> GraphInfo:
    """The graph that a recording of operators amounts to: one node per operator.

    An edge says that an operator reads what another wrote, or overwrites what it read or wrote.
    Edges that follow from two others are left out where the two are at hand.

    Args:
        operations: The operators in the order of their calls.
    """
    nodes = tuple(
        GraphNode(
            index=index,
            kind=_operator_kind(operation.name),
            name=operation.name,
            bytes=operation.nbytes,
            scope=operation.scope or str(operation.site),
        )
        for index, operation in enumerate(operations)
    )
    return GraphInfo("emulated", nodes, tuple(sorted(_dependencies(operations))))


def _operator_kind(name: str) -> str:
    namespace, _, rest = name.partition(".")
    operator = rest.partition(".")[0]
    if namespace == "aten" and operator in _COPIES:
        return "memcpy"
    if namespace == "aten" and operator in _FILLS:
        return "memset"
    return "kernel"


def _dependencies(operations: Sequence[Operation]) -> list[Edge]:
    last_writer: dict[int, int] = {}
    readers: dict[int, list[int]] = {}
    before: list[set[int]] = []
    for index, operation in enumerate(operations):
        direct = {last_writer[s] for s in operation.reads if s in last_writer}
        for storage in operation.writes:
            # The readers since the last write already wait for it.
            direct.update(readers.get(storage, ()))
            if not readers.get(storage) and storage in last_writer:
                direct.add(last_writer[storage])
        implied = {earlier for node in direct for earlier in before[node]}
        before.append(direct - implied)
        for storage in operation.reads:
            readers.setdefault(storage, []).append(index)
        for storage in operation.writes:
            last_writer[storage] = index
            readers[storage] = []
    return [(earlier, index) for index, direct in enumerate(before) for earlier in direct]
