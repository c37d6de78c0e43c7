"""Counts what happens to the steps of a fit, and says it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field, fields
from textwrap import shorten
from time import perf_counter

import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightning_graphs.device.backend import Backend, PoolHandle
from lightning_graphs.device.graph import CUDAGraph
from lightning_graphs.errors import GraphError
from lightning_graphs.private.callsite import stacklevel_of_user
from lightning_graphs.regions.conditions import CaptureKey
from lightning_graphs.report import GraphRecord, Report, StepTime
from lightning_graphs.values.signature import Signature

_RECAPTURES_SAID = 8
_LINES = 3
"""How many changes, or names, are listed in one sentence."""
_LONGEST = 160
"""Characters of a change."""


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


@dataclass(slots=True, repr=False)
class Statistics(Report):
    """What happened to the steps of a fit: its report as it grows, and what that is made of."""

    torch: str = torch.__version__
    graphs: list[GraphRecord] = field(default_factory=list)
    modules: list[str] = field(default_factory=list)
    fallbacks: list[str] = field(default_factory=list)
    recaptures: list[str] = field(default_factory=list)
    times: list[StepTime] = field(default_factory=list)
    captures: int = 0  # steps captured, a signature each
    comparisons: int = 0  # of graphs with eager runs
    # Optimizers that run their fused kernel, and by themselves would not
    fused: list[str] = field(default_factory=list)
    waiting: str = ""  # why the last eager step was not captured, where none was refused
    pace: StepTimes = field(default_factory=StepTimes)  # how long steps take
    _unverified: set[str] = field(default_factory=set)
    _alive: dict[CUDAGraph, GraphRecord] = field(default_factory=dict)
    _uncounted: dict[CUDAGraph, Sequence[CUDAGraph]] = field(default_factory=dict)
    # Why submodules run eagerly -> their names, and how the report says why
    _refused: dict[str, tuple[list[str], str]] = field(default_factory=dict)

    def note(self, reason: str, error: GraphError | None = None, *, after: str = "") -> None:
        """Warn, once for each reason, that something runs eagerly.

        It takes the place of what was said of the same error in the words of ``after``.
        """
        full = reason if error is None else f"{reason}: {error.full}"
        if full in self.fallbacks:
            return
        why = "" if error is None else f": {error}"
        if error is not None and (before := f"{after}: {error.full}") in self.fallbacks:
            self.fallbacks[self.fallbacks.index(before)] = full
            why = f" for the same reason: {error.observed}"
        else:
            self.fallbacks.append(full)
        rank_zero_warn(f"GraphCapture: {reason}{why}", stacklevel=stacklevel_of_user())

    def unverified(self, what: str, reason: str) -> None:
        """Warn, once for each sentence, that there was no memory for a comparison."""
        if what not in self._unverified:
            self._unverified.add(what)
            rank_zero_warn(f"GraphCapture: {what}: {reason}", stacklevel=stacklevel_of_user())

    def refused(self, name: str, error: GraphError) -> None:
        """Warn that a submodule runs eagerly; what holds for several is one reason, said once."""
        text = error.full
        is_said = any(text in reason for reason in self.fallbacks)
        why = f" for the same reason: {error.observed}" if is_said else f": {text}"
        names, why = self._refused.setdefault(text, ([], why))
        before = _in_short(names) + why
        if name not in names:
            names.append(name)
        entry = _in_short(names) + why
        if before in self.fallbacks:
            self.fallbacks[self.fallbacks.index(before)] = entry
        elif is_said:
            self.fallbacks.append(entry)
        else:
            self.note(_in_short(names), error)

    def recaptured(self, sentence: str, change: str) -> None:
        """Say that another capture is made, and keep what changed; further ones are not said."""
        is_said = change in self.recaptures
        self.recaptures.append(change)
        said = len(set(self.recaptures))
        if not is_said and said <= _RECAPTURES_SAID:
            is_last = said == _RECAPTURES_SAID
            further = "; further ones are listed in the report" if is_last else ""
            rank_zero_info(f"GraphCapture: {sentence}{further}")

    def runs_fused(self, name: str) -> None:
        """Say, once for each, that an optimizer runs another kernel than by itself."""
        if name not in self.fused:
            self.fused.append(name)
            rank_zero_info(
                f"GraphCapture: {name} runs its fused kernel during this fit; by itself it would "
                "run another one, whose results differ by rounding"
            )

    def chosen(self, names: Sequence[str]) -> None:
        """Say, once for each, which submodules have graphs."""
        new = [name for name in names if name not in self.modules]
        if new:
            self.modules += new
            rank_zero_info(f"GraphCapture: graphs for {', '.join(_patterns(new))}")

    def captured(
        self,
        # The signature in words: what is captured again under the same words continues their
        # record
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
        record.parts = len(graphs)
        record.captures += 1
        record.capture_ms = cost.ms
        if graphs[0].backend.name == "cuda":
            pools = {graph.pool() for graph in graphs}
            record.pool_mib = sum(cost.added.get(pool, 0) for pool in pools) / 2**20
        self._alive[graphs[0]] = record
        self._uncounted[graphs[0]] = tuple(graphs)
        return record

    def _count_nodes(self, first: CUDAGraph) -> None:
        """Count them when somebody asks: that takes as long as a tenth of a capture."""
        counts = [graph.node_counts() for graph in self._uncounted.pop(first, ())]
        if counts and all(counts):
            record = self._alive[first]
            record.nodes = sum(sum(count.values()) for count in counts)
            record.kernels = sum(count.get("kernel", 0) for count in counts)

    def count_replay(self, first: CUDAGraph) -> None:
        self.replayed += 1
        self._alive[first].replays += 1

    def released(self, first: CUDAGraph) -> None:
        self._count_nodes(first)
        self._alive.pop(first, None)

    def report(self) -> Report:
        for first in list(self._uncounted):
            self._count_nodes(first)
        values = {each.name: getattr(self, each.name) for each in fields(Report)}
        if not self.times_mean_something:
            values["times"] = []
        lists = {name: v for name, v in values.items() if isinstance(v, list)}
        return Report(**values | {name: tuple(map(copy, held)) for name, held in lists.items()})


@contextmanager
def capture_cost(backend: Backend) -> Iterator[CaptureCost]:
    """Measure time and pool memory of the captures in the body."""
    cost = CaptureCost()
    before = _pool_sizes(backend)
    started = perf_counter()
    yield cost
    cost.ms = (perf_counter() - started) * 1e3
    after = _pool_sizes(backend)
    cost.added = {pool: size - before.get(pool, 0) for pool, size in after.items()}


def _pool_sizes(backend: Backend) -> dict[PoolHandle, int]:
    """Bytes that torch's allocator holds for each memory pool; empty without a GPU.

    All are listed: a pool is asked for by its handle only at one's peril (see ``liveness``).
    """
    sizes: dict[PoolHandle, int] = {}
    if backend.name == "cuda":
        for segment in torch.cuda.memory_snapshot():
            pool = tuple(segment["segment_pool_id"])
            sizes[pool] = sizes.get(pool, 0) + segment["total_size"]
    return sizes


def in_words(signature: Signature) -> str:
    """A step's signature, short: its tensors, and its part in an accumulation window."""
    phase = conditions_of(signature).phase
    return tensors_in_words(signature) + (f"; {phase}" if phase.window != 1 else "")


