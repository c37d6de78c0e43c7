"""Tells the user of whole steps: what another capture is for, and why none is made."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from types import CodeType

from lightning_graphs.errors import CaptureError, GraphError
from lightning_graphs.policy.options import Options
from lightning_graphs.private.callsite import named_at
from lightning_graphs.regions.conditions import OF_LIBRARIES, conditions_of, differences
from lightning_graphs.report.messages import Messages, listed
from lightning_graphs.report.statistics import Statistics
from lightning_graphs.values.signature import Signature
from lightning_graphs.watch.environment import RaisedInCapture


class StepMessages:
    """Tells of captured and refused whole steps."""

    def __init__(self, options: Options, statistics: Statistics, messages: Messages) -> None:
        self._options = options
        self._statistics = statistics
        self._messages = messages
        self._latest: Signature | None = None

    def captured(self, signature: Signature) -> None:
        """Count a capture, and say what tells it from the last one."""
        self._statistics.captures += 1
        before, self._latest = self._latest, signature
        if before is not None and (change := listed(differences(before, signature))):
            self._messages.recaptured(f"captured another graph, because {change}", change)

    def waiting(
        self,
        signature: Signature,  # of the step
        why_not: str,  # why it is not captured
        # What reads a Python value of the batch that was another one before, if anything
        read: CaptureError | None,
        codes: Iterable[CodeType],  # what captured steps have run
        *,
        is_new: bool,  # no step before had a batch like this one
        at_once: bool,  # do not wait for more of them
    ) -> bool:
        """Say once, when eager steps go on and on, why they are."""
        before = self._latest
        moved = _moved(before, signature) if before is not None else []
        say = read is None and not moved
        is_time = self._messages.waits(
            signature, why_not, differences, is_new=is_new, at_once=at_once, say=say
        )
        if moved and is_time:
            read = CaptureError(
                "A graph would freeze an attribute or a global variable, which keeps changing.",
                "; ".join(moved) + named_at(moved[0], codes),
                "keep the value in a buffer that a hook fills: register_buffer(...) in __init__, "
                "and fill_(...) on it in on_train_batch_start",
            )
        if read is None or not is_time:
            return False
        self._say_refused(read, has_graphs=False)
        return True

    def refused(self, error: GraphError, *, has_graphs: bool) -> None:
        """Warn, or raise with ``on_failure="raise"``, that a step cannot be captured."""
        if self._options.on_failure == "raise":
            raise (error.__cause__ or error) if isinstance(error, RaisedInCapture) else error
        self._say_refused(error, has_graphs=has_graphs)

    def _say_refused(self, error: GraphError, *, has_graphs: bool) -> None:
        if self._options.scope == "auto" and not has_graphs:
            self._messages.note(
                "cannot capture the whole step; capturing submodules instead", error, after=_EAGER
            )
        else:
            self._messages.note(_EAGER, error)


_EAGER = "a step runs eagerly"


def _moved(before: Signature, after: Signature) -> list[str]:
    """The author's values that moved; empty if a person would name other changes as well."""
    old, new = conditions_of(before), conditions_of(after)
    same = replace(old, phase=new.phase, gradients=new.gradients, attributes=new.attributes)
    if replace(before, extra=(same,)) != after:
        return []
    lines = replace(same, attributes=old.attributes).diff(new)
    return [line for line in lines if not line.startswith(OF_LIBRARIES)]
