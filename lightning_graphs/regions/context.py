"""What a region is given by its client."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import FrameType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_graphs.device.graph import GraphPool
from lightning_graphs.errors import CaptureError
from lightning_graphs.policy.options import Options
from lightning_graphs.policy.worth import CapturePolicy, MemoryBudget
from lightning_graphs.private.callsite import site_in
from lightning_graphs.private.exchange import nothing
from lightning_graphs.regions.conditions import NO_OBSERVERS, Observers, in_turn
from lightning_graphs.regions.gradients import KeptGradients
from lightning_graphs.report.messages import Messages, Statistics
from lightning_graphs.values.memory import Given
from lightning_graphs.watch import environment
from lightning_graphs.watch.assertions import OpenAssertions
from lightning_graphs.watch.environment import Environment
from lightning_graphs.watch.foreseen import ForeseenReads
from lightning_graphs.watch.forks import Forks
from lightning_graphs.watch.kept import CallAt, KeptCalls
from lightning_graphs.watch.late import LatePolicy, LateValue
from lightning_graphs.watch.mechanism import Instruction
from lightning_graphs.watch.mirrors import Mirrors
from lightning_graphs.watch.places import StepState
from lightning_graphs.watch.reads import AttributeGuards
from lightning_graphs.watch.user_code import CompiledCode, Held, held_elsewhere


class StepRecorder:
    """Records what a step logs: nothing, unless a client derives from it."""

    # Gives what reads the present value of something that is logged; None if it is constant
    live: Callable[[Any], Callable[[], Any] | None] = staticmethod(nothing)
    _at_end: Sequence[Instruction] = ()

    def recording(self, held: Held | None = None) -> AbstractContextManager[None]:
        """Record what the body logs; ``held`` is what modules hold, if that is known."""
        return nullcontext()

    def keeping(self, *, by_methods: bool) -> AbstractContextManager[object]:
        """Keep back what a replay calls after its graphs, in the body: the step's own code.

        Args:
            by_methods: See :meth:`~lightning_graphs.watch.kept.KeptCalls.of_torch`.
        """
        return nullcontext()

    def keep(self, function: Callable[..., Any], given: Given, policy: LatePolicy) -> LateValue:
        """Keep a call back; see :data:`~lightning_graphs.watch.late.Keep`."""
        policy.refuse(policy.name)

    def finish(self) -> None:
        """Called at the end of the step's own code, as a part of it."""

    def reissue(self) -> None:
        """Log again, after a replay."""

    @property
    def last(self) -> Instruction | None:
        """What a replay does in the end, after side effects are applied; None: nothing.

        It logs what these have changed, and counts the steps that the step's own code has taken.
        """
        return in_turn(self._at_end)

    def logged(self) -> list[tuple[str, Tensor]]:
        """List the tensors that are logged, by name: those of the last run or replay."""
        return []

    def at_end(self, instruction: Instruction) -> None:
        """Let a replay do this in the end, after what it does then already."""
        self._at_end = (*self._at_end, instruction)


