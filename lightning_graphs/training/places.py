"""What a step stores in plain places or binds anew: a replay finds it there, and leaves it there."""

from __future__ import annotations

import contextlib
import operator
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import Parameter

from lightning_graphs.core.buffers import StaticInputs
from lightning_graphs.core.call_plan import CallPlan
from lightning_graphs.core.callsite import CallSiteFinder
from lightning_graphs.core.contents import Change, Contents
from lightning_graphs.core.obstacles import Obstacle
from lightning_graphs.core.signature import Signature
from lightning_graphs.core.torch_private import clone_all, version_of
from lightning_graphs.core.tree import flatten, leaves_of, substitute
from lightning_graphs.core.values import Absence, attributes_of, is_plain
from lightning_graphs.errors import CaptureError
from lightning_graphs.training.differences import Result
from lightning_graphs.training.frozen import StandIn
from lightning_graphs.training.generators import Generators
from lightning_graphs.training.python_state import DRAWN, STORED, AttributeReads, Attributes

COUNTED = Obstacle(
    "A captured step runs no Python code: numbers that it counts and lists that it fills go on, and "
    "what is computed from them would stand still.",
    "compute it in on_train_batch_end, or count in a buffer: self.n += 1 with a tensor",
    kind="python-state",
    code='self.register_buffer("n", torch.zeros((), dtype=torch.long))  # in __init__\n'
    "self.n += 1  # in training_step",
)


