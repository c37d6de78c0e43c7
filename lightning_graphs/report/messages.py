"""What is said to the user, and when; what times say; advice on lengths to pad to."""

from __future__ import annotations

import logging
import re
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field, fields, replace
from statistics import median
from textwrap import shorten
from time import perf_counter
from typing import Any, NamedTuple

import torch

from lightning_graphs.device.graph import Backend, CUDAGraph
from lightning_graphs.device.inspect import GraphNode
from lightning_graphs.errors import FIX, GraphError
from lightning_graphs.padding import added_by, choose_lengths
from lightning_graphs.private.callsite import stacklevel_of_user
from lightning_graphs.private.torch import PoolHandle
from lightning_graphs.report import GraphRecord, Padding, Report, Span, StepTime
from lightning_graphs.values.signature import Signature

# ------------------ Statistics of a fit


_NODES_COUNTED = 8
"""Of how many graphs the nodes are counted: others are for further shapes of the same code."""


@dataclass(slots=True)
class StepTimes:
    """How long steps take, in milliseconds."""

    eager: list[float] = field(default_factory=list)  # eager steps on the device
    # How long the device still worked on each of them once it had been launched
    behind: list[float] = field(default_factory=list)
    replayed: list[float] = field(default_factory=list)  # replayed steps on the device


@dataclass(slots=True)
class CaptureCost:
    """What one capture took."""

    ms: float = 0.0  # milliseconds
    # Bytes that each memory pool has more than before
    added: dict[PoolHandle, int] = field(default_factory=dict)


_GPU_BOUND_FROM = 0.95
"""Replay time over eager time from which on launching kernels was not what took the time."""
_MOST_ROWS = 1000
"""Rows of eager steps, and captures, of which a report has the place."""


