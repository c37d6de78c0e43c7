"""The values outside of a module that its code reads: globals, enclosing variables, classes."""

from __future__ import annotations

import contextlib
import dis
import functools
import gc
import re
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

from lightning_graphs.core.callsite import CallSite
from lightning_graphs.core.contents import Contents, is_still
from lightning_graphs.core.values import (
    Absence,
    is_object,
    is_plain,
    is_small_array,
    value_of_class,
    values_of_class,
)
from lightning_graphs.training.held_values import held_in_value
from lightning_graphs.training.own_code import OwnCode

_KINDS = ("GLOBAL", "DEREF", "ATTR", "METHOD")  # of names in byte code, local ones left out
_CONTAINERS = (dict, list, tuple, set)
_MOST_PARTS = 64


class OutsideValues:
    """What the names hold that a module's code reads outside of it, and what is inside of that.

    Looked at are the methods of the module and its submodules, the functions of their author that
    these call, their global and enclosing variables, and the attributes of their classes.

    Args:
        module: The module, with a training_step or without.
        own: Tells the author's code from others'.

    Attributes:
        held: Name and value of what was found, and of what is inside of it.
    """

    def __init__(self, module: nn.Module, own: OwnCode) -> None:
        search = _Search(module, own)
        self._places = list(search.places.values())
        self._classes = [(kind, dict(vars(kind))) for kind in search.classes]
        self._caches = list(search.caches)
        self._sites = {**search.reading, **search.binding}
        self.held = list(search.held())
        self._contents = Contents(self.held)

    def changed(self) -> dict[str, CallSite]:
        """The names of what is no longer as it was, each with the author's line that has it.

        That is a line which binds the name, or else the first one that reads it.
        """
        names = {place.name for place in self._places if place.is_changed()}
        names.update(place.name for place in self._set_in_classes())
        return {name: self._site(name) for name in sorted(names.union(self._contents.changed()))}

    def _site(self, name: str) -> CallSite:
        words = reversed(re.findall(r"\w+", name))
        return next((self._sites[word] for word in words if word in self._sites), CallSite())

    def restore(self) -> None:
        """Put everything back."""
        for place in (*self._places, *self._set_in_classes()):
            if place.is_changed():
                place.restore()
        self._contents.restore()

    @contextlib.contextmanager
    def caches_left(self) -> Iterator[None]:
        """Empty each ``functools.lru_cache`` that the body, a capture, has put something in.

        That is memory of its graph, which nothing has computed yet.
        """
        misses = [cache.cache_info().misses for cache in self._caches]
        try:
            yield
        finally:
            for cache, before in zip(self._caches, misses, strict=True):
                if cache.cache_info().misses != before:
                    cache.cache_clear()

    def _set_in_classes(self) -> list[_Place]:
        places = [
            _Place(f"{kind.__name__}.{key}", kind, key, before.get(key, Absence.ABSENT))
            for kind, before in self._classes
            for key in {**before, **vars(kind)}
            if not key.startswith("__")
        ]
        return [place for place in places if place.is_changed()]


class NamedByCalls:
    """What lies outside of a module and is named by the code of its calls.

    That code is ``training_step``, where there is one, the forwards of the module and its
    submodules, and the author's functions and methods that these name; hooks are not among them.

    Args:
        module: The module.
        own: Tells the author's code from others'.
    """

    def __init__(self, module: nn.Module, own: OwnCode) -> None:
        self._search = _Search(module, own, of_calls=True)

    @property
    def words(self) -> Collection[str]:
        """Every name that the code reads."""
        return self._search.reading.keys()

    def values(self) -> Iterator[tuple[str, Callable[[Any], Any], Any, object]]:
        """Global and enclosing variables with values, attributes of functions and of classes.

        Returns:
            The name of each, what to call with which key for its value, and what it is bound in.
        """
        for kind in self._search.named_classes():
            for key in values_of_class(kind):
                if key in self.words:
                    yield f"{kind.__name__}.{key}", partial(value_of_class, kind), key, kind
        for function in self._search.functions():
            table = vars(function)
            for key in table:
                yield f"{function.__qualname__}.{key}", table.get, key, table
        for name, values, index in self._search.defaults():
            yield name, values.__getitem__, index, values
        for place in self._search.places.values():
            if _says_what_it_is(place.before):
                owner = place.owner
                get = owner.get if isinstance(owner, dict) else partial(_content, owner)
                yield place.name, get, place.key, owner

    def cached(self) -> list[Any]:
        """What ``functools.lru_cache`` holds: a graph may read tensors in it after they have gone.

        The collector's view of a cache is the only one that shows its contents.
        """
        found = [held for cache in self._search.caches for held in gc.get_referents(cache)]
        tables = [held for held in found if isinstance(held, dict)]
        return found + [entry for table in tables for entry in table.values()]


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a name is bound to a value: a module's globals, a cell of a function, or a class."""

    name: str
    owner: dict[str, Any] | CellType | type
    key: str
    before: Any

    @classmethod
    def of(cls, name: str, owner: dict[str, Any] | CellType | type, key: str) -> _Place:
        return cls(name, owner, key, _table(owner).get(key, Absence.ABSENT))

    def is_changed(self) -> bool:
        return not is_still(_table(self.owner).get(self.key, Absence.ABSENT), self.before)

    def restore(self) -> None:
        absent = self.before is Absence.ABSENT
        if isinstance(self.owner, dict):
            if absent:
                del self.owner[self.key]
            else:
                self.owner[self.key] = self.before
        elif absent:
            delattr(self.owner, self.key)
        else:
            setattr(self.owner, self.key, self.before)