class Place:
    """Where something is kept.

    Args:
        name: What messages call it.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def now(self) -> Any:
        """What is there."""
        raise NotImplementedError

    def put(self, value: Any) -> None:
        """Keep this there."""
        raise NotImplementedError

    def is_still(self, now: Any, given: Any) -> bool:
        """Whether what is there is what was put there."""
        return now is given


class Entry(Place):
    """An attribute, or an entry of what attributes hold, levels deep.

    Args:
        name: What messages call it.
        owner: The module, or a table of its parameters or buffers.
        keys: Of the attribute, of the entry in what it holds, and so on.
    """

    def __init__(self, name: str, owner: Any, keys: tuple[Any, ...]) -> None:
        super().__init__(name)
        self.owner = owner
        self.keys = keys

    @property
    def table(self) -> Any:
        """What it is an entry of."""
        table = _table_of(self.owner)
        for key in self.keys[:-1]:
            table = _table_of(table[key])
        return table

    def now(self) -> Any:
        table, key = self.table, self.keys[-1]
        return table.get(key, Absence.ABSENT) if isinstance(table, dict) else table[key]

    def put(self, value: Any) -> None:
        if value is Absence.ABSENT:
            self.table.pop(self.keys[-1], None)
        else:
            self.table[self.keys[-1]] = value


def _table_of(owner: Any) -> Any:
    return owner if isinstance(owner, (dict, list, deque)) else attributes_of(owner)


class Content(Entry):
    """What a list or a deque holds that is an entry."""

    def now(self) -> Any:
        return tuple(super().now())

    def put(self, value: Any) -> None:
        container = super().now()
        container.clear()
        container.extend(value)

    def is_still(self, now: Any, given: Any) -> bool:
        return len(now) == len(given) and all(map(operator.is_, now, given))


class Number(Entry):
    """A number of Python's that steps count.

    Attributes:
        base: What it is before the present step.
    """

    base: Any = None


class Growing(Entry):
    """A list to which steps append."""


class Memory(Place):
    """The memory of a parameter or buffer, which ``tensor.data = ...`` exchanges."""

    def __init__(self, name: str, tensor: Tensor) -> None:
        super().__init__(name)
        self.tensor = tensor

    def now(self) -> Any:
        return self.tensor.detach()

    def put(self, value: Any) -> None:
        self.tensor.data = value

    def is_still(self, now: Any, given: Any) -> bool:
        return bool(now.data_ptr() == given.data_ptr() and now.stride() == given.stride())


class PlaceUsedError(CaptureError):
    """A captured step computes with what it counts or fills.

    Attributes:
        place: Where that is kept.
    """

    def __init__(self, place: Entry) -> None:
        observed = f"{place.name} is used at {CallSiteFinder().here().describe()}"
        super().__init__(COUNTED.rule, observed, COUNTED.remedy)
        self.place = place


class Counter(StandIn):
    """A number that is counted while a step is captured: moved by numbers, and used for no more."""

    def __init__(
        self, place: Number, steps: tuple[tuple[Callable[[Any, Any], Any], Any], ...] = ()
    ) -> None:
        self.place = place
        self._steps = steps

    def refuse(self) -> NoReturn:
        raise PlaceUsedError(self.place)

    def now(self) -> Any:
        value = self.place.base
        for move, by in self._steps:
            value = move(value, by)
        return value

    def _moved(self, move: Callable[[Any, Any], Any], by: Any) -> Counter:
        if type(by) not in (int, float):
            self.refuse()
        return Counter(self.place, (*self._steps, (move, by)))

    def __add__(self, by: Any) -> Counter:
        return self._moved(operator.add, by)

    def __sub__(self, by: Any) -> Counter:
        return self._moved(operator.sub, by)

    def __mul__(self, by: Any) -> Counter:
        return self._moved(operator.mul, by)

    __radd__, __rmul__ = __add__, __mul__


class Filled(StandIn):
    """A list that is filled while a step is captured, and looked at by nobody."""

    def __init__(self, place: Growing) -> None:
        self.place = place
        self.added: list[Any] = []

    def refuse(self) -> NoReturn:
        raise PlaceUsedError(self.place)

    def now(self) -> Any:
        return self.place.now()

    def append(self, value: Any) -> None:
        """As ``list.append``."""
        self.added.append(value)

    def extend(self, values: Iterable[Any]) -> None:
        """As ``list.extend``."""
        self.added.extend(values)

    def __iadd__(self, values: Iterable[Any]) -> Filled:
        self.extend(values)
        return self


class LeftBehindError(CaptureError):
    """Code has left something behind.

    Attributes:
        places: Where; None: not all of it could be stored again.
    """

    def __init__(self, names: Sequence[str], places: list[Place] | None) -> None:
        observed = f"training_step changes {', '.join(names[:3])}"
        super().__init__(STORED.rule, observed, STORED.remedy)
        self.places = places


class Places:
    """The places of a fit in which steps store something, or which are bound anew between them.

    They are found where a capture leaves something behind, and where a tensor that graphs were
    captured over is another one.

    Args:
        module: The user's module.
        reads: Learns that the values in them are no conditions.
    """

    def __init__(self, module: LightningModule, reads: AttributeReads) -> None:
        self._module = module
        self._reads = reads
        self._places: dict[str, Place] = {}
        self._fixed: set[str] = set()

    def __len__(self) -> int:
        return len(self._places)

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
        self._reads.leave_out(self._places)
        return bool(new)

    def learn_moved(self, moved: Iterable[tuple[str, dict[str, Any] | None, str, Tensor]]) -> bool:
        """Learn that these are other tensors now, or have other memory; see :meth:`learn`.

        What an optimizer moves is none of it.
        """
        known = self._trained()
        return self.learn(
            [
                Memory(f"self.{path}.data", tensor)
                if table is None
                else Entry(f"self.{path}", table, (key,))
                for path, table, key, tensor in moved
                if id(tensor) not in known
            ]
        )

    def _trained(self) -> set[int]:
        """The parameters that an optimizer writes, by their ``id``."""
        groups = (group for o in self._module.trainer.optimizers for group in o.param_groups)
        return {id(p) for group in groups for p in group["params"] if p.requires_grad}

    def unlearn(self, place: Entry) -> None:
        """Steps compute with what they count there: it is a condition again, or state."""
        if isinstance(place, Growing):
            self._places[place.name] = Content(place.name, place.owner, place.keys)
        else:
            self._fixed.add(place.name)
            del self._places[place.name]
        self._reads.leave_out(self._places)

    @contextlib.contextmanager
    def left(self, generators: Generators) -> Iterator[None]:
        """Undo what the body leaves in attributes of modules and in random generators.

        Raises:
            LeftBehindError: it has left something in other places than these.
            CaptureError: it has drawn from a generator.
        """
        optimized = self._trained()
        contents = Attributes(self._module)
        named = (*self._module.named_parameters(), *self._module.named_buffers())
        memory = [(Memory(f"self.{n}.data", tensor), tensor.detach()) for n, tensor in named]
        try:
            yield
        finally:
            drawn = generators.drawn()
            generators.restore()
            moved = [(place, was) for place, was in memory if not place.is_still(place.now(), was)]
            for place, was in moved:
                place.put(was)
            changes = [c for c in contents.changes() if c.name not in self._places]
            found = [self._place_of(change, contents, optimized) for change in changes]
            contents.restore()
        moved = [pair for pair in moved if pair[0].name not in self._places]
        found += [None if id(place.tensor) in optimized else place for place, _ in moved]
        names = sorted([*(c.name for c in changes), *(place.name for place, _ in moved)])
        if names:
            raise LeftBehindError(names, None if None in found else found)  # type: ignore[arg-type]
        if drawn:
            names = ", ".join(drawn)
            raise CaptureError(DRAWN.rule, f"training_step draws from {names}", DRAWN.remedy)

    def _place_of(self, change: Change, held: Contents, trained: set[int]) -> Entry | None:
        """The place that code has changed; None if it cannot be served."""
        name, owner, table, key, before, now = change
        kind: type[Entry] | None = None
        if isinstance(table, dict):
            if type(before) in (int, float) and type(now) in (int, float):
                kind = Number
            elif _is_tree(now) and _is_tree(before) and id(before) not in trained:
                kind = Entry
        elif isinstance(table, (list, deque)) and all(map(_is_tree, now)):
            grows = type(table) is list and [*map(id, now[: len(before)])] == [*map(id, before)]
            kind = Growing if grows else Content
        keys = () if key is None else (key,)
        while kind is not None and name not in self._fixed:
            if isinstance(owner, nn.Module) or held.is_table(owner):
                return kind(name, owner, keys)
            holder = held.holder_of(owner)
            if holder is None:
                break
            owner, above = holder
            keys = (above, *keys)
        return None

    def capturing(self) -> CapturedStores:
        """What a capture finds in these places, and leaves there."""
        return CapturedStores([*self], self._is_read, self._module)

    def _is_read(self, place: Place) -> bool:
        """Whether code may have read the place before it stored something there."""
        alone = isinstance(place, Entry) and len(place.keys) == 1
        return not alone or self._reads.may_have_read(place.owner, place.keys[0])

    def signature(self) -> tuple[Signature, ...]:
        """What is in these places now, for those that steps read."""
        if not self._places:
            return ()
        state = [p for p in self if not isinstance(p, (Number, Growing)) and self._is_read(p)]
        return (_signature_of(state)[0],)


def _is_tree(value: Any) -> bool:
    """Whether all of a value is in containers, tensors and plain values."""
    return all(isinstance(leaf, Tensor) or is_plain(leaf) for leaf in leaves_of(value))


def _detached(value: Any) -> Any:
    """A value without history of autograd's, which no later step goes back through."""
    if isinstance(value, Tensor):
        history = value.requires_grad and not isinstance(value, Parameter)
        return value.detach() if history else value
    found = leaves_of(value)
    tensors = [leaf for leaf in found if isinstance(leaf, Tensor)]
    return substitute(value, map(_detached, tensors)) if tensors else value


