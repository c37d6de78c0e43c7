"""Where the gradients of parameters are in a captured step."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from operator import gt, is_
from sys import getrefcount
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_graphs.autograd.backward import GradientMemory, empty_gradient, write_all
from lightning_graphs.private.engine import (
    after_backward,
    ahead_of_casts,
    removed,
    require_plain_gradients,
    will_execute,
)
from lightning_graphs.private.exchange import replaced
from lightning_graphs.private.torch import (
    address_of,
    local,
    storage_uses,
    tensor_uses,
    without_ownership,
)
from lightning_graphs.regions.conditions import Observers, Phase
from lightning_graphs.values.memory import GRADIENT, ReferenceGuard, clone_all, reference_counts
from lightning_graphs.values.tree import parameters_of

# ------------------ Gradients of parameters

KEPT_LATE = (
    "a gradient that is kept between forward and backward pass has been overwritten once: keep a "
    "copy, p.grad.clone()"
)


def _references(gradient: Tensor) -> int:
    uses = getrefcount(gradient) + tensor_uses(gradient)
    return uses + storage_uses(local(gradient).untyped_storage())


def _least_references() -> int:
    parameter = Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    gradient = parameter.grad
    return _references(gradient)


_ALONE = _least_references()
"""References to a gradient that is ``.grad`` and a local variable; versions of torch differ."""


def drop_gradients(parameters: Iterable[Tensor]) -> None:
    """Let no parameter have a gradient."""
    for parameter in parameters:
        parameter.grad = None


def zeroed_quickly(optimizer: Optimizer) -> AbstractContextManager[None]:
    """Let ``optimizer.zero_grad()`` take an eighth of its time while the body runs.

    It sets every gradient to None, as torch's own does: 11 us in place of 92 for 148 parameters. A
    ``zero_grad`` of the user's stays.
    """
    if type(optimizer).zero_grad is not Optimizer.zero_grad or "zero_grad" in vars(optimizer):
        return contextlib.nullcontext()

    def zero_grad(set_to_none: bool = True) -> None:
        if not set_to_none:
            Optimizer.zero_grad(optimizer, set_to_none=False)
            return
        drop_gradients(parameters_of(optimizer))

    return replaced(optimizer, "zero_grad", zero_grad)


class GradientBuffers:
    """Gradients that a graph reads or writes, at fixed addresses: the buffers of some parameters.

    A replay overwrites the buffers. Between replays ``.grad`` of each parameter is its buffer, as
    far as ``zero_grad``, validation loops and hooks do not unset or replace it.
    """

    def __init__(
        self,
        parameters: Sequence[Parameter],
        buffers: Sequence[Tensor],
        others: Sequence[Parameter] = (),  # parameters that have none
        *,
        # User code keeps gradients: ``.grad`` is never a buffer, but memory of its own
        copied: bool = False,
        # The buffers lie in the memory of the graphs, and the step zeroes them first
        in_pool: bool = False,
    ) -> None:
        self.parameters = list(parameters)
        self.others = list(others)
        self.copied = copied
        self.in_pool = in_pool
        self._is_released = False
        # Between bring_in and take_out: whether it was copied, and buffers with their values before
        self._brought: tuple[bool, list[Tensor], list[Tensor]] | None = None
        # Parameter, gradient that user code keeps, and buffer
        self._kept_elsewhere: list[tuple[Parameter, Tensor, Tensor]] = []
        self._use(buffers)

    def _use(self, buffers: Sequence[Tensor]) -> None:
        self.buffers = list(buffers)
        self._are_whole = all(local(b) is b for b in self.buffers)
        self.storages = [address_of(local(b).untyped_storage()) for b in self.buffers]

    @property
    def pool_bytes(self) -> int:
        """Bytes in the graphs' pool that only these gradients use."""
        return sum(b.nbytes for b in self.buffers) if self.in_pool and not self._is_released else 0

    def release_ownership(self) -> None:
        """Give up ownership of the buffers' memory, so that the next capture may use it, too.

        Every replay writes it again. ``.grad`` stays where it is.
        """
        before = self.buffers
        may = self.in_pool and self._are_whole and all(b.is_cuda for b in before)
        if not may or self._is_released:
            return
        self._use(without_ownership(before))
        for parameter, old, new in zip(self.parameters, before, self.buffers, strict=True):
            if parameter.grad is old:
                parameter.grad = new
        self._is_released = True

    def copy_out(self) -> None:
        """Move gradients out of memory whose ownership was given up, before it is released."""
        if self._is_released:
            self.leave()

    def leave(self) -> None:
        """Move gradients to memory of their own, and give up ownership of that of the graphs."""
        before, self._is_released = self.buffers, True
        self._use(without_ownership(before))
        try:
            for buffer in before:  # also where user code keeps it
                buffer.data = buffer.clone()
        except torch.OutOfMemoryError:  # the next step zeroes them in any case
            for parameter, buffer in zip(self.parameters, before, strict=True):
                if parameter.grad is buffer:
                    parameter.grad = None

    def drop_old(self) -> None:
        """Drop the gradients of the step before, if the captured step zeroes them first."""
        if self.in_pool:
            drop_gradients(self.parameters)

    def taking_over(self) -> AbstractContextManager[None]:
        """Move gradients of the body, an eager step, into the buffers, to save their memory.

        Buffers whose memory was given up stay as they are: that memory is free for the step.
        """

        def move(buffer: Tensor, parameter: Tensor) -> None:
            gradient = parameter.grad
            if gradient is None or gradient.requires_grad:
                return
            if (gradient.dtype, gradient.stride()) == (buffer.dtype, buffer.stride()):
                parameter.grad = buffer.copy_(gradient)

        takes_over = self.in_pool and not self._is_released
        pairs = self.pairs() if takes_over else ()
        return removed(p.register_post_accumulate_grad_hook(partial(move, b)) for p, b in pairs)

    def bind(self, *, zeroed: bool = False) -> None:
        """Point ``.grad`` of every parameter at its buffer, or copy there for user code to keep.

        Args:
            zeroed: The step has dropped the gradients of earlier ones.
        """
        kept, self._kept_elsewhere = [] if zeroed else self._kept_elsewhere, []
        if self.copied:
            self._copy_out(zeroed)
        elif not self.are_bound():
            self._set(self.buffers)
            for parameter, gradient, buffer in kept:
                with torch.no_grad():
                    parameter.grad = gradient.copy_(buffer)
        if zeroed:  # parameters that got none have none
            drop_gradients(self.others)

    def _set(self, gradients: Sequence[Tensor | None]) -> None:
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient

    def _bind_fitting(self) -> None:
        try:
            self._set(self.buffers)
        except RuntimeError:  # a parameter has another dtype or shape by now
            for parameter, buffer in self.pairs():
                with contextlib.suppress(RuntimeError):
                    parameter.grad = buffer

    def _copy_out(self, zeroed: bool) -> None:
        """Copy the buffers out: to new gradients, or in place to those that were added to."""
        now = [None if zeroed else p.grad for p in self.parameters]
        targets = [gradient for gradient in now if gradient is not None]
        sources = [b for g, b in zip(now, self.buffers, strict=True) if g is not None]
        missing = [b for g, b in zip(now, self.buffers, strict=True) if g is None]
        clone = clone_all if self._are_whole else partial(map, Tensor.clone)
        new = iter(clone(missing))
        if targets:
            with torch.no_grad():
                torch._foreach_copy_(list(map(local, targets)), list(map(local, sources)))
        self._set([next(new) if g is None else g for g in now])

    def references(self, *, bound: bool) -> list[int]:
        """Count the references to each buffer, its own and those of tensors over its memory.

        ``.grad`` counts for one, or for none in older versions of torch. So it is always a buffer
        while these are counted.
        """
        # No name holds the pairs: an iterator keeps the last one, which would count
        before = [] if bound else [(p, p.grad) for p, b in self.pairs() if p.grad is not b]
        if before:
            self._bind_fitting()
        found = reference_counts(self.buffers, self.storages)
        for parameter, gradient in before:
            parameter.grad = gradient
        return found

    def pairs(self) -> Iterator[tuple[Parameter, Tensor]]:
        return zip(self.parameters, self.buffers, strict=True)

    def load(self, *, replaced: bool = False) -> None:
        """Copy the gradients of earlier steps into the buffers, None as zero, and bind these.

        Gradients that user code keeps stay in ``.grad``: what a replay adds is copied there later.

        Args:
            replaced: Nothing will be added, as the step lets ``.grad`` be other tensors.
        """
        self._kept_elsewhere.clear()
        if self.are_bound():
            return
        missing, sources, targets = [], [], []
        for parameter, buffer in self.pairs():
            gradient = parameter.grad
            if gradient is buffer:
                continue
            if gradient is None:
                missing.append(buffer)
            else:
                sources.append(gradient)
                targets.append(buffer)
                is_kept = not replaced and gradient.layout is torch.strided
                if is_kept and _references(gradient) > _ALONE:
                    self._kept_elsewhere.append((parameter, gradient, buffer))
                    continue
            if not self.copied:
                parameter.grad = buffer
        if not self._are_whole:
            missing, sources, targets = (list(map(local, t)) for t in (missing, sources, targets))
        with torch.no_grad():
            if missing:
                torch._foreach_zero_(missing)
            if sources:
                torch._foreach_copy_(targets, sources)

    def bring_in(self, are_kept: Callable[[], bool]) -> None:
        """Load the present gradients for a graph that may change them; :meth:`take_out` follows.

        Args:
            are_kept: Whether user code keeps buffers, as hooks may that have replaced ``.grad``:
                then the buffers have their values back afterwards.
        """
        self._brought = None
        if self.are_bound():
            return
        keeps = are_kept()
        others = [buffer for parameter, buffer in self.pairs() if parameter.grad is not buffer]
        self._brought = self.copied, others, clone_all(others) if keeps else []
        self.copied |= keeps
        self.load()

    def take_out(self) -> None:
        """Let ``.grad`` be what the graph has computed from the gradients."""
        brought, self._brought = self._brought, None
        if brought is not None:
            self.bind()
            self.copied, others, kept = brought
            if kept:
                torch._foreach_copy_(others, kept)

    def are_bound(self) -> bool:
        return all(map(is_, map(GRADIENT, self.parameters), self.buffers))

    def complete(self) -> bool:
        """Whether, after hooks, just the parameters with a gradient at the capture have one."""
        missing = any(p.grad is None for p in self.parameters)
        return not missing and all(p.grad is None for p in self.others)


