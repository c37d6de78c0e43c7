"""Runs steps with graphs of submodules, under Lightning's loop."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import Tensor
from torch.optim import Optimizer

from lightning_graphs.errors import ReplayError
from lightning_graphs.lightning.logs import QuickLog, log_exchanged
from lightning_graphs.lightning.private import copies_of, functions_of
from lightning_graphs.lightning.trainer import LightningContext, wrapper_of
from lightning_graphs.lightning.words import why_no_whole_step
from lightning_graphs.private.callsite import reached_by_name, with_keyword
from lightning_graphs.regions.gradients import PersistentGradients
from lightning_graphs.regions.optimizer import CapturableOptimizer, zeroed_quickly
from lightning_graphs.regions.submodules import ModuleGraphs, StepFacts
from lightning_graphs.regions.update import CapturedUpdate
from lightning_graphs.watch.reads import GlobalReads

_ASKING = frozenset({"autograd", "backward", "create_graph"})
"""Names in code that may start a backward pass, perhaps for some parameters only."""
_AGAIN = frozenset({"create_graph", "retain_graph"})
"""Keywords in code that may go through a graph more than once."""
_STARTS = frozenset(dir(LightningModule))
"""Names of methods that Lightning calls."""


def _facts_of(fit: LightningContext) -> StepFacts:
    """Collect what is known of the steps of a fit before the first one."""
    module, trainer = fit.module, fit.trainer
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    code = GlobalReads(module, fit.watch.own)
    words = code.words_of(map(type, [*module.modules(), *callbacks]))
    asks = not module.automatic_optimization or bool(words & _ASKING)
    known = functions_of(LightningModule, "optimizer_zero_grad")
    own = type(module).optimizer_zero_grad not in known
    schedulers = tuple(copies_of(GradientAccumulationScheduler))
    schedules = any(isinstance(c, schedulers) for c in callbacks)
    return StepFacts(
        module.device,
        fit.watch.environment,
        # Autograd calls DDP's reducer with each gradient, which it reduces while others follow.
        direct=not (asks or wrapper_of(trainer) is not None),
        adds=own or schedules or trainer.accumulate_grad_batches > 1,
        again=with_keyword(_AGAIN, reached_by_name(_STARTS, code.codes)),
        repeats=fit.recovery.repeats,
        may_be_whole=fit.options.by_submodules
        and not why_no_whole_step(trainer, module, fit.options.optimizer_kernel),
    )


class ModuleRunner:
    """Runs steps with graphs of submodules, and an optimizer update as a graph of its own."""

    has_failed = may_follow_values = False
    graphs = ModuleGraphs
    updates = True
    """An optimizer step may be a graph of its own."""

    def __init__(
        self, fit: LightningContext, warmup_steps: int, looks_at_shapes: bool = False
    ) -> None:
        fit.ranks.close()  # submodules exchange nothing
        if fit.progress is not None:
            fit.progress.follows = True
        trainer, module = fit.trainer, fit.module
        self._calls = fit.recovery.calls
        self._statistics, self._policy = fit.statistics, fit.policy
        self._compiled, self._recovery = fit.compiled, fit.recovery
        self._warmup_left = warmup_steps
        self._open = ExitStack()
        self._gradients = gradients = PersistentGradients(fit.recovery.gradients_held)
        verifier = fit.verifier()
        # Made first: it changes nothing, and may refuse the options.
        self._graphs = self.graphs(
            fit, _facts_of(fit), gradients, verifier, looks_at_shapes=looks_at_shapes
        )
        self._update: CapturedUpdate | None = None
        if self.updates and module.automatic_optimization and len(trainer.optimizers) == 1:
            self._update = CapturedUpdate(fit, gradients, verifier)
        state = self._graphs.state
        quick = QuickLog(module, lambda: state.stepping)
        self._open.enter_context(log_exchanged(module, quick))

    @property
    def capturables(self) -> dict[Optimizer, CapturableOptimizer | None]:
        update = self._update
        return {} if update is None else {update.optimizer: update.capturable}

    def lend_memory(self) -> bool:
        """Return False: outputs of submodules may be kept past the step, and are no copies."""
        return False

    @property
    def held(self) -> str:
        is_new = self._update is not None and self._update.is_new
        return self._graphs.memory_risk or ("update" if is_new else "")

    def close(self) -> None:
        if self._update is not None:
            self._update.close()
            self._update = None
        self._graphs.close()
        self._open.close()
        self._gradients.clear()

    # ------------------------------------------------------------------ strategy methods

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step's code, with graphs for the calls that have one."""
        if self._policy.is_over:
            self._statistics.ran_eagerly()
            return self._calls.training_step(*args, **kwargs)
        if self._warmup_left > 0:
            self._warmup_left -= 1
            self._statistics.ran_eagerly()
            with self._compiled.watching():
                return self._calls.training_step(*args, **kwargs)
        self._graphs.begin(args)
        if self._graphs.insured and self._graphs.state.replays:
            self._graphs.insured -= 1
            self._recovery.insure(args, self._again)
        return self._stepping(args, kwargs)

    def _again(self, error: ReplayError, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a step again eagerly, after a graph has refused its replay."""
        self._graphs.begin_again(error)
        return self._stepping(args, kwargs)

    def _stepping(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._graphs.state.stepping = True
        try:
            with self._graphs.watching():
                return self._calls.training_step(*args, **kwargs)
        finally:
            if self._graphs.state.has_replayed:
                self._statistics.replayed += 1
            else:
                self._statistics.ran_eagerly()
            self._graphs.end()

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the backward pass, in which calls that recompute activations stay eager."""
        state = self._graphs.state
        stepping, state.stepping = state.stepping, False
        self._gradients.has_external_references()
        try:
            with self._graphs.watching(closure_loss):
                return self._calls.backward(closure_loss, optimizer, *args, **kwargs)
        finally:
            state.stepping = stepping

    def optimizer_step(
        self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        """Replay the optimizer update if it has a graph, else let the strategy run it."""
        # An optimizer without a graph may call its closure more than once, as LBFGS does.
        update = self._update
        if update is not None and update.capturable is None:
            update = None
        if update is not None and optimizer is not update.optimizer:
            update.follow(optimizer)
            update = None
        if update is None or self._warmup_left > 0 or not update.takes_closure_once:
            returned = self._calls.optimizer_step(optimizer, closure, model, **kwargs)
            if update is not None:
                update.refuse_closure()
            return returned
        with zeroed_quickly(optimizer):
            result = closure()
        if result is None or not update.step():
            return self._calls.optimizer_step(optimizer, lambda: result, model, **kwargs)
        return result
