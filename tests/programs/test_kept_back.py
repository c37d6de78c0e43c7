"""Calls that read values on the host, and whose results are only logged or stored."""

from __future__ import annotations

import math
import statistics
from collections import deque
from functools import partial
from typing import Any

import numpy
import torch
import torchmetrics.functional
from torch import Tensor

from tests.programs.table import Promises, stepping
from tests.training.fits import Net, batches


class Predicting(Net):
    def predicted(self, batch: Any) -> tuple[Tensor, Tensor]:
        logits = self.net(batch["x"])
        return torch.nn.functional.cross_entropy(logits.float(), batch["y"]), logits


def checked(self: Any, batch: Any, batch_idx: int) -> Any:
    """The step of scvi's semi-supervised plans."""
    loss, logits = self.predicted(batch)
    guess, y = logits.argmax(-1), batch["y"]
    accuracy = torchmetrics.functional.accuracy(guess, y, "multiclass", num_classes=3)
    f1 = torchmetrics.functional.classification.multiclass_f1_score(guess, y, 3, average="micro")
    error = torchmetrics.functional.classification.multiclass_calibration_error(logits, y, 3)
    self.log("loss", loss)
    self.log("accuracy", accuracy, on_step=True, on_epoch=True, batch_size=len(y))
    self.log("f1", f1, prog_bar=True)
    self.log("calibration", error, on_epoch=True)
    return loss


SCORES = {
    "accuracy": torchmetrics.functional.accuracy,
    "f1": partial(torchmetrics.functional.f1_score, average="macro"),
}


def held_elsewhere(self: Any, batch: Any, batch_idx: int) -> Any:
    """As pytorch_tabular: functions from containers, of which one place calls several."""
    loss, logits = self.predicted(batch)
    found = {}
    for name, score in SCORES.items():
        found[name] = score(logits.argmax(-1), batch["y"], task="multiclass", num_classes=3)
    self.log_dict(found)
    self.log("sum", torch.stack([*found.values()]).sum())
    return loss


def computed_further(self: Any, batch: Any, batch_idx: int) -> Any:
    loss, logits = self.predicted(batch)
    guess, y = logits.argmax(-1), batch["y"]
    found = torchmetrics.functional.confusion_matrix(guess, y, "multiclass", num_classes=3)
    self.log("error", 1 - found.diag().sum() / found.sum())
    self.log("share", torch.stack([found[0, 0], found[1, 1]]).float().mean() * loss.detach())
    self.last = found.float() * 2
    return loss


def read_as_arrays(self: Any, batch: Any, batch_idx: int) -> Any:
    loss, logits = self.predicted(batch)
    guess = logits.detach().argmax(-1).cpu().numpy()
    truth = (batch["y"] + guess_of(logits)).to("cpu").data.numpy()
    self.log("correct", float_of(guess == truth))
    self.log("spread", numpy.std(guess) + numpy.mean(truth))
    self.log("losses", numpy.mean([loss.item(), logits.std().item()]))
    return loss


def float_of(value: Any) -> Any:
    return value.mean()


def guess_of(logits: Tensor) -> Tensor:
    return logits.argmin(-1)


def converted(self: Any, batch: Any, batch_idx: int) -> Any:
    """Numbers as Python's own functions make them, of results and of the batch."""
    loss, logits = self.predicted(batch)
    hits = int((logits.argmax(-1) == batch["y"]).sum())
    self.log("loss", float(loss.detach()), on_step=True, on_epoch=True)
    self.log("perplexity", min(1e4, math.exp(loss.item())))
    self.log("accuracy", hits / len(batch["y"]), prog_bar=True)
    self.log("positive", max(1, int((batch["y"] == 1).sum())))
    self.log("labels", batch["y"].sum().item(), on_step=True, on_epoch=True)
    for i, mean in enumerate(logits.mean(0).tolist()):
        self.log(f"mean {i}", round(mean, 3))
    return loss


