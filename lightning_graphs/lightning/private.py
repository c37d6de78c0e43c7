"""Private API of Lightning that the callback uses, each with its reason and its fallback.

It is used on the versions that were read. On others the fallback uses public API, which is slower
and gives equal values.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import logging
import re
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from types import FrameType
from typing import Any

import lightning
import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loops import (
    evaluation_loop,
    fetchers,
    fit_loop,
    prediction_loop,
    training_epoch_loop,
)
from lightning.pytorch.loops.optimization import automatic, manual
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.connectors.logger_connector.logger_connector import _LoggerConnector
from lightning.pytorch.trainer.connectors.logger_connector.result import (
    _ResultCollection,
    _ResultMetric,
)
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import dataloader

from lightning_graphs.private.callsite import frames_from
from lightning_graphs.private.exchange import replaced, subclassed
from lightning_graphs.private.torch import is_newer_than_tested
from lightning_graphs.values.snapshot import PythonSnapshot

_COPY = "pytorch_lightning"
"""A second copy of ``lightning.pytorch``, with classes of its own under the same names."""


def is_lightnings(definition: object, *files: str) -> bool:
    """Tell whether a class or function is defined in one of these files of Lightning."""
    module = getattr(definition, "__module__", None)
    return any(
        module == f"{name}.{file}" for name in ("lightning.pytorch", _COPY) for file in files
    )


_IS_KNOWN = lightning.__version__.startswith(("2.5.", "2.6."))


def untested() -> str:
    """Name what is newer than the tests have seen, with its version; empty if nothing is."""
    newer = [f"Lightning {lightning.__version__}"] * (not _IS_KNOWN)
    newer += [f"torch {torch.__version__}"] * is_newer_than_tested()
    return " with ".join(newer)


def training_results(trainer: Trainer) -> Any | None:
    """Return the collection behind ``self.log`` in training; None on unknown versions.

    ``LightningModule.log`` costs 0.1 to 0.3 ms per key and step (measured on Lightning 2.6.6),
    most of it in checks of what a captured step cannot change; updating the entry that it made
    costs a tenth. Fallback: ``LightningModule.log``.
    """
    return trainer.fit_loop.epoch_loop._results if _IS_KNOWN else None


def present_results(trainer: Trainer) -> Any | None:
    """Return the collection behind ``self.log`` in the loop that runs, as for training."""
    return trainer._results if _IS_KNOWN else None


def logs_snapshot(trainer: Trainer) -> PythonSnapshot:
    """Take a snapshot of what ``self.log`` has collected in this epoch.

    No public API does. Fallback: an empty snapshot, and a step that runs again after it ran out of
    memory logs twice.
    """
    results = present_results(trainer)
    tables = [] if results is None else [results, vars(results), *map(vars, results.values())]
    kept = PythonSnapshot(("", table) for table in tables)
    if (connector := getattr(trainer, "_logger_connector", None)) is not None:
        kept.add_place("", vars(connector), "_current_fx")
    return kept


HOOK = "_current_fx_name"
"""Where a module has the name of :func:`present_hook`."""


def present_hook(module: LightningModule) -> str | None:
    """Return the name of the method that Lightning has called, by which ``self.log`` is keyed.

    No public API tells. Fallback: none, and each hook logs under the name of the present one.
    """
    # Not read as an attribute: a capture would make a guard of it
    return vars(module).get(HOOK)


def within_hook(module: LightningModule, hook: str | None) -> AbstractContextManager[None]:
    """Let the body log as if Lightning had called this method."""
    return nullcontext() if hook == present_hook(module) else replaced(module, HOOK, hook)


def result_key(trainer: Trainer, name: str, options: Mapping[str, Any]) -> str:
    """Return the key in :func:`present_results` of what the present step logs as ``name``.

    Args:
        options: Further arguments of ``self.log``, by name.
    """
    key = f"{present_hook(trainer.lightning_module)}.{name}"
    loader = getattr(present_results(trainer), "dataloader_idx", None)
    is_apart = loader is not None and options.get("add_dataloader_idx", True)
    return f"{key}.{loader}" if is_apart else key


@contextlib.contextmanager
def bound_log_redirected(trainer: Trainer, log: Callable[..., None]) -> Iterator[None]:
    """Redirect ``_ResultCollection.log``: user code may hold a ``self.log`` from before a capture.

    ``LightningModule.log`` checks its arguments and makes tensors of numbers before it calls this.
    Fallback: all of it runs in the capture.
    """
    results = present_results(trainer)
    if results is None:
        yield
        return
    connector = trainer._logger_connector
    current = connector._current_fx

    def caught(_: str, name: str, value: Any, *, logger: bool, **options: Any) -> None:
        del options["sync_dist_fn"]
        log(name, value, logger=None if logger else False, **options)

    with replaced(results, "log", caught), replaced(results, "reset", lambda **_: None):
        try:
            yield
        finally:
            connector._current_fx = current


def batch_size_of(results: Any, entry: Any, given: int | None) -> int:
    """Return the batch size by which Lightning weights an epoch mean."""
    size: int = results._extract_batch_size(entry, given, entry.meta)
    return size


def begin_logs(trainer: Trainer, results: Any, hook: str | None) -> None:
    """Reset the entries of a method as its first ``LightningModule.log`` of an epoch does.

    That makes and compares metadata, and moves each entry, for 0.2 ms a key. An epoch of few
    batches spends more on it than on its steps. Fallback: ``LightningModule.log``.
    """
    connector = trainer._logger_connector
    if connector.should_reset_tensors(hook or ""):
        results.reset(metrics=False, fx=hook)
    connector._current_fx = hook


def beginning_of(trainer: Trainer) -> Callable[[], bool | None]:
    """Return a test for the first batch of an epoch, where a method that logs resets its entries.

    No public attribute says so. Fallback: the state of the entries.
    """
    return partial(getattr, trainer._logger_connector, "_first_loop_iter", False)


class ResultTables:
    """Where Lightning keeps the results of several keys, so that one update serves all of them.

    ``_ResultMetric.update`` takes up to four kernels a key and 20 us, and no public API takes
    several values. Results that ranks reduce at each step are left out, and those that convert
    values. Fallback: one update for each key.
    """

    has_reset = attrgetter("has_reset")
    """Whether an entry was reset."""

    def __init__(self, results: Any, values: Mapping[str, Tensor]) -> None:
        found = ((key, results.get(key), value) for key, value in values.items())
        known = [(k, entry, v) for k, entry, v in found if _takes(entry, v)] if _IS_KNOWN else []
        self._results, self.entry_of = results, results.get
        self.keys = [key for key, _, _ in known]
        self.entries = [entry for _, entry, _ in known]
        # Tables and keys: of caches that an update empties, and of counts of updates
        self.caches = [(vars(entry), "_computed") for entry in self.entries]
        self.counts = [(vars(entry), "_update_count") for entry in self.entries]
        # Of the values of a step, under one name or two
        of_steps = [(entry, value) for _, entry, value in known if entry.meta.on_step]
        names = {True: ("_forward_cache",), False: ("_forward_cache", "value")}
        self.steps = [(vars(entry), names[entry.meta.on_epoch]) for entry, _ in of_steps]
        self.step_values = [value for _, value in of_steps]
        # Of what an epoch adds up, weighted sums ahead of plain ones; of the sums of the weights
        of_epochs = [each for each in known if each[1].meta.on_epoch]
        self._means = means = [each for each in of_epochs if each[1].meta.is_mean_reduction]
        sums = [each for each in of_epochs if each[1].meta.is_sum_reduction]
        self.mean_values = [value for *_, value in means]
        self.sum_values = [value for *_, value in sums]
        self.totals = [(vars(entry), "value") for _, entry, _ in (*means, *sums)]
        self.weights = [(vars(entry), "cumulated_batch_size") for _, entry, _ in means]
        # And of its extremes, with the function that compares two
        self.extremes = [
            (vars(entry), "value", entry.meta.reduce_fx, value)
            for _, entry, value in of_epochs
            if entry.meta.reduce_fx in _EXTREMES
        ]

    def sizes(self, given: Mapping[str, int | None]) -> list[int]:
        """Return the batch sizes by which the means of epochs are weighted."""
        return [batch_size_of(self._results, entry, given[key]) for key, entry, _ in self._means]


_EXTREMES = torch.max, torch.min
"""Those of Python read which one is larger on the host."""


def _takes(entry: Any, value: Tensor) -> bool:
    """Whether an entry keeps or reduces values such as this one as they are."""
    if type(entry) not in copies_of(_ResultMetric) or not entry.is_tensor:
        return False
    meta = entry.meta
    is_reduced = meta.is_mean_reduction or meta.is_sum_reduction or meta.reduce_fx in _EXTREMES
    return (
        (is_reduced or not meta.on_epoch)
        and not (meta.on_step and meta.sync.should)  # that of an epoch comes at its end
        and not (meta.enable_graph or entry.compute_on_cpu)
        and value.dtype in (torch.float32, torch.float64)
        and value.ndim == 0
        and entry.value.device == value.device
    )


def step_progress(results: Any) -> dict[str, Any]:
    """Map names on the progress bar to the entries that this step has logged there."""
    return {
        results._forked_name(entry, True)[1]: entry
        for _, entry in results.valid_items()
        if entry.meta.prog_bar and entry.meta.on_step
    }


def step_value(results: Any, entry: Any) -> Tensor | None:
    """Return an entry's value of this step, if it is a tensor; else None."""
    value = results._get_cache(entry, True)
    return value if isinstance(value, Tensor) else None


