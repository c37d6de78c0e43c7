"""Everything besides the batch that a captured step depends on."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from lightning_graphs.core.arguments.identity import is_tensor
from lightning_graphs.core.arguments.values import in_words

Values = tuple[tuple[str, Any], ...]


def moved_values(before: Values, now: Values) -> list[str]:
    """What changed among named values, a line each; two of them may have one name."""
    gone = dict((Counter(before) - Counter(now)).keys())
    new = Counter(now) - Counter(before)
    return [f"{name}: {in_words(gone[name], value)}" for name, value in new if name in gone]


def tensors_moved(before: Values, now: Values) -> list[str]:
    """The names under which there are other tensors now, where all names are the same."""
    if [name for name, _ in before] != [name for name, _ in now]:
        return []
    pairs = [(n, a, b) for (n, a), (_, b) in zip(before, now, strict=True) if a != b]
    return [name for name, *both in pairs if all(map(is_tensor, both))]


@dataclass(frozen=True, slots=True)
class Phase:
    """Which part of an accumulation window a micro-batch is."""

    zeroing: bool  # gradients are zeroed before its backward
    stepping: bool  # the optimizer steps after its backward
    window: int  # ``accumulate_grad_batches``: the loss is divided by it

    def __str__(self) -> str:
        parts = ["zeroing"] * self.zeroing + ["stepping"] * self.stepping
        return f"{' and '.join(parts) or 'neither zeroing nor stepping'}, window of {self.window}"


@dataclass(frozen=True, slots=True)
class Conditions:
    """The state of the fit that a capture freezes."""

    phase: Phase  # part of the accumulation window
    # Name and value of what the optimizer's groups hold, but for the live learning rates
    hyper_parameters: Values
    training: tuple[bool, ...]  # the train/eval flag of every module
    # Of the plain attributes that captured steps have read, and of the trainer's clipping
    attributes: Values
    # Which of the optimizer's parameters have one from earlier steps, where the step reads it
    gradients: tuple[bool, ...]

    def holds(self, now: Conditions) -> bool:
        """Whether what was captured under these may run now.

        What other captures have read since, which comes last, is no matter.
        """
        return (
            self.phase == now.phase
            and self.hyper_parameters == now.hyper_parameters
            and self.training == now.training
            and self.gradients == now.gradients
            and self.attributes == now.attributes[: len(self.attributes)]
        )

    def diff(self, other: Conditions) -> list[str]:
        """What changed, a line each; empty only when equal."""
        lines = []
        if self.phase != other.phase:
            lines.append(f"accumulation: {self.phase} -> {other.phase}")
        if len(self.hyper_parameters) != len(other.hyper_parameters):
            lines.append("the optimizer's parameter groups changed")
        else:
            pairs = zip(self.hyper_parameters, other.hyper_parameters, strict=True)
            lines += [f"{name}: {a!r} -> {b!r}" for (name, a), (_, b) in pairs if a != b]
        if self.training != other.training:
            flips = sum(a != b for a, b in zip(self.training, other.training, strict=False))
            lines.append(f"train/eval mode of {flips} module(s)")
        lines += moved_values(self.attributes, other.attributes)
        if self.gradients != other.gradients:
            lines.append("which parameters have gradients from earlier steps")
        return lines
