"""DDP on two GPUs: the same fits as in a rehearsal, over NCCL."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.training.ddp_fits import CASES, ON_A_GPU, require_equal_fits

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("case", [*CASES, *ON_A_GPU])
def test_a_fit_with_graphs_is_one_without(tmp_path: Path, case: str) -> None:
    require_equal_fits("cuda", tmp_path, case)
