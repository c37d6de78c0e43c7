"""The private corners of ``DistributedDataParallel``, each with its reason."""

from __future__ import annotations

from torch.nn.parallel import DistributedDataParallel


def reducer_is_warm(ddp: DistributedDataParallel) -> bool:
    """Whether DDP's gradient reducer has its final buckets and takes no times any more.

    In its first ten iterations it records events, which it reads on the host (reducer.hpp,
    ``should_collect_runtime_stats``). No public method tells how far it is; torch documents eleven
    warm-up iterations.
    """
    iteration = int(ddp._get_ddp_logging_data().get("iteration", 0))
    return iteration >= 10 and getattr(ddp, "_has_rebuilt_buckets", True)


def take_no_more_times(ddp: DistributedDataParallel) -> None:
    """Let the reducer take no times at every hundredth iteration either, which may be captured.

    No public method does.
    """
    never = 2**31 - 1
    ddp._set_ddp_runtime_logging_sample_rate(never)


def is_within_backward(ddp: DistributedDataParallel) -> bool:
    """Whether the reducer waits for gradients of a backward pass that has failed.

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
    """Let the reducer forget its backward pass, and make its buckets anew after the next one.

    To be called on all ranks, which make them together; no public method does it.
    """
    reset = getattr(ddp.reducer, "_reset_state", None)
    if reset is not None:
        ddp._has_rebuilt_buckets = False
        reset()
