"""Optimizers whose kernels run on the default stream, whatever the current one is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.loops.test_training import loss_of
from tests.loops.twice import Lab, twice
from tests.training.fits import Net, compare, fit_twice


class OffStream(torch.optim.SGD):
    """Launches its kernels as those of bitsandbytes do."""

    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        with torch.cuda.stream(torch.cuda.default_stream()):
            super().step()
        return loss


OffStream.__module__ = "bitsandbytes.optim"
SAID = "the optimizer step runs eagerly: OffStream launches its kernels on the default stream"


def late(loss: Tensor) -> Tensor:
    """Let the GPU be behind."""
    torch.cuda._sleep(2_000_000)
    return loss


def test_the_step_of_a_function_waits_for_its_gradients() -> None:
    def loop(lab: Lab) -> Any:
        model = lab.net()
        optimizer = OffStream(model.parameters(), lr=0.1, momentum=0.5)

        def train_step(batch: Any) -> Tensor:
            optimizer.zero_grad()
            loss = late(loss_of(model, batch))
            loss.backward()
            optimizer.step()
            return loss.detach()

        step = lab.capture(train_step, model, optimizer, on_failure="eager")
        return [step(batch) for batch in lab.batches(16)]

    with pytest.warns(UserWarning, match=SAID):
        lab = twice(loop, "cuda", torch.device("cuda"))
    assert lab.replayed >= 8
    assert "default stream" in lab.steps[0].report.fallbacks[0]


class Late(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return late(super().training_step(batch, batch_idx))

    def configure_optimizers(self) -> Any:
        return OffStream(self.parameters(), lr=0.1, momentum=0.5)


def test_the_step_of_a_fit_waits_for_its_gradients(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=SAID):
        fits = fit_twice("cuda", tmp_path, module=Late, capture={"on_failure": "eager"})
    compare(*fits, replayed=False)
