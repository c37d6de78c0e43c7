"""What zeroes a little memory in a graph is a kernel, and the same."""

from __future__ import annotations

import pytest
import torch

from lightning_graphs.device.graph import CUDAGraph, GraphPool, graph

pytestmark = pytest.mark.gpu


def test_counters_of_reductions_are_zeroed_by_kernels() -> None:
    x = torch.randn(2**17, 64, device="cuda")

    def sums() -> list[torch.Tensor]:
        return [(x * i).sum(0) for i in range(1, 4)]

    sums()
    plain = CUDAGraph(keep_graph=True)
    with graph(plain):
        sums()
    pool = GraphPool(backend="cuda", keep_graphs=True)
    with pool.capture() as short:
        found = sums()
    before, after = plain.inspection(), short.inspection()
    assert before.counts["memset"] == 3
    assert "memset" not in after.counts
    assert after.edges == before.edges
    others = [n.index for n in before.nodes if n.kind != "memset"]
    assert [after.nodes[i].name for i in others] == [before.nodes[i].name for i in others]
    for _ in range(3):
        x.normal_()
        short.replay()
        assert all(map(torch.equal, found, sums()))
