"""Inspection of graphs that torch captured: what the driver says about known work."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import lightning_graphs
from lightning_graphs.device import inspect as driver
from lightning_graphs.device.inspect import GraphInfo, diff, from_cuda
from lightning_graphs.errors import GraphError

pytestmark = pytest.mark.gpu

SIZE = 1024


def capture(body: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """Capture after one warm-up call, which also loads the kernels."""
    body()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        body()
    return graph


def info_of(graph: torch.cuda.CUDAGraph) -> GraphInfo:
    return from_cuda(graph.raw_cuda_graph())


def set_bytes(tensor: torch.Tensor) -> None:
    """A memset on the current stream: torch's own fills are kernels."""
    stream = torch.cuda.current_stream().cuda_stream
    cuda = driver.driver()
    (status,) = cuda.cuMemsetD8Async(tensor.data_ptr(), 7, tensor.nbytes, stream)
    assert status == cuda.CUresult.CUDA_SUCCESS


def test_chain_of_kernels() -> None:
    x = torch.full((SIZE,), 3.0, device="cuda")

    def body() -> None:
        x.mul_(2)
        x.mul_(2)
        x.add_(1)

    info = info_of(capture(body))
    assert info.counts == {"kernel": 3}
    assert info.edges == ((0, 1), (1, 2))
    assert sorted(info.kernels.values()) == [1, 2]
    assert all("elementwise_kernel" in name for name in info.kernels)
    assert all(node.name.startswith("void at::native::") for node in info.nodes)
    for node in info.nodes:
        assert node.grid is not None
        assert node.block is not None
        threads = node.grid[0] * node.block[0]
        assert 0 < threads <= SIZE


def test_forked_streams() -> None:
    x = torch.ones(SIZE, device="cuda")
    outs = [torch.full_like(x, -1) for _ in range(3)]
    sides = [torch.cuda.Stream() for _ in range(3)]

    def run(*, join_each: bool) -> None:
        current = torch.cuda.current_stream()
        x.mul_(2)
        for side, out in zip(sides, outs, strict=True):
            side.wait_stream(current)
            with torch.cuda.stream(side):
                torch.add(x, 1, out=out)
            if join_each:
                current.wait_stream(side)
        for side in sides:
            current.wait_stream(side)
        x.sub_(1)

    wide = info_of(capture(lambda: run(join_each=False)))
    assert wide.counts == {"kernel": 5}
    # The driver may add 0 -> 4, which the others imply.
    assert set(wide.edges) - {(0, 4)} == {(0, 1), (0, 2), (0, 3), (1, 4), (2, 4), (3, 4)}
    chained = info_of(capture(lambda: run(join_each=True)))
    assert chained.counts == {"kernel": 5}
    assert {(1, 2), (2, 3)} <= set(diff(chained, wide).missing_edges)


def test_memory_nodes() -> None:
    source = torch.arange(SIZE, device="cuda", dtype=torch.float32)
    target = torch.full_like(source, -1)
    host = torch.full((SIZE,), -1.0).pin_memory()
    marks = torch.zeros(100, device="cuda", dtype=torch.uint8)

    def body() -> None:
        set_bytes(marks)
        target.copy_(source)
        host.copy_(target, non_blocking=True)

    info = info_of(capture(body))
    assert info.counts == {"memcpy": 2, "memset": 1}
    assert info.bytes_copied == 2 * 4 * SIZE
    assert info.bytes_set == 100
    assert [node.kind for node in info.nodes] == ["memset", "memcpy", "memcpy"]
    assert [node.bytes for node in info.nodes] == [100, 4 * SIZE, 4 * SIZE]


def test_two_captures_of_the_same_work_are_equal_and_of_other_work_differ() -> None:
    x = torch.ones(SIZE, device="cuda")
    y = torch.ones(SIZE * SIZE, device="cuda")
    a, b = info_of(capture(lambda: x.mul_(2).add_(1))), info_of(capture(lambda: x.mul_(2).add_(1)))
    assert not diff(a, b)
    grown = diff(info_of(capture(lambda: x.mul_(2))), info_of(capture(lambda: y.mul_(2))))
    assert grown.first is not None
    assert (grown.first.index, grown.first.field) == (0, "grid")
    other = diff(a, info_of(capture(lambda: x.mul_(2).sigmoid_())))
    assert other.first is not None
    assert (other.first.index, other.first.field) == (1, "name")


def test_frontier_counts_nodes_during_capture_and_names_them() -> None:
    x = torch.ones(SIZE, device="cuda")
    x.mul_(2).add_(1)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        stream = torch.cuda.current_stream().cuda_stream
        before = driver.capture_frontier(stream)
        x.mul_(2)
        between = driver.capture_frontier(stream)
        x.add_(1)
        after = driver.capture_frontier(stream)
    assert [before[1], between[1], after[1]] == [0, 1, 2]
    assert before[0] == between[0] == after[0] == graph.raw_cuda_graph()
    info = from_cuda(graph.raw_cuda_graph(), [("", ""), ("net.bias", "net.py:3")])
    assert [node.scope for node in info.nodes] == ["", "net.bias"]
    assert [node.line for node in info.nodes] == ["", "net.py:3"]


def test_frontier_outside_a_capture_is_refused() -> None:
    with pytest.raises(GraphError, match="only while the stream is capturing"):
        driver.capture_frontier(torch.cuda.Stream().cuda_stream)


def test_a_profiler_shows_submodules_and_lines_of_replays(tmp_path: Path) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()).cuda()
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)

    def train_step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()

    step = lightning_graphs.capture(train_step, net, optimizer, annotate=True, only_if_faster=False)
    x = torch.ones(4, 8, device="cuda")
    for _ in range(8):
        step(x)
    torch.cuda.synchronize()
    kinds = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=kinds, acc_events=True) as profiler:
        step(x)
        torch.cuda.synchronize()
    path = tmp_path / "trace.json"
    profiler.export_chrome_trace(str(path))
    assert step.report.name_trace(path) > 5
    found = json.loads(path.read_text())["traceEvents"]
    named = [event["name"] for event in found if "launched by" in event.get("args", {})]
    assert any(name.startswith("Sequential.0: aten.addmm") for name in named)
    assert any("(backward): aten.mm" in name for name in named)
    assert any("_fused_adamw_" in name for name in named)
