"""Steps of an evaluation: each runs eagerly, is captured, or is replayed, as a training step is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import Strategy
from torch.optim import Optimizer

from lightning_graphs.errors import CODE, GraphError
from lightning_graphs.lightning.oom import OomRecovery
from lightning_graphs.lightning.ranks import COLLECTIVE_ALONE, StepCollectives, TrainerRanks
from lightning_graphs.lightning.runner import StepRunner, StrategyHandler
from lightning_graphs.lightning.strategy import calls_of
from lightning_graphs.lightning.trainer import (
    LightningContext,
    TrainerWatch,
    client_guards,
    evaluations_left,
    syncs,
)
from lightning_graphs.policy.worth import CapturePolicy, StepTiming, Stopwatch
from lightning_graphs.private.callsite import LIBRARIES
from lightning_graphs.private.exchange import replaced
from lightning_graphs.regions.conditions import ClientGuards, Phase
from lightning_graphs.regions.plan import StepPlan, found_for_later
from lightning_graphs.regions.whole_step import EvaluationSteps
from lightning_graphs.report import summary_line
from lightning_graphs.report.messages import Messages, Statistics
from lightning_graphs.watch.assertions import OpenAssertions
from lightning_graphs.watch.user_code import CompiledCode

EVALUATIONS = ("validation_step", "test_step", "predict_step")
"""Methods of strategies, and of modules, for a step of an evaluation."""


def _in_words(name: str) -> str:
    return name.replace("_", " ").replace("predict", "prediction")


def name_evaluation(error: GraphError, name: str) -> None:
    """Give an error's remedy the names of an evaluation's methods in place of those of training."""
    code, hook = CODE.get(error.remedy, ""), f"on_{name.removesuffix('_step')}_batch"
    error.remedy, code = (
        text.replace("training_step", name).replace("on_train_batch", hook)
        for text in (error.remedy, code)
    )
    CODE.setdefault(error.remedy, code)


class EvaluationWatch(TrainerWatch):
    """The trainer in an evaluation, as client of the engine.

    Args:
        name: The method of strategy and module, one of :data:`EVALUATIONS`.
    """

    def __init__(self, trainer: Trainer, module: LightningModule, name: str) -> None:
        super().__init__(trainer, module)
        self.run = getattr(trainer.strategy, name)
        self.name = name
        self.given: Sequence[Any] = ()  # arguments of the present step
        # Results are collected on the host, as a rule, and no gradient waits for what is read
        self.kept.keeps_known = True

    @property
    def function(self) -> Any:
        """The user's method."""
        return getattr(self._module, self.name)

    @property
    def optimizes_itself(self) -> bool:
        """False: an evaluation steps no optimizer."""
        return False

    def arguments(self, given: Sequence[Any], number: Callable[..., Any]) -> list[Any]:
        """Return the further arguments of the step, with a tracer for ``batch_idx``.

        The index of the data loader, which follows, is a part of the key.
        """
        first = [number("batch_idx", lambda: self.given[1]) for _ in given[:1]]
        return [*first, *given[1:]]

    def loss_of(self, returned: Any) -> None:
        """Return None: an evaluation has no backward pass."""


