"""The program of the host: what captured code computes on the CPU, computed again by each replay.

A graph holds what the device does. Code that is captured may also compute on the host: numbers and
tables that it makes there and copies to the device, draws of torch's CPU generator, of Python's and
of NumPy's, branches on them, and on values of its inputs. While it is captured these operators are
recorded. What follows from constants alone is computed once and stays on the device. The rest runs
before each replay, in its order: tensors that go to the device are copied into the graph's inputs,
and what Python reads is compared with what it was: where it is something else, the code would have
gone another way.

What the host reads of the device is computed on the host, too, where that is exact (integers,
booleans, comparisons, selections) and follows from inputs of which the host has a copy.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import reprlib
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import methodcaller
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.nn.utils.rnn import invert_permutation

from lightning_graphs.device.rules import (
    HOST_READ,
    RECURRENT,
    SET_GENERATOR,
    Obstacle,
    refuse,
    with_known_remedy,
)
from lightning_graphs.device.trace import OperatorCall, tensors_in
from lightning_graphs.errors import CaptureError
from lightning_graphs.private.callsite import OURS, CallSite, CallSiteFinder, outside_of
from lightning_graphs.private.generators import HostGenerator, comparable, generator_identity
from lightning_graphs.private.torch import memory_of, out_of_sight, storage_uses
from lightning_graphs.values.memory import empty_as

# ------------------ The host program

aten = torch.ops.aten


OF_SHAPES = frozenset({"ones_like", "zeros_like", "full_like", "new_ones", "new_zeros", "new_full"})
"""Operators that look at the shape of a tensor, and at nothing in it."""

SMALL = 2**20  # elements that the host computes for each step, at most
_TIES = ("sort", "argsort", "topk", "argmax", "argmin", "median", "mode", "kthvalue")
"""Operators that may choose otherwise among equal values on another device."""
_SELECTIONS = OF_SHAPES | {
    *("_to_copy", "clone", "copy", "fill", "zero", "zeros", "ones", "full", "scalar_tensor"),
    *("where", "index", "index_put", "index_select", "gather", "scatter", "masked_fill"),
    *("cat", "stack", "flip", "roll", "repeat", "constant_pad_nd", "abs", "neg", "clamp"),
    *("eye", "tril", "triu", "diag_embed"),
    *("amax", "amin", "max", "min", "maximum", "minimum"),
    *("add", "sub", "rsub", "mul", "div"),  # rounded once, as IEEE 754 has it
}
"""Operators that give equal bits for floating-point numbers on every device."""


@dataclass(frozen=True, slots=True)
class Register:
    """The register of a tensor that every replay computes again."""

    index: int


@dataclass(slots=True)
class HostOperation:
    """One operator of the host program."""

    func: Callable[..., Any]  # the operator
    args: list[Any]  # its arguments, with registers for tensors that replays compute again
    kwargs: dict[str, Any]  # its keyword arguments, with registers, too
    results: list[int]  # the registers of the tensors that it returns
    draws: HostGenerator | None = None  # the generator that it draws from
    read: Any = None  # what Python read by it, for an operator that returns no tensor
    site: CallSite | None = None  # where
    # Where its registers stand: in its arguments and in lists among them, under which key
    places: list[tuple[Any, Any, int]] = field(init=False)

    def __post_init__(self) -> None:
        lists = [v for v in (*self.args, *self.kwargs.values()) if isinstance(v, list)]
        found = [(holder, enumerate(holder)) for holder in (self.args, *lists)]
        self.places = [
            (holder, key, value.index)
            for holder, held in (*found, (self.kwargs, self.kwargs.items()))
            for key, value in held
            if isinstance(value, Register)
        ]


class HostReads(NamedTuple):
    """What Python has read of values that every replay computes again."""

    values: tuple[Any, ...]
    sites: tuple[CallSite | None, ...]  # where, in the user's code

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HostReads) and self.values == other.values

    def __hash__(self) -> int:
        return hash(self.values)

    def changes(self, to: HostReads) -> list[str]:
        """Describe the first value that another capture has read otherwise."""
        triples = zip(self.values, to.values, to.sites, strict=False)
        found = [_read_otherwise(a, b, site) for a, b, site in triples if not _same(a, b)]
        return found[:1]


def _read_otherwise(before: Any, now: Any, site: CallSite | None) -> str:
    a, b = (reprlib.repr(list(v[1]) if _is_table(v) else v) for v in (before, now))
    where = f" at {site.describe()}" if site is not None and site.line else ""
    return f"{a} -> {b}, which is read on the host{where}"


def _is_table(value: Any) -> bool:
    return type(value) is tuple and len(value) == 2 and type(value[0]) is torch.Size


class Reading:
    """Operation: reads a tensor of the host, a clock, or a generator of Python or NumPy."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call
        self.value: Any = None  # what it has read last

    def __call__(self, *given: Tensor) -> None:
        self.value = self._call(*given)


