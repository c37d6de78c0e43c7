"""Every step is done the same way on all ranks, also where one of them is made to differ."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.training.rank_differences import KINDS, require_together


@pytest.mark.parametrize("kind", KINDS)
def test_one_rank_differs(tmp_path: Path, kind: str) -> None:
    require_together("emulated", tmp_path, kind)
