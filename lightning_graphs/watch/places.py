"""Places that steps store to: lists that they fill without reading them, and all of a fit."""

from __future__ import annotations

import abc
import contextlib
import copy
import operator
from collections import deque
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CellType
from typing import Any

import numpy
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_graphs.device.rules import DRAWN, STORED
from lightning_graphs.errors import CaptureError
from lightning_graphs.private.callsite import LIBRARIES, OURS
from lightning_graphs.private.exchange import Absence, bind, in_slot, slots_of
from lightning_graphs.private.generators import Generators
from lightning_graphs.private.torch import (
    is_strided,
    named_buffers_in,
    named_modules_in,
    named_parameters_in,
    out_of_sight,
)
from lightning_graphs.values.guards import (
    DEPTH,
    REALS,
    Constant,
    attributes_of,
    is_array,
    is_constant,
    is_still,
)
from lightning_graphs.values.signature import Signature
from lightning_graphs.values.snapshot import Change, PythonSnapshot, refill
from lightning_graphs.values.tree import leaves_of, parameters_of, substitute
from lightning_graphs.watch.filled import ListAppend, follow_use
from lightning_graphs.watch.late import LateValue
from lightning_graphs.watch.reads import AttributeGuards
from lightning_graphs.watch.tracers import Tracer
from lightning_graphs.watch.user_code import iter_objects, objects_in

_FILLED = (list, deque, set)
_ABSENT = Absence.ABSENT


@dataclass(eq=False)
class Place(abc.ABC):
    """Where user code keeps a reference: an attribute, an entry, a number, an order or a memory."""

    name: str  # its name in messages

    @abc.abstractmethod
    def now(self) -> Any:
        """Return the value there."""

    @abc.abstractmethod
    def put(self, value: Any) -> None:
        """Store a value there."""

    def is_still(self, now: Any, given: Any) -> bool:
        """Return whether the value there is the one that was stored."""
        return now is given

    def content(self, value: Any) -> Any:
        """Return a value's content: operations on a filled list, entries of another container."""
        return tuple(value.operations) if isinstance(value, ListAppend) else content_of(value)

    def refill(self, value: Any, content: Any) -> None:
        """Give such a value another :meth:`content`."""
        refill(value, list(content.values()) if isinstance(content, dict) else content)


@dataclass(eq=False)
class Entry(Place):
    """An attribute, or an entry of what attributes hold, levels deep."""

    owner: Any  # the module, or a table of its parameters or buffers
    keys: tuple[Any, ...]  # of the attribute, of the entry in what it holds, and so on
    is_used: bool = False  # steps compute with the list that they fill there: it is state
    is_late: bool = False  # they do so behind the graph alone
    binding: str = ""  # of a place outside of modules: the variable that leads to it

    @property
    def holder(self) -> Any:
        """The object or container that it is an entry of."""
        holder = self.owner
        for key in self.keys[:-1]:
            holder = value_at(holder, key)
        return holder

    def now(self) -> Any:
        return value_at(self.holder, self.keys[-1])

    def put(self, value: Any) -> None:
        put_at(self.holder, self.keys[-1], value)

    def path_in(self, other: Place) -> tuple[Any, ...] | None:
        """Return the keys that lead here from another place's value; None if none do."""
        if (
            not isinstance(other, Entry)
            or isinstance(other, Order)
            or other.owner is not self.owner
        ):
            return None
        count = len(other.keys)
        starts = len(self.keys) >= count and all(map(_is_same_key, self.keys, other.keys))
        return self.keys[count:] if starts else None

    @property
    def where(self) -> tuple[int, Any]:
        """The holder, by its ``id``, and the key there: another name may lead to both."""
        return id(self.holder), self.keys[-1]

    def is_filled(self) -> bool:
        """Return whether it holds a list, deque or set that steps fill, and is no state of them."""
        return not self.is_used and type(self.now()) in _FILLED


