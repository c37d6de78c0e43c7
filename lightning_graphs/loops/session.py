"""The calls of one captured function: what they are captured with, timed and judged by."""

from __future__ import annotations

import atexit
import contextlib
import logging
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from statistics import median
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_graphs.device.cuda import joined_stream
from lightning_graphs.device.graph import GraphPool
from lightning_graphs.loops.function_runner import (
    EvaluationCalls,
    FunctionSteps,
    is_on_behalf_of_graphs,
)
from lightning_graphs.loops.program import Program, ProgramWatch
from lightning_graphs.loops.remedies import CONFIGURATION
from lightning_graphs.loops.repeated import CallRecovery
from lightning_graphs.policy.options import OptionError, Options
from lightning_graphs.policy.worth import (
    CapturePolicy,
    MemoryBudget,
    StepTiming,
    Stopwatch,
    judge,
)
from lightning_graphs.private.engine import ahead_of_destruction
from lightning_graphs.private.exchange import nothing
from lightning_graphs.private.torch import makes_own_graphs, why_no_cuda_graphs
from lightning_graphs.regions.conditions import flattened_once
from lightning_graphs.regions.context import TrainingContext
from lightning_graphs.regions.verify import Tolerance, Verifier
from lightning_graphs.report import summary_line
from lightning_graphs.report.messages import PATIENCE, Messages, Statistics
from lightning_graphs.watch.assertions import OpenAssertions
from lightning_graphs.watch.user_code import obstacle_in

_BACKENDS: Mapping[str, Literal["cuda", "emulated"]] = {"cuda": "cuda", "cpu": "emulated"}
_MANY = 10_000
"""Calls that are expected of a loop, whose end is not known."""
_LOOK = 64
"""After so many calls all ranks look together at the assertions of their replays."""
_LOG = logging.getLogger("lightning_graphs")


