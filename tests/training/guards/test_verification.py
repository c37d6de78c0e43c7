"""Agreement: a replay that computes something else than the eager step is found and named."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchmetrics
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter
from torch.optim import lr_scheduler

from lightning_graphs import GraphCapture, VerificationError
from lightning_graphs.device.graph import CUDAGraph
from lightning_graphs.policy.options import OptionError
from lightning_graphs.regions.gradients import GradientBuffers
from lightning_graphs.regions.verify import Verification
from tests.training.fits import (
    Fit,
    FullTrace,
    GradientTrace,
    Hidden,
    Net,
    Trace,
    adamw,
    assert_nothing_left,
    batches,
    compare,
    fit_twice,
    prepare,
)

VERIFYING_ALL = {"verify": 1}


# ---------------------------------------------------------------------- right steps


class Everything(Net):
    """A metric, a frozen parameter, and one that the optimizer lacks."""

    def __init__(self) -> None:
        super().__init__(lambda module: adamw(module.net))  # type: ignore[arg-type, attr-defined]
        self.net[4].bias.requires_grad_(False)
        self.extra = torch.nn.Parameter(torch.ones(8))
        self.mean = torchmetrics.MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss({**batch, "x": batch["x"] * self.extra})
        self.mean.update(loss)
        self.log("mean", self.mean, on_epoch=True)
        self.log("loss", loss, prog_bar=True)
        return {"loss": loss, "twice": loss * 2, "n": 3}


@pytest.mark.parametrize("trace", [Trace, GradientTrace, FullTrace])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_verifying_every_step_changes_nothing(
    backend: str, tmp_path: Path, trace: type[Trace], accumulate: int
) -> None:
    options: dict[str, Any] = {"accumulate_grad_batches": accumulate, "gradient_clip_val": 0.25}
    options |= {"module": Everything, "data": lambda: batches(20), "max_epochs": 1}
    compare(*fit_twice(backend, tmp_path, trace=trace, capture=VERIFYING_ALL, **options))


class Overflowing(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) * batch["factor"]


@pytest.mark.parametrize("trace", [Trace, GradientTrace])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_gradient_scaler_skips_as_ever(
    backend: str, device: torch.device, tmp_path: Path, trace: type[Trace], accumulate: int
) -> None:
    data = batches(10)
    for i, batch in enumerate(data):
        batch["factor"] = torch.tensor(float("inf") if i % 5 == 3 else 1.0)
    fits = []
    for captured in (False, True):
        scaler = torch.amp.GradScaler(device.type, init_scale=2.0**10, growth_interval=5)
        fits.append(
            prepare(
                backend,
                tmp_path,
                captured,
                module=Overflowing,
                data=lambda: data,
                trace=trace,
                capture=VERIFYING_ALL,
                accumulate_grad_batches=accumulate,
                plugins=[MixedPrecision("16-mixed", device.type, scaler)],
            ).run()
        )
    compare(*fits)
    scalers = [one.trainer.precision_plugin.scaler.state_dict() for one in fits]
    assert scalers[0] == scalers[1]
    assert scalers[0]["scale"] < 2.0**10


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """``global_step`` of each check."""
    steps: list[int] = []
    original = Verification.check

    def counted(self: Verification, plan: Any, args: Any) -> None:
        steps.append(self.module.trainer.global_step)
        original(self, plan, args)

    monkeypatch.setattr(Verification, "check", counted)
    return steps


@pytest.mark.parametrize(
    ("verify", "expected"),
    [(False, []), (True, [5]), (1, list(range(5, 20))), (4, [5, 8, 12, 16])],
)
def test_which_steps_are_verified(
    backend: str, tmp_path: Path, checks: list[int], verify: Any, expected: list[int]
) -> None:
    compare(*fit_twice(backend, tmp_path, capture={"verify": verify}))
    assert checks == expected


def test_every_micro_batch_of_a_window_is_verified(
    backend: str, tmp_path: Path, checks: list[int]
) -> None:
    options: dict[str, Any] = {"capture": {"verify": 2}, "max_epochs": 3}
    options["validation"] = 0  # whose steps are verified, too
    compare(*fit_twice(backend, tmp_path, accumulate_grad_batches=2, **options))
    assert checks[-2:] == [14, 14]
    assert checks.count(12) == 2
    assert checks.count(13) == 0


def _scheduled(module: LightningModule) -> Any:
    optimizer = adamw(module)
    rates = lr_scheduler.LambdaLR(optimizer, lambda step: 0.5 ** (step // 2))
    return [optimizer], [{"scheduler": rates, "interval": "step"}]


@pytest.mark.parametrize("scope", ["step", "modules"])
def test_a_rate_that_moves_is_no_difference(
    backend: str, tmp_path: Path, checks: list[int], scope: str
) -> None:
    options = {"module": partial(Net, _scheduled), "capture": {"verify": 3, "scope": scope}}
    compare(*fit_twice(backend, tmp_path, **options))
    assert checks[1:] or scope == "modules"  # which compare other regions


class Indexed(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": self.loss(batch), "index": batch_idx}

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": self.loss(batch), "index": batch_idx}


class Unread(Trace):
    def on_train_batch_end(self, *_: Any) -> None:
        """Nothing looks at what a step returns."""


def test_numbers_that_nothing_reads_are_no_difference(backend: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"module": Indexed, "trace": Unread, "data": lambda: batches(40)}
    eager, captured = fit_twice(
        backend, tmp_path, validation=24, capture={"verify": 2}, log_every_n_steps=9, **options
    )
    compare(eager, captured)
    assert captured.statistics.evaluation["validation_step"].fallbacks == []


def test_without_verification_the_first_one_is_the_default() -> None:
    assert GraphCapture().options.verify is True


@pytest.mark.parametrize("value", [0, -1, 2.0, "always", None])
def test_impossible_values(value: Any) -> None:
    with pytest.raises(OptionError, match="verify must be"):
        GraphCapture(verify=value)


# ---------------------------------------------------------------------- wrong steps

HIDDEN = Hidden()


class ReadsGlobal(Net):
    """What it reads is no attribute, so no capture knows of it; a hook moves it once."""

    def __init__(self) -> None:
        super().__init__()
        HIDDEN.clear()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) * HIDDEN["weight"]

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.global_step == 12:
            HIDDEN["weight"] = 2.0


def test_a_hidden_value_that_moves_is_found_by_the_next_check(backend: str, tmp_path: Path) -> None:
    captured = prepare(backend, tmp_path, True, module=ReadsGlobal, capture={"verify": 3})
    with pytest.raises(VerificationError, match=r"at step 12, the loss differs by up to") as caught:
        captured.run()
    assert "two eager runs differ by up to 0" in caught.value.observed
    assert_nothing_left(captured)


@pytest.mark.parametrize("trace", [Trace, FullTrace])
def test_with_every_step_verified_no_wrong_one_is_taken(
    backend: str, tmp_path: Path, trace: type[Trace]
) -> None:
    options: dict[str, Any] = {"module": ReadsGlobal, "trace": trace}
    options["capture"] = {"verify": 1, "on_failure": "eager"}
    eager = prepare(backend, tmp_path, False, **options).run()
    captured = prepare(backend, tmp_path, True, **options)
    with pytest.warns(UserWarning, match="the loss differs") as caught:
        captured.run()
    assert sum("differs" in str(w.message) for w in caught) == 1
    compare(eager, captured, replayed=False)
    assert captured.statistics.replayed == 7
    assert len(captured.statistics.fallbacks) == 1


def test_a_hidden_counter_is_found_at_once(backend: str, tmp_path: Path) -> None:
    class Counting(Net):
        """Each run of its Python computes something else: no two eager runs agree."""

        def __init__(self) -> None:
            super().__init__()
            self.counted = Hidden()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.counted["runs"] += 1
            return self.loss(batch) * self.counted["runs"]

    captured = prepare(backend, tmp_path, True, module=Counting)
    with pytest.raises(VerificationError, match="at step 5, the loss differs"):
        captured.run()


def test_a_write_past_the_dispatcher_is_found(tmp_path: Path) -> None:
    class Writing(Net):
        """numpy writes into the memory of a tensor, and no capture sees it; on a CPU only."""

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            memory = np.frombuffer((ctypes.c_float * 1).from_address(loss.data_ptr()), "float32")
            memory += 1
            return loss

    captured = prepare("emulated", tmp_path, True, module=Writing)
    with pytest.raises(VerificationError, match=r"at step 5, the loss differs by up to 1;"):
        captured.run()


def test_an_output_that_stands_still_is_found(backend: str, tmp_path: Path) -> None:
    class Returning(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return {"loss": self.loss(batch), "weight": HIDDEN["returned"]}

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            HIDDEN["returned"] = float(self.trainer.global_step >= 12)

    captured = prepare(backend, tmp_path, True, module=Returning, capture=VERIFYING_ALL)
    with pytest.raises(VerificationError, match=r"only the eager step has output.* = 1\.0"):
        captured.run()


def test_python_state_that_a_later_step_leaves_behind_is_found(
    backend: str, tmp_path: Path
) -> None:
    class Later(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if HIDDEN["step"] == 12:
                self.seen = 12
            return self.loss(batch)

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            HIDDEN["step"] = self.trainer.global_step

    captured = prepare(backend, tmp_path, True, module=Later, capture=VERIFYING_ALL)
    with pytest.raises(RuntimeError, match=r"training_step changes self\.seen"):
        captured.run()


ADDING: dict[Parameter, Tensor] = {}  # where graphs write that add to gradients


def written(parameter: Parameter) -> Tensor:
    gradient = ADDING.get(parameter, parameter.grad)
    assert gradient is not None
    return gradient


Spoils = Callable[[Fit], Tensor]
SPOILED: dict[str, tuple[Spoils, str]] = {
    "buffer": (lambda fit: fit.module.net[1].running_mean, r"buffer `net\.1\.running_mean`"),
    "parameter": (lambda fit: fit.module.net[4].weight, r"parameter `net\.4\.weight`"),
    "gradient": (
        lambda fit: written(fit.module.net[4].weight),
        r"the gradient of `net\.4\.weight`",
    ),
    "optimizer": (
        lambda fit: fit.trainer.optimizers[0].state[fit.module.net[4].weight]["exp_avg_sq"],
        r"the optimizer's `exp_avg_sq` of `net\.4\.weight`",
    ),
}


@pytest.mark.parametrize("what", SPOILED)
def test_the_first_tensor_that_differs_is_named(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """A graph that writes what the eager step does not; gradients are spoiled a replay late."""
    spoil, name = SPOILED[what]
    captured = prepare(backend, tmp_path, True, accumulate_grad_batches=2, max_epochs=4)
    original, adopt = CUDAGraph.replay, GradientBuffers.load
    ADDING.clear()

    def spoiling(self: CUDAGraph) -> None:
        original(self)
        with torch.no_grad():
            spoil(captured).view(-1)[3] += 0.5

    def adopting(self: GradientBuffers) -> None:
        ADDING.update(self.pairs())
        adopt(self)

    monkeypatch.setattr(CUDAGraph, "replay", spoiling)
    monkeypatch.setattr(GradientBuffers, "load", adopting)
    with pytest.raises(VerificationError, match=rf"{name} differs by up to 0\.5; two eager runs"):
        captured.run()
    ADDING.clear()


def test_a_check_takes_no_memory_for_gradients(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Old ones are gone, although a snapshot has them, and new ones are where the graph has its."""
    own, old, found = Verification._eager, [], []

    class Watch(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            old[:] = [StorageWeakRef(p.grad.untyped_storage()) for p in module.parameters()]

    def eager(self: Verification, plan: Any, *args: Any) -> Any:
        kept = sum(not reference.expired() for reference in old)
        results = own(self, plan, *args)
        pairs = zip(plan.gradients.parameters, plan.gradients.buffers, strict=True)
        found.append((kept, all(p.grad is buffer for p, buffer in pairs)))
        return results

    monkeypatch.setattr(Verification, "_eager", eager)
    options: dict[str, Any] = {"callbacks": lambda: [Watch()]}
    compare(
        prepare(backend, tmp_path, False, **options).run(),
        prepare(backend, tmp_path, True, **options).run(),
    )
    assert found == [(0, True)]


def test_a_step_left_out_is_found(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CUDAGraph, "replay", lambda self: None)
    captured = prepare(backend, tmp_path, True, module=NoBuffers)
    with pytest.raises(VerificationError, match="the loss differs by up to"):
        captured.run()


class NoBuffers(Net):
    def __init__(self) -> None:
        super().__init__()
        self.net[1] = torch.nn.Identity()
