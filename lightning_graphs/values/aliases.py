"""Lends memory of one graph to others of its pool and to callers, and watches their order."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lightning_graphs.private.torch import storage_uses, version_of


class AliasedBuffer:
    """Memory of a graph that callers may see, which no replay may overwrite as long as they do."""

    def __init__(self, tensor: Tensor) -> None:
        self._storage = tensor.untyped_storage()
        self._own_uses = 0
        self._address = tensor.data_ptr()

    def holds(self, argument: Tensor) -> bool:
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


Source = AliasedBuffer | SharedArgument
"""Memory of an earlier graph that stands for an argument of a later one."""


@dataclass(eq=False, slots=True)
class PendingBackward:
    """A forward pass whose backward has not run."""

    after: int  # place of its forward graph
    before: int  # place of its backward graph
    is_void: bool = False  # whether a graph has overwritten what the backward pass needs
    is_done: bool = False


class ReplayOrder:
    """Notices when graphs over one pool are not replayed in the order of their capture.

    What one graph had freed when another was captured, the other may use. So between a forward and
    its backward only such graphs may be replayed as were captured between the two.
    """

    def __init__(self) -> None:
        self._captured = 0
        self._pending: dict[PendingBackward, None] = {}
        self.last = -1  # place of the graph that was replayed last; -1 at the beginning

    def place(self) -> int:
        """The place of a graph that is captured now."""
        self._captured += 1
        return self._captured - 1

    @property
    def is_waiting(self) -> bool:
        """Whether a backward pass is still to come that a replay out of order would spoil."""
        return bool(self._pending)

    def begin(self) -> None:
        """Begin anew from the first graph: what is pending will not run."""
        for pending in self._pending:
            pending.is_void = True
        self._pending.clear()
        self.last = -1

    def replay(self, place: int) -> None:
        """Note a replay; costs nothing as long as replays keep to the order of capture."""
        if place != self.last + 1 and self._pending:
            spoilt = [p for p in self._pending if not p.after < place < p.before]
            for pending in spoilt:
                pending.is_void = True
                del self._pending[pending]
        self.last = place

    def wait(self, after: int, before: int) -> PendingBackward:
        """Expect the backward at one place of the forward at another."""
        pending = PendingBackward(after, before)
        self._pending[pending] = None
        return pending

    def finish(self, pending: PendingBackward) -> None:
        pending.is_done = True
        del self._pending[pending]
        self.replay(pending.before)
