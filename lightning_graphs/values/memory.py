"""Memory of a graph: static inputs, guarded addresses, outputs that are handed out or bound.

All is prepared at capture; a replay costs one fused copy and one comparison of lists.
"""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from itertools import chain
from operator import add, attrgetter, getitem, is_, itemgetter
from sys import getrefcount
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from lightning_graphs.errors import CaptureError, ReplayError
from lightning_graphs.private.exchange import Absence, bind
from lightning_graphs.private.torch import (
    PLAIN_TENSORS,
    foreach_clone,
    has_memory,
    is_strided,
    named_modules_in,
    of_class,
    parts_of,
    plain,
    pointers_equal,
    storage_uses,
    tables_of,
    tensor_uses,
    uses_at,
    version_of,
)
from lightning_graphs.values.guards import is_plain
from lightning_graphs.values.tree import alias_groups, named_leaves, substitute

REQUIRES_GRAD = attrgetter("requires_grad")
GRADIENT = attrgetter("grad")
_STORAGE, _BEGIN = Tensor.untyped_storage, torch.UntypedStorage.data_ptr


def copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy tensors of one device and dtype; a single one at half the price of a foreach call."""
    if len(targets) == 1:
        targets[0].copy_(sources[0])
    else:
        torch._foreach_copy_(targets, sources)


def clone_all(tensors: list[Tensor]) -> list[Tensor]:
    """Copies of all tensors; a few are copied one by one, at half the price of a foreach call.

    So are tensors of further classes: a foreach call would give all copies one class.
    """
    if len(tensors) < 3 or not PLAIN_TENSORS.issuperset(map(type, tensors)):
        return [tensor.clone() for tensor in tensors]
    if foreach_clone is not None:
        return list(foreach_clone(tensors))
    copies = [torch.empty_like(tensor) for tensor in tensors]
    torch._foreach_copy_(copies, tensors)
    return copies


class StaticInputs:
    """Static buffers for the tensor leaves of a call, and the copy into them.

    Every buffer has its leaf's class, shape, strides, dtype and ``requires_grad``; expanded and
    overlapping layouts are kept, so that kernels see what they saw. Aliased leaves share one.
    Construct it outside of a capture, on the stream that will copy.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],  # copied, never kept
        # Buffers that exist already, by the index of their leaf
        given: Mapping[int, Tensor] = MappingProxyType({}),
    ) -> None:
        firsts = alias_groups(tensors)
        # A buffer made under inference mode could not be written outside of it.
        with torch.inference_mode(False), torch.no_grad():
            own = {
                i: given[i].detach() if i in given else empty_as(tensors[i])
                for i in sorted(set(firsts))
            }
            spans = {i: overlap_span(b) for i, b in own.items() if b.numel()}
            # By themselves for autograd: a capture may write results in place into the buffers
            targets = {i: linear(own[i], n) if n else own[i].detach() for i, n in spans.items()}
        self._every = _CopyPlan(own, targets)
        missing = {i: buffer for i, buffer in targets.items() if i not in given}
        self._own = _CopyPlan(own, missing) if given else self._every
        self._differentiable = any(map(REQUIRES_GRAD, tensors))
        # Given buffers hold their values, and autograd may count writes to them.
        self.copy_in([own[i] if i in given else tensor for i, tensor in enumerate(tensors)])
        for i, buffer in own.items():
            if type(tensors[i]) not in PLAIN_TENSORS and i not in given:
                own[i] = of_class(type(tensors[i]), buffer)
            own[i].requires_grad_(tensors[i].requires_grad)
        self.tensors = [own[first] for first in firsts]

    def copy_in(self, tensors: Sequence[Tensor], *, given: bool = True) -> None:
        """Copy the leaves of a call into the buffers, one foreach call for each kind of leaf.

        The leaves must have the specs and aliases of those at construction: nothing is checked
        here. A leaf that already is its buffer costs no copy; one that lies in another buffer is
        read before that buffer is overwritten.
        """
        plan = self._every if given else self._own
        if not plan.targets:
            return
        if self._differentiable and torch.is_grad_enabled():
            with torch.no_grad():
                plan.copy(tensors)
        else:
            plan.copy(tensors)


