"""The head of the steps of a fit: found after a refused capture, and run where all is undone."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_graphs.device.rules import (
    DRAWN,
    DYNAMIC_SHAPE,
    HOST_COPY,
    HOST_DATA,
    HOST_READ,
    LINEAR_ALGEBRA,
    NOT_RECORDED,
    SET_GENERATOR,
    SIDE_EFFECT,
    UNREGISTERED_GENERATOR,
    noting,
    refusals,
)
from lightning_graphs.errors import CaptureError, CaptureStopped, GraphError
from lightning_graphs.private.callsite import CallSite, calls_observed, frames_of_region
from lightning_graphs.private.distributed import buffers_left
from lightning_graphs.private.exchange import nothing
from lightning_graphs.private.generators import RandomState
from lightning_graphs.regions.body import Begin, Given
from lightning_graphs.regions.conditions import Phase, conditions_of
from lightning_graphs.regions.context import TrainingContext
from lightning_graphs.report.messages import PATIENCE
from lightning_graphs.values.guards import Identity
from lightning_graphs.values.memory import StaticInputs, addresses_of, storage_address
from lightning_graphs.values.signature import Signature
from lightning_graphs.values.snapshot import Gradients, PythonSnapshot, Snapshot
from lightning_graphs.values.tree import leaves_of, parameters_of, substitute
from lightning_graphs.watch.batch import BatchValueRead, objects_of
from lightning_graphs.watch.environment import RaisedInCapture
from lightning_graphs.watch.head import (
    VARIABLES,
    Ending,
    FirstUse,
    Head,
    HeadEnded,
    Lasting,
    Made,
    Uses,
    endings_along,
    first_use,
    is_callers,
    lines_of,
)
from lightning_graphs.watch.host import RULE as ON_HOST
from lightning_graphs.watch.host_trace import ONE_GENERATOR
from lightning_graphs.watch.places import DrawnOutsideError, StepState, place_of, trained_parameters
from lightning_graphs.watch.user_code import UnregisteredTensors

_AHEAD = frozenset(
    each.rule
    for each in (
        *(DRAWN, DYNAMIC_SHAPE, HOST_COPY, HOST_DATA, HOST_READ, LINEAR_ALGEBRA),
        *(UNREGISTERED_GENERATOR, SET_GENERATOR, NOT_RECORDED),
    )
) | {ON_HOST, ONE_GENERATOR}
"""Rules that code breaks which may run ahead of a graph."""


def shape_of(key: Signature) -> tuple[Signature, Phase]:
    """Return the part of a key that is the same in attempts which learn of places and values."""
    return replace(key, extra=()), conditions_of(key).phase


class HeadMissed(CaptureError):
    """The head of a step ends with something else than what a capture or a plan is for."""

    def __init__(self) -> None:
        super().__init__("")


class WayMissed(HeadMissed):
    """A step goes another way at a fork than its graphs."""


class UndoneHead(NamedTuple):
    """A run of a head that is undone."""

    arguments: list[Any]  # of the step, its own ones
    before: PythonSnapshot  # of what modules held
    quiet: contextlib.ExitStack  # discards logs until it is closed
    made: Made  # tensors of the batch, and others that the head has made


class StepHead:
    """The head of the steps of a fit, if they have one.

    It is looked for once a capture of a whole step was refused: where the refusal is about code
    ahead of the first use of a parameter, a graph may begin behind that code.
    """

    def __init__(
        self,
        context: TrainingContext,
        places: StepState,
        uses: Iterable[str] = (),  # further rules against uses of values that were read or drawn
        *,
        trains: bool = True,
    ) -> None:
        self.context = context
        self._uses = {DRAWN.rule, *uses}
        self._reads = False
        self._places = places
        self.now: Head | None = None
        self._error: GraphError | None = None  # the first refusal
        self.misses = 0  # so many steps in a row had no plan for what left their head
        self._endings: list[Ending] | None = None
        # Shapes that are to be captured: of later steps, as the code behind a head runs already
        # when its key is known
        self.due: set[tuple[Signature, Phase]] = set()
        self._trains = trains
        self._infers = False  # the loop does, as the latest run has found it

    # ------------------------------------------------------------------ finding it

    def learn(self, error: GraphError, args: Sequence[Any]) -> bool:
        """Look for a head after a refused capture; return whether there is another one to try."""
        if not self.may_learn(error):
            return False
        endings = self._look_for(error, args)
        # A value that the head has read or drawn may be used in vain behind it
        is_use = self._reads and self.now is None and error.rule in self._uses
        refused = {} if is_use else lines_of(error)
        raised = isinstance(error, RaisedInCapture)  # if in the backward pass, no head has the line
        if error.rule == HOST_READ.rule and not (is_use or refused):  # nor has one here
            endings.clear()
        while endings:
            ending = endings.pop(0)
            if ending.is_behind(refused) and not (raised and ending.codes.isdisjoint(refused)):
                self.due.clear()
                self.now = Head(ending)
                self.look_again()
                return True
        if not self._is_of_variable(error):
            self.now = self._error = None  # whose traceback has tensors of the step
        return False

    def is_behind(self, error: CaptureError, args: Sequence[Any]) -> bool:
        """Whether a graph may begin behind code with shapes that no capture has, ahead of a use."""
        has_shapes = error.rule in (DYNAMIC_SHAPE.rule, NOT_RECORDED.rule)
        if self.now is not None or not (has_shapes and self.may_learn(error)):
            return False
        refused = lines_of(error)
        return any(ending.is_behind(refused) for ending in self._look_for(error, args))

    def _look_for(self, error: GraphError, args: Sequence[Any]) -> list[Ending]:
        """List where graphs may still begin; the first refusal has a step run to find that."""
        if self._endings is None:
            self._error, self._endings = error, self._found(args)
        return self._endings

    def _is_of_variable(self, error: GraphError) -> bool:
        """Return whether code behind the present head has read a value that leaves it."""
        return isinstance(error, BatchValueRead) and self.now is not None

    def may_learn(self, error: GraphError) -> bool:
        """Return whether code that a capture was refused for may run ahead of its graph."""
        is_known = isinstance(error, RaisedInCapture) or error.rule in _AHEAD | self._uses
        is_known |= self._is_of_variable(error)
        if not is_known or isinstance(error, DrawnOutsideError):
            return False
        # Of a step that FSDP2 gathers parameters for, these are there ahead of its first statement
        is_unit = any(unit is self.context.module for unit in self._units)
        return not (is_unit or self.context.compiled.runs)

    @property
    def _units(self) -> Sequence[nn.Module]:
        """The modules whose parameters FSDP2 gathers when they are called."""
        units = self.context.ranks.units
        return () if units is None else units.modules

    def forget(self) -> None:
        """Let no step have a head, since other ranks have none."""
        self.now, self._error, self._endings = None, None, []

    def missed(self) -> GraphError | None:
        """Note that no plan fits what has left the head of a step.

        After many of them in a row no step has a head: returns the refusal that had led to it.
        """
        if self.now is None:
            return None
        self.misses += 1
        if self.misses <= PATIENCE:
            return None
        error, self.now, self._error, self._endings = self._error, None, None, []
        return error

    def look_again(self) -> None:
        """Look at the module's parameters and buffers again."""
        if self.now is not None:
            module, watch = self.context.module, self.context.watch
            tensors, others = (*self._parameters(), *module.buffers()), module.modules()
            wrappers = self.context.ranks.wrappers
            lasting = (*tensors, *others, *watch.optimizers, *watch.schedulers, *wrappers)
            self.now.state = {*map(id, lasting)}

    def _found(self, args: Sequence[Any]) -> list[Ending]:
        """Run a step up to its first use of a parameter; list where graphs may begin."""
        seen: list[object] = []  # of what would be done again by each run that is undone

        def stop(name: str) -> None:
            seen.append(name)
            raise HeadEnded

        environment = self.context.watch.environment()
        outside, generators = environment.outside, environment.generators
        outside.on_iterator, outside.on_clock = stop, nothing
        outside.know_iterators(environment.held)
        found = FirstUse([], False)
        with self.undone(args) as undone, noting(), refusals() as refused:
            with contextlib.suppress(HeadEnded, CaptureStopped), environment.acting():
                step = partial(self.step, undone.arguments)
                found = first_use(step, self.uses())
            seen += [error for error in refused if error.rule == SIDE_EFFECT.rule]
            seen += generators.outside.intersection(generators.drawn()), outside.contents.changed()
            generators.restore()
            outside.contents.restore()
        self._reads = found.reads
        return [] if any(seen) else list(endings_along(found.stack))

    def uses(self) -> Uses:
        """Make what ends a run of a step, which is undone, where it uses more than heads do."""
        watch, buffers = self.context.watch, [*self.context.module.buffers()]
        stepping = [*watch.optimizers, *watch.schedulers]
        return Uses(self._parameters(), buffers, stepping, self._units)

    def _parameters(self) -> list[Tensor]:
        trained = parameters_of(*self.context.watch.optimizers)
        return [*dict.fromkeys([*self.context.module.parameters(), *trained])]

    @calls_observed
    def step(self, arguments: Sequence[Any]) -> Any:
        """Run the code of a step."""
        return self.context.watch.run(*arguments)

    def refuse_bound(self, names: Sequence[str], tensors: Sequence[Tensor]) -> None:
        """Refuse tensors that leave the head and are bound to what is before or behind it."""
        buffers = self.context.module.buffers()
        state = addresses_of((*self._parameters(), *buffers))
        if self._trains and not torch.is_grad_enabled():
            raise self._bound("gradients are not recorded at the end of it")
        for name, tensor in zip(names, tensors, strict=True):
            if tensor.requires_grad or storage_address(tensor) in state:
                how = "has a gradient" if tensor.requires_grad else "is a part of a buffer"
                raise self._bound(f"{name} {how}")

    def given(
        self, undone: UndoneHead, signature: Signature, tensors: Sequence[Tensor]
    ) -> dict[int, Tensor]:
        """Return, by index, the tensors that the code behind the head has in callers' variables.

        A graph reads them where they are. So they must be the head's.
        """
        own = undone.made.tensors
        found: dict[int, Tensor] = {}
        for i, (name, tensor) in enumerate(zip(signature.tensor_names, tensors, strict=True)):
            if is_callers(name) and signature.aliases[i] == i:  # those of callers come first
                if tensor.numel() and storage_address(tensor) not in own:
                    raise self._bound(f"{name} was there before")
                found[i] = tensor
        return found

    def _bound(self, what: str) -> CaptureError:
        return CaptureError(
            "Tensors that pass from the head of a step to its graph must be made there, without "
            "gradients.",
            f"{what}, and the graph begins at {self.site.describe()}",
            "use parameters after the code that reads on the host, and clone() buffers",
        )

    @property
    def site(self) -> CallSite:
        """Where the graphs of steps begin."""
        assert self.now is not None
        return self.now.ending.site

    # ------------------------------------------------------------------ running it

    def look(self, undone: UndoneHead) -> None:
        """At its end, let the places be known in which a head has stored something."""
        undone.quiet.close()
        watch = self.context.watch
        trained = trained_parameters(watch.optimizers)
        found = (place_of(each, undone.before, trained) for each in undone.before.changes())
        self._places.learn_ahead([place for place in found if place is not None])

    @contextlib.contextmanager
    def undone(self, args: Sequence[Any], *, tensors: bool = True) -> Iterator[UndoneHead]:
        """Undo what the body does, which runs the head of a step; yield arguments for that.

        Logs are discarded, and metrics are not updated. Without ``tensors`` the caller puts those
        of modules back.
        """
        module, around = self.context.module, self.context.watch.around_step()
        self._infers, records = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
        environment, quiet = self.context.watch.environment(), contextlib.ExitStack()
        held, outside = environment.held, environment.outside
        outside.assume(self.context.watch.function)  # it runs unfollowed
        contents, random = PythonSnapshot(held), RandomState(module.device, module.modules())
        parts = contents, outside.contents, objects_of(args[0]), environment.generators, random
        state = [*module.buffers(), *UnregisteredTensors(module, held).small] if tensors else []
        with contextlib.ExitStack() as stack:
            stack.enter_context(Snapshot(state, *parts).undone())
            if tensors and self.context.watch.optimizes_itself:
                gradients = Gradients(self._parameters())  # which code drops, or zeroes in place
                stack.enter_context(Snapshot(gradients.tensors, gradients).undone())
            stack.enter_context(around)
            # Leaving inference mode turns autograd on, whatever it was
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.set_grad_enabled(records))
            stack.enter_context(quiet)
            quiet.enter_context(self.context.watch.mute().recording())
            # Each rank runs heads that are undone as often as it has to
            quiet.enter_context(buffers_left(self.context.ranks.wrappers))
            own = StaticInputs(leaves_of(args[0], Tensor)).tensors  # code may change its batch
            made = quiet.enter_context(Made(own))
            arguments = [substitute(args[0], own), *args[1:]]
            stack.callback(made.tensors.clear)
            yield UndoneHead(arguments, contents, quiet, made)

    def modes(self) -> AbstractContextManager[object]:
        """Set the modes of the loop in the body, which is at the end of a run that is undone."""
        return torch.inference_mode() if self._infers else contextlib.nullcontext()


