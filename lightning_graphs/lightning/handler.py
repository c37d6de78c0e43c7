"""The one owner of the three strategy methods through which every training step passes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Protocol

from lightning.pytorch.strategies import Strategy
from torch import Tensor

from lightning_graphs.lightning.oom import OomRecovery
from lightning_graphs.lightning.strategy import NAMES, StepHandler
from lightning_graphs.policy.timing import StepTiming
from lightning_graphs.private.exchange import replaced
from lightning_graphs.regions.optimizer import CapturableOptimizer
from lightning_graphs.report.statistics import Statistics


class Runner(StepHandler, Protocol):
    """What runs the steps of a fit: as a whole, or with graphs of submodules."""

    has_failed: bool
    """Whether graphs of this scope come to nothing here; submodules take over."""
    may_follow_values: bool
    """Whether the last refusal may be due to a shape that follows from values."""

    @property
    def held(self) -> str:
        """What may leave too little memory for eager code that runs now; empty if nothing."""

    @property
    def capturable(self) -> CapturableOptimizer | None:
        """What keeps the optimizer capturable at present; None if its step runs eagerly."""

    def close(self) -> None:
        """Release every graph and give back what was changed; may be called again."""


class StrategyHandler:
    """Answers for the strategy from ``on_train_start`` to the end of a fit.

    A runner runs the steps. The first ones are timed, and a step that finds no memory is repeated;
    replayed steps after that pass ``training_step`` only. The scope changes here, between two
    optimizer steps.
    """

    def __init__(
        self,
        runner: Runner,
        # Makes what follows where graphs of whole steps come to nothing, perhaps because of a shape
        # that follows from values
        successor: Callable[[bool], Runner],
        recovery: OomRecovery,
        statistics: Statistics,
        timing: StepTiming,
        settled: Callable[[], None],  # called when the timing is complete
    ) -> None:
        self.runner = runner
        self._successor = successor
        self._recovery = recovery
        recovery.runner = runner
        self._statistics = statistics
        self._timing: StepTiming | None = timing
        self._settled = settled
        self._own: Callable[..., Any] = runner.training_step
        self._table: dict[str, Any] = {}
        self._methods: dict[str, Any] = {}
        self._open = contextlib.ExitStack()

    def take_over(self, strategy: Strategy) -> None:
        """Take the place of the strategy's methods, a user's own ones included."""
        self._own, self._table = strategy.training_step, vars(strategy)
        self._methods = {name: getattr(self, name) for name in NAMES}
        for name, method in self._methods.items():
            self._open.enter_context(replaced(strategy, name, method))

    def close(self) -> None:
        """Release the graphs and give the methods back; may be called again."""
        self.runner.close()
        self._open.close()

    def _bind(self) -> None:
        """Let nothing stand between the strategy and the runner where nothing has to."""
        is_direct = self._timing is None and not self.runner.has_failed
        for name in ("backward", "optimizer_step"):
            before, now = self._methods[name], getattr(self.runner if is_direct else self, name)
            self._methods[name] = now
            if self._table.get(name) == before:  # and no program's own
                self._table[name] = now

    # ------------------------------------------------------------------ strategy methods

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run it, and once more if it finds no memory."""
        recovery, timing, counts = self._recovery, self._timing, self._statistics
        if timing is not None:
            timing.begin(args)
        if recovery.is_open and recovery.begin_step():
            return self._own(*args, **kwargs)
        recovery.counted, again = (counts.eager, counts.replayed), None
        try:
            result = self.runner.training_step(*args, **kwargs)
        except Exception as error:
            again = recovery.way_on(error)
            if again is None:
                raise
        if again is not None:  # the error's traceback, and what it holds, is gone
            result = again(*args, **kwargs)
        if timing is not None and timing.manual:
            timing.end()
            if timing.is_complete():
                self._end_timing()
        elif self.runner.has_failed:
            self._bind()
        return result

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Run it; a timed step ends here unless the optimizer steps."""
        result = self.runner.backward(closure_loss, optimizer, *args, **kwargs)
        timing = self._timing
        if timing is not None and not (timing.stepping or timing.manual):
            timing.end()
        return result

    def optimizer_step(
        self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        """Run it, in the scope that there is from now on; a timed step ends here."""
        if self.runner.has_failed:
            self.runner.close()
            self.runner = self._successor(self.runner.may_follow_values)
            self._recovery.runner = self.runner
            self._bind()
        timing = self._timing
        if timing is None:
            return self.runner.optimizer_step(optimizer, closure, model, **kwargs)
        timing.stepping = True
        try:
            result = self.runner.optimizer_step(optimizer, closure, model, **kwargs)
        finally:
            timing.stepping = False
        if not timing.manual:
            timing.end()
            if timing.is_complete():
                self._end_timing()
        return result

    def _end_timing(self) -> None:
        self._timing = None
        self._bind()
        self._settled()