class KeptGradients(ReferenceGuard):
    """Notices gradients that user code keeps past their step: the next replay would overwrite them.

    In eager training each step makes new ones.

    Args:
        held: The ``id`` of gradients that this package itself holds for a while.
    """

    def __init__(self, held: Callable[[], Sequence[int]] = tuple) -> None:
        super().__init__()
        self._held = held
        self.are_copied = False  # user code has kept some: from now on gradients are copies
        self.are_kept = False  # found when references were counted last

    def track(self, gradients: GradientBuffers | None) -> None:
        """Record reference counts of the gradients that are about to become visible.

        None: ``.grad`` is not a graph's memory.
        """
        if gradients is None and self.tracked is not None:
            self.tracked.copy_out()
        if gradients is not self.tracked:
            self.tracked = None if gradients is None or gradients.copied else gradients
            self.count()

    def leave_memory(self) -> bool:
        """Move what ``.grad`` shows out of the memory of graphs; False if user code keeps some."""
        tracked = self.tracked
        if tracked is None or not tracked.in_pool:
            return True
        if self.has_external_references():
            return False
        if any(map(is_, map(GRADIENT, tracked.parameters), tracked.buffers)):
            tracked.leave()
            self.tracked = None
            self.count()
        return True

    def count(self) -> None:
        """Record reference counts again, since a capture holds references of its own."""
        self._uses = self._now()

    def _now(self) -> list[int]:
        tracked = self.tracked
        return tracked.references(bound=tracked.are_bound()) if tracked is not None else []

    def has_external_references(self) -> bool:
        """Whether user code has kept tracked gradients; to be asked before each replay."""
        tracked, self.bound, self.are_kept = self.tracked, None, False
        if tracked is None:
            return False
        if tracked.are_bound():
            self.bound = tracked
        now = tracked.references(bound=self.bound is tracked)
        if now == self._uses:
            return False
        if ours := Counter(self._held()):
            now = [n - ours[id(b)] for n, b in zip(now, tracked.buffers, strict=True)]
        self.are_kept = found = any(map(gt, now, self._uses))
        self._uses = list(map(min, now, self._uses))  # what a capture itself lets go of late
        self.are_copied |= found
        self.is_noticed |= found
        return found


