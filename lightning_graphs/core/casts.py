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
from lightning_graphs.core.gradients import write_all
from lightning_graphs.core.torch_private import (
    accumulation_hooks,
    after_backward,
    gradient_hooks,
    outputs_of,
    will_execute,
)

_TOGETHER = 48
"""So many gradients wait for each other: one launch of torch's fused copy takes 64 pieces."""


def ahead_of_casts(
    outputs: Sequence[Tensor], parameters: Sequence[Tensor]
) -> list[Tensor | GradientEdge]:
    """Where to ask autograd for gradients of parameters that are copied afterwards anyway.

    The gradient is taken ahead of a cast where that is the parameter's only use. Nobody else must
    look at it or write into it: no Python code may take part in the backward pass.

    Args:
        outputs: What depends on the parameters.
        parameters: The parameters.

    Returns:
        For each parameter the gradient edge into its cast, or the parameter itself.
    """
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
        users[0].name() == "ToCopyBackward0"
        and len(made) == 1
        and made[0].dtype.is_floating_point
        and made[0].device == parameter.device
        and parameter.is_floating_point()
    )


@contextlib.contextmanager
def cast_together(outputs: Sequence[Tensor], parameters: Sequence[Tensor]) -> Iterator[None]:
    """While the body runs backward passes through these outputs, cast many gradients at once.

    Left to autograd are the gradients of parameters with hooks, of those that are used several
    times or have a gradient, and of backward passes that ask for some only or will be
    differentiated. As with :func:`ahead_of_casts`, no Python code may take part in them.

    Args:
        outputs: What depends on the parameters.
        parameters: The parameters.
    """
    gathered = _GatheredGradients()
    handles = []
    for parameter, edge in zip(parameters, ahead_of_casts(outputs, parameters), strict=True):
        if isinstance(edge, GradientEdge) and not _has_hooks(parameter):
            accumulation = edge.node.next_functions[0][0]
            take = partial(gathered.take, parameter, accumulation)
            handles.append(edge.node.register_prehook(take))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _has_hooks(parameter: Tensor) -> bool:
    return bool(gradient_hooks(parameter) or accumulation_hooks(parameter))


class _GatheredGradients:
    """Gradients on their way to ``.grad``, taken from autograd ahead of their casts."""

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
        if len(self._waiting) == _TOGETHER:
            self._write()
        return (None,)

    def _finish(self) -> None:
        self._is_announced = False
        self._write()

    def _write(self) -> None:
        waiting, self._waiting = self._waiting, []
        targets = [torch.empty_like(parameter, requires_grad=False) for parameter, _ in waiting]
        write_all(targets, [gradient for _, gradient in waiting])
        for (parameter, _), target in zip(waiting, targets, strict=True):
            if parameter.grad is None:
                parameter.grad = target
            else:  # a backward pass inside of this one, as of a checkpoint, came first
                parameter.grad.add_(target)
