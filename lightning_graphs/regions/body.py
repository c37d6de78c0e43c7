"""The body of a training step: what runs, captured, compared with its replay or by itself."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial, update_wrapper
from types import FrameType
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from lightning_graphs.device.rules import (
    OLD_GRADIENTS,
    OPTIMIZER_SET,
    SCHEDULED,
    USED_BEHIND,
    stopping,
)
from lightning_graphs.device.trace import tensors_in
from lightning_graphs.errors import CaptureError
from lightning_graphs.private.callsite import (
    LIBRARIES,
    CallSite,
    add_line,
    calls_observed,
    is_result_dropped,
    returned_by,
)
from lightning_graphs.private.exchange import Member, exchanged, inference_mode_left
from lightning_graphs.private.generators import Generators
from lightning_graphs.private.torch import scaling_states, version_of
from lightning_graphs.regions.conditions import Observers, Phase
from lightning_graphs.regions.context import StepRecorder, TrainingContext
from lightning_graphs.regions.gradients import drop_gradients
from lightning_graphs.regions.optimizer import CapturableOptimizer
from lightning_graphs.regions.plan import StepOutputs
from lightning_graphs.regions.tried import RETURNING, UNSCALES_ITSELF, decided_on_device
from lightning_graphs.values.signature import Signature
from lightning_graphs.values.snapshot import Change, OptimizerState
from lightning_graphs.values.tree import leaves_of, parameters_of
from lightning_graphs.watch.environment import (
    Environment,
    NumberPlaces,
    Schedulers,
    Settings,
    number_places,
    numbers_exchanged,
    rates_exchanged,
)
from lightning_graphs.watch.forms import MakeNumber
from lightning_graphs.watch.head import Head
from lightning_graphs.watch.places import StepState
from lightning_graphs.watch.tracers import LateTracer, Tracer


class NoOptimizer(Optimizer):
    """Stands for the optimizer where a step has none."""

    def __init__(self) -> None:
        super().__init__([{"params": []}], {})
        self.param_groups.clear()


@dataclass(eq=False)
class StepBody:
    """The step of one fit, without the hooks of its client."""

    trains: ClassVar[bool] = True  # else gradients are recorded only where the loop has it so

    context: TrainingContext
    # The optimizers that steps may call, with what lets graphs step them; None: that is eager
    optimizers: Mapping[Optimizer, CapturableOptimizer | None]
    observers: Observers

    def __post_init__(self) -> None:
        self.module, self.client = self.context.module, self.context.watch
        self._scaler = self.client.scaler
        self.in_graphs = [one for one in self.optimizers.values() if one is not None]
        first: tuple[Optimizer, CapturableOptimizer | None] = NoOptimizer(), None
        self.optimizer, self.capturable = next(iter(self.optimizers.items()), first)

    @contextlib.contextmanager
    def surrounded(
        self,
        recorder: StepRecorder,
        places: StepState,
        held: Sequence[tuple[str, Any]],  # what modules hold, by name
        generators: Generators,
        listed: Callable[[Sequence[str]], str] = ", ".join,  # adds the user's line to names
    ) -> Iterator[None]:
        """Set up what surrounds a step that is captured, or compared with its graphs."""
        records = self.trains or torch.is_grad_enabled()
        with (
            places.changes_undone(held, generators, listed),
            self.context.watch.around_step(),
            recorder.recording(held),
            inference_mode_left(records=records),
        ):
            yield

    @calls_observed
    def run(
        self,
        arguments: tuple[Any, ...],
        phase: Phase,
        recorder: StepRecorder,
        *,
        # Called with the name of the next part, if hooks run in between
        cut: Callable[[str], None] = lambda _: None,
        keep: Callable[[], None] = lambda: None,  # called after the backward pass
    ) -> StepOutputs:
        """Run forward, loss, backward, clipping, update; the caller sets up the gradients."""
        if self.client.optimizes_itself:
            return self._run_all(arguments, recorder, keep)
        output, loss = self.forward(arguments, recorder)
        if loss is None:  # an evaluation's
            return output
        loss = loss / phase.window
        if phase.zeroing and not self.observers.own_zero_grad:
            self._zero_grad()
        if self.observers.before_backward:
            cut("backward")
        self._backward(loss)
        keep()
        if phase.stepping and self.capturable is not None:
            self.update(cut)
        return output

    def _run_all(
        self, arguments: tuple[Any, ...], recorder: StepRecorder, keep: Callable[[], None]
    ) -> StepOutputs:
        """Run a step whose own code runs backward passes and optimizer steps."""
        steps: list[Member] = []
        for optimizer in self.optimizers:
            within = partial(self._step_within, recorder, optimizer, optimizer.step)
            steps.append((optimizer, "step", update_wrapper(within, optimizer.step, (), ())))
        if (scaler := self._scaler) is not None:
            steps.append((scaler, "step", partial(self._step_scaled, scaler.step)))
        scheduler: Any
        for scheduler in self.client.schedulers:
            own = scheduler.step
            steps.append((scheduler, "step", partial(self.schedule, recorder, scheduler, own)))
        with exchanged(steps):
            output, _ = self.forward(arguments, recorder)
        keep()
        return output

    @stopping()
    def _step_within(
        self,
        recorder: StepRecorder,
        optimizer: Optimizer,
        own: Callable[..., Any],
        closure: Callable[[], Any] | None = None,
        **further: Any,
    ) -> Any:
        """Take the step of an optimizer, which the step's own code calls."""
        capturable, returned = self.optimizers[optimizer], None
        if capturable is None and (further or not self.client.takes_no_closure(closure)):
            what = next(iter(further), "a closure")
            raise USED_BEHIND.refused_here(f"{type(optimizer).__name__} is given {what}")
        if capturable is None and optimizer in RETURNING and not is_result_dropped():
            name = type(optimizer).__name__
            raise USED_BEHIND.refused_here(f"what the step of {name} returns is used")
        is_ahead = closure is not None and (capturable is None or capturable.takes_closure_once)
        given: tuple[Callable[[], Any], ...] = () if closure is None else (closure,)
        if is_ahead and closure is not None:
            with torch.enable_grad():
                returned = closure()
            given = () if capturable is None else capturable.closure_ahead
        with self.rates_given(optimizer):
            if capturable is not None:  # it calls a closure when it likes, and perhaps twice
                stepped = own(*given, **further)
                returned = returned if is_ahead else stepped
        if capturable is None:
            self.step_behind(recorder, optimizer)
        return returned

    def step_behind(self, recorder: StepRecorder, optimizer: Optimizer) -> None:
        """Leave out the step of an optimizer that no graph can step; replays take it behind."""

    def _step_scaled(self, own: Callable[..., Any], optimizer: Optimizer, *given: Any) -> Any:
        capturable, scaler = self.optimizers[optimizer], self._scaler
        assert scaler is not None, "whose step this is"
        is_scaled = scaling_states(scaler)[id(optimizer)]["stage"] is OptState.READY
        if is_scaled and capturable is not None and not capturable.unscales:
            scaler.unscale_(optimizer)
        with decided_on_device(optimizer):
            return own(optimizer, *given)

    def schedule(
        self, recorder: StepRecorder, scheduler: Any, own: Callable[..., Any], *given: Any, **k: Any
    ) -> None:
        """Leave out a step of a scheduler, which the step's own code calls."""

    def rates_given(self, optimizer: Optimizer) -> AbstractContextManager[None]:
        """Let the body, a step of an optimizer, find the learning rates on the device."""
        capturable = self.optimizers[optimizer]
        if capturable is not None and capturable.follows:  # here it moves its numbers itself
            return nullcontext()
        rates = None if capturable is None else capturable.live_rates()
        return rates_exchanged(self.client.schedulers, optimizer, rates)

    def forward(
        self, arguments: tuple[Any, ...], recorder: StepRecorder
    ) -> tuple[StepOutputs, Tensor | None]:
        """Run the step's own code; return what it returns, and the loss that is to be reduced."""
        returned = self._call(arguments)
        try:
            output = self._outputs(returned)
            loss = None
            if not self.client.optimizes_itself:
                loss = self.client.loss_of(returned)
        except CaptureError as error:
            add_line(error, "returned at", returned_by(self.client.function))
            raise
        recorder.finish()
        return output, loss

    def _outputs(self, returned: Any) -> StepOutputs:
        return StepOutputs(returned)

    def _call(self, arguments: Sequence[Any]) -> Any:
        return self.client.run(*arguments)

    def _zero_grad(self) -> None:
        """Drop the gradients of a backward pass of the step's own code, as Lightning does."""
        parameters = parameters_of(self.optimizer)
        hooks = self.observers.before_backward
        if hooks and any(p.grad is not None for p in parameters):
            seen = (
                f"{LIBRARIES.step} runs a backward pass of its own, and {hooks[0]} may look at it"
            )
            raise OLD_GRADIENTS.refused(seen)
        drop_gradients(parameters)

    def _backward(self, loss: Tensor) -> None:
        if self._scaler is not None:
            loss = self._scaler.scale(loss)
        self.client.backward(loss, self.optimizer)

    @calls_observed
    def update(self, cut: Callable[[str], None] = lambda _: None) -> None:
        """Unscale and clip the gradients, and take the optimizer step; see :meth:`run`."""
        if self._scaler is not None and not getattr(self.optimizer, UNSCALES_ITSELF, False):
            if self.observers.before_step:
                cut("unscale")
            self._scaler.unscale_(self.optimizer)
        if self.observers.before_step:
            cut("step")
        else:
            self.client.clip(self.optimizer)
        self._step()

    def _step(self) -> None:
        scaler = self._scaler
        if scaler is None:
            self.optimizer.step(*(() if self.capturable is None else self.capturable.closure_ahead))
            return
        with decided_on_device(self.optimizer):
            scaler.step(self.optimizer)
        scaler.update()

    def state_written(self, environment: Environment) -> set[Tensor]:
        """Collect what the step's own code may write, and a step that goes another way needs."""
        loose = environment.in_attributes
        state = {*self.module.parameters(), *self.module.buffers(), *loose}
        if self.client.optimizes_itself:
            state.update(parameters_of(*self.optimizers))
            state.update(*(OptimizerState(optimizer).tensors for optimizer in self.optimizers))
            state.update(
                tensors_in([*vars(self._scaler).values()]) if self._scaler is not None else ()
            )
            state.update([t.grad for t in state if t.is_leaf and t.grad is not None])
        return state

    def scaling(self) -> dict[str, Any]:
        """Return the scaler's state in a step that is under way; nothing without a scaler.

        A capture calls it first, and fails if torch does not show that state.
        """
        scaler = self._scaler
        return {} if scaler is None else dict(scaling_states(scaler)[id(self.optimizer)])

    def step_eagerly(self, scaling: dict[str, Any]) -> None:
        """Take the optimizer step, after hooks, from the state that :meth:`scaling` returned."""
        if self._scaler is not None:
            scaling_states(self._scaler)[id(self.optimizer)] = dict(scaling)
        self._step()