@dataclass(slots=True, repr=False)
class Statistics(Report):
    """What happened to the steps of a fit: its report as it grows, and what that is made of."""

    torch: str = torch.__version__
    graphs: list[GraphRecord] = field(default_factory=list)
    modules: list[str] = field(default_factory=list)
    fallbacks: list[str] = field(default_factory=list)
    recaptures: list[str] = field(default_factory=list)
    times: list[StepTime] = field(default_factory=list)
    timeline: list[Span] = field(default_factory=list)  # made when a report is
    captures: int = 0  # steps captured, a signature each
    comparisons: int = 0  # of graphs with eager runs
    fused: list[str] = field(default_factory=list)
    evaluation: dict[str, Statistics] = field(default_factory=dict)
    waiting: str = ""  # why the last eager step was not captured, if none was refused
    step_times: StepTimes = field(default_factory=StepTimes)  # how long steps take
    _alive: dict[CUDAGraph, GraphRecord] = field(default_factory=dict)
    _uncounted: dict[CUDAGraph, Sequence[CUDAGraph]] = field(default_factory=dict)
    # For each row of eager steps how many were replayed before it, and its length; replays note
    # nothing
    _eager_rows: list[tuple[int, int]] = field(default_factory=list)
    _captured_at: list[int] = field(default_factory=list)
    _heads: int = 0  # replayed steps that began with Python

    def ran_ahead(self, ms: float) -> None:
        """Note that Python has run for so long ahead of the graph of a step."""
        self._heads += 1
        self.head_ms += (ms - self.head_ms) / self._heads

    def ran_eagerly(self, steps: int = 1) -> None:
        """Count an eager step, or several in a row."""
        self.eager += steps
        rows = self._eager_rows
        if rows and rows[-1][0] == self.replayed:
            rows[-1] = self.replayed, rows[-1][1] + steps
        elif len(rows) < _MOST_ROWS:
            rows.append((self.replayed, steps))

    def judge(self) -> bool:
        """Put into the verdict what times say; return whether replayed steps are faster, if known.

        It stays empty if graphs pay off clearly.
        """
        usual, self.verdict = self.step_times.eager, ""
        otherwise = median(usual) if usual else None
        timed = [
            (eager, record.replay_ms, record.replays)
            for record in self.graphs
            if (eager := record.eager_ms or otherwise) and record.replay_ms and record.replays
        ]
        steps = sum(count for *_, count in timed) or 1
        eager = sum(ms * count for ms, _, count in timed) / steps
        replay = sum(ms * count for _, ms, count in timed) / steps
        if not timed or replay < _GPU_BOUND_FROM * eager:
            return True
        times = f"a replayed step takes {replay:.3f} ms and an eager one {eager:.3f} ms"
        if replay * _GPU_BOUND_FROM > eager:
            self.verdict = f"{times}: graphs make this step slower"
            return False
        self.verdict = (
            f"{times}: the GPU is busy all the time, and fewer launches gain little; "
            "torch.compile(module) makes the kernels themselves fewer and faster"
        )
        return replay < eager

    def _spans(self) -> list[Span]:
        found, replays, step = [], 0, 0
        for before, steps in self._eager_rows:
            if before > replays:
                found.append(Span(kind="replayed", begin=step, steps=before - replays))
                step, replays = step + before - replays, before
            found.append(Span(kind="eager", begin=step, steps=steps))
            step += steps
        if self.replayed > replays and len(self._eager_rows) < _MOST_ROWS:
            found.append(Span(kind="replayed", begin=step, steps=self.replayed - replays))
        captured = dict.fromkeys(self._captured_at)
        return found + [Span(kind="captured", begin=step, steps=1) for step in captured]

    def captured(
        self,
        # The signature in words, by which another capture of it finds this record
        signature: str,
        graphs: Sequence[CUDAGraph],
        cost: CaptureCost,
        *,
        scope: str = "step",
    ) -> GraphRecord:
        """Keep a record of what was captured, and return it."""
        same = (r for r in self.graphs if (r.scope, r.signature) == (scope, signature))
        record = next(same, None)
        if record is None:
            record = GraphRecord(signature=signature, scope=scope, captures=0)
            self.graphs.append(record)
        if len(self._captured_at) < _MOST_ROWS:
            self._captured_at.append(self.eager + self.replayed)
        record.parts, record.nodes, record.kernels = len(graphs), None, None
        record.captures += 1
        record.capture_ms = cost.ms
        if graphs[0].backend.name == "cuda":
            pools = {graph.pool() for graph in graphs}
            record.pool_mib = sum(cost.added.get(pool, 0) for pool in pools) / 2**20
        if graphs[0].is_annotated:
            record.launches = [*record.launches, *(_named(g, scope) for g in graphs)]
        self._alive[graphs[0]] = record
        self._uncounted[graphs[0]] = tuple(graphs)
        return record

    def _count_nodes(self, first: CUDAGraph) -> None:
        """Count nodes when a report is made: that takes as long as a tenth of a capture."""
        graphs = self._uncounted.pop(first, ())
        if sum(record.nodes is not None for record in self.graphs) >= _NODES_COUNTED:
            return
        counts = [graph.node_counts() for graph in graphs]
        if counts and all(counts):
            record = self._alive[first]
            record.nodes = sum(sum(count.values()) for count in counts)
            record.kernels = sum(count.get("kernel", 0) for count in counts)

    def released(self, first: CUDAGraph) -> None:
        self._count_nodes(first)
        self._alive.pop(first, None)

    def report(self) -> Report:
        for first in list(self._uncounted):
            self._count_nodes(first)
        values = {each.name: getattr(self, each.name) for each in fields(Report)}
        values["timeline"] = self._spans()
        if not self.times_mean_something:
            values["times"] = []
        lists = {name: v for name, v in values.items() if isinstance(v, list)}
        evaluation = {name: found.report() for name, found in self.evaluation.items()}
        values |= {name: tuple(map(copy, rows)) for name, rows in lists.items()}
        return Report(**values | {"evaluation": evaluation})


def _named(graph: CUDAGraph, scope: str) -> list[GraphNode]:
    """List the nodes of a graph, with the name of the submodule that it is of."""
    nodes, inside = graph.inspection().nodes, scope.removeprefix("module ")
    if inside == scope:
        return [*nodes]
    return [replace(node, scope=f"{inside}/{node.scope}") for node in nodes]


