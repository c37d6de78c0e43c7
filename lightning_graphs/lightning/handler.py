"""What takes the place of the strategy's methods: it times steps, repeats them, changes scope."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from lightning.pytorch.strategies import Strategy
from torch import Tensor
from torch.optim import Optimizer

from lightning_graphs.lightning.oom import OomRecovery
from lightning_graphs.lightning.runner import StepRunner
from lightning_graphs.lightning.strategy import NAMES, StepHandler
from lightning_graphs.policy.worth import StepTiming
from lightning_graphs.private.exchange import replaced
from lightning_graphs.regions.optimizer import CapturableOptimizer
from lightning_graphs.report.messages import Statistics


class Runner(StepHandler, Protocol):
    """Runs the steps of a fit: as whole graphs, or with graphs of submodules."""

    may_follow_values: bool
    """Whether the last refusal may be due to a shape that follows from values."""

    @property
    def has_failed(self) -> bool:
        """Whether captures of this scope have failed, so that submodules take over."""

    @property
    def held(self) -> str:
        """Which memory of graphs eager code may lack now; empty if none."""

    def lend_memory(self) -> bool:
        """Whether other graphs over the same pool may run ahead of the next step."""

    @property
    def capturables(self) -> Mapping[Optimizer, CapturableOptimizer | None]:
        """What lets graphs step each optimizer at present; None for one whose step is eager."""

    def close(self) -> None:
        """Release every graph and put back what was exchanged; may be called again."""


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
