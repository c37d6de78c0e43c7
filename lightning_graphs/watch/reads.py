"""Attributes, globals and closures that captured code reads."""

from __future__ import annotations

import contextlib
import datetime
import gc
import io
import os
import sys
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from functools import partial
from operator import attrgetter
from sys import getrefcount
from types import CellType, CodeType, FrameType, FunctionType, ModuleType
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.autograd import Function

from lightning_graphs.autograd.graphed import Stores
from lightning_graphs.device.rules import CLOCK, DRAWN
from lightning_graphs.device.trace import FunctionMode, tensors_in
from lightning_graphs.private.callsite import LIBRARIES, codes_in, is_library, named_at
from lightning_graphs.private.engine import current_autograd_node, tensor_hooks
from lightning_graphs.private.exchange import (
    LRU_CACHE,
    Absence,
    bind,
    bound,
    clear_uncounted,
    code_of,
    is_exchanged,
    nothing,
    replaced,
)
from lightning_graphs.private.generators import OF_TORCH
from lightning_graphs.private.torch import (
    COMPILED_FUNCTION,
    module_hooks,
    modules_in,
    parameters_in,
)
from lightning_graphs.values.guards import (
    BARE,
    ValueGuards,
    attributes_of,
    is_object,
    is_plain,
    is_still,
    value_of_class,
)
from lightning_graphs.values.snapshot import Change, PythonSnapshot
from lightning_graphs.watch.tracers import Tracer
from lightning_graphs.watch.user_code import (
    BASES,
    OF_ALL_MODULES,
    UserCode,
    function_of,
    functions_followed,
    held_elsewhere,
    inside_of_compiled,
    iter_objects,
    may_act,
    objects_in,
    optimizers_of,
)

# ------------------ Clocks

_NAMES = ("time", "perf_counter", "monotonic", "process_time", "thread_time")
NUMBERS: Mapping[str, Callable[[], Any]] = {
    name: getattr(time, name) for kind in _NAMES for name in (kind, f"{kind}_ns")
}
"""Functions of ``time`` that give a number, by their names."""

_OTHERS = (time.ctime, time.gmtime, time.localtime, time.strftime, time.clock_gettime, os.times)
_KNOWN: Mapping[Any, str] = {
    **{function: f"time.{name}" for name, function in NUMBERS.items()},
    **{function: f"{function.__module__}.{function.__name__}" for function in _OTHERS},
}
_OF_DATES = frozenset({"now", "utcnow", "today"})


def clock_named(function: Any) -> str:
    """Return the name of a C function that reads a clock; empty for others."""
    owner = getattr(function, "__self__", None)
    if isinstance(owner, type) and issubclass(owner, datetime.date):
        name = function.__name__
        return f"{owner.__name__}.{name}" if name in _OF_DATES else ""
    return _KNOWN.get(function, "") if type(function) is _OF_C else ""


_OF_C = type(time.time)


# ------------------ Attributes of modules

_LIBRARIES = ("torch.nn.", "torch.ao.", "torch._dynamo.")
_LIVE_IN_LIBRARIES = frozenset(
    {"p", "momentum", "dropout", "label_smoothing", "margin", "negative_slope", "alpha", "beta"}
    | {"delta", "lambd", "threshold", "reduction", "ignore_index", "track_running_stats"}
    | {"min_val", "max_val", "value", "dim", "approximate", "log_target", "log_input", "full"}
    | {"blank", "zero_infinity", "max_norm", "norm_type"}
)

_METHODS = (FunctionType, staticmethod, classmethod)


