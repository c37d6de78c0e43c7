"""Submodules as graphs: real fits with and without the callback, compared value by value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.training.fits import Net, adamw, batches, compare, fit_twice


class Block(nn.Module):
    """Residual block; keyword argument, nested output."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.inner = nn.Linear(16, 32)
        self.outer = nn.Linear(32, 16)
        self.dropout = nn.Dropout(0.25)

    def forward(self, x: Tensor, *, scale: Tensor) -> dict[str, Any]:
        hidden = self.dropout(self.outer(nn.functional.gelu(self.inner(self.norm(x)))))
        return {"hidden": (x + hidden * scale, hidden.detach().mean()), "kind": "block"}


class Blocks(Net):
    """Three blocks and a head; the loss reads a value on the host, so that no step is one graph."""

    def __init__(self, optimizers: Any = adamw) -> None:
        super().__init__(optimizers)
        self.net = nn.Linear(8, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(16, 3)

    def loss(self, batch: Any) -> Tensor:
        x = self.net(batch["x"])
        for block in self.blocks:
            x, _ = block(x, scale=x.detach().std())["hidden"]
        loss = nn.functional.cross_entropy(self.head(x).float(), batch["y"])
        return loss * 2 if loss.item() > 0.5 else loss


def named(*modules: str, **options: Any) -> dict[str, Any]:
    return {"scope": "modules", "modules": list(modules), **options}


CHOICES = {
    "blocks": named("blocks.*"),
    "class": named("Block"),
    "all": named("net", "blocks.*", "head"),
    "some": named("blocks.*", exclude=["blocks.1"]),
    "own choice": {"scope": "modules"},
}


@pytest.mark.parametrize("choice", CHOICES)
def test_the_values_are_those_of_eager_training(backend: str, tmp_path: Path, choice: str) -> None:
    fits = fit_twice(backend, tmp_path, module=Blocks, capture=CHOICES[choice], validation=2)
    compare(*fits)


@pytest.mark.parametrize("options", [{"accumulate_grad_batches": 2}, {"gradient_clip_val": 0.1}])
def test_accumulation_and_clipping(backend: str, tmp_path: Path, options: Any) -> None:
    fits = fit_twice(backend, tmp_path, module=Blocks, capture=CHOICES["blocks"], **options)
    compare(*fits)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_precision(backend: str, tmp_path: Path, precision: str) -> None:
    capture = CHOICES["all"]
    fits = fit_twice(backend, tmp_path, module=Blocks, capture=capture, precision=precision)
    compare(*fits)


def test_shapes_that_change(backend: str, tmp_path: Path) -> None:
    def data() -> list[dict[str, Any]]:
        return [b for pair in zip(batches(12), batches(12, size=6), strict=True) for b in pair]

    fits = fit_twice(backend, tmp_path, module=Blocks, capture=CHOICES["blocks"], data=data)
    compare(*fits)
    assert fits[1].statistics.captures == 2
