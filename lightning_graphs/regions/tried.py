"""An optimizer step that is tried as it is: what it does besides computing on the device."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial, wraps
from itertools import chain
from operator import attrgetter, getitem, setitem
from types import FunctionType
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_graphs.device.graph import is_current_stream_capturing
from lightning_graphs.device.rules import COUNTER
from lightning_graphs.device.trace import (
    FunctionMode,
    KnownStorage,
    Operation,
    OperatorCall,
    Recorder,
)
from lightning_graphs.errors import CaptureError, GraphError, first_line, in_one_line
from lightning_graphs.private.callsite import IN_LIBRARIES, is_result_dropped, line_of_class
from lightning_graphs.private.exchange import Absence, replaced
from lightning_graphs.private.torch import (
    COMPILED_FUNCTION,
    compiled_code_noticed,
    hides_memory,
    out_of_sight,
    plain,
)
from lightning_graphs.values.guards import OF_TENSORS, REALS, is_plain
from lightning_graphs.values.memory import clone_all, extent
from lightning_graphs.values.snapshot import PythonSnapshot, iter_inside
from lightning_graphs.values.tree import flatten, leaves_of, parameters_of
from lightning_graphs.watch.both_ways import BothWays
from lightning_graphs.watch.forms import MakeNumber
from lightning_graphs.watch.on_device import DeviceNumber
from lightning_graphs.watch.scalars import HostScalar, holds_number, scalars_followed
from lightning_graphs.watch.tracers import Conversion, ScalarTracer, present


def why_failed(optimizer: Optimizer, error: BaseException) -> str:
    """Say what an optimizer step has failed by in a capture, with the optimizer's own line."""
    site = line_of_class(error, type(optimizer))
    if isinstance(error, GraphError):
        said = first_line(error)
        return said.replace(IN_LIBRARIES, site.describe()) if site.line else said
    said = in_one_line(error)
    return f"{said} at {site.describe()}" if site.line else said


RETURNING: WeakSet[Optimizer] = WeakSet()
"""Optimizers whose step was seen to return something by itself."""

# ------------------ Steps that a gradient scaler skips

UNSCALES_ITSELF = "_step_supports_amp_scaling"
"""The attribute by which torch's GradScaler and Lightning know an optimizer that was made fused: it
divides gradients by the loss scale itself, and its hooks see scaled ones."""

_GIVEN = "grad_scale", "found_inf"
"""Attributes by which a scaler tells an optimizer what it is to do itself."""
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@contextlib.contextmanager
def decided_on_device(optimizer: Optimizer) -> Iterator[None]:
    """Let a scaler leave it to the optimizer in the body to skip its step, as if it was made fused.

    Of any other the scaler would read on the host whether its gradients have overflowed.
    """
    table = vars(optimizer)
    before = {name: table[name] for name in _GIVEN if name in table}
    try:
        with replaced(optimizer, UNSCALES_ITSELF, True):
            yield
    finally:  # a step that fails leaves them
        for name in _GIVEN:
            table.pop(name, None)
        table.update(before)


def unless_overflowed(optimizer: Optimizer, step: Callable[..., Any]) -> Callable[..., Any]:
    """Make the step of an optimizer that a scaler would skip by a read on the host.

    Its gradients are unscaled. An eager step is skipped as the scaler does; a captured one leaves
    everything as it was, which the device decides.
    """

    def stepped(*args: Any, **kwargs: Any) -> Any:
        table = vars(optimizer)
        given = {name: table.pop(name) for name in _GIVEN if name in table}
        overflowed = given.get("found_inf")
        try:
            if overflowed is None:
                return step(*args, **kwargs)
            if not is_current_stream_capturing():
                return None if overflowed.item() else step(*args, **kwargs)
            with _Sparing(overflowed, optimizer).sparing():
                returned = step(*args, **kwargs)
            if returned is not None and not is_result_dropped():
                raise CaptureError(
                    "A captured step that a gradient scaler may skip must return nothing.",
                    "what it returns is used",
                    "use no such result, or keep what you need of it in the state of the optimizer",
                )
            return None
        finally:
            table.update(given)

    return stepped