def _is_same_key(key: Any, other: Any) -> bool:
    """Return whether this is one key; tensors as keys are told apart by identity."""
    are_tensors = isinstance(key, Tensor) or isinstance(other, Tensor)
    return key is other or (not are_tensors and key == other)


class Number(Entry):
    """A Python number that steps count up."""


class Order(Entry):
    """The order of the keys of a dict."""

    @property
    def where(self) -> tuple[int, Any]:
        return id(Entry.now(self)), _ABSENT

    def is_filled(self) -> bool:
        return False

    def now(self) -> Any:
        table = super().now()
        return tuple(table) if isinstance(table, dict) else _ABSENT

    def put(self, value: Any) -> None:
        table = super().now()
        if isinstance(table, dict) and value != tuple(table):
            for key in value:
                table[key] = table.pop(key)

    def is_still(self, now: Any, given: Any) -> bool:
        return bool(now == given)


@dataclass(eq=False)
class Memory(Place):
    """The memory of a parameter or buffer, which ``tensor.data = ...`` exchanges."""

    tensor: Tensor

    def now(self) -> Any:
        return self.tensor.detach()

    def put(self, value: Any) -> None:
        self.tensor.data = value

    def is_still(self, now: Any, given: Any) -> bool:
        return bool(now.data_ptr() == given.data_ptr() and now.stride() == given.stride())


def value_at(holder: Any, key: Any) -> Any:
    """Return what a container or an object holds under a key."""
    if isinstance(holder, dict):
        return dict.get(holder, key, _ABSENT)
    if isinstance(holder, CellType):
        return in_slot(holder, key)
    if isinstance(holder, (list, deque)):
        return holder[key] if type(key) is int and key < len(holder) else _ABSENT
    table = attributes_of(holder)
    if key in table or holder is _ABSENT:
        return table.get(key, _ABSENT)
    return in_slot(holder, key) if key in slots_of(type(holder)) else _ABSENT


def put_at(holder: Any, key: Any, value: Any) -> None:
    """Store a value in a container or an object; do nothing if there is no such holder."""
    if isinstance(holder, (list, deque)):
        if type(key) is int and key < len(holder):
            holder[key] = value
    elif isinstance(holder, (dict, CellType)):
        bind(holder, key, value)
    elif holder is not _ABSENT and not isinstance(holder, Tracer):
        bind(holder if key in slots_of(type(holder)) else attributes_of(holder), key, value)


class NumberMovedError(CaptureError):
    """Raised if a graph would freeze a number that user code may have in an attribute."""

    number: object


def content_of(value: Any) -> dict[int, Any] | frozenset[Any] | None:
    """Return the entries of a list or set by their index; None for other types."""
    if isinstance(value, (list, deque)):
        return dict(enumerate(value))
    return frozenset(value) if isinstance(value, set) else None


def is_same_content(now: Any, before: Any) -> bool:
    """Return whether two results of :func:`content_of` have identical entries."""
    if isinstance(now, tuple) and isinstance(before, tuple):
        return len(now) == len(before) and all(map(operator.is_, now, before))
    if isinstance(now, dict) and isinstance(before, dict):
        return list(now) == list(before) and all(is_still(now[key], before[key]) for key in now)
    return bool(now == before)


def is_container(value: Any) -> bool:
    """Return whether a value is a container whose entries code can change."""
    return isinstance(value, (list, dict)) or content_of(value) is not None


def detached(value: Any) -> Any:
    """Detach the tensors in a value: no later backward pass reaches into this step."""
    if isinstance(value, Tensor):
        history = value.requires_grad and not isinstance(value, Parameter)
        return value.detach() if history else value
    tensors = leaves_of(value, Tensor)
    return substitute(value, map(detached, tensors)) if tensors else value


def depth_of(place: Place) -> int:
    return len(place.keys) if isinstance(place, Entry) else 0


