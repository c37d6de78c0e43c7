"""Lets the ranks of a fit decide together: every step is done the same way on all of them.

NCCL demands it: whether a collective is captured "must be uniform over all ranks participating",
and who launches a graph must launch "the graph derived from that collective capture" (NCCL's user
guide, "Using NCCL with CUDA Graphs"). So each rank says ahead of a step what it could do, and all
do what all can. They say it from host to host, over gloo: no rank waits for its device.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from lightning.pytorch import Trainer

from lightning_graphs.core.private.distributed import (
    ShardedUnits,
    forget_backward,
    reducer_is_warm,
    take_no_more_times,
)
from lightning_graphs.errors import FIX, CaptureError, GraphError
from lightning_graphs.regions.lifecycle import CAPTURE, EAGER
from lightning_graphs.training.costs.memory import is_out_of_memory, no_room
from lightning_graphs.training.ddp import is_model_parallel, waits_for_gradients, wrapper_of
from lightning_graphs.training.lightning_private import Sigterm, sigterm_agreed

NOT_REDUCED = (
    "after set_requires_gradient_sync(False) a step leaves gradients to the next one, of which a "
    "graph knows nothing; reduce them in every step"
)

_WELL, _FAILED, _NO_ROOM = range(3)

_Result = TypeVar("_Result")


class PartedError(Exception):
    """Some ranks have failed where others wait for them: no refusal, after which steps go on."""

    def __init__(self, rule: str, observed: str, remedy: str) -> None:
        super().__init__(str(GraphError(rule, observed, remedy)))


class Ranks:
    """Agreements between the ranks of one fit; with one rank they cost nothing.

    Every rank calls the same methods in the same order.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.are_one = trainer.world_size == 1  # there is one rank only
        # Called with the reason where one of the ranks :meth:`leave`
        self.left: Callable[[str], None] = lambda _: None
        self._trainer = trainer
        self.numbers = itertools.count(CAPTURE + 1)  # of plans that all ranks capture together
        # What reduces gradients over ranks; None if nothing does
        self.ddp = wrapper_of(trainer)
        # Submodules cannot be captured
        self.whole_steps_only = sharded = is_model_parallel(trainer)
        # What FSDP2 gathers and reduces; None if it does nothing
        self.units = (sharded and ShardedUnits(trainer.lightning_module)) or None
        self.ready = False  # steps may be captured; see :meth:`are_ready`
        self._reason = self.lost = ""  # why no graph is right any longer; empty as long as they are
        self._sigterm = Sigterm()
        self._open = contextlib.ExitStack()
        self._group: Any = None
        if not self.are_one:
            self._group = torch.distributed.new_group(backend="gloo")
            self._open.callback(torch.distributed.destroy_process_group, self._group)
            self._open.enter_context(sigterm_agreed(trainer, self._sigterm))

    def close(self) -> None:
        """Agree on nothing any more, as if there were one rank; may be called again."""
        self._group = self.ddp = None
        self.are_one = True
        self._open.close()

    def are_ready(self) -> bool:
        """Whether steps may be captured: the gradient reducer, if any, takes no times any more."""
        if not self.ready:
            self.ready = self.ddp is None or reducer_is_warm(self.ddp)
            if self.ready and self.ddp is not None:
                take_no_more_times(self.ddp)
        return self.ready

    def settle(self, choice: int, wish: bool) -> tuple[int, bool]:
        """What all ranks do with the coming step.

        It is what all chose. Where some have lost a graph that others have, all capture; where
        ranks would replay different graphs, because their batches differ, the step is eager.
        """
        if self._group is None:
            return choice, wish
        most, least, against, leaving, self._sigterm.stops = self._largest(
            choice, -choice, not wish, bool(self._reason), self._sigterm.received
        )
        if leaving:
            rank, reason = self._first_said(self._reason)
            self.left(self._reason or f"rank {rank} has switched its graphs off: {reason}")
            self.close()
            return EAGER, False
        if most != -least:
            choice = min(-least, CAPTURE) if -least <= CAPTURE else EAGER
        return choice, not against

    def leave(self, reason: str) -> None:
        """Let all ranks run eagerly: from the next step on, or at once where there is one."""
        if self._group is None:
            self.left(reason)
        self._reason = reason

    def any(self, value: bool) -> bool:
        return bool(self._largest(value)[0])

    def together(
        self,
        run: Callable[[], _Result],
        # Called with the result where another rank has none
        undo: Callable[[_Result], None] = lambda _: None,
        *,
        # It exchanges data with other ranks before it raises. Nobody can go on then, unless all
        # of them raise.
        exchanges: bool = False,
    ) -> _Result:
        """Run something on all ranks, and raise on all where it raises on one."""
        if self.are_one and self.ddp is None:
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
        waits = error is not None and waits_for_gradients(self._trainer)
        worst, least, unfinished = self._largest(outcome, -outcome, waits)
        if unfinished:
            assert self.ddp is not None
            forget_backward(self.ddp)
            self.ready, self.lost = False, "DDP makes its buckets anew"
        if worst != _WELL:
            rank, said = self._first_said(error)
            told, _, fix = str(said).partition(FIX)
            if exchanges and least == _WELL:
                raise PartedError(
                    "No rank can go on, because one has failed that the others wait for.",
                    f"rank {rank}: {told}",
                    fix or "correct the error of that rank; the others only waited for it",
                ) from error
            try:
                if error is not None:
                    raise error
            finally:
                del error, said  # their traceback holds this frame, and what callers hold
            undo(result)  # type: ignore[arg-type]
            observed = f"on rank {rank}: {told}"
            if worst == _NO_ROOM:
                raise no_room("A captured step", observed)
            raise CaptureError(
                "A step must be captured on all ranks, and compute there what the eager step does.",
                observed,
                fix or "correct the error of that rank",
            )
        return result  # type: ignore[return-value]

    def _first_said(self, said: Any) -> tuple[int, Any]:
        """The first rank that says something, and what it says."""
        found = [said] * self._trainer.world_size
        if self._group is not None:
            mine = str(said) if isinstance(said, Exception) else said
            torch.distributed.all_gather_object(found, mine, self._group)
        return next((rank, other) for rank, other in enumerate(found) if other)

    def _largest(self, *values: int) -> list[Any]:
        """The largest of each value over all ranks."""
        if self._group is None:
            return list(values)
        numbers = torch.tensor([*map(int, values)], device="cpu")
        torch.distributed.all_reduce(numbers, torch.distributed.ReduceOp.MAX, self._group)
        return numbers.tolist()
