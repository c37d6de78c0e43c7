"""torch's API for CUDA graphs over two backends, with checks; it does not import Lightning."""

import sys

from lightning_graphs.autograd.callables import make_graphed_callables
from lightning_graphs.device import inspect as inspect
from lightning_graphs.device.graph import (
    BackendName,
    CUDAGraph,
    graph,
    graph_pool_handle,
    is_current_stream_capturing,
)

__all__ = [
    "BackendName",
    "CUDAGraph",
    "graph",
    "graph_pool_handle",
    "is_current_stream_capturing",
    "make_graphed_callables",
]

# Programs import these by their dotted names, too.
for _name in ("graph", "inspect"):
    sys.modules[f"{__name__}.{_name}"] = sys.modules[f"lightning_graphs.device.{_name}"]
