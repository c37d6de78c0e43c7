"""Modules as users write them whose steps store something or rebind it."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable
from typing import Any

import torch
import torchmetrics
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import prune

from tests.programs.table import Promises, copied, table
from tests.training.fits import Net, batches


class Storing(Net):
    """Notes at the end of each step and epoch what its author would look at."""

    keeps = True  # what it looks at is another tensor after each step

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []
        self.kept: list[Any] = []

    def look(self) -> Any:
        """What the step has stored."""
        return None

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        found = self.look()
        self.seen.append(copied(found))
        if self.keeps and batch_idx % 3 == 0:  # and keeps a few, which later steps must not change
            self.kept.append((found, copied(found)))

    def on_train_end(self) -> None:
        for found, then in self.kept:
            assert repr(copied(found)) == repr(then)


# ---------------------------------------------------------------------- results that are kept


class LastOutputs(Storing):
    """Keeps the last outputs for a callback."""

    def __init__(self) -> None:
        super().__init__()
        self.last: dict[str, Tensor] = {}
        self.last_logits: Tensor | None = None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.net(batch["x"])
        self.last_logits = logits.detach()
        self.last = {"logits": logits.detach(), "y": batch["y"]}
        return F.cross_entropy(logits.float(), batch["y"])

    def look(self) -> Any:
        return self.last_logits, self.last


class Outputs(Storing):
    """What Lightning recommends in place of ``training_epoch_end``."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.outputs.append(loss)
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("mean", torch.stack([output.detach() for output in self.outputs]).mean())
        self.outputs.clear()

    def look(self) -> Any:
        return list(self.outputs)


class OutputDicts(Storing):
    """The same with a dict for each step, and lists for several things."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[Any] = []
        self.history: dict[str, list[Tensor]] = {"loss": [], "guess": []}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.net(batch["x"])
        loss = F.cross_entropy(logits.float(), batch["y"])
        self.outputs.append({"loss": loss.detach(), "guess": logits.argmax(-1), "split": "train"})
        self.history["loss"].append(loss.detach())
        self.history["guess"] += [logits.argmax(-1)]
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("mean", torch.stack([o["loss"] for o in self.outputs]).mean())
        self.outputs.clear()
        self.history = {"loss": [], "guess": []}

    def look(self) -> Any:
        return list(self.outputs), {key: list(held) for key, held in self.history.items()}


class Features(Storing):
    """A forward hook keeps the features of a layer, and the loss regularises them."""

    def __init__(self) -> None:
        super().__init__()
        self.features: dict[str, Tensor] = {}
        self.net[2].register_forward_hook(self.keep("act"))

    def keep(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Tensor) -> None:
            self.features[name] = output

        return hook

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) + 0.01 * self.features["act"].float().pow(2).mean()

    def look(self) -> Any:
        return {key: value.detach() for key, value in self.features.items()}


class Counters(Storing):
    """Python numbers that count steps and samples."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0
        self.samples = 0
        self.shown = 0.0
        self.sizes: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.steps += 1
        self.samples = self.samples + len(batch["x"])
        self.shown += 0.5
        self.sizes.append(len(batch["x"]))
        return self.loss(batch)

    def look(self) -> Any:
        return self.steps, self.samples, self.shown, list(self.sizes)


# ---------------------------------------------------------------------- state rebound


class Centred(Storing):
    """DINO's centre: a buffer that is a moving average, rebound."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(1, 3))
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.no_grad():
            teacher = self.teacher(batch["x"])
            target = F.softmax((teacher - self.center) / 0.04, dim=-1)
        student = F.log_softmax(self.net(batch["x"]) / 0.1, dim=-1)
        loss = -(target * student).sum(-1).mean()
        self.update(teacher)
        self.log("loss", loss)
        return loss

    @torch.no_grad()
    def update(self, teacher: Tensor) -> None:
        self.center = self.center * 0.9 + teacher.mean(0, keepdim=True) * 0.1

    def look(self) -> Any:
        return self.center


def moved(target: Iterable[Tensor], online: Iterable[Tensor], m: float) -> None:
    """What lightly calls ``update_momentum``."""
    for t, o in zip(target, online, strict=True):
        t.data = m * t.data + (1.0 - m) * o.data


class Byol(Storing):
    """A teacher whose ``.data`` is rebound in the step."""

    def __init__(self) -> None:
        super().__init__()
        self.target = copy.deepcopy(self.net).requires_grad_(False)
        self.predictor = nn.Linear(3, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        moved(self.target.parameters(), self.net.parameters(), 0.99)
        with torch.no_grad():
            target = self.target(batch["x"])
        loss = 1 - F.cosine_similarity(self.predictor(self.net(batch["x"])), target).mean()
        self.log("loss", loss)
        return loss

    def look(self) -> Any:
        return next(self.target.parameters()).detach()


class ByolOfHooks(Byol):
    """The same after each batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.no_grad():
            target = self.target(batch["x"])
        return 1 - F.cosine_similarity(self.predictor(self.net(batch["x"])), target).mean()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        moved(self.target.parameters(), self.net.parameters(), 0.99)