def masked(self: Any, batch: Any, batch_idx: int) -> Any:
    """The accuracy of samples of a class, of which batches have different numbers."""
    loss, logits = self.predicted(batch)
    mask = batch["y"] > 0
    hits = logits.argmax(-1)[mask] == batch["y"][mask]
    self.log("hits", hits.float().mean().nan_to_num())
    self.log("classes", torch.unique(logits.argmax(-1)).numel())
    self.log("loss", loss.item())
    return loss


def branched(self: Any, batch: Any, batch_idx: int) -> Any:
    loss, logits = self.predicted(batch)
    top = logits.amax().item()
    return loss * 2 if top > 100 else loss


def in_the_loss(self: Any, batch: Any, batch_idx: int) -> Any:
    loss, logits = self.predicted(batch)
    guess, y = logits.argmax(-1), batch["y"]
    return loss + torchmetrics.functional.accuracy(guess, y, "multiclass", num_classes=3)  # read


def by_its_type(self: Any, batch: Any, batch_idx: int) -> Any:
    loss, logits = self.predicted(batch)
    top = logits.amax().cpu()  # read
    self.log("top", top.item() if isinstance(top, Tensor) else top)
    return loss


def text_scores(self: Any, batch: Any, batch_idx: int) -> Any:
    """Texts are decoded, and scored by another library: here by one of NumPy."""
    loss, logits = self.predicted(batch)
    texts = numpy.array2string(logits.argmax(-1).cpu().numpy())
    self.log("length", numpy.char.str_len(texts) + 0.0)
    truth, guess = logits.argmin(-1).tolist(), logits.argmax(-1).tolist()
    low, high = numpy.percentile(guess, [25, 75])
    self.log("same", float_of(numpy.equal(truth, guess)))
    self.log("spread", high - low)
    self.seen_texts = texts
    return loss


def changed_afterwards(self: Any, batch: Any, batch_idx: int) -> Any:
    loss, logits = self.predicted(batch)
    guess, y = logits.argmax(-1), batch["y"]
    self.log("accuracy", torchmetrics.functional.accuracy(guess, y, "multiclass", num_classes=3))
    guess.zero_()
    return loss


class Handing(Predicting):
    """Keeps what a hook is given of the step's result."""

    def __init__(self) -> None:
        super().__init__()
        self.handed: list[Any] = []

    def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
        self.handed.append(outputs)

    def look(self) -> Any:
        return list(self.handed)


def returned(self: Any, batch: Any, batch_idx: int) -> Any:
    """Numbers of the host beside the loss: counters, what is read of the device and the batch."""
    loss, logits = self.predicted(batch)
    hits = (logits.argmax(-1) == batch["y"]).sum().item()
    count = int((batch["y"] > 0).sum()) + 1
    self.log("loss", loss, on_epoch=True, batch_size=count)
    found = {"labels": batch["y"].sum().item(), "count": count, "batch": batch_idx}
    return {"loss": loss, "hits": hits, "share": hits / len(batch["y"]), **found}


def returned_and_used(self: Any, batch: Any, batch_idx: int) -> Any:
    """A number of the batch is a part of the key if the loss needs it."""
    loss, _ = self.predicted(batch)
    count = int((batch["y"] > 0).sum()) + 1
    self.log("loss", loss, on_epoch=True, batch_size=count)
    return {"loss": loss * 8 / count, "count": count}


class Collecting(Predicting):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []


def collected(self: Any, batch: Any, batch_idx: int) -> Any:
    """Labels and guesses are collected on the host."""
    loss, logits = self.predicted(batch)
    self.seen.append((batch["y"].cpu(), logits.argmax(-1).cpu().numpy()))
    self.seen.extend(logits.argmin(-1).tolist())
    return loss


