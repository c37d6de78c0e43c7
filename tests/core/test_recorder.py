"""The recorder: what an operator reads, writes and allocates, under which scope, on which line."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import record_function
from torch.testing._internal.two_tensor import TwoTensor

from lightning_graphs import CaptureError
from lightning_graphs.core import BackendName, CUDAGraph, graph
from lightning_graphs.device.trace import Operation, OperatorMode, Recorder
from lightning_graphs.private import callsite


def _recorded(body: Callable[[], object], *, strict: bool = True) -> list[Operation]:
    recorder = Recorder(strict=strict)
    with recorder:
        body()
    return recorder.operations


def _line(function: object, text: str) -> int:
    lines, first = inspect.getsourcelines(function)  # type: ignore[arg-type]
    return next(first + i for i, line in enumerate(lines) if text in line)


class TestReadsAndWrites:
    def test_allocation(self, device: torch.device) -> None:
        x = torch.ones(3, device=device)
        (operation,) = _recorded(lambda: x + x)
        assert operation.name == "aten.add.Tensor"
        assert (operation.reads, operation.writes, operation.nbytes) == ((0,), (1,), 12)

    def test_an_intermediate_is_one_storage_however_it_is_viewed(
        self, device: torch.device
    ) -> None:
        x = torch.ones(2, 3, device=device)
        first, second = _recorded(lambda: (x * 2).t()[1:].mul(3))
        assert first.writes == second.reads == (1,)
        assert second.writes == (2,)

    def test_views_are_not_recorded(self, device: torch.device) -> None:
        x = torch.ones(2, 3, device=device)
        views = _recorded(lambda: x.t().reshape(3, 2)[0].unsqueeze(0).as_strided((1,), (1,)))
        assert views == []

    def test_in_place(self, device: torch.device) -> None:
        x, y = torch.ones(2, 2, device=device), torch.ones(2, device=device)
        (operation,) = _recorded(lambda: x[0].add_(y))
        assert (operation.reads, operation.writes, operation.nbytes) == ((0, 1), (0,), 8)

    def test_out(self, device: torch.device) -> None:
        x, out = torch.ones(4, device=device), torch.zeros(4, device=device)
        (operation,) = _recorded(lambda: torch.mul(x, 2, out=out))
        assert operation.name == "aten.mul.out"
        assert (set(operation.reads), operation.writes) == ({0, 1}, (1,))

    def test_lists_of_tensors(self, device: torch.device) -> None:
        xs = [torch.ones(4, device=device) for _ in range(3)]
        (operation,) = _recorded(lambda: torch._foreach_add_(xs, 1.0))
        assert (operation.reads, operation.writes) == ((0, 1, 2), (0, 1, 2))
        assert operation.nbytes == 48

    def test_running_statistics_are_written_though_the_schema_is_silent(
        self, device: torch.device
    ) -> None:
        norm = nn.BatchNorm1d(4, track_running_stats=True).to(device)
        norm.num_batches_tracked = None
        assert norm.running_mean is not None
        x = torch.randn(8, 4, device=device)
        recorder = Recorder()
        with recorder:
            norm(x)
            statistics = {recorder.know(norm.running_mean).id, recorder.know(norm.running_var).id}
        written = {i for operation in recorder.operations for i in operation.writes}
        assert statistics <= written

    def test_an_id_is_never_used_again(self, device: torch.device) -> None:
        x = torch.ones(64, device=device)

        def body() -> None:
            for _ in range(20):
                x + 1  # freed at once: the next result may sit at the same address

        writes = [operation.writes for operation in _recorded(body)]
        assert writes == [(i,) for i in range(1, 21)]


@torch.library.custom_op("lightning_graphs_tests::honest", mutates_args=("x",))
def honest(x: Tensor) -> Tensor:
    result = x + 1
    x.mul_(2)
    return result


class TestCustomAndCompiledCode:
    def test_an_honest_one_is_replayed(self, backend: BackendName, device: torch.device) -> None:
        x = torch.ones(3, device=device)
        captured = CUDAGraph(backend=backend)
        with graph(captured):
            y = honest(x)
        assert x.tolist() == [1.0] * 3
        captured.replay()
        captured.replay()
        assert x.tolist() == [4.0] * 3
        assert y.tolist() == [3.0] * 3

    @pytest.mark.filterwarnings("ignore:Using `torch.compile.module.` when there are global hooks")
    @pytest.mark.parametrize("original", [nn.Linear(2, 2), torch.sin], ids=["module", "function"])
    def test_compiled_code_is_refused(
        self, device: torch.device, original: Callable[[Tensor], Tensor]
    ) -> None:
        if isinstance(original, nn.Module):
            original.to(device)
        net = torch.compile(original, backend="eager")
        x = torch.ones(1, 2, device=device)
        with pytest.raises(CaptureError, match=r"torch\.compile"):
            _recorded(lambda: net(x))

    @pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # of what it imports
    @pytest.mark.parametrize("fullgraph", [False, True])
    def test_compiled_code_is_compiled_again_afterwards(
        self, device: torch.device, fullgraph: bool
    ) -> None:
        """Or else it runs eagerly from then on, and raises with ``fullgraph=True``."""
        runs = []

        def counting(module: Any, _: Any) -> Any:
            def run(*args: Any) -> Any:
                runs.append(1)
                return module(*args)

            return run

        torch.compiler.reset()
        net = torch.compile(lambda x: x.sin() + 1, backend=counting, fullgraph=fullgraph)
        x = torch.ones(2, device=device)
        net(x)
        with pytest.raises(CaptureError, match=r"torch\.compile"):
            _recorded(lambda: net(x))
        assert torch.equal(net(x), x.sin() + 1)
        assert len(runs) == 2

    @pytest.mark.parametrize(
        "body",
        [
            lambda x: x.to_sparse_csr() @ x,
            lambda x: torch.sparse.mm(x.to_sparse(), x),
        ],
        ids=["csr", "coo"],
    )
    @pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
    def test_other_layouts_are_refused(
        self, device: torch.device, body: Callable[[Tensor], Tensor]
    ) -> None:
        x = torch.eye(2, device=device)
        with pytest.raises(CaptureError, match=r"dense strided|depends on values"):
            _recorded(lambda: body(x))

    @pytest.mark.parametrize("strict", [False, True])
    def test_a_recorder_sees_the_parts_of_a_subclass(
        self, device: torch.device, strict: bool
    ) -> None:
        both = TwoTensor(torch.ones(2, device=device), torch.ones(2, device=device))
        operations = _recorded(lambda: both * 3, strict=strict)
        assert [operation.name for operation in operations] == ["aten.mul.Tensor"] * 2

    @pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
    def test_a_watching_recorder_lets_sparse_tensors_pass(self, device: torch.device) -> None:
        x = torch.eye(2, device=device)
        results: list[Tensor] = []
        _recorded(lambda: results.append(torch.sparse.mm(x.to_sparse(), x)), strict=False)
        assert torch.equal(results[0], x)

    def test_a_subclass_without_a_dispatch_of_its_own_is_a_tensor(
        self, backend: BackendName, device: torch.device
    ) -> None:
        class Named(nn.Parameter):
            pass

        weight = Named(torch.ones(2, device=device))
        captured = CUDAGraph(backend=backend)
        with graph(captured):
            y = weight.detach() * 2
        captured.replay()
        assert y.tolist() == [2.0] * 2


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        with record_function("scaling"), record_function("twice"):
            return x * self.scale * 2


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Inner(), Inner()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.tanh()


class TestScopesAndSites:
    def test_forward_scopes(self, device: torch.device) -> None:
        net = Outer().to(device)
        x = torch.ones(3, device=device)
        scopes = [operation.scope for operation in _recorded(lambda: net(x))]
        assert scopes == [
            *["Outer.blocks.0/scaling/twice"] * 2,
            *["Outer.blocks.1/scaling/twice"] * 2,
            "Outer",
        ]

    def test_backward_operators_carry_the_scope_of_their_forward(
        self, device: torch.device
    ) -> None:
        net = Outer().to(device)
        x = torch.ones(3, device=device)
        scopes = [o.scope for o in _recorded(lambda: net(x).sum().backward())]
        assert "Outer (backward)" in scopes
        first = scopes.index("Outer.blocks.1 (backward)")
        assert "Outer.blocks.0 (backward)" in scopes[first:]
        assert (
            "Outer.blocks.1 (backward)" not in scopes[scopes.index("Outer.blocks.0 (backward)") :]
        )

    def test_scopes_close_after_an_exception(self, device: torch.device) -> None:
        class Failing(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                raise ValueError("in forward")

        net, x = nn.Sequential(Failing()).to(device), torch.ones(3, device=device)

        def body() -> None:
            with pytest.raises(ValueError, match="in forward"):
                net(x)
            x + 1

        (operation,) = _recorded(body)
        assert operation.scope == ""
        assert not torch.nn.modules.module._global_forward_hooks

    def test_the_line_of_forward_and_backward_operators(self, device: torch.device) -> None:
        weight = torch.ones(3, device=device, requires_grad=True)

        def body() -> None:
            loss = weight.exp().sum()  # forward
            loss.backward()  # backward

        operations = _recorded(body)
        lines = {str(operation.site) for operation in operations}
        expected = {f"{__file__}:{_line(body, f'# {name}')}" for name in ("forward", "backward")}
        if device.type == "cpu":
            assert lines == expected
        else:  # a backward pass on a GPU runs on autograd's own thread, without frames of the user
            assert lines - {"?:0"} == expected
        assert operations[0].site.function == "body"
        assert operations[0].site.source == "loss = weight.exp().sum()  # forward"

    def test_the_recorder_leaves_no_mode_or_hook_after_a_refusal(
        self, device: torch.device
    ) -> None:
        x = torch.ones(3, device=device)
        with pytest.raises(CaptureError, match="value on the host"):
            _recorded(lambda: nn.Identity()(x).sum().item())
        assert not torch.nn.modules.module._global_forward_hooks
        assert not torch.nn.modules.module._global_forward_pre_hooks
        assert not torch.overrides._get_current_function_mode_stack()


def test_a_library_is_known_wherever_it_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "torchmetrics").mkdir()
    (tmp_path / "torchmetrics" / "__init__.py").touch()
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchmetrics"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(callsite, "LIBRARIES", callsite.Libraries())
    callsite.LIBRARIES.add(["torchmetrics"])
    assert callsite.is_library(str(tmp_path / "torchmetrics" / "metric.py"))
    assert callsite.is_library(torch.__file__)
    assert not callsite.is_library(str(tmp_path / "metrics.py"))


def test_an_error_that_code_catches_is_told() -> None:
    mode, errors = OperatorMode(), list[RuntimeError]()
    mode.on_error = errors.append
    with mode, contextlib.suppress(RuntimeError):
        torch.ones(2, 3) @ torch.ones(2, 3)
    assert len(errors) == 1