class Arranged:
    """Places, outer ones first, grouped by their present values."""

    def __init__(self, places: Iterable[Place]) -> None:
        self.filled: list[Entry] = []  # lists that are filled, and neither read nor state
        self.late: list[Entry] = []  # lists that are filled, and read, behind the graph
        self.counted: list[Place] = []  # numbers
        self.stored: list[Place] = []  # others
        known: set[tuple[int, Any]] = set()
        for place in sorted(places, key=depth_of):
            if isinstance(place, Entry) and place.where in known:
                continue  # by another name
            known.update([place.where] if isinstance(place, Entry) else [])
            outer = (*self.filled, *self.late)
            if any(isinstance(place, Entry) and place.path_in(one) for one in outer):
                continue  # a step that changes it reads the list that it is in
            if isinstance(place, Entry) and place.is_filled():
                (self.late if place.is_late else self.filled).append(place)
            else:
                counts = isinstance(place, Number) and type(place.now()) in REALS
                (self.counted if counts else self.stored).append(place)

    @property
    def all(self) -> list[Place]:
        return [*self.stored, *self.filled, *self.late, *self.counted]


class State:
    """The value of a place without the parts that are places of their own."""

    def __init__(self, place: Place, places: Sequence[Place]) -> None:
        self.place = place
        inside = ((p, p.path_in(place)) for p in places if isinstance(p, Entry))
        self._further = [(p, keys) for p, keys in inside if keys]

    def now(self) -> Any:
        value = self.place.now()
        for place, keys in self._further:
            value = _closed(value, keys, type(place.now()))
        return value


def _closed(value: Any, keys: Sequence[Any], kind: type) -> Any:
    """Copy a container, with a type in place of an inner place's value."""
    held = value_at(value, keys[0])
    if held is Absence.ABSENT:
        return value
    clone = copy.copy(value)
    put_at(clone, keys[0], kind if len(keys) == 1 else _closed(held, keys[1:], kind))
    return clone


def signature_of(states: Sequence[State]) -> tuple[Signature, list[Tensor]]:
    values = [detached(state.now()) for state in states]
    return Signature.of(values, {}, names=[state.place.name for state in states])


# ------------------ State between steps


class DrawnOutsideError(CaptureError):
    """Code draws from a generator that only its own globals hold: it cannot be run on trial."""


class LeftBehindError(CaptureError):
    """Raised for side effects that no replay can apply."""