@contextmanager
def capture_cost(backend: Backend, *, first: bool = False) -> Iterator[CaptureCost]:
    """Measure time and pool memory of the captures in the body: into a pool without others?"""
    cost = CaptureCost()
    before = {} if first else pool_sizes(backend)
    started = perf_counter()
    yield cost
    cost.ms = (perf_counter() - started) * 1e3
    after = pool_sizes(backend)
    cost.added = {pool: size - before.get(pool, 0) for pool, size in after.items()}


def pool_sizes(backend: Backend) -> dict[PoolHandle, int]:
    """Count the bytes that torch's allocator holds for each pool; empty without a GPU.

    All are listed: to ask for a pool by its handle is not safe (see ``liveness``).
    """
    sizes: dict[PoolHandle, int] = {}
    if backend.name == "cuda":
        for segment in torch.cuda.memory_snapshot():
            pool = tuple(segment["segment_pool_id"])
            sizes[pool] = sizes.get(pool, 0) + segment["total_size"]
    return sizes


# ------------------ Messages to the user

FEW = 8
"""How many captures in vain, or batches of new shapes in a row, are no coincidence."""
PATIENCE = 32
"""After so many eager steps in a row, a wait is given up, or its reason is said."""
TOO_RARE = "no batch signature came back often enough"
NOT_TIMED = "no eager step was timed yet"
LOG = logging.getLogger("lightning_graphs")
_RECAPTURES_SAID = 8
_LINES = 3
"""How many changes, or names, are listed in one sentence."""
_LONGEST = 160
"""Characters of a change."""

_SHAPES = re.compile(r"batch\S*: \w+\[[\d,]*\] -> \w+\[")
_PAD = (
    "pad batches to a few fixed lengths, as lightning_graphs.PadTo does; write DataLoader(..., "
    "drop_last=True) where only the last one of an epoch is smaller"
)
_LEAVE_OUT = "make tensors of what is new in every batch, or leave it out in collate_fn"


