"""Outputs that are handed out without a copy, because the next graph reads them in place."""

from __future__ import annotations

from torch import Tensor

from lightning_graphs.core.torch_private import storage_uses


class LentMemory:
    """Memory of a graph that callers may see, and whether somebody still looks at it.

    A graph must not be replayed over memory that a caller has kept from the replay before.

    Args:
        tensor: The graph's own tensor.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._storage = tensor.untyped_storage()
        self._own_uses = 0
        self.address = tensor.data_ptr()

    def settle(self) -> None:
        """Count who uses the memory now: the graphs themselves, and no caller yet."""
        self._own_uses = storage_uses(self._storage)

    @property
    def is_kept(self) -> bool:
        """Whether an alias of the memory is alive, by itself or inside of an autograd graph."""
        uses = storage_uses(self._storage)
        if uses < self._own_uses:  # something of the capture itself was released late
            self._own_uses = uses
        return uses > self._own_uses
