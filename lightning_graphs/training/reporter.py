"""What a fit tells of its graphs: a line when they have settled, a table at its end."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_info

from lightning_graphs.reporting import render, summary_line
from lightning_graphs.training.interception import StepHandler, intercept
from lightning_graphs.training.options import Options
from lightning_graphs.training.ranks import Ranks
from lightning_graphs.training.statistics import Statistics
from lightning_graphs.training.timing import StepTiming, Stopwatch, judge

_OF_PARTS = "the optimizer step", "capturing submodules, not"
"""How reasons begin that do not say why no step was replayed."""


class FitReporter:
    """Times the first steps of a fit, draws the conclusion, and says how it went."""

    def __init__(
        self,
        trainer: Trainer,
        options: Options,
        statistics: Statistics,
        handler: StepHandler,
        switch_off: Callable[[], None],
        ranks: Ranks,
    ) -> None:
        self._ranks = ranks
        ranks.left = self.left
        self._trainer = trainer
        self._options = options
        self._statistics = statistics
        self._handler = handler
        self._switch_off = switch_off
        device = trainer.strategy.root_device
        statistics.device = device.type
        if device.type == "cuda":
            statistics.device = torch.cuda.get_device_name(device)
        self._stopwatch = Stopwatch(device)
        self._off_since: int | None = None
        self._decides = options.only_if_faster and self._stopwatch.meaningful
        self.timing = StepTiming(
            handler,
            statistics,
            self._stopwatch,
            self._settled,
            manual=not trainer.lightning_module.automatic_optimization,
            verified=self._is_verified,
        )

    def _settled(self) -> None:
        """Say what the graphs gain, once it is known, and be out of the way from then on."""
        if self._off_since is not None:
            return
        intercept(self._trainer.strategy, self._handler)
        slower = not self._judge()
        rank_zero_info(summary_line(self._statistics.report()))
        if self._statistics.verdict:
            hint = ""
            if slower and not self._options.only_if_faster:
                hint = ". GraphCapture(only_if_faster=True) switches itself off then"
            rank_zero_info(f"GraphCapture: {self._statistics.verdict}{hint}")
        if slower and self._decides:
            self.switch_off(f"switched off by only_if_faster: {self._statistics.verdict}")
        self._log()

    def switch_off(self, reason: str) -> None:
        """Let steps run eagerly from now on; all ranks begin with it at the same step."""
        self._ranks.leave(reason)

    def left(self, reason: str) -> None:
        """Release the graphs now, and say why."""
        self._switch_off()
        self._off_since = self._batches()
        self._statistics.note(reason)

    def _is_verified(self) -> bool:
        """Whether the coming step is compared with the eager one, which takes time."""
        every = self._options.verify
        return isinstance(every, int) and self._trainer.global_step % every == 0

    def _batches(self) -> int:
        """Index of the present micro-batch in the whole fit."""
        return self._trainer.fit_loop.epoch_loop.total_batch_idx

    def _judge(self) -> bool:
        """Whether graphs pay off as far as one can tell; the verdict is kept."""
        if not self._stopwatch.meaningful:
            return True
        eager = self._statistics.pace.eager
        verdict = judge(self._statistics.graphs, median(eager) if eager else None)
        self._statistics.verdict = verdict.sentence if verdict is not None else ""
        return verdict is None or verdict.profitable

    def finish(self) -> None:
        """End the report; to be called at the end of a fit, while the graphs still live."""
        self.timing.read(wait=True)
        if self._off_since is not None:
            self._statistics.eager += self._batches() - self._off_since
        self._judge()
        statistics = self._statistics
        self._explain()
        statistics.inspect()
        self._log()

    def _explain(self) -> None:
        """Give a reason where no step was replayed, and none was refused."""
        statistics = self._statistics
        refused = any(not reason.startswith(_OF_PARTS) for reason in statistics.fallbacks)
        if statistics.replayed or refused or not statistics.eager:
            return
        if statistics.waiting:
            statistics.note(statistics.waiting)
            return
        steps = f"{statistics.eager} step{'s' * (statistics.eager != 1)}"
        reason = (
            f"steps run eagerly: the fit ended after {steps}, before the first graph "
            f"(warmup_steps={self._options.warmup_steps})"
        )
        statistics.fallbacks.append(reason)  # of a short run nobody needs to be warned

    def tell(self) -> None:
        """Show the table, on rank 0."""
        rank_zero_info(f"GraphCapture:\n{render(self._statistics.report())}")

    def _log(self) -> None:
        if self._options.log_metrics:
            figures = self._statistics.report().metrics()
            for logger in self._trainer.loggers:
                logger.log_metrics(figures, step=self._trainer.global_step)
