"""What a captured and verified step executes: runs of user code, updates and snapshots."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics

from lightning_graphs.regions.body import StepBody
from lightning_graphs.regions.step import Attempts
from lightning_graphs.regions.verified import Verification
from lightning_graphs.values.snapshot import RegionState, Snapshot
from tests.training.costs.test_further_signatures import Calls, counted
from tests.training.costs.test_replayed_steps import Silent
from tests.training.fits import Net, batches, compare, prepare

COUNTED = {
    "attempts": (Attempts, "_attempted"),
    "runs": (StepBody, "forward"),
    "updates": (StepBody, "_step"),
    "replays": (Verification, "_launched"),
    "copies": (RegionState, "take"),
    "restorations": (Snapshot, "restore"),
}


class Storing(Net):
    """Keeps what it has computed, counts its steps, fills a list, and logs a metric."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=3)
        self.count, self.losses = 0, list[Any]()

    def loss(self, batch: Any) -> Any:
        self.scores = scores = self.net(batch["x"])
        self.accuracy(scores, batch["y"])
        self.log("accuracy", self.accuracy)
        self.count += 1
        loss = torch.nn.functional.cross_entropy(scores, batch["y"])
        self.losses.append(loss.detach())
        return loss * (1 + 1 / self.count)


class Reading(Net):
    """Also computes with what it has kept: the capture takes that over while it goes on."""

    def loss(self, batch: Any) -> Any:
        self.last = super().loss(batch)
        return self.last * 2


class Largest(Net):
    """On a CPU its backward pass has another formula while operators are watched: zeros < 0."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = torch.nn.Parameter(torch.arange(4.0))

    def loss(self, batch: Any) -> Any:
        return super().loss(batch) - self.extra.max()


def executed(backend: str, root: Path, module: type[Net]) -> dict[str, int]:
    """Count what the one step executes that captures and verifies."""
    counts: Counter[str] = Counter()
    names = [name for _, name in COUNTED.values()]
    counting = Calls(counts, *names)
    options: dict[str, Any] = {"module": module, "data": lambda: batches(6), "trace": Silent}
    with ExitStack() as stack:
        for owner, name in COUNTED.values():
            stack.enter_context(counted(counts, owner, name))
        captured = prepare(
            backend, root, True, callbacks=lambda: [counting], validation=0, max_epochs=1, **options
        ).run()
    assert captured.statistics.fallbacks == []
    compare(prepare(backend, root, False, validation=0, max_epochs=1, **options).run(), captured)
    (steps,) = [step for step in counting.steps if any(step)]
    return dict(zip(COUNTED, steps, strict=True))


@pytest.mark.parametrize(("module", "attempts"), [(Net, 1), (Storing, 1), (Reading, 1)])
def test_a_verified_capture_executes_little(
    backend: str, tmp_path: Path, module: type[Net], attempts: int
) -> None:
    """In each attempt the capture runs the code, which executes nothing on a GPU."""
    assert executed(backend, tmp_path, module) == {
        "attempts": attempts,
        "runs": attempts + 1,
        "updates": attempts + 1,
        "replays": 1,
        "copies": 1,
        "restorations": 2,
    }


def test_bits_that_watching_has_changed_are_no_difference(backend: str, tmp_path: Path) -> None:
    found = executed(backend, tmp_path, Largest)
    assert (found["runs"], found["replays"]) == ({"emulated": 3, "cuda": 2}[backend], 1)
