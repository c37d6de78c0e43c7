"""FSDP2 on two ranks: what a fit trains with the callback is what it trains without, to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks import run_on_ranks
from tests.training.fsdp_fits import CASES, EAGER, require_equal_fits, resumed, trained_eagerly


@pytest.mark.parametrize("case", CASES)
def test_a_fit_with_graphs_is_one_without(tmp_path: Path, case: str) -> None:
    require_equal_fits("emulated", tmp_path, case)


@pytest.mark.parametrize("case", EAGER)
def test_what_is_not_captured_runs_eagerly_on_all_ranks(tmp_path: Path, case: str) -> None:
    assert run_on_ranks(trained_eagerly, "emulated", tmp_path, case) == [0, 0]


@pytest.mark.parametrize("whole", [True, False], ids=["one file", "a file of each rank"])
def test_checkpoints_are_those_of_eager_fits(tmp_path: Path, whole: bool) -> None:
    for states in run_on_ranks(resumed, "emulated", tmp_path, whole):
        assert all(state == states[0] for state in states)
