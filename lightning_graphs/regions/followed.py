"""Values of the host that the captures of a step follow: counters, clocks, draws, mirrors.

What is computed with them on the CPU, each replay computes again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import FrameType

from torch import Tensor

from lightning_graphs.device.graph import Backend
from lightning_graphs.device.rules import NOT_RECORDED, with_known_remedy
from lightning_graphs.errors import CaptureError
from lightning_graphs.private.callsite import frames_from
from lightning_graphs.regions.conditions import Instruction
from lightning_graphs.regions.context import CaptureFacts, TrainingContext
from lightning_graphs.regions.plan import Mechanism, Watcher
from lightning_graphs.values.memory import StaticInputs
from lightning_graphs.watch.assertions import Assertions
from lightning_graphs.watch.environment import Readings, clocks_exchanged
from lightning_graphs.watch.host import HostProgram
from lightning_graphs.watch.host_trace import HostTracer, draws_recorded, draws_refused
from lightning_graphs.watch.late import CallAt
from lightning_graphs.watch.mirrors import FollowedState, held_numbers
from lightning_graphs.watch.numbers import StepNumbers
from lightning_graphs.watch.tracers import Conversion, DrawingFunction, calls_followed

_ROOM_ON_DEVICE = 2**20  # bytes for what the host hands to the graph, to begin with


class Followed:
    """What captures of one step follow on the host; it learns from refused ones."""

    def __init__(self, context: TrainingContext, facts: CaptureFacts) -> None:
        self._context, self._facts = context, facts
        self._device = context.module.device
        self.copies = context.watch.copies_on_host
        self.room_on_device = _ROOM_ON_DEVICE
        self.finds_draws = False  # refuse the first draw on the host, with its line
        self.caught: list[CaptureError] = []  # CUDA's refusals of operators, which code may catch
        self._conversions: frozenset[Conversion] = frozenset()
        self._functions: frozenset[DrawingFunction] = frozenset()
        self._has_branched = False
        # Of the coming or the last capture
        self.numbers = StepNumbers(facts.reads, self._device)
        self.tracer: HostTracer | None = None
        self.assertions: Assertions  # what it reads only to raise
        self._state: FollowedState  # numbers that it reads and writes in tensors
        self._clocks = Readings()
        self.reads: list[CallAt] = []  # by which it has read numbers that the host knows
        self._advance: Instruction | None = None  # advances the numbers of its state
        self._program: HostProgram | None = None

    def begin(self, tensors: Sequence[Tensor], inputs: StaticInputs) -> None:
        """Prepare to follow what the coming capture computes on the host."""
        context, facts = self._context, self._facts
        self.tracer, self._program, self._clocks = None, None, Readings()
        self.reads.clear()
        if facts.has_host_program and not context.compiled.runs:
            copies, room = self.copies(tensors), self.room_on_device
            self.tracer = HostTracer(self._device, inputs.tensors, copies, room)
            self.tracer.on_read = self._note_read
            self.tracer.on_error = partial(_note_refusal, context.pool.backend, self.caught)
            self.tracer.declines = context.watch.declines
        tape = None if self.tracer is None else self.tracer.tape
        knows = (lambda _: False) if tape is None else tape.knows
        self.assertions = Assertions(self._device, knows)
        self.numbers = StepNumbers(facts.reads, self._device, tape, self._could_follow)
        named = ((f"self.{name}", buffer) for name, buffer in context.module.named_buffers())
        self._state = FollowedState(
            facts.mirrors,
            held_numbers(named),
            self.numbers,
            self.assertions,
            is_synced=context.watch.ddp is not None,
        )

    def watchers(self) -> list[Watcher]:
        """List what the coming capture follows."""
        return [
            Watcher(
                inside=self._conversions_followed,
                finish=self._refuse_beside_compiled,
                mechanism=self._refreshed,
            ),
            Watcher(inside=self._clocks_read, mechanism=self._clocks_repeated),
            Watcher(inside=self._draws, finish=self._finish, mechanism=self._computed),
            Watcher(inside=self._state_followed, mechanism=self._asserted),
        ]

    def learn(self) -> bool:
        """Learn from a refused capture; return whether another one would follow more.

        Conversions to bare numbers are followed if user code, or a package's, has asked for them;
        functions that draw are followed if a use of what they drew was refused.
        """
        learned = self._facts.mirrors.learn()
        known = self._conversions, self._functions
        self._conversions |= set(filter(self._could_follow, self.numbers.asked))
        self._functions |= self.numbers.refused
        return learned or known != (self._conversions, self._functions)

    def was_in_a_branch(self) -> bool:
        """Whether the first refusal may hold only for the present numbers of the trainer."""
        first = not self._has_branched
        self.numbers.note_guards()
        self._has_branched |= self.numbers.has_guards
        return first and self._has_branched

    def _note_read(self, frame: FrameType) -> None:
        runs_in = self._context.watch.own.runs_in
        inside = next(filter(runs_in, frames_from(frame)), None)
        if inside is not None:
            self.reads.append(CallAt.of((inside, inside.f_lasti, inside.f_lineno)))

    def _could_follow(self, asked: Conversion) -> bool:
        own = self._context.watch.own
        is_new = asked not in self._conversions and not self._context.compiled.runs
        return is_new and (own.has_module(asked[0]) or own.has_installed(asked[0]))

    # ------------------------------------------------------------------ numbers and clocks

    def _conversions_followed(self) -> AbstractContextManager[object]:
        if self._context.compiled.runs:
            return nullcontext()
        return calls_followed(self._conversions)

    def _refuse_beside_compiled(self) -> None:
        if self.tracer is not None and self._context.compiled.runs:
            raise CaptureError(  # and once more without: it runs eagerly while that is done
                "A capture cannot record what the host computes next to compiled code.",
                "the step calls code that torch.compile has made",
                "move what is compiled, or what the host computes, out of the step",
            )
        self.numbers.finish()

    def _refreshed(self) -> Mechanism:
        return Mechanism(before=[number.refresh for number in self.numbers.on_device.values()])

    def _clocks_read(self) -> AbstractContextManager[object]:
        if self._context.compiled.runs:
            return nullcontext()
        reading = partial(self._clocks.reading, self.numbers)
        return clocks_exchanged(self._context.watch.own, reading)

    def _clocks_repeated(self) -> Mechanism | None:
        clocks = self._clocks
        if not clocks:
            return None
        repeated = partial(clocks.repeated, self._context.watch.own)
        return Mechanism(before=(clocks.begin,), after=(clocks.end,), repeated=repeated)

    # ------------------------------------------------------------------ the host's program

    def _draws(self) -> AbstractContextManager[object]:
        if self.finds_draws:
            return draws_refused(self._device)
        if self.tracer is None:
            return nullcontext()
        return draws_recorded(self.numbers, self.tracer, self._functions)

    def _finish(self) -> None:
        if self.tracer is not None:
            self._program = self.tracer.finish()

    def _computed(self) -> Mechanism | None:
        program, copies = self._program, self.copies
        if program is None:
            return None
        return Mechanism(
            key=(program.read,),
            takes=(lambda batch: program.run(partial(copies, batch)),),
            cancel=program.restore,
            why_missed=lambda: program.why_missed,
            state=program,
            draws=program.generators,
        )

    # ------------------------------------------------------------------ numbers in tensors

    @contextlib.contextmanager
    def _state_followed(self) -> Iterator[None]:
        with self._state.watching(), self.assertions.watching():
            yield
        self._advance = self._state.instruction()
        self.assertions.finish()

    def _asserted(self) -> Mechanism:
        """Advance the numbers that the host knows, and look at what the graph has asserted."""
        fit = self._context.assertions
        pending = self.assertions.pending(fit)
        last = [] if self._advance is None else [self._advance]
        if pending is None:
            return Mechanism(last=last)
        enter = partial(setattr, fit, "is_used", True)
        return Mechanism(before=(pending.note,), last=(*last, pending.look), enter=enter)


def _note_refusal(backend: Backend, found: list[CaptureError], error: RuntimeError) -> None:
    """Note an operator that CUDA refuses, while the user's line runs that calls it."""
    if not found and (refusal := backend.refusal(error)) is not None:
        if refusal.rule == NOT_RECORDED.rule:
            refusal.remedy = with_known_remedy(NOT_RECORDED).remedy
        found.append(refusal)