class PersistentGradients(KeptGradients, GradientMemory):
    """Gradient buffers outside of every pool, for gradients that outlive a replay.

    Inside a pool, the memory of a gradient is that of an activation which the backward pass has
    freed and the next forward writes. Steps that accumulate need the gradients of earlier ones, so
    theirs live here, shared by all graphs.
    """

    def __init__(self, held: Callable[[], Sequence[int]] = tuple) -> None:
        super().__init__(held)
        self._buffers: dict[Parameter, Tensor] = {}

    def __contains__(self, parameter: Parameter) -> bool:
        return parameter in self._buffers

    def of(self, parameters: Sequence[Parameter]) -> list[Tensor]:
        """Return buffers for these parameters; missing ones are made, outside of a capture."""
        for parameter in parameters:
            known = self._buffers.get(parameter)
            if known is None or (known.dtype, known.shape) != (parameter.dtype, parameter.shape):
                self._buffers[parameter] = empty_gradient(parameter).zero_()
        return [self._buffers[parameter] for parameter in parameters]

    def clear(self) -> None:
        self._buffers.clear()
        self.track(None)

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        """Leave references out of account that captures in the body hold, and buffers they make."""
        self.has_external_references()
        before = self._now()
        try:
            yield
        finally:
            # No name here holds the buffers: it would count as a reference
            self.bound = None
            self.tracked = GradientBuffers([*self._buffers], [*self._buffers.values()])
            now = self._now()
            known = zip(self._uses, before, now, strict=False)
            self._uses = [u + b - a for u, a, b in known] + now[len(before) :]

    def bring_in(self, gradients: GradientBuffers) -> None:
        """See :meth:`GradientBuffers.bring_in`."""

        def are_kept() -> bool:
            self.has_external_references()
            return self.are_kept

        gradients.copied = self.are_copied
        gradients.bring_in(are_kept)


