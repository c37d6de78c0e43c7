"""Guards graphs before every step: reads its conditions, and finds what has made graphs wrong."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from lightning.pytorch import LightningModule

from lightning_graphs.errors import ReplayError
from lightning_graphs.lightning.context import CaptureFacts
from lightning_graphs.lightning.ranks import syncs
from lightning_graphs.private.torch import (
    accumulation_hooks,
    gradient_hooks,
    hook_tables,
    hooks_registered,
)
from lightning_graphs.regions.body import StepBody
from lightning_graphs.regions.conditions import CaptureKey, Phase, Values, tensors_moved
from lightning_graphs.values.memory import AddressGuard
from lightning_graphs.values.signature import KERNEL_CHOICES, BackendFlags
from lightning_graphs.watch.user_code import CodeOfModules

_TRAINING = attrgetter("training")
OF_THE_TRAINER = ("gradient clipping", "DDP syncs buffers", *KERNEL_CHOICES)
"""Names among :meth:`ReplayGuards.attributes` that stand for no value of the author's."""


class ReplayGuards:
    """Reads the conditions of a fit, and finds what has invalidated its graphs."""

    def __init__(self, module: LightningModule, body: StepBody, learned: CaptureFacts) -> None:
        self._learned = learned
        self._trainer = trainer = module.trainer
        self._plugin = trainer.precision_plugin
        self._optimizer = optimizer = body.optimizer
        self._capturable = body.capturable
        self._module = module
        self._known: Values = ()  # what attributes were last
        self.look_again()
        self._modules = list(module.modules())
        self._optimized = [p for group in optimizer.param_groups for p in group["params"]]
        self._hooks = _Hooks(module)
        self._code = CodeOfModules([module])

    def look_again(self) -> None:
        self._guard = AddressGuard.of_module(self._module, exempt=self._learned.places.exempt)

    def reason_to_rebind(self, *, has_graphs: bool = True) -> str | None:
        """Why no graph of the fit is right any longer; None as long as they are.

        As long as there are none, tensors and code are not looked at, which takes longest.
        """
        if has_graphs and (reason := self._moved_or_exchanged()):
            return reason
        if self._hooks.have_changed():
            return "a hook was registered or removed"
        if self._trainer.precision_plugin is not self._plugin:
            return "the trainer's precision was changed"
        if self._trainer.optimizers[0] is not self._optimizer:
            return "the optimizer was replaced"
        epoch, capturable = self._trainer.current_epoch, self._capturable
        if capturable is not None and (reason := capturable.reason_to_rebind(epoch)):
            return reason
        kept = self._learned.kept
        if kept.are_held() or kept.is_noticed:
            kept.are_copied, kept.is_noticed = True, False
            return "a gradient of an earlier step is kept, and is copied now"
        return None

    def _moved_or_exchanged(self) -> str:
        try:
            self._guard.check()
        except ReplayError as error:
            if self._guard.bring_back():
                return self._moved_or_exchanged()
            if not self._learned.places.learn_moved(self._guard.moved()):
                return error.observed
        return self._code.exchanged()

    def conditions(self, stepping: bool) -> CaptureKey:
        window = self._trainer.accumulate_grad_batches
        zeroing = self._trainer.fit_loop.epoch_loop.batch_idx % window == 0
        training = tuple(map(_TRAINING, self._modules))
        gradients: tuple[bool, ...] = ()
        capturable = self._capturable
        if stepping and not zeroing and capturable is not None:
            gradients = tuple([p.grad is not None for p in self._optimized])
        return CaptureKey(
            Phase(zeroing, stepping, window),
            capturable.hyper_parameters() if capturable is not None else (),
            training,
            self.attributes(),
            gradients,
        )

    def attributes(self) -> tuple[tuple[str, Any], ...]:
        """Name and value of the attributes that are conditions, as they are now."""
        trainer, values = self._trainer, self._learned.reads.now()
        if values is not self._known:
            before, self._known = self._known, values
            bound = tensors_moved(before, values)
            if bound and self._learned.places.learn_bound(bound):
                self._known = values = self._learned.reads.now()
        clipping = (trainer.gradient_clip_val, trainer.gradient_clip_algorithm)
        return (
            *zip(OF_THE_TRAINER, (clipping, syncs(trainer), *BackendFlags.now()), strict=True),
            *values,
        )


class _Hooks:
    """The hooks on the modules and parameters of a fit, which a capture makes part of a graph."""

    def __init__(self, module: LightningModule) -> None:
        self._tables = [table for inner in module.modules() for table in hook_tables(inner)]
        self._parameters = list(module.parameters())
        self._known = self._now()
        self._in_use = [table for table in self._tables if table]
        self._counts = list(map(len, self._in_use))
        self._number = hooks_registered()

    def _now(self) -> list[tuple[object, ...]]:
        own = [find(p) for p in self._parameters for find in (gradient_hooks, accumulation_hooks)]
        return [tuple(table or ()) for table in (*self._tables, *own)]  # type: ignore[arg-type]

    def have_changed(self) -> bool:
        """Whether any was registered or removed since; as a rule it is one comparison."""
        if list(map(len, self._in_use)) != self._counts:
            return True
        number = hooks_registered()
        if number == self._number:
            return False
        self._number = number
        return self._now() != self._known
