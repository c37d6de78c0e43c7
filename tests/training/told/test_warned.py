"""A warning names a line of the user's, never one of the package or of Lightning."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_graphs.errors import CaptureError
from tests.training import fits
from tests.training.fits import Net, batches, loader_of, prepare


class Reads(Net):
    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        return loss * 2 if loss.tolist() > 0.5 else loss


class Warns(Net):
    """In each step, and in some."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        warnings.warn("of user code, in each step", stacklevel=1)
        if batch_idx % 4 == 3:
            warnings.warn("of user code, in some steps", stacklevel=1)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("scope", ["step", "modules"])
def test_a_line_of_user_code_warns_once_as_without_the_callback(
    backend: str, tmp_path: Path, scope: str
) -> None:
    """Python knows the lines that have warned, until code enters ``catch_warnings``."""
    fit = prepare(backend, tmp_path, True, module=Warns, capture={"scope": scope})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        fit.run()
    assert fit.statistics.captures > 0
    said = [str(w.message) for w in caught if str(w.message).startswith("of user code")]
    assert said == ["of user code, in each step", "of user code, in some steps"]


@pytest.mark.parametrize(
    ("trainer", "text"),
    [({}, "a step runs eagerly"), ({"detect_anomaly": True}, "is inactive: detect_anomaly=True")],
    ids=["a refusal", "an inactive callback"],
)
def test_a_warning_is_at_the_users_line(
    backend: str, tmp_path: Path, trainer: dict[str, Any], text: str
) -> None:
    capture = {"scope": "step", "on_failure": "eager"}
    fit = prepare(backend, tmp_path, True, module=Reads, capture=capture, **trainer)
    with pytest.warns(UserWarning, match=rf"GraphCapture.*{text}") as caught:
        fit.run()
    ours = [w for w in caught if str(w.message).startswith("GraphCapture")]
    assert {w.filename for w in ours} <= {fits.__file__, __file__}


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.parametrize("scope", ["step", "modules"])
@pytest.mark.parametrize("on_failure", ["eager", "raise"])
def test_an_evaluation_alone_says_why_it_has_no_graphs(
    backend: str, tmp_path: Path, scope: str, on_failure: str
) -> None:
    capture = {"scope": scope, "on_failure": on_failure}
    fit = prepare(backend, tmp_path, True, capture=capture)
    with torch.autograd.set_detect_anomaly(True):
        if (scope, on_failure) == ("step", "raise"):
            with pytest.raises(CaptureError, match=r"fit or evaluation: detect_anomaly"):
                fit.trainer.validate(fit.module, loader_of(batches(3)))
        else:
            with pytest.warns(UserWarning, match=r"is inactive: detect_anomaly=True") as caught:
                assert fit.trainer.validate(fit.module, loader_of(batches(3)))
            (ours,) = [w for w in caught if str(w.message).startswith("GraphCapture")]
            assert ours.filename == __file__
