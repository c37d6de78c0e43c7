"""Code that puts gradients into ``.grad`` by itself: a graphed callable leaves them to autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_graphs.core import BackendName, make_graphed_callables
from lightning_graphs.errors import CaptureError
from tests.core.callables_support import both_ways, gradients_of

Run = Callable[[Tensor], Tensor]


class Recompute(torch.autograd.Function):
    """Activation checkpointing as it is written by hand."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, run: Run, pull: Callable[[Tensor, Tensor, Tensor], Any]
    ) -> Any:
        ctx.run, ctx.pull = run, pull
        ctx.save_for_backward(x)
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.run(x)
        found = ctx.pull(y, gradient, x)
        return x.grad if found is None else found, None, None


class OwnGradients(torch.autograd.Function):
    """A linear layer whose backward pass sets ``.grad`` of its parameters."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, linear: nn.Linear) -> Tensor:
        ctx.linear = linear
        ctx.save_for_backward(x)
        return nn.functional.linear(x, linear.weight, linear.bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        linear, (x,) = ctx.linear, ctx.saved_tensors
        linear.weight.grad, linear.bias.grad = gradient.t() @ x, gradient.sum(0)
        return gradient @ linear.weight, None


def whole(y: Tensor, gradient: Tensor, x: Tensor) -> None:
    torch.autograd.backward(y, gradient)


def method(y: Tensor, gradient: Tensor, x: Tensor) -> None:
    y.backward(gradient)


def of_inputs(y: Tensor, gradient: Tensor, x: Tensor) -> None:
    y.backward(gradient, inputs=[x])


def asked(y: Tensor, gradient: Tensor, x: Tensor) -> Any:
    return torch.autograd.grad(y, x, gradient)[0]


class Block(nn.Module):
    """A block of 8 features, of which ``forward`` is another one in each subclass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x)))  # type: ignore[no-any-return]

    def middle(self, x: Tensor) -> Tensor:
        raise NotImplementedError


def block(name: str, middle: Callable[[Any, Tensor], Any]) -> type[Block]:
    return type(name, (Block,), {"middle": middle})


def _in_its_forward(self: Any, x: Tensor) -> Any:
    y = self.inner(x)
    if torch.is_grad_enabled():
        self.inner(x.detach()).square().mean().backward()
    return y


def _twice(self: Any, x: Tensor) -> Any:
    return Recompute.apply(Recompute.apply(x, self.inner, whole), self.inner, whole)


REFUSED = {
    "backward": block("Whole", lambda self, x: Recompute.apply(x, self.inner, whole)),
    "a method": block("Method", lambda self, x: Recompute.apply(x, self.inner, method)),
    "twice": block("Twice", _twice),
    "reentrant": block(
        "Reentrant",
        lambda self, x: checkpoint(self.inner, x, use_reentrant=True, preserve_rng_state=False),
    ),
    "in its forward": block("InForward", _in_its_forward),
    "by hand": block("ByHand", lambda self, x: OwnGradients.apply(x, self.inner)),
}
SERVED = {
    "of inputs": block("OfInputs", lambda self, x: Recompute.apply(x, self.inner, of_inputs)),
    "asked": block("Asked", lambda self, x: Recompute.apply(x, self.inner, asked)),
    "no parameters": block("NoParameters", lambda self, x: Recompute.apply(x, torch.tanh, whole)),
    "not reentrant": block(
        "NotReentrant",
        lambda self, x: checkpoint(self.inner, x, use_reentrant=False, preserve_rng_state=False),
    ),
}


def _kept(module: nn.Module, x: Tensor) -> list[Tensor | None]:
    """Gradients of the module; their values are 7 where there are any."""
    for parameter in list(module.parameters())[::2]:
        parameter.grad = torch.full_like(parameter, 7.0)
    return gradients_of(module)


@both_ways
@pytest.mark.parametrize("kind", REFUSED)
def test_gradients_past_autograd_are_refused(
    backend: BackendName, device: torch.device, kind: str, param_grads: Any
) -> None:
    module, x = REFUSED[kind]().to(device), torch.randn(4, 8, device=device)
    before = _kept(module, x)
    with pytest.raises(CaptureError, match="must leave gradients to autograd") as caught:
        make_graphed_callables(
            module,
            (x,),
            allow_unused_input=True,
            param_grads=param_grads,
            backend=backend,
        )
    if kind in ("backward", "a method", "twice", "in its forward"):
        assert "adds to `.grad` of `inner.weight`" in str(caught.value) or "inner.bias" in str(
            caught.value
        )
        assert f"{__file__}:" in str(caught.value)
    after = gradients_of(module)
    assert [g is None for g in after] == [g is None for g in before]
    assert all(
        a is None or torch.equal(a, b) for a, b in zip(after, before, strict=True) if b is not None
    )


@both_ways
@pytest.mark.parametrize("kind", SERVED)
def test_gradients_that_are_asked_for_are_served(
    backend: BackendName, device: torch.device, kind: str, param_grads: Any
) -> None:
    eager = SERVED[kind]().to(device)
    module = SERVED[kind]().to(device)
    module.load_state_dict(eager.state_dict())
    make_graphed_callables(
        module,
        (torch.zeros(4, 8, device=device),),
        allow_unused_input=True,
        param_grads=param_grads,
        backend=backend,
    )
    for _ in range(3):
        x = torch.randn(4, 8, device=device)
        for one in (eager, module):
            one.zero_grad()
            one(x).square().sum().backward()
        for a, b in zip(gradients_of(module), gradients_of(eager), strict=True):
            assert (a is None) == (b is None)
            assert a is None or (b is not None and torch.equal(a, b))
