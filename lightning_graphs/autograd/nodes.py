"""Nodes of the autograd graph behind the outputs of a captured call.

Autocast casts a weight for each use, and autograd casts its gradient back. A capture takes these
casts out of the end of the backward pass and does many at once: fewer nodes and equal values, since
``copy_`` casts as autograd does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, saved_tensors_hooks
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from lightning_graphs.autograd.backward import empty_gradient, write_all
from lightning_graphs.errors import CaptureError
from lightning_graphs.private.callsite import CallSite, CallSiteFinder, calls_observed
from lightning_graphs.private.engine import (
    after_backward,
    backward_passes_observed,
    is_composed,
    local,
    nodes_from,
)
from lightning_graphs.private.torch import (
    has_gradient_hooks,
    is_compiled_node,
    is_node_of_torch,
    outputs_of,
    version_of,
    will_execute,
    without_hooks,
)

gradients_of = torch.autograd.grad
"""Torch's own function: while a user's step runs, another one may watch in its place."""


def leaves_behind(outputs: Sequence[Tensor]) -> list[Tensor]:
    """List the leaves of autograd on which these outputs depend, leaves among them included."""
    found = dict.fromkeys(output for output in outputs if output.grad_fn is None)
    found |= {leaf: None for node in nodes_behind(outputs) if (leaf := leaf_of(node)) is not None}
    return list(found)


def runs_code(outputs: Sequence[Tensor], adds_to: Container[int] | None = None) -> bool:
    """Return whether a backward pass of these outputs runs code that may look at ``.grad``.

    It has a ``torch.autograd.Function`` that compiled code has not made, or hooks at its leaves.
    With ``adds_to``, also whether it may write anything but gradients of the leaves with an ``id``
    there: it adds to others, or has a node that is not torch's own.
    """
    if any(output.grad_fn is None for output in outputs):
        return True
    nodes: Iterator[Any] = nodes_behind(outputs)
    for node in nodes:
        leaf = leaf_of(node)
        if leaf is None and isinstance(node, BackwardCFunction) and not is_compiled_node(node):
            return True
        if leaf is not None and has_gradient_hooks(leaf, node):
            return True
        if adds_to is not None and not (
            is_node_of_torch(node) if leaf is None else id(leaf) in adds_to
        ):
            return True
    return False


def nodes_behind(outputs: Sequence[Tensor]) -> Iterator[Node]:
    """Yield every node behind these outputs, once."""
    return nodes_from([output.grad_fn for output in outputs])


def leaf_of(node: Node) -> Tensor | None:
    """Return the leaf whose gradient this node accumulates; None for other nodes."""
    if type(node).__name__ != "AccumulateGrad":  # `name()` is a Function's own to overwrite
        return None
    leaf: Tensor | None = getattr(node, "variable", None)
    return leaf


def uses_of(
    leaves: Iterable[Tensor], outputs: Sequence[Tensor]
) -> dict[Tensor, list[tuple[Node, int]]]:
    """Map each leaf to the nodes behind these outputs that use it, and their input index."""
    found: dict[Tensor, list[tuple[Node, int]]] = {leaf: [] for leaf in leaves}
    for node in nodes_behind(outputs) if found else ():
        for i, (parent, _) in enumerate(node.next_functions):
            leaf = None if parent is None else leaf_of(parent)
            if leaf in found:
                found[leaf].append((node, i))
    return found


def has_python_nodes(outputs: Sequence[Tensor]) -> bool:
    """Return whether a backward pass of these outputs runs a ``torch.autograd.Function``."""
    return any(isinstance(node, BackwardCFunction) for node in nodes_behind(outputs))


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


@contextlib.contextmanager
def removed(hooks: Iterable[RemovableHandle]) -> Iterator[None]:
    """Make these hooks at the beginning of the body, and remove them at its end."""
    with contextlib.ExitStack() as stack:
        for hook in hooks:
            stack.enter_context(hook)
        yield


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


def _copy(gradient: Tensor | None) -> Tensor | None:
    return None if gradient is None else gradient.clone()


_MOST_WAITING = 32
"""One launch of torch's fused copy takes 64 pieces, and large gradients are several.

Those that wait take memory. ResNet-50 reserves 1.040 times what eager training does, and 0.081 more
for a second shape; with 48 that wait 1.015 and 0.109, with 24 1.093 and 0.009 (H200; equal times).
"""


def ahead_of_casts(
    outputs: Sequence[Tensor], parameters: Sequence[Tensor]
) -> list[Tensor | GradientEdge]:
    """Find where to ask autograd for parameter gradients that are copied anyway."""
    # The gradient is taken ahead of a cast where that is the parameter's only use. No other code
    # may read that gradient or write into it, so no Python code takes part in the backward pass.
    users, returned = uses_of(parameters, outputs), set(outputs)
    return [
        GradientEdge(users[parameter][0][0], 0)
        if parameter not in returned and _is_cast(parameter, users[parameter])
        else parameter
        for parameter in parameters
    ]


def _is_cast(parameter: Tensor, users: Sequence[tuple[Node, int]]) -> bool:
    if len(users) != 1 or type(parameter) not in (Tensor, Parameter):
        return False
    user = users[0][0]
    made = outputs_of(user)
    return (
        type(user).__name__ == "ToCopyBackward0"
        and len(made) == 1
        and made[0].dtype.is_floating_point
        and made[0].device == parameter.device
        and parameter.is_floating_point()
        and getattr(parameter, "grad_dtype", None) in (None, parameter.dtype)
    )


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

    Autograd keeps the gradients of parameters that have one already or are used more than once, and
    those of a pass that asks for some parameters only or will be differentiated. Others are in
    ``.grad`` at the end of the pass, and not before: no Python code may take part in it.
    """
    return fused_grad_casts(outputs, parameters, _GatheredGradients().take)


class _GatheredGradients:
    def __init__(self) -> None:
        self._waiting: list[tuple[Tensor, Tensor]] = []

    def take(
        self, parameter: Tensor, accumulation: Node | None, gradients: tuple[Tensor | None, ...]
    ) -> tuple[None] | None:
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
                raise _refusal(f"a backward pass inside of it adds to `.grad` of {name}")

    def refuse_reentry() -> None:
        raise _refusal("a backward pass inside of it computes a part of it again (use_reentrant)")

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


def require_plain_gradients(gradients: Sequence[Tensor | None]) -> None:
    """Refuse gradients that are not one piece of memory, or a shard of one."""
    if any(g is not None and g.layout is not torch.strided for g in gradients):
        raise CaptureError(
            "A graph cannot write sparse gradients, which have no fixed address.",
            "the backward pass computes one",
            "write nn.Embedding(..., sparse=False)",
        )
    for gradient in gradients:
        if gradient is not None and local(gradient) is gradient and is_composed(gradient):
            kind = type(gradient).__name__
            raise CaptureError(
                "A graph can write plain gradients only, also of parameters of a tensor subclass.",
                f"the backward pass computes a {kind}",
                f"return plain tensors from the backward pass of operators on {kind}",
            )