@dataclass(eq=False)
class HostProgram:
    """The program that the host runs ahead of a graph's replay."""

    operations: Sequence[HostOperation]
    values: list[Any]  # of the registers
    inputs: Sequence[tuple[int, int]]  # registers, and which input of the graph is copied to each
    held: Sequence[Tensor]  # memory that the graph reads
    _begun: dict[HostGenerator, Any] = field(default_factory=dict, init=False)
    # What Python would have read otherwise in the last step that the graph did not fit
    missed: tuple[HostOperation, Any] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.generators = list({o.draws: None for o in self.operations if o.draws is not None})

    @property
    def read(self) -> HostReads:
        """What Python has read of values that every replay computes again."""
        reads = [o for o in self.operations if not o.results]
        return HostReads(tuple(o.read for o in reads), tuple(o.site for o in reads))

    @torch.no_grad()
    def run(self, copies: Callable[[], Sequence[Tensor | None]]) -> bool:
        """Compute inputs of the coming replay; return whether Python would read equal values.

        If not, the generators are put back, and the graph does not fit this step.
        """
        values = self.values
        self._begun, self.missed = {}, None
        if self.inputs:
            given = copies()
            for register, i in self.inputs:
                if given[i] is None:
                    return False
                values[register] = given[i]
        self._begun = {generator: generator.get_state() for generator in self.generators}
        for operation in self.operations:
            for holder, key, register in operation.places:
                holder[key] = values[register]
            result = operation.func(*operation.args, **operation.kwargs)
            if not operation.results:
                if not _same(result, operation.read):
                    self.missed = operation, result
                    self.restore()
                    return False
            elif type(result) is Tensor:
                values[operation.results[0]] = result
            else:
                for register, tensor in zip(operation.results, tensors_in(result), strict=True):
                    values[register] = tensor
        return True

    @property
    def why_missed(self) -> str:
        """Why the graph did not fit the last step that it was tried for; empty if it did."""
        if self.missed is None:
            return ""
        operation, result = self.missed
        return _read_otherwise(operation.read, result, operation.site)

    def restore(self) -> None:
        """Put the generators back to their states before the last :meth:`run`."""
        for generator, state in self._begun.items():
            generator.set_state(state)


def copy_in(static: Tensor, value: Tensor) -> Tensor:
    """Operation: copy a tensor of the host into memory of the device, without waiting."""
    static.copy_(value, non_blocking=True)
    return value


def shape(value: Tensor) -> torch.Size:
    """Operation: give Python a tensor's shape."""
    return value.shape


def numbers(value: Tensor) -> tuple[torch.Size, tuple[Any, ...]]:
    """Operation: give Python a tensor's values, as ``tolist`` does."""
    return value.shape, tuple(value.flatten().tolist())


READS = frozenset(
    {aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default}
    | {shape, numbers}
)
"""Operations that tell Python something."""

SHAPES = (
    *("aten::nonzero", "aten::masked_select", "aten::bincount"),
    *("aten::_unique2", "aten::unique_consecutive", "aten::unique_dim"),
    "aten::repeat_interleave",
)
"""Operators that tell it the shape of their result."""

PACKING, PADDING = "_pack_padded_sequence", "_pad_packed_sequence"
READS_LENGTHS = frozenset({PACKING, PADDING, *RECURRENT})
"""Functions that read tensors of the host out of the dispatcher's sight."""


def fully_written(function: Any, caller: FrameType) -> Any:
    """Return what makes a tensor of which all is written next, in a way that the host can follow.

    An empty tensor has no values of its own; of a permutation's inverse all are written.
    """
    inverts = function is torch.empty_like
    inverts = inverts and outside_of(caller, OURS).f_code is invert_permutation.__code__
    return torch.zeros_like if inverts else function


