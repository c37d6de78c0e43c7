"""Tells the user of captures and of eager steps, and at the end of all graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from statistics import median
from types import CodeType

import torch
from lightning.pytorch.utilities import rank_zero_info

from lightning_graphs.errors import CaptureError, GraphError
from lightning_graphs.lightning.context import TrainingContext
from lightning_graphs.lightning.options import Options
from lightning_graphs.policy.timing import StepTiming, Stopwatch, judge
from lightning_graphs.policy.worth import EagerStreak
from lightning_graphs.private.callsite import named_at
from lightning_graphs.regions.replay_guards import OF_THE_TRAINER
from lightning_graphs.report import render, summary_line
from lightning_graphs.report.statistics import Statistics, conditions_of, differences, listed
from lightning_graphs.values.signature import Signature
from lightning_graphs.watch.refusals import RaisedInCapture


class Messages:
    """Decides what is worth saying, and says it through :class:`Statistics`."""

    def __init__(self, options: Options, statistics: Statistics) -> None:
        self._options = options
        self._statistics = statistics
        self._waiting = EagerStreak(options, statistics, differences)
        self._latest: Signature | None = None

    def replayed(self) -> None:
        """Note that graphs are of use: what came before is forgotten."""
        self._waiting.end()

    def captured(self, signature: Signature) -> None:
        """Count a capture, and say what tells it from the last one."""
        self._statistics.captures += 1
        before, self._latest = self._latest, signature
        if before is not None and (change := listed(differences(before, signature))):
            self._statistics.recaptured(f"captured another graph, because {change}", change)

    def waiting(
        self,
        signature: Signature,  # of the step
        why_not: str,  # why it is not captured
        # What reads a Python value of the batch that was another one before, if anything
        read: CaptureError | None,
        codes: Iterable[CodeType],  # what captured steps have run
        *,
        is_new: bool,  # no step before had a batch like this one
        at_once: bool,  # do not wait for more of them
    ) -> bool:
        """Say once, when eager steps go on and on, why they are."""
        before = self._latest
        moved = _moved(before, signature) if before is not None else []
        say = read is None and not moved
        is_time = self._waiting.add(signature, why_not, is_new=is_new, at_once=at_once, say=say)
        if moved and is_time:
            read = CaptureError(
                "A graph would freeze an attribute or a global variable, which keeps changing.",
                "; ".join(moved) + named_at(moved[0], codes),
                "keep the value in a buffer that a hook fills: register_buffer(...) in __init__, "
                "and fill_(...) on it in on_train_batch_start",
            )
        if read is None or not is_time:
            return False
        self._say_refused(read, has_graphs=False)
        return True

    def refused(self, error: GraphError, *, has_graphs: bool) -> None:
        """Warn, or raise with ``on_failure="raise"``, that a step cannot be captured."""
        if self._options.on_failure == "raise":
            raise (error.__cause__ or error) if isinstance(error, RaisedInCapture) else error
        self._say_refused(error, has_graphs=has_graphs)

    def _say_refused(self, error: GraphError, *, has_graphs: bool) -> None:
        if self._options.scope == "auto" and not has_graphs:
            self._statistics.note(
                "cannot capture the whole step; capturing submodules instead", error, after=_EAGER
            )
        else:
            self._statistics.note(_EAGER, error)


_EAGER = "a step runs eagerly"


def _moved(before: Signature, after: Signature) -> list[str]:
    """The author's values that moved; empty if a person would name other changes as well."""
    old, new = conditions_of(before), conditions_of(after)
    same = replace(old, phase=new.phase, gradients=new.gradients, attributes=new.attributes)
    if replace(before, extra=(same,)) != after:
        return []
    lines = replace(same, attributes=old.attributes).diff(new)
    return [line for line in lines if not line.startswith(OF_THE_TRAINER)]


_OF_PARTS = "the optimizer step", "capturing submodules, not"
"""How reasons begin that do not say why no step was replayed."""


class FitSummary:
    """Times the first steps of a fit, draws the conclusion, and says how it went."""

    def __init__(self, fit: TrainingContext, switch_off: Callable[[], None]) -> None:
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
        rank_zero_info(summary_line(self._statistics.report()))
        if self._statistics.verdict:
            hint = ""
            if slower and not self._fit.options.only_if_faster:
                hint = ". GraphCapture(only_if_faster=True) switches itself off then"
            rank_zero_info(f"GraphCapture: {self._statistics.verdict}{hint}")
        if slower and self._fit.options.only_if_faster:
            self._fit.ranks.leave(f"switched off by only_if_faster: {self._statistics.verdict}")
        self._log()

    def left(self, reason: str) -> None:
        """Release the graphs now, and say why."""
        self._switch_off()
        self._off_since = self._batches()
        self._statistics.note(reason)

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
            statistics.note(statistics.waiting)
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
        rank_zero_info(f"GraphCapture:\n{render(self._statistics.report())}")

    def _log(self) -> None:
        if self._fit.options.log_metrics:
            figures = self._statistics.report().metrics()
            for logger in self._fit.trainer.loggers:
                logger.log_metrics(figures, step=self._fit.trainer.global_step)
