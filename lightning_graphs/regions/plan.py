"""Plans: what the capture of a region has made, in lists of instructions that a replay walks."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_graphs.autograd.graphed import Stores, set_again
from lightning_graphs.device.graph import CUDAGraph, GraphPool
from lightning_graphs.errors import ReplayError
from lightning_graphs.private.exchange import is_in_backward_pass, modes_entered, modes_left
from lightning_graphs.private.generators import CapturedDropout
from lightning_graphs.regions.conditions import CaptureKey, conditions_of
from lightning_graphs.regions.forked import Forked
from lightning_graphs.regions.gradients import GradientBuffers
from lightning_graphs.report import GraphRecord
from lightning_graphs.values.memory import OutputPlan, Owing, StaticInputs, clone_all, gradients_of
from lightning_graphs.values.signature import CallPlan, Signature
from lightning_graphs.values.snapshot import Result, results_in
from lightning_graphs.values.tree import named_leaves, substitute
from lightning_graphs.watch.head import Head
from lightning_graphs.watch.late import LateValue
from lightning_graphs.watch.mechanism import Check, Instruction, Mechanism
from lightning_graphs.watch.reads import AttributeGuards
from lightning_graphs.watch.side_effects import SideEffects
from lightning_graphs.watch.tracers import LateTracer, Tracer


class PlanPart(NamedTuple):
    """One graph of a plan, with what a replay does around it."""

    graph: CUDAGraph
    before: Sequence[Instruction]  # the last one launches it
    after: Sequence[Instruction]

    @classmethod
    def of(
        cls, graph: CUDAGraph, before: Iterable[Instruction], after: Iterable[Instruction]
    ) -> PlanPart:
        return cls(graph, (*before, graph.launch), (*after,))


NEVER = sys.maxsize


@dataclass(slots=True, eq=False, kw_only=True)
class Plan:
    """A captured region, complete when made: lists of instructions that are walked in order.

    A replay compares with ``checks``, takes in what a call brings, and launches its parts: one, or
    more where code of hooks runs in between.
    """

    key: Hashable  # what it is for, with all that its capture has read
    checks: tuple[Check, ...] = ()
    # Compute and copy in what a call brings; one that gives False ends it: another way is taken
    takes: tuple[Callable[[Any], object], ...] = ()
    parts: dict[str, PlanPart] = field(default_factory=dict)
    uses: int = 0  # how often it was replayed
    unverified: bool = False  # it is yet to be compared with the eager region
    is_launched: bool = False  # the replay that was compared is the coming one
    number: int = 0  # equal on all ranks that have captured it together
    due: int = NEVER  # the number of uses from which on its region is to look at it
    trial: Any = None  # what its region measures of it
    # What its capture has found around it, for the comparison that follows at once
    surroundings: Any = None

    def fits(self, call: Any) -> bool:
        """Whether it is right for a call; if so it is ready for a replay."""
        return bool(self.key == call) and (not self.checks or self.holds())

    def may_fit(self, call: Any) -> bool:
        """Whether a call has the shapes that it is for: a quick look, among many plans."""
        return True

    def holds(self) -> bool:
        """Whether all that its checks read is as it was at the capture."""
        for read, known in self.checks:  # noqa: SIM110 (no generator in a replay)
            if read() != known:
                return False
        return True

    def take(self, given: Any) -> bool:
        """Take in what a call brings; False: its code would go another way than the graphs."""
        for instruction in self.takes:  # noqa: SIM110
            if instruction(given) is False:
                return False
        return True

    def cancel(self) -> None:
        """Undo what :meth:`fits` has prepared, since there is no replay."""

    def replay(self, name: str) -> None:
        """Launch the graph of a part, and do what follows."""
        part = self.parts[name]
        for instruction in (*part.before, *part.after):
            instruction()


@dataclass(slots=True)
class Present:
    """What a plan knows of the coming or the present replay."""

    tensors: Sequence[Tensor] = ()  # of its batch, if it writes any
    batch: Any = None  # its batch, if it changes containers
    copies: bool = True  # the graph replays again: what is handed out must not be its memory
    is_read: bool = True  # what the step returns is; else it gives ``UNREAD``
    # Tensors that were handed out, and what is their gradient after the backward pass
    owing: Owing = field(default_factory=list)


UNREAD = object()
"""Stands for what a replayed step would return."""


class StepOutputs(OutputPlan):
    """What a step has returned, with the present values of numbers in it.

    These are counters, values of its batch such as names of samples, and what calls give that are
    kept back.
    """

    def __init__(
        self,
        value: Any,
        comes_late: Callable[[str], bool] = lambda _: False,
        own: Container[int] = (),  # the ``id`` of tensors that are handed out themselves
    ) -> None:
        leaves = named_leaves(value, "output")
        itself = {name: leaf for name, leaf in leaves if id(leaf) in own}
        leaves = [(name, leaf) for name, leaf in leaves if name not in itself]
        objects = [n for n, leaf in leaves if comes_late(n) and not isinstance(leaf, Tensor)]
        numbers = {name: leaf for name, leaf in leaves if isinstance(leaf, Tracer)}
        # Those that are not there where graphs are compared, with what is inside of them
        late = [name for name, leaf in numbers.items() if isinstance(leaf, LateValue)]
        self._late = {*late}
        self._in_late = tuple(f"{name}{end}" for name in late for end in (" = ", "[", "."))
        tensors = [leaf for _, leaf in leaves if isinstance(leaf, Tensor)]
        absent = dict.fromkeys([*numbers, *objects, *itself])
        # Those that the step moves further on are read before it does
        self._numbers = {n: t for n, t in numbers.items() if type(t) not in (LateTracer, LateValue)}
        self._now: dict[str, Any] = {}
        super().__init__(substitute(value, tensors, "output", absent), static=False)
        if numbers or itself:
            self._build = partial(_with_numbers, self._build, numbers, itself, self._now)

    def reads(self) -> Iterator[Instruction]:
        """Yield what reads the numbers in it, ahead of what the step stores."""
        if self._numbers:
            yield self._read_numbers

    def _read_numbers(self) -> None:
        self._now.update((name, tracer.now()) for name, tracer in self._numbers.items())

    def results(self, returned: Any) -> list[Result]:
        """List what a step has returned, without what comes late here, to compare it."""
        found = results_in(returned, "output")
        if self._late:
            found = [r for r in found if not self.comes_late(r.name)]
        return [r._replace(name="the loss") if r.name in _LOSSES else r for r in found]

    def comes_late(self, name: str) -> bool:
        """Whether a call that is kept back gives what has this name, or a part of it."""
        return name in self._late or name.startswith(self._in_late)


_LOSSES = ("output", "output['loss']", 'output["loss"]')


def _with_numbers(
    build: Callable[[Sequence[Tensor]], Any],
    numbers: Mapping[str, Tracer],
    itself: Mapping[str, Any],
    known: dict[str, Any],  # numbers of this replay that were read before; none where it is judged
    tensors: Sequence[Tensor],
) -> Any:
    now = dict(itself) | {
        name: tracer.at_end() if isinstance(tracer, LateTracer) else tracer.now()
        for name, tracer in numbers.items()
        if name not in known
    }
    now |= known
    known.clear()
    return substitute(build(tensors), tensors, "output", now)


class BatchGradients:
    """What a captured step asks of its batch: ``x.requires_grad_()``, and then ``x.grad``.

    While it is captured, it has asked that of static inputs. A tensor that comes with a gradient
    gives its static input a copy: autograd adds to that in place, or the step's code drops it.
    """

    def __init__(self, inputs: StaticInputs, given: Sequence[Tensor]) -> None:
        self._static, self._given = inputs.tensors, list(given)
        for static, tensor in zip(self._static, given, strict=True):
            if tensor.is_leaf and tensor.grad is not None and tensor.requires_grad:
                static.grad = tensor.grad.detach().clone()
        self._before = [static.grad for static in self._static]
        self._required: list[int] = []  # the tensors of which the step requires a gradient
        # Tensors with a gradient: added in place to the one that comes, or new
        self._added: list[tuple[int, Tensor]] = []
        self._new: list[tuple[int, Tensor]] = []
        self._has_before: list[bool] = []  # whether one came with it, for all of these

    def __bool__(self) -> bool:
        return bool(self._required or self._added or self._new)

    def finish_capture(self) -> None:
        """Note what the step has asked, and restore the static inputs."""
        for i, gradient in gradients_of(self._static):
            kept = gradient is self._before[i]
            (self._added if kept else self._new).append((i, gradient))
        for i, (static, given) in enumerate(zip(self._static, self._given, strict=True)):
            if static.is_leaf and static.requires_grad and not given.requires_grad:
                self._required.append(i)
            static.detach_().requires_grad_(given.requires_grad)
            static.grad = None
        self._has_before = [self._before[i] is not None for i, _ in self._added + self._new]
        self._before, self._given = [], []

    @torch.no_grad()
    def take(self, batch: Sequence[Tensor]) -> bool:
        """Copy in the gradients that a batch has, if it has those of the capture."""
        if not (self._added or self._new):
            return True
        if [batch[i].grad is not None for i, _ in self._added + self._new] != self._has_before:
            return False
        for i, gradient in self._added:
            if (old := batch[i].grad) is not None:
                gradient.copy_(old)
        return True

    def hand_out(self, batch: Sequence[Tensor], owing: Owing) -> None:
        """Give a batch its gradients, after a replay of the forward pass."""
        for i in self._required:
            batch[i].requires_grad_()
        for i, _ in self._new:
            batch[i].grad = None
        owing += [(batch[i], gradient) for i, gradient in self._new + self._added]


def batch_written(
    inputs: StaticInputs,
    written: Sequence[int],  # the tensors of a batch that its step changes in place
    asked: BatchGradients,
    present: Present,
) -> Mechanism | None:
    """Make a replay change its batch as the step has changed the static one; None: it has not."""
    if not (written or asked):
        return None

    @torch.no_grad()
    def write() -> None:
        batch = present.tensors
        for i in written:
            batch[i].copy_(inputs.tensors[i])
        if asked:
            asked.hand_out(batch, present.owing)

    note = partial(setattr, present, "tensors")
    return Mechanism(takes=(asked.take, note) if asked else (note,), last=(write,))


@dataclass(slots=True, eq=False, kw_only=True)
class StepPlan(Plan):
    """A captured step.

    Its part "forward" is replayed in place of the step's own code; where they are no part of
    another one, "backward" in place of the backward pass, "unscale" ahead of the hooks before the
    optimizer step, and "step" in place of clipping and optimizer step.
    """

    key: Signature
    mechanisms: Sequence[Mechanism]
    effects: SideEffects  # what it finds in places, and does there and to containers of its batch
    outputs: StepOutputs  # what its code returned
    logged: Callable[[], list[tuple[str, Tensor]]]  # the tensors that its logs are given
    # What ``.grad`` is after the backward pass, of the optimizer's parameters
    gradients: GradientBuffers
    # What is added to earlier steps' gradients, or stays: of parameters that the optimizer does not
    # have; of a step that optimizes by its own code, of those that it does not zero
    outside: GradientBuffers
    graphs: dict[str, CUDAGraph]  # by the names of the parts, in the order of their capture
    guards: tuple[Check, ...]  # what must be as it was, for this step and for any other of the fit
    steps: bool = False  # whether the optimizer step is captured at all
    adds: bool = False  # whether its gradients are added to those of earlier steps
    # What it writes next to parameters and buffers, by name
    written: dict[str, Tensor] = field(default_factory=dict)
    # Attributes that each of its parts sets
    stores: dict[str, Stores] = field(default_factory=dict)
    # What the gradient scaler knows between ``unscale`` and ``step``
    scaling: dict[str, Any] = field(default_factory=dict)
    # Of a step that optimizes by its own code: earlier steps' gradients that it reads and replaces,
    # and all that are visible after it
    replaced: GradientBuffers | None = None
    visible: GradientBuffers | None = None
    dropped: Sequence[Parameter] = ()  # whose gradients of earlier steps nothing reads any more
    head: Head | None = None  # runs ahead of it: what leaves that is its batch
    forked: Forked | None = None  # what is replayed before it is known to be the step's way
    between: Sequence[tuple[CUDAGraph, UpdateBehind]] = ()  # optimizer steps ahead of "forward"
    behind: Sequence[UpdateBehind] = ()  # all optimizer steps that run eagerly
    # Whether user code keeps gradients that were shown to it
    are_kept: Callable[[], bool] = lambda: False
    call: CallPlan = field(init=False)  # checks a batch against the key, and takes its tensors out
    record: GraphRecord = field(init=False)  # where its replays are counted
    present: Present = field(default_factory=Present)

    def __post_init__(self) -> None:
        self.call = CallPlan(self.key, check_modes=True)
        self.checks = (*self.guards, *self._of_all("checks"))
        self.takes = tuple(self._of_all("takes"))
        if self.forked is not None:
            cancels = [m.cancel for m in self.mechanisms if m.cancel is not None]
            self.forked.begin([*self._of_all("before"), *self.loads_ahead], cancels)
            self.takes = (*self.takes, self.forked.take)
        self.parts = {
            name: PlanPart.of(graph, self._before(name), self._after(name))
            for name, graph in self.graphs.items()
        }

    # No instruction refers to the plan itself: its memory is free as soon as nothing else does.

    def _of_all(self, name: str) -> Iterator[Any]:
        """Yield the instructions of a name in the order of the mechanisms."""
        return chain.from_iterable(getattr(mechanism, name) for mechanism in self.mechanisms)

    def _before(self, name: str) -> Iterator[Instruction]:
        if name == "unscale":
            yield self.gradients.load
        elif name == "step":
            yield from self._of_all("before_update")
            yield partial(self.gradients.bring_in, self.are_kept)
        if name == self.first_backward and not self.loads_ahead:
            yield from self.loads()
        if name == "forward":
            yield from self._of_all("before") if self.forked is None else (self.forked.end,)
            yield from self._of_all("noted")
            for graph, update in self.between:
                yield graph.launch
                yield update.step

    def _after(self, name: str) -> Iterator[Instruction]:
        if name == "unscale":
            yield self.gradients.bind  # copies follow in place
        if name == "step":
            yield self.gradients.take_out
        if name in self.stores:
            yield partial(set_again, self.stores[name])
        if name == "forward":
            yield self.present.owing.clear
            yield from self.outputs.reads()
            for mechanism in reversed(self.mechanisms):
                yield from mechanism.after
            yield from self._of_all("last")

    def loads(self) -> Iterator[Instruction]:
        """Yield what loads the gradients of earlier steps, to which this one adds its own."""
        if self.adds:
            yield self.gradients.load
        if self.outside.parameters:
            yield self.outside.load
        if self.replaced is not None and self.replaced.parameters:
            yield partial(self.replaced.load, replaced=True)

    @property
    def loads_ahead(self) -> list[Instruction]:
        """What loads them ahead of forks, where a step's own code runs its backward passes."""
        by_hand = self.forked is not None and self.visible is not None
        return [*self.loads()] if by_hand else []

    @property
    def first_backward(self) -> str:
        """The part with the backward pass."""
        return "backward" if "backward" in self.graphs else "forward"

    @property
    def captured(self) -> list[CUDAGraph]:
        """All of its graphs."""
        ahead = [] if self.forked is None else self.forked.graphs
        return [*ahead, *(graph for graph, _ in self.between), *self.graphs.values()]

    @property
    def conditions(self) -> CaptureKey:
        """The conditions of its capture."""
        return conditions_of(self.key)

    def may_fit(self, call: tuple[Any, ...]) -> bool:
        return self.call.match(call[:1], {}) is not None

    def fits(self, call: tuple[Any, ...]) -> bool:
        """Whether the call and its conditions are those of the capture; it is then ready."""
        for read, known in self.checks:  # as :meth:`holds`, and below :meth:`take`, but for calls
            if read() != known:
                return False
        tensors = self.call.match(call[:1], {})
        if tensors is None:
            return False
        for instruction in self.takes:  # noqa: SIM110
            if instruction(tensors) is False:
                return False
        return True

    def take_call(self, call: tuple[Any, ...]) -> bool:
        """Take in the call that it was captured with; what leaves a head is there later."""
        if self.head is not None:
            return True
        tensors = self.call.match(call[:1], {})
        assert tensors is not None, "it was captured from this batch"
        return self.take(tensors)

    def cancel(self) -> None:
        if self.forked is not None:
            self.forked.undo()
        for mechanism in self.mechanisms:
            if mechanism.cancel is not None:
                mechanism.cancel()

    @property
    def why_missed(self) -> str:
        """Why it did not fit the last batch like its own; empty if it did."""
        found = (m.why_missed() for m in self.mechanisms if m.why_missed is not None)
        return next(filter(None, found), "")

    @property
    def loose(self) -> dict[str, Tensor]:
        """Tensors that it now writes next to parameters and buffers, by name."""
        return {**self.written, **self.effects.written}

    def run(self, recover: Callable[[StepPlan, Exception], Any]) -> Any:
        """Replay the step's own code, and return what it returns.

        Args:
            recover: Gives that where there is no memory for copies of it, or raises.
        """
        self.uses += 1
        if self.is_launched:
            self.is_launched = False
        else:
            for instruction in self.parts["forward"].before:
                instruction()
        try:
            returned = self.hand_out()
        except Exception as error:
            returned = recover(self, error)
        self.record.replays += 1
        return returned

    def hand_out(self, *, copies: bool = True) -> Any:
        """Set attributes, log, and return what the step returns; "forward" was launched before."""
        present = self.present
        present.copies = copies
        for instruction in self.parts["forward"].after:
            instruction()
        if present.is_read or not self.outputs.may_be_left:
            hand_out = self.outputs.copies if copies else self.outputs.give_away
            returned = hand_out(present.owing)
        else:
            returned = UNREAD
        present.batch, present.tensors = None, ()  # not before: without memory it is done again
        return returned

    def attach(self, *, bound: bool = False) -> None:
        """Let every ``.grad`` be what it is after the backward pass."""
        gradients = self.gradients
        if not bound or gradients.copied:
            gradients.bind(zeroed=not self.adds)
        elif not self.adds:
            for parameter in gradients.others:  # as drop_gradients, without a call in a replay
                parameter.grad = None
        if self.outside.parameters:
            self.outside.bind()
        if self.present.owing:
            self._give_gradients()

    @torch.no_grad()
    def _give_gradients(self) -> None:
        """Let tensors that were handed out have their gradients."""
        owing = self.present.owing
        copies = clone_all([gradient for _, gradient in owing])
        for (tensor, _), gradient in zip(owing, copies, strict=True):
            if tensor.grad is None:
                tensor.grad = gradient
            else:
                tensor.grad.copy_(gradient)
        owing.clear()


