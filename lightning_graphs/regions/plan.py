"""Plans: what the capture of a region has made, in lists of instructions that a replay walks."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_graphs.autograd.graphed import Stores, set_again
from lightning_graphs.device.graph import CUDAGraph
from lightning_graphs.private.generators import CapturedDropout
from lightning_graphs.regions.conditions import CaptureKey, Check, Instruction, conditions_of
from lightning_graphs.regions.gradients import BatchGradients, GradientBuffers
from lightning_graphs.report import GraphRecord
from lightning_graphs.values.memory import OutputPlan, Owing, StaticInputs, clone_all
from lightning_graphs.values.signature import CallPlan, Signature
from lightning_graphs.watch.assertions import PendingAssertions
from lightning_graphs.watch.environment import Readings
from lightning_graphs.watch.head import Head
from lightning_graphs.watch.host import HostProgram
from lightning_graphs.watch.side_effects import SideEffects


class Part(NamedTuple):
    """One graph of a plan, with what a replay does around it."""

    before: tuple[Instruction, ...]
    graph: CUDAGraph
    after: tuple[Instruction, ...]


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
    parts: Mapping[str, Part] = field(default_factory=dict)
    uses: int = 0  # how often it was replayed
    unverified: bool = False  # it is yet to be compared with the eager region
    number: int = 0  # equal on all ranks that have captured it together

    def fits(self, call: Any) -> bool:
        """Whether it is right for a call; if so it is ready for a replay."""
        return bool(self.key == call)

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

    def launch(self, name: str) -> None:
        """Launch the graph of a part."""
        part = self.parts[name]
        for instruction in part.before:
            instruction()
        part.graph.replay()

    def emit(self, name: str) -> None:
        """Do what follows the graph of a part."""
        for instruction in self.parts[name].after:
            instruction()

    def replay(self, name: str) -> None:
        """Launch a part, and do what follows."""
        self.launch(name)
        self.emit(name)


@dataclass(slots=True)
class Present:
    """What a plan knows of the coming or the present replay."""

    tensors: Sequence[Tensor] = ()  # of its batch, if it writes any
    batch: Any = None  # its batch, if it changes containers
    copies: bool = True  # the graph replays again: what is handed out must not be its memory
    # Tensors that were handed out, and what is their gradient after the backward pass
    owing: Owing = field(default_factory=list)


@dataclass(slots=True, eq=False, kw_only=True)
class StepPlan(Plan):
    """A captured step.

    Its part "forward" is replayed in place of the step's own code; where they are no part of
    another one, "backward" in place of the backward pass, "unscale" ahead of the hooks before the
    optimizer step, and "step" in place of clipping and optimizer step.
    """

    key: Signature
    inputs: StaticInputs  # the static batch
    effects: SideEffects  # what it finds in places, and does there and to containers of its batch
    outputs: OutputPlan  # what its code returned
    logs: Instruction  # makes its calls of loggers and metrics again
    logged: Callable[[], list[tuple[str, Tensor]]]  # the tensors that these are given
    # Logs what its side effects have changed, and counts its own steps; None if that is nothing
    last: Instruction | None = None
    # What ``.grad`` is after the backward pass, of the optimizer's parameters
    gradients: GradientBuffers
    # What is added to earlier steps' gradients, or stays: of parameters that the optimizer does not
    # have; of a step that optimizes by its own code, of those that it does not zero
    outside: GradientBuffers
    graphs: dict[str, CUDAGraph]  # by the names of the parts, in the order of their capture
    # What the host has of the tensors of a batch
    copies: Callable[[Sequence[Tensor]], Sequence[Tensor | None]]
    guards: tuple[Check, ...]  # what must be as it was, for this step and for any other of the fit
    # Bring up to date what its graphs read of the optimizer, which comes first, and the trainer
    refreshes: Sequence[Instruction] = ()
    steps: bool = False  # whether the optimizer step is captured at all
    adds: bool = False  # whether its gradients are added to those of earlier steps
    # What it writes next to parameters and buffers, by name
    written: dict[str, Tensor] = field(default_factory=dict)
    writes_batch: Sequence[int] = ()  # the tensors of its batch that it changes in place
    asked: BatchGradients | None = None  # which gradients of its batch it asks for
    # Attributes that each of its parts sets
    stores: dict[str, Stores] = field(default_factory=dict)
    # What the gradient scaler knows between ``unscale`` and ``step``
    scaling: dict[str, Any] = field(default_factory=dict)
    host: HostProgram | None = None  # what its code computes on the host; None if that is nothing
    dropout: CapturedDropout | None = None  # cuDNN's random state, if its recurrent layers draw
    clocks: Readings | None = None  # what its code reads of clocks; None if that is nothing
    advance: Instruction | None = None  # advances the numbers of its state that the host knows
    assertions: PendingAssertions | None = None  # what its code reads only to raise
    # Of a step that optimizes by its own code: earlier steps' gradients that it reads and replaces,
    # and all that are visible after it
    replaced: GradientBuffers | None = None
    visible: GradientBuffers | None = None
    head: Head | None = None  # runs ahead of it: what leaves that is its batch
    # Whether user code keeps gradients that were shown to it
    are_kept: Callable[[], bool] = lambda: False
    call: CallPlan = field(init=False)  # checks a batch against the key, and takes its tensors out
    record: GraphRecord = field(init=False)  # where its replays are counted
    present: Present = field(default_factory=Present)

    def __post_init__(self) -> None:
        self.call = CallPlan(self.key, check_modes=True)
        self.checks = self.guards
        if self.dropout is not None:
            self.checks += ((self.dropout.is_current, True),)
        self.takes = tuple(self._takes())
        self.parts = {
            name: Part(tuple(self._before(name)), graph, tuple(self._after(name)))
            for name, graph in self.graphs.items()
        }

    # No instruction refers to the plan itself: its memory is free as soon as nothing else does.

    def _takes(self) -> Iterator[Callable[[Sequence[Tensor]], object]]:
        host, copies = self.host, self.copies
        if self.asked:
            yield self.asked.take
        if self.effects.is_needed:
            yield self.effects.take
        if host is not None:
            yield lambda batch: host.run(partial(copies, batch))
        yield self.inputs.copy_in
        if self.writes_batch or self.asked:
            yield partial(setattr, self.present, "tensors")

    def _before(self, name: str) -> Iterator[Instruction]:
        if name == "unscale":
            yield self.gradients.load
        elif name == "step":
            yield self.refreshes[0]
            yield partial(self.gradients.bring_in, self.are_kept)
        elif name == "forward":
            yield from self.refreshes
        if name == self.first_backward:
            yield from self.loads()
        if name == "forward" and self.clocks is not None:
            yield self.clocks.begin

    def _after(self, name: str) -> Iterator[Instruction]:
        if name == "unscale":
            yield self.gradients.bind  # copies follow in place
        if name == "step":
            yield self.gradients.take_out
        if name in self.stores:
            yield partial(set_again, self.stores[name])
        if name == "forward":
            if self.assertions is not None:
                yield self.assertions.note
            if self.clocks is not None:
                yield self.clocks.end
            yield self.logs
            yield self.present.owing.clear
            if self.effects.is_needed:
                yield partial(self.effects.store, self.present)
            if self.last is not None:
                yield self.last
            if self.advance is not None:
                yield self.advance
            if self.assertions is not None:
                yield self.assertions.look

    def loads(self) -> Iterator[Instruction]:
        """Yield what loads the gradients of earlier steps, to which this one adds its own."""
        if self.adds:
            yield self.gradients.load
        if self.outside.parameters:
            yield self.outside.load
        if self.replaced is not None and self.replaced.parameters:
            yield partial(self.replaced.load, replaced=True)

    @property
    def first_backward(self) -> str:
        """The part with the backward pass."""
        return "backward" if "backward" in self.graphs else "forward"

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

    def take_call(self, call: tuple[Any, ...]) -> None:
        """Take in the call that it was captured with; what leaves a head is there later."""
        if self.head is None:
            tensors = self.call.match(call[:1], {})
            assert tensors is not None, "it was captured from this batch"
            self.take(tensors)

    def cancel(self) -> None:
        """Put the generators of the host back to where they were: there is no replay."""
        if self.host is not None:
            self.host.restore()

    @property
    def loose(self) -> dict[str, Tensor]:
        """Tensors that it now writes next to parameters and buffers, by name."""
        return {**self.written, **self.effects.written}

    def hand_out(self, *, copies: bool = True) -> Any:
        """Set attributes, log, and return what the step returns; "forward" was launched before."""
        present = self.present
        present.copies = copies
        for instruction in self.parts["forward"].after:
            instruction()
        if present.tensors:
            self._write_batch()
        hand_out = self.outputs.copies if copies else self.outputs.give_away
        returned = hand_out(present.owing)
        present.batch, present.tensors = None, ()  # not before: without memory it is done again
        return returned

    @torch.no_grad()
    def _write_batch(self) -> None:
        batch = self.present.tensors
        for i in self.writes_batch:
            batch[i].copy_(self.inputs.tensors[i])
        if self.asked:
            self.asked.hand_out(batch, self.present.owing)

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
