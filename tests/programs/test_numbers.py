"""Numbers of the trainer in a step: logged, in a branch, and as a factor, as an eager step does."""

from __future__ import annotations

import importlib
import math
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.programs.table import Promises, row, stepping
from tests.training.fits import Net

Batch = dict[str, Tensor]


class Moving(Net):
    """Its rate moves at every step."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("teacher", torch.zeros(8, 16).T)
        self.register_buffer("other", torch.zeros(8, 16).T)
        self.schedule = torch.linspace(0.04, 0.4, 20)  # no buffer
        self.register_buffer("table", torch.linspace(0.5, 1.5, 180).view(60, 3))
        self.momenta, self.weights = np.linspace(0.9, 1.0, 60), [1 + 0.05 * i for i in range(60)]
        self.count, self.seen = 0, None

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.0123, fused=True)
        moving = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
        return [optimizer], [{"scheduler": moving, "interval": "step"}]


# ------------------------------------------------------------------ logged


def logs_floats(self: Any, batch: Batch, batch_idx: int) -> Tensor:
    loss = self.loss(batch)
    self.log("index", float(batch_idx))
    self.log("step", float(self.global_step + 1), on_step=True, on_epoch=True)
    self.log(
        "epoch_number",
        float(self.current_epoch),
        prog_bar=True,
    )
    self.log_dict({"steps": float(self.global_step), "indices": float(batch_idx), "loss": loss})
    return loss


def logs_arithmetic(self: Any, batch: Batch, batch_idx: int) -> Tensor:
    rate = self.trainer.optimizers[0].param_groups[0]["lr"]
    self.log("share", (batch_idx + 1) / self.trainer.num_training_batches, prog_bar=True)
    self.log("beta", min(1.0, self.global_step / 12))
    self.log("temperature", max(0.5, 1 - 0.05 * self.global_step))
    self.log_dict({"twice": 2 * rate, "third": abs(rate / 3 - 1), "root": rate**0.5})
    self.log("last", self.lr_schedulers().get_last_lr()[0] * 10)
    self.log("rest", abs(math.floor(self.global_step / 3) - 100) % 7)
    return self.loss(batch)


def logs_conversions(self: Any, batch: Batch, batch_idx: int) -> Tensor:
    index = float(batch_idx)
    self.log("most", max(-1.0, index))
    self.log("tenths", int(self.global_step / 10))
    self.log("wave", math.sin(index), prog_bar=True)
    self.log("root", np.sqrt(1.0 + batch_idx))
    return self.loss(batch)


# ------------------------------------------------------------------ in a branch


def every_fourth(self: Any, batch: Batch, batch_idx: int) -> Tensor:
    loss = self.loss(batch)
    if batch_idx % 4 == 3:
        loss = loss * 2
        self.log("fourth", loss)
    return loss


def late_loss(self: Any, batch: Batch, batch_idx: int) -> Tensor:
    loss = self.loss(batch)
    if self.current_epoch >= 2:
        loss = loss + self.net[0].weight.square().sum()
    return loss


def last_batch(self: Any, batch: Batch, batch_idx: int) -> Tensor:
    return self.loss(batch) * (3.0 if self.trainer.is_last_batch else 1.0)


def by_the_rate(self: Any, batch: Batch, batch_idx: int) -> Tensor:
    rate = self.optimizers().param_groups[0]["lr"]
    return self.loss(batch) * (1.0 if rate > 0.005 else 2.0)


def first_step(self: Any, batch: Batch, batch_idx: int) -> Tensor:
    if self.global_step == 0:
        self.example = batch["x"].clone()
    if not batch_idx:
        return 2 * self.loss(batch)
    return self.loss(batch)


def milestones(self: Any, batch: Batch, batch_idx: int) -> Tensor:
    return self.loss(batch) / (2.0 if self.current_epoch in (1, 2) else 1.0)


def value_of_the_epoch(self: Any, batch: Batch, batch_idx: int) -> Tensor:
    weights, named = [1.0, 0.5, 0.25, 0.125], {0: 1.0, 1: 2.0}
    epoch = self.current_epoch
    return self.loss(batch) * weights[epoch] * named.get(epoch, 3.0) * math.exp(-epoch)


def divides_later(self: Any, batch: Batch, batch_idx: int) -> Tensor:
    loss = self.loss(batch)
    if batch_idx > 0 and 4 / batch_idx < 1:
        loss = loss * 0.5
    return loss


def shows(first: int) -> Any:
    """A step that reads the device once in three steps."""

    def shows_images(self: Any, batch: Batch, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        if batch_idx % 3 == first:
            self.seen = [i for i in range(int(loss.item()))]
        return loss

    return shows_images


# ------------------------------------------------------------------ as a factor


def annealed(self: Any, batch: Batch, batch_idx: int) -> Tensor:
    beta = min(1.0, self.global_step / 12)
    penalty = self.net[0].weight.square().sum()
    self.log("beta", beta)
    self.log("penalty", beta * penalty)
    return self.loss(batch) + beta * penalty


def warmed_up(self: Any, batch: Batch, batch_idx: int) -> Tensor:
    weight = self.global_step / 8 if self.global_step < 8 else 1.0
    self.log("weight", weight)
    return self.loss(batch) * weight


def ramps_up(self: Any, batch: Batch, batch_idx: int) -> Tensor:
    """As mean teachers do: at its bound the share is a constant to Python, and so is the weight."""
    share = min(self.global_step / 12, 1.0)
    weight = math.exp(-5.0 * (1.0 - share) ** 2) + max(0.0, 1 - self.global_step / 15)
    self.log("weight", weight)
    return self.loss(batch) * weight


def ramps_up_bare(self: Any, batch: Batch, batch_idx: int) -> Tensor:
    """At its bound the share may be an argument that must be a number to torch."""
    share = min(self.global_step / 4, 1.0)
    self.log("share", share * 0.5)
    given = self.net(batch["x"]), batch["y"]
    return nn.functional.cross_entropy(*given, label_smoothing=0.1 * share)


def tempered(self: Any, batch: Batch, batch_idx: int) -> Tensor:
    temperature = max(0.5, 3.0 - 0.07 * self.global_step)
    logits = self.net(batch["x"]) * (1 / temperature)
    return nn.functional.cross_entropy(logits, batch["y"]) * (1 / 3 + batch_idx)


def taught(self: Any, batch: Batch, batch_idx: int) -> Tensor:
    momentum = 1 - 0.3 / (1 + self.global_step)
    with torch.no_grad():
        self.teacher.mul_(momentum).add_((1 - momentum) * self.net[0].weight)
    distance = (self.net[0].weight - self.teacher).square().mean()
    return self.loss(batch) + (1 - momentum) * distance


def all_operators(self: Any, batch: Batch, batch_idx: int) -> Tensor:
    loss, number = self.loss(batch), 0.3 + 0.1 * self.global_step
    loss = (loss * number - number / 7) * number + number
    loss = number - (number + loss - number) * number / (1 + loss)
    loss = loss.add(batch_idx).sub(self.global_step).clone().mul_(number)
    loss += number
    loss -= self.current_epoch
    return torch.mul(loss, -number)


def cosine(self: Any, batch: Batch, batch_idx: int) -> Tensor:
    share = 0.5 * (1 + math.cos(math.pi * float(self.global_step) / 40))
    share = share if isinstance(share, float) else 100.0
    return self.loss(batch) * share + np.exp(-share) * (1.0 + int(batch_idx))


def by_the_rates(self: Any, batch: Batch, batch_idx: int) -> Tensor:
    rate = self.optimizers().param_groups[0]["lr"]
    return self.loss(batch) * (1 - 10 * rate) + rate


def as_a_tensor(self: Any, batch: Batch, batch_idx: int) -> Tensor:
    return self.loss(batch) * torch.tensor(1.0 + self.global_step / 20, device=self.device)


def divides(self: Any, batch: Batch, batch_idx: int) -> Tensor:
    number = 3 + 0.3 * self.global_step
    logits = self.net(batch["x"]) / number
    with torch.no_grad():
        logits.div_(1 + batch_idx)
    share = (batch["y"] > 0) * (0.1 * number) + batch["y"] / number + (batch["y"] < number - 4)
    return (nn.functional.cross_entropy(logits, batch["y"], reduction="none") * share).mean()


def chooses(self: Any, batch: Batch, batch_idx: int) -> Tensor:
    logits, number = self.net(batch["x"]), 0.31 + 0.01 * self.global_step
    sure = logits.softmax(-1).amax(-1) > number
    logits = torch.where(logits > -number, logits, -number).masked_fill(logits > 5, number)
    logits = logits.clamp(-1.0, number).clip(-number) % (1 + number)
    return torch.mean(nn.functional.cross_entropy(logits, batch["y"], reduction="none") * sure)


def averages(self: Any, batch: Batch, batch_idx: int) -> Tensor:
    decay, own = 1 - 0.3 / (1 + self.global_step), self.net[0].weight
    with torch.no_grad():
        self.teacher.lerp_(own, 1 - decay)
        self.teacher.mul_(decay).add_(own, alpha=1 - decay).sub_(own, alpha=0.1 * (1 - decay))
        torch._foreach_mul_([self.teacher, self.other], decay)
        torch._foreach_lerp_([self.other], [own], 1 - decay)
    distance = torch.add(own, self.teacher, alpha=-decay) - self.other
    return self.loss(batch) + distance.square().mean()


def fills(self: Any, batch: Batch, batch_idx: int) -> Tensor:
    loss, number = self.loss(batch), 0.95**self.global_step
    weights = torch.ones(3, device=self.device)
    weights[1] = number
    weights[weights > 0.97] = number
    weights.masked_fill_(weights < 0.4, number)
    weights = weights * torch.full((3,), number, device=self.device) + loss.new_full((), number)
    weights = weights + torch.full_like(weights, number).fill_(1 - number)
    return loss + nn.functional.cross_entropy(self.net(batch["x"]), batch["y"], weight=weights)


def becomes_tensors(self: Any, batch: Batch, batch_idx: int) -> Tensor:
    """Of the host, as a GPU has it: autograd keeps none of them."""
    loss, number = self.loss(batch), 0.95**self.global_step
    loss = loss * torch.tensor(number) / torch.full((), 1 + number) - torch.scalar_tensor(number)
    return loss * torch.tensor(torch.linspace(1, 2, 60)[self.global_step])


def indexes(self: Any, batch: Batch, batch_idx: int) -> Tensor:
    logits = self.net(batch["x"]) / self.schedule[self.current_epoch]
    weights = self.table[-1 - self.global_step] * torch.tensor(self.schedule[batch_idx])
    return nn.functional.cross_entropy(logits, batch["y"], weight=weights)


def in_half(self: Any, batch: Batch, batch_idx: int) -> Tensor:
    loss = self.loss(batch).bfloat16() / (1 + self.global_step)
    return (loss - 0.1 * self.global_step).float()


def reads_tables(self: Any, batch: Batch, batch_idx: int) -> Tensor:
    """Schedules in an array and in a list; the momentum is stored, as what follows from it."""
    self.seen = momentum = self.momenta[self.global_step]
    with torch.no_grad():
        self.teacher.mul_(momentum).add_((1 - momentum) * self.net[0].weight)
    self.log("momentum", momentum)
    distance = (self.net[0].weight - self.teacher).square().mean()
    return self.loss(batch) * self.weights[min(self.global_step, 40)] + distance


def counts_by_itself(self: Any, batch: Batch, batch_idx: int) -> Tensor:
    """BYOL: a function of math of a count that the step stores, and is stored, too."""
    self.seen = tau = 1 - 0.1 * (math.cos(math.pi * self.count / 60) + 1) / 2
    self.count += 1
    return self.loss(batch) * tau


@contextmanager
def scheduling() -> Iterator[None]:
    """A package has a function ``decay``."""
    text = "import math\ndef decay(n, most):\n    return float(1 + math.cos(math.pi * n / most))\n"
    with tempfile.TemporaryDirectory() as root, pytest.MonkeyPatch.context() as patch:
        packages = Path(root) / "site-packages"
        packages.mkdir()
        (packages / "scheduling.py").write_text(text)
        patch.syspath_prepend(str(packages))
        patch.delitem(sys.modules, "scheduling", raising=False)
        yield


def decays(self: Any, batch: Batch, batch_idx: int) -> Tensor:
    """A package makes a number a float: one graph for all epochs, whose number is an input."""
    momentum = importlib.import_module("scheduling").decay(self.current_epoch, 10)
    self.teacher.data = self.teacher.data * momentum + self.net[0].weight.data * (1 - momentum)
    return self.loss(batch) + (self.net[0].weight - self.teacher).square().mean()


def drawn(self: Any, batch: Batch, batch_idx: int) -> Tensor:
    """Has a host program, too."""
    share = torch.rand((), device="cpu").to(self.device)
    loss = nn.functional.cross_entropy(self.net[4](self.net[0](batch["x"])), batch["y"])
    return loss * share * (1 - batch_idx / 20)


# ------------------------------------------------------------------ refused


def stores(self: Any, batch: Batch, batch_idx: int) -> Tensor:
    self.seen = batch_idx
    return self.loss(batch)


def as_text(self: Any, batch: Batch, batch_idx: int) -> Tensor:
    return self.loss(batch) * float(str(batch_idx))


def indexed(self: Any, batch: Batch, batch_idx: int) -> Tensor:
    return self.loss(batch) * [1.0, 2.0, 1.5, 0.5, 1.0, 2.0, 1.5, 0.5, 1.0][self.global_step % 9]


def raised(self: Any, batch: Batch, batch_idx: int) -> Tensor:
    return self.loss(batch) ** (1 + 0.1 * self.global_step)


def smoothed(self: Any, batch: Batch, batch_idx: int) -> Tensor:
    given = self.net(batch["x"]), batch["y"]
    return nn.functional.cross_entropy(*given, label_smoothing=0.01 * self.global_step)


def writes_an_entry(self: Any, batch: Batch, batch_idx: int) -> Tensor:
    self.table[self.global_step].add_(1)
    return self.loss(batch) * self.table.mean()


def clamps_at_zero(self: Any, batch: Batch, batch_idx: int) -> Tensor:
    return self.loss(batch) + self.net(batch["x"]).clamp(min=0.0 * self.global_step).mean()


def schedules_itself(self: Any, batch: Batch, batch_idx: int) -> Tensor:
    loss = self.loss(batch)
    self.lr_schedulers().step()
    return loss


class Stored(Moving):
    """What its step stores is there before, as it happens."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.seen = batch_idx