class _CopyPlan:
    def __init__(self, buffers: Mapping[int, Tensor], memory: Mapping[int, Tensor]) -> None:
        # A foreach call with one tensor of another kind among them copies all of them one by one.
        kinds: dict[tuple[Any, ...], list[int]] = defaultdict(list)
        for i, target in memory.items():
            dense = extent(target) == target.numel()
            kinds[target.device, target.dtype, dense].append(i)
        self._leaves: list[int] = []
        self._groups: list[tuple[slice, list[Tensor]]] = []
        for group in kinds.values():
            part = slice(len(self._leaves), len(self._leaves) + len(group))
            self._groups.append((part, [memory[i] for i in group]))
            self._leaves += group
        self.targets = targets = [memory[i] for i in self._leaves]
        overlapping = (k for k, i in enumerate(self._leaves) if memory[i].shape != buffers[i].shape)
        self._spans = [(k, targets[k].numel()) for k in overlapping]
        self._storages = frozenset(t.untyped_storage().data_ptr() for t in targets)

    def copy(self, tensors: Sequence[Tensor]) -> None:
        sources = [*map(tensors.__getitem__, self._leaves)]
        for k, span in self._spans:
            sources[k] = linear(sources[k], span)
        if not self._storages.isdisjoint(map(_BEGIN, map(_STORAGE, sources))):
            # Some lie in our own buffers, at their places or at others.
            pairs = zip(sources, self.targets, strict=True)
            pending = [
                (s.clone() if s.untyped_storage().data_ptr() in self._storages else s, t)
                for s, t in pairs
                if s.data_ptr() != t.data_ptr()
            ]
            for source, target in pending:
                target.copy_(source)
            return
        for part, targets in self._groups:
            copy_all(targets, sources[part])


_Move = tuple[str, Mapping[str, Any] | None, str, Tensor]