class _Sparing(Recorder):
    """Recorder of a captured optimizer step that has no effect where gradients have overflowed.

    The step is computed in any case. What it writes is copied ahead of it, and the graph chooses
    between both bit by bit: exactly, whatever the numbers are.
    """

    def __init__(self, overflowed: Tensor, optimizer: Optimizer) -> None:
        super().__init__(strict=False)
        self._overflowed = overflowed
        held = [p for p in parameters_of(optimizer) if p.grad is not None]
        held += leaves_of([*optimizer.state.values()], Tensor)
        held = [t for t in held if not isinstance(t, HostScalar)]
        held = [
            t for t in plain(held) if t.device == overflowed.device and t.layout is torch.strided
        ]
        self._held = [*{id(tensor): tensor for tensor in held}.values()]
        self._covered: set[int] = set()  # storages that lie in one of these as a whole
        self._further: list[tuple[Tensor, Tensor]] = []  # written, and what they were before

    @contextlib.contextmanager
    def sparing(self) -> Iterator[None]:
        """Choose at the end of the body, a step, what becomes of all that it has written."""
        with torch.no_grad():
            groups = _together(map(_bits, self._held))
            copies = list(map(clone_all, groups))
        for tensor in self._held:
            storage = tensor.untyped_storage()
            if tensor.numel() * tensor.element_size() == storage.nbytes():
                self._covered.add(storage.data_ptr())
        with self:
            yield
        with torch.no_grad():
            for written, copy in reversed(self._further):
                self._choose([_bits(written)], [copy])
            for group, copied in zip(groups, copies, strict=True):
                self._choose(group, copied)

    def before_write(self, tensor: Tensor, known: KnownStorage) -> None:
        is_here = tensor.device == self._overflowed.device  # else the step is refused for it
        if is_here and not known.born and known.address not in self._covered:
            self._further.append((tensor, _bits(tensor).clone()))

    def keep(self, operation: Operation) -> None:
        """Record no operation."""

    def _run(self, call: OperatorCall) -> Any:
        if torch.Tag.nondeterministic_seeded in call.func.tags:
            raise CaptureError(
                "A captured step must draw as many random numbers as an eager one.",
                f"{call.func} draws in a step that the gradient scaler may skip",
                "train in bf16-mixed, which needs no scaler",
            )
        return call.run()

    def _choose(self, written: list[Tensor], before: list[Tensor]) -> None:
        skips = self._overflowed.ne(0)
        factors = [flag.to(written[0].dtype) for flag in (skips.logical_not(), skips)]
        for tensors, factor in zip((written, before), factors, strict=True):
            torch._foreach_mul_(tensors, factor)
        torch._foreach_add_(written, before)


def _bits(tensor: Tensor) -> Tensor:
    """View the elements of a tensor as integers; what a GPU multiplies by 0 or 1 is exact then."""
    plain = tensor.detach()
    if plain.is_complex():
        plain = torch.view_as_real(plain)
    return plain.view(_INTEGERS[plain.element_size()])