# ------------------ What is captured

KeyOf = Callable[[dict[str, Any]], tuple[Signature, Sequence[Tensor]]]
"""Returns the key of what follows a head, and its tensors, given what has left the head."""


class Behind:
    """What follows the head of a step."""

    def __init__(
        self, found: StepHead, arguments: Sequence[Any], key_of: KeyOf, step: CallSite
    ) -> None:
        assert found.now is not None
        self.head = found.now
        self._found, self._arguments, self._key_of, self._step = found, arguments, key_of, step

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        """Undo what the head does."""
        with self._found.undone(self._arguments) as self._undone:
            yield

    def run(self, begin: Begin, code: Callable[..., Any]) -> Any:
        """Run the code of the step, captured from the end of its head on."""

        ended: list[bool] = []

        def at_end(leaving: dict[str, Any]) -> Mapping[str, Any]:
            ended.append(True)
            self._found.look(self._undone)
            signature, tensors = self._key_of(leaving)
            frames = list(frames_of_region(sys._getframe(2)))
            named = frames, self._found.given(self._undone, signature, tensors)
            numbers, made = self.head.numbers(signature), self._undone.made
            call = Given(
                (leaving,), tensors, signature, self._step, *named, VARIABLES, numbers,
                lambda: made.refused_behind(named[1].values(), self.head.ending),
            )  # fmt: skip
            (own, *_) = begin(call)
            names = (
                n for n, value in leaving.items() if not isinstance(value, (Identity, Lasting))
            )
            return {name: own[name] for name in names if name in self.head.ending.live}

        result = self.head.run(partial(code, *self._undone.arguments), at_end)
        if not ended:
            raise HeadMissed
        return result
