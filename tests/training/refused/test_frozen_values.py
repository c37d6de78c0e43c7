"""Values that a step reads, and what it leaves behind, beyond plain attributes of its module."""

from __future__ import annotations

import argparse
import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torchmetrics
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_graphs.watch.reads import AttributeGuards
from tests.training.fits import Net, compare, fit_twice, warned
from tests.training.modules.test_equal import named


class Mode(Enum):
    NEAR = 1
    FAR = 2


@dataclass
class Weights:
    scale: float = 1.0


class Holder:
    """An object with attributes of its own."""

    def __init__(self, scale: float) -> None:
        self.scale = scale


class Reading(Net):
    """Reads a value that a hook changes before the second epoch."""

    first: Callable[[Any], Any]
    second: Callable[[Any], Any]
    used: Callable[[Any], Any]

    def __init__(self) -> None:
        super().__init__()
        self._held = type(self).first(self)

    @property
    def scale(self) -> Any:
        return type(self).used(self._held)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) * self.scale

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            held = type(self).second(self._held)
            if held is not None:
                self._held = held


def reading(first: Any, second: Any, used: Any) -> type[Reading]:
    members = {"first": lambda _: first(), "second": staticmethod(second)}
    return type("Reading", (Reading,), {**members, "used": staticmethod(used)})


