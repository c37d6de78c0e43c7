"""Calls that differ from the captured one, and state that moved since."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from lightning_graphs.core import make_graphed_callables
from lightning_graphs.device.graph import BackendName
from lightning_graphs.errors import CaptureError, ReplayError
from tests.core.callables_support import (
    Net,
    assert_same,
    assert_same_state,
    both_ways,
    gradients_of,
    state_of,
    two_three_one,
)


def test_values_changed_in_place_are_used(backend: BackendName, device: torch.device) -> None:
    linear = two_three_one(device)
    x = torch.ones(1, 2, device=device)
    graphed = make_graphed_callables(linear, (x,), backend=backend)
    linear.load_state_dict({"weight": torch.tensor([[5.0, 7.0]]), "bias": torch.tensor([0.0])})
    assert graphed(x).item() == 12.0


def test_a_parameter_that_belongs_to_no_module_is_watched(
    backend: BackendName, device: torch.device
) -> None:
    class Borrowing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.borrowed = [torch.full((2,), 3.0, device=device, requires_grad=True)]

        def forward(self, x: Tensor) -> Tensor:
            return x * self.borrowed[0]

    module, x = Borrowing(), torch.full((2,), 2.0, device=device)
    graphed = make_graphed_callables(module, (torch.zeros_like(x),), backend=backend)
    graphed(x).sum().backward()
    (borrowed,) = module.borrowed
    assert borrowed.grad is not None
    assert borrowed.grad.tolist() == [2.0, 2.0]
    borrowed.data = borrowed.data.clone()
    with pytest.raises(ReplayError, match="parameter 0 moved"):
        graphed(x)


@both_ways
def test_autocast_without_caching_equals_eager(
    backend: BackendName, device: torch.device, param_grads: Any
) -> None:
    class Mixed(nn.Module):
        """A part in full precision, whose backward must not be cast either."""

        def __init__(self) -> None:
            super().__init__()
            self.low, self.high = nn.Linear(4, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            y = self.low(x)
            with torch.autocast(x.device.type, enabled=False):
                return self.high(y.float())

    net = Mixed().to(device)
    eager, x = copy.deepcopy(net), torch.randn(6, 4, device=device)
    with torch.autocast(device.type, torch.bfloat16, cache_enabled=False):
        graphed = make_graphed_callables(
            net, (torch.zeros_like(x),), param_grads=param_grads, backend=backend
        )
    for _ in range(2):
        results = []
        for model in (graphed, eager):
            with torch.autocast(device.type, torch.bfloat16, cache_enabled=False):
                y = model(x)
            y.square().sum().backward()
            results.append(y)
        assert torch.equal(*results)
        assert_same(gradients_of(graphed), gradients_of(eager))


@pytest.mark.parametrize("as_function", [False, True])
def test_train_and_eval_of_any_submodule_are_respected(
    backend: BackendName, device: torch.device, as_function: bool
) -> None:
    net = Net().to(device)
    eager = copy.deepcopy(net)
    x = torch.randn(6, 4, device=device)
    graphed = make_graphed_callables(
        (lambda x: net(x)) if as_function else net, (torch.zeros_like(x),), backend=backend
    )
    for name, flag in (("norm", False), ("dropout", False), ("", False), ("", True)):
        for each in (net, eager):
            each.get_submodule(name).train(flag)
        torch.manual_seed(3)
        found = graphed(x)
        torch.manual_seed(3)
        assert torch.equal(found, eager(x)), (name, flag)
    assert_same_state(net, state_of(eager))


def test_an_argument_written_behind_autograd_is_refused(
    backend: BackendName, device: torch.device
) -> None:
    with pytest.raises(CaptureError, match=r"args\[0\] is written in place"):
        make_graphed_callables(
            lambda x: x.data.add_(1) * 2, (torch.full((2,), 3.0, device=device),), backend=backend
        )


def test_an_argument_of_nan_is_not_taken_for_a_written_one(
    backend: BackendName, device: torch.device
) -> None:
    sample = torch.full((2,), float("nan"), device=device)
    graphed = make_graphed_callables(lambda x: x * 2, (sample,), backend=backend)
    assert graphed(torch.ones(2, device=device)).tolist() == [2.0, 2.0]


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize("way", ["vmap", "jvp", "dual"])
def test_inside_of_a_transform_the_original_runs(
    backend: BackendName, device: torch.device, way: str
) -> None:
    def tangent_of(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        if way == "vmap":
            mapped: Tensor = torch.func.vmap(function)(torch.stack([x, 2 * x]))
            return mapped
        if way == "jvp":
            derivative: Tensor = torch.func.jvp(function, (x,), (torch.ones_like(x),))[1]
            return derivative
        with forward_ad.dual_level():
            dual = function(forward_ad.make_dual(x, torch.ones_like(x)))
            return forward_ad.unpack_dual(dual).tangent

    net = nn.Linear(4, 4).to(device)
    x = torch.randn(4, 4, device=device)
    graphed = make_graphed_callables(net.forward, (x,), backend=backend)
    with torch.no_grad():
        assert torch.equal(tangent_of(graphed, x), tangent_of(net, x))
    assert torch.equal(graphed(x), net(x))
