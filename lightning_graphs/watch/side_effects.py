"""Side effects of captured code on Python objects: recorded, and applied by each replay."""

from __future__ import annotations

import contextlib
import copy
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from types import CodeType
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn
from torch.nn import Parameter

from lightning_graphs.autograd.graphed import Stores
from lightning_graphs.device.rules import BATCH_CHANGED, FILLED, STORED
from lightning_graphs.device.trace import OperatorCall, OperatorsSeen
from lightning_graphs.errors import CaptureError, stop
from lightning_graphs.private.callsite import LIBRARIES, names_global
from lightning_graphs.private.exchange import replaced
from lightning_graphs.private.torch import (
    PLAIN_TENSORS,
    has_memory,
    is_strided,
    memory_of,
    storage_reference,
    storage_uses,
    version_of,
)
from lightning_graphs.values.guards import is_constant, is_plain
from lightning_graphs.values.memory import (
    Owing,
    StaticInputs,
    addresses_of,
    clone_all,
    gradients_of,
    storage_address,
)
from lightning_graphs.values.signature import CallPlan
from lightning_graphs.values.snapshot import Result, results_in
from lightning_graphs.values.tree import item_label, leaves_of, substitute
from lightning_graphs.watch.batch import Holder, holders_in, new_results
from lightning_graphs.watch.filled import (
    LateList,
    ListAppend,
    PlaceUsedError,
    Recorder,
    functions_followed,
    perform,
)
from lightning_graphs.watch.forms import MakeNumber
from lightning_graphs.watch.late import LateValue
from lightning_graphs.watch.mechanism import Mechanism
from lightning_graphs.watch.places import (
    Arranged,
    Entry,
    Order,
    Place,
    State,
    depth_of,
    detached,
    is_container,
    is_same_content,
    signature_of,
)
from lightning_graphs.watch.tracers import LateTracer, Tracer
from lightning_graphs.watch.user_code import UserCode


class CopiedOut:
    """Builds, for each replay, new values for the side effects of a captured step.

    Tensors are copies, so that no later replay shows in them; parameters, buffers and what has
    their memory are themselves. Tracers give their present values.
    """

    def __init__(self, state: Iterable[Tensor]) -> None:
        known = list(state)
        self._state, self._own = set(map(id, known)), addresses_of(known)
        self._themselves: dict[int, Any] = {}  # those that the step stores
        self._copied: list[Tensor] = []  # with their history
        self.sources: list[Tensor] = []  # without it
        self._gradients: list[tuple[int, Tensor]] = []  # of tensors with ``retain_grad``
        self._tracers: list[Tracer] = []

    def of(self, value: Any, known: dict[int, Any], refused: Callable[[Any], CaptureError]) -> Any:
        """Copy a value without autograd history; :meth:`memo` belongs to the copy.

        Args:
            value: What the captured step leaves.
            known: Objects by their ``id``: those of which each replay has its own, with
                themselves, and those that were met before, with what became of them.
            refused: Gives the error for an object that no replay can leave.
        """
        for leaf in leaves_of(value):
            if id(leaf) in known:
                continue
            if isinstance(leaf, Tracer):
                if isinstance(leaf, LateTracer):  # a replay has its value later
                    leaf.refuse()
                self._tracers.append(leaf)
                known[id(leaf)] = leaf
            elif isinstance(leaf, Tensor):
                known[id(leaf)] = self._met(leaf)
            elif not is_constant(leaf):
                stop(refused(leaf))
        return copy.deepcopy(value, known)

    def _met(self, tensor: Tensor) -> Tensor:
        source = tensor if id(tensor) in self._state else tensor.detach()
        if storage_address(tensor) in self._own:
            self._themselves[id(source)] = source
        else:
            self._copied.append(tensor)
            self.sources.append(source)
        return source

    def finish_capture(self) -> None:
        """Let go of the captured autograd graph, but for gradients."""
        self._parameters = [isinstance(tensor, Parameter) for tensor in self._copied]
        self._gradients, self._copied = gradients_of(self._copied), []

    def memo(self, owing: Owing, *, copies: bool) -> dict[int, Any]:
        """Return the memo by which ``copy.deepcopy`` makes the values of a replay."""
        found = self.sources
        if copies and found:
            pairs = zip(clone_all(found), self._parameters, strict=True)
            found = [Parameter(copied) if is_one else copied for copied, is_one in pairs]
            owing += [(found[i], gradient) for i, gradient in self._gradients]
        memo: dict[int, Any] = dict(self._themselves)
        memo.update(zip(map(id, self.sources), found, strict=True))
        memo.update((id(tracer), tracer.now()) for tracer in self._tracers)
        return memo


