"""Values whose uses the doctor notes."""

from __future__ import annotations

import contextlib
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence, Set
from functools import partial
from types import MethodDescriptorType, WrapperDescriptorType
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor

from lightning_graphs.device.rules import (
    BATCH_CHANGED,
    BATCH_VALUE,
    CLOCK,
    COLLECTIVE,
    COMPILED,
    COUNTER,
    DRAWN,
    FUNCTION_RULES,
    HOST_READ,
    INDEXING,
    MOVES_STORAGE,
    REHEARSED,
    Obstacle,
    with_known_remedy,
)
from lightning_graphs.device.trace import (
    Operation,
    OperatorCall,
    Recorder,
    is_collective,
    tensors_in,
)
from lightning_graphs.errors import CaptureError
from lightning_graphs.private.callsite import LIBRARIES, CallSite, CallSiteFinder
from lightning_graphs.private.generators import PythonGenerator
from lightning_graphs.private.torch import current_autograd_node
from lightning_graphs.report.diagnosis import Diagnosis, Effect
from lightning_graphs.values.tree import MAPPINGS, item_label, leaves_of
from lightning_graphs.watch.batch import objects_of
from lightning_graphs.watch.host import (
    OF_SHAPES,
    PACKING,
    PADDING,
    READS,
    READS_LENGTHS,
    SHAPES,
    SMALL,
    HostTape,
    fully_written,
    is_exact,
    name_of,
)
from lightning_graphs.watch.host_trace import FACTORIES, FROM_PYTHON, is_made_ahead
from lightning_graphs.watch.numbers import WAYS, Numbers, form_of
from lightning_graphs.watch.side_effects import SideEffects
from lightning_graphs.watch.tracers import TracedNumber

_GIVES_TO_HOST = frozenset({"cpu", "to", PACKING, PADDING})
"""Functions that give a tensor of the host, of one that the host has."""

# ------------------ Operators

_NUMBERS = (bool, int, float)


class Call(NamedTuple):
    """An operator with the Python numbers that a capture would bake into it."""

    operator: str
    numbers: tuple[float, ...]
    site: CallSite


class Change(NamedTuple):
    """How two runs of one code differ, though their inputs have equal shapes."""

    operator: str
    what: str  # the two numbers, or that it is missing in one of the runs
    site: CallSite
    whole: bool  # whether it may follow from a shape: whole numbers, or a missing operator


def changes(before: Sequence[Call], now: Sequence[Call]) -> Iterator[Change]:
    """Yield operators that a line calls more often in one of the runs, or with other numbers."""
    earlier, later = _numbers_by_line(before), _numbers_by_line(now)
    for operator, site in {**earlier, **later}:
        first, second = earlier[operator, site], later[operator, site]
        if len(first) != len(second):
            yield Change(operator, "not in every step", site, True)
            continue
        both = zip(first, second, strict=True)
        pairs = (pair for numbers in both for pair in zip(*numbers, strict=False))
        for a, b in pairs:
            if a == a and b == b and a != b:
                whole = isinstance(a, int) and isinstance(b, int)
                yield Change(operator, f"{a!r} in one step, {b!r} in another", site, whole)
                break


def _numbers_by_line(calls: Sequence[Call]) -> dict[tuple[str, CallSite], list[tuple[float, ...]]]:
    found: dict[tuple[str, CallSite], list[tuple[float, ...]]] = defaultdict(list)
    for call in calls:
        found[call.operator, call.site].append(call.numbers)
    return found


Listeners = frozenset[Callable[[str], object]]
"""What is called with a use of a tensor."""


