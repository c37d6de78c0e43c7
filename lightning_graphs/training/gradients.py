"""Where a captured step keeps its gradients, and what ``parameter.grad`` is between steps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter, is_

import torch
from torch import Tensor
from torch.nn import Parameter

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


class AttachedGradients:
    """The gradients that a captured step writes, always at the same addresses.

    Args:
        parameters: Parameters that got a gradient in the captured step.
        buffers: Their gradients.
    """

    def __init__(self, parameters: Sequence[Parameter], buffers: Sequence[Tensor]) -> None:
        self.parameters = list(parameters)
        self.buffers = list(buffers)

    def attach(self) -> None:
        """Make ``.grad`` the buffers; others zero it, or set it to None around validation."""
        if not all(map(is_, map(_gradient, self.parameters), self.buffers)):
            for parameter, buffer in zip(self.parameters, self.buffers, strict=True):
                parameter.grad = buffer

    def adopt(self) -> None:
        """Bring the gradients that there are into the buffers, None as zero, and attach them."""
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

    def complete(self) -> bool:
        """Whether every parameter still has a gradient, after hooks that may have changed them."""
        return all(parameter.grad is not None for parameter in self.parameters)


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
                self._buffers[parameter] = torch.zeros_like(parameter, requires_grad=False)
        return [self._buffers[parameter] for parameter in parameters]
