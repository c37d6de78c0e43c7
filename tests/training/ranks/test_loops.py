"""Functions that several processes call together: all ranks capture and replay alike."""

from __future__ import annotations

import pytest

from tests.loops.ranks import CASES, ended, require_decisions, require_equal
from tests.processes import in_one_process
from tests.ranks import run_on_ranks

pytestmark = in_one_process


@pytest.mark.parametrize("case", CASES)
def test_a_captured_loop_computes_what_the_eager_one_does(case: str) -> None:
    require_equal("emulated", case)


def test_all_ranks_go_the_same_way() -> None:
    require_decisions("emulated")


def test_graphs_end_ahead_of_their_process_groups() -> None:
    assert run_on_ranks(ended, "emulated") == [True, True]
