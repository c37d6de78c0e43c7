"""Numbers of the trainer in a captured step, and what becomes of their uses.

Counters, learning rates and other numbers of the optimizer are other ones in other steps. While a
step is captured its code gets tracers for them, which record computations. Where one is compared,
the outcome is a value that the step has read: steps for which it turns out otherwise are not this
graph's. Where one is logged, every replay logs its own. Where one meets a tensor, it is a number on
the device that every replay fills. Code that asks for the bare number cannot be followed further.
"""

from __future__ import annotations

import contextlib
import math
import time
import timeit
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from numbers import Real
from types import FrameType
from typing import Any, Protocol

import numpy
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from lightning_graphs.device.rules import (
    CLOCK,
    COUNTER,
    DRAWN,
    HOST_READ,
    NOT_RECORDED,
    Obstacle,
    are_noted,
    with_known_remedy,
)
from lightning_graphs.device.trace import FunctionMode
from lightning_graphs.errors import CaptureError, stop
from lightning_graphs.private.callsite import CallSite, CallSiteFinder, frames_from
from lightning_graphs.private.exchange import Absence, exchanged, standing_in
from lightning_graphs.private.torch import (
    captured_code_runs,
    in_transform,
    named_buffers_in,
    named_modules_in,
    out_of_sight,
    version_of,
)
from lightning_graphs.values.guards import REALS, is_plain
from lightning_graphs.values.memory import StaticInputs
from lightning_graphs.values.tree import leaves_of
from lightning_graphs.watch.assertions import CHECKED, Assertions, Checked, OpenAssertions, Room
from lightning_graphs.watch.branches import LateError
from lightning_graphs.watch.draws import draws_recorded, draws_refused
from lightning_graphs.watch.environment import Client, Environment
from lightning_graphs.watch.foreseen import ForeseenReads
from lightning_graphs.watch.forks import Forks
from lightning_graphs.watch.forms import PARTS, Numbers, bounds_followed, part_of
from lightning_graphs.watch.host import HostProgram, HostTape, Reading
from lightning_graphs.watch.host_trace import HostTracer, counted
from lightning_graphs.watch.kept import CallAt
from lightning_graphs.watch.mechanism import Instruction, Mechanism, Watcher
from lightning_graphs.watch.mirrors import FollowedState, Mirrors, answered, held_numbers
from lightning_graphs.watch.places import StepState
from lightning_graphs.watch.reads import NUMBERS, AttributeGuards
from lightning_graphs.watch.tables import Tables
from lightning_graphs.watch.tracers import (
    ArrayTracer,
    Asks,
    Conversion,
    DrawingFunction,
    OpaqueTracer,
    Question,
    ScalarTracer,
    calls_followed,
    computed_instead,
    tensors_asked,
)
from lightning_graphs.watch.user_code import CompiledCode, UserCode, constants_around

_ROOM = 64  # numbers on the device, in one step
WAYS = 8.0  # which draws may lead a step, at most: so many graphs there are for one batch
LASTING = "trainer.current_epoch"
"""Constant for many steps: code that needs the bare value may have it, as a guard."""


class FilledNumber:
    """A scalar on the device that every replay fills with the present value of a number."""

    def __init__(self, memory: Tensor, read: Callable[[], Any]) -> None:
        self.memory = memory
        self._read = read
        self._filled: Any = math.nan

    def refresh(self, _: object = None) -> None:
        """Write the present value; do nothing while the number is unchanged."""
        value = self._read()
        if value != self._filled or not value:  # zeros have a sign
            self._filled = value
            self.memory.fill_(value)


def item_of(read: Callable[[], Any], index: int) -> Callable[[], Any]:
    return lambda: read()[index]


def _present(read: Callable[[], Any], _: object) -> Any:
    """Value for a guard; ``ABSENT``, which no capture has seen, if reading it raises."""
    try:
        return read()
    except (ArithmeticError, LookupError, TypeError, ValueError):
        return Absence.ABSENT


