"""Whatever happens in a captured body, afterwards everything is as before it."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import Tensor
from torch.overrides import _get_current_function_mode_stack

from lightning_graphs import CaptureError, GraphError
from lightning_graphs.core import BackendName, CUDAGraph, graph, is_current_stream_capturing


def _line(function: object, text: str) -> int:
    lines, first = inspect.getsourcelines(function)  # type: ignore[arg-type]
    return next(first + i for i, line in enumerate(lines) if text in line and "_line" not in line)


@pytest.mark.parametrize(
    "error",
    [
        ValueError("of the body"),
        RuntimeError("of the body, while capturing"),
        KeyboardInterrupt("of the body"),
        SystemExit("of the body"),
        GraphError("of the body"),
        torch.OutOfMemoryError("of the body"),
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("empty", [True, False])
def test_the_body_wins_and_leaves_nothing(
    backend: BackendName, device: torch.device, error: BaseException, empty: bool
) -> None:
    x = torch.ones(4, device=device)
    stream = torch.cuda.current_stream() if backend == "cuda" else None
    torch.manual_seed(5)
    expected = torch.rand(4, device=device)
    torch.manual_seed(5)
    captured = CUDAGraph(backend=backend)

    def body() -> None:
        if not empty:
            x.mul_(torch.rand(4, device=device))
        raise error

    with pytest.raises(type(error), match="of the body") as caught, graph(captured):
        body()
    assert caught.value is error
    assert stream is None or torch.cuda.current_stream() == stream
    assert not is_current_stream_capturing()
    assert not _get_current_function_mode_stack()
    assert not torch.nn.modules.module._global_forward_hooks
    assert not torch.nn.modules.module._global_forward_pre_hooks
    assert x.tolist() == [1.0] * 4
    assert torch.equal(torch.rand(4, device=device), expected)
    with graph(captured):
        y = x + 1
    captured.replay()
    assert y.tolist() == [2.0] * 4


def test_a_refusal_in_a_module_names_its_line(backend: BackendName, device: torch.device) -> None:
    class Reader(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * x.sum().item()

    x, reader = torch.ones(4, device=device), Reader()
    where = f"{__file__}:{_line(Reader.forward, '.item()')} in forward"
    with (
        pytest.raises(CaptureError, match="capture") as caught,
        graph(CUDAGraph(backend=backend)),
    ):
        reader(x)
    assert where in str(caught.value)
    assert not torch.nn.modules.module._global_forward_hooks


def test_a_replay_cannot_be_captured() -> None:
    x = torch.ones(4)
    captured = CUDAGraph(backend="emulated")
    with graph(captured):
        y = x * 2
    with (
        pytest.raises(CaptureError, match="A capture cannot contain a replay"),
        graph(CUDAGraph(backend="emulated")),
    ):
        captured.replay()
    captured.replay()
    assert y.tolist() == [2.0] * 4
