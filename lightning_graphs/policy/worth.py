"""When a capture is worth it: what steps and captures cost, in time and in memory.

A capture costs time once, and every replay saves some of it.
"""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any, ClassVar, Literal, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from lightning_graphs.device.graph import CUDAGraph
from lightning_graphs.errors import no_room
from lightning_graphs.policy.options import Options
from lightning_graphs.private.engine import allocating_from
from lightning_graphs.report import GraphRecord, StepTime
from lightning_graphs.report.messages import FEW, NOT_TIMED, TOO_RARE, Statistics
from lightning_graphs.values.tree import leaves_of

SAMPLES = 8
"""Steps that are timed for each signature, of either kind."""

_LONGEST = 256
"""Micro-batches after which timing ends, whatever is still missing."""


class Mark(NamedTuple):
    """A moment on the host's clock, and on the GPU's own."""

    launched: float
    event: torch.cuda.Event | None


class Stopwatch:
    """Takes marks without waiting, and later gives the time between two of them."""

    def __init__(self, device: torch.device) -> None:
        # Whether the times say anything about graphs: not without a GPU
        self.meaningful = device.type == "cuda"
        if self.meaningful:
            torch.cuda.synchronize(device)  # both clocks begin together
        self._begin = self.mark()

    def mark(self) -> Mark:
        """Mark the present moment, on the current stream."""
        event = torch.cuda.Event(enable_timing=True) if self.meaningful else None
        if event is not None:
            event.record()
        return Mark(perf_counter(), event)

    def milliseconds(self, start: Mark, end: Mark, *, wait: bool) -> float | None:
        """Return the time in between; None without ``wait`` if the device is not as far yet."""
        if start.event is None or end.event is None:
            return (end.launched - start.launched) * 1e3
        if wait:
            end.event.synchronize()
        return start.event.elapsed_time(end.event) if end.event.query() else None

    def behind(self, mark: Mark) -> float:
        """Return by how many milliseconds the device came to a mark later than the host.

        A step's own times do not show it: a host that is far ahead waits as it launches.
        """
        on_device = self.milliseconds(self._begin, mark, wait=False)
        on_host = (mark.launched - self._begin.launched) * 1e3
        return 0.0 if on_device is None else max(0.0, on_device - on_host)


def _counted(done: Statistics) -> tuple[tuple[object, ...], int, list[int]]:
    """Count what disturbs a step's time, eager steps, and replays of each graph so far."""
    captures = sum(record.captures for record in done.graphs)
    disturbances = (captures, done.comparisons, *done.fallbacks, len(done.recaptures))
    return disturbances, done.eager, [record.replays for record in done.graphs]


@dataclass(slots=True)
class _Sample:
    """A step under way, then one whose time is not known yet."""

    step: int
    batch: Hashable
    start: Mark
    counted: tuple[tuple[object, ...], int, list[int]]  # when it began
    is_timed: bool = False
    records: tuple[GraphRecord, ...] = ()

    @property
    def key(self) -> Hashable:
        return self.batch, tuple(map(id, self.records))


