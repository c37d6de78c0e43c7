"""Measures how much memory graphs may take, and uses well what is there."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Literal

import torch
from torch import Tensor

from lightning_graphs.device.graph import CUDAGraph
from lightning_graphs.errors import no_room
from lightning_graphs.private.torch import is_strided, storage_uses

_WORTH_A_MOVE = 0.05
"""The part of the reserved memory that lies unused between tensors."""
_AT_ONCE = 2**28  # bytes: what a move needs next to the tensors
_AUTO = 0.35
"""How much more than eager steps this package may take, as a part of their peak."""
_LEAST, _LEAST_SHARE = 2**31, 0.05
"""Bytes that may be taken next to that peak in any case, up to this part of a GPU's memory."""
_ROOMY = 4
"""If so many times the peak of eager steps is free, memory need not be counted."""
SETTLED = 3
"""Steps after which the allocator has cut its memory into blocks for good."""
_BESIDE = 2**26  # bytes: what a comparison takes next to the state that it has copied
_MIB = 2**20


class MemoryKept(Exception):
    """A tensor of an eager run is alive in a graph's pool: no graph of that pool may replay."""


class MemoryBudget:
    """How much memory of a GPU this package may take; on a CPU there is no limit."""

    def __init__(self, device: torch.device, share: float | Literal["auto"] = "auto") -> None:
        self._device = device if device.type == "cuda" else None
        self._share = _AUTO if share == "auto" else share
        self._peak = self._activations = 0
        self.shares = True  # eager steps that are compared with a graph may take its memory
        # Eager code finds hardly any memory next to graphs, as of the last :meth:`settle`
        self.is_tight = False

    @property
    def _part(self) -> int:
        return int((1 + self._share) * self._peak)

    def require_room(self, what: str) -> None:
        """Ahead of a capture; the first one looks at what eager steps took."""
        if self._device is None:
            return
        taken = torch.cuda.memory_allocated(self._device)
        if not self._peak:
            self._peak = torch.cuda.max_memory_allocated(self._device)
            self._activations = self._peak - taken
            torch.cuda.empty_cache()  # graphs take from a pool, never what lies cached
        total = torch.cuda.get_device_properties(self._device).total_memory
        least = min(_LEAST, int(_LEAST_SHARE * total))
        limit = max(self._part, self._peak + least)
        if torch.cuda.memory_reserved(self._device) + self._activations > limit:
            torch.cuda.empty_cache()  # eager steps cannot use the rest, which is in use or in pools
            taken = torch.cuda.memory_reserved(self._device)
        if taken + self._activations > limit:
            raise no_room(
                what,
                f"{taken // _MIB} MiB are taken, a step takes {self._activations // _MIB} MiB "
                f"beside, and memory={self._share:g} allows {limit // _MIB} MiB",
            )

    @property
    def is_roomy(self) -> bool:
        """Whether so much is free that graphs take it from no eager step."""
        return self._device is not None and self._free() > _ROOMY * self._peak > 0

    def settle(self) -> None:
        """Empty the cache if memory is tight: eager code may need blocks of other sizes."""
        if self._device is None:
            return
        self.is_tight = self._free() <= 2 * self._activations
        if self.is_tight:
            torch.cuda.empty_cache()

    def room_for(self, needed: int, beside: int = 0) -> int:
        """Return how many of the needed bytes a copy may take here; the host can have the rest.

        ``beside`` bytes are taken next to it.
        """
        if self._device is None:
            return needed
        if self._room(beside) < needed:
            torch.cuda.empty_cache()
        return min(self._room(beside), needed)

    def _room(self, beside: int) -> int:
        taken = torch.cuda.memory_reserved(self._device) + beside
        return max(0, min(self._free() - beside, self._part - taken) - _BESIDE)

    def _free(self) -> int:
        """Return how many bytes the allocator may still take from the device."""
        free, total = torch.cuda.mem_get_info(self._device)
        fraction = getattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 1.0)
        allowed = int(total * fraction(self._device))
        return min(free, allowed - torch.cuda.memory_reserved(self._device))

    @contextlib.contextmanager
    def memory_of(self, graph: CUDAGraph) -> Iterator[None]:
        """Let the body take its memory from the pool of a graph, which lies idle between replays.

        All that the body makes must be gone by the next replay; see :meth:`nothing_kept`.
        """
        if self._device is None or not self.shares:
            yield
            return
        # It asks a pool for its id only, and torch makes no object of a graph's pool. It is for
        # this thread alone, in which the backward pass runs then.
        pool = torch.cuda.use_mem_pool(SimpleNamespace(id=graph.pool()))  # type: ignore[arg-type]
        with torch.autograd.set_multithreading_enabled(False), pool:
            yield

    @contextlib.contextmanager
    def nothing_kept(self) -> Iterator[None]:
        """Raise :class:`MemoryKept` if a tensor of the body lives on in the memory of graphs."""
        before = torch.cuda.memory_allocated(self._device) if self._device is not None else 0
        yield
        if self._device is None or not self.shares:
            return
        if torch.cuda.memory_allocated(self._device) > before:
            gc.collect()  # what refers to itself
        if torch.cuda.memory_allocated(self._device) > before:
            self.shares = False
            raise MemoryKept


def defragment(tensors: Iterable[Tensor]) -> None:
    """Move tensors together if much memory lies unused between them and others.

    An optimizer makes its state in the first step, wherever gradients and activations leave room.
    Later those use the gaps; in a captured step they are in memory of its own, and the gaps stay
    empty. Values and the tensors themselves stay as they are, only their addresses change: to be
    called before the first capture.
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
    pool, freed = torch.cuda.MemPool(), 0
    try:
        for tensor in movable:
            with torch.cuda.use_mem_pool(pool):
                tensor.data = tensor.clone()
            freed += tensor.untyped_storage().nbytes()
            if freed >= _AT_ONCE:
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
                freed = 0
    except torch.OutOfMemoryError:
        pass  # what has moved has moved; the rest stays
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def _is_whole(tensor: Tensor) -> bool:
    """Whether a tensor fills its storage, and nothing else uses that."""
    if not is_strided(tensor):  # an optimizer's state of sparse gradients
        return False
    storage = tensor.untyped_storage()
    fills = storage.nbytes() == tensor.numel() * tensor.element_size() > 0
    return fills and storage_uses(storage) == 2  # by the tensor, and by the name above
