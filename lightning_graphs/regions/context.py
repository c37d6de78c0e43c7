"""What the regions of one fit have in common, and what they ask of the client around them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import FunctionType, MethodType
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_graphs.device.graph import GraphPool
from lightning_graphs.device.rules import OnUse, refuse
from lightning_graphs.policy.budget import MemoryBudget
from lightning_graphs.policy.options import Options
from lightning_graphs.policy.worth import CapturePolicy
from lightning_graphs.regions.conditions import Observers
from lightning_graphs.regions.gradients import KeptGradients
from lightning_graphs.report.messages import Messages
from lightning_graphs.report.statistics import Statistics
from lightning_graphs.watch import environment
from lightning_graphs.watch.environment import Environment
from lightning_graphs.watch.reads import AttributeGuards
from lightning_graphs.watch.side_effects import Places
from lightning_graphs.watch.user_code import CompiledCode


class Recorder(Protocol):
    """Records what a step logs."""

    live: Callable[[Any], Callable[[], Any] | None]
    """Gives what tells the present value of something that is logged; None if it is constant."""

    def recording(self) -> AbstractContextManager[None]:
        """Record what the body logs."""

    def finish(self) -> None:
        """Called at the end of the step's own code, as a part of it."""

    def reissue(self) -> None:
        """Log again, after a replay."""


class Client(environment.Client, Protocol):
    """The loop around the regions of a fit, and what its parts of a step do."""

    run: Callable[..., Any]
    """The step's own function, as it is called eagerly."""

    @property
    def function(self) -> FunctionType | MethodType:
        """The function that a user has written for the step."""

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        """Those of the fit, as they are now."""

    @property
    def schedulers(self) -> Sequence[object]:
        """What moves learning rates."""

    @property
    def cycles(self) -> str:
        """Why a graph cannot hold the optimizer's numbers from the beginning; empty if it may."""

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """What scales the loss; None if nothing does."""

    @property
    def clipping(self) -> tuple[object, ...]:
        """How gradients are clipped, to be compared."""

    @property
    def epoch(self) -> int:
        """The epoch, from 0."""

    @property
    def ddp(self) -> Any:
        """The wrapper whose reducer sums gradients over ranks; None if there is none."""

    def arguments(self, given: Sequence[Any], number: Callable[..., Any]) -> Sequence[Any]:
        """What the step is given besides its batch, with a tracer for each counter."""

    def environment(
        self,
        modules: Sequence[torch.nn.Module] | None = None,
        *,
        on_use: OnUse = refuse,
        seen: Any = None,
    ) -> Environment:
        """An environment for code of the whole step, or of these modules."""

    def observers(self) -> Observers:
        """The hooks that run within a step."""

    def recorder(self) -> Recorder:
        """Records what a step logs, for replays."""

    def mute(self) -> Recorder:
        """Takes what a step logs that is compared with its replay, and shows it to nobody."""

    def around_step(self) -> AbstractContextManager[None]:
        """Keep nothing of the body, a step that is captured or compared."""

    def loss_of(self, returned: Any) -> Tensor:
        """The loss in what the step has returned."""

    def is_backward_unseen(self, loss: Tensor) -> bool:
        """Whether nothing but autograd's own operators runs in a backward pass."""

    def cast_unseen(self, loss: Tensor) -> AbstractContextManager[None]:
        """Cast gradients together in the body, a backward pass that nothing else sees."""

    def backward(self, loss: Tensor, optimizer: Optimizer) -> None:
        """The backward pass of a loss that is scaled already, without hooks."""

    def clip(self, optimizer: Optimizer) -> None:
        """Clip gradients."""

    def call_gradient_hooks(self, optimizer: Optimizer) -> None:
        """Call the hooks ahead of an optimizer step, and clip gradients."""

    def announce_optimizer_step(self, optimizer: Optimizer) -> None:
        """Call the hooks ahead of an optimizer step where none is overridden."""

    def waits_for_gradients(self) -> bool:
        """Whether a backward pass has failed, and its reducer has yet to forget it."""

    def copies_on_host(self, batch: Sequence[Tensor]) -> Sequence[Tensor | None]:
        """What the host has of each tensor of a batch; None where that is nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingContext:
    """What every region of a fit is made of."""

    module: Any  # the module that is trained
    options: Options
    pool: GraphPool  # owner of graphs, memory and stream
    statistics: Statistics  # where decisions are counted
    messages: Messages  # tells the user
    investment: CapturePolicy  # decides what is worth a capture
    budget: MemoryBudget  # what memory may be taken
    ranks: Any  # does whole steps the same way on all ranks
    watch: Client  # the loop around the regions
    no_whole_step: str  # why its steps are no whole graphs; empty if they may be
    compiled: CompiledCode = field(default_factory=CompiledCode)


class CaptureFacts:
    """What a fit has learned of its steps: it stays when their graphs are dropped."""

    def __init__(self, fit: TrainingContext, on_change: Callable[[], object]) -> None:
        self.reads = AttributeGuards()  # attributes that captured steps read
        self.places = Places(  # where steps store something
            fit.module, self.reads, on_change, lambda: fit.watch.optimizers
        )
        self.has_host_half = False  # captures record what steps compute on the host
        self.has_several_passes = False  # steps run backward passes inside of their own
        self.is_unseen = True  # libraries are not told of captures
        self.kept = KeptGradients()  # whether user code keeps gradients past their step
