"""Gradients through graphed callables: accumulated, refused, and whose memory they are."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_graphs.core import CUDAGraph, graph, make_graphed_callables
from lightning_graphs.device.graph import BackendName
from lightning_graphs.errors import CaptureError, ReplayError
from lightning_graphs.private.engine import leaves_alive
from tests.core.callables_support import both_ways, two_three_one


@both_ways
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_gradients_accumulate(
    backend: BackendName,
    device: torch.device,
    param_grads: Any,
    set_to_none: bool,
    accumulate: int,
) -> None:
    linear = two_three_one(device)
    sample = torch.zeros(1, 2, device=device)
    graphed = make_graphed_callables(linear, (sample,), param_grads=param_grads, backend=backend)
    optimizer = torch.optim.SGD(linear.parameters(), lr=0.0)
    for step in range(4):
        values = [float(10**i) for i in range(accumulate)]
        for i, value in enumerate(values):
            graphed(torch.tensor([[value, 2 * value]], device=device)).sum().backward()
            expected = sum(values[: i + 1])
            assert linear.weight.grad is not None
            assert linear.bias.grad is not None
            assert linear.weight.grad.tolist() == [[expected, 2 * expected]], step
            assert linear.bias.grad.tolist() == [i + 1.0], step
        optimizer.zero_grad(set_to_none=set_to_none)


@both_ways
def test_a_gradient_of_the_users_own_is_added_to(
    backend: BackendName, device: torch.device, param_grads: Any
) -> None:
    linear = two_three_one(device)
    graphed = make_graphed_callables(
        linear, (torch.zeros(1, 2, device=device),), param_grads=param_grads, backend=backend
    )
    linear.weight.grad = own = torch.full((1, 2), 100.0, device=device)
    graphed(torch.tensor([[1.0, 2.0]], device=device)).sum().backward()
    assert linear.weight.grad is own
    assert own.tolist() == [[101.0, 102.0]]
    graphed(torch.tensor([[1.0, 2.0]], device=device)).sum().backward()
    assert own.tolist() == [[102.0, 104.0]]
    assert linear.bias.grad is not None
    assert linear.bias.grad.tolist() == [2.0]


@pytest.mark.parametrize("again", ["forward", "backward"])
def test_an_earlier_callable_of_a_tuple_ends_the_pending_backward_of_later_ones(
    backend: BackendName, device: torch.device, again: str
) -> None:
    x = torch.ones(1, 2, device=device)
    first, second = make_graphed_callables(
        (two_three_one(device), two_three_one(device)), ((x,), (x,)), backend=backend
    )
    earlier = first(x).sum()
    pending = second(x).sum()
    if again == "forward":
        first(x)
    else:
        earlier.backward()
    with pytest.raises(ReplayError, match="an earlier callable of its tuple"):
        pending.backward()


def test_callables_of_a_tuple_in_order_may_wait_for_each_other(
    backend: BackendName, device: torch.device
) -> None:
    modules = two_three_one(device), two_three_one(device)
    x = torch.ones(1, 2, device=device)
    first, second = make_graphed_callables(modules, ((x,), (x,)), backend=backend)
    earlier = first(x).sum()
    second(3 * x).sum().backward()
    second(4 * x).sum().backward()
    earlier.backward()
    assert [m.weight.grad.tolist() for m in modules] == [[[1.0, 1.0]], [[7.0, 7.0]]]


def test_one_function_twice_in_a_tuple_has_two_forwards_pending(
    backend: BackendName, device: torch.device
) -> None:
    linear = two_three_one(device)
    x = torch.ones(1, 2, device=device)
    first, second = make_graphed_callables((linear.forward,) * 2, ((x,), (x,)), backend=backend)
    loss = (first(x) + second(10 * x)).sum()
    loss.backward()
    assert linear.weight.grad is not None
    assert linear.weight.grad.tolist() == [[11.0, 11.0]]


class PartlyUsed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(2, 1), nn.Linear(2, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.used(x)


@both_ways
def test_unused_parameters_and_inputs(
    backend: BackendName, device: torch.device, param_grads: Any
) -> None:
    module = PartlyUsed().to(device)
    x = torch.ones(1, 2, device=device, requires_grad=True)
    y = torch.ones(1, 2, device=device, requires_grad=True)
    sample = (torch.zeros_like(x, requires_grad=True), torch.zeros_like(y, requires_grad=True))
    with pytest.raises(CaptureError, match=r"args\[1\], unused.weight, unused.bias"):
        make_graphed_callables(module, sample, param_grads=param_grads, backend=backend)
    graphed = make_graphed_callables(
        module, sample, allow_unused_input=True, param_grads=param_grads, backend=backend
    )
    graphed(x, y).sum().backward()
    assert y.grad is None
    assert module.unused.weight.grad is None
    assert x.grad is not None
    assert torch.equal(x.grad, module.used.weight)
    assert module.used.weight.grad is not None
    assert module.used.weight.grad.tolist() == [[1.0, 1.0]]


class Pooled(nn.Module):
    """The second output depends on a layer of its own, and on the first one."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.pooler = nn.Linear(2, 2), nn.Linear(2, 1)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.body(x)
        return hidden, self.pooler(hidden) + y