class StepTiming:
    """Times steps, for as long as there are times to take.

    A step is a micro-batch, from its begin to the end of the backward pass or, where the optimizer
    steps, of that; with manual optimization it is the call of its function. Of each shape the first
    eager step (kernels are loaded, state is made) is left out, and so is every step with a capture,
    a refusal or a verification in it.
    """

    def __init__(
        self, statistics: Statistics, stopwatch: Stopwatch, *, manual: bool = False
    ) -> None:
        self._statistics = statistics
        self._stopwatch = stopwatch
        self.manual = manual
        self.stepping = False  # an optimizer step is under way
        self._steps = 0
        self._open: _Sample | None = None
        self._pending: deque[tuple[_Sample, Mark]] = deque()  # with their ends
        self._taken: Counter[Hashable] = Counter()
        self._replays: Counter[int] = Counter()
        self._times: defaultdict[Hashable, list[float]] = defaultdict(list)

    def begin(self, args: tuple[Any, ...]) -> None:
        """Begin a step, with the arguments of its function."""
        tensors = leaves_of(args[:1], Tensor)
        shapes = tuple((None if t.is_nested else t.shape, t.dtype) for t in tensors)
        batch, counted = (shapes, self.stepping), _counted(self._statistics)
        self._open = _Sample(self._steps, batch, self._stopwatch.mark(), counted)
        self._steps += 1

    def end(self) -> None:
        """End the step that is under way, if one is."""
        sample, self._open = self._open, None
        if sample is None:
            return
        disturbances, eager, replays = _counted(self._statistics)
        if disturbances != sample.counted[0]:
            return
        graphs = zip(self._statistics.graphs, replays, sample.counted[2], strict=True)
        sample.records = tuple(record for record, after, earlier in graphs if after > earlier)
        if not sample.records and eager == sample.counted[1]:
            return
        first, key = int(not sample.records), sample.key
        self._taken[key] += 1
        self._replays.update(map(id, sample.records))
        sample.is_timed = first < self._taken[key] <= first + SAMPLES
        if sample.is_timed or (not sample.records and sample.step > 0):
            self._pending.append((sample, self._stopwatch.mark()))

    def is_complete(self) -> bool:
        """Whether every graph has its times, which the device knows by now."""
        self.read()
        replays = [self._replays[id(record)] for record in self._statistics.graphs]
        is_complete = self._steps >= _LONGEST or min(replays, default=0) >= SAMPLES
        return is_complete and not self._pending

    def read(self, *, wait: bool = False) -> None:
        """Take over the times that the device knows by now."""
        while self._pending:
            sample, end = self._pending[0]
            ms = self._stopwatch.milliseconds(sample.start, end, wait=wait)
            if ms is None:
                return
            self._pending.popleft()
            self._keep(sample, end, ms)

    def _keep(self, sample: _Sample, end: Mark, ms: float) -> None:
        step_times = self._statistics.step_times
        if sample.records:
            step_times.replayed.append(ms)
        else:
            step_times.eager.append(ms)
            step_times.behind.append(self._stopwatch.behind(end))
        if not sample.is_timed:
            return
        kind: Literal["eager", "replay"] = "replay" if sample.records else "eager"
        self._statistics.times.append(StepTime(step=sample.step, kind=kind, ms=ms))
        self._times[sample.key].append(ms)
        eager = self._times[sample.batch, ()]
        for record in sample.records:
            record.replay_ms = median(self._times[sample.key])
            record.eager_ms = median(eager) if eager else None


# ------------------ Capture policy

PAYBACK = 20
"""Replays that repay a capture if nothing can be measured."""
_SIGHTINGS = 2
"""How often a signature is seen before its capture if nothing can be measured."""
_MOVES = 3
"""After so many changes in a row, each within PAYBACK replays, the optimizer step is eager."""
_ATTEMPT = 3.0, 80.0
"""What a first attempt to capture is expected to cost: so many eager steps, and milliseconds."""
_COMPARED = 3.0, 20.0
"""What a first verification is expected to cost: so many eager steps, and milliseconds."""
_REFUSED = 1.5, 20.0
"""What a first attempt is expected to cost that is refused, which most are early in the step: so
many eager steps, and milliseconds."""
_AT_RISK = 0.02
"""The part of a fit's eager time that may be spent as long as no capture has succeeded."""
_SURE = 0.67
"""An estimate is sure to be too high beyond so much of it."""
_FURTHER_CAPTURE = 0.5
"""What another one is expected to cost, as a part of the first, which loads what they find."""
_DEARER, _BY_CALL, _FURTHER_DEARER = 2.0, 3.5, 1.5
"""How many times more steps a capture costs in which every operator is looked at, or call by
call; of further ones the host looks at its own operators only."""
_SAVED = 0.7
"""The part of an eager step that a replay is expected to save as long as none was measured."""
_NOT_ALL = 0.98
"""The part of a step at most that graphs of its calls serve."""
_LEAST_SAVED = 0.02
"""The least part that is saved: even a busy GPU pauses between kernels."""
_MARGIN, _FURTHER_MARGIN = 1.5, 1.1
"""How much more than its cost a capture must be expected to save: the first one, and others."""
_ALONE = 0.6
"""The part of its cost that the first capture must be expected to save if no other one follows."""
_DOUBT = 10.0
"""How many replays tell little: whether those that were expected have come is chance."""
_FOR_VERIFICATION = 0.02
"""The part of the fit's time that verifying further graphs may take."""

