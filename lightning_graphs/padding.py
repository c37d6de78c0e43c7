"""Padding to a few lengths: batches of any length become batches of few shapes.

It changes what a step computes, unless the step leaves padding out by an attention mask or an
``ignore_index``. So it is for the author of the step to ask for it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from itertools import accumulate
from math import inf
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate

from lightning_graphs.errors import FIX

# ------------------ Choice of lengths


def choose_lengths(
    seen: Iterable[int] | Mapping[int, float],
    most: int = 8,
    *,
    batch_size: int = 1,
    multiple: int = 1,
    each: float = 0.0,
) -> list[int]:
    """Choose a few lengths to pad to, such that all batches together are padded least.

    Args:
        seen: The length of each text or batch, or how often each length comes.
        most: How many lengths are chosen at most.
        batch_size: The lengths are those of single texts, and so many of them make a batch, which
            is as long as its longest one.
        multiple: The lengths are multiples of this number.
        each: What one more length costs, in padded positions: fewer are chosen where further ones
            save less.

    Returns:
        The lengths in ascending order; the longest one holds all that were seen.

    Raises:
        ValueError: No length was seen, or ``most``, ``batch_size`` or ``multiple`` is less than 1.
    """
    counts: Mapping[int, float] = seen if isinstance(seen, Mapping) else Counter(seen)
    if not counts or min(most, batch_size, multiple) < 1:
        raise ValueError(
            f"choose_lengths() needs at least one length, got {len(counts)} of them, {most=}, "
            f"{batch_size=}, {multiple=}{FIX}give lengths, and numbers of at least 1"
        )
    rounded: defaultdict[int, float] = defaultdict(float)
    for length, count in counts.items():
        rounded[-(-length // multiple) * multiple] += count
    lengths = sorted(rounded)
    up_to = [0.0, *accumulate(rounded[length] for length in lengths)]
    if batch_size > 1:  # of a batch, the part that is at most so long
        up_to = [up_to[-1] * (part / up_to[-1]) ** batch_size for part in up_to]
    return _least_padded(lengths, up_to, most, each)


def _least_padded(
    lengths: Sequence[int], up_to: Sequence[float], most: int, each: float
) -> list[int]:
    """Choose lengths by dynamic programming; of the first ``i`` there are ``up_to[i]`` batches."""
    count = len(lengths)
    costs = [0.0, *[inf] * count]  # of the first i lengths, with as many chosen as there are rows
    rows: list[list[int]] = []  # where the last chosen one of the first i begins
    chosen, least = 0, inf
    for number in range(1, min(most, count) + 1):
        now, begins = [inf] * (count + 1), [0] * (count + 1)
        # The best begin of a longer part lies behind that of a shorter one.
        open_ = [(number, count, number - 1, count - 1)]
        while open_:
            low, high, left, right = open_.pop()
            if low > high:
                continue
            end = (low + high) // 2
            for begin in range(left, min(right, end - 1) + 1):
                cost = costs[begin] + lengths[end - 1] * (up_to[end] - up_to[begin])
                if cost < now[end]:
                    now[end], begins[end] = cost, begin
            open_ += [(low, end - 1, left, begins[end]), (end + 1, high, begins[end], right)]
        rows.append(begins)
        costs = now
        if now[count] + number * each < least:
            chosen, least = number, now[count] + number * each
    found, end = [], count
    for begins in reversed(rows[:chosen]):
        found.append(lengths[end - 1])
        end = begins[end]
    return found[::-1]


def added_by(lengths: Sequence[int], seen: Mapping[int, float]) -> float:
    """Return how much padding to these lengths adds, as a part of what was seen."""
    before = sum(length * count for length, count in seen.items())
    after = sum(next_length(lengths, length) * count for length, count in seen.items())
    return after / before - 1.0 if before else 0.0


def next_length(lengths: Sequence[int], length: int) -> int:
    """Return the shortest of ascending lengths that holds a length; itself if none does."""
    place = bisect_left(lengths, length)
    return lengths[place] if place < len(lengths) else length


# ------------------ Batches


class PadTo:
    """Collates examples, and pads the batch to the next of a few lengths.

    Each tensor is padded at its end. A batch that is longer than all of the lengths stays as it is.
    It is a ``collate_fn`` of a ``DataLoader``, also one with workers::

        pad = PadTo([64, 128, 256], {"input_ids": 0, "attention_mask": 0, "labels": -100})
        DataLoader(texts, batch_size=16, collate_fn=pad)

    Args:
        lengths: The lengths, as :func:`choose_lengths` gives them.
        values: The value that each tensor is padded with, by its key in the batch, or its index if
            that is a tuple or a list; tensors without one are not padded.
        collate_fn: Makes a batch of examples: a collator of transformers, or a function of yours.
        dim: The dimension that is padded; dimension 0 is that of examples. To pad several, write
            ``collate_fn=PadTo(...)`` for all but the last one.

    Raises:
        ValueError: There are no lengths, they are no positive numbers, or a batch has no tensor
            under a key of ``values``.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        values: Mapping[str, float] | Mapping[int, float],
        collate_fn: Callable[[list[Any]], Any] = default_collate,
        dim: int = 1,
    ) -> None:
        if not lengths or min(lengths) < 1:
            raise ValueError(
                f"PadTo() needs positive lengths, got {[*lengths]}{FIX}write PadTo([64, 128], ...)"
            )
        self.lengths = sorted(lengths)
        self.values: dict[Any, float] = dict(values)
        self.collate_fn, self.dim = collate_fn, dim

    def __call__(self, examples: list[Any]) -> Any:
        """Collate examples and pad their batch."""
        return self.pad(self.collate_fn(examples))

    def pad(self, batch: Any) -> Any:
        """Pad a batch; a dictionary, or another mapping that can be written, is changed itself."""
        if isinstance(batch, MutableMapping):
            for key in self.values:
                batch[key] = self._padded(batch, key)
            return batch
        parts = list(batch)
        for key in self.values:
            parts[key] = self._padded(parts, key)
        kind: Any = type(batch)
        return kind(*parts) if hasattr(batch, "_fields") else kind(parts)

    def _padded(self, batch: Any, key: Any) -> Tensor:
        try:
            tensor = batch[key]
        except (LookupError, TypeError):
            tensor = None
        if not isinstance(tensor, Tensor):
            known = list(batch) if isinstance(batch, Mapping) else f"{len(batch)} entries"
            raise ValueError(
                f"PadTo() pads tensors of the batch, which has none under {key!r}: it has {known}"
                f"{FIX}name the entries with the length, PadTo(lengths, {{name: value, ...}})"
            )
        length = tensor.shape[self.dim]
        missing = next_length(self.lengths, length) - length
        if not missing:
            return tensor
        behind = [0, 0] * (tensor.dim() - 1 - self.dim % tensor.dim())
        return torch.nn.functional.pad(tensor, [*behind, 0, missing], value=self.values[key])
