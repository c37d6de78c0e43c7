"""What a captured function does on the host: each replay does it again, after its graphs.

A plain loop logs what its function has returned. What the function reads on the host, only to
return or to store it, is read behind the graphs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from torch import Tensor

from lightning_graphs.device.rules import Obstacle
from lightning_graphs.regions.conditions import Instruction, in_turn
from lightning_graphs.watch.late import KeptCalls, LateCalls

CHANGED_LATER = Obstacle(
    "A tensor that a captured function reads on the host, behind its graphs, must still have its "
    "value then.",
    "read a copy: tensor.clone().item()",
    kind="host-read",
    code="value = total.clone().item()",
)


class NoLogs:
    """Records what a step logs: nothing, since a plain loop logs what the step has returned."""

    def __init__(self) -> None:
        self.live: Callable[[Any], Callable[[], Any] | None] = lambda _: None
        self._at_end: list[Instruction] = []

    def recording(self) -> AbstractContextManager[None]:
        return nullcontext()

    def keeping(self) -> AbstractContextManager[object]:
        return nullcontext()

    def finish(self) -> None:
        """Called at the end of the step's own code."""

    def reissue(self) -> None:
        """Log again, after a replay."""

    @property
    def last(self) -> Instruction | None:
        return in_turn(self._at_end)

    def logged(self) -> list[tuple[str, Tensor]]:
        return []

    def at_end(self, instruction: Instruction) -> None:
        self._at_end.append(instruction)


class Kept:
    """What is known of reads on the host that replays repeat behind their graphs."""

    def __init__(self, calls: KeptCalls) -> None:
        self.calls = calls
        self.copied: set[str] = set()  # names of those that are given copies
        self._has_learned = False

    def copy(self, name: str) -> None:
        """Let the next capture give a read a copy."""
        self.copied.add(name)
        self._has_learned = True

    def learns(self) -> bool:
        """Whether the next capture goes otherwise about it than the last one."""
        learned, self._has_learned = self._has_learned, False
        return learned


class HostReads(NoLogs):
    """Keeps reads on the host back, and leaves in wrappers of DDP what the function leaves there.

    Args:
        program: The module that is trained.
        kept: Knows which reads are kept back.
        wrappers: Those of DDP; in them it stands whether buffers are sent next.
    """

    def __init__(self, program: Any, kept: Kept, wrappers: Sequence[Any]) -> None:
        super().__init__()
        self._kept, self._wrappers = kept, wrappers
        state = (*program.parameters(), *program.buffers())
        self._late = LateCalls([], state, program.device.type, kept.copied)

    @contextlib.contextmanager
    def _recording(self) -> Any:
        with self._kept.calls.exchanged(self._late.keep):
            yield

    def recording(self) -> AbstractContextManager[None]:
        return self._recording() if self._kept.calls.known else nullcontext()

    def keeping(self) -> AbstractContextManager[object]:
        return (
            self._kept.calls.of_torch(self._late.keep) if self._kept.calls.known else nullcontext()
        )

    def finish(self) -> None:
        for name in self._late.finish():
            self._kept.copy(name)
            raise CHANGED_LATER.refused(f"the tensor of {name} is changed in place")
        for ddp in self._wrappers:
            syncs = ddp.require_forward_param_sync
            self.at_end(partial(setattr, ddp, "require_forward_param_sync", syncs))

    def reissue(self) -> None:
        for call in self._late.all:
            call.reissue()
