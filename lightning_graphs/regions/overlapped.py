"""Steps with a second graph, in which gradients of weights are computed beside the rest.

A graph is replayed for a while. Then the step is captured twice more: once to see its data flow,
and once in two streams, by that. The second graph is compared with the eager step as any other.
Both compute the same, so that they are replayed in turn, in steps of the fit, and timed. The faster
one is kept. If that is the second one, a third takes its turn against it, whose weights are cast
together.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from functools import partial
from statistics import median
from typing import Any, Protocol, TypeVar

import torch

from lightning_graphs.autograd.backward import write_all
from lightning_graphs.device.inspect import require_driver
from lightning_graphs.device.overlap import DataFlow, Overlapping
from lightning_graphs.errors import GraphError, in_one_line, is_out_of_memory
from lightning_graphs.policy.worth import Stopwatch
from lightning_graphs.private.exchange import TURN, exchanged, replaced
from lightning_graphs.regions.context import CaptureFacts, TrainingContext
from lightning_graphs.regions.plan import NEVER, StepPlan
from lightning_graphs.regions.step import StepCapture
from lightning_graphs.report import GraphRecord
from lightning_graphs.watch.mechanism import Instruction

Mode = TypeVar("Mode", DataFlow, Overlapping)

_WORDS = ("two streams", "one stream"), ("weights cast together", "each by itself")
"""What is tried in turn, and what stands otherwise."""
_TOO_DEAR = "another capture costs too much"


class Steps(Protocol):
    """The region whose steps these are."""

    plans: MutableMapping[Any, StepPlan]

    @property
    def capturing(self) -> StepCapture: ...
    def key(self, call: tuple[Any, ...]) -> Any: ...
    def capture(self, call: tuple[Any, ...], key: Any) -> StepPlan | None: ...
    def verify(self, plan: StepPlan, beside: StepPlan, call: tuple[Any, ...]) -> bool: ...
    def discard(self, plan: StepPlan) -> None: ...
    def release(self, plan: StepPlan) -> None: ...


# ------------------ Trials


def _launch_by(plan: StepPlan, launch: Instruction) -> None:
    """Let a function launch the graph of a plan."""
    part = plan.parts["forward"]
    plan.parts["forward"] = part._replace(before=(*part.before[:-1], launch))


def _end_trial(*plans: StepPlan) -> None:
    for plan in plans:
        plan.trial, plan.due = None, NEVER
        _launch_by(plan, plan.graphs["forward"].launch)


class Contest:
    """Replays two plans for the same steps in turn, and times their graphs."""

    def __init__(
        self,
        plans: tuple[StepPlan, StepPlan],
        cache: MutableMapping[Any, StepPlan],
        clock: Stopwatch,
        flow: DataFlow | None = None,  # what the winner is tried on, if that is the second one
    ) -> None:
        self.plans, self.flow = plans, flow
        self._cache, self._clock = cache, clock
        self._marks: tuple[list[Any], list[Any]] = ([], [])

    def begin(self) -> None:
        for plan, other, marks in zip(self.plans, reversed(self.plans), self._marks, strict=True):
            plan.trial = self
            _launch_by(plan, self._launching(plan, other, marks))

    def _launching(self, plan: StepPlan, other: StepPlan, marks: list[Any]) -> Instruction:
        launch, mark = plan.graphs["forward"].launch, self._clock.mark

        def launch_timed() -> None:
            if plan.due == 0:
                launch()
            else:
                start = mark()
                launch()
                marks.append((start, mark()))
                if min(map(len, self._marks)) >= PAIRS:
                    plan.due = other.due = 0
            if self._cache.get(plan.key) is plan:  # the other one is next
                other.uses = plan.uses
                self._cache[plan.key] = other

        return launch_timed

    def times(self) -> tuple[list[float], list[float]] | None:
        """Return the milliseconds of each replay; None if the device is not as far yet."""
        found = [
            [self._clock.milliseconds(*pair, wait=False) for pair in marks] for marks in self._marks
        ]
        first, second = ([ms for ms in times if ms is not None] for times in found)
        return (first, second) if [len(first), len(second)] == [*map(len, found)] else None


# ------------------ Decisions


class Overlap:
    """Gives steps a second graph in two streams, where that is worth it."""

    def __init__(self, fit: TrainingContext, facts: CaptureFacts, steps: Steps) -> None:
        self._fit, self._facts, self._steps = fit, facts, steps
        self._clock = Stopwatch(fit.module.device)
        self._added = 0  # bytes, by all second graphs

    @classmethod
    def of(cls, fit: TrainingContext, facts: CaptureFacts, steps: Steps) -> Overlap | None:
        """Make one; None if the steps of a fit cannot have a second graph."""
        may = fit.options.overlap and fit.ranks.are_one
        found = cls(fit, facts, steps) if may else None
        return found if found is not None and found._clock.meaningful else None

    def enter(self, plan: StepPlan) -> None:
        """Begin with a plan that is in the cache now."""
        graph = plan.graphs["forward"]
        is_whole = len(plan.captured) == 1 and plan.head is None and not graph.has_collectives
        if is_whole and not self._fit.compiled.runs:
            plan.due = FIRST

    def leave(self, plan: StepPlan) -> None:
        """Release what is tried beside a plan that has left the cache."""
        if plan.trial is not None:
            _end_trial(*(plans := plan.trial.plans))
            for other in plans:
                if other is not plan:
                    self._fit.statistics.released(other.graphs["forward"])
                    self._steps.discard(other)

    def judge(self, plan: StepPlan, call: tuple[Any, ...]) -> StepPlan | None:
        """Look at a trial that is due; return the plan that has taken the step, if one has."""
        flow: DataFlow | None = None
        if (trial := plan.trial) is not None:
            if not self._settle(trial) or trial.flow is None:
                return None
            plan, flow = trial.plans[1], trial.flow
        else:
            measures, left = self._fit.policy.measures, self._fit.policy.steps_left
            if measures and not is_affordable(plan.record, left):
                plan.due *= LATER
                return None
            plan.due = NEVER
        rival = self._challenge(plan, call, flow)
        return rival if rival is not None and rival.is_launched else None

    def _challenge(
        self, plan: StepPlan, call: tuple[Any, ...], flow: DataFlow | None
    ) -> StepPlan | None:
        """Capture and verify a second plan, and begin to compare both; return it.

        Args:
            flow: Of a plan in two streams, whose weights are to be cast together.
        """
        rival: StepPlan | str = ""
        words = ("one stream", f"{plan.record.overlap}; weights cast each by itself")
        # Later captures know no more than before: this one sees operators, they do not
        names = "has_host_program", "has_several_passes", "is_unseen"
        learned = [(self._facts, name, getattr(self._facts, name)) for name in names]
        try:
            with TURN, exchanged(learned):
                rival, found = self._rival(plan, call, flow)
            if isinstance(rival, str):
                why = rival
            elif self._steps.verify(rival, plan, call):  # its replay may be the step now
                more = found if flow is None and found is not None and found.casts else None
                Contest((plan, rival), self._steps.plans, self._clock, more).begin()
                return rival
            else:
                why = "it could not be verified"
        except Exception as error:  # the step has a graph, which is right
            is_known = isinstance(error, GraphError) or is_out_of_memory(error)
            if self._fit.options.on_failure == "raise" and not is_known:
                raise
            why = in_one_line(error)
        plan.record.overlap = f"{words[flow is not None]}: {why}"
        if not isinstance(rival, str):
            self._steps.discard(rival)
        return None

    def _memory(self) -> int:
        """Return how many bytes torch's allocator has reserved that are in use or in pools."""
        if self._fit.pool.backend.name != "cuda":
            return 0
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()

    def _rival(
        self, plan: StepPlan, call: tuple[Any, ...], flow: DataFlow | None
    ) -> tuple[StepPlan | str, DataFlow | None]:
        """Capture a step in two streams; or tell why it stays a chain; and return its data flow."""
        key, copy = self._steps.key(call), None if flow is None else write_all
        if key is None or self._steps.plans.get(plan.key) is not plan:
            return "the step has changed meanwhile", None
        if self._fit.pool.backend.name == "cuda":
            require_driver((12, 3), "A graph in two streams")
        self._fit.budget.settle()
        if self._fit.budget.is_tight:
            return "memory is tight", None
        memory = self._memory()
        if flow is None:
            flow_of = partial(DataFlow, self._fit.pool.backend.device_type)
            if (shown := self._seen(call, key, flow_of)) is None:
                return _TOO_DEAR, None
            self._steps.discard(shown[0])  # its memory is free for the next capture then
            flow = shown[1]
        if flow.why_not:
            return flow.why_not, None
        found = flow.schedule(int(MORE_MEMORY / 2 * memory) or 2**62)
        if not found.beside:
            return "nothing in it could run beside the rest", None
        make = partial(Overlapping, flow, found, flow.device_type, copy)
        if (seen := self._seen(call, key, make)) is None:
            return _TOO_DEAR, None
        rival, mode = seen
        why = mode.why_not or self._unlike(plan, rival, mode) or self._takes_more(memory)
        if why:
            self._steps.discard(rival)
        flow.ranges = mode.ranges  # of the graph that a third one is compared with
        return why or rival, flow

    def _takes_more(self, before: int) -> str:
        """Tell how much memory second graphs have added, if it is too much; empty if it is not."""
        self._added += self._memory() - before
        is_on_gpu = self._fit.pool.backend.name == "cuda"
        most = torch.cuda.max_memory_reserved() if is_on_gpu else 0  # such as by eager steps
        limit = max(MORE_MEMORY * max(before, most), AT_LEAST)
        return f"two take {self._added // 2**20} MiB more" if self._added > limit else ""

    def _seen(
        self, call: tuple[Any, ...], key: Any, make: Callable[[], Mode]
    ) -> tuple[StepPlan, Mode] | None:
        """Capture a step under a mode, of which each attempt gets its own; None: it is given up."""
        modes: list[Mode] = []

        def seeing() -> Mode:
            modes.append(make())
            return modes[-1]

        with replaced(self._steps.capturing, "seeing", seeing):
            plan = self._steps.capture(call, key)
        return None if plan is None else (plan, modes[-1])

    def _unlike(self, plan: StepPlan, rival: StepPlan, mode: Overlapping) -> str:
        """Tell what else than its streams differs in a second plan; empty if nothing does."""
        if rival.key != plan.key or rival.graphs.keys() != plan.graphs.keys():
            return "the step depends on something else where operators are seen"
        if self._fit.pool.backend.name != "cuda":
            return ""
        return mode.difference(*(one.graphs["forward"].inspection() for one in (plan, rival)))

    def _settle(self, contest: Contest) -> bool:
        """Keep the faster plan, and tell if it is the second; go on if not all times are known."""
        times = contest.times()
        if times is None:
            return False
        chain, rival = contest.plans
        winner, loser = (rival, chain) if is_faster(*times) else (chain, rival)
        _end_trial(chain, rival)
        winner.uses = max(chain.uses, rival.uses)
        self._steps.plans[winner.key] = winner
        self._steps.release(loser)
        said = winner.record.overlap
        words = _WORDS[bool(said)]
        winner.record.overlap = "; ".join(filter(None, (said, figure_words(*times, *words))))
        return winner is rival


