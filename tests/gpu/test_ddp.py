"""DDP on two GPUs: the same fits as in a rehearsal, over NCCL."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks import RankError, run_on_ranks
from tests.training.ddp_fits import CASES, ON_A_GPU, require_equal_fits
from tests.training.rank_differences import (
    KINDS,
    dying,
    failing,
    require_together,
    stopped,
)

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("case", [*CASES, *ON_A_GPU])
def test_a_fit_with_graphs_is_one_without(tmp_path: Path, case: str) -> None:
    require_equal_fits("cuda", tmp_path, case)


@pytest.mark.parametrize("kind", KINDS)
def test_one_rank_differs(tmp_path: Path, kind: str) -> None:
    require_together("cuda", tmp_path, kind)


def test_a_signal_to_one_rank_stops_all_after_the_same_step(tmp_path: Path) -> None:
    first, second = run_on_ranks(stopped, "cuda", tmp_path)
    assert first == second == (18, 18 - 13)


def test_an_exception_on_one_rank_ends_all(tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"rank 0: (.|\n)*rank 1: (.|\n)*broken on one rank"):
        run_on_ranks(failing, "cuda", tmp_path, seconds=60)


def test_a_killed_rank_ends_all(tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"rank 0: Traceback(.|\n)*rank 1: its process has ended"):
        run_on_ranks(dying, "cuda", tmp_path, seconds=60)
