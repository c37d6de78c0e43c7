"""Steps that store something or bind state anew are one graph, and leave what eager steps leave."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.training import storing
from tests.training.fits import (
    Fit,
    FullTrace,
    GradientTrace,
    Net,
    batches,
    compare,
    fit_twice,
)
from tests.training.storing import Storing

BATCHES = 12


def fits_of(backend: str, root: Path, module: Any, capture: Any = None, **options: Any) -> Any:
    """Two fits with equal values, also of what was stored at each step."""
    options = {"data": lambda: batches(BATCHES), "validation": 0, **options}
    eager, captured = fit_twice(backend, root, module=module, capture=capture, **options)
    compare(eager, captured, replayed=False)
    assert repr(captured.module.seen) == repr(eager.module.seen)
    return captured


def assert_whole(fit: Fit, replayed: int) -> None:
    """Assert that steps were replayed, as one graph each."""
    assert {record.scope for record in fit.statistics.graphs} == {"step"}
    assert fit.statistics.fallbacks == []
    assert fit.statistics.replayed >= replayed


OLD = pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated")


@OLD
@pytest.mark.parametrize("module", storing.WHOLE)
def test_a_step_that_stores_is_one_graph(backend: str, tmp_path: Path, module: Any) -> None:
    assert_whole(fits_of(backend, tmp_path, module), 2 * BATCHES - 6)


@OLD
@pytest.mark.filterwarnings("ignore:GraphCapture")
@pytest.mark.parametrize("module", storing.WHOLE)
def test_submodules_of_a_step_that_stores(backend: str, tmp_path: Path, module: Any) -> None:
    fits_of(backend, tmp_path, module, {"scope": "modules", "on_failure": "eager"})


FEW = [
    storing.Outputs, storing.Counters, storing.Features, storing.Centred, storing.Byol,
    storing.Recurrent, storing.Window, storing.VqVaeOfData,
]  # fmt: skip


@pytest.mark.parametrize(
    "options",
    [
        {"accumulate_grad_batches": 2},
        {"trace": FullTrace},
        {"trace": GradientTrace, "gradient_clip_val": 0.1},
        {"precision": "bf16-mixed"},
        {"capture": {"verify": False}},
        {"capture": {"verify": 4}},
    ],
    ids=["accumulated", "cut", "clipped", "bf16", "unverified", "verified"],
)
@pytest.mark.parametrize("module", FEW)
def test_a_step_that_stores_under_options(
    backend: str, tmp_path: Path, module: Any, options: Any
) -> None:
    assert fits_of(backend, tmp_path, module, **options).statistics.replayed > 0


class Appending(Net):
    """What Lightning recommends in place of ``training_epoch_end``."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.losses.append(loss.detach())
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("mean", torch.stack(self.losses).mean())
        self.log("count", float(len(self.losses)))
        self.losses.clear()


