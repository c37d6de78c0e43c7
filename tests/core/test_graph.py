"""``CUDAGraph`` and ``graph``: the documented API, state by state."""

from __future__ import annotations

import contextlib
import copy
import gc
import threading
import weakref
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_graphs import CaptureError, ReplayError, UnsupportedError
from lightning_graphs.core import (
    BackendName,
    CUDAGraph,
    graph,
    graph_pool_handle,
    is_current_stream_capturing,
)
from lightning_graphs.device.inspect import inspect as inspect_graph


def _doubling(
    backend: BackendName, device: torch.device, *, keep_graph: bool = False
) -> tuple[CUDAGraph, Tensor, Tensor]:
    """A graph of ``y = 2 * x`` with its static input and output."""
    x = torch.ones(4, device=device)
    captured = CUDAGraph(keep_graph, backend=backend)
    with graph(captured):
        y = x * 2
    return captured, x, y


class TestStates:
    @pytest.mark.parametrize(
        "call",
        [
            "replay",
            "instantiate",
            "pool",
            "raw_cuda_graph",
            "raw_cuda_graph_exec",
            "get_graph_data",
            "inspection",
        ],
    )
    def test_everything_that_needs_a_capture_says_so(self, backend: BackendName, call: str) -> None:
        with pytest.raises(ReplayError, match="needs a finished capture"):
            getattr(CUDAGraph(backend=backend), call)()

    def test_debug_dump_needs_a_capture(self, backend: BackendName, tmp_path: Path) -> None:
        with pytest.raises(ReplayError, match="needs a finished capture"):
            CUDAGraph(backend=backend).debug_dump(str(tmp_path / "graph.dot"))

    def test_a_second_capture_needs_a_reset(
        self, backend: BackendName, device: torch.device
    ) -> None:
        captured, x, y = _doubling(backend, device)
        with pytest.raises(CaptureError, match="can hold one capture only"), graph(captured):
            pass
        x.fill_(3.0)
        captured.replay()
        assert y.tolist() == [6.0] * 4

    def test_capture_end_needs_a_beginning(self, backend: BackendName) -> None:
        with pytest.raises(CaptureError, match="needs a capture_begin"):
            CUDAGraph(backend=backend).capture_end()

    def test_one_capture_at_a_time(self, backend: BackendName, device: torch.device) -> None:
        x = torch.ones(4, device=device)
        leaf = torch.ones(4, device=device, requires_grad=True)
        kept = leaf * 2  # and with it the leaf's node of the default stream
        outer, inner = CUDAGraph(backend=backend), CUDAGraph(backend=backend)
        with graph(outer):
            y = x + 1
            with (
                pytest.raises(CaptureError, match="begin inside of another one"),
                graph(inner),
            ):
                pass
            with pytest.raises(CaptureError, match="begin inside of another one"):
                inner.capture_begin()
            z = y + 1
        outer.replay()
        assert z.tolist() == [3.0] * 4
        kept.sum().backward()
        assert leaf.grad is not None
        assert leaf.grad.tolist() == [2.0] * 4

    @pytest.mark.parametrize("fails", [False, True])
    def test_inference_mode_in_the_body(
        self, backend: BackendName, device: torch.device, fails: bool
    ) -> None:
        """torch shows modes whole operators there, which do not say what they write."""
        norm, x = torch.nn.BatchNorm1d(4).to(device), torch.randn(8, 4, device=device)
        assert norm.running_mean is not None
        captured = CUDAGraph(backend=backend)
        with contextlib.suppress(ZeroDivisionError), graph(captured), torch.inference_mode():
            y = norm(x)
            assert 1 / (not fails)
        assert norm.running_mean.tolist() == [0.0] * 4
        if not fails:
            captured.replay()
            assert torch.equal(y, torch.nn.BatchNorm1d(4).to(device)(x))
            torch.testing.assert_close(norm.running_mean, x.mean(0) * 0.1)

    def test_reset_and_recapture(self, backend: BackendName, device: torch.device) -> None:
        captured, x, _ = _doubling(backend, device)
        captured.reset()
        captured.reset()
        with pytest.raises(ReplayError, match="needs a finished capture"):
            captured.replay()
        with graph(captured):
            y = x * 5
        captured.replay()
        assert y.tolist() == [5.0] * 4

    def test_reset_abandons_a_capture_under_way(
        self, backend: BackendName, device: torch.device
    ) -> None:
        x = torch.ones(4, device=device)
        captured = CUDAGraph(backend=backend)

        def body() -> None:
            x.mul_(2)
            captured.reset()

        with pytest.raises(CaptureError, match="needs a capture_begin"), graph(captured):
            body()
        assert not is_current_stream_capturing()
        assert x.tolist() == [1.0] * 4

    @pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
    def test_capture_error_modes(
        self, backend: BackendName, device: torch.device, mode: str
    ) -> None:
        x = torch.ones(4, device=device)
        captured = CUDAGraph(backend=backend)
        with graph(captured, capture_error_mode=mode):
            y = x - 3
        captured.replay()
        assert y.tolist() == [-2.0] * 4

    def test_unknown_capture_error_mode(self, backend: BackendName) -> None:
        with (
            pytest.raises(CaptureError, match="'thread_local', 'relaxed', got 'loose'"),
            graph(CUDAGraph(backend=backend), capture_error_mode="loose"),
        ):
            pass

    def test_unknown_backend(self) -> None:
        with pytest.raises(UnsupportedError, match="'auto', 'cuda', 'emulated', got 'tpu'"):
            CUDAGraph(backend="tpu")  # type: ignore[arg-type]

    def test_an_empty_graph_warns(self, backend: BackendName) -> None:
        captured = CUDAGraph(backend=backend)
        with pytest.warns(UserWarning, match="Graph is empty"), graph(captured):
            pass
        captured.replay()

    def test_an_empty_graph_leaves_no_capture_where_warnings_are_errors(
        self, backend: BackendName, device: torch.device
    ) -> None:
        captured = CUDAGraph(backend=backend)
        with pytest.raises(UserWarning, match="Graph is empty"), graph(captured):
            pass
        x = torch.ones(4, device=device)
        with graph(captured):
            y = x + 1
        captured.replay()
        assert y.tolist() == [2.0] * 4

    def test_is_current_stream_capturing(self, backend: BackendName, device: torch.device) -> None:
        x = torch.ones(4, device=device)
        assert not is_current_stream_capturing()
        with graph(CUDAGraph(backend=backend)):
            x * 2
            inside = is_current_stream_capturing()
        assert inside
        assert not is_current_stream_capturing()

    def test_a_graph_is_freed_without_the_garbage_collector(
        self, backend: BackendName, device: torch.device
    ) -> None:
        captured, x, y = _doubling(backend, device)
        captured.replay()
        graph_ref, memory = weakref.ref(captured), StorageWeakRef(y.untyped_storage())
        gc.disable()
        try:
            del captured, y
            assert graph_ref() is None
            assert memory.expired()
        finally:
            gc.enable()
        assert x.tolist() == [1.0] * 4

    def test_replay_on_another_thread(self, backend: BackendName, device: torch.device) -> None:
        captured, x, y = _doubling(backend, device)
        x.fill_(4.0)
        thread = threading.Thread(target=captured.replay)
        thread.start()
        thread.join()
        assert y.tolist() == [8.0] * 4


