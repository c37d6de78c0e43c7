"""Submodules that ``torch.jit.script`` has made: they keep parameters in C++, and are no dicts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.training.fits import Net, compare, fit_twice, named

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")


class Wrapped(nn.Module):
    """A scripted layer inside of a module of its author's."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)))

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.inner(x)
        return hidden


class Scripted(Net):
    """One scripted layer in a block, and one by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.layer = Wrapped(), torch.jit.script(nn.Linear(8, 8))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = self.layer(self.block(batch["x"]))
        return super().training_step({**batch, "x": x}, batch_idx)


@pytest.mark.parametrize(
    "capture", [{"scope": "step"}, {"scope": "auto"}, {"scope": "modules"}, named("block")]
)
def test_scripted_submodules(backend: str, tmp_path: Path, capture: dict[str, Any]) -> None:
    compare(*fit_twice(backend, tmp_path, module=Scripted, capture=capture))


@pytest.mark.filterwarnings("ignore:GraphCapture")
def test_a_scripted_submodule_that_is_named(backend: str, tmp_path: Path) -> None:
    capture = named("layer", "net")
    fits = fit_twice(backend, tmp_path, module=Scripted, capture=capture)
    compare(*fits, replayed=False)
    assert fits[1].statistics.modules == ["net"]
    assert "`layer` is not graphed: it is scripted" in fits[1].statistics.fallbacks[0]
