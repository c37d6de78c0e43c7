"""Gradients ahead of casts: which ones, and that they are the same as after them."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, autograd, nn
from torch.autograd.graph import GradientEdge
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_graphs.autograd.callables import CallableCapture, CaptureSettings
from lightning_graphs.autograd.graphed import ReplayOrder
from lightning_graphs.core import make_graphed_callables
from lightning_graphs.device.graph import BackendName, GraphPool
from lightning_graphs.private.engine import (
    ahead_of_casts,
    has_python_nodes,
    leaves_behind,
    runs_code,
)
from lightning_graphs.regions.gradients import cast_together
from tests.core.callables_support import assert_same, both_ways, gradients_of

Product = Callable[[Tensor, Tensor], Tensor]


def integers(*shape: int) -> Tensor:
    """Small ones: sums of their products are exact, in whatever order a kernel adds."""
    return torch.randint(-1, 2, shape).float()


class Weighted(nn.Module):
    """A product of its argument and its weight, as a test defines it."""

    def __init__(self, product: Product, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(integers(5, 4).to(dtype))
        self.product = product

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.weight)


def doubled_on_the_way_back(x: Tensor, weight: Tensor) -> Tensor:
    cast = weight.half()
    if cast.requires_grad:
        cast.register_hook(lambda gradient: gradient * 2)
    return x @ cast.mT.float()


AHEAD: dict[str, Product] = {
    "autocast": nn.functional.linear,
    "of its own": lambda x, w: x.double() @ w.double().mT,
    "to a narrower dtype": lambda x, w: x.half() @ w.half().mT,
    "of a view of the result": lambda x, w: x @ w.to(torch.bfloat16)[:, :4].mT,
    "with a hook": doubled_on_the_way_back,
}
ITSELF: dict[str, Product] = {
    "no cast": lambda x, w: (x.unsqueeze(1) * w).sum(-1),
    "used twice": lambda x, w: x @ w.mT + x @ w.mT,
    "used with and without": lambda x, w: x @ w.mT + w.sum(),
    "cast of a view": lambda x, w: x @ w.mT.to(torch.bfloat16),
    "cast to complex": lambda x, w: (x.to(torch.complex64) @ w.to(torch.complex64).mT).real,
}


def place_of_gradient(product: Product) -> Tensor | GradientEdge:
    module = Weighted(product)
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        output = module(torch.randn(3, 4))
    assert leaves_behind([output]) == [module.weight]
    (found,) = ahead_of_casts([output], [module.weight])
    assert isinstance(found, GradientEdge) or found is module.weight
    return found


@pytest.mark.parametrize("product", AHEAD.values(), ids=AHEAD)
def test_a_parameter_that_is_cast_once_is_asked_for_ahead_of_it(product: Product) -> None:
    found = place_of_gradient(product)
    assert isinstance(found, GradientEdge)
    assert found.node.name() == "ToCopyBackward0"


@pytest.mark.parametrize("product", ITSELF.values(), ids=ITSELF)
def test_any_other_parameter_is_asked_for_itself(product: Product) -> None:
    assert isinstance(place_of_gradient(product), nn.Parameter)


@pytest.mark.parametrize("product", [*AHEAD.values(), *ITSELF.values()], ids=[*AHEAD, *ITSELF])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_direct_gradients_are_those_of_eager_training(
    backend: BackendName, device: torch.device, product: Product, dtype: torch.dtype
) -> None:
    module = Weighted(product, dtype).to(device)
    x = integers(3, 4).to(device, dtype)
    eager = copy.deepcopy(module)
    with torch.autocast(device.type, torch.bfloat16, cache_enabled=False):
        graphed = make_graphed_callables(module, (x,), param_grads="direct", backend=backend)
        for step in range(3):
            value = x + step
            for one in (eager, graphed):
                one(value).float().square().sum().backward()  # accumulates in the later steps
            assert_same(gradients_of(module), gradients_of(eager))


def with_the_weight(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return nn.functional.linear(x, weight), weight


def with_a_hook_on_the_cast(x: Tensor, weight: Tensor) -> Tensor:
    cast = weight.half()
    if cast.grad_fn is not None:
        cast.grad_fn.register_hook(lambda inputs, _: (inputs[0] * 2,))
    return x.half() @ cast.mT


def with_a_hook_ahead_of_the_cast(x: Tensor, weight: Tensor) -> Tensor:
    cast = weight.half()
    if cast.grad_fn is not None:
        cast.grad_fn.register_prehook(lambda outputs: (outputs[0] * 2,))
    return x.half() @ cast.mT


class Halved(torch.autograd.Function):
    """Halves gradients where they are."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient.mul_(0.5)


