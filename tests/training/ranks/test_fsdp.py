"""FSDP2 on two ranks: what a fit trains with the callback is what it trains without, to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.training.fsdp_fits import (
    CASES,
    EAGER,
    require_eager_fits,
    require_equal_checkpoints,
    require_equal_fits,
)


@pytest.mark.parametrize("case", CASES)
def test_a_fit_with_graphs_is_one_without(tmp_path: Path, case: str) -> None:
    require_equal_fits("emulated", tmp_path, case)


@pytest.mark.parametrize("case", EAGER)
def test_what_is_not_captured_runs_eagerly_on_all_ranks(tmp_path: Path, case: str) -> None:
    require_eager_fits("emulated", tmp_path, case)


@pytest.mark.parametrize("whole", [True, False], ids=["one file", "a file of each rank"])
def test_checkpoints_are_those_of_eager_fits(tmp_path: Path, whole: bool) -> None:
    require_equal_checkpoints("emulated", tmp_path, whole)