_BUSY = "the GPU is busy all the time, and graphs save the time between kernels only"
_OFTEN = "which a graph would freeze; leave it alone, or move it every 20 steps at most"
"""The number is :data:`PAYBACK`."""


class History(NamedTuple):
    """What a cache of plans has seen of a signature, and of plans."""

    seen: int  # how often this signature came, without a graph
    lost: int  # how many graphs were refused, dropped, or gave way to another one of their shape
    uses: int  # replays of all graphs
    promised: float  # how many of these were expected when the graphs were captured
    moved: bool = False  # there are graphs of its shape, for other values


class Outlook(NamedTuple):
    """How often signatures are expected to come."""

    share: float  # the part of the coming steps that have this one
    rest: float  # how many follow at once; infinite if no other one has come
    others: Sequence[float]  # the parts of each of the others without a graph


class Experience:
    """What captures of one class of modules have cost in this process."""

    _known: ClassVar[WeakKeyDictionary[type, Experience]] = WeakKeyDictionary()

    def __init__(self) -> None:
        # Milliseconds up to the first graph, all attempts and the verification included
        self.price = 0.0
        self.has_succeeded = False

    @classmethod
    def with_class(cls, kind: type) -> Experience:
        """Return what is known of a class; fits add to it."""
        return cls._known.setdefault(kind, cls())


