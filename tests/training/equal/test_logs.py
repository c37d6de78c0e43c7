"""``self.log`` in every form: the CSV file and all metrics are those of a fit without capture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.training.fits import Net, batches, compare, fit_twice, warned


def logging_net(**options: Any) -> Any:
    """A module that logs its loss with these options."""

    class Logging(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            self.log("value", loss, **options)
            return loss

    return Logging


FORMS = [
    {},
    {"on_step": True},
    {"on_epoch": True},
    {"on_step": False, "on_epoch": True},
    {"on_step": True, "on_epoch": True},
    {"prog_bar": True},
    {"prog_bar": True, "on_step": True, "on_epoch": True},
    {"prog_bar": True, "logger": False},
    {"on_step": True, "sync_dist": True},
    {"on_epoch": True, "sync_dist": True},
    {"on_epoch": True, "reduce_fx": "min"},
    {"on_epoch": True, "reduce_fx": "max"},
    {"on_epoch": True, "reduce_fx": "sum"},
    {"on_epoch": True, "reduce_fx": "mean"},
    {"on_step": True, "on_epoch": True, "reduce_fx": "max", "prog_bar": True},
    {"on_epoch": True, "batch_size": 4},
    {"on_step": False, "on_epoch": True, "batch_size": 1},
    {"on_epoch": True, "enable_graph": False},
    {"on_epoch": True, "add_dataloader_idx": False},
    {"on_epoch": True, "rank_zero_only": True},
]


@pytest.mark.parametrize("options", FORMS, ids=lambda options: "-".join(map(str, options)) or "-")
def test_log(backend: str, tmp_path: Path, options: dict[str, Any]) -> None:
    compare(*fit_twice(backend, tmp_path, module=logging_net(**options)))


@pytest.mark.parametrize("interval", [3, 50])
def test_log_every_n_steps(backend: str, tmp_path: Path, interval: int) -> None:
    compare(*fit_twice(backend, tmp_path, log_every_n_steps=interval, max_epochs=3))


def test_log_with_progress_bar_on(
    backend: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    eager, captured = fit_twice(
        backend, tmp_path, module=logging_net(prog_bar=True), enable_progress_bar=True
    )
    compare(eager, captured)
    assert "value" in "".join(capfd.readouterr())


def test_inferred_batch_size_weights_the_epoch_mean(backend: str, tmp_path: Path) -> None:
    compare(
        *fit_twice(
            backend,
            tmp_path,
            module=logging_net(on_step=False, on_epoch=True),
            data=lambda: batches(10, last=3),
            max_epochs=5,
        )
    )


class Many(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log_dict({"a": loss, "b": loss * 2, "c": 3.0}, on_epoch=True, on_step=True)
        self.log(name="keyword", value=loss.detach(), prog_bar=True)
        self.log("flag", True)
        self.log("integer", batch["y"].max().float(), on_epoch=True, reduce_fx="max")
        self.log("size", float(len(batch["x"])))
        return loss


def test_log_dict_keywords_numbers_and_integers(backend: str, tmp_path: Path) -> None:
    eager, captured = fit_twice(backend, tmp_path, module=Many, val_check_interval=4)
    compare(eager, captured)
    assert "c_epoch" in captured.csv


class Temperature(Net):
    """Logs a parameter: its value before the optimizer step, not after it."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(()))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch) * self.temperature
        self.log("temperature", self.temperature, on_step=True, on_epoch=True)
        self.log("variance", self.net[1].running_var[0])
        return loss


def test_a_logged_parameter_has_its_value_before_the_step(backend: str, tmp_path: Path) -> None:
    compare(*fit_twice(backend, tmp_path, module=Temperature))


class Counting(Net):
    """Logs a Python number that is another one in every step."""

    count = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        type(self).count += 1
        self.log("count", float(self.count))
        return loss


def fresh_counting() -> Net:
    Counting.count = 0
    return Counting()


def test_a_number_that_changes_is_refused_and_runs_eagerly(backend: str, tmp_path: Path) -> None:
    _, captured = warned(
        backend, tmp_path, r"'count', ...\) logged different numbers", module=fresh_counting
    )
    assert captured.statistics.replayed == 0
    assert "test_logs.py" in captured.statistics.fallbacks[0]


class FromHooks(Net):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("from_hook", outputs["loss"] + batch_idx)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("norm", self.net[0].weight.grad.norm(), on_step=True, on_epoch=True)

    def on_train_epoch_end(self) -> None:
        self.log("epoch", float(self.current_epoch))


def test_log_from_hooks(backend: str, tmp_path: Path) -> None:
    compare(*fit_twice(backend, tmp_path, module=FromHooks))
