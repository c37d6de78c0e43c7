"""Times the first steps of a fit, eager and replayed, without making anyone wait."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from lightning_graphs.report import GraphRecord, StepTime
from lightning_graphs.report.statistics import Statistics
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
    """Takes marks without waiting, and later tells the time between two of them."""

    def __init__(self, device: torch.device) -> None:
        # Whether the times say anything about graphs: not without a GPU
        self.meaningful = device.type == "cuda"
        if self.meaningful:
            torch.cuda.synchronize(device)  # both clocks begin together
        self._begin = self.mark()

    def mark(self) -> Mark:
        """The present moment, on the current stream."""
        event = torch.cuda.Event(enable_timing=True) if self.meaningful else None
        if event is not None:
            event.record()
        return Mark(perf_counter(), event)

    def milliseconds(self, start: Mark, end: Mark, *, wait: bool) -> float | None:
        """Time between two marks; None if the device has not come so far and ``wait`` is False."""
        if start.event is None or end.event is None:
            return (end.launched - start.launched) * 1e3
        if wait:
            end.event.synchronize()
        return start.event.elapsed_time(end.event) if end.event.query() else None

    def behind(self, mark: Mark) -> float:
        """How many milliseconds after the host the device came to a mark whose time is known.

        A step's own times do not tell: a host that is far ahead waits as it launches.
        """
        on_device = self.milliseconds(self._begin, mark, wait=False)
        on_host = (mark.launched - self._begin.launched) * 1e3
        return 0.0 if on_device is None else max(0.0, on_device - on_host)


def _counted(done: Statistics) -> tuple[tuple[object, ...], int, list[int]]:
    """What disturbs a step's time, eager steps, and replays of each graph so far."""
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
    kept: bool = False
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
        sample.kept = first < self._taken[key] <= first + SAMPLES
        if sample.kept or (not sample.records and sample.step > 0):
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
        pace = self._statistics.pace
        if sample.records:
            pace.replayed.append(ms)
        else:
            pace.eager.append(ms)
            pace.behind.append(self._stopwatch.behind(end))
        if not sample.kept:
            return
        kind: Literal["eager", "replay"] = "replay" if sample.records else "eager"
        self._statistics.times.append(StepTime(step=sample.step, kind=kind, ms=ms))
        self._times[sample.key].append(ms)
        eager = self._times[sample.batch, ()]
        for record in sample.records:
            record.replay_ms = median(self._times[sample.key])
            record.eager_ms = median(eager) if eager else None


GPU_BOUND_FROM = 0.95
"""Replay time over eager time from which on launching kernels was not what took the time."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the times say."""

    profitable: bool  # whether replayed steps are faster at all, as far as one can tell
    sentence: str = ""  # what a user should know; empty where graphs pay off clearly


def judge(records: Sequence[GraphRecord], otherwise: float | None = None) -> Verdict:
    """Compare the time of replayed steps with that of eager ones."""
    timed = [
        (eager, record.replay_ms, record.replays)
        for record in records
        if (eager := record.eager_ms or otherwise) and record.replay_ms and record.replays
    ]
    if not timed:
        return Verdict(True)
    steps = sum(count for *_, count in timed)
    eager = sum(ms * count for ms, _, count in timed) / steps
    replay = sum(ms * count for _, ms, count in timed) / steps
    times = f"a replayed step takes {replay:.3f} ms and an eager one {eager:.3f} ms"
    if replay < GPU_BOUND_FROM * eager:
        return Verdict(True)
    if replay * GPU_BOUND_FROM <= eager:
        return Verdict(
            replay < eager,
            f"{times}: the GPU is busy all the time, and fewer launches gain little; "
            "torch.compile(module) makes the kernels themselves fewer and faster",
        )
    return Verdict(False, f"{times}: graphs make this step slower")
