"""Gradients that are zeroed where submodules are graphs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim

from lightning_graphs.regions.gradients import zeroed_quickly
from tests.training.fits import Net, compare, fit_twice, prepare

MODULES = {"scope": "modules", "modules": ["net"]}


@pytest.fixture
def parameter(device: torch.device) -> nn.Parameter:
    parameter = nn.Parameter(torch.ones(2, device=device))
    parameter.grad = torch.ones_like(parameter)
    return parameter


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_become_what_torch_makes_of_them(
    parameter: nn.Parameter, set_to_none: bool
) -> None:
    optimizer = optim.SGD([parameter, nn.Parameter(torch.ones(1))], lr=0.1)
    with zeroed_quickly(optimizer):
        assert "zero_grad" in vars(optimizer)
        optimizer.zero_grad(set_to_none)
    assert "zero_grad" not in vars(optimizer)
    if set_to_none:
        assert parameter.grad is None
    else:
        assert parameter.grad is not None
        assert parameter.grad.tolist() == [0.0, 0.0]
    assert optimizer.param_groups[0]["params"][1].grad is None


class Counting(optim.AdamW):
    """Has a ``zero_grad`` of its own."""

    zeroed = 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.zeroed += 1
        super().zero_grad(set_to_none)


def _of_a_subclass(module: Any) -> optim.Optimizer:
    return Counting(module.parameters(), lr=0.01)


def _of_an_instance(module: Any) -> optim.Optimizer:
    optimizer = optim.AdamW(module.parameters(), lr=0.01, fused=True)
    original = optimizer.zero_grad
    vars(optimizer)["zeroed"] = 0

    def zero_grad(set_to_none: bool = True) -> None:
        vars(optimizer)["zeroed"] += 1
        original(set_to_none)

    vars(optimizer)["zero_grad"] = zero_grad
    return optimizer


@pytest.mark.filterwarnings("ignore:GraphCapture")
@pytest.mark.parametrize("make", [_of_a_subclass, _of_an_instance])
def test_a_zero_grad_of_ones_own_is_called(
    backend: str, tmp_path: Path, make: Callable[[Any], optim.Optimizer]
) -> None:
    class Owning(Net):
        def configure_optimizers(self) -> Any:
            return make(self)

    counts = [
        vars(
            prepare(backend, tmp_path, captured, module=Owning, capture=MODULES)
            .run()
            .trainer.optimizers[0]
        )["zeroed"]
        for captured in (False, True)
    ]
    assert counts[0] == counts[1] > 0


def test_gradients_of_steps_that_accumulate(backend: str, tmp_path: Path) -> None:
    eager, captured = fit_twice(backend, tmp_path, capture=MODULES, accumulate_grad_batches=2)
    compare(eager, captured)
