"""torchmetrics objects that ``training_step`` updates."""

from __future__ import annotations

from typing import Any

import torchmetrics

from tests.programs.table import Program, Promises, table
from tests.training.fits import Net, batches


class Scored(Net):
    def __init__(self) -> None:
        super().__init__()
        self.accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=3)
        self.mean = torchmetrics.MeanMetric()

    def scores(self, batch: Any) -> Any:
        logits = self.net(batch["x"])
        return self.loss(batch), logits.argmax(-1)


class LoggedObject(Scored):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss, guess = self.scores(batch)
        self.accuracy(guess, batch["y"])
        self.mean.update(loss)
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.log("mean", self.mean, on_step=False, on_epoch=True, prog_bar=True)
        return loss


class LoggedForwardValue(Scored):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss, guess = self.scores(batch)
        self.log("accuracy", self.accuracy(guess, batch["y"]), on_step=True)
        self.log(name="again", value=self.mean(loss), on_epoch=True)
        return loss


class ComputedAtEpochEnd(Scored):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss, guess = self.scores(batch)
        self.accuracy.update(guess, batch["y"])
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("accuracy", self.accuracy.compute())
        self.accuracy.reset()


class Collected(Net):
    def __init__(self) -> None:
        super().__init__()
        self.metrics = torchmetrics.MetricCollection(
            {
                "accuracy": torchmetrics.Accuracy(task="multiclass", num_classes=3),
                "f1": torchmetrics.F1Score(task="multiclass", num_classes=3),  # of the same state
                "recall": torchmetrics.Recall(task="multiclass", num_classes=3, average="macro"),
            },
            prefix="train_",
        )

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.metrics.update(self.net(batch["x"]), batch["y"])
        return loss

    def on_train_epoch_end(self) -> None:
        self.log_dict(self.metrics.compute())
        self.metrics.reset()


class CollectedAsObject(Collected):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.metrics.update(self.net(batch["x"]), batch["y"])
        self.log_dict(self.metrics, on_step=False, on_epoch=True)
        return loss

    def on_train_epoch_end(self) -> None:
        return


class CollectedForwardValue(CollectedAsObject):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log_dict(self.metrics(self.net(batch["x"]), batch["y"]))
        return loss


class CollectedInPart(CollectedAsObject):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        values = self.metrics(self.net(batch["x"]), batch["y"])
        self.log("error", 1 - values.pop("train_accuracy"))
        del values["train_recall"]
        self.log_dict(values)
        return loss


class ChangedAfterwards(Scored):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        value = loss.detach().clone()
        self.mean.update(value)
        self.log("mean", self.mean, on_step=True, on_epoch=True)
        value.mul_(100)
        return loss


class OfTheIndex(Scored):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.mean.update(loss, batch_idx)
        self.log("mean", self.mean, on_epoch=True)
        return loss


ROWS = table(
    LoggedObject, LoggedForwardValue, ComputedAtEpochEnd, Collected,
    Program(CollectedAsObject, capture={"verify": 3}), CollectedForwardValue, CollectedInPart,
    ChangedAfterwards, OfTheIndex, max_epochs=3, data=lambda: batches(6),
)  # fmt: skip


class TestMetrics(Promises):
    rows = ROWS
