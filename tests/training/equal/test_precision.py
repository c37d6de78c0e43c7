"""Precision plugins."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import optim

from tests.training.equal.test_optimizers import RATE, Own, adam, in_scope, lion
from tests.training.fits import (
    Fit,
    FullTrace,
    GradientTrace,
    Net,
    Trace,
    batches,
    compare,
    fit_twice,
    prepare,
)


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
    """Some batches make the scaled gradients infinite."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) * batch["factor"]


def overflowing(*at: int) -> list[dict[str, Any]]:
    """Every fifth batch, and those at these places."""
    data = batches(10)
    for i, batch in enumerate(data):
        batch["factor"] = torch.tensor(float("inf") if i % 5 == 3 or i in at else 1.0)
    return data


def by_group(kind: Any, **options: Any) -> Callable[[Any], Any]:
    """An optimizer that was not made fused, and whose eager steps run the fused kernel.

    Lightning refuses to clip what an optimizer that was made so unscales by itself.
    """

    def make(parameters: Any) -> Any:
        optimizer = kind(parameters, lr=RATE, **options)
        for group in optimizer.param_groups:
            group["fused"] = True
        return optimizer

    return make


def elsewhere(p: torch.Tensor, g: torch.Tensor, state: Any, group: Any) -> None:
    """Writes to gradients, and to a tensor that is in no state."""
    total = group.setdefault("total", torch.zeros_like(g.sum()))
    total.add_(g.add_(p, alpha=0.25).sum())
    p[:1].sub_(g[:1], alpha=group["lr"])
    p.sub_(g, alpha=group["lr"])


def noisy(p: torch.Tensor, g: torch.Tensor, state: Any, group: Any) -> None:
    p.sub_(g + torch.randn_like(g) / 8, alpha=group["lr"])


SCALED: dict[str, Callable[[Any], Any]] = {
    "AdamW": by_group(optim.AdamW),
    "SGD": by_group(optim.SGD, momentum=0.5),
    "AdamW at its defaults": lambda p: optim.AdamW(p, lr=RATE, eps=2**-8),
    "AdamW made fused": lambda p: optim.AdamW(p, lr=RATE, fused=True),
    "Adagrad": lambda p: optim.Adagrad(p, lr=RATE),
    "RMSprop": lambda p: optim.RMSprop(p, lr=RATE, eps=2**-8),
    "SGD, one by one": lambda p: optim.SGD(p, RATE, 0.5, foreach=False, fused=False),
    "Lion": lambda p: Own(p, lion, decay=0.25),
    "writes elsewhere": lambda p: Own(p, elsewhere),
    "draws": lambda p: Own(p, noisy),
    "counts": lambda p: Own(p, adam),
}


def fit_scaled(
    backend: str, root: Path, name: str, *, kind: type[Net] = Overflowing, **options: Any
) -> tuple[Fit, Fit]:
    """Both fits under a gradient scaler, compared, and their loss scales."""
    device = "cuda" if backend == "cuda" else "cpu"

    def run(captured: bool) -> Fit:
        scaler = torch.amp.GradScaler(device, init_scale=512.0, growth_interval=4)
        return prepare(
            backend,
            root,
            captured,
            module=lambda: kind(lambda module: SCALED[name](module.parameters())),
            plugins=[MixedPrecision("16-mixed", device, scaler)],
            **options,
        ).run()

    eager, captured = run(False), run(True)
    by_rounding = name in ("AdamW at its defaults", "RMSprop")
    compare(eager, captured, replayed=False, tolerance=1e-4 if by_rounding else 0.0)
    assert captured.statistics.replayed > 5
    scales = [one.trainer.precision_plugin.scaler.get_scale() for one in (eager, captured)]
    assert scales[0] == scales[1] < 512.0
    return eager, captured


@pytest.mark.parametrize("scope", ["step", "modules"])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("clip", [None, 2**-6])
@pytest.mark.parametrize("name", SCALED)
@pytest.mark.filterwarnings("ignore:GraphCapture. the optimizer step runs eagerly")
def test_loss_scaling_skips_steps_with_inf(
    backend: str, tmp_path: Path, name: str, clip: Any, accumulate: int, scope: str
) -> None:
    _, captured = fit_scaled(
        backend,
        tmp_path,
        name,
        data=overflowing,
        gradient_clip_val=None if name == "AdamW made fused" else clip,
        accumulate_grad_batches=accumulate,
        **in_scope(scope),
    )
    assert bool(captured.statistics.fallbacks) is (name == "draws")


def in_one_buffer(p: torch.Tensor, g: torch.Tensor, state: Any, group: Any) -> None:
    """Momentum whose state is a flat tensor, and views of it."""
    if not state:
        state["flat"] = torch.zeros(2 * p.numel(), device=p.device)
        state["first"], state["both"] = state["flat"][: p.numel()].view_as(p), state["flat"][1:]
    state["first"].mul_(0.5).add_(g)
    state["both"].add_(2**-6)
    p.sub_(state["first"] * state["flat"].sum().sign(), alpha=group["lr"])