class AttributeGuards(ValueGuards):
    """Guards module attributes that captured steps have read, and notes those that they have set.

    A capture bakes them in. Their values are part of what a captured step depends on, so that a
    hook which anneals a weight or changes a dropout rate gets a graph for the new value. So is the
    absence of an attribute that was looked for in vain. A plain value, or a tensor, that the code
    has set itself before it reads it is no such value: every replay sets it again.
    """

    def __init__(self, is_apart: Callable[[nn.Module], bool] | None = None) -> None:
        super().__init__()
        # Whether a module does not run in captured code
        self.is_apart = _is_metric if is_apart is None else is_apart
        self.codes: dict[CodeType, None] = {}  # of the author's functions that ran
        self._kept: dict[int, Any] = {}
        self._unseen: list[tuple[str, nn.Module]] = []
        self._stored: dict[tuple[int, str], tuple[nn.Module, Any]] = {}
        self._paths: dict[int, str] = {}

    def read(self, words: Iterable[str]) -> None:
        """Guard these names in classes of objects, and in modules whose reads are not watched."""
        super().read(words)
        for name, owner in self._unseen:
            for key in (vars(owner).keys() & words) - OF_ALL_MODULES:
                if not _is_layer(owner) or _is_setting(vars(owner)[key]):
                    self.add(f"{name}.{key}", vars(owner).get, key, owner)

    def may_have_read(self, owner: object, key: Any) -> bool:
        """Return whether code may have read an attribute or entry before it set it."""
        return id(owner) not in self._paths or self.has(owner, key)

    def keep(self, values: Iterable[Any]) -> None:
        """Keep references to values that captured code may have found in caches."""
        self._kept.update((id(value), value) for value in values)

    def changed_outside(self, owners: Container[int]) -> list[str]:
        """Undo changes of code in modules other than these, given by their ``id``."""
        names = []
        for (place, key), (owner, before) in self._stored.items():
            if place not in owners and not is_still(vars(owner).get(key, Absence.ABSENT), before):
                names.append(f"{key} of a {type(owner).__name__}")
                bind(vars(owner), key, before)
        return names

    def stored(self) -> Stores:
        """Return the plain attributes that watched code has set since the last call."""
        places = [(owner, key) for (_, key), (owner, _) in self._stored.items()]
        self._stored.clear()
        found = [(owner, key, vars(owner).get(key, self)) for owner, key in places]
        return tuple(store for store in found if is_plain(store[2]))

    @contextlib.contextmanager
    def watching(
        self,
        module: nn.Module,
        others: Iterable[tuple[str, Any]] = (),
        held: Iterable[tuple[str, Any]] | None = None,  # what the module holds, if that is known
    ) -> Iterator[None]:
        """Note what the body reads from the module, from submodules of user code, and from others.

        Their classes are exchanged for subclasses. Layers of torch cannot be, where compiled code
        checks their class; of theirs, the numbers are noted that training is known to move, and
        those that user code names. What the body sets is noted of all of them.
        """
        self._thread = threading.get_ident()
        self._modules = {id(owner): owner for owner in modules_in(module)}
        closed, self._unseen = inside_of_compiled(module), []
        exchanged = []
        for name, owner in iter_objects(module) if held is None else held:
            if not isinstance(owner, nn.Module) or self.is_apart(owner):
                continue
            if is_layer := _is_layer(owner):
                table = vars(owner)
                for key in _LIVE_IN_LIBRARIES & table.keys():
                    if _is_setting(table[key]):
                        self.add(f"{name}.{key}", table.get, key, owner)
            if is_layer or owner in closed:
                self._unseen.append((name, owner))
            else:
                exchanged.append((owner, type(owner), name))
        exchanged += [(one, type(one), name) for name, one in others if is_watchable(one)]
        self._paths = paths = {id(owner): name for owner, _, name in exchanged}
        watched = {kind: self._watched(kind, paths) for kind in {kind for _, kind, _ in exchanged}}
        try:
            for owner, kind, _ in exchanged:
                object.__setattr__(owner, "__class__", watched[kind])
            with self._stores_noted(module):
                yield
        finally:
            for owner, kind, _ in exchanged:
                object.__setattr__(owner, "__class__", kind)

    def _is_mine(self) -> bool:
        """Return whether this thread runs the step: a backward pass on a GPU has its own."""
        return threading.get_ident() == self._thread or current_autograd_node() is not None

    @contextlib.contextmanager
    def _stores_noted(self, root: nn.Module) -> Iterator[None]:
        """Note what is set in existing modules, except in those that run later."""
        modules = {id(module) for module in modules_in(root) if not self.is_apart(module)}
        original: Any = nn.Module.__setattr__  # the only one that sees all of them

        def store(owner: nn.Module, key: str, value: Any) -> None:
            before = vars(owner).get(key, Absence.ABSENT)
            original(owner, key, value)
            if id(owner) in modules and key not in OF_ALL_MODULES and self._is_mine():
                self._stored.setdefault((id(owner), key), (owner, before))

        self._stored.clear()  # of code that was refused in the middle
        with replaced(nn.Module, "__setattr__", store):
            yield

    def _watched(self, kind: type, paths: Mapping[int, str]) -> type:
        own: Any = kind
        inherited = own.__getattribute__
        inherited_missing = getattr(own, "__getattr__", None)
        noted: set[tuple[int, str]] = set()

        def read(owner: Any, key: str) -> Any:
            value = inherited(owner, key)
            if key not in OF_ALL_MODULES:
                remember(owner, key, value)
            elif key == "__dict__" and not is_library(sys._getframe(1).f_code.co_filename):
                for each, held in [*value.items()] if id(owner) in paths else ():
                    if not each.startswith("_") and each not in OF_ALL_MODULES:
                        remember(owner, each, held)
            return value

        def remember(owner: Any, key: str, value: Any) -> None:
            place = id(owner), key
            if place in noted:
                return
            own = place in self._stored and (is_plain(value) or isinstance(value, Tensor))
            # A copy that the body makes has the watched class, too, and no path.
            if not own and place[0] in paths and self._is_mine():
                self._note(owner, kind, key, value, paths[place[0]])
                noted.add(place)

        def missing(owner: Any, key: str) -> Any:
            try:
                if inherited_missing is None:
                    raise AttributeError(f"{kind.__name__!r} object has no attribute {key!r}")
                return inherited_missing(owner, key)  # finds parameters, buffers and submodules
            except AttributeError:
                asked_by_library = is_library(sys._getframe(1).f_code.co_filename)
                is_special = key.startswith("__") or key in OF_ALL_MODULES
                if id(owner) in paths and not (asked_by_library or is_special):
                    get = partial(_looked_up, vars(owner), vars(kind))
                    self.add(f"{paths[id(owner)]}.{key}", get, key, owner)
                raise

        watched: dict[str, Any] = {"__getattribute__": read, "__getattr__": missing}
        watched["__module__"] = kind.__module__
        return type(kind)(kind.__name__, (kind,), watched)

    def _note(self, owner: Any, kind: type, key: str, value: Any, path: str) -> None:
        table = object.__getattribute__(owner, "__dict__")
        of_class = value_of_class(kind, key)
        is_method = isinstance(of_class, _METHODS)
        is_everywhere = any(of_class is value_of_class(base, key) for base in BASES)
        if key not in table and (is_everywhere or not (is_plain(of_class) or is_method)):
            return
        name = f"{path}.{'hparams' if key == '_hparams' else key}"
        if not (isinstance(value, nn.Module) or is_plain(value)):
            # A method brings its module along, of which nothing else is read here.
            inside = objects_in(name, value, dict(self._modules))
            for label in iterators_in(inside):  # before anything is taken from one
                _refuse_iterator(label)
        if key not in table and not is_method:
            self.add(name, partial(getattr, owner), key, owner)
        elif key in table and value is None:  # which a table without it gives as well
            self.add(name, partial(_looked_up, table, vars(kind)), key, owner)
        else:  # of a method, whether the instance has something else in its place
            self.add(name, table.get, key, owner)


