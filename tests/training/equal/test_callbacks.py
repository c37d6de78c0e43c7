"""Lightning's own callbacks beside the capture."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch import callbacks as lightning_callbacks
from lightning.pytorch.callbacks import (
    EarlyStopping,
    LambdaCallback,
    LearningRateMonitor,
    ModelCheckpoint,
    StochasticWeightAveraging,
    Timer,
)
from lightning.pytorch.profilers import PassThroughProfiler

from tests.training.fits import (
    Fit,
    GradientTrace,
    Net,
    Trace,
    assert_nothing_left,
    close,
    compare,
    fit_twice,
    prepare,
)

MODULES = {"scope": "modules"}


def names(one: Fit, root: Path, kind: str) -> list[str]:
    """The checkpoints of one of two fits, relative to its own folder."""
    return sorted(str(p.relative_to(root / kind)) for p in (root / kind).rglob("*.ckpt"))


def test_early_stopping(backend: str, tmp_path: Path) -> None:
    eager, captured = fit_twice(
        backend, tmp_path, max_epochs=9,
        callbacks=lambda: [EarlyStopping("val", min_delta=10.0, patience=2)],
    )  # fmt: skip
    compare(eager, captured)
    assert captured.trainer.current_epoch == 3


@pytest.mark.parametrize("accumulate", [1, 2])
def test_model_checkpoint_writes_the_same_files(
    backend: str, tmp_path: Path, accumulate: int
) -> None:
    eager, captured = fit_twice(
        backend, tmp_path, max_epochs=3, enable_checkpointing=True,
        accumulate_grad_batches=accumulate,
        callbacks=lambda: [
            ModelCheckpoint(
                every_n_train_steps=3, save_top_k=-1, save_last=True, monitor="loss_step",
                filename="{epoch}-{step}-{loss_step:.6f}",
            ),
            ModelCheckpoint(monitor="val", save_top_k=2, filename="best-{epoch}-{val:.6f}"),
        ],
    )  # fmt: skip
    compare(eager, captured)
    found = names(captured, tmp_path, "captured")
    assert found == names(eager, tmp_path, "eager")
    assert len(found) > 6
    for name in found:
        mine, theirs = (
            torch.load(tmp_path / kind / name, weights_only=False) for kind in ("captured", "eager")
        )
        assert list(mine) == list(theirs)
        for part in ("state_dict", "optimizer_states", "lr_schedulers", "epoch", "global_step"):
            close(mine[part], theirs[part], 0.0, f"{name}:{part}")


@pytest.mark.skipif(
    not hasattr(lightning_callbacks, "EMAWeightAveraging"), reason="Lightning 2.6 brought it"
)
@pytest.mark.parametrize("trace", [Trace, GradientTrace])
def test_exponential_moving_average(backend: str, tmp_path: Path, trace: type[Trace]) -> None:
    eager, captured = fit_twice(
        backend, tmp_path, max_epochs=3, trace=trace, val_check_interval=4,
        callbacks=lambda: [lightning_callbacks.EMAWeightAveraging(decay=0.5)],
    )  # fmt: skip
    compare(eager, captured)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_stochastic_weight_averaging(backend: str, tmp_path: Path, accumulate: int) -> None:
    eager, captured = fit_twice(
        backend, tmp_path, max_epochs=6, accumulate_grad_batches=accumulate,
        module=with_scheduler,
        callbacks=lambda: [StochasticWeightAveraging(2**-6, swa_epoch_start=2)],
    )  # fmt: skip
    compare(eager, captured)


def with_scheduler() -> Net:
    def optimizers(module: Any) -> Any:
        optimizer = torch.optim.SGD(module.parameters(), lr=2**-5, momentum=0.5, fused=True)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    return Net(optimizers)


def test_learning_rate_monitor(backend: str, tmp_path: Path) -> None:
    eager, captured = fit_twice(
        backend, tmp_path, module=with_scheduler, max_epochs=3,
        callbacks=lambda: [LearningRateMonitor(log_momentum=True, log_weight_decay=True)],
    )  # fmt: skip
    compare(eager, captured)
    assert "lr-SGD" in captured.csv


def test_callback_made_of_functions_sees_gradients(backend: str, tmp_path: Path) -> None:
    seen: list[list[float]] = []

    def looking() -> Any:
        mine: list[float] = []
        seen.append(mine)
        return [
            LambdaCallback(
                on_before_optimizer_step=lambda trainer, module, optimizer: mine.append(
                    float(module.net[0].weight.grad.norm())
                )
            )
        ]

    compare(*fit_twice(backend, tmp_path, callbacks=looking))
    assert seen[0] == seen[1]
    assert len(set(seen[1])) == 20


def test_timer(backend: str, tmp_path: Path) -> None:
    compare(*fit_twice(backend, tmp_path, callbacks=lambda: [Timer({"hours": 1})]))


@pytest.mark.parametrize("profiler", ["simple", "advanced"])
def test_profiler(backend: str, tmp_path: Path, profiler: str) -> None:
    compare(*fit_twice(backend, tmp_path, profiler=profiler))


class CountingProfiler(PassThroughProfiler):
    """Counts the contexts of each name; otherwise as its base."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def start(self, action_name: str) -> None:
        self.counts[action_name] += 1


def test_a_profiler_of_ones_own_sees_the_hooks_of_every_step(backend: str, tmp_path: Path) -> None:
    seen = []
    for captured in (False, True):
        profiler = CountingProfiler()
        prepare(backend, tmp_path, captured, profiler=profiler, capture=MODULES).run()
        hooks = {k: n for k, n in profiler.counts.items() if ".on_" in k}
        seen.append({k: n for k, n in hooks.items() if "GraphCapture" not in k})
    assert seen[0] == seen[1]
    assert seen[0]["[Callback]Trace.on_before_zero_grad"] == 20


def test_contexts_of_the_pass_through_profiler(backend: str, tmp_path: Path) -> None:
    seen = []

    class Profiling(Callback):
        def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
            with trainer.profiler.profile(action_name="mine") as name:
                seen.append((name, "profile" in vars(trainer.profiler)))

            @trainer.profiler.profile("mine")
            def decorated() -> None:
                pass

            decorated()

    _, captured = fit_twice(backend, tmp_path, callbacks=lambda: [Profiling()])
    assert set(seen) == {("mine", False), ("mine", True)}  # without the callback, and with it
    assert_nothing_left(captured)


def test_a_patched_pass_through_profiler_sees_every_context(backend: str, tmp_path: Path) -> None:
    seen: list[list[str]] = [[], []]
    for captured in (False, True):
        profiler = PassThroughProfiler()
        vars(profiler)["start"] = seen[captured].append
        prepare(backend, tmp_path, captured, profiler=profiler, capture=MODULES).run()
    assert seen[0].count("[Callback]Trace.on_before_zero_grad") == 20
    assert seen[1].count("[Callback]Trace.on_before_zero_grad") == 20


@pytest.mark.parametrize("method", ["start", "profile"])
def test_a_patched_class_of_profilers_sees_every_context(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    seen: list[str] = []
    original = getattr(PassThroughProfiler, method)

    def noting(self: PassThroughProfiler, action_name: str) -> Any:
        seen.append(action_name)
        return original(self, action_name)

    monkeypatch.setattr(PassThroughProfiler, method, noting)
    prepare(backend, tmp_path, True, capture=MODULES).run()
    assert seen.count("[Callback]Trace.on_before_zero_grad") == 20
