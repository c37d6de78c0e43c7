"""What the engine gets of the trainer, and what user code under watch reads of it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from types import MethodType
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_graphs.device.rules import COUNTER, STORED
from lightning_graphs.errors import CaptureError
from lightning_graphs.lightning.logs import (
    LOGGED_NUMBER,
    LoggedNumbers,
    LogRecorder,
    StepMetrics,
    log_exchanged,
    refuse_log,
)
from lightning_graphs.lightning.oom import OomRecovery
from lightning_graphs.lightning.private import (
    announce_optimizer_step,
    bound_log_redirected,
    call_gradient_hooks,
    copies_of,
    is_lightnings,
    overrides,
    takes_no_closure,
)
from lightning_graphs.lightning.strategy import (
    BatchTransfer,
    ManualSteps,
    ProgressValues,
    calls_of,
)
from lightning_graphs.lightning.words import observers_of
from lightning_graphs.private.callsite import is_library
from lightning_graphs.private.distributed import is_within_backward
from lightning_graphs.private.engine import nodes_behind, runs_code
from lightning_graphs.private.exchange import Absence, exchanged, replaced, subclassed
from lightning_graphs.private.torch import parameters_in
from lightning_graphs.regions.conditions import ClientGuards, Observers, Phase
from lightning_graphs.regions.context import Client, TrainingContext
from lightning_graphs.regions.gradients import cast_together
from lightning_graphs.regions.optimizer import scaler_of
from lightning_graphs.regions.reduction import buffers_synced, unseen_by
from lightning_graphs.regions.tolerance import Tolerance
from lightning_graphs.regions.verify import Verifier
from lightning_graphs.values.guards import is_object, is_plain
from lightning_graphs.values.tree import leaves_of
from lightning_graphs.watch.environment import (
    LOGGERS,
    Effect,
    Environment,
    effects_watched,
    rates_exchanged,
)
from lightning_graphs.watch.forms import MakeNumber
from lightning_graphs.watch.kept import CallAt, KeptCalls
from lightning_graphs.watch.mechanism import Check
from lightning_graphs.watch.reads import AttributeGuards
from lightning_graphs.watch.tracers import refuse_tracers
from lightning_graphs.watch.user_code import HELD_ELSEWHERE, UserCode, know_base

# ------------------ The trainer under watch

# `log` and `forward` are exchanged in instances while a step or a module is captured; the state
# is that of toggle_optimizer().
know_base(LightningModule, "log", "forward", "_param_requires_grad_state")
# The optimizer step guards the optimizers
HELD_ELSEWHERE.append(lambda root: getattr(getattr(root, "_trainer", None), "optimizers", ()))

_COUNTERS = frozenset({"global_step", "current_epoch", "is_last_batch"})
_CHANGING = _COUNTERS | {
    *("callback_metrics", "logged_metrics", "progress_bar_metrics", "lr_scheduler_configs"),
    *("checkpoint_callbacks", "early_stopping_callbacks"),
}
"""Attributes of the trainer with another value in every step."""

_CONSTANT = frozenset(
    {"max_epochs", "max_steps", "num_training_batches", "estimated_stepping_batches"}
    | {"world_size", "global_rank", "local_rank", "is_global_zero", "num_devices", "device_ids"}
    | {"precision", "default_root_dir", "lightning_module", "model", "optimizers"}
    | {"training", "validating", "testing", "predicting", "sanity_checking", "state"}
    | {"strategy", "accelerator", "precision_plugin", "profiler", "logger", "loggers"}
)
"""Attributes of the trainer that are constant in a fit, or have guards of their own."""

_CONTAINERS = (dict, list, set, tuple, Tensor)
_LOADERS = frozenset({"train_dataloader", "val_dataloaders"})
_CYCLES = "which a graph would freeze; cycle_momentum=False leaves momentum and betas alone"
_CLIPPING = attrgetter("gradient_clip_val", "gradient_clip_algorithm")
_PLUGIN = attrgetter("precision_plugin")
_MANY = 10_000
"""Steps that are expected of a fit without an end."""


def _without_autocast_cache(plugin: Any) -> AbstractContextManager[None]:
    """Keep autocast from caching casts of weights, also if the precision plugin enables it.

    A cached cast would be made by one graph and read by another, or by eager code.
    """
    manager = getattr(plugin, "autocast_context_manager", None)
    if manager is None:
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def uncached() -> Iterator[None]:
        with manager():
            torch.set_autocast_cache_enabled(False)
            yield

    return replaced(plugin, "autocast_context_manager", uncached)


class TrainerWatch(Client):
    """The trainer as client of the engine."""

    watched = ()
    stores_outside = False

    def __init__(
        self,
        trainer: Trainer,
        module: LightningModule,
        progress: ProgressValues | None = None,  # mirrors the values for the progress bar
    ) -> None:
        self._trainer = trainer
        self._module = module
        self._progress = progress
        self.own = UserCode(module)
        self.metrics = StepMetrics(module)
        self.kept = KeptCalls(self.own, LOGGED_NUMBER.rule)
        self.logged = LoggedNumbers()  # Python numbers that change from step to step
        self.run = trainer.strategy.training_step  # also if user code has set it
        self._calls = calls_of(trainer.strategy)
        # Of the step that is captured, or compared with its replay
        self._manual: ManualSteps | None = None
        self._refuses_numbers = False  # it is captured

    @property
    def function(self) -> Any:
        """The user's ``training_step``."""
        return self._module.training_step

    @property
    def optimizers(self) -> list[Optimizer]:
        return self._trainer.optimizers

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        return scaler_of(self._trainer.precision_plugin)

    @property
    def clipping(self) -> tuple[object, ...]:
        found: tuple[object, ...] = _CLIPPING(self._trainer)
        return found

    @property
    def epoch(self) -> int:
        return self._trainer.current_epoch

    @property
    def ddp(self) -> Any:
        return wrapper_of(self._trainer)

    @property
    def optimizes_itself(self) -> bool:
        return not self._module.automatic_optimization

    def recorder(self) -> LogRecorder:
        self._refuses_numbers = True
        given = (self.metrics, self.kept), self._progress, self.logged
        return LogRecorder(self._module, *given, manual=self._manual_steps(is_captured=True))

    def mute(self) -> LogRecorder:
        self._refuses_numbers = False
        given = self._module, (self.metrics, self.kept)
        manual = self._manual_steps(is_captured=False)
        watching = partial(effects_watched, self, refuses=False)
        undone = partial(self.kept.left_out, watching)
        return LogRecorder(*given, undone=undone, manual=manual)

    def _manual_steps(self, *, is_captured: bool) -> ManualSteps | None:
        self._manual = None
        if self.optimizes_itself:
            self._manual = ManualSteps(self._trainer, self._calls, is_captured=is_captured)
        return self._manual

    def learns(self) -> bool:
        return any([self.metrics.learn(), self.kept.learns()])

    def look(self, returned: Any) -> None:
        """Let captures compute metrics of whose values a step of the warm-up has returned one."""
        behind = set(nodes_behind(leaves_of(returned, Tensor)))
        values = [(m, getattr(m, "_forward_cache", None)) for _, m in self.metrics.apart()]
        found = ((m, leaves_of(value, Tensor)) for m, value in values)
        self.metrics.learn(m for m, made in found if any(t.grad_fn in behind for t in made))

    def keeps_back(self, error: CaptureError, reads: Sequence[CallAt]) -> bool:
        if self.waits_for_gradients():
            return False
        asked = self.logged.was_asked()
        if self.kept.learn(error, reads):
            return True
        if asked:  # not to be read behind a replay
            self.logged.frozen.clear()
        return asked

    def is_apart(self, module: nn.Module) -> bool:
        return self.metrics.is_apart(module)

    def backward(self, loss: Tensor, optimizer: Optimizer) -> None:
        self._trainer.precision_plugin.backward(loss, self._module, optimizer)

    def takes_no_closure(self, closure: Callable[[], Any] | None) -> bool:
        return closure is None or takes_no_closure(closure)

    def clip(self, optimizer: Optimizer) -> None:
        value, algorithm = _CLIPPING(self._trainer)
        self._module.configure_gradient_clipping(
            optimizer, gradient_clip_val=value, gradient_clip_algorithm=algorithm
        )

    def call_gradient_hooks(self, optimizer: Optimizer) -> None:
        call_gradient_hooks(self._trainer, self._module, optimizer)

    def announce_optimizer_step(self, optimizer: Optimizer) -> None:
        announce_optimizer_step(self._trainer, optimizer)

    def waits_for_gradients(self) -> bool:
        return (ddp := self.ddp) is not None and is_within_backward(ddp)

    def copies_on_host(self, batch: Sequence[Tensor]) -> Sequence[Tensor | None]:
        transfer = getattr(vars(self._trainer.strategy).get("batch_to_device"), "__self__", None)
        if isinstance(transfer, BatchTransfer):
            return [transfer.on_host(tensor) for tensor in batch]
        return super().copies_on_host(batch)

    def environment(self, modules: Sequence[nn.Module] | None = None) -> Environment:
        """Make an environment, before the code of the whole step or of these modules runs."""
        return Environment(self._module, self, modules=modules)

    def arguments(self, given: Sequence[Any], number: Callable[..., Any]) -> list[Any]:
        """Return the further arguments of ``training_step``, with a tracer for ``batch_idx``."""
        loop = self._trainer.fit_loop.epoch_loop
        read = partial(getattr, loop, "batch_idx")
        return [number("batch_idx", read) if type(v) is int else v for v in given]

    @property
    def schedulers(self) -> list[object]:
        """The schedulers of learning rates."""
        return [config.scheduler for config in self._trainer.lr_scheduler_configs]

    @property
    def cycles(self) -> str:
        """Why a graph cannot freeze the optimizer's numbers; empty if no scheduler moves them."""
        for config in self._trainer.lr_scheduler_configs:
            if config.interval == "step" and getattr(config.scheduler, "cycle_momentum", False):
                name = type(config.scheduler).__name__
                return f"{name} moves momentum or betas at every step, {_CYCLES}"
        return ""

    @property
    def accumulates(self) -> bool:
        """Whether steps add to gradients of earlier ones."""
        return self._trainer.accumulate_grad_batches > 1

    @property
    def effects(self) -> list[Effect]:
        """Lightning's functions and loggers that print and log for user code."""
        kind = type(self._trainer)  # the module's own loggers read the trainer's
        loggers = [(kind, name, f"trainer.{name}") for name in LOGGERS]
        modules = copies_of(LightningModule)
        return [*((each, "print", "self.print") for each in modules), *loggers]

    def observers(self) -> Observers:
        """Find the overridden hooks that run within a step."""
        return observers_of(self._trainer, self._module)

    def is_backward_unseen(self, loss: Tensor, adds_to: Container[int] | None = None) -> bool:
        """Tell whether a backward pass runs only operators of autograd, which read no ``.grad``."""
        return (
            not overrides(self._module, "backward")
            and not overrides(self._trainer.precision_plugin, "backward")
            and not runs_code([loss], adds_to)
        )

    def cast_unseen(self, loss: Tensor) -> AbstractContextManager[None]:
        """Cast gradients together in a backward pass, if no user code can see the difference.

        A gradient that waits for its cast is not in ``.grad`` yet. Only on one device.
        """
        is_alone = is_lightnings(type(self._trainer.strategy), "strategies.single_device") and not (
            torch.distributed.is_available() and torch.distributed.is_initialized()
        )
        if not (is_alone and self.is_backward_unseen(loss)):
            return contextlib.nullcontext()
        return cast_together([loss], [p for p in parameters_in(self._module) if p.requires_grad])

    def loss_of(self, returned: Any) -> Tensor | None:
        """Return the loss in what ``training_step`` has returned."""
        loss = returned.get("loss") if isinstance(returned, Mapping) else returned
        refuse_tracers(loss)
        if self._refuses_numbers:
            self.logged.refuse_returned(returned)
        if not isinstance(loss, Tensor):
            raise CaptureError(
                "training_step must return the loss, or a dict with it under 'loss'.",
                f"got {type(returned).__qualname__}"
                + (f" with loss={loss!r}" if isinstance(returned, Mapping) else ""),
                "return a loss for most batches; steps that are skipped run eagerly",
            )
        return loss

    @contextlib.contextmanager
    def around_step(self) -> Iterator[None]:
        """Let DDP and autocast cache nothing of a step that is captured or compared."""
        ddp = self.ddp
        unseen = contextlib.nullcontext() if ddp is None else exchanged(unseen_by([ddp]))
        with unseen, _without_autocast_cache(self._trainer.precision_plugin):
            yield

    def reading(
        self, reads: AttributeGuards, number: MakeNumber | None
    ) -> AbstractContextManager[None]:
        """Follow or refuse what the body reads of the trainer.

        The trainer's class is exchanged for a subclass. Reading a counter gives a tracer, or is
        refused, also in a library: ``self.global_step`` reads the trainer's. Other values that
        change are for libraries only. Comparable values that user code reads become guards.
        """
        original: Any = type(self._trainer)
        reads.called = self.kept.called

        def read(owner: Trainer, key: str) -> Any:
            steps = self._manual.ahead if self._manual is not None and key == "global_step" else 0
            if key in _COUNTERS and number is not None:
                found = number(f"trainer.{key}", partial(original.__getattribute__, owner, key))
                return found + steps if steps else found
            lasts = key in _CONSTANT or key.startswith("__")
            if key in _COUNTERS or not (lasts or is_library(sys._getframe(1).f_code.co_filename)):
                _note(owner, key, reads)
            return original.__getattribute__(owner, key)

        def store(owner: Trainer, key: str, value: Any) -> None:
            if is_library(sys._getframe(1).f_code.co_filename):
                object.__setattr__(owner, key, value)
            else:
                STORED.refuse_here(f"trainer.{key} is set")

        return subclassed(self._trainer, {"__getattribute__": read, "__setattr__": store})

    @contextlib.contextmanager
    def calling(self) -> Iterator[None]:
        """Refuse logs and learning rates in the body, a capture of calls of modules."""
        with contextlib.ExitStack() as stack:
            for optimizer in self._trainer.optimizers:
                stack.enter_context(rates_exchanged(self.schedulers, optimizer))
            stack.enter_context(log_exchanged(self._module, refuse_log))
            stack.enter_context(bound_log_redirected(self._trainer, refuse_log))
            yield


