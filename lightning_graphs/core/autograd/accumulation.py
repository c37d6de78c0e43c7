"""Refuses code that puts gradients into ``.grad`` by itself, past the one who asks for them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor
from torch.nn import Parameter

from lightning_graphs.core.autograd.nodes import leaves_behind
from lightning_graphs.core.callsite import CallSite, CallSiteFinder
from lightning_graphs.core.private.autograd import backward_passes_told
from lightning_graphs.core.private.torch import version_of
from lightning_graphs.errors import CaptureError


@contextlib.contextmanager
def accumulation_refused(named: Mapping[Tensor, str]) -> Iterator[None]:
    """While the body runs a call or its backward pass, refuse what sets ``.grad`` of parameters.

    Activation checkpointing by hand does: its backward pass computes anew and calls
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
        raise _refusal("a backward pass inside of it computes a part of it anew (use_reentrant)")

    with backward_passes_told(refuse_pass, refuse_reentry):
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
