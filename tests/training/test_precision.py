"""Precision plugins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import optim

from tests.training.fits import (
    FullTrace,
    GradientTrace,
    Net,
    Trace,
    compare,
    fit_twice,
    prepare,
)
from tests.training.test_optimizers import RATE, made


class Floats(Net):
    """Inputs in the precision of the parameters."""

    def loss(self, batch: Any) -> Any:
        return super().loss({**batch, "x": batch["x"].to(self.net[0].weight.dtype)})


@pytest.mark.parametrize("trace", [Trace, GradientTrace, FullTrace])
@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "bf16-mixed"])
def test_precision(backend: str, tmp_path: Path, precision: str, trace: type[Trace]) -> None:
    compare(*fit_twice(backend, tmp_path, precision=precision, module=Floats, trace=trace))


@pytest.mark.parametrize("accumulate", [2, 3])
def test_mixed_precision_accumulating(backend: str, tmp_path: Path, accumulate: int) -> None:
    compare(
        *fit_twice(backend, tmp_path, precision="bf16-mixed", accumulate_grad_batches=accumulate)
    )


def test_autocast_inside_of_training_step(backend: str, tmp_path: Path) -> None:
    class Casting(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            with torch.autocast(batch["x"].device.type, torch.bfloat16, cache_enabled=False):
                logits = self.net(batch["x"])
            return torch.nn.functional.cross_entropy(logits.float(), batch["y"])

    compare(*fit_twice(backend, tmp_path, module=Casting))


class Overflowing(Net):
    """One batch in five makes the scaled gradients infinite."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) * batch["factor"]


def overflowing() -> list[dict[str, Any]]:
    from tests.training.fits import batches

    data = batches(10)
    for i, batch in enumerate(data):
        batch["factor"] = torch.tensor(float("inf") if i % 5 == 3 else 1.0)
    return data


if torch.cuda.is_available():

    @pytest.mark.gpu
    @pytest.mark.filterwarnings("ignore:GraphCapture. the optimizer step runs eagerly")
    @pytest.mark.parametrize(
        ("name", "clip"),
        # Lightning refuses to clip what a fused optimizer unscales by itself.
        [("fused", None), ("default", None), ("default", 0.25), ("eager", None), ("eager", 0.25)],
    )
    def test_loss_scaling_skips_steps_with_inf(tmp_path: Path, name: str, clip: Any) -> None:
        optimizers: dict[str, Any] = {
            "fused": lambda p: optim.AdamW(p, lr=RATE, fused=True),
            "default": lambda p: optim.AdamW(p, lr=RATE),
            "eager": lambda p: optim.Adagrad(p, lr=RATE),
        }
        options: dict[str, Any] = {"capture": {"on_failure": "eager"}, "gradient_clip_val": clip}

        def module() -> Net:
            made_one = made(optimizers[name])()
            return Overflowing(made_one._optimizers)

        eager, captured = fit_twice(
            "cuda", tmp_path, module=module, data=overflowing, precision="16-mixed", **options
        )
        # Of the default AdamW, the captured step is the fused one: the same up to rounding.
        compare(eager, captured, replayed=False, tolerance=1e-4 if name == "default" else 0.0)
        assert captured.statistics.replayed > 10
        assert bool(captured.statistics.fallbacks) is (name == "eager")
        plugins = [one.trainer.precision_plugin for one in (eager, captured)]
        scales = [float(plugin.scaler.get_scale()) for plugin in plugins]
        assert scales[0] == scales[1] < 2.0**16


class SeesTheLoss(Trace):
    """Notes the loss of which the gradients are taken: the scaled one."""

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: torch.Tensor) -> None:
        self.events.append(("on_before_backward", trainer.global_step, 0, loss.item()))


def test_hooks_before_backward_see_the_scaled_loss(backend: str, tmp_path: Path) -> None:
    device = "cuda" if backend == "cuda" else "cpu"

    def plugins() -> list[Any]:
        return [MixedPrecision("16-mixed", device, torch.amp.GradScaler(device, init_scale=512.0))]

    options: dict[str, Any] = {"trace": SeesTheLoss}
    eager = prepare(backend, tmp_path, False, plugins=plugins(), **options).run()
    captured = prepare(backend, tmp_path, True, plugins=plugins(), **options).run()
    compare(eager, captured)
    losses = [event[3] for event in eager.trace.events if event[0] == "on_before_backward"]
    assert max(losses) > 100  # scaled, and no other
