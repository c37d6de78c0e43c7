"""What a fit tells its user about captures, recaptures and steps that run eagerly."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any, Generic, TypeVar

from lightning_graphs.core.cache import PlanCache
from lightning_graphs.core.signature import Signature
from lightning_graphs.errors import CaptureError, GraphError
from lightning_graphs.training.conditions import Conditions
from lightning_graphs.training.options import Options
from lightning_graphs.training.statistics import Statistics, difference
from lightning_graphs.training.step import RaisedInCapture
from lightning_graphs.training.watch import OF_THE_TRAINER

_REBINDS_TOLERATED = 3
"""How often graphs may be dropped before one of them was replayed, without a warning."""

_RARE_TOLERATED = 4
"""How many eager steps in a row, for each graph allowed, are taken without a warning."""

_SHORT_LIVED = 8
"""Graphs that were dropped after fewer steps than this were hardly worth their capture."""

_DROPS_TOLERATED = 3
"""How often in a row such graphs are captured again."""

_WORTH_A_VALUE = 20
"""How many replays between two values of an attribute repay the capture that one caused."""

Kind = TypeVar("Kind")
Key = TypeVar("Key", bound=Hashable)


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


class UnsteadyAttributes:
    """Notices that attributes which the step reads take new values too often for any graph.

    A step counts where nothing but attributes and the part of the accumulation window tells it from
    the one before: graphs of submodules may serve such steps, and no graph serves ever new shapes.
    Before the first capture there is no telling what the step reads, and a refusal tells of it.

    Args:
        options: The callback's options: a value of the last ``max_graphs`` is no new one.

    Attributes:
        said: There were too many new values.
    """

    def __init__(self, options: Options) -> None:
        self._tolerated = options.max_graphs
        self._values: deque[tuple[tuple[str, Any], ...]] = deque(maxlen=options.max_graphs)
        self._before: Signature | None = None
        self._in_a_row = 0
        self._replays = 0
        self.said = False

    def replayed(self) -> None:
        """Note a replay."""
        self._replays += 1

    def captured(self, signature: Signature) -> None:
        """Note what a graph is for: it holds the attributes that its capture has read."""
        self._before = signature
        self._is_new(_conditions(signature).attributes)

    def add(self, signature: Signature) -> str:
        """Look at a step that has no graph.

        Returns:
            The attributes that moved last, once in a fit, when they did too often; or else nothing.
        """
        if self._before is None or self.said:
            return ""
        before, self._before = self._before, signature
        if not self._is_new(_conditions(signature).attributes):
            return ""
        change = "; ".join(_moved(before, signature))
        if not change:
            return ""
        self._in_a_row = 1 if self._replays >= _WORTH_A_VALUE else self._in_a_row + 1
        self._replays = 0
        self.said = self._in_a_row > self._tolerated
        return change if self.said else ""

    def _is_new(self, values: tuple[tuple[str, Any], ...]) -> bool:
        if values in self._values:
            return False
        self._values.append(values)
        return True


def _conditions(signature: Signature) -> Conditions:
    conditions: Conditions = signature.extra[0]  # type: ignore[assignment]
    return conditions


def _moved(before: Signature, after: Signature) -> list[str]:
    """The author's values that moved; empty if a person would name other changes as well."""
    old, new = _conditions(before), _conditions(after)
    same = replace(old, phase=new.phase, gradients=new.gradients, attributes=new.attributes)
    if replace(before, extra=(same,)) != after:
        return []
    lines = replace(same, attributes=old.attributes).diff(new)
    return [line for line in lines if not line.startswith(OF_THE_TRAINER)]


class Drops:
    """Counts graphs that are dropped after a few steps, again and again."""

    def __init__(self) -> None:
        self._in_a_row = 0
        self._replayed = 0

    @property
    def are_too_many(self) -> bool:
        """Whether further captures are not worth their time."""
        return self._in_a_row > _DROPS_TOLERATED

    def add(self, replayed: int) -> None:
        """Count a drop.

        Args:
            replayed: How many steps graphs have served so far.
        """
        short_lived = replayed - self._replayed < _SHORT_LIVED
        self._in_a_row, self._replayed = self._in_a_row + 1 if short_lived else 0, replayed


