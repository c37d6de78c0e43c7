"""Gradients ahead of casts: where autograd is asked for them, and that they are the same."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from lightning_graphs.core import make_graphed_callables
from lightning_graphs.core.autograd_graph import ahead_of_casts, leaves_behind
from lightning_graphs.core.backend import BackendName
from lightning_graphs.core.capturing import CallableCapture
from lightning_graphs.core.order import ReplayOrder
from lightning_graphs.core.pool import GraphPool
from tests.core.callables_support import assert_same, gradients_of

Product = Callable[[Tensor, Tensor], Tensor]


class Weighted(nn.Module):
    """A product of its argument and its weight, as a test defines it."""

    def __init__(self, product: Product, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 4, dtype=dtype))
        self.product = product

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.weight)


def doubled_on_the_way_back(x: Tensor, weight: Tensor) -> Tensor:
    cast = weight.half()
    if cast.requires_grad:
        cast.register_hook(lambda gradient: gradient * 2)
    return x @ cast.mT.float()


ONCE: dict[str, Product] = {
    "autocast": nn.functional.linear,
    "of its own": lambda x, w: x.double() @ w.double().mT,
    "to a narrower dtype": lambda x, w: x.half() @ w.half().mT,
    "of a view of the result": lambda x, w: x @ w.to(torch.bfloat16)[:, :4].mT,
    "with a hook": doubled_on_the_way_back,
}
NOT_ONCE: dict[str, Product] = {
    "no cast": lambda x, w: (x.unsqueeze(1) * w).sum(-1),
    "used twice": lambda x, w: x @ w.mT + x @ w.mT,
    "used with and without": lambda x, w: x @ w.mT + w.sum(),
    "cast of a view": lambda x, w: x @ w.mT.to(torch.bfloat16),
    "cast to complex": lambda x, w: (x.to(torch.complex64) @ w.to(torch.complex64).mT).real,
}


def asked_for(product: Product) -> Tensor | GradientEdge:
    module = Weighted(product)
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        output = module(torch.randn(3, 4))
    assert leaves_behind([output]) == [module.weight]
    (found,) = ahead_of_casts([output], [module.weight])
    assert isinstance(found, GradientEdge) or found is module.weight
    return found


@pytest.mark.parametrize("product", ONCE.values(), ids=ONCE)
def test_a_parameter_that_is_cast_once_is_asked_for_ahead_of_it(product: Product) -> None:
    found = asked_for(product)
    assert isinstance(found, GradientEdge)
    assert found.node.name() == "ToCopyBackward0"


@pytest.mark.parametrize("product", NOT_ONCE.values(), ids=NOT_ONCE)
def test_any_other_parameter_is_asked_for_itself(product: Product) -> None:
    assert isinstance(asked_for(product), nn.Parameter)


@pytest.mark.parametrize("product", [*ONCE.values(), *NOT_ONCE.values()], ids=[*ONCE, *NOT_ONCE])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_direct_gradients_are_those_of_eager_training(
    backend: BackendName, device: torch.device, product: Product, dtype: torch.dtype
) -> None:
    module = Weighted(product, dtype).to(device)
    x = torch.randn(3, 4, device=device, dtype=dtype)
    eager = copy.deepcopy(module)
    with torch.autocast(device.type, torch.bfloat16, cache_enabled=False):
        graphed = make_graphed_callables(module, (x,), param_grads="direct", backend=backend)
        for step in range(3):
            value = x + step
            for one in (eager, graphed):
                one(value).float().square().sum().backward()  # accumulates in the later steps
            assert_same(gradients_of(module), gradients_of(eager))


class Tower(nn.Module):
    """Eight parameters that autocast casts, and two that it does not."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)), nn.LayerNorm(8))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


def backward_nodes(device: torch.device, backend: BackendName, *, direct: bool) -> int:
    module = Tower().to(device)
    pool = GraphPool(keep_graphs=True, backend=backend)
    with torch.autocast(device.type, torch.bfloat16, cache_enabled=False):
        capture = CallableCapture(
            module,
            (torch.randn(2, 8, device=device),),
            {},
            pool=pool,
            order=ReplayOrder(),
            direct=direct,
            allow_unused=False,
            static_outputs=False,
        )
        capture.warm_up(1)
        capture.capture_forward()
        capture.capture_backward()
    backward = capture.finish().backward_pass
    assert backward is not None
    nodes = sum(backward.graph.node_counts().values())
    pool.close()
    return nodes


def test_one_copy_takes_the_place_of_the_casts(backend: BackendName, device: torch.device) -> None:
    casts, copies = 8, 1  # of the gradients that were cast, and of those that were not
    found = [backward_nodes(device, backend, direct=direct) for direct in (False, True)]
    assert found[0] - found[1] == casts - copies
