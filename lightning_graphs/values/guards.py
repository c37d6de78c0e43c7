"""Python values that captured code reads, compared before each replay."""

from __future__ import annotations

import builtins
import contextlib
import reprlib
import weakref
import zlib
from array import array
from collections import ChainMap, OrderedDict, UserDict, UserList, deque
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from functools import partial
from pathlib import PosixPath, PurePosixPath, PureWindowsPath, WindowsPath
from threading import Event, Semaphore, local
from types import (
    BuiltinFunctionType,
    FunctionType,
    GeneratorType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any, NamedTuple
from uuid import UUID

import numpy
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_graphs.private.callsite import is_library, is_of_library
from lightning_graphs.private.exchange import (
    LRU_CACHE,
    Absence,
    clearings_of,
    code_of,
    contents_of_c,
    id_of_referent,
    in_slot,
    is_of_python,
    referent_of,
    slots_of,
)

# ------------------ Closures and defaults


def brought_along(value: Any) -> list[tuple[str, Any]] | None:
    """List what a function, method or partial brings along: closure, defaults, arguments."""
    if isinstance(value, partial):
        return [(key, getattr(value, key)) for key in ("func", "args", "keywords")]
    if isinstance(value, GeneratorType):
        return [*value.gi_frame.f_locals.items()] if value.gi_frame is not None else []
    if isinstance(value, (MethodType, BuiltinFunctionType)):
        owner = value.__self__
        function = getattr(value, "__func__", None)
        pairs = [("__self__", owner), ("__func__", function)]
        return [] if isinstance(owner, ModuleType) else pairs
    if not isinstance(value, FunctionType):
        return None
    code, keywords = code_of(value), value.__kwdefaults__ or {}
    defaults = value.__defaults__ or ()
    named = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
    cells = [in_slot(cell, "cell_contents") for cell in value.__closure__ or ()]
    found = [*zip(code.co_freevars, cells, strict=True), *zip(named, defaults, strict=True)]
    found += keywords.items()
    if is_library(code.co_filename):  # what it keeps of its own is no state of the author's
        found = [(name, held) for name, held in found if callable(held)]
    return found


# ------------------ Comparable values


class Identity:
    """Weak key of an object that is equal to itself only."""

    __slots__ = ("_count", "_hash", "_name", "_object", "is_tensor")

    def __init__(self, value: Any, count: int | None = None) -> None:
        self._object: Callable[[], Any]
        try:
            self._object = weakref.ref(value)
        except TypeError:
            self._object = lambda: value
        self._count = count
        self.is_tensor = isinstance(value, torch.Tensor)
        self._hash = hash((id(value), count))
        named = isinstance(value, (type, FunctionType, BuiltinFunctionType, ModuleType))
        self._name = value.__name__ if named else type(value).__qualname__
        if self.is_tensor:
            shape = "x".join(map(str, value.shape)) or "scalar"
            self._name += f" {str(value.dtype).removeprefix('torch.')}[{shape}]"

    def matches(self, value: Any) -> bool:
        return value is not None and value is self._object()

    @property
    def kind(self) -> type:
        """The class of the object, or a class that is the object."""
        found = self._object()
        return found if isinstance(found, type) else type(found)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Identity) or self._count != other._count:
            return False
        return self.matches(other._object())

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return self._name if self._count is None else f"{self._name} of {self._count}"


def is_tensor(value: Any) -> bool:
    """Return whether this is the identity of a tensor."""
    return isinstance(value, Identity) and value.is_tensor


def is_list(value: Any) -> bool:
    """Return whether this stands for a list or deque, with its length."""
    return isinstance(value, Identity) and value.kind in (list, deque)


REALS = (int, float, numpy.float64, numpy.float32, numpy.int64, numpy.int32)
"""Types of real numbers, entries of NumPy's arrays included: torch takes them as Python's."""


def is_number(value: Any) -> bool:
    """Return whether this is a constant that is a number."""
    return isinstance(value, Constant) and value.kind in REALS


_NUMBERS_AND_TEXTS = (bool, int, float, complex, str, bytes, numpy.generic)
_PLAIN = (*_NUMBERS_AND_TEXTS, Enum, torch.dtype, torch.device, type(None))
_WRITTEN = frozenset(
    {slice, range, Fraction, Decimal, UUID, date, datetime, timedelta, timezone}
    | {PosixPath, PurePosixPath, WindowsPath, PureWindowsPath}
)
"""Types of values that nothing changes, and that are equal where their texts are."""