def tensors_in_words(signature: Signature) -> str:
    """The tensors of a call: ``x f32[32,128], y i64[32]``."""
    pairs = zip(signature.tensor_names, signature.specs, strict=True)
    return ", ".join(f"{_bare(n)} {spec.against(spec)}" for n, spec in pairs) or "no tensor"


def _bare(name: str) -> str:
    # A batch in a dictionary is known by its keys.
    path = name.removeprefix("batch")
    is_key = path[:2] in ("['", '["') and path[-2:] in ("']", '"]') and path.count("[") == 1
    return path[2:-2] if is_key else name


def differences(before: Signature, after: Signature) -> list[str]:
    """What tells two captures apart, a line each, for a person to read."""
    lines = [line for line in before.diff(after) if not line.startswith("extra: ")]
    return lines + conditions_of(before).diff(conditions_of(after))


def conditions_of(signature: Signature) -> CaptureKey:
    conditions: CaptureKey = signature.extra[0]  # type: ignore[assignment]
    return conditions


def listed(lines: Sequence[str]) -> str:
    """The lines as one text, and no more of them than anybody reads."""
    shown = [shorten(line, _LONGEST, placeholder=" ...") for line in lines[:_LINES]]
    further = [f"and {len(lines) - _LINES} more"] if len(lines) > _LINES else []
    return "; ".join(shown + further)


def _patterns(names: Sequence[str]) -> Iterator[str]:
    """Names that differ by numbers only as one, with their number."""
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
