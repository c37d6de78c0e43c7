"""``self.log`` by whatever way it is reached: all of them end in ``LightningModule.log``."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from tests.training.fits import Net, batches, compare, fit_twice, said_of_rates, warned

SCOPES: dict[str, dict[str, Any]] = {
    "step": {"scope": "step"},
    "modules": {"scope": "modules", "modules": ["net"]},
}


class Scaling(Net):
    """Overrides ``log`` as projects do that always weight by a batch size of their own."""

    size = 3

    def log(self, name: str, value: Any, **options: Any) -> None:  # type: ignore[override]
        super().log(name, value * 100, **{**options, "batch_size": self.size})

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.size = 1 + len(batch["x"])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log_dict({"twice": loss * 2, "number": 0.25}, on_epoch=True)
        return loss


class Renaming(Scaling):
    """Writes every key under another name, and some twice or not at all."""

    def log(self, name: str, value: Any, **options: Any) -> None:  # type: ignore[override]
        if name == "number":
            return
        super().log(f"train/{name}", value, **options)
        if name == "twice":
            super().log("again", value, prog_bar=True)


class PastItself(Scaling):
    """Calls ``super().log`` where its own would change the value."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        super(Scaling, self).log("plain", loss, on_step=True, on_epoch=True)
        super(Scaling, self).log("number", 0.5, on_step=True, on_epoch=True)
        self.log("scaled", loss, on_epoch=True)
        return loss


class Snapshot(Net):
    """Keeps the method from before the fit."""

    def __init__(self) -> None:
        super().__init__()
        self.report = self.log
        self.log_train = partial(self.log, on_epoch=True, on_step=True, prog_bar=True)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.report("kept", loss)
        self.report("mean", loss * 3, on_step=False, on_epoch=True, sync_dist=True)
        self.report("largest", loss, on_epoch=True, reduce_fx="max", logger=True)
        self.log_train("partial", loss * 2)
        self.log("loss", loss, on_epoch=True)
        return loss


class ByTheTrainer(Net):
    """Logs by the trainer's reference to the module."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.trainer.lightning_module.log("there", loss, on_step=True, on_epoch=True)
        return loss


class ChangedLater(Net):
    """Goes on in place with what it has logged."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        logged = loss.detach().clone()
        self.log("value", logged, on_step=True, on_epoch=True)
        logged.mul_(100)
        self.log("total", logged, on_step=True, on_epoch=True)
        logged += loss.detach()
        return loss + 0.0 * logged


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize(
    "module", [Scaling, Renaming, PastItself, Snapshot, ByTheTrainer, ChangedLater]
)
def test_log(backend: str, tmp_path: Path, module: Any, scope: str) -> None:
    options: dict[str, Any] = {"max_epochs": 3, "data": lambda: batches(6, last=3)}
    compare(*fit_twice(backend, tmp_path, module=module, capture=SCOPES[scope], **options))
    assert not hasattr(LightningModule.log, "__wrapped__")  # Lightning's own again


def test_a_kept_method_from_the_first_batch_of_an_epoch(backend: str, tmp_path: Path) -> None:
    """A capture there is where Lightning resets what the epoch before has logged."""
    options: dict[str, Any] = {"max_epochs": 4, "data": lambda: batches(3)}
    compare(*fit_twice(backend, tmp_path, module=Snapshot, **options))


class KeptNumber(Snapshot):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.report("number", 0.25)
        return self.loss(batch)


def test_a_number_by_a_kept_method_is_refused(backend: str, tmp_path: Path) -> None:
    warned(
        backend, tmp_path, r"test_log_below.py:\d+ in training_step: self.report", module=KeptNumber
    )