class StepNumbers(Numbers):
    """The numbers of the trainer, and those that are drawn, in the capture of one step."""

    def __init__(
        self,
        reads: AttributeGuards,
        device: torch.device,
        tape: HostTape | None = None,
        # Whether the next capture could follow this where it is refused in this one
        could_follow: Callable[[Conversion], bool] = lambda _: False,
    ) -> None:
        super().__init__(device)
        self.could_follow = could_follow
        self._led: set[str] = set()  # what was drawn and has led the step on its way
        self.has_guards = False  # the step has gone a way that these numbers decide
        self._guards: list[tuple[str, Callable[[Any], Any]]] = []
        self.tape = tape
        self._ways = 1.0
        self._reads = reads
        # What a graph allocates itself is written by what ran before, in every replay.
        self._room = torch.empty(_ROOM, dtype=torch.float64, device=device)
        # Those that a replay must refresh
        self.filled: dict[tuple[str, torch.dtype], FilledNumber] = {}
        self.refused: set[DrawingFunction] = set()  # those, where what they drew was refused
        self.finds_places = False  # parts of tensors that move are indexed on the device
        self._read_only: list[tuple[str, Tensor, int]] = []

    # ------------------------------------------------------------------ what code gets

    def number(self, name: str, read: Callable[[], Any], obstacle: Obstacle = COUNTER) -> Any:
        """Return the tracer for a value that changes between steps; lists get one for each entry.

        Args:
            name: What messages call it.
            read: Gives the present value.
            obstacle: ``COUNTER`` of what the trainer changes; ``DRAWN`` of what is drawn on the
                host, and ``HOST_READ`` of what it computes of the batch, which replays have ahead
                of their graph; ``CLOCK`` of what they have after it.
        """
        value, drawn = read(), obstacle is DRAWN
        if drawn and type(value) in (list, tuple):
            items = range(len(value))
            return type(value)(
                [self.number(f"{name}[{i}]", item_of(read, i), DRAWN) for i in items]
            )
        kind = self.kind_of(value, obstacle)
        if kind is not None:
            return kind(self, name, read, value, drawn or name == LASTING, obstacle)
        if drawn and not is_plain(value):
            self.refuse(DRAWN, name)
        return self.guarded(name, read, value, obstacle) if is_plain(value) else value

    def kind_of(self, value: Any, obstacle: Obstacle | None = None) -> Callable[..., Any] | None:
        """Return the class of tracers for a value; None: user code gets the value itself.

        Without an obstacle it is for what user code computes from other tracers.
        """
        kind, drawn = type(value), obstacle is DRAWN
        if kind is numpy.ndarray and (drawn or obstacle is None):
            return ArrayTracer
        if obstacle is None or kind in REALS:
            return ScalarTracer
        if kind is bool:
            return None
        if drawn:
            return ScalarTracer if isinstance(value, Real) else None
        return lambda _, name, read, *__: OpaqueTracer(name, read)

    # ------------------------------------------------------------------ what becomes of it

    def guarded(self, name: str, read: Callable[[], Any], value: Any, obstacle: Obstacle) -> Any:
        """Return a value that user code sees; the graph is for steps that would see it, too."""
        self.has_guards = True
        if obstacle is HOST_READ:
            assert self.tape is not None
            self.tape.guard(partial(_present, read, None))
            return value
        if obstacle is not DRAWN:
            self._guards.append((name, partial(_present, read)))
            return value
        if name not in self._led:
            assert self.tape is not None, "which has recorded the draw"
            self._ways *= self.tape.count_ways(partial(_present, read, None))
            self._led.add(name)
        if self._ways > WAYS:
            self.refuse(DRAWN, f"{name}, which decides what the step runs,")
        return value

    def refuse(self, obstacle: Obstacle, name: str) -> None:
        if obstacle is DRAWN:
            self.refused |= self.drawing
        super().refuse(obstacle, name)

    def logged(self, value: Any) -> Callable[[], Any] | None:
        """Return a reader for a logged float that a guard fixes; None for other values.

        To be called by the replacement of a logging function.
        """
        # A float literal reached by a guarded branch is constant for this graph.
        is_ours = type(value) is float and self.has_guards
        if is_ours and any(b is value for b in (*self.bounds, *constants_around())):
            return lambda: value
        return None

    def tensor_of(self, number: ScalarTracer, dtype: torch.dtype) -> Tensor:
        if (own := number.in_graph(dtype)) is not None:
            return own
        known = self.filled.get((number.name, dtype))
        if known is not None:
            return known.memory
        place = len(self.filled)
        if place == _ROOM or number.obstacle is CLOCK:
            number.refuse()
        with out_of_sight():
            memory = self._room[place : place + 1].view(dtype)[0].data  # autograd counts its writes
            self.filled[number.name, dtype] = FilledNumber(memory, number.now)
            if captured_code_runs(memory.device):
                memory.fill_(number.value)
        return memory

    def read_only(self, name: str, *tensors: Tensor) -> None:
        observed = f"{name} is used at {CallSiteFinder().here().describe()}"
        self._read_only += [(observed, tensor, version_of(tensor)) for tensor in tensors]

    @property
    def ways(self) -> dict[str, Callable[[], Any]]:
        """By name, what reads the values by which code under watch has gone its way."""
        return {name: partial(read, None) for name, read in self._guards}

    def note_guards(self) -> None:
        """Let steps be compared by these; not where a further capture may need none of them."""
        for name, read in self._guards:
            self._reads.add(name, read, name, self._reads)
        self._guards.clear()

    def mechanism(self) -> Mechanism:
        """Return what fills the numbers on the device ahead of a replay."""
        return Mechanism(before=[number.refresh for number in self.filled.values()])

    def finish(self) -> None:
        """Refuse what shows only at the end of the step, and note which values guard the graph."""
        for observed, tensor, version in self._read_only:
            if version_of(tensor) != version:
                COUNTER.refuse(observed)
        self._read_only.clear()
        self.note_guards()


