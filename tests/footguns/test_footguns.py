"""What goes wrong silently with CUDA graphs elsewhere, and what happens here.

Traps that name a file are tested there, as a part of what graphed callables do.

| trap | here |
| --- | --- |
| an argument that is no tensor, a keyword, a container (`core/test_callables`) | right result |
| an output that is None, a number, or needed no grad (`core/test_callables`) | right result |
| hooks on submodules (`core/test_callables`) | right result |
| accumulated gradients (`core/test_callables_gradients`) | right result |
| warm-up moves BatchNorm statistics and random generators | right result |
| the sample arguments become the static inputs | right result |
| train/eval of a submodule (`core/test_callables_guards`) | right result |
| a call without grad mode (`core/test_callables`) | right result |
| a copy runs the original's weights (`core/test_callables_lifetime`) | right result |
| outputs are overwritten by the next call | right result |
| a scalar or a shape of Python is baked in | raises when it changes |
| a last batch of another size, also of one row | raises |
| another dtype, another device, other strides at the same address | raises |
| another ``requires_grad`` of an argument, another order of arguments | raises |
| a parameter that moved, was replaced, frozen or unfrozen | raises |
| autocast with caching at capture, another autocast state at a call | raises |
| double backward, a second backward, a backward after a later forward | raises |
| callables of a shared pool out of order (`core/test_callables_gradients`) | raises |
| reading a value on the host, control flow on values, dynamic shapes | raises |
| a tensor built from Python numbers | raises |
| an argument written in place; a buffer or an attribute rebound | raises |
| an optimizer step between forward and backward | raises |
| a capture inside of a capture | raises |
| Python side effects | run at warm-up and capture only |
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_graphs.core import CUDAGraph, graph, make_graphed_callables
from lightning_graphs.device.graph import BackendName
from lightning_graphs.errors import CaptureError, GraphError, ReplayError, SignatureError

Graphing = Callable[..., Any]


@pytest.fixture(params=["autograd", "direct"])
def graphing(backend: BackendName, request: pytest.FixtureRequest) -> Graphing:
    """``make_graphed_callables`` on the backend under test, for both kinds of gradients."""

    def graphed(function: Any, *args: Any, **options: Any) -> Any:
        return make_graphed_callables(
            function, args, param_grads=request.param, backend=backend, **options
        )

    return graphed


@pytest.fixture
def scale(device: torch.device) -> Scale:
    return Scale().to(device)


@pytest.fixture
def x(device: torch.device) -> Tensor:
    return torch.ones(4, 4, device=device)


class Scale(nn.Module):
    """Multiplies by a weight of 2, which gets the sum of its argument as gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2.0))
        self.offset = nn.Parameter(torch.tensor(0.0), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight + self.offset


# Right results.


def test_warm_up_moves_no_statistics_and_no_generator(
    graphing: Graphing, device: torch.device
) -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout()).to(device)
    batch = torch.randn(8, 3, device=device)
    torch.manual_seed(5)
    graphed = graphing(model, torch.ones_like(batch))
    assert model[0].num_batches_tracked.item() == 0
    assert model[0].running_mean.tolist() == [0.0] * 3
    found = graphed(batch)
    torch.manual_seed(5)
    eager = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout()).to(device)
    assert torch.equal(found, eager(batch))
    assert torch.equal(model[0].running_mean, eager[0].running_mean)


def test_dropout_differs_between_replays(graphing: Graphing, device: torch.device) -> None:
    graphed = graphing(nn.Dropout(), torch.ones(256, device=device))
    first, second = (graphed(torch.ones(256, device=device)) for _ in range(2))
    assert set(first.tolist()) == set(second.tolist()) == {0.0, 2.0}
    assert not torch.equal(first, second)


def test_sample_arguments_keep_their_values(graphing: Graphing, scale: Scale, x: Tensor) -> None:
    graphed = graphing(scale, x)
    graphed(5 * x)
    assert torch.equal(x, torch.ones_like(x))


def test_kept_outputs(graphing: Graphing, scale: Scale, x: Tensor) -> None:
    graphed = graphing(scale, x)
    kept = [graphed(value * x) for value in (1, 2, 3)]
    assert [y[0, 0].item() for y in kept] == [2.0, 4.0, 6.0]
    kept[2].mul_(2).sum().backward()
    assert scale.weight.grad is not None
    assert scale.weight.grad.item() == 2 * 3 * 16


# Refusals: a call that the graph was not captured for.

