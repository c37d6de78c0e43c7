"""Modules whose own hooks before the forward make what it computes with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch.nn.utils import prune

from tests.training.fits import Net, batches, compare, fit_twice


class PrunedTwice(Net):
    """Pruned in mid-fit, and again: the layer's weight is made by a hook before each forward."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.trainer.global_step in (9, 15):
            prune.l1_unstructured(self.net[0], "weight", 0.25)


@pytest.mark.filterwarnings("ignore:GraphCapture")
@pytest.mark.parametrize("scope", ["auto", "step", "modules"])
def test_a_layer_that_is_pruned_in_mid_fit(backend: str, tmp_path: Path, scope: str) -> None:
    eager, captured = fit_twice(
        backend,
        tmp_path,
        module=PrunedTwice,
        data=lambda: batches() * 4,
        capture={"scope": scope, "on_failure": "eager"},
        max_epochs=1,
    )
    compare(eager, captured, replayed=False)
    assert captured.statistics.replayed > 0
