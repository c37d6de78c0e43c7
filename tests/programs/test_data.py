"""Steps that set ``.data`` of parameters which their optimizer steps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_graphs.watch.side_effects import SetData
from tests.programs.table import Promises, stepping
from tests.training.fits import Net, batches


class Fused(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-2, fused=True)


class ByHand(Fused):
    """Perturbs weights between two backward passes, and puts them back."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.backup: dict[str, Tensor] = {}

    def begin(self, batch: Any) -> Any:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss)
        self.log("loss", loss)
        return optimizer


def normalised(self: Any, batch: Any, batch_idx: int) -> Any:
    with torch.no_grad():
        self.net[-1].weight.data = F.normalize(self.net[-1].weight.data, dim=1)
    return self.loss(batch)


def clipped(self: Any, batch: Any, batch_idx: int) -> Any:
    for parameter in self.net.parameters():
        parameter.data = torch.clamp(parameter.data, -0.3, 0.3)
    return self.loss(batch)


def adversarial(self: Any, batch: Any, batch_idx: int) -> None:
    """FGM: attacks each weight whose gradient has a norm."""
    optimizer = self.begin(batch)
    for name, parameter in self.net.named_parameters():
        norm = torch.norm(parameter.grad)
        self.backup[name] = parameter.data.clone()
        if norm != 0 and not torch.isnan(norm):
            parameter.data.add_(0.1 * parameter.grad / norm)
    self.manual_backward(self.loss(batch))
    for name, parameter in self.net.named_parameters():
        parameter.data = self.backup[name]
    self.backup = {}
    optimizer.step()


def sharpness_aware(self: Any, batch: Any, batch_idx: int) -> None:
    optimizer = self.begin(batch)
    parameters = [*self.net.parameters()]
    norm = torch.stack([p.grad.norm() for p in parameters]).norm()
    before = [p.data.clone() for p in parameters]
    for p in parameters:
        p.data = p.data + p.grad * (0.05 / (norm + 1e-12))
    optimizer.zero_grad()
    self.manual_backward(self.loss(batch))
    for p, old in zip(parameters, before, strict=True):
        p.data = old
    optimizer.step()


def keeps_what_it_sets(self: Any, batch: Any, batch_idx: int) -> Any:
    with torch.no_grad():
        self.kept = F.normalize(self.net[-1].weight.data, dim=1)
        self.net[-1].weight.data = self.kept
    return self.loss(batch)


def returns_what_it_sets(self: Any, batch: Any, batch_idx: int) -> Any:
    weight = F.normalize(self.net[-1].weight.data, dim=1)
    self.net[-1].weight.data = weight
    return {"loss": self.loss(batch), "weight": weight}


def writes_what_it_sets(self: Any, batch: Any, batch_idx: int) -> Any:
    weight = F.normalize(self.net[-1].weight.data, dim=1)
    self.net[-1].weight.data = weight
    weight.mul_(2.0)
    return self.loss(batch)


def keeps_what_was_there(self: Any, batch: Any, batch_idx: int) -> Any:
    old = self.net[-1].weight.data
    self.net[-1].weight.data = F.normalize(old, dim=1)
    return self.loss(batch) + old.sum() * 0.01


SETS = "verified; unverified; bf16"
ROWS = stepping(
    Fused, normalised, clipped, returns_what_it_sets, writes_what_it_sets, also=SETS, max_epochs=3,
    data=lambda: batches(8), replayed=12,
) | stepping(
    ByHand, adversarial, sharpness_aware, also=SETS, max_epochs=3, data=lambda: batches(8),
    replayed=12, found=None,
) | stepping(
    Fused,
    each=dict.fromkeys((keeps_what_it_sets, keeps_what_was_there), "cannot set the attribute"),
    found=None, max_epochs=3, data=lambda: batches(8), placed=False,
)  # fmt: skip


class TestData(Promises):
    rows = ROWS


def test_tied_weights_are_set_as_code_sets_them(backend: str, device: torch.device) -> None:
    """What two parameters share is no memory of one of them."""
    first, second = nn.Linear(4, 4, bias=False, device=device), nn.Linear(4, 4, bias=False)
    second.to(device).weight.data = first.weight.data
    both = nn.ModuleList([first, second])
    sets, new = SetData(both.parameters(), both, ()), torch.ones(4, 4, device=device)
    with sets.setting():
        first.weight.data = new
    assert first.weight.data_ptr() == new.data_ptr()
    assert not second.weight.eq(1).all()
