"""Where memory allows no verification, training goes on and a line says so."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_graphs.device.emulated import WriteWatch
from lightning_graphs.device.graph import is_current_stream_capturing
from lightning_graphs.policy.worth import MemoryBudget
from lightning_graphs.regions.gradients import GradientBuffers
from lightning_graphs.values.snapshot import RegionState
from tests.programs.test_host import Returned
from tests.training.fits import FullTrace, Net, Trace, compare, fit_twice, prepare
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


def _bytes_of_tensors(_: MemoryBudget) -> int:
    storages = (t.untyped_storage() for t in gc.get_objects() if issubclass(type(t), Tensor))
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def test_of_a_compared_step_with_a_head_nothing_is_kept(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may lie in the memory of a graph, which would be captured once more without that."""
    if backend == "emulated":
        monkeypatch.setattr(MemoryBudget, "allocated", property(_bytes_of_tensors))
    eager, captured = fit_twice(backend, tmp_path, module=Returned, validation=0)
    compare(eager, captured)
    assert captured.capture.report.head_ms > 0
    assert captured.statistics.recaptures == []


def test_new_gradients_are_not_saved(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fused updates declare that they write them. What is saved would also be kept, and copied."""
    saved: list[int] = []
    own = WriteWatch.found

    def found(watch: WriteWatch) -> Any:
        saved.append(sum(storage.nbytes() for storage in own(watch)))
        return own(watch)

    monkeypatch.setattr(WriteWatch, "found", found)
    monkeypatch.setattr(GradientBuffers, "taking_over", lambda _: nullcontext())
    eager, captured = fit_twice(backend, tmp_path, validation=0)
    compare(eager, captured)
    (bytes_saved,) = saved
    assert bytes_saved <= 8  # the update's rate
    assert captured.statistics.recaptures == []