def _note(trainer: Trainer, key: str, reads: AttributeGuards) -> None:
    """Add a guard for an attribute that user code reads, or report one that changes."""
    # Metrics are not read here: that would compute them
    value: Any = Absence.ABSENT if key in _CHANGING else _value_in(trainer, key)
    if isinstance(value, MethodType):
        return
    is_comparable = is_plain(value) or is_object(value) or isinstance(value, _CONTAINERS)
    if key in _CHANGING or not (key in _LOADERS or is_comparable):
        COUNTER.refuse_here(f"trainer.{key} is read")
    else:
        reads.add(f"self.trainer.{key}", partial(_value_in, trainer), key, trainer)


def _value_in(trainer: Trainer, key: str) -> Any:
    return getattr(trainer, key, Absence.ABSENT)


def client_guards(
    trainer: Trainer,
    phase: Callable[[], Phase],
    is_present: Callable[[], bool] | None = None,  # the optimizer is; None: steps have none
    *,
    synced: bool,
) -> ClientGuards:
    """List what of a trainer the graphs of its steps depend on."""
    plugin: Check = partial(_PLUGIN, trainer.strategy), trainer.precision_plugin
    of_all = [(plugin, lambda: "the trainer's precision was changed")]
    clipping: Callable[[], Any] = bool
    if is_present is not None:
        of_all.append(((is_present, True), lambda: "the optimizer was replaced"))
        clipping = partial(_CLIPPING, trainer)
    return ClientGuards(
        phase=phase,
        epoch=partial(attrgetter("current_epoch"), trainer),
        flags=(clipping, partial(syncs, trainer) if synced else bool),
        of_all=of_all,
    )


