"""Values for the progress bar without a stall: mirrored to pinned memory, by the graph itself.

Lightning reads every value with ``prog_bar=True`` at the end of every batch, whatever the refresh
rate of the bar. On a GPU that waits for the step to finish, and nothing runs while the CPU prepares
the next one. The mirror holds the values of the latest step that has finished.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor

from lightning_graphs.lightning.private import (
    step_progress,
    step_value,
    training_results,
    updates_loggers,
)
from lightning_graphs.private.exchange import replaced

_SLOTS = 64


class ProgressValues:
    """The values that steps log with ``prog_bar=True``.

    Whole steps copy them as part of the graph. Of other steps they are copied when Lightning asks,
    where :attr:`follows` is set.

    On the bar a value may be one step old. It is exact where Lightning waits for the device anyway:
    at steps that are logged, at the last batch of an epoch, and in loggers and ``callback_metrics``
    always.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        # Memory that a graph writes must exist before the capture.
        self._host = torch.full((_SLOTS,), float("nan"), pin_memory=True)
        self._values = self._host.numpy()
        self._slots: dict[str, int] = {}
        self._results: Any = training_results(trainer)
        self.mirrored: frozenset[str] = frozenset()  # names that the replayed step has copied
        self.follows = False  # copy the values of steps that are no graphs as a whole

    def installed(self) -> AbstractContextManager[None]:
        """Answer for the results collection when it is asked for the metrics of a step."""
        if self._results is None:
            return nullcontext()
        return replaced(self._results, "metrics", self._metrics)

    def capture(self, values: Mapping[str, Tensor]) -> frozenset[str]:
        """Copy scalars to the host, as a part of a capture, too; the names that found a place."""
        placed = list(filter(self._has_place, values))
        for name in placed:
            place = self._host[self._slots[name] :][:1]
            place.copy_(values[name].detach().float().reshape(1), non_blocking=True)
        return frozenset(placed)

    def show(self, name: str, number: Any) -> None:
        if self._has_place(name):
            self._values[self._slots[name]] = number
            self.mirrored |= {name}

    def _has_place(self, name: str) -> bool:
        if name not in self._slots and len(self._slots) < _SLOTS:
            self._slots[name] = len(self._slots)
        return name in self._slots

    def _metrics(self, on_step: bool) -> Any:
        """What the collection returns, with mirrored numbers instead of a read for each."""
        results, trainer = self._results, self._trainer
        original = type(results).metrics
        is_late = on_step and (self.mirrored or self.follows)
        if not is_late or trainer.is_last_batch or updates_loggers(trainer):
            return original(results, on_step)
        entries, names = step_progress(results), self.mirrored
        if self.follows:
            values = {e.meta.name: step_value(results, e) for e in entries.values()}
            names = self.capture({n: v for n, v in values.items() if v is not None and v.is_cuda})
        late = {n: e for n, e in entries.items() if e.meta.name in names}
        numbers = {n: float(self._values[self._slots[e.meta.name]]) for n, e in late.items()}
        if any(number != number for number in numbers.values()):
            return original(results, on_step)  # no replay has finished yet, or a real NaN
        shown = [entry.meta for entry in late.values()]
        for meta in shown:
            meta.prog_bar = False
        try:
            metrics = original(results, on_step)
        finally:
            for meta in shown:
                meta.prog_bar = True
        metrics["pbar"].update(numbers)
        return metrics
