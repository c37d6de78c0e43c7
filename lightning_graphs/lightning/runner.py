"""Whole training steps, eager, captured or replayed; what takes the place of strategy methods."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import Strategy
from torch import Tensor
from torch.optim import Optimizer

from lightning_graphs.errors import ReplayError
from lightning_graphs.lightning.logs import LOGGED_NUMBER, QuickLog, log_exchanged
from lightning_graphs.lightning.oom import OomRecovery
from lightning_graphs.lightning.private import (
    Unrecorded,
    announce_optimizer_step,
    call_gradient_hooks,
    copies_of,
    functions_of,
    is_lightnings_closure,
    skipping_backward,
    takes_no_closure,
)
from lightning_graphs.lightning.ranks import TrainerRanks
from lightning_graphs.lightning.strategy import NAMES
from lightning_graphs.lightning.trainer import LightningContext, client_guards, wrapper_of
from lightning_graphs.lightning.words import OPTIMIZER, why_no_whole_step
from lightning_graphs.policy.worth import StepTiming
from lightning_graphs.private.callsite import reached_by_name, with_keyword
from lightning_graphs.private.exchange import nothing, replaced
from lightning_graphs.regions.conditions import ClientGuards, Phase
from lightning_graphs.regions.gradients import KEPT_LATE, PersistentGradients, zeroed_quickly
from lightning_graphs.regions.lifecycle import EAGER
from lightning_graphs.regions.optimizer import CapturableOptimizer
from lightning_graphs.regions.plan import StepPlan, found_for_later
from lightning_graphs.regions.reduction import NOT_REDUCED
from lightning_graphs.regions.submodules import ModuleGraphs, StepFacts
from lightning_graphs.regions.update import CapturedUpdate
from lightning_graphs.regions.whole_step import BY_HAND, StepRegion
from lightning_graphs.report.messages import Statistics
from lightning_graphs.values.tree import leaves_of, stepping
from lightning_graphs.watch.reads import GlobalReads

_WRAPPED = (
    "the optimizer step runs eagerly: optimizer_step hands a closure of its own to the optimizer, "
    "which may change gradients; configure_gradient_clipping or on_before_optimizer_step may do so "
    "in a captured step"
)
_FURTHER_ARGUMENTS = (
    "the optimizer step runs eagerly: optimizer_step gives it further arguments, which may change; "
    "keep them in its groups or state"
)


class StepRunner(StepRegion):
    """Runs the steps of a fit as whole graphs."""

    no_update = OPTIMIZER
    _fit: LightningContext
    _recovery: OomRecovery
    _ranks: TrainerRanks

    def __init__(self, fit: LightningContext) -> None:
        self._trainer = fit.trainer
        self._calls = fit.recovery.calls
        self._run_step = self._calls.training_step
        # The plan of the coming step, or None, if it was looked for ahead of the methods
        self.found: tuple[StepPlan | None, ...] = ()
        self._stepping = False
        self._is_read = True  # what the coming step returns
        self._closure: type | None = None  # Lightning's own
        self._skips_backward = skipping_backward(fit.trainer)
        super().__init__(fit, fit.recovery, fit.verifier(), (LOGGED_NUMBER.rule,))

    @property
    def has_failed(self) -> bool:
        """Whether whole steps have failed: all were refused, or attributes change in every step."""
        return self._life.has_failed

    def _present(self) -> list[Optimizer]:
        """List the optimizers that steps call: all of them if these optimize manually."""
        found = self._trainer.optimizers
        return [*map(stepping, found)] if self._by_hand else found[:1]

    def _client_guards(self) -> ClientGuards:
        trainer, is_present, ddp = self._trainer, self._are_present, self._ranks.ddp
        if not self._by_hand:  # a replayed step asks
            optimizer, strategy = self._optimizers[0], trainer.strategy
            is_present = lambda: strategy.optimizers[0] is optimizer  # noqa: E731
        return client_guards(trainer, self._phase, is_present, synced=ddp is not None)

    def _phase(self) -> Phase:
        """Tell which part of an accumulation window the coming step is."""
        if self._by_hand:  # it may add to gradients of earlier ones, and may step
            return BY_HAND
        window = self._trainer.accumulate_grad_batches
        zeroing = self._trainer.fit_loop.epoch_loop.batch_idx % window == 0
        return Phase(zeroing, self._stepping, window)

    def close(self) -> None:
        for optimizer in self._optimizers:
            vars(optimizer).pop("zero_grad", None)
        super().close()

    # ------------------------------------------------------------------ strategy methods

    def optimizer_step(
        self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        """Run the closure of a stepping micro-batch, then the parts that no graph has run."""
        if self._by_hand:
            return self._calls.optimizer_step(optimizer, closure, model, **kwargs)
        if optimizer is not self._optimizers[0]:
            if optimizer is not self._trainer.optimizers[0]:
                return self._calls.optimizer_step(optimizer, closure, model, **kwargs)
            self._rebind(self._watch.reason_to_rebind() or "")  # before its step, not within it
        # A closure of user code may change gradients, or call Lightning's twice, as SAM does.
        own = type(closure) is self._closure
        if not own and is_lightnings_closure(closure):
            own, self._closure = True, type(closure)
        if not own and not takes_no_closure(closure) and self._capture.in_graphs:
            self._messages.note(_WRAPPED)
        if kwargs and self._capture.in_graphs:
            self._messages.note(_FURTHER_ARGUMENTS)
        own = own and not kwargs
        self._stepping = own
        try:
            capturable = self.capturables.get(optimizer)
            if not own or capturable is None or not capturable.takes_closure_once:
                returned = self._calls.optimizer_step(optimizer, closure, model, **kwargs)
                if own and capturable is not None and (error := capturable.closure_refused()):
                    self._leave_update(error)
                self._take_back_updates()
                return returned
            result = closure()
        finally:
            self._stepping = False
            plan, self._active = self._active, None
        unscales = plan is not None and "unscale" in plan.graphs
        if plan is None or not plan.steps or (unscales and not plan.gradients.complete()):
            return self._calls.optimizer_step(optimizer, lambda: result, model, **kwargs)
        if self._observers.before_step:
            if unscales:
                plan.replay("unscale")
            call_gradient_hooks(self._trainer, self._module, optimizer)
            self._step_after_hooks(plan)
        elif vars(self._trainer.profiler).get("profile") is not Unrecorded:  # type: ignore[attr-defined]
            announce_optimizer_step(self._trainer, optimizer)
        return result

    def _step_after_hooks(self, plan: StepPlan) -> None:
        """Replay the optimizer step after hooks have run, or run it eagerly if they changed it."""
        guard = self._capture.in_graphs[0].guard
        moved = guard.numbers() != plan.conditions.hyper_parameters
        moved = moved or not self._watch.are_in_place()
        if moved or guard.is_replaced(self._trainer.current_epoch) or not plan.gradients.complete():
            self._capture.step_eagerly(plan.scaling)
            return
        plan.replay("step")  # a fused kernel also unscales, unless that ran before the hooks

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Call the hooks of a backward pass, and replay it if it has a graph of its own."""
        plan = self._active
        if plan is None:
            return self._calls.backward(closure_loss, optimizer, *args, **kwargs)
        vars(self._optimizers[0]).pop("zero_grad", None)
        plugin = self._trainer.precision_plugin
        if self._observers.before_backward:  # they see the loss as the plugin has scaled it
            closure_loss = plugin.pre_backward(closure_loss, self._module)
        else:  # the base class only calls the hooks; the scale may have moved on in the graph
            Precision.pre_backward(plugin, closure_loss, self._module)
        if "backward" in plan.graphs:
            if self._kept.has_external_references():
                self._messages.note(KEPT_LATE)
            plan.replay("backward")
        # Without a backward graph no user code has run since the forward graph.
        unseen = "backward" not in plan.graphs and self._kept.bound is plan.gradients
        plan.attach(bound=unseen)
        if self._kept.tracked is not plan.gradients:
            self._kept.track(plan.gradients)
        closure_loss = Precision.post_backward(plugin, closure_loss, self._module)
        if not self._stepping:
            self._active = None
        return closure_loss

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run, capture or replay the step for this batch."""
        plan = self._plan_for(args, kwargs)
        self._active = plan
        if plan is None:
            return self._eager(args, kwargs)
        plan.present.batch = args[0]
        return self._replay(plan)

    def replay(self, args: tuple[Any, ...], *, stepping: bool, is_read: bool = True) -> Any:
        """Replay a step as the three methods do, and return what it returns, where that is read.

        None: the methods are to run it. They go on from the plan that was :attr:`found` here, or
        from what the step has returned, which had a head but no graph behind it.
        """
        recovery, counts = self._recovery, self._statistics
        if self._warmup_left > 0 or not self.is_undivided or self._policy.is_over:
            return None
        has_head = self._head.now is not None
        if has_head and (self._captures_ahead or (stepping and not self._capture.in_graphs)):
            return None
        if recovery.is_open and recovery.begin_step():
            return None
        recovery.counted = counts.eager, counts.replayed
        self._stepping, self._is_read = stepping, is_read
        try:
            if has_head:
                returned = self._run_head(args)
            else:
                returned = self._replay_found(args, stepping=stepping)
            plan = self._active
            if plan is None:
                if has_head:
                    recovery.repetition = lambda *_, **__: returned
                return None
            vars(self._optimizers[0]).pop("zero_grad", None)
            plan.attach(bound=self._kept.bound is plan.gradients)
            if self._kept.tracked is not plan.gradients:
                self._kept.track(plan.gradients)
        except Exception as error:
            recovery.repetition = recovery.repetition_after(error)
            if recovery.repetition is None:
                raise
            return None
        finally:
            self._stepping, self._active, self._is_read = False, None, True
        return returned

    def _replay_found(self, args: tuple[Any, ...], *, stepping: bool) -> Any:
        """Replay a step for whose batch there is a plan, if nothing else is to be decided."""
        life = self._life
        plan = life.find(args)
        if plan is None or plan.steps is not stepping or not life.is_ready(plan):
            self.found = found_for_later(plan)
            return None
        self._active, plan.present.batch = plan, args[0]
        return self._replay(plan)

    # ------------------------------------------------------------------ the three phases

    def _plan_for(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StepPlan | None:
        found, self.found = self.found, ()
        is_outside = bool(kwargs) or self._skips_backward() or self._policy.is_over
        ranks = self._ranks
        if is_outside or self._warmup_left > 0 or not (ranks.ready or ranks.are_ready()):
            if not is_outside:
                self._count_key(args)
            ranks.agree(EAGER, False)
            return None
        if self.has_backward and ranks.units is not None and not ranks.units.shard():
            ranks.leave(NOT_REDUCED)
        if self.has_backward and ranks.lost:
            self._rebind(ranks.lost)
        if (shape := self._facts.foreseen.shape) is not None:
            self._foresee_head(args, shape)
        if self._head.now is not None:
            self._begins_with_head = True
            return None
        return self._life.plan_for(args, *found)

    # ------------------------------------------------------------------ eager and replayed

    def _begin_eagerly(self) -> None:
        if self._fit.progress is not None:
            self._fit.progress.mirrored = frozenset()

    def _eager(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._begins_with_head:
            return self._run_head(args)
        self._statistics.ran_eagerly()
        self._begin_eagerly()
        if self._warmup_left > 0:
            self._warmup_left -= 1
            given = leaves_of(args[:1], Tensor)
            self._facts.earlier = self._fit.watch.copies_on_host(given)
            with self._observing(is_last=not self._warmup_left):
                returned = self._run_step(*args, **kwargs)
                if self._ranks.are_one and not self._warmup_left:
                    self._fit.watch.look(returned)
            watch = self._fit.watch
            watch.logged.returned(returned, watch.function)
            return returned
        return self._run_step(*args, **kwargs)

    @contextlib.contextmanager
    def _observing(self, *, is_last: bool) -> Iterator[None]:
        """Observe the body, a step of the warm-up, for what captures would have to learn."""
        watch = self._fit.watch
        with watch.logged.watching(self._module), self._fit.compiled.watching():
            if not (is_last and self._ranks.are_one and self._policy.is_likely):
                yield
                return
            with self._facts.places.observing(self._facts.foreseen.used), self._facts.foreseeing():
                yield

    def _replay(self, plan: StepPlan) -> Any:
        if self._waits:
            self._waits = False
            self._messages.replayed()
        self._churn.replays += 1
        plan.present.is_read = self._is_read
        returned = plan.run(self._recovery.hand_out_without_copies)
        if (ddp := self._ranks.ddp) is not None:  # the replay has reduced gradients
            ddp.require_forward_param_sync = plan.conditions.phase.stepping
        if not (self._by_hand or self._observers.own_zero_grad):
            # Lightning zeroes after the forward pass, where the graph has written new gradients.
            vars(self._optimizers[0])["zero_grad"] = nothing
        if self._by_hand:
            self._active = None
            plan.attach()
            self._kept.track(plan.visible)
        self._statistics.replayed += 1
        return returned


# ------------------ In place of the strategy's methods


class StrategyHandler:
    """Takes the place of the strategy's methods from ``on_train_start`` to the end of a fit.

    A runner runs the steps. The first ones are timed, and a step that finds no memory is repeated.
    After that only ``training_step`` goes through the handler. It changes the scope, between two
    optimizer steps or, with manual optimization, ahead of a step.
    """

    def __init__(
        self,
        runner: Runner,
        # Makes the submodule runner once whole steps have failed; the flag tells whether a shape
        # that follows from values may be why
        successor: Callable[[bool], Runner],
        recovery: OomRecovery,
        statistics: Statistics,
        timing: StepTiming,
        conclude: Callable[[], None],  # called when the timing is complete
    ) -> None:
        self.runner = runner
        self._successor = successor
        self._recovery = recovery
        recovery.runner = runner
        self._statistics = statistics
        self._timing: StepTiming | None = timing
        self._by_hand = timing.manual  # the whole step is one call of ``training_step``
        self._conclude = conclude
        self._own: Callable[..., Any] = runner.training_step
        self._table: dict[str, Any] = {}
        self._methods: dict[str, Any] = {}
        self._open = contextlib.ExitStack()

    def take_over(self, strategy: Strategy) -> None:
        """Exchange the strategy's methods, also those that user code has set."""
        self._own, self._table = strategy.training_step, vars(strategy)
        self._methods = {name: getattr(self, name) for name in NAMES}
        for name, method in self._methods.items():
            self._open.enter_context(replaced(strategy, name, method))

    @property
    def held(self) -> str:
        """Which memory of graphs eager code may lack now; empty if none."""
        return self.runner.held

    def lend_memory(self) -> bool:
        """Whether graphs of an evaluation may use the memory of those of steps."""
        return not self._recovery.has_given_away and self.runner.lend_memory()

    def close(self) -> None:
        """Release the graphs and put the methods back; may be called again."""
        self.runner.close()
        self._open.close()

    def _bind(self) -> None:
        """Bind the runner's methods directly, unless steps are timed or the scope is to change."""
        is_direct = self._timing is None and (self._by_hand or not self.runner.has_failed)
        for name in ("backward", "optimizer_step"):
            before, now = self._methods[name], getattr(self.runner if is_direct else self, name)
            self._methods[name] = now
            if self._table.get(name) == before:  # not exchanged by user code since
                self._table[name] = now

    # ------------------------------------------------------------------ strategy methods

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run a step, and run it again if graphs have caused an out-of-memory error."""
        recovery, timing, counts = self._recovery, self._timing, self._statistics
        again, recovery.repetition = recovery.repetition, None
        if again is not None:
            return again(*args, **kwargs)
        if self._by_hand and self.runner.has_failed:  # later it would be within the step
            self._change_scope()
        if timing is not None:
            timing.begin(args)
        if recovery.is_open and recovery.begin_step():
            return self._own(*args, **kwargs)
        recovery.counted = counts.eager, counts.replayed
        try:
            result = self.runner.training_step(*args, **kwargs)
        except Exception as error:
            again = recovery.repetition_after(error)
            if again is None:
                raise
        if again is not None:  # the error's traceback, and what it refers to, is released
            result = again(*args, **kwargs)
        if timing is not None and self._by_hand:
            self._end_step(timing)
        elif self.runner.has_failed and not self._by_hand:
            self._bind()
        return result

    def _change_scope(self) -> None:
        """Go on with graphs of submodules."""
        self.runner.close()
        self.runner = self._successor(self.runner.may_follow_values)
        self._recovery.runner = self.runner
        self._bind()

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the backward pass; a timed step ends here unless the optimizer steps."""
        result = self.runner.backward(closure_loss, optimizer, *args, **kwargs)
        timing = self._timing
        if timing is not None and not (timing.stepping or self._by_hand):
            timing.end()
        return result

    def optimizer_step(
        self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        """Run the optimizer step, after a change of scope if one is due; end a timed step."""
        if self.runner.has_failed and not self._by_hand:
            self._change_scope()
        timing = self._timing
        if timing is None:
            return self.runner.optimizer_step(optimizer, closure, model, **kwargs)
        timing.stepping = True
        try:
            result = self.runner.optimizer_step(optimizer, closure, model, **kwargs)
        finally:
            timing.stepping = False
        if not self._by_hand:
            self._end_step(timing)
        return result

    def whole_steps(self) -> StepRunner | None:
        """Return the runner if it replays whole steps, and no method is timed or exchanged."""
        runner, table = self.runner, self._table
        if self._timing is not None or not isinstance(runner, StepRunner) or not runner.plans:
            return None
        for name, method in self._methods.items():
            if table.get(name) != method:  # also if the callback has switched itself off
                return None
        return runner

    def _end_step(self, timing: StepTiming) -> None:
        """End a timed step, and the timing itself once it has seen enough of them."""
        timing.end()
        if timing.is_complete():
            self._timing = None
            self._bind()
            self._conclude()


# ------------------ Steps with graphs of submodules

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

    has_failed = False
    """Whether captures of this scope have failed, so that submodules take over."""
    may_follow_values = False
    """Whether the last refusal may be due to a shape that follows from values."""
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
        if kwargs or update is None or self._warmup_left > 0 or not update.takes_closure_once:
            returned = self._calls.optimizer_step(optimizer, closure, model, **kwargs)
            if update is not None:
                update.refuse_closure()
            return returned
        with zeroed_quickly(optimizer):
            result = closure()
        if result is None or not update.step():
            return self._calls.optimizer_step(optimizer, lambda: result, model, **kwargs)
        return result


Runner = StepRunner | ModuleRunner
"""Runs the steps of a fit: as whole graphs, or with graphs of submodules."""
