"""Snapshots of Python values and tensors, and their restoration."""

from __future__ import annotations

import contextlib
import copy
from array import array
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from operator import is_
from types import FunctionType, MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_graphs.errors import ReplayError
from lightning_graphs.private.exchange import (
    Absence,
    bind,
    bound,
    contents_of_c,
    is_exchanged,
    slots_of,
)
from lightning_graphs.private.torch import (
    flattened,
    named_buffers_in,
    named_modules_in,
    named_parameters_in,
    parts_of,
    plain,
    tables_of,
    unflattened,
    version_of,
)
from lightning_graphs.values.guards import (
    REALS,
    ArrayValue,
    attributes_of,
    entries,
    has_attributes,
    is_array,
    is_object,
    is_still,
    label_of,
    walk,
)
from lightning_graphs.values.memory import bytes_of, copy_all
from lightning_graphs.values.tree import held_in_containers, in_parts, named_leaves, tensors_inside

# ------------------------------------------------------------------ fingerprints

_CHUNK = {"cpu": 1 << 17, "cuda": 1 << 20}
"""Words at a time: what a CPU keeps in its cache, and what keeps a GPU busy about as long as
launches take. Fingerprints need 32 MiB next to the tensors at most."""

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}
_WORD = 4
"""Bytes of a word. Those of eight lose bits: twice the sign of a double is nothing modulo 2**64."""
_FACTOR = 0x9E3779B97F4A7C15 - (1 << 64)
"""2**64 over the golden ratio: its multiples are spread over all integers."""

Fingerprint = tuple[int, ...]


@torch.no_grad()
def fingerprints_of(tensors: Sequence[Tensor], *, together: bool = False) -> list[Fingerprint]:
    """Return a fingerprint of each tensor's bits, independent of its strides.

    Words, read as integers, are multiplied by odd numbers that depend on their place and added up,
    modulo 2**64, which does not depend on the order. One that changed always shows; several go
    unseen with a probability of about 2**-64, or 2**-33 if only signs change. There is one wait a
    device. Together, small ones have one fingerprint for as many as are looked at at a time.
    """
    factors: dict[torch.device, Tensor] = {}
    sums: dict[torch.device, list[Tensor]] = defaultdict(list)
    owners: dict[torch.device, list[list[int]]] = defaultdict(list)
    for whose, piece in _pieces(tensors, together):
        words = _words(piece)
        device, size = words.device, words.numel()
        if device not in factors or factors[device].numel() < size:
            factors[device] = (torch.arange(1, size + 1, device=device) * _FACTOR) | 1
        sums[device].append((words * factors[device][:size]).sum())
        owners[device].append(whose)
    found: list[list[int]] = [[] for _ in tensors]
    for device, scalars in sums.items():
        for whose, value in zip(owners[device], torch.stack(scalars).tolist(), strict=True):
            for i in whose:
                found[i].append(value)
    return [tuple(values) for values in found]


def _words(flat: Tensor) -> Tensor:
    """View elements as words, or as shorter integers if these do not fill whole words."""
    width = _WORD if flat.nbytes % _WORD == 0 else flat.element_size()
    begins = flat.data_ptr() % width == flat.storage_offset() * flat.element_size() % width == 0
    if flat.stride(0) != 1 or not begins:  # there are gaps, or no word begins there
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(_INTEGERS[width])


def _bare(tensor: Tensor) -> Tensor:
    """Return a strided tensor of the bits that a tensor shows."""
    dense = tensor if tensor.layout is torch.strided else tensor.to_dense()
    is_bare = not (dense.is_conj() or dense.is_neg())
    return dense if is_bare else dense.resolve_conj().resolve_neg()


