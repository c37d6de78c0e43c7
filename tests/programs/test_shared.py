"""Parameters that a step uses several times, in graphs of submodules and in other code.

Autograd adds the gradients of all uses up, from the last one to the first, and only then adds the
sum to gradients of earlier steps: graphs that add their own give other last bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from tests.programs.table import Promises, row, table
from tests.training.fits import Net, batches


class Recurrent(nn.Module):
    """Uses its parameters once for each step in time."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(2, 8)

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(len(x), 8)
        for step in x.view(len(x), 4, 2).unbind(1):
            state = self.cell(step, state)
        return state


class Siamese(Net):
    """Encodes two views."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Recurrent()

    def loss(self, batch: Any) -> Tensor:
        x = batch["x"]
        difference = self.encoder(x) - self.encoder(x.flip(1))
        return F.cross_entropy(self.net(difference).float(), batch["y"])


class Surrounded(Net):
    """Uses the first weight ahead of the network, and behind it."""

    def loss(self, batch: Any) -> Tensor:
        x, weight = batch["x"], self.net[0].weight
        ahead = ((x @ weight.T) ** 2).mean() + ((2 * x) @ weight.T).abs().mean()
        return super().loss(batch) + ahead + ((3 * x) @ weight.T).abs().mean()


class Ahead(Net):
    """Uses the first weight twice ahead of the network."""

    def loss(self, batch: Any) -> Tensor:
        x, weight = batch["x"], self.net[0].weight
        ahead = ((x @ weight.T) ** 2).mean() + ((2 * x) @ weight.T).abs().mean()
        return super().loss(batch) + ahead


class Penalized(Net):
    """Adds a penalty in every other epoch: the observed step has none."""

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        if self.current_epoch % 2:
            loss = loss + 0.1 * sum(p.square().sum() for p in self.net.parameters())
        return loss


class Twice(Net):
    """Calls its network for a second part that some batches do not have."""

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        if batch["more"] is not None:
            loss = loss + self.net(batch["more"]).square().mean()
        return loss


def with_more() -> list[dict[str, Any]]:
    return [{**b, "more": b["x"].flip(0) if i < 7 else None} for i, b in enumerate(batches(12))]


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).mT


class Parametrized(Net):
    def __init__(self) -> None:
        super().__init__()
        linear = nn.Linear(8, 8)
        parametrize.register_parametrization(linear, "weight", Symmetric())
        self.net = nn.Sequential(linear, nn.Tanh(), nn.Linear(8, 3))

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + self.net(-batch["x"]).square().mean()


class Cached(Parametrized):
    """Computes the weights of a step once."""

    def loss(self, batch: Any) -> Tensor:
        with parametrize.cached():
            return super().loss(batch)


class CachedTarget(Parametrized):
    def loss(self, batch: Any) -> Tensor:
        with torch.no_grad(), parametrize.cached():
            target = self.net(batch["x"]) + self.net(2 * batch["x"])
        return super().loss(batch) + F.mse_loss(self.net(batch["x"]), target)


class Adapted(Net):
    """An inner loop: the network is called with weights that a step of gradient descent gave."""

    def loss(self, batch: Any) -> Tensor:
        halves = {key: value.chunk(2) for key, value in batch.items()}
        weights = dict(self.net[4].named_parameters())
        features = self.net[:4](batch["x"]).chunk(2)
        for i in range(2):
            found = torch.func.functional_call(self.net[4], weights, (features[i],))
            loss = F.cross_entropy(found, halves["y"][i])
            given = torch.autograd.grad(loss, [*weights.values()], create_graph=True)
            pairs = zip(weights.items(), given, strict=True)
            weights = {name: weight - 0.1 * gradient for (name, weight), gradient in pairs}
        return loss + F.cross_entropy(self.net(batch["x"]), batch["y"])


class CachedValidation(Parametrized):
    """Computes the weights of a validation once."""

    def on_validation_epoch_start(self) -> None:
        self.cache = parametrize.cached()
        self.cache.__enter__()

    def on_validation_epoch_end(self) -> None:
        self.cache.__exit__(None, None, None)


ROWS = (
    table(
        Penalized, Siamese, Surrounded, Ahead, Parametrized, Cached, CachedTarget,
        capture={"scope": "modules"}, also="by threes", said=None, replayed=9, max_epochs=4,
        validation=0,
    )
    | table(
        Twice, capture={"scope": "modules"}, also="accumulated", said=None, replayed=9,
        data=with_more, max_epochs=3, validation=0,
    )
    | {"adapted as a whole": row(Adapted, graphs=1, below=None, validation=0)}
    | table(
        Adapted, capture={"scope": "modules", "modules": ["net.4"]}, graphs=1, replayed=9,
        said="weights that the step has computed", placed=False, found=None, validation=0,
    )
    | table(
        CachedValidation, said=None, replayed=9, max_epochs=4,
        ignored="GraphCapture: a validation step runs eagerly: A capture must not begin inside",
        check=lambda fit: fit.statistics.evaluation["validation_step"].replayed == 0,
    )
)  # fmt: skip


class TestShared(Promises):
    rows = ROWS