def is_watchable(value: Any) -> bool:
    """Return whether the class of an object can be exchanged for one that is watched."""
    return (
        is_object(value) and bool(type(value).__dictoffset__) and not isinstance(value, nn.Module)
    )


def _is_metric(module: nn.Module) -> bool:
    return any(base.__module__.startswith("torchmetrics.") for base in type(module).__mro__)


def _is_layer(module: nn.Module) -> bool:
    return _author_of(type(module)).startswith(_LIBRARIES)


def _is_setting(value: object) -> bool:
    return isinstance(value, (bool, int, float, str))


def _author_of(kind: type) -> str:
    """Return the module of a class; torch derives its own classes for parametrized modules."""
    written = (base for base in kind.__mro__ if base.__module__ != "torch.nn.utils.parametrize")
    return next(written).__module__


def iterators_in(held: Iterable[tuple[str, Any]]) -> list[str]:
    """List names of values that are iterators, except open files, and weak references.

    Nor are objects of user code, whose ``__next__`` is followed like any method of theirs.
    """
    known = (pair for pair in held if type(pair[1]) not in weakref.ProxyTypes)
    kinds = ((name, v) for name, v in known if isinstance(v, Iterator) and not is_object(v))
    return [name for name, v in kinds if not isinstance(v, io.IOBase)]


def _refuse_iterator(name: str) -> NoReturn:
    DRAWN.stop_here(f"{name}, an iterator, is read")


def _looked_up(own: Mapping[str, Any], of_class: Mapping[str, Any], key: str) -> Any:
    """Look up what a module or its class sets; raising for absent names would cost too much."""
    return own.get(key, of_class.get(key, Absence.ABSENT))