class AddressGuard:
    """Guard on tensors that a graph was captured over: objects, memory and layout, not values."""

    def __init__(
        self, tables: list[tuple[str, Mapping[str, Any]]], unmoved: Collection[int] = ()
    ) -> None:
        """Watch every value of every table; messages open with the name of the table."""
        self._values = [table.values() for _, table in tables if table]  # live views
        self._empty = [table for _, table in tables if not table]
        self._known = [(name, table, dict(table)) for name, table in tables]
        self._objects = list(chain.from_iterable(self._values))
        names = [_named(name, key) for name, table in tables for key in table]
        watched = [
            i
            for i, value in enumerate(self._objects)
            if isinstance(value, Tensor) and is_strided(value) and id(value) not in unmoved
        ]
        # A sparse one has no address. What is written to it may take other memory.
        self._sparse = [v for v in self._objects if isinstance(v, Tensor) and not is_strided(v)]
        self._versions = list(map(version_of, self._sparse))
        self._tensors: list[Tensor] = [self._objects[i] for i in watched]
        # The plain tensors in them, and whose each is
        parts = [(i, part) for i, t in enumerate(self._tensors) for _, part in parts_of(t)]
        self._owners = [i for i, _ in parts]
        self._local = [part for _, part in parts]
        self._tensor_names = [names[i] for i in watched]
        self._pointers = list(map(Tensor.data_ptr, self._local))
        self._indices = list(range(len(self._local)))
        self._homes = list(map(Tensor.untyped_storage, self._local))  # graphs read and write there
        self._trainable = [t for t in self._tensors if t.requires_grad]
        self._frozen = [t for t in self._tensors if not t.requires_grad]
        self._requires_grad = list(map(REQUIRES_GRAD, self._tensors))
        self._geometries = list(map(_geometry, self._tensors))

    @classmethod
    def of_module(
        cls,
        module: nn.Module,
        prefix: str = "",  # put before every name, such as ``"model."``
        # What may be replaced: the ``id`` of a table, and a key; or the ``id`` of a tensor whose
        # memory may be, and ``"data"``
        exempt: Collection[tuple[int, Any]] = (),
    ) -> AddressGuard:
        """Guard parameters, buffers and submodules in their tables, additions included."""
        tables: list[tuple[str, Mapping[str, Any]]] = []
        for path, owner in named_modules_in((prefix.rstrip("."), module)):
            inside = f"{path}." if path else ""
            kinds = ("parameter", "buffer", "submodule")
            pairs = zip(kinds, tables_of(owner), strict=True)
            tables += [(f"{kind} `{inside}", table) for kind, table in pairs]
        if exempt:
            tables = [
                (name, _Part(table, keys) if keys else table)
                for name, table in tables
                for keys in [{key for key in table if (id(table), key) in exempt}]
            ]
        return cls(tables, {owner for owner, key in exempt if key == "data"})

    def holds(self, *, trainable: bool = True) -> bool:
        """Return whether every guarded tensor is unchanged; the cost grows with their number.

        With ``trainable=False`` what required grad need not do so any more: an autograd node that
        is given the tensors tells.
        """
        found = list(chain.from_iterable(self._values))
        return not (
            any(self._empty)
            or len(found) != len(self._objects)
            or not all(map(is_, found, self._objects))
            or not self.is_in_place()
            or any(map(REQUIRES_GRAD, self._frozen))
            or (trainable and not all(map(REQUIRES_GRAD, self._trainable)))
            or (self._sparse and list(map(version_of, self._sparse)) != self._versions)
        )

    def is_in_place(self) -> bool:
        """Return whether every guarded tensor has the memory of the capture."""
        if pointers_equal is not None:
            return pointers_equal(self._local, self._pointers, self._indices)
        return list(map(Tensor.data_ptr, self._local)) == self._pointers

    def check(self, *, trainable: bool = True) -> None:
        """Refuse a replay if the guard does not hold."""
        if not self.holds(trainable=trainable):
            raise ReplayError(
                "A graph can replay only over the tensors of its capture, in the same memory.",
                self.difference(),
                "change values in place (`copy_`, `load_state_dict`), or capture again",
            )

    def difference(self) -> str:
        """Describe the first change."""
        return next(self._differences())[0]

    def bring_back(self) -> bool:
        """Move tensors back to their captured memory, with the values of ``tensor.data = ...``.

        False if none has moved, or if other tensors are in that memory or in the new one.
        """
        places: list[tuple[Tensor, Tensor]] = []
        for i, tensor in enumerate(self._local):
            if tensor.data_ptr() == self._pointers[i]:
                continue
            home, now, owner = self._homes[i], tensor.untyped_storage(), self._owners[i]
            is_same = _geometry(tensor) == self._geometries[owner] and now.device == home.device
            # In Python a storage is one object, however it is asked for.
            is_alone = storage_uses(home) == 1 and storage_uses(now) == 2
            if not is_same or not is_alone or tensor is not self._tensors[owner]:
                return False
            offset = (self._pointers[i] - home.data_ptr()) // tensor.element_size()
            place = tensor.detach().new_empty(0).set_(home, offset, tensor.shape, tensor.stride())
            places.append((tensor, place))
        for tensor, place in places:
            place.copy_(tensor.detach())
            tensor.data = place
        return bool(places)

    def moved(self) -> list[_Move]:
        """List path, table, key and former tensor of guarded tensors that were exchanged or moved.

        Without a table the tensor itself moved. Empty if anything else changed as well.
        """
        moves: list[_Move] = []
        for _, move in self._differences():
            if move is None:
                return []
            moves.append((move[0].split("`")[1], *move[1:]))
        return moves

    def _differences(self) -> Iterator[tuple[str, _Move | None]]:
        """List the changes since capture in words, and the tensors among them that moved."""
        for table_name, table, known in self._known:
            for key in {**known, **table}:
                name = _named(table_name, key)
                if key not in table:
                    yield f"{name} was removed since capture", None
                elif key not in known:
                    yield f"{name} was added since capture", None
                elif (now := table[key]) is not (was := known[key]):
                    are_tensors = isinstance(was, Tensor) and isinstance(now, Tensor)
                    move = (name, table, key, was) if are_tensors else None
                    yield f"{name} was replaced since capture", move
            if list(table) != list(known):
                name = _named(table_name, next(iter(table), ""))
                yield f"{name} changed its place since capture", None
        for owner, part, pointer in zip(self._owners, self._local, self._pointers, strict=True):
            if part.data_ptr() != pointer:
                name = self._tensor_names[owner]
                yield f"{name} moved since capture", (name, None, "data", part)
        for i, (name, tensor) in enumerate(zip(self._tensor_names, self._tensors, strict=True)):
            if (now := tensor.requires_grad) is not self._requires_grad[i]:
                yield f"{name} changed since capture: requires_grad is now {now}", None
        if list(map(version_of, self._sparse)) != self._versions:
            yield "a sparse tensor was written since capture", None


class _Part(Mapping[str, Any]):
    """A table without some of its entries."""

    def __init__(self, table: Mapping[str, Any], without: Collection[str]) -> None:
        self._table = table
        self._without = without

    def __getitem__(self, key: str) -> Any:
        return self._table[key]

    def __iter__(self) -> Iterator[str]:
        return (key for key in self._table if key not in self._without)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _named(table: str, key: str) -> str:
    return f"{table}{key}`" if table else key


