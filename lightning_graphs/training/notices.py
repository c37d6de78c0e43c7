"""What a fit tells its user about captures, recaptures and steps that run eagerly."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Generic, TypeVar

from lightning_graphs.core.signature import Signature
from lightning_graphs.errors import CaptureError, GraphError
from lightning_graphs.training.conditions import Conditions
from lightning_graphs.training.options import Options
from lightning_graphs.training.statistics import Statistics, differences, listed
from lightning_graphs.training.step import RaisedInCapture
from lightning_graphs.training.watch import OF_THE_TRAINER

_PATIENCE = 32
"""How many eager steps in a row are taken before it is said why."""
_NEW_IN_A_ROW = 8
"""The same where each of them has a batch of a kind that no step before had."""

_SHAPES = re.compile(r"batch\S*: \w+\[[\d,]*\] -> \w+\[")
_PAD = "pad batches to a few fixed lengths"
_LEAVE_OUT = "make tensors of what is new in every batch, or leave it out in collate_fn"

Kind = TypeVar("Kind")


class Waiting(Generic[Kind]):
    """Steps that run eagerly because none of them is worth a capture yet."""

    def __init__(
        self,
        options: Options,
        statistics: Statistics,
        difference: Callable[[Kind, Kind], list[str]],
    ) -> None:
        self._tolerated = _PATIENCE + (options.min_repeats or 0)
        self._statistics = statistics
        self._difference = difference
        self._before: Kind | None = None
        self._in_a_row = self._new_in_a_row = 0
        self._is_said = False

    def end(self) -> None:
        """Note that graphs are of use: what came before is forgotten."""
        self._in_a_row = self._new_in_a_row = 0

    def add(
        self,
        kind: Kind,
        why_not: str,
        *,
        is_new: bool = False,
        at_once: bool = False,
        say: bool = True,
    ) -> bool:
        """Count an eager step; when they go on and on, say once in a fit why they are.

        Args:
            is_new: No step before had a batch like this one.
            at_once: Do not wait for more of them.
            say: Say it; else somebody else does.

        Returns:
            Whether it is time to say it.
        """
        self._in_a_row += 1
        self._new_in_a_row = self._new_in_a_row + 1 if is_new else 0
        before, self._before = self._before, kind
        is_time = at_once or self._in_a_row > self._tolerated
        is_time |= self._new_in_a_row >= _NEW_IN_A_ROW
        if self._is_said or not (is_time or not self._statistics.replayed):
            return False
        changes = self._difference(before, kind) if before is not None else []
        further = f". The last two steps differ: {listed(changes)}" if changes else ""
        if is_new and changes:
            further += f"\n  remedy: {_PAD if all(map(_SHAPES.match, changes)) else _LEAVE_OUT}"
        self._statistics.waiting = f"steps run eagerly: {why_not}{further}"
        if is_time and say:
            self._statistics.note(self._statistics.waiting)
        self._is_said |= is_time
        return is_time


class Notices:
    """Decides what is worth saying, and says it through :class:`Statistics`."""

    def __init__(self, options: Options, statistics: Statistics) -> None:
        self._options = options
        self._statistics = statistics
        self._waiting = Waiting(options, statistics, differences)
        self._latest: Signature | None = None

    def replayed(self) -> None:
        """Note that graphs are of use: what came before is forgotten."""
        self._waiting.end()

    def captured(self, signature: Signature) -> None:
        """Count a capture, and say what tells it from the last one."""
        self._statistics.captures += 1
        before, self._latest = self._latest, signature
        if before is not None and (change := listed(differences(before, signature))):
            self._statistics.recaptured(f"captured another graph, because {change}", change)

    def rebound(self, reason: str) -> None:
        """Say why every graph was dropped."""
        self._statistics.recaptured(f"recapturing, because {reason}", reason)

    def waiting(self, signature: Signature, why_not: str, *, is_new: bool, at_once: bool) -> bool:
        """Say once, when eager steps go on and on, why they are.

        Returns:
            Whether it is because attributes take new values: submodules may have graphs then.
        """
        before = self._latest
        moved = _moved(before, signature) if before is not None else []
        is_time = self._waiting.add(
            signature, why_not, is_new=is_new, at_once=at_once, say=not moved
        )
        if not moved or not is_time:
            return False
        error = CaptureError(
            "A captured step freezes the attributes and global variables that it reads: one that "
            "keeps changing gets no graph.",
            "; ".join(moved),
            "keep the value in a buffer that a hook fills: register_buffer(...) in __init__, "
            "and fill_(...) on it in on_train_batch_start",
        )
        self._say_refused(error, has_graphs=False)
        return True

    def refused(self, error: GraphError, *, has_graphs: bool) -> None:
        """Warn, or raise with ``on_failure="raise"``, that a step cannot be captured.

        Raises:
            GraphError: the refusal itself, or what the step's own code raised.
        """
        if self._options.on_failure == "raise":
            raise (error.__cause__ or error) if isinstance(error, RaisedInCapture) else error
        self._say_refused(error, has_graphs=has_graphs)

    def _say_refused(self, error: GraphError, *, has_graphs: bool) -> None:
        if self._options.scope == "auto" and not has_graphs:
            self._statistics.note(
                "cannot capture the whole step; capturing submodules instead", error
            )
        else:
            self._statistics.note("a step runs eagerly", error)


def _moved(before: Signature, after: Signature) -> list[str]:
    """The author's values that moved; empty if a person would name other changes as well."""
    old, new = _conditions(before), _conditions(after)
    same = replace(old, phase=new.phase, gradients=new.gradients, attributes=new.attributes)
    if replace(before, extra=(same,)) != after:
        return []
    lines = replace(same, attributes=old.attributes).diff(new)
    return [line for line in lines if not line.startswith(OF_THE_TRAINER)]


def _conditions(signature: Signature) -> Conditions:
    conditions: Conditions = signature.extra[0]  # type: ignore[assignment]
    return conditions
