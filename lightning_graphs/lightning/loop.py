"""Lightning's loops while steps are replayed: what can be seen of them, and no more.

``advance`` of Lightning's loop takes 0.3 to 1 ms a step around a graph that may take 0.1 ms: it
opens a context of the profiler and looks up names around a dozen hooks, whether user code overrides
them or not, and makes all metrics after each step, whether they are read or not.
:class:`ReplayLoop` does the same in the same order, but for what no code can see. What is rare it
leaves to Lightning's own functions, up to whole steps. :class:`EvaluationLoop` is what there is of
the dozen functions around a step of an evaluation; Lightning's own ``run`` goes on from batch to
batch there.

This file stands for private functions of Lightning as they are in the versions that
:func:`~lightning_graphs.lightning.private.is_known_loop` names, attributes included: a call for
each of them would cost what is saved here. On other versions Lightning's own loop runs.
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from itertools import repeat
from math import inf
from operator import attrgetter, is_
from sys import getrefcount
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor

from lightning_graphs.lightning.evaluation_runner import EvaluationHandler
from lightning_graphs.lightning.private import (
    HOOK,
    copies_of,
    functions_of,
    is_known_evaluation,
    is_known_loop,
    is_unrecorded,
    moved_to_cpu,
    own_copy,
    plain_fetchers,
    unmarked_batches,
)
from lightning_graphs.lightning.runner import StepRunner, StrategyHandler
from lightning_graphs.lightning.strategy import rebuilt
from lightning_graphs.private.callsite import leaves_unread
from lightning_graphs.private.exchange import replaced
from lightning_graphs.regions.plan import UNREAD

_CACHE = attrgetter("_forward_cache")
_TRANSFERS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
_SCHEDULERS = "torch.optim.lr_scheduler"

_tables = SimpleNamespace(a={}, b={}, c={})
_ALONE = max(map(getrefcount, (_tables.a, _tables.b, _tables.c)))
"""References to a dict that is one attribute; versions of Python differ."""


def replays_looped(
    trainer: Trainer, module: LightningModule, handler: StrategyHandler
) -> AbstractContextManager[None]:
    """Let a :class:`ReplayLoop` take the place of Lightning's ``advance``, where it is known."""
    if not (is_known_loop(trainer) and _is_served(trainer)):
        return contextlib.nullcontext()
    loop = ReplayLoop(trainer, module, handler)
    return replaced(trainer.fit_loop.epoch_loop, "advance", loop.advance)


def _is_served(trainer: Trainer) -> bool:
    strategy: Any = trainer.strategy
    of_base = ("on_train_batch_start", "post_training_step")
    return (
        trainer.world_size == 1
        and not trainer.fast_dev_run  # type: ignore[attr-defined]
        and not strategy.handles_gradient_accumulation
        and all(getattr(type(strategy), name) in functions_of(Strategy, name) for name in of_base)
        and vars(strategy).keys().isdisjoint(of_base)
    )


class Hook(NamedTuple):
    """A hook of a batch, and what it is where user code does not override it."""

    name: str
    of_callback: frozenset[Any]
    of_module: frozenset[Any]

    @classmethod
    def named(cls, name: str) -> Hook:
        """Find the functions of Lightning's base classes."""
        return cls(name, functions_of(Callback, name), functions_of(LightningModule, name))


