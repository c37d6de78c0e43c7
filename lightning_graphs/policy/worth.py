"""Decides when a capture is worth it, when one waits, and when one gives up.

A capture costs time once, and every replay saves some of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from time import perf_counter

from lightning_graphs.policy.options import Options
from lightning_graphs.report.messages import FEW, NOT_TIMED, TOO_RARE
from lightning_graphs.report.statistics import Statistics, StepTimes

PAYBACK = 20
"""Replays that repay a capture where nothing can be measured."""
_SIGHTINGS = 2
"""How often a signature is seen before its capture where nothing can be measured."""
_MOVES = 3
"""So many moves of a number, each too soon after the last, put the optimizer step out of graphs."""
_FIRST_CAPTURE = 5.0, 150.0
"""What a first capture is expected to cost: so many eager steps, and so many milliseconds."""
_FURTHER_CAPTURE = 0.5
"""What another one is expected to cost, as a part of the first, which loads what they find."""
_DEARER = 2.5
"""How much more a capture costs in which every operator is looked at, or call by call."""
_SAVED = 0.7
"""The part of an eager step that a replay is expected to save as long as none was measured."""
_LEAST_SAVED = 0.02
"""The same where the GPU is busy all the time: what lies between kernels is not nothing."""
_MARGIN, _FURTHER_MARGIN = 1.5, 1.25
"""How much more than its cost a capture must be expected to save: the first one, and others."""
_FOR_VERIFICATION = 0.02
"""The part of the fit's time that verifying further graphs may take."""

_BUSY = "the GPU is busy all the time, and graphs save the time between kernels only"
_OFTEN = "which a graph would freeze; leave it alone, or move it every 20 steps at most"
"""The number is :data:`PAYBACK`."""


