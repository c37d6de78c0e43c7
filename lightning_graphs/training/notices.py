"""What a fit tells its user about captures, recaptures and steps that run eagerly."""

from __future__ import annotations

from dataclasses import replace

from lightning_graphs.core.signature import Signature
from lightning_graphs.errors import CaptureError, GraphError
from lightning_graphs.training.conditions import Conditions
from lightning_graphs.training.investment import Waiting
from lightning_graphs.training.memory import RaisedInCapture
from lightning_graphs.training.options import Options
from lightning_graphs.training.statistics import Statistics, differences, listed
from lightning_graphs.training.watch import OF_THE_TRAINER


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

    def waiting(
        self,
        signature: Signature,  # of the step
        why_not: str,  # why it is not captured
        # What reads a Python value of the batch that was another one before, if anything
        read: CaptureError | None,
        *,
        is_new: bool,  # no step before had a batch like this one
        at_once: bool,  # do not wait for more of them
    ) -> bool:
        """Say once, when eager steps go on and on, why they are."""
        before = self._latest
        moved = _moved(before, signature) if before is not None else []
        is_time = self._waiting.add(
            signature, why_not, is_new=is_new, at_once=at_once, say=not (moved or read)
        )
        if not (moved or read) or not is_time:
            return False
        if read is not None and not moved:
            self._say_refused(read, has_graphs=False)
            return True
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
        """Warn, or raise with ``on_failure="raise"``, that a step cannot be captured."""
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
