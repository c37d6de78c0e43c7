"""Losses that are values of torchmetrics objects, as libraries have them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torchmetrics
from torch import Tensor
from torch.nn import functional

from tests.programs.table import Program, Promises, table
from tests.training.fits import Net, batches, prepare


class Criterion(torchmetrics.Metric):
    """Cross-entropy as chemprop has its losses: update and compute are tensor code over states."""

    is_differentiable = True
    full_state_update = False

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.register_buffer("task_weights", torch.ones(3))
        self.power = 1.0
        self.add_state("total_loss", default=torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("num_samples", default=torch.tensor(0), dist_reduce_fx="sum")

    def update(self, logits: Tensor, target: Tensor) -> None:
        loss = functional.cross_entropy(logits, target, self.task_weights, reduction="none")
        self.total_loss += (loss**self.power).sum()
        self.num_samples += target.numel()

    def compute(self) -> Tensor:
        return self.total_loss / self.num_samples


class Full(Criterion):
    full_state_update = True


class Averaged(Criterion):
    """A state that is averaged by the number of updates."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("mean_loss", default=torch.tensor(0.0), dist_reduce_fx="mean")

    def update(self, logits: Tensor, target: Tensor) -> None:
        super().update(logits, target)
        self.mean_loss = self.total_loss.detach() / self.num_samples


class Wrapper(torchmetrics.Metric):
    """Overrides ``forward``, and has its metrics in a list, as pytorch-forecasting's MultiLoss."""

    full_state_update = False

    def __init__(self, *metrics: torchmetrics.Metric) -> None:
        super().__init__()
        self.metrics = [*metrics]
        self.weights = [0.5] * len(metrics)

    def update(self, logits: Tensor, target: Tensor) -> None:
        for metric in self.metrics:
            metric.update(logits, target)

    def compute(self) -> Tensor:
        found = [m.compute() * w for m, w in zip(self.metrics, self.weights, strict=True)]
        return torch.stack(found).sum(0)

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        found = [m(logits, target) * w for m, w in zip(self.metrics, self.weights, strict=True)]
        return torch.stack(found).sum(0)

    def _wrap_compute(self, compute: Callable[..., Any]) -> Callable[..., Any]:
        return compute

    def reset(self) -> None:
        for metric in self.metrics:
            metric.reset()

    def _apply(self, fn: Callable[..., Any], *given: Any, **kwargs: Any) -> Any:
        for metric in self.metrics:  # nn.Module moves those in a list to no device
            metric._apply(fn, *given, **kwargs)
        return super()._apply(fn, *given, **kwargs)


class Learned(Net):
    """The step of chemprop: the loss is what the criterion returns, and the criterion is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.criterion = self.made()

    def made(self) -> torchmetrics.Metric:
        return Criterion()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.criterion(self.net(batch["x"]), batch["y"])
        self.log("loss", self.criterion, batch_size=len(batch["y"]), prog_bar=True, on_epoch=True)
        return loss


class LearnedInFull(Learned):
    def made(self) -> torchmetrics.Metric:
        return Full()


class LearnedInStep(Learned):
    def made(self) -> torchmetrics.Metric:
        return Criterion(dist_sync_on_step=True)


class LearnedAveraged(Learned):
    def made(self) -> torchmetrics.Metric:
        return Averaged()


class LearnedFromSeveral(Learned):
    """The step of pytorch-forecasting: the value is logged, and used further."""

    def made(self) -> torchmetrics.Metric:
        return Wrapper(Criterion(), Full())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.net(batch["x"])
        loss = self.criterion(logits, batch["y"])
        self.log("loss", loss.detach(), on_step=True, on_epoch=True, prog_bar=True)
        return {"loss": loss * 1.5, "n_samples": batch["x"].size(0)}


class LearnedFromTheState(Learned):
    """Reads back what the criterion has kept, and computes and resets it by itself."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.criterion(self.net(batch["x"]), batch["y"])
        loss = self.criterion._forward_cache
        self.log("so far", self.criterion.compute())
        self.log("total", self.criterion.total_loss)
        return loss

    def on_train_epoch_end(self) -> None:
        self.criterion.reset()


class Annealed(Learned):
    """An attribute of the criterion moves between epochs."""

    def on_train_epoch_start(self) -> None:
        self.criterion.power = 1.0 + self.current_epoch


class LoggedTooEarly(Learned):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.criterion(self.net(batch["x"]), batch["y"])
        self.log("loss", self.criterion)
        return loss + self.criterion(self.net(batch["x"]), batch["y"])


class Listing(Criterion):
    """Keeps every value, for its end."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("values", default=[], dist_reduce_fx="cat")

    def update(self, logits: Tensor, target: Tensor) -> None:
        super().update(logits, target)
        self.values.append(self.total_loss.detach().clone())


class LearnedListing(Learned):
    def made(self) -> torchmetrics.Metric:
        return Listing()


class LearnedFromCollection(Net):
    def __init__(self) -> None:
        super().__init__()
        self.losses = torchmetrics.MetricCollection({"one": Criterion(), "other": Full()})

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        found = self.losses(self.net(batch["x"]), batch["y"])
        self.log_dict(self.losses, on_step=False, on_epoch=True)
        return sum(found.values())


class Accurate(Net):
    """The loss has a metric in it that checks its inputs by their values."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=3)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        guess = self.net(batch["x"]).argmax(-1)
        return loss * (1 + self.accuracy(guess, batch["y"]))


class AccurateUnchecked(Accurate):
    def __init__(self) -> None:
        super().__init__()
        self.accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=3, validate_args=False)


class Weighted(Accurate):
    """A check whose other way warns, ahead of one that no capture can hold."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torchmetrics.MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        weight = self.mean(self.loss(batch).detach())
        return weight * super().training_step(batch, batch_idx)


def test_no_capture_warns_of_a_way_that_is_not_gone(backend: str, tmp_path: Path) -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        fit = prepare(backend, tmp_path, True, module=Weighted, capture={"on_failure": "eager"})
        fit.run()
    assert fit.statistics.fallbacks != []
    assert [each for each in seen if "Encountered `nan`" in str(each.message)] == []


ROWS = table(
    Program(Learned, also="verified; accumulated; cut; bf16"), LearnedInFull, LearnedInStep,
    LearnedAveraged, LearnedFromSeveral, LearnedFromTheState, Annealed, AccurateUnchecked,
    LearnedFromCollection, LearnedListing, max_epochs=3, data=lambda: batches(6),
) | table(
    each={
        Accurate: "(unique|CUDA error)(?s:.*)validate_args=False",
        LoggedTooEarly: "a metric is logged, and called again, at",
    }
)  # fmt: skip


class TestCriteria(Promises):
    rows = ROWS
