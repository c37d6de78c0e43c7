"""Collectives of ``torch.distributed`` in a recording: recorded without any communication."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

_NAMESPACES = ("c10d", "_c10d_functional", "c10d_functional")
_GATHERED = "fsdp::all_gather_copy_in"
_SENDS = ("send", "barrier", "monitored_barrier_")
_ONE_RANK = timedelta(seconds=60)


def is_collective(func: OpOverload) -> bool:
    return func.namespace in _NAMESPACES


def written_position(func: OpOverload) -> tuple[int, ...]:
    """Where in its arguments a collective has what it writes; its schema does not say it.

    The same of the copy with which FSDP2 prepares one.
    """
    if func._schema.name == _GATHERED:
        return (1,)
    return (0,) if func.namespace == "c10d" and func._opname not in _SENDS else ()


def returned_alone(func: OpOverload, args: Sequence[Any]) -> Any:
    """What a collective returns, with the tensors as they are: nobody else is asked.

    During the capture of a CUDA graph nothing is exchanged either. So a rank may record, and fail
    to, by itself.
    """
    if func.namespace != "c10d":
        found = func(*(a.to("meta") if isinstance(a, Tensor) else a for a in args))
        is_wait = func._opname == "wait_tensor"
        return args[0] if is_wait else torch.zeros_like(found, device=args[0].device)
    reduced = args[0] if func is torch.ops.c10d.allreduce_.default else [torch.empty(0)]
    work = _alone().allreduce(reduced).boxed()  # its future holds these tensors
    return work if len(func._schema.returns) == 1 else (args[0], work)


@functools.cache
def _alone() -> Any:
    from torch.distributed import HashStore, ProcessGroupGloo  # type: ignore[attr-defined]

    return ProcessGroupGloo(HashStore(), 0, 1, _ONE_RANK)


def wait_for(result: Any) -> None:
    """Wait until a collective that was called has written its tensors."""
    if isinstance(result, Tensor):
        torch.ops._c10d_functional.wait_tensor(result)
        return
    work = result[-1] if isinstance(result, tuple) else result
    torch.distributed.Work.unbox(work).wait()