_CALLS: dict[str, tuple[Callable[[Tensor], tuple[Any, ...]], str]] = {
    "a shorter last batch": (lambda x: (x[:3], 1), r"args\[0\]: f32\[4,4\] -> f32\[3,4\]"),
    "a last batch of one": (lambda x: (x[:1], 1), r"args\[0\]: f32\[4,4\] -> f32\[1,4\]"),
    "another dtype": (lambda x: (x.half(), 1), r"-> f16\[4,4\]"),
    "another device": (lambda x: (x.to("meta"), 1), r"a meta tensor as args\[0\]"),
    "other strides at one address": (lambda x: (x.t(), 1), r"stride \(4,1\) -> .*stride \(1,4\)"),
    "requires_grad": (lambda x: (x.clone().requires_grad_(), 1), "-> .* requires_grad"),
    "another number": (lambda x: (x, 2), r"args\[1\]: 1 -> 2"),
    "a number of another type": (lambda x: (x, 1.0), r"args\[1\]: 1 -> 1.0"),
    "another order": (lambda x: (1, x), r"args\[0\]: f32\[4,4\].* -> 1"),
    "another structure": (lambda x: ([x], 1), r"structure: args\[0\]: a leaf -> list of 1"),
    "one argument too few": (lambda x: (x,), r"structure: args: tuple of 2 .* -> tuple of 1"),
}


@pytest.mark.parametrize("call", _CALLS)
def test_a_call_of_another_signature(
    graphing: Graphing, scale: Scale, x: Tensor, call: str
) -> None:
    def function(x: Tensor, n: int, *, factor: int = 2) -> Tensor:
        return scale(x) * n * factor

    graphed = graphing(function, x, 1, sample_kwargs={"factor": 2})
    change, message = _CALLS[call]
    with pytest.raises(SignatureError, match=message):
        graphed(*change(x), factor=2)
    for options, message in (({"factor": 3}, r'kwargs\["factor"\]: 2 -> 3'), ({}, "kwargs")):
        with pytest.raises(SignatureError, match=message):
            graphed(x, 1, **options)
    assert torch.equal(graphed(x, 1, factor=2), 4 * x)


def _assign(scale: Scale) -> None:
    state = {name: tensor.clone() for name, tensor in scale.state_dict().items()}
    scale.load_state_dict(state, assign=True)


def _move(scale: Scale) -> None:
    scale.weight.data = scale.weight.data + 1


def _replace(scale: Scale) -> None:
    scale.weight = nn.Parameter(torch.zeros_like(scale.weight))


_CHANGES: dict[str, tuple[Callable[[Scale], object], str]] = {
    "param.data = other": (_move, "`weight` moved since capture"),
    "load_state_dict(assign=True)": (_assign, "`weight` was replaced since capture"),
    "another Parameter": (_replace, "`weight` was replaced since capture"),
    "removed": (lambda m: delattr(m, "weight"), "`weight` was removed since capture"),
    "frozen": (lambda m: m.weight.requires_grad_(False), "`weight` changed since capture"),
    "unfrozen": (lambda m: m.offset.requires_grad_(True), "`offset` changed since capture"),
    "double": (lambda m: m.double(), "`weight` moved since capture"),
}


@pytest.mark.parametrize("as_function", [False, True])
@pytest.mark.parametrize("change", _CHANGES)
def test_a_parameter_that_is_another_one(
    graphing: Graphing, scale: Scale, x: Tensor, change: str, as_function: bool
) -> None:
    graphed = graphing((lambda x: scale(x) * 2) if as_function else scale, x)
    act, message = _CHANGES[change]
    act(scale)
    name = message.replace("`", "`scale.", 1) if as_function else message
    with pytest.raises(ReplayError, match=name):
        graphed(x)


def test_autocast_with_caching(
    graphing: Graphing, scale: Scale, x: Tensor, device: torch.device
) -> None:
    with (
        torch.autocast(device.type, torch.bfloat16),
        pytest.raises(CaptureError, match="does not support the autocast caching"),
    ):
        graphing(scale, x)


def test_another_autocast_state(
    graphing: Graphing, scale: Scale, x: Tensor, device: torch.device
) -> None:
    graphed = graphing(scale, x)
    with (
        torch.autocast(device.type, torch.bfloat16),
        pytest.raises(GraphError, match="autocast: off -> bfloat16"),
    ):
        graphed(x)


# Refusals: a backward pass over memory that is gone.