def steps_left(trainer: Trainer) -> int:
    """Estimate how many micro-batches are left in a fit."""
    left = float(_MANY)
    each = trainer.num_training_batches
    if trainer.max_epochs not in (None, -1) and each != float("inf"):
        done = trainer.fit_loop.epoch_loop.batch_progress.current.completed
        left = (trainer.max_epochs - trainer.current_epoch) * each - done
    if trainer.max_steps not in (None, -1):
        ahead = (trainer.max_steps - trainer.global_step) * trainer.accumulate_grad_batches
        left = min(left, ahead)
    return int(left)


def evaluations_left(trainer: Trainer) -> int:
    """Estimate how many batches are left for the evaluation that runs."""
    if trainer.testing or trainer.predicting:
        loop = trainer.test_loop if trainer.testing else trainer.predict_loop
        each = trainer.num_test_batches if trainer.testing else trainer.num_predict_batches
    else:
        is_fit = trainer.state.fn == TrainerFn.FITTING
        loop = trainer.fit_loop.epoch_loop.val_loop if is_fit else trainer.validate_loop
        each = trainer.num_val_batches
    every = sum(each)
    left = max(0.0, every - loop.batch_progress.current.completed)
    if trainer.state.fn == TrainerFn.FITTING:
        left += every * _validations_left(trainer)
    return int(min(left, _MANY))