_BUILTINS = vars(builtins)  # which every namespace has that ``exec`` or ``runpy`` has made
_BUFFERS, _BYTE = (bytearray, array, memoryview), numpy.dtype(numpy.uint8)
_OBJECTS = (SimpleNamespace, local, Event, Semaphore)
_SEQUENCES = (list, tuple, deque, numpy.flatiter)
_CONTAINERS = (*_SEQUENCES, dict, set, frozenset)  # an author's __len__ may do anything
BARE = frozenset({dict, OrderedDict, list, tuple, set, torch.Tensor, torch.nn.Parameter})
"""Classes of most of what modules hold, which are no author's."""

_STEPPED = (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler)
"""Classes of torch whose objects steps change; user code may own further ones."""
OF_TENSORS = frozenset({"state", "param_groups", "defaults"})
"""Attributes of every optimizer that hold what it has of its parameters."""
_LAST_RATES, _LAST_RATES_OF = "get_last_lr", "_last_lr"
"""A method of schedulers, and the attribute that it reads."""
_MOVED = OF_TENSORS | {"step", "last_epoch", _LAST_RATES_OF}
"""Attributes in which steps of optimizers and schedulers move numbers."""

DEPTH = 6
MOST_INSIDE = 10_000  # longer ones are data, which stay unopened
_MOST = 512
"""Entries that are looked at one by one, of a container and of all that is inside of a value."""

_MOST_BYTES = 64 * 1024
"""Size of arrays whose contents are looked at in replays; comparing these takes microseconds."""
_LARGEST_BYTES = 16 * 1024 * 1024
"""Size of arrays whose contents are looked at while code is captured or compared; it takes ms."""


def is_plain(value: Any) -> bool:
    """Return whether a value is compared as a whole by ``==``: numbers, texts, enums, None."""
    return isinstance(value, _PLAIN)


def change_words(before: Any, now: Any) -> str:
    """Describe the change of a value, given its texts."""
    a, b = repr(before), repr(now)
    return f"another {b}" if a == b else f"{a} -> {b}"


def is_constant(value: Any) -> bool:
    """Return whether a value is plain, or an immutable container of plain values."""
    if isinstance(value, (range, slice)):
        return all(map(is_plain, (value.start, value.stop, value.step)))
    return is_plain(value) or (isinstance(value, frozenset) and all(map(is_plain, value)))


def exact(value: Any) -> Hashable:
    """Return a key that separates plain values of a type: NaN equals NaN, 0.0 is not -0.0."""
    if isinstance(value, float):
        return value.hex()
    if type(value) in _WRITTEN:
        return repr(value)
    hash(value)  # or TypeError
    key: Hashable = value
    return key


@dataclass(frozen=True, slots=True)
class Constant:
    """A Python value that a graph has baked in, which a replay requires unchanged.

    Equal by type and value, objects by what is inside of them; other things that cannot be hashed
    are equal to themselves only. NaN equals NaN, and 0.0 differs from -0.0.
    """

    kind: type
    key: Hashable
    text: str = field(compare=False)

    @classmethod
    def of(cls, value: Any) -> Constant:
        """Make the constant of any value; objects are compared by their contents."""
        # While modules are watched, their classes are exchanged.
        kind = nn.Module if isinstance(value, nn.Module) else type(value)
        text = reprlib.repr(value)
        if text.startswith("<") and not is_plain(value):  # with an address
            text = kind.__qualname__
        return cls(kind, as_hashable(value), text)

    @classmethod
    def plain(cls, value: Any) -> Constant | Identity:
        """Make the constant of a plain value; an unhashable one is equal to itself only."""
        try:
            return cls(type(value), exact(value), repr(value))
        except TypeError:
            return Identity(value)

    def matches(self, value: Any) -> bool:
        if isinstance(self.key, Identity):
            return self.key.matches(value)
        return type(value) is self.kind and as_hashable(value) == self.key

    def __repr__(self) -> str:
        return self.text