def _together(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Group tensors by dtype; one that may share memory with another is by itself, after these.

    Of memory that a group has twice, what it was would be added twice.
    """
    kinds: dict[torch.dtype, list[Tensor]] = {}
    alone, end = [], 0
    for tensor in sorted(tensors, key=Tensor.data_ptr):
        begin = tensor.data_ptr()
        if begin < end:
            alone.append([tensor])
        else:
            kinds.setdefault(tensor.dtype, []).append(tensor)
        end = max(end, begin + extent(tensor) * tensor.element_size())
    return [*kinds.values(), *alone]


# ------------------ What a step makes anew


def kept_in_place(
    optimizer: Optimizer, step: Callable[..., Any], is_captured: Callable[[], bool]
) -> Callable[..., Any]:
    """Make a step that writes what it binds anew in its tables (``state["rms"] = p.norm()``).

    A captured one copies it to the tensor that was there, which the next replay reads, and so do
    eager ones once there was a capture.
    """

    def stepped(*args: Any, **kwargs: Any) -> Any:
        if not (is_captured() or is_current_stream_capturing()):
            return step(*args, **kwargs)
        held = _HeldTensors(optimizer)
        returned = step(*args, **kwargs)
        held.keep()
        return returned

    return stepped


class _HeldEntry(NamedTuple):
    """What an entry of a table held: its structure and leaves, and what puts containers back."""

    table: dict[Any, Any]
    key: Any
    value: Any
    structure: Any
    leaves: list[Any]
    contents: PythonSnapshot

    @classmethod
    def at(cls, table: dict[Any, Any], key: Any) -> _HeldEntry:
        value, leaves = table[key], list[tuple[str, Any]]()
        structure = flatten(value, "", leaves)
        contents = PythonSnapshot(iter_inside([("", value)]))
        return cls(table, key, value, structure, [leaf for _, leaf in leaves], contents)

    def anew(self) -> list[tuple[Tensor, Tensor]]:
        """Pair tensors with those now in their places; empty if more than that has changed."""
        leaves = list[tuple[str, Any]]()
        if flatten(self.table.get(self.key), "", leaves) != self.structure:
            return []
        pairs = zip(self.leaves, (leaf for _, leaf in leaves), strict=True)
        found = [(was, now) for was, now in pairs if was is not now]
        are_tensors = all(type(was) is type(now) is Tensor for was, now in found)
        return found if are_tensors and all(_kind(w) == _kind(n) for w, n in found) else []

    def restore(self) -> None:
        self.contents.restore()
        self.table[self.key] = self.value


class _HeldTensors:
    """Tensors that an optimizer holds in its state, groups and attributes, by their places."""

    def __init__(self, optimizer: Optimizer) -> None:
        own: dict[Any, Any] = vars(optimizer)
        held = parameters_of(optimizer)
        held += [p.grad for p in held if p.grad is not None]
        self._places = [
            _HeldEntry.at(table, key)
            for table in (*_tables_of(optimizer), own)
            for key, value in table.items()
            if not (key == "params" or (table is own and key in OF_TENSORS))
            if not (table is optimizer.state and isinstance(value, dict))
            if type(value) in (Tensor, list, tuple, dict, deque)
        ]
        self._others = {_address(t) for t in plain(held) if t.layout is torch.strided}
        self._here = {t.device for t in held}

    def keep(self) -> None:
        """Write to them what is in their places by now, and put them back there."""
        tensors = (t for place in self._places for t in place.leaves if type(t) is Tensor)
        before = Counter(_address(t) for t in tensors if t.layout is torch.strided)
        taken = {*before, *self._others}  # memory that is in use otherwise
        bound = set[int]()
        for place in self._places:
            anew = place.anew()
            # Tensors of one place may have changed their order there, as in a queue
            own = {_address(was) for was, _ in anew if before[_address(was)] == 1}
            made = [_address(tensor) for _, tensor in anew]
            begins = {tensor.data_ptr() for _, tensor in anew}  # parts of one tensor may be apart
            if len(begins) < len(made) or not begins.isdisjoint(bound):
                continue
            if not own.issuperset(taken.intersection(made)):
                continue
            if not anew or not all(was.device in self._here for was, _ in anew):
                continue
            bound |= begins
            with torch.no_grad():
                values = [
                    t.clone() if a in own else t for a, (_, t) in zip(made, anew, strict=True)
                ]
                for (was, _), value in zip(anew, values, strict=True):
                    was.copy_(value)
            place.restore()


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _kind(tensor: Tensor) -> tuple[object, ...]:
    is_plain = tensor.layout is torch.strided and not tensor._is_view()
    return is_plain, tensor.dtype, tensor.shape, tensor.stride(), tensor.requires_grad


# ------------------ Steps on the default stream

_OFF_STREAM = frozenset({"bitsandbytes"})
"""Packages whose optimizers launch their kernels on the default stream of the device, whatever the
current one is: their functions of C have no argument for a stream."""


def runs_off_stream(optimizer: Optimizer) -> bool:
    """Return whether a step launches kernels where no capture sees them, and no stream waits."""
    packages = {kind.__module__.partition(".")[0] for kind in type(optimizer).__mro__}
    return not _OFF_STREAM.isdisjoint(packages)


@contextlib.contextmanager
def in_order(optimizers: Iterable[Optimizer], device: torch.device) -> Iterator[None]:
    """Let steps of such optimizers in the body wait for the current stream, and that for them."""
    with contextlib.ExitStack() as stack:
        for optimizer in filter(runs_off_stream, optimizers):
            step = _on_default_stream(optimizer.step, device)
            stack.enter_context(replaced(optimizer, "step", step))
        yield


def _on_default_stream(step: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    default = torch.cuda.default_stream(device)

    def moved(
        to: torch.cuda.Stream, current: torch.cuda.Stream, call: Callable[..., Any]
    ) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            to.wait_stream(current)
            with torch.cuda.stream(to):
                returned = call(*args, **kwargs)
            current.wait_stream(to)
            return returned

        return called

    @wraps(step)
    def stepped(closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        current = torch.cuda.current_stream(device)
        given = () if closure is None else (closure,)
        if current == default:
            return step(*given, **kwargs)
        own = (moved(current, default, each) for each in given)
        return moved(default, current, step)(*own, **kwargs)

    return stepped


# ------------------ What a step does on the host


def can_watch(optimizer: Optimizer) -> bool:
    """Return whether no function of an optimizer is compiled: Dynamo would trace a watch, too."""
    module = sys.modules.get(type(optimizer).__module__)
    held = chain(*(vars(o).values() for o in (optimizer, type(optimizer), module) if o))
    tables = (getattr(value, "__dict__", {}) for value in held)
    # Dynamo marks what it leaves alone as well: functions of torch.optim, once it is imported
    return not any(COMPILED_FUNCTION in t and not t.get("_torchdynamo_disable") for t in tables)


class ClosureUse:
    """Finds whether a step only calls its closure, once and ahead of all work on tensors."""

    def __init__(self, closure: Callable[[], Any]) -> None:
        self._closure = closure
        self._watching = contextlib.ExitStack()
        self._calls, self._is_only_called = 0, True
        self.runs_compiled = False  # it calls compiled code, which hides what that does
        self._loss: Any = None

    @property
    def is_plain(self) -> bool:
        return self._calls == 1 and self._is_only_called and not self.runs_compiled

    def stand_ins(self) -> tuple[Callable[[], Any], ...]:
        """Make what a plain step calls where its closure has run ahead; nothing for another one."""
        if not self.is_plain:
            return ()
        loss = self._loss
        if isinstance(loss, Tensor):  # which nothing computes with, and none that could be kept
            loss = torch.full_like(loss.detach(), torch.nan)
        return (lambda: loss,)

    def watched(self, step: Callable[..., Any]) -> Any:
        """Take the step, and watch its functions of torch."""
        with self._watching:
            self._watch()
            return step(self._called)

    def _watch(self) -> None:
        self._watching.enter_context(compiled_code_noticed(self._note))
        self._watching.enter_context(FunctionMode(self._seen))

    def _note(self) -> None:
        self.runs_compiled = True

    def _called(self) -> Any:
        self._calls += 1
        self._watching.close()  # what the closure runs is not the step's own
        try:
            self._loss = self._closure()
            return self._loss
        finally:
            self._watch()

    def _seen(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        tensors = leaves_of((args, kwargs), Tensor)
        is_ahead = self._calls == 0 and bool(tensors)
        if is_ahead or any(tensor is self._loss for tensor in tensors):
            self._is_only_called = False
        return function(*args, **kwargs)


def _tables_of(optimizer: Optimizer) -> Iterator[dict[Any, Any]]:
    """List groups, states of parameters, and the state itself where it has more than these."""
    state: Any = optimizer.state
    has_more = not all(isinstance(value, dict) for value in state.values())
    held = chain(optimizer.param_groups, state.values(), (state,) if has_more else ())
    return (table for table in held if isinstance(table, dict))


def is_host_number(value: Any) -> bool:
    """Return whether a value is a number of the host, or a tensor with one."""
    return type(value) in REALS or holds_number(value)


def numbers_of(optimizer: Optimizer, of: Callable[[Any], bool] = is_host_number) -> set[str]:
    """Return the names of numbers on the host, in its groups and its state.

    To a rehearsal a tensor is none that has more elements for other parameters.
    """
    entries = [entry for table in _tables_of(optimizer) for entry in table.items()]
    others = {k for k, v in entries if isinstance(v, Tensor) and not of(v)}
    return {k for k, v in entries if of(v)} - others


class OptimizerNumber:
    """Where a number of the host is: an entry of a table, or a tensor of a CPU in one."""

    def __init__(self, table: dict[Any, Any], key: Any) -> None:
        self.table, self.key = table, key
        self.value = table[key]
        self.read: Callable[[], Any] = partial(getitem, table, key)
        self.write: Callable[[Any], object] = partial(setitem, table, key)
        self.kind: Any = type(self.value)
        if isinstance(self.value, Tensor):  # as NumPy has it: in a twentieth of torch's time
            with out_of_sight():
                array = self.value.numpy()
            self.read, self.write = array.item, array.fill
            self.kind = self.value.dtype, self.value.shape

    @property
    def is_kept(self) -> bool:
        """Whether the table still has the tensor in it."""
        return self.table.get(self.key) is self.value

    def keep(self, made: Tensor) -> None:
        """Let the graph copy what a step has made here in a capture to where that was before.

        Raises:
            CaptureError: It is of another kind.
        """
        own, is_view = self.value, made._is_view()
        if is_view or (made.dtype, made.shape, made.device) != (own.dtype, own.shape, own.device):
            COUNTER.refuse(f"`{self.key}` of the optimizer becomes a value of another kind")
        with torch.no_grad():
            own.copy_(made)
        self.table[self.key] = own

    def number_of(self, value: Any) -> Any:
        """Return the number that a step has put here in a capture.

        Raises:
            CaptureError: It is of another kind.
        """
        kind: object = type(value)
        number = value
        if isinstance(value, HostScalar):
            kind, number = (value.dtype, value.shape), value.number
        elif isinstance(value, ScalarTracer):
            kind = type(value.value)
        if kind != self.kind or isinstance(number, DeviceNumber):
            COUNTER.refuse(f"`{self.key}` of the optimizer becomes a value of another kind")
        return number


class Counters:
    """Numbers of the host that a captured step of an optimizer reads and moves.

    They are entries of its groups and of its state, or are in tensors of a CPU there. Those of one
    name and value, as all parameters have them, are one number as long as they are equal, which
    replays check. Each replay has them as they are, and moves them as the step does.
    """

    def __init__(
        self, optimizer: Optimizer, names: frozenset[str], number: MakeNumber | None, ways: BothWays
    ) -> None:
        # Name, kind, and value, which tells types apart -> places
        self._alike: dict[tuple[str, Any, str], list[OptimizerNumber]] = {}
        for table in _tables_of(optimizer) if number is not None else ():
            for key in (table.keys() & names) - {"lr"}:
                if is_host_number(table[key]):
                    place = OptimizerNumber(table, key)
                    self._alike.setdefault((key, place.kind, repr(place.read())), []).append(place)
        self._number, self._ways = number, ways
        # What a scaler tells the captured step, by which that has no effect
        self._overflowed: Tensor | None = vars(optimizer).get("found_inf")
        # Its classes may ask for bare numbers; compiled code would trace what stands for `float`
        classes = type(optimizer).__mro__[:-1] if can_watch(optimizer) else ()
        own = {kind.__module__ for kind in classes if kind.__module__.partition(".")[0] != "torch"}
        # Those that its classes are defined in, which torch's do not tell
        methods = [m for kind in classes for m in vars(kind).values()]
        self._modules = own | {m.__module__ for m in methods if isinstance(m, FunctionType)}
        self._conversions: set[Conversion] = {(name, kind) for name in own for kind in (float, int)}
        self._attributes = vars(optimizer)
        self._plain = {
            key: value
            for key, value in vars(optimizer).items()
            if is_plain(value) and not key.startswith("_")
        }
        # What a step makes of them, and where it puts that
        self._moves: dict[str, tuple[Any, list[OptimizerNumber]]] = {}

    @contextlib.contextmanager
    def followed(self) -> Iterator[None]:
        """Let the body, a step, have tracers; afterwards every number is as before."""
        given: list[tuple[OptimizerNumber, Any]] = []
        scalars: dict[int, HostScalar] = {}  # by address: some may share a tensor
        for n, ((key, *_), places) in enumerate(self._alike.items()):
            assert self._number is not None, "there are none without"
            name = f"`{key}` of the optimizer" + (f" ({n})" if n else "")
            tracer = self._number(name, places[0].read)
            for place in places:
                found, value = tracer, place.value
                if isinstance(value, Tensor):
                    made = HostScalar.of(value, tracer)
                    found = scalars.setdefault(value.data_ptr(), made)
                place.table[place.key] = found
                given.append((place, tracer))
        try:
            with contextlib.ExitStack() as following:
                if self._number is not None and (given or self._modules):
                    numbers = self._number("", float).numbers
                    own = scalars_followed(numbers, self._conversions, self._modules, self._ways)
                    following.enter_context(own)
                yield
        finally:
            now = [place.table[place.key] for place, _ in given]
            for place, _ in given:
                place.table[place.key] = place.value
        for (place, tracer), value in zip(given, now, strict=True):
            if type(value) is Tensor and value.device == tracer.numbers.device:
                place.keep(value)  # a rehearsal took it for one of the host
                continue
            number = place.number_of(value)
            if number is not tracer:
                name = number.name if isinstance(number, ScalarTracer) else repr(number)
                self._moves.setdefault(name, (number, []))[1].append(place)

    @property
    def checks(self) -> list[tuple[Callable[[], Any], Any]]:
        """What a replay compares: attributes, and that a number has one value in all its places."""
        found: list[tuple[Callable[[], Any], Any]] = []
        for places in self._alike.values():
            if len(places) > 1:
                found.append((partial(_count_values, [place.read for place in places]), 1))
            if isinstance(places[0].value, Tensor):
                found.append((lambda p=places: all(map(_is_kept, p)), True))  # type: ignore[misc]
        if self._plain:
            read = partial(map, self._attributes.get, self._plain)
            found.append((lambda: list(read()), [*self._plain.values()]))
        return found

    @property
    def places(self) -> set[tuple[int, Any]]:
        """Tables, by their ``id``, and keys whose numbers replays move."""
        return {(id(p.table), p.key) for places in self._alike.values() for p in places}

    @property
    def are_moved(self) -> bool:
        return bool(self._moves)

    @property
    def advance(self) -> Callable[[], None] | None:
        """What moves them after each replay; None if the step moves none."""
        moves = [(value, [place.write for place in p]) for value, p in self._moves.values()]
        overflowed = self._overflowed
        if not moves:
            return None

        def advance() -> None:
            if overflowed is not None and overflowed.item():  # as the scaler asks in eager steps
                return
            for value, writes in [(present(value), writes) for value, writes in moves]:
                for write in writes:
                    write(value)

        return advance


def _count_values(reads: Sequence[Callable[[], Any]]) -> int:
    return len({read() for read in reads})


_is_kept = attrgetter("is_kept")


def _reached(optimizer: Optimizer, seen: dict[int, Optimizer]) -> Iterator[Optimizer]:
    """Yield an optimizer, and those that it wraps."""
    seen[id(optimizer)] = optimizer
    yield optimizer
    for value in vars(optimizer).values():
        for held in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(held, Optimizer) and id(held) not in seen:
                yield from _reached(held, seen)


class HostState:
    """What an optimizer has on the host: values in its state, groups and attributes, CPU tensors.

    Those of optimizers that it wraps count, too. Tensors of a CPU count only where parameters are
    elsewhere. Copies of these, and comparisons with them, are no part of the captured step: what
    records that sees none.
    """

    def __init__(self, optimizer: Optimizer, device: torch.device) -> None:
        reached = [*_reached(optimizer, {})]
        own: list[dict[Any, Any]] = list(map(vars, reached))
        tables = [table for o in reached for table in _tables_of(o)]
        self._tables = [*tables, *own]
        inside = ((k, v) for table in own for k, v in table.items() if k not in OF_TENSORS)
        self._values = PythonSnapshot(iter_inside([*(("state", t) for t in tables), *inside]))
        for table in own:
            self._values.add("", table)
        tensors = [*self._tensors()]
        # Those whose values nothing finds, which no comparison could put back
        self.hidden = [tensor for tensor in tensors if hides_memory(tensor)]
        here = (v for v in tensors if v.device.type == "cpu" != device.type)
        with out_of_sight():
            self._known = [(tensor, tensor.clone()) for tensor in here]

    def _tensors(self) -> Iterator[Tensor]:
        held = chain.from_iterable(table.values() for table in self._tables)
        return (value for value in held if isinstance(value, Tensor))

    def moved(self) -> list[str]:
        """List the names of what has another value now."""
        found = list(self._values.changes())
        found = [c for c in found if not isinstance(c.key, Tensor)]  # a parameter's first state
        own = {c.name.rpartition(".")[2] for c in found if c.key is Absence.ABSENT}
        names = own | {str(c.key) for c in found if c.key is not Absence.ABSENT}
        with out_of_sight():
            changed = {id(tensor) for tensor, was in self._known if not torch.equal(tensor, was)}
        names |= {str(k) for table in self._tables for k, v in table.items() if id(v) in changed}
        return sorted(names)

    def restore(self) -> None:
        self._values.restore()
        with out_of_sight(), torch.no_grad():
            for tensor, was in self._known:
                tensor.copy_(was)
