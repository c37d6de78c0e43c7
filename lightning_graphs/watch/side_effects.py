"""What captured code stores in Python objects, recorded, and replayed."""

from __future__ import annotations

import contextlib
import copy
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import Parameter
from torch.utils._pytree import tree_leaves

from lightning_graphs.autograd.graphed import Stores
from lightning_graphs.device.generators import Generators
from lightning_graphs.device.rules import DRAWN, STORED
from lightning_graphs.errors import CaptureError
from lightning_graphs.private.exchange import Absence
from lightning_graphs.private.torch import is_strided, version_of
from lightning_graphs.values.guards import is_constant, is_plain
from lightning_graphs.values.memory import (
    Owing,
    StaticInputs,
    clone_all,
    gradients_of,
    storage_address,
)
from lightning_graphs.values.signature import CallPlan, Signature
from lightning_graphs.values.snapshot import Change, PythonSnapshot, Result, refill, results_in
from lightning_graphs.values.tree import leaves_of, substitute
from lightning_graphs.watch.containers import (
    Entry,
    ListAppend,
    Memory,
    Number,
    Order,
    Place,
    content_of,
    held_at,
    is_container,
    is_same_content,
    perform,
    put_at,
)
from lightning_graphs.watch.object_graph import iter_objects
from lightning_graphs.watch.reads import AttributeGuards
from lightning_graphs.watch.tracers import Tracer, present

# ------------------ Copies in what a captured step reads in plain places, and stores again what it


def _detached(value: Any) -> Any:
    """A value without history of autograd's, which no later step goes back through."""
    if isinstance(value, Tensor):
        history = value.requires_grad and not isinstance(value, Parameter)
        return value.detach() if history else value
    tensors = leaves_of(value, Tensor)
    return substitute(value, map(_detached, tensors)) if tensors else value


def depth_of(place: Place) -> int:
    return len(place.keys) if isinstance(place, Entry) else 0


class Arranged:
    """Places, outer ones first, by what is in them now."""

    def __init__(self, places: Iterable[Place]) -> None:
        self.filled: list[Entry] = []  # lists that are filled, and neither read nor state
        self.counted: list[Place] = []  # numbers
        self.kept: list[Place] = []  # all else
        for place in sorted(places, key=depth_of):
            if any(isinstance(place, Entry) and place.is_inside(outer) for outer in self.filled):
                continue  # a step that changes it reads the list that it is in
            if isinstance(place, Entry) and place.is_filled():
                self.filled.append(place)
            else:
                counts = place.counted and type(place.now()) in place.counted
                (self.counted if counts else self.kept).append(place)

    @property
    def all(self) -> list[Place]:
        return [*self.kept, *self.filled, *self.counted]


class _State:
    """What is in a place, but for what is in further places inside of it."""

    def __init__(self, place: Place, places: Sequence[Place]) -> None:
        self.place = place
        inside = [p for p in places if isinstance(p, Entry) and p.is_inside(place)]
        outer = depth_of(place)
        self._further = [(p, p.keys[outer:]) for p in inside]

    def now(self) -> Any:
        value = self.place.now()
        for place, keys in self._further:
            value = _closed(value, keys, type(place.now()))
        return value


def _closed(value: Any, keys: Sequence[Any], kind: type) -> Any:
    """A copy of a container that has a type in the place of what is held there."""
    held = held_at(value, keys[0])
    if held is Absence.ABSENT:
        return value
    clone = copy.copy(value)
    put_at(clone, keys[0], kind if len(keys) == 1 else _closed(held, keys[1:], kind))
    return clone


def _signature_of(states: Sequence[_State]) -> tuple[Signature, list[Tensor]]:
    values = [_detached(state.now()) for state in states]
    return Signature.of(values, {}, names=[state.place.name for state in states])


def signature_now(places: Iterable[Place], is_read: Callable[[Place], bool]) -> Signature:
    """The signature of what steps read in places."""
    found = Arranged(places)
    return _signature_of([_State(p, found.all) for p in found.kept if is_read(p)])[0]


