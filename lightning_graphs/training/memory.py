"""Memory around a capture: tensors that warm-up steps have strewn are moved together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from lightning_graphs.core.torch_private import storage_uses

_WORTH_A_MOVE = 0.05
"""The part of the reserved memory that lies unused between tensors."""
_AT_ONCE = 2**28  # bytes: what a move needs beside the tensors


def gather(tensors: Iterable[Tensor]) -> None:
    """Move tensors together where much memory lies unused between them and others.

    An optimizer makes its state in the first step, wherever gradients and activations leave room.
    Later those use the gaps; in a captured step they are in memory of its own, and the gaps stay
    empty. Values and the tensors themselves stay as they are, only their addresses change: to be
    called before the first capture.

    Args:
        tensors: Tensors on the current device; others, and those whose memory has other users, are
            left where they are.
    """
    if torch.cuda.get_allocator_backend() != "native":  # others have no pools
        return
    device = torch.cuda.current_device()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    reserved = torch.cuda.memory_reserved()
    if reserved - torch.cuda.memory_allocated() < _WORTH_A_MOVE * reserved:
        return
    movable = [t for t in tensors if t.is_cuda and t.device.index == device and _is_whole(t)]
    pool = torch.cuda.MemPool()
    try:
        for part in _parts(movable):
            with torch.cuda.use_mem_pool(pool):
                copies = [tensor.clone() for tensor in part]
            for tensor, copy in zip(part, copies, strict=True):
                tensor.data = copy
            del copies, tensor, copy
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()  # what has moved has moved; the rest stays


def _is_whole(tensor: Tensor) -> bool:
    """Whether a tensor fills its storage, and nothing else uses that."""
    storage = tensor.untyped_storage()
    fills = storage.nbytes() == tensor.numel() * tensor.element_size() > 0
    return fills and storage_uses(storage) == 2  # by the tensor, and by the name above


def _parts(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    part: list[Tensor] = []
    size = 0
    for tensor in tensors:
        part.append(tensor)
        size += tensor.numel() * tensor.element_size()
        if size >= _AT_ONCE:
            yield part
            part, size = [], 0
    if part:
        yield part
