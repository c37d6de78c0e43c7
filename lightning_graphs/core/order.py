"""Graphs over one pool must replay in the order of their capture, and here it is noticed."""

from __future__ import annotations


class PendingBackward:
    """A forward pass whose backward has not run.

    Attributes:
        after: Place of its forward graph.
        before: Place of its backward graph.
        is_void: Whether a graph has overwritten what the backward pass needs.
        is_done: Whether the backward pass has run.
    """

    __slots__ = ("after", "before", "is_done", "is_void")

    def __init__(self, after: int, before: int) -> None:
        self.after = after
        self.before = before
        self.is_void = self.is_done = False


class ReplayOrder:
    """Notices when graphs over one pool are not replayed in the order of their capture.

    What one graph had freed when another was captured, the other may use. So between a forward and
    its backward only such graphs may be replayed as were captured between the two.

    Attributes:
        last: Place of the graph that was replayed last; -1 at the beginning.
    """

    def __init__(self) -> None:
        self._captured = 0
        self._pending: dict[PendingBackward, None] = {}
        self.last = -1

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
        """Expect the backward at place ``before`` of the forward at place ``after``."""
        pending = PendingBackward(after, before)
        self._pending[pending] = None
        return pending

    def finish(self, pending: PendingBackward) -> None:
        """Note the replay of a backward graph."""
        pending.is_done = True
        del self._pending[pending]
        self.replay(pending.before)