class TeacherByLerp(Byol):
    """The same in place, as torch's ``AveragedModel`` does it."""

    keeps = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.no_grad():
            for t, o in zip(self.target.parameters(), self.net.parameters(), strict=True):
                t.lerp_(o, 0.01)
            target = self.target(batch["x"])
        return 1 - F.cosine_similarity(self.predictor(self.net(batch["x"])), target).mean()


class TeacherOfStateDict(Byol):
    """The same by way of a dict of tensors that is kept in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.shadow: dict[str, Tensor] = {}

    def on_train_start(self) -> None:
        self.shadow = {name: p.detach().clone() for name, p in self.net.named_parameters()}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        for name, p in self.net.named_parameters():
            self.shadow[name] = 0.99 * self.shadow[name] + 0.01 * p.detach()
        return loss + sum(
            (self.shadow[n] - p).pow(2).mean() for n, p in self.net.named_parameters()
        )

    def look(self) -> Any:
        return dict(self.shadow)


class Queue(Storing):
    """MoCo with a queue that is rebound."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", F.normalize(torch.randn(32, 3), dim=-1))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        q = F.normalize(self.net(batch["x"]), dim=-1)
        k = F.normalize(self.net(batch["x"] + 0.1), dim=-1).detach()
        logits = torch.cat([(q * k).sum(-1, keepdim=True), q @ self.queue.T], dim=1)
        loss = F.cross_entropy(logits / 0.1, torch.zeros_like(batch["y"]))
        self.queue = torch.cat([k, self.queue])[:32]
        self.log("loss", loss)
        return loss

    def look(self) -> Any:
        return self.queue


class Recurrent(Storing):
    """Truncated back propagation through time: the state goes on from batch to batch."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.Linear(16, 32)
        self.hidden: Any = None

    def on_train_epoch_start(self) -> None:
        self.hidden = None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hidden, cell = self.hidden or (torch.zeros_like(batch["x"]),) * 2
        gates = self.gates(torch.cat([batch["x"], hidden], dim=1)).chunk(4, dim=1)
        i, f, o = (gate.sigmoid() for gate in gates[:3])
        cell = f * cell + i * gates[3].tanh()
        hidden = o * cell.tanh()
        self.hidden = hidden.detach(), cell.detach()
        loss = F.cross_entropy(self.net(hidden).float(), batch["y"])
        self.log("loss", loss)
        return loss

    def look(self) -> Any:
        return self.hidden


class Window(Storing):
    """The last few embeddings, in a deque."""

    def __init__(self) -> None:
        super().__init__()
        self.window: deque[Tensor] = deque(maxlen=3)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.net(batch["x"])
        self.window.append(logits.detach().mean(0))
        smooth = torch.stack(list(self.window)).mean(0)
        return F.cross_entropy(logits.float(), batch["y"]) + (logits.mean(0) - smooth).pow(2).sum()

    def look(self) -> Any:
        return list(self.window)


class Codebook(nn.Module):
    """The EMA codebook of a VQ-VAE, as in the well-known notebook: rebound in ``forward``."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 3)
        self.register_buffer("sizes", torch.zeros(6))
        self.ema = nn.Parameter(torch.randn(6, 3))

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        weight = self.embedding.weight
        distances = z.pow(2).sum(1, keepdim=True) + weight.pow(2).sum(1) - 2 * z @ weight.T
        index = distances.argmin(1)
        codes = torch.zeros(len(z), 6, device=z.device).scatter_(1, index[:, None], 1)
        quantized = codes @ weight
        if self.training:
            self.sizes = self.sizes * 0.9 + 0.1 * codes.sum(0)
            n = self.sizes.data.sum()
            self.sizes = (self.sizes + 1e-5) / (n + 6e-5) * n
            self.ema = nn.Parameter(self.ema * 0.9 + 0.1 * (codes.T @ z))
            self.embedding.weight = nn.Parameter(self.ema / self.sizes.unsqueeze(1))
        loss = 0.25 * F.mse_loss(quantized.detach(), z)
        return loss, z + (quantized - z).detach()


