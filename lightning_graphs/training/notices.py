"""What a fit tells its user about captures, recaptures and steps that run eagerly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from lightning_graphs.core.signature import Signature
from lightning_graphs.errors import GraphError
from lightning_graphs.training.options import Options
from lightning_graphs.training.statistics import Statistics, difference
from lightning_graphs.training.step import RaisedInCapture

_REBINDS_TOLERATED = 3
"""How often graphs may be dropped before one of them was replayed, without a warning."""

_RARE_TOLERATED = 4
"""How many eager steps in a row, for each graph allowed, are taken without a warning."""

Kind = TypeVar("Kind")


class RareSteps(Generic[Kind]):
    """Counts steps that come and go, so that none of them is ever captured.

    Args:
        options: The callback's options.
        difference: What tells two kinds of steps apart, for a person to read; empty if nothing.

    Attributes:
        count: How many there were in a row.
    """

    def __init__(self, options: Options, difference: Callable[[Kind, Kind], str]) -> None:
        self.count = 0
        self._tolerated = _RARE_TOLERATED * options.max_graphs
        self._difference = difference
        self._before: Kind | None = None
        self._said = False

    def end(self) -> None:
        """Note that a step is worth a graph: what came before is forgotten."""
        self.count = 0

    def add(self, kind: Kind) -> str:
        """Count a step.

        Returns:
            How the last two differ, once in a fit, when there were too many; or else nothing.
        """
        self.count += 1
        before, self._before = self._before, kind
        if self._said or before is None or self.count <= self._tolerated:
            return ""
        change = self._difference(before, kind)
        self._said = bool(change)
        return change


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
        self._rare = RareSteps(options, difference)

    def replayed(self) -> None:
        """Note that graphs are of use: what came before is forgotten."""
        self._rebinds = 0
        self._rare.end()

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
        if change := self._rare.add(signature):
            self._statistics.note(
                f"steps run eagerly: in {self._rare.count} steps no batch signature came back "
                f"often enough for a graph. The last two differ: {change}"
            )

    def refused(self, error: GraphError) -> None:
        """Warn, or raise with ``on_failure="raise"``, that a step cannot be captured.

        Raises:
            GraphError: the refusal itself, or what the step's own code raised.
        """
        if self._options.on_failure == "raise":
            raise (error.__cause__ or error) if isinstance(error, RaisedInCapture) else error
        self._statistics.note(f"a step runs eagerly: {error}")
