"""Programs that evaluate in their own ways: what they collect and count is that of eager steps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric

from tests.programs.table import Program, Promises, row
from tests.training.fits import Fit, Net


class Evaluating(Net):
    """Writes down what it has found, at the end of each validation."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[Any] = []
        self.seen: list[Any] = []


class Collecting(Evaluating):
    """Collects outputs in a list, and empties it."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.outputs.append({"loss": self.loss(batch), "y": batch["y"]})

    def on_validation_epoch_end(self) -> None:
        losses = torch.stack([output["loss"] for output in self.outputs])
        self.log("val", losses.mean())
        self.seen.append(losses)
        self.outputs.clear()


class Summing(Evaluating):
    """Counts batches and adds up losses in attributes, and logs counters and rates."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.total: Any = 0.0

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.count += 1
        self.total = self.total + self.loss(batch)
        self.log("count", float(self.count))
        self.log("epoch", self.current_epoch)
        self.log("step", float(self.global_step))
        self.log("rate", self.optimizers().param_groups[0]["lr"])

    def on_validation_epoch_end(self) -> None:
        self.seen.append((self.count, float(self.total)))
        self.total = 0.0


class Differentiating(Evaluating):
    """Asks for gradients of its batch."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        with torch.inference_mode(False), torch.enable_grad():
            x = batch["x"].clone().requires_grad_()
            loss = nn.functional.cross_entropy(self.net(x).float(), batch["y"])
            (gradient,) = torch.autograd.grad(loss, x)
        self.log_dict({"val": loss, "norm": gradient.norm()})


class Drawing(Evaluating):
    """Validates on noisy batches."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x: Tensor = batch["x"] + torch.randn_like(batch["x"])
        self.log("val", self.loss({**batch, "x": x}))


class Inferring(Evaluating):
    """Evaluates in an inference mode of its own: indexes with a list, fills a tensor, and lets
    the loss decide."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()  # which reads what it is given

    @torch.inference_mode()
    def scores(self, batch: Any, batch_idx: int) -> Tensor:
        output = self.net(batch["x"])
        output = output.masked_fill(output < output.topk(2).values[:, [-1]], -9.0)
        factors = torch.ones(3, device=output.device)
        factors[1:] = 0.5
        if (loss := nn.functional.cross_entropy(output, batch["y"])) > 1.0:
            self.log("large", loss.item() + 1.0)
        self.mean.update(output.mean())
        return output * (factors * batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        scores = self.scores(batch, batch_idx)
        self.log("val", scores.mean())
        return scores

    def on_validation_batch_end(self, outputs: Any, *_: Any) -> None:
        self.seen.append(outputs)

    def on_validation_epoch_end(self) -> None:
        self.seen.append(self.mean.compute())


class Exchanging(Evaluating):
    """Validates another module, an average of the one that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.average = torch.optim.swa_utils.AveragedModel(self.net).module.requires_grad_(False)

    def on_train_batch_end(self, *_: Any) -> None:
        pairs = zip(self.average.parameters(), self.net.parameters(), strict=True)
        for average, parameter in pairs:
            average.data.lerp_(parameter.data, 0.5)

    def on_validation_start(self) -> None:
        self.net, self.average = self.average, self.net  # type: ignore[assignment]

    on_validation_end = on_validation_start


class ByHand(Evaluating):
    """Optimizes manually; its validation does not."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        loss = self.loss(batch)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()


class Copying(Evaluating):
    """Collects copies on the host, of its batch and of what it computes, in lists, one by one too,
    and returns some."""

    def __init__(self) -> None:
        super().__init__()
        self.labels: list[int] = []
        self.found: dict[str, list[Any]] = {"scores": [], "pairs": []}

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        scores = self.net(batch["x"])
        self.log("val", nn.functional.cross_entropy(scores.float(), batch["y"]))
        guess, y = scores.argmax(-1).cpu(), batch["y"].cpu()
        self.log("hits", (guess == y).float().mean().item())
        self.outputs.append({"guess": guess.numpy(), "y": y, "loss": scores.detach().mean().cpu()})
        self.labels.extend(batch["y"].tolist())
        self.labels += scores.argmin(-1).tolist()
        self.found["scores"].extend(scores.detach().float().to("cpu").numpy())
        for probability, label in zip(scores.softmax(-1).tolist(), y.numpy(), strict=True):
            self.found["pairs"].append((probability[0], label))
        return {"guess": guess, "y": y.numpy()}

    def on_validation_batch_end(self, outputs: Any, *_: Any) -> None:
        self.seen.append((repr(outputs), len(self.labels)))

    def on_validation_epoch_end(self) -> None:
        self.seen.append(repr((self.outputs, self.labels, self.found)))
        self.outputs.clear()


class Splitting(Evaluating):
    """Reads numbers of its batch that it needs, and keeps others."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        lengths = (batch["y"] // 3 * 0 + 2).tolist()
        self.outputs.append(batch["y"].cpu())
        parts = self.net(batch["x"]).repeat_interleave(2, 0).split(lengths)
        self.log("val", torch.stack([part.sum() for part in parts]).mean())

    def on_validation_epoch_end(self) -> None:
        self.seen.append(repr(self.outputs))


def replays(fit: Fit) -> bool:
    found = fit.capture.report.evaluation["validation_step"]
    return found.replayed >= 11 and not found.fallbacks


def replays_forks(fit: Fit) -> bool:
    found = fit.capture.report.evaluation["validation_step"]
    return found.replayed >= 4 and not found.fallbacks


def program(kind: Any, check: Any = replays, **expected: Any) -> Program:
    return row(kind, validation=6, max_epochs=3, check=check, **expected)


ROWS = {
    kind.__name__: program(kind)
    for kind in (Collecting, Summing, Differentiating, Drawing, Exchanging, Copying, Splitting)
}
ROWS |= {
    f"Inferring, {mode}": program(Inferring, inference_mode=mode, check=replays_forks)
    for mode in (True, False)
}
ROWS["ByHand"] = program(ByHand, said=None)


class TestEvaluation(Promises):
    rows = ROWS
