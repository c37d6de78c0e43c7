"""Where a captured step keeps its gradients, and what ``parameter.grad`` is between steps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter, is_
from sys import getrefcount

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_graphs.core.gradients import empty_gradient
from lightning_graphs.training.interception import replaced

_gradient: Callable[[Tensor], Tensor | None] = attrgetter("grad")


@contextlib.contextmanager
def gradients_set_aside(parameters: Sequence[Parameter]) -> Iterator[None]:
    """While capturing, no parameter has a gradient; afterwards each has the one it had."""
    before = list(map(_gradient, parameters))
    for parameter in parameters:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in zip(parameters, before, strict=True):
            parameter.grad = gradient


@contextlib.contextmanager
def zeroed_quickly(optimizer: Optimizer) -> Iterator[None]:
    """While the body runs, ``optimizer.zero_grad()`` costs a third of what it costs in torch.

    It sets every gradient to None, as torch's own does. One that somebody else has written stays.
    """
    if type(optimizer).zero_grad is not Optimizer.zero_grad or "zero_grad" in vars(optimizer):
        yield
        return

    def zero_grad(set_to_none: bool = True) -> None:
        if not set_to_none:
            Optimizer.zero_grad(optimizer, set_to_none=False)
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    with replaced(optimizer, "zero_grad", zero_grad):
        yield


class AttachedGradients:
    """The gradients that a captured step writes, always at the same addresses.

    Args:
        parameters: Parameters that have a gradient after the captured step.
        buffers: Their gradients.
        others: Parameters that have none.
        shared: Other graphs write the same buffers.
    """

    def __init__(
        self,
        parameters: Sequence[Parameter],
        buffers: Sequence[Tensor],
        others: Sequence[Parameter] = (),
        *,
        shared: bool = False,
    ) -> None:
        self.parameters = list(parameters)
        self.buffers = list(buffers)
        self.others = list(others)
        self._shared = shared
        self._references: list[int] | None = None

    def attach(self, *, zeroed: bool = False) -> None:
        """Make ``.grad`` the buffers; others zero it, or set it to None around validation.

        Args:
            zeroed: The step zeroes gradients, so parameters that got none have none.
        """
        if not self._are_attached():
            for parameter, buffer in zip(self.parameters, self.buffers, strict=True):
                parameter.grad = buffer
        if zeroed:
            for parameter in self.others:
                parameter.grad = None

    def leave_kept(self) -> None:
        """Ahead of a replay, give gradients that somebody has kept memory of their own.

        In eager training each step makes new ones. Only the tensors themselves are known to be
        kept, not others over the same memory (``p.grad.detach()``), and not where steps add up.
        """
        if self._shared:
            return
        references = list(map(getrefcount, self.buffers))
        if references == self._references:
            return
        if self._references is None:  # nobody has seen them yet
            self._references = references
            return
        for i, (now, before) in enumerate(zip(references, self._references, strict=True)):
            if now > before:
                kept = self.buffers[i]
                self.buffers[i] = kept.detach()
                kept.data = kept.clone()

    def adopt(self) -> None:
        """Bring the gradients that there are into the buffers, None as zero, and attach them."""
        if self._are_attached():
            return
        missing, sources, targets = [], [], []
        for parameter, buffer in zip(self.parameters, self.buffers, strict=True):
            gradient = parameter.grad
            if gradient is buffer:
                continue
            if gradient is None:
                missing.append(buffer)
            else:
                sources.append(gradient)
                targets.append(buffer)
            parameter.grad = buffer
        with torch.no_grad():
            if missing:
                torch._foreach_zero_(missing)
            if sources:
                torch._foreach_copy_(targets, sources)

    def _are_attached(self) -> bool:
        return all(map(is_, map(_gradient, self.parameters), self.buffers))

    def complete(self) -> bool:
        """Whether the same parameters have gradients as in the capture, whatever hooks did."""
        return all(p.grad is not None for p in self.parameters) and all(
            p.grad is None for p in self.others
        )


class KeptGradients:
    """Gradients that outlive their step because somebody has kept them, as eager training allows.

    The graphs of a pool write each other's memory.
    """

    def __init__(self) -> None:
        self._written: AttachedGradients | None = None

    def leave(self, coming: AttachedGradients | None = None) -> None:
        """Leave those that were kept to their keepers, with memory of their own.

        Args:
            coming: What a replay is about to write; None where no replay follows.
        """
        if self._written is not None and self._written is not coming:
            self._written.leave_kept()
        if coming is not None:
            coming.leave_kept()
        self._written = coming


class PersistentGradients:
    """Gradient buffers outside of every pool, for gradients that outlive a replay.

    Inside a pool, the memory of a gradient is that of an activation which the backward pass has
    freed and the next forward writes. Steps that accumulate need the gradients of earlier ones, so
    theirs live here, shared by all graphs.
    """

    def __init__(self) -> None:
        self._buffers: dict[Parameter, Tensor] = {}

    def of(self, parameters: Sequence[Parameter]) -> list[Tensor]:
        """The buffers of these parameters, made (outside of a capture) where they are missing."""
        for parameter in parameters:
            if parameter not in self._buffers:
                self._buffers[parameter] = empty_gradient(parameter).zero_()
        return [self._buffers[parameter] for parameter in parameters]

    def clear(self) -> None:
        """Let go of all buffers: no graph writes them any more."""
        self._buffers.clear()


class GradientTargets:
    """Where the gradients of one captured step go: fresh ones, and buffers that outlive a replay.

    Nobody zeroes the gradients of a parameter that the optimizer does not have: they add up.

    Args:
        optimizer: Zeroes and reads gradients.
        trainable: Parameters that may get one.
        persistent: The buffers.
        keeps: Gradients outlive the step.
        adds: Gradients are added to those of earlier steps.
        holds: The optimizer step is captured, and reads gradients of earlier steps too.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        trainable: Sequence[Parameter],
        persistent: PersistentGradients,
        *,
        keeps: bool,
        adds: bool,
        holds: bool,
    ) -> None:
        optimized = dict.fromkeys(p for group in optimizer.param_groups for p in group["params"])
        self.parameters = list({**optimized, **dict.fromkeys(trainable)})
        self._inside = [p in optimized for p in self.parameters]
        self._adds = [adds or not inside for inside in self._inside]
        self._held = [
            holds and inside and p.grad is not None
            for p, inside in zip(self.parameters, self._inside, strict=True)
        ]
        self._buffers = [
            persistent.of([p])[0] if p.requires_grad and (keeps or not inside) else None
            for p, inside in zip(self.parameters, self._inside, strict=True)
        ]

    def keep(self) -> None:
        """Write or add fresh gradients to their buffers; a part of the captured step."""
        written: tuple[list[Tensor], list[Tensor]] = ([], [])
        added: tuple[list[Tensor], list[Tensor]] = ([], [])
        for i, (parameter, buffer) in enumerate(zip(self.parameters, self._buffers, strict=True)):
            if buffer is None:
                continue
            if parameter.grad is not None:
                targets, fresh = added if self._adds[i] else written
                targets.append(buffer)
                fresh.append(parameter.grad)
            if parameter.grad is not None or self._held[i]:
                parameter.grad = buffer
        with torch.no_grad():
            if written[0]:
                torch._foreach_copy_(*written)
            if added[0]:
                torch._foreach_add_(*added)

    def attached(self) -> tuple[AttachedGradients, AttachedGradients]:
        """The gradients as they are now: of the optimizer's parameters, and of the others."""
        return self._attached(True), self._attached(False)

    def _attached(self, inside: bool) -> AttachedGradients:
        mine = [p for p, i in zip(self.parameters, self._inside, strict=True) if i is inside]
        used = [(p, p.grad) for p in mine if p.grad is not None]
        others = [p for p in mine if p.grad is None]
        shared = any(buffer is not None for buffer in self._buffers)
        return AttachedGradients([p for p, _ in used], [g for _, g in used], others, shared=shared)
