"""Several ranks: DDP and FSDP2 as Lightning sets them up, and decisions of all ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer

from lightning_graphs.device.rules import Obstacle
from lightning_graphs.lightning.logs import log_exchanged
from lightning_graphs.lightning.private import (
    Sigterm,
    ddp_built_on,
    ddp_options,
    is_lightnings,
    sigterm_agreed,
)
from lightning_graphs.lightning.trainer import wrapper_of
from lightning_graphs.policy.options import Options
from lightning_graphs.private.distributed import FsdpModules, collectives_called
from lightning_graphs.regions.lifecycle import Ranks
from lightning_graphs.regions.reduction import Collectives, why_not_reduced

# ------------------ Strategies

_REFUSED = {
    "fsdp": "FSDP frees the memory of parameters within a step, which a graph has the address of",
    "deepspeed": "DeepSpeed runs steps in an engine of its own",
    "xla": "XLA compiles steps for devices of its own",
}
"""File of a strategy of Lightning -> why its steps cannot be captured."""


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
    finds_unused = bool(given.get("find_unused_parameters"))
    return why_not_reduced(hook, finds_unused=finds_unused, remedy="write strategy='ddp'")


def is_model_parallel(trainer: Trainer) -> bool:
    """Tell whether the strategy is Lightning's for FSDP2 and tensor parallelism."""
    return _is(trainer.strategy, "model_parallel")


def is_ddp(strategy: object) -> bool:
    return _is(strategy, "ddp")


def _is(strategy: object, file: str) -> bool:
    """Tell whether a strategy is defined in a file of Lightning, or derived from one there."""
    return any(is_lightnings(kind, f"strategies.{file}") for kind in type(strategy).__mro__)


def capture_stream(trainer: Trainer, stack: ExitStack) -> torch.cuda.Stream:
    """Make the stream for captures, on which a strategy with DDP also makes the wrapper."""
    stream = torch.cuda.Stream(trainer.strategy.root_device)
    if is_ddp(trainer.strategy):
        stack.enter_context(ddp_built_on(trainer.strategy, stream))
    return stream


# ------------------ Steps that each rank decides about alone

COLLECTIVE_ALONE = Obstacle(
    "A captured step of an evaluation cannot call collectives, because each rank replays it by "
    "itself.",
    "log with sync_dist=True, or gather at the end of the epoch; or write evaluation=False",
    kind="collective",
    code='self.log("loss", loss, sync_dist=True)  # in place of all_reduce(loss)',
)


class StepCollectives(Collectives):
    """Notes whether eager steps of an evaluation call collectives, but for what they log.

    Ranks may have different numbers of batches, so they cannot agree on each of them. Lightning
    reduces what is logged by itself, also after a replay.
    """

    @contextlib.contextmanager
    def observing_step(self, module: LightningModule) -> Iterator[None]:
        """Observe a step of the module in the body."""
        with log_exchanged(module, self._log), self.observing():
            yield

    def _log(self, log: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        before = collectives_called()
        log(*args, **kwargs)
        self._allowed += (collectives_called() or 0) - (before or 0)


# ------------------ Decisions of all ranks


class TrainerRanks(Ranks):
    """Decisions of the ranks of one fit, which also hear of signals.

    Args:
        alone: Each rank decides alone, about steps in which none waits for another.
    """

    def __init__(self, trainer: Trainer, *, alone: bool = False) -> None:
        # DDP's wrapper, which reduces gradients; None without DDP
        self.ddp = None if alone else wrapper_of(trainer)
        sharded = is_model_parallel(trainer)
        group = None
        if not alone and trainer.world_size > 1:
            group = torch.distributed.new_group(backend="gloo")
        super().__init__(
            group,
            [] if self.ddp is None else [self.ddp],
            (sharded and FsdpModules(trainer.lightning_module)) or None,
            is_sharded=sharded,
            ready=alone,
        )
        self._sigterm = Sigterm()
        if group is not None:
            self._open.callback(torch.distributed.destroy_process_group, group)
            self._open.enter_context(sigterm_agreed(trainer, self._sigterm))

    def tells(self) -> bool:
        return self._sigterm.received

    def hears(self, told: bool) -> None:
        self._sigterm.stops = told

    def close(self) -> None:
        self.ddp = None
        super().close()
