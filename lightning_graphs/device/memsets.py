"""Lets kernels zero memory in a captured graph.

Reductions of torch, such as those for gradients of biases, zero a few counters ahead of a kernel.
On a stream that is a kernel of the driver. In a graph it is a node of another kind, for which the
GPU leaves its queue of kernels: 96 of them take 12 % of a step of BERT (H100). A kernel that writes
the same bytes takes their place.
"""

from __future__ import annotations

import ctypes
import functools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from lightning_graphs.device.inspect import driver, driver_call, edges_of, handles_of, kind_of
from lightning_graphs.errors import GraphError

_THREADS, _MOST = 256, 2**16
"""Threads of a block, and bytes that are worth a kernel which writes them one by one."""

_SOURCE = b"""
.version 7.0
.target sm_60
.address_size 64
.visible .entry zero(.param .u64 place, .param .u32 bytes)
{
    .reg .pred %p<2>;
    .reg .b32 %r<6>;
    .reg .b64 %d<4>;
    ld.param.u64 %d1, [place];
    ld.param.u32 %r1, [bytes];
    mov.u32 %r2, %ctaid.x;
    mov.u32 %r3, %ntid.x;
    mov.u32 %r4, %tid.x;
    mad.lo.u32 %r5, %r2, %r3, %r4;
    setp.ge.u32 %p1, %r5, %r1;
    @%p1 bra done;
    cvta.to.global.u64 %d1, %d1;
    cvt.u64.u32 %d2, %r5;
    add.u64 %d3, %d1, %d2;
    mov.u32 %r2, 0;
    st.global.u8 [%d3], %r2;
done:
    ret;
}
\0"""


@functools.cache
def _kernel(device: int) -> tuple[Any, Any]:
    """Return the kernel of a device, which is the present one, and the module that has it."""
    module = driver_call("cuModuleLoadData", _SOURCE)
    return driver_call("cuModuleGetFunction", module, b"zero"), module


def _zeroed(nodes: Sequence[Any], device: int) -> Iterator[tuple[int, int, int]]:
    """Yield position, address and bytes of each node that zeroes a little memory of a device."""
    which = driver().CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
    for position, node in enumerate(nodes):
        if kind_of(node) == "memset":
            params = driver_call("cuGraphMemsetNodeGetParams", node)
            size = int(params.width) * int(params.elementSize)
            is_plain = not int(params.value) and int(params.height) <= 1 and 0 < size <= _MOST
            if is_plain and int(driver_call("cuPointerGetAttribute", which, params.dst)) == device:
                yield position, int(params.dst), size


def zero_by_kernels(raw_graph: int, device: int) -> Sequence[Any] | None:
    """Replace what zeroes a little memory by kernels, in a graph that is not instantiated yet.

    Args:
        raw_graph: The ``cudaGraph_t``.
        device: Its device, which is the present one.

    Returns:
        All nodes, each where it or the one that it replaces was; None if no node was replaced.
    """
    found = None
    try:
        nodes = [*handles_of(raw_graph)]
        zeroed = [*_zeroed(nodes, device)]
        if not zeroed:
            return None
        function, _ = _kernel(device)
        before: defaultdict[int, list[int]] = defaultdict(list)
        behind: defaultdict[int, list[int]] = defaultdict(list)
        for source, target in edges_of(raw_graph, {int(node): i for i, node in enumerate(nodes)}):
            before[target].append(source)
            behind[source].append(target)
        for at, place, size in zeroed:
            ends = ([nodes[i] for i in others[at]] for others in (before, behind))
            new = _added(raw_graph, _params(function, place, size), *ends)
            driver_call("cuGraphDestroyNode", nodes[at])
            nodes[at], found = new, nodes
    except (GraphError, AttributeError, TypeError):
        return found  # no cuda-python, a driver that lacks a function, or bindings with another
    return found


def _added(raw_graph: int, params: Any, before: list[Any], behind: list[Any]) -> Any:
    node = driver_call("cuGraphAddKernelNode", raw_graph, before, len(before), params)
    try:
        if behind:
            # `_v2` in the bindings of CUDA 12 is the plain function of 13
            name = "cuGraphAddDependencies_v2"
            name = name if hasattr(driver(), name) else name.removesuffix("_v2")
            driver_call(name, raw_graph, [node] * len(behind), behind, None, len(behind))
    except BaseException:
        driver_call("cuGraphDestroyNode", node)
        raise
    return node


def _params(function: Any, place: int, size: int) -> Any:
    params = driver().CUDA_KERNEL_NODE_PARAMS()
    params.func = function
    params.gridDimX, params.blockDimX = -(-size // _THREADS), _THREADS
    params.gridDimY = params.gridDimZ = params.blockDimY = params.blockDimZ = 1
    params.kernelParams = (place, size), (ctypes.c_void_p, ctypes.c_uint32)
    return params