@dataclass(eq=False, slots=True)
class _Effect:
    """Side effect of a step on a place, or on a container of its batch."""

    place: Place
    # "fill" what is there, by operations; "refill" it, with a content; or "bind" another value
    how: str
    value: Any
    then: Mapping[Any, Any] = field(default_factory=dict)  # the content before, by its keys

    @classmethod
    def inside(cls, place: Place, given: Any, content: Any, then: Any) -> _Effect:
        """Find the side effect on a place's value, given its contents before and after."""
        if isinstance(given, ListAppend):
            return cls(place, "fill", given.operations)
        return cls(place, "refill", content, then if isinstance(then, dict) else {})

    @property
    def is_compared(self) -> bool:
        """Whether the value shows the result of the effect: no list in it is filled as well.

        What a call that is kept back gives is not there where graphs are compared.
        """
        if isinstance(self.place, Holder) or leaves_of(self.value, LateValue):
            return False
        return self.how == "fill" or not leaves_of(self.value, ListAppend)

    def detach(self, copies: CopiedOut, known: dict[int, Any]) -> None:
        """Let the value hold only what replays need; see :meth:`CopiedOut.of`."""
        if not (self.how == "refill" and isinstance(self.value, dict)):
            self.value = copies.of(self.value, known, partial(_refused, self.place, None))
            return
        known.update((id(v), v) for v in self.then.values() if not is_plain(v))
        self.value = {
            key: value
            if value is self.then.get(key, known)  # it stays
            else copies.of(value, known, partial(_refused, self.place, key))
            for key, value in self.value.items()
        }

    def built(self, before: Any, memo: dict[int, Any]) -> Any:
        """The value of one replay, of :meth:`CopiedOut.memo`."""
        if not self.then:
            return copy.deepcopy(self.value, memo)
        now = self.place.content(before)
        memo.update((id(v), now[k]) for k, v in self.then.items() if k in now and not is_plain(v))
        stays = {k for k, v in self.then.items() if k in now and v is self.value.get(k, memo)}
        built = copy.deepcopy({k: v for k, v in self.value.items() if k not in stays}, memo)
        return {k: now[k] if k in stays else built[k] for k in self.value}

    def apply(self, before: Any, value: Any) -> Any:
        """Do it where this was in the place before; what is there now."""
        if self.how == "bind":
            self.place.put(value)
            return value
        if self.how == "fill":
            perform(value, before)
        else:
            self.place.refill(before, value)
        return before

    def outcome(self, before: Any, value: Any) -> Any:
        """Return what applying it would add."""
        if self.how == "bind":
            return value
        return self.new_in(self.apply(copy.copy(before), value), list(before))

    def new_in(self, now: Any, before: Sequence[Any]) -> Any:
        """Return the new parts of this; ``before`` was there."""
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
    """The inputs that captured code reads in places, and its side effects there and on its batch.

    A value that code reads in a place is an input of the graph, captured over a copy. Every replay
    applies the side effects again; see :class:`CopiedOut`.
    """

    def __init__(
        self,
        places: Collection[Place] = (),
        is_read: Callable[[Place], bool] = lambda _: True,
        state: Iterable[Tensor] = (),  # parameters and buffers
        batch: Any = None,  # of the captured code, which may change its containers
    ) -> None:
        self._copies = CopiedOut(state)
        found, self._is_read = Arranged(places), is_read
        self._filled, self._late, self._counted = found.filled, found.late, found.counted
        self._states = [State(place, found.all) for place in found.stored if is_read(place)]
        self._unread = [place for place in found.stored if not is_read(place)]
        self._types = [(p, type(p.now())) for p in (*self._filled, *self._late, *self._counted)]
        signature, tensors = signature_of(self._states)
        self.signature = (signature,) if places else ()
        self._call = CallPlan(signature, check_modes=False)
        self._inputs = StaticInputs(tensors)
        own = [
            Parameter(own.detach(), own.requires_grad) if isinstance(given, Parameter) else own
            for own, given in zip(self._inputs.tensors, tensors, strict=True)
        ]
        self.own = own
        self._versions = list(map(version_of, own))
        supply = iter(own)
        values = [state.now() for state in self._states]
        inside = (substitute(value, supply) for value in values)
        self._inside = [copy.copy(value) if isinstance(value, set) else value for value in inside]
        self._leaves = [
            (state.place, leaf)
            for state, inside in zip(self._states, self._inside, strict=True)
            for leaf in leaves_of(inside, Tensor)
        ]
        self._contained = [*(s.place for s in self._states), *self._filled]
        self._same = _sameness([place.now() for place in self._contained])
        self._batch, self._holders = batch, holders_in(batch)
        self._effects: list[_Effect] = []
        self._in_batch: list[_Effect] = []
        self._written: list[tuple[Tensor, int]] = []
        self._given: list[tuple[Place, Any]] = [(holder, holder.value) for holder in self._holders]
        self._contents = [place.content(given) for place, given in self._given]
        self._looked: list[tuple[Any, Any]] | None = None
        self._raw: list[Tensor] = [*tensors]

    # ------------------------------------------------------------------ while it is captured

    @contextlib.contextmanager
    def exchanged(
        self,
        number: MakeNumber,
        recorder: Recorder,
        own: UserCode,
    ) -> Iterator[None]:
        """While the body, a capture, runs, places hold what the graph is to read.

        Args:
            number: Makes the tracer for a number.
            recorder: Keeps back what user code computes with a list.
            own: The user code of the fit, which may ask for the length of a list.
        """
        inside = [*self._inside, *(ListAppend(place, number) for place in self._filled)]
        shared = [inside[i if first < 0 else first] for i, first in enumerate(self._same)]
        given = [*zip(self._contained, shared, strict=True)]
        given += [(place, place.now()) for place in self._unread]
        given.sort(key=lambda pair: depth_of(pair[0]))
        given += [(place, number(place.name, place.now)) for place in self._counted]
        given += [(p, LateList(p, number, recorder, own.runs_in).tracer) for p in self._late]
        lists = self._filled or self._late
        before = [(place, place.now()) for place, _ in given]
        self._given += given
        self._contents += [place.content(value) for place, value in given]
        for place, value in given:
            place.put(value)
        try:
            with functions_followed(own.modules()) if lists else contextlib.nullcontext():
                yield
        finally:
            for place, value in reversed(before):
                place.put(value)

    def without_places(self, stores: Stores) -> Stores:
        """Drop what this step stores in places: it is not the same in each step."""
        found = (place for place, _ in self._given if isinstance(place, Entry))
        mine = {(id(place.owner), place.keys) for place in found}
        return tuple(s for s in stores if (id(s[0]), (s[1],)) not in mine)

    def look(self, adopt: Callable[[], Sequence[tuple[Place, Any]]] = tuple) -> None:
        """Record the side effects so far; later ones are refused.

        The first time, ``adopt`` gives further places that the code has stored to, and not read,
        with what they held.
        """
        if any(tensor.grad is not None for tensor in self.own):
            name = self._states[0].place.name
            raise STORED.refused(f"a gradient reaches {name}, which the step sets")
        if self._looked is None:
            for place in filter(self._is_read, self._unread):  # no capture had come so far before
                error = PlaceUsedError(FILLED.rule, f"{place.name} is used", FILLED.remedy)
                error.place = place
                raise error
            self._add_unread(adopt())
        now = [(place.now(), place.content(given)) for place, given in self._given]
        if self._looked is not None:
            for (place, _), at_end, then in zip(self._given, now, self._looked, strict=True):
                if not (place.is_still(at_end[0], then[0]) and is_same_content(at_end[1], then[1])):
                    if isinstance(place, Holder):
                        raise _changed("batch after its forward pass")
                    raise STORED.refused(f"{place.name} is set after the forward pass")
            return
        self._looked = now
        bound: list[_Effect] = []
        inside: list[_Effect] = []
        seen: set[int] = set()
        rows = zip(self._given, now, self._contents, strict=True)
        for (place, given), (value, content), then in rows:
            if not place.is_still(value, given):
                bound.append(_Effect(place, "bind", value))
            container = id(place) if isinstance(place, Holder) else id(given)
            if container in seen or is_same_content(content, then):
                seen.add(container)
                continue
            seen.add(container)
            if place in self._unread:
                raise STORED.refused(f"{place.name} is changed by another name")
            if isinstance(place, Holder) and not place.is_rewritable:
                raise _changed(f"{place.name}, a {type(given).__qualname__}")
            inside.append(_Effect.inside(place, given, content, then))
        bound = [effect for effect in bound if not _is_part(effect.place, bound)]
        self._effects = [*inside, *sorted(bound, key=_rank)]
        self._find_written({id(effect.place) for effect in self._effects})
        held = [value for holder in self._holders for value in holder.before.values()]
        of_batch = {id(value): value for value in (self._batch, *held) if not is_plain(value)}
        self._had, of_places = set(of_batch), {id(tensor): tensor for tensor in self.own}
        self._in_batch = [e for e in self._effects if isinstance(e.place, Holder)]
        for effect in self._effects:
            known = of_batch if isinstance(effect.place, Holder) else of_places
            effect.detach(self._copies, known)

    def _add_unread(self, adopted: Sequence[tuple[Place, Any]]) -> None:
        if adopted and not self.signature:
            self.signature = (signature_of([])[0],)
        self._given += adopted
        self._contents += [place.content(before) for place, before in adopted]
        self._unread += [place for place, _ in adopted]

    def _find_written(self, changed: set[int]) -> None:
        """Find tensors that are written in place."""
        single = {id(p) for i, p in enumerate(self._contained) if self._same[i] in (-1, i)}
        for position, (place, leaf) in enumerate(self._leaves):
            is_written = version_of(leaf) != self._versions[position]
            if id(place) in single and (id(place) not in changed or is_written):
                self._written.append((leaf.detach(), position))

    @property
    def inputs(self) -> list[tuple[Tensor, Tensor]]:
        """Pair the tensors in places with those that captured code finds there."""
        return [*zip(self._raw, self.own, strict=True)]

    @property
    def is_needed(self) -> bool:
        """Return whether a replay has side effects on places or on its batch."""
        return bool(self._contained or self._types or self._effects)

    def refuse_untouched(self, codes: Iterable[CodeType]) -> None:
        """Refuse lists that other steps fill, if this one asks for types, by the code of it."""
        untouched = [g for _, g in self._given if isinstance(g, ListAppend) and not g.operations]
        if untouched and any(names_global(code, "type") for code in codes):
            untouched[0].refuse()

    @property
    def left(self) -> Sequence[Tensor]:
        """The tensors that the captured step has left in places, and that are copied out."""
        return self._copies.sources

    def finish_capture(self) -> None:
        """Let go of the captured autograd graph, but for gradients."""
        self._copies.finish_capture()

    # ------------------------------------------------------------------ around a replay

    def mechanism(self, present: Any) -> Mechanism:
        """Return what a plan takes in and stores; ``present`` as in :meth:`store`."""
        if not self.is_needed:
            return Mechanism(key=self.signature)
        store = partial(self.store, present)
        return Mechanism(key=self.signature, takes=(self.take,), after=(store,))

    def take(self, _: object = None) -> bool:
        """Copy in the present values of places; return whether the graph fits them."""
        try:
            raw = [state.now() for state in self._states]
            others = any(type(place.now()) is not kind for place, kind in self._types)
            contained = [place.now() for place in self._contained]
            if others or (len(contained) > 1 and _sameness(contained) != self._same):
                return False
        except (LookupError, TypeError):  # what holds it is something else by now
            return False
        tensors = self._call.match(list(map(detached, raw)), {})
        if tensors is None:
            return False
        self._raw = leaves_of(raw, Tensor)
        self._inputs.copy_in(tensors)
        return True

    def write_back(self) -> None:
        """After a replay, copy in-place writes back to the tensors in their places."""
        if self._written:
            targets = [self._raw[position] for _, position in self._written]
            with torch.inference_mode():  # eager steps may have made some of them in it
                torch._foreach_copy_(targets, [own for own, _ in self._written])

    @property
    def written(self) -> dict[str, Tensor]:
        return {f"of a place {i}": self._raw[i] for _, i in self._written}

    def store(self, present: Any) -> None:
        """Apply the side effects after a replay; ``present`` has its batch and ``owing``."""
        self.write_back()
        if self._effects:
            self._apply(self._effects, present.owing, present.batch, copies=present.copies)

    def _apply(self, effects: Sequence[_Effect], owing: Owing, batch: Any, *, copies: bool) -> None:
        built = self._built(effects, self._copies.memo(owing, copies=copies), batch)
        for effect, before, value in [*built]:  # numbers follow from those of before
            effect.apply(before, value)

    def _built(
        self, effects: Iterable[_Effect], memo: dict[int, Any], batch: Any = None
    ) -> Iterator[tuple[_Effect, Any, Any]]:
        """List each effect with the value in its place and its value of this replay."""
        memo.update(zip(map(id, self.own), self._raw, strict=True))
        found = self._found_in(batch, memo) if self._in_batch and batch is not None else {}
        for effect in effects:
            place = effect.place
            before = found[id(place)] if isinstance(place, Holder) else place.now()
            yield effect, before, effect.built(before, memo)

    def _found_in(self, batch: Any, memo: dict[int, Any]) -> dict[int, Any]:
        """Find another batch's containers; the memo maps those of the captured one to them."""
        found: list[Any] = []
        memo[id(self._batch)] = batch
        for holder in self._holders:
            real = batch if holder.parent < 0 else found[holder.parent]
            if holder.parent >= 0 and not holder.is_beside:
                real = self._holders[holder.parent].content(real)[holder.key]
            found.append(real)
            now = holder.content(real)
            pairs = ((k, v) for k, v in holder.before.items() if id(v) in self._had and k in now)
            memo.update((id(v), now[k]) for k, v in pairs)
        return dict(zip(map(id, self._holders), found, strict=True))

    def results(self, batch: Any, tensors: Sequence[Tensor]) -> list[Result]:
        """Return, after a replay, what its side effects store, also in a copy of this batch."""
        self.write_back()
        compared = [effect for effect in self._effects if effect.is_compared]
        built = [*self._built(compared, self._copies.memo([], copies=False))]
        found = [r for e, was, value in built for r in _results(e.place, e.outcome(was, value))]
        if self._in_batch:
            own = StaticInputs(tensors).tensors
            changed = substitute(batch, own)
            self._apply(self._in_batch, [], changed, copies=False)
            found += new_results(changed, own)
        return found

    def eager_results(self, batch: Any, had: Sequence[Tensor]) -> Callable[[], list[Result]]:
        """Return, ahead of an eager step, a reader of what it stores in a replay's places."""
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
            return [*found, *(new_results(batch, had) if self._in_batch else ())]

        return results


