"""Submodules that are called inside of ``torch.func`` or forward-mode autograd, always or at times.

A graph knows neither the batches of a vmap nor tangents: such calls run as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from tests.programs.table import Promises, row
from tests.training.fits import Net


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
    "item in grad": lambda head, x: torch.func.grad(lambda x: reading(head(x).sum()))(x),
}
vmap_of = torch.func.vmap


def reading(loss: Tensor) -> Tensor:
    return loss * (1.0 if loss.item() > 0 else 2.0)  # read


class Summed(Net):
    """Adds what a function makes of a layer."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.head, self.way = nn.Linear(8, 1), way

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + IN_STEPS[self.way](self.head, batch["x"]).pow(2).mean()


EVERY_WAY = {
    "said": None, "validation": 0, "capture": {"scope": "auto", "verify": False},
    "modules": ("block", "net"), "ignored": ".torch.jit",
}  # fmt: skip
ROWS = {
    f"{way}, every {n}": row(
        partial(Transformed, way, n), also="modules, unverified",
        below="is made inside of a transform" if n == 1 and way != "without_autograd" else None,
        **EVERY_WAY,
    )
    for way in WAYS for n in (1, 3)
}  # fmt: skip
REFUSED = {"item in grad": "in reading: return loss"}
ROWS |= {
    way: row(partial(Summed, way), ignored=".torch.jit", found=None, said=REFUSED.get(way, ""))
    for way in IN_STEPS
}


class TestTransforms(Promises):
    rows = ROWS
