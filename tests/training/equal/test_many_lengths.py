"""Fits in which batches have many lengths: each has its graph, and all values are as eager."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_graphs.regions.conditions import ReplayGuards
from tests.training.fits import Net, compare, fit_twice, prepare

LENGTHS = 60


def of_many_lengths(lengths: int = LENGTHS, rounds: int = 2) -> list[dict[str, Tensor]]:
    """Batches of four sequences, each length as often as any other, in any order."""
    order = [*range(1, lengths + 1)] * rounds
    random.Random(0).shuffle(order)
    numbers = torch.Generator().manual_seed(0)
    return [
        {
            "x": torch.randn(4, length, 8, generator=numbers),
            "y": torch.randint(0, 3, (4,), generator=numbers),
        }
        for length in order
    ]


class Sequences(Net):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 3), nn.Dropout(0.25))

    def loss(self, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch["x"]).mean(1), batch["y"])


def test_sixty_lengths_give_the_values_of_eager_steps(backend: str, tmp_path: Path) -> None:
    eager, captured = fit_twice(
        backend,
        tmp_path,
        module=Sequences,
        data=of_many_lengths,
        validation=0,
        max_epochs=1,
        capture={"min_repeats": 0, "warmup_steps": 1, "verify": False},
    )
    compare(eager, captured)
    assert captured.statistics.captures == LENGTHS
    assert captured.statistics.replayed == 2 * LENGTHS - 1


def test_a_replay_among_many_lengths_reads_the_guards_of_two(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: Counter[str] = Counter()
    checks = ReplayGuards.checks

    def counting(self: ReplayGuards, *args: Any, **kwargs: Any) -> Any:
        (read, known), *others = checks(self, *args, **kwargs)

        def counted() -> Any:
            reads["guard"] += 1
            return read()

        return ((counted, known), *others)

    monkeypatch.setattr(ReplayGuards, "checks", counting)
    fit = prepare(
        backend,
        tmp_path,
        True,
        module=Sequences,
        data=lambda: of_many_lengths(8, 5),
        validation=0,
        max_epochs=1,
        capture={"min_repeats": 0, "warmup_steps": 1, "verify": False},
    ).run()
    assert fit.statistics.captures == 8
    # Of the plan that was used last, and of the one that fits.
    assert reads["guard"] <= 2 * len(fit.loader) + fit.statistics.captures
