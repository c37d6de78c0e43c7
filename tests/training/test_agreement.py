"""When a replay counts as what eager code computes, and how often each of them runs."""

from __future__ import annotations

import pytest
import torch

from lightning_graphs import VerificationError
from lightning_graphs.training.agreement import Agreement, BothWays
from lightning_graphs.training.differences import Result, Tolerance
from lightning_graphs.training.memory import MemoryBudget

BUDGET = MemoryBudget(torch.device("cpu"))


def compared(eager: list[float], replayed: list[float]) -> list[str]:
    """What is said of runs that give these values, one after the other."""
    said: list[str] = []
    values = {"eager": iter(eager), "replayed": iter(replayed)}

    def run(way: str) -> list[Result]:
        return [Result("x", torch.tensor([next(values[way])]))]

    rule = Agreement(Tolerance("cpu", None), BUDGET, "at step 3", said.append)
    rule.require(BothWays(lambda: run("eager"), lambda: run("replayed"), lambda: None))
    assert [list(left) for left in values.values()] == [[], []]
    return said


def test_equal_bits_take_two_runs() -> None:
    assert compared([1.0], [1.0]) == []


def test_a_rounding_is_accepted() -> None:
    assert compared([1.0, 1.0], [1.0 + 2**-20, 1.0 + 2**-20]) == []


def test_noise_of_eager_runs_is_asked_for() -> None:
    assert compared([1.0, 1.0 + 2**-15, 1.0], [1.0 - 2**-15] * 2) == []
    with pytest.raises(VerificationError, match=r"at step 3, x differs by up to 0\.5; two eager"):
        compared([1.0, 1.0 + 2**-15, 1.0], [1.5, 1.5])


def test_without_memory_for_copies_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MemoryBudget, "has_room", lambda *_: False)
    said = compared([1.0, 1.0], [2.0, 2.0])
    assert said == ["not every tensor was verified: no memory for copies"]


def test_a_result_of_one_way_only_is_named() -> None:
    ways = BothWays(
        lambda: [Result("x", torch.ones(1))],
        lambda: [Result("y", torch.ones(1))],
        lambda: None,
    )
    rule = Agreement(Tolerance("cpu", None), BUDGET, "at step 3", print)
    with pytest.raises(VerificationError, match="at step 3, only the eager step has x"):
        rule.require(ways)