def _pieces(tensors: Sequence[Tensor], together: bool) -> Iterator[tuple[list[int], Tensor]]:
    """Elements, as many as are looked at at a time, and whose they are; of small tensors copies."""
    for part in in_parts(tensors, lambda device: _CHUNK[device.type] * _WORD if together else 0):
        if len(part) > 1:
            yield part, flattened([_bare(tensors[i]) for i in part])
            continue
        (tensor,) = (tensors[i] for i in part)
        size = max(1, _CHUNK[tensor.device.type] * _WORD // tensor.itemsize)
        for piece in _bare(tensor).reshape(-1).split(size):
            yield part, piece


# ------------------------------------------------------------------ Python values

_CHANGEABLE = (list, OrderedDict, dict, set, deque)


class Change(NamedTuple):
    """A change that code has made."""

    name: str  # its name in messages
    owner: Any  # a module, an object or a container
    table: Any  # the container of what is in it; another value where there is no such
    key: Any  # where in there; ABSENT: all of it
    before: Any
    now: Any


class Binding(NamedTuple):
    """Where a name is bound to a value: in a dict, in a slot of an object, in a cell."""

    name: str
    owner: Any
    key: str
    before: Any


class PythonSnapshot:
    """Snapshot of named containers and objects, and of module attributes.

    Containers are lists, dicts, sets and arrays of up to 16 MiB; other values are left out.
    """

    def __init__(self, held: Iterable[tuple[str, Any]] = ()) -> None:
        self.containers: list[tuple[str, Any, Any, Any]] = []
        self.bindings: dict[tuple[int, str], Binding] = {}
        self.classes: dict[type, dict[str, Any]] = {}
        self._tables: set[int] = set()
        for name, value in held:
            self.add(name, value)

    def add(self, name: str, value: Any) -> None:
        if isinstance(value, _CHANGEABLE):
            self.containers.append((name, value, value, _copy(value)))
        elif isinstance(value, (nn.Module, FunctionType)) or has_attributes(value):
            table = attributes_of(value)
            self.containers.append((name, value, table, _copy(table)))
            if isinstance(value, nn.Module):
                self._tables.update(map(id, tables_of(value)))
            elif is_object(value):
                for key in slots_of(type(value)):
                    self.add_place(f"{name}.{key}", value, key)
        elif is_array(table := contents_of_c(value)):
            self.containers.append((name, value, table, _copy(table)))

    def add_place(self, name: str, owner: Any, key: str) -> Binding:
        """Add the binding of a key with its present value; a known one keeps its first value."""
        found = Binding(name, owner, key, bound(owner, key))
        return self.bindings.setdefault((id(owner), key), found)

    def add_class(self, kind: type) -> None:
        """Add all bindings of a class itself; known ones keep their first value."""
        self.classes.setdefault(kind, dict(vars(kind)))

    def _rebound(self) -> Iterator[Change]:
        """Yield changed bindings outside of containers, but for what a capture exchanges."""
        places: list[tuple[str, Any, str, Any]] = [*self.bindings.values()]
        for kind, was in self.classes.items():
            keys = (key for key in {**was, **vars(kind)} if not key.startswith("__"))
            places += [(f"{kind.__name__}.{k}", kind, k, was.get(k, Absence.ABSENT)) for k in keys]
        for name, owner, key, before in places:
            if not (is_still(now := bound(owner, key), before) or is_exchanged(now)):
                yield Change(name, owner, owner, key, before, now)

    def changed(self) -> list[str]:
        return sorted({change.name for change in self.changes()})

    def changes(self) -> Iterator[Change]:
        """List the changes since the snapshot."""
        for held in self.containers:
            if not _is_untouched(*held[2:]):
                yield from self._changes_in(*held)
        yield from self._rebound()

    def _changes_in(self, name: str, owner: Any, table: Any, before: Any) -> Iterator[Change]:
        if not isinstance(table, dict):
            if not _same(table, before):
                yield Change(name, owner, table, Absence.ABSENT, before, _copy(table))
            return
        for key in {**before, **table}:
            # Some dicts have a ``get`` of their own
            was, now = before.get(key, Absence.ABSENT), dict.get(table, key, Absence.ABSENT)
            if now is not was and not is_still(now, was):
                yield Change(f"{name}{self.label(owner, key)}", owner, table, key, was, now)
        if table is owner and not self.is_table(owner) and not _is_grown(table, before):
            order = tuple(before), tuple(table)
            yield Change(f"the order of {name}", owner, table, Absence.ABSENT, *order)

    def entries(self) -> Iterator[Change]:
        """List all entries of the containers, and all bindings, as changes."""
        for one in self.bindings.values():
            yield Change(one.name, one.owner, one.owner, one.key, one.before, one.before)
        for name, owner, table, _ in self.containers:
            pairs = enumerate(table) if isinstance(table, (list, deque)) else ()
            for key, held in table.items() if isinstance(table, dict) else pairs:
                yield Change(f"{name}{self.label(owner, key)}", owner, table, key, held, held)

    def is_table(self, value: Any) -> bool:
        """Return whether this is a module's table of parameters, buffers or submodules."""
        return id(value) in self._tables

    def label(self, owner: Any, key: Any) -> str:
        """Return the suffix of a holder's name for a key."""
        if not isinstance(owner, (dict, list, deque)) or self.is_table(owner):
            return f".{key}"
        ids = [*map(id, owner), id(key)] if isinstance(owner, dict) else [id(key)]
        return label_of(key, ids.index(id(key)))

    def name_of(self, owner: Any) -> str:
        return next(name for name, held, *_ in self.containers if held is owner)

    def holder_of(self, value: Any) -> tuple[Any, Any] | None:
        """Return what this value was found in, and its key there; None if there is nothing."""
        for _, owner, table, before in self.containers:
            if owner is value:
                break  # what was found later refers back to it
            if isinstance(table, (dict, list, deque)):
                pairs = before.items() if isinstance(table, dict) else enumerate(before)
                for key, held in pairs:
                    if held is value:
                        return owner, key
        slots = ((o, key) for _, o, key, held in self.bindings.values() if held is value)
        return next(slots, None)

    @contextlib.contextmanager
    def changes_undone(self, refuse: Callable[[Sequence[str]], object]) -> Iterator[None]:
        """Undo what the body changes, and refuse it by its names."""
        try:
            yield
        finally:
            changed = self.changed()
            self.restore()
        if changed:
            refuse(changed)

    def restore(self) -> None:
        for name, owner, container, before in self.containers:
            is_same = _is_untouched(container, before)
            if not is_same and any(self._changes_in(name, owner, container, before)):
                refill(container, before)
        for change in self._rebound():
            bind(change.owner, change.key, change.before)


def _is_untouched(table: Any, before: Any) -> bool:
    """Return whether a plain dict has the same keys and values, in the same order."""
    if type(table) not in (dict, OrderedDict) or len(table) != len(before):
        return False
    return not table or all(map(is_, (*table, *table.values()), (*before, *before.values())))


def _is_grown(table: dict[Any, Any], before: dict[Any, Any]) -> bool:
    """Return whether former keys have their former order, and new ones follow."""
    kept = [key for key in before if key in table]
    return kept == list(table)[: len(kept)]


def _copy(container: Any) -> Any:
    if isinstance(container, dict):
        return dict(container)
    if isinstance(container, memoryview):
        format_: Any = container.format
        return memoryview(container.tobytes()).cast(format_)
    if is_array(container):
        return copy.copy(container)
    return set(container) if isinstance(container, set) else list(container)


def refill(container: Any, before: Any) -> None:
    """Replace the contents of a container."""
    # Past methods of its own: some containers forbid their own change.
    if is_array(container):
        everything: Any = (
            slice(None) if isinstance(container, (bytearray, array, memoryview)) else ...
        )
        container[everything] = before
        return
    kind: Any = next(kind for kind in _CHANGEABLE if isinstance(container, kind))
    kind.clear(container)
    (kind.extend if kind in (list, deque) else kind.update)(container, before)


def _same(now: Any, before: Any) -> bool:
    if is_array(now):
        return ArrayValue.of(now) == ArrayValue.of(before)
    if isinstance(now, set):
        return bool(now == before)
    return len(now) == len(before) and all(map(is_, now, before))


def contents_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> PythonSnapshot:
    named = [(f"args[{i}]", value) for i, value in enumerate(args)]
    named += [(f'kwargs["{key}"]', value) for key, value in kwargs.items()]
    return PythonSnapshot(iter_inside(named))


def iter_inside(named: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yield name and value of containers and objects inside of values, outer ones first."""
    seen: dict[int, Any] = {}
    for name, value in named:
        yield from walk(name, value, seen, inside=_inside)


def _inside(value: Any) -> list[tuple[str, Any, Any]]:
    """List the entries of an argument.

    Of objects of transformers, which are no author's own, the tables of attributes: the layers of a
    model fill those of a cache.
    """
    if is_of_transformers(value):
        return [("", "", attributes_of(value))]
    return entries(value) or []


def is_of_transformers(value: Any) -> bool:
    kind = type(value)
    return kind.__module__.startswith("transformers.") and not issubclass(kind, (dict, nn.Module))


# ------------------------------------------------------------------ tensors, and all parts


class SnapshotPart(Protocol):
    """Snapshot of state that is no tensor, taken at construction."""

    def restore(self) -> object:
        """Put it back; may be called again."""


class Snapshot:
    """Snapshot of tensor values and other parts, taken at construction.

    Values are saved once for each storage, together with what else lies in it: on the device as far
    as there is room, the rest in memory of the host. Tensors in several pieces of memory are left
    out, because no graph writes them in place.

    Args:
        tensors: Whose values are saved; a sharded one stands for the part of this rank, one of a
            subclass for the tensors that hold its values.
        parts: Further snapshots, restored after the tensors, in this order.
        room: Given bytes to save, returns how many may be saved on the device; default: all.
    """

    def __init__(
        self, tensors: Iterable[Tensor], *parts: SnapshotPart, room: Callable[[int], float] = float
    ) -> None:
        self._parts = [*parts]
        self._tensors = [t for t in plain(tensors) if t.layout is torch.strided]
        self._memory = [tensor.detach() for tensor in self._tensors]
        # Where the storages begin whose values are saved
        self.addresses = [t.untyped_storage().data_ptr() for t in self._tensors]
        storages: dict[torch.device, dict[int, Tensor]] = {}
        for tensor, address in zip(self._tensors, self.addresses, strict=True):
            own = storages.setdefault(tensor.device, {})
            if address and address not in own:
                own[address] = _whole(tensor)
        size = sum(whole.nbytes for own in storages.values() for whole in own.values())
        on_device = room(size)
        self._saved: list[tuple[list[Tensor], list[Tensor]]] = []  # storages and their copies
        with torch.inference_mode(False), torch.no_grad():
            for device, own in storages.items():
                here, there = _split(own.values(), on_device)
                for views, where in ((here, device), (there, torch.device("cpu"))):
                    kinds: dict[torch.dtype, list[Tensor]] = {}
                    for view in views:
                        kinds.setdefault(view.dtype, []).append(view)
                    for alike in kinds.values():
                        self._saved.append((alike, _copied(alike, where)))

    @cached_property
    def _copies(self) -> dict[int, Tensor]:
        """The copy of each storage, by where that begins."""
        return {v.data_ptr(): c for pair in self._saved for v, c in zip(*pair, strict=True)}

    def saved(self, tensor: Tensor) -> Tensor:
        """Return a tensor's saved value, a view to read only; its storage is in the snapshot."""
        address = tensor.untyped_storage().data_ptr()
        if not address:
            return torch.empty_like(tensor)
        copy = self._copies[address]
        is_part = copy.nbytes < copy.untyped_storage().nbytes()
        storage = (copy.clone() if is_part else copy).untyped_storage()
        view = torch.empty(0, dtype=tensor.dtype, device=storage.device)
        return view.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())

    def add(self, part: SnapshotPart) -> None:
        """Add one more part to restore."""
        self._parts.append(part)

    def restore(self) -> None:
        """Write saved values back in place, and put the parts back; version counters stay.

        Raises:
            ReplayError: A tensor was given another storage, which a graph would not reach. It has
                its former one again.
        """
        moved = []
        for i, (tensor, address) in enumerate(zip(self._tensors, self.addresses, strict=True)):
            if tensor.untyped_storage().data_ptr() != address:
                moved.append(i)
                tensor.data = self._memory[i]
        with torch.no_grad():
            for views, values in self._saved:
                copy_all(views, values)
        for part in self._parts:
            part.restore()
        for i in moved:
            raise ReplayError(
                "A snapshot can be restored only into the memory that it was taken of.",
                f"tensor {i} of shape {tuple(self._tensors[i].shape)} moved since the snapshot",
                "change tensors in place between the snapshot and its restoration",
            )

    @contextlib.contextmanager
    def undone(self) -> Iterator[None]:
        """Restore all of it after the body."""
        try:
            yield
        finally:
            self.restore()


def _split(views: Iterable[Tensor], room: float) -> tuple[list[Tensor], list[Tensor]]:
    """Split into storages that fit in the room, and others."""
    here: list[Tensor] = []
    there: list[Tensor] = []
    for view in views:
        if view.nbytes <= room:
            here.append(view)
            room -= view.nbytes
        else:
            there.append(view)
    return here, there


_NUMBERS = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64})
"""Types whose copies have the same bits, whatever these are."""


