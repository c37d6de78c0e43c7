"""The only place that calls ``cuda.bindings``: raw graph handles, through the driver API.

The bindings are imported on first use. What the *driver* can do is asked of :func:`driver_version`:
newer bindings offer functions that an older driver lacks, and calling those raises. What the
*bindings* call a function is asked of their major version's names, which differ.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch

from lightning_graphs.core.inspect import GraphInfo, GraphNode
from lightning_graphs.core.private.torch import demangle
from lightning_graphs.errors import GraphError, UnsupportedError

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
    """The newest CUDA version of the installed driver, as (major, minor)."""
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
    """The graph under capture on a stream, and how many nodes it has.

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


def from_cuda(raw_graph: int, scopes: Sequence[str] = ()) -> GraphInfo:
    """Nodes in order of creation, and edges; the Python scopes are those of the first nodes."""
    require_driver((12, 3), "Reading the nodes of a CUDA graph")
    handles = _handles(raw_graph)
    named = (*scopes, *[""] * (len(handles) - len(scopes)))
    nodes = (
        _describe(i, handle, scope)
        for i, (handle, scope) in enumerate(zip(handles, named, strict=False))
    )
    edges = _edges(raw_graph, {int(handle): i for i, handle in enumerate(handles)})
    return GraphInfo("cuda", tuple(nodes), tuple(sorted(edges)))


def count_kinds(raw_graph: int) -> Counter[str]:
    """Number of nodes by kind; names are not looked at."""
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


def _describe(index: int, handle: Any, scope: str) -> GraphNode:
    label = _label(handle)
    node = GraphNode(index, _KINDS.get(label, "empty"), label.lower(), scope=scope)
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
