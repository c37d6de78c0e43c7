"""Submodules that are called inside of ``torch.func`` or forward-mode autograd, always or at times.

A graph knows neither the batches of a vmap nor tangents: such calls run as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from tests.training.fits import Net, compare, fit_twice
from tests.training.modules.test_equal import named


class Block(nn.Module):
    """A layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh()


def plain(block: Block, x: Tensor) -> Tensor:
    hidden: Tensor = block(x)
    return hidden


def vmap(block: Block, x: Tensor) -> Tensor:
    hidden: Tensor = torch.func.vmap(block)(x)
    return hidden


def jvp(block: Block, x: Tensor) -> Tensor:
    hidden, tangent = torch.func.jvp(block, (x,), (torch.ones_like(x),))
    return hidden + tangent  # type: ignore[no-any-return]


def jacobian(block: Block, x: Tensor) -> Tensor:
    hidden: Tensor = torch.func.vmap(torch.func.jacrev(block))(x).sum(1)
    return hidden


def dual(block: Block, x: Tensor) -> Tensor:
    with forward_ad.dual_level():
        found = forward_ad.unpack_dual(block(forward_ad.make_dual(x, torch.ones_like(x))))
    return found.primal + found.tangent


def without_autograd(block: Block, x: Tensor) -> Tensor:
    with torch.no_grad():
        target = torch.func.vmap(block)(x)
    return target + plain(block, x)


WAYS = {f.__name__: f for f in (vmap, jvp, jacobian, dual, without_autograd)}


class Transformed(Net):
    """Calls a block as it is, and in one of these ways; in other steps not."""

    def __init__(self, way: str, every: int) -> None:
        super().__init__()
        self.block, self.head = Block(), nn.Linear(8, 8)
        self.way, self.every, self.steps = way, every, 0

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.steps += 1

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hidden = plain(self.block, batch["x"])
        if self.steps % self.every == 0:
            hidden = hidden + WAYS[self.way](self.block, batch["x"])
        return super().training_step({**batch, "x": self.head(hidden)}, batch_idx)


@pytest.mark.filterwarnings("ignore:GraphCapture", "ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize(
    "capture", [{"scope": "auto"}, {"scope": "modules"}, named("block", "net")]
)
@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("way", WAYS)
def test_calls_inside_of_a_transform(
    backend: str, tmp_path: Path, way: str, every: int, capture: dict[str, Any]
) -> None:
    capture = {**capture, "on_failure": "eager", "verify": False}
    fits = fit_twice(
        backend, tmp_path, module=lambda: Transformed(way, every), capture=capture, validation=0
    )
    compare(*fits, replayed=False)
    statistics = fits[1].statistics
    if capture["scope"] == "modules" and every == 1:
        assert any("is made inside of a transform" in line for line in statistics.fallbacks)


IN_STEPS: dict[str, Callable[[nn.Linear, Tensor], Tensor]] = {
    "squeeze_": lambda head, x: head(x).squeeze_(1),
    "views in place": lambda head, x: head(x).unsqueeze_(1).transpose_(0, 2).squeeze_(),
    "vmap of vjp": lambda head, x: vmap_of(
        lambda row: torch.func.vjp(head, row)[1](torch.ones(1, device=row.device))[0]
    )(x),
    "jacrev": lambda head, x: torch.func.jacrev(head)(x),
    "jacfwd": lambda head, x: torch.func.jacfwd(head)(x),
    "hessian": lambda head, x: vmap_of(torch.func.hessian(lambda row: head(row).tanh().sum()))(x),
    "jvp": lambda head, x: torch.func.jvp(head, (x,), (torch.ones_like(x),))[1],
}
vmap_of = torch.func.vmap


class Summed(Net):
    """Adds what a function makes of a layer."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.head, self.way = nn.Linear(8, 1), way

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + IN_STEPS[self.way](self.head, batch["x"]).pow(2).mean()


@pytest.mark.filterwarnings("ignore:GraphCapture", "ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize("scope", ["step", "modules"])
@pytest.mark.parametrize("way", IN_STEPS)
def test_steps_with_transforms(backend: str, tmp_path: Path, way: str, scope: str) -> None:
    fits = fit_twice(backend, tmp_path, module=lambda: Summed(way), capture={"scope": scope})
    compare(*fits, replayed=scope == "step")
    assert fits[1].statistics.replayed > 0