def test_double_backward(graphing: Graphing, scale: Scale, x: Tensor) -> None:
    loss = graphing(scale, x)(x).sum()
    with pytest.raises(GraphError, match="double backward"):
        loss.backward(create_graph=True)


def test_a_second_backward(graphing: Graphing, scale: Scale, x: Tensor) -> None:
    loss = graphing(scale, x)(x).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(GraphError, match="one backward pass for each forward"):
        loss.backward()
    assert scale.weight.grad is not None
    assert scale.weight.grad.item() == 16.0


@pytest.mark.parametrize("second_with_grad", [True, False])
def test_two_forwards_before_one_backward(
    graphing: Graphing, scale: Scale, x: Tensor, second_with_grad: bool
) -> None:
    graphed = graphing(scale, x)
    first = graphed(x)
    with torch.set_grad_enabled(second_with_grad):
        second = graphed(3 * x)
    with pytest.raises(GraphError, match="backward for its latest forward only"):
        first.sum().backward()
    assert scale.weight.grad is None
    if second_with_grad:
        second.sum().backward()
        assert scale.weight.grad is not None
        assert scale.weight.grad.item() == 3 * 16


# Refusals: code that cannot be captured; both backends name the line of the user.


def _branch(x: Tensor) -> Tensor:
    return x * 2 if x.sum() > 0 else x * 3


_CODE: dict[str, Callable[[Tensor], Tensor]] = {
    "item": lambda x: x * x.sum().item(),
    "tolist": lambda x: x * sum(x[0].tolist()),
    "control flow on values": _branch,
    "cpu": lambda x: x * x.cpu().numpy().sum(),
    "boolean indexing": lambda x: x[x > 0] * 2,
    "nonzero": lambda x: x * x.nonzero().shape[0],
    "tensor from numbers": lambda x: x * torch.tensor([1.0, 2.0, 3.0, 4.0], device=x.device),
}


@pytest.mark.parametrize("code", _CODE)
def test_code_that_cannot_be_captured(graphing: Graphing, x: Tensor, code: str) -> None:
    with pytest.raises(CaptureError, match=r"test_footguns\.py"):
        graphing(_CODE[code], x)
    assert graphing(lambda x: x * 2, x)(3 * x)[0, 0].item() == 6.0


def test_an_argument_written_in_place(graphing: Graphing, x: Tensor) -> None:
    with pytest.raises(CaptureError, match=r"args\[0\] is written in place"):
        graphing(lambda x: x.mul_(2), x)


@pytest.mark.parametrize("is_buffer", [True, False])
def test_a_tensor_of_a_module_bound_anew(graphing: Graphing, x: Tensor, is_buffer: bool) -> None:
    class Carrying(nn.Module):
        mean: Tensor

        def __init__(self) -> None:
            super().__init__()
            mean = torch.zeros_like(x)
            if is_buffer:
                self.register_buffer("mean", mean)
            else:
                self.mean = mean

        def forward(self, x: Tensor) -> Tensor:
            self.mean = 0.5 * self.mean + 0.5 * x
            return self.mean * 2

    module = Carrying()
    before = module.mean
    with pytest.raises(CaptureError, match="`mean` is set to another tensor in every call"):
        graphing(module, x)
    assert module.mean is before
    assert torch.equal(before, torch.zeros_like(x))


def test_an_optimizer_step_before_the_backward(graphing: Graphing, scale: Scale, x: Tensor) -> None:
    graphed = graphing(scale, x)
    graphed(x).sum().backward()
    loss = graphed(x).sum()
    torch.optim.SGD([scale.weight], lr=1.0).step()
    with pytest.raises(GraphError, match="in place after the forward pass, as by optimizer"):
        loss.backward()
    scale.zero_grad()
    graphed(x).sum().backward()
    assert scale.weight.grad is not None
    assert scale.weight.grad.item() == 16.0


def test_a_capture_inside_of_a_capture(
    graphing: Graphing, backend: BackendName, scale: Scale, x: Tensor
) -> None:
    outer = CUDAGraph(backend=backend)
    with pytest.raises(CaptureError, match="called during a capture"), graph(outer):
        graphing(scale, x)


# Documented: what is not part of a graph.


def test_python_side_effects_are_not_replayed(graphing: Graphing, x: Tensor) -> None:
    calls = []

    def function(x: Tensor) -> Tensor:
        calls.append(len(calls))
        return x * 2

    graphed = graphing(function, x, num_warmup_iters=2)
    assert graphed(3 * x)[0, 0].item() == 6.0
    assert calls == [0, 1, 2]
