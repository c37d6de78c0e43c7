"""The casts at the end of a backward pass, in one copy in place of a kernel for each weight.

Autocast casts a weight for each use, and autograd casts its gradient back. A capture takes these
casts out of the backward pass and does many at once: fewer nodes, and the same values, since
``copy_`` casts as autograd does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node
from torch.nn import Parameter

from lightning_graphs.core.autograd_graph import leaf_of, nodes_behind
from lightning_graphs.core.gradients import empty_gradient, write_all
from lightning_graphs.core.torch_private import after_backward, outputs_of, will_execute

_MOST_WAITING = 32
"""One launch of torch's fused copy takes 64 pieces, and large gradients are several.

Those that wait take memory. ResNet-50 reserves 1.040 times what eager training does, and 0.081 more
for a second shape; with 48 that wait 1.015 and 0.109, with 24 1.093 and 0.009 (H200; equal times).
"""


def ahead_of_casts(
    outputs: Sequence[Tensor], parameters: Sequence[Tensor]
) -> list[Tensor | GradientEdge]:
    """Where to ask autograd for gradients of parameters that are copied afterwards anyway."""
    # The gradient is taken ahead of a cast where that is the parameter's only use. Nobody else may
    # read that gradient or write into it, so no Python code may take part in the backward pass.
    users: dict[Tensor, list[Node]] = {parameter: [] for parameter in parameters}
    for node in nodes_behind(outputs):
        for parent, _ in node.next_functions:
            leaf = None if parent is None else leaf_of(parent)
            if leaf in users:
                users[leaf].append(node)
    returned = set(outputs)
    return [
        GradientEdge(users[parameter][0], 0)
        if parameter not in returned and _is_cast(parameter, users[parameter])
        else parameter
        for parameter in parameters
    ]


def _is_cast(parameter: Tensor, users: Sequence[Node]) -> bool:
    """Whether the only user casts a floating-point tensor to such a dtype, and does no more."""
    if len(users) != 1 or type(parameter) not in (Tensor, Parameter):
        return False
    made = outputs_of(users[0])
    return (
        type(users[0]).__name__ == "ToCopyBackward0"
        and len(made) == 1
        and made[0].dtype.is_floating_point
        and made[0].device == parameter.device
        and parameter.is_floating_point()
        and getattr(parameter, "grad_dtype", None) in (None, parameter.dtype)
    )


@contextlib.contextmanager
def cast_together(outputs: Sequence[Tensor], parameters: Sequence[Tensor]) -> Iterator[None]:
    """While the body runs a backward pass through these outputs, cast many gradients at once.

    Autograd keeps the gradients of parameters that have one already, or that are used more than
    once behind the outputs, and those of a pass that asks for some parameters only or that will be
    differentiated. Others are in ``.grad`` at the end of the pass, and not before: no Python code
    may take part in it.
    """
    gathered = _GatheredGradients()
    handles = []
    for parameter, edge in zip(parameters, ahead_of_casts(outputs, parameters), strict=True):
        if isinstance(edge, GradientEdge):
            accumulation = edge.node.next_functions[0][0]
            take = partial(gathered.take, parameter, accumulation)
            handles.append(edge.node.register_prehook(take))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _GatheredGradients:
    """Gradients of one backward pass on their way to ``.grad``, taken ahead of their casts."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Tensor, Tensor]] = []
        self._is_announced = False

    def take(
        self, parameter: Tensor, accumulation: Node | None, gradients: tuple[Tensor | None, ...]
    ) -> tuple[None] | None:
        """A hook ahead of a cast: takes what the cast is given, and gives it nothing to do."""
        gradient = gradients[0]
        if (
            type(gradient) is not Tensor
            or gradient.layout is not torch.strided
            or not parameter.requires_grad
            or parameter.grad is not None
            or torch.is_grad_enabled()
            or accumulation is None
            or not will_execute(accumulation)
        ):
            return None
        if not self._is_announced:
            after_backward(self._finish)
            self._is_announced = True
        self._waiting.append((parameter, gradient))
        if len(self._waiting) == _MOST_WAITING:
            self._write()
        return (None,)

    def _finish(self) -> None:
        self._is_announced = False
        self._write()

    def _write(self) -> None:
        waiting, self._waiting = self._waiting, []
        targets = [empty_gradient(parameter) for parameter, _ in waiting]
        write_all(targets, [gradient for _, gradient in waiting])
        for (parameter, _), target in zip(waiting, targets, strict=True):
            parameter.grad = target
