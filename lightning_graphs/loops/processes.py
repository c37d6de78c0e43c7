"""Several processes: DDP and FSDP2 as a loop has made them, and decisions of its ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_graphs.device.rules import Obstacle
from lightning_graphs.private.distributed import FsdpModules, renew_reducer
from lightning_graphs.private.exchange import exchanged
from lightning_graphs.private.torch import local
from lightning_graphs.regions.lifecycle import Ranks
from lightning_graphs.regions.reduction import (
    NOT_REDUCED,
    OF_A_FORWARD,
    buffers_synced,
    unseen_by,
    why_not_reduced,
)
from lightning_graphs.watch.user_code import OF_ALL_MODULES

# What DDP sets in its wrapper; that is a part of keys, and put back, as :class:`Processes` says
OF_ALL_MODULES.update(OF_A_FORWARD, {"require_backward_grad_sync"})

_REFUSED = {
    "torch.distributed.fsdp.fully_sharded_data_parallel": (
        "FullyShardedDataParallel frees the memory of parameters within a step, which a graph has "
        "the address of; use fully_shard"
    ),
    "torch.nn.parallel.data_parallel": (
        "DataParallel copies the model to other devices in each call; use DistributedDataParallel"
    ),
    "deepspeed": "DeepSpeed runs steps in an engine of its own; use DistributedDataParallel",
}
"""Beginning of the module of a wrapper's class -> why its steps cannot be captured."""

OWN_COLLECTIVE = Obstacle(
    "A captured function can exchange data with other processes only through DDP or FSDP2, whose "
    "ranks decide together.",
    "give capture() the wrapped model that the function trains; or call collectives after the "
    "function",
    kind="collective",
    code="loss = step(batch)\ntorch.distributed.all_reduce(loss)  # after the captured function",
)
JOINED = (
    "a wrapper's join() lets ranks end after different numbers of calls, but each call waits for "
    "all ranks; give every rank the same number of batches"
)


class Processes:
    """What of a program exchanges data with other processes.

    A function that trains a model under DDP or FSDP2 is called on all ranks in turn, which decide
    together. Any other function is a rank's own.
    """

    def __init__(self, program: nn.Module, *, evaluates: bool) -> None:
        modules = [*program.modules()]
        self._kinds = {kind.__module__ for m in modules for kind in type(m).__mro__}
        self.wrappers = [m for m in modules if isinstance(m, DistributedDataParallel)]
        units = FsdpModules(program)
        self._units = units if len(units) else None
        self._is_sharded = any(local(p) is not p for p in program.parameters())
        is_joint = not evaluates and (self.wrappers or self._is_sharded) and _world() > 1
        self.are_joint = bool(is_joint)
        self.are_apart = _world() > 1 and not self.are_joint
        self.is_first = not self.are_joint or distributed.get_rank() == 0

    def why_not(self) -> str:
        """Why calls cannot be captured, and the remedy; empty if they can."""
        for begin, reason in _REFUSED.items():
            if any(kind.startswith(begin) for kind in self._kinds):
                return reason
        for ddp in self.wrappers if self.are_joint else ():
            hooks: Sequence[Any] = getattr(ddp, "_comm_hooks", ())
            remedy = "leave it out"
            for hook in (*(hook for hook, _ in hooks), None):
                finds_unused = ddp.find_unused_parameters
                if why := why_not_reduced(hook, finds_unused=finds_unused, remedy=remedy):
                    return why
            if self._is_joined():
                return JOINED
        return ""

    def ranks(self) -> Ranks:
        """Make what decides for all ranks; all of them call it, if there are several."""
        if self.are_joint:
            parts = self._group(), self.wrappers, self._units
            return Ranks(*parts, is_sharded=self._is_sharded)
        return Ranks(None, (), self._units, is_sharded=self._is_sharded, ready=True)

    def _group(self) -> Any:
        """Find the group over gloo of all ranks that train the same models."""
        every = tuple(range(_world()))
        found = {tuple(distributed.get_process_group_ranks(w.process_group)) for w in self.wrappers}
        return _group_of(every if self._is_sharded or len(found) > 1 else found.pop())

    def _is_joined(self) -> bool:
        return any(ddp._join_config.enable for ddp in self.wrappers)

    def why_to_leave(self) -> str:
        """Why the coming call, and all that follow, are eager on all ranks; empty: they need not.

        FSDP2 frees what was gathered outside of the function.
        """
        if self._is_joined():
            return JOINED
        return NOT_REDUCED if self._units is not None and not self._units.shard() else ""

    def renew(self) -> None:
        """Let DDP accumulate gradients on the present stream, where calls are captured."""
        for ddp in self.wrappers:
            renew_reducer(ddp)

    def unseen(self) -> Any:
        """Make DDP forget the forward passes of the body."""
        return exchanged(unseen_by(self.wrappers))

    def sync(self) -> bool:
        """Tell whether the coming forward pass of a wrapper gets the buffers of rank 0."""
        return any(map(buffers_synced, self.wrappers))

    def key(self) -> tuple[tuple[bool, bool], ...]:
        """Return whether each wrapper gets buffers in the coming call, and reduces gradients."""
        return tuple((buffers_synced(ddp), ddp.require_backward_grad_sync) for ddp in self.wrappers)


_groups: dict[tuple[int, ...], tuple[Any, Any]] = {}
"""Ranks -> the default group that there was, and the group over gloo: captured functions share it.

A second group of the same name would find addresses of the first in the store.
"""


def _group_of(ranks: tuple[int, ...]) -> Any:
    """Return a group over gloo of these ranks, which ask for it together."""
    default = distributed.group.WORLD
    known, group = _groups.get(ranks, (None, None))
    if known is not default:
        only_these = len(ranks) < _world()  # and no other rank, make it
        parts = {"backend": "gloo", "use_local_synchronization": only_these}
        group = distributed.new_group([*ranks], **parts)  # type: ignore[arg-type]
        _groups[ranks] = default, group
    return group


def _world() -> int:
    """Return the number of processes that torch.distributed has here."""
    known = distributed.is_available() and distributed.is_initialized()
    return distributed.get_world_size() if known else 1