def _validations_left(trainer: Trainer) -> float:
    """Estimate how many validations follow the present one."""
    between: Any = trainer.val_check_batch
    per_epoch = trainer.num_training_batches
    if not isinstance(between, (int, float)) or between == float("inf"):
        between = per_epoch
    if trainer.check_val_every_n_epoch is not None and between >= per_epoch:
        between = per_epoch * trainer.check_val_every_n_epoch
    return steps_left(trainer) // between if 0 < between < float("inf") else 0.0


# ------------------ DDP around the module


def wrapper_of(trainer: Trainer) -> DistributedDataParallel | None:
    """Return DDP's wrapper of the module, which reduces gradients; None without DDP."""
    model = trainer.strategy.model
    return model if isinstance(model, DistributedDataParallel) else None


def syncs(trainer: Trainer) -> bool:
    """Tell whether the coming forward pass gets the buffers of rank 0."""
    ddp = wrapper_of(trainer)
    return ddp is not None and buffers_synced(ddp)


# ------------------ The context of a fit

_ARITHMETIC = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
"""Precision of the trainer -> dtype in which autocast computes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LightningContext(TrainingContext):
    """The parts of a fit that its runners share."""

    trainer: Trainer
    recovery: OomRecovery  # repeats a step that finds no memory
    watch: TrainerWatch
    progress: ProgressValues | None  # mirror of the values for the progress bar; None without a GPU

    def verifier(self) -> Verifier:
        """Make what compares graphs of this fit with eager runs."""
        arithmetic = _ARITHMETIC.get(str(self.trainer.precision_plugin.precision))
        tolerance = Tolerance(self.module.device.type, arithmetic)
        parts = self.budget, self.ranks, self.messages
        return Verifier(self.options.verify, tolerance, *parts, lambda: self.module.global_step)
