"""Exchanges members of other objects, and modes of torch, and puts them back.

Functions, methods, attributes and classes that are exchanged while code is captured or a fit runs
pass through here. Several threads may fit: what they exchange in classes and modules is put back
in any order, and their captures take turns (:data:`TURN`).
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import re
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from enum import Enum
from functools import lru_cache, partial, wraps
from types import (
    CodeType,
    FrameType,
    FunctionType,
    MappingProxyType,
    MemberDescriptorType,
    ModuleType,
)
from typing import Any
from weakref import ProxyTypes, WeakKeyDictionary, ref

import torch
from torch.utils import _device, _python_dispatch


class Absence(Enum):
    """Value of an absent member."""

    ABSENT = "absent"

    def __repr__(self) -> str:
        return self.value


_OF_C = (ctypes._SimpleCData, ctypes.Array, ctypes.Structure)


def contents_of_c(value: Any) -> Any:
    """Return the memory of a value of ``ctypes``, as those that processes share; others as is."""
    if not isinstance(value, _OF_C):
        return value
    return memoryview((ctypes.c_char * ctypes.sizeof(value)).from_buffer(value)).cast("B")


def referent_of(value: Any) -> Any:
    """Return what a weak reference, a weak proxy or a read-only view of a dict leads to.

    Of a reference whose object is gone, None; other values as they are.
    """
    kind = type(value)  # a proxy says that its class is that of its object
    if kind is MappingProxyType:
        return gc.get_referents(value)[0]
    if kind in ProxyTypes:
        try:
            return value.__reduce_ex__.__self__
        except ReferenceError:
            return None
    return ref.__call__(value) if issubclass(kind, ref) else value


def id_of_referent(value: Any) -> int:
    """Return the identity of what such a value leads to, which guards compare."""
    return id(referent_of(value))


LRU_CACHE = type(lru_cache(len))
"""The class of functions that ``functools.lru_cache`` has wrapped."""


_counts: WeakKeyDictionary[Any, list[int]] = WeakKeyDictionary()  # hits, misses, clearings


def clearings_of(cache: Any) -> int:
    """Return how often a ``functools.lru_cache`` was found cleared, as its own counts tell."""
    hits, misses, *_ = cache.cache_info()
    known = _counts.setdefault(cache, [0, 0, 0])
    known[:] = hits, misses, known[2] + (hits < known[0] or misses < known[1])
    return known[2]


def clear_uncounted(cache: Any) -> None:
    """Clear a ``functools.lru_cache`` of what a capture has left there, which is no clearing."""
    clearings_of(cache)
    cache.cache_clear()
    _counts[cache][:2] = 0, 0


def in_slot(value: Any, key: str) -> Any:
    """Return what an object keeps in a slot."""
    try:
        return object.__getattribute__(value, key)
    except (AttributeError, ValueError):  # the latter of a cell that is not filled yet
        return Absence.ABSENT  # its own `__getattr__` is not asked: it may do anything


@lru_cache
def _slots(kind: type) -> tuple[str, ...]:
    tables = [vars(base).items() for base in kind.__mro__]
    found = (k for table in tables for k, v in table if isinstance(v, MemberDescriptorType))
    return tuple(key for key in found if key != "__dict__")  # a SimpleNamespace names it so


slots_of: Callable[[type], tuple[str, ...]] = _slots
"""The names under which instances of a class keep values outside of their ``__dict__``."""


def is_of_python(kind: type) -> bool:
    """Return whether a class is written in Python, by the way its instances are made."""
    new = vars(kind).get("__new__")
    return bool(kind.__flags__ & _HEAP_TYPE) and (new is None or isinstance(new, staticmethod))


_HEAP_TYPE = 1 << 9
"""``Py_TPFLAGS_HEAPTYPE`` of CPython's stable interface: classes of its own are none."""


def bound(owner: Any, key: Any) -> Any:
    """Return the value of a key in a dict or a class, or of a slot."""
    if isinstance(owner, (dict, type)):
        return (owner if isinstance(owner, dict) else vars(owner)).get(key, Absence.ABSENT)
    return in_slot(owner, key)


def bind(owner: Any, key: Any, value: Any) -> None:
    """Set or delete a member, past the ``__setattr__`` of a frozen class."""
    kind: Any = type if isinstance(owner, type) else object
    if isinstance(owner, dict):
        if value is Absence.ABSENT:
            owner.pop(key, None)
        else:
            owner[key] = value
    elif value is Absence.ABSENT:
        kind.__delattr__(owner, key)
    else:
        kind.__setattr__(owner, key, value)


Member = tuple[Any, str, Any]
"""An object, a class or a module of Python, a name in it, and a value for that."""