class ArrayValue(NamedTuple):
    """The contents of a NumPy array, or of one of Python's, comparable and hashable."""

    dtype: Any
    shape: tuple[int, ...]
    content: bytes

    @classmethod
    def of(cls, value: Any) -> ArrayValue:
        if isinstance(value, _BUFFERS):
            return cls(memoryview(value).format, (len(value),), memoryview(value).tobytes())
        return cls(value.dtype, value.shape, value.tobytes())

    def __repr__(self) -> str:
        kind = f"{self.dtype}{list(self.shape)}"
        entries = numpy.frombuffer(self.content, self.dtype).tolist() if self.content else []
        if len(entries) > 6:  # reprlib shows no more
            return f"{kind} with checksum {zlib.crc32(self.content):08x}"
        return f"{kind} of {reprlib.repr(entries)}"


class _Keys(tuple[Any, ...]):
    """The keys of a dict, in their order."""

    __slots__ = ()


_COMPARED = frozenset({bool, int, float, complex, str, bytes, frozenset, ArrayValue, _Keys})


def is_still(now: Any, before: Any) -> bool:
    """Return whether a value is the former object, or a plain value that equals it.

    What only passes for a plain value is not compared, since that may tell its number.
    """
    if now is before:
        return True
    kind = type(now)
    if kind is not type(before) or now.__class__ is not kind:
        return False
    if not (kind in _COMPARED or is_plain(now)):
        return False
    try:
        return exact(now) == exact(before)
    except TypeError:  # one of NumPy's that can be written
        return False


def is_array(value: Any, most: int = _LARGEST_BYTES) -> bool:
    """Return whether a value is an array of NumPy or Python whose contents a snapshot copies.

    Larger ones are data. Subclasses may hold more.
    """
    if type(value) in _BUFFERS:
        view = memoryview(value)
        return view.ndim == 1 and view.contiguous and view.nbytes <= most
    return type(value) in (numpy.ndarray, numpy.memmap) and value.nbytes <= most


def is_small_array(value: Any) -> bool:
    """Return whether replays, too, compare a value by contents that are no addresses."""
    return is_array(value, _MOST_BYTES) and not getattr(value, "dtype", _BYTE).hasobject


def is_object(value: Any) -> bool:
    """Return whether an object's state is in its attributes, and its class is user code.

    Objects of C keep values elsewhere; those of trainers and loggers change in their threads.
    """
    kind: Any = type(value)  # what an object says to be its class may be another one
    if kind in BARE:
        return False
    if issubclass(kind, _OBJECTS) or kind in (UserDict, UserList, ChainMap):
        return True
    if issubclass(kind, (type, nn.Module, Enum)) or is_of_library(kind):
        return False
    return all(map(is_of_python, kind.__mro__[:-1]))


def attributes_of(value: Any) -> dict[str, Any]:
    """Return the attributes of an object itself, without its slots."""
    try:
        table: Any = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return value.__dict__ if isinstance(value, local) else {}  # those of this thread
    return table if isinstance(table, dict) else {}


def members_of(value: Any) -> dict[str, Any]:
    """Return attributes and slots of an object itself by name."""
    in_slots = {key: in_slot(value, key) for key in slots_of(type(value))}
    return {**attributes_of(value), **in_slots}


def entries(value: Any) -> list[tuple[str, Any, Any]] | None:
    """List label, key and value of a container's or an object's entries; None if it has none.

    Sets have nothing inside: what is hashed is compared by value.
    """
    if is_of_objects(value):
        value = value.flat
    if isinstance(value, dict):
        named = enumerate(value.items())
        return [(label_of(key, place), key, held) for place, (key, held) in named]
    if isinstance(value, _SEQUENCES):
        return [(f"[{index}]", index, held) for index, held in enumerate(value)]
    own = [*members_of(value).items()] if has_attributes(value) else brought_along(value)
    return None if own is None else [(f".{key}", key, held) for key, held in own]


def is_of_objects(value: Any) -> bool:
    """Return whether a value is an array of NumPy that holds Python's objects, and is no data."""
    is_array = type(value) is numpy.ndarray and value.dtype == object
    return is_array and value.size <= MOST_INSIDE


def label_of(key: Any, place: int) -> str:
    """Return the suffix of a name for a dict's key; torch would print all of a tensor."""
    return f"[<tensor {place}>]" if isinstance(key, torch.Tensor) else f"[{key!r}]"


def has_attributes(value: Any) -> bool:
    """Return whether a value's entries are attributes: an object, or a tensor with some."""
    if isinstance(value, torch.Tensor):
        is_itself = type(value).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
        return is_itself and bool(attributes_of(value))
    return is_object(value) or isinstance(value, _STEPPED)


