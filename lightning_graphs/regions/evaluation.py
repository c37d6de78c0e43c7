"""A step of an evaluation: a step without backward pass and update, captured and compared."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_graphs.regions.body import StepBody
from lightning_graphs.regions.conditions import Observers, Phase
from lightning_graphs.regions.gradients import GradientTargets
from lightning_graphs.regions.step import StepCapture
from lightning_graphs.regions.verified import Verification
from lightning_graphs.values.snapshot import RegionState
from lightning_graphs.watch.environment import Environment
from lightning_graphs.watch.user_code import UnregisteredTensors, iter_objects

NO_OBSERVERS = Observers((), (), False)
"""No hook runs inside of a step of an evaluation."""


class NoOptimizer(Optimizer):
    """Stands for the optimizer where an evaluation has none."""

    def __init__(self) -> None:
        super().__init__([{"params": []}], {})
        self.param_groups.clear()


class EvaluationBody(StepBody):
    """The step of an evaluation, of which there is the step's own code alone.

    It runs outside of inference mode, in the grad mode of the loop: its tensors then count writes,
    and can be written whenever the graph is replayed. Kernels, and so values, are the same.
    """

    @contextlib.contextmanager
    def surrounded(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        is_enabled = torch.is_grad_enabled()
        with (
            super().surrounded(*args, **kwargs),
            torch.inference_mode(False),
            torch.set_grad_enabled(is_enabled),  # leaving inference mode has turned it on
        ):
            yield


class EvaluationCapture(EvaluationBody, StepCapture):
    """Captures steps of one evaluation."""

    def _targets(self, phase: Phase, environment: Environment) -> GradientTargets:
        """Choose no gradients: those of training stay where they are."""
        whole = Phase(zeroing=True, stepping=True, window=1)
        return GradientTargets(
            NoOptimizer(), [], self.persistent, whole, NO_OBSERVERS, in_place=False
        )


class EvaluationVerification(EvaluationBody, Verification):
    """Compares captured steps of an evaluation with eager ones, also in what they log."""

    def _state(self, written: dict[str, Tensor], others: Sequence[Tensor] = ()) -> RegionState:
        """Describe what steps may change: no parameters, as far as none was seen to be written."""
        unseen = UnregisteredTensors(self.module, iter_objects(self.module)).small
        tensors = {f"buffer `{name}`": buffer for name, buffer in self.module.named_buffers()}
        tensors |= {f"tensor `{name}`": tensor for name, tensor in written.items()}
        return RegionState(tensors, {}, unseen)
