"""Hands out the gradients that a step asks for of the tensors of its batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_graphs.core.arguments.buffers import StaticInputs
from lightning_graphs.core.arguments.outputs import Owing, gradients_of


class BatchGradients:
    """What a captured step asks of its batch: ``x.requires_grad_()``, and then ``x.grad``.

    While it is captured, it has asked that of static inputs. A tensor that comes with a gradient
    gives its static input a copy: autograd adds to that in place, or the step's code drops it.
    """

    def __init__(self, inputs: StaticInputs, given: Sequence[Tensor]) -> None:
        self._static, self._given = inputs.tensors, list(given)
        for static, tensor in zip(self._static, given, strict=True):
            if tensor.is_leaf and tensor.grad is not None and tensor.requires_grad:
                static.grad = tensor.grad.detach().clone()
        self._before = [static.grad for static in self._static]
        self._required: list[int] = []  # the tensors of which the step requires a gradient
        # Tensors with a gradient: added in place to the one that comes, or new
        self._added: list[tuple[int, Tensor]] = []
        self._new: list[tuple[int, Tensor]] = []
        self._has_before: list[bool] = []  # whether one came with it, for all of these

    def __bool__(self) -> bool:
        return bool(self._required or self._added or self._new)

    def finish_capture(self) -> None:
        """Look at what the step has asked; static inputs are as before."""
        for i, gradient in gradients_of(self._static):
            kept = gradient is self._before[i]
            (self._added if kept else self._new).append((i, gradient))
        for i, (static, given) in enumerate(zip(self._static, self._given, strict=True)):
            if static.is_leaf and static.requires_grad and not given.requires_grad:
                self._required.append(i)
            static.detach_().requires_grad_(given.requires_grad)
            static.grad = None
        self._has_before = [self._before[i] is not None for i, _ in self._added + self._new]
        self._before, self._given = [], []

    @torch.no_grad()
    def take(self, batch: Sequence[Tensor]) -> bool:
        """Copy in the gradients that a batch has, if it has those of the capture."""
        if not (self._added or self._new):
            return True
        if [batch[i].grad is not None for i, _ in self._added + self._new] != self._has_before:
            return False
        for i, gradient in self._added:
            if (old := batch[i].grad) is not None:
                gradient.copy_(old)
        return True

    def hand_out(self, batch: Sequence[Tensor], owing: Owing) -> None:
        """After a replay of the forward pass."""
        for i in self._required:
            batch[i].requires_grad_()
        for i, _ in self._new:
            batch[i].grad = None
        owing += [(batch[i], gradient) for i, gradient in self._new + self._added]
