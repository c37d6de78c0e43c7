"""Hooks, counters and outputs: in the same order and with the same values as without capture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.training.fits import FullTrace, GradientTrace, Net, Trace, batches, compare, fit_twice


@pytest.mark.parametrize("trace", [Trace, GradientTrace, FullTrace])
@pytest.mark.parametrize("accumulate", [1, 2, 3])
def test_hooks_come_in_the_same_order_with_the_same_values(
    backend: str, tmp_path: Path, trace: type[Trace], accumulate: int
) -> None:
    compare(*fit_twice(backend, tmp_path, trace=trace, accumulate_grad_batches=accumulate))


def test_global_step_counts_updates(backend: str, tmp_path: Path) -> None:
    eager, captured = fit_twice(backend, tmp_path, accumulate_grad_batches=3, max_epochs=3)
    compare(eager, captured)
    assert captured.trainer.global_step == eager.trainer.global_step == 12


class Outputs(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        logits = self.net(batch["x"])
        return {"loss": loss, "twice": loss * 2, "logits": logits, "n": 3, "none": None}


def test_outputs_reach_on_train_batch_end(backend: str, tmp_path: Path) -> None:
    eager, captured = fit_twice(backend, tmp_path, module=Outputs)
    compare(eager, captured)
    outputs = [e[5] for e in captured.trace.events if e[0] == "on_train_batch_end"]
    assert len({str(out["loss"]) for out in outputs}) == 20
    assert outputs[-1]["n"] == 3


class KeepsOutputs(Trace):
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *rest: Any) -> None:
        self.kept = [*getattr(self, "kept", []), outputs]


def test_kept_outputs_are_not_overwritten_by_later_steps(backend: str, tmp_path: Path) -> None:
    eager, captured = fit_twice(backend, tmp_path, module=Outputs, trace=KeepsOutputs)
    losses = [[out["loss"].item() for out in one.trace.kept] for one in (eager, captured)]
    assert losses[0] == losses[1]
    assert len(set(losses[1])) == 20


def test_several_epochs_and_limited_batches(backend: str, tmp_path: Path) -> None:
    compare(
        *fit_twice(
            backend,
            tmp_path,
            max_epochs=4,
            limit_train_batches=5,
            limit_val_batches=1,
            num_sanity_val_steps=1,
        )
    )


def test_max_steps(backend: str, tmp_path: Path) -> None:
    eager, captured = fit_twice(backend, tmp_path, max_steps=13, max_epochs=-1)
    compare(eager, captured)
    assert captured.trainer.global_step == 13


def test_validation_inside_an_epoch(backend: str, tmp_path: Path) -> None:
    compare(*fit_twice(backend, tmp_path, val_check_interval=3, accumulate_grad_batches=2))


def test_last_batch_steps_early_when_accumulating(backend: str, tmp_path: Path) -> None:
    eager, captured = fit_twice(
        backend, tmp_path, data=lambda: batches(7), accumulate_grad_batches=3, max_epochs=5
    )
    compare(eager, captured)
    assert captured.trainer.global_step == 15
