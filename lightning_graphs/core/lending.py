"""Memory that graphs share without a copy: what one has written or was given, another reads."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from lightning_graphs.core.torch_private import storage_uses, version_of


class Source(Protocol):
    """Memory of an earlier graph that stands for an argument of a later one."""

    def holds(self, argument: Tensor) -> bool:
        """Whether the value of this argument is in the memory now."""


class LentMemory:
    """Memory of a graph that callers may see, and whether somebody still looks at it.

    A graph must not be replayed over memory that a caller has kept from the replay before.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._storage = tensor.untyped_storage()
        self._own_uses = 0
        self._address = tensor.data_ptr()

    def holds(self, argument: Tensor) -> bool:
        """Whether this argument is the lent tensor itself."""
        return argument.data_ptr() == self._address

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


class SharedArgument:
    """The static input of the first of several calls that are given the same tensor."""

    def __init__(self) -> None:
        self._tensor: Tensor | None = None
        self._version = 0

    def put(self, argument: Tensor) -> None:
        """Note whose value has been copied in; it is kept, so that no other is mistaken for it."""
        if argument.is_inference():  # nobody counts how often it is written
            self._tensor = None
            return
        self._tensor = argument
        self._version = version_of(argument)

    def holds(self, argument: Tensor) -> bool:
        """Whether this argument is the very tensor, and unchanged since."""
        return argument is self._tensor and version_of(argument) == self._version
