"""Backward passes of captured calls, and whom replays hand gradients: autograd, or ``.grad``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, saved_tensors_hooks
from torch.nn import Parameter

from lightning_graphs.errors import CaptureError, ReplayError, stop
from lightning_graphs.private.callsite import CallSite, CallSiteFinder, calls_observed
from lightning_graphs.private.engine import (
    backward_passes_observed,
    has_gradient_hooks,
    leaves_behind,
    removed,
    tensor_hooks,
    uses_of,
    without_hooks,
)
from lightning_graphs.private.torch import hooks_registered, is_composed, local, version_of
from lightning_graphs.values.memory import (
    GRADIENT,
    AliasedBuffer,
    clone_all,
    copy_all,
    extent,
    linear,
    overlap_span,
)
from lightning_graphs.values.tree import by_kind


class GradientMemory:
    """Memory for the gradients of parameters, given before a capture."""

    are_copied = False  # ``.grad`` shares nothing with that memory
    are_kept = False  # user code has references to it: no replay may change them

    def of(self, parameters: Sequence[Parameter]) -> Sequence[Tensor]:
        """Make a buffer for each parameter's gradient."""
        return list(map(empty_gradient, parameters))


def empty_gradient(parameter: Tensor) -> Tensor:
    """Allocate a gradient in the layout that autograd gives it."""
    # It is that of the parameter where its elements fill their memory, and else row-major.
    layout = torch.preserve_format if is_dense(parameter) else torch.contiguous_format
    if local(parameter) is parameter and is_composed(parameter):
        # A quantized weight: its gradient is plain
        size, stride, dtype = parameter.shape, parameter.stride(), parameter.dtype
        meta = torch.empty_strided(size, stride, dtype=dtype, device="meta")
        return torch.empty_like(meta, device=parameter.device, memory_format=layout)
    return torch.empty_like(parameter, requires_grad=False, memory_format=layout)


def zero_gradient(output: Tensor, stride: tuple[int, ...] | None) -> Tensor:
    """Allocate an output's gradient with the strides that were observed."""
    # Kernels round otherwise over another layout, one with gaps or repetitions (a stride of 0)
    # included. Where none is known, or elements overlap otherwise, it is that of the output.
    zeros = torch.zeros_like(output, requires_grad=False)
    if stride is None or stride == zeros.stride() or not zeros.numel():
        return zeros
    meta = torch.empty_strided(output.shape, stride, dtype=output.dtype, device="meta")
    if overlap_span(unrepeated(meta)):
        return zeros
    return zeros.new_zeros(extent(meta)).as_strided(output.shape, stride)


def repeated(tensor: Tensor) -> list[int]:
    """List the dimensions along which a tensor repeats its elements (stride 0)."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return [i for i, (size, stride) in enumerate(pairs) if stride == 0 and size > 1]


def unrepeated(tensor: Tensor, dimensions: Sequence[int] | None = None) -> Tensor:
    """Remove a tensor's repetitions along some dimensions or all."""
    for dimension in repeated(tensor) if dimensions is None else dimensions:
        tensor = tensor.narrow(dimension, 0, 1)
    return tensor


def refuse_parameter_hooks(named: Sequence[tuple[str, Tensor]]) -> None:
    rule = (
        'param_grads="direct" cannot call hooks on parameters, because the graph itself writes the '
        "gradients."
    )
    remedy = 'use param_grads="autograd"'
    hooked = next((name for name, p in named if has_gradient_hooks(p)), None)
    if hooked is not None:
        raise CaptureError(rule, f"`{hooked}` has a gradient hook", remedy)
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        ranks = distributed.get_world_size()
        if ranks > 1:
            observed = f"the process group has {ranks} ranks, and the reducer of DDP is such a hook"
            raise CaptureError(rule, observed, remedy)