def _sameness(values: Sequence[Any]) -> list[int]:
    """For each container the first one that is the same object."""
    first: dict[int, int] = {}
    opened = (id(v) if is_container(v) else None for v in values)
    return [-1 if key is None else first.setdefault(key, i) for i, key in enumerate(opened)]


def _copy(value: Any) -> Any:
    return copy.copy(value) if isinstance(value, set) else value


@dataclass(eq=False, slots=True)
class _Effect:
    """What a step does to a place."""

    place: Place
    # "fill" what is there, by operations; "refill" it, with indices of what it holds, and values;
    # or "bind" another value
    how: str
    value: Any

    @property
    def is_compared(self) -> bool:
        """Whether the value says what is there after it; lists in it may be filled as well."""
        return self.how == "fill" or not leaves_of(self.value, ListAppend)

    @classmethod
    def refilling(cls, place: Place, content: Iterable[Any], before: Iterable[Any]) -> _Effect:
        known = {id(value): i for i, value in enumerate(before) if not is_plain(value)}
        pairs = [(known.get(id(value), -1), value) for value in content]
        return cls(place, "refill", [(i, None if i >= 0 else value) for i, value in pairs])

    def apply(self, before: Any, value: Any) -> Any:
        """Do it where this was in the place before; what is there now."""
        if self.how == "bind":
            self.place.put(value)
            return value
        if self.how == "fill":
            perform(value, before)
        else:
            held = list(before)
            refill(before, [held[i] if i >= 0 else new for i, new in value])
        return before

    def outcome(self, before: Any, value: Any) -> Any:
        """What is new where it was applied, if it were."""
        if self.how == "bind":
            return value
        return self.new_in(self.apply(copy.copy(before), value), list(before))

    def new_in(self, now: Any, before: Sequence[Any]) -> Any:
        """What of this is new; ``before`` is what was there."""
        if self.how == "bind":
            return now
        if isinstance(now, set):
            return sorted(now.difference(before), key=repr)
        held, count = list(now), len(before)
        if is_same_content(tuple(held[:count]), tuple(before)):
            return dict(enumerate(held[count:], count))
        known = set(map(id, before))
        return {i: value for i, value in enumerate(held) if id(value) not in known}


