"""What the benchmarks share: rows with a verdict, the two APIs, and a clock."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_graphs import core


@dataclass(frozen=True)
class Row:
    """One line of the result: a figure, what it may be at most, and whether results were right."""

    name: str
    figure: float
    unit: str
    limit: float | None
    correct: bool
    detail: str = ""

    @property
    def verdict(self) -> str:
        if not self.correct:
            return "WRONG RESULT"
        if self.limit is None or self.figure != self.figure:
            return ""
        return "PASS" if self.figure <= self.limit else "FAIL"


class Ours:
    """This package's graphs."""

    def __init__(self, backend: core.BackendName) -> None:
        self.backend = backend

    def new_graph(self) -> Any:
        return core.CUDAGraph(backend=self.backend)

    def capture(self, graph: Any, pool: Any = None) -> AbstractContextManager[None]:
        return core.graph(graph, pool)

    def new_pool(self) -> Any:
        return core.graph_pool_handle(backend=self.backend)

    def callables(
        self, module: nn.Module, sample: tuple[Tensor, ...], pool: Any, **how: Any
    ) -> Any:
        return core.make_graphed_callables(module, sample, pool=pool, backend=self.backend, **how)


class Torchs:
    """torch's own graphs."""

    def new_graph(self) -> Any:
        return torch.cuda.CUDAGraph()

    def capture(self, graph: Any, pool: Any = None) -> AbstractContextManager[None]:
        return torch.cuda.graph(graph, pool)

    def new_pool(self) -> Any:
        return torch.cuda.graph_pool_handle()

    def callables(
        self, module: nn.Module, sample: tuple[Tensor, ...], pool: Any, **how: Any
    ) -> Any:
        return torch.cuda.make_graphed_callables(module, sample, pool=pool, **how)


class Lab:
    """Where the benchmark runs: both APIs, a clock and the sizes.

    In a dry run everything is small, runs on the CPU with the emulated backend in both places, and
    every time and every amount of memory is NaN.
    """

    def __init__(self, dry: bool) -> None:
        self.dry = dry
        if dry:
            torch.set_num_threads(1)  # tiny tensors: on a busy machine threads wait for each other
        self.device = torch.device("cpu" if dry else "cuda")
        self.ours = Ours("emulated" if dry else "cuda")
        self.theirs: Any = Ours("emulated") if dry else Torchs()
        self.rounds = 1 if dry else 4
        self.parameters = (4, 12) if dry else (100, 600)

    def calls(self, count: int) -> int:
        return min(count, 2) if self.dry else count

    def synchronize(self) -> None:
        if not self.dry:
            torch.cuda.synchronize()

    def wall(self, body: Callable[[], object], calls: int, *, drain: bool) -> float:
        """Microseconds per call; with ``drain`` until the GPU has finished, else CPU time only."""
        calls = self.calls(calls)
        self.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            body()
        if drain:
            self.synchronize()
        elapsed = time.perf_counter() - start
        self.synchronize()
        return float("nan") if self.dry else elapsed / calls * 1e6

    def on_gpu(self, body: Callable[[], object], calls: int) -> float:
        """Microseconds per call between two CUDA events."""
        if self.dry:
            return self.wall(body, calls, drain=True)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        for _ in range(calls):
            body()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / calls * 1e3

    def medians(self, *measurements: Callable[[], float]) -> list[float]:
        """The median of each measurement; every second round runs them in reverse order."""
        found: list[list[float]] = [[] for _ in measurements]
        for i in range(2 * self.rounds):
            order = range(len(measurements))
            for j in reversed(order) if i % 2 else order:
                found[j].append(measurements[j]())
        return [statistics.median(values) for values in found]

    def clean(self) -> None:
        """Return what is free, and the cuBLAS workspaces: the next capture starts as any other."""
        gc.collect()
        if not self.dry:
            torch.cuda.synchronize()
            torch._C._cuda_clearCublasWorkspaces()
            torch.cuda.empty_cache()

    def reserved(self, pool: Any) -> float:
        """MiB that the allocator reserves for a private pool."""
        if self.dry:
            return float("nan")
        segments = torch.cuda.memory_snapshot()
        mine = (s["total_size"] for s in segments if tuple(s["segment_pool_id"]) == tuple(pool))
        return sum(mine) / 2**20

    @contextmanager
    def side_stream(self) -> Iterator[None]:
        if self.dry:
            yield
            return
        stream, before = torch.cuda.Stream(), torch.cuda.current_stream()
        stream.wait_stream(before)
        with torch.cuda.stream(stream):
            yield
        before.wait_stream(stream)
