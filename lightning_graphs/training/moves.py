"""Hyper-parameters that move during a fit: kept live, captured again, or left to eager steps."""

from __future__ import annotations

from typing import NamedTuple

from lightning_graphs.training.live_numbers import (
    LIVE_KEYS,
    HyperParameters,
    NumbersFrozenError,
)

_MOVES_TOLERATED = 3
"""How many moves, each too soon after the last, put the optimizer step out of the graph."""

_WORTH_A_CAPTURE = 20
"""How many replays between two moves repay the capture that the first one caused."""


class Decision(NamedTuple):
    """What a move leads to; every graph is dropped.

    Attributes:
        reason: What moved.
        obstacle: Why the optimizer step is eager from now on; None if it is captured again.
    """

    reason: str
    obstacle: str | None


class Moves:
    """Watches the hyper-parameters that graphs freeze, for the length of a fit.

    Args:
        expected: A scheduler says that it moves some of them.

    Attributes:
        live: Whether captures leave the optimizer's numbers open, to be rewritten.
    """

    def __init__(self, expected: bool) -> None:
        self.live = expected
        self._frozen_because = ""
        self._before: HyperParameters | None = None
        self._in_a_row = 0
        self._replays = 0

    def replayed(self) -> None:
        """Count a replay."""
        self._replays += 1

    def rebound(self) -> None:
        """What is frozen from now on may be something else."""
        self._before = None

    def frozen(self, error: NumbersFrozenError) -> str:
        """Give up to keep numbers live; what to say of it."""
        self.live = False
        self._frozen_because = error.observed
        return f"numbers of the optimizer cannot be rewritten in a graph ({error.observed})"

    def look(self, now: HyperParameters, *, can_live: bool) -> Decision | None:
        """What the hyper-parameters of the coming step lead to; None: nothing.

        Args:
            now: What a capture would freeze.
            can_live: The optimizer's kernel is one whose numbers can be rewritten.
        """
        before, self._before = self._before, now
        if before is None or before == now:
            return None
        moved = {name for (name, a), (_, b) in zip(before, now, strict=False) if a != b}
        names = ", ".join(sorted(moved))
        if can_live and not self.live and not self._frozen_because and moved <= LIVE_KEYS:
            self.live = True
            return Decision(f"{names} of the optimizer changed and may do so again", None)
        self._in_a_row = 1 if self._replays >= _WORTH_A_CAPTURE else self._in_a_row + 1
        self._replays = 0
        if self._in_a_row < _MOVES_TOLERATED:
            return None
        cycled = moved <= {"betas", "momentum"}
        hint = "; OneCycleLR(..., cycle_momentum=False) leaves it alone" if cycled else ""
        why = f" ({self._frozen_because})" if self._frozen_because else ""
        return Decision(
            f"{names} of the optimizer keeps changing",
            f"a scheduler or a hook moves {names}, which a graph would freeze{why}{hint}",
        )
