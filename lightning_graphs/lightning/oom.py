"""Recovery from an out-of-memory error that graphs have caused: the step runs again eagerly."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from lightning.pytorch import Trainer
from torch import Tensor
from torch.optim import Optimizer

from lightning_graphs.errors import ReplayError, first_line
from lightning_graphs.lightning.private import logs_snapshot
from lightning_graphs.lightning.strategy import StrategyCalls
from lightning_graphs.policy.worth import MemoryBudget
from lightning_graphs.private.callsite import CallSiteFinder, add_line, calls_observed
from lightning_graphs.private.exchange import nothing, replaced
from lightning_graphs.private.generators import RandomState
from lightning_graphs.regions.lifecycle import Ranks
from lightning_graphs.regions.optimizer import scaler_of
from lightning_graphs.regions.recovery import Again, MemoryRecovery
from lightning_graphs.report.messages import Statistics
from lightning_graphs.values.snapshot import RegionState
from lightning_graphs.values.tree import parameters_of


class OomRecovery(MemoryRecovery):
    """Runs a step again eagerly after an out-of-memory error that graphs have caused.

    All graphs are released then, what the step has done is undone, and it runs again. An optimizer
    step is repeated by itself, and so is a backward pass, after its forward pass: no hook is called
    twice. A step that finds no memory then would not find it without graphs either.
    """

    exchanged = ("log",)

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
        super().__init__(trainer.lightning_module, statistics, budget, ranks, raises=raises)
        self._trainer, self._own = trainer, own
        self._manual = not self._module.automatic_optimization
        self._adds = self._manual  # nothing else changes parameters within a step
        self._outside = (partial(logs_snapshot, trainer),)
        # The strategy's methods for steps that are not captured
        self.calls = StrategyCalls(self._step_eagerly, self._backward_eagerly, self._update_eagerly)
        self.counted = 0, 0  # eager and replayed steps, as the present one began
        # Repeats the present step, which was begun outside of the strategy's methods
        self.repetition: Callable[..., Any] | None = None
        self._update_fits = -1  # the optimizer step fits next to the graphs of so many captures

    def repetition_after(self, error: Exception) -> Callable[..., Any] | None:
        """Return what runs a step again after an error; None if graphs have not caused it."""
        refused = self._unserved(error)
        if refused is None and not self._may_repeat(error):
            return None
        return partial(self._repeat, refused, first_line(error))

    def _repeat(self, refused: ReplayError | None, reason: str, *args: Any, **kwargs: Any) -> Any:
        begin = self._begin
        if begin is not None:
            begin.restore()
        self._statistics.eager, self._statistics.replayed = self.counted
        if refused is not None and begin is not None and begin.again is not None:
            return begin.again(refused, args, kwargs)
        self._statistics.ran_eagerly()
        self._give_up(reason)
        return self._own.training_step(*args, **kwargs)

    @property
    def repeats(self) -> bool:
        """Whether a step may run again after a graph has refused its replay; see :meth:`insure`."""
        return self._retries and not self._manual

    def insure(self, args: tuple[Any, ...], again: Again) -> None:
        """Take a snapshot, so that ``again`` can run the step if a graph refuses its replay."""
        self._begin, self.is_open = self._snapshot(args), True
        self._begin.again = again

    def _unserved(self, error: Exception) -> ReplayError | None:
        """Return the error with the user's line, if a graph of an insured step has raised it."""
        is_insured = self._begin is not None and self._begin.again is not None
        if not (is_insured and isinstance(error, ReplayError)):
            return None
        add_line(error, "asked for at", CallSiteFinder().of_exception(error))
        return error

    # ------------------------------------------------------------------ the strategy's own methods

    @calls_observed
    def _step_eagerly(self, *args: Any, **kwargs: Any) -> Any:
        self.begin_eagerly(args)
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
        self._statistics.eager, self._statistics.replayed = self.counted
        if refused is None:
            self._statistics.ran_eagerly()
            self._give_up(reason)
        now = now or self._snapshot(begin.args, gradients=True)
        begin.restore()
        with replaced(self._module, "log", nothing):
            if refused is not None and begin.again is not None:
                returned = begin.again(refused, begin.args, {})
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
    has_state = (p in optimizer.state for p in parameters_of(optimizer) if p.grad is not None)
    return all(group.get("fused") for group in optimizer.param_groups) and all(has_state)