class SideEffects:
    """What captured code finds in places, and what it leaves there.

    What code reads is an input of the graph: a copy, over which it is captured. What it leaves is
    stored again by every replay: copies, so that nobody sees a later step in what he has kept.
    """

    def __init__(
        self, places: Iterable[Place], is_read: Callable[[Place], bool], module: nn.Module
    ) -> None:
        state = (*module.parameters(), *module.buffers())
        self._themselves = set(map(storage_address, state)) - {0}
        self._state = set(map(id, state))
        found = Arranged(places)
        self._filled, self._counted = found.filled, found.counted
        self._states = [_State(place, found.all) for place in found.kept if is_read(place)]
        self._unread = [place for place in found.kept if not is_read(place)]
        self._types = [(place, type(place.now())) for place in (*self._filled, *self._counted)]
        self.signature, tensors = _signature_of(self._states)
        self._call = CallPlan(self.signature, check_modes=False)
        self._inputs = StaticInputs(tensors)
        own = [
            Parameter(own.detach(), own.requires_grad) if isinstance(given, Parameter) else own
            for own, given in zip(self._inputs.tensors, tensors, strict=True)
        ]
        self.own = own
        self._versions = list(map(version_of, own))
        supply = iter(own)
        values = [state.now() for state in self._states]
        self._inside = [_copy(substitute(value, supply)) for value in values]
        self._leaves = [
            (state.place, leaf)
            for state, inside in zip(self._states, self._inside, strict=True)
            for leaf in leaves_of(inside, Tensor)
        ]
        self._contained = [*(s.place for s in self._states), *self._filled]
        self._same = _sameness([place.now() for place in self._contained])
        self._effects: list[_Effect] = []
        self._written: list[tuple[Tensor, int]] = []
        self._looked: list[tuple[Any, Any]] | None = None
        self._raw: list[Tensor] = []
        # What is stored as a copy, with its history; and the gradients of those that keep theirs
        self._copied: list[Tensor] = []
        self._gradients: list[tuple[int, Tensor]] = []

    # ------------------------------------------------------------------ while it is captured

    @contextlib.contextmanager
    def exchanged(self, number: Callable[[str, Callable[[], Any]], Any]) -> Iterator[None]:
        """While the body, a capture, runs, places hold what the graph is to read.

        Args:
            number: Makes what stands for a number, of its name and what gives it.
        """
        inside = [*self._inside, *map(ListAppend, self._filled)]
        shared = [inside[i if first < 0 else first] for i, first in enumerate(self._same)]
        given = [*zip(self._contained, shared, strict=True)]
        given += [(place, place.now()) for place in self._unread]
        given.sort(key=lambda pair: depth_of(pair[0]))
        given += [(place, number(place.name, place.now)) for place in self._counted]
        before = [(place, place.now()) for place, _ in given]
        self._given, self._contents = given, [content_of(value) for _, value in given]
        for place, value in given:
            place.put(value)
        try:
            yield
        finally:
            for place, value in reversed(before):
                place.put(value)

    def without_numbers(self, stores: Stores) -> Stores:
        """Without those that are stored here, and read by the next step."""
        found = (p for p in (*self._counted, *self._filled) if isinstance(p, Entry))
        mine = {(id(place.owner), place.keys) for place in found}
        return tuple(s for s in stores if (id(s[0]), (s[1],)) not in mine)

    def look(self) -> None:
        """See what the code has left; what it stores after this is refused."""
        if any(tensor.grad is not None for tensor in self.own):
            name = self._states[0].place.name
            raise STORED.refused(f"a gradient reaches {name}, which the step sets")
        now = [(place.now(), _content(given)) for place, given in self._given]
        if self._looked is not None:
            pairs = zip(self._given, now, self._looked, strict=True)
            later = [p.name for (p, _), a, b in pairs if not _is_same(p, a, b)]
            if later:
                raise STORED.refused(f"{later[0]} is set after the forward pass")
            return
        self._looked = now
        bound: list[_Effect] = []
        inside: list[_Effect] = []
        seen: set[int] = set()
        for (place, given), (value, content), then in zip(
            self._given, now, self._contents, strict=True
        ):
            if not place.is_still(value, given):
                bound.append(_Effect(place, "bind", value))
            if id(given) in seen:
                continue
            seen.add(id(given))
            if isinstance(given, ListAppend) and content:
                inside.append(_Effect(place, "fill", given.operations))
            elif not isinstance(given, ListAppend) and not is_same_content(content, then):
                if place in self._unread:
                    raise STORED.refused(f"{place.name} is changed by another name")
                inside.append(_Effect.refilling(place, content or (), then or ()))
        bound = [effect for effect in bound if not _is_part(effect.place, bound)]
        self._effects = [*inside, *sorted(bound, key=_rank)]
        self._plan_copies({id(effect.place) for effect in self._effects})

    def _plan_copies(self, changed: set[int]) -> None:
        single = {id(p) for i, p in enumerate(self._contained) if self._same[i] in (-1, i)}
        for position, (place, leaf) in enumerate(self._leaves):
            is_written = version_of(leaf) != self._versions[position]
            if id(place) in single and (id(place) not in changed or is_written):
                self._written.append((leaf.detach(), position))
        sources: dict[str, list[Tensor]] = {"copy": [], "itself": []}
        self._slots: list[tuple[str, int]] = []
        known = {id(tensor): ("given", i) for i, tensor in enumerate(self.own)}
        values = [effect.value for effect in self._effects]
        for leaf in leaves_of(values):
            if isinstance(leaf, Tracer):
                leaf.now()  # or a refusal, where no replay has the value
            elif isinstance(leaf, Tensor):
                if id(leaf) not in known:
                    kind = "itself" if storage_address(leaf) in self._themselves else "copy"
                    known[id(leaf)] = kind, len(sources[kind])
                    sources[kind].append(leaf)
                self._slots.append(known[id(leaf)])
            elif not is_constant(leaf):
                raise STORED.refused(f"the step stores a {type(leaf).__qualname__}")
        if len(leaves_of(values, Tracer)) > sum(isinstance(x, Tracer) for x in tree_leaves(values)):
            raise STORED.refused("the step stores a number in a container of its own kind")
        self._parameters = [isinstance(leaf, Parameter) for leaf in sources["copy"]]
        self._copied = sources["copy"]
        self._sources = {
            kind: [leaf if id(leaf) in self._state else leaf.detach() for leaf in leaves]
            for kind, leaves in sources.items()
        }
        for effect in self._effects:
            effect.value = _detached(effect.value)

    def refuse_untouched(self) -> None:
        """Refuse lists that other steps fill, and this one may have looked at by their type."""
        for _, given in self._given:
            if isinstance(given, ListAppend) and not given.operations:
                given.refuse()

    def finish_capture(self) -> None:
        """Let go of the captured autograd graph, but for gradients."""
        self._gradients, self._copied = gradients_of(self._copied), []

    # ------------------------------------------------------------------ around a replay

    def take(self) -> bool:
        """Copy in what the places hold, if the graph is captured for such."""
        try:
            raw = [state.now() for state in self._states]
            others = any(type(place.now()) is not kind for place, kind in self._types)
            contained = [place.now() for place in self._contained]
            if others or (len(contained) > 1 and _sameness(contained) != self._same):
                return False
        except (LookupError, TypeError):  # what holds it is something else by now
            return False
        tensors = self._call.match(list(map(_detached, raw)), {})
        if tensors is None:
            return False
        self._raw = leaves_of(raw, Tensor)
        self._inputs.copy_in(tensors)
        return True

    def write_back(self) -> None:
        """After a replay: let tensors that stay in their places hold what was written there."""
        if self._written:
            targets = [self._raw[position] for _, position in self._written]
            with torch.no_grad():
                torch._foreach_copy_(targets, [own for own, _ in self._written])

    @property
    def written(self) -> dict[str, Tensor]:
        return {f"of a place {i}": self._raw[i] for _, i in self._written}

    def store(self, owing: Owing) -> None:
        """After a replay: store what the code stores; some of it still gets its gradient."""
        self.write_back()
        if not self._effects:
            return
        copies = clone_all(self._sources["copy"])
        copies = [
            Parameter(copy) if is_parameter else copy
            for copy, is_parameter in zip(copies, self._parameters, strict=True)
        ]
        owing += [(copies[i], gradient) for i, gradient in self._gradients]
        for effect, before, value in [*self._built(copies)]:  # numbers follow from those of before
            effect.apply(before, value)

    def _built(self, copies: Sequence[Tensor]) -> Iterator[tuple[_Effect, Any, Any]]:
        """Each effect, what is in its place, and its value of this replay."""
        sources = {**self._sources, "given": self._raw, "copy": copies}
        supply = iter([sources[kind][index] for kind, index in self._slots])
        for effect in self._effects:
            value = present(substitute(effect.value, supply))
            yield effect, effect.place.now(), value

    def results(self) -> list[Result]:
        """After a replay: what would be stored."""
        self.write_back()
        built = [*self._built(self._sources["copy"])]
        compared = [(e, e.outcome(before, value)) for e, before, value in built if e.is_compared]
        return [result for e, value in compared for result in _results(e.place, value)]

    def eager_results(self) -> Callable[[], list[Result]]:
        """Ahead of an eager step: what gives, after it, what it has stored where a replay does."""
        compared = [effect for effect in self._effects if effect.is_compared]
        before = [effect.place.now() for effect in compared]
        known = [
            [] if effect.how == "bind" else list(held)
            for effect, held in zip(compared, before, strict=True)
        ]

        def results() -> list[Result]:
            found = []
            for effect, held, then in zip(compared, before, known, strict=True):
                now = effect.place.now() if effect.how == "bind" else held
                found += _results(effect.place, effect.new_in(now, then))
            return found

        return results


