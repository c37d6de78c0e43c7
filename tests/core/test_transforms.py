"""Transforms of ``torch.func`` and views in place: replays compute what eager code computes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, func, nn

from lightning_graphs.core import BackendName
from tests.core.recorded import assert_recorded, gradient

pytestmark = pytest.mark.filterwarnings(  # by torch's jvp, and its linearize
    "ignore:.torch.jit:DeprecationWarning", "ignore:Attempted to insert:UserWarning"
)

Function = Callable[[Tensor], Tensor]


@pytest.fixture
def x(device: torch.device) -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).to(device)


TRANSFORMS: dict[str, Function] = {
    "grad": func.grad(lambda x: x.tanh().sum()),
    "vjp": lambda x: func.vjp(torch.tanh, x)[1](torch.ones_like(x))[0],
    "jvp": lambda x: func.jvp(torch.tanh, (x,), (torch.ones_like(x),))[1],
    "jacrev": func.jacrev(torch.tanh),
    "jacfwd": func.jacfwd(torch.tanh),
    "hessian": func.hessian(lambda x: x.tanh().sum()),
    "vmap": func.vmap(lambda x: x.tanh().sum()),
    "vmap of grad": func.vmap(func.grad(lambda x: x.tanh().sum())),
    "vmap of vjp": func.vmap(lambda x: func.vjp(torch.tanh, x)[1](torch.ones_like(x))[0]),
    "vmap of jacfwd": func.vmap(func.jacfwd(torch.tanh)),
    "linearize": lambda x: func.linearize(lambda y: (y @ x.mT).tanh(), x)[1](torch.ones_like(x)),
    "functional_call": lambda x: func.functional_call(nn.ReLU(), {}, (x,)),
    "batched gradients": lambda x: torch.autograd.functional.jacobian(
        torch.tanh, x, vectorize=True
    ),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms(backend: BackendName, x: Tensor, name: str) -> None:
    assert_recorded(backend, TRANSFORMS[name], x)


VIEWS: dict[str, Function] = {
    "squeeze_": lambda x: x.sum(1, keepdim=True).squeeze_(1) * 2,
    "squeeze_ of all": lambda x: x.sum(1, keepdim=True).squeeze_() * 2,
    "unsqueeze_": lambda x: (x * 2).unsqueeze_(1) * x,
    "t_": lambda x: (x * 2).t_() @ x,
    "transpose_": lambda x: (x * 2).transpose_(0, 1) @ x,
    "swapaxes_": lambda x: (x * 2).swapaxes_(0, 1) @ x,
    "swapdims_": lambda x: (x * 2).swapdims_(0, 1) @ x,
    "as_strided_": lambda x: (x * 2).as_strided_((4, 3), (1, 4)) @ x,
    "detach_": lambda x: (x * 2).detach_() * x,
    "several": lambda x: (x * 2).unsqueeze_(0).transpose_(0, 2).add_(1).squeeze_(2).t_().mul_(x),
}


@pytest.mark.parametrize("name", VIEWS)
def test_views_in_place(backend: BackendName, x: Tensor, name: str) -> None:
    assert_recorded(backend, VIEWS[name], x)
    assert_recorded(backend, lambda x: gradient(VIEWS[name], x), x.requires_grad_())