class Observer(Recorder):
    """Notes every obstacle of the code that runs under it, and lets the code run.

    On a CPU all memory is the host's: copies from there are not seen.

    Args:
        note: Called with operator, obstacle and the user's line.
        look: Called with every Python function of torch and its arguments; the numbers that it
            returns are no part of the capture, here and in the backward pass.
    """

    raises, is_real = False, True

    def __init__(
        self,
        note: Callable[[str, Obstacle, CallSite], None],
        look: Callable[[Any, Any, Any], Iterable[float]],
        generators: Sequence[torch.Generator],
        sites: CallSiteFinder,
        rehearsal: bool,
    ) -> None:
        super().__init__(generators)
        self._note = note
        self._look = look
        self._sites = sites
        self._rehearsal = rehearsal
        self._on_gpu = any(generator.device.type != "cpu" for generator in generators)
        self.silent = False  # whether nothing is noted at the moment
        self.answered = False  # whether the host has what is asked for by what is noted
        self._makes_on_host = False
        self._forbidden: dict[int, Listeners] = {}
        self.begin(())

    def begin(self, on_host: Iterable[Tensor]) -> None:
        """Begin another step; the host has these tensors, too, and what follows from them."""
        self.calls: list[Call] = []
        self.answers: list[str] = []  # what Python has read by it in this step
        self._updated: set[float] = set()
        self._on_host = {self.know(tensor).id for tensor in on_host}
        self._of_host: set[int] = set()  # those that code has moved there

    @contextlib.contextmanager
    def looking_away(self) -> Iterator[None]:
        """Note nothing that the body does."""
        before, self.silent = self.silent, True
        try:
            yield
        finally:
            self.silent = before

    def forbid(self, value: Any, used: Callable[[str], object]) -> None:
        """Tell where a step needs a tensor in ``value``, such as the result of a metric.

        What follows from one may be logged or stored; a backward pass, another tensor that is
        written with it, and what the step returns need it.
        """
        self._follow(leaves_of(value, Tensor), frozenset({used}))

    def _follow(self, tensors: Iterable[Tensor], used: Listeners) -> None:
        for tensor in tensors:
            known = self.know(tensor, born=True).id
            self._forbidden[known] = self._forbidden.get(known, frozenset()) | used

    def tell_used(self, tensors: Iterable[Tensor], by: str) -> None:
        """Tell the listeners of those among these tensors that have some."""
        for used in self._late_in(tensors):
            used(by)

    def _late_in(self, tensors: Iterable[Tensor]) -> Listeners:
        """Find the listeners to uses of these tensors."""
        if not self._forbidden or self.silent:
            return frozenset()
        known = (self.know(t).id for t in tensors if t.layout is torch.strided)
        return frozenset().union(*(self._forbidden.get(each, ()) for each in known))

    def _is_not_late(self, tensor: Tensor) -> bool:
        return tensor.layout is torch.strided and self.know(tensor).id not in self._forbidden

    def refuse(self, operator: str, obstacle: Obstacle, site: CallSite | None = None) -> None:
        # Compiled code runs eagerly under a dispatch mode, and so in full sight.
        hidden = obstacle is COMPILED or (obstacle.rehearsal and not self._rehearsal)
        if not self.silent and not hidden:
            self._note(operator, with_known_remedy(obstacle), site or self._sites.here())

    def call(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        name = getattr(func, "__name__", "")
        if not self.silent:
            self._updated.update(self._look(func, args, kwargs))
        rule = FUNCTION_RULES.get(name)
        obstacle = rule(args, kwargs) if rule is not None else None
        if obstacle is not None:
            lengths = name == "ctc_loss" and len(args) > 3 and args[1].dtype is torch.int64
            asked = args[2:4] if lengths else args[:1]
            asked = args[1:2] if name in READS_LENGTHS else asked
            read = name in FROM_PYTHON and obstacle is HOST_READ  # tensors in a list
            answered = not read and self._host_has(tensors_in(asked))
            # What a call that is kept back has given is on the host after a replay alone
            self.answered = answered = answered and not self._late_in(tensors_in(asked))
            self.refuse(name, obstacle)
            self._count(name, leaves_of(args))
            with self.looking_away():  # the operators inside of it belong to this obstacle
                result = super(Recorder, self).call(func, args, kwargs)
            if answered and name in _GIVES_TO_HOST:
                self._put_on_host(result)
            return self._tell(result, answered and name not in READS_LENGTHS)
        func = fully_written(func, sys._getframe(2))
        device = kwargs.get("device")
        self._makes_on_host = not self._on_gpu and name in FACTORIES and device in (None, "cpu")
        result = REHEARSED.get(func, func)(*args, **kwargs)
        if self._makes_on_host:
            self._on_host.add(self.know(result).id)
            self._makes_on_host = False
        return result

    def _put_on_host(self, result: Any) -> None:
        """Note that a result is a tensor of the host: with it all operators run there."""
        tensor = result if isinstance(result, Tensor) else result[1]
        self._of_host.add(self.know(tensor, born=True).id)
        self._on_host.add(self.know(tensor).id)

    def _tell(self, result: Any, answered: bool) -> Any:
        """Remember what Python reads, if the host has it."""
        self.answered = False
        if answered and not self.silent:
            what = [tuple(tensor.shape) for tensor in tensors_in(result)] or result
            self.answers.append(f"{self._sites.here().describe()} gave {what!r}")
        return result

    def _host_has(self, tensors: Iterable[Tensor]) -> bool:
        return all(
            t.layout is torch.strided
            and ((self._on_gpu and t.device.type == "cpu") or self.know(t).id in self._on_host)
            for t in tensors
        )

    def keep(self, operation: Operation) -> None:
        """Keep nothing: views are calls, too."""

    def _meet_constant(self, tensor: Tensor) -> None:
        super()._meet_constant(tensor)
        self._on_host.add(self.know(tensor).id)
        if tensor.dim() == 0 and tensor.device.type == "cpu":
            self._count("a tensor of a Python number", [tensor.item()])

    def _count(self, operator: str, values: Iterable[Any]) -> None:
        """Keep a call with the numbers among its arguments."""
        if not self.silent:
            found = [value for value in values if type(value) in _NUMBERS]
            numbers = tuple(math.nan if value in self._updated else value for value in found)
            self.calls.append(Call(operator, numbers, self._sites.here()))

    def _run(self, call: OperatorCall) -> Any:
        self._count(str(call.func), (*call.args, *call.kwargs.values()))
        late = self._late_in(call.inputs)
        result = self._tell(super()._run(call), self.answered)
        is_read = current_autograd_node() is not None or any(map(self._is_not_late, call.written))
        if late and not is_read:
            self._follow(tensors_in(result), late)
            late = frozenset()
        for used in late:
            used(str(call.func))
        outputs = [t for t in tensors_in(result) if t.layout is torch.strided]
        given = call.inputs if name_of(call.func) not in OF_SHAPES else []
        inside = bool(given) and all(self.know(t).id in self._of_host for t in given)
        if inside:
            self._of_host.update(self.know(tensor, born=True).id for tensor in outputs)
        follows = (inside or is_exact(call.func, outputs, SMALL)) and self._host_has(given)
        follows = follows and all(self.know(tensor).born for tensor in call.written)
        change = self._on_host.update if follows else self._on_host.difference_update
        change(self.know(tensor, born=True).id for tensor in (*outputs, *call.written))
        return result

    def _is_known(self, call: OperatorCall) -> bool:
        """Whether the host has what it would read by an operator."""
        if call.func in INDEXING:
            masks = [t for t in tensors_in(call.args[1]) if t.dtype is torch.bool]
            return bool(masks) and self._host_has(masks)
        tells = call.func in READS or call.func._schema.name in SHAPES
        tells = tells or call.func is torch.ops.aten._to_copy.default
        return tells and current_autograd_node() is None and self._host_has(call.inputs)

    def _draws_on_host(self, call: OperatorCall) -> bool:
        if torch.Tag.nondeterministic_seeded not in call.func.tags:
            return False
        if not self._on_gpu:
            return self._makes_on_host
        made: torch.device = call.kwargs.get("device") or torch.device("cpu")
        return all(d.type == "cpu" for d in [t.device for t in call.inputs] or [made])

    def _check(self, call: OperatorCall) -> None:
        if is_collective(call.func):
            self.refuse(str(call.func), COLLECTIVE)
        if self._draws_on_host(call):
            self.answered = current_autograd_node() is None
            self.refuse(str(call.func), DRAWN)
            return
        self.answered = self._is_known(call)
        if not self._moves_own(call):
            super()._check(call)

    def _moves_own(self, call: OperatorCall) -> bool:
        """Return whether memory is given to a tensor that the step has made, as cuDNN's layers do.

        A rehearsal cannot follow that.
        """
        moves = call.func.overloadpacket in MOVES_STORAGE and not self._rehearsal
        return moves and all(self.know(tensor).born for tensor in call.written)


_FOLLOWED = (COUNTER, DRAWN, CLOCK)
"""Of what numbers are that captured code may compute with; others may only be logged."""


class NotedNumbers(Numbers):
    """Makes numbers that note their uses, and allow them.

    Args:
        met: Called with an obstacle and the name of the number that is in the way.
        follow: Captured code follows what Python makes of a number, and only the bare value of one
            is in the way.
    """

    tape: HostTape

    def __init__(self, met: Callable[[Obstacle, str], object], *, follow: bool) -> None:
        self._met = met
        self.follow = follow
        self.bounds: list[float] = []
        self._made: list[float] = []
        self.begin()

    def begin(self) -> None:
        """Begin another step."""
        self.tape = HostTape()
        self.outcomes: list[Any] = []  # what Python has read of them, as captured code may
        self._ways = 1.0  # which draws may lead the step; so many graphs there are

    def refuse(self, obstacle: Obstacle, name: str) -> None:
        self._met(obstacle, name)

    def kind_of(self, value: Any, obstacle: Obstacle | None = None) -> Callable[..., Any] | None:
        if isinstance(value, numpy.ndarray):
            return lambda _, __, ___, value, *____: value
        return _KINDS.get(type(value))

    def guarded(self, name: str, read: Callable[[], Any], value: Any, obstacle: Obstacle) -> Any:
        if obstacle is DRAWN:
            self._ways *= self.ways_of(read)
        too_many = obstacle is DRAWN and self._ways > WAYS
        if type(value) is bool or not too_many:  # else no two steps went the same way
            self.outcomes.append(value)
        if too_many or not self.follow or obstacle not in _FOLLOWED:
            self.refuse(obstacle, name)
        return value

    def drawn(
        self, name: str, generator: PythonGenerator, draw: Callable[[], Any], value: Any
    ) -> Any:
        """Stand for a value that was drawn; ``draw`` gives further ones."""
        again = self.tape.draw(generator, draw)
        again.value = value
        found = self.number(name, partial(getattr, again, "value"), DRAWN)
        whole = leaves_of(found, _KINDS[int])
        for number in whole if len(whole) <= WAYS else ():  # C code may read them unseen
            ways = self._ways * self.ways_of(number.now)
            if ways <= WAYS:
                number.has_few_values, self._ways = True, ways
                self.outcomes.append(number.value)
        return found

    def bare(self, value: float) -> float:
        """Make a plain float, an object of its own that can be found again."""
        self._made.append(float(repr(float(value))))
        return self._made[-1]

    def is_live(self, value: Any) -> bool:
        """Whether it is a number that a captured step would follow."""
        return isinstance(value, Noted) or any(value is made for made in self._made)


class NotedValue:
    """A value that it is in all respects; C code reads it unseen."""

    name: str
    value: Any

    def __reduce__(self) -> tuple[type, tuple[Any]]:
        return type(self.value), (self.value,)


def _kind(base: type, kind: Any, members: dict[str, Any]) -> Any:
    """Make a class of Python values that note their uses."""
    return type(f"Noted{kind.__name__}", (base, kind), members)


class Noted(TracedNumber, NotedValue):
    """A number that it stands for, in all respects; a use that no replay can follow is noted.

    C code reads it unseen: of torch's functions the observer sees the arguments, and of
    ``range`` and indexing it sees that the operators of two steps differ.
    """

    numbers: NotedNumbers

    has_few_values = False
    """There is a graph for each of its values."""

    def named(self, expression: str) -> str:
        return self.name

    def computed(self, name: str, function: Callable[..., Any], *operands: Any) -> Any:
        if not self.numbers.follow:
            self.refuse()
        return super().computed(name, function, *operands)

    def _guarded(self, name: str, read: Callable[[], Any], value: Any, obstacle: Obstacle) -> Any:
        return value if self.has_few_values else super()._guarded(name, read, value, obstacle)

    def converted(self, kind: type, module: str) -> Any:
        """Convert it as a capture does, which traces this if user code asks for it."""
        if not self.numbers.follow:
            self.refuse()
        return self.numbers.bare(self.value) if kind is float else kind(self.value)


def _new(kind: Any) -> Callable[..., Any]:
    return lambda cls, numbers, name, read, value, *_: kind.__new__(cls, value)


_KINDS: dict[type, Any] = {k: _kind(Noted, k, {"__new__": _new(k)}) for k in (int, float)}


def are_live(call: tuple[Any, Any, Any], device: torch.device, *, ahead: bool) -> bool:
    """Whether every replay updates the numbers in a call of torch, or makes the call ahead."""
    function, args, kwargs = call
    if any(n.obstacle not in (COUNTER, DRAWN) for n in parts_of((args, kwargs), Noted)):
        return False
    if ahead and is_made_ahead(getattr(function, "__name__", ""), args, kwargs):
        return True
    return form_of(function, args, kwargs, device) is not None


def parts_of(value: Any, kind: type) -> list[Any]:
    """List what is of some kind among the arguments of a call, also in slices."""
    found = leaves_of(value)
    inside = [part for s in found if type(s) is slice for part in (s.start, s.stop, s.step)]
    return [part for part in (*found, *inside) if isinstance(part, kind)]


# ------------------ Values of the batch


class BatchValue(NotedValue):
    """A value of the batch: every use of it is noted."""

    on_read: Callable[[str], object]

    def read(self) -> Any:
        """Return the value itself, to code that looks at it."""
        self.on_read(self.name)
        return self.value


def _reading(plain: Callable[..., Any]) -> Callable[..., Any]:
    return lambda value, *args, **kwargs: plain(value.read(), *args, **kwargs)


def _batch_kind(kind: type) -> Any:
    methods = (WrapperDescriptorType, MethodDescriptorType)
    own: dict[str, Any] = {n: f for n, f in vars(kind).items() if isinstance(f, methods)}
    own.pop("__getattribute__", None)  # inherited from Python 3.13 on
    if kind in (str, bytes):  # what the other operand, float and int do with them
        own |= {"__radd__": lambda value, other: other + value, "__float__": float, "__int__": int}
    return _kind(BatchValue, kind, {name: _reading(f) for name, f in own.items()})


_BATCH_KINDS = {kind: _batch_kind(kind) for kind in (str, bytes, int, float)}


class BatchReads:
    """What the observed steps read of the Python values in their batches."""

    def __init__(self, observer: Observer, sites: CallSiteFinder) -> None:
        self._observer = observer
        self._sites = sites
        self._first: dict[str, CallSite] = {}  # where each of them is read
        self._given: list[dict[str, Any]] = []  # the values in the batch of each step
        self._is_over = False
        self._changed: list[str] = []  # what no replay does to its batch

    @property
    def way(self) -> Hashable:
        """What the last step has read: another one may go another way."""
        return tuple((name, self._given[-1].get(name)) for name in self._first)

    @contextlib.contextmanager
    def of_step(self, batch: Any) -> Iterator[Any]:
        """Make a batch whose values note their uses, for a step that the body runs.

        Its lists and dicts stay themselves: hooks find there what the step does to them.
        """
        self._given.append({})
        self._is_over = False
        noted = _each(batch, "batch", self._noted)
        containers, objects = SideEffects(batch=noted), objects_of(noted)
        try:
            yield noted
        finally:
            self._is_over = True
            self._changed += objects.changed()
            try:
                containers.look()
            except CaptureError as error:
                self._changed.append(error.observed.removeprefix(f"{LIBRARIES.step} changes "))
            _each(
                batch, "batch", lambda _, leaf: leaf.value if isinstance(leaf, BatchValue) else leaf
            )

    def _noted(self, name: str, value: Any) -> Any:
        if type(value) not in _BATCH_KINDS:
            return value
        self._given[-1][name] = value
        noted = _BATCH_KINDS[type(value)](value)
        noted.name, noted.value, noted.on_read = name, value, self._note
        return noted

    def _note(self, name: str) -> None:
        silent = self._is_over or self._observer.silent
        if not silent and (site := self._sites.here()).line:
            self._first.setdefault(name, site)

    def unseen(self, step: int, site: CallSite) -> bool:
        """Whether code of C may have read numbers of the batch, others than in that step."""
        then, now = self._given[step], self._given[-1]
        numbers = [name for name, value in now.items() if type(value) in (int, float)]
        moved = [name for name in numbers if then.get(name, now[name]) != now[name]]
        self._first = {**dict.fromkeys(moved, site), **self._first}
        return bool(moved)

    def judge(self, diagnosis: Diagnosis, moved: Set[str], step: CallSite) -> None:
        """Name what no replay does to a batch, and values that a step reads if they have changed.

        Args:
            moved: The names of values that were others in other batches.
            step: The step itself.
        """
        for name in dict.fromkeys(self._changed):
            diagnosis.add(BATCH_CHANGED, name, step)
        read = [name for name in self._first if name in moved]
        ways = [tuple(map(given.get, read)) for given in self._given]
        is_new = len(set(ways)) == len(ways) > 2
        of_read: Effect = "eager step" if is_new else "further graph"
        of_others: Effect = "left out unless it is read"
        for names, effect in ((read, of_read), (sorted(moved - {*read}), of_others)):
            if names:
                further = f"likewise {len(names) - 1} more" if names[1:] else ""
                site = self._first.get(names[0])
                diagnosis.add(BATCH_VALUE, names[0], site, observed=further, effect=effect)


def _each(value: Any, name: str, change: Callable[[str, Any], Any]) -> Any:
    """Change everything in the tuples, lists and dicts of a value, the latter two in place."""
    if type(value) is tuple:
        return tuple(_each(held, f"{name}[{i}]", change) for i, held in enumerate(value))
    if type(value) not in (list, *MAPPINGS):
        return change(name, value)
    for key in range(len(value)) if type(value) is list else list(value):
        value[key] = _each(value[key], name + item_label(key), change)
    return value
