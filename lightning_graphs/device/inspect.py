"""Reads the nodes of a captured graph, and compares two graphs.

The bindings are imported on first use. What the *driver* can do is asked of :func:`driver_version`:
newer bindings offer functions that an older driver lacks, and calling those raises. What the
*bindings* call a function is asked of their major version's names, which differ.
"""

from __future__ import annotations

import importlib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

import torch

from lightning_graphs.errors import GraphError, UnsupportedError
from lightning_graphs.private.torch import demangle

if TYPE_CHECKING:
    from lightning_graphs.device.trace import Operation


Edge = tuple[int, int]

KINDS = ("kernel", "memcpy", "memset", "host", "child", "event", "empty", "alloc", "free")
"""What a node can be. Conditional nodes count as ``child``; semaphores and batched stream memory
operations, which order work and compute nothing, as ``event``."""

_COPIES = frozenset({"copy_", "copy", "_to_copy", "clone"})
_FILLS = frozenset({"fill_", "fill", "zero_", "zero", "zeros", "ones", "full"})
_FIELDS = ("kind", "name", "bytes", "grid", "block", "scope")
_SHOWN = 5


@dataclass(frozen=True, slots=True)
class GraphNode:
    """One node of a captured graph.

    Attributes:
        index: Its position in the graph's nodes, in order of capture.
        kind: One of :data:`KINDS`.
        name: The kernel's demangled name, or the operator's.
        bytes: Bytes that are copied, set, allocated, or (recorded operators) written; else 0.
        grid: Blocks of a kernel launch; None where that is unknown or meaningless.
        block: Threads per block; None where the grid is None.
        scope: The Python scopes that launched it, or the user's line; may be empty.
        line: The user's line that launched it; may be empty.
    """

    index: int
    kind: str
    name: str
    bytes: int = 0
    grid: tuple[int, int, int] | None = None
    block: tuple[int, int, int] | None = None
    scope: str = ""
    line: str = ""


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

    def as_graph_data(self) -> dict[str, Any]:
        """What ``torch.cuda.CUDAGraph.get_graph_data`` would give, with positions as ids."""
        nodes: list[dict[str, Any]] = [
            {
                "index": node.index,
                "node_type": node.kind,
                "tools_id": node.index,
                "graph_id": 0,
                "node_id": node.index,
                "kernel_name": node.name if node.kind == "kernel" else None,
                "dependencies": [],
                "dependents": [],
            }
            for node in self.nodes
        ]
        for before, after in self.edges:
            nodes[before]["dependents"].append(after)
            nodes[after]["dependencies"].append(before)
        return {"exec_graph_id": 0, "nodes": nodes}

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
        frequent = list(self.kernels.items())[:_SHOWN]
        lines.extend(f"  {count:>6} x {short_name(name)}" for name, count in frequent)
        return "\n".join(lines)


def short_name(name: str) -> str:
    """A kernel's name without return type, namespaces, template and call arguments."""
    bare = re.sub(r"[<(].*", "", name.replace("(anonymous namespace)::", ""))
    return bare.rpartition(" ")[2].rpartition("::")[2] or name


class Inspected(Protocol):
    """A graph that can list its nodes."""

    def inspection(self) -> GraphInfo: ...


def inspect(graph: Inspected) -> GraphInfo:
    """List the nodes and edges of a captured graph.

    Args:
        graph: A :class:`~lightning_graphs.device.graph.CUDAGraph` after its capture; on CUDA one
            that was made with ``keep_graph=True``.
    """
    return graph.inspection()


# ------------------ Reading


def from_recording(operations: Sequence[Operation]) -> GraphInfo:
    """Convert a recording of operators to a graph, one node per operator.

    An edge says that an operator reads what another wrote, or overwrites what it read or wrote.
    Edges that follow from two others are omitted where the two are at hand.
    """
    nodes = tuple(
        GraphNode(i, _kind_of(o.name), o.name, o.nbytes, None, None, o.scope or line, line)
        for i, o in enumerate(operations)
        for line in [o.line]
    )
    return GraphInfo("emulated", nodes, tuple(sorted(_dependencies(operations))))


