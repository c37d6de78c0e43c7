"""Out of memory at any allocation of a captured function: the call runs again without graphs."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_graphs.values.memory import OutputPlan
from tests.failures.test_out_of_memory import (
    SAMPLES,
    Allocations,
    _replays_take_no_memory,
    little_is_free,
)
from tests.loops.test_training import loss_of
from tests.loops.twice import Lab, assert_same

pytestmark = pytest.mark.filterwarnings("ignore:capture")
_ = _replays_take_no_memory, little_is_free

SEEN: list[Any] = []


@pytest.fixture(autouse=True)
def _collected() -> Iterator[None]:
    """A captured method refers to itself, and is released as garbage."""
    yield
    gc.collect()


class Loop:
    """Has state of every kind that a call changes before it may find no memory."""

    def __init__(self, lab: Lab, **options: Any) -> None:
        SEEN.clear()
        torch.manual_seed(0)
        random.seed(0)
        self.lab, self.model = lab, lab.net()
        self.other = nn.Linear(3, 3).to(lab.device)
        self.optimizers = [
            torch.optim.AdamW(self.model.parameters(), lr=2**-7, fused=True),
            torch.optim.SGD(self.other.parameters(), lr=2**-5, momentum=0.5, fused=True),
        ]
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizers[0], 2, 0.5)
        self.calls = 0
        models = [self.model, self.other]
        given = {"on_failure": "eager", "warmup_steps": 1, **options}
        self.step = lab.capture(self.train, models, self.optimizers, **given)

    def train(self, batch: Any) -> Tensor:
        SEEN.append(len(batch["x"]))
        self.calls += 1
        first, second = self.optimizers
        first.zero_grad()
        loss = loss_of(self.model, batch)
        loss.backward()
        first.step()
        self.schedule.step()
        second.zero_grad()
        with torch.no_grad():
            out = self.model(batch["x"])
        self.other(out).square().mean().backward()
        second.step()
        return loss.detach()

    def run(self, failing: tuple[int, int | None] = (-1, None)) -> tuple[Any, Allocations]:
        """Train on ten batches, of which the eighth is smaller; the state after them."""
        index, found = failing
        short, losses = Allocations(found), []
        for i, batch in enumerate(self.lab.batches(10)):
            given = {name: value[:7] for name, value in batch.items()} if i == 7 else batch
            if i == index:
                with short, short.counting(True):
                    losses.append(self.step(given))
            else:
                losses.append(self.step(given))
        state = [losses, self.calls, [*SEEN], self.lab.state(), self.schedule.state_dict()]
        state += [torch.get_rng_state(), torch.rand(2, device=self.lab.device), random.random()]
        return state, short


@pytest.mark.parametrize("index", [3, 7], ids=["captured", "another shape"])
def test_out_of_memory_at_any_allocation(backend: str, device: torch.device, index: int) -> None:
    expected, _ = Loop(Lab(backend, device)).run()
    lab = Lab(backend, device, {})
    found, everything = Loop(lab).run((index, None))
    assert_same(expected, found)
    assert lab.replayed
    assert everything.count > SAMPLES
    for i in range(SAMPLES):
        lab = Lab(backend, device, {})
        found, short = Loop(lab).run((index, i * everything.count // SAMPLES))
        assert_same(expected, found)
        report = lab.steps[0].report
        assert report.eager + report.replayed == 10, short.count
        assert len(report.fallbacks) <= 1


def test_what_is_handed_out_without_copies_is_not_overwritten(
    backend: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, failed = OutputPlan.copies, [0]

    def copies(plan: OutputPlan, owing: Any) -> Any:
        if not failed[0]:
            failed[0] += 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")
        return own(plan, owing)

    expected, _ = Loop(Lab(backend, device)).run()
    lab = Lab(backend, device, {})
    loop = Loop(lab)
    monkeypatch.setattr(OutputPlan, "copies", copies)
    found, _ = loop.run()
    assert_same(expected, found)
    assert failed == [1]
    (reason,) = loop.step.report.fallbacks
    assert reason.startswith("calls run eagerly from now on: one found no memory next to that")


def test_what_does_not_fit_without_graphs_either_is_raised(
    backend: str, device: torch.device
) -> None:
    lab = Lab(backend, device, {})
    model = lab.net()

    @torch.no_grad()
    def evaluate(batch: Any, large: bool) -> Tensor:
        if large:
            raise torch.OutOfMemoryError("Tried to allocate 2 GiB.")
        return loss_of(model, batch)

    step = lab.capture(evaluate, model, on_failure="eager")
    batches = list(lab.batches(8))
    for batch in batches:
        step(batch, False)
    assert lab.replayed
    with pytest.raises(torch.OutOfMemoryError, match="2 GiB"):
        step(batches[0], True)
    step(batches[0], False)
    assert len(step.report.fallbacks) == 1