class CapturePolicy:
    """Decides which graphs are worth their capture.

    A capture is expected to pay if the steps that it will serve save more than it costs: its
    attempts, its verification, and what attempts before it have cost in vain. All that is measured
    as the fit goes on, and estimated before. Until one has succeeded, attempts may take a small
    part of the fit's time: nothing may come of them. If nothing can be measured (on the emulated
    backend), or with ``min_repeats`` or ``only_if_faster=False``, sightings decide alone.
    """

    def __init__(
        self,
        options: Options,
        statistics: Statistics,
        steps_left: Callable[[], int],
        experience: Experience | None = None,  # with fits like this one
    ) -> None:
        given = options.min_repeats
        # Times decide, and not sightings alone
        self.measures = statistics.backend == "cuda" and options.by_times
        self._statistics, self._times = statistics, statistics.step_times
        self._verifies = options.verify is not False
        self._sightings = _SIGHTINGS if given is None else given
        # After how many steps the first graph may come
        self.earliest = options.warmup_steps + (0 if self.measures else self._sightings)
        self._steps_left = steps_left
        self.met = ""  # what the last attempt was refused for
        self.is_over = False  # no graph can pay off in this fit any more, and there is none
        self._experience = Experience() if experience is None else experience
        self._expects = self._experience.price  # at least
        self._costs: list[float] = []  # of the attempts that succeeded
        self._dearer = 1.0  # how many times more steps a capture is expected to cost than usual
        self._part = 1.0  # the part of a step's work that graphs can take over
        self._expected = 0.0  # how many uses the signature that was asked about last will have
        self._others: list[float] = []  # and each of the others without a graph
        self._began = 0.0  # the attempt
        self._attempt = self._longest = 0.0  # the last one that has ended, and the longest
        self._in_vain = 0.0  # what was spent since the last attempt that succeeded
        self._spent = 0.0  # what was spent in all since the first one that did
        self._started = perf_counter()
        self._alone = float("inf")  # milliseconds of an eager step, ahead of the first graph
        self._verified = 0.0
        self._verification = 0.0

    # ------------------------------------------------------------------ captures

    def why_not(self, history: History, outlook: Callable[[], Outlook]) -> str:
        """Why a signature is not worth a capture yet; empty if it is."""
        if history.lost > FEW and history.lost > FEW + history.uses / self.break_even:
            return (
                "graphs have to be dropped before they have paid off "
                f"({history.lost} graphs, {history.uses} replays)"
            )
        if not self.measures:
            return "" if history.seen > self._sightings else TOO_RARE
        if history.moved and history.seen <= self._sightings:
            return "values that the step reads keep changing"
        if not self._is_timed:
            return NOT_TIMED
        saving, remaining = self._saving, self._steps_left()
        if saving <= 0.0:
            return _BUSY
        share, rest, others = outlook()
        # What was expected of other graphs may not have come true
        trust = min(1.0, (history.uses + _DOUBT) / (history.promised + _DOUBT))
        coming = remaining - 1.0  # the present step is one of them
        rest = min(rest, coming)
        self._expected = 1.0 + trust * (rest + (coming - rest) * share)
        self._others = [trust * remaining * other for other in others]
        wanted, eager, safe = self._wanted, self._eager, self._safe
        if remaining < wanted:
            at_best = wanted * saving / (_SAVED * self._part * eager)
            self.is_over = not self._costs and remaining < at_best
            if saving <= _LEAST_SAVED * self._part * eager:
                return _BUSY
            return f"too few steps are left to repay a capture (about {wanted:.0f})"
        if remaining < safe:
            is_settled = len(self._times.eager) >= SAMPLES or self._in_vain > 0.0
            self.is_over = remaining < (1.0 if is_settled else _SURE) * safe
            met = f"; the last attempt met this: {self.met}" if self.met else ""
            return (
                "too few steps are left to try a capture, which may fail "
                f"(about {safe:.0f} would do){met}"
            )
        return "" if self._expected >= wanted else TOO_RARE

    @property
    def _wanted(self) -> float:
        """How many uses a signature must be expected to have.

        What the first capture costs beyond a further one, captures of the others help to repay.
        """
        uses = self.break_even
        if len(self._costs) == 1:  # what a further one costs is not known yet
            steps = self._statistics.eager + self._statistics.replayed + self._steps_left()
            at_risk = self._costs[0] - _AT_RISK * steps * self._eager
            return max(_FURTHER_MARGIN * uses, at_risk / self._saving)
        if self._costs:
            return _FURTHER_MARGIN * uses
        dearer = min(1.0, _FURTHER_DEARER / self._dearer)
        further = _FURTHER_MARGIN * _FURTHER_CAPTURE * dearer * uses
        gained = sum(other - further for other in self._others if other > further)
        return max(_MARGIN * uses - gained, further, _ALONE * uses)

    @property
    def steps_left(self) -> int:
        return self._steps_left()

    @property
    def is_likely(self) -> bool:
        """Whether there may be a first capture, as far as the times so far tell."""
        return not self._is_timed or self._steps_left() >= self._safe

    @property
    def _is_timed(self) -> bool:
        """Whether times decide, and an eager step has one."""
        return self.measures and bool(self._times.eager)

    @property
    def break_even(self) -> float:
        """How many replays repay a capture."""
        if not self._is_timed:
            return PAYBACK
        saving = self._saving
        return self._price / saving if saving > 0.0 else float("inf")

    @contextmanager
    def timing_capture(self) -> Iterator[None]:
        """Measure what a capture costs, whether it succeeds or not."""
        self._began = perf_counter()
        try:
            yield
        finally:
            self.tries_again()

    def tries_again(self) -> None:
        """End an attempt, and begin another one: what it has learned serves later captures, too."""
        now = perf_counter()
        self._attempt, self._began = (now - self._began) * 1e3, now
        self._longest = max(self._longest, self._attempt)
        self._spend(self._attempt)

    def _spend(self, ms: float) -> None:
        self._in_vain += ms
        if self._costs:
            self._spent += ms
        elif self.measures:
            self._experience.price = self._in_vain

    def observed(self, since: float) -> None:
        """Note that a step was observed from a moment of ``perf_counter`` on until now."""
        eager = self._eager if self._is_timed else 0.0
        self._spend(max(0.0, (perf_counter() - since) * 1e3 - eager))

    @contextmanager
    def spending(self) -> Iterator[None]:
        """Count the time of the body, which serves no whole step, as spent without a success."""
        began = perf_counter()
        try:
            yield
        finally:
            self._spend((perf_counter() - began) * 1e3)

    def succeeded(self) -> None:
        """Note that the last attempt has made a graph: nothing was in vain."""
        if not self._costs and self.measures:
            self._experience.has_succeeded = True
            if self._is_timed:
                self._alone = self._eager
        self._costs.append(self._attempt)
        self._in_vain = 0.0

    def refuted(self) -> None:
        """Note that the last graph computes something else: what it has cost was in vain."""
        if len(self._costs) == 1:
            self._experience.has_succeeded = False
            self._spend(self._costs.pop() + self._verification * 1e3)

    def goes_on(self) -> bool:
        """Whether another attempt is worth it, after all that earlier ones have cost."""
        self.tries_again()
        return not self._is_timed or (self._expected >= self._wanted and self.is_likely)

    def follows_host(self) -> None:
        """Note that captures must look at every operator."""
        self._dearer = _DEARER

    def goes_on_with_part(self, part: float) -> bool:
        """Whether captures are still worth it if a part of each step at least has graphs."""
        self._part, self._dearer = min(max(part, _LEAST_SAVED), _NOT_ALL), _BY_CALL
        if not self._is_timed:
            return True
        return self._steps_left() >= max(_MARGIN * self.break_even, self._safe)

    @property
    def _eager(self) -> float:
        """Milliseconds of an eager step."""
        return median(self._times.eager)

    @property
    def _saving(self) -> float:
        """An estimate of the milliseconds that a replay saves."""
        # Steps next to graphs find less memory at hand, and a capture repays none of that
        eager, times = min(self._eager, self._alone), self._times
        if times.replayed:
            return eager - median(times.replayed)
        # A device that is still busy when a step has been launched did not wait for launches.
        return max(_LEAST_SAVED * eager, _SAVED * (eager - 3 * median(times.behind))) * self._part

    @property
    def _safe(self) -> float:
        """How many steps must be left, so that an attempt in vain hardly shows."""
        if self._costs or self._experience.has_succeeded:
            return 0.0
        steps, constant = _REFUSED
        if self._part < 1.0:
            steps *= _BY_CALL
        if self._longest:  # what the first one loads is there
            constant = 0.0
        refused = max(steps * self._eager + constant, self._longest)
        at_risk = max(self._in_vain + refused, self._expects)
        done = self._statistics.eager + self._statistics.replayed
        return max(0.0, at_risk / _AT_RISK / self._eager - done)

    @property
    def _price(self) -> float:
        """An estimate of the milliseconds that the next capture costs, with all attempts."""
        if self._costs:
            first, *further = self._costs
            each = self._spent / max(1, len(further))
            return each if further else max(each, _FURTHER_CAPTURE * first)
        steps, constant = _COMPARED if self._verifies else (0.0, 0.0)
        compared = steps * self._eager + constant
        steps, constant = _ATTEMPT
        attempt = max(steps * self._eager * self._dearer + constant, self._longest)
        return max(self._in_vain + attempt + compared, self._expects)

    # ------------------------------------------------------------------ verification

    @property
    def affords_verification(self) -> bool:
        """Whether one more verification is within what verification may take of the fit's time."""
        if not (self.measures and self._verification):
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
            if len(self._costs) == 1 and not self._verification:
                self._experience.price += took * 1e3
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
        self.moved: set[str] = set()  # the last time
        self.replays = 0  # since the last move

    def are_too_many(self, now: tuple[tuple[str, object], ...]) -> bool:
        """Whether the optimizer step is not worth a capture any longer; said once."""
        before, self._before = self._before, now
        if self.obstacle or before == now:
            return False
        moved = {name for (name, a), (_, b) in zip(before, now, strict=False) if a != b}
        self.moved = moved
        if not moved:
            return False
        self._in_a_row = 1 if self.replays >= PAYBACK else self._in_a_row + 1
        self.replays = 0
        if self._in_a_row < _MOVES:
            return False
        self._in_a_row = 0
        names = ", ".join(sorted(moved))
        self.obstacle = f"a scheduler or a hook moves {names} time and again, {_OFTEN}"
        return True