class UnusedTensors:
    """Notes which tensors in attributes of objects code uses.

    A normalizer that data fits to each sample holds other tensors in every step, and stands in the
    settings of a module. What no operator has seen of it, and no code names, is no input of a
    graph. Names tell of code that runs out of sight: hooks, backward passes, optimizers.

    Args:
        held: What code finds, by name.
        words: Every name in user code that the capture runs, complete at its end.
    """

    def __init__(self, held: Iterable[tuple[str, Any]], words: Container[str]) -> None:
        self._owners: list[Any] = []  # alive, so that an ``id`` stays its own
        self._found: dict[tuple[int, str], Tensor] = {}
        self._words, self._seen = words, set[int]()  # the ``id`` of each tensor that was seen
        for _, value in held:
            for key, tensor in attributes_of(value).items() if is_object(value) else ():
                if isinstance(tensor, Tensor):
                    self._owners.append(value)
                    self._found[id(value), key] = tensor

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Note which of them operators of the body see, captured code, and which it keeps."""
        if not self._found:
            yield
            return
        known = {id(tensor) for tensor in self._found.values()}

        def called(function: Any, args: Any, kwargs: Any) -> Any:
            self._seen.update(known.intersection(map(id, tensors_in((args, kwargs)))))
            return function(*args, **kwargs)

        before = {place: getrefcount(tensor) for place, tensor in self._found.items()}
        with FunctionMode(called):
            yield
        for place, tensor in self._found.items():
            if getrefcount(tensor) != before[place]:  # code keeps it
                self._seen.add(id(tensor))

    def tell(self, reads: ValueGuards) -> None:
        """Let guards know, once the capture is over, of which objects it has used no tensor."""
        used = {
            owner
            for (owner, key), tensor in self._found.items()
            if id(tensor) in self._seen or key in self._words
        }
        unused = {place for place in self._found if place[0] not in used}
        reads.leave_values_out(unused, self._found.keys() - unused, self._owners)


# ------------------ Globals, closures, classes


def reached_by(root: nn.Module, function: Any, own: UserCode) -> list[tuple[str, Any]]:
    """List name and value of what a function, and the user's functions that it names, refer to."""
    found: list[tuple[str, Any]] = []
    reads = GlobalReads(root, own, lambda name, value: found.append((name, value)))
    reads.assume(function)
    for name, value in iter_objects(root):  # of its owner, what the code names
        if not reads.words.isdisjoint(name.split(".")):
            found.append((name, value))
    return found


_DEFAULTS = attrgetter("__defaults__")
_OF_ENVIRONMENT = frozenset({"environ", "getenv"})
_OF_SUPER = "__class__"  # the enclosing variable that super() reads


