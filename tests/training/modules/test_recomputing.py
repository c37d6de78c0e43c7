"""Submodules whose code puts gradients into ``.grad`` by itself run eagerly; whole steps do not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from tests.core.test_recomputing import REFUSED, SERVED
from tests.training.fits import Net, compare, fit_twice

SAYS = pytest.mark.filterwarnings("ignore:GraphCapture")
VALIDATES = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")


class Recomputing(Net):
    """A block between layers that any graph can hold."""

    def __init__(self, kind: str, *, reads: bool = False) -> None:
        super().__init__()
        block = (REFUSED | SERVED)[kind]()
        self.net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), block, nn.Linear(8, 3))
        self.reads = reads
        self.least = 1e9  # of a loss that is turned around

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        if self.reads and loss.tolist() > self.least:  # which no graph of a whole step can
            loss = -loss
        return loss


@SAYS
@VALIDATES
@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("scope", ["modules", "auto", "step"])
@pytest.mark.parametrize("kind", [*REFUSED, *SERVED])
def test_all_gradients_are_there(
    backend: str, tmp_path: Path, kind: str, scope: str, window: int
) -> None:
    eager, captured = fit_twice(
        backend,
        tmp_path,
        module=lambda: Recomputing(kind, reads=scope == "auto"),
        capture={"scope": scope, "on_failure": "eager"},
        accumulate_grad_batches=window,
    )
    compare(eager, captured, replayed=False)
    assert captured.statistics.replayed > 0
    told = [line for line in captured.statistics.fallbacks if "leave gradients to autograd" in line]
    if kind == "by hand":  # which is found before
        assert scope == "step" or any(
            ".grad of a parameter" in f for f in captured.statistics.fallbacks
        )
    else:
        assert bool(told) == (kind in REFUSED and scope != "step")