class BatchLoop:
    """What loops over batches do alike: move a batch, and call hooks where they are overridden."""

    def __init__(self, trainer: Trainer, module: LightningModule, loop: Any) -> None:
        self._trainer: Any = trainer
        self._module = module
        self._names = vars(module)  # of the hook that runs, and of hooks that an instance has
        self._strategy: Any = trainer.strategy
        self._device = trainer.strategy.root_device
        self._loop = loop
        self._connector: Any = trainer._logger_connector
        self._moves = True  # user code runs while a batch is moved
        self._reading: dict[Any, bool] = {}  # whether hooks look at what a step has returned
        self._transfers = [(name, functions_of(LightningModule, name)) for name in _TRANSFERS]

    def _look_at_moves(self) -> None:
        """Find out whether user code runs while a batch is moved."""
        trainer = self._trainer
        own = type(trainer.precision_plugin).convert_input
        converts = own not in functions_of(Precision, "convert_input")
        self._moves = converts
        for owner in filter(None, (self._module, trainer.datamodule)):
            for name, known in self._transfers:
                self._moves |= getattr(type(owner), name) not in known or name in vars(owner)
        moves = type(self._strategy).batch_to_device
        self._moves |= moves not in functions_of(Strategy, "batch_to_device")

    def _moved(self, batch: Any, loader: int = 0) -> Any:
        """Move a batch of a data loader to the device."""
        names, strategy = self._names, self._strategy
        if self._moves:
            batch = self._trainer.precision_plugin.convert_input(batch)
            batch = self._module._on_before_batch_transfer(batch, dataloader_idx=loader)
        elif "batch_to_device" not in vars(strategy):  # else it is exchanged
            moved = rebuilt(batch, self._device)
            if moved is not None:
                return moved
        before, names[HOOK] = names[HOOK], "batch_to_device"
        batch = strategy.batch_to_device(batch, dataloader_idx=loader)
        names[HOOK] = before
        return batch

    def _call(self, hook: Hook, *values: Any) -> Any:
        """Call a hook where it is overridden; return what the module's own one returns."""
        trainer, module, names = self._trainer, self._module, self._names
        name, idle, of_module = hook
        before, names[HOOK], answer = names[HOOK], name, None
        for owner in trainer.callbacks:  # the live list, to which hooks may add
            own = getattr(type(owner), name) not in idle or name in vars(owner)
            if own and callable(function := getattr(owner, name)):
                function(trainer, module, *values)
        own = getattr(type(module), name) not in of_module or name in names
        if own and callable(function := getattr(module, name)):
            answer = function(*values)
        names[HOOK] = before
        return answer

    def _is_output_read(self, hook: Hook) -> bool:
        """Whether user code may look at what a step returns, which the hook at its end is given.

        That is as hooks are when the step begins: not one that another one adds at its end.
        """
        (name, idle, of_module), known = hook, self._reading
        for owner in self._trainer.callbacks:
            own = getattr(type(owner), name)
            if own not in known:
                known[own] = not (own in idle or leaves_unread(own, 3))
            if known[own] or name in vars(owner):
                return True
        own = getattr(type(self._module), name)
        if own not in known:
            known[own] = not (own in of_module or leaves_unread(own, 1))
        return known[own] or name in self._names