class TestTemplates:
    def test_without_keep_graph_there_is_no_template(
        self, backend: BackendName, device: torch.device
    ) -> None:
        captured, _, _ = _doubling(backend, device)
        for call in (captured.raw_cuda_graph, captured.instantiate, captured.get_graph_data):
            with pytest.raises(ReplayError, match="needs the cudaGraph_t"):
                call()
        with pytest.raises(UnsupportedError, match="Inspecting a graph needs its cudaGraph_t"):
            inspect_graph(captured)

    def test_the_first_replay_instantiates(
        self, backend: BackendName, device: torch.device
    ) -> None:
        captured, _, y = _doubling(backend, device, keep_graph=True)
        with pytest.raises(RuntimeError, match=r"instantiate|cudaGraphExec_t"):
            captured.raw_cuda_graph_exec()
        captured.replay()
        assert y.tolist() == [2.0] * 4

    def test_instantiate_may_be_repeated(self, backend: BackendName, device: torch.device) -> None:
        captured, x, y = _doubling(backend, device, keep_graph=True)
        for value in (3.0, 4.0):
            captured.instantiate()
            x.fill_(value)
            captured.replay()
            assert y.tolist() == [2 * value] * 4

    def test_the_emulated_backend_has_no_handles(self) -> None:
        captured, _, _ = _doubling("emulated", torch.device("cpu"), keep_graph=True)
        captured.instantiate()
        for handle in (captured.raw_cuda_graph, captured.raw_cuda_graph_exec):
            with pytest.raises(UnsupportedError, match="neither cudaGraph_t nor cudaGraphExec_t"):
                handle()

    def test_graph_data(self, backend: BackendName, device: torch.device) -> None:
        x = torch.ones(4, device=device)
        with graph(captured := CUDAGraph(backend=backend, keep_graph=True)):
            (x * 2).neg_()
        captured.instantiate()
        if backend == "cuda" and not hasattr(torch.cuda.CUDAGraph, "get_graph_data"):
            with pytest.raises(UnsupportedError, match=r"needs torch 2\.13"):
                captured.get_graph_data()
            return
        described = captured.get_graph_data()
        before, after = described["nodes"]
        assert (before["dependencies"], before["dependents"]) == ([], [1])
        assert (after["dependencies"], after["dependents"]) == ([0], [])
        for index, node in enumerate((before, after)):
            assert (node["index"], node["node_type"]) == (index, "kernel")
            assert node["kernel_name"]
            assert node["graph_id"] == described["exec_graph_id"] == node["tools_id"] >> 32
            assert node["node_id"] == node["tools_id"] & 0xFFFFFFFF

    def test_debug_dump(self, backend: BackendName, device: torch.device, tmp_path: Path) -> None:
        x = torch.ones(4, device=device)
        captured = CUDAGraph(backend=backend)
        captured.enable_debug_mode()
        with graph(captured):
            y = x * 2
        captured.debug_dump(str(tmp_path / "graph.dot"))
        assert "digraph" in (tmp_path / "graph.dot").read_text()
        captured.replay()
        assert y.tolist() == [2.0] * 4

    def test_debug_dump_of_recorded_operators(self, tmp_path: Path) -> None:
        x = torch.ones(4)
        with graph(captured := CUDAGraph(backend="emulated", keep_graph=True)):
            (x * 2).neg_()
        captured.debug_dump(str(tmp_path / "graph.dot"))
        nodes = 'n0 [label="aten.mul.Tensor"];\nn1 [label="aten.neg_.default"];\n'
        assert (tmp_path / "graph.dot").read_text() == f"digraph {{\n{nodes}n0 -> n1;\n}}\n"

    def test_debug_dump_without_debug_mode_warns(
        self, backend: BackendName, device: torch.device, tmp_path: Path
    ) -> None:
        captured, _, _ = _doubling(backend, device)
        with pytest.warns(UserWarning, match="debug not enabled"):
            captured.debug_dump(str(tmp_path / "graph.dot"))
        assert not (tmp_path / "graph.dot").exists()


