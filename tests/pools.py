"""What graphs over one pool do to each other on a GPU, for the emulated backend, which has no pool.

There a capture takes memory that earlier ones of its pool have freed. So a replay spoils all that
later graphs have computed, and of earlier ones what was free when it was captured.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch
from torch import Tensor, UntypedStorage

from lightning_graphs.device.emulated import EmulatedGraph, Recording, _fill_with_sentinel
from lightning_graphs.device.trace import tensors_in
from lightning_graphs.private.torch import storage_uses

Memory = list[tuple[UntypedStorage, torch.dtype]]


def freed(recording: Recording) -> Memory:
    """The storages of a recording that nothing but itself uses, with the dtype of their values."""
    own: Counter[int] = Counter()
    for tensor in _tensors_of(recording):
        own[tensor.untyped_storage().data_ptr()] += 1
    return [
        (storage, dtype)
        for storage, dtype in recording._born
        if storage.nbytes() and storage_uses(storage) <= own[storage.data_ptr()] + 1
    ]


def _tensors_of(recording: Recording) -> Iterator[Tensor]:
    for operation in recording.operations:
        for value in (operation.args, tuple(operation.kwargs.values()), operation.result):
            yield from tensors_in(value)


class SharedPools:
    """Spoils what each replay would overwrite: ahead of it, or behind it what it has used up."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.spoilt: Counter[Any] = Counter()  # bytes, by pool
        # Of each pool its recordings, in the order of captures, with what each may overwrite
        self._pools: defaultdict[Any, WeakKeyDictionary[Recording, tuple[Memory, Memory]]]
        self._pools = defaultdict(WeakKeyDictionary)
        self._ahead: Memory = []
        begin, end, replay = (
            EmulatedGraph.capture_begin,
            EmulatedGraph.capture_end,
            EmulatedGraph.replay,
        )

        def begun(graph: EmulatedGraph, pool: Any, *rest: Any) -> None:
            self._ahead = self._freed(pool)
            begin(graph, pool, *rest)

        def ended(graph: EmulatedGraph) -> None:
            ahead = self._ahead
            end(graph)
            assert graph.recording is not None
            found = ahead, self._freed(graph.pool())
            self._pools[graph.pool()][graph.recording] = found

        def replayed(graph: EmulatedGraph) -> None:
            assert graph.recording is not None
            together = self._pools[graph.pool()]
            order, (ahead, behind) = [*together], together[graph.recording]
            later = order[order.index(graph.recording) + 1 :]
            self._spoil(graph.pool(), [*ahead, *(part for other in later for part in other._born)])
            replay(graph)
            self._spoil(graph.pool(), behind)

        monkeypatch.setattr(EmulatedGraph, "capture_begin", begun)
        monkeypatch.setattr(EmulatedGraph, "capture_end", ended)
        monkeypatch.setattr(EmulatedGraph, "replay", replayed)

    def _freed(self, pool: Any) -> Memory:
        return [part for other in [*self._pools[pool]] for part in freed(other)]

    def _spoil(self, pool: Any, memory: Memory) -> None:
        for storage, dtype in memory:
            _fill_with_sentinel(storage, dtype)
            self.spoilt[pool] += storage.nbytes()