def _sameness(values: Sequence[Any]) -> list[int]:
    """Map each container to the first one that is identical to it."""
    first: dict[int, int] = {}
    opened = (id(v) if is_container(v) else None for v in values)
    return [-1 if key is None else first.setdefault(key, i) for i, key in enumerate(opened)]


def _changed(observed: str) -> CaptureError:
    return BATCH_CHANGED.refused(f"{LIBRARIES.step} changes {observed}")


def _refused(place: Place, key: Any, leaf: Any) -> CaptureError:
    """Return the error for an object that a step stores and no replay can make again."""
    kind = type(leaf).__qualname__
    if isinstance(place, Holder):
        return _changed(f"{place.name}{item_label(key)}, where it puts a {kind}")
    return STORED.refused(f"the step stores a {kind}")


def _is_part(place: Place, bound: Iterable[_Effect]) -> bool:
    """Return whether a place is inside of another place's new value, which includes it."""
    others = (effect.place for effect in bound if effect.place is not place)
    return isinstance(place, Entry) and any(place.path_in(o) is not None for o in others)


def _rank(effect: _Effect) -> int:
    """Rank new keys by their order in the dict, and an effect on the order itself last."""
    place = effect.place
    if isinstance(place, Order):
        return sys.maxsize
    if not (isinstance(place, Entry) and isinstance(place.holder, dict)):
        return 0
    return {key: i for i, key in enumerate(place.holder)}.get(place.keys[-1], 0)


