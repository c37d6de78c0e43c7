"""Submodules as graphs: real fits with and without the callback, compared value by value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.training.fits import Net, adamw, batches, compare, fit_twice, named


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


class Normed(nn.Module):
    """RMSNorm as models write it, which uses its argument twice."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 16))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = Normed(), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + nn.functional.gelu(self.inner(self.norm(x)))


class Residuals(Blocks):
    """Arguments of the norms are added to what comes later, too."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Residual() for _ in range(4))

    def loss(self, batch: Any) -> Tensor:
        x = self.net(batch["x"])
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).float(), batch["y"])


@pytest.mark.parametrize("names", [["Normed"], ["Normed", "blocks.*.inner"], ["Residual"]])
def test_gradients_of_all_uses_are_added_in_the_order_of_autograd(
    backend: str, tmp_path: Path, names: list[str]
) -> None:
    capture = named(*names)
    fits = fit_twice(backend, tmp_path, module=Residuals, capture=capture, max_epochs=3)
    compare(*fits)


class Passing(Normed):
    """Returns its argument, too, as norms that add up residuals do."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), x


class PassedOn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = Passing(), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        normed, residual = self.norm(x)
        return residual + nn.functional.gelu(self.inner(normed))


class PassingResiduals(Residuals):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(PassedOn() for _ in range(4))


def test_an_argument_that_is_returned_keeps_the_gradient_that_it_gets_as_an_output(
    backend: str, tmp_path: Path
) -> None:
    fits = fit_twice(backend, tmp_path, module=PassingResiduals, capture=named("Passing"))
    compare(*fits)


def test_autocast_caches_nothing_between_graphs_and_eager_code(
    backend: str, tmp_path: Path
) -> None:
    class Tied(Blocks):
        """A weight of a graphed block is also used outside of it, before and after."""

        def loss(self, batch: Any) -> Tensor:
            weight = self.blocks[0].inner.weight
            x = self.net(batch["x"])
            x = nn.functional.linear(x, weight)[:, :16]
            x = self.blocks[0](x, scale=x.detach().std())["hidden"][0]
            x = nn.functional.linear(x, weight)[:, 16:]
            return nn.functional.cross_entropy(self.head(x).float(), batch["y"])

    fits = fit_twice(
        backend,
        tmp_path,
        module=Tied,
        capture=named("blocks.0"),
        precision="bf16-mixed",
        validation=0,
    )
    # Eager training adds the three gradients in bfloat16, where its cache has one cast of three.
    compare(*fits, tolerance=2e-2)


def test_statistics_have_a_record_for_each_module(backend: str, tmp_path: Path) -> None:
    _, captured = fit_twice(backend, tmp_path, module=Blocks, capture=CHOICES["all"], validation=0)
    statistics = captured.statistics
    assert statistics.modules == ["net", "blocks.0", "blocks.1", "blocks.2", "head"]
    assert statistics.recaptures == []
    assert (statistics.eager, statistics.replayed) == (6, 14)
    records = {r.scope: r for r in statistics.graphs if r.scope.startswith("module ")}
    assert list(records) == [f"module {name}" for name in statistics.modules]
    for record in records.values():
        assert (record.captures, record.parts, record.replays) == (1, 2, 14)
        if backend == "emulated":  # on a GPU nodes are counted where cuda-python is installed
            assert record.nodes is not None
            assert record.nodes > 0
        assert record.capture_ms > 0
    assert records["module net"].signature == "args[0] f32[8,8]"
    block = records["module blocks.1"].signature
    assert block == 'args[0] f32[8,16], kwargs["scale"] f32[]'


def test_shapes_that_change(backend: str, tmp_path: Path) -> None:
    def data() -> list[dict[str, Any]]:
        return [b for pair in zip(batches(12), batches(12, size=6), strict=True) for b in pair]

    fits = fit_twice(backend, tmp_path, module=Blocks, capture=CHOICES["blocks"], data=data)
    compare(*fits)
    assert fits[1].statistics.captures == 2
    assert fits[1].statistics.recaptures == [
        'batch["x"]: f32[6,8] -> f32[8,8]; batch["y"]: i64[6] -> i64[8]'
    ]