_alive: weakref.WeakSet[Calls] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Release all graphs while there is a device and a process group, at the end of the program."""
    for calls in [*_alive]:
        calls.close()


def _warn(text: str, stacklevel: int) -> None:
    # The level is that of rank_zero_warn, which has two frames more
    warnings.warn(text, stacklevel=stacklevel - 2)


class Calls:
    """Runs the calls of a function."""

    def __init__(
        self,
        function: Callable[..., Any],
        name: str,  # of the function, in messages
        given: tuple[Mapping[str, nn.Module], Mapping[str, Optimizer] | None],
        options: Options,
        statistics: Statistics,
    ) -> None:
        models, optimizers = given
        stepped = [] if optimizers is None else [*optimizers.values()]
        self._open = contextlib.ExitStack()
        self._options, self._statistics = options, statistics
        self.program = Program(function, models, stepped)
        self._device = device = self.program.device
        self._watch = ProgramWatch(self.program, stepped, evaluates=optimizers is None)
        self._processes = self._watch.processes
        who = f"capture({name})"
        parts = statistics, PATIENCE + (options.min_repeats or 0)
        say, warn = (_LOG.info, _warn) if self._processes.is_first else (nothing, nothing)
        self._messages = Messages(*parts, steps="calls", who=who, say=say, warn=warn)
        statistics.device = device.type
        self._steps: FunctionSteps | None = None
        self._timing: StepTiming | None = None
        self._assertions: OpenAssertions | None = None
        if self._may_begin(function):
            _alive.add(self)
            self._begin(evaluates=optimizers is None)

    @property
    def is_active(self) -> bool:
        """Whether calls may be captured at all."""
        return self._steps is not None and not is_on_behalf_of_graphs()

    def _may_begin(self, function: Callable[..., Any]) -> bool:
        """Whether calls may be captured on this device; says why not.

        Raises:
            CaptureError: They may not, with ``on_failure="raise"``.
            OptionError: The backend is one of another device.
        """
        options, device = self._options, self._device
        if options.backend not in ("auto", _BACKENDS.get(device.type)):
            raise OptionError(
                "backend must be 'auto', 'cuda' for a model on a GPU or 'emulated' on the CPU.",
                f"got {options.backend!r} with a model on {device}",
                "write backend='auto', or move the model ahead of the first call",
            )
        if device.type == "cpu" and options.backend == "auto":
            why = "inactive on a CPU; backend='emulated' rehearses there"
            self._messages.say(f"{self._messages.who} is {why}")
            self._statistics.fallbacks.append(why)
            return False
        reason = obstacle_in(self.program) or ""
        if device.type not in _BACKENDS:
            reason = f"it captures on NVIDIA GPUs, and the model is on {device}"
        elif device.type == "cuda" and (unsupported := why_no_cuda_graphs()):
            reason = unsupported
        elif torch.is_anomaly_enabled():
            reason = "detect_anomaly checks every operator on the host"
        elif makes_own_graphs(function):
            reason = "torch.compile(mode='reduce-overhead') has made graphs of its own"
        reason = reason or self._processes.why_not()
        if not reason:
            return True
        if options.on_failure == "raise":
            raise CONFIGURATION.refused(reason)
        self._messages.note(f"calls run eagerly: {reason}", CONFIGURATION.refused(reason))
        return False

    def _begin(self, *, evaluates: bool) -> None:
        options, statistics, device = self._options, self._statistics, self._device
        backend = statistics.backend = _BACKENDS[device.type]
        self._stream = None
        if backend == "cuda":
            self._stream = torch.cuda.Stream(device)
            statistics.device = torch.cuda.get_device_name(device)
        pool = GraphPool(stream=self._stream, keep_graphs=True, backend=backend)
        pool.annotates = options.annotate
        self._open.callback(pool.close)
        watch, processes = self._watch, self._processes
        if self._stream is not None:
            with self._on_stream():
                processes.renew()
        budget, ranks = MemoryBudget(device, options.memory), processes.ranks()
        self._ranks = ranks
        ranks.on_leave = self._leave
        self._open.callback(ranks.close)
        if not ranks.are_one:
            close = weakref.WeakMethod(self.close)
            self._open.enter_context(ahead_of_destruction(lambda: (close() or nothing)()))
        budget.shares = ranks.are_one  # NCCL's thread keeps what was reduced until it looks
        pool.is_roomy = lambda: budget.is_roomy
        timed = backend == "cuda"
        self._assertions = OpenAssertions(
            lambda: watch.calls,
            bool if ranks.are_one else lambda: watch.calls % _LOOK == 0,
            pool.backend.synchronize,
            ranks,
            updates=not evaluates,
        )
        context = TrainingContext(
            module=self.program,
            options=options,
            pool=pool,
            statistics=statistics,
            messages=self._messages,
            policy=CapturePolicy(options, statistics, lambda: _MANY, timed=timed),
            budget=budget,
            ranks=ranks,
            watch=watch,
            assertions=self._assertions,
            no_whole_step="",
        )
        tolerance = Tolerance(device.type, None)
        listened = budget, ranks, self._messages
        verifier = Verifier(options.verify, tolerance, *listened, lambda: watch.calls)
        kind = EvaluationCalls if evaluates else FunctionSteps
        parts = self.program, watch, statistics, budget, ranks
        recovery = CallRecovery(*parts, raises=options.on_failure == "raise")
        self._steps = kind(context, verifier, self._around, recovery)
        self._stopwatch = Stopwatch(device)
        self._timing = StepTiming(statistics, self._stopwatch, manual=True)

    # ------------------------------------------------------------------ calls

    def call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run, capture or replay a call."""
        steps, timing = self._steps, self._timing
        assert steps is not None, "the calls are active"
        given = self.program.arguments.given(args, kwargs)
        if timing is None:
            return steps.run(given, args, kwargs)
        timing.begin((given,))
        returned = steps.run(given, args, kwargs)
        timing.end()
        if timing.is_complete():
            self._timing = None
            self._conclude()
        return returned

    @contextlib.contextmanager
    def _around(self) -> Iterator[None]:
        """Surround a call that is no replay: it runs on the stream of captures."""
        with flattened_once(), self._on_stream():
            yield

    def _on_stream(self) -> AbstractContextManager[object]:
        if self._stream is None:
            return nullcontext()
        return joined_stream(self._device, self._stream)

    # ------------------------------------------------------------------ results

    def judge(self) -> bool:
        """Put into the report what the times say; whether graphs pay off as far as they do."""
        if self._timing is not None:
            self._timing.read()
        if self._steps is None or not self._stopwatch.meaningful:
            return True
        eager = self._statistics.step_times.eager
        verdict = judge(self._statistics.graphs, median(eager) if eager else None)
        self._statistics.verdict = verdict.sentence
        return verdict.profitable

    def _conclude(self) -> None:
        """Say what the graphs gain, once the timing is complete; end them if they gain nothing."""
        pays = self.judge()
        who, verdict = self._messages.who, self._statistics.verdict
        self._messages.say(summary_line(self._statistics.report(), who))
        if not pays and self._options.only_if_faster:
            self._ranks.leave(f"calls run eagerly from now on: {verdict}")

    def _leave(self, reason: str) -> None:
        self.close()
        self._messages.note(reason)

    def settle(self) -> None:
        """Raise what an assertion of earlier replays has failed by, on this rank."""
        error = None if self._assertions is None else self._assertions.find()
        if error is not None:
            raise error

    def close(self) -> None:
        """Release the graphs, and hand the optimizers back; may be called again."""
        steps, self._steps = self._steps, None
        if steps is not None:
            steps.close()
        self._open.close()
