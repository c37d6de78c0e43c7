"""How much memory may be taken, for a GPU whose allocator says what the test lets it say."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from lightning_graphs.errors import NoRoomError
from lightning_graphs.policy.worth import MemoryBudget, MemoryKept
from lightning_graphs.regions.lifecycle import Ranks
from lightning_graphs.regions.recovery import MemoryRecovery
from lightning_graphs.regions.verify import nothing_kept
from lightning_graphs.report.messages import Statistics

MIB = 2**20


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """MiB that are allocated, were at most, are reserved and are free."""
    says = {"allocated": 40, "peak": 100, "reserved": 40, "free": 1000, "total": 0, "percent": 100}
    for name, key in (
        ("memory_allocated", "allocated"),
        ("max_memory_allocated", "peak"),
        ("memory_reserved", "reserved"),
    ):
        monkeypatch.setattr(torch.cuda, name, lambda _, key=key: says[key] * MIB)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (says["free"] * MIB, 10**4 * MIB))
    monkeypatch.setattr(
        torch.cuda, "get_per_process_memory_fraction", lambda _: says["percent"] / 100
    )
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda _: SimpleNamespace(total_memory=says["total"] * MIB),
    )
    return says


def test_captures_stay_within_their_part_of_the_peak(
    allocator: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def empty_cache() -> None:
        allocator["reserved"] = allocator["allocated"] + allocator.get("pools", 0)

    monkeypatch.setattr(torch.cuda, "empty_cache", empty_cache)
    allocator["reserved"] = 100
    budget = MemoryBudget(torch.device("cuda"), 0.25)
    budget.require_room("A captured step")  # what eager steps took beside the state: 60
    assert allocator["reserved"] == 40  # what lies cached is of no use to a graph
    allocator |= {"allocated": 45, "pools": 20, "reserved": 200, "peak": 200}  # that is ours
    budget.require_room("A captured step")
    allocator |= {"allocated": 46, "reserved": 200}
    observed = "66 MiB are taken, it takes 60 MiB beside, and memory=0.25 allows 125 MiB"
    with pytest.raises(NoRoomError, match=observed):
        budget.require_room("A captured step")
    budget.require_room("A captured step", lent=True)  # in memory of graphs that there are
    budget.require_room("A captured step", grows=0.9)  # which they share
    allocator["pools"] = 80
    allocator["reserved"] = 200
    with pytest.raises(NoRoomError, match="126 MiB are taken, it takes 0 MiB beside"):
        budget.require_room("A captured step", lent=True)


def test_a_larger_batch_takes_more_by_what_eager_steps_have_taken() -> None:
    grown: list[float] = []

    class Budget(MemoryBudget):
        def require_room(self, what: str, *, lent: bool | None = None, grows: float = 1.0) -> None:
            grown.append(grows)

    statistics, budget = Statistics(), Budget(torch.device("cpu"))
    recovery = MemoryRecovery(torch.nn.Linear(1, 1), statistics, budget, Ranks(), raises=True)
    recovery.runner = SimpleNamespace(held="")
    for size in (40, 200, 120):
        recovery.begin_eagerly((torch.zeros(size),))
    recovery.before_capture((torch.zeros(20),))
    statistics.captures, recovery.runner = 1, SimpleNamespace(held="graphs")
    for size in (20, 220, 10):
        recovery.before_capture((torch.zeros(size),))
    assert grown == [1.0, 0.0, 1.0, 0.0]  # of what one of 200 took


def test_validations_ahead_of_the_first_step_tell_nothing_of_it(allocator: dict[str, int]) -> None:
    budget = MemoryBudget(torch.device("cuda"))
    budget.require_room("A captured step", lent=False)
    allocator |= {"allocated": 400, "peak": 1000, "reserved": 400}
    budget.require_room("A captured step")
    budget.require_room("A captured step", lent=False)
    allocator["reserved"] = 800
    with pytest.raises(NoRoomError, match="it takes 600 MiB beside"):
        budget.require_room("A captured step", lent=False)


def test_plenty_is_four_times_the_peak_of_eager_steps(allocator: dict[str, int]) -> None:
    budget = MemoryBudget(torch.device("cuda"))
    assert not budget.is_roomy  # the peak was not read yet
    budget.require_room("A captured step")
    allocator["free"] = 400
    assert not budget.is_roomy
    allocator["free"] = 401
    assert budget.is_roomy
    allocator["percent"] = 4  # a cap on the process: 400, of which some is reserved
    assert not budget.is_roomy


@pytest.mark.parametrize(("total", "limit"), [(0, 1350), (10_000, 1500), (80_000, 3048)])
def test_copies_take_no_more_than_graphs_may(
    allocator: dict[str, int], total: int, limit: int
) -> None:
    allocator |= {"total": total, "peak": 1000, "free": 5000}
    budget = MemoryBudget(torch.device("cuda"))
    budget.require_room("A captured step")
    allocator["reserved"] = 1100
    left = limit - 1100 - 96  # a comparison takes 96 beside
    assert budget.room_for(10 * MIB) == 10 * MIB
    assert budget.room_for(3000 * MIB) == left * MIB
    assert budget.room_for(3000 * MIB, 100 * MIB) == (left - 100) * MIB
    allocator["free"] = 100
    assert budget.room_for(300 * MIB) == 4 * MIB
    allocator["free"] = 20
    assert budget.room_for(300 * MIB) == 0


def test_a_cap_of_the_process_is_what_is_free(allocator: dict[str, int]) -> None:
    budget = MemoryBudget(torch.device("cuda"))
    budget.require_room("A captured step")  # eager steps took 60 beside the state
    allocator["reserved"] = 100
    for percent, is_tight in ((3, False), (2, True)):  # of 10,000, of which 100 are reserved
        allocator["percent"] = percent
        budget.settle()
        assert budget.is_tight == is_tight


def test_small_models_may_take_a_twentieth_of_the_gpu(allocator: dict[str, int]) -> None:
    allocator["total"] = 8000
    budget = MemoryBudget(torch.device("cuda"))
    budget.require_room("A captured step")
    allocator["reserved"] = 440  # and a step takes 60
    budget.require_room("A captured step")
    allocator["reserved"] = 441
    with pytest.raises(NoRoomError, match="allows 500 MiB"):
        budget.require_room("A captured step")


@pytest.mark.parametrize("shares", [True, False])
def test_only_memory_of_graphs_must_be_let_go_of(allocator: dict[str, int], shares: bool) -> None:
    budget = MemoryBudget(torch.device("cuda"))
    budget.shares = shares
    with pytest.raises(MemoryKept) if shares else nullcontext(), nothing_kept(budget, Ranks()):
        allocator["allocated"] += 1
    with nothing_kept(budget, Ranks()):
        allocator["allocated"] += 1  # a graph's memory is no longer used


def test_a_cpu_has_no_budget() -> None:
    budget = MemoryBudget(torch.device("cpu"), 0.0)
    budget.require_room("A captured step")
    assert budget.room_for(2**60) == 2**60
    assert not budget.is_roomy