class ReplayLoop(BatchLoop):
    """Runs the steps of an epoch up to one whose end is Lightning's: validation, the last batch."""

    def __init__(self, trainer: Trainer, module: LightningModule, handler: StrategyHandler) -> None:
        loop: Any = trainer.fit_loop.epoch_loop
        super().__init__(trainer, module, loop)
        self._handler = handler
        self._start, self._end = map(Hook.named, ("on_train_batch_start", "on_train_batch_end"))
        self._updates = functions_of(LightningModule, "optimizer_step")
        self._schedules = functions_of(LightningModule, "lr_scheduler_step")
        self._own = loop.advance
        self._automatic = loop.automatic_optimization
        self._by_hand = loop.manual_optimization if not module.automatic_optimization else None
        # What the entries of results had of the step before, where the metrics are behind it
        self._behind: list[Any] | None = None
        self._known: Any = None  # ``training_step``, and how many arguments it takes
        self._given = 0
        self._runner: StepRunner

    # ------------------------------------------------------------------ whose step it is

    def advance(self, fetcher: Any) -> None:
        """Run one step as Lightning does, or steps up to the first that ends as Lightning's."""
        runner = self._handler.whole_steps()
        if runner is None or not self._may_begin(fetcher):
            self._own(fetcher)
            return
        self._runner, self._behind = runner, None
        try:
            with unmarked_batches(fetcher):
                self._run(fetcher)
        except BaseException:  # StopIteration, too
            self._show_step_before()
            raise

    def _may_begin(self, fetcher: Any) -> bool:
        """Whether nothing unusual is to be done in this epoch."""
        loop, trainer = self._loop, self._trainer
        if (
            loop._restarting
            or loop.val_loop._restarting
            or loop._skip_next_val
            or type(fetcher) not in plain_fetchers()
            or not is_unrecorded(trainer)
            or not self._goes_on()
        ):
            return False
        step = self._module.training_step
        if (function := getattr(step, "__func__", step)) is not self._known:
            self._given, self._known = len(loop._build_kwargs({}, None, 0)), function
        self._look_at_moves()
        return True

    def _goes_on(self) -> bool:
        """Whether the next step may follow without Lightning's ``run``."""
        return (
            not self._trainer.should_stop
            and not self._automatic._skip_backward
            and torch.is_grad_enabled()
            and self._handler.whole_steps() is not None
        )

    # ------------------------------------------------------------------ steps

    def _run(self, fetcher: Any) -> None:
        trainer, loop, progress = self._trainer, self._loop, self._loop.batch_progress
        current, total = progress.current, progress.total
        validates, signals = loop._should_check_val_epoch(), trainer._signal_connector
        options = trainer.limit_val_batches, trainer.check_val_every_n_epoch
        callbacks = trainer.callbacks
        known = [*callbacks]
        while True:
            batch, index = self._begin(fetcher), current.ready - 1
            output: Any = None
            skips = False
            if batch is None:
                loop._warning_cache.warn(_NO_BATCH)
            else:
                skips = bool(self._call(self._start, batch, index) == -1)
                if skips:
                    progress.increment_by(0, is_last_batch=True)
                else:
                    current.started += 1
                    total.started += 1
                    output = self._step(batch, index)
            current.processed += 1
            total.processed += 1
            is_last = progress.is_last_batch or current.ready == trainer.fit_loop.max_batches
            window = trainer.accumulate_grad_batches
            steps = is_last or window == 1 or current.ready % window == 0
            if steps and self._by_hand is None and self._strategy.lr_scheduler_configs:
                self._move_rates(index, is_last=is_last)
            if skips:
                raise StopIteration
            self._call(self._end, output, batch, index)
            window = trainer.accumulate_grad_batches  # which a hook may have changed
            steps = is_last or window == 1 or current.ready % window == 0
            if self._by_hand is None:
                updates = self._automatic.optim_progress.optimizer.step.total.completed
            else:
                updates = self._by_hand.optim_step_progress.total.completed
            leaves = (
                is_last
                or signals.received_sigterm
                or -1 != loop.max_steps <= updates
                or not self._goes_on()
                or (validates and self._validation_is_due(fetcher))
                or trainer.callbacks is not callbacks
                or len(callbacks) != len(known)
                or not all(map(is_, callbacks, known))
                or (trainer.limit_val_batches, trainer.check_val_every_n_epoch) != options
            )
            self._end_step(leaves=leaves, steps=steps)
            batch = output = None  # nothing of it is held while the next one is fetched
            if leaves:
                return
            if steps:
                if self._strategy.lr_scheduler_configs:
                    loop.update_lr_schedulers("step", update_plateau_schedulers=True)
                loop._batches_that_stepped += 1

    def _begin(self, fetcher: Any) -> Any:
        """Fetch a batch and move it to the device; None if the loader has none in its place."""
        progress, results = self._loop.batch_progress, self._loop._results
        batch = next(fetcher)[0]
        progress.is_last_batch = fetcher.done
        batch = self._moved(batch)
        progress.current.ready += 1
        progress.total.ready += 1
        self._connector._first_loop_iter = self._connector._first_loop_iter is None
        results.batch, results.batch_size, results.dataloader_idx = batch, None, None
        return batch

    def _step(self, batch: Any, index: int) -> Any:
        """Replay a step as a whole, or let Lightning run it; return what hooks get of it."""
        trainer, automatic, names = self._trainer, self._automatic, self._names
        window, progress = trainer.accumulate_grad_batches, self._loop.batch_progress
        ready = progress.current.ready
        stepping = window == 1 or ready % window == 0 or progress.is_last_batch
        stepping = stepping or ready == trainer.fit_loop.max_batches
        given = (batch, index)[: self._given]
        if self._by_hand is not None:
            return self._step_by_hand(self._by_hand, given)
        is_own = type(self._module).optimizer_step not in self._updates
        if is_own or "optimizer_step" in names or automatic._skip_backward:
            return self._step_as_lightning(given, index)
        updates = automatic.optim_progress.optimizer.step
        updates.total.ready += stepping
        updates.current.ready += stepping
        before, names[HOOK] = names[HOOK], "training_step"
        is_read = self._is_output_read(self._end)
        returned = self._runner.replay(given, stepping=stepping, is_read=is_read)
        names[HOOK] = before
        if returned is None:  # Lightning counts
            updates.total.ready -= stepping
            updates.current.ready -= stepping
            return self._step_as_lightning(given, index)
        if index % window == 0:
            zeroing = automatic.optim_progress.optimizer.zero_grad
            for tracker in (zeroing.total, zeroing.current):
                tracker.ready += 1
                tracker.started += 1
                tracker.completed += 1
        updates.total.completed += stepping
        updates.current.completed += stepping
        if returned is UNREAD:
            return None
        if isinstance(returned, Tensor):
            return {"loss": returned / window}
        extra = {key: value for key, value in returned.items() if key != "loss"}
        return {"loss": returned["loss"] / window, **extra}

    def _step_as_lightning(self, given: tuple[Any, ...], index: int) -> Any:
        try:
            kwargs = dict(zip(("batch", "batch_idx"), given, strict=False))
            return self._automatic.run(self._trainer.optimizers[0], index, kwargs)
        finally:
            self._runner.found = ()  # also if it was not asked for

    def _step_by_hand(self, loop: Any, given: tuple[Any, ...]) -> Any:
        """Let the strategy's method run a step that optimizes by its own code."""
        names, returned = self._names, None
        loop.on_run_start()  # an eager step tells Lightning of the optimizers' steps
        with contextlib.suppress(StopIteration):
            before, names[HOOK] = names[HOOK], "training_step"
            returned = self._strategy.training_step(*given)
            names[HOOK] = before
        loop._restarting = False
        loop.on_run_end()
        return loop.output_result_cls.from_training_step_output(returned).asdict()

    def _move_rates(self, index: int, *, is_last: bool) -> None:
        """Step the schedulers of learning rates that are due after this step."""
        loop, module, names = self._loop, self._module, self._names
        configs = self._strategy.lr_scheduler_configs
        is_own = (
            type(module).lr_scheduler_step not in self._schedules or "lr_scheduler_step" in names
        )
        if is_own or not all([type(c.scheduler).__module__ == _SCHEDULERS for c in configs]):
            loop.update_lr_schedulers("step", update_plateau_schedulers=False)
        else:
            progress = loop.scheduler_progress
            for config in configs:
                if (
                    config.interval == "step"
                    and not config.reduce_on_plateau
                    and (index + 1) % config.frequency == 0
                ):
                    progress.total.ready += 1
                    progress.current.ready += 1
                    before, names[HOOK] = names[HOOK], "lr_scheduler_step"
                    config.scheduler.step()
                    names[HOOK] = before
                    progress.total.completed += 1
                    progress.current.completed += 1
        if is_last:
            loop.update_lr_schedulers("epoch", update_plateau_schedulers=False)

    # ------------------------------------------------------------------ the end of a step

    def _validation_is_due(self, fetcher: Any) -> bool:
        trainer, every = self._trainer, self._trainer.val_check_batch
        if trainer._val_check_time_interval is not None or every is None or every == inf:
            return bool(self._loop._should_check_val_fx(fetcher))
        progress = self._loop.batch_progress
        batches = progress.total if trainer.check_val_every_n_epoch is None else progress.current
        return bool(batches.ready % every == 0)

    def _end_step(self, *, leaves: bool, steps: bool) -> None:
        """End a step; make its metrics where they are logged, or may be seen without being read."""
        trainer, connector, loop = self._trainer, self._connector, self._loop
        results, progress = loop._results, loop.batch_progress
        every = trainer.log_every_n_steps
        c = connector
        tables = map(getrefcount, (c._callback_metrics, c._logged_metrics, c._progress_bar_metrics))
        is_shown = (
            leaves
            or (steps and every and (loop._batches_that_stepped + 1) % every == 0)
            or max(tables) > _ALONE
        )
        if is_shown:
            connector.on_batch_end()
        results.batch = results.batch_size = None
        progress.current.completed += 1
        progress.total.completed += 1
        self._behind = None
        if is_shown:
            connector.update_train_step_metrics()
        else:
            self._behind = [*map(_CACHE, results.values())]

    def _show_step_before(self) -> None:
        """Update the dicts of metrics as they were at the end of the last whole step.

        A value that was read since stays as it was read.
        """
        if (caches := self._behind) is None:
            return
        connector, results = self._connector, self._loop._results
        entries = [*results.values()]
        now = results.metrics(on_step=True)
        present = [*map(_CACHE, entries)]
        caches = [*caches, *repeat(None, len(entries) - len(caches))]
        for entry, cache in zip(entries, caches, strict=True):
            entry._forward_cache = cache
        last = results.metrics(on_step=True)
        for entry, cache in zip(entries, present, strict=True):
            entry._forward_cache = cache
        for table, kind in (
            (connector._callback_metrics, "callback"),
            (connector._logged_metrics, "log"),
            (connector._progress_bar_metrics, "pbar"),
        ):
            for key, value in last[kind].items():
                if key not in table or not _is_same(table[key], now[kind].get(key)):
                    table[key] = value


