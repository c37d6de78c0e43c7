"""Python that a capture would freeze: refused with its reason, and then equal to eager."""

from __future__ import annotations

import argparse
import functools
import gc
import json
import random
import weakref
from array import array
from collections import deque
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum
from queue import Queue
from threading import local
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy
import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn

from tests.programs.table import Promises, row, table
from tests.training.fits import Net, batches, named


class IndexedByRange(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        for _ in range(batch_idx):
            loss = loss * 1.5
        return loss


class IndexedInAHelper(Net):
    def scale(self, loss: Any, i: int) -> Any:
        return loss * len(str(i))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.scale(self.loss(batch), batch_idx)


class IndexReturned(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": self.loss(batch), "index": batch_idx}


class ByProgress(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) / (1 + self.trainer.fit_loop.epoch_loop.batch_idx)


class Mixup(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        share = float(str(numpy.random.beta(1.0, 1.0)))
        return share * self.loss(batch)


class OldGradients(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        old = self.net[0].weight.grad
        return self.loss(batch) * (1.0 if old is None else 1.0 + old.norm())


class OldGradientsDropped(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        for parameter in self.parameters():
            parameter.grad = None
        return self.loss(batch)


class OldGradientsClipped(Net):
    """Clips too early, which scales nothing, and logs the norm."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        norm = nn.utils.clip_grad_norm_(self.parameters(), 1.0)
        self.log("norm", norm)
        return self.loss(batch)


class OldGradientsClippedByLightning(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.clip_gradients(self.optimizers(), 2.0**-6, "norm")
        return self.loss(batch)


class OldNorms(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        norms = grad_norm(self, norm_type=2)
        return self.loss(batch) * (1.0 + sum(norms.values()))


class Moving(Net):
    """Moves a part of it to where it is, and zeroes gradients that Lightning zeroes as well."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.net.to(self.device)
        self.optimizers().zero_grad()
        return self.loss(batch)


class Restarting(Net):
    """Drops what was accumulated before."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.zero_grad()
        return self.loss(batch)


class Annealed(Net):
    """A Python attribute that another hook moves, as KL annealing does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = 0.25
        self.save_hyperparameters({"scale": 1.0})

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("weight", self.weight)
        return loss * self.weight * self.hparams.scale

    def on_train_epoch_start(self) -> None:
        self.weight = 0.25 * (1 + self.current_epoch)
        self.hparams.scale = 1.0 + (self.current_epoch == 3)


class ScheduledDropout(Net):
    def on_train_epoch_start(self) -> None:
        self.net[3].p = 0.25 * (self.current_epoch % 2)


class NamedInALayer(Net):
    """A number that the author has put into a layer of torch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) * self.net.factor

    def on_train_epoch_start(self) -> None:
        self.net.factor = 0.5 * (1 + self.current_epoch % 2)


class Consuming(Net):
    def training_step(self, dataloader_iter: Any) -> Any:
        batch, _, _ = next(dataloader_iter)
        return self.loss(move_data_to_device(batch, self.device))


class SometimesSkipping(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if len(batch["x"]) == 5 else self.loss(batch)


class AnnealedInItsTable(Annealed):
    """Reads its attributes past their names, as a __getattr__ of its own does."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) * vars(self)["weight"]


class Settings(Net):
    """Weights of the loss in a dict, a list and a namespace, moved by a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = {"loss": 1.0}
        self.factors = [1.0, 2.0]
        self.settings = SimpleNamespace(scale=1.0)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) * self.weights["loss"] * self.factors[0] * self.settings.scale

    def on_train_epoch_start(self) -> None:
        self.weights["loss"] = 1.0 / (1 + self.current_epoch)
        self.factors[0] = 1.0 + self.current_epoch
        self.settings.scale = 0.5 * (1 + self.current_epoch)


class WeightsInAList(Net):
    """A hook moves entries of a list after each step, as the balance of several losses does."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = [1.0, 0.5]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) * self.weights[0] + self.net[0].weight.norm() * self.weights[1]

    def on_train_batch_end(self, *_: Any) -> None:
        self.weights[0] *= 0.875
        self.weights[1] += 0.125


class LoggedWeightsInAList(WeightsInAList):
    """A new list each time, whose numbers are inputs from the first capture on."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log_dict({str(place): weight for place, weight in enumerate(self.weights)})
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, *_: Any) -> None:
        self.weights = [self.weights[0] * 0.875, self.weights[1] + 0.125]


class LatestLosses(Net):
    """The mean of the latest losses, which a hook notes."""

    def __init__(self) -> None:
        super().__init__()
        self.latest: deque[float] = deque(maxlen=2)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) / (sum(self.latest) / len(self.latest) if self.latest else 1.0)

    def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
        self.latest.append(float(outputs["loss"]))


class Penalized(Net):
    """A gradient penalty, for which the step has autograd look at its batch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch["x"], batch["y"]
        x.requires_grad_()
        output = self.net(x)
        (gradient,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        return nn.functional.cross_entropy(output, y) + gradient.pow(2).sum()


class PenalizedAndSeen(Penalized):
    """The batch has the gradients of an eager step."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(batch["x"].grad)


class Dumping(Net):
    """A TypeError that exists only while capturing does not end a fit that trains eagerly."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        json.dumps(batch_idx)
        return self.loss(batch)


class InAnArray(Net):
    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[str, Any] = {"counts": numpy.zeros(2)}
        self.seen: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.kept["counts"][1] += 1
        return self.loss(batch)

    def on_train_epoch_end(self) -> None:
        self.seen.append(self.kept["counts"][1])


class InBytes(InAnArray):
    """Marks what it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = {"counts": bytearray(4)}


class IntoAQueue(InAnArray):
    """Hands what another thread writes down to it."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: Queue[int] = Queue()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.waiting.put(1)
        return self.loss(batch)

    def on_train_batch_end(self, *args: Any) -> None:
        self.seen.append(self.waiting.qsize())


class InALargeArray(InAnArray):
    """As a table of results, or a buffer of what was seen."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = {"counts": numpy.zeros(100_000)}


class ReadIntoAnArray(InAnArray):
    """Adds what it reads of the device to a part of an array."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.kept["counts"][1] += loss.item()
        return loss


class PenalizedByIndex(Penalized):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * len(str(batch_idx))


# ---------------------------------------------------------------------- values


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

    def get(self) -> float:
        return self.scale


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


def _set(variable: ContextVar[float], scale: float = 1.0) -> ContextVar[float]:
    variable.set(scale)
    return variable


def _of_this_thread(values: Any, scale: float = 1.0) -> Any:
    values.scale = scale
    return values


ALIVE: list[Holder] = []  # to which something refers weakly
TABLE = {"scale": 1.0}


def _alive() -> Holder:
    ALIVE[:] = [Holder(1.0)]
    return ALIVE[0]


def _looked_up() -> float:
    return TABLE["scale"]


def _cached() -> Any:
    TABLE["scale"] = 1.0
    return functools.lru_cache(_looked_up)


def _clear(cache: Any) -> None:
    TABLE["scale"] = 3.0
    cache.cache_clear()
    cache()


VALUES: dict[str, tuple[Any, Any, Any, str]] = {
    "number": (lambda: 1.0, lambda _: 3.0, lambda w: w, "self._held: 1.0 -> 3.0"),
    "tuple": (lambda: (1.0,), lambda _: (3.0,), lambda w: w[0], "self._held[0]: 1.0 -> 3.0"),
    "list": (lambda: [1.0], lambda _: [3.0], lambda w: w[0], "self._held[0]: 1.0 -> 3.0"),
    "growing list": (
        lambda: [1.0], lambda w: w.append(2.0), sum, "self._held keeps changing",
    ),
    "context variable": (
        lambda: _set(ContextVar("scale")), lambda w: _set(w, 3.0), lambda w: w.get(),
        "self._held.get(): 1.0 -> 3.0",
    ),
    "of a thread": (
        lambda: _of_this_thread(local()), lambda w: _of_this_thread(w, 3.0), lambda w: w.scale,
        "self._held.scale: 1.0 -> 3.0",
    ),
    "read-only view": (
        lambda: MappingProxyType({"scale": 1.0}),
        lambda w: gc.get_referents(w)[0].update(scale=3.0), lambda w: w["scale"],
        "self._held['scale']: 1.0 -> 3.0",
    ),
    "weak reference": (
        lambda: weakref.ref(_alive()), lambda w: setattr(w(), "scale", 3.0), lambda w: w().scale,
        "self._held().scale: 1.0 -> 3.0",
    ),
    "weak proxy": (
        lambda: weakref.proxy(_alive()), lambda w: setattr(w, "scale", 3.0), lambda w: w.scale,
        "self._held.scale: 1.0 -> 3.0",
    ),
    "weak method": (
        lambda: weakref.WeakMethod(_alive().get), lambda w: setattr(ALIVE[0], "scale", 3.0),
        lambda w: w()(), "self._held().scale: 1.0 -> 3.0",
    ),
    "cleared cache": (_cached, _clear, lambda w: w(), "self._held.cache_clear: 0 -> 1"),
    "array of Python": (
        lambda: array("d", [1.0]), lambda w: w.append(2.0), sum, "self._held: d[1] of [1.0] -> ",
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


ROWS = (
    table(
        each={
            IndexedByRange: "batch_idx", IndexedInAHelper: "batch_idx",
            ByProgress: "trainer.fit_loop",
            OldGradients: ".grad of a parameter is read",
            OldGradientsDropped: ".grad of a parameter is set",
            OldGradientsClipped: "cannot use gradients before its backward.*: norm = nn.utils.clip",
            OldGradientsClippedByLightning: ".grad of a parameter is read",
            OldNorms: ".grad of a parameter is read", 
            PenalizedByIndex: "batch_idx",
        }
    )
    | table(IndexReturned, Mixup, Dumping)
    | table(Moving, ScheduledDropout, NamedInALayer, max_epochs=3)
    | table(
        Restarting, said="in training_step: self.zero_grad", also="unverified",
        accumulate_grad_batches=2,
    )
    | table(Consuming, said="takes an iterator", found="rule remedy", placed=False, validation=0)
    | table(
        SometimesSkipping, said="got NoneType", replayed=16, max_epochs=5, placed=False,
        data=lambda: batches(6, last=5),
    )
    | table(Annealed, AnnealedInItsTable, graphs=4, max_epochs=4)
    | table(Settings, graphs=3, max_epochs=3)
    | table(WeightsInAList, graphs=2, max_epochs=3)
    | table(LatestLosses, graphs=2, max_epochs=3, found=None)
    | table(LoggedWeightsInAList, graphs=1)
    | table(
        Penalized, PenalizedAndSeen, also="unverified; auto; auto, unverified", validation=0,
        max_epochs=3,
    )
    | table(
        each={
            InAnArray: r"changes self.kept\['counts'\]",
            InBytes: r"changes self.kept\['counts'\]", ReadIntoAnArray: "host",
            InALargeArray: r"changes self.kept\['counts'\]",
            OfAnIterator: "self.source, an iterator, is read at",
        },
        validation=0,
    )
    | table(OfPython, OfNumpy, said="draws from self.source", found="rule remedy", validation=0)
    | {
        kind: row(reading(*given), graphs=2, changes=(change,), validation=0)
        for kind, (*given, change) in VALUES.items()
    }
    | {
        "an equal value": row(
            reading(lambda: {"a": [1.0]}, lambda _: {"a": [1.0]}, lambda w: w["a"][0]), graphs=1,
            validation=0,
        )
    }
    | table(IntoAQueue, also="verified", validation=0)
    | table(Masked, OfTheClass, Smoothed, graphs=2, validation=0)
    | table(WithWeighted, graphs=2, capture=named("net"), validation=0)
)  # fmt: skip


class TestFrozen(Promises):
    rows = ROWS