REFUSED = {
    as_text: "batch_idx is read at .*float",
    indexed: "trainer.global_step % 9 is read at",
    raised: r"trainer.global_step.* is read at",
    smoothed: "trainer.global_step is read at .*label_smoothing",
    writes_an_entry: "an index into a tensor that the step writes, is used at .*add_",
    clamps_at_zero: "trainer.global_step is read at .*clamp",
}


def overrides_log(self: Any, batch: Batch, batch_idx: int) -> Tensor:
    self.log("index", float(batch_idx))
    return self.loss(batch)


def in_turn(self: Any, batch: Batch, batch_idx: int) -> Tensor:
    """Layers, names and numbers of loops in turn: a graph for each."""
    layer = [self.net[0], self.net[0]][batch_idx % 2]
    x = batch["x"]
    for _ in range(1 + self.global_step % 2):
        x = x * 1.25
    self.log(f"of {batch_idx % 2}", layer(x).square().mean())
    return nn.functional.cross_entropy(self.net(x), batch["y"]) * (0.5, 2.0)[batch_idx % 2]


def in_stages(self: Any, batch: Batch, batch_idx: int) -> Tensor:
    """A layer, a length, a loop and an exponent that stay for many steps each."""
    seen = math.ceil(min(1.0, 0.3 + self.global_step / 40) * 8)
    x = nn.functional.pad(batch["x"][:, :seen], (0, 8 - seen))
    for _ in range(1 + self.global_step // 20):
        x = x * 1.25
    layer = (self.net[0], self.net)[min(self.global_step // 16, 1)]
    share = 0.5 ** int(self.global_step / 20)
    smoothed = nn.functional.cross_entropy(
        self.net(x), batch["y"], label_smoothing=0.1 / (1 + self.global_step // 20)
    )
    return smoothed + share * layer(x).square().mean()


class Overriding(Moving):
    """Looks at what it logs."""

    def log(self, name: str, value: Any, **options: Any) -> None:
        super().log(name, max(value, 3.0), **options)


FACTOR = {"max_epochs": 4, "graphs": range(4), "replayed": 17}
ROWS = (
    stepping(
        Moving, logs_floats, logs_arithmetic, logs_conversions, max_epochs=3, replayed=9,
        also="by threes",
    )
    | stepping(
        Moving, every_fourth, late_loss, last_batch, by_the_rate, first_step, milestones,
        value_of_the_epoch, divides_later, max_epochs=4, replayed=13, also="accumulated",
    )
    # One in three of its steps cannot be captured.
    | {
        f"shows {first} {scope}": replace(found, capture={"scope": scope})
        for scope in ("step", "auto")
        for first in range(3)
        for found in stepping(
            Moving, shows(first), max_epochs=4, said="a step runs eagerly", replayed=17
        ).values()
    }
    | stepping(
        Moving, as_a_tensor, warmed_up, taught, by_the_rates, cosine, divides, chooses, averages,
        fills, becomes_tensors, indexes, in_half, reads_tables, counts_by_itself,
        also="by threes", ignored="To copy construct", **FACTOR,
    )
    | stepping(
        Moving, annealed, tempered, also="by threes; float64; bf16; bf16-true", **FACTOR
    )
    | stepping(Moving, all_operators, also="by threes; float64; bf16", **FACTOR)
    | stepping(Moving, in_turn, max_epochs=4, graphs=2, replayed=13)
    | stepping(Moving, in_stages, max_epochs=4, replayed=13, resumes=False, found=None)
    | stepping(Moving, decays, around=scheduling, max_epochs=4, graphs=1)
    | stepping(Moving, drawn, max_epochs=3)
    | stepping(Moving, ramps_up, max_epochs=3, graphs=2, replayed=19)
    | stepping(Moving, ramps_up_bare, max_epochs=3, replayed=13, found=None)
    | stepping(Moving, stores)
    | {"stored over itself": row(type("Over", (Stored,), {"training_step": stores}))}
    | {"Overriding": row(type("Overriding", (Overriding,), {"training_step": overrides_log}))}
    | stepping(Moving, each=REFUSED)
    | stepping(Moving, schedules_itself, said="the step sets .*last_epoch", placed=False,
        ignored="Seems like .optimizer.step|Detected call of .lr_scheduler.step",)
)  # fmt: skip
# No line is known
ROWS["schedules_itself"] = replace(ROWS["schedules_itself"], found="rule remedy")


class TestNumbers(Promises):
    rows = ROWS
