"""How ranks sum the gradients of captured steps."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel

from lightning_graphs.autograd.backward import empty_gradient, is_dense, write_all
from lightning_graphs.errors import CaptureError
from lightning_graphs.private.distributed import buckets_of, collectives_called
from lightning_graphs.private.engine import removed, require_plain_gradients
from lightning_graphs.private.exchange import Member, replaced
from lightning_graphs.regions.gradients import fused_grad_casts

# ------------------ What reduces gradients

NOT_REDUCED = (
    "after set_requires_gradient_sync(False) a step leaves gradients to the next one, of which a "
    "graph knows nothing; reduce them in every step"
)

_WITH_STATE = ("powerSGD_hook", "post_localSGD_hook")
"""Modules of torch with communication hooks that count steps in Python."""


def why_not_reduced(hook: object, *, finds_unused: bool, remedy: str) -> str:
    """Why no graph can reduce gradients as DDP does with these options; empty if one can.

    ``remedy`` says how to leave out the search for unused parameters.
    """
    if finds_unused:
        return (
            "find_unused_parameters=True reads on the host, in every step, which parameters have a "
            f"gradient; {remedy}, and requires_grad_(False) on what the loss leaves out"
        )
    if getattr(hook, "__module__", "").rpartition(".")[2] in _WITH_STATE:
        return (
            f"the communication hook {getattr(hook, '__name__', hook)} counts steps, which a graph "
            "does not; leave the hook out, or use bf16_compress_hook"
        )
    return ""


def buffers_synced(ddp: DistributedDataParallel) -> bool:
    """Tell whether the coming forward pass gets the buffers of rank 0.

    It does after a step that has reduced gradients, but not within an accumulation window or right
    after a validation, which has received them.
    """
    return bool(ddp.modules_buffers) and ddp.require_forward_param_sync


OF_A_FORWARD = ("require_forward_param_sync", "modules_buffers", "named_module_buffers")
"""What a forward pass sets in DDP's wrapper."""


def unseen_by(wrappers: Iterable[DistributedDataParallel]) -> list[Member]:
    """List what is to be put back, so that these forget the forward passes of a body."""
    tables = [(ddp, vars(ddp)) for ddp in wrappers]
    return [(ddp, name, own[name]) for ddp, own in tables for name in OF_A_FORWARD if name in own]


class Collectives:
    """Notes whether eager code of steps that each rank decides about alone calls collectives."""

    def __init__(self) -> None:
        self.are_called = False
        self.are_known = False  # a step was observed
        self._allowed = 0  # those of the observed step that a replay is followed by, too

    @contextlib.contextmanager
    def observing(self) -> Iterator[None]:
        """Observe a step in the body; a group that does not number collectives may call some."""
        self._allowed, before = 0, collectives_called()
        yield
        now = collectives_called()
        is_known = before is not None and now is not None
        self.are_called |= not is_known or (now or 0) - (before or 0) > self._allowed
        self.are_known = True


# ------------------ How ranks sum gradients

# DDP launches two or three kernels for each parameter: it casts, divides into a bucket and copies
# back. In eager steps they hide behind the launches of others. In a graph nothing hides them: GPT-2
# with 148 parameters takes 1 ms longer on two H100 than on one, and NCCL takes a third of that.


