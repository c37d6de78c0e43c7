"""Gradients that enter and leave graphs in memory with gaps, or with the same elements again.

Kernels add up in another order over another layout: the last bits of sums tell.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.training.fits import Net, batches, compare, fit_twice

N = 72
"""Samples of a batch: as many as kernels need to add up in more than one order."""


def _weights(x: Tensor) -> Tensor:
    return torch.linspace(-1, 1, x.numel(), device=x.device).view(x.shape)


class Spectrum(nn.Module):
    """Its input gets a gradient with gaps."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(66, 64)

    def forward(self, x: Tensor) -> Any:
        return self.layer(torch.view_as_real(torch.fft.rfft(x, dim=1)).flatten(1))


class Total(nn.Module):
    """Its input gets a gradient that is the same for all features."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 64)

    def forward(self, x: Tensor) -> Any:
        return self.layer(x.sum(1, keepdim=True))


class Laid(Net):
    """A graphed block between BatchNorms."""

    def __init__(self, loss: str, block: type[nn.Module] | None = None) -> None:
        super().__init__()
        self.before = nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64))
        self.block = block() if block else nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64))
        self.kind = loss

    def loss(self, batch: Any) -> Tensor:
        x = self.block(self.before(batch["x"]))
        kind = self.kind
        if kind == "takes turns":
            kind = ("squares", "sum")[self.trainer.global_step % 2]
        if kind == "sum":
            return x.sum() * 1e-3
        if kind == "sums of rows":
            return (x.sum(1) * _weights(x[:, 0])).sum() * 1e-2
        if kind == "sums of columns":
            return (x.sum(0) * _weights(x[0])).sum() * 1e-2
        if kind == "spectrum":
            return torch.fft.rfft(x, dim=-1).abs().sum() * 1e-3
        if kind == "parts":
            parts = torch.stack([x, x.tanh(), x.sin()], dim=-1)
            return (parts * _weights(parts)).sum() * 1e-2
        return x.square().mean()


class Periods(nn.Module):
    """One stack of convolutions for images of several shapes, as in TimesNet."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 16)
        self.conv = nn.Sequential(
            nn.Conv2d(16, 16, 3, padding=1), nn.GELU(), nn.Conv2d(16, 16, 3, padding=1)
        )

    def forward(self, x: Tensor) -> Any:
        x = self.layer(x.repeat(1, 3).unsqueeze(-1))
        found = []
        for period in (3, 5, 8):
            length = -(-24 // period) * period
            y = torch.cat([x, x.new_zeros(len(x), length - 24, 16)], dim=1)
            y = y.reshape(len(x), length // period, period, 16).permute(0, 3, 1, 2).contiguous()
            y = self.conv(y).permute(0, 2, 3, 1).reshape(len(x), -1, 16)
            found.append(y[:, :24])
        weights = torch.fft.rfft(x, dim=1).abs().mean(-1)[:, :3].softmax(1)
        return (torch.stack(found, dim=-1) * weights[:, None, None]).sum(-1) + x


class TimesNet(Net):
    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = Periods(), nn.Linear(16 * 24, 3)

    def loss(self, batch: Any) -> Tensor:
        x = self.block(batch["x"])
        return nn.functional.cross_entropy(self.head(x.flatten(1)), batch["y"])


LOSSES = ["sum", "sums of rows", "sums of columns", "spectrum", "parts", "takes turns", "squares"]
FITS: dict[str, Any] = {
    **{loss: (lambda loss=loss: Laid(loss)) for loss in LOSSES},
    "gaps of the input": lambda: Laid("squares", Spectrum),
    "repetitions of the input": lambda: Laid("squares", Total),
    "TimesNet": TimesNet,
}


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("kind", FITS)
def test_sums_are_added_up_in_the_same_order(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, window: int
) -> None:
    # By default, cuDNN may add up the gradients of convolutions by atomics: no two runs are equal.
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    if window == 2 and kind == "takes turns":
        pytest.skip("its graphs are captured where no gradient is repeated")
    name = "block.conv" if kind == "TimesNet" else "block"
    eager, captured = fit_twice(
        backend,
        tmp_path,
        module=FITS[kind],
        data=lambda: batches(8, N),
        capture={"scope": "modules", "modules": [name]},
        accumulate_grad_batches=window,
    )
    compare(eager, captured)
