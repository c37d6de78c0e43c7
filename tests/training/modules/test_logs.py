"""``self.log`` between graphed modules: what whole eager steps log, and at a lower price."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import LightningModule

from tests.training.equal.test_logs import FORMS, Many, Temperature, logging_net
from tests.training.fits import Net, batches, compare, fit_twice

CAPTURE: dict[str, Any] = {"scope": "modules", "modules": ["net"]}


@pytest.mark.parametrize("options", FORMS, ids=lambda options: "-".join(map(str, options)) or "-")
def test_log(backend: str, tmp_path: Path, options: dict[str, Any]) -> None:
    compare(*fit_twice(backend, tmp_path, module=logging_net(**options), capture=CAPTURE))


@pytest.mark.parametrize("module", [Many, Temperature])
def test_what_is_logged(backend: str, tmp_path: Path, module: type[Net]) -> None:
    options: dict[str, Any] = {"val_check_interval": 4, "max_epochs": 3, "capture": CAPTURE}
    compare(*fit_twice(backend, tmp_path, module=module, **options))


class Varying(Net):
    """Batch sizes and options that change, and a key that is logged twice in a step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("size", loss, on_epoch=True, batch_size=1 + batch_idx % 3)
        self.log("twice", loss, on_epoch=True)
        self.log("twice", loss * 2, on_epoch=True)
        if batch_idx % 2:
            self.log("sometimes", loss, on_step=True, on_epoch=True)
        return loss


def test_what_changes_from_step_to_step(backend: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"data": lambda: batches(11, last=3), "capture": CAPTURE}
    compare(*fit_twice(backend, tmp_path, module=Varying, max_epochs=3, **options))


def test_lightnings_own_function_is_called_once_an_epoch(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    original = LightningModule.log

    def log(self: LightningModule, name: str, *args: Any, **kwargs: Any) -> None:
        calls.append(name)
        original(self, name, *args, **kwargs)

    monkeypatch.setattr(LightningModule, "log", log)
    compare(*fit_twice(backend, tmp_path, module=logging_net(on_epoch=True), capture=CAPTURE))
    # 20 eager steps; then 3 of warm-up, and the first of the second epoch.
    assert calls.count("value") == 20 + 3 + 1
