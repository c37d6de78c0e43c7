"""Whether a step is worth a second graph, in two streams, and which of both graphs is kept."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from lightning_graphs.report import GraphRecord

FIRST = 200
"""Replays of a graph after which a second one is considered."""
LATER = 4
"""It is considered again after so many times more of them, where they have not paid for it yet."""
PAIRS = 24
"""How often both are replayed in turn, and timed."""

_FASTER = 0.99
"""The second graph is kept if it takes less than this part of the first one's time."""
_OF_SAVED = 0.1
"""The part of what replays have saved that a second graph may cost."""
_GAIN = 0.08
"""The part of a replay that a second graph is expected to save in the coming steps."""
_CAPTURES, _STEPS = 2.5, 6.0
"""What it costs: captures, one of which shows the data flow, and eager steps to verify it."""
MORE_MEMORY, AT_LEAST = 0.15, 2**26
"""How much more memory it may take, as a part of all that is reserved; so many bytes in any case,
since torch's allocator takes up to 20 MiB at a time, and cuBLAS 32 for each stream."""


def is_affordable(record: GraphRecord, steps_left: int) -> bool:
    """Whether the replays of a graph have paid for a second one, and coming ones will."""
    if record.eager_ms is None or record.replay_ms is None:
        return False
    costs = _CAPTURES * record.capture_ms + _STEPS * record.eager_ms
    saved = record.replays * (record.eager_ms - record.replay_ms)
    return costs <= min(_OF_SAVED * saved, _GAIN * record.replay_ms * steps_left)


def is_faster(first: Sequence[float], second: Sequence[float]) -> bool:
    """Compare the times of two graphs, in milliseconds."""
    return median(second) < _FASTER * median(first)


def in_words(first: Sequence[float], second: Sequence[float]) -> str:
    """Say which of two graphs is kept, and why, for a report."""
    one, two = median(first), median(second)
    if is_faster(first, second):
        return f"two streams: {two:.3f} ms in place of {one:.3f} ({two / one - 1:+.0%})"
    return f"one stream: {one:.3f} ms, in two {two:.3f} ms"
