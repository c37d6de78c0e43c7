"""Steps whose graph stays in one stream: work that torch's dispatcher shows incompletely."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from lightning_graphs.device.graph import GraphPool
from lightning_graphs.device.overlap import DataFlow
from lightning_graphs.device.schedule import SIDE
from lightning_graphs.regions import overlapped
from tests.gpu.test_inspect_cuda import set_bytes
from tests.training.equal.test_overlap import fits

pytestmark = pytest.mark.gpu


def seen(between: Callable[[Tensor], object]) -> DataFlow:
    """The data flow of a step that does something with what its layers have computed."""
    net = nn.Sequential(*(nn.Linear(64, 64) for _ in range(10))).cuda()  # a chain that is long
    x = torch.randn(32, 64, device="cuda")

    def step() -> None:
        net.zero_grad()
        y = net(x)
        between(y.detach())
        y.square().sum().backward()

    step()
    torch.cuda.synchronize()
    flow = DataFlow("cuda")
    with GraphPool(backend="cuda", keep_graphs=True).capture(), flow:
        step()
    return flow


def test_gradients_of_weights_run_beside() -> None:
    flow = seen(lambda y: None)
    assert not flow.why_not
    found = flow.schedule(2**40)
    beside = [w.name for w, s in zip(found.works, found.streams, strict=True) if s == SIDE]
    assert {"aten::mm", "aten::sum"} == {*beside}


def test_work_of_other_libraries_is_noticed() -> None:
    assert "no operator of torch" in seen(set_bytes).why_not


def test_streams_of_user_code_are_noticed() -> None:
    def on_a_stream(y: Tensor) -> None:
        main, stream = torch.cuda.current_stream(), torch.cuda.Stream()
        stream.wait_stream(main)
        with torch.cuda.stream(stream):
            y.mul_(1.0)
        main.wait_stream(stream)

    assert "stream of user code" in seen(on_a_stream).why_not


def test_what_waits_in_pinned_memory_is_followed() -> None:
    pinned = torch.zeros(32, 64).pin_memory()

    def there_and_back(y: Tensor) -> None:
        pinned.copy_(y, non_blocking=True)
        y.copy_(pinned, non_blocking=True)

    flow = seen(there_and_back)
    there, back = (use for use in flow.operators if use.func is torch.ops.aten.copy_.default)
    assert there.writes
    assert {*there.writes} <= {*back.reads}


def test_a_second_graph_that_takes_too_much_memory_is_let_go_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"FIRST": 2, "MORE_MEMORY": 0.0, "AT_LEAST": 0}.items():
        monkeypatch.setattr(overlapped, name, value)
    captured = fits("cuda", tmp_path)
    (record,) = captured.capture.report.graphs
    assert record.overlap.startswith("one stream: two take ")
    assert record.replays > 20
