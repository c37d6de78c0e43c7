"""Exchanges of Lightning's strategy methods, ``self.log``, progress bar and batch transfer.

Every hook, counter, progress bar, logger and checkpoint stays in Lightning's hands. The methods
have had these names and signatures since Lightning 2.0; they are looked up on the instance.

Lightning reads every value with ``prog_bar=True`` at the end of every batch, whatever the refresh
rate of the bar. On a GPU that waits for the step to finish, and nothing runs while the CPU prepares
the next one. The mirror holds the values of the latest step that has finished.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, is_dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import Strategy
from torch import Tensor

from lightning_graphs.lightning.private import (
    count_step,
    counting_optimizers,
    functions_of,
    is_profiled,
    own_counts,
    reader_of_streams,
    step_progress,
    step_value,
    training_results,
    updates_loggers,
)
from lightning_graphs.private.exchange import exchanged, nothing, replaced
from lightning_graphs.private.torch import is_strided, version_of
from lightning_graphs.values.guards import is_object
from lightning_graphs.values.tree import leaves_of

# ------------------ Strategy methods and ``self.log``

NAMES = ("training_step", "backward", "optimizer_step")


@dataclass(frozen=True, slots=True)
class StrategyCalls:
    """The strategy's own methods."""

    training_step: Callable[..., Any]
    backward: Callable[..., Tensor]
    optimizer_step: Callable[..., Any]


def calls_of(strategy: Strategy, step: str = NAMES[0]) -> StrategyCalls:
    """Return the methods of a strategy, with that of this name for steps."""
    return StrategyCalls(getattr(strategy, step), strategy.backward, strategy.optimizer_step)


def saving_exchanged(
    strategy: Strategy, before: Callable[[], object]
) -> AbstractContextManager[None]:
    """Call ``before`` ahead of all that writes a checkpoint; it may raise, or say no by False."""
    save = strategy.save_checkpoint

    def saved(*args: Any, **kwargs: Any) -> None:
        if before() is not False:
            save(*args, **kwargs)

    return replaced(strategy, "save_checkpoint", saved)


# ------------------ Values for the progress bar

_SLOTS = 64