def test_a_skipped_step_restores_shared_memory_once(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SCALED, "in one buffer", lambda p: Own(p, in_one_buffer))
    _, captured = fit_scaled(backend, tmp_path, "in one buffer", data=overflowing)
    assert not captured.statistics.fallbacks


class ByHand(Overflowing):
    """Two optimizers with one scaler; each is skipped where its own gradients overflow."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [self._optimizers(self.net[0]), self._optimizers(self.net[4])]


@pytest.mark.parametrize("scope", ["step", "modules"])
def test_a_rate_that_moves_under_scaling(backend: str, tmp_path: Path, scope: str) -> None:
    class Scheduled(Overflowing):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            moving = optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
            return [optimizer], [{"scheduler": moving, "interval": "step"}]

    options: dict[str, Any] = {"kind": Scheduled, "data": overflowing, **in_scope(scope)}
    _, captured = fit_scaled(backend, tmp_path, "Lion", max_epochs=3, **options)
    assert captured.statistics.fallbacks == []


@pytest.mark.parametrize("name", ["AdamW", "SGD", "AdamW made fused", "Lion"])
def test_loss_scaling_under_manual_optimization(backend: str, tmp_path: Path, name: str) -> None:
    _, captured = fit_scaled(backend, tmp_path, name, kind=ByHand, data=overflowing)
    assert captured.statistics.fallbacks == []


@pytest.mark.parametrize("trace", [GradientTrace, FullTrace])
@pytest.mark.parametrize("clip", [None, 2**-6])
@pytest.mark.parametrize("name", ["AdamW", "SGD", "AdamW made fused", "Lion"])
def test_hooks_see_scaled_gradients_and_then_unscaled_ones(
    backend: str, tmp_path: Path, name: str, clip: Any, trace: type[Trace]
) -> None:
    """``on_after_backward`` runs before the gradients are unscaled, the others after it."""
    _, captured = fit_scaled(
        backend,
        tmp_path,
        name,
        data=overflowing,
        gradient_clip_val=None if name == "AdamW made fused" else clip,
        trace=trace,
    )
    assert captured.statistics.fallbacks == []


@pytest.mark.parametrize("scope", ["step", "modules"])
@pytest.mark.parametrize("name", ["AdamW", "SGD", "Lion"])
def test_the_first_steps_overflow(backend: str, tmp_path: Path, name: str, scope: str) -> None:
    """A scaler begins high. Until a step is taken the optimizer has no state to capture."""
    _, captured = fit_scaled(
        backend, tmp_path, name, data=lambda: overflowing(*range(6)), **in_scope(scope)
    )
    assert captured.statistics.fallbacks == []


@pytest.mark.filterwarnings("ignore:GraphCapture. the optimizer step runs eagerly. hooks look")
@pytest.mark.parametrize("scope", ["step", "modules"])
@pytest.mark.parametrize("hook", ["on_after_backward", "on_before_optimizer_step"])
@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_hooks_under_scaling_change_and_remove_gradients_and_move_numbers(
    backend: str, tmp_path: Path, name: str, hook: str, scope: str
) -> None:
    class Meddling(Overflowing):
        def meddle(self, *_: Any) -> None:
            step = self.trainer.global_step
            self.net[0].weight.grad.mul_(0.5)
            if step % 4 == 2:
                self.net[4].weight.grad = self.net[4].weight.grad * 2
            if step and step % 4 == 0:
                self.net[4].bias.grad = None
            if step in (6, 9):
                self.trainer.optimizers[0].param_groups[0]["weight_decay"] = step / 16

    setattr(Meddling, hook, Meddling.meddle)
    options: dict[str, Any] = {"kind": Meddling, "data": overflowing, **in_scope(scope)}
    _, captured = fit_scaled(backend, tmp_path, name, **options)
    assert not any("is kept" in reason for reason in captured.statistics.recaptures)


@pytest.mark.parametrize("hook", ["on_after_backward", "on_before_optimizer_step"])
@pytest.mark.parametrize("name", ["AdamW", "SGD", "AdamW made fused"])
def test_kept_gradients_under_scaling(backend: str, tmp_path: Path, name: str, hook: str) -> None:
    """Copies of the graph's gradients are unscaled as they are."""

    class Keeping(Overflowing):
        def keep(self, *_: Any) -> None:
            self.kept = self.net[4].weight.grad

    setattr(Keeping, hook, Keeping.keep)
    _, captured = fit_scaled(
        backend, tmp_path, name, kind=Keeping, data=overflowing, trace=FullTrace
    )
    assert any("is kept" in reason for reason in captured.statistics.recaptures)


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
