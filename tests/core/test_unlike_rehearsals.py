"""What a GPU does and a rehearsal does not: tensors that stay on the host, layers of cuDNN."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lightning_graphs.device.emulated import UndoingBackend
from lightning_graphs.device.graph import GraphPool
from lightning_graphs.device.rules import noting, refusals, stopped
from lightning_graphs.device.trace import OperatorCall, OperatorsSeen
from lightning_graphs.errors import CaptureError
from lightning_graphs.watch.host_trace import HostTracer


def test_a_tensor_of_the_host_is_read_in_the_batch_of_the_replay() -> None:
    """... and not where the graph's copy of it lies, which a replay fills later."""
    static, given = torch.tensor([4, 3]), torch.tensor([4, 3])
    tracer = HostTracer(torch.device("meta"), [static], [given], 1024, [])
    with tracer:
        assert static.tolist() == [4, 3]
    program = tracer.finish()
    assert program is not None
    assert program.run(lambda: [torch.tensor([4, 3])])
    assert not program.run(lambda: [torch.tensor([4, 2])])


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x ** torch.tensor(2.5),
        lambda x: torch.tensor(2.5) ** x,
        lambda x: torch.where(torch.tensor(True), x, 2 * x),
        lambda x: torch.where(x > 0, torch.tensor(0.5), x),
    ],
)
def test_kernels_that_copy_numbers_of_the_host_find_them_on_the_device(
    call: Callable[[Tensor], Tensor],
) -> None:
    """... in backward passes, too: CUDA refuses to copy them from there in a capture."""
    x = torch.empty(4, device="meta", requires_grad=True)
    devices = []

    def see(operator: OperatorCall, _: object) -> None:
        if operator.func is torch.ops.aten.where.self:
            devices.append({tensor.device.type for tensor in operator.inputs})

    tracer = HostTracer(x.device, [], [], 1024, [])
    with OperatorsSeen(see):
        with tracer:
            y = call(x).sum()
        with tracer if tracer.in_backward else contextlib.nullcontext():
            y.backward()
    assert devices
    assert all(found == {"meta"} for found in devices)


def test_a_backward_pass_that_reads_is_refused_with_the_line_of_its_forward_pass() -> None:
    x = torch.ones(4, requires_grad=True)
    tracer = HostTracer(x.device, [], [], 1024, [])
    with tracer:
        y = x.prod()  # forward
    assert tracer.in_backward
    said = pytest.raises(CaptureError, match=r"backward pass of Prod at .*# forward")
    with said, stopped(), tracer:
        (2 * y).backward()


def test_the_doctor_lets_a_step_give_memory_to_tensors_of_its_own() -> None:
    """As recurrent layers of cuDNN do; a tensor from before keeps its memory."""
    weights, known = torch.ones(4), torch.empty(0)
    pool = GraphPool(backend=UndoingBackend(weights.device, is_rehearsal=False))
    with contextlib.suppress(CaptureError), refusals() as refused, pool.capture():
        torch.empty(0).set_(weights.untyped_storage())
        assert refused == []
        known.set_(weights.untyped_storage())
    with pytest.raises(CaptureError, match=r"aten\.set_\.source_Storage"), pool.capture():
        known.set_(weights.untyped_storage())


def test_every_refusal_is_noted_and_the_code_goes_on(device: torch.device) -> None:
    """... as it would, and all that it writes is undone."""
    x = torch.arange(4.0, device=device)
    before = torch.ones(2)

    def body() -> list[object]:
        x.add_(1)
        noise = torch.eye(2).to_mkldnn() if device.type == "cpu" else None  # of no GPU
        found: list[object] = [x.sum().item(), x[x > 2].tolist(), noise]
        before.to(device)
        return [*found, torch.tensor([1.0, 2.0], device=device)]

    pool = GraphPool(backend=UndoingBackend(device, is_rehearsal=False))
    with noting(), refusals() as refused, pool.capture():
        results = body()
        said = [error.observed.partition(" at ")[0].rpartition("(")[2] for error in refused]
    assert results[:2] == [10.0, [3.0, 4.0]]
    assert x.tolist() == [0.0, 1.0, 2.0, 3.0]
    wanted = {"aten._local_scalar_dense.default)", "aten.index.Tensor", "tolist", "tensor"}
    wanted |= {"aten._to_copy.default"} if device.type == "cuda" else set()
    assert set(said) >= wanted