class AliasedGradients:
    """Hands the gradients that a backward graph writes to autograd, without a copy where it can.

    Autograd keeps what it is given as ``.grad`` and adds to it in place, so that a replay would
    overwrite it (pytorch#181723). So the graph copies into memory outside of its pool, which one
    backward pass at a time aliases. A replay that finds an alias alive saves it first; from then on
    gradients are copies.
    """

    def __init__(self, targets: Sequence[Tensor]) -> None:
        self._memory, self._reserved = _side_by_side(targets)
        self.buffers: Sequence[Tensor | None] = ()  # the aliased memory of each gradient
        self._aliased: list[Tensor] = []
        # Of gradients with gaps or repetitions, by index, how they came; the buffers have neither.
        self._spread: dict[int, tuple[torch.Size, tuple[int, ...]]] = {}
        self._loans = [AliasedBuffer(memory) for memory in self._memory]
        self._aliases = True

    @property
    def is_kept(self) -> bool:
        return any(loan.is_kept for loan in self._loans)

    def capture(self, gradients: Sequence[Tensor | None]) -> None:
        """Write the gradients into the buffers, as the last part of a capture."""
        written = [None if g is None else unrepeated(g) for g in gradients]
        self.buffers = list(map(_fitted, self._reserved, written))
        self._aliased = [buffer for buffer in self.buffers if buffer is not None]
        for loan in self._loans:
            loan.count_uses()
        write_all(self._aliased, [g for g in written if g is not None])
        found = [(g, w) for g, w in zip(gradients, written, strict=True) if w is not None]
        for i, ((gradient, once), buffer) in enumerate(zip(found, self._aliased, strict=True)):
            assert gradient is not None
            has_gaps = once.stride() != buffer.stride() and not overlap_span(once)
            if has_gaps or once.shape != gradient.shape:
                self._spread[i] = gradient.shape, (once if has_gaps else buffer).stride()

    def replay(self, backward: Callable[[], None]) -> Sequence[Tensor | None]:
        """Run the backward graph; return the gradients in the order of their layouts."""
        if self.is_kept:
            self._aliases = False
            kept = clone_all(self._memory)
            backward()
            gradients = clone_all(self._aliased)
            torch._foreach_copy_(self._memory, kept)
        else:
            backward()
            gradients = [*map(_alias, self._aliased)] if self._aliases else clone_all(self._aliased)
        for i, (shape, stride) in self._spread.items():
            gradients[i] = _spread(gradients[i], shape, stride)
        if len(gradients) == len(self.buffers):
            return gradients
        found = iter(gradients)
        return [None if buffer is None else next(found) for buffer in self.buffers]


class HookedInOrder:
    """Gives parameters to the node of a call so that their hooks run in the order of autograd.

    One node hands out all gradients at once, and autograd then calls hooks on parameters in any
    order: another one than in eager code, where gradients come one by one. Hooks that share a
    generator, an average or a list would see it. So each parameter with hooks goes through a node
    of its own, and of several nodes that are ready autograd runs the one first that was made last.
    """

    def __init__(self, parameters: Sequence[Tensor], came: Sequence[Tensor]) -> None:
        self.own = parameters
        place = {parameter: i for i, parameter in enumerate(parameters)}
        self._last_to_first = [place[leaf] for leaf in reversed(came) if leaf in place]
        self._unused = sorted(set(range(len(parameters))) - set(self._last_to_first))
        self._at_capture = any(map(has_gradient_hooks, parameters))
        self._hooked = self._at_capture
        self._hooks_looked_at = -1

    def given(self) -> Sequence[Tensor]:
        """Return the parameters; call it once for each call, right before its node is made."""
        if (number := hooks_registered()) != self._hooks_looked_at:
            self._hooks_looked_at = number
            self._hooked = self._at_capture or any(map(tensor_hooks, self.own))
        if not self._hooked:
            return self.own
        given = list(self.own)
        for i in self._last_to_first:
            given[i] = torch.ops.aten.alias.default(given[i])
        for i in self._unused:  # autograd would call hooks with None
            given[i] = given[i].detach()
        return given


