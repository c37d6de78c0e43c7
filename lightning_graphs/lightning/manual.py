"""Manual optimization: a captured ``training_step`` whose own code steps optimizers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from lightning.pytorch import Trainer

from lightning_graphs.lightning.private import count_step, counting_optimizers, own_counts
from lightning_graphs.lightning.strategy import StrategyCalls
from lightning_graphs.private.exchange import exchanged, nothing


class ManualSteps:
    """Optimizer steps of one ``training_step`` that is captured, or compared with its replay.

    Lightning counts them, and ``trainer.global_step`` with them. A replay counts them at its end.

    Args:
        own: The strategy's own methods, which call no runner of graphs.
        is_captured: A replay counts; else the counts are those of a copy.
    """

    def __init__(self, trainer: Trainer, own: StrategyCalls, *, is_captured: bool) -> None:
        self._trainer, self._own, self._is_captured = trainer, own, is_captured
        self._taken: list[Any] = []

    @property
    def ahead(self) -> int:
        """How many were taken in a capture, and have not been counted."""
        return len(self._taken) if self._is_captured else 0

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record the steps of the body, for which Lightning's own counts stay as they are."""
        strategy = self._trainer.strategy
        own = [
            (strategy, name, getattr(self._own, name)) for name in ("backward", "optimizer_step")
        ]
        with exchanged(own), contextlib.ExitStack() as stack:
            count: Callable[[], object] = nothing
            if not self._is_captured:
                count = stack.enter_context(own_counts(self._trainer))
            for optimizer in counting_optimizers(self._trainer):
                after = partial(self._count, optimizer, count)
                hooks = (
                    (optimizer, "_on_before_step", nothing),
                    (optimizer, "_on_after_step", after),
                )
                stack.enter_context(exchanged(hooks))
            yield

    def _count(self, optimizer: Any, count: Callable[[], object]) -> None:
        self._taken.append(optimizer)
        count()

    def repeat(self) -> None:
        """Let Lightning count them, after a replay."""
        for optimizer in self._taken:
            count_step(optimizer)