TURN = threading.RLock()
"""Held by a thread while it captures: what it exchanges in shared classes wraps what was there, and
must not wrap, or be wrapped by, what another capture has exchanged."""

_layers: dict[tuple[int, str], list[Any]] = {}
"""Member of a class or module, by its table -> its own value, and those set since."""


@contextlib.contextmanager
def exchanged(members: Iterable[Member]) -> Iterator[None]:
    """Exchange these members while the body runs.

    Of objects they are set in their ``__dict__``, past ``nn.Module.__setattr__``.
    """
    before: list[Member] = []
    shared: list[tuple[Any, str, Any, list[Any]]] = []
    try:
        for owner, name, value in members:
            table: Any = vars(owner)
            own = table.get(name, Absence.ABSENT)
            is_class = isinstance(owner, type)
            if is_class or isinstance(owner, ModuleType):  # which all threads share
                layers = _layers.setdefault((id(owner), name), [own])
                if len(layers) == 1:
                    layers[0] = own
                layers.append(value)
                shared.append((owner if is_class else table, name, value, layers))
            else:
                before.append((table, name, own))
            if is_class:
                bind(owner, name, value)
            else:
                table[name] = value
        yield
    finally:
        for place in reversed(before):
            bind(*place)
        for table, name, value, layers in reversed(shared):
            if layers[-1] is value:
                layers.pop()
                bind(table, name, layers[-1])
            else:  # it is hidden by that of another thread, which goes on
                del layers[next(i for i in range(len(layers) - 1, 0, -1) if layers[i] is value)]


FOR_A_WHILE = "_stands_for_a_while"
"""Attribute that marks functions and classes which a capture exchanges while it runs."""


def is_exchanged(value: Any) -> bool:
    """Return whether a value temporarily replaces ``float``, ``int`` or a function."""
    return isinstance(value, (FunctionType, type)) and FOR_A_WHILE in vars(value)


def standing_in(
    own: Callable[..., Any],
    instead: Callable[..., Any],
    follows: Callable[[FrameType], bool] = bool,
) -> Callable[..., Any]:
    """Make what stands for a function while this thread captures code.

    Args:
        own: The function, which is called by other threads and from other frames.
        instead: Called in its place, with the frame that calls, and the arguments.
        follows: Whether it is, given that frame.
    """
    thread = threading.get_ident()

    @wraps(own)
    def call(*args: Any, **kwargs: Any) -> Any:
        frame = sys._getframe(1)
        if threading.get_ident() != thread or not follows(frame):
            return own(*args, **kwargs)
        return instead(frame, *args, **kwargs)

    vars(call)[FOR_A_WHILE] = True
    return call


@contextlib.contextmanager
def called_instead(instead: Mapping[FunctionType, Callable[..., Any]]) -> Iterator[None]:
    """Have calls of these functions call others while the body runs, in this thread.

    Exchanged is the code of a function: names, containers and partials that hold it stay. What is
    called gets a function that does what it did, the frame that calls, and the arguments.
    """
    before = {function: function.__code__ for function in instead}
    try:
        for function, call in instead.items():
            again = _copy_of(function)
            own = _codes.setdefault(function, function.__code__)
            led = standing_in(again, partial(_led, call, again))
            function.__code__ = _code_that_calls(led, own)
        yield
    finally:
        for function, code in before.items():
            function.__code__ = code
            if _codes.get(function) is code:  # the outermost exchange of it ends
                del _codes[function]


_codes: dict[FunctionType, CodeType] = {}
"""The own code of functions that call others for a while."""


def code_of(function: FunctionType) -> CodeType:
    """Return the code that is a function's own, whatever it calls for a while."""
    return _codes.get(function, function.__code__)


def _led(call: Callable[..., Any], again: Any, frame: FrameType, *args: Any, **kwargs: Any) -> Any:
    return call(again, frame.f_back, *args, **kwargs)  # past the function's own frame


def _copy_of(function: FunctionType) -> FunctionType:
    name, defaults = function.__name__, function.__defaults__
    again = FunctionType(
        function.__code__, function.__globals__, name, defaults, function.__closure__
    )
    again.__kwdefaults__ = function.__kwdefaults__
    return again