class Messages:
    """What is said to the user in one fit.

    Args:
        statistics: The report as it grows, which has all that is said.
        repeats: So many eager steps more than usual are waited for before it is said why.
        steps: What the user calls the steps.
        who: Begins every sentence.
        say: Prints a sentence.
        warn: Warns with a sentence, as :func:`warnings.warn`; both of one rank only.
    """

    def __init__(
        self,
        statistics: Statistics,
        repeats: int | None = None,
        *,
        steps: str = "steps",
        who: str = "GraphCapture",
        say: Callable[[str], object] = LOG.info,
        warn: Callable[..., object] = warnings.warn,
    ) -> None:
        self._statistics = statistics
        self._patience, self._steps, self.who = PATIENCE + (repeats or 0), steps, who
        self.say, self.warn_user = say, warn
        # Why submodules run eagerly -> their names, and how the report says why
        self._refused: dict[str, tuple[list[str], str]] = {}
        self._unverified: set[str] = set()
        self._before: Any = None  # what stands for the last step that was waiting
        self._in_a_row = self._new_in_a_row = 0
        self._is_said = False

    def note(self, reason: str, error: GraphError | None = None, *, after: str = "") -> None:
        """Warn, once for each reason, that something runs eagerly.

        It replaces what was said of this error in the words of ``after``.
        """
        full = reason if error is None else f"{reason}: {error.full}"
        if full in self._statistics.fallbacks:
            return
        why = "" if error is None else f": {error}"
        if error is not None and (before := f"{after}: {error.full}") in self._statistics.fallbacks:
            self._statistics.fallbacks[self._statistics.fallbacks.index(before)] = full
            why = f" for the same reason: {error.observed}"
        else:
            self._statistics.fallbacks.append(full)
        self.warn_user(f"{self.who}: {reason}{why}", stacklevel=stacklevel_of_user())

    def compared(self) -> None:
        """Count a comparison of a graph with an eager run."""
        self._statistics.comparisons += 1

    def unverified(self, what: str, reason: str) -> None:
        """Warn, once for each sentence, that there was no memory for a comparison."""
        if what not in self._unverified:
            self._unverified.add(what)
            self.warn_user(f"{self.who}: {what}: {reason}", stacklevel=stacklevel_of_user())

    def refused(self, name: str, error: GraphError) -> None:
        """Warn that a submodule runs eagerly; what holds for several is one reason, said once."""
        text = error.full
        is_said = any(text in reason for reason in self._statistics.fallbacks)
        why = f" for the same reason: {error.observed}" if is_said else f": {text}"
        names, why = self._refused.setdefault(text, ([], why))
        before = _in_short(names) + why
        if name not in names:
            names.append(name)
        entry = _in_short(names) + why
        if before in self._statistics.fallbacks:
            self._statistics.fallbacks[self._statistics.fallbacks.index(before)] = entry
        elif is_said:
            self._statistics.fallbacks.append(entry)
        else:
            self.note(_in_short(names), error)

    def recaptured(self, sentence: str, change: str) -> None:
        """Say that another capture is made, and keep what changed; further ones are not said."""
        is_said = change in self._statistics.recaptures
        self._statistics.recaptures.append(change)
        said = len(set(self._statistics.recaptures))
        if not is_said and said <= _RECAPTURES_SAID:
            is_last = said == _RECAPTURES_SAID
            further = "; further ones are listed in the report" if is_last else ""
            self.say(f"{self.who}: {sentence}{further}")

    def runs_fused(self, name: str) -> None:
        """Say, once for each, that an optimizer runs another kernel than by itself."""
        if name not in self._statistics.fused:
            self._statistics.fused.append(name)
            self.say(
                f"{self.who}: {name} runs its fused kernel, which rounds differently from torch's "
                f"default; write {name}(..., fused=True) in eager runs that you compare with, or "
                "optimizer_kernel='own' here"
            )

    def chosen(self, names: Sequence[str]) -> None:
        """Say, once for each, which submodules have graphs."""
        new = [name for name in names if name not in self._statistics.modules]
        if new:
            self._statistics.modules += new
            self.say(f"{self.who}: graphs for {', '.join(_patterns(new))}")

    # ------------------------------------------------------------------ eager steps in a row

    def replayed(self) -> None:
        """Note that graphs are of use: eager steps that came before are forgotten."""
        self._in_a_row = self._new_in_a_row = 0
        self._statistics.waiting = ""

    def scope_changed(self) -> None:
        """Count eager steps in a row from 0: they wait for graphs of submodules now."""
        self._before, self._is_said = None, False
        self._in_a_row = self._new_in_a_row = 0

    def waits(
        self,
        step: Any,  # stands for the step
        why_not: str,  # why it is not worth a capture yet
        differences: Callable[[Any, Any], list[str]],  # tells two steps apart, a line each
        *,
        is_new: bool = False,  # no step before had a batch like this one
        at_once: bool = False,  # do not wait for more of them
        say: bool = True,  # False: the caller says it
    ) -> bool:
        """Count an eager step; after many in a row, say once in a fit why they are eager."""
        self._in_a_row += 1
        self._new_in_a_row = self._new_in_a_row + 1 if is_new else 0
        before, self._before = self._before, step
        is_time = at_once or self._in_a_row > self._patience
        is_time |= self._new_in_a_row >= FEW
        if self._is_said or not (self._in_a_row >= FEW or is_time or not self._statistics.replayed):
            return False
        changes = differences(before, step) if before is not None else []
        further = f". The last two steps differ: {listed(changes)}" if changes else ""
        if is_new and changes:
            further += f"{FIX}{_PAD if all(map(_SHAPES.match, changes)) else _LEAVE_OUT}"
        is_early = not (changes or is_time) and why_not in (TOO_RARE, NOT_TIMED)
        why = f"{self._steps} run eagerly: {why_not}{further}"
        self._statistics.waiting = "" if is_early else why
        if is_time and say:
            self.note(self._statistics.waiting)
        self._is_said |= is_time
        return is_time


def listed(lines: Sequence[str]) -> str:
    """Join the first few lines to one text, and count the others."""
    shown = [shorten(line, _LONGEST, placeholder=" ...") for line in lines[:_LINES]]
    further = [f"and {len(lines) - _LINES} more"] if len(lines) > _LINES else []
    return "; ".join(shown + further)


