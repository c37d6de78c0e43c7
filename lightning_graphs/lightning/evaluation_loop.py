"""Lightning's loops of validation, test and prediction while batches are replayed.

A batch of an evaluation passes a dozen functions of Lightning around its step, as one of training
does, and small models spend most of a validation there. :class:`EvaluationLoop` does the same in
the same order, but for what no code can see; see :mod:`~lightning_graphs.lightning.loop`, of which
the same is true: it stands for private functions of known versions, and leaves to them what is
rare. Lightning's own ``run`` goes on from batch to batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from itertools import repeat
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_graphs.lightning.evaluation_runner import EvaluationHandler
from lightning_graphs.lightning.loop import FX, BatchLoop, Hook
from lightning_graphs.lightning.private import (
    is_known_evaluation,
    is_unrecorded,
    moved_to_cpu,
    plain_fetchers,
)
from lightning_graphs.lightning.strategy import rebuilt
from lightning_graphs.private.exchange import replaced

_CPU = torch.device("cpu")


@contextlib.contextmanager
def evaluations_looped(
    trainer: Trainer, module: LightningModule, handler: EvaluationHandler
) -> Iterator[None]:
    """Let an :class:`EvaluationLoop` run the batches of an evaluation, where it is known."""
    loop = _loop_of(trainer, handler.name)
    if not is_known_evaluation(trainer, loop):
        yield
        return
    if handler.name == "predict_step":
        name, run = "_predict_step", PredictionLoop(trainer, module, loop, handler).run
    else:
        name, run = "_evaluation_step", EvaluationLoop(trainer, module, loop, handler).run
    with replaced(loop, name, run):
        yield


def _loop_of(trainer: Trainer, name: str) -> Any:
    if name == "validation_step" and trainer.state.fn == TrainerFn.FITTING:
        return trainer.fit_loop.epoch_loop.val_loop
    stage = name.removesuffix("_step").replace("validation", "validate")
    return getattr(trainer, f"{stage}_loop")


class EvaluationLoop(BatchLoop):
    """Runs each batch of an evaluation, once steps have graphs."""

    name = "_evaluation_step"
    """What it stands for."""

    def __init__(
        self, trainer: Trainer, module: LightningModule, loop: Any, handler: EvaluationHandler
    ) -> None:
        super().__init__(trainer, module, loop)
        self._handler = handler
        self._own = getattr(loop, self.name)
        hook = f"on_{handler.name.removesuffix('_step')}_batch"
        self._start, self._end = Hook.named(f"{hook}_start"), Hook.named(f"{hook}_end")
        self._fetcher: Any = None  # of the evaluation that was begun last
        self._is_served = False
        self._has_several = False  # data loaders, whose index is an argument
        self._takes_index = True  # the step is given the index of the batch
        self._quiet = -1  # so many entries of the results were seen, none of which is of steps

    # ------------------------------------------------------------------ whose batch it is

    def _begin(self, fetcher: Any) -> None:
        """Look at the evaluation that begins."""
        loop, trainer = self._loop, self._trainer
        self._fetcher = fetcher
        self._is_served = (
            type(fetcher) in plain_fetchers()
            and is_unrecorded(trainer)
            and not trainer.sanity_checking
        )
        if not self._is_served:
            return
        self._has_several = self._are_several()
        index = 0 if self._has_several else None
        given = loop._build_step_args_from_hook_kwargs(
            loop._build_kwargs(None, 0, index), self._handler.name
        )
        self._takes_index = len(given) == 2 + self._has_several
        self._look_at_moves()

    def _are_several(self) -> bool:
        return bool(self._loop._is_sequential and self._loop.num_dataloaders > 1)

    def run(self, batch: Any, batch_idx: int, loader: int, iterator: Any) -> None:
        """Run one batch, as Lightning's own method does."""
        loop, handler = self._loop, self._handler
        if loop._data_fetcher is not self._fetcher:
            self._begin(loop._data_fetcher)
        if not (self._is_served and handler.evaluation.plans):
            self._own(batch, batch_idx, loader, iterator)
            return
        self._run(self._moved(batch, loader), batch_idx, loader)

    def _step(self, batch: Any, batch_idx: int, loader: int) -> Any:
        """Replay a step, or let the strategy's method run it."""
        given = (batch, batch_idx, loader) if self._has_several else (batch, batch_idx)
        if not self._takes_index:
            given = (batch, *given[2:])
        handler, names = self._handler, self._names
        name = handler.name
        before, names[FX] = names[FX], name
        returned = handler.replay_batch(given) or (getattr(self._strategy, name)(*given),)
        names[FX] = before
        return returned[0]

    # ------------------------------------------------------------------ batches

    def _run(self, batch: Any, batch_idx: int, loader: int) -> None:
        trainer, loop, connector = self._trainer, self._loop, self._connector
        results, progress = loop._results, loop.batch_progress
        current, total = progress.current, progress.total
        given = (batch, batch_idx, loader) if self._has_several else (batch, batch_idx)
        current.ready += 1
        total.ready += 1
        is_first = connector._first_loop_iter
        connector._first_loop_iter = is_first is None
        results.batch, results.batch_size = batch, None
        results.dataloader_idx = loader if self._has_several else None
        self._call(self._start, *given)
        current.started += 1
        total.started += 1
        output = self._step(batch, batch_idx, loader)
        current.processed += 1
        total.processed += 1
        self._call(self._end, output, *given)
        is_shown = len(results) != self._quiet and self._logs_steps(results)
        if is_shown:
            connector.on_batch_end()
        results.batch = results.batch_size = None
        current.completed += 1
        total.completed += 1
        loop._has_run = True
        seen = loop._seen_batches_per_dataloader
        if is_shown:
            connector.update_eval_step_metrics(seen[loader])
        seen[loader] += 1
        if trainer._signal_connector.received_sigterm and not progress.is_last_batch:
            raise SIGTERMException

    def _logs_steps(self, results: Any) -> bool:
        """Whether a value may be logged for its batch; if not it is asked for new keys only."""
        if any(entry.meta.on_step for entry in results.values()):
            return True
        self._quiet = len(results)
        return False


class PredictionLoop(EvaluationLoop):
    """Runs each batch of a prediction."""

    name = "_predict_step"

    def _are_several(self) -> bool:
        return bool(self._loop.num_dataloaders > 1)

    def _run(self, batch: Any, batch_idx: int, loader: int) -> None:
        loop, progress = self._loop, self._loop.batch_progress
        current, total = progress.current, progress.total
        given = (batch, batch_idx, loader) if self._has_several else (batch, batch_idx)
        current.ready += 1
        total.ready += 1
        writes = True in map(isinstance, self._trainer.callbacks, repeat(BasePredictionWriter))
        keeps = writes and loop._store_data_for_prediction_writer(batch_idx, loader)
        self._call(self._start, *given)
        current.started += 1
        total.started += 1
        output = self._step(batch, batch_idx, loader)
        if output is None:
            loop._warning_cache.warn(_NOTHING)
        current.processed += 1
        total.processed += 1
        self._call(self._end, output, *given)
        current.completed += 1
        total.completed += 1
        if loop._return_predictions or keeps:
            kept = rebuilt(output, _CPU)
            kept = moved_to_cpu(output) if kept is None else kept
            loop._predictions[loader].append(kept)


_NOTHING = "predict returned None if it was on purpose, ignore this warning..."