class CapturePolicy:
    """Decides which graphs are worth their capture.

    A capture is expected to pay where the steps that it will serve save more than it costs. Both
    are measured as the fit goes on. Where nothing can be measured (on the emulated backend), or
    with ``min_repeats`` or ``only_if_faster=False``, sightings decide alone.
    """

    def __init__(
        self,
        options: Options,
        statistics: Statistics,
        steps_left: Callable[[], int],
        *,
        timed: bool,
    ) -> None:
        given = options.min_repeats
        # Times decide, and not sightings alone
        self.measures = timed and options.only_if_faster and given is None
        self._pace = statistics.pace if self.measures else None
        self._sightings = _SIGHTINGS if given is None else given
        # After how many steps the first graph may come
        self.earliest = options.warmup_steps + (0 if self.measures else self._sightings)
        self._steps_left = steps_left
        self.is_over = False  # no graph can pay off in this fit any more, and there is none
        self._costs: list[float] = []
        self._dearer = 1.0  # how much more a capture is expected to cost than usual
        self._part = 1.0  # the part of a step's work that graphs can take over
        self._goes_on = True
        self._expected = 0.0  # how many uses the signature that was asked about last will have
        self._began = 0.0
        self._started = perf_counter()
        self._verified = 0.0
        self._verification = 0.0

    # ------------------------------------------------------------------ captures

    def why_not(self, seen: int, share: float, lost: int, uses: int, *, moved: bool) -> str:
        """Why a signature is not worth a capture yet; see :class:`~cache.PlanCache`."""
        if lost > FEW + uses / self.break_even:
            return (
                "graphs have to be dropped before they have paid off "
                f"({lost} graphs, {uses} replays)"
            )
        if self._pace is None:
            return "" if seen > self._sightings else TOO_RARE
        if moved and seen <= self._sightings:
            return "values that the step reads have moved on"
        if not self._pace.eager:
            return NOT_TIMED
        saving, left = self._saving(self._pace), self._steps_left()
        if saving <= 0.0:
            return _BUSY
        margin = _FURTHER_MARGIN if self._costs else _MARGIN
        wanted, self._expected = margin * self._cost(self._pace) / saving, left * share
        if left < wanted:
            most = _SAVED * self._part * median(self._pace.eager)
            at_best = _MARGIN * self._cost(self._pace) / most
            self.is_over = not self._costs and left < at_best
            if saving <= _LEAST_SAVED * self._part * median(self._pace.eager):
                return _BUSY
            return f"fewer steps are left than repay a capture (about {wanted:.0f})"
        return "" if self._expected >= wanted else TOO_RARE

    @property
    def break_even(self) -> float:
        """How many replays repay a capture."""
        if self._pace is None or not self._pace.eager:
            return PAYBACK
        saving = self._saving(self._pace)
        return self._cost(self._pace) / saving if saving > 0.0 else float("inf")

    @contextmanager
    def paying(self) -> Iterator[None]:
        """Measure what a capture costs, whether it succeeds or not."""
        self.tries_again()
        self._goes_on = True
        try:
            yield
        finally:
            if self._goes_on:
                self._costs.append((perf_counter() - self._began) * 1e3)

    def tries_again(self) -> None:
        """A capture begins anew: what it came to before was learned for all that follow."""
        self._began = perf_counter()

    def goes_on_with_host(self) -> bool:
        """Whether a capture is still worth it, now that it must look at every operator."""
        self._dearer = _DEARER
        self._goes_on = self._pace is None or self._expected >= _MARGIN * self.break_even
        return self._goes_on

    def goes_on_with_part(self, part: float) -> bool:
        """Whether captures are still worth it where a part of each step at least has graphs."""
        self._part, self._dearer = max(part, _LEAST_SAVED), _DEARER
        self._costs.clear()
        return self._pace is None or self._steps_left() >= _MARGIN * self.break_even

    def _saving(self, pace: StepTimes) -> float:
        """Milliseconds that a replay saves."""
        eager = median(pace.eager)
        if pace.replayed:
            return eager - median(pace.replayed)
        # A device that is still busy when a step has been launched did not wait for launches.
        return max(_LEAST_SAVED * eager, _SAVED * (eager - 3 * median(pace.behind))) * self._part

    def _cost(self, pace: StepTimes) -> float:
        """Milliseconds that the next capture costs."""
        if not self._costs:
            steps, constant = _FIRST_CAPTURE
            return (steps * median(pace.eager) + constant) * self._dearer
        first, *further = self._costs
        return median(further) if further else _FURTHER_CAPTURE * first

    # ------------------------------------------------------------------ verification

    @property
    def affords_verification(self) -> bool:
        """Whether one more verification is within what verification may take of the fit's time."""
        if self._pace is None or not self._verification:
            return True
        allowed = _FOR_VERIFICATION * (perf_counter() - self._started)
        return self._verified + self._verification <= allowed

    @contextmanager
    def verifying(self) -> Iterator[None]:
        """Measure what a verification costs."""
        started = perf_counter()
        try:
            yield
        finally:
            took = perf_counter() - started
            if self._verification:  # the first one loads what later ones find
                self._verified += took
            self._verification = took


class HyperParameterChurn:
    """Watches the hyper-parameters that graphs freeze, for the length of a fit."""

    def __init__(self, obstacle: str = "") -> None:
        # Why the optimizer step is eager; empty as long as it is captured
        self.obstacle = obstacle
        self._before: tuple[tuple[str, object], ...] = ()
        self._in_a_row = 0
        self.replays = 0  # since the last move

    def are_too_many(self, now: tuple[tuple[str, object], ...]) -> bool:
        """Whether the optimizer step is not worth a capture any longer; said once."""
        before, self._before = self._before, now
        if self.obstacle or before == now:
            return False
        moved = {name for (name, a), (_, b) in zip(before, now, strict=False) if a != b}
        if not moved:
            return False
        self._in_a_row = 1 if self.replays >= PAYBACK else self._in_a_row + 1
        self.replays = 0
        if self._in_a_row < _MOVES:
            return False
        names = ", ".join(sorted(moved))
        self.obstacle = f"a scheduler or a hook moves {names} time and again, {_OFTEN}"
        return True
