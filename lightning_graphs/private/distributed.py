"""Private corners of DDP, of FSDP2 (``fully_shard``) and of ``DTensor``, each with its reason."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

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


def local(tensor: Tensor) -> Tensor:
    """Return the tensor itself, or this rank's part of a ``DTensor``.

    ``DTensor.to_local()`` makes another tensor where autograd looks, with an address of its own.
    """
    found: Tensor = getattr(tensor, "_local_tensor", tensor)
    return found


def unwraps_itself(types: Sequence[type]) -> bool:
    """Return whether an operator is on a ``DTensor``, or on a collective's result for one.

    A dispatch mode that does not know it sees the operators on the shards.
    """
    return any(kind.__module__.startswith("torch.distributed.") for kind in types)


def asks_for_shapes() -> bool:
    """Return whether fake tensors are in use, as in an operator's first call on a ``DTensor``.

    No public function tells.
    """
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


class FsdpModules:
    """The units that ``fully_shard`` has made of a module, each with gathered parameters."""

    def __init__(self, module: nn.Module) -> None:
        found = (m for m in module.modules() if hasattr(m, "_get_fsdp_state"))
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