class VqVae(Storing):
    def __init__(self) -> None:
        super().__init__()
        self.book = Codebook()
        self.decoder = nn.Linear(3, 8)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss, quantized = self.book(self.net(batch["x"]))
        loss = loss + F.mse_loss(self.decoder(quantized), batch["x"])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(
            [*self.net.parameters(), *self.decoder.parameters()], lr=2**-7, fused=True
        )

    def look(self) -> Any:
        return self.book.sizes, self.book.embedding.weight.detach()


class VqVaeOfData(VqVae):
    """The codebook by ``.data``, and its sizes in place, as newer ones do it."""

    keeps = False

    def __init__(self) -> None:
        super().__init__()
        self.book = CodebookOfData()


class CodebookOfData(Codebook):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        weight = self.embedding.weight
        index = torch.cdist(z, weight).argmin(1)
        codes = F.one_hot(index, 6).to(z) if z.is_cuda else torch.eye(6)[index]
        quantized = codes @ weight
        if self.training:
            self.sizes.data.mul_(0.9).add_(codes.sum(0), alpha=0.1)
            self.ema.data = self.ema.data * 0.9 + 0.1 * (codes.T @ z.detach())
            self.embedding.weight.data = self.ema.data / (self.sizes.unsqueeze(1) + 1e-5)
        loss = 0.25 * F.mse_loss(quantized.detach(), z)
        return loss, z + (quantized - z).detach()


class Meter:
    """The meter of torch's ImageNet example, on tensors."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.val: Any = 0
        self.sum: Any = 0
        self.count = 0

    def update(self, val: Tensor, n: int = 1) -> None:
        self.val = val
        self.sum = self.sum + val * n
        self.count += n


class Metered(Storing):
    def __init__(self) -> None:
        super().__init__()
        self.meter = Meter()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.meter.update(loss.detach(), len(batch["x"]))
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("mean", self.meter.sum / self.meter.count)
        self.meter.reset()

    def look(self) -> Any:
        return self.meter.val, self.meter.sum, self.meter.count


class Smoothed(Storing):
    """A moving average of the loss, beginning with None."""

    def __init__(self) -> None:
        super().__init__()
        self.smooth: Tensor | None = None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        now = loss.detach()
        self.smooth = now if self.smooth is None else 0.9 * self.smooth + 0.1 * now
        self.log("smooth", self.smooth)
        return loss

    def look(self) -> Any:
        return self.smooth


class ReadNowAndThen(Smoothed):
    """What most steps only store, some read first, and are captured later."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        if batch_idx % 4 == 3:
            self.log("last", self.smooth * 0.9)
        self.smooth = loss.detach()
        return loss


