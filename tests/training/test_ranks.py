"""Every step is done the same way on all ranks, also where one of them is made to differ."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.utilities.exceptions import SIGTERMException

from tests.ranks import RankError, in_folder, run_on_ranks
from tests.training.ddp_fits import DDP, of_rank
from tests.training.fits import prepare
from tests.training.rank_differences import KINDS, ODD, At, require_together


@pytest.mark.parametrize("kind", KINDS)
def test_one_rank_differs(tmp_path: Path, kind: str) -> None:
    require_together("emulated", tmp_path, kind)


def stopped(rank: int, root: Path) -> Any:
    """Get a SIGTERM on one rank, in the middle of a fit; where each of them has stopped."""

    def signal_self(trainer: Any, module: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    made = prepare(
        "emulated",
        in_folder(root, rank),
        True,
        data=partial(of_rank, rank),
        callbacks=lambda: [At(17, signal_self)],
        **DDP,
    )
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SIGTERMException):
        made.run()
    assert signal.getsignal(signal.SIGTERM) is handler
    assert made.trainer.received_sigterm is (rank == ODD)
    return made.trainer.global_step, made.statistics.replayed


def test_a_signal_to_one_rank_stops_all_after_the_same_step(tmp_path: Path) -> None:
    first, second = run_on_ranks(stopped, tmp_path)
    assert first == second == (18, 18 - 13)


def synchronizing(rank: int, root: Path) -> Any:
    """How often Lightning asks the other ranks for a signal ahead of a step."""
    asked = [0, 0]
    for is_captured in (False, True):
        made = prepare("emulated", in_folder(root, rank), is_captured, validation=0, **DDP)
        loop = made.trainer.fit_loop.epoch_loop
        own = loop._broadcast_sigterm_tensor

        def ask(own: Any = own, at: int = is_captured) -> None:
            asked[at] += 1
            own()

        loop._broadcast_sigterm_tensor = ask
        made.run()
        assert loop._broadcast_sigterm_tensor is ask
    return asked


def test_no_step_waits_for_the_device_to_hear_of_signals(tmp_path: Path) -> None:
    assert run_on_ranks(synchronizing, tmp_path) == [[20, 0]] * 2


def failing(rank: int, root: Path) -> None:
    """Raise on one rank, in the middle of a fit."""

    def fail(trainer: Any, module: Any) -> None:
        raise ValueError("broken on one rank")

    at = At(17, fail)
    prepare("emulated", in_folder(root, rank), True, callbacks=lambda: [at], **DDP).run()


def test_an_exception_on_one_rank_ends_all(tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"rank 0: (.|\n)*rank 1: (.|\n)*broken on one rank"):
        run_on_ranks(failing, tmp_path, seconds=60)


def dying(rank: int, root: Path) -> None:
    """End the process of one rank at once."""

    def die(trainer: Any, module: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    at = At(17, die)
    prepare("emulated", in_folder(root, rank), True, callbacks=lambda: [at], **DDP).run()


def test_a_killed_rank_ends_all(tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"rank 0: Traceback(.|\n)*rank 1: its process has ended"):
        run_on_ranks(dying, tmp_path, seconds=60)
