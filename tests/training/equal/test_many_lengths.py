"""Fits in which batches have many lengths: each has its graph, and all values are as eager."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_graphs import PadTo
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


def test_many_lengths_give_the_values_of_eager_steps(
    backend: str, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    lengths = LENGTHS if pytestconfig.option.every_row else 12
    eager, captured = fit_twice(
        backend,
        tmp_path,
        module=Sequences,
        data=lambda: of_many_lengths(lengths),
        validation=0,
        max_epochs=1,
        capture={"min_repeats": 0, "warmup_steps": 1, "verify": False},
    )
    compare(eager, captured)
    assert captured.statistics.captures == lengths
    assert captured.statistics.replayed == 2 * lengths - 1


def test_the_report_says_which_padding_would_do(backend: str, tmp_path: Path) -> None:
    fit = prepare(
        backend,
        tmp_path,
        True,
        module=Sequences,
        data=lambda: of_many_lengths(LENGTHS, 1),
        validation=0,
        max_epochs=1,
        capture={"min_repeats": 10, "on_failure": "eager"},
    )
    with pytest.warns(UserWarning, match="pad batches to a few fixed lengths"):
        fit.run()
    report = fit.capture.report
    padding = report.padding
    assert padding is not None
    assert (padding.tensors, padding.seen) == (('"x"',), LENGTHS - 3)  # but for the warm-up
    assert padding.lengths[-1] == LENGTHS
    assert len(padding.lengths) < 16
    assert 0.0 < padding.added < 0.5
    assert f'collate_fn=PadTo({[*padding.lengths]}, {{"x": ...}}, collate_fn)' in str(report)
    assert f"{LENGTHS - 3} lengths came. {len(padding.lengths)} would do, with" in str(report)


class Masked(Sequences):
    """Leaves padding out."""

    def loss(self, batch: Any) -> Tensor:
        x, mask = batch["x"], batch["mask"]
        means = (self.net(x) * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        return nn.functional.cross_entropy(means, batch["y"])


def padded() -> Any:
    """The batches of many lengths, with masks, each padded to one of two lengths."""
    batches = [
        {**batch, "mask": torch.ones(batch["x"].shape[:2])} for batch in of_many_lengths(LENGTHS, 1)
    ]
    pad = PadTo([32, LENGTHS], {"x": 0.0, "mask": 0.0}, collate_fn=lambda examples: examples[0])
    return DataLoader(batches, batch_size=1, collate_fn=pad)  # type: ignore[arg-type]


def test_padded_to_two_lengths_two_graphs_do(backend: str, tmp_path: Path) -> None:
    given: dict[str, Any] = {"module": Masked, "data": padded, "validation": 0, "max_epochs": 1}
    capture = {"min_repeats": 0, "warmup_steps": 1, "verify": False}
    eager, captured = fit_twice(backend, tmp_path, capture=capture, **given)
    compare(eager, captured)
    assert captured.statistics.captures == 2
    assert captured.statistics.eager <= 2
    assert captured.capture.report.padding is None


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