def empty_as(tensor: Tensor, device: torch.device | None = None) -> Tensor:
    """Make a buffer with a tensor's strides, overlaps and gaps, in a new storage."""
    like: dict[str, Any] = {"dtype": tensor.dtype, "device": device or tensor.device}
    return torch.empty_strided(tensor.shape, tensor.stride(), **like)


def extent(tensor: Tensor) -> int:
    """Count the elements of memory from a tensor's first to its last one, inclusive."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((size - 1) * stride for size, stride in sizes)


def overlap_span(tensor: Tensor) -> int:
    # The extent of a tensor whose elements may share memory, which `copy_` refuses; else 0.
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return extent(tensor)
            reach += stride * (size - 1)
    return 0


def linear(tensor: Tensor, span: int | None = None) -> Tensor:
    """View a tensor's memory as a flat tensor of so many elements."""
    return tensor.as_strided((tensor.numel() if span is None else span,), (1,))


def bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """View a storage as bytes, in which equal NaN compare equal."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def storage_address(tensor: Tensor) -> int:
    """Return the address of a tensor's storage, or of its first part's; 0 if it has none."""
    for _, part in parts_of(tensor):
        return part.untyped_storage().data_ptr() if has_memory(part) else 0
    return 0


def addresses_of(tensors: Iterable[Tensor]) -> set[int]:
    """Return where the memory of these tensors begins, without those that have none."""
    return {*map(storage_address, plain(tensors))} - {0}


def _geometry(tensor: Tensor) -> tuple[torch.Size, tuple[int, ...], torch.dtype]:
    return tensor.shape, tensor.stride(), tensor.dtype


def reference_counts(tensors: list[Tensor], storages: list[int]) -> list[int]:
    """Count references to each tensor and to its storage, given as addresses."""
    of_tensors = map(add, map(getrefcount, tensors), map(tensor_uses, tensors))
    return list(map(add, of_tensors, map(uses_at, storages)))


class ReferenceGuard:
    """Notices references to gradients that user code keeps past their step."""

    def __init__(self) -> None:
        self.is_noticed = False  # such references were found since this was set last
        self.tracked: Any = None  # gradients that ``.grad`` is, in memory that a replay overwrites
        self.bound: Any = None  # these, if ``.grad`` was them when they were looked at last
        self._uses: list[int] = []  # when they became visible

    def holds(self) -> bool:
        """Return whether no reference was added."""
        tracked = self.bound = self.tracked
        if tracked is None or self.is_noticed:
            return not self.is_noticed
        are_bound = all(map(is_, map(GRADIENT, tracked.parameters), tracked.buffers))
        return (
            are_bound and reference_counts(tracked.buffers, tracked.storages) == self._uses
        ) or not self.has_external_references()

    def has_external_references(self) -> bool:
        """Count again, bound or not; return whether references were added."""
        raise NotImplementedError


# ------------------ Memory shared by graphs


class AliasedBuffer:
    """Memory of a graph that callers may alias; no replay may overwrite it while they do."""

    def __init__(self, tensor: Tensor) -> None:
        self._storage = tensor.untyped_storage()
        self._own_uses = 0
        self._address = tensor.data_ptr()

    def holds(self, argument: Tensor) -> bool:
        return argument.data_ptr() == self._address

    def count_uses(self) -> None:
        """Count the uses by the graphs themselves, before any caller has an alias."""
        self._own_uses = storage_uses(self._storage)

    @property
    def is_kept(self) -> bool:
        """Whether an alias of the memory is alive, by itself or inside of an autograd graph."""
        uses = storage_uses(self._storage)
        if uses < self._own_uses:  # something of the capture itself was released late
            self._own_uses = uses
        return uses > self._own_uses


# ------------------ Return values

_CONSTANTS = (
    type(None), bool, int, float, complex, str, bytes, enum.Enum, type,
    torch.dtype, torch.device, torch.Size,
)  # fmt: skip


Owing = list[tuple[Tensor, Tensor]]
"""Tensors that were handed out, and the gradient of each, which a graph computes."""


def gradients_of(tensors: Sequence[Tensor]) -> list[tuple[int, Tensor]]:
    """List index and gradient of tensors that retain theirs: leaves, or by ``retain_grad()``."""
    keeping = ((i, t) for i, t in enumerate(tensors) if t.is_leaf or t.retains_grad)
    return [(i, t.grad) for i, t in keeping if t.grad is not None]


NO_CACHE = "set config.use_cache = False: training needs no cache of keys and values"
RETURNED = "A graphed callable must return containers of tensors, None and constants."


def tensors_returned(value: Any) -> list[Tensor]:
    """List the tensors in a return value: a replay makes tensors, and no other objects."""
    leaves = named_leaves(value, "output")
    for name, leaf in leaves:
        if not isinstance(leaf, (Tensor, *_CONSTANTS)):
            raise CaptureError(
                RETURNED,
                f"{name} is a {type(leaf).__qualname__}, in which a graph cannot find tensors",
                _remedy_for(leaf),
            )
    return [leaf for _, leaf in leaves if isinstance(leaf, Tensor)]


def _remedy_for(leaf: object) -> str:
    """Name what to return in place of an object."""
    if type(leaf).__module__.startswith("transformers."):
        return NO_CACHE
    return "return the tensors in that object instead"


class OutputPlan:
    """Rebuilds what a captured call returned around the tensors of a replay; constants stay.

    Tensors in attributes and entries that the call has bound are outputs as well, behind those that
    it returned: these are bound whenever a result is built.
    """

    def __init__(
        self,
        value: Any,
        *,
        static: bool,  # the graph's own output tensors are handed out instead of copies
        # Lists tensors of the callable's own. An output that lies in the memory of one is handed
        # out itself: code that writes it means to write there.
        state: Callable[[], Sequence[Tensor]] = tuple,
        bound: Sequence[Bound] = (),
    ) -> None:
        tensors = tensors_returned(value)
        self._returned = len(tensors)
        self.given: Given = (), {}  # the arguments of the call whose result is built next
        places = {id(tensor): i for i, tensor in enumerate(tensors)}
        new = [each.value for each in bound if isinstance(each.value, Tensor)]
        for tensor in new:  # one that is returned, too, stays one
            if places.setdefault(id(tensor), len(tensors)) == len(tensors):
                tensors += tensors_returned(tensor)
        self.bound = [replace(b, value=None) if id(b.value) in places else b for b in bound]
        self.differentiable_indices = [i for i, t in enumerate(tensors) if t.requires_grad]
        self._plain = [i for i, t in enumerate(tensors) if not t.requires_grad]
        # With the autograd graph behind them
        self.requiring_grad = [tensors[i] for i in self.differentiable_indices]
        self.tensors = [tensor.detach() for tensor in tensors]
        self._gradients: list[tuple[int, Tensor]] = []  # of outputs that retain them, by index
        # Those that are handed out without a copy
        self._itself = set(range(len(tensors)) if static else ())
        if self._plain and not static:
            own = addresses_of(state())
            self._itself.update(i for i in self._plain if storage_address(tensors[i]) in own)
        self._aliased: dict[int, AliasedBuffer] = {}
        template = substitute(value, self.tensors)
        self._build: Callable[[Sequence[Tensor]], Any] = lambda found: substitute(template, found)
        self._is_one = isinstance(value, Tensor) and not self._itself
        if isinstance(value, Tensor):
            self._build = itemgetter(0)
        elif value is None:
            self._build = lambda _: None
        elif type(value) is tuple and all(isinstance(item, Tensor) for item in value):
            self._build = tuple
        if bound:
            self._is_one = False
            self._build = partial(self._bind, self._build, [places.get(id(b.value)) for b in bound])

    def _bind(
        self,
        build: Callable[[Sequence[Tensor]], Any],
        places: Sequence[int | None],
        found: Sequence[Tensor],
    ) -> Any:
        given, self.given = self.given, ((), {})
        for each, place in zip(self.bound, places, strict=True):
            each.put(given, each.value if place is None else found[place])
        return build(found[: self._returned])

    def finish_capture(self) -> None:
        """Let go of the captured autograd graph."""
        found = gradients_of(self.requiring_grad)
        self._gradients = [(self.differentiable_indices[i], gradient) for i, gradient in found]
        self.requiring_grad = []

    def alias_output(self, index: int) -> AliasedBuffer:
        """Return an alias of one of :attr:`tensors` from now on, not a copy."""
        if index not in self._aliased:
            self._aliased[index] = AliasedBuffer(self.tensors[index])
            self._itself.add(index)
            self._is_one = False
        return self._aliased[index]

    def track_aliases(self) -> None:
        """Begin to track callers that keep aliased outputs, before the first replay."""
        for alias in self._aliased.values():
            alias.count_uses()

    @property
    def is_kept(self) -> bool:
        return any(alias.is_kept for alias in self._aliased.values())

    @property
    def may_be_left(self) -> bool:
        """Whether nothing is missed where no result is built."""
        return not (self.bound or self._gradients)

    def give_away(self, owing: Owing) -> Any:
        """Return a call's result without copies, as no replay comes after it."""
        return self._built([tensor.detach() for tensor in self.tensors], owing)

    def copies(self, owing: Owing) -> Any:
        """Return copies of a call's result, and pending gradients of tensors in it."""
        if self._is_one and not self._gradients:
            return self.tensors[0].clone()
        if not self.tensors:
            return self._build(self.tensors)
        return self._built(self._take(range(len(self.tensors))), owing)

    def _built(self, found: list[Tensor], owing: Owing) -> Any:
        owing += [(found[i], gradient) for i, gradient in self._gradients]
        return self._build(found)

    def _take(self, indices: Sequence[int]) -> list[Tensor]:
        tensors, itself = self.tensors, self._itself
        if not itself and len(tensors) > 2:
            return clone_all([tensors[i] for i in indices])
        return [tensors[i].detach() if i in itself else tensors[i].clone() for i in indices]

    def differentiable(self) -> tuple[Tensor, ...]:
        """List the outputs that require grad, for the autograd node to return."""
        return tuple(self._take(self.differentiable_indices))

    def hand_out(self, differentiable: Sequence[Tensor] | None = None) -> Any:
        if differentiable is None:
            return self._build(self._take(range(len(self.tensors))))
        if not self._plain:
            return self._build(differentiable)
        found = dict(zip(self.differentiable_indices, differentiable, strict=True))
        found.update(zip(self._plain, self._take(self._plain), strict=True))
        return self._build([found[i] for i in range(len(found))])


