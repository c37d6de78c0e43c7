"""Times the first steps of a fit, draws the conclusion, and says at its end how it went."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import torch

from lightning_graphs.lightning.fit import LightningContext
from lightning_graphs.policy.timing import StepTiming, Stopwatch, judge
from lightning_graphs.report import render, summary_line

_OF_PARTS = "the optimizer step", "capturing submodules, not"
"""How reasons begin that do not say why no step was replayed."""


class FitSummary:
    """Times the first steps of a fit, draws the conclusion, and says how it went."""

    def __init__(self, fit: LightningContext, switch_off: Callable[[], None]) -> None:
        self._fit = fit
        fit.ranks.left = self.left
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

    def settled(self) -> None:
        """Say what the graphs gain, now that it is known."""
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

    def left(self, reason: str) -> None:
        """Release the graphs now, and say why."""
        self._switch_off()
        self._off_since = self._batches()
        self._fit.messages.note(reason)

    def _batches(self) -> int:
        """Index of the present micro-batch in the whole fit."""
        return self._fit.trainer.fit_loop.epoch_loop.total_batch_idx

    def _judge(self) -> bool:
        """Whether graphs pay off as far as one can tell; the verdict is kept."""
        if not self._stopwatch.meaningful:
            return True
        eager = self._statistics.pace.eager
        verdict = judge(self._statistics.graphs, median(eager) if eager else None)
        self._statistics.verdict = verdict.sentence
        return verdict.profitable

    def count_rest(self) -> None:
        """Count the steps since the callback was switched off, which passed it by."""
        if self._off_since is not None:
            self._statistics.eager += self._batches() - self._off_since
            self._off_since = self._batches()

    def finish(self) -> None:
        """End the report; to be called at the end of a fit, while the graphs still live."""
        self.timing.read(wait=True)
        self.count_rest()
        self._judge()
        self._explain()
        self._log()

    def _explain(self) -> None:
        """Give a reason where no step was replayed, or none any more, and none was refused."""
        statistics = self._statistics
        refused = any(not reason.startswith(_OF_PARTS) for reason in statistics.fallbacks)
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
        statistics.fallbacks.append(reason)  # of a short run nobody needs to be warned

    def tell(self) -> None:
        self._fit.messages.say(f"GraphCapture:\n{render(self._statistics.report())}")

    def _log(self) -> None:
        if self._fit.options.log_metrics:
            figures = self._statistics.report().metrics()
            for logger in self._fit.trainer.loggers:
                logger.log_metrics(figures, step=self._fit.trainer.global_step)
