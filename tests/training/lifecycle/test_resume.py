"""A checkpoint written with the callback resumes without it, and the other way round."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import optim

from tests.training.equal.test_optimizers import FUSED, RATE, made
from tests.training.fits import Fit, Net, Trace, close, counters, prepare

OPTIMIZERS: dict[str, Any] = {
    "AdamW": FUSED["AdamW"],
    "SGD with momentum": FUSED["SGD with momentum"],
    "AdamW without flags": lambda p: optim.AdamW(p, lr=RATE, eps=2**-8),
    "Adagrad": lambda p: optim.Adagrad(p, lr=RATE),
}


def scheduled(name: str) -> Any:
    def module() -> Net:
        def optimizers(net: Any) -> Any:
            optimizer = OPTIMIZERS[name](net.parameters())
            return [optimizer], [optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

        return Net(optimizers)

    return module


class Seeding(Trace):
    """Dropout depends on the step only, not on where the run began."""

    def on_train_batch_start(self, trainer: Any, *rest: Any) -> None:
        super().on_train_batch_start(trainer, *rest)
        torch.manual_seed(trainer.global_step)


def run(
    backend: str, root: Path, captured: bool, name: str, epochs: int, checkpoint: Path | None = None
) -> Fit:
    fit = prepare(
        backend, root, captured, module=scheduled(name), trace=Seeding, max_epochs=epochs,
        capture={"on_failure": "eager"},
    )  # fmt: skip
    return fit.run(ckpt_path=checkpoint, **({"weights_only": False} if checkpoint else {}))


@pytest.mark.filterwarnings("ignore:GraphCapture. the optimizer step runs eagerly:UserWarning")
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("then", [False, True], ids=["then without", "then with"])
@pytest.mark.parametrize("first", [False, True], ids=["without", "with"])
def test_resume_has_the_same_trajectory(
    backend: str, tmp_path: Path, first: bool, then: bool, name: str
) -> None:
    whole = run(backend, tmp_path / "whole", False, name, 4)
    half = run(backend, tmp_path / "half", first, name, 2)
    checkpoint = tmp_path / "half.ckpt"
    half.trainer.save_checkpoint(checkpoint)
    resumed = run(backend, tmp_path / "resumed", then, name, 4, checkpoint)
    tolerance = 1e-4 if name == "AdamW without flags" else 0.0
    close(resumed.module.state_dict(), whole.module.state_dict(), tolerance, "module")
    close(
        resumed.trainer.optimizers[0].state_dict(), whole.trainer.optimizers[0].state_dict(),
        tolerance, "optimizer",
    )  # fmt: skip
    assert counters(resumed.trainer) == counters(whole.trainer)
    if then:
        # Of two learning rates: constants of a graph where no fused kernel reads them
        assert resumed.statistics.replayed >= (10 if name == "Adagrad" else 11)


class Saving(Trace):
    """Saves in the middle of an epoch, while graphs are in use."""

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == 17:
            trainer.save_checkpoint(Path(trainer.default_root_dir) / "middle.ckpt")


@pytest.mark.filterwarnings("ignore:GraphCapture. the optimizer step runs eagerly:UserWarning")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_checkpoint_of_a_captured_fit_has_the_form_of_any_other(
    backend: str, tmp_path: Path, name: str
) -> None:
    saved = []
    for captured in (False, True):
        fit = prepare(
            backend, tmp_path, captured, module=made(OPTIMIZERS[name]), trace=Saving,
            capture={"on_failure": "eager"},
        ).run()  # fmt: skip
        path = Path(fit.trainer.default_root_dir) / "middle.ckpt"
        saved.append(torch.load(path, weights_only=False))
    eager, captured_one = (one["optimizer_states"][0] for one in saved)
    assert list(saved[0]) == list(saved[1])
    tolerance = 1e-4 if name == "AdamW without flags" else 0.0
    close(captured_one, eager, tolerance, "optimizer")
    for index, state in eager["state"].items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                mine = captured_one["state"][index][key]
                assert (mine.device, mine.dtype, mine.shape) == (
                    value.device, value.dtype, value.shape,
                )  # fmt: skip


def test_a_resumed_fit_on_a_cpu_needs_no_capturable_optimizer(backend: str, tmp_path: Path) -> None:
    half = run(backend, tmp_path / "half", True, "AdamW without flags", 2)
    checkpoint = tmp_path / "half.ckpt"
    half.trainer.save_checkpoint(checkpoint)
    resumed = prepare(
        "emulated", tmp_path / "cpu", False, module=scheduled("AdamW without flags"), max_epochs=3
    ).run(ckpt_path=checkpoint, weights_only=False)
    group = resumed.trainer.optimizers[0].param_groups[0]
    assert not group["capturable"]
    assert resumed.trainer.global_step == 30
