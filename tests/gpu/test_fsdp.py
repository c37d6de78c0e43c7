"""FSDP2 on two GPUs: the same fits as in a rehearsal, over NCCL."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.training.fsdp_fits import (
    CASES,
    EAGER,
    ON_A_GPU,
    require_eager_fits,
    require_equal_checkpoints,
    require_equal_fits,
)

pytestmark = pytest.mark.gpu

RUNS: dict[str, Callable[[Path], None]] = {
    **{f"equal: {c}": partial(require_equal_fits, "cuda", case=c) for c in [*CASES, *ON_A_GPU]},
    **{f"eager: {case}": partial(require_eager_fits, "cuda", case=case) for case in EAGER},
    "a checkpoint in one file": partial(require_equal_checkpoints, "cuda", whole=True),
    "a checkpoint of each rank": partial(require_equal_checkpoints, "cuda", whole=False),
}


@pytest.mark.parametrize("name", RUNS)
def test_on_two_gpus(side_by_side: Callable[[str], None], name: str) -> None:
    side_by_side(name)