def skipping_backward(trainer: Trainer) -> Callable[[], bool]:
    """Return a test for forward passes alone, with which SWA refreshes BatchNorm statistics.

    No public attribute says so. Fallback: False, as without such callbacks.
    """
    loop = trainer.fit_loop.epoch_loop.automatic_optimization
    return partial(getattr, loop, "_skip_backward", False)


def updates_loggers(trainer: Trainer) -> bool:
    """Tell whether loggers get the values of this step. Fallback: yes, which costs a stall."""
    connector = getattr(trainer, "_logger_connector", None)
    return bool(getattr(connector, "should_update_logs", True))


def step_of_loggers(trainer: Trainer) -> int:
    """Return the number that Lightning logs values of this step under. Fallback: the global step.

    With several optimizers that counts the steps of each.
    """
    steps = getattr(trainer.fit_loop.epoch_loop, "_batches_that_stepped", None)
    return trainer.global_step if steps is None else int(steps)


def announce_optimizer_step(trainer: Trainer, optimizer: Any) -> None:
    """Call ``on_before_optimizer_step`` for a profiler, if there is one; no code overrides it."""
    if vars(trainer.profiler).get("profile") is not Unrecorded:  # type: ignore[attr-defined]
        call._call_callback_hooks(trainer, "on_before_optimizer_step", optimizer)
        call._call_lightning_module_hook(trainer, "on_before_optimizer_step", optimizer)


