"""Functions that several processes call together: all ranks capture and replay alike."""

from __future__ import annotations

import pytest

from tests.loops.ranks import CASES, require_decisions, require_equal


@pytest.mark.parametrize("case", CASES)
def test_a_captured_loop_computes_what_the_eager_one_does(case: str) -> None:
    require_equal("emulated", case)


def test_all_ranks_go_the_same_way() -> None:
    require_decisions("emulated")
