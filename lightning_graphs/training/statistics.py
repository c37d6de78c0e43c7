"""What happened to the steps of a fit, counted and said."""

from __future__ import annotations

from dataclasses import dataclass, field

from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightning_graphs.core.signature import Signature
from lightning_graphs.training.conditions import Conditions


@dataclass(slots=True)
class Statistics:
    """What happened to the steps of a fit.

    Attributes:
        eager: Micro-batches that ran eagerly.
        replayed: Micro-batches that were replayed.
        captures: Steps captured, a signature each.
        fallbacks: Reason of each refusal, in order.
        recaptures: What changed, for each capture after the first.
    """

    eager: int = 0
    replayed: int = 0
    captures: int = 0
    fallbacks: list[str] = field(default_factory=list)
    recaptures: list[str] = field(default_factory=list)

    def note(self, reason: str) -> None:
        """Warn, once for each reason, that something runs eagerly."""
        if reason not in self.fallbacks:
            self.fallbacks.append(reason)
            rank_zero_warn(f"GraphCapture: {reason}")

    def recaptured(self, sentence: str, change: str) -> None:
        """Say that another capture is made, and keep what changed."""
        self.recaptures.append(change)
        rank_zero_info(f"GraphCapture: {sentence}")


def difference(before: Signature, after: Signature) -> str:
    """What tells two captures apart, for a person to read."""
    lines = [line for line in before.diff(after) if not line.startswith("extra: ")]
    conditions: Conditions = before.extra[0]  # type: ignore[assignment]
    return "; ".join(lines + conditions.diff(after.extra[0]))  # type: ignore[arg-type]
