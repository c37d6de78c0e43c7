"""Graphs as an investment: a capture costs time once, and every replay saves some of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from time import perf_counter

from lightning.pytorch import Trainer

from lightning_graphs.core.cache import Account
from lightning_graphs.training.options import Options
from lightning_graphs.training.statistics import Pace, Statistics

_REHEARSED_PAYBACK = 20
"""Replays that repay a capture where nothing can be measured."""
_SIGHTINGS = 2
"""How often a signature is seen before its capture where nothing can be measured."""
_CREDIT = 8
"""How many captures there may be that came to nothing and that replays have not repaid."""
_FIRST_CAPTURE = 5.0, 150.0
"""What a first capture is expected to cost: so many eager steps, and so many milliseconds."""
_FURTHER_CAPTURE = 4.0
"""What another one is expected to cost as long as none was measured, in eager steps."""
_SAVED = 0.7
"""The part of an eager step that a replay is expected to save as long as none was measured."""
_MARGIN = 1.5
"""How much more than its cost a capture must be expected to save."""
_FOR_VERIFICATION = 0.05
"""The part of the fit's time that verifying further graphs may take."""
_MANY = 10_000
"""Steps that are left in a fit without an end."""


class Investment:
    """Decides which graphs are worth their capture.

    A capture is expected to pay where the steps that it will serve save more than it costs. Both
    are measured as the fit goes on. Where nothing can be measured (on the emulated backend), or
    with ``min_repeats`` or ``only_if_faster=False``, sightings decide alone.

    Args:
        options: The callback's options.
        statistics: How long steps take.
        steps_left: How many micro-batches are left in the fit.
        timed: Times say something about graphs.

    Attributes:
        earliest: After how many steps the first graph may come.
        is_over: No graph can pay off in this fit any more, and there is none.
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
        measures = timed and options.only_if_faster and given is None
        self._pace = statistics.pace if measures else None
        self._sightings = _SIGHTINGS if given is None else given
        self.earliest = options.warmup_steps + (0 if measures else self._sightings)
        self._steps_left = steps_left
        self.is_over = False
        self._costs: list[float] = []
        self._started = perf_counter()
        self._verified = 0.0
        self._verification = 0.0

    # ------------------------------------------------------------------ captures

    def why_not(self, seen: int, share: float, account: Account) -> str:
        """Why a signature is not worth a capture yet; empty if it is.

        Args:
            seen: How often it was seen, this step included.
            share: What part of the coming steps is expected to have its shape.
            account: What captures have led to.
        """
        if account.lost > _CREDIT + account.uses / self.payback:
            return (
                "graphs have to be dropped before they have paid off "
                f"({account.lost} graphs, {account.uses} replays)"
            )
        if self._pace is None:
            return "" if seen > self._sightings else "no batch signature came back often enough"
        if account.moved and seen <= self._sightings:
            return "values that the step reads have moved on"
        if not self._pace.eager:
            return "no eager step was timed yet"
        saving, left = self._saving(self._pace), self._steps_left()
        if saving <= 0.0:
            return "the GPU is busy all the time, and graphs save the time between kernels only"
        wanted = _MARGIN * self._cost(self._pace) / saving
        if left < wanted:
            at_best = _MARGIN * self._cost(self._pace) / (_SAVED * median(self._pace.eager))
            self.is_over = not self._costs and left < at_best
            return f"fewer steps are left than repay a capture (about {wanted:.0f})"
        return "" if left * share >= wanted else "no batch signature came back often enough"

    @property
    def measures(self) -> bool:
        """Whether times decide, and not sightings alone."""
        return self._pace is not None

    @property
    def payback(self) -> float:
        """How many replays repay a capture."""
        if self._pace is None or not self._pace.eager:
            return _REHEARSED_PAYBACK
        saving = self._saving(self._pace)
        return self._cost(self._pace) / saving if saving > 0.0 else float("inf")

    @contextmanager
    def paying(self) -> Iterator[None]:
        """Measure what a capture costs, whether it succeeds or not."""
        started = perf_counter()
        try:
            yield
        finally:
            self._costs.append((perf_counter() - started) * 1e3)

    def _saving(self, pace: Pace) -> float:
        """Milliseconds that a replay saves."""
        eager = median(pace.eager)
        if pace.replayed:
            return eager - median(pace.replayed)
        # A device that is still busy when a step has been launched did not wait for launches.
        return _SAVED * max(0.0, eager - 3 * median(pace.behind))

    def _cost(self, pace: Pace) -> float:
        """Milliseconds that the next capture costs."""
        eager = median(pace.eager)
        if not self._costs:
            steps, constant = _FIRST_CAPTURE
            return steps * eager + constant
        # The first capture of a process loads what later ones find.
        return median(self._costs[1:]) if len(self._costs) > 1 else _FURTHER_CAPTURE * eager

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


def steps_left(trainer: Trainer) -> int:
    """How many micro-batches are left in a fit, as far as one can tell."""
    left = float(_MANY)
    each = trainer.num_training_batches
    if trainer.max_epochs not in (None, -1) and each != float("inf"):
        done = trainer.fit_loop.epoch_loop.batch_idx
        left = (trainer.max_epochs - trainer.current_epoch) * each - done
    if trainer.max_steps not in (None, -1):
        ahead = (trainer.max_steps - trainer.global_step) * trainer.accumulate_grad_batches
        left = min(left, ahead)
    return int(left)
