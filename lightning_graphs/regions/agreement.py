"""Decisions that several ranks make together, and what reduces their gradients.

NCCL demands it: whether a collective is captured "must be uniform over all ranks participating",
and who launches a graph must launch "the graph derived from that collective capture" (NCCL's user
guide, "Using NCCL with CUDA Graphs"). So each rank says ahead of a step what it could do, and all
do what all can. They say it from host to host, over gloo: no rank waits for its device.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch.nn.parallel import DistributedDataParallel

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
    forget_backward,
    is_within_backward,
    reducer_is_warm,
    take_no_more_times,
)
from lightning_graphs.private.exchange import Member
from lightning_graphs.regions.lifecycle import CAPTURE, EAGER

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

_WELL, _FAILED, _NO_ROOM = range(3)

_Result = TypeVar("_Result")


class PartedError(Exception):
    """Some ranks have failed that others wait for: it ends the program, as a refusal does not."""

    def __init__(self, rule: str, observed: str, remedy: str) -> None:
        super().__init__(str(GraphError(rule, observed, remedy)))


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

    def close(self) -> None:
        """Decide alone from now on, as with one rank; may be called again."""
        self._group, self.wrappers = None, ()
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
            torch.distributed.all_gather_object(found, mine, self._group)
        return next((rank, other) for rank, other in enumerate(found) if other)

    def _largest(self, *values: int) -> list[Any]:
        """Return the largest of each value over all ranks."""
        if self._group is None:
            return list(values)
        numbers = torch.tensor([*map(int, values)], device="cpu")
        torch.distributed.all_reduce(numbers, torch.distributed.ReduceOp.MAX, self._group)
        return numbers.tolist()
