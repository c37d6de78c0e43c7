"""What every test of the callback shares."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """The models are tiny: threads would spend their time waiting for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _quiet_lightning() -> Iterator[None]:
    """Lightning introduces every trainer with several lines."""
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    before = logger.level
    logger.setLevel(logging.WARNING)
    yield
    logger.setLevel(before)