def _content(given: Any) -> Any:
    """What was done to a list that is filled, or what another one holds."""
    return tuple(given.operations) if isinstance(given, ListAppend) else content_of(given)


def _is_same(place: Place, now: tuple[Any, Any], before: tuple[Any, Any]) -> bool:
    return place.is_still(now[0], before[0]) and is_same_content(now[1], before[1])


def _is_part(place: Place, bound: Iterable[_Effect]) -> bool:
    """Whether a place is in what another place is bound to, which has it already."""
    others = [effect.place for effect in bound if effect.place is not place]
    return isinstance(place, Entry) and any(
        place.is_inside(other) or (isinstance(place, Order) and place.is_of(other))
        for other in others
    )


def _rank(effect: _Effect) -> int:
    """Keys come into a dict in the order in which it holds them; then that is put right."""
    place = effect.place
    if isinstance(place, Order):
        return sys.maxsize
    keys = list(place.holder) if isinstance(place, Entry) and isinstance(place.holder, dict) else []
    return keys.index(place.keys[-1]) if isinstance(place, Entry) and place.keys[-1] in keys else 0


def _results(place: Place, value: Any) -> list[Result]:
    return results_in(value, f"stored `{place.name}`")


# ------------------ Learns in which places the steps of a fit store something, or find something b


