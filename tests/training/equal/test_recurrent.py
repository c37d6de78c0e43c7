"""Recurrent layers: their dropout is cuDNN's own, and models flatten their weights in each call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor, nn

from tests.training.fits import Net, compare, fit_twice

SAYS = pytest.mark.filterwarnings("ignore:GraphCapture")


def moved_to_one_piece(layer: nn.RNNBase) -> None:
    """What cuDNN does on a GPU: the weights move to new memory, one behind the other."""
    weights = list(layer.parameters())
    with torch.no_grad():
        piece = torch.cat([weight.reshape(-1) for weight in weights])
        start = 0
        for weight in weights:
            weight.set_(piece.untyped_storage(), start, weight.shape, weight.stride())
            start += weight.numel()


@pytest.fixture(autouse=True)
def _as_on_a_gpu(backend: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A rehearsal flattens recurrent layers as cuDNN wants them on a GPU."""
    if backend == "emulated":
        monkeypatch.setattr(nn.RNNBase, "flatten_parameters", moved_to_one_piece)
    before = nn.RNNBase.flatten_parameters
    yield
    assert nn.RNNBase.flatten_parameters is before


class Encoder(nn.Module):
    """A recurrent layer between others."""

    def __init__(self, flattens: bool, kind: type[nn.RNNBase] = nn.LSTM, **options: Any) -> None:
        super().__init__()
        self.before = nn.Sequential(nn.Linear(4, 8), nn.Tanh())
        self.recurrent = kind(8, 8, batch_first=True, **options)
        width = 16 if self.recurrent.bidirectional else 8
        self.after = nn.Sequential(nn.Linear(width, 8), nn.Tanh())
        self._flattens = flattens
        self.recurrent.flatten_parameters()

    def forward(self, x: Tensor) -> Tensor:
        if self._flattens:
            self.recurrent.flatten_parameters()
        hidden = self.recurrent(self.before(x.view(-1, 2, 4)))[0]
        found: Tensor = self.after(hidden[:, -1])
        return found


def with_encoder(flattens: bool = False, **options: Any) -> Callable[[], Net]:
    class Recurrent(Net):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = Encoder(flattens, **options)

        def loss(self, batch: Any) -> Tensor:
            return super().loss({**batch, "x": self.encoder(batch["x"])})

    return Recurrent


def rounding(backend: str) -> float:
    """cuDNN's backward pass adds up in an order of its own."""
    return 0.0 if backend == "emulated" else 1e-5


@pytest.mark.parametrize(
    ("scope", "flattens", "precision"),
    [
        ("auto", False, "32-true"),
        ("auto", True, "32-true"),
        ("auto", True, "bf16-mixed"),
        ("modules", False, "32-true"),
        ("modules", True, "32-true"),
        ("modules", True, "bf16-mixed"),
    ],
)
def test_without_dropout_they_are_graphed(
    backend: str, tmp_path: Path, scope: str, flattens: bool, precision: str
) -> None:
    fits = fit_twice(
        backend, tmp_path, module=with_encoder(flattens, num_layers=2), precision=precision,
        capture={"scope": scope},
    )  # fmt: skip
    compare(*fits, tolerance=rounding(backend) * (1 if precision == "32-true" else 1e3))
    assert fits[1].statistics.replayed > 10
    assert fits[1].statistics.recaptures == []
    assert fits[1].statistics.modules == (["encoder", "net"] if scope == "modules" else [])


class Seeds(Callback):
    """Sets torch's seed, with which cuDNN makes its random state again."""

    def __init__(self, each: str) -> None:
        self._each = each

    def on_train_epoch_start(self, trainer: Trainer, *_: Any) -> None:
        if self._each == "epoch":
            torch.manual_seed(trainer.current_epoch)

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if self._each == "step":
            torch.manual_seed(trainer.global_step)


LAYERS = {
    "LSTM": {"num_layers": 2, "dropout": 0.25},
    "GRU": {"kind": nn.GRU, "num_layers": 3, "dropout": 0.5, "bidirectional": True},
    "RNN": {"kind": nn.RNN, "num_layers": 2, "dropout": 0.5},
}


@pytest.mark.parametrize("each", ["fit", "epoch"])
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("scope", ["step", "modules"])
def test_dropout_between_layers_is_that_of_eager_steps(
    backend: str, tmp_path: Path, scope: str, layer: str, each: str
) -> None:
    """Verified, and verified again: nothing of it moves cuDNN's random state on."""
    fits = fit_twice(
        backend, tmp_path, module=with_encoder(True, **LAYERS[layer]),
        capture={"scope": scope, "verify": 7}, callbacks=lambda: [Seeds(each)],
    )  # fmt: skip
    compare(*fits, tolerance=rounding(backend))
    statistics = fits[1].statistics
    assert statistics.fallbacks == []
    assert statistics.recaptures == []
    assert "encoder" in statistics.modules or scope == "step"
    # On a GPU the first step of an epoch makes the state again, with a number that is drawn in it.
    assert statistics.replayed > 10


@SAYS
def test_a_seed_for_each_step_keeps_them_eager(backend: str, tmp_path: Path) -> None:
    fits = fit_twice(
        backend, tmp_path, module=with_encoder(num_layers=2, dropout=0.25),
        capture={"scope": "step", "on_failure": "eager"}, callbacks=lambda: [Seeds("step")],
    )  # fmt: skip
    compare(*fits, replayed=backend == "emulated", tolerance=rounding(backend))
    if backend != "emulated":
        (reason,) = fits[1].statistics.fallbacks
        assert "a generator of torch's is set before each step" in reason
        assert "set seeds once, before the fit" in reason


@pytest.mark.parametrize("options", [{"dropout": 0.25}, {"num_layers": 2}])
@pytest.mark.filterwarnings("ignore:dropout option adds dropout")
def test_layers_that_draw_nothing(backend: str, tmp_path: Path, options: Any) -> None:
    """Dropout has no effect behind the only layer."""
    fits = fit_twice(backend, tmp_path, module=with_encoder(**options))
    compare(*fits, tolerance=rounding(backend))


@pytest.mark.filterwarnings("ignore:Found 8 module")  # Lightning's
def test_a_layer_in_eval_mode_draws_nothing(backend: str, tmp_path: Path) -> None:
    class Frozen(with_encoder(num_layers=2, dropout=0.25)):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.encoder.requires_grad_(False).eval()

    compare(*fit_twice(backend, tmp_path, module=Frozen), tolerance=rounding(backend))