class Assigning(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.last = loss.detach()
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.log("last", self.last)


class Counting(Net):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.calls += 1
        return self.loss(batch)

    def on_train_epoch_end(self) -> None:
        self.log("calls", float(self.calls))


class SubmoduleCounting(Net):
    class Layer(nn.Linear):
        calls = 0

        def forward(self, x: Any) -> Any:
            self.calls += 1
            return super().forward(x)

    def __init__(self) -> None:
        super().__init__()
        self.net[4] = self.Layer(16, 3)

    def on_train_epoch_end(self) -> None:
        self.log("calls", float(self.net[4].calls))


class RebindingBuffer(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.average = 0.5 * self.average + 0.5 * loss.detach()
        self.log("average", self.average)
        return loss


@pytest.mark.parametrize(
    "module", [Appending, Assigning, Counting, SubmoduleCounting, RebindingBuffer]
)
def test_what_hooks_find(backend: str, tmp_path: Path, module: Any) -> None:
    eager, captured = fit_twice(backend, tmp_path, module=module)
    compare(eager, captured)


def in_turn() -> list[Any]:
    """Batches of two sizes."""
    sizes = [8, 6] * BATCHES
    return [
        {key: value[:size] for key, value in batch.items()}
        for batch, size in zip(batches(len(sizes)), sizes, strict=True)
    ]


@pytest.mark.parametrize("module", [kind for kind in FEW if kind is not storing.Recurrent])
def test_shapes_in_turn(backend: str, tmp_path: Path, module: Any) -> None:
    capture = {"on_failure": "eager"}
    fit = fits_of(backend, tmp_path, module, capture, data=in_turn, max_epochs=1)
    assert fit.statistics.replayed > 0


class Weighted(Storing):
    """Computes with a number that it counts."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.steps += 1
        return self.loss(batch) * (1 + 1 / self.steps)

    def look(self) -> Any:
        return self.steps


class Branching(Weighted):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.steps += 1
        loss = self.loss(batch)
        return loss * 2 if self.steps == 9 else loss


class Annealed(Weighted):
    """What autoencoders do, with numbers that follow from one another."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.beta = 0, 0.0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.before = self.steps
        self.steps += 1
        self.beta = min(1.0, self.steps / 10)
        self.log("steps", self.steps)
        self.log("beta", self.beta)
        return self.loss(batch) * self.beta

    def look(self) -> Any:
        return self.before, self.steps, self.beta


@pytest.mark.parametrize("module", [Weighted, Branching, Annealed])
@pytest.mark.parametrize("verify", [True, 3])
def test_numbers_that_steps_count_and_use(
    backend: str, tmp_path: Path, module: Any, verify: Any
) -> None:
    fit = fits_of(backend, tmp_path, module, {"on_failure": "eager", "verify": verify})
    assert_whole(fit, BATCHES)


class Indexing(Weighted):
    """Takes the bare value of a number that it counts."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.steps += 1
        return self.loss(batch) * [1.0, 2.0][self.steps % 2]


class Averaged(storing.Outputs):
    """Computes with a list that it fills."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss + torch.stack([output.detach() for output in self.outputs]).mean()


class Bounded(storing.Outputs):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss * 2 if len(self.outputs) > 8 else loss


class Objects(Storing):
    """Stores an object."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Any = None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.found = object()
        return self.loss(batch)


@pytest.mark.filterwarnings("ignore:GraphCapture")
@pytest.mark.parametrize(
    ("module", "said"),
    [
        (Indexing, "(self.steps + 1) % 2 is read at"),
        (Averaged, ""),
        (Bounded, ""),
        (Objects, "self.found"),
    ],
)
def test_what_cannot_be_stored_again_is_refused(
    backend: str, tmp_path: Path, module: Any, said: str
) -> None:
    statistics = fits_of(backend, tmp_path, module, {"on_failure": "eager"}).statistics
    assert statistics.replayed <= 2
    assert said in "".join(statistics.fallbacks)


class Reset(storing.Centred):
    """A hook puts other tensors in the places, of the same geometry and of another."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 8:
            self.center = torch.ones_like(self.center)
        if batch_idx == 10:
            self.center = self.center[0]

    def update(self, teacher: Any) -> None:
        super().update(teacher)
        self.center = self.center.reshape(1, 3)


class Clipped(Net):
    """Weights in new memory after every step, as in WGAN, CLIP and moving averages."""

    def on_train_batch_end(self, *_: Any) -> None:
        for parameter in self.parameters():
            parameter.data = parameter.data.clamp(-0.2, 0.2)


@pytest.mark.parametrize("scope", ["step", "modules"])
def test_parameters_in_new_memory_are_brought_back(
    backend: str, tmp_path: Path, scope: str
) -> None:
    fits = fit_twice(backend, tmp_path, module=Clipped, capture={"scope": scope}, validation=0)
    compare(*fits)
    assert fits[1].statistics.recaptures == []


class InPlaceAndAnew(Storing):
    """State that a hook binds anew, and steps write in place."""

    keeps = False

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("moved", torch.zeros(3))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.mean = self.mean * 0.5
        self.moved.data = self.moved * 0.5

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.net(batch["x"])
        self.mean += logits.detach().mean(0)
        self.moved.data.add_(logits.detach().mean(0), alpha=0.5)
        loss = nn.functional.cross_entropy(logits.float(), batch["y"])
        return loss + (logits * (self.mean - self.moved)).mean()

    def look(self) -> Any:
        return self.mean, self.moved


class Alternating(Storing):
    """Two places with one tensor, and one that is given what the other had."""

    def __init__(self) -> None:
        super().__init__()
        self.now: Any = None
        self.same: Any = None
        self.before: Any = None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.net(batch["x"])
        self.before = self.now
        self.now = self.same = logits.detach().mean(0)
        loss = nn.functional.cross_entropy(logits.float(), batch["y"])
        return loss if self.before is None else loss + (logits * self.before).mean()

    def look(self) -> Any:
        assert self.now is self.same
        return self.now, self.before


class WithNumbers(Storing):
    """Keeps numbers beside tensors, and logs one that it counts."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[Any] = []
        self.steps = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.steps += 1
        self.log("steps", self.steps)
        self.outputs.append({"loss": loss.detach(), "batch": batch_idx, "step": self.steps})
        return loss

    def look(self) -> Any:
        return list(self.outputs)


@pytest.mark.parametrize("module", [Reset, InPlaceAndAnew, Alternating, WithNumbers])
@pytest.mark.parametrize("verify", [True, 3])
def test_places_in_other_ways(backend: str, tmp_path: Path, module: Any, verify: Any) -> None:
    fit = fits_of(backend, tmp_path, module, {"on_failure": "eager", "verify": verify})
    assert fit.statistics.replayed > BATCHES
