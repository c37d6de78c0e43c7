"""Backward passes whose nodes another thread numbers, as that of a GPU does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint

from lightning_graphs.private.engine import backward_passes_noted


@pytest.fixture(autouse=True)
def apart(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run the passes in a thread that has recorded fewer nodes than this one."""
    engine: Any = torch.autograd._engine_run_backward  # type: ignore[attr-defined]
    own = torch.ones((), requires_grad=True)
    for _ in range(64):
        own = own * 1.0
    with ThreadPoolExecutor(1) as other:
        (thread,) = other.map(lambda _: threading.get_ident(), [0])

        def run(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == thread:
                return engine(*args, **kwargs)
            return other.submit(engine, *args, **kwargs).result(60)

        monkeypatch.setattr(torch.autograd, "_engine_run_backward", run)
        yield


def slope(output: Tensor, x: Tensor, **given: Any) -> Tensor:
    return torch.autograd.grad(output if given else output.sum(), x, create_graph=True, **given)[0]


def physics(x: Tensor, ahead: Tensor) -> None:
    second = slope(slope(x.sin() * x, x), x)
    (second + x).square().sum().backward()


def accumulated(x: Tensor, ahead: Tensor) -> None:
    x.pow(3).sum().backward(create_graph=True)
    gradient, x.grad = x.grad, None
    assert gradient is not None
    gradient.square().sum().backward()


def weighted(x: Tensor, ahead: Tensor) -> None:
    """The gradient's own graph has one of the weights."""
    (x * slope(x.pow(3), x)).sum().backward()
    found = torch.autograd.grad(x.pow(3), x, torch.ones_like(x) * x, create_graph=True)
    torch.autograd.backward(get_gradient_edge(found[0].sum()))


def batched(x: Tensor, ahead: Tensor) -> None:
    each = slope(x.pow(3), x, grad_outputs=torch.eye(4), is_grads_batched=True)
    each.square().sum().backward()


def recomputed(x: Tensor, ahead: Tensor) -> None:
    checkpoint(torch.sin, x, use_reentrant=True).sum().backward()


def of_ahead(x: Tensor, ahead: Tensor) -> None:
    (x * ahead).sum().backward()


def by_weights_of_ahead(x: Tensor, ahead: Tensor) -> None:
    found = torch.autograd.grad(x.pow(3), x, ahead, create_graph=True)
    found[0].sum().backward()


def added_to_ahead(x: Tensor, ahead: Tensor) -> None:
    x.grad = ahead
    x.pow(3).sum().backward(create_graph=True)
    assert x.grad is not None
    x.grad.sum().backward()


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.parametrize(
    "body",
    [
        *(physics, accumulated, weighted, batched, recomputed),
        *(of_ahead, by_weights_of_ahead, added_to_ahead),
    ],
)
@pytest.mark.parametrize("made", ["here", "there"])
def test_a_pass_goes_outside(body: Callable[[Tensor, Tensor], None], made: str) -> None:
    x = torch.linspace(0.1, 1, 4, requires_grad=True)
    w = torch.full((4,), 2.0, requires_grad=True)
    ahead = w.exp() if made == "here" else slope(w.square(), w)  # the second: in the other thread
    told: list[str] = []
    with backward_passes_noted(lambda: told.append("outside")) as passes:
        body(x, ahead)
    assert passes
    assert bool(told) == ("ahead" in body.__name__)
