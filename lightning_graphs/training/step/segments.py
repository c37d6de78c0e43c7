"""The graphs that the capture of one step makes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial

from lightning_graphs.core.graph import CUDAGraph, GraphPool
from lightning_graphs.core.graphed import Stores
from lightning_graphs.core.private.cudnn import CapturedDropout
from lightning_graphs.training.guards.python_state import AttributeReads


class Segments:
    """The graphs of one step: one, or more where the capture was cut."""

    def __init__(self, pool: GraphPool, reads: AttributeReads) -> None:
        self._pool = pool
        self._reads = reads
        self._open = contextlib.ExitStack()
        self.graphs: dict[str, CUDAGraph] = {}
        self.stores: dict[str, Stores] = {}

    @contextlib.contextmanager
    def capturing(self, name: str) -> Iterator[None]:
        with self._open:
            self.cut(name)
            yield

    def cut(self, name: str) -> None:
        self._open.close()
        self._open.push(partial(self._ended, name))
        self._captured = self._open.enter_context(self._pool.capture())

    def _ended(self, name: str, error: type[BaseException] | None, *_: object) -> None:
        if error is None:
            self.graphs[name] = self._captured
            if stores := self._reads.stored():
                self.stores[name] = stores

    @property
    def dropout(self) -> CapturedDropout | None:
        """cuDNN's random state, if any of the graphs draws from it."""
        return next((graph.dropout for graph in self.graphs.values() if graph.dropout), None)

    def abandon(self) -> None:
        while self.graphs:
            self._pool.release(self.graphs.popitem()[1])
