"""What a fit is captured with, why it may not be, what it shows, and what its summary says."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from time import perf_counter
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightning_graphs.device.cuda import joined_stream
from lightning_graphs.device.graph import BACKENDS, Backend, GraphPool
from lightning_graphs.errors import CaptureError
from lightning_graphs.lightning.oom import OomRecovery
from lightning_graphs.lightning.private import cheap_contexts, step_of_loggers, updates_loggers
from lightning_graphs.lightning.ranks import TrainerRanks, why_not_captured
from lightning_graphs.lightning.runner import ModuleRunner, Runner, StepRunner
from lightning_graphs.lightning.strategy import (
    BatchTransfer,
    ProgressValues,
    calls_of,
    saving_exchanged,
)
from lightning_graphs.lightning.trainer import LightningContext, TrainerWatch, steps_left
from lightning_graphs.lightning.words import moves_batches_itself, why_no_whole_step
from lightning_graphs.policy.options import Options
from lightning_graphs.policy.worth import (
    CapturePolicy,
    Experience,
    MemoryBudget,
    StepTiming,
    Stopwatch,
)
from lightning_graphs.private.exchange import replaced
from lightning_graphs.private.torch import why_no_cuda_graphs
from lightning_graphs.regions.conditions import flattened_once
from lightning_graphs.regions.tried import in_order
from lightning_graphs.report import render, summary_line
from lightning_graphs.report.messages import Messages, Statistics
from lightning_graphs.report.report import share_of
from lightning_graphs.watch.assertions import OpenAssertions


def reason_to_stay_out(trainer: Trainer, options: Options) -> str:
    """Why this fit is not captured, in one sentence; empty if it may be."""
    device = trainer.strategy.root_device
    if device.type not in BACKENDS:
        return f"it captures on NVIDIA GPUs, and the trainer runs on {device}"
    if device.type == "cuda" and (reason := why_no_cuda_graphs()):
        return reason
    if reason := why_not_captured(trainer, options):
        return reason
    if torch.is_anomaly_enabled():
        return "detect_anomaly=True checks every operator on the host"
    return ""


def save_nothing(trainer: Trainer) -> None:
    """Let the callbacks that follow in ``on_exception`` save no state behind a failed assertion."""
    stack, ended = contextlib.ExitStack(), trainer.strategy.on_exception

    def end(exception: BaseException) -> None:
        stack.close()
        ended(exception)

    stack.enter_context(saving_exchanged(trainer.strategy, _refuse_save))
    stack.enter_context(replaced(trainer.strategy, "on_exception", end))


def _refuse_save() -> bool:
    rank_zero_warn(
        "GraphCapture: no checkpoint is saved, since its state comes after a failed assertion; "
        "go on from the one before"
    )
    return False


def refused(reason: str) -> CaptureError:
    return CaptureError(
        "GraphCapture cannot capture this fit or evaluation.",
        reason,
        "remove the reason, write scope='modules', or train without graphs (on_failure='eager')",
    )


def fit_context(
    trainer: Trainer,
    module: LightningModule,
    options: Options,
    statistics: Statistics,  # of this fit or evaluation
    stream: torch.cuda.Stream | None,  # for captures; None: a new one
    stack: contextlib.ExitStack,  # gets what is to be put back
    backend: Backend | None = None,  # None: that of the device
) -> LightningContext:
    """Make what the runners of a fit or of an evaluation share."""
    device, calls = trainer.strategy.root_device, calls_of(trainer.strategy)
    name = statistics.backend = "emulated" if backend else BACKENDS[device.type]
    own_stream = progress = None
    if name == "cuda":
        own_stream = stack.enter_context(joined_stream(device, stream))
        stack.enter_context(in_order(trainer.optimizers, device))
        if trainer.state.fn == TrainerFn.FITTING:
            progress = ProgressValues(trainer)
            stack.enter_context(progress.installed())
        if not moves_batches_itself(trainer, module):
            stack.enter_context(BatchTransfer(trainer).installed())
    stack.enter_context(cheap_contexts(trainer))
    stack.enter_context(flattened_once())
    pool = GraphPool(stream=own_stream, keep_graphs=True, backend=backend or name)
    pool.annotates = options.annotate and backend is None
    stack.callback(pool.close)
    is_fit = trainer.state.fn == TrainerFn.FITTING
    budget, ranks = MemoryBudget(device, options.memory), TrainerRanks(trainer, alone=not is_fit)
    pool.is_roomy = lambda: budget.is_roomy
    stack.callback(ranks.close)
    assertions = OpenAssertions(
        partial(getattr, trainer, "global_step"),
        partial(updates_loggers, trainer),
        pool.backend.synchronize,
        ranks,
    )
    stack.callback(assertions.release)

    def may_save() -> bool:
        assertions.settle()
        return assertions.failed is None or _refuse_save()

    stack.enter_context(saving_exchanged(trainer.strategy, may_save))
    raises = options.on_failure == "raise"
    return LightningContext(
        trainer=trainer,
        module=module,
        options=options,
        pool=pool,
        statistics=statistics,
        messages=Messages(statistics, options.min_repeats, say=rank_zero_info, warn=rank_zero_warn),
        progress=progress,
        policy=CapturePolicy(
            options,
            statistics,
            partial(steps_left, trainer),
            Experience.with_class(type(module)),
        ),
        budget=budget,
        recovery=OomRecovery(trainer, calls, statistics, budget, ranks, raises=raises),
        ranks=ranks,
        watch=TrainerWatch(trainer, module, progress),
        assertions=assertions,
        no_whole_step=why_no_whole_step(trainer, module, options.optimizer_kernel),
    )


def runner_for(fit: LightningContext) -> Runner:
    """Make the runner that the options ask for, by default that of whole steps.

    :class:`StrategyHandler` takes submodules from the next step on if whole steps fail: if the
    first capture is refused, or if attributes take new values too often.
    """
    if fit.options.scope == "step":
        return StepRunner(fit)
    if fit.options.by_submodules:
        return ModuleRunner(fit, fit.options.warmup_steps)
    if fit.no_whole_step:
        reason = f"capturing submodules, not the whole step: {fit.no_whole_step}"
        fit.messages.say(f"GraphCapture: {reason}")  # no warning: nothing is to be done
        return ModuleRunner(fit, fit.options.warmup_steps)
    return StepRunner(fit)


# ------------------ Summary of a fit

_PARTLY_EAGER = "the optimizer step"
"""The beginning of reasons that explain an eager part of a step, not an eager step."""


class FitSummary:
    """Times the first steps of a fit, judges whether graphs pay off, and says so to the user."""

    def __init__(self, fit: LightningContext, switch_off: Callable[[], None]) -> None:
        self._fit = fit
        fit.ranks.on_leave = self.on_leave
        self._statistics = statistics = fit.statistics
        self._switch_off = switch_off
        device = fit.trainer.strategy.root_device
        statistics.device = device.type
        if device.type == "cuda":
            statistics.device = torch.cuda.get_device_name(device)
        self._stopwatch = Stopwatch(device)
        self._off_since: int | None = None
        manual = not fit.module.automatic_optimization
        self.timing = StepTiming(statistics, self._stopwatch, manual=manual)

    def conclude(self) -> None:
        """Say what the graphs gain; called once, when the timing is complete."""
        if self._off_since is not None:
            return
        if self._stopwatch.meaningful:
            torch.cuda.empty_cache()  # what eager steps had, and graphs cannot take
        slower = not self._judge()
        self._fit.messages.say(summary_line(self._statistics.report()))
        if self._statistics.verdict:
            hint = ""
            if slower and not self._fit.options.only_if_faster:
                hint = ". GraphCapture(only_if_faster=True) switches itself off then"
            self._fit.messages.say(f"GraphCapture: {self._statistics.verdict}{hint}")
        if slower and self._fit.options.only_if_faster:
            self._fit.ranks.leave(f"switched off by only_if_faster: {self._statistics.verdict}")
        self._log()

    def on_leave(self, reason: str) -> None:
        """Switch the callback off for the rest of the fit, and say why."""
        self._switch_off()
        self._off_since = self._batches()
        self._fit.messages.note(reason)

    def _batches(self) -> int:
        """Return the index of the present micro-batch in the whole fit."""
        return self._fit.trainer.fit_loop.epoch_loop.total_batch_idx

    def _judge(self) -> bool:
        """Tell whether graphs pay off by the times so far, and put the verdict into the report."""
        return not self._stopwatch.meaningful or self._statistics.judge()

    def count_rest(self) -> None:
        """Count as eager the steps that ran since the callback was switched off."""
        if self._off_since is not None:
            self._statistics.ran_eagerly(self._batches() - self._off_since)
            self._off_since = self._batches()

    def counted(self) -> tuple[int, int]:
        """Return how many steps were replayed so far, and how many ran eagerly."""
        self.count_rest()
        return self._statistics.replayed, self._statistics.eager

    def finish(self) -> None:
        """Complete the report; called at the end of a fit, before the graphs are released."""
        self.timing.read(wait=True)
        self.count_rest()
        self._judge()
        self._explain()
        self._log()

    def _explain(self) -> None:
        """Report why steps ran eagerly, if none of them was refused."""
        statistics = self._statistics
        refused = any(not reason.startswith(_PARTLY_EAGER) for reason in statistics.fallbacks)
        if statistics.waiting and not refused:
            self._fit.messages.note(statistics.waiting)
        if statistics.waiting or statistics.replayed or refused or not statistics.eager:
            return
        steps = f"{statistics.eager} step{'s' * (statistics.eager != 1)}"
        options = self._fit.options
        waits = "" if options.min_repeats is None else f", min_repeats={options.min_repeats}"
        reason = (
            f"steps run eagerly: the fit ended after {steps}, before the first graph "
            f"(warmup_steps={options.warmup_steps}{waits}); longer fits have graphs"
        )
        if captures := sum(record.captures for record in statistics.graphs):
            reason = (
                f"steps run eagerly: no step came back to a capture in the {steps} of the fit "
                f"(captures: {captures})"
            )
        statistics.fallbacks.append(reason)  # a short run is no reason for a warning

    def tell(self) -> None:
        self._fit.messages.say(f"GraphCapture:\n{render(self._statistics.report())}")

    def _log(self) -> None:
        if self._fit.options.log_metrics:
            figures = self._statistics.report().metrics()
            for logger in self._fit.trainer.loggers:
                logger.log_metrics(figures, step=self._fit.trainer.global_step)


# ------------------ What is shown while it runs

SHARE, TIME = "graphs/replayed_percent", "graphs/ms_per_step"


@contextlib.contextmanager
def rate_shown(
    callback: Callback, trainer: Trainer, count: Callable[[], tuple[int, int]], *, logs: bool
) -> Iterator[StepRate | None]:
    """Let the bar show ``graphs=98 %`` and, if asked, the loggers the time of a step.

    The bar asks for it when it is drawn, and a step does nothing.

    Args:
        callback: Its hook is exchanged, if loggers get figures.
        trainer: Its bar is that of Lightning, or one that is derived from Lightning's.
        count: Returns how many steps were replayed, and how many ran eagerly.
        logs: Loggers get figures.
    """
    bar: Any = trainer.progress_bar_callback
    with contextlib.ExitStack() as stack:
        if bar is not None:
            own = bar.get_metrics

            def get_metrics(trainer: Trainer, module: LightningModule) -> dict[str, Any]:
                replayed, eager = count()
                return {"graphs": share_of(replayed, eager), **own(trainer, module)}

            stack.enter_context(replaced(bar, "get_metrics", get_metrics))
        rate = StepRate(trainer, count) if logs else None
        if rate is not None:
            hook = replaced(callback, "on_train_batch_end", rate.on_train_batch_end)
            stack.enter_context(hook)
        yield rate


class StepRate:
    """Logs the time of a step, and the share of replayed ones, as often as Lightning logs.

    The time is that of the clock, between two entries of the log: all that a step takes, the data
    loader included, and no validation.

    Args:
        trainer: Its loggers get the figures.
        count: Returns how many steps were replayed, and how many ran eagerly.
    """

    def __init__(self, trainer: Trainer, count: Callable[[], tuple[int, int]]) -> None:
        self._trainer = trainer
        self._count = count
        self._logged: int | None = None  # the step of the last entry
        self.restart()

    def restart(self) -> None:
        """Begin to measure, behind what is no part of a step."""
        self._began = perf_counter()
        self._counted = self._count()

    def on_train_batch_end(self, *_: object) -> None:
        """Log, if Lightning does after this step; in place of the callback's hook."""
        step = step_of_loggers(self._trainer)
        if step == self._logged or not updates_loggers(self._trainer):
            return
        self._logged = step
        before, now = self._counted, self._count()
        replayed, eager = (b - a for a, b in zip(before, now, strict=True))
        if not (steps := replayed + eager):
            return
        ms = (perf_counter() - self._began) * 1e3
        figures = {TIME: ms / steps, SHARE: 100.0 * replayed / steps}
        for logger in self._trainer.loggers:
            logger.log_metrics(figures, step=step)
        self.restart()
