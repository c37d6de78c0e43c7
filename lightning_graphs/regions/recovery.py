"""Recovery from an out-of-memory error that graphs have caused: the step runs again eagerly."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_graphs.errors import GraphError, ReplayError, first_line, is_out_of_memory
from lightning_graphs.policy.worth import SETTLED, MemoryBudget
from lightning_graphs.private.callsite import stacklevel_of_user
from lightning_graphs.private.exchange import nothing
from lightning_graphs.private.generators import Generators, RandomState
from lightning_graphs.private.torch import (
    named_buffers_in,
    named_modules_in,
    named_parameters_in,
)
from lightning_graphs.regions.lifecycle import Ranks
from lightning_graphs.regions.plan import StepPlan
from lightning_graphs.report.messages import Statistics
from lightning_graphs.values.snapshot import Gradients, PythonSnapshot, Snapshot, SnapshotPart
from lightning_graphs.values.tree import leaves_of
from lightning_graphs.watch.user_code import UnregisteredTensors, iter_objects, objects_in

_NONE_YET = -1, 0


def _size(value: Any) -> int:
    """Return how many numbers the tensors of a batch have."""
    kind = type(value)
    if kind is Tensor:
        return int(value.numel())
    if kind is tuple or kind is list or kind is dict:
        return sum(map(_size, value.values() if kind is dict else value))
    is_open = isinstance(value, (Tensor, Mapping, list, tuple)) or is_dataclass(kind)
    if not (is_open or hasattr(kind, "to")):  # nor does it move to the device
        return 0
    return sum(tensor.numel() for tensor in leaves_of(value, Tensor))


_LOOKED_AT = 16
"""Eager steps ahead of the first capture whose batches are compared in size."""


def _once_more(size: int, largest: int, times: int) -> tuple[int, int]:
    """Return the largest size of batches that have found memory, and how often, after one more."""
    return size, times + 1 if size == largest else 1


Again = Callable[[ReplayError, tuple[Any, ...], dict[str, Any]], Any]
"""Runs a step once more, given why, and what it was given."""


class StateBefore(Snapshot):
    """Snapshot of the state before a step, from which the step can run again.

    It has buffers and other tensors that the step may write, the batch among them; generators and
    attributes; ``.grad`` of every parameter, and with ``gradients`` its values.

    Args:
        module: The module that is trained.
        args: What the step is given.
        budget: How much memory copies may take on the device.
        gradients: The gradients that there are may be added to.
        tensors: Others whose values are saved.
        outside: Further snapshots of what :meth:`restore_python` puts back.
    """

    def __init__(
        self,
        module: Any,
        args: tuple[Any, ...],
        budget: MemoryBudget,
        *,
        gradients: bool,
        tensors: Iterable[Tensor] = (),
        outside: Sequence[SnapshotPart] = (),
    ) -> None:
        self.args, self._outside = args, outside
        # Attributes of modules that stand for methods while graphs or their code run
        self.exchanged = {"forward"}
        self.again: Again | None = None  # runs the step from here once more; None: eagerly
        held = [*iter_objects(module), *objects_in("batch", args, {})]
        tree = named_modules_in(("", module))
        self.gradients = Gradients([parameter for _, parameter in named_parameters_in(tree)])
        self._tables: list[dict[str, Any]] = [vars(one) for _, one in tree]
        self._contents, self._generators = PythonSnapshot(held), Generators(held, module.device)
        found = [b for _, b in named_buffers_in(tree)]
        found += [*UnregisteredTensors(module, held).tensors, *tensors]
        found += self.gradients.tensors if gradients else []
        # References to each gradient, or to its memory: here, and three for a value that is saved
        self.references = 4 if gradients else 1
        random = RandomState(module.device, module.modules())
        super().__init__(found, self.gradients, random, room=budget.room_for)

    def restore(self) -> None:
        super().restore()
        self.restore_python()

    def restore_python(self) -> None:
        """Put back Python state, generators and logs."""
        kept = self.exchanged
        ours = [{key: table[key] for key in kept & table.keys()} for table in self._tables]
        self._contents.restore()
        for table, now in zip(self._tables, ours, strict=True):
            for key in kept & table.keys():
                del table[key]
            table.update(now)
        self._generators.restore()
        for part in self._outside:
            part.restore()


class MemoryHolder(Protocol):
    """Holds memory that eager code may lack."""

    @property
    def held(self) -> str:
        """What is held, another text for other captures; empty if nothing is."""


class MemoryRecovery:
    """Releases all graphs where they have caused an out-of-memory error, for a step to run again.

    They can cause one in the capture, verification or replay of a step, and in an eager step that
    is larger than any that ran next to the present graphs, where little is free. A snapshot is
    taken ahead of those.

    Args:
        module: What is trained.
        statistics: Where decisions are counted.
        budget: How much memory captures and snapshots may take.
        ranks: With several of them the error is raised, since other ranks wait.
        raises: The error is raised in any case.
    """

    runner: MemoryHolder  # what runs the steps at present
    beside: MemoryHolder | None = None  # what runs other steps, with graphs of its own
    lent: Callable[[], bool | None] = nothing  # whether graphs of those lend their memory
    step, who = "step", "GraphCapture"  # in messages
    exchanged: Collection[str] = ()  # see :class:`StateBefore`

    def __init__(
        self,
        module: Any,
        statistics: Statistics,
        budget: MemoryBudget,
        ranks: Ranks,
        *,
        raises: bool,
    ) -> None:
        self._module = module
        # Take snapshots of what else a step changes; whether that includes gradients
        self._outside: Sequence[Callable[[], SnapshotPart]] = ()
        self._adds = False
        self._statistics, self._budget, self._ranks = statistics, budget, ranks
        self._is_alone = ranks.are_one  # read here: ranks that have switched graphs off act as one
        self._retries = self._is_alone and not raises
        self.is_open = False  # :meth:`begin_step` has to finish the step before
        self._begin: StateBefore | None = None
        self._running = False  # code of the step has begun
        # What is held, after how many captures, and the size of the batch that is trained meanwhile
        self._trial: tuple[tuple[str, int], int] | None = None
        self._fitting: dict[tuple[str, int], tuple[int, int]] = {}  # -> largest size, how often
        # The size of the largest batch with a graph; captures ahead of the last one, and its size
        self._largest, self._last = 0, (0, 0)
        self._eager = 0  # the size of the largest batch ahead of the first capture
        self._reason = ""

    def _snapshot(self, args: tuple[Any, ...], *, gradients: bool = False) -> StateBefore:
        """Take a snapshot ahead of a step."""
        own, adds = (self._module, args, self._budget), gradients or self._adds
        before = StateBefore(*own, gradients=adds, outside=[take() for take in self._outside])
        before.exchanged |= {*self.exchanged}
        return before

    # ------------------------------------------------------------------ a captured step

    def before_capture(self, args: tuple[Any, ...]) -> None:
        """Require memory for a capture of a whole step, and take a snapshot if memory is tight."""
        grows = self._growth(_size(args))
        self._budget.require_room(f"A captured {self.step}", lent=self.lent(), grows=grows)
        if self._retries and not self._budget.is_roomy:
            self._begin, self.is_open = self._snapshot(args), True

    def _growth(self, size: int) -> float:
        """Estimate by how much a graph for a batch makes their memory grow, which they share.

        Eager steps of such batches would take more, next to it. It is a part of what the largest
        batch takes that ran ahead of the first capture.
        """
        captures, before = self._statistics.captures, self._last
        if captures > before[0]:
            self._largest = max(self._largest, before[1])
        self._last = captures, size
        if not (self.runner.held and self._largest):
            self._largest = 0
            return 1.0
        return max(0.0, size - self._largest) / (self._eager or self._largest)

    def forget_gradients(self, plan: StepPlan) -> None:
        """Release old gradients that the captured step zeroes before user code can read them."""
        plan.gradients.drop_old()
        if self._begin is not None:
            self._begin.gradients.forget()

    def gradients_held(self) -> list[int]:
        """Return the ``id`` of each gradient of the snapshot, once for each reference."""
        begin = self._begin
        return [] if begin is None else [*map(id, begin.gradients.tensors)] * begin.references

    def hand_out_without_copies(self, plan: StepPlan, error: Exception) -> Any:
        """Return the graph's own tensors for a replayed step that has no memory for copies.

        The graphs are released before the next step.
        """
        if not self._may_retry(error) or self._begin is None:
            self._running = True  # its graph has run: it cannot begin again
            raise error
        self._reason = first_line(error)
        self._begin.restore_python()
        return plan.hand_out(copies=False)

    @property
    def has_given_away(self) -> bool:
        """Whether what the last step has handed out lies in memory of its graph."""
        return bool(self._reason)

    # ------------------------------------------------------------------ steps in turn

    def begin_step(self) -> bool:
        """Begin another step; True if graphs are released, so that it must run eagerly."""
        self.is_open = False
        if self._reason:  # the step before was replayed, and had no memory for copies
            self._statistics.ran_eagerly()
            self._give_up(self._reason)
            return True
        if self._begin is not None and self._trial is not None:  # the step before has found memory
            holding, size = self._trial
            largest, times = self._fitting.get(holding, _NONE_YET)
            self._fitting[holding] = _once_more(size, largest, times)
        self._begin, self._trial, self._running = None, None, False
        return False

    def end_steps(self) -> None:
        """Release the graphs if they would overwrite what the last step has handed out."""
        if self._reason:
            self._give_up(self._reason)

    def begin_eagerly(self, args: tuple[Any, ...]) -> None:
        """Begin an eager step: with a snapshot if it may find no memory beside graphs."""
        held = self._held
        if self._statistics.eager < _LOOKED_AT and not self._statistics.captures:
            self._eager = max(self._eager, _size(args))
        if self._retries and self._begin is None and held:
            size = _size(args)
            holding = held, self._statistics.captures
            largest, times = self._fitting.get(holding, _NONE_YET)
            is_large = size > largest or (size == largest and times < SETTLED)
            if is_large and self._budget.is_roomy:
                self._fitting[holding] = _once_more(size, largest, times)
            elif is_large:
                self._begin, self._trial = self._snapshot(args), (holding, size)
        self._running = self.is_open = True

    @property
    def _held(self) -> str:
        return self.runner.held or ("" if self.beside is None else self.beside.held)

    def _may_repeat(self, error: Exception) -> bool:
        """Whether the step may run again, from a snapshot if its code has begun."""
        return self._may_retry(error) and (not self._running or self._begin is not None)

    def _may_retry(self, error: Exception) -> bool:
        if not is_out_of_memory(error):
            return False
        if not self._is_alone and self._held:
            why = GraphError(
                "A step that runs out of memory cannot be repeated without graphs, because other "
                "ranks are inside of its collectives.",
                first_line(error),
                "allow fewer graphs (max_graphs=...), or make the batch smaller",
            )
            warnings.warn(f"{self.who}: {why}", stacklevel=stacklevel_of_user())
        return self._retries

    def _give_up(self, reason: str) -> None:
        self._reason, self._begin = "", None
        self._ranks.leave(
            f"{self.step}s run eagerly from now on: one found no memory next to that of graphs: "
            f"{reason}"
        )
        gc.collect()  # frees what the error's traceback refers to
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