class StepState:
    """Places in a fit that steps store to, or that are bound to other tensors between steps.

    Captures with side effects reveal them, and so do tensors that are no longer those a graph was
    captured over.
    """

    def __init__(
        self,
        module: nn.Module,
        reads: AttributeGuards,
        on_change: Callable[[], object],
        optimizers: Callable[[], Iterable[Optimizer]],  # gives those of the present
    ) -> None:
        self._optimizers = optimizers
        self._module = module
        self._reads = reads
        self._on_change = on_change
        self._places: dict[str, Place] = {}
        self._ahead: set[str] = set()  # names of those that code stores to ahead of a graph
        self._shared: dict[int, Any] = {}  # containers in places, ahead of the present capture
        self._looked_for: set[str] = set()  # names of values that have changed
        # What captured code refers to outside of modules, if it may store there
        self.outside: PythonSnapshot | None = None
        # Tensors that it meets elsewhere than in modules, by name, with the memory that they had
        self.loose: Sequence[tuple[str, Tensor, Tensor]] = ()
        # In which other places the code that was watched last has left something; none if that
        # cannot be stored again
        self.found: list[Place] = []
        self._contents = PythonSnapshot()  # what modules held ahead of the code that is watched
        # What they hold ahead of the coming code, if it is known; what they held ahead of the last
        self.known: PythonSnapshot | None = None
        self.last: PythonSnapshot | None = None
        self._apart: set[str] = set()  # names of modules that ran later than that
        self._is_changed = False  # places were adopted
        self._numbers: dict[tuple[int, Any], Any] = {}  # behind the last step of the warm-up

    def __iter__(self) -> Iterator[Place]:
        return iter(self._places.values())

    @property
    def exempt(self) -> set[tuple[int, Any]]:
        """Table, by its ``id``, and key of each, or tensor and ``"data"``."""
        entries = [p for p in self if isinstance(p, Entry) and len(p.keys) == 1]
        found = {(id(place.owner), place.keys[0]) for place in entries}
        return found | {(id(place.tensor), "data") for place in self if isinstance(place, Memory)}

    def _entries(self) -> set[tuple[int, Any]]:
        """Return the holder of each, by its ``id``, and its key there."""
        return {place.where for place in self if isinstance(place, Entry)}

    def learn(self, found: Sequence[Place]) -> bool:
        """Add these places; return whether one of them is new."""
        new = {place.name: place for place in found if place.name not in self._places}
        self._places.update(new)
        if new:
            self._changed()
        return bool(new)

    def learn_ahead(self, found: Sequence[Place]) -> None:
        """Add places to which code ahead of graphs stores: the graphs may read them."""
        self._ahead.update(place.name for place in found)
        self.learn(found)

    @contextlib.contextmanager
    def observing(self, used: Container[int]) -> Iterator[None]:
        """Learn the numbers that the body counts, an eager step, and the lists that it fills.

        A capture would learn them at its end, and begin again. So it would with tensors that it
        computes with and exchanges: those whose ``id`` is among the used ones in the end.
        """
        held = [*iter_objects(self._module)]
        contents, trained = self._take(held), trained_parameters(self._optimizers())
        yield
        self._find_apart(held)
        self._numbers = _numbers_in(contents)
        changes = [*self._changes(contents)]
        found = [(place_of(each, contents, trained), each.before) for each in changes]
        if all(place is not None for place, _ in found):
            filled = {id(each.owner) for each in changes}  # what stays of them is not exchanged
            whole = {id(was) for _, was in found if is_container(was)} - filled
            pairs = [(p, id(was) in used or id(was) in whole) for p, was in found if p is not None]
            self.learn([p for p, read in pairs if read or isinstance(p, Number) or p.is_filled()])

    def adopt(self) -> list[tuple[Place, Any]]:
        """Add attributes that the code under watch has set and not read; with what they held.

        Nothing had to stand in for them, so the capture goes on. Empty if it has changed anything
        else that is no known place: it begins again with all of these.
        """
        trained, new = trained_parameters(self._optimizers()), []
        for change in self._changes(self._contents):
            place = place_of(change, self._contents, trained)
            if place is not None and place.name in self._places:
                continue
            if place is None or not self._is_set_alone(place, change):
                return []
            new.append((place, change.before))
        self._places.update((place.name, place) for place, _ in new)
        self._is_changed |= bool(new)
        return [*new]

    def _take(self, held: Sequence[tuple[str, Any]]) -> PythonSnapshot:
        self._find_apart(held)
        return PythonSnapshot(held)

    def _find_apart(self, held: Sequence[tuple[str, Any]]) -> None:
        modules = ((name, value) for name, value in held if isinstance(value, nn.Module))
        self._apart = {name for name, module in modules if self._reads.is_apart(module)}

    def _changes(self, contents: PythonSnapshot) -> Iterator[Change]:
        """List changes of the body, but for those in modules that run later than captured code."""
        inside = tuple(f"{name}." for name in self._apart)
        return (change for change in contents.changes() if not change.name.startswith(inside))

    def _is_set_alone(self, place: Entry, change: Change) -> bool:
        is_attribute = type(place) is Entry and place.owner is change.owner
        if not is_attribute or is_container(change.before) or is_container(change.now):
            return False
        return not self._reads.may_have_read(place.owner, change.key)

    def settle(self) -> None:
        """Let all know of places that were adopted, once the code under watch has ended."""
        if self._is_changed:
            self._is_changed = False
            self._changed()

    def _changed(self) -> None:
        self._reads.leave_out(self._entries)
        self._on_change()

    def learn_moved(
        self, moved: Sequence[tuple[str, Mapping[str, Any] | None, str, Tensor]]
    ) -> bool:
        """Add tensors that were exchanged or have other memory; see :meth:`learn`.

        False if one is a parameter of an optimizer.
        """
        known = trained_parameters(self._optimizers())
        found: list[Place] = []
        for path, table, key, was in moved:
            if id(was) in known or (table is not None and id(table[key]) in known):
                return False
            name = f"self.{path}"
            place = Memory(f"{name}.data", was) if table is None else Entry(name, table, (key,))
            found.append(place)
        return self.learn(found)

    def learn_bound(self, names: Iterable[str]) -> bool:
        """Add attributes of these names that hold other tensors than before; see :meth:`learn`.

        Such a tensor is copied in, so its history, and what else has its memory, must not count.
        """
        modules = {f"self.{n}" if n else "self": m for n, m in self._module.named_modules()}
        trained = trained_parameters(self._optimizers())
        device = next(self._module.parameters()).device
        found: list[Place] = []
        for name in names:
            path, _, key = name.rpartition(".")
            value = vars(modules[path]).get(key) if path in modules else None
            if type(value) is not Tensor or value.requires_grad or id(value) in trained:
                return False
            if value.device != device or not is_strided(value) or value._base is not None:
                return False
            found.append(Entry(name, modules[path], (key,)))
        return self.learn(found)

    def learn_named(self, names: Iterable[str]) -> bool:
        """Add numbers and lists of these names, which keep changing; see :meth:`learn`."""
        new = set(names) - self._looked_for
        self._looked_for |= new  # once: a replay buffer of objects may grow in each step
        if not new:
            return False
        held, where = self._all_held(), {self._reads.where.get(name) for name in new}
        named = (one for one in held.entries() if (id(one.owner), one.key) in where)
        found = (place_of(one, held, ()) for one in named)
        return self.learn([p for p in found if isinstance(p, Number) or (p and p.is_filled())])

    def learn_logged(self, logged: object) -> bool:
        """Add numbers of which a step logs one, or what it computes of some that hooks move."""
        value = Constant.plain(logged) if type(logged) is float else None
        alike = [name for name, held in self._reads.now() if held == value]
        now, before, where = _numbers_in(self._all_held()), self._numbers, self._reads.where
        moved = {at for at in now.keys() & before.keys() if now[at] != before[at]}
        have_moved = [name for name, at in where.items() if at in moved]
        both = [name for name in alike if where.get(name) in moved]  # others may be so by chance
        return self.learn_named(both) or self.learn_named(have_moved) or self.learn_named(alike)

    def are_used(self, *filled: Entry) -> bool:
        """Follow what steps compute with lists that they fill: these, or all; False if none."""
        found = filled or [p for p in self if isinstance(p, Entry) and p.is_filled()]
        for place in found:
            follow_use(place)
        if found:
            self._changed()
        return bool(found)

    @contextlib.contextmanager
    def changes_undone(
        self,
        held: Sequence[tuple[str, Any]],  # what modules hold
        generators: Generators,
        listed: Callable[[Sequence[str]], str],
    ) -> Iterator[None]:
        """Undo changes of the body in module attributes and random generators."""
        trained = trained_parameters(self._optimizers())
        contents, self.known = self.known or self._take(held), None
        self._contents = self.last = contents
        outside, self.outside = self.outside or self._known_outside(), None
        loose, self.loose = self.loose, ()
        tree = named_modules_in(("", self._module))
        named = (*named_parameters_in(tree), *named_buffers_in(tree))
        with out_of_sight():  # of what watches the body
            memory = [(Memory(f"self.{n}.data", t), t.detach()) for n, t in named if is_strided(t)]
            memory += [(place, place.now()) for place in self if isinstance(place, Memory)]
        try:
            yield
        finally:
            self._contents = PythonSnapshot()
            drawn = generators.drawn()
            generators.restore()
            memory += [(Memory(f"{name}.data", t), was) for name, t, was in loose]
            moved = [(p, was) for p, was in memory if not p.is_still(p.tensor, was)]
            for place, was in moved:
                place.put(was)
            moved = [pair for pair in moved if pair[0].name not in self._places]
            # Code that is met while others stand in lists' places shows what it names with these
            ahead = {id(table): before for *_, table, before in contents.containers}
            outside.containers = [
                (*seen, table, ahead.get(id(table), before))
                for *seen, table, before in outside.containers
                if not type(table).__module__.startswith(OURS)
            ]
            changed = _places_of((outside, contents), trained)
            pairs = [(n, p) for n, p in changed if (p.name if p else n) not in self._places]
            found: list[Place | None] = [place for _, place in pairs]
            found += [place for place, _ in moved if id(place.tensor) not in trained]
            further = [*self._names_in(outside)]  # which the code has not been given by this one
            found += further
            if changed:
                contents.restore()
                outside.restore()
            self.found = [p for p in found if p is not None] if None not in found else []
        if found or moved:
            names = [name for name, _ in pairs] + [place.name for place, _ in moved]
            names += [place.name for place in further]
            left = [name for name, place in pairs if place is None]  # which no replay can store
            observed = f"{LIBRARIES.step} changes {listed(sorted(left or names))}"
            raise LeftBehindError(STORED.rule, observed, STORED.remedy)
        if drawn:
            observed = f"{LIBRARIES.step} draws from {listed(drawn)}"
            if not generators.outside.isdisjoint(drawn):
                raise DrawnOutsideError(DRAWN.rule, observed, DRAWN.remedy)
            raise CaptureError(DRAWN.rule, observed, DRAWN.remedy)

    def prepared(self) -> tuple[Collection[Place], Callable[[Place], bool], Sequence[Tensor]]:
        """Return, for a capture: places, whether it may read one, parameters and buffers."""
        while self.learn([*self._further_names()]):
            pass
        tree = named_modules_in(("", self._module))
        own = [tensor for _, tensor in (*named_parameters_in(tree), *named_buffers_in(tree))]
        return [*self], self._is_read, own

    def _known_outside(self) -> PythonSnapshot:
        """Take a snapshot of the places outside of modules to which code stores."""
        found, seen = PythonSnapshot(), dict[int, Any]()
        for place in self:
            if isinstance(place, Entry) and is_namespace(place.owner):
                _add_variable(found, place.binding or place.name, place.owner, place.keys[0], seen)
        return found

    def _all_held(self) -> PythonSnapshot:
        """Take a snapshot of what modules hold, and of variables that captured code has named."""
        found, seen = PythonSnapshot(iter_objects(self._module)), dict[int, Any]()
        for name, table, key in self._reads.tables():
            if is_namespace(table):
                _add_variable(found, name, table, key, seen)
        return found

    def _further_names(self) -> Iterator[Entry]:
        """Find further names of values in these places that steps can change."""
        kept = [place.now() for place in self]
        self._shared = {id(value): value for value in kept if is_container(value)}
        return self._names_in(self._all_held() if self._shared else PythonSnapshot())

    def _names_in(self, held: PythonSnapshot) -> Iterator[Entry]:
        """Find further names in a snapshot for containers that were in places last."""
        for change in held.entries() if self._shared else ():
            place = place_of(change, held, ()) if id(change.now) in self._shared else None
            if place is not None and place.name not in self._places:
                yield place

    def _is_read(self, place: Place) -> bool:
        """Return whether code may have read the place before it stored there."""
        if isinstance(place, Entry) and len(place.keys) == 1 and place.name not in self._ahead:
            return self._reads.may_have_read(place.owner, place.keys[0])
        return True

    def signature(self) -> tuple[Signature, ...]:
        """Return the signature of the present values that steps read."""
        if not self._places:
            return ()
        found = Arranged(self)
        read = filter(self._is_read, found.stored)
        return (signature_of([State(place, found.all) for place in read])[0],)