# ------------------ Clocks: a replay reads the first before its graph, and the others after it

Read = Callable[[str, Callable[..., Any]], Any]
"""Answers a clock that user code reads, given its name and function."""

_APART = 0.001  # seconds, at least, between the times that captured code sees


class Clocks:
    """The readings of clocks in one step."""

    def __init__(self, numbers: StepNumbers, own: UserCode) -> None:
        self._numbers, self._own = numbers, own
        self._taken: list[Reading] = []

    def watched(self) -> AbstractContextManager[None]:
        """Give user code in the body, captured code, tracers in place of readings."""
        return clocks_exchanged(self._own, self._reading)

    def _reading(self, name: str, function: Callable[..., Any]) -> Any:
        """Return one more reading during a capture, without a call of the user's clock."""
        reading = Reading(function)
        reading.value = self._apart(name)
        self._taken.append(reading)
        read = partial(getattr, reading, "value")
        return self._numbers.number(self._numbers.unique(name), read, CLOCK)

    def _apart(self, name: str) -> Any:
        now, apart = NUMBERS[name.removeprefix("time.")](), len(self._taken) * _APART
        return now + int(apart * 1e9) if isinstance(now, int) else now + apart

    def _end(self) -> None:
        for reading in self._taken[1:]:
            reading()

    def _repeated(self) -> AbstractContextManager[None]:
        """Give the captured code, the body, the last readings again."""
        values = iter([reading.value for reading in self._taken])
        return clocks_exchanged(self._own, lambda name, _: next(values, self._apart(name)))

    def mechanism(self) -> Mechanism | None:
        """Return what reads the clocks in a replay; None if the step reads none."""
        if not self._taken:
            return None
        return Mechanism(before=(self._taken[0],), after=(self._end,), repeated=self._repeated)