def _kind_of(operator: str) -> str:
    namespace, name, *_ = *operator.split("."), ""
    if namespace == "aten" and name in _COPIES:
        return "memcpy"
    name = name.removeprefix("new_").removesuffix("_like")
    return "memset" if namespace == "aten" and name in _FILLS else "kernel"


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


# ------------------ Comparing


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first place where two captures part.

    Attributes:
        index: The node's index, or None where the graphs as a whole differ (their backend).
        field: The field of the node, ``"node"`` where one graph has ended, or ``"backend"``.
        left: The first capture's value; None where it has no such node.
        right: The second capture's value; None where it has no such node.
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
        lines = [] if self.first is None else [f"first divergence: {self.first}"]
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


def diff(a: GraphInfo, b: GraphInfo) -> GraphDiff:
    """Compare two captures, node by node in order of capture.

    Returns:
        The differences, the first divergence named; falsy when there are none.
    """
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
    if len(a.nodes) == len(b.nodes):
        return None
    end = min(len(a.nodes), len(b.nodes))
    names = [info.nodes[end].name if end < len(info.nodes) else None for info in (a, b)]
    return Divergence(end, "node", *names)


def _unequal(left: Mapping[str, int], right: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    pairs = {name: (left.get(name, 0), right.get(name, 0)) for name in (*left, *right)}
    return {name: (a, b) for name, (a, b) in pairs.items() if a != b}


# ------------------ The driver API

_KINDS = {
    "KERNEL": "kernel",
    "MEMCPY": "memcpy",
    "MEMSET": "memset",
    "HOST": "host",
    "GRAPH": "child",
    "CONDITIONAL": "child",
    "EMPTY": "empty",
    "WAIT_EVENT": "event",
    "EVENT_RECORD": "event",
    "EXT_SEMAS_SIGNAL": "event",
    "EXT_SEMAS_WAIT": "event",
    "BATCH_MEM_OP": "event",
    "MEM_ALLOC": "alloc",
    "MEM_FREE": "free",
}
_MEMORY_TYPES = {1: "H", 2: "D", 3: "A", 4: "U"}
_CAPTURE_ACTIVE = 1


def driver() -> ModuleType:
    try:
        return importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        major = (torch.version.cuda or "").partition(".")[0]
        wanted = f">={major},<{int(major) + 1}" if major else ">=12.9,<14"
        raise UnsupportedError(
            "Reading the nodes of a CUDA graph needs the package cuda-python.",
            f"importing cuda.bindings.driver failed: {error}",
            f'run pip install "cuda-python{wanted}" (the CUDA major version of torch)',
        ) from error


def _call(name: str, *args: object) -> Any:
    function = getattr(driver(), name)
    try:
        status, *values = function(*args)
    except RuntimeError as error:
        # Without libcuda, or without this function in it, the bindings raise instead of returning.
        raise UnsupportedError(
            f"{name} needs an NVIDIA driver that offers it.",
            str(error),
            "install or update the NVIDIA driver, or use the emulated backend",
        ) from error
    if int(status) != 0:
        raise GraphError(
            f"{name} returned an error.",
            str(getattr(status, "name", f"CUDA error {int(status)}")),
            "check that graph and stream are alive and on this device, or update the driver",
        )
    return values[0] if len(values) == 1 else tuple(values)


def driver_version() -> tuple[int, int]:
    """Return the newest CUDA version of the installed driver, as (major, minor)."""
    version = int(_call("cuDriverGetVersion"))
    return version // 1000, version % 1000 // 10


def require_driver(minimum: tuple[int, int], feature: str) -> None:
    present = driver_version()
    if present < minimum:
        raise UnsupportedError(
            f"{feature} needs an NVIDIA driver for CUDA {minimum[0]}.{minimum[1]} or newer.",
            f"the installed driver supports CUDA {present[0]}.{present[1]}",
            "update the NVIDIA driver",
        )


def capture_frontier(stream_handle: int) -> tuple[int, int]:
    """Return the graph under capture on a stream, and its number of nodes.

    Nodes are listed in the order of their creation, so that two calls around an operator tell
    which nodes it added.
    """
    # Without room for edge data a query fails on programmatic edges (CUDA_ERROR_LOSSY_QUERY). The
    # function with room for it is `_v3` in the bindings of CUDA 12 and the plain one in 13.
    name = "cuStreamGetCaptureInfo_v3"
    if not hasattr(driver(), name):
        name = "cuStreamGetCaptureInfo"
    status, _, graph, *_ = _call(name, stream_handle)
    if int(status) != _CAPTURE_ACTIVE:
        raise GraphError(
            "Nodes can be counted only while the stream is capturing.",
            f"the capture status is {status.name}",
            "count nodes between capture_begin() and capture_end(), on the capture stream",
        )
    return int(graph), _count(int(graph))


def from_cuda(raw_graph: int, places: Sequence[tuple[str, str]] = ()) -> GraphInfo:
    """Read nodes in order of creation, and edges.

    The given places, scopes and lines, belong to the first nodes.
    """
    require_driver((12, 3), "Reading the nodes of a CUDA graph")
    handles = _handles(raw_graph)
    named = (*places, *[("", "")] * (len(handles) - len(places)))
    nodes = (
        replace(_describe(i, handle), scope=scope, line=line)
        for i, (handle, (scope, line)) in enumerate(zip(handles, named, strict=False))
    )
    edges = _edges(raw_graph, {int(handle): i for i, handle in enumerate(handles)})
    return GraphInfo("cuda", tuple(nodes), tuple(sorted(edges)))


def count_kinds(raw_graph: int) -> Counter[str]:
    """Count nodes by kind, without reading their names."""
    return Counter(_KINDS.get(_label(handle), "empty") for handle in _handles(raw_graph))


def _handles(raw_graph: int) -> Sequence[Any]:
    count = _count(raw_graph)
    return _call("cuGraphGetNodes", raw_graph, count)[0] if count else []


def _label(handle: Any) -> str:
    return str(_call("cuGraphNodeGetType", handle).name).removeprefix("CU_GRAPH_NODE_TYPE_")


def _count(graph: int) -> int:
    return int(_call("cuGraphGetNodes", graph, 0)[-1])


def _edges(graph: int, position: dict[int, int]) -> list[tuple[int, int]]:
    # `_v2` in the bindings of CUDA 12 is the plain function of 13. The edge data it returns is
    # freed memory in 13.0.3 to 13.2.0 (NVIDIA/cuda-python#1804) and stays untouched.
    name = "cuGraphGetEdges_v2"
    if not hasattr(driver(), name):
        name = "cuGraphGetEdges"
    count = int(_call(name, graph, 0)[-1])
    if not count:
        return []
    sources, targets, *_ = _call(name, graph, count)
    return [
        (position[int(source)], position[int(target)])
        for source, target in zip(sources, targets, strict=True)
    ]


def _describe(index: int, handle: Any) -> GraphNode:
    label = _label(handle)
    node = GraphNode(index, _KINDS.get(label, "empty"), label.lower())
    if label == "KERNEL":
        params = _call("cuGraphKernelNodeGetParams", handle)
        grid = (int(params.gridDimX), int(params.gridDimY), int(params.gridDimZ))
        block = (int(params.blockDimX), int(params.blockDimY), int(params.blockDimZ))
        return replace(node, name=demangle(_kernel_name(params)), grid=grid, block=block)
    if label == "MEMCPY":
        params = _call("cuGraphMemcpyNodeGetParams", handle)
        ends = (int(params.srcMemoryType), int(params.dstMemoryType))
        source, target = (_MEMORY_TYPES.get(end, "?") for end in ends)
        size = params.WidthInBytes * max(1, params.Height) * max(1, params.Depth)
        return replace(node, name=f"memcpy {source} to {target}", bytes=size)
    if label == "MEMSET":
        params = _call("cuGraphMemsetNodeGetParams", handle)
        return replace(node, bytes=params.elementSize * params.width * max(1, params.height))
    if label == "MEM_ALLOC":
        return replace(node, bytes=int(_call("cuGraphMemAllocNodeGetParams", handle).bytesize))
    return node


def _kernel_name(params: Any) -> str:
    # Kernels of a lazily loaded library carry only `kern`, those of a module only `func`.
    if int(params.kern):
        name = _call("cuKernelGetName", params.kern)
    else:
        name = _call("cuFuncGetName", params.func)
    return str(name.decode())