class BucketReduction:
    """Sums the gradients of one backward pass over ranks, with the buckets of DDP's reducer.

    They are reduced in its order, and each is laid out as there: sums over many ranks depend on it.
    """

    def __init__(
        self, ddp: DistributedDataParallel, buckets: Sequence[Sequence[Parameter]]
    ) -> None:
        self._ddp = ddp
        self._buckets = buckets
        self._bucket_of = {p: i for i, bucket in enumerate(buckets) for p in bucket}
        self._incomplete: defaultdict[int, dict[Parameter, Tensor]] = defaultdict(dict)
        self._begun: list[tuple[Any, list[Tensor]]] = []  # with the views of their buckets

    def unprepared(self) -> contextlib.AbstractContextManager[None]:
        """Let DDP's reducer expect no backward pass, while the body runs a forward pass."""
        return replaced(self._ddp, "require_backward_grad_sync", False)

    def leave_to_ddp(self) -> None:
        """Let DDP's reducer expect the backward pass after all, as a forward pass does."""
        self._ddp.reducer.prepare_for_forward()
        self._ddp.reducer.prepare_for_backward([])

    @contextlib.contextmanager
    def reducing(self, loss: Tensor) -> Iterator[None]:
        """Reduce gradients while the body runs the backward pass; ``.grad`` is then as with DDP."""
        parameters = [*self._bucket_of]
        hooks = (p.register_post_accumulate_grad_hook(self._accumulated) for p in parameters)
        casts = fused_grad_casts([loss], parameters, self._ahead_of_cast)
        try:
            with removed(hooks), casts:
                yield
            self._finish()
        finally:
            self._begun.clear()
            self._incomplete.clear()

    def _ahead_of_cast(
        self, parameter: Parameter, _: object, gradients: tuple[Tensor | None, ...]
    ) -> tuple[None] | None:
        gradient = gradients[0]
        if type(gradient) is not Tensor or gradient.layout is not torch.strided:
            return None
        if parameter.grad is not None:  # autograd adds to it
            return None
        self._take(parameter, gradient)
        return (None,)

    def _accumulated(self, parameter: Tensor) -> None:
        require_plain_gradients([parameter.grad])
        if parameter.grad is not None:  # it was not taken ahead of a cast
            self._take(parameter, parameter.grad)  # type: ignore[arg-type]

    def _take(self, parameter: Parameter, gradient: Tensor) -> None:
        self._incomplete[self._bucket_of[parameter]][parameter] = gradient
        for i in range(len(self._begun), len(self._buckets)):
            if len(self._incomplete[i]) < len(self._buckets[i]):
                break
            self._begun.append(self._reduce(self._buckets[i], self._incomplete.pop(i)))

    def _reduce(
        self, bucket: Sequence[Parameter], gradients: dict[Parameter, Tensor]
    ) -> tuple[Any, list[Tensor]]:
        group = self._ddp.process_group
        flat = torch.empty(
            sum(p.numel() for p in bucket), dtype=bucket[0].dtype, device=bucket[0].device
        )
        views = list(_views_of(flat, bucket))
        with torch.no_grad():
            write_all(views, [gradients[p] for p in bucket])
            flat.mul_(1.0 / group.size())
        return torch.distributed.all_reduce(flat, group=group, async_op=True), views

    def _finish(self) -> None:
        if len(self._begun) < len(self._buckets):
            self._refuse()
        for (work, views), bucket in zip(self._begun, self._buckets, strict=True):
            work.wait()
            gradients = views
            if not self._ddp.gradient_as_bucket_view:
                gradients = [p.grad if p.grad is not None else empty_gradient(p) for p in bucket]
                write_all(gradients, views)
            for parameter, gradient in zip(bucket, gradients, strict=True):
                parameter.grad = gradient

    def _refuse(self) -> NoReturn:
        came = set().union(*self._incomplete.values(), *self._buckets[: len(self._begun)])
        pairs = self._ddp.module.named_parameters()
        name, *others = [name for name, p in pairs if p in self._bucket_of and p not in came]
        raise CaptureError(
            "Under DDP every parameter must have a gradient in a captured step.",
            f"`{name}`" + (f" and {len(others)} others have none" if others else " has none"),
            "write requires_grad_(False) for parameters that the loss leaves out",
        )


def _views_of(flat: Tensor, bucket: Sequence[Parameter]) -> Iterator[Tensor]:
    """Yield the parts of a bucket, each in the layout of its parameter if that is dense."""
    start = 0
    for parameter in bucket:
        if is_dense(parameter):
            yield flat.as_strided(parameter.shape, parameter.stride(), start)
        else:
            yield flat[start : start + parameter.numel()].view(parameter.shape)
        start += parameter.numel()


def reduction_of(ddp: DistributedDataParallel | None, *, adds: bool) -> BucketReduction | None:
    """Make what reduces the gradients of one step; None if the wrapper does more than sum them.

    With ``adds`` they are added to those of earlier steps, which DDP divides in another way if
    they are views of its buckets.
    """
    if ddp is None or ddp._comm_hooks or ddp.static_graph or ddp.mixed_precision is not None:
        return None
    if adds and ddp.gradient_as_bucket_view:
        return None
    buckets = buckets_of(ddp)
    is_known = bool(buckets) and all(p.requires_grad for bucket in buckets for p in bucket)
    return BucketReduction(ddp, buckets) if is_known else None
