"""The benchmarks of several ranks, small and over gloo; the first row of each is two ranks."""

from __future__ import annotations

import faulthandler
import math
import os
import re
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_graphs.regions import peers as connections
from lightning_graphs.regions.peers import Peers
from tests.processes import forks
from tests.ranks import RankError, run_on_ranks

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def several(script: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a script whose processes come from a server that has imported it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(script("teams"), "context", forks())
    return script


@pytest.mark.parametrize(
    ("ranks", "variants", "sizes"),
    [(2, "plain", "2"), (8, "plain,views,accumulated,fsdp2", "8,4,2,1")],
)
def test_ranks_train_as_eagerly_and_decide_together(
    several: Any, tmp_path: Path, ranks: int, variants: str, sizes: str
) -> None:
    ddp, path = several("ddp"), tmp_path / "found.json"
    how = ["--gpus", str(ranks), "--variants", variants, "--sizes", sizes, "--json", str(path)]
    assert ddp.main(["--tiny", "--rows", "gpt2", *how]) == 0
    found = ddp.read([path])
    assert {fit.ranks for fit in found} == {*map(int, sizes.split(","))}
    for fit, one in found.items():
        assert len(one["losses"]) == fit.ranks
        assert len({*map(tuple, one["losses"])}) == fit.ranks  # each has batches of its own
        if fit.how == "captured":
            captures, replayed, fallbacks = one["decisions"]
            assert (captures, fallbacks) == (2 if fit.variant == "accumulated" else 1, [])
            assert replayed > 3


def of_one(ms: float, floor: float = 1.0, **other: Any) -> dict[str, Any]:
    """What has come of a fit."""
    losses = [[2.0, 1.0], [2.0, 1.5]]
    return {"ms": ms, "floor_ms": floor, "losses": losses, "well": True, "peak_mib": 1.0, **other}


@pytest.mark.parametrize(
    ("other", "verdict"),
    [
        ({}, "PASS"),
        ({"ms": 1.04}, "FAIL"),  # of its floor
        ({"alone": 0.9}, "FAIL"),  # weak scaling 0.891
        ({"eager alone": 9.9}, "FAIL"),  # eager's is 0.99
        ({"well": False}, "WRONG RESULT"),
        ({"losses": [[2.0, 1.0], [2.0, 1.5 + 2**-20]]}, "WRONG RESULT"),
        ({"losses": [[2.0, 1.0], [2.0, math.nan]]}, "WRONG RESULT"),
        ({"losses": [[2.0, 1.0], [2.0, 1.5 + 2**-20]], "again": 2.0 + 2**-20}, "PASS"),
    ],
)
def test_limits_of_scaling(several: Any, other: dict[str, Any], verdict: str) -> None:
    ddp = several("ddp")
    fit = ddp.Fit("gpt2", "views", "captured", 2)
    alone = fit._replace(ranks=1, variant="plain")
    again = {**of_one(10.0), "losses": [[other.get("again", 2.0), 1.0], [2.0, 1.5]]}
    found = {
        fit: of_one(
            **{"ms": 1.01, **{k: v for k, v in other.items() if k in ("ms", "well", "losses")}}
        ),
        fit._replace(how="eager"): of_one(10.0),
        fit._replace(how="eager-again"): again,
        alone: of_one(other.get("alone", 0.95)),
        alone._replace(how="eager"): of_one(other.get("eager alone", 9.0)),
    }
    rows = ddp.judge(fit, found, tiny=False)
    assert ddp.verdict_of(rows) == verdict, [*map(ddp.in_words, rows)]
    assert "gpt2, views, captured" in ddp.tables(found)


def test_collectives_take_from_their_last_rank_on_by_one_clock(several: Any) -> None:
    """The second rank's clock is 1000 us ahead, and it begins 30 us later."""
    kernel = "ncclKernel_AllReduce"
    first = {"since": 0.0, "nccl": [(10.0, 60.0, kernel)], "others": [(0.0, 45.0), (55.0, 90.0)]}
    second = {"since": 500.0, "nccl": [(540.0, 560.0, kernel)], "others": [(500.0, 540.0)]}
    found = several("ddp").by_one_clock([first, second], 1)
    assert found["drift_us"] == found["largest_drift_us"] == 30.0
    assert found["clocks_us"] == 1000.0
    assert found["nccl_ms"] == 0.02
    assert found["hidden"] == (5 + 5 + 0) / 40


@pytest.mark.parametrize("ranks", [2, 8])
def test_a_rank_that_is_gone_ends_all_with_one_sentence(several: Any, ranks: int) -> None:
    rows = [*several("soak_ranks").run(60, "step", ranks, 0, 120.0)]
    assert {row.verdict for row in rows} == {"PASS"}, rows
    assert [row.name for row in rows if "killed" in row.name]


def waiting() -> None:
    """Wait for ever, as a rank does whose device waits for another."""
    threading.Event().wait()


def leaving(folder: Path, rank: int, *_: Any) -> None:
    """End as rank 0, and wait as the others."""
    os.dup2(os.open(folder / f"{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    faulthandler.register(signal.SIGUSR1)
    (folder / f"{rank}.at").write_text("begun")
    if rank > 0:
        waiting()


@pytest.mark.parametrize(
    ("limit", "why"), [("STALLS", "is ended"), ("LOOKS_FOR", "has said nothing for 1 s")]
)
def test_ranks_that_wait_for_ever_are_ended_and_say_where(
    several: Any,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    limit: str,
    why: str,
) -> None:
    soak = several("soak_ranks")
    monkeypatch.setattr(soak, "QUIET", 1)
    monkeypatch.setattr(soak, limit, 2.0)
    monkeypatch.setattr(soak, "program", leaving)
    (row,) = soak.run(100, "", 2, 0, 120.0)
    assert (row.figure, row.verdict) == (2, "WRONG RESULT")
    said = capsys.readouterr().out
    where = said[said.index(f"rank 1 {why} (begun)") :]
    assert re.match(r".*\n +threads: \w+ S.*\n(.*\n)+ .*in waiting", where), where


def hearing(rank: int, root: Path, is_killed: bool) -> None:
    """Hear of rank 2, which is killed while a child of its own lives on; rank 3 just leaves.

    If it is not killed, an error has ended its program, and all is closed behind that.

    Rank 0 goes on to a group that never comes about.
    """
    connections.PATIENCE = connections._LOOKS = 0.5
    torch.distributed.init_process_group("gloo")
    peers = Peers(torch.distributed.group.WORLD)
    if rank == 3:
        peers.close()
    torch.distributed.barrier()
    if rank == 2 and not is_killed:
        sys.last_value = ValueError("broken")
        peers.close()
        os._exit(1)
    if rank == 2:
        child_reads, own = os.pipe()
        if os.fork() == 0:
            os.close(own)
            os.read(child_reads, 1)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    if rank < 2:
        peers._is_told.wait(20.0)
        (root / f"lost to {rank}").write_text(str(peers.lost))
    if rank == 0:
        os.dup2(os.open(root / "said", os.O_WRONLY | os.O_CREAT), 2)
        torch.distributed.new_group()


@pytest.mark.parametrize("is_killed", [True, False], ids=["killed", "by an error"])
def test_ranks_hear_which_one_is_gone_and_of_none_that_leaves(
    tmp_path: Path, is_killed: bool
) -> None:
    gone = "rank {}: its process has ended"
    with pytest.raises(RankError, match=rf"^{gone.format(0)}\n{gone.format(2)}$"):
        run_on_ranks(hearing, tmp_path, is_killed, ranks=4)
    assert [(tmp_path / f"lost to {rank}").read_text() for rank in range(2)] == ["2", "2"]
    assert (tmp_path / "said").read_text().count("gone: rank 2 has ended") == 1