def _is_same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.data_ptr() == b.data_ptr()
    return bool(a == b)


_NO_BATCH = "train_dataloader yielded None. If this was on purpose, ignore this warning..."


# ------------------ Loops of evaluations

_CPU = torch.device("cpu")


def evaluations_looped(
    trainer: Trainer, module: LightningModule, handler: EvaluationHandler
) -> AbstractContextManager[None]:
    """Let an :class:`EvaluationLoop` run the batches of an evaluation, where it is known."""
    loop = _loop_of(trainer, handler.name)
    if not is_known_evaluation(trainer, loop):
        return contextlib.nullcontext()
    if handler.name == "predict_step":
        name, run = "_predict_step", PredictionLoop(trainer, module, loop, handler).run
    else:
        name, run = "_evaluation_step", EvaluationLoop(trainer, module, loop, handler).run
    return replaced(loop, name, run)


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
        self._writers = repeat(tuple(copies_of(BasePredictionWriter)))
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
        before, names[HOOK] = names[HOOK], name
        is_read = self._is_output_read(self._end)
        returned = handler.replay_batch(given, is_read=is_read)
        returned = returned or (getattr(self._strategy, name)(*given),)
        names[HOOK] = before
        return None if returned[0] is UNREAD else returned[0]

    # ------------------------------------------------------------------ batches

    def _run(self, batch: Any, batch_idx: int, loader: int) -> None:
        trainer, loop, connector = self._trainer, self._loop, self._connector
        results, progress = loop._results, loop.batch_progress
        is_first = connector._first_loop_iter
        connector._first_loop_iter = is_first is None
        results.batch, results.batch_size = batch, None
        results.dataloader_idx = loader if self._has_several else None
        self._take(batch, batch_idx, loader)
        is_shown = len(results) != self._quiet and self._logs_steps(results)
        if is_shown:
            connector.on_batch_end()
        results.batch = results.batch_size = None
        progress.current.completed += 1
        progress.total.completed += 1
        loop._has_run = True
        seen = loop._seen_batches_per_dataloader
        if is_shown:
            connector.update_eval_step_metrics(seen[loader])
        seen[loader] += 1
        if trainer._signal_connector.received_sigterm and not progress.is_last_batch:
            ending = own_copy(trainer, SIGTERMException)
            raise ending

    def _take(self, batch: Any, batch_idx: int, loader: int) -> Any:
        """Run a step between its hooks; return what it returns."""
        progress = self._loop.batch_progress
        current, total = progress.current, progress.total
        given = (batch, batch_idx, loader) if self._has_several else (batch, batch_idx)
        current.ready += 1
        total.ready += 1
        self._call(self._start, *given)
        current.started += 1
        total.started += 1
        output = self._step(batch, batch_idx, loader)
        current.processed += 1
        total.processed += 1
        self._call(self._end, output, *given)
        return output

    def _logs_steps(self, results: Any) -> bool:
        """Whether a value may be logged for its batch; if not it is asked for new keys only."""
        if any(entry.meta.on_step for entry in results.values()):
            return True
        self._quiet = len(results)
        return False


class PredictionLoop(EvaluationLoop):
    """Runs each batch of a prediction."""

    name = "_predict_step"

    def _is_output_read(self, hook: Hook) -> bool:
        return True

    def _are_several(self) -> bool:
        return bool(self._loop.num_dataloaders > 1)

    def _step(self, batch: Any, batch_idx: int, loader: int) -> Any:
        output = super()._step(batch, batch_idx, loader)
        if output is None:
            self._loop._warning_cache.warn(_NOTHING)
        return output

    def _run(self, batch: Any, batch_idx: int, loader: int) -> None:
        loop, progress = self._loop, self._loop.batch_progress
        writes = True in map(isinstance, self._trainer.callbacks, self._writers)
        keeps = writes and loop._store_data_for_prediction_writer(batch_idx, loader)
        output = self._take(batch, batch_idx, loader)
        progress.current.completed += 1
        progress.total.completed += 1
        if loop._return_predictions or keeps:
            kept = rebuilt(output, _CPU)
            kept = moved_to_cpu(output) if kept is None else kept
            loop._predictions[loader].append(kept)


_NOTHING = "predict returned None if it was on purpose, ignore this warning..."
