"""What a graph for a further shape costs: runs of the author's code, and Python around it."""

from __future__ import annotations

import random
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn

from lightning_graphs.regions.body import StepBody
from lightning_graphs.watch.foreseen import ForeseenReads
from lightning_graphs.watch.host_trace import HostTracer
from tests.training.costs.test_replayed_steps import Silent
from tests.training.fits import Net, batches, compare, prepare

SIZES = (8, 6, 4)
STEPS = 6  # of each size, of which the third is captured


class Masked(Net):
    """Layers upon layers, and a branch on a mask of the batch: the host computes it, too."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(layers)]
        self.net = nn.Sequential(*blocks, nn.Linear(8, 3))

    def loss(self, batch: Any) -> Tensor:
        x = self.scaled(batch["x"], batch["y"] < 0)
        return nn.functional.cross_entropy(self.net(x).float(), batch["y"])

    def scaled(self, x: Tensor, mask: Tensor) -> Tensor:
        if self.has(mask):
            return x * 2.0
        return x

    def has(self, mask: Tensor) -> Any:
        return len(mask.nonzero())


class Asked(Masked):
    """Asks for a truth, as models of transformers ask whether a mask hides anything."""

    def has(self, mask: Tensor) -> Any:
        return mask.any()


class AskedAndFilled(Asked):
    """Makes numbers on the host behind all that it asks: they become constants of the graph."""

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) * torch.tensor([1.5, 2.0], device=self.device).sum()


class AskedAndDrawn(Asked):
    """Draws on the host behind all that it asks."""

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) * random.random()


class Calls(Callback):
    """Counts what is called in each step."""

    def __init__(self, counts: Counter[str], *names: str) -> None:
        self.steps: list[list[int]] = []
        self._counts = counts
        self._names = names

    def on_train_batch_start(self, *_: Any) -> None:
        self._counts.clear()

    def on_train_batch_end(self, *_: Any) -> None:
        self.steps.append([self._counts[name] for name in self._names])


def counted(counts: Counter[str], owner: type, name: str) -> Any:
    """While this is open, calls of a method are counted; nothing keeps what they are given."""
    method = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        counts[name] += 1
        return method(*args, **kwargs)

    return patch.object(owner, name, call)


def calls(backend: str, root: Path, layers: int, module: type[Masked] = Masked) -> list[list[int]]:
    """In each step: runs of the author's code by us, and operators that the host looked into.

    These are those that it may follow, and all that it was shown.
    """
    counts: Counter[str] = Counter()
    counting = Calls(counts, "forward", "operator", "_looks_into")
    with ExitStack() as stack:
        stack.enter_context(counted(counts, StepBody, "forward"))
        for name in ("operator", "_looks_into"):
            stack.enter_context(counted(counts, HostTracer, name))
        fit = prepare(
            backend,
            root,
            True,
            module=lambda: module(layers),
            data=lambda: [batch for size in SIZES for batch in batches(STEPS, size)],
            callbacks=lambda: [counting],
            trace=Silent,
            validation=0,
            max_epochs=1,
            capture={"warmup_steps": 1},
        ).run()
    assert fit.statistics.fallbacks == []
    assert fit.statistics.captures == len(SIZES)
    return counting.steps


@pytest.mark.parametrize("module", [Masked, Asked])
def test_a_shape_is_captured_once_and_compared_with_one_eager_run(
    backend: str, tmp_path: Path, module: type[Masked]
) -> None:
    # The last step of the warm-up shows that the step reads on the host
    steps = [runs for runs, *_ in calls(backend, tmp_path, 2, module)]
    assert [runs for runs in steps if runs] == [2] * len(SIZES)


def test_of_a_further_capture_the_host_looks_at_no_operator_of_the_device(
    backend: str, tmp_path: Path
) -> None:
    few, many = (
        [followed for _, followed, _ in calls(backend, tmp_path / str(layers), layers)]
        for layers in (2, 6)
    )
    assert max(few) > 0
    # One more where a tensor of the device has the `id` of one that is gone
    assert all(abs(a - b) <= 1 for a, b in zip(few, many, strict=True))


def test_the_host_is_shown_no_operator_behind_the_last_read(backend: str, tmp_path: Path) -> None:
    few, many = (
        [shown for *_, shown in calls(backend, tmp_path / str(layers), layers, Asked)]
        for layers in (2, 6)
    )
    assert max(few) > 0
    assert few == many


@pytest.mark.parametrize("module", [Asked, AskedAndFilled, AskedAndDrawn])
def test_what_follows_the_last_read_is_equal(
    backend: str, tmp_path: Path, module: type[Masked]
) -> None:
    options: dict[str, Any] = {"module": lambda: module(2), "validation": 0, "max_epochs": 1}
    capture = {"warmup_steps": 1, "verify": False}
    fits = (
        prepare(backend, tmp_path, False, **options),
        prepare(backend, tmp_path, True, capture=capture, **options),
    )
    compare(*(fit.run() for fit in fits))


def test_observing_a_step_leaves_tensors_what_they_are(device: torch.device) -> None:
    """torch takes what has a slot of sequences for a list, and asks a number for its length."""
    x, foreseen = torch.arange(4, device=device), ForeseenReads()
    with foreseen.observing(nn.Linear(2, 2).to(device), x.device, lambda _: False):
        assert len(x[x > 1]) == 2
    assert foreseen.is_any
    assert torch.tensor([x[1], x[2]]).tolist() == [1, 2]