def _same(a: Any, b: Any) -> bool:
    return bool(a == b) or (a != a and b != b)


def operator_name(func: OpOverload) -> str:
    """Return an operator's name without the underscore of in-place variants."""
    return func._schema.name.removeprefix("aten::").rstrip("_")


def is_exact(func: OpOverload, outputs: Sequence[Tensor], elements: int) -> bool:
    """Return whether an operator is small and gives equal bits on every device."""
    name = operator_name(func)
    if "empty" in name or name in _TIES or func.namespace != "aten" or not outputs:
        return False
    if torch.Tag.nondeterministic_seeded in func.tags:
        return False
    if any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns):
        return True  # a view
    if sum(t.numel() for t in outputs) > elements:
        return False
    return name in _SELECTIONS or not any(t.is_floating_point() for t in outputs)


# ------------------ Its recording


_marks = itertools.count(2**40)
"""Seeds of states in which captures leave generators of user code; none is used twice."""

UNLIKE_DEVICES = Obstacle(
    "On a GPU PyTorch computes nothing of a tensor there into a tensor on the CPU.",
    "make the tensor on the device of the module: without device= it is on the CPU",
    kind="unlike-devices",
    code="total = torch.zeros(1, device=self.device)  # in place of torch.zeros(1)",
)
RULE = "A replay cannot repeat everything that a step computes on the host."
REMEDY = "compute that value on the device, or pass the value in with the batch"
_FURTHER_DRAWS = 64


def refuse_write(func: OpOverload) -> None:
    """Refuse an operator that writes what the device has to a tensor of the host."""
    if torch.Tag.pointwise in func.tags:
        UNLIKE_DEVICES.refuse_here(f"{func} writes to a tensor of the host")
    else:
        HOST_READ.refuse_here(f"{func} writes to a tensor of the host")