class LeftBehindError(CaptureError):
    """Code has left something behind."""


class Places:
    """The places of a fit in which steps store something, or which are bound anew between them.

    They are found where a capture leaves something behind, and where a tensor that graphs were
    captured over is another one.
    """

    def __init__(
        self, module: LightningModule, reads: AttributeGuards, on_change: Callable[[], object]
    ) -> None:
        self._module = module
        self._reads = reads
        self._on_change = on_change
        self._places: dict[str, Place] = {}
        # In which other places the code that was watched last has left something; none if that
        # cannot be stored again
        self.found: list[Place] = []

    def __iter__(self) -> Iterator[Place]:
        return iter(self._places.values())

    @property
    def exempt(self) -> set[tuple[int, Any]]:
        """Table, by its ``id``, and key of each, or tensor and ``"data"``."""
        entries = [p for p in self if isinstance(p, Entry) and len(p.keys) == 1]
        found = {(id(place.owner), place.keys[0]) for place in entries}
        return found | {(id(place.tensor), "data") for place in self if isinstance(place, Memory)}

    def learn(self, found: Sequence[Place]) -> bool:
        """Treat these as such from now on; whether there is one that was not known."""
        new = {place.name: place for place in found if place.name not in self._places}
        self._places.update(new)
        if new:
            self._changed()
        return bool(new)

    def _changed(self) -> None:
        self._reads.leave_out(self._places)
        self._on_change()

    def learn_moved(
        self, moved: Sequence[tuple[str, Mapping[str, Any] | None, str, Tensor]]
    ) -> bool:
        """Learn that these are other tensors now, or have other memory; see :meth:`learn`.

        Parameters that an optimizer moves, or is told of, are none of it.
        """
        known = trained_parameters(self._module.trainer)
        found: list[Place] = []
        for path, table, key, was in moved:
            if id(was) in known or (table is not None and id(table[key]) in known):
                return False
            name = f"self.{path}"
            place = Memory(f"{name}.data", was) if table is None else Entry(name, table, (key,))
            found.append(place)
        return self.learn(found)

    def learn_bound(self, names: Iterable[str]) -> bool:
        """Learn that attributes with these names hold other tensors than before; see :meth:`learn`.

        Such a tensor is copied in, so its history, and what else has its memory, must not count.
        """
        modules = {f"self.{n}" if n else "self": m for n, m in self._module.named_modules()}
        trained, device = trained_parameters(self._module.trainer), self._module.device
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

    def are_used(self, *filled: Entry) -> bool:
        """Steps compute with these lists that they fill, or with any of them: they are state."""
        found = filled or [p for p in self if isinstance(p, Entry) and p.is_filled()]
        for place in found:
            place.is_used = True
        if found:
            self._changed()
        return bool(found)

    @contextlib.contextmanager
    def left(
        self, generators: Generators, listed: Callable[[Sequence[str]], str]
    ) -> Iterator[None]:
        """Undo what the body leaves in attributes of modules and in random generators."""
        trained = trained_parameters(self._module.trainer)
        contents = PythonSnapshot(iter_objects(self._module))
        named = (*self._module.named_parameters(), *self._module.named_buffers())
        memory = [(Memory(f"self.{n}.data", t), t.detach()) for n, t in named if is_strided(t)]
        try:
            yield
        finally:
            drawn = generators.drawn()
            generators.restore()
            moved = [(place, was) for place, was in memory if not place.is_still(place.now(), was)]
            for place, was in moved:
                place.put(was)
            moved = [pair for pair in moved if pair[0].name not in self._places]
            pairs = [(c.name, place_of(c, contents, trained)) for c in contents.changes()]
            pairs = [(n, p) for n, p in pairs if (p.name if p else n) not in self._places]
            found: list[Place | None] = [place for _, place in pairs]
            found += [None if id(place.tensor) in trained else place for place, _ in moved]
            contents.restore()
            self.found = [p for p in found if p is not None] if None not in found else []
        if found:
            names = sorted([*(name for name, _ in pairs), *(place.name for place, _ in moved)])
            observed = f"training_step changes {listed(names)}"
            raise LeftBehindError(STORED.rule, observed, STORED.remedy)
        if drawn:
            raise DRAWN.refused(f"training_step draws from {listed(drawn)}")

    def capturing(self) -> SideEffects | None:
        """What a capture finds in these places, and leaves there; None if there are none."""
        if not self._places:
            return None
        while self.learn([*self._further_names()]):
            pass
        return SideEffects([*self], self._is_read, self._module)

    def _further_names(self) -> Iterator[Entry]:
        """Where else the module holds what is in these places, and steps can change."""
        kept = [place.now() for place in self]
        shared = {id(value) for value in kept if is_container(value)}
        held = PythonSnapshot(iter_objects(self._module)) if shared else PythonSnapshot()
        for change in held.entries():
            place = place_of(change, held, ()) if id(change.now) in shared else None
            if place is not None and place.name not in self._places:
                yield place

    def _is_read(self, place: Place) -> bool:
        """Whether code may have read the place before it stored something there."""
        if isinstance(place, Entry) and len(place.keys) == 1:
            return self._reads.may_have_read(place.owner, place.keys[0])
        return True

    def signature(self) -> tuple[Signature, ...]:
        """What is in these places now, for those that steps read."""
        if not self._places:
            return ()
        return (signature_now(self, self._is_read),)