def call_gradient_hooks(trainer: Trainer, module: LightningModule, optimizer: Any) -> None:
    """Call ``on_before_optimizer_step`` and clip gradients, as precision plugins do.

    Fallback: the public hooks by themselves, unseen by profilers.
    """
    if _IS_KNOWN:
        trainer.precision_plugin._after_closure(module, optimizer)
        return
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        callback.on_before_optimizer_step(trainer, module, optimizer)
    module.on_before_optimizer_step(optimizer)
    module.configure_gradient_clipping(
        optimizer,
        gradient_clip_val=trainer.gradient_clip_val,
        gradient_clip_algorithm=trainer.gradient_clip_algorithm,
    )


def is_lightnings_closure(closure: object) -> bool:
    """Tell whether a closure is one of Lightning's loop, without a function around it.

    Fallback: False, so that the optimizer calls it.
    """
    return is_lightnings(type(closure), "loops.optimization.automatic")


def takes_no_closure(closure: object) -> bool:
    """Tell whether a module that optimizes manually called ``optimizer.step()`` alone.

    Lightning puts a function of its own in the closure's place, and hands it to the optimizer in
    one that calls hooks behind it. Fallback: False.
    """
    if isinstance(closure, partial) and is_lightnings(closure.func, "plugins.precision.precision"):
        closure = closure.args[-1]
    is_named = getattr(closure, "__name__", "") == "do_nothing_closure"
    return is_named and is_lightnings(closure, "core.optimizer")


_BASES = ("callbacks.callback", "core.hooks", "core.module", "plugins.precision.precision")


def overrides(instance: object, method: str) -> bool:
    """Tell whether anything but Lightning's base classes defines the method."""
    if method in vars(instance):
        return True
    own = getattr(type(instance), method, None)
    return own is not None and not is_lightnings(own, *_BASES)


