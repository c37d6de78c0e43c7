"""Steps with a second graph in two streams: equal values, and the faster graph is kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_graphs.regions import overlapped
from lightning_graphs.regions.overlapped import is_affordable
from lightning_graphs.report import GraphRecord
from tests.loops.twice import Lab, twice
from tests.training.fits import Fit, Net, adamw, batches, compare, fit_twice


class Clock:
    """Says that every second graph, those in two streams, takes so many milliseconds.

    It knows that a step later, as with a GPU that is behind.
    """

    meaningful = True
    second = 1.0

    def __init__(self, device: torch.device) -> None:
        self.marks = 0
        self.asked: set[int] = set()

    def mark(self) -> int:
        self.marks += 1
        return self.marks

    def milliseconds(self, start: int, end: int, *, wait: bool) -> float | None:
        if start not in self.asked:
            self.asked.add(start)
            return None
        return self.second if (start // 2) % 2 else 1.0


class Deep(Net):
    def __init__(self) -> None:
        super().__init__(adamw)
        blocks = (nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU()) for _ in range(3))
        self.net = nn.Sequential(*blocks, nn.Dropout(0.25), nn.Linear(8, 3))


class Flat(Net):
    def __init__(self) -> None:
        super().__init__(adamw)
        self.net = nn.Sequential(nn.Linear(8, 3))


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlapped, "FIRST", 2)
    monkeypatch.setattr(overlapped, "PAIRS", 2)
    monkeypatch.setattr(overlapped, "Stopwatch", Clock)


def fits(backend: str, root: Path, **options: Any) -> Fit:
    """A fit as without the callback, whose steps have tried two streams."""
    options = {"module": Deep, "data": lambda: batches(14), "validation": 1, **options}
    options["capture"] = {"overlap": True, **options.get("capture", {})}
    eager, captured = fit_twice(backend, root, **options)
    compare(eager, captured)
    return captured


@pytest.mark.parametrize(
    ("second", "said"), [(0.98, "two streams: 0.980 ms"), (0.995, "one stream")]
)
def test_the_faster_graph_is_kept(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, second: float, said: str
) -> None:
    monkeypatch.setattr(Clock, "second", second)
    captured = fits(backend, tmp_path, precision="bf16-mixed")
    (record,) = captured.capture.report.graphs
    assert record.overlap.startswith(said)
    assert "weights cast together: " in record.overlap or second > 0.99
    assert record.replays > 20
    assert record.captures == 1


@pytest.mark.parametrize(
    "options",
    [
        {"accumulate_grad_batches": 2},
        {"gradient_clip_val": 0.5, "capture": {"verify": 5}},
        {"data": lambda: batches(14, last=6), "capture": {"verify": False}},
    ],
    ids=["accumulated", "clipped", "shapes"],
)
def test_two_streams_train_as_one_does(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    monkeypatch.setattr(Clock, "second", 0.5)
    captured = fits(backend, tmp_path, **options)
    found = [record.overlap for record in captured.capture.report.graphs if record.replays > 8]
    assert found
    assert all(words.startswith("two streams") for words in found)


class ByHand(Deep):
    """Adds to its gradients by hand, and steps every second time."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        loss = self.loss(batch)
        self.log("loss", loss)
        optimizer.zero_grad()
        self.manual_backward(loss)
        self.manual_backward(self.loss(batch))
        optimizer.step()


def test_steps_that_optimize_by_hand_overlap(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Clock, "second", 0.5)
    captured = fits(backend, tmp_path, module=ByHand)
    (record,) = captured.capture.report.graphs
    assert record.overlap.startswith("two streams")


def in_a_loop(lab: Lab) -> list[Tensor]:
    model = Deep().net.to(lab.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2**-7, fused=True)

    def train_step(batch: Any) -> Tensor:
        loss = nn.functional.cross_entropy(model(batch["x"]).float(), batch["y"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    step = lab.capture(train_step, model, optimizer)
    return [step(batch) for batch in lab.batches(24)]


def test_calls_of_a_plain_loop_overlap(
    backend: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Clock, "second", 0.5)
    lab = twice(in_a_loop, backend, device, overlap=True)
    (record,) = lab.steps[0].report.graphs
    assert record.overlap.startswith("two streams")


def test_a_step_that_cannot_overlap_keeps_its_graph(backend: str, tmp_path: Path) -> None:
    captured = fits(backend, tmp_path, module=Flat)
    (record,) = captured.capture.report.graphs
    assert record.overlap == "one stream: nothing in it could run beside the rest"


@pytest.mark.parametrize(
    ("replays", "left", "affordable"),
    [(200, 10**6, False), (800, 10**6, True), (800, 1000, False), (800, 10**4, True)],
)
def test_replays_pay_for_a_second_graph(replays: int, left: int, affordable: bool) -> None:
    record = GraphRecord(signature="x", capture_ms=400.0, replays=replays)
    assert not is_affordable(record, left)
    record.eager_ms, record.replay_ms = 50.0, 5.0
    assert is_affordable(record, left) is affordable
