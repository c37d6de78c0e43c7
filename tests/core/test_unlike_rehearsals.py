"""What a GPU does and a rehearsal does not: tensors that stay on the host, layers of cuDNN."""

from __future__ import annotations

import torch

from lightning_graphs.device.rules import Obstacle
from lightning_graphs.private.callsite import CallSite, CallSiteFinder
from lightning_graphs.watch.host_trace import HostTracer
from lightning_graphs.watch.noted import Observer


def test_a_tensor_of_the_host_is_read_in_the_batch_of_the_replay() -> None:
    """... and not where the graph's copy of it lies, which a replay fills later."""
    static, given = torch.tensor([4, 3]), torch.tensor([4, 3])
    tracer = HostTracer(torch.device("meta"), [static], [given], 1024)
    with tracer:
        assert static.tolist() == [4, 3]
    program = tracer.finish()
    assert program is not None
    assert program.run(lambda: [torch.tensor([4, 3])])
    assert not program.run(lambda: [torch.tensor([4, 2])])


def test_the_doctor_lets_a_step_give_memory_to_tensors_of_its_own() -> None:
    """As recurrent layers of cuDNN do; a tensor from before keeps its memory."""
    found: list[tuple[str, str]] = []

    def note(operator: str, obstacle: Obstacle, _: CallSite) -> None:
        found.append((operator, obstacle.kind))

    weights, known = torch.ones(4), torch.empty(0)
    observer = Observer(note, lambda *_: (), [torch.default_generator], CallSiteFinder(), False)
    with observer:
        torch.empty(0).set_(weights.untyped_storage())
        assert found == []
        known.set_(weights.untyped_storage())
    assert found == [("aten.set_.source_Storage", "moved-memory")]
