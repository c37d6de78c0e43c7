"""Decisions that several ranks make together, and how they sum the gradients of captured steps.

NCCL demands it: whether a collective is captured "must be uniform over all ranks participating",
and who launches a graph must launch "the graph derived from that collective capture" (NCCL's user
guide, "Using NCCL with CUDA Graphs"). So each rank says ahead of a step what it could do, and all
do what all can. They say it from host to host, over gloo: no rank waits for its device.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel

from lightning_graphs.autograd.backward import empty_gradient, is_dense, write_all
from lightning_graphs.errors import (
    FIX,
    CaptureError,
    GraphError,
    in_one_line,
    is_out_of_memory,
    no_room,
)
from lightning_graphs.private.engine import (
    FsdpModules,
    buckets_of,
    forget_backward,
    is_within_backward,
    reducer_is_warm,
    removed,
    require_plain_gradients,
    take_no_more_times,
)
from lightning_graphs.private.exchange import Member, replaced
from lightning_graphs.regions.gradients import fused_grad_casts
from lightning_graphs.regions.peers import PartedError, Peers, parted

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


def syncs(ddp: DistributedDataParallel) -> bool:
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


# ------------------ Decisions of all ranks

GIVE_UP, EAGER, CAPTURE = -1, 0, 1
"""What becomes of a call; larger numbers are those of plans, which replay it."""
_WELL, _FAILED, _NO_ROOM = range(3)

_Result = TypeVar("_Result")


class Ranks:
    """Decisions that ranks make together; with one rank they cost nothing.

    Every rank calls the same methods in the same order.

    Args:
        group: A group over gloo in which ranks agree; None: there is one rank, or each decides
            alone, about steps in which none waits for another.
        wrappers: Those of DDP, which reduce gradients.
        units: The modules whose parameters FSDP2 gathers; None without FSDP2.
        is_sharded: Whether parameters are, so that submodules cannot be captured.
    """

    def __init__(
        self,
        group: Any = None,
        wrappers: Sequence[DistributedDataParallel] = (),
        units: FsdpModules | None = None,
        *,
        is_sharded: bool = False,
        ready: bool = False,  # steps may be captured; see :meth:`are_ready`
    ) -> None:
        self.are_one = group is None
        # Called with the reason when a rank calls :meth:`leave`
        self.on_leave: Callable[[str], None] = lambda _: None
        self.numbers = itertools.count(CAPTURE + 1)  # of plans that all ranks capture together
        self.wrappers: tuple[Any, ...] = tuple(wrappers)
        self.units = units
        self.whole_steps_only, self.ready = is_sharded, ready
        self._reason = self.lost = ""  # why graphs are wrong from now on; empty if they are right
        self._open = contextlib.ExitStack()
        self._group = group
        self._peers = None if group is None else Peers(group)

    def close(self) -> None:
        """Decide alone from now on, as with one rank; may be called again."""
        if self._peers is not None:
            self._peers.close()
        self._group, self.wrappers, self._peers = None, (), None
        self.are_one = True
        self._open.close()

    def are_ready(self) -> bool:
        """Tell whether steps may be captured: DDP's reducers must have ended their timing."""
        if not self.ready:
            self.ready = all(map(reducer_is_warm, self.wrappers))
            for ddp in self.wrappers if self.ready else ():
                take_no_more_times(ddp)
        return self.ready

    def waits_for_gradients(self) -> bool:
        """Tell whether a backward pass has failed that a reducer of DDP still waits for."""
        return any(map(is_within_backward, self.wrappers))

    def tells(self) -> bool:
        """Return what this rank tells all others ahead of a step, next to what it could do."""
        return False

    def hears(self, told: bool) -> None:
        """Take note of whether any rank has told it."""

    def agree(self, choice: int, wish: bool) -> tuple[int, bool]:
        """Decide with all ranks what to do with the coming step, and whether all wish it.

        It is what all have chosen. If some lack a graph that others have, all capture. If ranks
        would replay different graphs, because their batches differ, the step is eager.
        """
        if self._group is None:
            return choice, wish
        most, least, against, leaving, told = self._largest(
            choice, -choice, not wish, bool(self._reason), self.tells()
        )
        self.hears(told)
        if leaving:
            rank, reason = self._first_said(self._reason)
            self.on_leave(self._reason or f"rank {rank} has switched its graphs off: {reason}")
            self.close()
            return EAGER, False
        if most != -least:
            choice = min(-least, CAPTURE) if -least <= CAPTURE else EAGER
        return choice, not against

    def leave(self, reason: str) -> None:
        """Switch all ranks to eager steps: from the next step on, at once if there is one rank."""
        if self._group is None:
            self.on_leave(reason)
        self._reason = reason

    def any(self, value: bool) -> bool:
        """Tell whether it is true on any rank."""
        return bool(self._largest(value)[0])

    def all_or_none(
        self,
        run: Callable[[], _Result],
        # Called with the result if another rank has raised
        undo: Callable[[_Result], None] = lambda _: None,
        *,
        # It exchanges data with other ranks before it raises: no rank can go on if only some raise
        exchanges: bool = False,
    ) -> _Result:
        """Run something on all ranks, and raise a CaptureError on all if it raises on one."""
        if self.are_one and not self.wrappers:
            return run()
        error, result, outcome = None, None, _WELL
        try:
            result = run()
        except Exception as raised:
            error, outcome = raised, _NO_ROOM if is_out_of_memory(raised) else _FAILED
            if self.units is not None:
                self.units.forget_step()
            if exchanges and outcome == _FAILED and not isinstance(error, GraphError):
                raise
        waits = error is not None and self.waits_for_gradients()
        worst, least, unfinished = self._largest(outcome, -outcome, waits)
        if unfinished:
            for ddp in self.wrappers:
                forget_backward(ddp)
            self.ready, self.lost = False, "DDP makes its buckets again"
        if worst != _WELL:
            rank, said = self._first_said(error)
            error_text, _, fix = str(said).partition(FIX)
            if exchanges and least == _WELL:
                raise PartedError(
                    "No rank can go on, because one has failed that the others wait for.",
                    f"rank {rank}: {error_text}",
                    fix or "correct the error of that rank; the others only waited for it",
                ) from error
            try:
                if error is not None:
                    raise error
            finally:
                del error, said  # their traceback refers to this frame and those of callers
            undo(result)  # type: ignore[arg-type]
            observed = f"on rank {rank}: {error_text}"
            if worst == _NO_ROOM:
                raise no_room("A captured step", observed)
            raise CaptureError(
                "A step must be captured on all ranks, and compute there what the eager step does.",
                observed,
                fix or "correct the error of that rank",
            )
        return result  # type: ignore[return-value]

    def raise_on_all(self, error: BaseException | None) -> None:
        """Raise the error of one rank on all of them, which call this together."""
        if not self.any(error is not None):
            return
        rank, said = self._first_said("" if error is None else in_one_line(error))
        if error is not None:
            raise error
        raise PartedError(
            "No rank can go on, because an assertion has failed on one of them.",
            f"rank {rank}: {said}",
            "correct the error of that rank; the others only take part in its steps",
        )

    def _first_said(self, said: Any) -> tuple[int, Any]:
        """Return the first rank whose text is not empty, and the text."""
        found = [said]
        if self._group is not None:
            found *= torch.distributed.get_world_size(self._group)
            mine = str(said) if isinstance(said, Exception) else said
            self._exchange(torch.distributed.all_gather_object, found, mine)
        return next((rank, other) for rank, other in enumerate(found) if other)

    def _largest(self, *values: int) -> list[Any]:
        """Return the largest of each value over all ranks."""
        if self._group is None:
            return list(values)
        numbers = torch.tensor([*map(int, values)], device="cpu")
        self._exchange(torch.distributed.all_reduce, numbers, torch.distributed.ReduceOp.MAX)
        return numbers.tolist()

    def _exchange(self, collective: Callable[..., Any], *args: Any) -> None:
        """Call a collective of the group; raise a PartedError if a rank is gone."""
        try:
            collective(*args, self._group)
        except RuntimeError as error:
            if self._peers is None or not self._peers.are_parted(error):
                raise
            raise parted(self._peers.lost) from None


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
