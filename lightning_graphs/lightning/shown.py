"""What a fit shows while it runs: the share of replayed steps in its bar, the time of a step in its
loggers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_graphs.lightning.private import step_of_loggers, updates_loggers
from lightning_graphs.private.exchange import replaced
from lightning_graphs.report.report import share_of

SHARE, TIME = "graphs/replayed_percent", "graphs/ms_per_step"


@contextlib.contextmanager
def shown(
    callback: Callback, trainer: Trainer, count: Callable[[], tuple[int, int]], *, logs: bool
) -> Iterator[StepRate | None]:
    """Let the bar show ``graphs=98 %`` and, if asked, the loggers the time of a step.

    The bar asks for it when it is drawn anew, and a step does nothing.

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
