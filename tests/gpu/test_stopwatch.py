"""How far a GPU is behind the host, told by events."""

from __future__ import annotations

import pytest
import torch

from lightning_graphs.policy.worth import Stopwatch

pytestmark = pytest.mark.gpu
CYCLES = 200_000_000  # some 100 ms


def test_it_knows_how_far_the_gpu_is_behind() -> None:
    torch.cuda._sleep(1000)  # it is loaded
    stopwatch = Stopwatch(torch.device("cuda"))
    idle = stopwatch.mark()
    behind = []
    for _ in range(2):  # a second step finds the GPU busy with the first
        torch.cuda._sleep(CYCLES)
        behind.append(stopwatch.mark())
    torch.cuda.synchronize()
    again = stopwatch.mark()
    torch.cuda.synchronize()
    first, second = map(stopwatch.behind, behind)
    assert stopwatch.behind(idle) < 20
    assert 50 < first < 400
    assert second > 1.5 * first
    assert stopwatch.behind(again) < 20
