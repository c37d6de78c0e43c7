"""Which lengths a report says to pad to, and when it says so."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from lightning_graphs.report import GraphRecord
from lightning_graphs.report.messages import Statistics, lengths_in, padding_for
from lightning_graphs.values.signature import Signature


def signature(**shapes: tuple[int, ...]) -> Signature:
    batch = {name: torch.empty(shape) for name, shape in shapes.items()}
    return Signature.of((batch,), {}, names=("batch",))[0]


def texts(length: int, size: int = 4) -> Signature:
    return signature(tokens=(size, length), mask=(size, 1, length, length), label=(size,))


def test_one_length_of_several_tensors_is_found() -> None:
    found = lengths_in([(texts(8), 3.0), (texts(5), 2.0), (texts(8), 1.0), (texts(7, size=3), 1.0)])
    assert found is not None
    assert found.tensors == ('batch["tokens"]', 'batch["mask"]')
    assert found.counts == {8: 4.0, 5: 2.0}  # the last batch of an epoch is left out


@pytest.mark.parametrize(
    "shapes",
    [
        [],
        [texts(8)],
        [texts(8, size=size) for size in (3, 4, 5)],
        [signature(source=(4, n), target=(4, 2 * n)) for n in (3, 4, 5)],
        [signature(image=(4, 3, n, 2 * n)) for n in (8, 16)],
    ],
    ids=["nothing", "one", "sizes of batches", "two lengths", "height and width"],
)
def test_where_no_one_length_differs_nothing_is_said(shapes: list[Signature]) -> None:
    assert lengths_in([(shape, 1.0) for shape in shapes]) is None


def done(eager: int, replayed: int, captures: int, times: tuple[float, float, float]) -> Statistics:
    """A fit on a GPU: milliseconds of an eager step, a replay and a capture."""
    statistics = Statistics(backend="cuda", eager=eager, replayed=replayed, captures=captures)
    statistics.step_times.eager += [times[0]] * min(eager, 8)
    statistics.step_times.replayed += [times[1]] * min(replayed, 8)
    ms = times[2]
    statistics.graphs += [GraphRecord(signature="", capture_ms=ms) for _ in range(captures)]
    return statistics


def lengths(counts: Mapping[int, int]) -> list[tuple[Signature, float]]:
    return [(texts(length), float(count)) for length, count in counts.items()]


SIXTY = lengths({4 * n: 7 for n in range(4, 64)})


def test_many_eager_steps_would_be_replayed() -> None:
    statistics = done(400, 0, 0, (54.0, 0.0, 0.0))
    padding = padding_for(SIXTY, statistics)
    assert padding is not None
    assert padding.tensors == ('"tokens"', '"mask"')
    assert padding.seen == 60
    assert 3 <= len(padding.lengths) <= 10
    assert padding.lengths[-1] == 252
    assert padding.saves_ms is not None
    assert 0.6 * 400 * 54.0 < padding.saves_ms < 400 * 54.0
    assert "60 lengths came." in str(padding)
    assert "s less, if the step leaves padding out" in str(padding)


def test_the_dearer_a_capture_the_fewer_lengths() -> None:
    cheap, dear = (
        padding_for(SIXTY, done(380, 20, 1, (54.0, 5.0, cost))) for cost in (50.0, 800.0)
    )
    assert cheap is not None
    assert dear is not None
    assert len(cheap.lengths) > len(dear.lengths)
    assert cheap.added < dear.added


@pytest.mark.parametrize(
    ("shapes", "statistics"),
    [
        (SIXTY, Statistics()),
        # The GPU is busy: padding is work
        (SIXTY, done(300, 100, 10, (54.0, 53.0, 100.0))),
        # As good as all were replayed
        (SIXTY, done(10, 39990, 60, (54.0, 5.0, 100.0))),
        (lengths({32: 200, 64: 200}), done(400, 0, 0, (54.0, 0.0, 0.0))),
    ],
    ids=["no step", "busy", "replayed", "few lengths"],
)
def test_where_padding_gains_little_nothing_is_said(
    shapes: list[tuple[Signature, float]], statistics: Statistics
) -> None:
    assert padding_for(shapes, statistics) is None
