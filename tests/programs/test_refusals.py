"""What else stands in the way of a graph, and what only looks as if it did."""

from __future__ import annotations

import copy
import io
import itertools
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import torchmetrics
from torch import Tensor, nn

from tests.programs.table import Promises, row, table
from tests.training.equal.test_distributions import Variational
from tests.training.fits import Net, batches


class Catching(Net):
    """Goes on where a look at its loss fails."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        try:
            return loss * 2 if loss.tolist() > 1 else loss
        except Exception:
            return loss


class CatchingAll(Net):
    """Catches what no handler of errors does."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        try:
            return loss * (1.0 + len(loss.reshape(1).tolist()))
        except BaseException:
            return loss


class Trying(Net):
    """Goes on where something that a replay lacks is refused."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torchmetrics.MeanMetric()
        self.scales = itertools.cycle([1.0, 2.0])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        try:
            return loss * self.scale(loss.detach())
        except Exception:  # as frameworks of disent
            self.trainer.callbacks.clear()
            return loss


class Player:
    """Plays in a world of arrays."""

    def __init__(self) -> None:
        self.state = np.zeros(8, dtype=np.float32)

    def play(self, net: nn.Module) -> float:
        seen = torch.from_numpy(self.state).to(next(net.parameters()).device)
        with torch.no_grad():
            choice = int(net(seen[None]).argmax())
        self.state = (0.9 * self.state + 0.1 * np.arange(8) * (choice - 1)).astype(np.float32)
        return float(self.state[0])


class Playing(Net):
    """Plays in the step, and copies its weights now and then, so that a branch is refused first."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 3))
        self.target = copy.deepcopy(self.layers).requires_grad_(False)
        self.player = Player()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        reward = self.player.play(self.layers)
        aim = self.target(batch["x"]).softmax(1)
        if self.global_step % 7 == 0:
            self.target.load_state_dict(self.layers.state_dict())
        self.log("reward", reward)
        return nn.functional.cross_entropy(self.layers(batch["x"]), aim)


class TryingMetric(Trying):
    def scale(self, loss: Tensor) -> Any:
        return 2 * self.mean(loss)


class TryingGradient(Trying):
    def scale(self, loss: Tensor) -> Any:
        gradient = self.net[0].weight.grad
        return 1 if gradient is None else 1 + gradient.abs().mean()


class TryingShape(Trying):
    def scale(self, loss: Tensor) -> Any:
        loss = loss.reshape(1)
        return loss[loss > 0].sum()


class TryingCopy(Trying):
    def scale(self, loss: Tensor) -> Any:
        return loss.cpu().to(self.device)


class TryingIterator(Trying):
    def scale(self, loss: Tensor) -> Any:
        return next(self.scales)


class IteratorAhead(Net):
    """Takes a number from an iterator ahead of all weights, of which none may be lost."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = (1.0 + i / 8 for i in range(1000))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        scale = next(self.scales)
        return self.loss(batch) * scale


class Box:
    """Holds a tensor."""

    def __init__(self, content: Tensor) -> None:
        self.content = content


class Boxing(Net):
    """Stores another object in each step."""

    last: Box

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Box] = []
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.last = Box(loss.detach())
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.kept.append(self.last)
        self.seen.append([box.content.item() for box in self.kept[-3:]])


class Listing(Net):
    """A tensor is made of the numbers in others."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        return loss * torch.tensor([loss.detach()], device=self.device).mean()