def walk(
    name: str,
    value: Any,
    seen: dict[int, Any],
    depth: int = DEPTH,
    *,
    inside: Callable[[Any], list[tuple[str, Any, Any]] | None] = entries,
    modules: Callable[[str, nn.Module, dict[int, Any], int], Iterator[tuple[str, Any]]]
    | None = None,
) -> Iterator[tuple[str, Any]]:
    """Yield name and value of all that a value holds up to a depth, itself first.

    Plain values, classes, and tensors without attributes are skipped, and modules without
    ``modules``, which goes on with them. Containers of many entries are data: they stay unopened.
    """
    if id(value) in seen or is_plain(value) or isinstance(value, type) or value is _BUILTINS:
        return
    if isinstance(value, torch.Tensor) and not has_attributes(value):
        return
    if isinstance(value, nn.Module):
        if modules is not None:
            yield from modules(name, value, seen, depth)
        return
    seen[id(value)] = value
    yield name, value
    if depth > 0 and not (isinstance(value, _CONTAINERS) and len(value) > MOST_INSIDE):
        for label, _, held in inside(value) or []:
            yield from walk(name + label, held, seen, depth - 1, inside=inside, modules=modules)


def values_of_class(kind: type) -> dict[str, Any]:
    """Return the class attributes that instances find by name, except those of libraries.

    Of what classes have, these are the values that captures bake in: no functions, no properties.
    """
    found: dict[str, Any] = {}
    for base in kind.__mro__:
        if base is not object and not is_of_library(base):
            found = {**vars(base), **found}
    return {k: v for k, v in found.items() if not k.startswith("__") and _is_value(v)}


def value_of_class(kind: type, key: str) -> Any:
    """Return the class attribute of a name, of the first base that has it."""
    return next((vars(b)[key] for b in kind.__mro__ if key in vars(b)), Absence.ABSENT)


def _is_value(value: Any) -> bool:
    known = is_plain(value) or is_small_array(value) or is_object(value)
    return known or isinstance(value, (dict, set, frozenset, torch.Tensor, *_SEQUENCES))


def _shape(tensor: Any) -> Any:
    """Return what code can see of a tensor that it does not use; other values as they are."""
    if not isinstance(tensor, torch.Tensor):
        return tensor
    return _Keys((type(tensor), tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad))


def _shape_in(get: Callable[[Any], Any], key: Any) -> Any:
    return _shape(get(key))


