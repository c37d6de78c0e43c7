"""What replays read on the host, of tensors that never leave it."""

from __future__ import annotations

import torch

from lightning_graphs.watch.host_trace import HostTracer


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