class HostTape:
    """Runs host operators while code is captured, and records those that replays repeat.

    Operators on constants are not recorded. The capture restores generators; draws begin at their
    states before it.
    """

    def __init__(self, lasting: Iterable[torch.Generator] = ()) -> None:
        self.operations: list[HostOperation] = []
        self.values: list[Any] = []  # what they compute; a register is a place in this list
        self.inputs: list[tuple[int, int]] = []  # their registers, and which input each of them is
        self.states: dict[HostGenerator, Any] = {torch.default_generator: torch.get_rng_state()}
        self.states |= {generator: generator.get_state() for generator in lasting}
        self._begun = {**self.states}
        # The states in which draws have left the generators of user code, each another one
        self._left: dict[HostGenerator, Any] = {}
        # Those that are not known to outlive a step, and where they are drawn from
        self.new: dict[torch.Generator, str] = {}
        self.is_set = ""  # where code sets one, which replays would only continue
        # The state to which code has set torch's generator, and where; None: as draws have left it
        self._displaced: tuple[Tensor, str] | None = None
        # Of a rehearsal: as the device left it when code asked, and where it drew until code set it
        self._of_device: Tensor | None = None
        self.is_rewound = ""
        # Tensors of the host, and where replays compute them; None of constants
        self._registers: dict[Tensor, Register | None] = {}
        self._born: set[Tensor] = set()  # those among them that the captured code has made
        self._before: set[int] = set()  # the memory of the others
        self._entries: list[Tensor] = []  # copies of parts of others, where code has views
        self._draws: list[tuple[HostGenerator, Reading]] = []
        self._sites = CallSiteFinder()

    def knows(self, tensor: Tensor) -> bool:
        return tensor in self._registers

    def made(self, tensor: Tensor | None) -> bool:
        """Return whether the captured code has made a tensor, and its memory."""
        return tensor in self._born and memory_of(tensor) not in self._before

    def changes(self, tensor: Tensor) -> bool:
        """Return whether replays compute a tensor again."""
        return self._registers.get(tensor) is not None

    def input(self, tensor: Tensor, index: int) -> None:
        """Register the host copy of an input."""
        register = self._registers[tensor] = self._new_register(tensor)
        self._before.add(memory_of(tensor))
        self.inputs.append((register.index, index))

    def constant(self, tensor: Tensor) -> None:
        """Register a tensor that is constant over all steps."""
        self._registers[tensor] = None
        self._born.add(tensor)

    def of_shape(self, tensor: Tensor) -> Tensor:
        """Return a constant with the shape of a tensor of the device."""
        with out_of_sight():
            constant = empty_as(tensor, torch.device("cpu"))
        self.constant(constant)
        return constant

    def of_known_shape(self, func: OpOverload, result: Any) -> Any:
        """Return the result of an operator; replays compare its shapes if they depend on data."""
        if func._schema.name in SHAPES:
            for tensor in tensors_in(result):
                self.compare(shape, tensor)
        return result

    @property
    def draws(self) -> list[HostGenerator]:
        """The generators that are drawn from, once for each draw."""
        return [o.draws for o in self.operations if o.draws is not None]

    def copy(self, static: Tensor, value: Tensor) -> None:
        """Let replays copy a tensor into memory of the device."""
        register = self._registers[value]
        assert register is not None
        self.operations.append(HostOperation(copy_in, [static, register], {}, [register.index]))

    def compare(self, func: Callable[..., Any], tensor: Tensor) -> None:
        """Let replays compare what Python reads of a tensor of the host."""
        if (register := self._registers[tensor]) is not None:
            site = self._sites.here()
            made = HostOperation(func, [register], {}, [], read=func(tensor), site=site)
            self.operations.append(made)

    def reading(self, tensor: Tensor) -> Reading:
        """Let replays read the number in a tensor of the host."""
        reading = Reading(methodcaller("item"))
        with out_of_sight():
            reading(tensor)
        self.operations.append(HostOperation(reading, [self._registers[tensor]], {}, []))
        return reading

    def frozen(self, tensor: Tensor) -> Tensor:
        """Return a constant copy of a tensor of the host; replays compare its values."""
        self.know(aten.clone.default, tensor)
        with out_of_sight():
            self.compare(numbers, tensor)
            known = tensor.clone()
        self.constant(known)
        return known

    def draw(self, generator: HostGenerator, call: Callable[[], Any]) -> Reading:
        """Draw from a generator of Python or NumPy, and let replays draw."""
        draw = Reading(call)
        with self._continued(generator):
            draw()
        self.operations.append(HostOperation(draw, [], {}, [], generator))
        self._draws.append((generator, draw))
        return draw

    def guard(self, read: Callable[[], Any]) -> None:
        """Let replays compare what Python reads of numbers that they compute."""
        site = self._sites.here()
        self.operations.append(HostOperation(read, [], {}, [], read=read(), site=site))

    def count_ways(self, read: Callable[[], Any]) -> float:
        """Guard what Python reads of draws; return how many outcomes that may have."""
        self.guard(read)
        values = [draw.value for _, draw in self._draws]
        found: Counter[Any] = Counter()
        with contextlib.ExitStack() as stack:
            for generator in {generator: None for generator, _ in self._draws}:
                stack.callback(generator.set_state, generator.get_state())
            for _ in range(_FURTHER_DRAWS):
                for _, draw in self._draws:
                    draw()
                found[read()] += 1
        for (_, draw), value in zip(self._draws, values, strict=True):
            draw.value = value
        # The inverse of the share that the most frequent value has in so many further draws.
        return _FURTHER_DRAWS / max(found.values())

    def made_by(
        self,
        function: Callable[..., Tensor],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        reads: Sequence[Callable[[], Any] | None],
    ) -> Tensor:
        """Make a tensor by a function that replays call again on their arguments."""

        def make(**kwargs: Any) -> Tensor:
            pairs = zip(args, reads, strict=True)
            return function(*(arg if read is None else read() for arg, read in pairs), **kwargs)

        with out_of_sight():
            value = make(**kwargs)
        if not any(reads):
            self.constant(value)
            return value
        # Python numbers may get another dtype.
        again = partial(make, **{**kwargs, "dtype": value.dtype})
        self.operations.append(HostOperation(again, [], {}, [self._meet(value).index]))
        self.compare(shape, value)
        return value

    def entry(self, table: Tensor, index: Any, read: Callable[[], Any]) -> Tensor:
        """Return an entry of a constant table at an index that replays read again."""
        if self.changes(table):
            self.refuse("a tensor that changes has an index that changes")
        value = self.made_by(lambda i, **_: table[i].clone(), (index,), {}, [read])
        self._entries.append(value)
        return value

    def run(self, call: OperatorCall) -> Any:
        """Run an operator on host tensors, and record it if replays change one of them."""
        func = call.func
        registers = [self.know(func, tensor) for tensor in call.inputs]
        generator = self._generator(call)
        changes = generator is not None or any(registers)
        for tensor in call.written:
            self._before_write(func, tensor, changes)
        own = call.mapped(lambda tensor: self._registers[tensor] or tensor)
        with out_of_sight(), self._continued(generator):
            result = call.run()
        outputs = list(tensors_in(result))
        if not changes:
            for tensor in outputs:
                if not self.knows(tensor):  # else it was written in place
                    self.constant(tensor)
            return result
        if not outputs and func not in READS:
            self.refuse(f"{func} is called")
        results = [self._meet(tensor).index for tensor in outputs]
        read = None if outputs else result
        site = None if outputs else self._sites.here()
        self.operations.append(
            HostOperation(func, [*own.args], own.kwargs, results, generator, read, site)
        )
        return result

    def know(self, func: OpOverload, tensor: Tensor) -> Register | None:
        """Return the register of an operator's input; None for a constant."""
        if tensor not in self._registers:
            # What torch makes of Python numbers by itself is a constant. What was there before may
            # change: every replay reads it again.
            constant = func is aten.lift_fresh.default
            self._registers[tensor] = None if constant else self._new_register(tensor)
            if not constant:
                self._before.add(memory_of(tensor))
        return self._registers[tensor]

    def _meet(self, tensor: Tensor) -> Register:
        """Give a register to an operator's result, which replays compute again."""
        if tensor not in self._registers:  # else it was written in place
            self.constant(tensor)
        register = self._registers[tensor] or self._new_register(tensor)
        self._registers[tensor] = register
        return register

    def _before_write(self, func: OpOverload, tensor: Tensor, changes: bool) -> None:
        """Give a register to a constant that is about to be written."""
        if not self.made(tensor):
            self.refuse(f"{func} writes to a tensor from before the step")
        if memory_of(tensor) in map(memory_of, self._entries):
            self.refuse(f"{func} writes to an entry of a table")
        if not changes or self._registers[tensor] is not None:
            return
        with out_of_sight():
            count = tensor.untyped_storage().nbytes() // tensor.element_size()
            value = tensor.as_strided((count,), (1,), 0).clone()
        base = self._new_register(value)
        self.operations.append(HostOperation(aten.clone.default, [value], {}, [base.index]))
        for alias in self._registers:
            if memory_of(alias) == memory_of(tensor):
                if alias.dtype != tensor.dtype:
                    self.refuse(f"{func} writes to a view of another type")
                register = self._registers[alias] = self._new_register(alias)
                view = [base, alias.shape, alias.stride(), alias.storage_offset()]
                made = HostOperation(aten.as_strided.default, view, {}, [register.index])
                self.operations.append(made)

    def _new_register(self, tensor: Tensor) -> Register:
        self.values.append(tensor)
        return Register(len(self.values) - 1)

    def _generator(self, call: OperatorCall) -> HostGenerator | None:
        if torch.Tag.nondeterministic_seeded not in call.func.tags:
            return None
        given = call.kwargs.get("generator")
        if given is None:
            return torch.default_generator
        known = (g for g in self.states if isinstance(g, torch.Generator))
        same = (g for g in known if generator_identity(g) == generator_identity(given))
        return next(same, given)

    @contextlib.contextmanager
    def _continued(self, generator: HostGenerator | None) -> Iterator[None]:
        """Continue a generator in the body, and restore its state from before the capture.

        Those of user code are left in other states, which show where code sets them.
        """
        if generator is None:
            yield
            return
        found = generator.get_state()
        is_own = isinstance(generator, torch.Generator) and generator is not torch.default_generator
        if generator not in self.states:
            self.states[generator] = self._begun[generator] = found
            if isinstance(generator, torch.Generator):
                self.new[generator] = f"a generator is drawn from {self._here()}"
        if is_own:
            self._look(generator, found)
        elif generator is torch.default_generator:
            self._require_in_place()
        generator.set_state(self.states[generator])
        try:
            yield
        finally:
            self.states[generator] = generator.get_state()
            generator.set_state(found)
            if isinstance(generator, torch.Generator) and is_own:
                generator.manual_seed(next(_marks))
                self._left[generator] = generator.get_state()

    def _look(self, generator: HostGenerator, found: Any) -> None:
        """Note a generator of user code that is not as the last draw has left it."""
        expected = self._left.get(generator, self._begun[generator])
        if comparable(found) != comparable(expected):
            self.note_set("a generator was set, which is drawn from")

    def note_set(self, what: str) -> None:
        """Note that code sets a generator, which is refused."""
        self.is_set = self.is_set or f"{what} {self._here()}"

    def state(self) -> Tensor:
        """Return the state of torch's generator, as captured code would find it."""
        found: Tensor = self.states[torch.default_generator]
        self._of_device = torch.default_generator.get_state()
        return found.clone() if self._displaced is None else self._displaced[0].clone()

    def set_state(self, state: Tensor) -> None:
        """Note that code sets torch's generator; it may undo that ahead of the next draw."""
        is_same = torch.equal(state, self.states[torch.default_generator])
        observed = f"a generator is set {self._here()}"
        self._displaced = None if is_same else (state, observed)
        now = torch.default_generator.get_state()
        if self._of_device is None or not torch.equal(now, self._of_device):
            self.is_rewound = observed

    def refuse_set(self, *, with_device: bool) -> None:
        """Refuse generators that the code has made or set, with its line.

        Args:
            with_device: The device draws from torch's generator, too.
        """
        made = [f"{drawn}, which the step makes" for drawn in self.new.values()]
        rewound = [self.is_rewound] if with_device else []
        if found := next(filter(None, (self.is_set, *made, *rewound)), ""):
            raise with_known_remedy(SET_GENERATOR).refused(found)

    def _require_in_place(self) -> None:
        if self._displaced is not None:
            self.is_set = self.is_set or self._displaced[1]

    def _here(self) -> str:
        return f"at {self._sites.here().describe()}"

    def put_back(self) -> None:
        """Put the generators of user code back to their states from before the capture."""
        self._require_in_place()
        with out_of_sight():
            for generator in self._left:
                self._look(generator, generator.get_state())
                generator.set_state(self._begun[generator])

    def drop_unread(self) -> None:
        """Drop operators unless Python or the device reads their results; draws stay."""
        storages = list(map(memory_of, self.values))
        needed: set[int] = set()
        kept = []
        for operation in reversed(self.operations):
            leaves = not operation.results or operation.func is copy_in
            if leaves or operation.draws or any(storages[r] in needed for r in operation.results):
                given = [register for _, _, register in operation.places]
                needed.update(storages[r] for r in (*given, *operation.results))
                kept.append(operation)
        self.operations = kept[::-1]
        self.inputs = [(r, i) for r, i in self.inputs if storages[r] in needed]

    def refuse_kept_tensors(self) -> None:
        """Refuse host tensors that user code keeps: a replay would not update them."""
        changing = [tensor for tensor, register in self._registers.items() if register is not None]
        others = {memory_of(tensor) for tensor in changing if tensor not in self._born}
        born = [tensor for tensor in changing if memory_of(tensor) not in others]
        del changing, self._entries[:]
        self._registers.clear()
        self._born.clear()
        for generation in (1, 2):  # frames of the code that was captured; all takes 0.3 s
            if _shapes_of_kept(born):
                gc.collect(generation)
        for size in _shapes_of_kept(born):
            raise CaptureError(RULE, f"a CPU tensor of shape {size} is kept or returned", REMEDY)

    def refuse(self, what: str) -> None:
        """Refuse what replays cannot repeat, and name the user's line."""
        refuse(CaptureError(RULE, f"{what}, at {self._sites.here().describe()}", REMEDY))


def _shapes_of_kept(born: list[Tensor]) -> list[tuple[int, ...]]:
    """Return the shapes of tensors that have further references."""
    uses = Counter(map(memory_of, born))
    kept = []
    for tensor in born:
        storage = tensor.untyped_storage()
        # Each of our tensors uses it, and so does the name above. Of the tensor know `born`, the
        # values of replays, the name in this loop and the call.
        if storage_uses(storage) > uses[storage._cdata] + 1 or sys.getrefcount(tensor) > 4:
            kept.append(tuple(tensor.shape))
    return kept
