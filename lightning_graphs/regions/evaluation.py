"""A step of an evaluation: a step without backward pass and update, captured and compared."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from lightning_graphs.device.rules import GRADIENTS_CHANGED
from lightning_graphs.private.callsite import LIBRARIES
from lightning_graphs.private.torch import version_of
from lightning_graphs.regions.behind import Behind
from lightning_graphs.regions.body import Given, NoOptimizer, StepBody
from lightning_graphs.regions.conditions import Observers, Phase, ReplayGuards
from lightning_graphs.regions.gradients import GradientTargets
from lightning_graphs.regions.plan import StepPlan
from lightning_graphs.regions.step import StepCapture
from lightning_graphs.regions.verified import Verification
from lightning_graphs.regions.whole_step import StepRegion
from lightning_graphs.values.snapshot import RegionState
from lightning_graphs.watch.environment import Environment
from lightning_graphs.watch.user_code import UnregisteredTensors, iter_objects

NO_OBSERVERS = Observers((), (), False)
"""No hook runs inside of a step of an evaluation."""


def outside_inference_mode() -> AbstractContextManager[None]:
    """Leave inference mode in the body, in the grad mode that is the present one now."""
    return _outside_inference_mode(torch.is_grad_enabled())


@contextlib.contextmanager
def _outside_inference_mode(is_grad_enabled: bool) -> Iterator[None]:
    # Leaving inference mode turns autograd on, whatever it was
    with torch.inference_mode(False), torch.set_grad_enabled(is_grad_enabled):
        yield


class EvaluationBody(StepBody):
    """The step of an evaluation, of which there is the step's own code alone.

    It runs outside of inference mode, in the grad mode of the loop: its tensors then count writes,
    and can be written whenever the graph is replayed. Kernels, and so values, are the same.
    """

    @contextlib.contextmanager
    def surrounded(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        modes = outside_inference_mode()  # made here, in the grad mode of the loop
        with super().surrounded(*args, **kwargs), modes:
            yield


class _Gradients:
    """Finds gradients of training that a capture changes."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._before = [(parameter, parameter.grad) for parameter in parameters]
        self._versions = [version_of(g) for _, g in self._before if g is not None]

    def restore(self) -> bool:
        """Put back those that were exchanged; return whether any was changed."""
        changed = [pair for pair in self._before if pair[0].grad is not pair[1]]
        for parameter, gradient in changed:
            parameter.grad = gradient
        versions = [version_of(g) for _, g in self._before if g is not None]
        return bool(changed) or versions != self._versions


class EvaluationCapture(EvaluationBody, StepCapture):
    """Captures steps of one evaluation."""

    def _captured(self, given: Given | Behind, phase: Phase, watch: ReplayGuards) -> StepPlan:
        gradients = _Gradients(self.module.parameters())
        try:
            plan = super()._captured(given, phase, watch)
        except BaseException:
            gradients.restore()
            raise
        if gradients.restore():
            for graph in plan.graphs.values():
                self.context.pool.release(graph)
            raise GRADIENTS_CHANGED.refused(
                f"{LIBRARIES.step} runs a backward pass that reaches them"
            )
        return plan

    def _targets(self, phase: Phase, environment: Environment) -> GradientTargets:
        """Choose no gradients: those of training stay where they are."""
        whole = Phase(zeroing=True, stepping=True, window=1)
        return GradientTargets(
            NoOptimizer(), [], self.persistent, whole, NO_OBSERVERS, in_place=False
        )


class EvaluationVerification(EvaluationBody, Verification):
    """Compares captured steps of an evaluation with eager ones, also in what they log."""

    def _state(self, plan: StepPlan | None = None) -> RegionState:
        """Describe what steps may change: no parameters, as far as none was seen to be written."""
        unseen = UnregisteredTensors(self.module, iter_objects(self.module)).small
        written = {} if plan is None else plan.loose
        tensors = {f"buffer `{name}`": buffer for name, buffer in self.module.named_buffers()}
        tensors |= {f"tensor `{name}`": tensor for name, tensor in written.items()}
        return RegionState(tensors, {}, unseen)

    def _drop_gradients(self) -> None:
        """Leave them: those of training may be adding up."""


class EvaluationSteps(StepRegion):
    """The steps of an evaluation as regions, which leave gradients alone."""

    verifies = EvaluationVerification
    has_backward = False

    def _bind(self) -> None:
        """Make guards and captures for the present parameters and modules."""
        self._observers = NO_OBSERVERS
        self._optimizers = self._present()
        self._in_graphs, self._eager_because = [], ""
        optimizers = dict.fromkeys(self._optimizers or [NoOptimizer()])
        self._capture = EvaluationCapture(self._fit, self._facts, optimizers, NO_OBSERVERS)
        guards = self._facts, self._client_guards()
        self._watch = ReplayGuards(self._module, [], [], *guards)
        self._bind_head()

    def compare(self, plan: StepPlan, call: tuple[Any, ...]) -> bool:
        return self._put_off(plan) if self._is_in_head else self._is_equal(plan, call)