class StepGradients(NamedTuple):
    """The gradients of a captured step, as a plan has them; see :class:`StepPlan`."""

    inside: GradientBuffers
    outside: GradientBuffers
    replaced: GradientBuffers | None = None
    visible: GradientBuffers | None = None
    reads_old: bool = True  # whether it may read gradients of earlier steps
    dropped: Sequence[Parameter] = ()  # whose gradients of earlier steps nothing reads any more


class GradientTargets:
    """Where the gradients of one captured step go: fresh ones, and buffers that outlive a replay.

    Gradients of a parameter that no optimizer has are never zeroed: they add up.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        trainable: Sequence[Parameter],
        persistent: PersistentGradients,
        phase: Phase,  # of the accumulation window
        observers: Observers,  # hooks that read gradients, or zero them, within the step
        *,
        # Autograd itself adds to those of earlier steps: a backward pass ahead of a step under DDP
        # reduces them, too, and of several passes each is added by itself
        in_place: bool,
    ) -> None:
        self.adds = adds = not phase.zeroing or observers.own_zero_grad  # to those of earlier steps
        # Gradients outlive the step
        keeps = not (phase.zeroing and phase.stepping) or bool(observers.before_backward)
        self._are_read = adds or bool(observers.before_backward)  # those of earlier steps
        self._in_pool = not (keeps or in_place)
        inside = dict.fromkeys(parameters_of(optimizer))
        self.parameters = list({**inside, **dict.fromkeys(trainable)})
        self._inside = inside
        lasting = [p for p in self.parameters if p.requires_grad and (keeps or p not in inside)]
        self._buffers = dict(zip(lasting, persistent.of(lasting), strict=True))
        known = {p for p in lasting if p.grad is not None}
        adding = {p for p in lasting if adds or p not in inside}
        self._grown = adding & known if in_place else set()
        self._added = adding - self._grown
        # The optimizer step reads the buffer, whether it gets a gradient or not
        holds = phase.stepping and not phase.zeroing
        self._held = known & inside.keys() if holds else set()

    def begin(self) -> None:
        """Let ``.grad`` be what a backward pass of the capture adds to."""
        for parameter in self._grown:
            parameter.grad = self._buffers[parameter]

    def keep(self) -> None:
        """Write or add fresh gradients to their buffers; a part of the captured step."""
        require_plain_gradients([parameter.grad for parameter in self.parameters])
        written: tuple[list[Tensor], list[Tensor]] = ([], [])
        added: tuple[list[Tensor], list[Tensor]] = ([], [])
        for parameter, buffer in self._buffers.items():
            gradient = parameter.grad
            if gradient is not None and gradient is not buffer:
                targets, fresh = added if parameter in self._added else written
                targets.append(local(buffer))
                fresh.append(local(gradient))
            if gradient is not None or parameter in self._held:
                parameter.grad = buffer
        with torch.no_grad():
            if written[0]:
                torch._foreach_copy_(*written)
            if added[0]:
                torch._foreach_add_(*added)

    def found(self, *, copied: bool) -> StepGradients:
        """Take the gradients as they are now.

        Args:
            copied: See :class:`GradientBuffers`.
        """
        inside = self._buffers_of(inside=True, copied=copied)
        dropped = () if self._are_read else tuple(self._inside)
        return StepGradients(inside, self._buffers_of(inside=False), dropped=dropped)

    def _buffers_of(self, *, inside: bool, copied: bool = False) -> GradientBuffers:
        mine = [p for p in self.parameters if (p in self._inside) is inside]
        used = [(p, p.grad) for p in mine if p.grad is not None]
        return GradientBuffers(
            [p for p, _ in used],
            [g for _, g in used],
            [p for p in mine if p.grad is None],
            copied=copied,
            in_pool=self._in_pool and inside,
        )


# ------------------ Casts of gradients

# Autocast casts a weight for each use, and autograd casts its gradient back. A capture takes these
# casts out of the end of the backward pass and does many at once: fewer nodes and equal values,
# since ``copy_`` casts as autograd does.

_MOST_WAITING = 32
"""One launch of torch's fused copy takes 64 pieces, and large gradients are several.

