"""A GPU other than the first one, and models over two: where there are two GPUs."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_graphs import capture
from tests.loops.test_training import adamw, training
from tests.loops.twice import Lab, twice
from tests.training.fits import compare, fit_twice

OTHER = torch.device("cuda", 1)


def test_a_function_on_another_gpu() -> None:
    """The current device stays the first one: the model's counts."""

    def loop(lab: Lab) -> Any:
        model = lab.net()
        optimizer = adamw(model)
        step = lab.capture(training(model, optimizer, Tensor.item), model, optimizer)
        return [step(batch) for batch in lab.batches(16)]

    with torch.cuda.device(0):
        assert twice(loop, "cuda", OTHER).replayed == 11
        assert torch.cuda.current_device() == 0


def test_a_fit_on_another_gpu_leaves_the_memory_of_both_as_it_was(tmp_path: Path) -> None:
    def allocated() -> list[int]:
        gc.collect()  # a trainer and its module refer to each other
        torch.cuda.synchronize(OTHER)
        return [torch.cuda.memory_allocated(device) for device in (0, 1)]

    fit_twice("cuda", tmp_path / "first", devices=[1])  # cuBLAS keeps a workspace for each stream
    torch._C._cuda_clearCublasWorkspaces()
    before = allocated()
    eager, captured = fit_twice("cuda", tmp_path, devices=[1])
    compare(eager, captured)
    assert captured.trainer.strategy.root_device == OTHER
    del eager, captured
    torch._C._cuda_clearCublasWorkspaces()
    # The first fits may only now be gone
    assert all(now <= then for now, then in zip(allocated(), before, strict=True))


class Divided(nn.Module):
    """Has its second half on the other GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16).to("cuda:0"), nn.Linear(16, 3).to(OTHER)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).to(OTHER)).to(x.device)


def test_a_model_over_two_gpus_is_eager() -> None:
    model = Divided()
    optimizer = adamw(model)
    step = capture(training(model, optimizer, Tensor.item), model, optimizer)
    batch = next(Lab("cuda", torch.device("cuda:0")).batches(1))
    with pytest.warns(UserWarning, match="first.weight` is on cuda:0 and .* on cuda:1"):
        losses = [step(batch) for _ in range(8)]
    assert losses == sorted(losses, reverse=True)
    assert (step.report.eager, step.report.replayed) == (8, 0)
