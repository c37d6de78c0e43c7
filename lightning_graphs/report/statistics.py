"""Counts what happens to the steps of a fit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field, fields
from time import perf_counter

import torch

from lightning_graphs.device.graph import Backend, CUDAGraph
from lightning_graphs.private.torch import PoolHandle
from lightning_graphs.report import GraphRecord, Report, StepTime


@dataclass(slots=True)
class StepTimes:
    """How long steps take, in milliseconds."""

    eager: list[float] = field(default_factory=list)  # eager steps on the device
    # How long the device still worked on each of them once it had been launched
    behind: list[float] = field(default_factory=list)
    replayed: list[float] = field(default_factory=list)  # replayed steps on the device


@dataclass(slots=True)
class CaptureCost:
    """What one capture took."""

    ms: float = 0.0  # milliseconds
    # Bytes that each memory pool has more than before
    added: dict[PoolHandle, int] = field(default_factory=dict)


@dataclass(slots=True, repr=False)
class Statistics(Report):
    """What happened to the steps of a fit: its report as it grows, and what that is made of."""

    torch: str = torch.__version__
    graphs: list[GraphRecord] = field(default_factory=list)
    modules: list[str] = field(default_factory=list)
    fallbacks: list[str] = field(default_factory=list)
    recaptures: list[str] = field(default_factory=list)
    times: list[StepTime] = field(default_factory=list)
    captures: int = 0  # steps captured, a signature each
    comparisons: int = 0  # of graphs with eager runs
    # Optimizers that run their fused kernel, and by themselves would not
    fused: list[str] = field(default_factory=list)
    waiting: str = ""  # why the last eager step was not captured, where none was refused
    pace: StepTimes = field(default_factory=StepTimes)  # how long steps take
    _alive: dict[CUDAGraph, GraphRecord] = field(default_factory=dict)
    _uncounted: dict[CUDAGraph, Sequence[CUDAGraph]] = field(default_factory=dict)

    def captured(
        self,
        # The signature in words: what is captured again under the same words continues their
        # record
        signature: str,
        graphs: Sequence[CUDAGraph],
        cost: CaptureCost,
        *,
        scope: str = "step",
    ) -> GraphRecord:
        """Keep a record of what was captured, and return it."""
        same = (r for r in self.graphs if (r.scope, r.signature) == (scope, signature))
        record = next(same, None)
        if record is None:
            record = GraphRecord(signature=signature, scope=scope, captures=0)
            self.graphs.append(record)
        record.parts = len(graphs)
        record.captures += 1
        record.capture_ms = cost.ms
        if graphs[0].backend.name == "cuda":
            pools = {graph.pool() for graph in graphs}
            record.pool_mib = sum(cost.added.get(pool, 0) for pool in pools) / 2**20
        self._alive[graphs[0]] = record
        self._uncounted[graphs[0]] = tuple(graphs)
        return record

    def _count_nodes(self, first: CUDAGraph) -> None:
        """Count them when somebody asks: that takes as long as a tenth of a capture."""
        counts = [graph.node_counts() for graph in self._uncounted.pop(first, ())]
        if counts and all(counts):
            record = self._alive[first]
            record.nodes = sum(sum(count.values()) for count in counts)
            record.kernels = sum(count.get("kernel", 0) for count in counts)

    def count_replay(self, first: CUDAGraph) -> None:
        self.replayed += 1
        self._alive[first].replays += 1

    def released(self, first: CUDAGraph) -> None:
        self._count_nodes(first)
        self._alive.pop(first, None)

    def report(self) -> Report:
        for first in list(self._uncounted):
            self._count_nodes(first)
        values = {each.name: getattr(self, each.name) for each in fields(Report)}
        if not self.times_mean_something:
            values["times"] = []
        lists = {name: v for name, v in values.items() if isinstance(v, list)}
        return Report(**values | {name: tuple(map(copy, held)) for name, held in lists.items()})


@contextmanager
def capture_cost(backend: Backend) -> Iterator[CaptureCost]:
    """Measure time and pool memory of the captures in the body."""
    cost = CaptureCost()
    before = _pool_sizes(backend)
    started = perf_counter()
    yield cost
    cost.ms = (perf_counter() - started) * 1e3
    after = _pool_sizes(backend)
    cost.added = {pool: size - before.get(pool, 0) for pool, size in after.items()}


def _pool_sizes(backend: Backend) -> dict[PoolHandle, int]:
    """Bytes that torch's allocator holds for each memory pool; empty without a GPU.

    All are listed: a pool is asked for by its handle only at one's peril (see ``liveness``).
    """
    sizes: dict[PoolHandle, int] = {}
    if backend.name == "cuda":
        for segment in torch.cuda.memory_snapshot():
            pool = tuple(segment["segment_pool_id"])
            sizes[pool] = sizes.get(pool, 0) + segment["total_size"]
    return sizes