Those that wait take memory. ResNet-50 reserves 1.040 times what eager training does, and 0.081 more
for a second shape; with 48 that wait 1.015 and 0.109, with 24 1.093 and 0.009 (H200; equal times).
"""


def fused_grad_casts(
    outputs: Sequence[Tensor],
    parameters: Sequence[Tensor],
    # Called with a parameter, the node that accumulates its gradient, and what the cast is given
    take: Callable[[Any, Node | None, tuple[Tensor | None, ...]], tuple[None] | None],
) -> AbstractContextManager[None]:
    """Ask ahead of each cast in the body's backward passes whether to skip it."""
    edges = zip(parameters, ahead_of_casts(outputs, parameters), strict=True)
    return removed(
        edge.node.register_prehook(partial(take, parameter, edge.node.next_functions[0][0]))
        for parameter, edge in edges
        if isinstance(edge, GradientEdge)
    )


def cast_together(
    outputs: Sequence[Tensor], parameters: Sequence[Tensor]
) -> AbstractContextManager[None]:
    """Cast many gradients at once in the body's backward pass through these outputs.

    What is added to a gradient is cast as it is added, in one kernel. Autograd keeps the gradients
    of parameters that are used more than once, and those of a pass that asks for some parameters
    only or will be differentiated. Others are in ``.grad`` at the end of the pass, and not before:
    no Python code may take part in it.
    """
    return fused_grad_casts(outputs, parameters, _GatheredGradients().take)


def _adds_exactly(total: Tensor, short: Tensor) -> bool:
    """Whether an addition in place casts what is added to its own type first, as autograd does."""
    is_plain = type(total) is Tensor and total.layout is torch.strided
    is_wider = torch.promote_types(total.dtype, short.dtype) is total.dtype
    return is_plain and is_wider and not total.requires_grad


class _GatheredGradients:
    def __init__(self) -> None:
        self._waiting: list[tuple[Tensor, Tensor]] = []

    def take(
        self, parameter: Tensor, accumulation: Node | None, gradients: tuple[Tensor | None, ...]
    ) -> tuple[None] | None:
        gradient, before = gradients[0], parameter.grad
        if (
            type(gradient) is not Tensor
            or gradient.layout is not torch.strided
            or not parameter.requires_grad
            or not (before is None or _adds_exactly(before, gradient))
            or torch.is_grad_enabled()
            or accumulation is None
            or not will_execute(accumulation)
        ):
            return None
        if before is not None:
            before.add_(gradient)
            return (None,)
        if not self._waiting:  # what still waits at the end is written then
            after_backward(self._write)
        self._waiting.append((parameter, gradient))
        if len(self._waiting) == _MOST_WAITING:
            self._write()
        return (None,)

    def _write(self) -> None:
        waiting, self._waiting = self._waiting, []
        targets = [empty_gradient(parameter) for parameter, _ in waiting]
        write_all(targets, [gradient for _, gradient in waiting])
        for (parameter, _), target in zip(waiting, targets, strict=True):
            parameter.grad = target