# ------------------ What a call binds

Given = tuple[Sequence[Any], Mapping[str, Any]]
"""Positional and keyword arguments of a call."""


@dataclass(frozen=True, slots=True)
class Bound:
    """An attribute or entry that a call has bound to a tensor or a plain value, or has deleted."""

    name: str
    key: Any
    value: Any  # ABSENT: it was deleted
    owner: nn.Module | None  # whose attribute it is
    path: tuple[Any, ...] = ()  # leads from the arguments to a dict of the caller's

    def _table(self, given: Given) -> dict[Any, Any]:
        if self.owner is not None:
            return vars(self.owner)
        table: dict[Any, Any] = reduce(getitem, self.path, given)  # type: ignore[arg-type]
        return table

    def now(self, given: Given) -> Any:
        """Return what is bound now, given the arguments."""
        return self._table(given).get(self.key)

    def put(self, given: Given, value: Any) -> None:
        """Bind another value of the same kind."""
        if value is Absence.ABSENT:
            self._table(given).pop(self.key, None)
        else:
            self._table(given)[self.key] = value


_Change = tuple[str, Any, Any, Any, Any, Any]
"""Its name, owner, table and key, and the values before and now."""


def take_attributes(changes: Iterable[_Change]) -> list[Bound]:
    """List attributes of modules that are bound to other tensors, and bind them as before."""
    found = []
    for name, owner, table, key, before, now in list(changes):
        if isinstance(owner, nn.Module) and isinstance(now, Tensor):
            found.append(Bound(name.removeprefix("."), key, now, owner))
            bind(table, key, before)
    return found


def entries_bound(changes: Iterable[_Change], given: Given) -> list[Bound]:
    """List entries of dicts among the arguments that were bound or deleted.

    The list is empty if any of them was bound to something else than a tensor or a plain value.
    """
    found: list[Bound] = []
    if not are_apart(given):
        return found
    for name, owner, table, key, _, now in changes:
        path = _path(given, owner) if type(table) is dict and table is owner else None
        is_value = isinstance(now, Tensor) or now is Absence.ABSENT or is_plain(now)
        if path is None or key is Absence.ABSENT or not is_value:
            return []
        found.append(Bound(name, key, now, None, path))
    return found


def _path(given: Any, table: object) -> tuple[Any, ...] | None:
    """Return the keys that lead to a dict; None if it is not among the arguments."""
    return next((path for path, held in _dicts(given, ()) if held is table), None)


def _dicts(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if type(value) is dict:
        yield path, value
    if type(value) in (dict, tuple, list):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        for key, held in pairs:
            yield from _dicts(held, (*path, key))


def are_apart(given: Given) -> bool:
    """Return whether each dict among the arguments is in one place."""
    dicts = [id(held) for _, held in _dicts(given, ())]
    return len(set(dicts)) == len(dicts)
