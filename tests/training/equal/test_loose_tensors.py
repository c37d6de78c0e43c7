"""Tensors that a step writes and that no module has in a table: attributes, dicts, globals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_graphs.watch.user_code import CompiledCode
from tests.training.fits import Net, compare, fit_twice
from tests.training.modules.test_equal import named

RUNNING: dict[str, Tensor] = {}


class Average:
    """A running mean in an object of its own."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


class Averaging(nn.Module):
    """Keeps a running mean of what it sees, where ``place`` says, and divides by it."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.place = place
        self.norms = [nn.BatchNorm1d(8)]
        self.kept: list[Any] = []

    def mean(self) -> Tensor:
        """The running mean."""
        if not self.kept:
            value = torch.ones((), device=self.linear.weight.device)
            self.norms[0].to(value.device)
            RUNNING.clear()
            RUNNING["mean"] = value
            self.kept.append(value)
            if self.place == "dict":
                self.kept.append({"mean": value})
            elif self.place == "object":
                self.kept.append(Average(value))
            elif self.place == "attribute":
                self.value = value
        if self.place == "global":
            return RUNNING["mean"]
        if self.place == "dict":
            found: Tensor = self.kept[1]["mean"]
            return found
        if self.place == "object":
            held: Tensor = self.kept[1].value
            return held
        return self.value if self.place == "attribute" else self.kept[0]

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.linear(x)
        if self.place == "module in a list":
            return hidden + self.norms[0](hidden)
        mean = self.mean()
        mean.mul_(0.9).add_(0.1 * hidden.detach().abs().mean())
        return hidden / mean


class Averaged(Net):
    """A block with a running mean ahead of the network."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.block = Averaging(place)

    def on_train_start(self) -> None:
        self.block.mean()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step({**batch, "x": self.block(batch["x"])}, batch_idx)


PLACES = ["attribute", "list", "dict", "object", "global", "module in a list"]


@pytest.mark.parametrize("verify", [True, False, 4])
@pytest.mark.parametrize("capture", [{"scope": "step"}, named("block")])
@pytest.mark.parametrize("place", PLACES)
def test_a_tensor_that_is_written(
    backend: str, tmp_path: Path, place: str, capture: dict[str, Any], verify: Any
) -> None:
    means = []

    def module() -> Averaged:
        means.append(Averaged(place))
        return means[-1]

    capture = {**capture, "verify": verify}
    eager, captured = fit_twice(backend, tmp_path, module=module, capture=capture, validation=0)
    compare(eager, captured)
    mine, theirs = (fit.block for fit in reversed(means))
    assert torch.equal(mine.kept[0], theirs.kept[0])
    for name, buffer in theirs.norms[0].named_buffers():
        assert torch.equal(mine.norms[0].get_buffer(name), buffer), name


@pytest.mark.parametrize("place", PLACES)
def test_a_tensor_that_is_written_where_something_was_compiled(
    backend: str, tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then a capture begins with a pass of its own."""
    monkeypatch.setattr(CompiledCode, "runs", True)
    modules = named("block", verify=False)
    fits = fit_twice(
        backend, tmp_path, module=lambda: Averaged(place), capture=modules, validation=0
    )
    compare(*fits)
    mine, theirs = (fit.module.block for fit in reversed(fits))
    assert torch.equal(mine.kept[0], theirs.kept[0])
    for name, buffer in theirs.norms[0].named_buffers():
        assert torch.equal(mine.norms[0].get_buffer(name), buffer), name


DRAWING = np.random.default_rng(0)


class Jittered(Net):
    """Draws from a generator of NumPy in a global variable."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step({**batch, "x": self.jitter(batch["x"])}, batch_idx)

    def jitter(self, x: Tensor) -> Tensor:
        return x + float(DRAWING.normal())


@pytest.mark.filterwarnings("ignore:GraphCapture")
@pytest.mark.parametrize("verify", [True, False])
def test_a_step_that_draws_from_a_global_generator_runs_eagerly(
    backend: str, tmp_path: Path, verify: bool
) -> None:
    def module() -> Jittered:
        DRAWING.bit_generator.state = np.random.default_rng(7).bit_generator.state
        return Jittered()

    capture = {"on_failure": "eager", "verify": verify}
    fits = fit_twice(backend, tmp_path, module=module, capture=capture, validation=0)
    compare(*fits, replayed=False)
    assert "draws from" in fits[1].statistics.fallbacks[0]