VALUES: dict[str, tuple[Any, Any, Any, str]] = {
    "number": (lambda: 1.0, lambda _: 3.0, lambda w: w, "self._held: 1.0 -> 3.0"),
    "tuple": (lambda: (1.0,), lambda _: (3.0,), lambda w: w[0], "self._held[0]: 1.0 -> 3.0"),
    "list": (lambda: [1.0], lambda _: [3.0], lambda w: w[0], "self._held[0]: 1.0 -> 3.0"),
    "growing list": (
        lambda: [1.0], lambda w: w.append(2.0), sum, "self._held: list of 1 -> list of 2",
    ),
    "set": (lambda: {1.0}, lambda w: w.add(2.0), sum, "self._held: frozenset({1.0}) -> "),
    "dict": (lambda: {"a": 1.0}, lambda _: {"a": 3.0}, lambda w: w["a"], "self._held['a']: "),
    "nested dict": (
        lambda: {"a": {"b": 1.0}}, lambda w: w["a"].update(b=3.0), lambda w: w["a"]["b"],
        "self._held['a']['b']: 1.0 -> 3.0",
    ),
    "dataclass": (
        Weights, lambda _: Weights(3.0), lambda w: w.scale, "self._held.scale: 1.0 -> 3.0",
    ),
    "object": (
        lambda: Holder(1.0), lambda w: setattr(w, "scale", 3.0), lambda w: w.scale,
        "self._held.scale: 1.0 -> 3.0",
    ),
    "namespace": (
        lambda: argparse.Namespace(scale=1.0), lambda w: setattr(w, "scale", 3.0),
        lambda w: w.scale, "self._held.scale: 1.0 -> 3.0",
    ),
    "enum": (
        lambda: Mode.NEAR, lambda _: Mode.FAR, lambda w: 1.0 if w is Mode.NEAR else 3.0,
        "self._held: <Mode.NEAR: 1> -> <Mode.FAR: 2>",
    ),
    "none": (lambda: None, lambda _: 3.0, lambda w: w or 1.0, "self._held: None -> 3.0"),
    "function": (
        lambda: torch.sin, lambda _: torch.exp, lambda f: f(torch.ones(())),
        "self._held: sin -> exp",
    ),
    "numpy scalar": (
        lambda: numpy.float32(1.0), lambda _: numpy.float32(3.0), float, "self._held: ",
    ),
    "array": (
        lambda: numpy.ones(2), lambda w: w.put(1, 3.0), lambda w: float(w.sum()),
        "self._held: float64[2] of [1.0, 1.0] -> float64[2] of [1.0, 3.0]",
    ),
    "long array": (
        lambda: numpy.ones(8192), lambda w: w.put(8191, 3.0), lambda w: float(w[-1]),
        "self._held: float64[8192] with checksum ",
    ),
    "array in a dict": (
        lambda: {"a": numpy.ones(2)}, lambda w: w["a"].put(1, 3.0), lambda w: float(w["a"][1]),
        "self._held['a']: float64[2] of [1.0, 1.0] -> ",
    ),
    "large array": (
        lambda: numpy.ones(8193), lambda w: 3 * w, lambda w: float(w[0]),
        "self._held: another ndarray",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", VALUES)
def test_a_value_that_a_hook_moves_gets_another_graph(
    backend: str, tmp_path: Path, kind: str
) -> None:
    *given, change = VALUES[kind]
    eager, captured = fit_twice(backend, tmp_path, module=reading(*given), validation=0)
    compare(eager, captured)
    assert captured.statistics.captures == 2
    assert captured.statistics.recaptures[0].startswith(change)


class Masked(Net):
    """A tensor that is no buffer, replaced by a hook."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) * self.mask

    def on_train_epoch_start(self) -> None:
        self.mask = torch.full((), 1.0 + self.current_epoch, device=self.device)


class OfTheClass(Net):
    scale = 1.0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) * self.scale

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.scale = 3.0


class Smoothed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.criterion = nn.CrossEntropyLoss(label_smoothing=0.25)
        self.slope = nn.LeakyReLU(0.5)

    def loss(self, batch: Any) -> Tensor:
        return self.criterion(self.slope(self.net(batch["x"])), batch["y"])

    def on_train_epoch_start(self) -> None:
        self.criterion.label_smoothing = 0.25 * (1 - self.current_epoch)
        self.slope.negative_slope = 0.5 * (1 - self.current_epoch)


@pytest.mark.parametrize("module", [Masked, OfTheClass, Smoothed])
def test_a_changed_value_gets_another_graph(
    backend: str, tmp_path: Path, module: type[Net]
) -> None:
    eager, captured = fit_twice(backend, tmp_path, module=module, validation=0)
    compare(eager, captured)
    assert captured.statistics.captures == 2


def test_an_equal_value_in_its_place_is_no_change(backend: str, tmp_path: Path) -> None:
    module = reading(lambda: {"a": [1.0]}, lambda _: {"a": [1.0]}, lambda w: w["a"][0])
    eager, captured = fit_twice(backend, tmp_path, module=module, validation=0)
    compare(eager, captured)
    assert captured.statistics.captures == 1


def test_values_are_described_again_only_after_a_change() -> None:
    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.settings = {"scale": 1.0, "seen": [0]}

    module, reads = Module(), AttributeGuards()
    with reads.watching(module):
        assert module.settings["scale"] == 1.0
    before = reads.now()
    assert reads.now() is before
    module.settings["seen"].append(1)
    assert dict(reads.now())["self.settings['seen'][1]"].value == 1


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 3)
        self.weights = numpy.ones(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * float(self.weights[1])


class WithWeighted(Net):
    def __init__(self) -> None:
        super().__init__()
        self.net = Weighted()  # type: ignore[assignment]

    def on_train_epoch_start(self) -> None:
        self.net.weights[1] = 1.0 + self.current_epoch


def test_an_array_of_a_graphed_submodule(backend: str, tmp_path: Path) -> None:
    fits = fit_twice(backend, tmp_path, module=WithWeighted, capture=named("net"), validation=0)
    compare(*fits)
    assert fits[1].statistics.captures == 2


def test_large_arrays_and_those_of_objects_are_compared_by_identity() -> None:
    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.large = numpy.zeros(65537, dtype=numpy.uint8)
            self.objects = numpy.array([None])

    module, reads = Module(), AttributeGuards()
    with reads.watching(module):
        _ = module.large, module.objects
    before = reads.now()
    module.large[0], module.objects[0] = 1, 1
    assert reads.now() is before
    module.large = module.large.copy()
    assert reads.now() != before


class Meter:
    def __init__(self) -> None:
        self.total: Any = 0.0
        self.count = 0

    def update(self, value: Tensor) -> None:
        self.total = self.total + value
        self.count += 1


class Collecting(Net):
    """Leaves something behind in every step, and logs it at the end of the epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: Any = self.empty()

    def empty(self) -> Any:
        raise NotImplementedError

    def keep(self, loss: Tensor) -> None:
        raise NotImplementedError

    def count(self) -> int:
        raise NotImplementedError

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.keep(loss.detach())
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("count", float(self.count()))


class InADefaultDict(Collecting):
    def empty(self) -> Any:
        return defaultdict(list)

    def keep(self, loss: Tensor) -> None:
        self.kept["losses"].append(loss)

    def count(self) -> int:
        return len(self.kept["losses"])


class InANestedList(InADefaultDict):
    def empty(self) -> Any:
        return {"losses": []}


class InAMeter(Collecting):
    def empty(self) -> Any:
        return Meter()

    def keep(self, loss: Tensor) -> None:
        self.kept.update(loss)

    def count(self) -> int:
        return int(self.kept.count)


class InAnArray(Collecting):
    def empty(self) -> Any:
        return {"counts": numpy.zeros(2)}

    def keep(self, loss: Tensor) -> None:
        self.kept["counts"][1] += 1

    def count(self) -> int:
        return int(self.kept["counts"][1])


class InAMetric(Collecting):
    def empty(self) -> Any:
        return {"mean": torchmetrics.MeanMetric(nan_strategy="disable")}

    def keep(self, loss: Tensor) -> None:
        self.kept["mean"].to(loss.device).update(loss)

    def count(self) -> int:
        return int(self.kept["mean"].update_count)


class OfPython(Net):
    def __init__(self) -> None:
        super().__init__()
        self.source: Any = random.Random(0)

    def drawn(self) -> float:
        return float(self.source.random())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) * (2.0 if self.drawn() < 0.02 else 1.0)


class OfNumpy(OfPython):
    def __init__(self) -> None:
        super().__init__()
        self.source = {"mixup": numpy.random.default_rng(0)}

    def drawn(self) -> float:
        return float(self.source["mixup"].random())


class OfAnIterator(OfPython):
    def __init__(self) -> None:
        super().__init__()
        self.source = iter([i / 20 for i in range(20)])  # as many as there are steps

    def drawn(self) -> float:
        return float(next(self.source))


class AtTheLastBatch(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) * (2.0 if self.trainer.is_last_batch else 1.0)


REFUSED = {
    InAnArray: r"changes self.kept\['counts'\]",
    OfPython: "draws from self.source",
    OfNumpy: r"draws from self.source\['mixup'\]",
    OfAnIterator: "self.source, an iterator, is read at",
}


@pytest.mark.parametrize("module", REFUSED)
def test_refused_with_reason_and_equal(backend: str, tmp_path: Path, module: type[Net]) -> None:
    said = f"a step runs eagerly: (?s:.*){REFUSED[module]}"
    _, captured = warned(backend, tmp_path, said, module=module, validation=0)
    assert captured.statistics.replayed == 0


@pytest.mark.parametrize(
    "module", [InADefaultDict, InANestedList, InAMeter, InAMetric, AtTheLastBatch]
)
def test_stored_again_by_replays_and_equal(backend: str, tmp_path: Path, module: type[Net]) -> None:
    eager, captured = fit_twice(backend, tmp_path, module=module, validation=0)
    compare(eager, captured)
    if issubclass(module, Collecting):
        assert captured.module.count() == eager.module.count()
    if issubclass(module, InADefaultDict):
        kept = (torch.stack(fit.module.kept["losses"]) for fit in (captured, eager))
        assert torch.equal(*kept)
