"""Who owns a memory pool, a capture stream and the graphs captured with them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from lightning_graphs.core.backend import BackendName, PoolHandle, get_backend
from lightning_graphs.core.graph import CUDAGraph, graph


class GraphPool:
    """Graphs that share one memory pool and one capture stream, and are released together.

    Graphs of one pool must replay in the order of their capture, never at the same time: the
    memory that one has freed, the next one uses.

    Args:
        pool: Token of a pool to share; a new one by default.
        stream: Capture stream; the device's default one by default.
        keep_graphs: Keep the template of every graph.
        capture_error_mode: ``cudaStreamCaptureMode``. Data loaders pin memory in threads, and a
            capture in ``"global"`` mode dies of it.
        backend: ``"cuda"``, ``"emulated"`` or ``"auto"``.
    """

    def __init__(
        self,
        pool: PoolHandle | None = None,
        *,
        stream: torch.cuda.Stream | None = None,
        keep_graphs: bool = False,
        capture_error_mode: str = "thread_local",
        backend: BackendName = "auto",
    ) -> None:
        self.backend = get_backend(backend)
        self.handle = pool if pool is not None else self.backend.new_pool()
        self.stream = stream
        self._keep_graphs = keep_graphs
        self._capture_error_mode = capture_error_mode
        self._graphs: list[CUDAGraph] = []

    def beside(self, pool: PoolHandle | None = None) -> GraphPool:
        """Another one like this, whose graphs are released by themselves."""
        return GraphPool(
            pool,
            stream=self.stream,
            keep_graphs=self._keep_graphs,
            capture_error_mode=self._capture_error_mode,
            backend=self.backend.name,
        )

    @contextlib.contextmanager
    def capture(self) -> Iterator[CUDAGraph]:
        """Capture the body into a new graph of this pool."""
        captured = CUDAGraph(self._keep_graphs, backend=self.backend.name)
        with graph(captured, self.handle, self.stream, self._capture_error_mode):
            yield captured
        self._graphs.append(captured)

    def release(self, captured: CUDAGraph) -> None:
        """Reset one graph of this pool; its memory serves the next capture."""
        self._graphs.remove(captured)
        captured.reset()

    def close(self) -> None:
        """Reset every graph; may be called again."""
        while self._graphs:
            self._graphs.pop().reset()