def called_from(frame: FrameType, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return what calls a function as from the line that a frame has come to, for who looks."""
    code, there = _code_that_calls(function, (lambda: None).__code__), frame.f_code
    code = code.replace(
        co_filename=there.co_filename, co_name=there.co_name, co_firstlineno=frame.f_lineno
    )
    return FunctionType(code, {"__name__": frame.f_globals.get("__name__")})


def _code_that_calls(call: Callable[..., Any], own: CodeType) -> CodeType:
    """Make code that passes its arguments on, for a function that has this code and its cells."""
    constants = tuple(call if value is ... else value for value in _PASSING.co_consts)
    return _PASSING.replace(co_consts=constants, co_freevars=own.co_freevars)


with warnings.catch_warnings():
    warnings.simplefilter("ignore", SyntaxWarning)  # that a constant is called
    _EXPRESSION = compile("lambda *args, **kwargs: (...)(*args, **kwargs)", __file__, "eval")
_PASSING = next(code for code in _EXPRESSION.co_consts if isinstance(code, CodeType))


def replaced(owner: Any, name: str, value: Any) -> AbstractContextManager[None]:
    """Exchange one member of an object, class or Python module while the body runs."""
    return exchanged([(owner, name, value)])


@contextlib.contextmanager
def subclassed(owner: Any, members: Mapping[str, Any]) -> Iterator[None]:
    """Give an object a subclass of its class with these members while the body runs."""
    original = type(owner)
    owner.__class__ = type(original.__name__, (original,), dict(members))
    try:
        yield
    finally:
        owner.__class__ = original


def nothing(*_: Any, **__: Any) -> None:
    """Replace a method that must not run a second time."""


# ------------------ Modes of torch

# torch leaves modes only in the reverse order of their entry; its stacks of them are private.


def dispatch_modes() -> list[Any]:
    """Return this thread's dispatch modes, outermost first; nothing public reads them."""
    return list(_python_dispatch._get_current_dispatch_mode_stack())


def modes_entered() -> tuple[int, int]:
    """Return how many dispatch modes and function modes are entered in this thread."""
    return len(dispatch_modes()), torch._C._len_torch_function_stack()


@contextlib.contextmanager
def warnings_left_out(message: str = "") -> Iterator[None]:
    """Leave out warnings that begin so while the body runs.

    ``warnings.catch_warnings`` makes Python forget which lines have warned: those of user code
    would warn once more after each capture.
    """
    rule, filters = ("ignore", re.compile(message), Warning, None, 0), warnings.filters
    filters.insert(0, rule)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # code has reset the filters
            filters.remove(rule)  # type: ignore[attr-defined]


def innermost_modes() -> tuple[Any, Any]:
    """Return the dispatch mode and the function mode that see calls of this thread first."""
    functions = torch._C._len_torch_function_stack()
    innermost = next(reversed(dispatch_modes()), None)
    return innermost, torch._C._get_function_stack_at(functions - 1) if functions else None


def default_device() -> torch.device | None:
    """Return the device that a program has set for factories; torch tells the CPU if it set none.

    That is a mode below all others, which are shown no device.
    """
    found: torch.device | None = _device.CURRENT_DEVICE
    return found


def is_in_backward_pass() -> bool:
    """Return whether autograd's engine runs the calling code: a hook or a custom function."""
    return torch._C._current_graph_task_id() != -1


_infers: ContextVar[bool] = ContextVar("infers", default=False)


def in_inference_mode() -> bool:
    """Return whether code is in inference mode, or would be if it were not captured."""
    return torch.is_inference_mode_enabled() or _infers.get()


@contextlib.contextmanager
def inference_mode_left(*, records: bool | None = None) -> Iterator[None]:
    """Leave inference mode for the body, captured code, where it becomes ``torch.no_grad``.

    Tensors that are made there count writes then, and can be written whenever the graph is
    replayed. Kernels, and so values, are the same.

    Args:
        records: Autograd records in the body; None: as torch has it, which turns that on.
    """

    def enter(_: FrameType, mode: Any) -> None:
        mode._inference_mode_context = entered = contextlib.ExitStack()
        entered.callback(_infers.reset, _infers.set(mode.mode))
        if mode.mode:
            entered.enter_context(torch.no_grad())
            entered.enter_context(torch.autograd.forward_ad._set_fwd_grad_enabled(False))
        else:
            entered.enter_context(torch._C._InferenceMode(False))

    instead = standing_in(torch.inference_mode.__enter__, enter)
    with (
        torch.inference_mode(False),
        contextlib.nullcontext() if records is None else torch.set_grad_enabled(records),
        replaced(torch.inference_mode, "__enter__", instead),
    ):
        yield


@contextlib.contextmanager
def modes_left(entered: tuple[int, int]) -> Iterator[None]:
    """Leave modes that were entered after these for the body, which exchanges the others.

    A capture ends, and another one begins, while modes are entered that watch its code.
    """
    dispatching, functions = modes_entered()
    inner = [_python_dispatch._pop_mode() for _ in range(dispatching - entered[0])]
    others = [torch._C._pop_torch_function_stack() for _ in range(functions - entered[1])]
    try:
        yield
    finally:
        for mode in reversed(others):
            torch._C._push_on_torch_function_stack(mode)
        for mode in reversed(inner):
            _python_dispatch._push_mode(mode)