def counting_optimizers(trainer: Trainer) -> list[Any]:
    """Return what ``self.optimizers()`` gives: wrappers whose steps Lightning counts.

    With manual optimization ``_on_before_step`` and ``_on_after_step`` of each are set to functions
    that count, for the time of a ``training_step`` (manual.py, since 1.5). No public API tells of
    the counts. Fallback: none, and whole steps are not captured.
    """
    return list(getattr(trainer.strategy, "_lightning_optimizers", ()))


def counts_manual_steps(trainer: Trainer) -> bool:
    """Tell whether the steps of every optimizer are counted in the way that is known."""
    found = counting_optimizers(trainer)
    names = {"_on_before_step", "_on_after_step"}
    are_known = all(names <= vars(one).keys() for one in found)
    return _IS_KNOWN and are_known and len(found) == len(trainer.optimizers)


@contextlib.contextmanager
def own_counts(trainer: Trainer) -> Iterator[Callable[[], None]]:
    """Let the body have a copy of the counts of manual optimizer steps; yield what counts one."""
    loop = trainer.fit_loop.epoch_loop.manual_optimization
    counts = copy.deepcopy(loop.optim_step_progress)
    with replaced(loop, "optim_step_progress", counts):
        yield counts.increment_completed


def count_step(optimizer: Any) -> None:
    """Count a step of one of :func:`counting_optimizers` that a replay has taken."""
    optimizer._on_before_step()
    optimizer._on_after_step()


def ddp_options(strategy: object) -> tuple[Mapping[str, Any], object]:
    """Return what a strategy hands to DDP, and the communication hook that it registers.

    They are arguments of the strategy without a public attribute. Fallback: none.
    """
    return getattr(strategy, "_ddp_kwargs", {}), getattr(strategy, "_ddp_comm_hook", None)


def ddp_built_on(strategy: Any, stream: torch.cuda.Stream) -> AbstractContextManager[None]:
    """Let a strategy wrap its module in DDP on ``stream``, where steps are captured later.

    Gradients are accumulated on the stream on which DDP was made, and Lightning makes it on one
    of its own (2.6) or on the default one (#21746). No public API says where. Fallback: a strategy
    of user code wraps modules in its own way.
    """
    if not is_lightnings(type(strategy)._setup_model, "strategies.ddp"):
        return nullcontext()

    def setup_model(model: torch.nn.Module) -> DistributedDataParallel:
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        with torch.cuda.stream(stream):
            ids = strategy.determine_ddp_device_ids()
            wrapped = DistributedDataParallel(model, device_ids=ids, **strategy._ddp_kwargs)
        torch.cuda.current_stream(stream.device).wait_stream(stream)
        return wrapped

    return replaced(strategy, "_setup_model", setup_model)


@dataclass(slots=True)
class Sigterm:
    """A SIGTERM in a fit of several ranks."""

    received: bool = False  # this rank has got one
    stops: bool = False  # all ranks stop after the present step


@contextlib.contextmanager
def sigterm_agreed(trainer: Trainer, sigterm: Sigterm) -> Iterator[None]:
    """Let all ranks stop after the same step where one has got a SIGTERM, and wait for no device.

    Lightning (2.5.2) broadcasts a tensor ahead of every step and reads it. The signal handler
    broadcasts another one, wherever the other ranks are, and a rank with the signal ends alone.
    No public API replaces that. Fallback: Lightning's own way.
    """
    connector = getattr(trainer, "_signal_connector", None)
    loop = trainer.fit_loop.epoch_loop
    if not _IS_KNOWN or connector is None:
        yield
        return

    def received(_: Any) -> bool:
        return sigterm.stops if trainer.training else sigterm.received

    def receive(_: Any, value: bool) -> None:
        sigterm.received = value

    def notify(signum: int, frame: FrameType | None) -> None:
        launcher = trainer.strategy.launcher
        if launcher is not None and not sigterm.received:
            launcher.kill(signum)
        sigterm.received = True

    own = connector._sigterm_notifier_fn
    composed = getattr(signal.getsignal(signal.SIGTERM), "signal_handlers", None)
    handlers = composed if isinstance(composed, list) and own in composed else [own]
    at = handlers.index(own)
    sigterm.received = connector.received_sigterm
    watched = subclassed(connector, {"received_sigterm": property(received, receive)})
    try:
        handlers[at] = notify
        with watched, replaced(loop, "_broadcast_sigterm_tensor", lambda: None):
            yield
    finally:
        handlers[at] = own
        connector.received_sigterm = sigterm.received


