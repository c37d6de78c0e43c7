"""Where memory allows no verification, training goes on and a line says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_graphs.device.graph import is_current_stream_capturing
from lightning_graphs.values.snapshot import RegionState
from tests.training.fits import FullTrace, Net, Trace, compare, prepare
from tests.training.guards.test_verification import HIDDEN, Everything


@pytest.fixture
def no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def take(*_: Any) -> None:
        raise torch.OutOfMemoryError("9 MiB are free")

    monkeypatch.setattr(RegionState, "take", take)


@pytest.mark.usefixtures("no_memory")
@pytest.mark.parametrize("trace", [Trace, FullTrace])
def test_without_memory_for_a_copy_it_says_so(
    backend: str, tmp_path: Path, trace: type[Trace]
) -> None:
    options: dict[str, Any] = {"module": Everything, "trace": trace, "max_epochs": 1}
    eager = prepare(backend, tmp_path, False, **options).run()
    captured = prepare(backend, tmp_path, True, **options)
    with pytest.warns(UserWarning, match="a captured step was not verified: 9 MiB") as caught:
        captured.run()
    assert sum("verified" in str(w.message) for w in caught) == 1
    compare(eager, captured)


def test_an_eager_run_without_memory(backend: str, tmp_path: Path) -> None:
    class Large(Net):
        """Its backward pass finds no memory beside the graph."""

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            capturing = is_current_stream_capturing()
            if HIDDEN["captured"] == 2.0 and not capturing and torch.is_grad_enabled():
                raise torch.OutOfMemoryError("Tried to allocate 2 GiB.")
            HIDDEN["captured"] = 2.0 if capturing else 1.0
            return loss

    HIDDEN.clear()
    eager = prepare(backend, tmp_path, False, module=Large).run()
    captured = prepare(backend, tmp_path, True, module=Large)
    with pytest.warns(UserWarning, match="a captured step was not verified: Tried to allocate 2"):
        captured.run()
    compare(eager, captured)
