"""A replay refuses to read memory that was freed since the capture, and names the tensor."""

from __future__ import annotations

import gc
import inspect
import sys
import weakref

import pytest
import torch
from torch import Tensor, nn

from lightning_graphs import ReplayError
from lightning_graphs.core import BackendName, CUDAGraph, graph, graph_pool_handle
from lightning_graphs.private.engine import leaves_in_reach


def _line(function: object, text: str) -> int:
    lines, first = inspect.getsourcelines(function)  # type: ignore[arg-type]
    return next(first + i for i, line in enumerate(lines) if text in line)


def test_a_dead_input_is_named(backend: BackendName, device: torch.device) -> None:
    x = torch.ones(3, 5, dtype=torch.float64, device=device)
    captured = CUDAGraph(backend=backend)
    with graph(captured, check_input_liveness=True):
        y = x * 2  # first use
    captured.replay()
    assert y.sum().item() == 30.0
    del x  # the end
    with pytest.raises(ReplayError, match="that it reads was freed or moved") as caught:
        captured.replay()
    message, here = str(caught.value), test_a_dead_input_is_named
    assert f"float64[3x5] on {device.type}" in message
    assert f"first used at {__file__}:{_line(here, '# first use')} in" in message
    if torch.__version__ >= (2, 13):  # torch 2.8 does not tell where
        assert f"freed at {__file__}:{_line(here, '# the end')} in" in message
    assert ", freed" in message
    assert "keep a reference" in message


def test_live_inputs_pass(backend: BackendName, device: torch.device) -> None:
    layer = nn.Linear(4, 2).to(device)
    x = torch.ones(3, 4, device=device)
    layer(x)
    captured = CUDAGraph(backend=backend)
    with graph(captured, check_input_liveness=True):
        y = layer(x.view(4, 3).t().contiguous().view(3, 4)).relu().sum()
    x.fill_(0.5)
    captured.replay()
    torch.testing.assert_close(y, layer(x).relu().sum())


def test_tensors_of_the_capture_itself_may_die(backend: BackendName, device: torch.device) -> None:
    x = torch.ones(3, device=device)
    captured = CUDAGraph(backend=backend)
    with graph(captured, check_input_liveness=True):
        intermediate = x + 1
        y = intermediate * torch.tensor(2.0)
    del intermediate
    gc.collect()
    captured.replay()
    assert y.tolist() == [4.0] * 3


def test_garbage_that_held_a_storage_takes_no_tensor_with_it(
    backend: BackendName, device: torch.device
) -> None:
    x = torch.ones(3, device=device)
    captured = CUDAGraph(backend=backend)
    with graph(captured, check_input_liveness=True):
        y = x * 2
    garbage: list[object] = [x.untyped_storage()]  # as pickle leaves behind
    garbage.append(garbage)
    del garbage
    gc.collect()
    x.fill_(3.0)
    captured.replay()
    assert y.tolist() == [6.0] * 3


def test_a_view_keeps_its_base_alive(backend: BackendName, device: torch.device) -> None:
    base = torch.ones(6, device=device)
    view = base[2:4]
    captured = CUDAGraph(backend=backend)
    with graph(captured, check_input_liveness=True):
        y = base * 3
    del base
    captured.replay()
    assert y.tolist() == [3.0] * 6
    del view
    with pytest.raises(ReplayError, match=r"float32\[6\]"):
        captured.replay()


def test_a_moved_input_is_refused(backend: BackendName, device: torch.device) -> None:
    x = torch.ones(4, device=device)
    captured = CUDAGraph(backend=backend)
    with graph(captured, check_input_liveness=True):
        y = x + 1
    x.untyped_storage().resize_(1 << 24)
    with pytest.raises(ReplayError, match="moved"):
        captured.replay()
    assert y.shape == (4,)


def test_a_new_tensor_at_the_old_place_is_no_substitute(
    backend: BackendName, device: torch.device
) -> None:
    x = torch.ones(64, device=device)
    captured = CUDAGraph(backend=backend)
    with graph(captured, check_input_liveness=True):
        x * 2
    del x
    replacement = torch.full((64,), 5.0, device=device)
    with pytest.raises(ReplayError, match=r"float32\[64\]"):
        captured.replay()
    assert replacement.cpu().tolist() == [5.0] * 64


def test_an_output_of_an_earlier_graph_of_the_pool_may_be_dropped(
    backend: BackendName, device: torch.device
) -> None:
    """The earlier graph owns the memory and writes it again before the later one reads it."""
    x = torch.ones(4, device=device)
    pool = graph_pool_handle(backend=backend)
    first, second = CUDAGraph(backend=backend), CUDAGraph(backend=backend)

    def capture() -> Tensor:
        with graph(first, pool=pool):
            y = x * 2
        with graph(second, pool=pool, check_input_liveness=True):
            return y + 1

    z = capture()
    x.fill_(10.0)
    first.replay()
    second.replay()
    assert z.tolist() == [21.0] * 4


def test_an_output_of_a_graph_that_is_gone_is_dead() -> None:
    x = torch.ones(4)
    first, second = CUDAGraph(backend="emulated"), CUDAGraph(backend="emulated")
    with graph(first):
        y = x * 2
    with graph(second):
        y + 1
    del y
    first.reset()
    with pytest.raises(ReplayError, match=r"float32\[4\] on cpu"):
        second.replay()


def test_a_look_for_leaves_keeps_no_tensor_alive() -> None:
    """Captures with torch up to 2.11 look; up to Python 3.12 a frame keeps what it is asked for."""
    x = torch.ones(3)
    alive = weakref.ref(x)

    def called() -> set[int]:
        return {id(leaf) for leaf in leaves_in_reach(sys._getframe())}

    assert id(x) in called()
    del x
    assert alive() is None


def test_a_look_for_leaves_takes_nothing_from_a_table_that_code_holds() -> None:
    x = torch.ones(3)
    table = locals()
    assert id(x) in {id(leaf) for leaf in leaves_in_reach(sys._getframe())}
    assert table["x"] is x
