"""Modules whose own hooks before the forward make what it computes with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch.nn import utils
from torch.nn.utils import prune

from tests.training.fits import Net, batches, compare, examined, fit_twice


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


def masked(layer: Any) -> Any:
    return prune.l1_unstructured(layer, "weight", 0.25)


OLD = {
    "parametrizations.weight_norm": utils.weight_norm,
    "parametrizations.spectral_norm": utils.spectral_norm,
    "prune.remove": masked,
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("new", OLD)
def test_of_submodules_with_old_hooks_run_and_doctor_say_what_replaces_them(
    backend: str, tmp_path: Path, new: str
) -> None:
    def module() -> Net:
        net = Net()
        OLD[new](net.net[0])
        return net

    capture: dict[str, Any] = {"scope": "modules", "on_failure": "eager"}
    given: dict[str, Any] = {"module": module, "validation": 0}
    eager, captured = fit_twice(backend, tmp_path, capture=capture, **given)
    compare(eager, captured, replayed=False)
    (said,) = captured.statistics.fallbacks
    assert said == (
        "calls of `net.0` run eagerly: a hook of torch.nn.utils sets a weight again in each "
        f"call; use torch.nn.utils.{new}"
    )
    assert "net.0" not in captured.statistics.modules
    assert captured.statistics.replayed > 0
    fit = examined(backend, tmp_path, capture=capture, **given)
    (finding,) = fit.capture.report.diagnosis.findings
    assert (finding.effect, finding.remedy) == ("eager step", f"use torch.nn.utils.{new}")
    assert f"{finding.observed}; {finding.remedy}" == said
