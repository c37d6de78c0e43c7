"""Private corners of DDP, FSDP2 (``fully_shard``) and process groups."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from sys import getrefcount
from typing import Any, cast
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_graphs.private.exchange import exchanged, nothing


def collectives_called() -> int | None:
    """Count the collectives that this process has called so far, of all its process groups.

    Groups number them, and no public API tells. Fallback: None, it is not known.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return 0
    try:
        groups: list[Any] = [*torch.distributed.distributed_c10d._world.pg_map]
        return int(sum(group._get_sequence_number_for_group() for group in groups))
    except (AttributeError, RuntimeError):  # a backend that does not number them
        return None


_OF_A_STEP = (
    "all_gather_state",
    "reduce_scatter_state",
    "reduce_scatter_states",
    "post_forward_order",
    "iter_forward_root",
    "_last_post_reduce_events",
    "_modules_to_run_forward",
    "_all_gather_result",
    "_post_reduce_event",
    "_all_reduce_state",
    "_reshard_after_forward_event",
    "_partial_reduce_output",
    "_post_forward_indices",
    "unsharded_accumulated_grad",
)
"""What FSDP2 has of a step that is under way, in its various versions: None or empty after it."""


class FsdpModules:
    """The units that ``fully_shard`` has made of a module, each with gathered parameters."""

    def __init__(self, module: nn.Module) -> None:
        found = [m for m in module.modules() if hasattr(m, "_get_fsdp_state")]
        self.modules = found
        states = (cast(Any, m)._get_fsdp_state() for m in found)
        self._states: list[Any] = list(dict.fromkeys(states))
        self._groups = [group for state in self._states for group in _groups(state)]

    def __len__(self) -> int:
        return len(self._states)

    def shard(self) -> bool:
        """Free parameters that a forward pass outside of a step gathered; whether steps reduce all.

        ``FSDPModule.reshard`` lets go, too, and looks at every unit with locks and hooks.
        """
        reduces = True
        for group in self._groups:
            if not group.is_sharded:
                group.reshard()
            reduces = reduces and group.reduce_grads and group.all_reduce_grads
        return reduces

    def forget_step(self) -> None:
        """Reset the state of a step that raised.

        ``FSDPModule.reset_iter_state`` (torch 2.13) waits for events, and those of a capture that
        has failed cannot be waited for.
        """
        for holder in self._holders():
            for name in _OF_A_STEP:
                value: Any = getattr(holder, name, None)
                if hasattr(value, "clear"):
                    value.clear()
                elif value is not None:
                    setattr(holder, name, None)
        for state in self._states:
            state._state_ctx.post_backward_final_callback_queued = False
            state._training_state = type(state._training_state).IDLE
        for group in self._groups:
            group._training_state = type(group._training_state).IDLE
            group._to_sharded()

    def _holders(self) -> Iterator[Any]:
        for state in self._states:
            yield from (state, state._state_ctx, state._comm_ctx)
        for group in self._groups:
            yield group
            for parameter in group.fsdp_params:
                yield parameter
                if hasattr(parameter, "_unsharded_param"):
                    parameter._unsharded_param.grad = None


def _groups(state: Any) -> list[Any]:
    """Return the groups of a unit: one, before torch 2.12."""
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [state._fsdp_param_group]
    return [group for group in groups if group is not None]


def reducer_is_warm(ddp: DistributedDataParallel) -> bool:
    """Return whether DDP's reducer has its final buckets and times no more iterations.

    In its first ten iterations it records events, which it reads on the host (reducer.hpp,
    ``should_collect_runtime_stats``). No public method tells how far it is; torch documents eleven
    warm-up iterations.
    """
    iteration = int(ddp._get_ddp_logging_data().get("iteration", 0))
    return iteration >= 10 and getattr(ddp, "_has_rebuilt_buckets", True)