class Misnamed(torch.autograd.Function):
    """Calls itself what autograd calls the nodes of leaves, and keeps a tensor as they do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kept: list[Tensor]) -> Tensor:
        ctx.name, (ctx.variable,) = "AccumulateGrad", kept
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient * 2, None


def test_a_function_that_poses_as_a_leaf_is_none() -> None:
    x, kept = torch.ones(2, requires_grad=True), torch.ones(3, requires_grad=True)
    output = Misnamed.apply(x, [kept]).half()  # type: ignore[no-untyped-call]
    assert leaves_behind([output]) == [x]
    assert ahead_of_casts([output], [kept])[0] is kept


class Shifted(nn.Module):
    """Adds a shift to something, so that both get one gradient, which Python writes into."""

    def __init__(self, way: str, cast: bool) -> None:
        super().__init__()
        self.weight, self.shift = (nn.Parameter(integers(4, 4)) for _ in range(2))
        self.way, self.cast = way, cast

    def forward(self, x: Tensor) -> Tensor:
        h = x @ self.weight
        if self.way == "hook" and h.requires_grad:
            h.register_hook(lambda gradient: gradient.mul_(0.5))
        elif self.way == "function":
            out: Tensor = Halved.apply(h)  # type: ignore[no-untyped-call]
            h = out
        return h + (self.shift.to(h.dtype) if self.cast else self.shift)


@both_ways
@pytest.mark.parametrize("way", ["hook", "function"])
@pytest.mark.parametrize("cast", [True, False])
def test_what_python_writes_into_a_gradient_reaches_no_other(
    backend: BackendName, device: torch.device, param_grads: Any, way: str, cast: bool
) -> None:
    module = Shifted(way, cast).to(device)
    eager, x = copy.deepcopy(module), integers(4, 4).to(device)
    with torch.autocast(device.type, torch.bfloat16, enabled=cast, cache_enabled=False):
        graphed = make_graphed_callables(module, (x,), param_grads=param_grads, backend=backend)
        for one in (eager, graphed):
            one(x).float().square().sum().backward()
    assert_same(gradients_of(module), gradients_of(eager))


@pytest.mark.parametrize(
    "product",
    [
        with_the_weight,
        with_a_hook_on_the_cast,
        with_a_hook_ahead_of_the_cast,
    ],
)
def test_who_else_looks_at_a_gradient_sees_what_it_is(
    backend: BackendName, device: torch.device, product: Callable[..., Any]
) -> None:
    module = Weighted(product).to(device)
    eager, x = copy.deepcopy(module), integers(3, 4).to(device)
    with torch.autocast(device.type, torch.bfloat16, cache_enabled=False):
        graphed = make_graphed_callables(module, (x,), param_grads="direct", backend=backend)
        for one in (eager, graphed):
            found = one(x)
            outputs = found if isinstance(found, tuple) else (found,)
            sum(o.float().square().sum() for o in outputs if o.requires_grad).backward()
    assert_same(gradients_of(module), gradients_of(eager))


class Tower(nn.Module):
    """Two parameters for each layer that autocast casts, and two that it does not."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(layers)), nn.LayerNorm(8))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


def backward_nodes(device: torch.device, backend: BackendName, *, direct: bool) -> int:
    module = Tower().to(device)
    pool = GraphPool(keep_graphs=True, backend=backend)
    with torch.autocast(device.type, torch.bfloat16, cache_enabled=False):
        settings = CaptureSettings(pool, ReplayOrder(), direct)
        capture = CallableCapture(module, (torch.randn(2, 8, device=device),), {}, settings)
        capture.warm_up(1)
        capture.capture_forward()
        capture.capture_backward()
    backward = capture.finish().backward_pass
    assert backward is not None
    nodes = sum(backward.graph.node_counts().values())
    pool.close()
    return nodes


