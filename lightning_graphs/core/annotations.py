"""What is noted while a CUDA graph is captured: which scope launched each node, and its inputs.

Both are our own. torch's annotations (2.12) need ``cudaGraphNodeGetToolsId``, which the driver has
from CUDA 13.1 on: counting the nodes of the graph under capture after every operator gives the same
names on every driver. And torch's check of live inputs is as young as 2.13.
"""

from __future__ import annotations

from typing import Any

import torch

from lightning_graphs.core.backend import PoolHandle
from lightning_graphs.core.driver import capture_frontier, walk
from lightning_graphs.core.inspect import GraphInfo, from_cuda
from lightning_graphs.core.recorder import KnownStorage, Operation, Recorder
from lightning_graphs.core.recording import describe_dead
from lightning_graphs.errors import ReplayError


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


class InputLiveness(Recorder):
    """Watches a capture for the tensors that it reads from outside.

    It says which tensor died, where the capture used it first and where it was freed. Kernels that
    are launched outside of torch's dispatcher are invisible to it, and to torch's own.
    """

    def __init__(self, pool: PoolHandle) -> None:
        super().__init__(strict=False)
        self._pool = pool
        self._needed: dict[int, KnownStorage] = {}

    def keep(self, operation: Operation) -> None:
        """Note what the operator read, if it ran on the GPU.

        A 0-d CPU tensor enters a kernel as a constant; a larger one can only be the pinned source
        of a copy, which a replay reads again.
        """
        super().keep(operation)
        touched = [self.storages[i] for i in (*operation.reads, *operation.writes)]
        if any(known.device_type == "cuda" for known in touched):
            for i in operation.reads:
                known = self.storages[i]
                if not known.born and (known.device_type == "cuda" or not known.scalar):
                    self._needed[i] = known

    def check(self) -> None:
        """Refuse a replay that would read freed memory."""
        dead = [k for k in self._needed.values() if not _alive(k) and not self._held_by_pool(k)]
        if dead:
            raise ReplayError(
                "Every tensor that a graph reads must live, at its address, until the last replay.",
                "; ".join(describe_dead(known) for known in dead[:3]),
                "keep a reference to the tensor beside the graph, and copy new values into it",
            )

    def _held_by_pool(self, known: KnownStorage) -> bool:
        """Whether the memory is still the pool's: an earlier graph of the pool refills it.

        The tensor may be gone and its block be free for later captures. Graphs of one pool replay
        in the order of their capture, so that the earlier graph has written the memory again.

        All pools are listed and ours chosen here: given the handle of a pool, torch 2.11 takes a
        reference away from its numbers, and those above 256 are then freed while in use.
        """
        segments: list[dict[str, Any]] = torch.cuda.memory_snapshot()
        return any(
            segment["address"] <= known.address < segment["address"] + segment["total_size"]
            for segment in segments
            if tuple(segment["segment_pool_id"]) == self._pool
        )


def _alive(known: KnownStorage) -> bool:
    storage = known.storage()
    return storage is not None and storage.data_ptr() == known.address