class Recaptures(Generic[Key]):
    """Says what further captures are made for, until it is plain that there are too few graphs.

    Args:
        options: The callback's options.
        statistics: Where captures are counted and said.
        cache: The graphs.
    """

    def __init__(
        self, options: Options, statistics: Statistics, cache: PlanCache[Key, Any]
    ) -> None:
        self._max_graphs = options.max_graphs
        self._statistics = statistics
        self._cache = cache
        self._again = 0

    def say_captured(self, key: Key, sentence: str, change: str) -> None:
        """Say what a capture is made for that is about to enter the cache.

        Args:
            key: Its key in the cache.
            sentence: What to say of it.
            change: What tells it from the last one.
        """
        again = self._cache.was_displaced(key)
        self._again += again
        if not again or self._again <= self._max_graphs:
            self._statistics.recaptured(sentence, change)
        elif self._again == self._max_graphs + 1:
            wanted = self._cache.wanted()
            self._statistics.recaptured(
                f"so far {wanted} signatures take turns in {self._max_graphs} graph(s), and are "
                "captured again when they come back: pad to fewer lengths, or write "
                f"max_graphs={wanted} or more",
                change,
            )
        else:
            self._statistics.recaptures.append(change)


class Notices:
    """Decides what is worth saying, and says it through :class:`Statistics`.

    Args:
        options: The callback's options.
        statistics: Where it is counted and said.
        cache: The graphs.
    """

    def __init__(
        self, options: Options, statistics: Statistics, cache: PlanCache[Signature, Any]
    ) -> None:
        self._options = options
        self._statistics = statistics
        self._rebinds = 0
        self._rare = RareSteps(options, difference)
        self._unsteady = UnsteadyAttributes(options)
        self._cache = cache
        self._recaptures = Recaptures(options, statistics, cache)

    def replayed(self) -> None:
        """Note that graphs are of use: what came before is forgotten."""
        self._rebinds = 0
        self._rare.end()
        self._unsteady.replayed()

    def captured(self, signature: Signature) -> None:
        """Count a capture that is about to be kept, and say what tells it from the last one."""
        self._statistics.captures += 1
        self._unsteady.captured(signature)
        for before in self._cache.keys()[:1]:
            change = difference(before, signature)
            if self._unsteady.said and _moved(before, signature):
                self._statistics.recaptures.append(change)
            else:
                sentence = f"captured another graph, because {change}"
                self._recaptures.say_captured(signature, sentence, change)

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
        if (change := self._rare.add(signature)) and not self._unsteady.said:
            self._statistics.note(
                f"steps run eagerly: in {self._rare.count} steps no batch signature came back "
                f"often enough for a graph. The last two differ: {change}"
            )

    def unsteady(self, signature: Signature) -> bool:
        """Say so once when attributes take new values too often; whether it was said now."""
        change = self._unsteady.add(signature)
        if change:
            error = CaptureError(
                "A captured step freezes the attributes and global variables that it reads: one "
                "that keeps changing gets no graph.",
                change,
                "keep the value in a buffer that a hook fills: register_buffer(...) in __init__, "
                "and fill_(...) on it in on_train_batch_start",
            )
            self._say_refused(error, has_graphs=False)
        return bool(change)

    def refused(self, error: GraphError, *, has_graphs: bool) -> None:
        """Warn, or raise with ``on_failure="raise"``, that a step cannot be captured.

        Args:
            error: Why.
            has_graphs: Other steps are captured, so that no submodules are tried.

        Raises:
            GraphError: the refusal itself, or what the step's own code raised.
        """
        if self._options.on_failure == "raise":
            raise (error.__cause__ or error) if isinstance(error, RaisedInCapture) else error
        self._say_refused(error, has_graphs=has_graphs)

    def _say_refused(self, error: GraphError, *, has_graphs: bool) -> None:
        if self._options.scope == "auto" and not has_graphs:
            self._statistics.note(f"no graph of the whole step: {error}")
        else:
            self._statistics.note(f"a step runs eagerly: {error}")
