"""Nodes carry the names of the Python scopes that launched them, on both backends."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from lightning_graphs.core import BackendName, CUDAGraph, graph
from lightning_graphs.device.inspect import inspect


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        with record_function("mixing"):
            return self.head(self.encoder(x)).sum()


def _scopes(backend: BackendName, device: torch.device, *, keep_graph: bool) -> list[str]:
    net = Net().to(device)
    x = torch.ones(2, 4, device=device)
    net(x).backward()
    net.zero_grad(set_to_none=True)
    captured = CUDAGraph(keep_graph, backend=backend)
    with graph(captured, enable_annotations=True):
        loss = net(x)
        with record_function("gradients"):
            loss.backward()
    return [node.scope for node in inspect(captured).nodes]


def test_nodes_carry_scopes(backend: BackendName, device: torch.device) -> None:
    scopes = " | ".join(_scopes(backend, device, keep_graph=True))
    for scope in (
        "Net/mixing/Net.encoder.0",
        "Net/mixing/Net.encoder.1",
        "Net/mixing/Net.head",
        "Net/mixing/Net.head (backward)",
        "Net/mixing/Net.encoder.0 (backward)",
    ):
        assert scope in scopes


def test_annotations_do_not_need_the_template(backend: BackendName, device: torch.device) -> None:
    kept = _scopes(backend, device, keep_graph=True)
    dropped = _scopes(backend, device, keep_graph=False)
    assert dropped == kept
    assert len(kept) > 5


def test_an_annotated_graph_replays(backend: BackendName, device: torch.device) -> None:
    x = torch.ones(3, device=device)
    captured = CUDAGraph(backend=backend)
    with graph(captured, enable_annotations=True, check_input_liveness=True):
        y = x * 2
    x.fill_(4.0)
    captured.replay()
    assert y.tolist() == [8.0] * 3
    assert inspect(captured).counts == {"kernel": 1}
