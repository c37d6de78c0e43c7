"""DDP on two GPUs: the same fits as in a rehearsal, over NCCL."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.loops import ranks as loops
from tests.ranks import RankError, run_on_ranks
from tests.training.ddp_fits import CASES, ON_A_GPU, require_equal_fits
from tests.training.rank_differences import (
    KINDS,
    dying,
    failing,
    failing_when_verified,
    require_ended,
    require_together,
    stopped,
)

pytestmark = pytest.mark.gpu


def _signal(root: Path) -> None:
    first, second = run_on_ranks(stopped, "cuda", root)
    assert first == second == (18, 18 - 13)


def _exception(root: Path) -> None:
    with pytest.raises(RankError, match=r"rank 0: (.|\n)*rank 1: (.|\n)*broken on one rank"):
        run_on_ranks(failing, "cuda", root, seconds=60)


def _verified(root: Path) -> None:
    with pytest.raises(RankError, match=r"rank 0: (.|\n)*rank 1: (.|\n)*broken on one rank"):
        run_on_ranks(failing_when_verified, "cuda", root, seconds=60)


def _killed(root: Path) -> None:
    gone = r"rank 0: Traceback(.|\n)*PartedError.*: rank 1 has ended(.|\n)*rank 1: its process has"
    with pytest.raises(RankError, match=gone):
        run_on_ranks(dying, "cuda", root, seconds=60)


def _killed_amid_a_step(root: Path) -> None:
    with pytest.raises(RankError, match=r"rank 0: its process has ended\nrank 1: its process has"):
        run_on_ranks(partial(dying, busy=True), "cuda", root, seconds=60)
    assert (root / "said by 0").read_text().count("rank 1 has ended") == 1


RUNS: dict[str, Callable[[Path], None]] = {
    "a killed rank ends all": _killed,
    "a rank that is killed amid a step ends all": _killed_amid_a_step,
    "an exception on one rank ends all": _exception,
    "an assertion of one rank ends all": partial(require_ended, "cuda", every=50, ends=20),
    "an exception in a verification ends all": _verified,
    "a signal to one rank stops all after the same step": _signal,
    **{f"a plain loop: {c}": lambda _, c=c: loops.require_equal("cuda", c) for c in loops.CASES},
    "plain loops: all ranks go the same way": lambda _: loops.require_decisions("cuda"),
    **{f"one rank differs: {k}": partial(require_together, "cuda", kind=k) for k in KINDS},
    **{f"equal: {c}": partial(require_equal_fits, "cuda", case=c) for c in [*CASES, *ON_A_GPU]},
}


@pytest.mark.parametrize("name", RUNS)
def test_on_two_gpus(side_by_side: Callable[[str], None], name: str) -> None:
    side_by_side(name)
