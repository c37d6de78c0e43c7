"""DDP on two ranks: what a fit trains with the callback is what it trains without, to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.training.ddp_fits import CASES, require_equal_fits


@pytest.mark.parametrize("case", CASES)
def test_a_fit_with_graphs_is_one_without(tmp_path: Path, case: str) -> None:
    require_equal_fits("emulated", tmp_path, case)