def take_no_more_times(ddp: DistributedDataParallel) -> None:
    """Stop the reducer from timing every hundredth iteration, which may be captured.

    No public method does.
    """
    never = 2**31 - 1
    ddp._set_ddp_runtime_logging_sample_rate(never)


def buffers_left(wrappers: Iterable[DistributedDataParallel]) -> AbstractContextManager[None]:
    """Let forward passes of the body leave buffers as they are, which rank 0 would send to all.

    No public method does. Without the private one, ranks that run the body unlike times wait for
    each other.
    """
    return exchanged((ddp, "_sync_buffers", nothing) for ddp in wrappers)


def buckets_of(ddp: DistributedDataParallel) -> list[list[nn.Parameter]]:
    """List the parameters of each bucket of DDP's reducer, in the order of reduction.

    Torch's join of uneven inputs asks this way, too. No public method tells. Fallback: no buckets,
    with which the reducer itself is captured.
    """
    zeros = getattr(ddp.reducer, "_get_zeros_like_grad_buckets", list)
    return [bucket.parameters() for bucket in zeros()]


def is_within_backward(ddp: DistributedDataParallel) -> bool:
    """Return whether the reducer waits for gradients of a backward pass that has failed.

    No public method tells. Without the private one, the next step raises.
    """
    check = getattr(ddp.reducer, "_check_reducer_finalized", None)
    try:
        if check is not None:
            check()
    except RuntimeError:
        return True
    return False


def forget_backward(ddp: DistributedDataParallel) -> None:
    """Let the reducer forget its backward pass, and make its buckets again after the next one.

    To be called on all ranks, which make them together; no public method does it.
    """
    reset = getattr(ddp.reducer, "_reset_state", None)
    if reset is not None:
        ddp._has_rebuilt_buckets = False
        reset()


_renewed: WeakSet[DistributedDataParallel] = WeakSet()


def renew_reducer(wrapper: DistributedDataParallel) -> bool:
    """Let DDP accumulate gradients on the present stream; whether it does.

    Its reducer keeps the AccumulateGrad nodes of the stream on which it was made, mostly the
    default one, whose nodes CUDA refuses to capture; from 2.13 on torch has an option (see
    :func:`stale_gradient_nodes_tolerated`). So the reducer is made once more, as unpickling DDP
    does: no public method moves it. All ranks are to do it together; it counts its iterations from
    then on.
    """
    if hasattr(torch.autograd.graph, "set_override_stale_capture_stream") or wrapper in _renewed:
        return True
    ddp: Any = wrapper
    try:
        parameters, sparse = ddp._build_params_for_reducer()
        names = ddp._build_debug_param_to_name_mapping(parameters)
        hooks, make = [*ddp._comm_hooks], ddp._ddp_init_helper
    except AttributeError:
        return False
    if any(getrefcount(vars(ddp)[name]) > 2 for name in ("reducer", "logger")):
        return False  # another owner would keep the hooks of the old one
    del ddp.logger, ddp.reducer
    make(parameters, sparse, names, ddp.static_graph)
    if ddp.static_graph:
        ddp.reducer._set_static_graph()
        ddp.logger._set_static_graph()
    ddp._has_rebuilt_buckets = False
    c10d: Any = dist
    for hook, state in hooks:
        if isinstance(hook, c10d.BuiltinCommHookType):
            c10d._register_builtin_comm_hook(ddp.reducer, hook)
        else:
            c10d._register_comm_hook(ddp.reducer, state, hook)
    _renewed.add(wrapper)
    return True


def ahead_of_destruction(call: Callable[[], object]) -> AbstractContextManager[None]:
    """Call this before the program destroys all process groups, while the body runs.

    NCCL waits for the end of graphs that hold its collectives, and for ever for those that live.
    Nothing public tells of the end of a group.
    """
    own = dist.destroy_process_group

    def destroy(group: Any = None) -> None:
        if group is None or group is dist.group.WORLD:
            call()
        own(group)

    name = "destroy_process_group"
    return exchanged([(dist, name, destroy), (dist.distributed_c10d, name, destroy)])