class ValueGuards:
    """Guards for values that captures have baked in: by name, comparable and hashable.

    Plain values and arrays of up to 64 KiB are compared by value, also inside of containers
    and objects; everything else, larger arrays too, by identity. As long as nothing has changed,
    asking costs one comparison an entry.
    """

    def __init__(self) -> None:
        self._roots: dict[tuple[int, Any], tuple[str, Callable[[Any], Any], Any]] = {}
        self._checks: list[tuple[Callable[[Any], Any], Any, Any]] = []
        self._values: list[tuple[str, Any]] = []
        # Where values of these names are: the ``id`` of a table, an object or a cell, and a key
        self.where: dict[str, tuple[int, Any]] = {}
        self._seen: dict[int, Any] = {}
        self._described: tuple[tuple[str, Any], ...] | None = None
        self._words: frozenset[str] = frozenset()
        # Gives places that are no guards: a table, an object or a cell by its ``id``, and a key
        self._left_out: Callable[[], Container[tuple[int, Any]]] = tuple
        self._now_left_out: Container[tuple[int, Any]] = ()
        # Entries of objects whose tensors no captured code has used; those that some has
        self._unused: set[tuple[int, Any]] = set()
        self._used: set[tuple[int, Any]] = set()
        self._owners: list[Any] = []
        # By their ``id``, objects of which captured code has called no more than what is kept back:
        # compared by identity, unless code reads something that they hold
        self.called: Mapping[int, object] = {}
        self._known_called = 0
        # Gives the ``id`` of optimizers and the like that regions follow
        self.followed: Callable[[], Container[int]] = tuple

    def leave_out(self, places: Callable[[], Container[tuple[int, Any]]]) -> None:
        """Drop the guards of places that this gives, whatever name leads to them.

        A place is the ``id`` of a table, an object or a cell, and a key.
        """
        self._left_out = places
        self._described = None

    def leave_values_out(
        self,
        unused: Iterable[tuple[int, Any]],
        used: Iterable[tuple[int, Any]],
        owners: Iterable[Any],  # kept alive
    ) -> None:
        """Compare tensors in entries of objects by their shapes, unless code has used some.

        An entry is the ``id`` of an object, and a key.
        """
        self._used.update(used)
        self._unused = self._unused.union(unused) - self._used
        self._owners += owners
        self._described = None

    def has(self, owner: object, key: Any) -> bool:
        return (id(owner), key) in self._roots

    def tables(self) -> Iterator[tuple[str, Any, Any]]:
        """Yield name, table and key of each value that is read in a table, or in a cell."""
        for name, get, key in self._roots.values():
            table = get.args[0] if isinstance(get, partial) else getattr(get, "__self__", None)
            yield name, table, key

    def add(self, name: str, get: Callable[[Any], Any], key: Any, owner: object) -> None:
        """Guard ``get(key)`` from now on; a known key of this owner keeps its guard."""
        place = id(owner), key
        if place not in self._roots:
            self._roots[place] = (name, get, key)
            self._described = None

    def read(self, words: Iterable[str]) -> None:
        """Guard class attributes of objects, too, under the names that code reads."""
        if not self._words.issuperset(words):
            self._words |= frozenset(words)
            self._described = None

    def without(self, owners: Container[int]) -> ValueGuards:
        """Return these guards without those of owners that are given by ``id``."""
        rest = ValueGuards()
        rest._words, rest._left_out = self._words, self._left_out
        rest._unused, rest.called = self._unused, self.called
        rest._roots = {p: root for p, root in self._roots.items() if p[0] not in owners}
        return rest

    def now(self) -> tuple[tuple[str, Any], ...]:
        """Return name and present value of every guard, in order of addition."""
        is_known = self._described is not None and self._known_called == len(self.called)
        if is_known and self._described is not None and self._is_unchanged():
            return self._described
        self._known_called = len(self.called)
        self._checks, self._values, self._seen, self.where = [], [], {}, {}
        self._now_left_out = left_out = self._left_out()
        for place, (name, get, key) in self._roots.items():
            if place in left_out:
                continue
            value = get(key)
            self._checks.append((get, key, value))
            self.where[name] = place
            self._describe(name, value, DEPTH, len(self._values) + _MOST)
        self._described = tuple(self._values)
        self._seen = {}
        return self._described

    def _is_unchanged(self) -> bool:
        for get, key, known in self._checks:
            now = get(key)
            if now is not known and not is_still(now, known):
                return False
        return True

    def _describe(self, name: str, value: Any, depth: int, most: int) -> None:
        if (held := referent_of(value)) is not value:
            self._checks.append((id_of_referent, value, id(held)))
            name += "()" if issubclass(type(value), weakref.ref) else ""
            self._describe(name, held, depth, most)
            return
        if is_plain(value) or type(value) in _WRITTEN:
            self._values.append((name, Constant.plain(value)))
            return
        if id(value) in self._seen or value is _BUILTINS:
            self._values.append((name, Identity(value)))
            return
        self._seen[id(value)] = value
        if isinstance(value, ContextVar):
            held = value.get(Absence.ABSENT)
            self._checks.append((value.get, Absence.ABSENT, held))
            self._values.append((name, Identity(value)))
            self._describe(f"{name}.get()", held, depth - 1, most)
            return
        if isinstance(value, LRU_CACHE):
            self._checks.append((clearings_of, value, known := clearings_of(value)))
            self._values.append((name, Identity(value)))
            self._values.append((f"{name}.cache_clear", Constant.plain(known)))
            return
        value = contents_of_c(value)
        if is_of_objects(value) and depth and len(self._values) + value.size <= most:
            value = value.flat
        of_set = isinstance(value, (set, frozenset)) and len(value) <= _MOST
        if of_set or is_small_array(value):
            content: Callable[[Any], Any] = frozenset if of_set else ArrayValue.of
            known = content(value)
            self._checks.append((content, value, known))
            self._values.append((name, known))
            return
        if isinstance(value, DataLoader) and "dataset" in self._words:
            self._values.append((name, Identity(value)))
            self._describe(f"{name}.dataset", value.dataset, depth - 1, most)
            return
        if isinstance(value, (MethodType, partial)) and depth > 0:
            # Each look at a method in its object makes another one.
            self._values.append((name, Identity(getattr(value, "__func__", type(value)))))
            for key, held in brought_along(value) or ():
                if key != "__func__":
                    self._describe(f"{name}.{key}", held, depth - 1, most)
            return
        if isinstance(value, _STEPPED):
            self._describe_stepped(name, value, depth, most)
            return
        table = attributes_of(value) if is_object(value) else value
        if id(value) in self.called and self._words.isdisjoint(table):
            self._values.append((name, Identity(value)))
            return
        count = len(table) if isinstance(table, (dict, set, frozenset, *_SEQUENCES)) else None
        if count is not None:  # ahead of its entries: an index may be gone
            of_dict = table is value and isinstance(table, dict)
            self._checks.append((_Keys, table, _Keys(table)) if of_dict else (len, table, count))
        if count is None or not depth or len(self._values) + count > most:
            self._values.append((name, Identity(value, count)))
            return
        # Its entries are values of their own.
        self._values.append((name, Identity(type(value), count)))
        get = partial(dict.get, table) if isinstance(table, dict) else table.__getitem__
        for label, key, held in entries(value) or []:
            if (id(value), key) in self._now_left_out:
                continue
            if (id(value), key) in self._unused and isinstance(held, torch.Tensor):
                known = _shape(held)
                self._checks.append((partial(_shape_in, get), key, known))
                self._values.append((name + label, known))
                continue
            self.where[name + label] = id(value), key
            is_slot = table is not value and key not in table
            self._checks.append((partial(in_slot, value) if is_slot else get, key, held))
            self._describe(name + label, held, depth - 1, most)
        if table is not value:
            self._describe_class(name, value, depth, most)

    def _describe_class(self, name: str, value: Any, depth: int, most: int) -> None:
        """Describe what code reads of an object that it does not have itself, but its class."""
        kind = type(value)
        for key, held in values_of_class(kind).items():
            if key in self._words and key not in attributes_of(value):
                # An attribute of its own may come to hide it
                self._checks.append((attributes_of(value).get, key, None))
                self._checks.append((partial(value_of_class, kind), key, held))
                self._describe(f"{name}.{key}", held, depth - 1, most)

    def _describe_stepped(self, name: str, value: Any, depth: int, most: int) -> None:
        """Describe attributes that code names of an optimizer, a scheduler or a gradient scaler.

        What steps move in those that regions follow is compared there.
        """
        self._values.append((name, Identity(value)))
        table, is_own = vars(value), is_object(value)
        stepped = id(getattr(value, "optimizer", value))  # of a scheduler, or of a wrapper
        moved = _MOVED if stepped in self.followed() else frozenset[str]()
        asked = self._words.union([_LAST_RATES_OF] if _LAST_RATES in self._words else []) - moved
        for key in [k for k in table if k in asked and (is_own or k in _MOVED)] if depth else ():
            if (id(value), key) in self._now_left_out:
                continue
            self._checks.append((table.get, key, table[key]))
            self._describe(f"{name}.{key}", table[key], depth - 1, most)
        if is_own:
            self._describe_class(name, value, depth, most)


