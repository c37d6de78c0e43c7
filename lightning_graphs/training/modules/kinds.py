"""What a step of graphed submodules depends on, and the graphs of one such step."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

from torch import nn

from lightning_graphs.core.call_plan import CallPlan
from lightning_graphs.core.signature import EVERYTHING, KernelChoice, Modes, Signature
from lightning_graphs.core.torch_private import (
    accumulation_hooks,
    gradient_hooks,
    hooks_registered,
)
from lightning_graphs.errors import CaptureError
from lightning_graphs.training.conditions import moved_values
from lightning_graphs.training.investment import FEW
from lightning_graphs.training.modules.observation import StepObserver
from lightning_graphs.training.modules.sites import Baked, CapturedCalls
from lightning_graphs.training.statistics import listed

_REQUIRES_GRAD = attrgetter("requires_grad")


class Flags(NamedTuple):
    """What a step's graphs depend on beside its batch."""

    training: tuple[bool, ...]  # train/eval flag of every module
    requires_grad: tuple[bool, ...]  # of every parameter
    hooked: tuple[bool, ...]  # which parameters have hooks; empty if none has
    kernels: KernelChoice  # what operators choose their kernels by


class FlagsReader:
    """Reads the flags before each step."""

    def __init__(self, module: nn.Module) -> None:
        self._modules = list(module.modules())
        self._parameters = list(module.parameters())
        self._hooked: tuple[bool, ...] = ()
        self._hooks_looked_at = -1

    def now(self) -> Flags:
        """The flags as they are."""
        training = tuple([m.training for m in self._modules])
        required = tuple(map(_REQUIRES_GRAD, self._parameters))
        return Flags(training, required, self._hooks(), KernelChoice.now())

    def _hooks(self) -> tuple[bool, ...]:
        number = hooks_registered()
        if self._hooked or number != self._hooks_looked_at:
            self._hooks_looked_at = number
            found = [bool(gradient_hooks(p) or accumulation_hooks(p)) for p in self._parameters]
            self._hooked = tuple(found) if any(found) else ()
        return self._hooked


class StepKind(NamedTuple):
    """What is known of a step before it runs."""

    signature: Signature | None  # of its batch; None for batches that have none
    flags: Flags

    @property
    def is_told_by_tensors(self) -> bool:
        """Whether there is nothing but tensors in the batch on which shapes could depend."""
        signature = self.signature
        return signature is not None and len(signature.specs) == len(signature.leaves)

    def change(self, to: StepKind) -> list[str]:
        """What is different in another kind, for a person to read."""
        lines: list[str] = []
        if self.signature is not None and to.signature is not None:
            lines = self.signature.diff(to.signature)
        names = ("train/eval flags", "requires_grad of parameters", "hooks on parameters")
        triples = zip(names, self.flags, to.flags, strict=False)
        changed = [name for name, before, after in triples if before != after]
        changed += self.flags.kernels.changes(to.flags.kernels)
        return lines + [f"{name} changed" for name in changed]


class StepOfModules:
    """The graphs for steps of one kind that make the same calls."""

    def __init__(
        self, kind: StepKind, pattern: Hashable, captured: CapturedCalls, baked: Baked
    ) -> None:
        self.kind = kind
        self.key = (kind, pattern, baked.values)
        self.captured = captured
        self.baked = baked
        self.uses = 0
        signature = kind.signature
        self._call = CallPlan(signature, check_modes=True) if signature is not None else None

    @property
    def is_current(self) -> bool:
        """Whether everything of Python's that is in the graphs is as it was then."""
        return self.baked.is_current

    def change(self, to: StepOfModules) -> str:
        """What is different in another step, for a person to read."""
        lines = self.kind.change(to.kind)
        lines += moved_values(self.baked.values, to.baked.values)
        return listed(lines) or "a step calls its modules differently"

    def fits(self, args: tuple[Any, ...], flags: Flags) -> bool:
        """Whether a step with these arguments is of this kind."""
        if flags != self.kind.flags or not self.is_current:
            return False
        return self._call is None or self._call.match(args, {}) is not None


@dataclass(slots=True)
class Observed:
    """A step that is observed, or was, and is captured once its values are those of then."""

    kind: StepKind
    values: Hashable  # of attributes that earlier captures of such steps have read
    observer: StepObserver  # sees its calls, and keeps their arguments
    left: int = FEW  # how many steps with other values may come before


@dataclass(slots=True)
class Search:
    """Steps of a kind that was captured are observed: one of them made other calls."""

    kind: StepKind
    left: int  # how many steps are observed yet
    reason: str  # what is said if nothing comes of it


def batch_signature(batch: tuple[Any, ...], device_type: str) -> Signature | None:
    """The signature of a batch; None where it has none, and the modules' own arguments decide."""
    try:
        modes = Modes.current(device_type)
        # What is no tensor is a matter of the calls that are given it.
        return Signature.of(batch, {}, names=("batch",), modes=modes, unread=EVERYTHING)[0]
    except CaptureError:
        return None