def _says_what_it_is(value: Any) -> bool:
    """Whether a change of a value, or of what is inside of it, can be told by looking.

    Of a tensor, which may change in place, it can be told whether it is another one.
    """
    known = is_plain(value) or is_small_array(value) or isinstance(value, Tensor)
    return known or isinstance(value, _CONTAINERS) or is_object(value)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _content(cell: Any, _key: str) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is not filled yet, or not any more
        return Absence.ABSENT


def _table(owner: dict[str, Any] | CellType | type) -> Mapping[str, Any]:
    if isinstance(owner, CellType):
        try:
            return {"cell_contents": owner.cell_contents}
        except ValueError:  # it is not filled yet
            return {}
    return owner if isinstance(owner, dict) else vars(owner)


class _Search:
    """Follows names from the methods of a module to the values that its author's code reads.

    Args:
        module: The module.
        own: Tells the author's code from others'.
        of_calls: Begin with training_step and the forwards, and not with every method.
    """

    def __init__(self, module: nn.Module, own: OwnCode, *, of_calls: bool = False) -> None:
        self.places: dict[tuple[int, str], _Place] = {}
        self.classes: dict[type, None] = {}
        self.caches: dict[Any, None] = {}
        self._own = own
        self.reading: dict[str, CallSite] = {}
        self.binding: dict[str, CallSite] = {}
        self._modules = {id(child) for child in module.modules()}
        self._seen: set[FunctionType] = set()
        self._pending: deque[FunctionType] = deque()
        self._module_kinds: list[type] = []
        self._followed: dict[type, None] = {}
        self._of_calls = of_calls
        self._module = module
        self._follow(getattr(module, "training_step", None))
        kinds = {base for child in module.modules() for base in type(child).__mro__}
        if of_calls:
            self._module_kinds = [k for k in kinds if own.has_module(k.__module__)]
        for kind in kinds:
            self._follow(vars(kind).get("forward") if of_calls else kind)
        while self._pending:
            self._read(self._pending.popleft())

    @functools.cached_property
    def _attributes(self) -> list[tuple[str, Any]]:
        """Functions and objects in attributes of the modules: own code may call them."""
        return [
            (key, part)
            for child in self._module.modules()
            for key, value in vars(child).items()
            for part in _parts(value)
            if isinstance(part, (FunctionType, MethodType, functools.partial)) or is_object(part)
        ]

    def held(self) -> Iterator[tuple[str, Any]]:
        """Name and value of what was found but for plain values, and of what is inside of it."""
        yield from ((p.name, p.before) for p in self.places.values() if _is_tensor(p.before))
        seen = set(self._modules)
        values = [(place.name, place.before) for place in self.places.values()]
        values += [(function.__name__, vars(function)) for function in self.functions()]
        values += [
            (f"{kind.__name__}.{key}", value)
            for kind in self.classes
            for key, value in vars(kind).items()
            if not key.startswith("__")
        ]
        for name, value in values:
            yield from held_in_value(name, value, seen)

    def named_classes(self) -> list[type]:
        """The author's classes that the code may name: those of modules are named by ``self``."""
        return [*self.classes, *self._module_kinds]

    def defaults(self) -> Iterator[tuple[str, tuple[Any, ...], int]]:
        """Default values of the author's functions that can change: name, all, and which."""
        for function in filter(self._is_own, self._seen):
            for i, value in enumerate(function.__defaults__ or ()):
                if isinstance(value, _CONTAINERS) or is_object(value):
                    yield f"{function.__qualname__}'s default", function.__defaults__ or (), i

    def functions(self) -> Iterator[FunctionType]:
        """The author's functions that were found and have attributes, other than wrappers' own."""
        for function in self._seen:
            if vars(function) and "__wrapped__" not in vars(function) and self._is_own(function):
                yield function

    def _is_own(self, function: FunctionType) -> bool:
        return self._own.has(function.__code__.co_filename, function.__module__ or "")

    def _follow(self, value: Any) -> None:
        """Look into a function, a class or an object, where it is the author's own."""
        if isinstance(value, type):
            if value in self._module_kinds:
                return
            if value not in self.classes and self._own.has_module(value.__module__):
                self.classes[value] = None
                self._follow_methods(value)
        elif is_object(value):
            for kind in type(value).__mro__[:-1]:
                if not self._of_calls:
                    self._follow(kind)
                elif self._own.has_module(kind.__module__):
                    self._follow_methods(kind)
        elif hasattr(value, "cache_info") and hasattr(value, "__wrapped__"):
            self.caches[value] = None
            self._follow(value.__wrapped__)
        elif callable(value):
            function = _function_of(value)
            if isinstance(function, FunctionType) and function not in self._seen:
                self._seen.add(function)
                self._pending.append(function)
                self._follow(getattr(function, "__wrapped__", None))

    def _follow_methods(self, kind: type) -> None:
        """Look into the methods of a class: of calls, into those that Python or the code names."""
        if kind not in self._followed:
            self._followed[kind] = None
            for key, attribute in vars(kind).items():
                if not self._of_calls or key in self.reading or key.startswith("__"):
                    self._follow(_function_of(attribute))

    def _read(self, function: FunctionType) -> None:
        if not self._is_own(function):
            return
        code = function.__code__
        names = self._globals_of(code)
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            if name != "__class__":  # of super()
                self._add(_Place.of(name, cell, "cell_contents"))
        used = {name for part in _codes(code) for name in part.co_names}
        for kind in (*self._module_kinds, *self._followed) if self._of_calls else ():
            for name in used & vars(kind).keys():
                self._follow(_function_of(vars(kind)[name]))
        for name, value in self._attributes:
            if name in used:
                self._follow(value)
        for name in names:
            place = _Place.of(name, function.__globals__, name)
            self._add(place)
            if isinstance(place.before, ModuleType) and self._own.has_module(place.before.__name__):
                table = vars(place.before)
                for key in table.keys() & used:
                    self._add(_Place.of(f"{name}.{key}", table, key))

    def _globals_of(self, code: CodeType) -> dict[str, None]:
        """The global names in a function's code; notes the lines of these and of other names."""
        found: dict[str, None] = {}
        for part in _codes(code):
            line, lines = part.co_firstlineno, dict(dis.findlinestarts(part))
            for instruction in dis.get_instructions(part):
                line = lines.get(instruction.offset) or line
                action, _, kind = instruction.opname.partition("_")
                if kind not in _KINDS:
                    continue
                if kind == "GLOBAL":
                    found[instruction.argval] = None
                sites = self.binding if action == "STORE" else self.reading
                site = CallSite(part.co_filename, line, part.co_name)
                sites.setdefault(instruction.argval, site)
        return found

    def _add(self, place: _Place) -> None:
        if self.places.setdefault((id(place.owner), place.key), place) is place:
            self._follow(place.before)


def _parts(value: Any) -> list[Any]:
    """A value, or what is in a container; long ones are data."""
    if not isinstance(value, (dict, list, tuple)):
        return [value]
    held = value.values() if isinstance(value, dict) else value
    return list(held) if len(held) <= _MOST_PARTS else []


def _function_of(value: Any) -> Any:
    """The function behind a method, a property or a partial; other values as they are."""
    if isinstance(value, property):
        value = value.fget
    while isinstance(value, functools.partial):
        value = value.func
    return getattr(value, "__func__", value)


def _codes(code: CodeType) -> Iterator[CodeType]:
    """A function's code and that of the functions and comprehensions in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)