class Inside(NamedTuple):
    """Name and value of everything inside of an object or a container; tensors by identity."""

    values: tuple[tuple[str, Any], ...]

    @classmethod
    def of(cls, value: Any) -> Inside:
        held = ValueGuards()
        held.add("", lambda _: value, None, value)
        if is_object(value):
            held.read(values_of_class(type(value)))
        return cls(held.now())

    def changes(self, other: Inside) -> list[str]:
        """List the changes from this to another, a line each."""
        old, new = dict(self.values), dict(other.values)
        absent = Absence.ABSENT
        pairs = {key: (old.get(key, absent), new.get(key, absent)) for key in {**old, **new}}
        return [f"{key}: {change_words(a, b)}" for key, (a, b) in pairs.items() if a != b]


_OPENED = (set, list, dict, deque, MethodType, partial)  # of containers, the author's own


def as_hashable(value: Any) -> Hashable:
    """Return the comparable key of a value and of everything inside of it."""
    if isinstance(value, nn.Module):
        return Identity(value)
    if isinstance(value, _OPENED) or is_small_array(value) or is_object(value):
        with contextlib.suppress(Exception):  # of code of its own
            return Inside.of(value)
    try:
        return exact(value)
    except Exception:  # it has no hash, or one of its own that fails
        return Identity(value)
