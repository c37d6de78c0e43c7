"""What a captured and verified step executes: runs of user code, updates and snapshots."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from lightning.pytorch import Callback
from torch import nn

from lightning_graphs.device.graph import CUDAGraph
from lightning_graphs.regions.body import StepBody
from lightning_graphs.regions.step import Attempts
from lightning_graphs.regions.verify import Verification
from lightning_graphs.values.snapshot import RegionState, Snapshot
from tests.loops.test_training import scheduled
from tests.loops.twice import Lab
from tests.training.costs.test_calls_of_a_step import Small, loader
from tests.training.costs.test_further_signatures import Calls, counted
from tests.training.costs.test_replayed_steps import Silent
from tests.training.fits import Net, batches, compare, named, prepare

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


class Seen(Largest):
    """Its backward pass runs the author's code."""

    def backward(self, loss: Any, *args: Any, **kwargs: Any) -> None:
        loss.backward()


class Packed(Largest):
    """So does this one."""

    def loss(self, batch: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
            return super().loss(batch)


def executed(
    backend: str, root: Path, module: type[Net], data: Any = lambda: batches(6)
) -> list[dict[str, int]]:
    """Count what the steps execute that capture and verify: as a rule one does both."""
    counts: Counter[str] = Counter()
    names = [name for _, name in COUNTED.values()]
    counting = Calls(counts, *names)
    options: dict[str, Any] = {"module": module, "data": data, "trace": Silent}
    with ExitStack() as stack:
        for owner, name in COUNTED.values():
            stack.enter_context(counted(counts, owner, name))
        captured = prepare(
            backend, root, True, callbacks=lambda: [counting], validation=0, max_epochs=1, **options
        ).run()
    assert captured.statistics.fallbacks == []
    compare(prepare(backend, root, False, validation=0, max_epochs=1, **options).run(), captured)
    return [dict(zip(COUNTED, step, strict=True)) for step in counting.steps if any(step)]


@pytest.mark.parametrize(("module", "attempts"), [(Net, 1), (Storing, 1), (Reading, 1)])
def test_a_verified_capture_executes_little(
    backend: str, tmp_path: Path, module: type[Net], attempts: int
) -> None:
    """In each attempt the capture runs the code, which executes nothing on a GPU."""
    assert executed(backend, tmp_path, module) == [
        {
            "attempts": attempts,
            "runs": attempts + 1,
            "updates": attempts + 1,
            "replays": 1,
            "copies": 1,
            "restorations": 1,
        }
    ]


class Classes(Net):
    """It reads a number of the batch, which is the same in each, and needs it bare."""

    def loss(self, batch: Any) -> Any:
        count = int(batch["y"].clamp(min=2).max()) + 1
        labels = nn.functional.one_hot(batch["y"], count).float()
        return nn.functional.cross_entropy(self.net(batch["x"]), labels)


class Positives(Net):
    """It reads another one in each batch."""

    def loss(self, batch: Any) -> Any:
        return super().loss(batch) / (int((batch["x"] > 0).sum()) + 1)


class LogsNumber(Net):
    """It logs a number of its loss, which only the device computes."""

    def loss(self, batch: Any) -> Any:
        loss = super().loss(batch)
        self.log("number", loss.detach().item())
        return loss


class LogsBoth(Classes):
    """The host computes one of its numbers, and only the device the other."""

    def loss(self, batch: Any) -> Any:
        loss = super().loss(batch)
        self.log("number", loss.item())
        return loss


@pytest.mark.parametrize(
    ("module", "attempts"), [(Classes, 1), (Positives, 2), (LogsNumber, 1), (LogsBoth, 1)]
)
def test_few_attempts_learn_what_the_host_computes(
    backend: str, tmp_path: Path, module: type[Net], attempts: int
) -> None:
    """Numbers are followed in a second one, if they are others for the batch before."""
    assert sum(each["attempts"] for each in executed(backend, tmp_path, module)) == attempts


class Filtered(Net):
    """It takes a part of its batch whose size only the device knows, and reads a value of it."""

    def loss(self, batch: Any) -> Any:
        assert batch["name"] != "none"
        chosen = torch.nonzero(batch["x"].sum(1) > -9.0).squeeze(-1)
        return super().loss({key: batch[key][chosen] for key in "xy"})


class Averaging(Net):
    """It computes with a tensor that it exchanges."""

    def __init__(self) -> None:
        super().__init__()
        self.average = torch.zeros(())

    def loss(self, batch: Any) -> Any:
        loss = super().loss(batch)
        self.average = self.average.to(loss.device) * 0.9 + 0.1 * loss.detach()
        return loss + self.average


class Metric(Net):
    """The value of a metric is its loss, which looks at no number of it."""

    def __init__(self) -> None:
        super().__init__()
        self.error = torchmetrics.MeanSquaredError()

    def loss(self, batch: Any) -> Any:
        target = nn.functional.one_hot(batch["y"], 3).float()
        self.log("error", error := self.error(self.net(batch["x"]), target))
        return error * 2


class Weighted(Net):
    """It makes a tensor of numbers behind the last one that it asks for."""

    def loss(self, batch: Any) -> Any:
        if (batch["x"] > 99).any():
            raise ValueError("too large")
        scores = self.net(batch["x"])
        weight = torch.tensor([1.0, 2.0, 3.0], device=scores.device)
        return nn.functional.cross_entropy(scores, batch["y"], weight)


def labelled() -> list[dict[str, Any]]:
    return [{**batch, "name": f"number {i}"} for i, batch in enumerate(batches(8))]


class Sized(Net):
    """There it computes with a tensor of the host."""

    def loss(self, batch: Any) -> Any:
        if (batch["x"] > 99).any():
            raise ValueError("too large")
        return super().loss(batch) * torch.prod(torch.tensor(batch["x"].shape))


class Chosen(Net):
    """Behind its head it chooses by a list."""

    def loss(self, batch: Any) -> Any:
        rows = torch.nonzero(batch["x"].sum(1) > -9.0).squeeze(-1)
        return super().loss({"x": batch["x"][rows][:, [*range(8)]], "y": batch["y"][rows]})


class Parts(Net):
    """It exchanges a container of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: dict[str, Any] = {}

    def loss(self, batch: Any) -> Any:
        loss = super().loss(batch)
        self.parts = {"loss": loss.detach(), "input": batch["x"].mean()}
        return loss


ALL = [Filtered, Averaging, Metric, Weighted, Sized, Chosen, Parts]


@pytest.mark.parametrize("module", ALL)
def test_the_first_attempt_knows_what_eager_steps_show(
    backend: str, tmp_path: Path, module: type[Net]
) -> None:
    """A head, state, the metric of a loss, a host program that goes on to the end."""
    found = executed(backend, tmp_path, module, labelled)
    assert sum(each["attempts"] for each in found) == 1


@pytest.mark.parametrize(("module", "is_watched"), [(Seen, True), (Packed, True), (Largest, False)])
def test_bits_that_watching_has_changed_are_no_difference(
    backend: str, tmp_path: Path, module: type[Net], is_watched: bool
) -> None:
    """The last replay, which is compared with an eager run that was not watched, is the step.

    A backward pass that can only write gradients is not watched in the first place.
    """
    (found,) = executed(backend, tmp_path, module)
    expected = (3, 2) if is_watched and backend == "emulated" else (2, 1)
    assert (found["runs"], found["replays"]) == expected


# ------------------ What is looked at


class Idle(Small):
    """Has layers that its steps do not use."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.idle = nn.ModuleList(nn.Linear(1, 1) for _ in range(layers)).requires_grad_(False)


class Counting(Callback):
    """Counts calls of functions in the step that calls most: the one that is captured."""

    most = calls = 0

    def on_train_batch_start(self, *_: Any) -> None:
        self.calls = 0
        sys.setprofile(self._see)

    def on_train_batch_end(self, *_: Any) -> None:
        sys.setprofile(None)
        self.most = max(self.most, self.calls)

    def _see(self, _: object, event: str, __: object) -> None:
        self.calls += event == "call"


def test_a_verified_capture_calls_little_for_what_it_does_not_use(tmp_path: Path) -> None:
    """Each walk through the modules shows, and so does whatever asks each tensor."""
    found = []
    for layers in (0, 0, 20):  # the first one imports what others find
        counting = Counting()
        prepare(
            "emulated", tmp_path, True, module=partial(Idle, layers), data=loader, trace=Silent,
            callbacks=partial(list, [counting]), validation=0, max_epochs=1, max_steps=8,
        ).run()  # fmt: skip
        found.append(counting.most)
    assert (found[2] - found[1]) / 20 <= 320  # a layer, of two tensors: 302, or 314 behind others


# ------------------ The replay that was compared is the step


def launches_counted(monkeypatch: pytest.MonkeyPatch, counts: Counter[str]) -> None:
    """Count the launches of graphs, of whatever they are."""
    ended = CUDAGraph.capture_end

    def end(graph: CUDAGraph) -> None:
        ended(graph)
        launch = graph._replay

        def counting() -> None:
            counts["launches"] += 1
            launch()

        graph._replay = counting

    monkeypatch.setattr(CUDAGraph, "capture_end", end)


@pytest.mark.parametrize("verify", [True, 3])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_every_launch_is_a_step(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verify: Any, accumulate: int
) -> None:
    """Of training and validation, also where they are verified again; gradients that a step makes
    again are not copied."""
    launches_counted(monkeypatch, counts := Counter[str]())
    take, copied = RegionState.take, list[bool]()

    def taking(state: RegionState, *args: Any) -> Snapshot:
        assert not gc.isenabled()  # a capture makes so much that all objects would be looked at
        snapshot = take(state, *args)
        gradients = {p.grad.data_ptr() for p in state.parameters.values() if p.grad is not None}
        copied.append(not gradients.isdisjoint(snapshot.addresses))
        return snapshot

    options: dict[str, Any] = {"module": Storing, "validation": 8, "max_epochs": 3}
    options["accumulate_grad_batches"] = accumulate
    with monkeypatch.context() as patch:
        patch.setattr(RegionState, "take", taking)
        captured = prepare(backend, tmp_path, True, capture={"verify": verify}, **options).run()
    compare(prepare(backend, tmp_path, False, **options).run(), captured)
    evaluation = captured.capture.report.evaluation["validation_step"]
    assert evaluation.replayed > 8
    assert counts["launches"] == captured.statistics.replayed + evaluation.replayed
    assert any(copied) is (accumulate > 1)
    assert copied.count(False) >= (2 if verify is True else 5)


def test_every_launch_is_a_call(
    backend: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches_counted(monkeypatch, counts := Counter[str]())
    lab = Lab(backend, device, {"verify": 3})
    scheduled(lab)
    assert counts["launches"] == lab.replayed > 10


def test_every_launch_of_an_update_is_one(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls of submodules are compared ahead of a step, with arguments of the one before it."""
    launches_counted(monkeypatch, counts := Counter[str]())
    counting = Calls(counts, "launches", "_step", "take", "restore")
    with ExitStack() as stack:
        for owner, name in ((StepBody, "_step"), (RegionState, "take"), (Snapshot, "restore")):
            stack.enter_context(counted(counts, owner, name))
        captured = prepare(
            backend, tmp_path, True, callbacks=lambda: [counting], capture=named("net"),
            data=lambda: batches(8), validation=0, max_epochs=1, trace=Silent,
        ).run()  # fmt: skip
    assert captured.statistics.fallbacks == []
    update, calls, steady = [step for step in counting.steps if any(step)]
    assert update == [1, 2, 1, 1]  # it is captured, and runs eagerly once
    assert calls == [2 + 3, 0, 1, 2]  # forward and backward pass, twice, and the update
    assert steady == [3, 0, 0, 0]
