"""Hyper-parameters that move during a fit: captured again, or left to eager optimizer steps."""

from __future__ import annotations

from lightning.pytorch import Trainer

_MOVES_TOLERATED = 3
"""How many moves, each too soon after the last, put the optimizer step out of the graph."""

_WORTH_A_CAPTURE = 20
"""How many replays between two moves repay the capture that the first one caused."""

_LEAVE_ALONE = "which a graph would freeze; cycle_momentum=False leaves momentum and betas alone"


class Moves:
    """Watches the hyper-parameters that graphs freeze, for the length of a fit.

    Attributes:
        obstacle: Why the optimizer step is eager; empty as long as it is captured.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.obstacle = _cycled(trainer)
        self._before: tuple[tuple[str, object], ...] = ()
        self._in_a_row = 0
        self._replays = 0

    def replayed(self) -> None:
        """Count a replay."""
        self._replays += 1

    def are_too_many(self, now: tuple[tuple[str, object], ...]) -> bool:
        """Whether the optimizer step is not worth a capture any longer; said once."""
        before, self._before = self._before, now
        if self.obstacle or before == now:
            return False
        moved = {name for (name, a), (_, b) in zip(before, now, strict=False) if a != b}
        if not moved:
            return False
        self._in_a_row = 1 if self._replays >= _WORTH_A_CAPTURE else self._in_a_row + 1
        self._replays = 0
        if self._in_a_row < _MOVES_TOLERATED:
            return False
        names = ", ".join(sorted(moved))
        self.obstacle = f"a scheduler or a hook moves {names} time and again, {_LEAVE_ALONE}"
        return True


def _cycled(trainer: Trainer) -> str:
    for config in trainer.lr_scheduler_configs:
        if config.interval == "step" and getattr(config.scheduler, "cycle_momentum", False):
            name = type(config.scheduler).__name__
            return f"{name} moves momentum or betas at every step, {_LEAVE_ALONE}"
    return ""
