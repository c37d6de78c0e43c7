"""Compares what a function computes in replays with what it computes eagerly."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lightning_graphs.core import BackendName, CUDAGraph, graph

Function = Callable[[Tensor], Tensor]


def gradient(function: Function, x: Tensor, *, twice: bool = False) -> Tensor:
    """The gradient of a negative multiple of its sum, or that of the squares of this."""
    loss = function(x).sum() * -1.3
    (found,) = torch.autograd.grad(loss, x, create_graph=twice)
    if twice:
        (found,) = torch.autograd.grad(found.pow(2).sum(), x)
    return found


def _bits(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().numpy().tobytes()  # type: ignore[no-any-return]


def assert_recorded(backend: BackendName, run: Function, x: Tensor) -> None:
    """Assert that replays compute what eager code computes, to the bit."""
    run(x)
    captured = CUDAGraph(backend=backend)
    with graph(captured):
        found = run(x)
    for seed in (1, 2):
        with torch.no_grad():
            x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)))
        captured.replay()
        assert _bits(found) == _bits(run(x))