def _is_tree(value: Any) -> bool:
    """Whether all of a value is in containers, tensors and plain values."""
    return all(isinstance(leaf, (Tensor, Tracer)) or is_constant(leaf) for leaf in leaves_of(value))


def place_of(change: Change, held: PythonSnapshot, trained: Collection[int]) -> Entry | None:
    """The place that code has changed; None if a replay cannot store there."""
    _, owner, table, key, before, now = change
    kind: type[Entry] | None = None
    if isinstance(table, dict) and key is Absence.ABSENT:
        kind = Order
    elif isinstance(table, dict) or table is owner:
        # To code that asks for its class, what stands for a number is one.
        if type(before) in (int, float) and isinstance(now, (int, float)) and type(now) is not bool:
            kind = Number
        elif _is_tree(now) and _is_tree(before) and id(before) not in trained:
            kind = Entry
    if isinstance(table, (list, deque, set)):
        kind = Entry if all(map(_is_tree, now)) else None
    keys = () if key is Absence.ABSENT else (key,)
    label = "".join(held.label(owner, key) for key in keys)
    while kind is not None:
        if isinstance(owner, nn.Module) or held.is_table(owner):
            of = "the order of " if kind is Order else ""
            return kind(f"{of}{held.name_of(owner)}{label}", owner, keys)
        holder = held.holder_of(owner)
        if holder is None:
            break
        owner, above = holder
        keys, label = (above, *keys), held.label(owner, above) + label
    return None


def trained_parameters(trainer: Trainer) -> set[int]:
    """The ``id`` of each parameter that an optimizer of a fit writes."""
    groups = (group for optimizer in trainer.optimizers for group in optimizer.param_groups)
    return {id(p) for group in groups for p in group["params"] if p.requires_grad}
