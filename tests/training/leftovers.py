"""What must not be there after a fit, however it ended."""

from __future__ import annotations

import torch
from lightning.pytorch import Trainer

from lightning_graphs.lightning.strategy import NAMES
from tests.training.fits import TrainingContext


def assert_nothing_left(captured: TrainingContext) -> None:
    """Assert that strategy, stream, optimizer, module and trainer are Lightning's again."""
    trainer = captured.trainer
    assert not set(NAMES) & set(vars(trainer.strategy))
    assert type(trainer) is Trainer
    assert "profile" not in vars(trainer.profiler)
    assert "log" not in vars(captured.module)
    assert "<locals>" not in repr(type(captured.module).__getattribute__)
    assert captured.capture._handler is None
    assert "autocast_context_manager" not in vars(trainer.precision_plugin)
    for optimizer in trainer.optimizers:
        assert "zero_grad" not in vars(optimizer)
        for group in optimizer.param_groups:
            assert isinstance(group["lr"], float)
            assert group.get("foreach") is None
            assert not group.get("capturable")
    if torch.cuda.is_available():
        assert torch.cuda.current_stream() == torch.cuda.default_stream()
