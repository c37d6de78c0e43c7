"""Every step is done the same way on all ranks, also where one of them is made to differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop

from tests.ranks import RankError, in_folder, run_on_ranks
from tests.training.ddp_fits import DDP
from tests.training.fits import prepare
from tests.training.rank_differences import (
    KINDS,
    failing,
    failing_when_verified,
    out_of_memory,
    parting,
    require_ended,
    require_together,
    stopped,
)


@pytest.mark.parametrize("kind", KINDS)
def test_one_rank_differs(tmp_path: Path, kind: str) -> None:
    require_together("emulated", tmp_path, kind)


def test_a_signal_to_one_rank_stops_all_after_the_same_step(tmp_path: Path) -> None:
    first, second = run_on_ranks(stopped, "emulated", tmp_path)
    assert first == second == (18, 18 - 13)


def synchronizing(rank: int, root: Path) -> Any:
    """How often Lightning asks the other ranks for a signal ahead of a step."""
    asked = [0, 0]
    for is_captured in (False, True):
        made = prepare("emulated", in_folder(root, rank), is_captured, validation=0, **DDP)
        loop = made.trainer.fit_loop.epoch_loop
        own = getattr(loop, "_broadcast_sigterm_tensor", None)
        if own is None:  # Lightning 2.5 does not ask
            continue

        def ask(own: Any = own, at: int = is_captured) -> None:
            asked[at] += 1
            own()

        loop._broadcast_sigterm_tensor = ask
        made.run()
        assert loop._broadcast_sigterm_tensor is ask
    return asked


def test_no_step_waits_for_the_device_to_hear_of_signals(tmp_path: Path) -> None:
    asks = hasattr(_TrainingEpochLoop, "_broadcast_sigterm_tensor")
    assert run_on_ranks(synchronizing, tmp_path) == [[20 * asks, 0]] * 2


def test_an_exception_on_one_rank_ends_all(tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"rank 0: (.|\n)*rank 1: (.|\n)*broken on one rank"):
        run_on_ranks(failing, "emulated", tmp_path, seconds=60)


def test_an_exception_in_a_verification_ends_all(tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"rank 0: (.|\n)*rank 1: (.|\n)*broken on one rank"):
        run_on_ranks(failing_when_verified, "emulated", tmp_path, seconds=60)


@pytest.mark.parametrize(("every", "ends"), [(1, 17), (50, 20)])
def test_an_assertion_of_one_rank_ends_all(tmp_path: Path, every: int, ends: int) -> None:
    require_ended("emulated", tmp_path, every, ends)


def test_no_rank_goes_on_where_others_wait_for_it(tmp_path: Path) -> None:
    (said, other), (again, odd) = run_on_ranks(parting, tmp_path)
    for each in (said, again):
        assert "wait for: rank 1: CUDA out of memory" in each
    assert "on rank 1: AssertionError" in other
    assert odd == "AssertionError: "


def test_a_step_without_memory_ends_all_and_says_why(tmp_path: Path) -> None:
    """No rank may repeat a step amid whose collectives the others are."""
    with pytest.raises(RankError, match=r"rank 0: (.|\n)*rank 1: (.|\n)*Tried to allocate 2 GiB"):
        run_on_ranks(out_of_memory, "emulated", tmp_path, seconds=60)
    first, second = ((tmp_path / f"said by {rank}").read_text() for rank in (0, 1))
    assert not first
    assert second.count("cannot be repeated without graphs, because other ranks") == 1
    assert "Tried to allocate 2 GiB" in second