def _results(place: Place, value: Any) -> list[Result]:
    return results_in(value, f"stored `{place.name}`")


# ------------------ The data of parameters


class SetData:
    """Sets ``parameter.data`` in place where captured code sets it, for what optimizers step.

    Graphs need the memory of these where it is, so values are copied there. That is the same as
    long as nothing else refers to the memory that would have been left, or uses the other. A value
    that is kept gets the memory of the parameter, as an eager step would leave them (SAM).

    Args:
        parameters: Those that optimizers step.
        module: Its other parameters, and buffers, may share memory with them.
        loose: So may tensors that it holds in attributes.
        copies: Tensors in places, with what the code finds there; it may not use those of a
            parameter's memory.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        module: nn.Module,
        loose: Iterable[Tensor],
        copies: Iterable[tuple[Tensor, Tensor]] = (),
    ) -> None:
        own = {p for p in parameters if isinstance(p, Parameter) and p.requires_grad}
        tensors = {*own, *module.parameters(), *module.buffers(), *loose}
        trained = {memory_of(p) for p in own if has_memory(p)}
        found = [(t, copy) for t, copy in copies if has_memory(t) and has_memory(copy)]
        kept = [(t, copy) for t, copy in found if t not in own]
        self._copies = {memory_of(copy) for t, copy in kept if memory_of(t) in trained}
        self._known = {memory_of(t) for t in (*tensors, *chain(*found)) if has_memory(t)}
        tensors -= {t for t, _ in found} - own
        sharing = Counter(memory_of(t) for t in tensors if has_memory(t))
        self._own = [
            p for p in own if is_strided(p) and sharing[memory_of(p)] == 1 and _is_whole(p)
        ]
        self._uses: dict[int, int] = {}  # of the memory of each, as the code begins
        # What parameters were set to: whether it is alive, by the identity of its memory
        self._given: dict[int, Callable[[], UntypedStorage | None]] = {}
        self._watch = contextlib.ExitStack()
        self._is_used = False

    @contextlib.contextmanager
    def setting(self) -> Iterator[None]:
        """Do so in the body; refuse there what uses the memory that a parameter was set to."""
        data: Any = Tensor.data
        self._given.clear()
        self._uses = {id(p): storage_uses(p.untyped_storage()) for p in self._own}

        def write(parameter: Any, value: Any) -> None:
            if not self._take(parameter, data.__get__(parameter), value):
                data.__set__(parameter, value)

        copies = OperatorsSeen(self._see_copies) if self._copies else contextlib.nullcontext()
        with replaced(Parameter, "data", property(data.__get__, write)), copies, self._watch:
            yield

    def mechanism(self) -> Mechanism | None:
        """Let a verification's eager step set them in place, too, if the step does so."""
        return Mechanism(repeated=self.setting) if self._is_used else None

    def refuse_kept(self, kept: Iterable[Tensor]) -> None:
        """Refuse a step that leaves, or returns, what it has set parameters to."""
        if any(self._is_given(tensor) for tensor in (kept if self._given else ())):
            raise STORED.refused(
                f"{LIBRARIES.step} keeps what it has set `.data` of a parameter to"
            )

    def _take(self, parameter: Any, now: Tensor, value: Any) -> bool:
        """Copy a value to a parameter; False if that is not the same as setting its data."""
        uses = self._uses.get(id(parameter))
        if uses is None or type(value) not in PLAIN_TENSORS or not is_strided(value):
            return False
        kind = [(t.dtype, t.device, t.shape, t.stride()) for t in (now, value)]
        if kind[0] != kind[1]:
            return False
        if memory_of(value) == memory_of(now):
            return bool(value.data_ptr() == now.data_ptr())
        if storage_uses(now.untyped_storage()) > uses + 1:  # by the name here
            return False
        if not self._is_used:
            self._watch.enter_context(OperatorsSeen(self._see))
        self._is_used = True
        with torch.no_grad():
            now.copy_(value)
        self._given[memory_of(value)] = storage_reference(value.untyped_storage())
        if type(value) is Tensor and memory_of(value) not in self._known:
            value.data = now
        return True

    def _see(self, call: OperatorCall, _: Any) -> None:
        if any(map(self._is_given, call.inputs)):
            STORED.stop_here("what `.data` of a parameter was set to is used")

    def _see_copies(self, call: OperatorCall, _: Any) -> None:
        if any(memory_of(t) in self._copies for t in call.inputs if has_memory(t)):
            STORED.stop_here("what has the memory of a parameter is used")

    def _is_given(self, tensor: Tensor) -> bool:
        alive = self._given.get(memory_of(tensor)) if has_memory(tensor) else None
        return alive is not None and alive() is not None


def _is_whole(parameter: Tensor) -> bool:
    """Return whether a parameter has all of its memory, and no flat one has it."""
    return parameter.untyped_storage().nbytes() == parameter.nbytes