def found_for_later(plan: StepPlan | None) -> tuple[StepPlan | None, ...]:
    """Return the plan of a step that begins later, after hooks; empty: it is to be found then.

    Code of hooks may change what graphs ahead of forks have read already.
    """
    if plan is None or plan.forked is None:
        return (plan,)
    plan.cancel()
    return ()


# ------------------ Graphs of one capture


class Segments:
    """The graphs of one step: one, or more if the capture was cut."""

    def __init__(
        self,
        pool: GraphPool,
        reads: AttributeGuards,
        seeing: Callable[[], AbstractContextManager[object]],  # surrounds what is captured
    ) -> None:
        self._pool = pool
        self._reads = reads
        self._seeing = seeing
        self._early: Stores = ()  # set ahead of forks
        self._open = contextlib.ExitStack()
        self.graphs: dict[str, CUDAGraph] = {}
        self.ahead: list[CUDAGraph] = []  # of forks
        self.between: list[tuple[CUDAGraph, UpdateBehind]] = []  # each ends ahead of a step
        self.stores: dict[str, Stores] = {}
        self._entered = 0, 0

    @contextlib.contextmanager
    def capturing(self, name: str) -> Iterator[None]:
        with self._open:
            self.cut(name)
            self._entered = modes_entered()
            yield

    def fork(self) -> bool:
        """Begin another graph where code asks which way to go on; False if none can begin there."""
        if self.between or not self._can_end():
            return False
        self.ahead.append(self._end())
        return True

    def step(self, update: UpdateBehind) -> bool:
        """Begin another graph where an optimizer steps eagerly; False if none can begin there."""
        if not self._can_end():
            return False
        self.between.append((self._end(), update))
        update.is_between = True
        return True

    def _can_end(self) -> bool:
        """Whether all modes of the first graph are entered, and no call or pass is under way."""
        modes = zip(modes_entered(), self._entered, strict=True)
        return all(now >= first for now, first in modes) and not is_in_backward_pass()

    def _end(self) -> CUDAGraph:
        stores = self._reads.stored()
        with modes_left(self._entered):
            self._open.close()
            ended = self.graphs.pop("forward")
            self.cut("forward")
        self._early = (*self._early, *stores)
        return ended

    def cut(self, name: str) -> None:
        self._open.close()
        self._open.push(partial(self._ended, name))
        self._captured = self._open.enter_context(self._pool.capture())
        self._open.enter_context(self._seeing())

    def _ended(self, name: str, error: type[BaseException] | None, *_: object) -> None:
        if error is None:
            self.graphs[name] = self._captured
            early, self._early = self._early, ()
            if stores := (*early, *self._reads.stored()):
                self.stores[name] = stores

    @property
    def dropout(self) -> CapturedDropout | None:
        """cuDNN's random state, if any of the graphs draws from it."""
        between = (graph for graph, _ in self.between)
        found = (graph.dropout for graph in (*self.ahead, *between, *self.graphs.values()))
        return next(filter(None, found), None)

    def mechanism(self) -> Mechanism | None:
        """Check that cuDNN's random state is that of the capture, if recurrent layers draw."""
        dropout = self.dropout
        return None if dropout is None else Mechanism(checks=((dropout.is_current, True),))

    def abandon(self) -> None:
        while self.graphs:
            self._pool.release(self.graphs.popitem()[1])
        while self.ahead:
            self._pool.release(self.ahead.pop())
        while self.between:
            self._pool.release(self.between.pop()[0])


