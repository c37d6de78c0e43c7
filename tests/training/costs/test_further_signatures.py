"""What a graph for a further shape costs: runs of the author's code, and Python around it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import patch

from lightning.pytorch import Callback
from torch import Tensor, nn

from lightning_graphs.regions.body import StepBody
from lightning_graphs.watch.host_trace import HostTracer
from tests.training.costs.test_replayed_steps import Silent
from tests.training.fits import Net, batches, prepare

SIZES = (8, 6, 4)
STEPS = 6  # of each size, of which the third is captured


class Masked(Net):
    """Layers upon layers, and a branch on a mask of the batch: the host computes it, too."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(layers)]
        self.net = nn.Sequential(*blocks, nn.Linear(8, 3))

    def loss(self, batch: Any) -> Tensor:
        x = batch["x"]
        if len((batch["y"] < 0).nonzero()):
            x = x * 2.0
        return nn.functional.cross_entropy(self.net(x).float(), batch["y"])


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


def calls(backend: str, root: Path, layers: int) -> list[list[int]]:
    """In each step: runs of the author's code by us, and operators that the host looked into."""
    counts: Counter[str] = Counter()
    counting = Calls(counts, "forward", "_follow")
    with counted(counts, StepBody, "forward"), counted(counts, HostTracer, "_follow"):
        fit = prepare(
            backend,
            root,
            True,
            module=lambda: Masked(layers),
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


def test_a_further_shape_is_captured_once_and_compared_with_one_eager_run(
    backend: str, tmp_path: Path
) -> None:
    steps = [runs for runs, _ in calls(backend, tmp_path, 2)]
    # The first capture finds that the step reads on the host, and is made once more.
    first, *further = [runs for runs in steps if runs]
    assert first == 3
    assert further == [2] * (len(SIZES) - 1)


def test_of_a_further_capture_the_host_looks_at_no_operator_of_the_device(
    backend: str, tmp_path: Path
) -> None:
    few, many = (
        [followed for _, followed in calls(backend, tmp_path / str(layers), layers)]
        for layers in (2, 6)
    )
    assert max(few) > 0
    assert few == many
