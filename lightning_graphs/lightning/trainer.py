"""The trainer, as code under watch meets it: its counters, values, learning rates and loggers."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_graphs.autograd.nodes import cast_together, has_python_nodes, leaves_behind
from lightning_graphs.device.rules import COUNTER, STORED, OnUse, refuse
from lightning_graphs.lightning.logs import LoggedNumbers, LogRecorder, refuse_log
from lightning_graphs.lightning.oom import OomRecovery
from lightning_graphs.lightning.private import (
    announce_optimizer_step,
    call_gradient_hooks,
    kept_log_caught,
)
from lightning_graphs.lightning.ranks import unseen_by_ddp, waits_for_gradients, wrapper_of
from lightning_graphs.lightning.strategy import (
    ProgressValues,
    copies_on_host,
    log_exchanged,
    loss_of,
)
from lightning_graphs.lightning.words import observers_of, overrides
from lightning_graphs.private.callsite import CallSiteFinder, is_library
from lightning_graphs.private.exchange import Absence, replaced, subclassed
from lightning_graphs.private.torch import has_gradient_hooks
from lightning_graphs.regions.conditions import Observers
from lightning_graphs.regions.context import TrainingContext
from lightning_graphs.regions.optimizer import scaler_of
from lightning_graphs.regions.verify import Tolerance, Verifier
from lightning_graphs.values.guards import is_object, is_plain
from lightning_graphs.watch.environment import AsRead, Effect, Environment
from lightning_graphs.watch.reads import AttributeGuards
from lightning_graphs.watch.tracers import rates_exchanged
from lightning_graphs.watch.user_code import HELD_ELSEWHERE, UserCode, is_lightnings, know_base

# ------------------ The trainer, as code under watch meets it: its counters, values, learning rate

# `log` and `forward` are exchanged in instances while a step or a module is captured; the state
# is that of toggle_optimizer().
know_base(LightningModule, "log", "forward", "_param_requires_grad_state")
# What steps the parameters is looked after by the optimizer step
HELD_ELSEWHERE.append(lambda root: getattr(getattr(root, "_trainer", None), "optimizers", ()))

_COUNTERS = frozenset({"global_step", "current_epoch", "is_last_batch"})
_MOVING = _COUNTERS | {
    *("callback_metrics", "logged_metrics", "progress_bar_metrics", "lr_scheduler_configs"),
    *("checkpoint_callbacks", "early_stopping_callbacks"),
}
"""What the trainer gives anew in every step."""

_LASTING = frozenset(
    {"max_epochs", "max_steps", "num_training_batches", "estimated_stepping_batches"}
    | {"world_size", "global_rank", "local_rank", "is_global_zero", "num_devices", "device_ids"}
    | {"precision", "default_root_dir", "lightning_module", "model", "optimizers"}
    | {"training", "validating", "testing", "predicting", "sanity_checking", "state"}
    | {"strategy", "accelerator", "precision_plugin", "profiler", "logger", "loggers"}
)
"""What stays as it is for a whole fit, or is looked at elsewhere."""

_CONTAINERS = (dict, list, set, tuple, Tensor)
_LOADERS = frozenset({"train_dataloader", "val_dataloaders"})
_LOGGERS = ("logger", "loggers")
_CYCLES = "which a graph would freeze; cycle_momentum=False leaves momentum and betas alone"
_MANY = 10_000
"""Steps that are left in a fit without an end."""


@contextlib.contextmanager
def _without_autocast_cache(plugin: Any) -> Iterator[None]:
    """Keep autocast from caching the casts of weights, whatever the plugin says.

    A cached cast would be made by one graph and read by another, or by eager code.
    """
    manager = getattr(plugin, "autocast_context_manager", None)
    if manager is None:
        yield
        return

    @contextlib.contextmanager
    def uncached() -> Iterator[None]:
        with manager():
            torch.set_autocast_cache_enabled(False)
            yield

    with replaced(plugin, "autocast_context_manager", uncached):
        yield


class TrainerWatch:
    """Makes the environments of a fit, and watches its trainer in them."""

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
        self.logged = LoggedNumbers()  # Python numbers that change from step to step
        self.run = trainer.strategy.training_step  # a program's own one, too

    @property
    def function(self) -> Any:
        """See :class:`Client`, as for what follows."""
        return self._module.training_step

    @property
    def optimizers(self) -> list[Optimizer]:
        return self._trainer.optimizers

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        return scaler_of(self._trainer.precision_plugin)

    @property
    def clipping(self) -> tuple[object, ...]:
        return self._trainer.gradient_clip_val, self._trainer.gradient_clip_algorithm

    @property
    def epoch(self) -> int:
        return self._trainer.current_epoch

    @property
    def ddp(self) -> Any:
        return wrapper_of(self._trainer)

    def recorder(self) -> LogRecorder:
        return LogRecorder(self._module, self._progress, self.logged)

    def mute(self) -> LogRecorder:
        return LogRecorder(self._module)

    def backward(self, loss: Tensor, optimizer: Optimizer) -> None:
        self._trainer.precision_plugin.backward(loss, self._module, optimizer)

    def clip(self, optimizer: Optimizer) -> None:
        value, algorithm = self._trainer.gradient_clip_val, self._trainer.gradient_clip_algorithm
        self._module.configure_gradient_clipping(
            optimizer, gradient_clip_val=value, gradient_clip_algorithm=algorithm
        )

    def call_gradient_hooks(self, optimizer: Optimizer) -> None:
        call_gradient_hooks(self._trainer, self._module, optimizer)

    def announce_optimizer_step(self, optimizer: Optimizer) -> None:
        announce_optimizer_step(self._trainer, optimizer)

    def waits_for_gradients(self) -> bool:
        return waits_for_gradients(self._trainer)

    def copies_on_host(self, batch: Sequence[Tensor]) -> list[Tensor | None]:
        return copies_on_host(self._trainer, batch)

    def environment(
        self,
        modules: Sequence[nn.Module] | None = None,
        *,
        on_use: OnUse = refuse,
        seen: Iterable[Any] | None = None,
    ) -> Environment:
        """An environment for code of the whole step, or of these modules; made before it runs."""
        return Environment(self._module, self, modules=modules, on_use=on_use, seen=seen)

    def arguments(self, given: Sequence[Any], number: Callable[..., Any]) -> list[Any]:
        """What ``training_step`` is given beside its batch, with a tracer for the index of that."""
        loop = self._trainer.fit_loop.epoch_loop
        read = partial(getattr, loop, "batch_idx")
        return [number("batch_idx", read) if type(v) is int else v for v in given]

    @property
    def schedulers(self) -> list[object]:
        """What moves learning rates."""
        return [config.scheduler for config in self._trainer.lr_scheduler_configs]

    @property
    def cycles(self) -> str:
        """Why a graph cannot hold the optimizer's numbers from the beginning; empty if it may."""
        for config in self._trainer.lr_scheduler_configs:
            if config.interval == "step" and getattr(config.scheduler, "cycle_momentum", False):
                name = type(config.scheduler).__name__
                return f"{name} moves momentum or betas at every step, {_CYCLES}"
        return ""

    @property
    def accumulates(self) -> bool:
        """Whether gradients of earlier steps are added to."""
        return self._trainer.accumulate_grad_batches > 1

    @property
    def effects(self) -> list[Effect]:
        """What prints and logs for user code."""
        kind = type(self._trainer)  # the module's own loggers read the trainer's
        loggers = [(kind, name, f"trainer.{name}") for name in _LOGGERS]
        return [(LightningModule, "print", "self.print"), *loggers]

    def observers(self) -> Observers:
        """The overridden hooks that run within a step."""
        return observers_of(self._trainer, self._module)

    def is_backward_unseen(self, loss: Tensor) -> bool:
        """Whether autograd's own operators alone run in a backward pass, which see no ``.grad``."""
        return (
            not overrides(self._module, "backward")
            and not overrides(self._trainer.precision_plugin, "backward")
            and not has_python_nodes([loss], compiled=False)
            and not any(map(has_gradient_hooks, leaves_behind([loss])))
        )

    def cast_unseen(self, loss: Tensor) -> AbstractContextManager[None]:
        """Around a backward pass that is unseen, on one device: cast gradients together.

        Those that wait for their cast are not in ``.grad`` yet.
        """
        is_alone = is_lightnings(type(self._trainer.strategy), "strategies.single_device") and not (
            torch.distributed.is_available() and torch.distributed.is_initialized()
        )
        if not (is_alone and self.is_backward_unseen(loss)):
            return contextlib.nullcontext()
        return cast_together([loss], [p for p in self._module.parameters() if p.requires_grad])

    def loss_of(self, returned: Any) -> Tensor:
        """The loss in what ``training_step`` has returned."""
        return loss_of(returned)

    @contextlib.contextmanager
    def around_step(self) -> Iterator[None]:
        """Let DDP and autocast keep nothing of the body, a step that is captured or compared."""
        with unseen_by_ddp(self._trainer), _without_autocast_cache(self._trainer.precision_plugin):
            yield

    @contextlib.contextmanager
    def reading(
        self, on_use: OnUse, reads: AttributeGuards | None, number: AsRead | None
    ) -> Iterator[None]:
        """Meet what the body reads of the trainer: counters, and other values that move.

        The trainer's class is exchanged for a subclass. Counters are nobody's to read: the module's
        own read the trainer's. What else changes, as its metrics do, only libraries may look at;
        values that user code finds there and that can be compared are noted. It may set none.
        """
        original: Any = type(self._trainer)

        def read(owner: Trainer, key: str) -> Any:
            if key in _COUNTERS and number is not None:
                return number(f"trainer.{key}", partial(original.__getattribute__, owner, key))
            lasts = key in _LASTING or key.startswith("__")
            if key in _COUNTERS or not (lasts or is_library(sys._getframe(1).f_code.co_filename)):
                _note(owner, key, on_use, reads)
            return original.__getattribute__(owner, key)

        def store(owner: Trainer, key: str, value: Any) -> None:
            if not is_library(sys._getframe(1).f_code.co_filename):
                on_use(STORED, f"trainer.{key}", f"trainer.{key} is set", CallSiteFinder().here())
            object.__setattr__(owner, key, value)

        with subclassed(self._trainer, {"__getattribute__": read, "__setattr__": store}):
            yield

    @contextlib.contextmanager
    def calling(self) -> Iterator[None]:
        """Refuse logs and learning rates in the body, a capture of calls of modules."""
        with contextlib.ExitStack() as stack:
            for optimizer in self._trainer.optimizers:
                stack.enter_context(rates_exchanged(self.schedulers, optimizer))
            stack.enter_context(log_exchanged(self._module, refuse_log))
            stack.enter_context(kept_log_caught(self._trainer, refuse_log))
            yield