class ListingLabels(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        sums = torch.tensor([batch["y"].sum(), batch["y"][0]], device=self.device)
        return self.loss(batch) * sums.float().mean()


class Windowed(Net):
    """The end of a list that grows: it is another one in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.losses.append(loss.detach())  # read
        return loss / sum(self.losses[-3:])


class Copying(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) + copy.deepcopy(self.net)(batch["x"]).mean()


class Saving(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        torch.save(loss.detach(), io.BytesIO())
        return loss


def _counts(layer: Any) -> float:
    layer.calls += 1
    return 1.0


def _appends(layer: Any) -> float:
    layer.sizes.append(8)
    return 1.0


def _draws(layer: Any) -> float:
    return random.random()


class Bound(nn.Linear):
    last: Any = None

    def forward(self, x: Tensor) -> Tensor:
        self.last = super().forward(x)  # bound
        return self.last.relu()


class Deciding(Net):
    """Its way is not the same in all steps: a graph for each."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        if random.random() < 0.5:
            loss = loss * 2
        if random.choice(["halved", "whole"]) == "halved":
            loss = loss / 2
        for _ in range(random.randint(1, 2)):
            loss = loss + 1
        if self.global_step % 2:
            loss = loss * 3
        return loss


class Hooked(Net):
    """Hooks compute in the step."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0].register_forward_hook(_kept)
        self.net[4].bias.register_hook(lambda gradient: gradient * 0.5)


def _kept(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    return output * 2


class Layer(nn.Module):
    """Leaves something behind in its ``leave``."""

    def __init__(self, leave: Callable[[Any], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.calls = 0
        self.sizes: list[int] = []
        self.leave = leave

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).relu() * self.leave(self)


class Layered(Net):
    def __init__(self, leave: Callable[[Any], Any], kind: Any = None) -> None:
        super().__init__()
        self.layer = kind(8, 8) if kind else Layer(leave)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss({**batch, "x": self.layer(batch["x"])})


class EmptyTensor(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        nothing = torch.tensor([], device=self.device)
        return self.loss(batch) + torch.cat([nothing, batch["x"][0]]).sum()


TWENTY = {"data": lambda: batches(20), "validation": 0}
LAYERS = {"capture": {"scope": "modules"}, "found": "rule remedy line", "replayed": 1, **TWENTY}
ROWS = (
    table(Catching, Listing, said=".", placed=False, **TWENTY)
    | table(
        Windowed, said="cannot compute with the list: self.losses: list of", found=None, replayed=0,
        data=lambda: batches(48), validation=0, max_epochs=1,
    )
    | table(
        Playing, said="which keeps changing: self.player.state", placed=False, found=None,
        replayed=60, capture={"scope": "auto"}, data=lambda: batches(120), validation=0,
        max_epochs=1,
    )
    | table(Saving, found=None, **TWENTY)  # saves behind each replay
    | table(ListingLabels, found=None, **TWENTY)  # ahead of the graph
    | table(CatchingAll, Copying, said=None, placed=False, found=None, **TWENTY)  # CUDA captures it
    | table(TryingMetric, validation=0)  # the host waits for what it reads
    # What an ``except`` has caught stays refused.
    | table(
        each={
            TryingGradient: ".grad of a parameter is read at",
            TryingCopy: "cannot read a value on the host|CUDA refuses to record",
            TryingShape: "an operator whose output shape depends on values|CUDA refuses to record",
            TryingIterator: "self.scales, an iterator, is read at",
            IteratorAhead: "self.scales, an iterator, is read at",
        },
        validation=0,
    )
    | {
        leave.__name__: row(partial(Layered, leave), said=said, **LAYERS)
        for leave, said in (
            (_counts, "changes self.calls"), (_appends, "changes self.sizes"),
            (_draws, "random.random"),
        )
    }
    | {"Bound": row(partial(Layered, _counts, Bound), capture={"scope": "modules"}, **TWENTY)}
    | table(Boxing, Hooked, EmptyTensor, Variational, **TWENTY)
    # Ways that draws and counters decide are a graph each.
    | table(
        Deciding, said=None, replayed=1, found="", capture={"warmup_steps": 30, "min_repeats": 0},
        max_epochs=1,
        data=lambda: batches(60), validation=0,
    )
)  # fmt: skip


class TestRefusals(Promises):
    rows = ROWS