# ------------------ Optimizer steps that no graph can take

Shown = Sequence[tuple[Parameter, Tensor | None]]
"""Parameters and their gradients, as an optimizer step finds them."""


class UpdateBehind:
    """An optimizer step that a captured step's own code takes, and that runs eagerly.

    Every replay takes it behind the graph, or between two graphs, with the gradients that the code
    had then.
    """

    is_between = False

    def __init__(self, optimizer: Optimizer, shown: Shown, present: Present) -> None:
        self._optimizer, self._shown, self._present = optimizer, shown, present

    def take(self) -> None:
        """Take the step, behind the graph.

        Raises:
            ReplayError: It, or the copy of what the captured step returns, has found no memory.
        """
        if not self._present.copies:
            raise ReplayError(
                "An optimizer step that runs eagerly behind its graph must find memory.",
                f"{type(self._optimizer).__name__} steps again, after memory has run out",
                "give graphs less memory (max_graphs, memory), or take a smaller batch",
            )
        self.step()

    def step(self) -> None:
        for parameter, gradient in self._shown:
            parameter.grad = gradient
        self._optimizer.step()
        for parameter, _ in self._shown:
            parameter.grad = None  # those that stay are bound after all instructions

    def results(self, *, eager: bool = False) -> list[Result]:
        """List the gradients that it uses, or those of parameters as they are, to compare them."""
        found = [parameter.grad if eager else gradient for parameter, gradient in self._shown]
        own = [(i, g.detach()) for i, g in enumerate(found) if g is not None]
        return [
            Result(
                f"gradient {i} ahead of an optimizer step",
                gradient.clone() if self.is_between else gradient,  # others may follow there
                is_gradient=True,
            )
            for i, gradient in own
        ]