def _whole(tensor: Tensor) -> Tensor:
    """View the storage of a tensor by one reference, with a version counter of its own."""
    fills = tensor.nbytes == tensor.untyped_storage().nbytes() and tensor.is_contiguous()
    if fills and tensor.dtype in _NUMBERS and not tensor.is_inference():
        return tensor.data  # no view of that, a second reference: those of gradients are counted
    return bytes_of(tensor.untyped_storage())


def _copied(views: list[Tensor], device: torch.device) -> list[Tensor]:
    """Copy storages, on their device to one piece of memory: many take longer to get."""
    if len(views) > 1 and device == views[0].device:
        return [*unflattened(flattened(views), views)]
    copies = [torch.empty_like(view, device=device) for view in views]
    for copy_, view in zip(copies, views, strict=True):
        copy_.copy_(view)
    return copies


# ------------------------------------------------------------------ parts


class Gradients:
    """Snapshot of parameters' ``.grad`` bindings and ``requires_grad``, not of values."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._known = [(p, p.grad, p.requires_grad) for p in parameters]
        self._versions = list(map(version_of, self.tensors))

    def changed(self) -> bool:
        """Whether a parameter has another gradient by now, or one was written in place."""
        is_other = any(p.grad is not gradient for p, gradient, _ in self._known)
        return is_other or list(map(version_of, self.tensors)) != self._versions

    @property
    def tensors(self) -> list[Tensor]:
        return self.without(())

    def without(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        """List the gradients but for those of some parameters."""
        others = set(parameters)
        return [g for p, g, _ in self._known if g is not None and p not in others]

    def forget(self) -> None:
        """Drop references to gradients that parameters no longer have."""
        self._known = [
            (p, None if p.grad is None else gradient, trained)
            for p, gradient, trained in self._known
        ]

    def restore(self) -> None:
        for parameter, gradient, trained in self._known:
            if parameter.requires_grad is not trained:  # code may have put its own data there
                parameter.requires_grad_(trained)
            parameter.grad = gradient


def _states_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """List the states of parameters."""
    return [state for state in optimizer.state.values() if isinstance(state, dict)]


class OptimizerState:
    """Snapshot of optimizer state with the numbers of its groups, and of the loss scale."""

    def __init__(self, optimizer: Optimizer, scaler: torch.amp.GradScaler | None = None) -> None:
        self._optimizer = optimizer
        self._scaler = scaler
        table, groups = optimizer.state, optimizer.param_groups
        self._known = dict(table)  # some optimizers keep there what is of no parameter
        self._states = [(state, dict(state)) for state in _states_of(optimizer)]
        self._numbers = [{k: v for k, v in g.items() if type(v) in REALS} for g in groups]
        self._scale: dict[str, Any] = {} if scaler is None else scaler.state_dict()
        held = [*chain.from_iterable(map(dict.values, [*_states_of(optimizer), *groups]))]
        held += [value for value in table.values() if not isinstance(value, dict)]
        self.tensors = [*tensors_inside(held)]
        nested = [("state", value) for value in held_in_containers(held)]
        self._nested = PythonSnapshot(iter_inside(nested))

    def restore(self) -> int:
        """Put it back; of how many parameters there were other tensors."""
        table: dict[Any, Any] = self._optimizer.state
        mine = set(map(id, self.tensors))
        now = _states_of(self._optimizer)
        made = [[v for v in s.values() if isinstance(v, Tensor)] for s in now]
        for key in [key for key in table if key not in self._known]:
            del table[key]
        table.update(self._known)
        for state, known in self._states:
            state.clear()
            state.update(known)
        self._nested.restore()
        for group, numbers in zip(self._optimizer.param_groups, self._numbers, strict=False):
            group.update(numbers)
        if self._scaler is not None:
            with contextlib.suppress(AssertionError):  # nothing has used it yet
                self._scaler.update(self._scale["scale"])  # forgets a step left halfway
            self._scaler.load_state_dict(self._scale)
        return sum(any(id(tensor) not in mine for tensor in tensors) for tensors in made)


# ------------------------------------------------------------------ by name


class Result(NamedTuple):
    """One tensor that a region computes or changes."""

    name: str  # what a message calls it
    value: Tensor  # the tensor itself, not a copy
    gradient: str = ""  # the name of the gradient that an update of it was computed from; or empty
    is_gradient: bool = False  # whether it is a gradient itself


def results_in(value: Any, name: str, of: str = "") -> list[Result]:
    """List the tensors in a value by name; names include the constants."""
    results: list[Result] = []
    for found, leaf in named_leaves(value, name):
        if isinstance(leaf, Tensor):
            results += results_of(leaf.detach(), found, of)
        else:
            results.append(Result(f"{found} = {leaf!r}{of}", torch.empty(0)))
    return results


def results_of(
    tensor: Tensor, name: str, of: str = "", *, gradient: str = "", is_gradient: bool = False
) -> list[Result]:
    """List the plain tensors that hold a tensor's values, by name."""
    rest = gradient, is_gradient
    return [Result(f"{name}{suffix}{of}", part, *rest) for suffix, part in parts_of(tensor)]


