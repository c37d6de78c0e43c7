"""Recovery from an out-of-memory error that graphs have caused: the step runs again eagerly."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer

from lightning_graphs.errors import GraphError, ReplayError, first_line, is_out_of_memory
from lightning_graphs.lightning.private import logs_snapshot
from lightning_graphs.lightning.ranks import Ranks
from lightning_graphs.lightning.strategy import StrategyCalls
from lightning_graphs.policy.worth import SETTLED, MemoryBudget
from lightning_graphs.private.callsite import (
    CallSiteFinder,
    add_line,
    calls_observed,
    stacklevel_of_user,
)
from lightning_graphs.private.exchange import nothing, replaced
from lightning_graphs.private.generators import Generators, RandomState
from lightning_graphs.regions.optimizer import scaler_of
from lightning_graphs.regions.plan import StepPlan
from lightning_graphs.report.messages import Statistics
from lightning_graphs.values.snapshot import Gradients, PythonSnapshot, RegionState, Snapshot
from lightning_graphs.values.tree import leaves_of
from lightning_graphs.watch.user_code import UnregisteredTensors, iter_objects, objects_in

Again = Callable[[ReplayError, tuple[Any, ...], dict[str, Any]], Any]
"""Runs a step once more, given why, and what ``training_step`` was given."""

_EXCHANGED = frozenset({"forward", "log"})
"""Attributes of modules that stand for methods while graphs or their code run."""
_NONE_YET = -1, 0


def _once_more(size: int, largest: int, times: int) -> tuple[int, int]:
    """Return the largest size of batches that have found memory, and how often, after one more."""
    return size, times + 1 if size == largest else 1


class StepBegin(Snapshot):
    """Snapshot of the state before a step, from which the step can run again.

    It has buffers and other tensors that the step may write, the batch among them; generators,
    attributes, metrics and logs; ``.grad`` of every parameter, and with ``gradients`` its values.
    Parameters and the optimizer's state do not change before the optimizer steps.
    """

    def __init__(
        self,
        trainer: Trainer,
        module: LightningModule,
        args: tuple[Any, ...],
        budget: MemoryBudget,
        *,
        gradients: bool,  # the gradients that there are may be added to
    ) -> None:
        self.args = args
        held = [*iter_objects(module), *objects_in("batch", args, {})]
        self.gradients = Gradients(module.parameters())
        self._tables = list(map(vars, module.modules()))
        self._contents, self._generators = PythonSnapshot(held), Generators(held, module.device)
        self._logs = logs_snapshot(trainer)
        tensors = [*module.buffers(), *UnregisteredTensors(module, held).tensors]
        tensors += self.gradients.tensors if gradients else []
        # References to each gradient, or to its memory: here, and three for a value that is saved
        self.references = 4 if gradients else 1
        random = RandomState(module.device, module.modules())
        super().__init__(tensors, self.gradients, random, room=budget.room_for)

    def restore(self) -> None:
        super().restore()
        self.restore_python()

    def restore_python(self) -> None:
        """Put back Python state, generators and logs."""
        ours = [{key: table[key] for key in _EXCHANGED & table.keys()} for table in self._tables]
        self._contents.restore()
        for table, now in zip(self._tables, ours, strict=True):
            for key in _EXCHANGED & table.keys():
                del table[key]
            table.update(now)
        self._generators.restore()
        self._logs.restore()


class Holder(Protocol):
    """Holds memory that eager code may lack."""

    @property
    def held(self) -> str:
        """What is held, another text for other captures; empty if nothing is."""


class OomRecovery:
    """Runs a step again eagerly after an out-of-memory error that graphs have caused.

    Graphs can cause an out-of-memory error in two cases: in the first observation, capture,
    verification or replay of a step, and in an eager step that is larger than any that ran next to
    the present graphs, where little is free. Then all graphs are released, what the step has done
    is undone, and it runs again. An optimizer step is repeated by itself, and so is a backward
    pass, after its forward pass: no hook is called twice. A step that finds no memory then would
    not find it without graphs either.
    """

    runner: Holder  # what runs the steps at present
    beside: Holder | None = None  # what runs other steps of the fit, with graphs of its own
    lent: Callable[[], bool | None] = nothing  # whether graphs of those lend their memory

    def __init__(
        self,
        trainer: Trainer,
        own: StrategyCalls,  # the strategy's own methods
        statistics: Statistics,
        budget: MemoryBudget,  # how much memory captures and snapshots may take
        ranks: Ranks,  # with several of them the error is raised, since other ranks wait
        *,
        raises: bool,  # the error is raised in any case
    ) -> None:
        self._trainer = trainer
        self._module = module = trainer.lightning_module
        self._own = own
        self._statistics = statistics
        self._budget = budget
        self._ranks = ranks
        self._is_alone = ranks.are_one  # read here: ranks that have switched graphs off act as one
        self._retries = self._is_alone and not raises
        self._manual = not module.automatic_optimization
        # The strategy's methods for steps that are not captured
        self.calls = StrategyCalls(self._step_eagerly, self._backward_eagerly, self._update_eagerly)
        self.is_open = False  # :meth:`begin_step` has to finish the step before
        self.counted = 0, 0  # eager and replayed steps, as the present one began
        self._begin: StepBegin | None = None
        self._running = False  # user code of the step has begun
        # What is held, after how many captures, and the size of the batch that is trained meanwhile
        self._trial: tuple[tuple[str, int], int] | None = None
        self._fitting: dict[tuple[str, int], tuple[int, int]] = {}  # -> largest size, how often
        self._reason = ""
        self._again: Again | None = None
        # Repeats the present step, which was begun outside of the strategy's methods
        self.repetition: Callable[..., Any] | None = None
        self._update_fits = -1  # the optimizer step fits next to the graphs of so many captures

    def before_capture(self, args: tuple[Any, ...]) -> None:
        """Require memory for a capture of a whole step, and take a snapshot if memory is tight."""
        self._budget.require_room("A captured step", lent=self.lent())
        if self._retries and not self._budget.is_roomy:
            self._begin, self.is_open = self._snapshot(args), True

    def forget_gradients(self, plan: StepPlan) -> None:
        """Release old gradients that the captured step zeroes before user code can read them."""
        plan.gradients.drop_old()
        if self._begin is not None:
            self._begin.gradients.forget()

    def gradients_held(self) -> list[int]:
        """Return the ``id`` of each gradient of the snapshot, once for each reference."""
        begin = self._begin
        return [] if begin is None else [*map(id, begin.gradients.tensors)] * begin.references

    def _snapshot(self, args: tuple[Any, ...], *, gradients: bool = False) -> StepBegin:
        gradients |= self._manual
        return StepBegin(self._trainer, self._module, args, self._budget, gradients=gradients)

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
        self._begin, self._trial, self._running, self._again = None, None, False, None
        return False

    def repetition_after(self, error: Exception) -> Callable[..., Any] | None:
        """Return what runs a step again after an error; None if graphs have not caused it."""
        refused = self._unserved(error)
        if refused is None and (
            not self._may_retry(error) or (self._running and self._begin is None)
        ):
            return None
        return partial(self._repeat, refused, first_line(error))

    def _repeat(self, refused: ReplayError | None, reason: str, *args: Any, **kwargs: Any) -> Any:
        if self._begin is not None:
            self._begin.restore()
        if refused is not None and self._again is not None:
            (self._statistics.eager, self._statistics.replayed) = self.counted
            return self._again(refused, args, kwargs)
        self._count_as_eager()
        self._give_up(reason)
        return self._own.training_step(*args, **kwargs)

    def _count_as_eager(self) -> None:
        self._statistics.eager, self._statistics.replayed = self.counted
        self._statistics.ran_eagerly()

    @property
    def repeats(self) -> bool:
        """Whether a step may run again after a graph has refused its replay; see :meth:`insure`."""
        return self._retries and not self._manual

    def insure(self, args: tuple[Any, ...], again: Again) -> None:
        """Take a snapshot, so that ``again`` can run the step if a graph refuses its replay."""
        self._begin, self._again, self.is_open = self._snapshot(args), again, True

    def _unserved(self, error: Exception) -> ReplayError | None:
        """Return the error with the user's line, if a graph of an insured step has raised it."""
        if self._again is None or not isinstance(error, ReplayError):
            return None
        add_line(error, "asked for at", CallSiteFinder().of_exception(error))
        return error

    def hand_out_without_copies(self, plan: StepPlan, error: Exception) -> Any:
        """Return the graph's own tensors for a replayed step that has no memory for copies.

        The graphs are released before the next step.
        """
        if not self._may_retry(error) or self._begin is None:
            raise error
        self._reason = first_line(error)
        self._begin.restore_python()
        return plan.hand_out(copies=False)

    @property
    def has_given_away(self) -> bool:
        """Whether what the last step has handed out lies in memory of its graph."""
        return bool(self._reason)

    def end_steps(self) -> None:
        """Release the graphs if they would overwrite what the last step has handed out."""
        if self._reason:
            self._give_up(self._reason)

    @property
    def _held(self) -> str:
        return self.runner.held or ("" if self.beside is None else self.beside.held)

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
            warnings.warn(f"GraphCapture: {why}", stacklevel=stacklevel_of_user())
        return self._retries

    def _give_up(self, reason: str) -> None:
        self._reason, self._begin = "", None
        self._ranks.leave(
            f"steps run eagerly from now on: one found no memory beside what graphs hold: {reason}"
        )
        gc.collect()  # frees what the error's traceback refers to
        if self._module.device.type == "cuda":
            torch.cuda.empty_cache()

    # ------------------------------------------------------------------ the strategy's own methods

    @calls_observed
    def _step_eagerly(self, *args: Any, **kwargs: Any) -> Any:
        held = self._held
        if self._retries and self._begin is None and held:
            size = sum(t.numel() for t in leaves_of(args, Tensor))
            holding = held, self._statistics.captures
            largest, times = self._fitting.get(holding, _NONE_YET)
            is_large = size > largest or (size == largest and times < SETTLED)
            if is_large and self._budget.is_roomy:
                self._fitting[holding] = _once_more(size, largest, times)
            elif is_large:
                self._begin, self._trial = self._snapshot(args), (holding, size)
        self._running = self.is_open = True
        return self._own.training_step(*args, **kwargs)

    @calls_observed
    def _backward_eagerly(
        self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any
    ) -> Any:
        plugin = self._trainer.precision_plugin
        if self._begin is None or self._manual:
            return self._own.backward(closure_loss, optimizer, *args, **kwargs)
        backward = partial(self._backward, plugin.backward, closure_loss)
        with replaced(plugin, "backward", backward):
            return self._own.backward(closure_loss, optimizer, *args, **kwargs)

    def _backward(
        self,
        own: Callable[..., None],
        closure_loss: Tensor,
        loss: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Run the backward pass without the hooks around it, again if it finds no memory."""
        begin, now = self._begin, None
        assert begin is not None
        try:
            now = self._snapshot(begin.args, gradients=True)
            own(loss, *args, **kwargs)
            return
        except Exception as error:
            refused = self._unserved(error)
            if refused is None and not self._may_retry(error):
                raise
            reason = first_line(error)
        for tensor in (closure_loss, loss):
            tensor.detach_()  # frees the autograd graph, also if user code holds the loss
        self._count_as_eager()
        if refused is None:
            self._give_up(reason)
        now = now or self._snapshot(begin.args, gradients=True)
        begin.restore()
        with replaced(self._module, "log", nothing):
            if refused is not None and self._again is not None:
                (self._statistics.eager, self._statistics.replayed) = self.counted
                returned = self._again(refused, begin.args, {})
            else:
                returned = self._own.training_step(*begin.args)
        loss = returned["loss"] if isinstance(returned, Mapping) else returned
        fresh = loss / self._trainer.accumulate_grad_batches
        del returned
        now.restore()
        scaler = scaler_of(self._trainer.precision_plugin)
        own(fresh if scaler is None else scaler.scale(fresh), *args, **kwargs)

    def _update_eagerly(
        self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        if self._manual:  # steps of other optimizers cannot be undone
            self._begin = None
        captures = self._statistics.captures
        if self._manual or self._update_fits == captures:
            return self._own.optimizer_step(optimizer, closure, model, **kwargs)
        with replaced(optimizer, "step", partial(self._step, optimizer, optimizer.step)):
            result = self._own.optimizer_step(optimizer, closure, model, **kwargs)
        if self._begin is not None:  # later ones take no more memory
            self._update_fits = captures
        return result

    def _step(
        self,
        optimizer: Optimizer,
        own: Callable[..., Any],
        closure: Callable[[], Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run the optimizer step without the hooks around it, again if it finds no memory."""
        undo: Callable[[], None] | None = None
        results = []

        def keep() -> None:
            nonlocal undo
            if self._begin is not None and not _takes_no_memory(optimizer):
                undo = nothing
                state = RegionState.of_step(
                    self._module, [optimizer], scaler_of(self._trainer.precision_plugin)
                )
                random = RandomState(self._module.device, self._module.modules())
                undo = state.take(self._budget.room_for, random).restore

        def counted() -> Any:
            assert closure is not None
            results.append(closure())
            if len(results) == 1:
                keep()
            return results[-1]

        if closure is None:
            keep()
        try:
            return own(None if closure is None else counted, **kwargs)
        except Exception as error:
            if not self._may_retry(error) or undo is None or len(results) > 1:
                raise
            reason = first_line(error)
        undo()
        self._give_up(reason)
        return own(None if closure is None else partial(results.__getitem__, 0), **kwargs)


def _takes_no_memory(optimizer: Optimizer) -> bool:
    groups = optimizer.param_groups
    parameters = [p for group in groups for p in group["params"] if p.grad is not None]
    return all(group.get("fused") for group in groups) and all(
        parameter in optimizer.state for parameter in parameters
    )
