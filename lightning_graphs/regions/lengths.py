"""Which lengths to pad to, so that batches of many lengths need few graphs."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from statistics import median
from typing import NamedTuple

from lightning_graphs.padding import added_by, choose_lengths
from lightning_graphs.report import Padding
from lightning_graphs.report.messages import FEW, Statistics
from lightning_graphs.values.signature import Signature

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
