"""Where the parameter gradients of a graphed backward go, without autograd's help."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter, is_

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_graphs.core.torch_private import accumulation_hooks, gradient_hooks
from lightning_graphs.errors import CaptureError, ReplayError

_gradient: Callable[[Tensor], Tensor | None] = attrgetter("grad")

GradientBuffers = Callable[[Sequence[Parameter]], Sequence[Tensor]]
"""Memory for the gradients of parameters, given before a capture."""


def new_buffers(parameters: Sequence[Parameter]) -> list[Tensor]:
    """Buffers of their own for these parameters."""
    return [torch.empty_like(p, requires_grad=False) for p in parameters]


def refuse_parameter_hooks(named: Sequence[tuple[str, Tensor]]) -> None:
    """Refuse ``param_grads="direct"`` where a hook on a parameter would be skipped.

    Raises:
        CaptureError: names the parameter, or the process group whose reducer hooks into autograd.
    """
    rule = (
        'param_grads="direct" writes parameter gradients inside of the graph: hooks on parameters '
        "never fire."
    )
    remedy = 'use param_grads="autograd"'
    hooked = next((name for name, p in named if gradient_hooks(p) or accumulation_hooks(p)), None)
    if hooked is not None:
        raise CaptureError(rule, f"`{hooked}` has a gradient hook", remedy)
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        ranks = distributed.get_world_size()
        if ranks > 1:
            observed = f"a process group of {ranks} ranks, whose gradient reducer is such a hook"
            raise CaptureError(rule, observed, remedy)


class DirectGradients:
    """Hands the gradients that a backward graph writes to ``parameter.grad`` itself.

    The graph ends with one fused copy of all parameter gradients into buffers that live outside of
    its pool: inside, their memory would be that of activations which the backward pass has freed
    and the next forward writes again. A parameter without gradient is given its buffer. A
    parameter that has one gets the new gradient added; where that gradient is still the buffer,
    its value is moved out of the way before the graph runs.

    Args:
        parameters: Parameters that may get a gradient.
        buffers: Memory for the gradient of each.
    """

    def __init__(self, parameters: Sequence[Parameter], buffers: Sequence[Tensor]) -> None:
        self._parameters = list(parameters)
        self._buffers = list(buffers)
        self._kept: list[Tensor] | None = None
        self._nothing = [None] * len(self._parameters)

    @property
    def parameters(self) -> Sequence[Parameter]:
        """The parameters whose gradients it writes."""
        return self._parameters

    def capture(self, gradients: Sequence[Tensor | None]) -> None:
        """Write the gradients into the buffers; to be called as the last part of a capture.

        Args:
            gradients: One for each parameter; a parameter with None is left alone from now on.
        """
        used = [i for i, gradient in enumerate(gradients) if gradient is not None]
        self._parameters = [self._parameters[i] for i in used]
        self._buffers = [self._buffers[i] for i in used]
        self._nothing = [None] * len(used)
        if used:
            torch._foreach_copy_(self._buffers, [g for g in gradients if g is not None])

    def refuse_hooks(self) -> None:
        """Refuse to go on where a hook would be skipped.

        Raises:
            ReplayError: a hook was registered on a parameter after the capture.
        """
        parameters = self._parameters
        if any(map(gradient_hooks, parameters)) or any(map(accumulation_hooks, parameters)):
            raise ReplayError(
                'With param_grads="direct", hooks on parameters never fire.',
                "a gradient hook was registered on a parameter after the capture",
                'remove it, or use param_grads="autograd"',
            )

    def replay(self, backward: Callable[[], None]) -> None:
        """Run the backward graph; afterwards ``.grad`` is what autograd would have made it."""
        parameters = self._parameters
        before = list(map(_gradient, parameters))
        if all(map(is_, before, self._nothing)):
            backward()
            for parameter, buffer in zip(parameters, self._buffers, strict=True):
                parameter.grad = buffer
            return
        self._move_out_of_the_way(before)
        backward()
        self._accumulate()

    def _move_out_of_the_way(self, gradients: Sequence[Tensor | None]) -> None:
        """Copy gradients that are still the graph's buffers: the replay overwrites those."""
        held = [i for i, g in enumerate(gradients) if g is self._buffers[i]]
        if not held:
            return
        if self._kept is None:
            self._kept = [torch.empty_like(buffer) for buffer in self._buffers]
        kept = [self._kept[i] for i in held]
        torch._foreach_copy_(kept, [self._buffers[i] for i in held])
        for i, gradient in zip(held, kept, strict=True):
            self._parameters[i].grad = gradient

    def _accumulate(self) -> None:
        targets, additions = [], []
        for parameter, buffer in zip(self._parameters, self._buffers, strict=True):
            if parameter.grad is None:
                parameter.grad = buffer
            else:
                targets.append(parameter.grad)
                additions.append(buffer)
        if targets:
            torch._foreach_add_(targets, additions)