def clocks_exchanged(own: UserCode, read: Read) -> AbstractContextManager[None]:
    """Replace clocks that user code reads in this thread.

    Packages read clocks on their own account, some whenever Python collects garbage. Compiled code
    must see none of it.
    """

    def standing(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def instead(_: FrameType, *args: Any) -> Any:
            return read(f"time.{name}", partial(function, *args))

        return standing_in(function, instead, own.runs_in)

    proxies: dict[int, Callable[..., Any]] = {}
    for name, known in NUMBERS.items():
        function = vars(time)[name]
        proxies[id(known)] = proxies[id(function)] = standing(name, function)
    return exchanged(
        [
            (module, key, proxies[id(value)])
            for module in (time, timeit, *own.modules())
            if not proxies.keys().isdisjoint(map(id, vars(module).values()))  # few of thousands
            for key, value in vars(module).items()
            if id(value) in proxies
        ]
    )


# ------------------ All of it

_CLIPPING = "torch.nn.utils.clip_grad"
_ROOM_FOR_HOST = 2**20  # bytes for what the host hands to the graph, to begin with


class FollowedFacts(Protocol):
    """What captures have learned of a fit."""

    reads: AttributeGuards
    places: StepState
    mirrors: Mirrors
    forks: Forks
    foreseen: ForeseenReads
    has_host_program: bool
    earlier: Sequence[Tensor | None]  # copies on the host of an eager step's batch


def functions_asked(graph: Callable[[], Assertions]) -> AbstractContextManager[None]:
    """Let the assertions of a graph compute for functions of torch that look at their results."""

    def drawn(_: FrameType, *args: Any, **kwargs: Any) -> Any:
        return graph().normal(*args, **kwargs)

    def computed(checked: Checked) -> Callable[..., Any]:
        return lambda frame, *args, **kwargs: graph().computed(checked, frame, *args, **kwargs)

    def rolled(_: FrameType, *args: Any, **kwargs: Any) -> Any:
        """Give a bare number for a list of one: torch takes no other object there."""
        if not leaves_of((args, kwargs), ScalarTracer):
            return None
        args, kwargs = tree_map_only(ScalarTracer, ScalarTracer.bare, (args, kwargs))
        return torch.roll(*args, **kwargs)

    checks = ((each.owner, each.called, computed(each)) for each in CHECKED)
    rolling = ((owner, "roll", rolled) for owner in (torch, Tensor))
    return computed_instead([(torch, "normal", drawn), *rolling, *checks])


class Followed:
    """What captures of one step follow on the host; it learns from refused ones.

    Args:
        module: The module that is trained.
        client: The program around the step.
        facts: What was learned of it.
        compiled: Whether the step calls compiled code, next to which less is followed.
        fit: The assertions of the fit.
        refusal: Gives CUDA's refusal of an operator, from its error; None for other errors.
    """

    def __init__(
        self,
        module: Any,
        client: Client,
        facts: FollowedFacts,
        compiled: CompiledCode,
        fit: OpenAssertions,
        refusal: Callable[[RuntimeError], CaptureError | None],
    ) -> None:
        self._module, self._client, self._facts = module, client, facts
        self._compiled, self._fit, self._refusal = compiled, fit, refusal
        self._device: torch.device = module.device
        self.room_on_device = _ROOM_FOR_HOST
        self.finds_draws = False  # refuse the first draw on the host, with its line
        self._conversions: frozenset[Conversion] = frozenset()
        self._functions: frozenset[DrawingFunction] = frozenset()
        self._finds_places = False
        self._bounding: set[str] = set()  # modules whose `min` and `max` are followed
        self._generators: list[torch.Generator] = []  # that were there ahead of a capture
        self._learns_generators = True
        self._leaves_reals = True  # on the device, which the host could compute
        self._has_left_reals = False
        # Whether whole numbers that the host computes and code reads are followed, which takes
        # attempts of their own; None: only if they are not those of a batch before
        self._follows_counts: bool | None = None
        self._is_following = self._has_varied = False
        self._converted: set[Conversion] = set()  # to be followed with them
        self._has_counted = False
        self._has_branched = False
        # Of the coming or the last capture
        self.numbers = StepNumbers(facts.reads, self._device)
        self.tracer: HostTracer | None = None
        self._assertions: Assertions | None = None  # what it reads only to raise, if anything
        self._knows: Callable[[Tensor], bool]  # whether a tensor is the host's, where both are one
        self._state: FollowedState | None = None  # numbers that it reads and writes in tensors
        self.reads: list[CallAt] = []  # by which it has read numbers that the host knows
        self._awaits = -1  # so many reads of the step are to come; below 0: that is not known
        self._advance: Instruction | None = None  # advances the numbers of its state
        self._program: HostProgram | None = None
        self._make_room()

    def _make_room(self) -> None:
        if self._fit.room is None:  # the last one is in use by a graph
            self._fit.room = Room.on(self._device)

    def begin(self, tensors: Sequence[Tensor], inputs: StaticInputs) -> None:
        """Prepare to follow what the coming capture computes on the host."""
        client, facts, tape = self._client, self._facts, None
        if self._follows_counts is None and self._misses_count():
            self._follows_counts = True
        pairs = zip(facts.earlier, tensors, strict=False)
        is_alike = len(facts.earlier) == len(tensors) > 0 and not are_noted()
        is_alike &= all(a is not None and a.shape == b.shape for a, b in pairs)
        self._is_following = not is_alike if (f := self._follows_counts) is None else f
        self.tracer, self._program, self._state, self._advance = None, None, None, None
        self._assertions, self._has_counted = None, False
        self._make_room()
        self.reads.clear()
        if facts.has_host_program and not self._compiled.runs:
            copies, room = client.copies_on_host(tensors), self.room_on_device
            given = inputs.tensors, copies, room, self._generators
            self.tracer = HostTracer(self._device, *given)
            self.tracer.on_read, self.tracer.on_error = self._note_read, self.refuse
            self.tracer.declines, tape = client.declines, self.tracer.tape
            self.tracer.leaves_reals = self._leaves_reals
        is_here = all(tensor.device == self._device for tensor in inputs.tensors)
        self._awaits = facts.foreseen.questions if is_here and not are_noted() else 0
        self._awaits = self._awaits or -1
        self._knows = (lambda _: False) if tape is None else tape.knows
        self.numbers = StepNumbers(facts.reads, self._device, tape, self._could_follow)
        self.numbers.finds_places = self._finds_places
        found = named_buffers_in(named_modules_in(("", self._module)))
        if buffers := [(f"self.{name}", buffer) for name, buffer in found]:
            followed = facts.mirrors, held_numbers(buffers), self.numbers, self._require
            self._state = FollowedState(*followed, is_synced=client.ddp is not None)

    def watchers(self, environment: Environment) -> list[Watcher]:
        """List what the coming capture follows."""
        clocks, compiled = Clocks(self.numbers, self._client.own), self._compiled.runs
        bounding = () if compiled else self._bounding
        return [
            Watcher(
                inside=nullcontext if compiled else partial(calls_followed, self._conversions),
                finish=self._refuse_beside_compiled,
                mechanism=self.numbers.mechanism,
            ),
            Watcher(inside=nullcontext if compiled else clocks.watched, mechanism=clocks.mechanism),
            Watcher(inside=self._draws, finish=self._finish, mechanism=self._computed),
            Watcher(inside=self._asked, mechanism=self._asserted),
            Watcher(inside=self._places_found),
            Watcher(inside=partial(bounds_followed, bounding) if bounding else nullcontext),
            Watcher(inside=partial(self._tables, environment)),
        ]

    def learn(self) -> bool:
        """Learn from a refused capture; return whether another one would follow more.

        Conversions to bare numbers are followed if user code, or a package's, has asked for them;
        functions that draw are followed if a use of what they drew was refused.
        """
        learned, self._has_varied = self._facts.mirrors.learn() or self._has_varied, False
        if self.tracer is not None and self.tracer.has_left:
            self._facts.foreseen.questions, learned = 0, True
        self._has_left_reals |= self.tracer is not None and self.tracer.has_left_reals
        forks = self._facts.forks
        are_needed = self._has_left_reals and self.numbers.are_bare and not forks.taken
        if self._leaves_reals and are_needed:
            self._leaves_reals = forks.is_on = False
            return True
        if self._learns_generators and self.tracer is not None and self.tracer.tape.new:
            self._generators += self.tracer.tape.new
            self._learns_generators, learned = False, True  # others come anew in each step
        known = self._conversions, self._functions, self._finds_places
        self._conversions |= set(filter(self._could_follow, self.numbers.asked))
        self._functions |= self.numbers.refused
        self._finds_places |= self.numbers.are_places and not self._compiled.runs
        return learned or known != (self._conversions, self._functions, self._finds_places)

    def learn_moved(self, logged: object) -> bool:
        """Learn of a refusal of a logged number; return whether another capture may follow it."""
        new = {*filter(self._client.own.has_module, self.numbers.comparing)} - self._bounding
        self._bounding |= new
        return bool(new) or self._facts.places.learn_logged(logged)

    def reads_bare(self) -> bool:
        """Let the next capture have bare numbers of the host, if the refused one had tracers."""
        had, self._has_counted = self._has_counted, False
        if had:
            self._follows_counts = False
        return had

    def was_in_a_branch(self) -> bool:
        """Whether the first refusal may hold only for the present numbers of the trainer."""
        first = not self._has_branched
        self.numbers.note_guards()
        self._has_branched |= self.numbers.has_guards
        return first and self._has_branched

    def _note_read(self, frame: FrameType) -> None:
        inside = next(filter(self._client.own.runs_in, frames_from(frame)), None)
        if inside is not None:
            self.reads.append(CallAt.of((inside, inside.f_lasti, inside.f_lineno)))

    def refuse(self, error: RuntimeError) -> None:
        """End the code at an operator that CUDA refuses, while the user's line runs."""
        if (refusal := self._refusal(error)) is not None:
            if refusal.rule == NOT_RECORDED.rule:
                refusal.remedy = with_known_remedy(NOT_RECORDED).remedy
            stop(refusal)

    def _unanswered(self, asked: Question) -> Any:
        """Let CUDA refuse what it is asked, past handlers of errors in captured code.

        A tracer of the host may know the answer, and sees the refusal otherwise.
        """
        if self.tracer is not None and not self.tracer.has_left:
            return self._answered_last(asked) if self._awaits == 0 else None
        if self._device.type == "cuda":
            try:
                asked.condition().item()
            except RuntimeError as error:
                self.refuse(error)
        return None

    def _answered_last(self, asked: Question) -> Any:
        """Answer what code reads last, and record no further."""
        assert self.tracer is not None
        if in_transform() or self._has_counted or asked.asks not in (Asks.TRUTH, Asks.ITEM):
            return None
        (tensor,) = asked.tensors
        if tensor.numel() != 1:  # torch says so
            return None
        value = tensor.item()
        self.tracer.leave()
        return bool(value) if asked.asks is Asks.TRUTH else value

    def _could_follow(self, asked: Conversion) -> bool:
        own, (name, _) = self._client.own, asked
        is_new = asked not in self._conversions and not self._compiled.runs
        return is_new and (own.has_module(name) or own.has_installed(name) or name == _CLIPPING)

    def _refuse_beside_compiled(self) -> None:
        if self.tracer is not None and self._compiled.runs:
            raise CaptureError(  # and once more without: it runs eagerly while that is done
                "A capture cannot record what the host computes next to compiled code.",
                "the step calls code that torch.compile has made",
                "move what is compiled, or what the host computes, out of the step",
            )
        self.numbers.finish()

    def _places_found(self) -> AbstractContextManager[object]:
        if not self._finds_places or self._compiled.runs:
            return nullcontext()

        def call(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
            if function in PARTS:
                return part_of(self.numbers, function, *args)
            return function(*args, **kwargs)

        return FunctionMode(call)

    def _tables(self, environment: Environment) -> AbstractContextManager[object]:
        if not self._finds_places or self._compiled.runs:
            return nullcontext()
        return Tables(environment.held, environment.outside).exchanged()

    # ------------------------------------------------------------------ the host's program

    def _draws(self) -> AbstractContextManager[object]:
        if self.finds_draws:
            return draws_refused(self._device)
        if self.tracer is None:
            return nullcontext()
        return draws_recorded(self.numbers, self.tracer, self._functions)

    def _finish(self) -> None:
        if self.tracer is None:
            return
        self._program, self._learns_generators = self.tracer.finish(), True
        facts, is_empty = self._facts, self._program is None and not self.tracer.has_answered
        is_wrong = is_empty and facts.foreseen.is_any and not facts.foreseen.makes
        if is_wrong and not are_noted():
            facts.foreseen.is_any = facts.has_host_program = False
        program = self._program
        if program is None or self._is_following or self._follows_counts is False:
            return
        if any(type(value) is int for value in program.read.values):
            if program.run(lambda: self._facts.earlier):
                program.restore()
            elif self._misses_count():
                self._follows_counts = self._has_varied = True
                self._conversions |= set(filter(self._could_follow, self._converted))
                self.numbers.refuse(HOST_READ, "a number of the batch")

    def _misses_count(self) -> bool:
        """Whether the last program would have read another whole number in the last step."""
        missed = None if self._program is None else self._program.missed
        return missed is not None and type(missed[1]) is int

    def _computed(self) -> Mechanism | None:
        program, copies = self._program, self._client.copies_on_host
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

    # ------------------------------------------------------------------ what code asks of tensors

    @contextlib.contextmanager
    def _asked(self) -> Iterator[None]:
        state = self._state
        known = nullcontext() if state is None else state.watching()
        with (
            tensors_asked(self._unanswered),
            known,
            tensors_asked(self._answer),
            functions_asked(self._of_graph),
        ):
            yield
        self._advance = None if state is None else state.instruction()
        if self._assertions is not None:
            self._assertions.finish()

    def _of_graph(self) -> Assertions:
        if self._assertions is None:
            self._assertions = found = self._fit.begin(self._device, self._knows)
            found.forks, found.numbers = self._facts.forks, self.numbers
        return self._assertions

    def _answer(self, asked: Question) -> Any:
        found = None
        if self._awaits:
            self._awaits -= self._facts.foreseen.counts(asked)
        tracer = None if self.tracer is None or self.tracer.has_left else self.tracer
        if tracer is not None and not self._is_following and asked.asks is Asks.INT:
            self._converted.add((asked.frame.f_globals.get("__name__", ""), int))
        elif tracer is not None and self._is_following and asked.is_called:
            found = answered(asked, self._count, partial(counted, tracer), self.numbers)
        return self._of_graph().answer(asked) if found is None else found

    def _count(self, tensor: Tensor) -> Any:
        """Return the tracer for a whole number that replays compute ahead of their graph."""
        assert self.tracer is not None
        if (held := counted(self.tracer, tensor)) is None:
            return None
        self._has_counted, reading = True, self.tracer.tape.reading(held)
        read = partial(getattr, reading, "value")
        return self.numbers.number(self.numbers.unique("a number of the batch"), read, HOST_READ)

    def _require(self, condition: Tensor, site: CallSite, error: LateError) -> None:
        self._of_graph().require(condition, site, error)

    def look_behind(self, loss: Tensor | None) -> None:
        """Look at the gradients of a loss; see :meth:`Assertions.look_behind`."""
        if self._assertions is not None:
            self._assertions.look_behind(loss)

    def _asserted(self) -> Mechanism:
        """Advance the numbers that the host knows, and look at what the graph has asserted."""
        pending = None if self._assertions is None else self._assertions.pending(self._fit)
        last = [] if self._advance is None else [self._advance]
        if pending is None:
            return Mechanism(last=last)
        enter = partial(setattr, self._fit, "is_used", True)
        return Mechanism(noted=(pending.note,), last=(*last, pending.look), enter=enter)