def _add_variable(
    held: PythonSnapshot, name: str, owner: Any, key: Any, seen: dict[int, Any]
) -> None:
    held.add_place(name, owner, key)
    for label, inside in objects_in(name, value_at(owner, key), seen):
        held.add(label, inside)


def _is_tree(value: Any) -> bool:
    """Return whether a value consists of containers, tensors, arrays and plain values."""
    known = Tensor, Tracer, numpy.ndarray, numpy.generic
    return all(isinstance(leaf, known) or is_constant(leaf) for leaf in leaves_of(value))


def place_of(change: Change, held: PythonSnapshot, trained: Collection[int]) -> Entry | None:
    """Return the place of a change; None if a replay cannot store there."""
    _, owner, table, key, before, now = change
    kind: type[Entry] | None = None
    if isinstance(owner, type):  # whose attributes are in no table
        return None
    if isinstance(table, dict) and key is Absence.ABSENT:
        kind = Order
    elif is_array(table):
        return None  # its numbers are changed where they are
    elif isinstance(table, dict) or (table is owner and key is not Absence.ABSENT):
        # To code that asks for its class, a tracer for a number is one.
        is_number = isinstance(now, (int, float, LateValue)) and type(now) is not bool
        if type(before) in REALS and is_number:
            kind = Number
        elif _is_tree(now) and _is_tree(before) and id(before) not in trained:
            kind = Entry
    elif isinstance(table, _FILLED):
        kind = Entry if all(map(_is_tree, now)) else None
    keys = () if key is Absence.ABSENT else (key,)
    label = own = "".join(held.label(owner, key) for key in keys)
    while kind is not None and len(keys) <= 2 * DEPTH:  # or slots lead back to their holder
        of = "the order of " if kind is Order else ""
        if isinstance(owner, nn.Module) or held.is_table(owner):
            return kind(f"{of}{held.name_of(owner)}{label}", owner, keys)
        if keys and is_namespace(owner) and (id(owner), keys[0]) in held.bindings:
            name = held.bindings[id(owner), keys[0]].name
            return kind(f"{of}{name}{label.removeprefix(own)}", owner, keys, binding=name)
        holder = held.holder_of(owner)
        if holder is None:
            break
        owner, above = holder
        own = held.label(owner, above)
        keys, label = (above, *keys), own + label
    return None


