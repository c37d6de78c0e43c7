"""Whether graphs are worth it: what the times of eager and replayed steps say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_graphs.reporting import GraphRecord

GPU_BOUND_FROM = 0.95
"""Replay time over eager time from which on launching kernels was not what took the time."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the times say.

    Attributes:
        profitable: Whether replayed steps are faster at all.
        sentence: What a user should know; empty where graphs pay off clearly.
    """

    profitable: bool
    sentence: str = ""


def judge(records: Sequence[GraphRecord], otherwise: float | None = None) -> Verdict | None:
    """Compare the time of replayed steps with that of eager ones.

    Args:
        records: The captured signatures; those with both times count, each as often as it was
            replayed.
        otherwise: Time of an eager step where a record has none.

    Returns:
        None if no record has both times.
    """
    timed = [
        (eager, record.replay_ms, record.replays)
        for record in records
        if (eager := record.eager_ms or otherwise) and record.replay_ms and record.replays
    ]
    if not timed:
        return None
    steps = sum(count for *_, count in timed)
    eager = sum(ms * count for ms, _, count in timed) / steps
    replay = sum(ms * count for _, ms, count in timed) / steps
    times = f"a replayed step takes {replay:.3f} ms and an eager one {eager:.3f} ms"
    if replay < GPU_BOUND_FROM * eager:
        return Verdict(True)
    if replay * GPU_BOUND_FROM <= eager:
        return Verdict(
            replay < eager,
            f"{times}: the GPU is busy all the time, and fewer launches gain little; "
            "torch.compile(module) makes the kernels themselves fewer and faster",
        )
    return Verdict(False, f"{times}: graphs make this step slower")