class OutputGradients:
    """The static inputs of a backward graph; aliases of later graphs are read in place."""

    def __init__(self, buffers: Sequence[Tensor], sources: Mapping[int, AliasedGradients]) -> None:
        self.buffers = list(buffers)
        self._aliased = [(i, self.buffers[i], producer) for i, producer in sources.items()]
        self._own = [i for i in range(len(self.buffers)) if i not in sources]
        self._targets = [unrepeated(self.buffers[i]) for i in self._own]
        repeats = [(j, i, repeated(self.buffers[i])) for j, i in enumerate(self._own)]
        self._repeats = [repeat for repeat in repeats if repeat[2]]

    @property
    def repeat(self) -> bool:
        """Whether some gradients must come with repeated elements."""
        return bool(self._repeats)

    def fit(self, gradients: Sequence[Tensor]) -> bool:
        """Return whether these gradients repeat the elements that the graph takes for repeated."""
        strides = [(gradients[i].stride(), repeat) for _, i, repeat in self._repeats]
        return not any(stride[dimension] for stride, repeat in strides for dimension in repeat)

    def completed(self, gradients: Sequence[Tensor | None]) -> list[Tensor]:
        pairs = zip(gradients, self.buffers, strict=True)
        return [
            torch.zeros_like(unrepeated(buffer)).expand_as(buffer) if g is None else g
            for g, buffer in pairs
        ]

    def take(self, gradients: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Copy the gradients in; return buffers, and values to restore there after the replay."""
        if self._targets:
            sources = [gradients[i] for i in self._own]
            for j, _, repeat in self._repeats:
                sources[j] = unrepeated(sources[j], repeat)
            copy_all(self._targets, sources)
        displaced = []
        for i, buffer, producer in self._aliased:
            gradient = gradients[i]
            if gradient.data_ptr() == buffer.data_ptr() and gradient.stride() == buffer.stride():
                continue
            if producer.is_kept:
                displaced.append((buffer, buffer.clone()))
            buffer.copy_(gradient)
        return displaced


def _side_by_side(targets: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Allocate memory for each device and dtype, with a slice for each tensor."""
    # They share a storage so that one number tells whether any of them is in use.
    memory, parts = [], [*targets]
    for (device, dtype), indices in by_kind(targets).items():
        step = _ALIGNMENT // dtype.itemsize
        sizes = [-(-targets[i].numel() // step) * step for i in indices]
        memory.append(torch.empty(sum(sizes), dtype=dtype, device=device))
        for i, part in zip(indices, memory[-1].split(sizes), strict=True):
            parts[i] = part[: targets[i].numel()]
    return memory, parts


_PIECES = 64
"""How many pairs of tensors one launch of torch's fused copy takes; many tensors take several."""

_GRAIN = 2048
"""Pieces have a multiple of so many elements: 512 threads copy four at a time if aligned."""


def write_all(buffers: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """Copy gradients to their buffers, as part of a capture: one launch for each pair of dtypes.

    torch's fused kernel leaves each run of 65,536 elements to one block of threads: a tensor or a
    few then take 13 us (H200). So they are cut into pieces, as many as one launch takes, that all
    multiprocessors share in; and the plain kernel copies a single one.
    """
    kinds: dict[tuple[torch.device, torch.dtype, torch.dtype], list[tuple[Tensor, Tensor]]] = {}
    for buffer, gradient in zip(buffers, gradients, strict=True):
        if buffer.stride() == gradient.stride() and is_dense(buffer):
            kind = buffer.device, buffer.dtype, gradient.dtype
            kinds.setdefault(kind, []).append((linear(buffer), linear(gradient.detach())))
        else:  # one such pair would have all others copied one by one, too
            buffer.copy_(gradient)
    for pairs in kinds.values():
        if len(pairs) == 1:
            pairs[0][0].copy_(pairs[0][1])
            continue
        total = sum(target.numel() for target, _ in pairs)
        size = total // max(_PIECES - len(pairs), _PIECES // 4) // _GRAIN * _GRAIN + _GRAIN
        targets, sources = zip(*pairs, strict=True)
        torch._foreach_copy_(_pieces(targets, size), _pieces(sources, size))


def _pieces(tensors: Sequence[Tensor], size: int) -> list[Tensor]:
    return [piece for tensor in tensors for piece in tensor.split(size)]


def is_dense(tensor: Tensor) -> bool:
    """Return whether elements fill their memory without overlaps and gaps."""
    return extent(tensor) == tensor.numel() and not overlap_span(tensor)


def _fitted(buffer: Tensor, gradient: Tensor | None) -> Tensor | None:
    """View a buffer's memory in the layout of a gradient, without overlaps and gaps."""
    if gradient is None:
        return None
    dense = torch.empty_like(gradient, device="meta")
    return buffer.as_strided(dense.shape, dense.stride(), buffer.storage_offset())


def _spread(gradient: Tensor, shape: torch.Size, stride: tuple[int, ...]) -> Tensor:
    """Restore the gaps of a gradient, and then its repetitions."""
    if stride != gradient.stride():
        gradient = gradient.new_empty_strided(gradient.shape, stride).copy_(gradient)
    return gradient.expand(shape)


_alias: Callable[[Tensor], Tensor] = attrgetter("data")  # detach() costs twice as much
_ALIGNMENT = 512  # bytes, as torch's allocator does: kernels read aligned memory in larger units


class EarlierGradients:
    """Gradients of earlier steps, to which a backward pass adds what it brings as one sum.

    Autograd adds the sum of all uses of a parameter to its ``.grad``. Graphs that write gradients
    themselves, and eager code with the same parameters, would each add their own.
    """

    def __init__(self) -> None:
        # Of parameters whose gradient is a buffer: its value, while graphs write there
        self._values: dict[Tensor, Tensor] = {}

    @contextlib.contextmanager
    def aside(self, graphs: Iterable[DirectGradients]) -> Iterator[None]:
        """Let the parameters of these graphs have no gradient in the body, a backward pass."""
        pairs = [p for each in graphs for p in zip(each.parameters, each.buffers, strict=True)]
        before = [(p, b, g) for p, b in dict(pairs).items() if (g := p.grad) is not None]
        held = {parameter: buffer for parameter, buffer, old in before if old is buffer}
        self._values |= {p: torch.empty_like(b) for p, b in held.items() if p not in self._values}
        if held:
            torch._foreach_copy_([self._values[p] for p in held], [*held.values()])
        for parameter, _, _ in before:
            parameter.grad = None
        try:
            yield
        finally:
            self._add(before)

    def _add(self, before: Sequence[tuple[Tensor, Tensor, Tensor]]) -> None:
        restored: tuple[list[Tensor], list[Tensor]] = ([], [])
        added: tuple[list[Tensor], list[Tensor]] = ([], [])
        for parameter, buffer, old in before:
            value = self._values[parameter] if old is buffer else None
            addition, parameter.grad = parameter.grad, old
            if value is not None and addition is buffer:
                addition, value = value, None
            for (targets, sources), source in ((restored, value), (added, addition)):
                if source is not None:
                    targets.append(old)
                    sources.append(source)
        with torch.no_grad():
            if restored[0]:
                torch._foreach_copy_(*restored)
            if added[0]:
                torch._foreach_add_(*added)


class DirectGradients:
    """Hands the gradients that a backward graph writes to ``parameter.grad`` itself.

    The graph copies them into buffers outside of its pool: inside, their memory would be that of
    activations. A parameter without gradient is given its buffer. A parameter that has one gets the
    new gradient added; where that is still the buffer, its value is kept meanwhile.
    """

    def __init__(
        self,
        parameters: Sequence[Parameter],
        buffers: Sequence[Tensor],
        memory: GradientMemory | None = None,  # where these are
    ) -> None:
        self.parameters = list(parameters)
        self.buffers = list(buffers)
        self._memory = memory or GradientMemory()
        self._earlier = EarlierGradients()
        self._nothing = [None] * len(self.parameters)
        self._hooks_looked_at = -1

    def capture(self, gradients: Sequence[Tensor | None]) -> None:
        used = [i for i, gradient in enumerate(gradients) if gradient is not None]
        self.parameters = [self.parameters[i] for i in used]
        self.buffers = [self.buffers[i] for i in used]
        self._nothing = [None] * len(used)
        self.write([g for g in gradients if g is not None])

    def write(self, gradients: Sequence[Tensor]) -> None:
        write_all(self.buffers, gradients)

    def refuse_hooks(self) -> None:
        number = hooks_registered()
        if number == self._hooks_looked_at:
            return
        if any(map(tensor_hooks, self.parameters)):
            raise ReplayError(
                'A graph with param_grads="direct" cannot call hooks on parameters.',
                "a gradient hook was registered on a parameter after the capture",
                'remove the hook, or use param_grads="autograd"',
            )
        self._hooks_looked_at = number

    def replay(
        self, backward: Callable[[], None], reached: Collection[Tensor] | None = None
    ) -> None:
        """Run the backward graph; afterwards ``.grad`` is as autograd would have set it."""
        parameters, buffers = self.parameters, self.buffers
        before = list(map(GRADIENT, parameters))
        memory, is_whole = self._memory, reached is None
        if is_whole and not memory.are_copied and all(map(is_, before, self._nothing)):
            backward()
            for parameter, buffer in zip(parameters, buffers, strict=True):
                parameter.grad = buffer
            return
        chosen = frozenset(parameters if reached is None else reached)
        kept = clone_all(buffers) if memory.are_copied and memory.are_kept else []
        with self._earlier.aside([self]):
            backward()
            # What was attached before stays so until it is zeroed
            found = clone_all(buffers) if memory.are_copied else buffers
            if kept:
                torch._foreach_copy_(buffers, kept)
            for parameter, gradient in zip(parameters, found, strict=True):
                if parameter in chosen:
                    parameter.grad = gradient


# ------------------ Backward passes of a capture

gradients_of = torch.autograd.grad
"""Torch's own function: while a user's step runs, another one may watch in its place."""


@calls_observed
def gradients_behind(
    outputs: Sequence[Tensor],
    # Whose gradients are asked for; None for those that no output depends on.
    targets: Sequence[Tensor | GradientEdge],
    given: Sequence[Tensor],
    *,
    # Tensors whose own hooks do not run: autograd runs them on what is replayed.
    hooked: Sequence[Tensor],
    # Leaves whose gradients are copied in time; see :func:`gradients_copied`.
    apart: Sequence[Tensor] = (),
    keep: bool = False,  # what autograd has saved, for another pass
    came: list[Tensor] | None = None,  # gets the leaves of `hooked`, as their gradients come
) -> tuple[Tensor | None, ...]:
    """Run ``torch.autograd.grad`` in a capture, or in the warm-up before it."""
    wanted: Any = targets  # the annotation of torch forgets that the two kinds may be mixed
    with (
        # Backward passes run outside of torch.autocast, whatever the forward pass ran in.
        torch.autocast(outputs[0].device.type, enabled=False),
        without_hooks(hooked),
        gradients_copied(apart),
        removed(t.register_hook(partial(_note, came, t)) for t in hooked if t.requires_grad)
        if came is not None
        else contextlib.nullcontext(),
    ):
        found: tuple[Tensor | None, ...]
        found = gradients_of(outputs, wanted, given, retain_graph=keep, allow_unused=True)
        return found


def gradients_copied(tensors: Sequence[Tensor]) -> AbstractContextManager[None]:
    """Make ``torch.autograd.grad`` in the body return copies of these tensors' gradients.

    Autograd gives one tensor to all nodes that need it, and some hooks write it after the copy to
    ``.grad``.
    """
    return removed(t.register_hook(_copy) for t in tensors if t.requires_grad)


def _note(came: list[Tensor], leaf: Tensor, _: Tensor | None) -> None:
    came.append(leaf)


def _copy(gradient: Tensor | None) -> Tensor | None:
    return None if gradient is None else gradient.clone()


def saved_for_graphs() -> AbstractContextManager[None]:
    """Allow saved tensors of the body's autograd graph to be written by replays.

    Autograd refuses to read saved tensors that were written; replays write them, and parameters
    change between steps.
    """
    return saved_tensors_hooks(Tensor.detach, lambda saved: saved)


class PerUseGradients:
    """Splits a leaf's gradient into one term for each use, in the order of autograd.

    Sums depend on their order, and autograd adds the uses of a tensor as they come: those inside of
    a graph, in one sum, would come before others that eager code adds first.
    """

    def __init__(self, outputs: Sequence[Tensor], leaves: Sequence[Tensor]) -> None:
        # One that is returned as well gets a gradient as an output, which no node gives.
        uses = uses_of(set(leaves) - set(outputs), outputs)
        self.number = {leaf: len(users) for leaf, users in uses.items() if len(users) > 1}
        self._found: dict[Tensor, list[Tensor | None]] = {leaf: [] for leaf in self.number}
        self._users: dict[Node, list[tuple[int, Tensor]]] = {}
        for leaf in self.number:
            for node, i in uses[leaf]:
                self._users.setdefault(node, []).append((i, leaf))

    def taken(self) -> AbstractContextManager[None]:
        """Capture the terms while the body runs a backward pass; the leaves get none."""
        for found in self._found.values():
            found.clear()
        users = self._users.items()
        return removed(node.register_hook(partial(self._take, used)) for node, used in users)

    def _take(
        self, uses: Sequence[tuple[int, Tensor]], gradients: Sequence[Tensor | None], _: Any
    ) -> tuple[Tensor | None, ...]:
        rest = list(gradients)
        for i, leaf in uses:
            self._found[leaf].append(gradients[i])
            rest[i] = None
        return tuple(rest)

    def of(self, leaf: Tensor, gradient: Tensor | None) -> list[Tensor | None]:
        """Return the terms of all uses, None for absent ones; or the gradient of autograd."""
        if leaf not in self.number:
            return [gradient]
        found = self._found[leaf]
        return [*found, *[None] * (self.number[leaf] - len(found))]


# ------------------ Code that sets ``.grad``


@contextlib.contextmanager
def accumulation_refused(named: Mapping[Tensor, str]) -> Iterator[None]:
    """Refuse code in the body, a call or its backward pass, that sets ``.grad`` of parameters.

    Activation checkpointing by hand does: its backward pass repeats the forward pass and calls
    ``torch.autograd.backward``, which adds to ``.grad`` at once. A replay hands out the gradients
    that it was asked for, and knows nothing of others. Leaves that the code has made itself may
    have theirs. What was in ``.grad`` is there afterwards.
    """
    before = [(leaf, leaf.grad) for leaf in named]
    versions = [None if grad is None else version_of(grad) for _, grad in before]

    def refuse_pass(roots: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        for leaf in inputs or leaves_behind(roots):
            if leaf in named or isinstance(leaf, Parameter):
                name = f"`{named[leaf]}`" if leaf in named else "a parameter"
                stop(_refusal(f"a backward pass inside of it adds to `.grad` of {name}"))

    def refuse_reentry() -> None:
        stop(_refusal("a backward pass inside of it computes a part of it again (use_reentrant)"))

    with backward_passes_observed(refuse_pass, refuse_reentry):
        try:
            yield
        finally:
            written = None
            for (leaf, grad), version in zip(before, versions, strict=True):
                if leaf.grad is not grad:
                    leaf.grad, written = grad, named[leaf]
                elif grad is not None and version_of(grad) != version:
                    written = named[leaf]
    if written is not None:
        raise _refusal(f"its code sets `.grad` of `{written}`", at=CallSite())


def _refusal(observed: str, *, at: CallSite | None = None) -> CaptureError:
    at = CallSiteFinder().here() if at is None else at
    return CaptureError(
        "A graphed callable must leave gradients to autograd, because a replay hands out those "
        "that it is asked for, and no others.",
        observed if at == CallSite() else f"{observed}, at {at.describe()}",
        "checkpoint with torch.utils.checkpoint(..., use_reentrant=False); or compute gradients "
        "with torch.autograd.grad, and return them from the Function's backward",
    )
