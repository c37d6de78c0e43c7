"""Captures of steps that only take notes: what is refused in them, as rows of a diagnosis.

Each is made as any other one, but on a backend that undoes everything and keeps nothing, and code
goes on where it is refused, as far as it can.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from torch import Tensor

from lightning_graphs.device.rules import (
    BATCH_VALUE,
    CHANGING_SHAPE,
    OBSTACLES,
    Obstacle,
    as_operator,
    noting,
)
from lightning_graphs.errors import CODE, CaptureError
from lightning_graphs.policy.options import Options
from lightning_graphs.private.callsite import LIBRARIES, NO_LINE, CallSite, site_in
from lightning_graphs.regions.conditions import (
    conditions_of,
    moving,
    numbers_moved,
    read_otherwise,
    tensors_moved,
)
from lightning_graphs.regions.optimizer import NoStateError, UpdateRefused
from lightning_graphs.regions.whole_step import StepRegion
from lightning_graphs.report.diagnosis import Diagnosis, Effect
from lightning_graphs.values.signature import Signature
from lightning_graphs.watch.batch import BatchValueRead
from lightning_graphs.watch.environment import RaisedInCapture
from lightning_graphs.watch.host import HostReads

_TRIES = 16
"""How often one step is captured at most, until nothing is learned any more."""

Refused = Sequence[CaptureError]


def options_of_notes(options: Options) -> Options:
    """Return the options for captures that take notes: whatever can be captured is."""
    return replace(options, verify=False, only_if_faster=False, min_repeats=0, on_failure="eager")


class JudgedSteps(StepRegion):
    """Captures steps as whole graphs, undoes that, and tells what was refused."""

    has_stepped = False  # optimizers have their state
    _found: Any = None  # key of the step that was captured last

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.answered: list[CaptureError] = []  # what the host does ahead of the graph

    def diagnose(self, call: tuple[Any, ...]) -> Refused:
        """Capture a step until nothing more is learned; return the refusals that are left."""
        refused: Refused = ()
        self._left.clear()
        self._rebind()
        if self._by_hand and not self.has_stepped:
            return refused
        self._facts.has_host_program, self.answered = False, []
        try:
            with noting():
                for _ in range(_TRIES):
                    refused = self._refused(call)
                    if not (refused and self._may_go_on(*refused)):
                        break
        finally:
            self.answered += self._capture.notes.answered
            for capturable in filter(None, self.capturables.values()):
                capturable.restore()
        return [e for e in refused if e.rule and not isinstance(e, NoStateError)]

    def _refused(self, call: tuple[Any, ...]) -> Refused:
        try:
            self._conditions = self._current_conditions(has_graphs=False)
            self._found = None
            if self._head.now is None:
                self._found = self._signature_of(call, self._conditions)[0]
            plan = self.capture(call, self._found)
        except CaptureError as error:
            first, *others = error.others or (error,)
            return [first, *(e for e in others if not isinstance(e, RaisedInCapture))]
        assert plan is not None, "there is no policy by which it would cost too much"
        self._found = plan.key
        self.discard(plan)
        return ()

    def _may_go_on(self, first: CaptureError, *others: CaptureError) -> bool:
        read = [error for error in others if isinstance(error, BatchValueRead)]
        for error in read:
            self._values.read(error)
        return self.may_succeed(self._found, first) or bool(read)

    def _key_behind(self, leaving: dict[str, Any]) -> tuple[Signature, list[Tensor]]:
        with self._head.modes():
            self._coming_key = self._signature_of((leaving,), self._watch.conditions())[0]
        return super()._key_behind(leaving)

    def step_key(self, call: tuple[Any, ...]) -> Signature | None:
        """Return the key of a step, with what Python has read; None of one with a head."""
        with contextlib.suppress(CaptureError):
            if self._head.now is None:
                found = self._signature_of(call, self._watch.conditions())[0]
                further = () if self._found is None else self._found.extra
                reads = [part for part in further if isinstance(part, HostReads)]
                # Values that steps store and read may come to a rest, as a window that is full
                return replace(found, extra=(*found.extra[:1], *reads))
        return None

    def follow(self, keys: Sequence[Signature]) -> None:
        """Let later captures follow numbers that have moved, as those of a fit do in time."""
        if len(keys) > 1 and (names := numbers_moved(*keys[-2:])):
            self._facts.places.learn_named(names)

    def changes(self, keys: Sequence[Signature]) -> CaptureError | None:
        """Return the refusal of steps of which none has a key that came before."""
        if len({key.specs for key in keys}) == len(keys) > 2:
            change = "; ".join(keys[-2].diff(keys[-1]))
            return CHANGING_SHAPE.refused(change[:400])
        if len(set(keys)) < len(keys) or len(keys) < 3:
            return None
        read = [conditions_of(key).attributes for key in keys]
        comes_back = len(set(read)) < len(read) or bool(tensors_moved(*read[-2:]))  # or is state
        for why in (moving, read_otherwise)[comes_back:]:
            found = [why(*pair, self._facts.reads.codes) for pair in pairwise(keys)]
            if None not in found:
                return found[-1]
        return None

    def batch_values(self, keys: Sequence[Signature]) -> Iterator[tuple[list[str], str, Effect]]:
        """Yield names of values that differ between batches, the line that reads one, an effect."""
        read = self._values.is_guarded
        tables = [dict(zip(key.names, key.leaves, strict=True)) for key in keys]
        ways = [tuple(map(table.get, sorted(read))) for table in tables]
        is_new = len(set(ways)) == len(ways) > 2
        yield sorted(read), self._values.observed, "eager step" if is_new else "further graph"
        yield sorted(self._values.unread), "", "left out unless it is read"


# ------------------ What is told

_HOW = (
    r",? ?\b(at|see|is|(named|returned|(is )?taken) at|(stored or returned, )?in the code of)? ?$"
)
_USED = r"(, which decides what the step runs,)? is (read|used|called|set)$"
_OF_HOST = ("host-read", "host-data", "host-copy", "data-dependent-shape")
"""Kinds of what the host may do ahead of a graph."""


def site_of(error: CaptureError) -> tuple[str, CallSite]:
    """Return what an error is about, in its words or an operator's name, and the user's line."""
    site = CallSite() if NO_LINE in error.observed else site_in(error.observed)
    what = error.observed.partition(f"{site} in " if site.line else NO_LINE)[0]
    return as_operator(re.sub(_USED, "", re.sub(_HOW, "", what))), site


class Findings:
    """Puts what captures of steps refuse into a diagnosis."""

    def __init__(self, diagnosis: Diagnosis) -> None:
        self.diagnosis = diagnosis
        self._keys: list[Signature] = []
        self._seen: set[object] = set()  # in this step

    def judge(self, steps: JudgedSteps, call: tuple[Any, ...]) -> None:
        """Capture a step, and take what was refused into the diagnosis."""
        self.begin()
        for error in steps.diagnose(call):
            self.add(error, self.effect_of(error))
        for error in steps.answered:
            self.add(error, self.effect_of_answered(error))
        if (key := steps.step_key(call)) is not None:
            self._keys.append(key)
            steps.follow(self._keys)

    def judge_all(self, steps: JudgedSteps) -> CaptureError | None:
        """Judge all steps together; return what changes from step to step."""
        for names, observed, effect in steps.batch_values(self._keys):
            if names:
                further = f"likewise {len(names) - 1} more" if names[1:] else ""
                row = BATCH_VALUE, names[0], site_in(observed)
                self.diagnosis.add(*row, observed=further, effect=effect)
        return steps.changes(self._keys)

    def begin(self) -> None:
        """Begin with another step."""
        self._seen.clear()

    def effect_of(self, error: CaptureError) -> Effect | None:
        """Return the effect of what was refused; None if it is not told."""
        return "eager optimizer step" if isinstance(error, UpdateRefused) else "eager step"

    def effect_of_answered(self, error: CaptureError) -> Effect | None:
        """Return the effect of what the host does ahead of the graph; None if it is not told."""
        known = OBSTACLES.get(error.rule)  # errors of others have no kind
        return "runs ahead of the graph" if known and known.kind in _OF_HOST else None

    def add_change(self, error: CaptureError | None) -> None:
        """Add what changes from step to step, unless its line is an obstacle already."""
        if error is not None:
            at = self.diagnosis.at(site_in(error.observed))
            if not any(finding.effect == "eager step" for finding in at):
                self.add(error)

    def add(self, error: CaptureError, effect: Effect | None = "eager step") -> None:
        """Add a refusal, once for each step; nothing without an effect."""
        if effect is None:
            return
        what, site = site_of(error)
        known, observed, code = OBSTACLES.get(error.rule), "", CODE.get(error.remedy, "")
        if known is None or known.kind == "contract":
            known = Obstacle(error.rule, error.remedy, "contract", code)
            what, observed = LIBRARIES.step, what
        elif known.remedy != error.remedy:
            known = replace(known, remedy=error.remedy, code=code)
        elif known.kind == "changing-shape":
            what, observed = "batch", error.observed
        elif NO_LINE in error.observed:
            observed = "in the backward pass"
        # One use may break a rule by several operators
        seen = error.rule, site, "" if known.kind in _OF_HOST else what
        if seen not in self._seen:
            self._seen.add(seen)
            self.diagnosis.add(known, what, site, observed=observed, effect=effect)
        error.__traceback__ = error.__context__ = error.__cause__ = None  # they hold frames
        error.others = ()