class TestPools:
    def test_tokens_are_distinct(self, backend: BackendName) -> None:
        assert graph_pool_handle(backend=backend) != graph_pool_handle(backend=backend)

    def test_graphs_share_a_pool(self, backend: BackendName, device: torch.device) -> None:
        x = torch.ones(4, device=device)
        pool = graph_pool_handle(backend=backend)
        first, second = CUDAGraph(backend=backend), CUDAGraph(backend=backend)
        with graph(first, pool=pool):
            y = x * 2
        with graph(second, pool=first.pool()):
            z = y + 1
        assert tuple(first.pool()) == tuple(second.pool()) == tuple(pool)
        x.fill_(5.0)
        first.replay()
        second.replay()
        assert z.tolist() == [11.0] * 4

    def test_graphs_have_pools_of_their_own(
        self, backend: BackendName, device: torch.device
    ) -> None:
        first, second = _doubling(backend, device)[0], _doubling(backend, device)[0]
        assert first.pool() != second.pool()


class TestGenerators:
    def test_a_registered_generator_advances_with_every_replay(
        self, backend: BackendName, device: torch.device
    ) -> None:
        generator = torch.Generator(device=device)
        captured = CUDAGraph(backend=backend)
        captured.register_generator_state(generator)
        x = torch.zeros(64, device=device)
        with graph(captured):
            x.uniform_(generator=generator)
        generator.manual_seed(7)
        replayed = []
        for _ in range(3):
            captured.replay()
            replayed.append(x.cpu())
        generator.manual_seed(7)
        for values in replayed:
            assert torch.equal(values, x.uniform_(generator=generator).cpu())

    def test_an_unregistered_generator_is_refused(
        self, backend: BackendName, device: torch.device
    ) -> None:
        generator = torch.Generator(device=device).manual_seed(3)
        x = torch.zeros(64, device=device)
        with (
            pytest.raises(CaptureError, match="uniform_"),
            graph(CUDAGraph(backend=backend)),
        ):
            x.uniform_(generator=generator)
        again = torch.Generator(device=device).manual_seed(3)
        expected = torch.zeros(64, device=device).uniform_(generator=again)
        assert torch.equal(x.uniform_(generator=generator), expected)

    def test_the_default_generator_is_always_known(self) -> None:
        captured = CUDAGraph(backend="emulated")
        with graph(captured):
            y = torch.rand(8, generator=torch.default_generator)
        torch.manual_seed(1)
        captured.replay()
        torch.manual_seed(1)
        assert torch.equal(y, torch.rand(8))


