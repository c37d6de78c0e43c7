"""Which Python scope launched which node of a CUDA graph, by our own bookkeeping.

torch's annotations (2.12) need ``cudaGraphNodeGetToolsId``, which the driver has from CUDA 13.1
on. Counting the nodes of the graph under capture after every operator gives the same names on
every driver.
"""

from __future__ import annotations

from lightning_graphs.core.driver import capture_frontier, walk
from lightning_graphs.core.inspect import GraphInfo, from_cuda
from lightning_graphs.core.recorder import Operation, Recorder


class AnnotatingRecorder(Recorder):
    """Watches a capture and notes, after each operator, how many nodes the graph has."""

    def __init__(self, stream: int) -> None:
        super().__init__(strict=False)
        self._stream = stream
        self._scopes_of_nodes: list[str] = []

    def keep(self, operation: Operation) -> None:
        super().keep(operation)
        _, count = capture_frontier(self._stream)
        label = f"{operation.scope}: {operation.name}".removeprefix(": ")
        self._scopes_of_nodes.extend([label] * (count - len(self._scopes_of_nodes)))

    def inspection(self) -> GraphInfo:
        """Nodes with their scopes; to be called while the capture is still under way."""

        graph, _ = capture_frontier(self._stream)
        records, _ = walk(graph)
        handles = [record.handle for record in records]
        return from_cuda(graph, dict(zip(handles, self._scopes_of_nodes, strict=False)))
