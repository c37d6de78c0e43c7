"""What only a GPU can show of a capture: memory, streams, threads, devices, random numbers."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from lightning_graphs import CaptureError, ReplayError
from lightning_graphs.core import CUDAGraph, graph, graph_pool_handle
from lightning_graphs.device import inspect as bindings
from lightning_graphs.device.graph import GraphPool, get_backend

pytestmark = pytest.mark.gpu

MEGABYTE = 1 << 20


def _memory() -> tuple[int, int]:
    """Bytes allocated and reserved, with nothing cached."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()


def _floats(count: int, value: float = 1.0) -> Tensor:
    return torch.full((count,), value, device="cuda")


@pytest.fixture(autouse=True)
def _warm_context() -> Iterator[None]:
    """What CUDA and cuBLAS allocate once belongs to no test."""
    x = torch.ones(8, 8, device="cuda")
    (x @ x).sum().item()
    torch.rand(2, device="cuda")
    yield
    torch.cuda.synchronize()


class TestMemory:
    def test_reset_returns_to_the_baseline(self) -> None:
        x = _floats(MEGABYTE)
        before = _memory()
        captured = CUDAGraph()
        with graph(captured):
            y = (x * 2).exp()
        captured.replay()
        assert _memory()[0] > before[0]
        del y
        captured.reset()
        assert _memory() == before

    @pytest.mark.parametrize("options", [{}, {"check_input_liveness": True}])
    def test_recaptures_do_not_leak(self, options: dict[str, bool]) -> None:
        x = _floats(MEGABYTE)
        captured = CUDAGraph()

        def cycle() -> None:
            with graph(captured, **options):
                y = x * 2
            captured.replay()
            del y
            captured.reset()

        cycle()
        before = _memory()
        for _ in range(100):
            cycle()
        assert _memory() == before

    def test_a_refused_capture_leaks_nothing_and_spares_the_generator(self) -> None:
        x = _floats(MEGABYTE)
        torch.cuda.manual_seed(4)
        expected = torch.rand(8, device="cuda")
        torch.cuda.manual_seed(4)
        captured = CUDAGraph()

        def body() -> None:
            y = x * torch.rand_like(x)
            y.sum().item()

        def refuse() -> None:
            with pytest.raises(CaptureError, match=r"body: y\.sum\(\)\.item\(\)"), graph(captured):
                body()

        refuse()
        assert torch.equal(torch.rand(8, device="cuda"), expected)
        before = _memory()
        for _ in range(10):
            refuse()
        assert _memory() == before
        with graph(captured):
            z = torch.rand_like(x)
        torch.cuda.manual_seed(4)
        captured.replay()
        torch.cuda.manual_seed(4)
        assert torch.equal(z, torch.rand_like(x))

    def test_running_out_of_memory_leaves_a_working_process(self) -> None:
        x = _floats(MEGABYTE)
        captured = CUDAGraph()

        def body() -> None:
            y = x * 2
            torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
            y.add_(1)

        def run_out() -> None:
            with pytest.raises(torch.OutOfMemoryError, match="out of memory"), graph(captured):
                body()

        run_out()
        before = _memory()
        run_out()
        assert _memory() == before
        with graph(captured):
            z = x * 3
        captured.replay()
        assert z.sum().item() == 3 * MEGABYTE


class TestStreams:
    def test_forked_streams(self) -> None:
        x = _floats(1024)
        sides = [torch.cuda.Stream() for _ in range(2)]
        captured = CUDAGraph()
        with graph(captured):
            main = torch.cuda.current_stream()
            base = x + 1
            parts = []
            for factor, side in enumerate(sides, start=2):
                side.wait_stream(main)
                with torch.cuda.stream(side):
                    parts.append(base * factor)
            for side in sides:
                main.wait_stream(side)
            total = parts[0] + parts[1]
        for value in (1.0, 5.0):
            x.fill_(value)
            captured.replay()
            assert total.unique().tolist() == [5 * (value + 1)]

    def test_a_stream_that_does_not_join_is_refused(self) -> None:
        x, side = _floats(16), torch.cuda.Stream()
        captured = CUDAGraph()

        def body() -> Tensor:
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                return x * 2

        with pytest.raises(CaptureError, match="unjoined"), graph(captured):
            body()
        with graph(captured):
            y = x * 3
        captured.replay()
        assert y.unique().tolist() == [3.0]

    def test_a_stream_left_current_by_a_failing_body(self) -> None:
        x, captured = _floats(16), CUDAGraph()

        def body() -> None:
            x.mul_(2)
            torch.cuda.set_stream(torch.cuda.Stream())
            raise ValueError("of the body")

        with pytest.raises(ValueError, match="of the body"), graph(captured):
            body()
        assert torch.cuda.current_stream() == torch.cuda.default_stream()
        with graph(captured):
            y = x * 3
        captured.replay()
        assert y.unique().tolist() == [3.0]

    def test_the_default_stream_cannot_be_captured(self) -> None:
        captured, x = CUDAGraph(), _floats(16)
        before = _memory()
        with pytest.raises(RuntimeError, match="non-default stream"):
            captured.capture_begin()
        assert _memory() == before
        with graph(captured):
            y = x * 3
        captured.replay()
        assert y.unique().tolist() == [3.0]

    @pytest.mark.parametrize("index", range(torch.cuda.device_count()))
    def test_each_device_keeps_its_default_capture_stream(self, index: int) -> None:
        streams = []
        with torch.cuda.device(index):
            x = torch.ones(16, device=f"cuda:{index}")
            for factor in (2, 3):
                captured = CUDAGraph()
                with graph(captured):
                    streams.append(torch.cuda.current_stream())
                    y = x * factor
                captured.replay()
                assert y.device.index == index
                assert y.unique().tolist() == [factor]
        assert streams[0] == streams[1]
        assert streams[0].device_index == index

    def test_a_side_stream_joins_after_an_exception(self) -> None:
        x = _floats(MEGABYTE, 0.0)

        def body() -> None:
            for _ in range(50):
                x.add_(1)
            raise ValueError("of the body")

        with pytest.raises(ValueError, match="of the body"), get_backend("cuda").side_stream():
            body()
        assert x.unique().tolist() == [50.0]


