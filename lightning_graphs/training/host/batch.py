"""What a captured step does to containers of its batch, done by each replay to the real ones."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_graphs.core.arguments.buffers import storage_address
from lightning_graphs.core.arguments.contents import is_still, refill
from lightning_graphs.core.arguments.snapshot import Result, results_in
from lightning_graphs.core.arguments.tree import (
    MAPPINGS,
    item_label,
    leaves_of,
    open_container,
)
from lightning_graphs.core.arguments.values import attributes_of, is_constant, is_plain, slots_of
from lightning_graphs.core.private.torch import clone_all
from lightning_graphs.errors import CaptureError
from lightning_graphs.exchange import Absence, bind, bound
from lightning_graphs.training.guards.frozen import StandIn
from lightning_graphs.training.guards.own_batch import BATCH_CHANGED

_LISTS = (list, deque)


@dataclass(eq=False, slots=True)
class _Holder:
    """A container of a batch, or the attributes that one has beside its items."""

    name: str  # what messages call it
    parent: int  # the number of what holds it
    key: Any  # under which it is held there; None: these are attributes of its parent
    value: Any
    before: dict[Any, Any]  # what it holds ahead of the step

    @property
    def is_beside(self) -> bool:
        return self.key is None

    def content(self, value: Any) -> dict[Any, Any]:
        """What a container holds in the place of this one."""
        return _attributes(value) if self.is_beside else _items(value)

    def rewrite(self, value: Any, content: dict[Any, Any]) -> None:
        """Let a container hold this."""
        if not self.is_beside and isinstance(value, _LISTS):
            refill(value, list(content.values()))
        elif not self.is_beside and isinstance(value, MutableMapping):
            if isinstance(value, dict):
                refill(value, content)
                return
            value.clear()
            value.update(content)
        else:
            for key in {**_attributes(value), **content}:
                new = content.get(key, Absence.ABSENT)
                bind(value if key in slots_of(type(value)) else attributes_of(value), key, new)

    @property
    def is_rewritable(self) -> bool:
        kind = type(self.value)
        known = kind in (list, deque, *MAPPINGS) or kind not in pytree.SUPPORTED_NODES
        return known and not isinstance(self.value, tuple)


def _items(value: Any) -> dict[Any, Any]:
    if isinstance(value, MutableMapping):
        return {key: value[key] for key in value}
    if isinstance(value, (tuple, *_LISTS)):
        return dict(enumerate(value))
    opened = open_container(value)
    is_known = opened is not None and type(value) in pytree.SUPPORTED_NODES
    return dict(enumerate(opened.values)) if opened and is_known else _attributes(value)


def _attributes(value: Any) -> dict[Any, Any]:
    table = attributes_of(value)
    if isinstance(value, MutableMapping):  # "data" is that of a UserDict
        return {} if table is value else {k: v for k, v in table.items() if k != "data"}
    slots = {key: bound(value, key) for key in slots_of(type(value))}
    return {**table, **{k: v for k, v in slots.items() if v is not Absence.ABSENT}}


def _holders(value: Any) -> list[_Holder]:
    """Every container in a value, outer ones first."""
    found: list[_Holder] = []
    seen: set[int] = set()
    pending: list[tuple[str, int, Any, Any]] = [("batch", -1, 0, value)]
    for name, parent, key, held in pending:
        if isinstance(held, (Tensor, StandIn)) or id(held) in seen or open_container(held) is None:
            continue
        seen.add(id(held))
        number = len(found)
        found.append(_Holder(name, parent, key, held, _items(held)))
        is_object = not isinstance(held, (MutableMapping, tuple, *_LISTS))
        if isinstance(held, MutableMapping) and type(held).__dictoffset__:
            found.append(_Holder(name, number, None, held, _attributes(held)))
        for i, holder in enumerate(found[number:], number):
            for k, inside in holder.before.items():
                label = f".{k}" if is_object or holder.is_beside else item_label(k)
                pending.append((name + label, i, k, inside))
    return found


class BatchChanges:
    """Rewrites the containers of a batch as the captured step has rewritten those of its own.

    What it has put there is copied for each batch: with tensors of the replay in the place of
    those that it has computed, and what is in the batch itself where that was moved.
    """

    def __init__(self, own: Any, state: Iterable[Tensor] = ()) -> None:
        """Look at the batch of a capture, ahead of it.

        Args:
            own: The batch.
            state: Parameters and buffers, which are put there themselves.
        """
        self._batch = own
        self._holders = _holders(own)
        self._state = {id(tensor): tensor for tensor in state}
        self._themselves = set(map(storage_address, self._state.values())) - {0}
        self._known = {id(v) for h in self._holders for v in h.before.values() if not is_plain(v)}
        self._known.add(id(own))
        self._rewritten: list[tuple[int, dict[Any, Any]]] = []
        self._tensors: list[Tensor] = []  # those that the step has put there
        self._live: list[StandIn] = []
        self._looked = False

    def look(self) -> None:
        """See what the step has done; what it does after this is refused."""
        now = [(i, h.content(h.value)) for i, h in enumerate(self._holders)]
        changed = [(i, content) for i, content in now if _differ(self._holders[i].before, content)]
        if self._looked:
            same = len(changed) == len(self._rewritten) and all(
                i == j and not _differ(a, b)
                for (i, a), (j, b) in zip(changed, self._rewritten, strict=True)
            )
            if not same:
                raise _refused("batch after its forward pass")
            return
        self._looked, self._rewritten = True, changed
        for i, content in changed:
            holder = self._holders[i]
            if not (holder.is_beside or holder.is_rewritable):
                raise _refused(f"{holder.name}, a {type(holder.value).__qualname__}")
            for key, value in content.items():
                self._look_at(f"{holder.name}{item_label(key)}", value)
        detached = {id(tensor): tensor.detach() for tensor in self._tensors}
        self._sources = [detached[id(tensor)] for tensor in self._tensors]
        places = list(map(storage_address, self._tensors))
        # All but parameters and buffers, which are put there themselves
        self._own = [i for i, at in enumerate(places) if at not in self._themselves]

    def _look_at(self, name: str, value: Any) -> None:
        if id(value) in self._known:
            return
        for leaf in leaves_of(value):
            if id(leaf) in self._known:
                continue
            if isinstance(leaf, StandIn):
                leaf.now()  # or a refusal, where no replay has the value
                self._live.append(leaf)
            elif isinstance(leaf, Tensor):
                if all(leaf is not tensor for tensor in self._tensors):
                    self._tensors.append(leaf)
            elif not is_constant(leaf):
                raise _refused(f"{name}, where it puts a {type(leaf).__qualname__}")

    @property
    def are_none(self) -> bool:
        return not self._rewritten

    @property
    def name(self) -> str:
        """The first container that is changed."""
        return self._holders[self._rewritten[0][0]].name

    def apply(self, batch: Any, *, copies: bool = True) -> None:
        """After a replay: change the containers of its batch."""
        memo: dict[int, Any] = {id(self._batch): batch}
        found: list[Any] = []
        for holder in self._holders:
            if holder.parent < 0 or holder.is_beside:
                real = batch if holder.parent < 0 else found[holder.parent]
            else:
                parent = self._holders[holder.parent]
                real = parent.content(found[holder.parent])[holder.key]
            found.append(real)
            now = holder.content(real)
            pairs = ((k, v) for k, v in holder.before.items() if id(v) in self._known and k in now)
            memo.update((id(v), now[k]) for k, v in pairs)
        sources = dict(enumerate(self._sources))
        if copies:
            cloned = clone_all([self._sources[i] for i in self._own])
            sources.update(zip(self._own, cloned, strict=True))
        for i, tensor in enumerate(self._tensors):
            memo[id(tensor)] = self._state.get(id(tensor), sources[i])
        memo.update((id(stand_in), stand_in.now()) for stand_in in self._live)
        rewritten = [
            (self._holders[i], found[i], self._copied(i, content, found[i], memo))
            for i, content in self._rewritten
        ]
        for holder, real, content in rewritten:
            holder.rewrite(real, content)

    def _copied(self, i: int, content: Any, real: Any, memo: dict[int, Any]) -> dict[Any, Any]:
        """What a container of a batch is to hold: what is the same stays."""
        holder = self._holders[i]
        now, before = holder.content(real), holder.before
        stays = {k for k, v in content.items() if k in now and k in before and v is before[k]}
        return {k: now[k] if k in stays else copy.deepcopy(v, memo) for k, v in content.items()}


def _differ(before: dict[Any, Any], now: dict[Any, Any]) -> bool:
    if list(before) != list(now):
        return True
    return not all(is_still(value, before[key]) for key, value in now.items())


def _refused(observed: str) -> CaptureError:
    return BATCH_CHANGED.refused(f"training_step changes {observed}")


def new_results(batch: Any, known: Sequence[Tensor]) -> Iterator[Result]:
    """What is in a batch after a step, but for the tensors that it has had."""
    had = set(map(id, known))
    for holder in _holders(batch):
        for key, value in holder.before.items():
            if isinstance(value, Tensor) and id(value) not in had:
                yield from results_in(value, holder.name + item_label(key))