class GlobalReads:
    """Finds globals, closure variables and class attributes that executed user code refers to.

    Each function is looked at when it is called for the first time, before it can change anything.
    """

    def __init__(
        self,
        module: nn.Module,
        own: UserCode,
        # Called with the name and value of everything that is found, and of what is inside of it
        *listeners: Callable[[str, Any], object],
        held: Iterable[tuple[str, Any]] | None = None,
    ) -> None:
        self.words: set[str] = set((LIBRARIES.step, "forward"))  # every name in the code that ran
        self._module = module
        self._own = own
        # Called with the name of a clock that code reads for which nothing stands
        self.on_clock: Callable[[str], object] = lambda name: CLOCK.refused_here(f"{name} is read")
        # Called with the name of an iterator that code can take values from
        self.on_iterator: Callable[[str], object] = _refuse_iterator
        # Called with a frame, and a function in C which may act outside of Python's values
        self.on_act: Callable[[FrameType, Any], object] = nothing
        # Called with all places that functions refer to, as they are found
        self.on_found: Callable[[Iterable[Change]], object] = nothing
        self._iterators: list[str] = []  # that were found, and not told of yet
        self._free: set[str] = set()  # enclosing variables that the code names
        self._is_followed = False
        self._kinds: dict[type, None] = {}
        self._functions: defaultdict[CodeType, dict[FunctionType, None]] = defaultdict(dict)
        self._caches: dict[Any, int] = {}
        self._known: set[CodeType] = set()
        self.codes: list[CodeType] = []  # of the author's functions that ran
        tree = modules_in(module)
        self._seen: dict[int, Any] = {id(child): child for child in tree}
        self._seen |= held_elsewhere(module)
        self.contents = PythonSnapshot()  # of all that is found
        self._classes = self.contents.classes
        self._listeners = (self.contents.add, *listeners)
        for child in tree:
            self.look_into(type(child))
            self._look_inside(vars(child).get("forward"))
            for hook in module_hooks(child):
                self.assume(hook)
        for _, value in iter_objects(module) if held is None else held:
            self._look_inside(value)
        for optimizer in optimizers_of(module):
            self.look_into(type(optimizer))
        for parameter in parameters_in(module):  # their hooks run in a thread of autograd's
            for hook in tensor_hooks(parameter).values():
                self.assume(hook)

    # ------------------------------------------------------------------ following

    @contextlib.contextmanager
    def followed(self) -> Iterator[None]:
        """Follow the functions that the body calls in this thread.

        Compiled code does not run as Python, and a profiler that user code has set stays: in both
        cases the modules' functions count as if they had run.
        """
        tree = modules_in(self._module)
        for kind in set(map(type, tree)):  # those that watch reads are others
            if self._own.has_module(kind.__module__):
                self.contents.add_class(kind)
        profiled = sys.getprofile() is not None
        hidden = tree if profiled else inside_of_compiled(self._module)
        for kind in {base for child in hidden for base in type(child).__mro__}:
            for name in (LIBRARIES.step, "forward"):
                self.assume(vars(kind).get(name))
        self._is_followed = True
        self._tell_of_iterators()
        if profiled:
            yield
            return
        with functions_followed(self._begun, self._called, self._counts):
            yield

    def has(self, value: Any) -> bool:
        """Return whether the code refers to an object, or to something that holds it."""
        return self._seen.get(id(value)) is value

    def assume_running(self, frames: Iterable[FrameType]) -> None:
        """Look at functions that were called before they could be followed."""
        for frame in frames:
            self._begun(frame)

    def _begun(self, frame: FrameType) -> None:
        if frame.f_code not in self._known:
            self._read(frame.f_code, frame.f_globals)

    def _called(self, frame: FrameType, function: Any) -> None:
        if (name := clock_named(function)) and self._own.runs_in(frame):
            self.on_clock(name)
        elif may_act(function):
            self.on_act(frame, function)

    def _counts(self, frame: FrameType, function: Any) -> bool:
        return self._own.runs_in(frame) or may_act(function)

    def _read(self, code: CodeType, table: dict[str, Any]) -> None:
        """Resolve the names in a function and in functions that are nested in it."""
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
        self._free.update(code.co_freevars)
        for function in list(self._functions[code]):
            self._look_into_cells(function)
        self._tell_of_iterators()

    def know_iterators(self, held: Iterable[tuple[str, Any]]) -> None:
        """Tell of iterators in modules, too, where no read of an attribute is watched."""
        self._iterators += iterators_in(held)

    def _tell_of_iterators(self) -> None:
        """Tell of iterators that the code names, before it takes a value from one."""
        for label in list(self._iterators) if self._is_followed else ():
            word = label.partition("[")[0].rpartition(".")[2]
            if word in self.words or word in self._free:
                self._iterators.remove(label)
                self.on_iterator(label)

    def _look_into_cells(self, function: FunctionType) -> None:
        code = code_of(function)
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            if name != _OF_SUPER:
                self._add(name, cell, "cell_contents", code.co_names)

    def _is_own(self, function: FunctionType) -> bool:
        return self._own.has(code_of(function).co_filename, function.__module__ or "")

    def assume(self, value: Any) -> None:
        """Read a function that runs unfollowed, and user functions that it names."""
        function = function_of(value)
        if not isinstance(function, FunctionType) or code_of(function) in self._known:
            return
        if not self._is_own(function):
            return
        code, known = code_of(function), len(self.contents.bindings)
        self._functions[code][function] = None
        self._read(code, function.__globals__)
        for found in list(self.contents.bindings.values())[known:]:
            self.assume(found.before)
        for kind, before in list(self._classes.items()):
            for name in before.keys() & set(code.co_names) if issubclass(kind, nn.Module) else ():
                self.assume(before[name])

    def words_of(self, kinds: Iterable[type]) -> set[str]:
        """Return the names and keywords in user code of these classes.

        In their methods, and in the author's functions that these name.
        """
        for base in dict.fromkeys(base for kind in kinds for base in kind.__mro__):
            if self._own.has_module(base.__module__):
                for value in list(vars(base).values()):
                    self.assume(value)
        given = [part for code in self.codes for part in code.co_consts if type(part) is tuple]
        return self.words | {word for names in given for word in names if isinstance(word, str)}

    def _add(
        self, name: str, owner: dict[str, Any] | CellType, key: str, names: Iterable[str]
    ) -> None:
        value = bound(owner, key)
        if isinstance(value, Tracer):  # stands for what is there: a known place
            return
        if is_exchanged(value):
            self._look(name, getattr(value, "__wrapped__", None))
            return
        if isinstance(value, ModuleType):
            if self._own.has_module(value.__name__):
                for inner in set(names) & vars(value).keys():
                    self._add(f"{name}.{inner}", vars(value), inner, ())
        elif (id(owner), key) not in self.contents.bindings:
            found = self.contents.add_place(name, owner, key)
            self._look(name, value)
            self.on_found([Change(name, owner, owner, key, *[found.before] * 2)])

    def _look(self, name: str, value: Any) -> None:
        """Record a value and its contents."""
        if isinstance(value, type):
            self.look_into(value)
        elif isinstance(value, LRU_CACHE):
            self._caches.setdefault(value, value.cache_info().misses)
            self._look_inside(value.__wrapped__)
        elif isinstance(function_of(value), FunctionType):
            self._look_inside(value)
        else:
            if isinstance(value, Tensor):
                self._tell(name, value)
            for label, inside in objects_in(name, value, self._seen):
                self._tell(label, inside)
                self._look_inside(inside)

    def _tell(self, name: str, value: Any) -> None:
        if iterators_in([(name, value)]):
            self._iterators.append(name)
        for tell in self._listeners:
            tell(name, value)
        if self.on_found is not nothing:
            self.on_found(PythonSnapshot([(name, value)]).entries())

    def _look_inside(self, value: Any) -> None:
        """Record the class of an object, or the closure and defaults of a function."""
        kind = type(value)
        if kind in BARE or isinstance(value, nn.Module):
            return
        function = function_of(value)
        if is_object(value):
            self.look_into(kind)
        elif not isinstance(function, FunctionType):
            return
        elif not self._is_own(function):
            wrapped = getattr(function, "__wrapped__", None)
            if function.__name__ != "step" or hasattr(function, COMPILED_FUNCTION):
                self.assume(wrapped)
            else:  # of an optimizer, as a rule, which may not be called; else it is followed
                self._look_inside(wrapped)
        elif function not in self._functions[code_of(function)]:
            self._functions[code_of(function)][function] = None
            self._tell(function.__name__, function)
            for key in vars(function):
                self._add(f"{function.__qualname__}.{key}", vars(function), key, ())
            if code_of(function) in self._known:
                self._look_into_cells(function)

    def look_into(self, kind: type) -> None:
        """Record what user code finds in a class."""
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
                        self.assume(value)

    # ------------------------------------------------------------------ what they have changed

    def listed(self, names: Sequence[str]) -> str:
        """Format names for a message, with the user's line of the first one."""
        line = "" if names[0] == OF_TORCH else named_at(names[0], self.codes)
        return ", ".join(names[:3]) + line

    def empty_caches(self) -> None:
        """Empty each ``functools.lru_cache`` to which the capture added: it holds a graph's memory.

        Nothing has computed it yet.
        """
        for cache, misses in self._caches.items():
            if cache.cache_info().misses != misses:
                clear_uncounted(cache)
                self._caches[cache] = cache.cache_info().misses

    # ------------------------------------------------------------------ what a graph depends on

    def read_into(self, reads: AttributeGuards) -> None:
        """Add all of this to the guards of a capture."""
        reads.codes.update(dict.fromkeys(self.codes))
        for value in self._values():
            reads.add(*value)
        reads.read(self.words)
        if not self.words.isdisjoint(_OF_ENVIRONMENT):
            reads.add("os.environ", vars(os.environ).get, "_data", os.environ)
        # A graph may read tensors in a cache after they have gone. The collector's view is the only
        # one that shows what is in it.
        found = [held for cache in self._caches for held in gc.get_referents(cache)]
        tables = [held for held in found if isinstance(held, dict)]
        reads.keep(found + [entry for table in tables for entry in table.values()])

    def _values(self) -> Iterator[tuple[str, Callable[[Any], Any], Any, object]]:
        """Yield for each value its name, a reader with its key, and the owner of its binding."""
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
