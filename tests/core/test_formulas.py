"""Operators for which torch has another formula where a dispatch mode is on, and their gradients.

torch asks ``areAnyTensorSubclassLike`` in the backward passes and tangents of these. A capture
computes what eager code computes, to the bit, or refuses what eager code reads on the host.
"""

from __future__ import annotations

import operator
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, func, nn

from lightning_graphs import CaptureError
from lightning_graphs.core import BackendName, CUDAGraph, graph
from tests.core.recorded import assert_recorded, gradient

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # by torch's jvp

functional = nn.functional

Function = Callable[[Tensor], Tensor]


def _mask(x: Tensor) -> Tensor:
    return x > 0


# One a line: the line of the lambda is the line that a refusal must name.
READS: dict[str, Function] = {
    "prod": lambda x: x.prod(),
    "prod of a dimension": lambda x: x.prod(1),
    "cumprod": lambda x: x.cumprod(-1),
    "cumprod in place": lambda x: (x * 2).cumprod_(0),
    "masked_fill": lambda x: x.masked_fill(_mask(x), x[0, 0]),
    "masked_fill in place": lambda x: (x * 2).masked_fill_(_mask(x), x[0, 0]),
    "vander": lambda x: torch.linalg.vander(x),
}

SERVED: dict[str, Function] = {
    "prod of a number": lambda x: x[0, 0].prod() * 2,
    "cumprod of one": lambda x: x[:, :1].cumprod(1),
    "masked_fill by a constant": lambda x: x.masked_fill(_mask(x), 2.0),
    **{
        name: operator.methodcaller(name)
        for name in ("max", "min", "median", "nanmedian", "amax", "std", "norm")
    },
    "max of equal ones": lambda x: x.sign().mul(x.detach().abs()).round().max(),
    "max of each row": lambda x: x.max(1).values,
    "kthvalue": lambda x: x.kthvalue(2).values,
    "sort": lambda x: x.sort(1).values * x,
    "gather": lambda x: x.gather(1, x.detach().argsort(1)),
    "det": lambda x: torch.linalg.det(x[:, :3]),
    "renorm": lambda x: x.renorm(2, 0, 0.5),
    "cdist": lambda x: torch.cdist(x, 2 * x),
    "normalize": lambda x: functional.normalize(x),
    "softsign": lambda x: functional.softsign(x),
    "logcumsumexp": lambda x: x.logcumsumexp(1),
    "binary cross entropy": lambda x: functional.binary_cross_entropy(x.sigmoid(), x.detach() * 0),
    "clamp": lambda x: x.clamp(x.detach().mean(), x.detach().max()),
    "index_fill": lambda x: x.index_fill(1, x.detach().long().flatten()[:1] * 0, 3.0),
}


@pytest.fixture
def x(device: torch.device) -> Tensor:
    values = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    return values.to(device).requires_grad_()


@pytest.mark.parametrize("name", READS)
def test_gradients_for_which_the_host_reads(backend: BackendName, x: Tensor, name: str) -> None:
    function = READS[name]
    with (
        pytest.raises(CaptureError, match="A capture cannot") as caught,
        graph(CUDAGraph(backend=backend)),
    ):
        gradient(function, x)
    if backend == "emulated":  # CUDA tells of the backward pass only
        assert f"{__file__}:{function.__code__.co_firstlineno} in <lambda>" in str(caught.value)


@pytest.mark.parametrize("name", SERVED)
def test_gradients(backend: BackendName, x: Tensor, name: str) -> None:
    assert_recorded(backend, lambda x: gradient(SERVED[name], x), x)


def test_second_gradient_of_a_determinant(backend: BackendName, x: Tensor) -> None:
    with pytest.raises(CaptureError, match="A capture cannot"), graph(CUDAGraph(backend=backend)):
        gradient(lambda x: torch.linalg.det(x[:, :3]), x, twice=True)


_NORMS: dict[str, Function] = {
    "layer": lambda x: functional.layer_norm(x, (4,)),
    "group": lambda x: functional.group_norm(x, 2),
    "batch": lambda x: functional.batch_norm(x, None, None, training=True),
}


def _tangent(function: Function, x: Tensor) -> Tensor:
    tangent: Tensor = func.jvp(function, (x,), (torch.ones_like(x),))[1]
    return tangent


@pytest.mark.parametrize("name", _NORMS)
def test_tangents_of_normalization(backend: BackendName, x: Tensor, name: str) -> None:
    x = x.detach()
    if backend == "cuda":
        assert_recorded(backend, lambda x: _tangent(_NORMS[name], x), x)
        return
    with (
        pytest.raises(CaptureError, match="A rehearsal cannot contain forward-mode"),
        graph(CUDAGraph(backend=backend)),
    ):
        _tangent(_NORMS[name], x)
    assert_recorded(backend, lambda x: func.jacrev(_NORMS[name])(x), x)  # reverse mode is served
