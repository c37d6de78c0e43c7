"""A step's way through the house: eager, captured or replayed, decided for every batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor
from torch.optim import Optimizer

from lightning_graphs.core.buffers import AddressGuard
from lightning_graphs.core.cache import PlanCache
from lightning_graphs.core.pool import GraphPool
from lightning_graphs.core.signature import CallPlan, Modes, Signature
from lightning_graphs.core.torch_private import has_step_hooks
from lightning_graphs.errors import CaptureError, GraphError, ReplayError
from lightning_graphs.training.conditions import Conditions, Phase
from lightning_graphs.training.frozen import LoggedNumbers
from lightning_graphs.training.interception import StrategyCalls
from lightning_graphs.training.lightning_private import (
    announce_optimizer_step,
    call_gradient_hooks,
    skips_backward,
)
from lightning_graphs.training.observers import Observers
from lightning_graphs.training.optimizers import CapturableOptimizer, capture_obstacle
from lightning_graphs.training.options import Options
from lightning_graphs.training.precision import scaler_of
from lightning_graphs.training.progress import ProgressValues
from lightning_graphs.training.python_state import AttributeReads
from lightning_graphs.training.statistics import Statistics, difference
from lightning_graphs.training.step import RaisedInCapture, StepCapture, StepPlan

_MOVES_TOLERATED = 3
"""How often hyper-parameters may change before the optimizer step leaves the graph."""

_REBINDS_TOLERATED = 3
"""How often graphs may be dropped before one of them was replayed, without a warning."""

_RARE_TOLERATED = 4
"""How many eager steps in a row, for each graph allowed, are taken without a warning."""


class StepRunner:
    """Stands in for the strategy's methods between ``on_train_start`` and the end of a fit.

    Args:
        trainer: The trainer.
        module: Its module.
        calls: The strategy's own methods.
        options: The callback's options.
        pool: Owner of graphs, memory and stream.
        statistics: Where decisions are counted.
        progress: Mirror of the values for the progress bar; None without a GPU.
    """

    def __init__(
        self,
        trainer: Trainer,
        module: LightningModule,
        calls: StrategyCalls,
        options: Options,
        pool: GraphPool,
        statistics: Statistics,
        progress: ProgressValues | None,
    ) -> None:
        self._progress = progress
        self._trainer = trainer
        self._module = module
        self._calls = calls
        self._options = options
        self._pool = pool
        self.statistics = statistics
        self._cache: PlanCache[Any, StepPlan] = PlanCache(
            options.max_graphs, options.capture_after, self._release
        )
        self._warmup_left = options.warmup_steps
        self._numbers = LoggedNumbers()
        self._reads = AttributeReads()
        self._active: StepPlan | None = None
        self._last: StepPlan | None = None
        self._stepping = False
        self._moves = 0
        self._rebinds = 0
        self._rare = 0
        self._seen_last: Signature | None = None
        self._last_hyper_parameters: tuple[tuple[str, Any], ...] | None = None
        self._optimizer: Optimizer = trainer.optimizers[0]
        self._observers = Observers.of(trainer, module)
        self.capturable: CapturableOptimizer | None = None
        self._bind()

    def _bind(self, optimizer_obstacle: str | None = None) -> None:
        """Look at the optimizer, parameters and modules as they are now."""
        device_type = self._pool.backend.device_type
        obstacle = optimizer_obstacle or capture_obstacle(
            self._optimizer,
            device_type,
            scaled=scaler_of(self._trainer.precision_plugin) is not None,
        )
        before = self.capturable
        self.capturable = None
        if obstacle is None:
            self.capturable = CapturableOptimizer(self._optimizer, self._module.device, before)
        else:
            self.statistics.note(f"the optimizer step runs eagerly: {obstacle}")
        self._capture = StepCapture(
            self._trainer,
            self._module,
            self._calls,
            self._pool,
            self._optimizer,
            self.capturable,
            self._observers,
            self._reads,
            self._progress,
        )
        self._watch()

    def _watch(self) -> None:
        self._guard = AddressGuard.of_module(self._module)
        self._modules = list(self._module.modules())
        groups = self._optimizer.param_groups
        self._optimized = [p for group in groups for p in group["params"]]

    def _release(self, plan: StepPlan) -> None:
        if self._last is plan:
            self._last = None
        for graph in plan.graphs:
            self._pool.release(graph)

    def close(self) -> None:
        """Release every graph and give the optimizer back as it came; may be called again."""
        self._active = self._last = None
        self._cache.clear()
        vars(self._optimizer).pop("zero_grad", None)
        if self.capturable is not None:
            self.capturable.restore()
            self.capturable = None

    # ------------------------------------------------------------------ strategy methods

    def optimizer_step(
        self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        """Run a stepping micro-batch: the closure first, then whatever no graph has done yet."""
        if optimizer is not self._optimizer:
            return self._calls.optimizer_step(optimizer, closure, model, **kwargs)
        self._stepping = True
        try:
            result = closure()
        finally:
            self._stepping = False
        plan, self._active = self._active, None
        if plan is None or not plan.steps:
            return self._calls.optimizer_step(optimizer, lambda: result, model, **kwargs)
        if self._observers.before_step:
            call_gradient_hooks(self._trainer, self._module, optimizer)
            self._step_after_hooks(plan)
        else:
            announce_optimizer_step(self._trainer, self._module, optimizer)
        return result

    def _step_after_hooks(self, plan: StepPlan) -> None:
        """Replay the optimizer step on the gradients that the hooks left."""
        assert self.capturable is not None
        captured: Conditions = plan.call.signature.extra[0]  # type: ignore[assignment]
        moved = self.capturable.hyper_parameters() != captured.hyper_parameters
        if moved or not plan.gradients.complete():
            self._capture.update_eagerly()
            return
        plan.gradients.adopt()
        self.capturable.refresh()
        assert plan.step is not None
        plan.step.replay()

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Call the hooks of a backward pass; replay it where it is a graph of its own."""
        plan = self._active
        if plan is None:
            return self._calls.backward(closure_loss, optimizer, *args, **kwargs)
        vars(self._optimizer).pop("zero_grad", None)
        plugin = self._trainer.precision_plugin
        # The base class only calls the hooks; the plugin's scaling is in the graph.
        Precision.pre_backward(plugin, closure_loss, self._module)
        if plan.backward is not None:
            self._adopt(plan)
            plan.backward.replay()
        plan.gradients.attach(zeroed=not self._accumulates(plan))
        plan.outside.attach()
        closure_loss = Precision.post_backward(plugin, closure_loss, self._module)
        if not self._stepping:
            self._active = None
        return closure_loss

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Decide for this batch, and run, capture or replay it."""
        plan = None if kwargs else self._plan_for(args)
        self._active = plan
        if plan is None:
            return self._eager(args, kwargs)
        return self._replay(plan)

    # ------------------------------------------------------------------ the three phases

    def _plan_for(self, args: tuple[Any, ...]) -> StepPlan | None:
        if self._warmup_left > 0 or skips_backward(self._trainer):
            return None
        self._check_addresses()
        conditions = self._conditions()
        plan = self._find(args[0], conditions)
        if plan is None:
            plan = self._captured(args, conditions)
        return plan

    def _find(self, batch: Any, conditions: Conditions) -> StepPlan | None:
        last = self._last
        if last is not None and self._fill(last, batch, conditions):
            return last
        for plan in self._cache.plans():
            if plan is not last and self._fill(plan, batch, conditions):
                self._last = self._cache.get(plan.call.signature)
                return plan
        return None

    def _fill(self, plan: StepPlan, batch: Any, conditions: Conditions) -> bool:
        """Copy the batch in, if it and the fit are what the plan was captured from."""
        if plan.call.signature.extra[0] != conditions:
            return False
        tensors = plan.call.match((batch,), {})
        if tensors is None:
            return False
        plan.inputs.copy_in(tensors)
        return True

    def _captured(self, args: tuple[Any, ...], conditions: Conditions) -> StepPlan | None:
        """Capture this batch's step if its signature is due; None means: run it eagerly."""
        modes = Modes.current(self._pool.backend.device_type)
        try:
            _refuse_iterator(args[0])
            signature, tensors = Signature.of(
                (args[0],), {}, names=("batch",), modes=modes, extra=(conditions,)
            )
        except CaptureError as error:
            self._refused(None, error)
            return None
        if not self._cache.is_due(signature):
            self._note_rarity(signature)
            return None
        known = len(self._reads)
        try:
            self._numbers.refuse_changing()
            plan = self._capture.capture(args[0], tensors, args[1:], signature, conditions.phase)
        except GraphError as error:
            self._refused(signature, error)
            return None
        if len(self._reads) != known:
            # What the step has read is a condition from now on.
            conditions = replace(conditions, attributes=self._attributes())
            signature = replace(signature, extra=(conditions,))
            plan.call = CallPlan(signature, check_modes=True)
        self._announce(signature)
        self._cache.add(signature, plan)
        self._last = plan
        plan.inputs.copy_in(tensors)
        return plan

    def _eager(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.statistics.eager += 1
        if self._progress is not None:
            self._progress.mirrored = frozenset()
        if self._warmup_left > 0:
            self._warmup_left -= 1
            with self._numbers.watching(self._module):
                return self._calls.training_step(*args, **kwargs)
        return self._calls.training_step(*args, **kwargs)

    def _replay(self, plan: StepPlan) -> Any:
        self.statistics.replayed += 1
        self._rebinds = self._rare = 0
        if self.capturable is not None:
            self.capturable.refresh()
        if plan.backward is None:
            self._adopt(plan)
        plan.forward.replay()
        if not self._observers.own_zero_grad:
            # Lightning zeroes after the forward pass; the graph has done it and written anew.
            vars(self._optimizer)["zero_grad"] = _nothing
        plan.logs.reissue()
        return plan.outputs.hand_out()

    # ------------------------------------------------------------------ conditions

    def _adopt(self, plan: StepPlan) -> None:
        """Bring in the gradients of earlier steps to which this one adds its own."""
        if self._accumulates(plan):
            plan.gradients.adopt()
        plan.outside.adopt()

    def _accumulates(self, plan: StepPlan) -> bool:
        return not plan.phase.zeroing or self._observers.own_zero_grad

    def _conditions(self) -> Conditions:
        window = self._trainer.accumulate_grad_batches
        zeroing = self._trainer.fit_loop.epoch_loop.batch_idx % window == 0
        phase = Phase(zeroing, self._stepping, window)
        training = tuple([m.training for m in self._modules])
        gradients: tuple[bool, ...] = ()
        if phase.stepping and not phase.zeroing and self.capturable is not None:
            gradients = tuple([p.grad is not None for p in self._optimized])
        return Conditions(phase, self._hyper_parameters(), training, self._attributes(), gradients)

    def _attributes(self) -> tuple[tuple[str, Any], ...]:
        trainer = self._trainer
        clipping = (trainer.gradient_clip_val, trainer.gradient_clip_algorithm)
        return (*self._reads.values(), ("gradient clipping", clipping))

    def _hyper_parameters(self) -> tuple[tuple[str, Any], ...]:
        """What the optimizer's groups hold; where it keeps moving, the step leaves the graph."""
        if self.capturable is None:
            return ()
        now = self.capturable.hyper_parameters()
        if self._last_hyper_parameters not in (None, now):
            self._moves += 1
            if self._moves >= _MOVES_TOLERATED:
                pairs = zip(self._last_hyper_parameters or (), now, strict=False)
                names = ", ".join(sorted({name for (name, a), (_, b) in pairs if a != b}))
                cycled = names in ("betas", "momentum")
                hint = "; OneCycleLR(..., cycle_momentum=False) leaves it alone" if cycled else ""
                self._rebind(
                    f"{names} of the optimizer keeps changing",
                    f"a scheduler moves {names}, which a graph would freeze{hint}",
                )
                return ()
        self._last_hyper_parameters = now
        return now

    def _check_addresses(self) -> None:
        """Drop every graph when parameters moved or the optimizer was replaced."""
        try:
            self._guard.check(geometry=False)
        except ReplayError as error:
            self._rebind(error.observed)
        if self.capturable is not None and self.capturable.replaced():
            self._rebind("the optimizer's state or parameter groups were replaced")
        if self.capturable is not None and has_step_hooks(self._optimizer):
            self._rebind("a step hook was registered on the optimizer")

    def _rebind(self, reason: str, optimizer_obstacle: str | None = None) -> None:
        self._rebinds += 1
        if self._rebinds <= _REBINDS_TOLERATED:
            self.statistics.recaptured(f"recapturing, because {reason}", reason)
        else:
            self.statistics.note(
                f"a step runs eagerly: {reason}, and that again in every few steps"
            )
        self._cache.clear()
        if self.capturable is not None:
            self.capturable.restore()
        self._bind(optimizer_obstacle)

    def _announce(self, signature: Signature) -> None:
        self.statistics.captures += 1
        if len(self._cache):
            change = difference(self._cache.keys()[0], signature)
            self.statistics.recaptured(f"captured another graph, because {change}", change)

    def _note_rarity(self, signature: Signature) -> None:
        """Say so once when signatures come and go and none is ever captured."""
        self._rare += 1
        before, self._seen_last = self._seen_last, signature
        many = self._rare > _RARE_TOLERATED * self._options.max_graphs
        if many and before not in (None, signature):
            self.statistics.note(
                f"steps run eagerly: in {self._rare} steps no batch signature came back often "
                f"enough for a graph. The last two differ: {difference(before, signature)}"
            )

    def _refused(self, signature: Signature | None, error: GraphError) -> None:
        if self._options.on_failure == "raise":
            raise (error.__cause__ or error) if isinstance(error, RaisedInCapture) else error
        if signature is not None:
            self._cache.refuse(signature)
        self.statistics.note(f"a step runs eagerly: {error}")


def _refuse_iterator(batch: Any) -> None:
    if isinstance(batch, Iterator):
        raise CaptureError(
            "A captured step gets its batch: a replay takes none from an iterator.",
            f"training_step takes dataloader_iter, a {type(batch).__qualname__}",
            "write training_step(self, batch, batch_idx)",
        )


def _nothing(*_: Any, **__: Any) -> None:
    """Stands for ``optimizer.zero_grad`` while a captured step has zeroed already."""