class ProgressValues:
    """Mirror of the values that steps log with ``prog_bar=True``, in pinned memory.

    Graphs of whole steps copy the values. Those of other steps are copied when Lightning asks for
    them, if :attr:`follows` is set.

    On the bar a value may be one step old. It is exact where Lightning waits for the device anyway:
    at steps that are logged, at the last batch of an epoch, and in loggers and ``callback_metrics``
    always.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        # What a graph writes must exist before the capture; a host half would follow the views.
        host = torch.full((_SLOTS,), float("nan"), pin_memory=True)
        self._values, self._places = host.numpy(), host.split(1)
        self._slots: dict[str, int] = {}
        self._results: Any = training_results(trainer)
        self.mirrored: frozenset[str] = (
            frozenset()
        )  # names whose values the replayed step has copied
        self.follows = False  # copy values of steps without a graph of the whole

    def installed(self) -> AbstractContextManager[None]:
        """Answer in place of the results collection when Lightning reads the metrics of a step."""
        if self._results is None:
            return nullcontext()
        return replaced(self._results, "metrics", self._metrics)

    def capture(self, values: Mapping[str, Tensor]) -> frozenset[str]:
        """Copy scalars to the host, also in a capture; return the names that have a slot."""
        placed = list(filter(self._has_place, values))
        for name in placed:
            place = self._places[self._slots[name]]
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
        """Return the metrics of the collection, with mirrored numbers in place of device reads."""
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


# ------------------ Batch transfer


class BatchTransfer:
    """Runs ``strategy.batch_to_device`` on a stream of its own.

    Lightning asks for the next batch while the GPU still replays the last step, for which a copy
    on the stream of the steps would wait. A CPU that is far ahead waits here, so that batches do
    not pile up in memory.

    It requires that no user code overrides the hooks that move a batch. A tensor, or a tuple, list
    or dict of tensors, takes a short path; Lightning's own costs 0.1 ms of CPU time.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._strategy = strategy = trainer.strategy
        self._device = strategy.root_device
        self._transfer = strategy.batch_to_device
        self._stream = torch.cuda.Stream(self._device)
        self._present = reader_of_streams(self._device)
        self._moved = torch.cuda.Event()
        self._launched: deque[torch.cuda.Event] = deque()
        self._copied: deque[list[tuple[weakref.ref[Tensor], Tensor]]] = deque(maxlen=_AHEAD + 1)
        known = functions_of(Strategy, "batch_to_device")
        unchanged = getattr(self._transfer, "__func__", None) in known
        self._is_short = unchanged and not is_profiled(trainer)

    def installed(self) -> AbstractContextManager[None]:
        return replaced(self._strategy, "batch_to_device", self._batch_to_device)

    def _batch_to_device(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        steps = self._present()
        is_elsewhere = bool(args) or kwargs.get("device") is not None
        parts = open_simple_batch(batch) if self._is_short and not is_elsewhere else None
        if parts is None:
            return self._long_way(steps, batch, *args, **kwargs)
        tensors, build = parts
        self._wait_for_steps(steps)
        torch.cuda.set_stream(self._stream)
        try:
            moved = [tensor.to(self._device, non_blocking=True) for tensor in tensors]
        finally:
            torch.cuda.set_stream(steps)
        self._hand_over(steps, moved)
        self._copied.append(list(zip(map(weakref.ref, moved), tensors, strict=True)))
        return build(moved)

    def on_host(self, tensor: Tensor) -> Tensor | None:
        """Return the source of a tensor of the last batches; None if it may have changed since.

        A tensor that has stayed on the host is its own. One that was made in inference mode, as
        those of evaluations are, does not count its writes.
        """
        if tensor.device.type == "cpu":
            return tensor
        for copied in self._copied:
            for moved, source in copied:
                if moved() is tensor:
                    counts_writes = not tensor.is_inference()
                    return source if counts_writes and version_of(tensor) == 0 else None
        return None

    def _long_way(self, steps: torch.cuda.Stream, batch: Any, *args: Any, **kwargs: Any) -> Any:
        before = leaves_of(batch)  # a batch that moves itself may be moved in place
        if any(map(_needs_the_step_stream, before)):
            return self._transfer(batch, *args, **kwargs)
        self._wait_for_steps(steps)
        with torch.cuda.stream(self._stream):
            moved = self._transfer(batch, *args, **kwargs)
        leaves = leaves_of(moved)
        if len(leaves) == len(before):
            pairs = [(t, b) for t, b in zip(leaves, before, strict=True) if isinstance(t, Tensor)]
            self._copied.append([(weakref.ref(t), b) for t, b in pairs if t.is_cuda])
        self._hand_over(steps, [t for t in leaves if isinstance(t, Tensor) and t.is_cuda])
        return moved

    def _hand_over(self, steps: torch.cuda.Stream, moved: Sequence[Tensor]) -> None:
        """Let the steps wait for the copies, and keep their memory until the steps have used it."""
        self._moved.record(self._stream)
        steps.wait_event(self._moved)
        for tensor in moved:
            tensor.record_stream(steps)

    def _wait_for_steps(self, steps: torch.cuda.Stream) -> None:
        """Wait until fewer than :data:`_AHEAD` steps are unfinished."""
        if len(self._launched) == _AHEAD:
            event = self._launched.popleft()
            event.synchronize()
        else:
            event = torch.cuda.Event()
        event.record(steps)
        self._launched.append(event)


_AHEAD = 2
"""Steps that the CPU may be ahead of the GPU."""


def _needs_the_step_stream(leaf: Any) -> bool:
    """Tell whether a leaf must be copied on the stream of the steps.

    A kernel that computes a tensor of the GPU may still run. ``record_stream`` does not take sparse
    and nested tensors or those inside of an object, so their memory would be reused too early.
    """
    if isinstance(leaf, Tensor):
        return leaf.is_cuda or not is_strided(leaf)
    return hasattr(leaf, "to") or is_object(leaf)


@lru_cache
def _stays(kind: Any) -> bool:
    """Return whether moving a batch leaves values of this kind where and what they are."""
    is_open = issubclass(kind, (Mapping, Sequence)) and kind is not str
    return not (is_open or is_dataclass(kind) or hasattr(kind, "to"))


def rebuilt(batch: Any, device: torch.device) -> Any:
    """Return what moving a batch to a device gives if all is there: new containers.

    None if it may give something else: the batch is moved then.
    """
    kind = type(batch)
    if kind is Tensor:
        return batch if batch.device == device else None
    if kind not in (list, tuple, dict):
        return None
    moved = list(batch.values() if kind is dict else batch)
    for i, value in enumerate(moved):
        inside: Any = type(value)
        if inside is Tensor and value.device == device:
            continue
        if not _stays(inside):
            moved[i] = rebuilt(value, device)
            if moved[i] is None:
                return None
    return dict(zip(batch, moved, strict=True)) if kind is dict else kind(moved)


def open_simple_batch(batch: Any) -> tuple[list[Tensor], Callable[[list[Tensor]], Any]] | None:
    """Return the tensors of a simple batch, and what rebuilds it; None for any other batch.

    A batch is simple if it is a strided CPU tensor, or a tuple, list or dict of such tensors, of
    simple batches, and of values that stay where they are.
    """
    tensors: list[Tensor] = []
    if type(batch) not in (Tensor, tuple, list, dict) or not _collect(batch, tensors):
        return None
    return tensors, lambda moved: _filled(batch, iter(moved))


def _collect(value: Any, found: list[Tensor]) -> bool:
    kind: Any = type(value)
    if kind is Tensor:
        found.append(value)
        return value.device.type == "cpu" and is_strided(value)
    if kind is tuple or kind is list or kind is dict:
        inside = value.values() if kind is dict else value
        return all([_collect(one, found) for one in inside])
    return _stays(kind)


def _filled(value: Any, moved: Iterator[Tensor]) -> Any:
    kind = type(value)
    if kind is Tensor:
        return next(moved)
    if kind is dict:
        return {key: _filled(one, moved) for key, one in value.items()}
    return kind([_filled(one, moved) for one in value]) if kind in (tuple, list) else value


# ------------------ Manual optimization


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