class Client(environment.Client):
    """The loop around the regions of a fit, and what its parts of a step do: as a rule nothing."""

    run: Callable[..., Any]
    """The step's own function, as it is called eagerly."""
    kept: KeptCalls
    """Learns which calls of it replays make behind their graphs."""

    def keeps_effect(self, frame: FrameType, function: Callable[..., Any], given: Given) -> Any:
        return self.kept.effect(frame, function, given)

    def declines(self, frame: FrameType) -> bool:
        return self.kept.declines(frame)

    @property
    @abstractmethod
    def optimizes_itself(self) -> bool:
        """Whether the step's own code runs backward passes and optimizer steps."""

    @property
    @abstractmethod
    def function(self) -> FunctionType | MethodType:
        """The function that a user has written for the step."""

    @property
    @abstractmethod
    def optimizers(self) -> Sequence[Optimizer]:
        """Those of the fit, as they are now."""

    @property
    @abstractmethod
    def schedulers(self) -> Sequence[object]:
        """What moves learning rates."""

    @property
    def cycles(self) -> str:
        """Why a graph cannot hold the optimizer's numbers from the beginning; empty if it may."""
        return ""

    @property
    @abstractmethod
    def scaler(self) -> torch.amp.GradScaler | None:
        """What scales the loss; None if nothing does."""

    @property
    def clipping(self) -> tuple[object, ...]:
        """How gradients are clipped, to be compared."""
        return ()

    @property
    @abstractmethod
    def epoch(self) -> int:
        """The epoch, from 0."""

    @abstractmethod
    def arguments(self, given: Sequence[Any], number: Callable[..., Any]) -> Sequence[Any]:
        """Return the step's arguments besides its batch, with a tracer for each counter."""

    @abstractmethod
    def environment(self, modules: Sequence[torch.nn.Module] | None = None) -> Environment:
        """Make an environment for code of the whole step, or of these modules."""

    def observers(self) -> Observers:
        """List the hooks that run within a step."""
        return NO_OBSERVERS

    @abstractmethod
    def recorder(self) -> StepRecorder:
        """Record what a step logs, for replays."""

    def mute(self) -> StepRecorder:
        """Discard what a step logs that is compared with its replay."""
        return StepRecorder()

    @abstractmethod
    def learns(self) -> bool:
        """Whether a refusal has shown how the next capture of the step may succeed."""

    @abstractmethod
    def keeps_back(self, error: CaptureError, reads: Sequence[CallAt]) -> bool:
        """Whether the next capture keeps back the call in which a refusal arose, or these reads."""

    def is_apart(self, module: torch.nn.Module) -> bool:
        """Whether a module runs after the replay of a step, not in it."""
        return False

    @abstractmethod
    def around_step(self) -> AbstractContextManager[None]:
        """Keep nothing of the body, a step that is captured or compared."""

    def takes_no_closure(self, closure: Callable[[], Any] | None) -> bool:
        """Whether the step's code has called ``optimizer.step()`` alone, whatever that is given."""
        return closure is None

    def loss_of(self, returned: Any) -> Tensor | None:
        """Find the loss in what the step has returned; None: it has no backward pass."""
        return None

    def is_backward_unseen(self, loss: Tensor, adds_to: Container[int] | None = None) -> bool:
        """Whether nothing but autograd's own operators runs in a backward pass.

        With ``adds_to``, and writes nothing but gradients of these leaves, given by their ``id``.
        """
        return False

    def cast_unseen(self, loss: Tensor) -> AbstractContextManager[None]:
        """Cast gradients together in the body, a backward pass that nothing else sees."""
        return nullcontext()

    def backward(self, loss: Tensor, optimizer: Optimizer) -> None:
        """Run the backward pass of a loss that is scaled already, without hooks."""

    def clip(self, optimizer: Optimizer) -> None:
        """Clip gradients."""

    def call_gradient_hooks(self, optimizer: Optimizer) -> None:
        """Call the hooks ahead of an optimizer step, and clip gradients."""

    def announce_optimizer_step(self, optimizer: Optimizer) -> None:
        """Call the hooks ahead of an optimizer step if none is overridden."""

    @abstractmethod
    def waits_for_gradients(self) -> bool:
        """Whether a backward pass has failed, and its reducer has yet to forget it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingContext:
    """What all regions of a fit are made with."""

    module: Any  # the module that is trained
    options: Options
    pool: GraphPool  # owner of graphs, memory and stream
    statistics: Statistics  # where decisions are counted
    messages: Messages  # what is said to the user
    policy: CapturePolicy  # decides what is worth a capture
    budget: MemoryBudget  # what memory may be taken
    ranks: Any  # lets all ranks treat whole steps alike
    watch: Client  # the loop around the regions
    assertions: OpenAssertions  # of replays, which the host has yet to look at
    no_whole_step: str  # why its steps are no whole graphs; empty if they may be
    compiled: CompiledCode = field(default_factory=CompiledCode)


def followed(context: TrainingContext) -> set[int]:
    """Return the ``id`` of the optimizers and scalers whose numbers regions follow."""
    held = held_elsewhere(context.module)
    return {*held, *map(id, context.watch.optimizers)}


class CaptureFacts:
    """What captures have learned of the steps of a fit; it outlives their graphs."""

    def __init__(
        self,
        context: TrainingContext,
        on_change: Callable[[], object],
        held: Callable[[], Sequence[int]] = tuple,  # see :class:`KeptGradients`
    ) -> None:
        self._context = context
        self.reads = AttributeGuards(context.watch.is_apart)  # attributes that captured steps read
        self.reads.followed = partial(followed, context)
        self.places = StepState(  # where steps store something
            context.module, self.reads, on_change, partial(getattr, context.watch, "optimizers")
        )
        self.moved: list[str] = []  # what was found to keep changing, since the last capture
        self.mirrors = Mirrors(on_change)  # numbers in tensors that steps read and advance
        self.forks = Forks()  # where steps ask the device which way to go on
        self.foreseen = ForeseenReads()  # what they read on the host, before one was captured
        self.has_host_program = False  # captures record what steps compute on the host
        self.has_several_passes = False  # steps run backward passes inside of their own
        self.steps_between = False  # optimizers that no graph can step do so between two graphs
        self.is_unseen = True  # captures are hidden from libraries
        self.earlier: Sequence[Tensor | None] = ()  # copies on the host of an eager step's batch
        self.kept = KeptGradients(held)  # whether user code keeps gradients past their step

    @contextmanager
    def foreseeing(self) -> Iterator[None]:
        """Observe the body, an eager step, so that captures begin as they would go on."""
        context, module = self._context, self._context.module
        if context.compiled.runs or not context.ranks.are_one:
            yield
            return
        keep = partial(context.watch.keeps_back, reads=())
        with self.foreseen.observing(module, module.device, keep):
            yield
        if self.foreseen.is_any:
            self.has_host_program = True
            context.policy.follows_host()


class Notes:
    """What attempts refuse, where :func:`~lightning_graphs.device.rules.noting` is entered."""

    def __init__(self) -> None:
        self.last: Sequence[CaptureError] = ()  # what the last attempt has refused
        self.answered: list[CaptureError] = []  # what a host program does in place of the graph
        self._asked: Sequence[CaptureError] = ()  # perhaps the next attempt's program does that

    def take(self, refused: Sequence[CaptureError], *, asks_host: bool = False) -> bool:
        """Take note of an attempt; return whether another one may go further in the code."""
        before, self.last = self.last, refused
        self.answered += [e for e in self._asked if not any(map(partial(_is_alike, e), refused))]
        self._asked = refused if asks_host else ()
        texts = [[(e.rule, e.observed) for e in found] for found in (before, refused)]
        return bool(refused) and not refused[-1].is_noted and texts[0] != texts[1]


def _is_alike(one: CaptureError, other: CaptureError) -> bool:
    return one.rule == other.rule and site_in(one.observed) == site_in(other.observed)
