"""Copies in what a captured step reads in plain places, and stores again what it leaves there."""

from __future__ import annotations

import abc
import contextlib
import operator
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from lightning_graphs.core.arguments.buffers import StaticInputs, storage_address
from lightning_graphs.core.arguments.outputs import Owing, gradients_of
from lightning_graphs.core.arguments.signature import CallPlan, Signature
from lightning_graphs.core.arguments.tree import leaves_of, substitute
from lightning_graphs.core.arguments.values import Absence, attributes_of, is_plain
from lightning_graphs.core.callsite import CallSiteFinder
from lightning_graphs.core.graphed import Stores
from lightning_graphs.core.obstacles import Obstacle
from lightning_graphs.core.private.torch import clone_all, version_of
from lightning_graphs.errors import CaptureError
from lightning_graphs.training.guards.frozen import StandIn, present
from lightning_graphs.training.guards.python_state import STORED
from lightning_graphs.training.verify.differences import Result, results_in

FILLED = Obstacle(
    "A captured step can append to a list, but cannot compute with the list.",
    "compute with the list in on_train_batch_end, or keep the last few entries in a deque",
    kind="python-state",
    code="self.last = deque(maxlen=10)  # in __init__\n"
    "self.last.append(loss.detach())  # in training_step",
)


@dataclass(eq=False)
class Place(abc.ABC):
    """Where something is kept."""

    name: str  # what messages call it

    counted: ClassVar[tuple[type, ...]] = ()
    """The types of what is counted or filled there."""

    @abc.abstractmethod
    def now(self) -> Any:
        """What is there."""

    @abc.abstractmethod
    def put(self, value: Any) -> None:
        """Keep this there."""

    def is_still(self, now: Any, given: Any) -> bool:
        """Whether what is there is what was put there."""
        return now is given

    def is_state(self) -> bool:
        """Whether what is there now is kept, and neither counted nor filled."""
        return type(self.now()) not in self.counted


@dataclass(eq=False)
class Entry(Place):
    """An attribute, or an entry of what attributes hold, levels deep."""

    owner: Any  # the module, or a table of its parameters or buffers
    keys: tuple[Any, ...]  # of the attribute, of the entry in what it holds, and so on

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
    """A number of Python's that steps count."""

    counted = (int, float)


class Growing(Entry):
    """A list to which steps append."""

    counted = (list,)


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


class PlaceUsedError(CaptureError):
    """A captured step computes with a list that it fills."""

    place: Growing  # where that is kept


class Filled(StandIn):
    """A list that is filled while a step is captured, and looked at by nobody."""

    def __init__(self, place: Growing) -> None:
        self.place = place
        self.added: list[Any] = []

    def refuse(self) -> NoReturn:
        observed = f"{self.place.name} is used at {CallSiteFinder().here().describe()}"
        error = PlaceUsedError(FILLED.rule, observed, FILLED.remedy)
        error.place = self.place
        raise error

    def now(self) -> Any:
        return self.place.now()

    def append(self, value: Any) -> None:
        self.added.append(value)

    def extend(self, values: Iterable[Any]) -> None:
        self.added.extend(values)

    def __iadd__(self, values: Iterable[Any]) -> Filled:  # type: ignore[override, misc]
        self.extend(values)
        return self


def _detached(value: Any) -> Any:
    """A value without history of autograd's, which no later step goes back through."""
    if isinstance(value, Tensor):
        history = value.requires_grad and not isinstance(value, Parameter)
        return value.detach() if history else value
    tensors = leaves_of(value, Tensor)
    return substitute(value, map(_detached, tensors)) if tensors else value


def signature_of(places: Sequence[Place]) -> tuple[Signature, list[Tensor]]:
    values = [_detached(place.now()) for place in places]
    return Signature.of(values, {}, names=[place.name for place in places])