def _note(trainer: Trainer, key: str, on_use: OnUse, reads: AttributeGuards | None) -> None:
    """Note what the author's code reads from the trainer, or tell that it moves."""
    # Whether it moves is known ahead of a look at metrics, which computes them
    value: Any = Absence.ABSENT if key in _MOVING else _found_in(trainer, key)
    if isinstance(value, MethodType):
        return
    is_comparable = is_plain(value) or is_object(value) or isinstance(value, _CONTAINERS)
    if key in _MOVING or not (key in _LOADERS or is_comparable):
        on_use(COUNTER, f"trainer.{key}", f"trainer.{key} is read", CallSiteFinder().here())
    elif reads is not None:
        reads.add(f"self.trainer.{key}", partial(_found_in, trainer), key, trainer)


def _found_in(trainer: Trainer, key: str) -> Any:
    return getattr(trainer, key, Absence.ABSENT)


def steps_left(trainer: Trainer) -> int:
    """How many micro-batches are left in a fit, as far as one can tell."""
    left = float(_MANY)
    each = trainer.num_training_batches
    if trainer.max_epochs not in (None, -1) and each != float("inf"):
        done = trainer.fit_loop.epoch_loop.batch_idx
        left = (trainer.max_epochs - trainer.current_epoch) * each - done
    if trainer.max_steps not in (None, -1):
        ahead = (trainer.max_steps - trainer.global_step) * trainer.accumulate_grad_batches
        left = min(left, ahead)
    return int(left)


# ------------------ The context of a fit under Lightning: what its runners have besides the region

_ARITHMETIC = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
"""What autocast computes in, by the name of a precision."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LightningContext(TrainingContext):
    """What every runner is made of."""

    trainer: Trainer
    recovery: OomRecovery  # repeats a step that finds no memory
    watch: TrainerWatch
    progress: ProgressValues | None  # mirror of the values for the progress bar; None without a GPU

    def verifier(self) -> Verifier:
        """What compares graphs of this fit with eager runs."""
        arithmetic = _ARITHMETIC.get(str(self.trainer.precision_plugin.precision))
        tolerance = Tolerance(self.module.device.type, arithmetic)
        parts = self.budget, self.ranks, self.messages
        return Verifier(self.options.verify, tolerance, *parts, lambda: self.module.global_step)
