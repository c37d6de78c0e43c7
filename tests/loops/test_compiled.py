"""Captured functions next to code that ``torch.compile`` has made."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lightning_graphs.watch.user_code import CompiledCode
from tests.loops.test_training import adamw, loss_of, training
from tests.loops.twice import Lab, twice


@pytest.mark.parametrize(
    "read", [lambda loss: loss.item(), lambda loss: (loss.detach().cpu(), [loss.tolist()])]
)
def test_methods_that_read_are_kept_back_without_a_mode(
    read: Callable[[Any], Any], backend: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mode of functions would have compiled code compiled once more, in the capture."""
    monkeypatch.setattr(CompiledCode, "runs", True)

    def loop(lab: Lab) -> Any:
        model = lab.net()
        optimizer = adamw(model)
        step = lab.capture(training(model, optimizer, read), model, optimizer)
        return [step(batch) for batch in lab.batches(10)]

    item, cpu = torch.Tensor.item, torch.Tensor.cpu
    assert twice(loop, backend, device).replayed == 5
    assert (torch.Tensor.item, torch.Tensor.cpu) == (item, cpu)


def test_compiled_code_may_step_the_optimizer(backend: str, device: torch.device) -> None:
    """It calls what stands in for ``optimizer.step()`` as it is."""

    def loop(lab: Lab) -> Any:
        model = lab.net()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01, fused=True)

        @torch.compile(backend="eager")  # of Dynamo, which traces this function
        def update() -> None:
            optimizer.step()

        def train_step(batch: Any) -> Any:
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            update() if lab.options is not None else optimizer.step()
            return loss.detach()

        step = lab.capture(train_step, model, optimizer, on_failure="eager")
        losses = []
        for i, batch in enumerate(lab.batches(12)):
            optimizer.param_groups[0]["lr"] = 0.01 / (1 + i // 4)
            losses.append(step(batch))
        return losses

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the emulated backend sees no kernels of compiled code
        twice(loop, backend, device)