def copies_of(kind: type) -> list[Any]:
    """List a class of Lightning, and the same one of ``pytorch_lightning`` if that is imported.

    Fallback: the code of the latter counts as user code.
    """
    other = sys.modules.get(kind.__module__.replace("lightning.pytorch", _COPY, 1))
    return [kind, *filter(None, [getattr(other, kind.__name__, None)])]


def own_copy(trainer: Trainer, kind: type) -> Any:
    """Return the class of :func:`copies_of` that belongs to the trainer's package."""
    is_copy = any(one.__module__.startswith(_COPY) for one in type(trainer).__mro__)
    return copies_of(kind)[-1 if is_copy else 0]


def functions_of(kind: type, name: str) -> frozenset[Any]:
    """Return a method as all :func:`copies_of` a class define it; it is overridden by others."""
    return frozenset(getattr(one, name) for one in copies_of(kind))


_LOOPS_READ = (2, 6, 0), (2, 6, 6)
"""The first and the last version whose loops were read."""


def _are_loops_read(trainer: Trainer) -> bool:
    package = sys.modules[own_copy(trainer, Trainer).__module__.partition(".")[0]]
    found = re.match(r"(\d+)\.(\d+)\.(\d+)$", package.__version__)
    log = logging.getLogger(own_copy(trainer, Trainer).__module__.replace(".trainer", ".call"))
    return (
        found is not None
        and _LOOPS_READ[0] <= tuple(map(int, found.groups())) <= _LOOPS_READ[1]
        and not log.isEnabledFor(logging.DEBUG)  # it names each hook
    )


def is_known_loop(trainer: Trainer) -> bool:
    """Tell whether :mod:`~lightning_graphs.lightning.loop` may stand for the training loop.

    No public API leaves out what Lightning's ``advance`` does around hooks that are not overridden,
    and around metrics that are not read, 0.3 to 1 ms a step. Fallback: Lightning's own loop.
    """
    if not _are_loops_read(trainer):
        return False
    loop = trainer.fit_loop.epoch_loop
    parts = {
        fit_loop._FitLoop: trainer.fit_loop,
        training_epoch_loop._TrainingEpochLoop: loop,
        automatic._AutomaticOptimization: loop.automatic_optimization,
        manual._ManualOptimization: loop.manual_optimization,
        _ResultCollection: loop._results,
        _LoggerConnector: trainer._logger_connector,
    }
    are_known = all(type(part) in copies_of(kind) for kind, part in parts.items())
    return are_known and vars(loop).keys().isdisjoint(("advance", "on_advance_end", "run"))


def is_known_evaluation(trainer: Trainer, loop: Any) -> bool:
    """Tell whether :mod:`~lightning_graphs.lightning.loop` may stand for a loop.

    As :func:`is_known_loop`, of which the same is true, for the loops of validation, test and
    prediction.
    """
    parts: dict[type, Any] = {_LoggerConnector: trainer._logger_connector}
    if type(loop) in copies_of(prediction_loop._PredictionLoop):
        names = ("_predict_step", "_store_data_for_prediction_writer", "run")
    else:
        names = ("_evaluation_step", "_build_kwargs", "run")
        parts |= {evaluation_loop._EvaluationLoop: loop, _ResultCollection: loop._results}
    return (
        _are_loops_read(trainer)
        and all(type(part) in copies_of(kind) for kind, part in parts.items())
        and vars(loop).keys().isdisjoint(names)
    )


def moved_to_cpu(value: Any) -> Any:
    """Return predictions as Lightning keeps them: tensors on the CPU, in containers of their own.

    The function is not documented, and older than Lightning 2. It is a fallback itself.
    """
    return move_data_to_device(value, torch.device("cpu"))


def plain_fetchers() -> tuple[type, ...]:
    """Return the classes of fetchers that hand out batch after batch, not an iterator."""
    plain = fetchers._DataFetcher, fetchers._PrefetchDataFetcher
    return tuple(itertools.chain.from_iterable(map(copies_of, plain)))