class Counted(Smoothed):
    """Averages histograms as FreeMatch does, of which a capture learns ahead of the average."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("zeros", torch.zeros(3))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.net(batch["x"]).float()
        counts = torch.bincount(logits.argmax(-1), minlength=3)
        before = self.zeros if self.smooth is None else self.smooth
        self.smooth = before * 0.9 + 0.1 * (counts / counts.sum())
        return F.cross_entropy(logits, batch["y"])


# ---------------------------------------------------------------------- metrics


class Errors(torchmetrics.Metric):
    """States in lists, rebound and in place."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("errors", default=[], dist_reduce_fx="cat")
        self.add_state("total", default=torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("count", default=torch.tensor(0), dist_reduce_fx="sum")

    def update(self, preds: Tensor, target: Tensor) -> None:
        self.errors.append((preds.argmax(-1) != target).float())
        self.total = self.total + preds.detach().sum()
        self.count += target.numel()

    def compute(self) -> Tensor:
        errors = self.errors if isinstance(self.errors, Tensor) else torch.cat(self.errors)
        return errors.mean() + self.total / self.count


class Measured(Storing):
    keeps = False

    def __init__(self) -> None:
        super().__init__()
        self.error = Errors()
        self.plain = Errors()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.net(batch["x"])
        self.error(logits, batch["y"])
        self.log("error", self.error, on_step=True, on_epoch=True)
        self.plain.update(logits, batch["y"])
        return F.cross_entropy(logits.float(), batch["y"])

    def on_train_epoch_end(self) -> None:
        self.log("plain", self.plain.compute())
        self.plain.reset()

    def look(self) -> Any:
        return self.plain.errors, self.plain.total, self.plain.count


class MeasuredInADict(Storing):
    """Metrics that the module does not know as submodules."""

    def __init__(self) -> None:
        super().__init__()
        self.own = {"train": Errors()}

    def on_fit_start(self) -> None:
        self.own["train"].to(self.device)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.net(batch["x"])
        self.own["train"].update(logits, batch["y"])
        return F.cross_entropy(logits.float(), batch["y"])

    def on_train_epoch_end(self) -> None:
        self.log("plain", self.own["train"].compute())
        self.own["train"].reset()


# ---------------------------------------------------------------------- computed weights


class WeightNorm(Storing):
    def __init__(self) -> None:
        super().__init__()
        self.net[0] = nn.utils.weight_norm(self.net[0])


class SpectralNorm(Storing):
    def __init__(self) -> None:
        super().__init__()
        self.net[0] = nn.utils.spectral_norm(self.net[0])
        self.net[4] = nn.utils.spectral_norm(self.net[4])


class Pruned(Storing):
    def __init__(self) -> None:
        super().__init__()
        prune.l1_unstructured(self.net[0], "weight", amount=0.3)
        prune.random_unstructured(self.net[4], "weight", amount=0.3)


class Quantized(Storing):
    """Fake quantisation with ranges that are rebound, as IBert's ``QuantAct`` has them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("x_min", torch.zeros(1))
        self.register_buffer("x_max", torch.zeros(1))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = batch["x"]
        self.x_min = self.x_min * 0.95 + x.detach().min() * 0.05
        self.x_max = self.x_max * 0.95 + x.detach().max() * 0.05
        scale = torch.clamp(torch.max(self.x_min.abs(), self.x_max.abs()), min=1e-8) / 127
        return self.loss(
            {
                **batch,
                "x": torch.fake_quantize_per_tensor_affine(
                    x, scale, torch.zeros_like(scale, dtype=torch.int32), -128, 127
                ),
            }
        )

    def look(self) -> Any:
        return self.x_min, self.x_max


class GradientNorms(Storing):
    """The norm of each gradient, logged and kept in a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.norm: Tensor | None = None

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norms = [p.grad.norm() for p in self.parameters() if p.grad is not None]
        self.norm = torch.stack(norms).norm()
        self.log("norm", self.norm)

    def look(self) -> Any:
        return self.norm


# ---------------------------------------------------------------------- in other ways


class Weighted(Storing):
    """Computes with a number that it counts."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.steps += 1
        return self.loss(batch) * (1 + 1 / self.steps)

    def look(self) -> Any:
        return self.steps


class Branching(Weighted):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.steps += 1
        loss = self.loss(batch)
        return loss * 2 if self.steps == 9 else loss


class Annealed(Weighted):
    """What autoencoders do, with numbers that follow from one another."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.beta = 0, 0.0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.before = self.steps
        self.steps += 1
        self.beta = min(1.0, self.steps / 10)
        self.log("steps", self.steps)
        self.log("beta", self.beta)
        return self.loss(batch) * self.beta

    def look(self) -> Any:
        return self.before, self.steps, self.beta


class SubmoduleCounting(Net):
    class Layer(nn.Linear):
        calls = 0

        def forward(self, x: Any) -> Any:
            self.calls += 1
            return super().forward(x)

    def __init__(self) -> None:
        super().__init__()
        self.net[4] = self.Layer(16, 3)

    def on_train_epoch_end(self) -> None:
        self.log("calls", float(self.net[4].calls))


class Reset(Centred):
    """A hook puts other tensors in the places, of the same geometry and of another."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 8:
            self.center = torch.ones_like(self.center)
        if batch_idx == 10:
            self.center = self.center[0]

    def update(self, teacher: Any) -> None:
        super().update(teacher)
        self.center = self.center.reshape(1, 3)


class InPlaceAndAnew(Storing):
    """State that a hook rebinds, and steps write in place."""

    keeps = False

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("moved", torch.zeros(3))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.mean = self.mean * 0.5
        self.moved.data = self.moved * 0.5

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.net(batch["x"])
        self.mean += logits.detach().mean(0)
        self.moved.data.add_(logits.detach().mean(0), alpha=0.5)
        loss = F.cross_entropy(logits.float(), batch["y"])
        return loss + (logits * (self.mean - self.moved)).mean()

    def look(self) -> Any:
        return self.mean, self.moved


class Alternating(Storing):
    """Two places with one tensor, and one that is given what the other had."""

    def __init__(self) -> None:
        super().__init__()
        self.now: Any = None
        self.same: Any = None
        self.before: Any = None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.net(batch["x"])
        self.before = self.now
        self.now = self.same = logits.detach().mean(0)
        loss = F.cross_entropy(logits.float(), batch["y"])
        return loss if self.before is None else loss + (logits * self.before).mean()

    def look(self) -> Any:
        assert self.now is self.same
        return self.now, self.before


class WithNumbers(Storing):
    """Keeps numbers beside tensors, and logs one that it counts."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[Any] = []
        self.steps = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.steps += 1
        self.log("steps", self.steps)
        self.outputs.append({"loss": loss.detach(), "batch": batch_idx, "step": self.steps})
        return loss

    def look(self) -> Any:
        return list(self.outputs)


class Clipped(Net):
    """Weights in new memory after every step, as in WGAN, CLIP and moving averages."""

    def on_train_batch_end(self, *_: Any) -> None:
        for parameter in self.parameters():
            parameter.data = parameter.data.clamp(-0.2, 0.2)


class Indexing(Weighted):
    """Takes the bare value of a number that it counts."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.steps += 1
        return self.loss(batch) * [1.0, 2.0, 1.5, 0.5, 1.0, 2.0, 1.5, 0.5, 1.0][self.steps % 9]


class Averaged(Outputs):
    """Computes with a list that it fills."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss + torch.stack([output.detach() for output in self.outputs]).mean()


class Bounded(Outputs):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss * 2 if len(self.outputs) > 8 else loss


class Totals(Storing):
    """Adds up on the host what it reads of the device, as meters do, and computes with it."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.sums = 0.0, {"loss": 0.0, "steps": 0}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch) * (1 + 0.01 * self.last)
        self.last = loss.item()
        self.sums["loss"] += self.last
        self.sums["steps"] += 1
        self.log("mean", self.sums["loss"] / self.sums["steps"])
        return loss

    def look(self) -> Any:
        return self.last, dict(self.sums)


class Spelling(Storing):
    """Computes with a text that it prolongs."""

    def __init__(self) -> None:
        super().__init__()
        self.text = ""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.text += "a"
        return self.loss(batch) * (1 + 0.01 * len(self.text))

    def look(self) -> Any:
        return self.text


class Objects(Storing):
    """Stores an object."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Any = None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.found = object()
        return self.loss(batch)


EACH_WAY = "accumulated; cut; clipped; bf16; unverified; verified"
USUAL = {
    "data": lambda: batches(12),
    "validation": 0,
    "replayed": 12,
    "ignored": ".*weight_norm. is",
}
ROWS = (
    table(
        LastOutputs, OutputDicts, ByolOfHooks, TeacherByLerp, TeacherOfStateDict, Queue, VqVae,
        Metered, Smoothed, Measured, MeasuredInADict, WeightNorm, SpectralNorm, Pruned, Quantized,
        GradientNorms, SubmoduleCounting, graphs=1, **USUAL,
    )
    | table(
        Outputs, Counters, Features, Centred, Byol, Window, VqVaeOfData,
        also=f"{EACH_WAY}; in turn", graphs=1, **USUAL,
    )
    | table(Recurrent, also=EACH_WAY, graphs=1, **USUAL)
    | table(
        Branching, Reset, InPlaceAndAnew, Alternating, ReadNowAndThen, Counted,
        also="verified", **USUAL,
    )
    | table(Weighted, Annealed, WithNumbers, also="verified", **USUAL)
    | table(Clipped, graphs=1, below="", validation=0)
    | table(
        each={Indexing: r"\(self.steps \+ 1\) % 9 is read at"},
        found="line", data=lambda: batches(12), validation=0,
    )
    | table(each={Objects: "self.found"}, data=lambda: batches(12), validation=0)
    | table(Totals, also="verified; cut", **USUAL)
    | table(Averaged, Bounded, Spelling, said=None, data=lambda: batches(12), validation=0)
)  # fmt: skip


class TestStoring(Promises):
    rows = ROWS
