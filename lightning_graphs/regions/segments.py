"""The graphs that one capture of a step makes: cut for hooks, and where code asks for its way."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial

from lightning_graphs.autograd.graphed import Stores
from lightning_graphs.device.graph import CUDAGraph, GraphPool
from lightning_graphs.private.generators import CapturedDropout
from lightning_graphs.private.modes import modes_entered, modes_left
from lightning_graphs.watch.reads import AttributeGuards


class Segments:
    """The graphs of one step: one, or more if the capture was cut."""

    def __init__(
        self,
        pool: GraphPool,
        reads: AttributeGuards,
        seeing: Callable[[], AbstractContextManager[object]],  # surrounds what is captured
    ) -> None:
        self._pool = pool
        self._reads = reads
        self._seeing = seeing
        self._early: Stores = ()  # set ahead of forks
        self._open = contextlib.ExitStack()
        self.graphs: dict[str, CUDAGraph] = {}
        self.ahead: list[CUDAGraph] = []  # of forks
        self.stores: dict[str, Stores] = {}
        self._entered = 0, 0

    @contextlib.contextmanager
    def capturing(self, name: str) -> Iterator[None]:
        with self._open:
            self.cut(name)
            self._entered = modes_entered()
            yield

    def can_fork(self) -> bool:
        """Whether all modes of the first graph are entered, and none is in the midst of a call."""
        return all(now >= first for now, first in zip(modes_entered(), self._entered, strict=True))

    def fork(self) -> None:
        """Begin another graph where code asks which way to go on."""
        stores = self._reads.stored()
        with modes_left(self._entered):
            self._open.close()
            self.ahead.append(self.graphs.pop("forward"))
            self.cut("forward")
        self._early = (*self._early, *stores)

    def cut(self, name: str) -> None:
        self._open.close()
        self._open.push(partial(self._ended, name))
        self._captured = self._open.enter_context(self._pool.capture())
        self._open.enter_context(self._seeing())

    def _ended(self, name: str, error: type[BaseException] | None, *_: object) -> None:
        if error is None:
            self.graphs[name] = self._captured
            early, self._early = self._early, ()
            if stores := (*early, *self._reads.stored()):
                self.stores[name] = stores

    @property
    def dropout(self) -> CapturedDropout | None:
        """cuDNN's random state, if any of the graphs draws from it."""
        found = (graph.dropout for graph in (*self.ahead, *self.graphs.values()))
        return next(filter(None, found), None)

    def abandon(self) -> None:
        while self.graphs:
            self._pool.release(self.graphs.popitem()[1])
        while self.ahead:
            self._pool.release(self.ahead.pop())