# ------------------ Whether a second graph is worth it

FIRST = 200
"""Replays of a graph after which a second one is considered."""
LATER = 4
"""A second graph that is not paid for yet is considered again after so many times more replays."""
PAIRS = 24
"""How often both are replayed in turn, and timed."""

_FASTER = 0.99
"""The second graph is kept if it takes less than this part of the first one's time."""
_OF_SAVED = 0.1
"""The part of what replays have saved that a second graph may cost."""
_GAIN = 0.08
"""The part of a replay that a second graph is expected to save in the coming steps."""
_CAPTURES, _STEPS = 3.5, 12.0
"""What they cost: captures, one of which shows the data flow, and eager steps to verify them."""
MORE_MEMORY, AT_LEAST = 0.15, 2**26
"""How much more memory it may take, as a part of the most that was reserved; so many bytes in any
case, since torch's allocator takes up to 20 MiB at a time, and cuBLAS 32 for each stream."""


def is_affordable(record: GraphRecord, steps_left: int) -> bool:
    """Whether the replays of a graph have paid for a second one, and coming ones will."""
    if record.eager_ms is None or record.replay_ms is None:
        return False
    costs = _CAPTURES * record.capture_ms + _STEPS * record.eager_ms
    saved = record.replays * (record.eager_ms - record.replay_ms)
    return costs <= min(_OF_SAVED * saved, _GAIN * record.replay_ms * steps_left)


def is_faster(first: Sequence[float], second: Sequence[float]) -> bool:
    """Compare the times of two graphs, in milliseconds."""
    return median(second) < _FASTER * median(first)


def figure_words(first: Sequence[float], second: Sequence[float], what: str, other: str) -> str:
    """Say which of two graphs is kept, and why, for a report.

    Args:
        what: What is new in the second one.
        other: The same without it.
    """
    one, two = median(first), median(second)
    if is_faster(first, second):
        return f"{what}: {two:.3f} ms in place of {one:.3f} ({two / one - 1:+.0%})"
    return f"{other}: {one:.3f} ms, {what} {two:.3f} ms"