def test_one_copy_takes_the_place_of_the_casts(backend: BackendName, device: torch.device) -> None:
    casts, copies = 8, 1  # eight casts go; the gradients that were cast have a copy of their own
    found = [backward_nodes(device, backend, direct=direct) for direct in (False, True)]
    assert found[0] - found[1] == casts - copies


class CountedOperators(TorchDispatchMode):
    """Counts operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.__name__] += 1
        return func(*args, **(kwargs or {}))


def loss_of(module: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = module(x).float().square().sum()
    return loss


def twice(loss: Tensor, _: nn.Module) -> None:
    loss.backward(retain_graph=True)
    loss.backward()


def for_some(loss: Tensor, module: nn.Module) -> None:
    loss.backward(inputs=list(module.parameters())[:3])


def asked_for(loss: Tensor, module: nn.Module) -> None:
    parameters = list(module.parameters())
    for parameter, gradient in zip(parameters, autograd.grad(loss, parameters), strict=True):
        parameter.grad = gradient


PASSES: dict[str, Callable[[Tensor, nn.Module], None]] = {
    "once": lambda loss, _: loss.backward(),
    "twice": twice,
    "to be differentiated": lambda loss, _: loss.backward(create_graph=True),
    "for some parameters": for_some,
    "by autograd.grad": asked_for,
}


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.parametrize("backward", PASSES.values(), ids=PASSES)
@pytest.mark.parametrize("layers", [4, 30], ids=["few", "more than wait together"])
def test_gradients_that_are_cast_together_are_those_of_autograd(
    device: torch.device, layers: int, backward: Callable[[Tensor, nn.Module], None]
) -> None:
    eager = Tower(layers).to(device)
    gathered = copy.deepcopy(eager)
    x = torch.randn(5, 8, device=device)
    for _ in range(2):  # the second time there are gradients
        with torch.autocast(device.type, torch.bfloat16, cache_enabled=False):
            losses = loss_of(eager, x), loss_of(gathered, x)
        backward(losses[0], eager)
        with cast_together([losses[1]], list(gathered.parameters())):
            backward(losses[1], gathered)
        assert_same(gradients_of(gathered), gradients_of(eager))


def test_gradients_that_are_cast_together_have_the_layout_that_autograd_gives_them(
    device: torch.device,
) -> None:
    values = torch.randn(32, 32, device=device)
    layouts = (values[::4, ::4], values.mT[::4, ::4], values[:8, :8].clone().mT, values[:8, :8])
    strides = []
    for gather in (False, True):
        parameters = [nn.Parameter(layout.detach()) for layout in layouts]
        with torch.autocast(device.type, torch.bfloat16, cache_enabled=False):
            loss = torch.stack([(values[:8, :8] @ p).float().sum() for p in parameters]).sum()
        with cast_together([loss], parameters if gather else []):
            loss.backward()
        strides.append([p.grad.stride() for p in parameters if p.grad is not None])
    assert strides[0] == strides[1]
    assert len(strides[0]) == len(layouts)


def test_gradients_that_are_cast_together_need_no_cast_each(device: torch.device) -> None:
    module = Tower().to(device)
    counts = []
    for parameters in ([], list(module.parameters())):
        counted = CountedOperators()
        for _ in range(2):  # the second time what comes is added
            with torch.autocast(device.type, torch.bfloat16, cache_enabled=False):
                loss = loss_of(module, torch.randn(5, 8, device=device))
            with cast_together([loss], parameters), counted:
                loss.backward()
        module.zero_grad()
        counts.append(counted.counts)
    assert counts[0]["_to_copy.default"] - counts[1]["_to_copy.default"] == 2 * 8
    assert counts[0]["add_.Tensor"] == counts[1]["add_.Tensor"]
    assert counts[1]["_foreach_copy_.default"] - counts[0]["_foreach_copy_.default"] == 1


class _Doubles(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return 2 * gradient


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compiler imports them
def test_python_nodes_of_compiled_code_are_told_from_an_authors() -> None:
    compiled = torch.compile(nn.Linear(3, 3), backend="aot_eager")(torch.randn(2, 3))
    assert has_python_nodes([compiled])
    assert not runs_code([compiled])
    assert runs_code([_Doubles.apply(compiled)])
    assert not has_python_nodes([torch.ones(3, requires_grad=True).exp()])