class TestThreads:
    def test_a_thread_may_pin_memory_during_a_thread_local_capture(self) -> None:
        x = _floats(1024)
        pinned: list[Tensor] = []
        captured = CUDAGraph()
        with graph(captured, capture_error_mode="thread_local"):
            y = x * 2
            thread = threading.Thread(
                target=lambda: pinned.append(torch.arange(4 * MEGABYTE).pin_memory())
            )
            thread.start()
            thread.join()
            z = y + 1
        captured.replay()
        assert z.unique().tolist() == [3.0]
        assert pinned[0].is_pinned()
        assert pinned[0][-1].item() == 4 * MEGABYTE - 1

    def test_pinned_memory_of_a_graph_that_is_gone_hinders_no_other(self) -> None:
        x, pool, pinned = _floats(1024, 0.0), GraphPool(backend="cuda"), []
        for value in (1.0, 2.0, 3.0):
            with pool.capture() as captured:
                pinned.append(torch.full((1024,), value, pin_memory=True))
                x.copy_(pinned[-1], non_blocking=True)
            captured.replay()
            assert x.unique().tolist() == [value]
            pool.release(captured)


class TestLiveness:
    def test_memory_of_an_earlier_graph_of_the_pool_is_alive(self) -> None:
        x, pool = _floats(MEGABYTE), graph_pool_handle()
        first, second = CUDAGraph(), CUDAGraph()
        with graph(first, pool=pool):
            y = x * 2
        with graph(second, pool=pool, check_input_liveness=True):
            z = y + 1
        del y
        first.replay()
        second.replay()
        assert z.unique().tolist() == [3.0]

    def test_memory_outside_of_the_pool_is_dead(self) -> None:
        x = _floats(MEGABYTE)
        captured = CUDAGraph()
        with graph(captured, check_input_liveness=True):
            y = x * 2
        del x
        torch.cuda.empty_cache()
        with pytest.raises(ReplayError, match=r"float32\[1048576\] on cuda:0"):
            captured.replay()
        assert y.shape == (MEGABYTE,)

    def test_the_check_leaves_the_handle_of_the_pool_alone(self) -> None:
        """torch 2.11 drops references to the numbers of a handle that it lists the memory of."""
        x, pool = _floats(4), graph_pool_handle()
        while pool[1] <= 256:  # smaller numbers are immortal, and the loss would not show
            pool = graph_pool_handle()
        captured = CUDAGraph()
        with graph(captured, pool=pool, check_input_liveness=True):
            y = x * 2
        del x
        before = sys.getrefcount(pool[1])
        for _ in range(3):
            with pytest.raises(ReplayError, match="that it reads was freed or moved"):
                captured.replay()
        after = sys.getrefcount(pool[1])
        assert after == before
        assert y.shape == (4,)


def test_random_numbers_are_those_of_eager_code() -> None:
    x = _floats(4096)
    captured = CUDAGraph()
    with graph(captured):
        y = torch.dropout(x, 0.5, True) + torch.randn_like(x)
    torch.manual_seed(21)
    replayed = []
    for _ in range(10):
        captured.replay()
        replayed.append(y.clone())
    torch.manual_seed(21)
    eager = [torch.dropout(x, 0.5, True) + torch.randn_like(x) for _ in range(10)]
    assert all(map(torch.equal, replayed, eager))


def test_instantiate_picks_up_edits_of_the_template() -> None:
    x = _floats(1024)
    captured = CUDAGraph(keep_graph=True)
    with graph(captured):
        y = x * 2
        y.add_(1)
    captured.instantiate()
    cuda, raw = bindings.driver(), captured.raw_cuda_graph()
    assert bindings.count_kinds(raw) == {"kernel": 2}
    found, nodes, *_ = cuda.cuGraphGetNodes(raw, 2)
    (destroyed,) = cuda.cuGraphDestroyNode(nodes[-1])
    assert found == destroyed == cuda.CUresult.CUDA_SUCCESS
    captured.replay()
    assert y.unique().tolist() == [3.0]
    captured.instantiate()
    captured.replay()
    assert y.unique().tolist() == [2.0]
    assert captured.raw_cuda_graph_exec() != 0