@both_ways
@pytest.mark.parametrize("used", [(0,), (1,), (0, 1), ()])
def test_outputs_without_a_gradient_hand_none_on(
    backend: BackendName, device: torch.device, param_grads: Any, used: tuple[int, ...]
) -> None:
    """Gradients of an earlier pass stay as they are where this one does not reach."""
    torch.manual_seed(0)
    eager = Pooled().to(device)
    module = copy.deepcopy(eager)
    sample = (torch.zeros(3, 2, device=device), torch.zeros(3, 1, device=device))
    graphed = make_graphed_callables(
        module, tuple(t.requires_grad_() for t in sample), param_grads=param_grads, backend=backend
    )
    found = []
    for owner, call in ((eager, eager), (module, graphed)):
        x = torch.full((3, 2), 2.0, device=device, requires_grad=True)
        y = torch.full((3, 1), 3.0, device=device, requires_grad=True)
        for outputs in ((0, 1), used, used):
            if outputs != (0, 1):
                owner.body.weight.grad = None
            results = call(x, y)
            chosen = [r if i in outputs else r.detach() for i, r in enumerate(results)]
            total = sum((r.sum() for r in chosen), torch.zeros((), device=device))
            if total.requires_grad:
                total.backward()
        gradients = [t.grad for t in (*owner.parameters(), x, y)]
        found.append([g if g is None else g.clone() for g in gradients])  # a buffer, if direct
        owner.zero_grad(set_to_none=True)
        if used:
            results = call(x, y)
            sum(results[i].sum() for i in used).backward()
            found[-1] += [p.grad for p in owner.parameters()]
    for mine, theirs in zip(*found, strict=True):
        assert (mine is None) == (theirs is None)
        assert mine is None or torch.equal(mine, theirs)


@both_ways
def test_frozen_parameters_get_no_gradient(
    backend: BackendName, device: torch.device, param_grads: Any
) -> None:
    linear = two_three_one(device)
    linear.weight.requires_grad_(False)
    x = torch.ones(3, 2, device=device)
    graphed = make_graphed_callables(linear, (x,), param_grads=param_grads, backend=backend)
    graphed(x).sum().backward()
    assert linear.weight.grad is None
    assert linear.bias.grad is not None
    assert linear.bias.grad.tolist() == [3.0]


@both_ways
def test_a_parameter_shared_by_two_graphed_modules(
    backend: BackendName, device: torch.device, param_grads: Any
) -> None:
    first, second = two_three_one(device), two_three_one(device)
    second.weight = first.weight
    x = torch.ones(1, 2, device=device)
    make_graphed_callables((first, second), ((x,), (x,)), param_grads=param_grads, backend=backend)
    for step in (1.0, 2.0):
        (first(x).sum() + second(10 * x).sum()).backward()
        assert first.weight.grad is not None
        assert first.weight.grad.tolist() == [[11.0 * step, 11.0 * step]]


@both_ways
def test_a_function_over_trainable_tensors(
    backend: BackendName, device: torch.device, param_grads: Any
) -> None:
    weight = torch.full((2,), 3.0, device=device, requires_grad=True)
    linear = two_three_one(device)

    def function(x: Tensor) -> Tensor:
        return linear(x * weight)

    x = torch.ones(1, 2, device=device)
    graphed = make_graphed_callables(function, (x,), param_grads=param_grads, backend=backend)
    for _ in range(2):
        weight.grad = None
        linear.zero_grad()
        y = graphed(x)
        assert y.item() == 16.0
        y.sum().backward()
        assert weight.grad is not None
        assert weight.grad.tolist() == [2.0, 3.0]
        assert linear.weight.grad is not None
        assert linear.weight.grad.tolist() == [[3.0, 3.0]]


def test_gradients_of_autograd_grad_are_the_callers_own(
    backend: BackendName, device: torch.device
) -> None:
    linear = two_three_one(device)
    x = torch.ones(1, 2, device=device, requires_grad=True)
    graphed = make_graphed_callables(linear, (x.detach().requires_grad_(),), backend=backend)
    kept = []
    for value in (1.0, 4.0):
        loss = (value * graphed(value * x)).sum()
        kept.append(torch.autograd.grad(loss, [x, linear.weight]))
    assert linear.weight.grad is None
    assert [[g.tolist() for g in pair] for pair in kept] == [
        [[[2.0, 3.0]], [[1.0, 1.0]]],
        [[[32.0, 48.0]], [[16.0, 16.0]]],
    ]


