"""Outputs that the next graph reads in place: not copied, and never overwritten under a caller."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from lightning_graphs.core.lending import LentMemory
from lightning_graphs.core.outputs import OutputPlan
from tests.training.fits import Net, batches, compare, fit_twice

CAPTURE: dict[str, Any] = {"scope": "modules", "modules": ["blocks.*"]}


class Chain(Net):
    """Three blocks, each fed with what the one before it returned."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(8, 16)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.25), nn.ReLU()) for _ in range(3)
        )
        self.head = nn.Linear(16, 3)

    def chain(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def loss(self, batch: Any) -> Tensor:
        x = self.chain(self.net(batch["x"]))
        return nn.functional.cross_entropy(self.head(x).float(), batch["y"])


class Residual(Chain):
    """What goes from block to block is used beside them, too."""

    def chain(self, x: Tensor) -> Tensor:
        first = self.blocks[0](x)
        second = self.blocks[1](first)
        return self.blocks[2](second) + first * second


class Changing(Chain):
    """What a block returned is written in place before the next block reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16)) for _ in range(3))

    def chain(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).mul_(0.5)
        return x


class Keeping(Chain):
    """The output of the first block is kept, and read in the step after."""

    def chain(self, x: Tensor) -> Tensor:
        first = self.blocks[0](x)
        before = getattr(self, "_kept", None)
        self._kept = first.detach()
        x = self.blocks[2](self.blocks[1](first))
        return x if before is None else x + before.mean()


@pytest.fixture
def lent(monkeypatch: pytest.MonkeyPatch) -> set[LentMemory]:
    """All memory that was lent."""
    found: set[LentMemory] = set()
    original = OutputPlan.lend

    def lend(self: OutputPlan, index: int) -> LentMemory:
        found.add(original(self, index))
        return original(self, index)

    monkeypatch.setattr(OutputPlan, "lend", lend)
    return found


@pytest.mark.parametrize(("module", "count"), [(Chain, 2), (Residual, 2), (Changing, 0)])
def test_outputs_go_from_graph_to_graph_unless_something_else_comes_between(
    backend: str, tmp_path: Path, lent: set[LentMemory], module: type[Chain], count: int
) -> None:
    compare(*fit_twice(backend, tmp_path, module=module, capture=CAPTURE))
    assert len(lent) == count


def test_an_output_that_somebody_keeps_is_not_overwritten(
    backend: str, tmp_path: Path, lent: set[LentMemory]
) -> None:
    compare(*fit_twice(backend, tmp_path, module=Keeping, capture=CAPTURE))
    assert len(lent) == 2


def test_shapes_share_modules_and_not_memory(
    backend: str, tmp_path: Path, lent: set[LentMemory]
) -> None:
    def data() -> list[dict[str, Any]]:
        return [b for pair in zip(batches(12), batches(12, size=6), strict=True) for b in pair]

    compare(*fit_twice(backend, tmp_path, module=Chain, capture=CAPTURE, data=data))
    assert len(lent) == 4


class HandingOut(Chain):
    """The output of the second block is handed to hooks, after the optimizer step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        first = self.blocks[0](self.net(batch["x"]))
        second = self.blocks[1](first)
        logits = self.head(self.blocks[2](second))
        loss = nn.functional.cross_entropy(logits, batch["y"])
        return {"loss": loss, "features": second.detach()}


def test_hooks_after_the_step_see_what_a_lent_output_was(
    backend: str, tmp_path: Path, lent: set[LentMemory]
) -> None:
    def data() -> list[dict[str, Any]]:
        return [b for pair in zip(batches(12), batches(12, size=6), strict=True) for b in pair]

    compare(*fit_twice(backend, tmp_path, module=HandingOut, capture=CAPTURE, data=data))
    assert len(lent) == 4


class KeepingTheLast(Chain):
    """The output of the second block is kept, and read in the step after; batches of two sizes."""

    def chain(self, x: Tensor) -> Tensor:
        second = self.blocks[1](self.blocks[0](x))
        before = getattr(self, "_kept", None)
        self._kept = second.detach()
        x = self.blocks[2](second)
        return x if before is None else x + before.mean()


def test_an_output_that_is_kept_is_copied_from_then_on(
    backend: str, tmp_path: Path, lent: set[LentMemory]
) -> None:
    def data() -> list[dict[str, Any]]:
        return [b for pair in zip(batches(12), batches(12, size=6), strict=True) for b in pair]

    _, captured = fits = fit_twice(
        backend, tmp_path, module=KeepingTheLast, capture=CAPTURE, data=data
    )
    compare(*fits)
    assert len(lent) == 4  # two outputs of either size, and none after the first replay
    reasons = captured.statistics.recaptures
    assert any("an output of a graphed module is kept" in reason for reason in reasons)