class TestClass:
    """What code does with ``torch.cuda.graph``, which is a class."""

    def test_subclasses_begin_and_end_around_the_body(
        self, backend: BackendName, device: torch.device
    ) -> None:
        calls = []

        class Noted(graph):
            def __init__(self, captured: CUDAGraph, name: str) -> None:
                super().__init__(captured, capture_error_mode="thread_local")
                self.name = name

            def __enter__(self) -> None:
                super().__enter__()
                calls.append((self.name, is_current_stream_capturing()))

            def __exit__(self, *error: object) -> None:
                calls.append((self.name, is_current_stream_capturing()))
                super().__exit__(*error)

        captured, x = CUDAGraph(backend=backend), torch.ones(4, device=device)
        with Noted(captured, "mine"):
            y = x * 2
        captured.replay()
        assert y.tolist() == [2.0] * 4
        with pytest.raises(ValueError, match="of the body"), Noted(CUDAGraph(backend=backend), "b"):
            raise ValueError("of the body")
        assert calls == [("mine", True)] * 2 + [("b", True)] * 2
        assert not is_current_stream_capturing()

    def test_entered_by_hand_and_once_more(
        self, backend: BackendName, device: torch.device
    ) -> None:
        captured, x = CUDAGraph(backend=backend), torch.ones(4, device=device)
        context = graph(captured)
        for factor in (2, 3):
            context.__enter__()
            assert not gc.isenabled()
            y = x * factor
            context.__exit__(None, None, None)
            assert gc.isenabled()
            captured.replay()
            assert y.tolist() == [float(factor)] * 4
            captured.reset()
        context.__enter__()
        error = ValueError("of the body")
        context.__exit__(ValueError, error, None)
        assert not is_current_stream_capturing()
        with pytest.raises(CaptureError, match="needs a capture_begin"):
            context.__exit__(None, None, None)

    def test_what_it_was_given(self, backend: BackendName, device: torch.device) -> None:
        captured = CUDAGraph(backend=backend)
        pool = graph_pool_handle(backend=backend)
        context = graph(captured, pool, capture_error_mode="relaxed", check_input_liveness=True)
        assert context.cuda_graph is captured
        assert context.pool == (pool,)
        assert graph(captured).pool == ()
        assert context.capture_error_mode == "relaxed"
        assert context.check_input_liveness
        if backend == "cuda":
            assert context.capture_stream == graph.default_capture_stream
            assert isinstance(context.stream_ctx, torch.cuda.StreamContext)
            with context:
                assert torch.cuda.current_stream() == context.capture_stream
                torch.zeros(1, device=device)
            own = torch.cuda.Stream()
            assert graph(captured, stream=own).capture_stream is own
        else:
            assert context.capture_stream is None


