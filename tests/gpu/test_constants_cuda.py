"""Numbers rewritten inside of torch's fused optimizer kernels, on a real GPU."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, optim

from lightning_graphs.core import CUDAGraph, graph
from lightning_graphs.training.live_numbers import GraphNumbers
from lightning_graphs.training.optimizers import CapturableOptimizer

DEVICE = torch.device("cuda")

OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "Adam": lambda g: optim.Adam(g, weight_decay=0.25, fused=True),
    "Adam with amsgrad": lambda g: optim.Adam(g, amsgrad=True, fused=True),
    "AdamW": lambda g: optim.AdamW(g, fused=True),
    "SGD": lambda g: optim.SGD(g, fused=True),
    "SGD with momentum": lambda g: optim.SGD(g, momentum=0.75, dampening=0.125, fused=True),
    "SGD with nesterov": lambda g: optim.SGD(g, momentum=0.75, nesterov=True, fused=True),
}


class Twins:
    """One network whose optimizer step is captured with live numbers, and its eager twin."""

    def __init__(self, name: str, layers: int = 3, dtype: torch.dtype = torch.float32) -> None:
        parts = [nn.Linear(16, 16, device=DEVICE, dtype=dtype) for _ in range(layers)]
        self.net = nn.Sequential(*parts)
        self.twin = copy.deepcopy(self.net)
        self.optimizer, self.eager = map(OPTIMIZERS[name], map(_groups, (self.net, self.twin)))
        for group in (*self.optimizer.param_groups, *self.eager.param_groups):
            group["lr"] = torch.tensor(2**-6, device=DEVICE)
        for mine, theirs in zip(self.net.parameters(), self.twin.parameters(), strict=True):
            mine.grad = torch.randn_like(mine)
            theirs.grad = mine.grad.clone()
        self.optimizer.step()
        self.eager.step()
        capturable = CapturableOptimizer(self.optimizer, DEVICE, live=True)
        assert capturable.numbers is not None
        self.graph = CUDAGraph(keep_graph=True, backend="cuda")
        with graph(self.graph), capturable.numbers.marked():
            self.optimizer.step()
        self.numbers: GraphNumbers = capturable.numbers.find(self.graph)

    def move(self, optimizer: optim.Optimizer, step: int) -> None:
        for i, group in enumerate(optimizer.param_groups):
            shift = (step + i) % 5 / 32
            if "betas" in group:
                group["betas"] = (0.95 - shift, 0.999 - shift / 4)
                group["eps"] = 1e-6 * (1 + step)
            elif group["momentum"] != 0:
                group["momentum"], group["dampening"] = 0.9 - shift, shift
            group["weight_decay"] = shift

    def difference(self) -> float:
        pairs = zip(self.net.parameters(), self.twin.parameters(), strict=True)
        return max(float((a - b).detach().abs().max()) for a, b in pairs)


def _groups(net: nn.Sequential) -> list[dict[str, Any]]:
    return [{"params": list(net[:1].parameters())}, {"params": list(net[1:].parameters())}]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_replays_compute_with_what_was_written(name: str, dtype: torch.dtype) -> None:
    twins = Twins(name, dtype=dtype)
    for step in range(10):
        twins.move(twins.optimizer, step)
        twins.move(twins.eager, step)
        twins.numbers.refresh()
        twins.graph.replay()
        twins.eager.step()
        assert twins.difference() == 0.0, step


def test_every_kernel_of_many_parameters_is_rewritten() -> None:
    twins = Twins("AdamW", layers=150)
    for step in range(3):
        twins.move(twins.optimizer, step)
        twins.move(twins.eager, step)
        twins.numbers.refresh()
        twins.graph.replay()
        twins.eager.step()
    assert twins.difference() == 0.0


def test_writes_do_not_reach_replays_that_are_queued() -> None:
    twins = Twins("SGD with momentum")
    torch.cuda._sleep(100_000_000)  # the replays wait while all numbers are written
    for step in range(20):
        twins.move(twins.optimizer, step)
        twins.numbers.refresh()
        twins.graph.replay()
    for step in range(20):
        twins.move(twins.eager, step)
        twins.eager.step()
    assert twins.difference() == 0.0