def _patterns(names: Sequence[str]) -> Iterator[str]:
    """Yield names; those that differ by numbers only are one pattern, with their count."""
    alike: dict[str, list[list[str]]] = {}
    for name in names:
        alike.setdefault(re.sub(r"\b\d+\b", "*", name), []).append(name.split("."))
    for group in alike.values():
        parts = [ps[0] if len(set(ps)) == 1 else "*" for ps in zip(*group, strict=True)]
        yield ".".join(parts) + (f" ({len(group)})" if len(group) > 1 else "")


def _in_short(names: Sequence[str]) -> str:
    quoted = [f"`{name}`" for name in names[:_LINES]]
    if len(names) > _LINES:
        quoted[-1] += f" and {len(names) - _LINES} more"
    return f"{', '.join(quoted)} {'runs' if len(names) == 1 else 'run'} eagerly"


# ------------------ Advice on padding

_MOST = 16
"""Lengths that are named."""
_WORTH = 0.9
"""The part of the present time that padding must be expected to leave, at most."""
_REPLAY, _CAPTURE = 0.15, 4.0
"""What a replay and a capture take, in eager steps, if nothing can be measured."""
_KEY = re.compile(r"batch\[(.+?)\]$")


class Lengths(NamedTuple):
    """The one length that differs among the batches of a fit."""

    tensors: tuple[str, ...]  # those that have it
    counts: dict[int, float]  # how often each comes


def lengths_in(shapes: Iterable[tuple[Signature, float]]) -> Lengths | None:
    """Find the length that differs among batches; None if there is none, or more than one.

    Batches of another structure, or of another number of examples, are left out.
    """
    alike: defaultdict[object, list[tuple[Signature, float]]] = defaultdict(list)
    for shape, count in shapes:
        sizes = tuple(spec.shape[:1] for spec in shape.specs)
        kind = tuple((spec.dtype, len(spec.shape)) for spec in shape.specs)
        alike[shape.tensor_names, kind, sizes].append((shape, count))
    group = max(alike.values(), key=lambda found: sum(n for _, n in found), default=[])
    if not group:
        return None
    first = group[0][0]
    places = [
        (i, dim)
        for i, spec in enumerate(first.specs)
        for dim, size in enumerate(spec.shape)
        if any(shape.specs[i].shape[dim] != size for shape, _ in group)
    ]
    counts: defaultdict[int, float] = defaultdict(float)
    for shape, count in group:
        found = {shape.specs[i].shape[dim] for i, dim in places}
        if len(found) != 1:
            return None
        counts[found.pop()] += count
    names = dict.fromkeys(first.tensor_names[i] for i, _ in places)
    return Lengths(tuple(names), dict(counts))


def padding_for(shapes: Iterable[tuple[Signature, float]], done: Statistics) -> Padding | None:
    """Advise on padding after a fit; None if it is not expected to save a tenth of the time."""
    found = lengths_in(shapes)
    steps = done.eager + done.replayed
    if found is None or len(found.counts) < FEW or not steps:
        return None
    times = done.step_times
    is_measured = done.times_mean_something and bool(times.eager)
    eager = median(times.eager) if is_measured else 1.0
    replay = median(times.replayed) if is_measured and times.replayed else _REPLAY * eager
    costs = [record.capture_ms for record in done.graphs] if is_measured else []
    capture = median(costs) if costs else _CAPTURE * eager
    positions = sum(length * count for length, count in found.counts.items())
    each = capture * positions / (replay * steps)
    lengths = choose_lengths(found.counts, _MOST, each=each)
    added = added_by(lengths, found.counts)
    before = done.eager * eager + done.replayed * replay + done.captures * capture
    after = steps * replay * (1.0 + added) + len(lengths) * capture
    if after > _WORTH * before:
        return None
    return Padding(
        tensors=tuple(_KEY.sub(r"\1", name) for name in found.tensors),
        seen=len(found.counts),
        lengths=tuple(lengths),
        added=added,
        saves_ms=before - after if is_measured else None,
    )