class TestBesideACapture:
    """What is done with other graphs, of torch or of autograd, does not end a capture."""

    @pytest.mark.parametrize("mode", ["global", "thread_local"])
    @pytest.mark.parametrize("how", ["released", "rebound", "reset", "collected", "by a thread"])
    def test_another_graph_is_given_up(
        self, backend: BackendName, device: torch.device, mode: str, how: str
    ) -> None:
        others = [_doubling(backend, device)[0]]
        captured, x = CUDAGraph(backend=backend), torch.ones(4, device=device)
        gone = weakref.ref(others[0])
        with graph(captured, capture_error_mode=mode):
            y = x * 3
            if how == "released":
                others.clear()
            elif how == "rebound":
                others[0] = CUDAGraph(backend=backend)
            elif how == "reset":
                others[0].reset()
            elif how == "collected":
                circle: list[object] = [others.pop()]
                circle.append(circle)
                del circle
                gc.collect()
            else:
                thread = threading.Thread(target=others.clear)
                thread.start()
                thread.join()
            y = y + 1
        captured.replay()
        assert y.tolist() == [4.0] * 4
        assert how == "reset" or gone() is None
        if how == "reset":
            with graph(others[0]):
                z = x * 5
            others[0].replay()
            assert z.tolist() == [5.0] * 4

    @pytest.mark.parametrize("on_another_stream", [False, True])
    def test_a_step_whose_warm_up_is_kept(
        self, backend: BackendName, device: torch.device, on_another_stream: bool
    ) -> None:
        linear, x = torch.nn.Linear(4, 3, device=device), torch.randn(2, 4, device=device)
        kept = []
        stream = torch.cuda.Stream() if backend == "cuda" and on_another_stream else None
        with torch.cuda.stream(stream):
            for _ in range(3):
                linear.zero_grad()
                loss = linear(x).square().mean()
                loss.backward()
                kept += [loss, linear(x).sum()]
        expected = [p.grad for p in linear.parameters()]
        linear.zero_grad()
        captured = CUDAGraph(backend=backend)
        with graph(captured):
            linear(x).square().mean().backward()
        captured.replay()
        found = [p.grad for p in linear.parameters()]
        for mine, theirs in zip(found, expected, strict=True):
            assert mine is not None
            assert theirs is not None
            assert torch.equal(mine, theirs)
        linear.zero_grad()
        kept[-1].backward()
        assert linear.bias.grad is not None
        assert linear.bias.grad.tolist() == [2.0] * 3

    @pytest.mark.parametrize("wanted", [False, True])
    def test_warnings_about_streams_come_to_those_who_want_them(
        self, backend: BackendName, device: torch.device, wanted: bool
    ) -> None:
        told = getattr(torch._C, "_warn_on_accumulate_grad_stream_mismatch", None)
        if told is None:
            pytest.skip("this torch has no reader of the user's choice")
        warn = torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch
        weight = torch.ones(4, device=device, requires_grad=True)
        kept = weight.sum()
        warn(wanted)
        try:
            with graph(CUDAGraph(backend=backend)):
                (weight * 2).sum().backward()
            assert told() == wanted
        finally:
            warn(True)
        assert kept.requires_grad


def test_what_is_no_pool_no_generator_and_no_copy(backend: str) -> None:
    """torch refuses these as well; a copy would write copies of the graph's memory."""
    captured = CUDAGraph(backend=backend)
    with pytest.raises(CaptureError, match=r"pool must be what (.|\n)*got 3"):
        captured.capture_begin(pool=3)  # type: ignore[arg-type]
    with pytest.raises(CaptureError, match=r"must be given a torch.Generator(.|\n)*got a int"):
        captured.register_generator_state(3)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="neither copied nor pickled"):
        copy.deepcopy(captured)