class CapturedStores:
    """What captured code finds in places, and what it leaves there.

    What code reads is an input of the graph: a copy, over which it is captured. What it leaves is
    stored again by every replay: copies, so that nobody sees a later step in what he has kept.
    """

    def __init__(
        self, places: Sequence[Place], is_read: Callable[[Place], bool], module: nn.Module
    ) -> None:
        state = (*module.parameters(), *module.buffers())
        self._themselves = set(map(storage_address, state)) - {0}
        kept = [place for place in places if place.is_state()]
        # Numbers, and lists that are filled
        self._counted = [p for p in places if isinstance(p, Entry) and not p.is_state()]
        self._read = [place for place in kept if is_read(place)]
        self._unread = [place for place in kept if not is_read(place)]
        self.signature, tensors = signature_of(self._read)
        self._call = CallPlan(self.signature, check_modes=False)
        self._inputs = StaticInputs(tensors)
        own = [
            Parameter(own.detach(), own.requires_grad) if isinstance(given, Parameter) else own
            for own, given in zip(self._inputs.tensors, tensors, strict=True)
        ]
        self.own = own
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
        stand_ins = [
            Filled(place) if isinstance(place, Growing) else number(place.name, place.now)
            for place in self._counted
        ]
        self._given = [
            *zip(self._read, self._inside, strict=True),
            *zip(self._counted, stand_ins, strict=True),
            *((place, place.now()) for place in self._unread),
        ]
        before = [(place, place.now()) for place, _ in self._given]
        for place, value in self._given:
            place.put(value)
        try:
            yield
        finally:
            for place, value in reversed(before):
                place.put(value)

    def without_numbers(self, stores: Stores) -> Stores:
        """Without the numbers among them: those are stored here, and read by the next step."""
        mine = {(id(place.owner), place.keys) for place in self._counted}
        return tuple(s for s in stores if (id(s[0]), (s[1],)) not in mine)

    def look(self) -> None:
        """See what the code has left; what it stores after this is refused."""
        if any(tensor.grad is not None for tensor in self.own):
            name = self._read[0].name
            raise STORED.refused(f"a gradient reaches {name}, which the step sets")
        now = [place.now() for place, _ in self._given]
        if self._looked is not None:
            pairs = zip(self._given, now, self._looked, strict=True)
            later = [place.name for (place, _), a, b in pairs if not place.is_still(a, b)]
            if later:
                raise STORED.refused(f"{later[0]} is set after the forward pass")
            return
        self._looked = now
        rebound = set()
        for (place, given), value in zip(self._given, now, strict=True):
            is_still = place.is_still(value, given)
            if isinstance(given, Filled):
                if not is_still:
                    given.refuse()
                value, is_still = given.added, not given.added
            if not is_still:
                self._outgoing.append((place, value))
                rebound.add(id(place))
        self._plan_copies(rebound)

    def _plan_copies(self, rebound: set[int]) -> None:
        position = 0
        for place, inside in zip(self._read, self._inside, strict=True):
            for leaf in leaves_of(inside, Tensor):
                if id(place) not in rebound or version_of(leaf) != self._versions[position]:
                    self._written.append((leaf.detach(), position))
                position += 1
        sources: dict[str, list[Tensor]] = {"copy": [], "itself": []}
        self._slots: list[tuple[str, int]] = []
        known = {id(tensor): ("given", i) for i, tensor in enumerate(self.own)}
        for leaf in leaves_of([value for _, value in self._outgoing]):
            if isinstance(leaf, StandIn):
                leaf.now()  # or a refusal, where no replay has the value
            elif isinstance(leaf, Tensor):
                if id(leaf) not in known:
                    kind = "itself" if storage_address(leaf) in self._themselves else "copy"
                    known[id(leaf)] = kind, len(sources[kind])
                    sources[kind].append(leaf)
                self._slots.append(known[id(leaf)])
            elif not is_plain(leaf):
                raise STORED.refused(f"the step stores a {type(leaf).__qualname__}")
        self._parameters = [isinstance(leaf, Parameter) for leaf in sources["copy"]]
        self._copied = sources["copy"]
        self._sources = {kind: [leaf.detach() for leaf in sources[kind]] for kind in sources}
        self._outgoing = [(place, _detached(value)) for place, value in self._outgoing]

    def finish_capture(self) -> None:
        """Let go of the captured autograd graph, but for gradients."""
        self._gradients, self._copied = gradients_of(self._copied), []

    # ------------------------------------------------------------------ around a replay

    def take(self) -> bool:
        """Copy in what the places hold, if the graph is captured for such."""
        try:
            raw = [place.now() for place in self._read]
            others = [place.is_state() for place in self._counted]
        except (LookupError, TypeError):  # what holds it is something else by now
            return False
        tensors = self._call.match(list(map(_detached, raw)), {})
        if tensors is None or any(others):
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
        if not self._outgoing:
            return
        copies = clone_all(self._sources["copy"])
        copies = [
            Parameter(copy) if is_parameter else copy
            for copy, is_parameter in zip(copies, self._parameters, strict=True)
        ]
        owing += [(copies[i], gradient) for i, gradient in self._gradients]
        for place, value in [*self._built(copies)]:  # numbers follow from those of before
            if isinstance(place, Growing):
                place.now().extend(value)
            else:
                place.put(value)

    def _built(self, copies: Sequence[Tensor]) -> Iterator[tuple[Place, Any]]:
        sources = {**self._sources, "given": self._raw, "copy": copies}
        supply = iter([sources[kind][index] for kind, index in self._slots])
        for place, value in self._outgoing:
            yield place, present(substitute(value, supply))

    def results(self) -> list[Result]:
        """After a replay: what would be stored."""
        self.write_back()
        built = self._built(self._sources["copy"])
        return [result for place, value in built for result in _results(place, value)]

    def eager_results(self) -> Callable[[], list[Result]]:
        """Ahead of an eager step: what gives, after it, what it has stored where a replay does."""
        known = [(p, len(p.now()) if isinstance(p, Growing) else 0) for p, _ in self._outgoing]

        def results() -> list[Result]:
            pairs = ((p, p.now()[n:] if isinstance(p, Growing) else p.now()) for p, n in known)
            return [result for place, value in pairs for result in _results(place, value)]

        return results


def _results(place: Place, value: Any) -> list[Result]:
    return results_in(value, f"stored `{place.name}`")