def _numbers_in(held: PythonSnapshot) -> dict[tuple[int, Any], Any]:
    """Return the present numbers in a snapshot's containers, by their ``id`` and the key there."""
    found: dict[tuple[int, Any], Any]
    found = {(id(o), k): v for _, o, k, v in held.bindings.values() if type(v) in REALS}
    for _, owner, table, _ in held.containers:  # without names, which would cost a call for each
        listed = enumerate(table) if isinstance(table, (list, deque)) else ()
        pairs = table.items() if isinstance(table, dict) else listed
        found.update({(id(owner), k): v for k, v in pairs if type(v) in REALS})
    return found


def _places_of(
    snapshots: Sequence[PythonSnapshot], trained: Collection[int]
) -> list[tuple[str, Entry | None]]:
    """Return name and place of each change; what several snapshots hold has its first place."""
    found: dict[tuple[int, Any], tuple[str, Entry | None]] = {}
    for held in snapshots:
        for change in held.changes():
            where = id(change.owner), change.key
            if where not in found or found[where][1] is None:
                found[where] = change.name, place_of(change, held, trained)
    return [*found.values()]


def is_namespace(owner: Any) -> bool:
    """Return whether variables of functions are bound there: globals, or a closure's cell."""
    return isinstance(owner, CellType) or (isinstance(owner, dict) and "__builtins__" in owner)


def trained_parameters(optimizers: Iterable[Optimizer]) -> set[int]:
    """Return the ``id`` of each parameter that an optimizer writes."""
    return {id(p) for p in parameters_of(*optimizers) if p.requires_grad}
