"""A warning names a line of the user's, never one of the package or of Lightning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tests.training import fits
from tests.training.fits import Net, prepare


class Reads(Net):
    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        return loss * 2 if loss.tolist() > 0.5 else loss


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
