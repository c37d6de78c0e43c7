"""``make_graphed_callables``: equal to the original in everything that can be observed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

from lightning_graphs.core import graph_pool_handle, make_graphed_callables
from lightning_graphs.device.graph import BackendName
from lightning_graphs.errors import CaptureError, GraphError
from tests.core.callables_support import (
    Net,
    assert_same,
    assert_same_state,
    both_ways,
    gradients_of,
    state_of,
    two_three_one,
)


class Holding:
    """Has a module, and calls it in two ways."""

    def __init__(self, net: nn.Module) -> None:
        self.net = net

    def __call__(self, x: Tensor) -> Tensor:
        return self.method(x)

    def method(self, x: Tensor) -> Tensor:
        result: Tensor = self.net(x).square()
        return result


def squared(net: nn.Module, x: Tensor) -> Tensor:
    return Holding(net)(x)


HOLDERS: dict[str, Callable[[nn.Module], Callable[[Tensor], Tensor]]] = {
    "closure": lambda net: lambda x: squared(net, x),
    "partial": lambda net: partial(squared, net),
    "partial, by name": lambda net: partial(lambda x, net: squared(net, x), net=net),
    "partial of another": lambda net: partial(Holding(net).method),
    "method": lambda net: Holding(net).method,
    "object": Holding,
}


@dataclass
class Pair:
    """A container that no pytree registry knows."""

    left: Tensor
    right: Any = None


def test_a_module_is_returned_as_itself(backend: BackendName, device: torch.device) -> None:
    linear = two_three_one(device)
    graphed = make_graphed_callables(linear, (torch.zeros(5, 2, device=device),), backend=backend)
    assert graphed is linear
    x = torch.tensor([[1.0, 10.0]] * 5, device=device)
    y = graphed(x)
    assert y.tolist() == [[33.0]] * 5
    y.sum().backward()
    assert linear.weight.grad is not None
    assert linear.weight.grad.tolist() == [[5.0, 50.0]]


def test_a_function_with_several_tensors(backend: BackendName, device: torch.device) -> None:
    def function(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return a * b, a + b

    sample = (torch.ones(2, device=device, requires_grad=True), torch.ones(2, device=device))
    graphed = make_graphed_callables(function, sample, backend=backend)
    a = torch.tensor([2.0, 3.0], device=device, requires_grad=True)
    product, total = graphed(a, torch.tensor([5.0, 7.0], device=device))
    assert product.tolist() == [10.0, 21.0]
    assert total.tolist() == [7.0, 10.0]
    (product.sum() + 10 * total.sum()).backward()
    assert a.grad is not None
    assert a.grad.tolist() == [15.0, 17.0]


@pytest.mark.parametrize("holder", HOLDERS)
def test_modules_that_a_callable_holds_are_trained(
    backend: BackendName, device: torch.device, holder: str
) -> None:
    net, x = two_three_one(device), torch.randn(5, 2, device=device)
    function = HOLDERS[holder](net)
    function(x).sum().backward()
    expected = gradients_of(net)
    graphed = make_graphed_callables(function, (torch.zeros_like(x),), backend=backend)
    net.zero_grad()
    y = graphed(x)
    y.sum().backward()
    assert torch.equal(y, function(x))
    assert_same(gradients_of(net), expected)


@both_ways
def test_a_tuple_is_captured_in_order_and_backwards_in_reverse(
    backend: BackendName, device: torch.device, param_grads: Any
) -> None:
    order = []

    class Noting(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, name: str, x: Tensor) -> Tensor:
            ctx.name = name
            order.append(f"forward {name}")
            return 2 * x

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:
            order.append(f"backward {ctx.name}")
            return None, 2 * gradient

    def call(name: str) -> Callable[[Tensor], Tensor]:
        return lambda x: Noting.apply(name, x)

    x = torch.ones(2, device=device, requires_grad=True)
    pool = graph_pool_handle(backend=backend)
    first, second = make_graphed_callables(
        (call("a"), call("b")), ((x,), (x,)), 1, pool=pool, param_grads=param_grads, backend=backend
    )
    warm_up = ["forward a", "backward a", "forward b", "backward b"]
    assert order == [*warm_up, "forward a", "forward b", "backward b", "backward a"]
    assert first.forward_graph.pool() == second.backward_pass.graph.pool() == pool

    x = torch.tensor([1.0, 3.0], device=device, requires_grad=True)
    second(first(x)).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [4.0, 4.0]
    assert len(order) == 8


def test_a_tuple_of_modules_equals_eager(backend: BackendName, device: torch.device) -> None:
    modules = Net(0.0).to(device), nn.Linear(3, 2).to(device)
    eager = copy.deepcopy(modules)
    hidden = torch.zeros(6, 3, device=device, requires_grad=True)
    graphed = make_graphed_callables(
        modules, ((torch.zeros(6, 4, device=device),), (hidden,)), backend=backend
    )
    assert graphed == modules
    for _ in range(3):
        x = torch.randn(6, 4, device=device)
        found, expected = graphed[1](graphed[0](x)), eager[1](eager[0](x))
        assert torch.equal(found, expected)
        found.square().sum().backward()
        expected.square().sum().backward()
    for a, b in zip(graphed, eager, strict=True):
        assert_same(gradients_of(a), gradients_of(b))
        assert_same_state(a, state_of(b))


def test_keyword_arguments_containers_and_constants(
    backend: BackendName, device: torch.device
) -> None:
    def function(batch: dict[str, Any], *, scale: float, pair: Pair) -> dict[str, Any]:
        total = batch["x"] + batch["more"][0] * scale + pair.left
        return {"total": total, "pair": Pair(total.sum(), "text"), "none": None, "list": [3, total]}

    def batch(value: float) -> dict[str, Any]:
        x = torch.full((2,), value, device=device)
        return {"x": x, "more": (10 * x, "constant")}

    graphed = make_graphed_callables(
        function,
        (batch(0.0),),
        sample_kwargs={"scale": 2.0, "pair": Pair(torch.zeros(2, device=device))},
        backend=backend,
    )
    found = graphed(batch(1.0), scale=2.0, pair=Pair(torch.full((2,), 0.5, device=device)))
    assert found["total"].tolist() == [21.5, 21.5]
    assert found["pair"].left.item() == 43.0
    assert found["pair"].right == "text"
    assert found["none"] is None
    assert found["list"][0] == 3
    assert found["list"][1].tolist() == [21.5, 21.5]


def test_a_model_output(backend: BackendName, device: torch.device) -> None:
    def function(x: Tensor) -> BaseModelOutput:
        return BaseModelOutput(last_hidden_state=2 * x, hidden_states=(x + 1,))

    graphed = make_graphed_callables(function, (torch.zeros(2, device=device),), backend=backend)
    found = graphed(torch.ones(2, device=device))
    assert type(found) is BaseModelOutput
    assert found.last_hidden_state.tolist() == [2.0, 2.0]
    assert found.hidden_states[0].tolist() == [2.0, 2.0]
    assert found.attentions is None


def test_an_output_in_which_tensors_could_hide_is_refused(
    backend: BackendName, device: torch.device
) -> None:
    def function(x: Tensor) -> object:
        return {"y": x + 1, "cache": {x + 2}}

    with pytest.raises(CaptureError, match=r'output\["cache"\] is a set'):
        make_graphed_callables(function, (torch.zeros(2, device=device),), backend=backend)


def test_integer_and_detached_outputs_need_no_grad(
    backend: BackendName, device: torch.device
) -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x.argmax(), x * 2, (x * 3).detach()

    x = torch.tensor([1.0, 4.0, 2.0], device=device, requires_grad=True)
    graphed = make_graphed_callables(
        function, (torch.zeros_like(x, requires_grad=True),), backend=backend
    )
    index, doubled, tripled = graphed(x)
    assert index.item() == 1
    assert doubled.requires_grad
    assert not tripled.requires_grad
    assert tripled.tolist() == [3.0, 12.0, 6.0]
    doubled.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2.0, 2.0, 2.0]


def test_hooks_of_the_module_fire_and_those_of_submodules_are_captured(
    backend: BackendName, device: torch.device
) -> None:
    module = nn.Sequential(nn.Linear(2, 2, device=device), nn.Linear(2, 1, device=device))
    eager = copy.deepcopy(module)
    calls: list[str] = []
    for each in (module, eager):
        each[0].register_forward_hook(lambda _, args, output: output * 3)
        each[1].register_forward_pre_hook(lambda _, args: (args[0] + 1,))
        each[0].register_full_backward_hook(lambda _, inputs, outputs: (inputs[0] * 5,))
    x = torch.randn(4, 2, device=device, requires_grad=True)
    graphed = make_graphed_callables(
        module, (torch.zeros_like(x, requires_grad=True),), backend=backend
    )
    graphed.register_forward_hook(lambda *_: calls.append("forward"))
    graphed.register_full_backward_hook(lambda *_: calls.append("backward"))
    for _ in range(2):
        found, expected = graphed(x), eager(x)
        assert torch.equal(found, expected)
        gradient, expected_gradient = (
            torch.autograd.grad(y.sum(), x)[0] for y in (found, expected)
        )
        assert torch.equal(gradient, expected_gradient)
    assert calls == ["forward", "backward"] * 2


@both_ways
def test_a_callable_without_any_gradient(
    backend: BackendName, device: torch.device, param_grads: Any
) -> None:
    linear = two_three_one(device).requires_grad_(False)
    x = torch.ones(3, 2, device=device)
    graphed = make_graphed_callables(linear, (x,), param_grads=param_grads, backend=backend)
    y = graphed(2 * x)
    assert not y.requires_grad
    assert y.tolist() == [[11.0]] * 3


def test_static_outputs_are_overwritten(backend: BackendName, device: torch.device) -> None:
    linear, x = two_three_one(device), torch.ones(1, 2, device=device)
    graphed = make_graphed_callables(linear, (x,), static_outputs=True, backend=backend)
    first = graphed(x)
    assert first.item() == 6.0
    second = graphed(2 * x)
    assert first.data_ptr() == second.data_ptr()
    assert first.item() == second.item() == 11.0
    second.sum().backward()
    assert linear.weight.grad is not None
    assert linear.weight.grad.tolist() == [[2.0, 2.0]]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("at_capture", [False, True])
def test_without_grad(
    backend: BackendName, device: torch.device, mode: Any, at_capture: bool
) -> None:
    linear = two_three_one(device)
    x = torch.ones(1, 2, device=device)
    if at_capture:
        with mode():
            graphed = make_graphed_callables(linear, (x,), backend=backend)
    else:
        graphed = make_graphed_callables(linear, (x,), backend=backend)
    with mode():
        y = graphed(torch.full((1, 2), 2.0, device=device))
        assert y.item() == 11.0
        assert not y.requires_grad
    graphed(x).sum().backward()
    assert linear.weight.grad is not None
    assert linear.weight.grad.tolist() == [[1.0, 1.0]]


def test_a_loss_as_a_graphed_function(backend: BackendName, device: torch.device) -> None:
    prediction = torch.randn(6, 3, device=device, requires_grad=True)
    target = torch.randint(3, (6,), device=device)
    loss = make_graphed_callables(
        nn.functional.cross_entropy,
        (torch.zeros(6, 3, device=device, requires_grad=True), torch.zeros_like(target)),
        sample_kwargs={"label_smoothing": 0.1},
        backend=backend,
    )
    found = loss(prediction, target, label_smoothing=0.1)
    expected = nn.functional.cross_entropy(prediction, target, label_smoothing=0.1)
    assert torch.equal(found, expected)
    gradients = [torch.autograd.grad(3 * each, prediction)[0] for each in (found, expected)]
    assert torch.equal(*gradients)


@both_ways
@pytest.mark.parametrize("optimizer_name", ["SGD", "AdamW"])
def test_training_equals_eager_bit_by_bit(
    backend: BackendName, device: torch.device, param_grads: Any, optimizer_name: str
) -> None:
    options = {"SGD": {"momentum": 0.9}, "AdamW": {"weight_decay": 0.1}}[optimizer_name]
    batches = torch.randn(20, 6, 4, device=device)

    def train(net: nn.Module) -> list[float]:
        optimizer = getattr(torch.optim, optimizer_name)(net.parameters(), lr=0.05, **options)
        torch.manual_seed(11)
        losses = []
        for batch in batches:
            optimizer.zero_grad()
            loss = net(batch).square().mean()
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            optimizer.step()
            losses.append(loss.item())
        return losses

    net = Net().to(device)
    eager = copy.deepcopy(net)
    graphed = make_graphed_callables(
        net, (torch.zeros(6, 4, device=device),), param_grads=param_grads, backend=backend
    )
    assert train(graphed) == train(eager)
    assert_same_state(graphed, state_of(eager))


_MISUSES: dict[str, tuple[dict[str, Any], str]] = {
    "param_grads": ({"param_grads": "both"}, "param_grads must be .*, got 'both'"),
    "no warm-up": ({"num_warmup_iters": 0}, "num_warmup_iters must be .*, got 0"),
    "a warm-up of words": ({"num_warmup_iters": "3"}, "num_warmup_iters must be .*, got '3'"),
    "a bare tensor": ({"sample_args": torch.ones(1, 2)}, r"write \(x,\)"),
}


@pytest.mark.parametrize("misuse", _MISUSES)
def test_misuse_is_explained(backend: BackendName, device: torch.device, misuse: str) -> None:
    options, message = _MISUSES[misuse]
    with pytest.raises(GraphError, match=message):
        make_graphed_callables(
            **{
                "callables": two_three_one(device),
                "sample_args": (torch.ones(1, 2, device=device),),
                "backend": backend,
                **options,
            }
        )


def test_every_callable_has_its_own_arguments(backend: BackendName, device: torch.device) -> None:
    with pytest.raises(CaptureError, match="2 callables, 1 sample_args, 2 sample_kwargs"):
        make_graphed_callables(
            (torch.sin, torch.cos), ((torch.ones(1, device=device),),), backend=backend
        )