def reader_of_streams(device: torch.device) -> Callable[[], torch.cuda.Stream]:
    """Return what returns the current stream of a device: one object for each stream.

    ``torch.cuda.current_stream``, the fallback, makes an object each time, which takes 7 us.
    """
    read, ask = getattr(torch._C, "_cuda_getCurrentStream", None), torch.cuda.current_stream
    if read is None:
        return partial(ask, device)
    index, known = ask(device).device_index, dict[Any, torch.cuda.Stream]()

    def current() -> torch.cuda.Stream:
        stream = known.get(key := read(index))
        if stream is None:
            stream = known[key] = ask(device)
        return stream

    return current


_READ = {"torch", "autograd", "profiler", "record_function", "_profile_name", "_sampler_iter"}
_READ |= {"_reset", "_next_data", "_num_yielded", "_dataset_kind", "_DatasetKind", "Iterable"}
_READ |= {"_IterableDataset_len_called", "_dataset", "_num_workers", "warnings", "warn"}
"""Names in the method of torch's data loaders that was read, in torch 2.11 and 2.13."""


def _unmarked(kind: type) -> type:
    """Return a class of iterators that mark no batch for profilers while none records."""

    def __next__(iterator: Any) -> Any:
        is_recorded = torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
        if is_recorded or iterator._sampler_iter is None:
            return kind.__next__(iterator)  # type: ignore[attr-defined]
        batch = iterator._next_data()
        iterator._num_yielded += 1
        return batch

    return type(kind.__name__, (kind,), {"__next__": __next__, "__module__": kind.__module__})


_UNMARKED = {
    kind: _unmarked(kind)
    for kind in (dataloader._SingleProcessDataLoaderIter, dataloader._MultiProcessingDataLoaderIter)
    if {*kind.__next__.__code__.co_names} == _READ
}


@contextlib.contextmanager
def unmarked_batches(fetcher: Any) -> Iterator[None]:
    """Let torch's data loaders make no mark for profilers of each batch, while none records.

    No public API leaves it out. It takes 12 of the 15 us of a batch that is there already. Other
    iterators, and those of datasets without a length of their own, stay as they are.
    """
    known: list[tuple[Any, type]] = []
    mode = getattr(fetcher.combined_loader, "_iterator", None)
    for iterator in getattr(mode, "iterators", ()):
        kind = type(iterator)
        if kind in _UNMARKED and iterator._dataset_kind == dataloader._DatasetKind.Map:
            known.append((iterator, kind))
            iterator.__class__ = _UNMARKED[kind]
    try:
        yield
    finally:
        for iterator, kind in known:
            iterator.__class__ = kind


def is_unrecorded(trainer: Trainer) -> bool:
    """Tell whether :func:`cheap_contexts` is in force: no profiler records the fit."""
    profiler = trainer.profiler  # type: ignore[attr-defined]
    return vars(profiler).get("profile") is Unrecorded


def is_profiled(trainer: Trainer) -> bool:
    """Tell whether a profiler records the fit: any but an unchanged ``PassThroughProfiler``."""
    profiler = trainer.profiler  # type: ignore[attr-defined]
    kind = type(profiler)
    parts = (kind, kind.start, kind.stop, kind.profile)
    is_original = all(is_lightnings(p, "profilers.base", "profilers.profiler") for p in parts)
    is_patched = not {"start", "stop", "profile"}.isdisjoint(vars(profiler))
    return kind.__name__ != "PassThroughProfiler" or not is_original or is_patched


def cheap_contexts(trainer: Trainer) -> contextlib.AbstractContextManager[None]:
    """Make ``profiler.profile(...)`` three times as cheap while no profiler records.

    Lightning opens such a context around each hook of each callback.
    """
    if is_profiled(trainer):
        return contextlib.nullcontext()
    return replaced(trainer.profiler, "profile", Unrecorded)  # type: ignore[attr-defined]


@dataclass(eq=False, repr=False)
class Unrecorded(contextlib.nullcontext[str], contextlib.ContextDecorator):
    """Takes the place of ``Profiler.profile(...)``: a context and a decorator that do nothing."""

    action_name: str
    enter_result = property(attrgetter("action_name"))


def given_to_fabric() -> Sequence[Any]:
    """Return the callbacks that were given to the Fabric that is being made.

    It asks factories for further ones (``Fabric._configure_callbacks``), and tells them nothing.
    Without that name there are none here, and a Fabric is refused by its first hook.
    """
    frames = frames_from(sys._getframe())
    making = (f.f_locals for f in frames if f.f_code.co_name == "_configure_callbacks")
    found = next(making, {}).get("callbacks")
    return found if isinstance(found, list) else []
