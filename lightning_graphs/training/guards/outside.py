"""Finds values outside of modules that code which ran names: globals, closures, classes."""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from operator import attrgetter
from types import CellType, CodeType, FrameType, FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn
from torch.autograd import Function

from lightning_graphs.core.arguments.contents import Contents
from lightning_graphs.core.arguments.values import is_object, value_of_class
from lightning_graphs.core.callsite import codes_in, named_at
from lightning_graphs.core.generators import OF_TORCH
from lightning_graphs.core.private.torch import accumulation_hooks, gradient_hooks, module_hooks
from lightning_graphs.exchange import Absence, bound
from lightning_graphs.training.guards.clocks import CLOCK, clock_named
from lightning_graphs.training.guards.own_code import OwnCode, function_of, inside_of_compiled
from lightning_graphs.training.guards.python_state import AttributeReads
from lightning_graphs.training.guards.walkers import held_in, held_in_value
from lightning_graphs.training.host.followed import stands_for_a_while

_DEFAULTS = attrgetter("__defaults__")
_ENTRIES = ("training_step", "forward")  # which no code of the author's names
_OF_SUPER = "__class__"  # the enclosing variable that super() reads
_LRU_CACHE = type(functools.lru_cache(lambda: None))


class OutsideValues:
    """What the author's functions that run name outside of modules, and what is inside of that.

    Each function is looked at when it is called for the first time, before it can change anything.
    """

    def __init__(
        self,
        module: nn.Module,
        own: OwnCode,
        # Called with the name and value of everything that is found, and of what is inside of it
        *listeners: Callable[[str, Any], object],
        held: Iterable[tuple[str, Any]] | None = None,
    ) -> None:
        self.words: set[str] = set(_ENTRIES)  # every name in the code that ran
        self._module = module
        self._own = own
        # Called with the name of a clock that code reads for which nothing stands
        self.on_clock: Callable[[str], object] = lambda name: CLOCK.refused_here(f"{name} is read")
        self._kinds: dict[type, None] = {}
        self._functions: defaultdict[CodeType, dict[FunctionType, None]] = defaultdict(dict)
        self._caches: dict[Any, int] = {}
        self._known: set[CodeType] = set()
        self.codes: list[CodeType] = []  # of the author's functions that ran
        self._seen: dict[int, Any] = {id(child): child for child in module.modules()}
        self.contents = Contents()  # of all that is found
        self._classes = self.contents.classes
        self._listeners = (self.contents.add, *listeners)
        for child in module.modules():
            self._look_into_class(type(child))
            self._look_inside(vars(child).get("forward"))
            for hook in module_hooks(child):
                self._assume(hook)
        for _, value in held_in(module) if held is None else held:
            self._look_inside(value)
        for parameter in module.parameters():  # their hooks run in a thread of autograd's
            for table in (gradient_hooks(parameter), accumulation_hooks(parameter)):
                for hook in table.values() if isinstance(table, dict) else ():
                    self._assume(hook)

    # ------------------------------------------------------------------ following

    @contextlib.contextmanager
    def followed(self) -> Iterator[None]:
        """Follow the functions that the body calls, in this thread.

        Compiled code does not run as Python, and a profiler that somebody has set is left alone:
        the functions of the modules concerned count as if they had run.
        """
        for kind in set(map(type, self._module.modules())):  # those that watch reads are others
            if self._own.has_module(kind.__module__):
                self.contents.add_class(kind)
        profiled = sys.getprofile() is not None
        hidden = self._module.modules() if profiled else inside_of_compiled(self._module)
        for kind in {base for child in hidden for base in type(child).__mro__}:
            for name in _ENTRIES:
                self._assume(vars(kind).get(name))
        if profiled:
            yield
            return
        sys.setprofile(self._called)
        try:
            yield
        finally:
            sys.setprofile(None)

    def _called(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code not in self._known:
            self._read(frame.f_code, frame.f_globals)
        elif event == "c_call" and (name := clock_named(argument)) and self._own.runs_in(frame):
            self.on_clock(name)

    def _read(self, code: CodeType, table: dict[str, Any]) -> None:
        """Look at what is behind the names in a function, and in those that are inside of it."""
        self._known.add(code)
        if not self._own.has(code.co_filename, table.get("__name__", "")):
            return
        codes = list(codes_in(code))
        self._known.update(codes)
        self.codes += codes
        names = dict.fromkeys(name for part in codes for name in part.co_names)
        self.words.update(names)
        for name in names:  # attributes among them may have the name of a global variable
            self._add(name, table, name, names)
        for function in list(self._functions[code]):
            self._look_into_cells(function)

    def _look_into_cells(self, function: FunctionType) -> None:
        code = function.__code__
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            if name != _OF_SUPER:
                self._add(name, cell, "cell_contents", code.co_names)

    def _is_own(self, function: FunctionType) -> bool:
        return self._own.has(function.__code__.co_filename, function.__module__ or "")

    def _assume(self, value: Any) -> None:
        """Read a function that runs where nobody follows it, and those of the author it names."""
        function = function_of(value)
        if not isinstance(function, FunctionType) or function.__code__ in self._known:
            return
        if not self._is_own(function):
            return
        code, known = function.__code__, len(self.contents.bindings)
        self._functions[code][function] = None
        self._read(code, function.__globals__)
        for found in list(self.contents.bindings.values())[known:]:
            self._assume(found.before)
        for kind, before in list(self._classes.items()):
            for name in before.keys() & set(code.co_names) if issubclass(kind, nn.Module) else ():
                self._assume(before[name])

    def words_of(self, kinds: Iterable[type]) -> set[str]:
        """Names, those of keywords too, in what the author has given these classes.

        In their methods, and in the author's functions that these name.
        """
        for base in dict.fromkeys(base for kind in kinds for base in kind.__mro__):
            if self._own.has_module(base.__module__):
                for value in list(vars(base).values()):
                    self._assume(value)
        given = [part for code in self.codes for part in code.co_consts if type(part) is tuple]
        return self.words | {word for names in given for word in names if isinstance(word, str)}

    def _add(
        self, name: str, owner: dict[str, Any] | CellType, key: str, names: Iterable[str]
    ) -> None:
        value = bound(owner, key)
        if stands_for_a_while(value):
            self._look(name, getattr(value, "__wrapped__", None))
            return
        if isinstance(value, ModuleType):
            if self._own.has_module(value.__name__):
                for inner in set(names) & vars(value).keys():
                    self._add(f"{name}.{inner}", vars(value), inner, ())
        elif (id(owner), key) not in self.contents.bindings:
            self.contents.add_place(name, owner, key)
            self._look(name, value)

    def _look(self, name: str, value: Any) -> None:
        """Look into a value: what it was is known from now on."""
        if isinstance(value, type):
            self._look_into_class(value)
        elif isinstance(value, _LRU_CACHE):
            self._caches.setdefault(value, value.cache_info().misses)
            self._look_inside(value.__wrapped__)
        elif isinstance(function_of(value), FunctionType):
            self._look_inside(value)
        else:
            if isinstance(value, Tensor):
                self._tell(name, value)
            for label, inside in held_in_value(name, value, self._seen):
                self._tell(label, inside)
                self._look_inside(inside)

    def _tell(self, name: str, value: Any) -> None:
        for tell in self._listeners:
            tell(name, value)

    def _look_inside(self, value: Any) -> None:
        """Look at the class of an object, and at what a function brings with it."""
        function = function_of(value)
        if is_object(value):
            self._look_into_class(type(value))
        elif not isinstance(function, FunctionType):
            return
        elif not self._is_own(function):
            self._assume(getattr(function, "__wrapped__", None))  # by torch.compile, as a rule
        elif function not in self._functions[function.__code__]:
            self._functions[function.__code__][function] = None
            self._tell(function.__name__, function)
            for key in vars(function):
                self._add(f"{function.__qualname__}.{key}", vars(function), key, ())
            if function.__code__ in self._known:
                self._look_into_cells(function)

    def _look_into_class(self, kind: type) -> None:
        if kind in self._kinds:
            return
        self._kinds[kind] = None
        for base in kind.__mro__:
            if base not in self._classes and self._own.has_module(base.__module__):
                self.contents.add_class(base)
                for key, value in self._classes[base].items():
                    if not key.startswith("__") or isinstance(value, FunctionType):
                        self._look(f"{base.__name__}.{key}", value)
                    if issubclass(base, Function):  # its backward runs in a thread of autograd
                        self._assume(value)

    # ------------------------------------------------------------------ what they have changed

    def listed(self, names: Sequence[str]) -> str:
        """Some names for a message, with the author's line of the first one."""
        line = "" if names[0] == OF_TORCH else named_at(names[0], self.codes)
        return ", ".join(names[:3]) + line

    def empty_caches(self) -> None:
        """Empty each ``functools.lru_cache`` in which something was put, memory of a graph.

        Nothing has computed it yet.
        """
        for cache, misses in self._caches.items():
            if cache.cache_info().misses != misses:
                cache.cache_clear()
                self._caches[cache] = cache.cache_info().misses

    # ------------------------------------------------------------------ what a graph depends on

    def read_into(self, reads: AttributeReads) -> None:
        """Let a capture that was followed depend on all of this."""
        reads.codes.update(dict.fromkeys(self.codes))
        for value in self._values():
            reads.add(*value)
        reads.read(self.words)
        # A graph may read tensors in a cache after they have gone. The collector's view is the only
        # one that shows what is in it.
        found = [held for cache in self._caches for held in gc.get_referents(cache)]
        tables = [held for held in found if isinstance(held, dict)]
        reads.keep(found + [entry for table in tables for entry in table.values()])

    def _values(self) -> Iterator[tuple[str, Callable[[Any], Any], Any, object]]:
        """The name of each value, what to call with which key for it, and what it is bound in."""
        for kind in self._kinds:
            own = [base for base in kind.__mro__ if base in self._classes]
            for key in dict.fromkeys(key for base in own for key in self._classes[base]):
                if key in self.words and not (key.startswith("__") and key.endswith("__")):
                    held = value_of_class(kind, key)
                    is_itself = getattr(kind, key, None) is getattr(held, "__func__", held)
                    look: Callable[..., Any] = getattr if is_itself else value_of_class
                    yield f"{kind.__name__}.{key}", partial(look, kind), key, kind
        for function in (f for code in self._known for f in self._functions.get(code, ())):
            if function.__defaults__:
                yield f"{function.__qualname__}'s defaults", _DEFAULTS, function, function
        for name, owner, key, before in self.contents.bindings.values():
            if before is not Absence.ABSENT and isinstance(owner, (dict, CellType)):
                get = owner.get if isinstance(owner, dict) else partial(getattr, owner)
                yield name, get, key, owner
