"""Several ranks: DDP and FSDP2 as Lightning sets them up, and decisions of all ranks.

NCCL demands it: whether a collective is captured "must be uniform over all ranks participating",
and who launches a graph must launch "the graph derived from that collective capture" (NCCL's user
guide, "Using NCCL with CUDA Graphs"). So each rank says ahead of a step what it could do, and all
do what all can. They say it from host to host, over gloo: no rank waits for its device.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, TypeVar

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.nn.parallel import DistributedDataParallel

from lightning_graphs.device.rules import Obstacle
from lightning_graphs.errors import (
    FIX,
    CaptureError,
    GraphError,
    in_one_line,
    is_out_of_memory,
    no_room,
)
from lightning_graphs.lightning.logs import log_exchanged
from lightning_graphs.lightning.private import Sigterm, ddp_built_on, ddp_options, sigterm_agreed
from lightning_graphs.policy.options import Options
from lightning_graphs.private.engine import (
    FsdpModules,
    forget_backward,
    is_within_backward,
    reducer_is_warm,
    take_no_more_times,
)
from lightning_graphs.private.exchange import replaced
from lightning_graphs.private.torch import collectives_called
from lightning_graphs.regions.lifecycle import CAPTURE, EAGER
from lightning_graphs.watch.user_code import is_lightnings

# ------------------ Strategies

_REFUSED = {
    "fsdp": "FSDP frees the memory of parameters within a step, which a graph has the address of",
    "deepspeed": "DeepSpeed runs steps in an engine of its own",
    "xla": "XLA compiles steps for devices of its own",
}
"""File of a strategy of Lightning -> why its steps cannot be captured."""

_WITH_STATE = ("powerSGD_hook", "post_localSGD_hook")
"""Modules of torch with communication hooks that count steps in Python."""


def why_not_captured(trainer: Trainer, options: Options) -> str:
    """Why steps of the trainer's strategy cannot be captured, and the remedy; empty if they can.

    It may be called before the strategy is set up, and after.
    """
    strategy = trainer.strategy
    for file, reason in _REFUSED.items():
        if _is(strategy, file):
            return f"{reason}; write Trainer(strategy='ddp') if the model fits on one device"
    if is_model_parallel(trainer) and options.by_submodules:
        return (
            "FSDP2 gathers the parameters of submodules to new addresses in every step; write "
            "GraphCapture() for whole steps"
        )
    if is_model_parallel(trainer) or (trainer.world_size == 1 and not is_ddp(strategy)):
        return ""
    if not is_ddp(strategy):
        return f"{type(strategy).__name__} is not DDP; write Trainer(strategy='ddp')"
    given, hook = ddp_options(strategy)
    if given.get("find_unused_parameters"):
        return (
            "find_unused_parameters=True reads on the host, in every step, which parameters have a "
            "gradient; write strategy='ddp', and requires_grad_(False) on what the loss leaves out"
        )
    if getattr(hook, "__module__", "").rpartition(".")[2] in _WITH_STATE:
        return (
            f"the communication hook {getattr(hook, '__name__', hook)} counts steps, which a graph "
            "does not; leave ddp_comm_hook out, or use bf16_compress_hook"
        )
    return ""


def is_model_parallel(trainer: Trainer) -> bool:
    """Tell whether the strategy is Lightning's for FSDP2 and tensor parallelism."""
    return _is(trainer.strategy, "model_parallel")


def is_ddp(strategy: object) -> bool:
    return _is(strategy, "ddp")


def _is(strategy: object, file: str) -> bool:
    """Tell whether a strategy is defined in a file of Lightning, or derived from one there."""
    return any(is_lightnings(kind, f"strategies.{file}") for kind in type(strategy).__mro__)


def wrapper_of(trainer: Trainer) -> DistributedDataParallel | None:
    """Return DDP's wrapper of the module, which reduces gradients; None without DDP."""
    model = trainer.strategy.model
    return model if isinstance(model, DistributedDataParallel) else None


def capture_stream(trainer: Trainer, stack: ExitStack) -> torch.cuda.Stream:
    """Make the stream for captures, on which a strategy with DDP also makes the wrapper."""
    stream = torch.cuda.Stream(trainer.strategy.root_device)
    if is_ddp(trainer.strategy):
        stack.enter_context(ddp_built_on(trainer.strategy, stream))
    return stream


def waits_for_gradients(trainer: Trainer) -> bool:
    """Tell whether a backward pass has failed that DDP's reducer still waits for."""
    ddp = wrapper_of(trainer)
    return ddp is not None and is_within_backward(ddp)


def syncs(trainer: Trainer) -> bool:
    """Tell whether the coming forward pass gets the buffers of rank 0.

    It does after a step that has reduced gradients, but not within an accumulation window or right
    after a validation, which has received them.
    """
    ddp = wrapper_of(trainer)
    return ddp is not None and bool(ddp.modules_buffers) and ddp.require_forward_param_sync