def _signature_of(places: Sequence[Place]) -> tuple[Signature, list[Tensor]]:
    values = [_detached(place.now()) for place in places]
    return Signature.of(values, {}, names=[place.name for place in places])


class CapturedStores:
    """What captured code finds in places, and what it leaves there.

    What code reads is an input of the graph: a copy, over which it is captured. What it leaves is
    stored again by every replay: copies, so that nobody sees a later step in what he has kept.

    Args:
        places: The places.
        is_read: Tells of a place whether code reads it.
        module: Its parameters and buffers are handed out themselves.
    """

    def __init__(
        self, places: Sequence[Place], is_read: Callable[[Place], bool], module: nn.Module
    ) -> None:
        state = (*module.parameters(), *module.buffers())
        self._themselves = {t.untyped_storage().data_ptr() for t in state} - {0}
        self._numbers = [place for place in places if isinstance(place, Number)]
        self._lists = [place for place in places if isinstance(place, Growing)]
        kept = [p for p in places if not isinstance(p, (Number, Growing))]
        self._read = [place for place in kept if is_read(place)]
        self._unread = [place for place in kept if not is_read(place)]
        self.signature, tensors = _signature_of(self._read)
        self._call = CallPlan(self.signature, check_modes=False)
        self._inputs = StaticInputs(tensors)
        own = [
            Parameter(own.detach(), own.requires_grad) if isinstance(given, Parameter) else own
            for own, given in zip(self._inputs.tensors, tensors, strict=True)
        ]
        self._own = own
        self._versions = list(map(version_of, own))
        supply = iter(own)
        self._inside = [
            substitute(place.now(), supply) if leaves_of(place.now()) else place.now()
            for place in self._read
        ]
        self._outgoing: list[tuple[Place, Any]] = []
        self._written: list[tuple[Tensor, int]] = []
        self._looked: list[Any] | None = None
        self._raw: list[Tensor] = []

    # ------------------------------------------------------------------ while it is captured

    @contextlib.contextmanager
    def exchanged(self) -> Iterator[None]:
        """While the body, a capture, runs, places hold what the graph is to read."""
        counters = [Counter(place) for place in self._numbers]
        self._filled = [Filled(place) for place in self._lists]
        given = [
            *zip(self._read, self._inside, strict=True),
            *zip(self._numbers, counters, strict=True),
            *zip(self._lists, self._filled, strict=True),
        ]
        self._given = [*given, *((place, place.now()) for place in self._unread)]
        before = [(place, place.now()) for place, _ in self._given]
        for place, value in given:
            place.put(value)
        try:
            yield
        finally:
            for place, value in reversed(before):
                place.put(value)

    def look(self) -> None:
        """See what the code has left; what it stores after this is refused.

        Raises:
            CaptureError: it has left something that no replay could make again.
        """
        if any(tensor.grad is not None for tensor in self._own):
            name = self._read[0].name
            observed = f"a gradient reaches {name}, which is bound anew"
            raise CaptureError(STORED.rule, observed, STORED.remedy)
        now = [place.now() for place, _ in self._given]
        if self._looked is not None:
            pairs = zip(self._given, now, self._looked, strict=True)
            later = [place.name for (place, _), a, b in pairs if not place.is_still(a, b)]
            if later:
                observed = f"{later[0]} is set after the forward pass"
                raise CaptureError(STORED.rule, observed, STORED.remedy)
            return
        self._looked = now
        rebound = set()
        for (place, given), value in zip(self._given, now, strict=True):
            if not place.is_still(value, given):
                self._outgoing.append((place, value))
                rebound.add(id(place))
        lists = zip(self._lists, self._filled, strict=True)
        self._outgoing += [(place, filled.added) for place, filled in lists if filled.added]
        self._plan_copies(rebound)

    def _plan_copies(self, rebound: set[int]) -> None:
        position = 0
        for place, inside in zip(self._read, self._inside, strict=True):
            for leaf in leaves_of(inside):
                if isinstance(leaf, Tensor):
                    if id(place) not in rebound or version_of(leaf) != self._versions[position]:
                        self._written.append((leaf.detach(), position))
                    position += 1
        given = {id(tensor): i for i, tensor in enumerate(self._own)}
        self._sources: list[Tensor] = []
        self._slots: list[tuple[str, int]] = []
        known: dict[int, int] = {}
        for leaf in leaves_of([value for _, value in self._outgoing]):
            if not isinstance(leaf, Tensor):
                if not (is_plain(leaf) or isinstance(leaf, StandIn)):
                    observed = f"it stores a {type(leaf).__qualname__}"
                    raise CaptureError(STORED.rule, observed, STORED.remedy)
            elif id(leaf) in given:
                self._slots.append(("given", given[id(leaf)]))
            else:
                index = known.setdefault(id(leaf), len(self._sources))
                if index == len(self._sources):
                    self._sources.append(leaf)
                itself = leaf.untyped_storage().data_ptr() in self._themselves
                self._slots.append(("itself" if itself else "copy", index))
        self._parameters = [isinstance(leaf, Parameter) for leaf in self._sources]
        self._sources = [leaf.detach() for leaf in self._sources]
        self._outgoing = [(place, _detached_tree(value)) for place, value in self._outgoing]

    # ------------------------------------------------------------------ around a replay

    def take(self) -> bool:
        """Copy in what the places hold, if the graph is captured for such."""
        try:
            raw = [place.now() for place in self._read]
            lists = [type(place.now()) for place in self._lists]
        except (LookupError, TypeError):  # what holds it is something else by now
            return False
        tensors = self._call.match(list(map(_detached, raw)), {})
        if tensors is None or any(kind is not list for kind in lists):
            return False
        self._raw = [leaf for leaf in leaves_of(raw) if isinstance(leaf, Tensor)]
        self._inputs.copy_in(tensors)
        for number in self._numbers:
            number.base = number.now()
        return True

    def write_back(self) -> None:
        """After a replay: let tensors that stay in their places hold what was written there."""
        with torch.no_grad():
            for own, position in self._written:
                self._raw[position].copy_(own)

    def store(self) -> None:
        """After a replay: store what the code stores."""
        if self._written:
            self.write_back()
        if not self._outgoing:
            return
        copies = clone_all(self._sources)
        copies = [
            Parameter(copy) if is_parameter else copy
            for copy, is_parameter in zip(copies, self._parameters, strict=True)
        ]
        for place, value in self._built(copies):
            if isinstance(place, Growing):
                place.now().extend(value)
            else:
                place.put(value)

    def _built(self, copies: Sequence[Tensor]) -> Iterator[tuple[Place, Any]]:
        sources = {"given": self._raw, "copy": copies, "itself": self._sources}
        supply = iter([sources[kind][index] for kind, index in self._slots])
        for place, value in self._outgoing:
            yield place, _now(substitute(value, supply))

    def results(self) -> list[Result]:
        """After a replay: what would be stored."""
        self.write_back()
        return _results(self._built(self._sources))

    def results_of(self, before: Sequence[Any]) -> list[Result]:
        """After an eager step: what it has stored where a replay does.

        Args:
            before: What :meth:`present` gave before it.
        """
        found = []
        for (place, _), then in zip(self._outgoing, before, strict=True):
            now = place.now()[then:] if isinstance(place, Growing) else place.now()
            found.append((place, _detached(now)))
        return _results(found)

    def present(self) -> list[Any]:
        """What :meth:`results_of` has to know of the places before a step."""
        places = [place for place, _ in self._outgoing]
        return [len(p.now()) if isinstance(p, Growing) else None for p in places]


def _now(value: Any) -> Any:
    return value.now() if isinstance(value, StandIn) else value


def _detached_tree(value: Any) -> Any:
    found = [leaf.detach() for leaf in leaves_of(value) if isinstance(leaf, Tensor)]
    return substitute(value, found)


def _results(values: Iterable[tuple[Place, Any]]) -> list[Result]:
    found: list[tuple[str, Any]] = []
    for place, value in values:
        flatten(value, f"stored `{place.name}`", found)
    return [
        Result(name, leaf)
        if isinstance(leaf, Tensor)
        else Result(f"{name} = {leaf!r}", torch.empty(0))
        for name, leaf in found
    ]