@dataclass(frozen=True, slots=True)
class RegionState:
    """State that a region of user code may change: input of snapshots, source of results.

    Names are as in messages.
    """

    tensors: Mapping[str, Tensor]  # buffers, and what else the region is known to write
    parameters: Mapping[str, Tensor]  # what may have a gradient
    unseen: Sequence[Tensor] = ()  # what it may write unnoticed, and is not compared
    optimizers: Sequence[Optimizer] = ()  # which the region steps
    scaler: torch.amp.GradScaler | None = None
    # Whose gradients it replaces: the values of those that there are, nothing needs any more
    renewed: Sequence[Tensor] = ()
    # Numbers on the host that follow replays; by table and key: they are put back, not compared
    counted: Container[tuple[int, Any]] = ()

    @classmethod
    def of_step(
        cls,
        root: nn.Module,
        optimizers: Sequence[Optimizer],
        scaler: torch.amp.GradScaler | None,
        *,
        written: Mapping[str, Tensor] = MappingProxyType({}),  # other tensors, by name
        unseen: Sequence[Tensor] = (),
        others: Iterable[Tensor] = (),  # with gradients; they may be parameters of the module
        renewed: Sequence[Tensor] = (),
        counted: Container[tuple[int, Any]] = (),
    ) -> RegionState:
        """Describe the state of a training step, with the steps of these optimizers."""
        tree = named_modules_in(("", root))
        names: dict[Tensor, str] = {p: f"`{name}`" for name, p in named_parameters_in(tree)}
        for n, optimizer in enumerate(optimizers):
            owner = f"optimizer {n}" if n else "the optimizer"
            for i, group in enumerate(optimizer.param_groups):
                for k, parameter in enumerate(group["params"]):
                    names.setdefault(parameter, f"`group {i}, parameter {k} of {owner}`")
        further = [tensor for tensor in others if tensor not in names]
        names |= {tensor: f"`tensor {i} with a gradient`" for i, tensor in enumerate(further)}
        named = {name: tensor for tensor, name in names.items()}
        tensors = {f"buffer `{name}`": buffer for name, buffer in named_buffers_in(tree)}
        tensors |= {f"tensor `{name}`": tensor for name, tensor in written.items()}
        return cls(tensors, named, unseen, optimizers, scaler, renewed, counted)

    def take(self, room: Callable[[int], float], *parts: SnapshotPart) -> Snapshot:
        """Take a snapshot, with further parts; see :class:`Snapshot`."""
        gradients = Gradients(self.parameters.values())
        tensors = [*self.tensors.values(), *self.unseen, *self.parameters.values()]
        tensors += gradients.without(self.renewed)
        own: list[SnapshotPart] = [gradients]
        for optimizer in self.optimizers:
            known = OptimizerState(optimizer, self.scaler)
            tensors += known.tensors
            own.append(known)
        return Snapshot(tensors, *own, *parts, room=room)

    def results(self) -> list[Result]:
        """List the region's changes in the order of computation."""
        found = [r for name, tensor in self.tensors.items() for r in results_of(tensor, name)]
        for name, p in self.parameters.items():
            if p.grad is not None:
                found += results_of(p.grad, _gradient_of(name), is_gradient=True)
        return found + self._updated() if self.optimizers else found

    def _updated(self) -> list[Result]:
        """List what optimizer steps change: parameters, optimizer state, loss scale."""
        found: list[Result] = []
        for name, parameter in self.parameters.items():
            found += results_of(parameter, f"parameter {name}", gradient=_gradient_of(name))
        for optimizer in self.optimizers:
            for name, parameter in self.parameters.items():
                state = optimizer.state.get(parameter, {})
                for key, value in state.items():
                    if isinstance(value, Tensor) and (id(state), key) not in self.counted:
                        whose = f"the optimizer's `{key}` of {name}"
                        found += results_of(value, whose, gradient=_gradient_of(name))
            for key, value in optimizer.state.items():
                if isinstance(value, Tensor) and (id(optimizer.state), key) not in self.counted:
                    found += results_of(value, f"the optimizer's `{key}`")
        if self.scaler is not None:
            found.append(Result("the loss scale", torch.tensor(self.scaler.get_scale())))
        return found


def _gradient_of(name: str) -> str:
    return f"the gradient of {name}"