# ------------------ Numbers of optimizers


class OptimizerNumbers:
    """Numbers of optimizers and schedulers while a step is captured.

    User code gets tracers for them, steps of optimizers get learning rates on the device. Numbers
    that a scheduler has moved within the step are late: a replay has them at its end. What the code
    sets itself ahead of the update, replays set ahead of their graphs.
    """

    def __init__(
        self,
        optimizers: Mapping[Optimizer, CapturableOptimizer | None],
        schedulers: Schedulers,
        number: MakeNumber,
    ) -> None:
        self._optimizers, self._schedulers = optimizers, schedulers
        self._rates: dict[Optimizer, NumberPlaces] = {}
        self._traced: dict[Optimizer, NumberPlaces] = {}
        for index, (optimizer, capturable) in enumerate(optimizers.items()):
            own = number if not index else partial(_of_optimizer, number, index)
            rates = None if capturable is None else capturable.live_rates(own)
            parts = schedulers, optimizer, rates
            self._rates[optimizer] = number_places(*parts)
            self._traced[optimizer] = number_places(*parts, number, index)
        self._scheduled: set[Optimizer] = set()  # whose scheduler the step has stepped
        self._late = contextlib.ExitStack()
        self.settings = Settings()
        self._groups: dict[Optimizer, list[dict[str, Any]]] = {}  # as the step's code steps it
        self._is_forked = False  # behind such a step: its rates are read ahead of all settings

    def rates(self) -> AbstractContextManager[None]:
        """Let all optimizers have their rates on the device while the body runs."""
        return _all_exchanged(self._rates)

    def rates_of(self, optimizer: Optimizer) -> AbstractContextManager[None]:
        """Let one have them while the body, its step, runs within the step's own code."""
        if optimizer in self._scheduled:
            raise SCHEDULED.refused_here("an optimizer steps after its scheduler")
        groups = [dict(group) for group in optimizer.param_groups]
        known = self._groups.setdefault(optimizer, groups)
        for group, before in zip(groups, known, strict=True):
            if any(group.get(key) is not before.get(key) for key in {**group, **before}):
                raise OPTIMIZER_SET.refused_here("the step sets numbers between two updates")
        return numbers_exchanged(optimizer, self._rates[optimizer])

    @contextlib.contextmanager
    def traced(self) -> Iterator[None]:
        """Let the body, the step's own code, find tracers."""
        for places in self._traced.values():
            self.settings.reads(places)
        with _all_exchanged(self._traced, self._follows), self._late:
            yield

    def _follows(self, optimizer: Optimizer, change: Change) -> bool:
        """Whether a number that the step's code has set is set by replays, too."""
        capturable = self._optimizers[optimizer]
        groups = zip(optimizer.param_groups, self._groups.get(optimizer, ()), strict=False)
        stepped = next((known for group, known in groups if group is change.table), None)
        if stepped is not None and stepped.get(change.key) is not change.now:  # it comes too late
            return False
        may = capturable is None or (change.key == "lr" and capturable.has_rates)
        return may and not self._is_forked and self.settings.follow(change)

    def fork(self) -> None:
        self._is_forked |= bool(self._groups)

    def schedule(self, scheduler: object, args: Any, kwargs: Any) -> None:
        """Let what a scheduler moves be late from now on, or refuse its step."""
        optimizer: Any = vars(scheduler).get("optimizer")
        if optimizer not in self._rates or _takes_value(args, kwargs):
            SCHEDULED.stop_here("a scheduler is stepped with a value of the step")
        self._scheduled.add(optimizer)
        places = number_places(self._schedulers, optimizer, None, LateTracer)
        self._late.enter_context(numbers_exchanged(optimizer, places))