def unseen_by_ddp(trainer: Trainer) -> AbstractContextManager[None]:
    """Make DDP forget the forward passes of the body."""
    ddp, name = wrapper_of(trainer), "require_forward_param_sync"
    return nullcontext() if ddp is None else replaced(ddp, name, getattr(ddp, name))


# ------------------ Steps that each rank decides about alone

COLLECTIVE_ALONE = Obstacle(
    "A captured step of an evaluation cannot call collectives, because each rank replays it by "
    "itself.",
    "log with sync_dist=True, or gather at the end of the epoch; or write evaluation=False",
    kind="collective",
    code='self.log("loss", loss, sync_dist=True)  # in place of all_reduce(loss)',
)


class Collectives:
    """Notes whether eager steps of an evaluation call collectives.

    Ranks may have different numbers of batches, so they cannot agree on each of them. Lightning
    reduces what is logged by itself, also after a replay.
    """

    def __init__(self) -> None:
        self.are_called = False
        self.are_known = False  # a step was observed
        self._by_logs = 0

    @contextlib.contextmanager
    def observing(self, module: LightningModule) -> Iterator[None]:
        """Observe a step of the module in the body."""
        self._by_logs, before = 0, collectives_called()
        with log_exchanged(module, self._log):
            yield
        now = collectives_called()
        is_known = before is not None and now is not None
        self.are_called |= not is_known or (now or 0) - (before or 0) > self._by_logs
        self.are_known = True

    def _log(self, log: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        before = collectives_called()
        log(*args, **kwargs)
        self._by_logs += (collectives_called() or 0) - (before or 0)


# ------------------ Decisions of all ranks

NOT_REDUCED = (
    "after set_requires_gradient_sync(False) a step leaves gradients to the next one, of which a "
    "graph knows nothing; reduce them in every step"
)

_WELL, _FAILED, _NO_ROOM = range(3)

_Result = TypeVar("_Result")


class PartedError(Exception):
    """Some ranks have failed that others wait for: it ends the fit, as a refusal does not."""

    def __init__(self, rule: str, observed: str, remedy: str) -> None:
        super().__init__(str(GraphError(rule, observed, remedy)))


class Ranks:
    """Decisions that the ranks of one fit make together; with one rank they cost nothing.

    Every rank calls the same methods in the same order.

    Args:
        alone: Each rank decides alone, about steps in which none waits for another.
    """

    def __init__(self, trainer: Trainer, *, alone: bool = False) -> None:
        # There is one rank, or each decides alone
        self.are_one = alone or trainer.world_size == 1
        # Called with the reason when a rank calls :meth:`leave`
        self.on_leave: Callable[[str], None] = lambda _: None
        self._trainer = trainer
        self.numbers = itertools.count(CAPTURE + 1)  # of plans that all ranks capture together
        # DDP's wrapper, which reduces gradients; None without DDP
        self.ddp = None if alone else wrapper_of(trainer)
        # Submodules cannot be captured
        self.whole_steps_only = sharded = is_model_parallel(trainer)
        # The modules whose parameters FSDP2 gathers; None without FSDP2
        self.units = (sharded and FsdpModules(trainer.lightning_module)) or None
        self.ready = alone  # steps may be captured; see :meth:`are_ready`
        self._reason = self.lost = ""  # why graphs are wrong from now on; empty if they are right
        self._sigterm = Sigterm()
        self._open = contextlib.ExitStack()
        self._group: Any = None
        if not self.are_one:
            self._group = torch.distributed.new_group(backend="gloo")
            self._open.callback(torch.distributed.destroy_process_group, self._group)
            self._open.enter_context(sigterm_agreed(trainer, self._sigterm))

    def close(self) -> None:
        """Decide alone from now on, as with one rank; may be called again."""
        self._group = self.ddp = None
        self.are_one = True
        self._open.close()

    def are_ready(self) -> bool:
        """Tell whether steps may be captured: DDP's reducer, if any, must have ended its timing."""
        if not self.ready:
            self.ready = self.ddp is None or reducer_is_warm(self.ddp)
            if self.ready and self.ddp is not None:
                take_no_more_times(self.ddp)
        return self.ready

    def agree(self, choice: int, wish: bool) -> tuple[int, bool]:
        """Decide with all ranks what to do with the coming step, and whether all wish it.

        It is what all have chosen. If some lack a graph that others have, all capture. If ranks
        would replay different graphs, because their batches differ, the step is eager.
        """
        if self._group is None:
            return choice, wish
        most, least, against, leaving, self._sigterm.stops = self._largest(
            choice, -choice, not wish, bool(self._reason), self._sigterm.received
        )
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
        found = [said] * self._trainer.world_size
        if self._group is not None:
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
