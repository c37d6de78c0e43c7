"""What a step computes on the host, where an operator refuses it or a capture costs too much."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_graphs.policy.worth import CapturePolicy
from lightning_graphs.watch.foreseen import ForeseenReads
from tests.programs.test_host import AMask, SpokenAndChosen
from tests.training.fits import batches, compare, fit_twice

pytestmark = pytest.mark.filterwarnings("ignore:GraphCapture")


@pytest.fixture
def refused_lengths(backend: str) -> Iterator[None]:
    """On a CPU as on a GPU: the operator takes no lengths of the host."""

    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("Expected all tensors to be on the same device")

    if backend == "cuda":
        yield
        return
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # there is another kernel
        library.impl("_ctc_loss.Tensor", refuse, "CPU")
    yield
    library._destroy()


@pytest.mark.usefixtures("refused_lengths")
@pytest.mark.parametrize("capture", [{"scope": "modules"}, {"diagnose": True}])
def test_lengths_in_steps_that_are_watched(
    backend: str, tmp_path: Path, capture: dict[str, Any]
) -> None:
    options: dict[str, Any] = {"capture": {"on_failure": "eager", **capture}, "validation": 0}
    eager, watched = fit_twice(backend, tmp_path, module=SpokenAndChosen, **options)
    compare(eager, watched, replayed=False)
    assert (watched.statistics.replayed > 10) == ("scope" in capture)


def test_a_capture_that_costs_too_much_by_then_is_left_for_later(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the warm-up has not shown what the step reads."""
    asked: list[bool] = []

    def goes_on(policy: CapturePolicy) -> bool:
        asked.append(False)
        return False

    monkeypatch.setattr(CapturePolicy, "goes_on", goes_on)
    monkeypatch.setattr(ForeseenReads, "counts", lambda *_: False)
    eager, captured = fit_twice(backend, tmp_path, module=AMask, data=lambda: batches(12))
    compare(eager, captured)
    assert asked == [False]  # the next capture records the host program at once
    assert captured.statistics.captures == 1
    assert captured.statistics.fallbacks == []
