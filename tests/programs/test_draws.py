"""Draws of ``random`` and ``numpy.random`` in a step: replays make them again, as an eager step."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_graphs.private.generators import comparable
from tests.programs.table import Promises, stepping
from tests.training.fits import Net, batches

Batch = dict[str, Tensor]


def states() -> tuple[Any, ...]:
    """Where the generators of the host are."""
    return random.getstate(), comparable(np.random.get_state()), torch.get_rng_state().tolist()


# ------------------------------------------------------------------ numbers


def mixup(self: Any, batch: Batch, batch_idx: int) -> Tensor:
    x, y = batch["x"], batch["y"]
    share = np.random.beta(0.4, 0.4)
    order = torch.randperm(x.size(0), device=x.device)
    logits = self.net(share * x + (1 - share) * x[order])
    loss = torch.nn.functional.cross_entropy
    self.log("share", share)
    return share * loss(logits, y) + (1 - share) * loss(logits, y[order])


def several(self: Any, batch: Batch, batch_idx: int) -> Tensor:
    a, b = random.random(), random.uniform(0.5, 2.0)
    c = np.random.rand()
    self.share = np.sqrt(1.0 - c) + a
    self.log_dict({"b": b, "root": self.share, "gauss": random.gauss(0, 1)})
    return self.loss(batch) * a + b * self.loss(batch) - np.random.normal() / 2


def functions_of_numpy(self: Any, batch: Batch, batch_idx: int) -> Tensor:
    clipped = np.clip(np.random.beta(0.4, 0.4), 0.2, 0.8)
    shares = np.where(np.random.rand(8) < 0.5, np.random.beta(0.4, 0.4, 8), 1.0)
    shares = torch.from_numpy(shares).to(batch["x"])[:, None]
    x = shares * batch["x"] + (1 - shares) * batch["x"].flip(0)
    return self.loss({**batch, "x": x}) * clipped


def in_place(self: Any, batch: Batch, batch_idx: int) -> Tensor:
    share = np.random.beta(0.2, 0.2)
    x = batch["x"].clone()
    flipped = x.flip(0).mul_(1.0 - share)
    return self.loss({**batch, "x": x.mul_(share).add_(flipped)})


def of_the_trainer(self: Any, batch: Batch, batch_idx: int) -> Tensor:
    return self.loss(batch) * random.uniform(0.5, 1 + self.global_step)


def as_tensors(self: Any, batch: Batch, batch_idx: int) -> Tensor:
    x = batch["x"]
    share = torch.tensor(np.random.beta(0.4, 0.4), device=x.device)
    places = torch.tensor([random.randint(0, 7) for _ in range(4)], device=x.device)
    weights = torch.from_numpy(np.random.rand(8)).to(x)
    noise = torch.as_tensor(np.random.normal(size=(8, 1)) * 0.5 + 1, device=x.device)
    kept = torch.tensor(np.random.rand(8) < 0.5, device=x.device)
    x = x * weights * noise.float() * share.to(x.dtype) * kept
    x = x + torch.Tensor(np.random.random((8, 1))).to(x) * torch.Tensor([random.random()]).to(x)
    return self.loss({**batch, "x": torch.cat([x, x[places]])[: len(batch["y"])]})


def permuted(self: Any, batch: Batch, batch_idx: int) -> Tensor:
    order = np.random.permutation(8)
    return self.loss({"x": batch["x"][order], "y": batch["y"][order]})


def seeds(self: Any, batch: Batch, batch_idx: int) -> Tensor:
    random.seed(3)
    return self.loss(batch) * random.random()  # the same one in every step


def some(self: Any, batch: Batch, batch_idx: int) -> Tensor:
    kept = np.random.rand(8) < 0.9
    other = torch.from_numpy(np.random.rand(8) < 0.9)
    x = torch.cat([batch["x"][kept], batch["x"][other]])
    return self.net(x).square().mean()


# ------------------------------------------------------------------ branches


def teacher_forcing(self: Any, batch: Batch, batch_idx: int) -> Tensor:
    return self.loss(batch) * (2.0 if random.random() < 0.5 else 1.0)


def scheduled_sampling(self: Any, batch: Batch, batch_idx: int) -> Tensor:
    forced = random.random() < 1 - self.global_step / 16
    self.log("forced", float(forced))
    return self.loss(batch) * (2.0 if forced else 1.0)


def sometimes(self: Any, batch: Batch, batch_idx: int) -> Tensor:
    if np.random.rand() > 0.4:
        return self.loss(batch)
    share = np.random.beta(1.0, 1.0)
    return self.loss({**batch, "x": batch["x"] * max(share, 1 - share)})


def one_of_several(self: Any, batch: Batch, batch_idx: int) -> Tensor:
    kind = random.choice(["twice", "once"])
    size = random.choice([4, 8])
    loss = self.loss({"x": batch["x"][:size], "y": batch["y"][:size]})
    return loss * 2 if kind == "twice" else loss


def unpacked(self: Any, batch: Batch, batch_idx: int) -> Tensor:
    top, left = np.random.randint(0, 2, 2)
    return self.loss(batch) * [1.0, 2.0][top] * (1 + left)


def an_array_of_one(self: Any, batch: Batch, batch_idx: int) -> Tensor:
    return self.loss(batch) * (2.0 if np.random.rand(1) < 0.5 else 1.0)


def spans(shape: tuple[int, int], share: float, *, length: int = 2) -> Any:
    """Masked spans of each sequence, as wav2vec 2.0 and HuBERT draw them."""
    mask = np.zeros(shape, dtype=bool)
    count = int(share * shape[1] / length + np.random.rand(1).item())
    starts = [np.random.choice(shape[1] - length + 1, count, replace=False) for _ in mask]
    wide = np.array(starts)[:, :, None] + np.arange(length)
    np.put_along_axis(mask, wide.reshape(len(mask), -1), 1, -1)
    return mask


def masked_spans(self: Any, batch: Batch, batch_idx: int) -> Tensor:
    x = batch["x"]
    mask = torch.tensor(spans((len(x), 8), 0.5), device=x.device, dtype=torch.bool)
    return torch.nn.functional.cross_entropy(self.net(x.masked_fill(mask, 0.0)), batch["y"])


def order(count: int) -> list[int]:
    drawn = list(range(count))
    random.shuffle(drawn)
    return drawn


def shuffled_features(self: Any, batch: Batch, batch_idx: int) -> Tensor:
    places = torch.tensor(order(8), device=self.device)
    return self.loss({**batch, "x": batch["x"][:, places]})


def noise(seed: int) -> Any:
    drawn = np.random.rand(8)
    drawn.sort()
    return drawn * torch.rand(()).item()


def two_generators(self: Any, batch: Batch, batch_idx: int) -> Tensor:
    drawn = torch.as_tensor(noise(3), device=self.device, dtype=torch.float32)
    return torch.nn.functional.cross_entropy(self.net(batch["x"] + drawn), batch["y"])


def resized(self: Any, batch: Batch, batch_idx: int) -> Tensor:
    size = random.choice([8, 12, 16])  # asked for its type, and used twice
    x = F.interpolate(batch["x"][None, None], size=(size, size), mode="bilinear")
    return self.loss({"x": x[0, 0, :8, :8], "y": batch["y"]})


# ------------------------------------------------------------------ ahead of the graph, or refused


def another_index_each_time(self: Any, batch: Batch, batch_idx: int) -> Tensor:
    return self.loss(batch) * list(range(100))[random.randint(0, 99)]


def coins(self: Any, batch: Batch, batch_idx: int) -> Tensor:
    heads = sum(1.0 for _ in range(8) if random.random() < 0.5)
    return self.loss(batch) * heads


def cropped(self: Any, batch: Batch, batch_idx: int) -> Tensor:
    return self.loss(batch) * self.net[0].weight.flatten()[random.randrange(100) :].mean()


def sampled(self: Any, batch: Batch, batch_idx: int) -> Tensor:
    chosen = torch.tensor(random.sample(range(9999), 5000), device=self.device)
    return self.loss(batch) * chosen.float().mean()


def shuffles(self: Any, batch: Batch, batch_idx: int) -> Tensor:
    factors = [1.0, 2.0, 3.0]
    random.shuffle(factors)
    return self.loss(batch) * factors[0]


def chooses_a_module(self: Any, batch: Batch, batch_idx: int) -> Tensor:
    return random.choice([self.net, self.net])(batch["x"]).square().mean()


def adds_in_place(self: Any, batch: Batch, batch_idx: int) -> Tensor:
    noise = kept = np.random.rand(8, 1)
    noise += 1.0
    return self.loss({**batch, "x": batch["x"] * torch.tensor(kept).to(batch["x"])})


def writes_places(self: Any, batch: Batch, batch_idx: int) -> Tensor:
    mask = np.zeros(8)
    np.put(mask, np.random.choice(8, 2, replace=False), 1.0)
    return self.loss({**batch, "x": batch["x"] * torch.from_numpy(mask).to(batch["x"])[:, None]})


REFUSED = {
    another_index_each_time: r"index\(random.randint\), which decides what the step runs, is",
    cropped: "random.randrange.*, which decides what the step runs, is",
    chooses_a_module: "random.choice is used at",
}


@contextmanager
def seeded() -> Iterator[None]:
    random.seed(7)
    yield


LEFT = {"around": seeded, "outside": states}  # generators are in the same place afterwards
ROWS = (
    stepping(
        Net, mixup, functions_of_numpy, seeds, several, in_place, of_the_trainer, as_tensors,
        permuted, sampled, max_epochs=3, also="accumulated; verified", replayed=9, **LEFT,
    )
    | stepping(
        Net, an_array_of_one, teacher_forcing, scheduled_sampling, sometimes, one_of_several,
        unpacked, max_epochs=4, replayed=9, **LEFT,
    )
    # A function of plain values that draws is called by replays.
    | stepping(
        Net, masked_spans, shuffled_features, data=lambda: batches(20), validation=0, graphs=1,
        **LEFT,
    )
    | stepping(Net, resized, max_epochs=4, graphs=3, **LEFT)
    | stepping(Net, coins, shuffles, adds_in_place, writes_places, **LEFT)
    | stepping(Net, two_generators, validation=0, **LEFT)
    | stepping(Net, each=REFUSED, **LEFT)
)  # fmt: skip


class TestDraws(Promises):
    rows = ROWS