@pytest.mark.parametrize("partial", ["grad", "inputs"])
def test_direct_gradients_refuse_a_partial_backward(
    backend: BackendName, device: torch.device, partial: str
) -> None:
    linear = two_three_one(device)
    x = torch.ones(1, 2, device=device, requires_grad=True)
    graphed = make_graphed_callables(
        linear, (x.detach().requires_grad_(),), param_grads="direct", backend=backend
    )
    loss = graphed(x).sum()
    ask = {"grad": torch.autograd.grad, "inputs": lambda y, x: y.backward(inputs=[x])}[partial]
    with pytest.raises(ReplayError, match=r"torch\.autograd\.grad or backward"):
        ask(loss, x)
    assert linear.weight.grad is None


def test_hooks_on_parameters_fire_once(backend: BackendName, device: torch.device) -> None:
    linear = two_three_one(device)
    seen: list[Any] = []
    handle = linear.weight.register_hook(lambda g: 10 * g)
    linear.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.tolist()))
    x = torch.ones(1, 2, device=device)
    graphed = make_graphed_callables(linear, (x,), backend=backend)
    assert seen == []
    graphed(x).sum().backward()
    assert seen == [[[10.0, 10.0]]]
    handle.remove()
    linear.weight.grad = None
    graphed(x).sum().backward()
    assert seen == [[[10.0, 10.0]], [[1.0, 1.0]]]


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_direct_gradients_refuse_hooks_on_parameters(
    backend: BackendName, device: torch.device, kind: str
) -> None:
    linear = two_three_one(device)
    x = torch.ones(1, 2, device=device)
    handle = getattr(linear.weight, kind)(lambda _: None)
    with pytest.raises(CaptureError, match="`weight` has a gradient hook"):
        make_graphed_callables(linear, (x,), param_grads="direct", backend=backend)
    handle.remove()
    graphed = make_graphed_callables(linear, (x,), param_grads="direct", backend=backend)
    handle = getattr(linear.weight, kind)(lambda _: None)
    loss = graphed(x).sum()
    with pytest.raises(ReplayError, match="registered on a parameter after the capture"):
        loss.backward(retain_graph=True)
    assert linear.weight.grad is None
    handle.remove()
    loss.backward()
    assert linear.weight.grad is not None
    assert linear.weight.grad.tolist() == [[1.0, 1.0]]


@both_ways
def test_sparse_gradients_are_refused(
    backend: BackendName, device: torch.device, param_grads: Any
) -> None:
    embedding = nn.Embedding(5, 3, sparse=True, device=device)
    with pytest.raises(CaptureError, match="cannot write sparse gradients"):
        make_graphed_callables(
            embedding,
            (torch.tensor([1, 2], device=device),),
            param_grads=param_grads,
            backend=backend,
        )


def test_the_signature_is_that_of_the_original(backend: BackendName, device: torch.device) -> None:
    x = torch.ones(1, 2, device=device)
    graphed = make_graphed_callables(two_three_one(device), (x,), backend=backend)
    assert list(inspect.signature(graphed.forward).parameters) == ["input"]


def test_direct_gradients_after_another_capture(backend: BackendName, device: torch.device) -> None:
    """A capture may renew the gradient nodes of leaves, as torch does where a dtype changes."""
    torch.manual_seed(0)
    layer, x = nn.Linear(4, 4).to(device), torch.randn(3, 4, device=device)
    graphed = make_graphed_callables(layer, (x,), backend=backend, param_grads="direct")
    graphed(x).sum().backward()
    gradient = layer.weight.grad
    assert gradient is not None
    expected, total, captured = gradient.clone(), gradient.clone(), CUDAGraph(backend=backend)
    with graph(captured):
        total.add_(gradient)
    for leaf in leaves_alive():
        if leaf.is_leaf and leaf.requires_grad and not leaf.numel():  # the anchors of graphs
            data = leaf.data
            leaf.data = data.double()
            leaf.data = data
    layer.zero_grad(set_to_none=True)
    graphed(x).sum().backward()
    assert layer.weight.grad is not None
    assert torch.equal(layer.weight.grad, expected)


def test_a_leaf_in_a_graph_of_the_default_stream(
    backend: BackendName, device: torch.device
) -> None:
    leaf = torch.ones(4, device=device, requires_grad=True)
    kept, captured = leaf * 2, CUDAGraph(backend=backend)  # with the leaf's node of that stream
    with graph(captured):
        (leaf * 3).sum().backward()
    assert leaf.grad is not None
    leaf.grad.zero_()
    captured.replay()
    kept.sum().backward()
    assert leaf.grad.tolist() == [5.0] * 4
