"""Calls of submodules that bind attributes, and return or change objects around their tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Independent, MixtureSameFamily, Normal, kl_divergence

from lightning_graphs.device.rules import READ_BEFORE
from tests.training.fits import Net, compare, examined, fit_twice, named, rows, warned


class Scaled(nn.Module):
    """RevIN around a layer: statistics of each batch, kept in attributes from one end to the other.

    They are None, as in the library, until the first batch.
    """

    def __init__(self, *, detached: bool = True) -> None:
        super().__init__()
        self.layer, self.weight = nn.Linear(8, 8), nn.Parameter(torch.ones(8))
        self.mean: Any = None
        self.std: Any = None
        self.detached = detached

    def scale(self, x: Tensor) -> Tensor:
        self.mean = x.mean(dim=-1, keepdim=True)
        self.std = (x.var(dim=-1, keepdim=True, unbiased=False) + 1e-5).sqrt()
        if self.detached:
            self.mean, self.std = self.mean.detach(), self.std.detach()
        return (x - self.mean) / self.std * self.weight

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(self.scale(x)) / self.weight
        return y * self.std + self.mean


class Binding(Net):
    """The step uses what the block has left in its attributes."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.block = nn.Linear(8, 8), Scaled(detached=how == "detached")
        self.seen: list[float] = []

    def loss(self, batch: Any) -> Any:
        y = self.block(self.first(batch["x"]))
        loss = super().loss({**batch, "x": y})
        self.log("std", self.block.std.mean())
        return loss + 0.1 * (self.block.mean**2).mean()

    def on_train_batch_end(self, *_: Any) -> None:
        self.seen.append(self.block.mean.sum().item())
        self.log("kept", sum(self.seen))


@pytest.mark.parametrize("how", ["detached", "differentiable"])
def test_attributes_are_bound_again(backend: str, tmp_path: Path, how: str) -> None:
    capture = named("first", "block", verify=1)
    compare(*fit_twice(backend, tmp_path, module=lambda: Binding(how), capture=capture))
    found = examined(
        backend, tmp_path, module=lambda: Binding(how), capture=named("first", "block")
    )
    assert not rows(found, READ_BEFORE.kind)


class Averaged(nn.Module):
    """A moving average that is rebound: each call reads what the one before has left."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.average = nn.Linear(8, 8), torch.zeros(8)

    def forward(self, x: Tensor) -> Tensor:
        self.average = 0.9 * self.average.to(x) + 0.1 * x.detach().mean(0)  # anew
        y: Tensor = self.layer(x - self.average)
        return y


class Moving(Net):
    def __init__(self) -> None:
        super().__init__()
        self.block = Averaged()

    def loss(self, batch: Any) -> Any:
        return super().loss({**batch, "x": self.block(batch["x"])})


def test_what_is_read_before_stays_eager(backend: str, tmp_path: Path) -> None:
    said = "`average` is set to another tensor in every call, and may have been read before"
    warned(backend, tmp_path, said, module=Moving, capture=named("block", "net"))
    (row,) = rows(
        examined(backend, tmp_path, module=Moving, capture=named("block")), READ_BEFORE.kind
    )
    assert (row.operator, row.line) == (said, Averaged.forward.__code__.co_firstlineno)


class Encoder(nn.Module):
    """Returns a distribution, as variational models do."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.mean, self.scale, self.how = nn.Linear(8, 8), nn.Linear(8, 8), how

    def forward(self, x: Tensor) -> dict[str, Any]:
        found: Any = Normal(self.mean(x), nn.functional.softplus(self.scale(x)) + 1e-3)
        if self.how == "independent":
            found = Independent(found, 1)
        elif self.how == "mixture":
            mixed = torch.distributions.Categorical(logits=x.detach())
            found = MixtureSameFamily(mixed, found)
        return {"posterior": found, "z": x}


class Decoder(nn.Module):
    """Is given a distribution."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, posterior: Any, z: Tensor) -> Tensor:
        y: Tensor = self.layer(z) + posterior.mean.reshape(len(z), -1)[:, :1]
        return y


class Variational(Net):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.encoder, self.decoder = Encoder(how), Decoder()

    def loss(self, batch: Any) -> Any:
        made = self.encoder(batch["x"])
        posterior = made["posterior"]
        loss = super().loss({**batch, "x": self.decoder(**made)})
        if isinstance(posterior, Normal):
            prior = Normal(torch.zeros_like(posterior.loc), torch.ones_like(posterior.scale))
            return loss + 0.1 * kl_divergence(posterior, prior).mean()
        return loss - 0.01 * posterior.log_prob(posterior.mean).mean()


@pytest.mark.parametrize("how", ["normal", "independent", "mixture"])
def test_distributions_are_made_of_the_tensors_of_each_replay(
    backend: str, tmp_path: Path, how: str
) -> None:
    capture = named("encoder", "decoder", verify=1)
    compare(*fit_twice(backend, tmp_path, module=lambda: Variational(how), capture=capture))


class Filling(nn.Module):
    """Takes entries out of dicts that it is given, and puts others in, as scvi-tools does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor, kwargs: dict[str, Any], cache: dict[str, Any]) -> Tensor:
        y: Tensor = self.layer(x) * kwargs.pop("scale")
        kwargs["used"] = True
        cache["inner"]["y"] = y.tanh()
        cache["inner"]["seen"] = x.detach().mean()
        return y


class Filled(Net):
    def __init__(self) -> None:
        super().__init__()
        self.block = Filling()

    def loss(self, batch: Any) -> Any:
        kwargs, cache = {"scale": 2.0, "kept": 1}, {"inner": {"first": batch["x"]}}
        loss = super().loss({**batch, "x": self.block(batch["x"], kwargs, cache=cache)})
        assert [*kwargs] == ["kept", "used"]
        assert [*cache["inner"]] == ["first", "y", "seen"]
        self.log("seen", cache["inner"]["seen"])
        return loss + (cache["inner"]["y"] ** 2).mean()


@pytest.mark.parametrize("accumulate", [1, 2])
def test_entries_of_dicts_are_bound_again(backend: str, tmp_path: Path, accumulate: int) -> None:
    capture, options = named("block", verify=1), {"accumulate_grad_batches": accumulate}
    compare(*fit_twice(backend, tmp_path, module=Filled, capture=capture, **options))
