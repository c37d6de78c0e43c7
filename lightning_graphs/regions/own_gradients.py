"""Gradients of a captured step whose own code runs backward passes, zeroes and uses them.

Its own code takes optimizer steps, too. Those of an optimizer that no graph can step run eagerly,
behind the graph.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_graphs.device.rules import USED_BEHIND
from lightning_graphs.device.trace import OperatorCall, OperatorsSeen, tensors_in
from lightning_graphs.errors import CaptureError
from lightning_graphs.private.callsite import is_library
from lightning_graphs.private.engine import require_plain_gradients
from lightning_graphs.private.exchange import replaced
from lightning_graphs.private.torch import has_memory, local, memory_of, version_of
from lightning_graphs.regions.gradients import GradientBuffers, PersistentGradients, StepGradients
from lightning_graphs.regions.optimizer import why_not_beside, why_not_sharded
from lightning_graphs.regions.plan import Shown
from lightning_graphs.values.tree import parameters_of


class OwnGradients:
    """Where such gradients go: all outlive a replay, in buffers that steps of all kinds share.

    The step finds gradients of earlier ones there, as it would find them in ``.grad``. It may read
    them, leave them, add to them in place, drop them or compute new ones: these are copied to the
    buffers at its end.
    """

    adds = False  # what a replay loads is no part of the new gradients

    def __init__(
        self,
        parameters: Iterable[Parameter],  # that may have a gradient
        persistent: PersistentGradients,
        # Gets those that have no buffer, since they required no gradient as the step began
        unforeseen: list[Parameter],
    ) -> None:
        self.parameters = list(dict.fromkeys(parameters))
        has_buffer = [
            p for p in self.parameters if p.requires_grad or p.grad is not None or p in persistent
        ]
        self._buffers = dict(zip(has_buffer, persistent.of(has_buffer), strict=True))
        self._trained = [p.requires_grad for p in self.parameters]
        self._before = [p for p in self.parameters if p.grad is not None]
        self._new: list[Parameter] = []
        self._dropped: set[Parameter] = set()  # before anything has read their old gradients
        self._reads_old = False
        self._unforeseen = unforeseen
        # By optimizer steps behind the graph: new gradients, and the versions of all in buffers
        self._used: list[Parameter] = []
        self._used_as: dict[Parameter, int] = {}

    def begin(self) -> None:
        """Let ``.grad`` be what the step would find of earlier ones."""
        for parameter in self._before:
            parameter.grad = self._buffers[parameter]
        self._versions = {p: version_of(self._buffers[p]) for p in self._before}

    def watched(self) -> AbstractContextManager[None]:
        """Note whether the body, the step's own code, reads gradients of earlier steps.

        It does not if it sets ``.grad`` of each of them first, as ``zero_grad`` does. Autograd adds
        to them in place, or sets ``.grad`` unseen.
        """
        gradient: Any = Tensor.grad

        def is_old(parameter: Any, value: Tensor | None) -> bool:
            return value is not None and value is self._buffers.get(parameter)

        def read(parameter: Any) -> Any:
            value = gradient.__get__(parameter)
            if is_old(parameter, value):
                code = sys._getframe(1).f_code
                zeroes = code.co_name == "zero_grad" and is_library(code.co_filename)
                self._reads_old |= not zeroes
            return value

        def write(parameter: Any, value: Tensor | None) -> None:
            old = gradient.__get__(parameter)
            if is_old(parameter, old) and version_of(old) == self._versions.get(parameter):
                self._dropped.add(parameter)
            gradient.__set__(parameter, value)

        return replaced(Parameter, "grad", property(read, write))

    def shown(self) -> Shown:
        """Copy the present gradients to their buffers, for an optimizer step that runs eagerly."""
        self._copy()
        self._used += self._new
        return [(p, p.grad) for p in self.parameters]

    def used_behind(self, shown: Shown) -> None:
        """Refuse to change these from now on, which a step behind the graph is to use."""
        self._used_as |= {p: version_of(gradient) for p, gradient in shown if gradient is not None}

    def keep(self) -> None:
        """Copy new gradients to their buffers; the last part of the captured step.

        Raises:
            CaptureError: Gradients that a step behind the graph is to use have changed since.
        """
        self._refuse_frozen()
        self._copy()
        if any(version_of(self._buffers[p]) != as_it_was for p, as_it_was in self._used_as.items()):
            raise USED_BEHIND.refused("gradients are computed again behind it")
        self._new = [p for p in dict.fromkeys((*self._used, *self._new)) if p.grad is not None]

    def _copy(self) -> None:
        require_plain_gradients([parameter.grad for parameter in self.parameters])
        present = [(p, p.grad) for p in self.parameters if p.grad is not None]
        new = [(p, gradient) for p, gradient in present if gradient is not self._buffers.get(p)]
        self._unforeseen += [p for p, _ in new if p not in self._buffers]
        if self._unforeseen:
            raise CaptureError(
                "A captured step must have memory for gradients before it begins.",
                f"{len(self._unforeseen)} parameters require a gradient in the middle of the step",
                "call requires_grad_() before the fit",
            )
        self._new = [p for p, _ in new]
        if new:
            targets = [local(self._buffers[p]) for p in self._new]
            with torch.no_grad():
                torch._foreach_copy_(targets, [local(gradient) for _, gradient in new])
        for parameter in self._new:
            parameter.grad = self._buffers[parameter]

    def _refuse_frozen(self) -> None:
        """Refuse a step that leaves ``requires_grad`` changed, which a replay would not."""
        moved = sum(
            p.requires_grad is not trained
            for p, trained in zip(self.parameters, self._trained, strict=True)
        )
        if moved:
            raise CaptureError(
                "A captured step must leave requires_grad of parameters as it has found it.",
                f"requires_grad of {moved} parameter(s) has changed at its end",
                "put it back at the end of the step, as untoggle_optimizer does, or set it in a "
                "hook between steps",
            )

    def found(self, *, copied: bool) -> StepGradients:
        """Take the gradients as they are now.

        Args:
            copied: See :class:`GradientBuffers`.
        """
        new = set(self._new)
        lasting = [p for p in self.parameters if p.grad is not None and p not in new]
        stays = set(lasting)
        dropped = [p for p in self._before if p.grad is None]
        return StepGradients(
            inside=self._in_buffers(self._new, dropped, copied=copied),
            outside=self._in_buffers(lasting, copied=copied),
            replaced=self._in_buffers(p for p in self._before if p not in stays),
            visible=self._in_buffers([*self._new, *lasting], copied=copied),
            reads_old=self._reads_old or not self._dropped.issuperset(self._before),
            dropped=() if self._reads_old else tuple(self._dropped),
        )

    def _in_buffers(
        self,
        parameters: Iterable[Parameter],
        others: Iterable[Parameter] = (),
        *,
        copied: bool = False,
    ) -> GradientBuffers:
        found = list(parameters)
        buffers = [self._buffers[p] for p in found]
        return GradientBuffers(found, buffers, list(others), copied=copied)


# ------------------ Optimizer steps behind the graph


def why_not_behind(
    module: nn.Module, optimizer: Optimizer, scaler: torch.amp.GradScaler | None
) -> str | None:
    """Why the step of an optimizer cannot run eagerly behind the graph of a step that calls it."""
    if why := why_not_beside(module, optimizer):
        return why
    if scaler is not None:
        name = type(optimizer).__name__
        return f"a gradient scaler steps {name}, which no graph can step, and asks the device"
    return why_not_sharded(optimizer)


def uses_refused(optimizer: Optimizer, shown: Shown) -> OperatorsSeen:
    """Refuse uses of what an optimizer step behind the graph is yet to change, in the body.

    Draws are refused, too: the optimizer may draw before them.
    """
    tensors = parameters_of(optimizer)
    tensors += [gradient for _, gradient in shown if gradient is not None]
    tensors += tensors_in([*optimizer.state.values()])
    touched = {memory_of(plain) for plain in map(local, tensors)}

    def see(call: OperatorCall, _: Any) -> None:
        draws = torch.Tag.nondeterministic_seeded in call.func.tags
        if draws or any(memory_of(t) in touched for t in call.inputs if has_memory(t)):
            USED_BEHIND.stop_here(f"{call.func} uses what it changes, or draws,")

    return OperatorsSeen(see)
