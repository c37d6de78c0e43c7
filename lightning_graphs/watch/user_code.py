"""Tells user code from libraries; finds objects that it can reach, and functions that it calls."""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from inspect import unwrap
from types import (
    BuiltinFunctionType,
    CodeType,
    FrameType,
    FunctionType,
    MethodDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_graphs.private.callsite import (
    NUMERIC,
    OURS,
    STANDARD,
    frames_from,
    is_installed,
    is_library,
)
from lightning_graphs.private.engine import tensor_hooks
from lightning_graphs.private.exchange import code_of
from lightning_graphs.private.torch import (
    COMPILED_CALL,
    COMPILED_FUNCTION,
    compiled_code_noticed,
    hides_memory,
    is_compiled,
    is_strided,
    makes_own_graphs,
    module_hooks,
    modules_in,
    named_buffers_in,
    named_modules_in,
    named_parameters_in,
    out_of_sight,
    tables_of,
    version_of,
)
from lightning_graphs.values.guards import BARE, DEPTH, entries, is_plain, walk
from lightning_graphs.values.snapshot import Snapshot

# ------------------ User, library and compiled code


def function_of(value: Any) -> Any:
    """Unwrap a method, a property or a partial; return other values as they are."""
    if isinstance(value, property):
        value = value.fget
    while isinstance(value, partial):
        value = value.func
    return getattr(value, "__func__", value) if isinstance(value, _BOUND) else value


_BOUND = (MethodType, staticmethod, classmethod)


class UserCode:
    """Tells user code from the code of libraries.

    Installed packages are libraries, but for the one that the root module's class is from, or that
    is given.
    """

    def __init__(self, root: nn.Module, package: str = "") -> None:
        kinds = (kind.__module__ for kind in type(root).__mro__)  # FSDP2 derives one of torch's
        named = next(n for n in kinds if "torch.distributed" not in n).partition(".")[0]
        self._package = package or named
        self._judged = set[str]()  # names in `sys.modules`
        self._own: list[str] = []  # those of them where user code is
        # Whether code of this file, in the module of this name, is the author's
        self.has: Callable[[str, str], bool] = cache(self._judge)
        # Whether a module is one of an installed package, but those that every step goes through
        self.has_installed: Callable[[str], bool] = cache(self._judge_installed)

    def _judge(self, file: str, name: str) -> bool:
        if file.startswith("<"):  # a notebook, or made by a dataclass or the like for a module
            if name not in sys.modules:
                return False
            file = getattr(sys.modules[name], "__file__", None) or file
        if is_library(file):
            return False
        if name.partition(".")[0] == self._package:
            return True
        path = os.path.normpath(file)
        return not (path.startswith(STANDARD) or is_installed(path))

    def modules(self) -> list[ModuleType]:
        """List the modules that are imported and user code.

        Thousands are imported, few by the next call: each is judged once, and those of an installed
        package by that.
        """
        new = sys.modules.keys() - self._judged
        packages = {name: name.partition(".")[0] for name in new}
        foreign = {
            package
            for package in {*packages.values()}
            if (file := getattr(sys.modules.get(package), "__file__", None)) is not None
            and not self.has(file, package)
        }
        self._judged.update(new)
        self._own += [n for n in new if packages[n] not in foreign and self.has_module(n)]
        found = map(sys.modules.get, self._own)
        return [module for module in found if isinstance(module, ModuleType)]

    def has_module(self, name: str) -> bool:
        """Return whether a module that was imported under this name is user code."""
        file = getattr(sys.modules.get(name), "__file__", None)
        if file is None:  # a notebook, unlike modules of C
            return name == "__main__"
        return self.has(file, name)

    def runs_in(self, frame: FrameType) -> bool:
        """Return whether a frame runs user code."""
        return self.has(frame.f_code.co_filename, frame.f_globals.get("__name__", ""))

    def _judge_installed(self, name: str) -> bool:
        # NumPy and its like take `float` for a type of numbers of their own
        file = getattr(sys.modules.get(name), "__file__", None)
        if file is None or is_library(file) or name.partition(".")[0] in NUMERIC:
            return False
        return is_installed(os.path.normpath(file))


def inside_of_compiled(root: nn.Module) -> set[nn.Module]:
    """List modules whose class compiled code checks.

    The root is one of them if its step is compiled, as by ``trainer.fit(torch.compile(module))``.
    """
    own = [vars(value) for value in vars(root).values() if isinstance(value, FunctionType)]
    if any(COMPILED_FUNCTION in each and not each.get("_torchdynamo_disable") for each in own):
        return {*modules_in(root)}
    compiled = filter(is_compiled, modules_in(root))
    return {module for owner in compiled for module in modules_in(owner)} - {root}


_OWN_GRAPHS = (
    "is compiled to CUDA graphs of its own, which no graph can hold; write torch.compile(...) "
    "without mode, or mode='max-autotune-no-cudagraphs'"
)


def obstacle_in(module: nn.Module) -> str | None:
    """Why no graph can hold a module, or one inside of it, in a sentence; None if one can."""
    for owner in with_own_graphs(module):
        return f"`{owner}` {_OWN_GRAPHS}"
    devices: dict[torch.device, str] = {}
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if hides_memory(tensor):
            return f"`{name}` {hidden_in(tensor)}"
        if tensor.device.type not in ("cpu", "meta"):
            devices.setdefault(tensor.device, name)
    if len(devices) > 1:
        (one, first), (other, second), *_ = devices.items()
        return f"`{first}` is on {one} and `{second}` on {other}, but a graph runs on one device"
    return None


def hidden_in(tensor: Tensor) -> str:
    """Say why nothing finds a tensor's values."""
    kind = type(tensor).__name__
    return f"is of the class {kind}, which lacks __tensor_flatten__: its values cannot be found"


def with_own_graphs(module: nn.Module) -> Iterator[str]:
    """List qualified names of submodules and attributes with CUDA graphs of ``torch.compile``."""
    for name, inner in module.named_modules():
        if makes_own_graphs(inner):
            yield name or type(inner).__name__
            continue
        for attribute, value in vars(inner).items():
            if callable(value) and not isinstance(value, nn.Module) and makes_own_graphs(value):
                where = name if attribute == COMPILED_CALL else f"{name}.{attribute}"
                yield where.strip(".") or type(inner).__name__


def bound_by_hooks(root: nn.Module) -> dict[str, str]:
    """List weights that old ``torch.nn.utils`` hooks bind again in each call, with remedies.

    ``weight_norm``, ``spectral_norm`` and pruning set a plain attribute, ahead of the forward.
    """
    found: dict[str, str] = {}
    for path, inner in root.named_modules():
        for hook in module_hooks(inner):
            name = getattr(hook, "name", None) or getattr(hook, "_tensor_name", None)
            library, _, kind = type(hook).__module__.rpartition(".")
            if library == "torch.nn.utils" and name:
                new = "prune.remove" if kind == "prune" else f"parametrizations.{kind}"
                found[f"{path}.{name}".lstrip(".")] = f"{library}.{new}"
    return found


class CompiledCode:
    """Notes whether steps of a fit call code that ``torch.compile`` has made.

    Such code has no host program. It checks the functions and classes that it was compiled with,
    and is compiled again if these change. Other compiled code of the process does not count.
    """

    runs = False

    def watching(self) -> AbstractContextManager[None]:
        """Watch the body, an eager step or its capture, until a call of compiled code is seen."""
        return nullcontext() if self.runs else compiled_code_noticed(self._note)

    def _note(self) -> None:
        self.runs = True


# ------------------ Objects and tensors in modules

_TABLES = ("_parameters", "_buffers", "_modules")

OF_ALL_MODULES = {*vars(nn.Module()), "__dict__", "forward"}
"""Attributes of modules that are no values of their author's."""

BASES: list[type[nn.Module]] = [nn.Module]
"""Classes of libraries from which those of authors derive."""

HELD_ELSEWHERE: list[Callable[[nn.Module], Iterable[Any]]] = [
    lambda root: vars(root).get("_held_elsewhere", ())
]
"""Functions that give objects into which :func:`iter_objects` does not look, of the root module."""


def know_base(kind: type[nn.Module], *names: str) -> None:
    """Register a client's base class of modules, and its attributes that hold no user values."""
    BASES.append(kind)
    OF_ALL_MODULES.update(vars(kind()), names)


Held = Iterable[tuple[str, Any]]
"""Names and values of all that a module holds; see :func:`iter_objects`."""


def iter_objects(root: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield name and value of every module in a tree, and of values in their attributes.

    Of what every module has, only the tables of its parameters, buffers and submodules.
    """
    seen = held_elsewhere(root)
    yield from _of_tree("self", root, seen, DEPTH + 1)
    for optimizer in optimizers_of(root):
        for key, value in vars(optimizer).items():
            name = f"{type(optimizer).__name__}.{key}"
            yield from walk(name, brought(value), seen, modules=_of_tree)


def optimizers_of(root: nn.Module) -> list[Optimizer]:
    """Return the optimizers of a module's training."""
    return [one for one in held_elsewhere(root).values() if isinstance(one, Optimizer)]


def brought(value: Any) -> FunctionType | None:
    """Return the function of user code in a method that code has put on an optimizer, if any."""
    while value is not None:  # others may be around it, as those of schedulers
        function = function_of(value)
        if isinstance(function, FunctionType) and not is_library(code_of(function).co_filename):
            return function
        value = getattr(value, "__wrapped__", None)
    return None


def step_brought(optimizer: Optimizer) -> FunctionType | None:
    """Return the function that user code has put around the step of its class, if any."""
    return brought(vars(optimizer).get("step"))


def steps_of_optimizers(root: nn.Module) -> set[CodeType]:
    """Return the code of the functions that step the optimizers of a module."""
    found = optimizers_of(root)
    steps = [*map(step_brought, found), *(unwrap(type(one).step) for one in found)]
    return {code_of(step) for step in steps if isinstance(step, FunctionType)}


def held_elsewhere(root: nn.Module) -> dict[int, Any]:
    """Return objects by their ``id`` that the engine guards and puts back by other means.

    Among them what optimizers hold, which wrappers around them bind, too.
    """
    found = [one for find in HELD_ELSEWHERE for one in find(root)]
    for one in [each for each in found if isinstance(each, Optimizer)]:
        found += [one.state, one.param_groups, *one.param_groups]
    return {id(one): one for one in found}


def objects_in(name: str, value: Any, seen: dict[int, Any]) -> Iterator[tuple[str, Any]]:
    """Yield name and value of all objects in a value, itself first, modules included."""
    return walk(name, value, seen, modules=_of_tree)


def _of_tree(
    name: str, root: nn.Module, seen: dict[int, Any], depth: int
) -> Iterator[tuple[str, Any]]:
    modules = [(path, m) for path, m in named_modules_in(("", root)) if id(m) not in seen]
    seen.update((id(module), module) for _, module in modules)
    for path, module in modules:
        yield from _of_module(f"{name}.{path}" if path else name, module, seen, depth - 1)


def _of_module(
    name: str, module: nn.Module, seen: dict[int, Any], depth: int
) -> Iterator[tuple[str, Any]]:
    if isinstance(module, torch.jit.ScriptModule):  # it holds nothing of Python's
        return
    yield name, module
    for key, value in vars(module).items():
        if key in _TABLES:
            yield name, value
            for label, tensor in value.items() if key != "_modules" else ():
                if tensor is not None and not _is_bare(tensor):
                    yield from _of_tensor(f"{name}.{label}", tensor, seen, depth)
        elif key not in OF_ALL_MODULES and not is_plain(value):
            yield from walk(f"{name}.{key}", value, seen, depth, modules=_of_tree)
    for hook in module_hooks(module):
        yield from walk(f"{name}.{_name_of(hook)}", hook, seen, depth, modules=_of_tree)


def _is_bare(tensor: Tensor) -> bool:
    """Return whether a tensor has no attributes and no hooks, as most."""
    return type(tensor) in BARE and not (vars(tensor) or tensor_hooks(tensor))


def _of_tensor(
    name: str, tensor: Tensor, seen: dict[int, Any], depth: int
) -> Iterator[tuple[str, Any]]:
    """Yield what attributes and hooks of a parameter or buffer hold."""
    yield from walk(name, tensor, seen, depth, modules=_of_tree)
    for hook in tensor_hooks(tensor).values():
        yield from walk(f"{name}.{_name_of(hook)}", hook, seen, depth, modules=_of_tree)


def _name_of(hook: Any) -> str:
    return getattr(hook, "__name__", type(hook).__name__)


_MOST_BYTES = 2**28


class UnregisteredTensors:
    """Tensors that are neither parameters nor buffers of a module, with their version counters.

    Code changes them as it changes buffers, and a verification has to put them back. The buffers
    of modules that are not registered count as written: BatchNorm's kernels do not say so.
    """

    def __init__(self, module: nn.Module, held: Iterable[tuple[str, Any]]) -> None:
        tree = named_modules_in(("", module))
        self._known = {id(t) for _, t in (*named_parameters_in(tree), *named_buffers_in(tree))}
        self._buffers: set[str] = set()  # names of those that count as written
        self._tables: dict[int, object] = {}  # alive, so that an ``id`` stays its own
        self._named: list[tuple[str, Tensor]] = []
        self._versions: list[int] = []
        self.memory: list[tuple[str, Tensor, Tensor]] = []  # name, tensor, and the memory it had
        # Where it is set, tensors that are found late are put back with it, too
        self.snapshot: Snapshot | None = None
        for name, value in held:
            self.add(name, value)

    def add(self, name: str, value: Any) -> None:
        """Add the tensors that are directly in a value."""
        found: list[Tensor] = []
        if id(value) in self._tables:  # of a module that was looked at
            return
        if isinstance(value, nn.Module):
            parameters, buffers, _ = tables = tables_of(value)
            self._tables.update((id(table), table) for table in tables)
            self._buffers.update([f"{name}.{key}" for key in buffers])
            held, known = (vars(value), parameters, buffers), self._known
            pairs = [
                (f".{key}", tensor)
                for table in held
                for key, tensor in table.items()
                if isinstance(tensor, Tensor) and id(tensor) not in known
            ]
        elif isinstance(value, Tensor):
            pairs = [("", value), *_tensors_in(value)]
        else:
            pairs = _tensors_in(value)
        for label, tensor in pairs:
            if id(tensor) in self._known:
                continue
            if is_strided(tensor) and not tensor.is_inference():
                self._known.add(id(tensor))
                self._named.append((name + label, tensor))
                self._versions.append(version_of(tensor))
                with out_of_sight():
                    self.memory.append((name + label, tensor, tensor.detach()))
                found.append(tensor)
        if self.snapshot is not None and found:
            self.snapshot.add(Snapshot(found))

    @property
    def tensors(self) -> list[Tensor]:
        return [tensor for _, tensor in self._named]

    @property
    def small(self) -> list[Tensor]:
        """Small tensors, which kernels outside of torch may write unnoticed."""
        return [t for t in self.tensors if t.untyped_storage().nbytes() <= _MOST_BYTES]

    def written(self) -> dict[str, Tensor]:
        """Return, by name, tensors that were written since the last call."""
        before, self._versions = self._versions, [version_of(tensor) for _, tensor in self._named]
        triples = zip(self._named, before, self._versions, strict=True)
        return {n: t for (n, t), then, now in triples if then != now or n in self._buffers}


def _tensors_in(value: Any) -> list[tuple[str, Tensor]]:
    """List label and tensor of tensors that are directly in a container, or in an object."""
    return [(label, held) for label, _, held in entries(value) or () if isinstance(held, Tensor)]


# ------------------ The functions that it calls while it is captured

_FREE = (3, 4)
"""Identifiers of ``sys.monitoring`` that no kind of tool has for itself."""

Begun = Callable[[FrameType], object]
"""Called with the frame of a function of Python that begins, once for each code at least."""

Called = Callable[[FrameType, Any], object]
"""Called with a frame and what it is about to call, a function of C among others."""


def functions_followed(
    begun: Begun,
    called: Called,
    counts: Callable[[FrameType, Any], bool],  # whether what a frame calls must be seen
) -> AbstractContextManager[None]:
    """Follow the functions that the body calls, in this thread.

    From Python 3.12 on each code is seen once, and calls only where they count. A profiler sees
    all, also what this package does meanwhile, which takes as long as the captured code itself.
    """
    tools: Any = getattr(sys, "monitoring", None)
    free = [tool for tool in _FREE if tools is not None and tools.get_tool(tool) is None]
    if not free:
        return _profiled(begun, called)
    return _monitored(tools, free[0], begun, called, counts)


@contextlib.contextmanager
def _profiled(begun: Begun, called: Called) -> Iterator[None]:
    def see(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            begun(frame)
        elif event == "c_call":
            called(frame, argument)

    sys.setprofile(see)
    try:
        yield
    finally:
        sys.setprofile(None)


@contextlib.contextmanager
def _monitored(
    tools: Any, tool: int, begun: Begun, called: Called, counts: Callable[[FrameType, Any], bool]
) -> Iterator[None]:
    thread = threading.get_ident()

    def begin(code: CodeType, _: int) -> object:
        if threading.get_ident() != thread:
            return None
        begun(sys._getframe(1))
        return tools.DISABLE

    def call(code: CodeType, _: int, function: object, first: object) -> object:
        if threading.get_ident() != thread:
            return None
        frame = sys._getframe(1)
        if type(function) is MethodDescriptorType and isinstance(first, function.__objclass__):
            function = function.__get__(first, type(first))  # CPython crashes without the type
        if not counts(frame, function):
            return tools.DISABLE
        called(frame, function)
        return None

    events = tools.events
    tools.use_tool_id(tool, __name__)
    try:
        for event, see in (
            (events.PY_START, begin),
            (events.PY_RESUME, begin),
            (events.CALL, call),
        ):
            tools.register_callback(tool, event, see)
        tools.set_events(tool, events.PY_START | events.PY_RESUME | events.CALL)
        tools.restart_events()  # those of earlier bodies
        yield
    finally:
        tools.set_events(tool, tools.events.NO_EVENTS)
        for event in (events.PY_START, events.PY_RESUME, events.CALL):
            tools.register_callback(tool, event, None)
        tools.free_tool_id(tool)


# ------------------ What functions in C do

_FILES = frozenset({"write", "writelines", "truncate", "seek"})
_FILES |= {"read", "read1", "readall", "readinto", "readline", "readlines"}
_SOCKETS = frozenset({"send", "sendall", "sendto", "sendmsg", "recv", "recv_into", "recvfrom"})
_DATABASES = frozenset({"execute", "executemany", "executescript", "commit", "rollback"})
_DATABASES |= {"fetchone", "fetchmany", "fetchall"}
_SYSTEM = frozenset({"read", "write", "pread", "pwrite", "readv", "writev", "sendfile", "open"})
_SYSTEM |= {"mkdir", "rmdir", "remove", "unlink", "rename", "replace", "link", "symlink", "chmod"}
_SYSTEM |= {"truncate", "ftruncate", "utime", "chdir", "listdir", "scandir", "stat", "access"}
_SYSTEM |= {"system", "fork", "kill", "posix_spawn", "putenv", "unsetenv", "pipe"}
IN_C = {
    **{"_io": _FILES, "mmap": _FILES, "_csv": frozenset({"writerow", "writerows"})},
    **{"_pickle": frozenset({"dump", "load"}), "sqlite3": _DATABASES},
    **dict.fromkeys(("posix", "nt"), _SYSTEM),
    **dict.fromkeys(("_socket", "socket", "_ssl", "ssl"), _SOCKETS),
    "_queue": frozenset({"put", "put_nowait", "get", "get_nowait"}),
    "_multiprocessing": frozenset({"acquire", "release", "__enter__", "__exit__", "send", "recv"}),
    "_posixsubprocess": frozenset({"fork_exec"}),
}
"""Functions, and methods of classes, that act outside of Python's values, by modules in C."""

_MAY_ACT = frozenset(itertools.chain.from_iterable(IN_C.values()))
_ON_THEIR_OWN = frozenset({"torch", "triton", "numba", "jax", "lightning_graphs", "importlib"})
_ON_THEIR_OWN |= {"_frozen_importlib", "_frozen_importlib_external", "linecache", "warnings"}
"""What compiles and loads code, or shows lines of it, when it likes."""

_FOR_OTHERS = "torch.utils.tensorboard", f"{OURS}private.exchange", f"{OURS}device.cuda"
"""Modules among these that pass on what user code calls."""


def may_act(function: Any) -> bool:
    """Return whether a function may be one in C that acts outside of Python's values."""
    return type(function) is BuiltinFunctionType and function.__name__ in _MAY_ACT


def asking(own: UserCode, frame: FrameType) -> FrameType | None:
    """Return the frame of user code on whose behalf a frame acts; None if there is none."""
    for each in frames_from(frame):
        if own.runs_in(each):
            return each
        module: str = each.f_globals.get("__name__", "")
        if module.partition(".")[0] in _ON_THEIR_OWN and not module.startswith(_FOR_OTHERS):
            return None
    return None


def constants_around() -> Iterator[Any]:
    """Return the constants in the code of running user functions."""
    for frame in frames_from(sys._getframe(1)):
        if not is_library(frame.f_code.co_filename):
            yield from frame.f_code.co_consts