# ------------------ Memory

_AUTO = 0.35
"""How much more than eager steps this package may take, as a part of their peak."""
_LEAST, _LEAST_SHARE = 2**31, 0.05
"""Bytes that may be taken next to that peak in any case, up to this part of a GPU's memory."""
_ROOMY = 4
"""If so many times the peak of eager steps is free, memory need not be counted."""
SETTLED = 3  # steps after which the allocator has cut its memory into blocks for good
_BESIDE = 3 * 2**25  # bytes: what a comparison takes next to the state that it has copied
_MIB = 2**20


class MemoryKept(Exception):
    """A tensor of an eager run is alive in a graph's pool: no graph of that pool may replay."""


class MemoryBudget:
    """How much memory of a GPU this package may take; on a CPU there is no limit."""

    def __init__(self, device: torch.device, share: float | Literal["auto"] = "auto") -> None:
        self._device = device if device.type == "cuda" else None
        self._share = _AUTO if share == "auto" else share
        self._peak = self._activations = 0
        self.shares = True  # eager steps that are compared with a graph may take its memory
        # Eager code finds hardly any memory next to graphs, as of the last :meth:`settle`
        self.is_tight = False

    def require_room(self, what: str, *, lent: bool | None = None, grows: float = 1.0) -> None:
        """Ahead of a capture of a fit's step, of which the first looks at what eager steps took.

        To others, as of validations, those may have ``lent`` memory, which ``grows`` by a part."""
        if self._device is None:
            return
        peak, beside = self._peak, self._activations
        if not peak:
            peak = torch.cuda.max_memory_allocated(self._device)
            beside = peak - torch.cuda.memory_allocated(self._device)
            torch.cuda.empty_cache()  # graphs take from a pool, never what lies cached
            if lent is None:  # else those of the fit may not have run yet
                self._peak, self._activations = peak, beside
        limit, beside = self._limit(peak), 0 if lent else int(beside * grows)
        if torch.cuda.memory_reserved(self._device) + beside > limit:
            torch.cuda.empty_cache()  # eager steps cannot use the rest, which is in use or in pools
            taken = torch.cuda.memory_reserved(self._device)
            if taken + beside > limit:
                raise no_room(
                    what,
                    f"{taken // _MIB} MiB are taken, it takes {beside // _MIB} MiB beside, and "
                    f"memory={self._share:g} allows {limit // _MIB} MiB",
                )

    def _limit(self, peak: int) -> int:
        """Return how many bytes may be reserved, given the peak of eager steps."""
        total = torch.cuda.get_device_properties(self._device).total_memory
        return peak + max(int(self._share * peak), min(_LEAST, int(_LEAST_SHARE * total)))

    @property
    def is_roomy(self) -> bool:
        """Whether so much is free that graphs take it from no eager step."""
        return self._device is not None and self._free() > _ROOMY * self._peak > 0

    def settle(self) -> None:
        """Empty the cache if memory is tight: eager code may need blocks of other sizes."""
        if self._device is None:
            return
        self.is_tight = self._free() <= 2 * self._activations
        if self.is_tight:
            torch.cuda.empty_cache()

    def room_for(self, needed: int, beside: int = 0) -> int:
        """Return how many of the needed bytes a copy may take here; the host can have the rest.

        ``beside`` bytes are taken next to it.
        """
        if self._device is None:
            return needed
        if self._room(beside) < needed:
            torch.cuda.empty_cache()
        return min(self._room(beside), needed)

    def _room(self, beside: int) -> int:
        taken = torch.cuda.memory_reserved(self._device) + beside
        return max(0, min(self._free() - beside, self._limit(self._peak) - taken) - _BESIDE)

    def _free(self) -> int:
        """Return how many bytes the allocator may still take from the device."""
        free, total = torch.cuda.mem_get_info(self._device)
        fraction = getattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 1.0)
        return min(
            free, int(total * fraction(self._device)) - torch.cuda.memory_reserved(self._device)
        )

    @contextlib.contextmanager
    def memory_of(self, graph: CUDAGraph) -> Iterator[None]:
        """Let the body take its memory from the pool of a graph, which lies idle between replays.

        All that the body makes must be gone by the next replay.
        """
        if self._device is None or not self.shares:
            yield
            return
        with allocating_from(graph.pool(), self._device):
            yield

    @property
    def allocated(self) -> int:
        return 0 if self._device is None else torch.cuda.memory_allocated(self._device)
