"""When a replay counts as what eager code computes, and how often each of them runs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_graphs import VerificationError
from lightning_graphs.lightning.ranks import TrainerRanks
from lightning_graphs.policy.worth import MemoryBudget
from lightning_graphs.regions.tolerance import Tolerance
from lightning_graphs.regions.verify import Comparison, Verifier
from lightning_graphs.report.messages import Messages, Statistics
from lightning_graphs.values.snapshot import RegionState, Result

CPU = torch.device("cpu")


NOTHING = RegionState({}, {})


def verifier() -> Verifier:
    trainer: Any = SimpleNamespace(world_size=1, strategy=SimpleNamespace(model=None))
    parts = MemoryBudget(CPU), TrainerRanks(trainer), Messages(Statistics())
    return Verifier(True, Tolerance("cpu", None), *parts, lambda: 3)


def compared(eager: list[float], replayed: list[float]) -> None:
    """Compare runs that give these values, one after the other."""
    values = {"eager": iter(eager), "replayed": iter(replayed)}

    def run(way: str) -> list[Result]:
        return [Result("x", torch.tensor([next(values[way])]))]

    ways = Comparison(NOTHING, lambda: run("eager"), lambda: run("replayed"))
    verifier().compare(ways, "it was not verified")
    assert [list(left) for left in values.values()] == [[], []]


def test_equal_bits_take_two_runs() -> None:
    compared([1.0], [1.0])


def test_a_rounding_is_accepted() -> None:
    compared([1.0] * 3, [1.0 + 2**-20] * 2)


def test_noise_of_eager_runs_is_asked_for() -> None:
    compared([1.0, 1.0 + 2**-15, 1.0], [1.0 - 2**-15] * 2)
    with pytest.raises(VerificationError, match=r"at step 3, x differs by up to 0\.5; two eager"):
        compared([1.0, 1.0 + 2**-15, 1.0], [1.5, 1.5])


def test_without_memory_for_copies_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def clone(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("9 MiB are free")

    monkeypatch.setattr(torch.Tensor, "clone", clone)
    with pytest.warns(UserWarning, match="it was not verified: 9 MiB are free"):
        compared([1.0, 1.0], [2.0])


def test_a_result_of_one_way_only_is_named() -> None:
    ways = Comparison(
        NOTHING,
        lambda: [Result("x", torch.ones(1))],
        lambda: [Result("y", torch.ones(1))],
    )
    with pytest.raises(VerificationError, match="at step 3, only the eager step has x"):
        verifier().compare(ways, "it was not verified")
