"""Loops of Fabric: each precision, each way of clipping, and what else a step calls of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.nn import functional as F

from tests.loops.twice import Lab, twice

PRECISIONS = ["32-true", "64-true", "bf16-true", "bf16-mixed"]
CLIPS: dict[str, dict[str, Any]] = {"norm": {"max_norm": 0.5}, "value": {"clip_val": 0.01}}


class Scoring(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        parts = [nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Dropout(0.25), nn.Linear(16, 3)]
        self.net = nn.Sequential(*parts)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def score(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self(x).float(), y)


def fabric_of(lab: Lab, precision: Any) -> Fabric:
    kind = "gpu" if lab.device.type == "cuda" else "cpu"
    return Fabric(accelerator=kind, devices=1, precision=precision)


# On a GPU: a fused step reads its rate from a tensor of 32 bits.
@pytest.mark.filterwarnings("ignore:capture.*parameters are float64, and a captured learning rate")
@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_loop_of_fabric(precision: str, clip: str, backend: str, device: torch.device) -> None:
    """Its backward pass, its clipping, a method that is marked, and reductions of one process."""

    def loop(lab: Lab) -> Any:
        fabric = fabric_of(lab, precision)
        plain = Scoring().to(device)
        optimizer = torch.optim.AdamW(plain.parameters(), 0.01, fused=True)
        model, optimizer = fabric.setup(plain, optimizer)
        model.mark_forward_method("score")

        def train_step(batch: Any, last: bool) -> Any:
            with fabric.no_backward_sync(model, enabled=not last):
                x = batch["x"].to(next(plain.parameters()).dtype)
                loss = model.score(x, batch["y"])
                fabric.backward(loss / 2)
            with fabric.autocast(), torch.no_grad():
                sure = model(x).softmax(-1).amax()
            if last:
                norm = fabric.clip_gradients(model, optimizer, **CLIPS[clip])
                optimizer.step()
                optimizer.zero_grad()
            return fabric.all_reduce(loss.detach()), sure, norm if last else None

        step = lab.capture(train_step, model, optimizer)
        losses = [step(batch, i % 2 == 1) for i, batch in enumerate(lab.batches(24))]
        return losses, plain.state_dict(), optimizer.state_dict()

    lab = twice(loop, backend, device)
    assert lab.replayed >= 8  # of two graphs


def test_a_model_that_fabric_makes(backend: str, device: torch.device) -> None:
    """``init_module`` makes it where, and in the precision that, it trains."""

    def loop(lab: Lab) -> Any:
        fabric = fabric_of(lab, "bf16-true")
        with fabric.init_module():
            plain = Scoring()
        optimizer = torch.optim.AdamW(plain.parameters(), 0.01, fused=True)
        model, optimizer = fabric.setup(plain, optimizer)

        def train_step(batch: Any) -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(batch["x"].bfloat16()).float(), batch["y"])
            fabric.backward(loss)
            optimizer.step()
            return loss.detach()

        step = lab.capture(train_step, model, optimizer)
        return [step(batch) for batch in lab.batches(20)], plain.state_dict()

    assert twice(loop, backend, device).replayed >= 10
