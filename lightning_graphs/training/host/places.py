"""Learns in which places the steps of a fit store something, or find something bound anew."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn

from lightning_graphs.core.arguments.contents import Change, Contents
from lightning_graphs.core.arguments.signature import Signature
from lightning_graphs.core.arguments.tree import leaves_of
from lightning_graphs.core.arguments.values import is_constant
from lightning_graphs.core.generators import Generators
from lightning_graphs.core.private.torch import is_strided
from lightning_graphs.errors import CaptureError
from lightning_graphs.exchange import Absence
from lightning_graphs.training.guards.frozen import StandIn
from lightning_graphs.training.guards.python_state import DRAWN, STORED, AttributeReads
from lightning_graphs.training.guards.walkers import held_in
from lightning_graphs.training.host.containers import (
    Entry,
    Memory,
    Number,
    Order,
    Place,
    is_container,
)
from lightning_graphs.training.host.stored import CapturedStores, signature_now


class LeftBehindError(CaptureError):
    """Code has left something behind."""


class Places:
    """The places of a fit in which steps store something, or which are bound anew between them.

    They are found where a capture leaves something behind, and where a tensor that graphs were
    captured over is another one.
    """

    def __init__(
        self, module: LightningModule, reads: AttributeReads, on_change: Callable[[], object]
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
        contents = Contents(held_in(self._module))
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

    def capturing(self) -> CapturedStores | None:
        """What a capture finds in these places, and leaves there; None if there are none."""
        if not self._places:
            return None
        while self.learn([*self._further_names()]):
            pass
        return CapturedStores([*self], self._is_read, self._module)

    def _further_names(self) -> Iterator[Entry]:
        """Where else the module holds what is in these places, and steps can change."""
        kept = [place.now() for place in self]
        shared = {id(value) for value in kept if is_container(value)}
        held = Contents(held_in(self._module)) if shared else Contents()
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
    return all(
        isinstance(leaf, (Tensor, StandIn)) or is_constant(leaf) for leaf in leaves_of(value)
    )


def place_of(change: Change, held: Contents, trained: Collection[int]) -> Entry | None:
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
