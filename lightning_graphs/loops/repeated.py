"""Calls that run again eagerly, since they found no memory beside graphs."""

from __future__ import annotations

from itertools import chain
from typing import Any

from lightning_graphs.errors import first_line
from lightning_graphs.loops.program import Program, ProgramWatch
from lightning_graphs.policy.worth import MemoryBudget
from lightning_graphs.regions.agreement import Ranks
from lightning_graphs.regions.recovery import MemoryRecovery, StateBefore
from lightning_graphs.report.messages import Statistics
from lightning_graphs.values.snapshot import OptimizerState, PythonSnapshot


class CallRecovery(MemoryRecovery):
    """Undoes all that a call has done, optimizer steps among it, and lets it run again."""

    step = "call"

    def __init__(
        self,
        program: Program,
        watch: ProgramWatch,
        statistics: Statistics,
        budget: MemoryBudget,
        ranks: Ranks,
        *,
        raises: bool,
    ) -> None:
        super().__init__(statistics, budget, ranks, raises=raises)
        self._program, self._watch = program, watch
        self.who = f"capture({program.name})"

    def _snapshot(self, args: tuple[Any, ...], *, gradients: bool = False) -> StateBefore:
        watch = self._watch
        states = [OptimizerState(one, watch.scaler) for one in watch.optimizers]
        groups = [group for one in watch.optimizers for group in one.param_groups]
        stepped = chain.from_iterable(group["params"] for group in groups)
        kept = chain.from_iterable(state.tensors for state in states)
        # A scheduler sets rates in the groups
        named = [
            (f"scheduler or group {i}", one) for i, one in enumerate([*watch.schedulers, *groups])
        ]
        outside = watch.environment().outside
        outside.assume(self._program.inner)  # it runs unfollowed
        found = StateBefore(
            self._program,
            args,
            self._budget,
            gradients=True,
            tensors=[*self._program.parameters(), *stepped, *kept],
            outside=[PythonSnapshot(named), outside.contents],
        )
        for state in states:
            found.add(state)
        return found

    def repeats_after(self, error: Exception) -> bool:
        """Whether a call may run again after an error: graphs have caused it."""
        self._error = first_line(error)
        return self._may_repeat(error)

    def undo(self) -> None:
        """Put back the state before the call, if its code has begun, and release the graphs."""
        if self._begin is not None:
            self._begin.restore()
        self._give_up(self._error)