class Averaging(Predicting):
    """Collects what it has read of the device, and shows what it computes with that."""

    def __init__(self) -> None:
        super().__init__()
        self.recent: deque[float] = deque(maxlen=5)
        self.all: list[float] = []
        self.by_name = {"loss": [0.0], "top": [0.0]}
        self.seen: list[Any] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.seen.append((*self.recent, *self.all, str(self.by_name)))

    def on_train_epoch_end(self) -> None:
        self.all = []

    def read(self, batch: Any) -> tuple[Tensor, float]:
        loss, _ = self.predicted(batch)
        self.recent.append(loss.item())
        self.all.append(self.recent[-1])
        return loss, self.recent[-1]


def averaged(self: Any, batch: Any, batch_idx: int) -> Any:
    loss, _ = self.read(batch)
    self.log("mean", numpy.mean(self.recent))
    self.log("sum", sum(self.all) / len(self.all))
    self.log("middle", statistics.median(self.recent))
    return {"loss": loss, "last": float(numpy.mean(self.all[-3:]))}


def asked_for_more(self: Any, batch: Any, batch_idx: int) -> Any:
    loss, _ = self.read(batch)
    self.log("best", min(self.recent), prog_bar=True)
    self.log("worst", max(self.all, default=0.0))
    self.log("middle", sorted(self.recent)[len(self.recent) // 2])
    self.mean = numpy.array(self.all).mean()
    self.log("deviation", torch.tensor(self.all).std(correction=0))
    return loss


def by_how_many(self: Any, batch: Any, batch_idx: int) -> Any:
    """A window that is cut, one that is full, and one that begins anew."""
    loss, value = self.read(batch)
    if len(self.recent) == self.recent.maxlen:
        self.log("full", numpy.mean(self.recent))
    self.by_name["loss"] += [value]
    if len(self.by_name["loss"]) > 4:
        del self.by_name["loss"][0]
    self.log("cut", numpy.std(self.by_name["loss"]))
    if len(self.all) == 6:
        self.all.pop(0)
        self.all[0] = 0.5 * self.all[0]
        self.log("anew", numpy.sum(self.all) / len(self.all))
        self.all.clear()
    return loss


def by_names(self: Any, batch: Any, batch_idx: int) -> Any:
    loss, logits = self.predicted(batch)
    append = self.by_name["top"].append
    append(logits.amax().item())
    append(logits.amin().item())
    self.by_name["loss"].append(loss.item())
    for name, values in self.by_name.items():
        self.log(name, sum(values) / len(values))
    return loss


def as_one_tensor(self: Any, batch: Any, batch_idx: int) -> Any:
    loss, logits = self.predicted(batch)
    both = torch.tensor([loss.item(), logits.amax().item()])
    self.log("both", both.mean())
    return loss


def scaled_by_average(self: Any, batch: Any, batch_idx: int) -> Any:
    loss, _ = self.read(batch)
    return loss / numpy.mean(self.recent)


ROWS = stepping(
    Predicting, checked, also="bf16; verified; cut; accumulated", max_epochs=3,
    data=lambda: batches(6),
) | stepping(
    Predicting, computed_further, held_elsewhere, converted, read_as_arrays, masked, text_scores,
    changed_afterwards, branched, each={in_the_loss: "in_the_loss", by_its_type: "host"},
    max_epochs=3, data=lambda: batches(6),
) | stepping(
    Handing, returned, also="verified; cut", max_epochs=3, data=lambda: batches(6),
    check=lambda fit: fit.statistics.captures == 1,
) | stepping(
    Handing, returned_and_used, max_epochs=4, data=lambda: batches(6),
) | stepping(
    Collecting, collected, also="verified", max_epochs=3, data=lambda: batches(6),
) | stepping(
    Averaging, averaged, asked_for_more, by_how_many, by_names, as_one_tensor, also="verified",
    each={scaled_by_average: "scaled_by_average"}, max_epochs=2, data=lambda: batches(12),
)  # fmt: skip


class TestKeptBack(Promises):
    rows = ROWS
