"""``self.log`` in every form: the CSV file and all metrics are those of a fit without capture."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from tests.programs.table import Promises, row, stepping, table
from tests.training.fits import Net, batches, compare, fit_twice


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


class OneName(Net):
    """Logs one name in its steps and hooks; each has a key of its own."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("value", loss)
        return loss

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.log("value", batch["x"].mean())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("value", self.loss(batch) * 2)


class Many(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log_dict({"a": loss, "b": loss * 2, "c": 3.0}, on_epoch=True, on_step=True)
        self.log(name="keyword", value=loss.detach(), prog_bar=True)
        self.log("flag", True)
        self.log("integer", batch["y"].max().float(), on_epoch=True, reduce_fx="max")
        self.log("size", float(len(batch["x"])))
        return loss


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


class Counting(Net):
    """Logs a Python number that is another one in every step."""

    count = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        type(self).count += 1
        self.log("count", float(self.count))
        return loss


class SetByHook(Net):
    """Logs and uses weights that hooks set ahead of each step, as those of a KL divergence."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.share = self.global_step / 32

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch) * (1 + self.share)
        self.log("share", self.share, on_step=True, on_epoch=True)
        self.log("percent", self.share * 100)
        return loss


class ComputedOfHook(Net):
    """Logs what it computes of a count that a hook advances, as EDM its thousands of images."""

    images = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("thousands", self.images / 1e3)
        return self.loss(batch)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.images += len(batch["x"])


class AsAnother(Net):
    """Logs a number that a hook moves, and that comes by the ``p`` of a dropout layer."""

    def __init__(self) -> None:
        super().__init__()
        self.annealed = {"beta": 0.0}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("beta", self.annealed["beta"])
        return self.loss(batch) * self.annealed["beta"]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.annealed["beta"] = min(1.0, self.annealed["beta"] + 0.05)


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


class FromHooks(Net):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("from_hook", outputs["loss"] + batch_idx)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("norm", self.net[0].weight.grad.norm(), on_step=True, on_epoch=True)

    def on_train_epoch_end(self) -> None:
        self.log("epoch", float(self.current_epoch))


# ---------------------------------------------------------------------- by other ways


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


class Kept(Net):
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


class KeptNumber(Kept):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.report("number", 0.25)
        return self.loss(batch)


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


class Scheduled(Net):
    """Its rate moves at every step, and a hook moves other numbers of its optimizer."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.0123, fused=True)
        moving = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
        return [optimizer], [{"scheduler": moving, "interval": "step"}]

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        group = self.trainer.optimizers[0].param_groups[0]
        group["weight_decay"] = 0.1 / (1 + batch_idx // 3)
        group["betas"] = (0.9, 0.99 + 0.001 * (batch_idx // 2))


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


def reads_decay(self: Any, batch: Any, batch_idx: int) -> Any:
    decay = self.trainer.optimizers[0].param_groups[0]["weight_decay"]
    return self.loss(batch) + len(str(decay)) * self.net[0].weight.square().sum()


def adds_to_index(self: Any, batch: Any, batch_idx: int) -> Any:
    self.log("index", len(str(batch_idx)))
    return self.loss(batch)


class Unfused(Net):
    """An optimizer whose kernel takes its numbers from the host, and a hook that moves them."""

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


class Precise(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("third", 1 / 3, on_step=True, on_epoch=True)
        self.log("label", batch["y"].max(), on_step=True, on_epoch=True, reduce_fx="max")
        self.log("rate", self.trainer.optimizers[0].param_groups[0]["lr"])
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss


@contextmanager
def from_none() -> Iterator[None]:
    Counting.count = 0
    yield


OF_NET = {"modules": ("net",), "below": ""}
SOON = {"warmup_steps": 1, "min_repeats": 1}
ROWS = (
    {"-".join(map(str, form)) or "log": row(logging_net(**form), **OF_NET) for form in FORMS}
    | {f"every {n} steps": row(log_every_n_steps=n, max_epochs=3) for n in (3, 50)}
    | {
        "progress bar": row(logging_net(prog_bar=True), enable_progress_bar=True),
        "inferred batch size": row(
            logging_net(on_step=False, on_epoch=True), data=lambda: batches(10, last=3),
            max_epochs=5,
        ),
        "many": row(
            Many, val_check_interval=4, **OF_NET, check=lambda fit: "c_epoch" in fit.csv
        ),
    }
    | table(Temperature, FromHooks, **OF_NET)
    | table(
        SetByHook, ComputedOfHook, AsAnother, graphs=1, modules=("net",),
        also="accumulated; verified",
    )
    | table(OneName, max_epochs=3, also="modules, verified")
    | table(
        Varying, said="would freeze a counter", found=None, data=lambda: batches(11, last=3),
        max_epochs=3, **OF_NET,
    )
    | table(each={Counting: r"'count', ...\) logged different numbers"}, around=from_none)
    # By whatever way it is reached: all of them end in ``LightningModule.log``.
    | table(
        Scaling, Renaming, PastItself, Kept, ByTheTrainer, ChangedLater, **OF_NET, max_epochs=3,
        data=lambda: batches(6, last=3),
        check=lambda fit: not hasattr(LightningModule.log, "__wrapped__"),
    )
    # A capture there is where Lightning resets what the epoch before has logged.
    | {"kept, from the first batch of an epoch": row(Kept, max_epochs=4, data=lambda: batches(3))}
    | table(
        each={
            InBackward: "self.log is called at", WeightedByIndex: "batch_idx is read at",
        }
    )
    | table(Told, ToldByKept, max_epochs=3, below="self.log is called at")
    | stepping(
        Scheduled, logs_rates, logs_counters, modules=("net",), max_epochs=3, replayed=11,
        capture=SOON, said="the optimizer step runs eagerly", placed=False, validation=0,
    )
    # Numbers that moved in the warm-up are refused: a capture would freeze them.
    | stepping(
        Scheduled, logs_decay, modules=("net",), said=None, max_epochs=3, capture=SOON, validation=0
    )
    | stepping(
        Scheduled, reads_decay, adds_to_index, said="is read at", max_epochs=3, capture=SOON,
        validation=0,
    )
    | table(Diverging, max_epochs=3)
    | table(Unfused, KeptNumber, max_epochs=3)
    | table(Precise, max_epochs=3, also="float64; bf16-true", ignored=".*needs to be floating")
)  # fmt: skip
# By then a run has left the update to eager steps
ROWS["reads_decay"] = replace(ROWS["reads_decay"], found=None)


class TestLogs(Promises):
    rows = ROWS


def test_lightnings_own_function_is_called_for_new_keys(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    original = LightningModule.log

    def log(self: LightningModule, name: str, *args: Any, **kwargs: Any) -> None:
        calls.append(name)
        original(self, name, *args, **kwargs)

    monkeypatch.setattr(LightningModule, "log", log)
    capture = {"scope": "modules", "modules": ["net"]}
    compare(*fit_twice(backend, tmp_path, module=logging_net(on_epoch=True), capture=capture))
    assert calls.count("value") == 20 + 3  # eager steps; and those of the warm-up
