"""What the tests of graphed callables share: modules, and comparisons of their state."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

both_ways = pytest.mark.parametrize("param_grads", ["autograd", "direct"])


class Net(nn.Module):
    """Linear layers, BatchNorm and dropout: parameters, buffers and random numbers."""

    def __init__(self, dropout: float = 0.25) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.dropout = nn.Dropout(dropout)
        self.second = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.dropout(torch.relu(self.norm(self.first(x)))))


def state_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def assert_same_state(module: nn.Module, expected: dict[str, Tensor]) -> None:
    found = module.state_dict()
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def gradients_of(module: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in module.parameters()]


def assert_same(found: list[Tensor | None], expected: list[Tensor | None]) -> None:
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.equal(a, b)


def two_three_one(device: torch.device) -> nn.Linear:
    """``y = 2 x0 + 3 x1 + 1``."""
    linear = nn.Linear(2, 1, device=device)
    with torch.no_grad():
        linear.weight.copy_(torch.tensor([[2.0, 3.0]]))
        linear.bias.fill_(1.0)
    return linear