class EvaluationRunner(EvaluationSteps, StepRunner):
    """Runs the steps of an evaluation as whole graphs."""

    def __init__(self, fit: LightningContext, watch: EvaluationWatch) -> None:
        self.client = watch
        self.scope, self.step = watch.name, _in_words(watch.name)
        super().__init__(fit)
        self._may_give_up = False
        self._skips_backward = bool  # there is none
        self._is_synced: Callable[[], bool] = bool  # the coming step gets the buffers of rank 0
        # Called by steps of several ranks, of which each decides alone
        self._collectives: StepCollectives | None = None
        if fit.trainer.world_size > 1:
            self._collectives, self._is_synced = StepCollectives(), partial(syncs, fit.trainer)
        statistics = fit.statistics
        self._verifier.step = lambda: statistics.eager + statistics.replayed

    def _present(self) -> list[Optimizer]:
        """List all optimizers: their rates may be logged."""
        return [*self._trainer.optimizers]

    def _client_guards(self) -> ClientGuards:
        return client_guards(self._trainer, self._phase, synced=self._ranks.ddp is not None)

    def _phase(self) -> Phase:
        """Tell which data loader the coming batch is of."""
        given = self.client.given
        return Phase(False, False, 1, given[2] if len(given) > 2 else 0)

    def close(self) -> None:
        self._cache.clear()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run, capture or replay the step for this batch."""
        self.client.given = args
        plan = self._plan_for(args, kwargs)
        if plan is None:
            return self._eager(args, kwargs)
        plan.present.batch = args[0]
        return self._replay(plan)

    def replay(
        self, args: tuple[Any, ...], *, stepping: bool = False, is_read: bool = True
    ) -> tuple[Any, ...]:
        """Replay the step for this batch, if nothing is to be decided; return its result in one.

        Empty: :meth:`training_step` is to run it. It goes on from what was found here.
        """
        life, self.client.given = self._life, args
        if self._warmup_left > 0 or self._is_synced():
            return ()
        if self._head.now is not None:
            is_theirs = self._captures_ahead or self._policy.is_over or self._collectives
            return () if is_theirs else (self._run_head(args),)
        plan = life.find(args)
        if plan is None or not life.is_ready(plan):
            self.found = found_for_later(plan)
            return ()
        plan.present.batch, self._is_read = args[0], is_read
        try:
            return (self._replay(plan),)
        finally:
            self._is_read = True

    def _plan_for(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StepPlan | None:
        if not self._is_synced() and (self._collectives is None or self._collectives.are_known):
            return super()._plan_for(args, kwargs)
        self.found = ()
        if not (kwargs or self._policy.is_over):
            self._count_key(args)
        return None

    def _eager(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._collectives is None or self._is_synced():  # DDP broadcasts its buffers
            return super()._eager(args, kwargs)
        with self._collectives.observing_step(self._module):
            return super()._eager(args, kwargs)

    # ------------------------------------------------------------------ the region

    def capture(self, call: tuple[Any, ...], key: Any) -> StepPlan | None:
        called = self._collectives
        with LIBRARIES.calling(self.client.name):
            if called is not None and called.are_called:
                raise COLLECTIVE_ALONE.refused(f"{self.client.name} calls some")
            plan = super().capture(call, key)
        graphs = [] if plan is None else plan.captured
        if plan is not None and called is not None and any(g.has_collectives for g in graphs):
            self.discard(plan)
            raise COLLECTIVE_ALONE.refused(f"{self.client.name} calls some")
        return plan

    def compare(self, plan: StepPlan, call: tuple[Any, ...]) -> bool:
        with LIBRARIES.calling(self.client.name):
            return super().compare(plan, call)

    def refuse(self, error: GraphError) -> None:
        """Tell that such steps run eagerly, or raise, with remedies for an evaluation."""
        name_evaluation(error, self.client.name)
        super().refuse(error)

    def _replay(self, plan: StepPlan) -> Any:
        if self._waits:
            self._waits = False
            self._messages.replayed()
        plan.present.is_read = self._is_read
        returned = plan.run(self._recovery.hand_out_without_copies)
        self._statistics.replayed += 1
        return returned


class EvaluationHandler(StrategyHandler):
    """Takes the place of one of the strategy's methods for steps of an evaluation."""

    def __init__(
        self,
        fit: LightningContext,
        name: str,  # of the method, one of EVALUATIONS
        beside: StrategyHandler | None = None,  # runs the training steps of the fit
    ) -> None:
        trainer, options = fit.trainer, fit.options
        if options.by_submodules:  # whole steps were not asked for
            options = replace(options, on_failure="eager")
        self.name = name
        self.statistics = statistics = Statistics(backend=fit.statistics.backend)
        fit.statistics.evaluation[name] = statistics
        messages = Messages(
            statistics,
            options.min_repeats,
            steps=f"{_in_words(name)}s",
            say=fit.messages.say,
            warn=fit.messages.warn_user,
        )
        calls = calls_of(trainer.strategy, name)
        raises = options.on_failure == "raise"
        self._ranks_of_fit = ranks = fit.ranks
        if not ranks.are_one:
            ranks = TrainerRanks(trainer, alone=True)
            ranks.on_leave = self._leave
        recovery = OomRecovery(trainer, calls, statistics, fit.budget, ranks, raises=raises)
        left = partial(evaluations_left, trainer)
        watch = EvaluationWatch(trainer, fit.module, name)
        self.assertions = OpenAssertions(
            lambda: statistics.eager + statistics.replayed,
            bool,  # nothing lasts before the end
            fit.pool.backend.synchronize,
            ranks,
            updates=False,
        )
        self._pool = pool = fit.pool.beside(fit.pool.handle)
        self._is_lent = True  # that memory, by the training steps of the fit
        own = replace(
            fit,
            pool=pool,
            assertions=self.assertions,
            options=options,
            statistics=statistics,
            messages=messages,
            policy=CapturePolicy(options, statistics, left),
            recovery=recovery,
            ranks=ranks,
            watch=watch,
            progress=None,
            no_whole_step="",
            compiled=CompiledCode(),
        )
        self._fit = own
        stopwatch = Stopwatch(trainer.strategy.root_device)
        self._is_meaningful = stopwatch.meaningful
        runner = EvaluationRunner(own, watch)
        timing = StepTiming(statistics, stopwatch, manual=True)
        self.evaluation = runner
        # It has no successor: what is no whole graph runs eagerly
        super().__init__(runner, lambda _: runner, recovery, statistics, timing, self._judge)
        recovery.beside, fit.recovery.beside = beside, self
        if beside is not None:
            recovery.lent = lambda: self._is_lent and bool(beside.held)
        self._open.callback(pool.close)
        self._open.callback(self.assertions.release)

    def take_over(self, strategy: Strategy) -> None:
        """Exchange the strategy's method, also one that user code has set."""
        self._own, self._table = getattr(strategy, self.name), vars(strategy)
        self._methods = {self.name: self.training_step}
        self._open.enter_context(replaced(strategy, self.name, self.training_step))

    def _leave(self, reason: str) -> None:
        """Run the steps of this rank eagerly from now on, and those of training on all ranks."""
        self.close()
        self._fit.messages.note(reason)
        self._ranks_of_fit.leave(reason)

    def begin(self, *, lent: bool) -> None:
        """Begin a validation of a fit, in memory that is lent by its training steps, or not.

        Their graphs and those of an evaluation may take what the others have freed. So a replay of
        one kind spoils results of the other, which is right as long as all of these are copied.
        """
        if self._is_lent and not lent:
            self._is_lent = False
            self.evaluation.forget_plans()
            self._pool.handle = self._pool.backend.new_pool()

    def end(self) -> None:
        """End a validation of a fit, whose steps may overwrite what it has handed out."""
        self._recovery.end_steps()

    # ------------------------------------------------------------------ steps without the method

    def replay_batch(self, args: tuple[Any, ...], *, is_read: bool) -> tuple[Any, ...]:
        """Replay a step as the method does, and return its result in one, where that is read.

        Empty: the method is to run it. It goes on from what was found here.
        """
        recovery, counts, method = self._recovery, self._statistics, self._methods[self.name]
        if self._timing is not None or self._table.get(self.name) != method:
            return ()
        if recovery.is_open and recovery.begin_step():
            return ()
        recovery.counted = counts.eager, counts.replayed
        try:
            return self.evaluation.replay(args, is_read=is_read)
        except Exception as error:
            recovery.repetition = recovery.repetition_after(error)
            if recovery.repetition is None:
                raise
        return ()

    def _bind(self) -> None:
        """Leave the method where it is: it repeats a step that finds no memory."""

    def finish(self) -> None:
        """Complete the report; called at the end, before the graphs are released."""
        if self._timing is not None:
            self._timing.read(wait=True)
        statistics = self.statistics
        if statistics.graphs:
            if self._is_meaningful:
                statistics.judge()
            self._fit.messages.say(f"{summary_line(statistics.report())}, of {self.name}")

    def _judge(self) -> None:
        """Let steps run eagerly from now on if graphs make them slower."""
        if not self._is_meaningful or self.statistics.judge():
            return
        if self._fit.options.only_if_faster:
            self.close()
            verdict = self.statistics.verdict
            self._fit.messages.note(f"{self.name} runs eagerly from now on: {verdict}")
