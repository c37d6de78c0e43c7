"""What a fit tells its user about captures, recaptures and steps that run eagerly."""

from __future__ import annotations

from lightning_graphs.core.signature import Signature
from lightning_graphs.errors import GraphError
from lightning_graphs.training.options import Options
from lightning_graphs.training.statistics import Statistics, difference
from lightning_graphs.training.step import RaisedInCapture

_REBINDS_TOLERATED = 3
"""How often graphs may be dropped before one of them was replayed, without a warning."""

_RARE_TOLERATED = 4
"""How many eager steps in a row, for each graph allowed, are taken without a warning."""


class Notices:
    """Decides what is worth saying, and says it through :class:`Statistics`.

    Args:
        options: The callback's options.
        statistics: Where it is counted and said.
    """

    def __init__(self, options: Options, statistics: Statistics) -> None:
        self._options = options
        self._statistics = statistics
        self._rebinds = 0
        self._rare = 0
        self._said_rare = False
        self._seen_last: Signature | None = None

    def replayed(self) -> None:
        """Note that graphs are of use: what came before is forgotten."""
        self._rebinds = self._rare = 0

    def captured(self, signature: Signature, before: Signature | None) -> None:
        """Count a capture, and say what tells it from the last one, if there is one."""
        self._statistics.captures += 1
        if before is not None:
            change = difference(before, signature)
            self._statistics.recaptured(f"captured another graph, because {change}", change)

    def rebound(self, reason: str) -> None:
        """Say why every graph was dropped."""
        self._rebinds += 1
        if self._rebinds <= _REBINDS_TOLERATED:
            self._statistics.recaptured(f"recapturing, because {reason}", reason)
        else:
            self._statistics.note(
                f"a step runs eagerly: {reason}, and that again in every few steps"
            )

    def rare(self, signature: Signature) -> None:
        """Say so once when signatures come and go and none is ever captured."""
        self._rare += 1
        before, self._seen_last = self._seen_last, signature
        many = self._rare > _RARE_TOLERATED * self._options.max_graphs
        if many and not self._said_rare and before is not None and before != signature:
            self._said_rare = True
            self._statistics.note(
                f"steps run eagerly: in {self._rare} steps no batch signature came back often "
                f"enough for a graph. The last two differ: {difference(before, signature)}"
            )

    def refused(self, error: GraphError) -> None:
        """Warn, or raise with ``on_failure="raise"``, that a step cannot be captured.

        Raises:
            GraphError: the refusal itself, or what the step's own code raised.
        """
        if self._options.on_failure == "raise":
            raise (error.__cause__ or error) if isinstance(error, RaisedInCapture) else error
        self._statistics.note(f"a step runs eagerly: {error}")
