"""A captured function that is closed leaves the memory of the GPU as it was."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import Tensor

from tests.loops.test_training import adamw, training
from tests.loops.twice import Lab


def allocated_after(options: Any) -> int:
    """Return the bytes that a loop leaves, whose model and optimizer are alive."""
    lab = Lab("cuda", torch.device("cuda"), options)
    torch.manual_seed(0)
    model = lab.net()
    optimizer = adamw(model)
    step = lab.capture(training(model, optimizer, Tensor.detach), model, optimizer)
    for batch in lab.batches(24):
        step(batch)
    optimizer.zero_grad()
    if options is not None:
        assert step.report.replayed > 10
        step.close()
    del batch
    gc.collect()
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()  # each stream has one
    return torch.cuda.memory_allocated()


def test_a_function_that_is_closed_leaves_no_memory() -> None:
    allocated_after(None)
    expected = allocated_after(None)
    assert allocated_after({}) == expected
    assert allocated_after({}) == expected