def _of_optimizer(number: MakeNumber, index: int, name: str, *read: Any) -> Any:
    return number(f"{name} (optimizer {index})", *read)


@contextlib.contextmanager
def _all_exchanged(
    places: Mapping[Optimizer, NumberPlaces],
    follows: Callable[[Optimizer, Change], bool] = lambda *_: False,
) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for optimizer, found in places.items():
            exchanging = numbers_exchanged(optimizer, found, partial(follows, optimizer))
            stack.enter_context(exchanging)
        yield


def _takes_value(*given: Any) -> bool:
    """Whether a scheduler is handed a value of the step."""
    return any(isinstance(leaf, (Tensor, Tracer)) for leaf in leaves_of(given))


# ------------------ What is captured

Begin = Callable[["Given"], Sequence[Any]]
"""Begins the capture of a call; what its code is to have in place of what was given."""


@dataclass(frozen=True, slots=True)
class Given:
    """A call that is captured: of a step, or of what follows its head."""

    arguments: Sequence[Any]  # the batch first, or else what leaves the head
    tensors: Sequence[Tensor]  # in the first of them
    signature: Signature
    step: CallSite  # the code that is captured
    frames: Sequence[FrameType] = ()  # run already
    # Tensors that the graph reads themselves, by their indices
    given: Mapping[int, Tensor] = field(default_factory=dict)
    name: str = "batch"  # of the first argument
    # Readers of numbers in it that other steps have others for, by their keys
    numbers: Mapping[str, Callable[[], Any]] = field(default_factory=dict)
    # Surrounds the code that is captured
    inside: Callable[[], AbstractContextManager[object]] = nullcontext
    head: ClassVar[Head | None] = None

    def around(self) -> AbstractContextManager[object]:
        return nullcontext()

    def run(self, begin: Begin, code: Callable[..., Any]) -> Any:
        """Run the code of the step, captured from its beginning on."""
        return code(*begin(self))


def unseen_steps_refused(
    optimizers: Mapping[Optimizer, Any],  # each with what counts the steps that are seen
    compiled: Any,
) -> Callable[[], None]:
    """Return what refuses, at the end of a capture, steps that compiled code took by itself.

    It holds the method that the optimizer had before; learning rates would be constants of it.
    """
    known = {o: (one, one.calls, _versions(o)) for o, one in optimizers.items() if one is not None}

    def refuse() -> None:
        for optimizer, (one, calls, versions) in known.items():
            if compiled.runs and one.calls == calls and _versions(optimizer) != versions:
                raise CaptureError(
                    "A captured step must call optimizer.step() outside of compiled code.",
                    f"code that torch.compile has made steps {type(optimizer).__name__}",
                    "leave torch.compile out around optimizer.step(): in the graph it costs what "
                    "its kernels cost",
                )

    return refuse


def _versions(optimizer: Optimizer) -> list[int]:
    return list(map(version_of, parameters_of(optimizer)))
