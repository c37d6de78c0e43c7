"""Recurrent layers: their dropout is cuDNN's own, and models flatten their weights in each call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_graphs import CaptureError
from lightning_graphs.training.guards import uncapturable
from tests.training.fits import Net, batches, compare, fit_twice, prepare
from tests.training.leftovers import assert_nothing_left

SAYS = pytest.mark.filterwarnings("ignore:GraphCapture")
REASON = "draws the dropout between its layers from a random state inside of cuDNN"


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
    """A rehearsal flattens and judges recurrent layers as cuDNN's are on a GPU."""
    if backend == "emulated":
        monkeypatch.setattr(nn.RNNBase, "flatten_parameters", moved_to_one_piece)
        monkeypatch.setattr(uncapturable, "computed_by_cudnn", lambda _: True)
    before = nn.RNNBase.flatten_parameters
    yield
    assert nn.RNNBase.flatten_parameters is before


class Encoder(nn.Module):
    """A recurrent layer between others."""

    def __init__(self, flattens: bool, **options: Any) -> None:
        super().__init__()
        self.before = nn.Sequential(nn.Linear(4, 8), nn.Tanh())
        self.recurrent = nn.LSTM(8, 8, batch_first=True, **options)
        self.after = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
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


@SAYS
@pytest.mark.parametrize("scope", ["auto", "modules"])
def test_with_dropout_their_siblings_are_graphed(backend: str, tmp_path: Path, scope: str) -> None:
    fits = fit_twice(
        backend, tmp_path, module=with_encoder(True, num_layers=2, dropout=0.25), max_epochs=1,
        capture={"scope": scope, "on_failure": "eager"}, data=lambda: batches(20),
    )  # fmt: skip
    if backend == "emulated":  # two eager runs differ on a GPU
        compare(*fits, replayed=False)
    statistics = fits[1].statistics
    assert statistics.modules == ["encoder.before", "encoder.after", "net"]
    # Neither a capture nor a verification was lost: as many eager steps as with any other choice.
    assert statistics.eager == 6
    assert statistics.replayed == 14
    assert statistics.captures == 1
    *whole, layer = statistics.fallbacks
    assert layer.startswith(f"`encoder.recurrent` is not graphed: `LSTM` {REASON}")
    if scope == "auto":
        (reason,) = whole
        assert reason.startswith(
            f"capturing submodules, not the whole step: `encoder.recurrent` {REASON}"
        )
    assert_nothing_left(fits[1])


@SAYS
def test_whole_steps_are_refused_before_anything_is_captured(backend: str, tmp_path: Path) -> None:
    module = with_encoder(num_layers=2, dropout=0.25)
    fit = prepare(backend, tmp_path, True, module=module)
    with pytest.raises(CaptureError, match=f"`encoder.recurrent` {REASON}"):
        fit.run()
    fit = prepare(backend, tmp_path, True, module=module, capture={"on_failure": "eager"}).run()
    (reason,) = fit.statistics.fallbacks
    assert reason.startswith(f"`encoder.recurrent` {REASON}")


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


@SAYS
def test_a_layer_that_is_named(backend: str, tmp_path: Path) -> None:
    capture = {"scope": "modules", "modules": ["encoder.recurrent", "net"]}
    module = with_encoder(num_layers=2, dropout=0.25)
    fit = prepare(backend, tmp_path, True, module=module, capture=capture).run()
    assert fit.statistics.modules == ["net"]
    (reason,) = fit.statistics.fallbacks
    assert reason.startswith(f"`encoder.recurrent` is not graphed: `LSTM` {REASON}")