class Telling(nn.Module):
    """A layer that logs by what it was given."""

    def __init__(self, log: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.tell = log

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        self.tell("size", x.detach().square().mean(), on_step=True, on_epoch=True)
        return x


class Told(Net):
    """Its layer holds the kept method, or something that asks for it each time."""

    kept = False

    def __init__(self) -> None:
        super().__init__()
        log = self.log if self.kept else lambda *args, **options: self.log(*args, **options)
        self.net[2] = Telling(log)


class ToldByKept(Told):
    kept = True


@pytest.mark.parametrize("module", [Told, ToldByKept])
def test_a_layer_that_logs(backend: str, tmp_path: Path, module: Any) -> None:
    compare(*fit_twice(backend, tmp_path, module=module, max_epochs=3))


@pytest.mark.parametrize("module", [Told, ToldByKept])
def test_a_layer_that_logs_stays_eager_between_graphs(
    backend: str, tmp_path: Path, module: Any
) -> None:
    capture = {"scope": "modules", "on_failure": "eager"}
    _, captured = warned(
        backend,
        tmp_path,
        r"self.log is called at .*test_log_below.py:\d+ in",
        module=module,
        max_epochs=3,
        capture=capture,
    )
    assert captured.statistics.replayed > 0


class InBackward(Net):
    """Logs a gradient from a hook, which every replay would run too early or not at all."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hidden = self.net[0](batch["x"])
        hidden.register_hook(lambda gradient: self.log("norm", gradient.norm(), on_epoch=True))
        return nn.functional.cross_entropy(self.net[1:](hidden), batch["y"])


class WeightedByIndex(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, on_epoch=True, batch_size=batch_idx)
        return loss


@pytest.mark.parametrize(
    ("module", "said"), [(InBackward, "self.log is called"), (WeightedByIndex, "batch_idx is read")]
)
def test_what_a_replay_cannot_log_is_refused(
    backend: str, tmp_path: Path, module: Any, said: str
) -> None:
    warned(backend, tmp_path, rf"{said} at .*test_log_below.py", module=module)


def scheduled(step: Any) -> Any:
    """A net whose rate moves at every step, and whose step is this function."""

    class Scheduled(Net):
        training_step = step

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.0123, fused=True)
            moving = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
            return [optimizer], [{"scheduler": moving, "interval": "step"}]

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            group = self.trainer.optimizers[0].param_groups[0]
            group["weight_decay"] = 0.1 / (1 + batch_idx // 3)
            group["betas"] = (0.9, 0.99 + 0.001 * (batch_idx // 2))

    return Scheduled


def logs_rates(self: Any, batch: Any, batch_idx: int) -> Any:
    self.log("lr", self.trainer.optimizers[0].param_groups[0]["lr"], on_epoch=True, on_step=True)
    self.log("bar", self.optimizers().param_groups[0]["lr"], prog_bar=True)
    self.log("last", self.lr_schedulers().get_last_lr()[0])
    return self.loss(batch)


def logs_decay(self: Any, batch: Any, batch_idx: int) -> Any:
    group = self.trainer.optimizers[0].param_groups[0]
    self.log("wd", group["weight_decay"], on_epoch=True, on_step=True)
    self.log("beta", group["betas"][1], prog_bar=True)
    return self.loss(batch)


def logs_counters(self: Any, batch: Any, batch_idx: int) -> Any:
    self.log("index", batch_idx, on_step=True, on_epoch=True)
    self.log("steps", self.global_step)
    self.log("epoch_number", self.current_epoch, prog_bar=True)
    self.log("shown", self.trainer.global_step, prog_bar=True)
    return self.loss(batch)


@pytest.mark.filterwarnings("ignore:GraphCapture")
@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("warmup", [1, 3])
@pytest.mark.parametrize("step", [logs_rates, logs_decay, logs_counters])
def test_numbers_of_the_trainer(
    backend: str, tmp_path: Path, step: Any, warmup: int, scope: str
) -> None:
    capture = {**SCOPES[scope], "warmup_steps": warmup, "min_repeats": 1, "on_failure": "eager"}
    eager, captured = fit_twice(
        backend, tmp_path, module=scheduled(step), max_epochs=3, capture=capture, validation=0
    )
    compare(eager, captured, replayed=False)
    # Numbers that moved in the warm-up are refused: a capture would freeze them.
    assert captured.statistics.replayed > 10 or step is logs_decay


class Diverging(Net):
    """A rate that a hook sets beside its scheduler, as hand-made warm-ups do."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("lr", self.optimizers().param_groups[0]["lr"])
        self.log("last", self.lr_schedulers().get_last_lr()[0])
        return self.loss(batch)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.trainer.optimizers[0].param_groups[0]["lr"] = 0.001 * (1 + batch_idx)


def test_a_rate_beside_its_scheduler(backend: str, tmp_path: Path) -> None:
    compare(*fit_twice(backend, tmp_path, module=Diverging, max_epochs=3))


def reads_decay(self: Any, batch: Any, batch_idx: int) -> Any:
    decay = self.trainer.optimizers[0].param_groups[0]["weight_decay"]
    return self.loss(batch) + len(str(decay)) * self.net[0].weight.square().sum()


def adds_to_index(self: Any, batch: Any, batch_idx: int) -> Any:
    self.log("index", len(str(batch_idx)))
    return self.loss(batch)


@pytest.mark.filterwarnings("ignore:GraphCapture. the optimizer step runs eagerly. a scheduler")
@pytest.mark.parametrize("step", [reads_decay, adds_to_index])
def test_numbers_that_are_used_are_refused(backend: str, tmp_path: Path, step: Any) -> None:
    warned(
        backend,
        tmp_path,
        r"is read at .*test_log_below.py",
        module=scheduled(step),
        max_epochs=3,
        validation=0,
        capture={"warmup_steps": 1, "min_repeats": 1},
    )


class Unfused(Net):
    """An optimizer that stays eager: its numbers are nobody's condition."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, foreach=False, fused=False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        group = self.trainer.optimizers[0].param_groups[0]
        self.log("wd", group["weight_decay"], on_epoch=True)
        self.log("lr", group["lr"])
        return self.loss(batch)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        group = self.trainer.optimizers[0].param_groups[0]
        group["weight_decay"], group["lr"] = 0.1 / (1 + batch_idx), 0.1 / (1 + batch_idx // 2)


@pytest.mark.filterwarnings("ignore:.*the optimizer step runs eagerly")
def test_numbers_of_an_eager_optimizer(backend: str, tmp_path: Path) -> None:
    eager, captured = fit_twice(backend, tmp_path, module=Unfused, max_epochs=3)
    compare(eager, captured, replayed=False)
    assert captured.statistics.replayed > 20


class Precise(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("third", 1 / 3, on_step=True, on_epoch=True)
        self.log("label", batch["y"].max(), on_step=True, on_epoch=True, reduce_fx="max")
        self.log("rate", self.trainer.optimizers[0].param_groups[0]["lr"])
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss


@pytest.mark.filterwarnings("ignore:.*but the value needs to be floating")
@pytest.mark.filterwarnings("ignore:.*optimizer step runs eagerly. parameters are float64")
@pytest.mark.parametrize("precision", ["64-true", "bf16-true"])
def test_default_dtype_of_numbers(backend: str, tmp_path: Path, precision: str) -> None:
    options: dict[str, Any] = {"max_epochs": 3, "precision": precision}
    eager, captured = fit_twice(backend, tmp_path, module=Precise, **options)
    compare(eager, captured, said=said_of_rates(captured))
