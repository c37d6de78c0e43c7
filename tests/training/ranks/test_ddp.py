"""DDP on two ranks: what a fit trains with the callback is what it trains without, to the bit."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch import strategies
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import powerSGD_hook

from lightning_graphs import CaptureError
from lightning_graphs.lightning.ranks import why_not_captured
from lightning_graphs.policy.options import Options
from lightning_graphs.policy.worth import MemoryBudget
from lightning_graphs.regions import verify
from tests.ranks import in_folder, run_on_ranks
from tests.training.ddp_fits import (
    CASES,
    DDP,
    EVALUATED,
    evaluated_twice,
    of_rank,
    require_equal_fits,
    trained_on_two_nodes,
    trained_twice,
)
from tests.training.fits import prepare


@pytest.mark.parametrize("case", CASES)
def test_a_fit_with_graphs_is_one_without(tmp_path: Path, case: str) -> None:
    require_equal_fits("emulated", tmp_path, case)


@pytest.mark.parametrize("case", EVALUATED)
def test_evaluations(tmp_path: Path, case: str) -> None:
    for replayed, said, found in run_on_ranks(evaluated_twice, "emulated", tmp_path, case):
        if case == "gathers":
            assert replayed == 0
            assert "cannot call collectives" in said[0]
            assert "cannot call collectives" in found[0]
        else:
            assert replayed >= {"even": 24, "uneven": 10}[case]
            assert said == found == []


@pytest.mark.parametrize(
    ("launcher", "name"), [("torchrun", "TorchElasticEnvironment"), ("srun", "SLURMEnvironment")]
)
def test_two_nodes(tmp_path: Path, launcher: str, name: str) -> None:
    found = run_on_ranks(trained_on_two_nodes, tmp_path, launcher)
    assert found == [(name, 0, found[0][2]), (name, 1, found[0][2])]
    assert found[0][2] >= 10


def trained_with_memory_in_use(rank: int, root: Path) -> Any:
    """Fit both ways; one rank finds more memory in use each time that it asks."""
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            taken = itertools.count()
            patch.setattr(verify, "_OF_NCCL", 0.01)
            patch.setattr(MemoryBudget, "allocated", property(lambda _: next(taken)))
        return trained_twice(rank, "emulated", root, "plain")


def test_memory_in_use_on_one_rank_parts_no_ranks(tmp_path: Path) -> None:
    (_, replayed), (_, again) = run_on_ranks(trained_with_memory_in_use, tmp_path)
    assert replayed == again >= 10


def _without_its_package(kind: type) -> Any:
    return kind.__new__(kind)  # DeepSpeed and XLA are not installed here


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (strategies.FSDPStrategy, "FSDP frees the memory of parameters within a step"),
        (partial(_without_its_package, strategies.DeepSpeedStrategy), "an engine of its own"),
        (partial(_without_its_package, strategies.XLAStrategy), "XLA compiles steps"),
        (partial(strategies.DDPStrategy, find_unused_parameters=True), "reads on the host"),
        (partial(strategies.DDPStrategy, ddp_comm_hook=powerSGD_hook), "powerSGD_hook counts"),
        (object, "object is not DDP"),
        (strategies.DDPStrategy, ""),
        (strategies.ModelParallelStrategy, ""),
        (partial(strategies.DDPStrategy, ddp_comm_hook=bf16_compress_hook), ""),
    ],
)
def test_strategies(make: Callable[[], Any], reason: str) -> None:
    found = why_not_captured(SimpleNamespace(strategy=make(), world_size=2), Options())
    assert (reason in found and "; " in found) if reason else found == ""


def refused(rank: int, root: Path) -> Any:
    """Fit with a strategy that is refused, in both ways."""
    given = {**DDP, "data": partial(of_rank, rank), "strategy": "ddp_find_unused_parameters_true"}
    with pytest.raises(CaptureError, match="find_unused_parameters=True") as raised:
        prepare("emulated", in_folder(root, rank), True, **given).run()
    fit = prepare(
        "emulated", in_folder(root, rank), True, capture={"on_failure": "eager"}, **given
    ).run()
    return str(raised.traceback[-1].frame.code.name), fit.statistics.fallbacks


def test_a_refusal_comes_at_setup(tmp_path: Path) -> None:
    first, second = run_on_ranks(refused, tmp_path)
    assert first == second
    where, (line,) = first
    assert where == "setup"
    assert "requires_grad_(False)" in line
