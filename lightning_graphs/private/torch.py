"""Private API of torch: each use with its reason, and what is done where it is missing.

Each says why no public API serves, and what happens where torch lacks the private one.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch import Tensor, UntypedStorage, nn
from torch._ops import _higher_order_ops
from torch.autograd import forward_ad
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils import parametrize
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils.hooks import RemovableHandle

from lightning_graphs.private.exchange import (
    dispatch_modes,
    exchanged,
    in_slot,
    nothing,
    replaced,
)

# ------------------ Dispatch modes


@contextlib.contextmanager
def out_of_sight() -> Iterator[None]:
    """Run operators and functions of torch that no mode of this thread sees."""
    show = hide_modes()
    try:
        with torch._C.DisableTorchFunction():
            yield
    finally:
        show()


def functions_out_of_sight() -> AbstractContextManager[None]:
    """Call functions of torch that no mode sees, while modes see the operators in them."""
    hidden: AbstractContextManager[None] = torch._C.DisableTorchFunction()
    return hidden


def asked_without(kind: type[TorchFunctionMode]) -> AbstractContextManager[None]:
    """Let modules see whether tensors override functions of torch as if no such mode did.

    ``nn.MultiheadAttention`` and layers of ``nn.TransformerEncoder`` have a kernel for evaluation
    that they leave for others where functions are overridden, and a mode overrides all. They ask
    ``torch.overrides``, as higher-order operators do; functions of torch ask under their own names.
    """
    own = torch.overrides.has_torch_function
    none = torch._C._disabled_torch_function_impl  # that of parameters, too

    def overrides(kind: Any) -> bool:
        return kind is not Tensor and getattr(kind, "__torch_function__", none) is not none

    def has(values: Iterable[Any]) -> bool:
        modes = torch.overrides._get_current_function_mode_stack()
        others = not all(isinstance(mode, kind) for mode in modes)
        if others or sys._getframe(1).f_globals is vars(torch._ops):
            return own(values)
        return any(map(overrides, map(type, values)))

    return replaced(torch.overrides, "has_torch_function", has)


def hide_modes() -> Callable[[], None]:
    """Hide operators from this thread's modes; return a function that ends it."""
    modes = [_python_dispatch._pop_mode() for _ in dispatch_modes()]

    def show() -> None:
        while modes:
            _python_dispatch._push_mode(modes.pop())

    return show


def run_kernel(operator: Any, device: torch.device, *args: Any, **kwargs: Any) -> Any:
    """Run an operator's kernel, while modes see the operators of which it consists.

    Nothing public leaves out the modes for an operator and keeps them for those inside of it.
    """
    key = getattr(torch._C.DispatchKey, device.type.upper())
    return operator.redispatch(torch._C.DispatchKeySet(key), *args, **kwargs)


Mode = TypeVar("Mode", bound=TorchDispatchMode)


def dispatched_directly(kind: type[Mode]) -> type[Mode]:
    """Take the wrapper off a mode's method with which torch keeps Dynamo out of it.

    It takes as long as a small operator, for each one. A mode needs none that lets no code compile.
    """
    method: Any = kind.__torch_dispatch__
    kind.__torch_dispatch__ = getattr(method, "__wrapped__", method)  # type: ignore[method-assign]
    return kind


def let_higher_order_operators_in(mode: type[TorchDispatchMode]) -> None:
    """Let modes of this type see higher-order operators as all others.

    Newer versions of torch ask the type; older ones want a rule of each operator for each type.
    """
    if hasattr(TorchDispatchMode, "supports_higher_order_operators"):
        return
    for operator in _higher_order_ops.values():
        if mode not in operator.python_key_table:
            operator.py_impl(mode)(partial(_dispatched, operator))


def _dispatched(operator: Any, mode: Any, *args: Any, **kwargs: Any) -> Any:
    return mode.__torch_dispatch__(operator, (), args, kwargs)


def eager_attention(operator: Any) -> Callable[..., Any] | None:
    """Return what ``flex_attention`` runs in eager mode; None for other operators."""
    kernels: dict[Any, Callable[..., Any]] = getattr(operator, "py_kernels", {})
    is_attention = str(operator).startswith("flex_attention")  # or its backward pass
    key = torch._C.DispatchKey.CompositeExplicitAutograd
    return kernels.get(key) if is_attention else None


def unwraps_itself(types: Sequence[type]) -> bool:
    """Return whether an operator is on a ``DTensor``, or on a collective's result for one.

    A dispatch mode that does not know it sees the operators on the shards.
    """
    return any(kind.__module__.startswith("torch.distributed.") for kind in types)


def asks_for_shapes() -> bool:
    """Return whether fake tensors are in use, as in an operator's first call on a ``DTensor``.

    No public function tells.
    """
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


# ------------------ Tensors


PLAIN_TENSORS = frozenset({Tensor, nn.Parameter})
"""Classes of tensors whose operators are torch's own."""


def is_strided(tensor: Tensor) -> bool:
    """Return whether a tensor is one piece of memory, unlike sparse and nested ones."""
    return tensor.layout is torch.strided and not tensor.is_nested


subclasses_unasked = torch._C.DisableTorchFunctionSubclass
"""Context in which no tensor subclass hears of functions of torch; torch's own examples use it."""


def of_class(kind: type[Tensor], tensor: Tensor) -> Tensor:
    """Return a tensor of a class in the memory of another one, as ``nn.Parameter`` makes itself.

    The public ``as_subclass`` makes a view, which cannot be detached in place.
    """
    return Tensor._make_subclass(kind, tensor)


def has_memory(tensor: Tensor) -> bool:
    """Return whether a tensor has one piece of memory.

    Zeros of forward-mode autograd have none, nor do tensors of ``torch.func``. Nothing public tells
    these. They are known by their kind, and torch computes with them so.
    """
    return tensor.layout is torch.strided and not (tensor._is_zerotensor() or is_wrapped(tensor))


def memory_of(tensor: Tensor) -> int:
    """Return the identity of a tensor's storage, valid while that is alive."""
    identity: int = tensor.untyped_storage()._cdata
    return identity


def base_of(tensor: Tensor) -> Tensor:
    """Return the tensor that a view is of; autograd knows it, and nothing public tells."""
    base: Tensor | None = tensor._base
    return tensor if base is None else base


version_of: Callable[[Tensor], int] = attrgetter("_version")
"""How often autograd has seen the memory of a tensor written; views share the count.

torch compares it in its own check of tensors that backward needs, and has no public reader.
"""


def storage_reference(storage: UntypedStorage) -> Callable[[], UntypedStorage | None]:
    """A weak reference to a storage, as torch's own multiprocessing holds one.

    On torch 2.8 a Python ``weakref`` dies with a cycle of garbage that held the storage, though
    tensors still use it: pickling a module makes such cycles. Where this reference lives, a Python
    one finds a storage without memory.
    """
    reference = StorageWeakRef(storage)
    return lambda: UntypedStorage._new_with_weak_ptr(reference.cdata)


pointers_equal: Callable[[list[Tensor], list[int], list[int]], bool] | None = getattr(
    torch._C, "_tensors_data_ptrs_at_indices_equal", None
)
"""Whether tensors are at their addresses; None in builds without CUDA, which lack the function.

It takes a fifth of the time of asking each tensor.
"""

flattened: Callable[..., Tensor] = torch._utils._flatten_dense_tensors
unflattened: Callable[..., Sequence[Tensor]] = torch._utils._unflatten_dense_tensors
"""The elements of tensors of one type, of a single one a view, and views of them in the shapes of
others. DDP's helpers; a public ``cat`` needs a view of each, made in Python, as long as the copy.
"""

foreach_clone: Callable[[list[Tensor]], Sequence[Tensor]] | None = getattr(
    torch, "_foreach_clone", None
)
"""Copies of many tensors at once; it is younger than the oldest supported torch."""


def without_ownership(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return new tensors over the memory of these without owning it, as torch's graph trees do."""
    make = getattr(torch._C, "_construct_storage_from_data_pointer", None)
    if make is None:
        return list(tensors)
    own = {s.data_ptr(): s for s in (t.untyped_storage() for t in tensors) if s.nbytes()}
    storages = {at: make(at, s.device, s.nbytes()) for at, s in own.items()}
    found = []
    for tensor in tensors:
        storage = storages.get(tensor.untyped_storage().data_ptr())
        place = tensor.storage_offset(), tensor.shape, tensor.stride()
        found.append(tensor if storage is None else tensor.new_empty(0).set_(storage, *place))
    return found


tensor_uses: Callable[[Tensor], int] = getattr(Tensor, "_use_count", lambda tensor: 0)
"""How many owners in C++ a tensor has, such as DLPack and nodes of autograd: nothing public tells.

Without the method these go unnoticed.
"""

uses_at: Callable[[int], int] = torch._C._storage_Use_Count
"""How many tensors and Python objects share a storage, which nothing public tells."""

address_of: Callable[[UntypedStorage], int] = attrgetter("_cdata")
"""What :data:`uses_at` knows a storage by, as long as that is alive."""


def storage_uses(storage: UntypedStorage) -> int:
    """Count the tensors and Python objects that share this storage."""
    return uses_at(address_of(storage))


def deepcopies_cloned() -> AbstractContextManager[None]:
    """Let ``copy.deepcopy`` of plain tensors, in the body and this thread, be ``clone()``.

    torch copies the storage, and puts the copy into a new tensor by ``set_``, which no capture can
    hold: the values, the strides and the memory are the same. Others are copied by torch.
    """
    own: Callable[..., Any] = Tensor.__deepcopy__
    thread = threading.get_ident()

    def copied(tensor: Any, memo: dict[int, Any]) -> Any:
        is_whole = type(tensor) is Tensor and tensor.is_contiguous() and not tensor.requires_grad
        if not is_whole or id(tensor) in memo or threading.get_ident() != thread:
            return own(tensor, memo)
        if tensor.untyped_storage().nbytes() != tensor.nbytes or vars(tensor):
            return own(tensor, memo)
        memo[id(tensor)] = found = tensor.clone()
        return found

    return exchanged([(Tensor, "__deepcopy__", copied)])


# ------------------ Tensors in others: subclasses, ``DTensor``


def local(tensor: Tensor) -> Tensor:
    """Return the tensor itself, or this rank's part of a ``DTensor``.

    ``DTensor.to_local()`` makes another tensor where autograd looks, with an address of its own.
    """
    found: Tensor = getattr(tensor, "_local_tensor", tensor)
    return found


def is_composed(tensor: Tensor) -> bool:
    """Return whether other tensors hold the values of one, as those of a quantized weight do."""
    found: bool = type(tensor) not in PLAIN_TENSORS and is_traceable_wrapper_subclass(tensor)
    return found


def hides_memory(tensor: Tensor) -> bool:
    """Return whether a subclass without ``__tensor_flatten__`` keeps its values in other tensors.

    Nothing public tells. Its own storage has no address, which torch says in an error.
    """
    kind = type(tensor)
    own = getattr(kind, "__torch_dispatch__", None) is not Tensor.__torch_dispatch__
    if kind in PLAIN_TENSORS or not own or is_composed(tensor):
        return False
    try:
        return not tensor.untyped_storage().data_ptr() and tensor.numel() > 0
    except (NotImplementedError, RuntimeError):
        return True


def parts_of(tensor: Tensor) -> list[tuple[str, Tensor]]:
    """List the plain tensors that hold a tensor's values, each with a suffix for its name.

    As a rule that is the tensor itself, without a suffix. A subclass with ``__tensor_flatten__``
    has its memory in other tensors. Of one that :func:`hides_memory` there are none.
    """
    if type(tensor) in PLAIN_TENSORS:
        return [("", tensor)]
    own = local(tensor)
    if not is_composed(own):
        return [] if hides_memory(own) else [("", own)]
    names: Sequence[str] = own.__tensor_flatten__()[0]  # type: ignore[attr-defined]
    return [
        (f".{name}{suffix}", part)
        for name in names
        for suffix, part in parts_of(getattr(own, name))
    ]


def plain(tensors: Iterable[Tensor]) -> list[Tensor]:
    """List the plain tensors that hold the values of these; see :func:`parts_of`."""
    return [part for tensor in tensors for _, part in parts_of(tensor)]


# ------------------ Modules


def named_modules_in(*roots: tuple[str, nn.Module]) -> list[tuple[str, nn.Module]]:
    """List the modules of trees with their paths, each once, as ``named_modules`` does.

    Each level of torch's generators passes on all that is below it: a walk takes ten times as long.
    """
    found: dict[int, tuple[str, nn.Module]] = {}
    pending = [*reversed(roots)]
    while pending:
        path, module = pending.pop()
        if id(module) not in found:
            found[id(module)] = path, module
            if inside := object.__getattribute__(module, "_modules"):  # watched classes see others
                above = f"{path}." if path else ""
                pending += [(above + k, m) for k, m in [*inside.items()][::-1] if m is not None]
    return [*found.values()]


def _named(table: str, modules: Iterable[tuple[str, nn.Module]]) -> list[tuple[str, Any]]:
    found: dict[int, tuple[str, Tensor]] = {}
    for path, module in modules:
        for key, tensor in object.__getattribute__(module, table).items():
            if tensor is not None and id(tensor) not in found:
                found[id(tensor)] = f"{path}.{key}" if path else key, tensor
    return [*found.values()]


named_parameters_in = partial(_named, "_parameters")

named_buffers_in = partial(_named, "_buffers")
"""List the tensors of modules by path, each once; the modules are given with theirs."""


def modules_in(root: nn.Module) -> list[nn.Module]:
    return [module for _, module in named_modules_in(("", root))]


def parameters_in(root: nn.Module) -> list[Any]:
    return [tensor for _, tensor in named_parameters_in(named_modules_in(("", root)))]


_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")

_OF_ALL_MODULES = [getattr(nn.modules.module, f"_global{name}", {}) for name in _HOOKS]


def hook_tables(module: nn.Module) -> list[dict[int, Callable[..., Any]]]:
    """Return the tables of hooks around a module's forward and backward; torch has no reader.

    Those of all modules are among them.
    """
    return [getattr(module, name, {}) for name in _HOOKS] + _OF_ALL_MODULES


hooks_registered: Callable[[], int] = (
    partial(attrgetter("next_id"), RemovableHandle)
    if isinstance(getattr(RemovableHandle, "next_id", None), int)
    else partial(next, itertools.count())
)
"""A number that grows with every hook that is registered anywhere; else it always differs."""


def module_hooks(module: nn.Module) -> list[Callable[..., Any]]:
    """List the hooks of a module, and those of all modules that are no capture's."""
    found: list[Callable[..., Any]] = []
    for name in _HOOKS:
        if table := getattr(module, name, None):
            found += table.values()
    for table in filter(None, _OF_ALL_MODULES):
        found += (h for h in table.values() if not h.__module__.startswith("lightning_graphs."))
    return found


def tables_of(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return the tables of a module's parameters, buffers and submodules.

    Scripted modules keep theirs in C++, where code cannot replace them: these are copies.
    """
    tables: Any = (module._parameters, module._buffers, module._modules)
    if isinstance(module, torch.jit.ScriptModule):
        tables = tuple(dict(table.items()) for table in tables)
    return tables  # type: ignore[no-any-return]


def caches_weights(module: nn.Module | None = None) -> bool:
    """Return whether weights are computed once for all calls: those of a module, or any.

    They are inside of ``torch.nn.utils.parametrize.cached()``, which keeps a number for it.
    """
    if not getattr(parametrize, "_cache_enabled", 0):
        return False
    return module is None or any(map(parametrize.is_parametrized, module.modules()))


# ------------------ Optimizers


scaling_states: Callable[[torch.amp.GradScaler], Any] = attrgetter("_per_optimizer_states")
"""What a scaler knows of steps that are under way; nothing public gives it."""


def step_hook_tables(optimizer: Optimizer) -> list[Any]:
    """Return the tables of hooks around ``optimizer.step``; torch only lets others add some."""
    shared = sys.modules[Optimizer.__module__]  # torch.optim does not show it as an attribute
    return [
        getattr(optimizer, "_optimizer_step_pre_hooks", ()),
        getattr(optimizer, "_optimizer_step_post_hooks", ()),
        getattr(shared, "_global_optimizer_pre_hooks", ()),
        getattr(shared, "_global_optimizer_post_hooks", ()),
    ]


def capturable_unasked(optimizer: Optimizer) -> AbstractContextManager[None]:
    """Let an optimizer be captured as it is in the body, be it ``capturable`` or not.

    torch asks every group for that there, also those of Adafactor, which have no such entry: a
    ``KeyError``. Versions of torch have two names for the check; under a third one it is asked.
    """
    names = ("_accelerator_graph_capture_health_check", "_cuda_graph_capture_health_check")
    own = [n for n in names if hasattr(optimizer, n)]
    return exchanged([(optimizer, name, nothing) for name in own])


def count_for_schedulers(optimizer: Optimizer, step: Callable[..., Any], own: Any) -> None:
    """Mark what stands for a method that no scheduler watches yet as one that is watched.

    One that is made in the middle of a fit would wrap it for good.
    """
    if hasattr(own, "__func__"):
        step._wrapped_by_lr_sched = optimizer._opt_called = True  # type: ignore[attr-defined]


# ------------------ Transforms and compiled code


_innermost_transform, is_wrapped, is_batched = (
    getattr(torch._C._functorch, name, lambda *tensors: None)
    for name in ("peek_interpreter_stack", "is_functorch_wrapped_tensor", "is_legacy_batchedtensor")
)


def in_transform() -> bool:
    """Return whether code runs in ``torch.func`` (vmap, jvp, grad) or forward-mode autograd.

    Its tensors carry batches or tangents that a graph knows nothing of.
    """
    if torch.compiler.is_compiling():  # compiled code looks as if it were inside of one
        return False
    return _innermost_transform() is not None or in_forward_mode()


def in_forward_mode() -> bool:
    """Return whether forward-mode autograd is on, which ``torch.func.jvp`` turns on as well."""
    level: int = getattr(forward_ad, "_current_level", -1)
    return level >= 0


def left_alone(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that compiled code calls as it is, without a look into it.

    ``torch.compiler.disable`` imports the compiler; before that is there, nothing is compiled.
    """
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is None:
        return function
    # It has come along from the function that this one wraps, and would be called in its place
    vars(function).pop(COMPILED_FUNCTION, None)
    disabled: Callable[..., Any] = dynamo.disable(function)
    return disabled


COMPILED_FUNCTION = "_torchdynamo_orig_callable"  # of functions that run as no Python
COMPILED_CALL = "_compiled_call_impl"
"""Where ``module.compile()`` leaves what calls of the module run, and nothing else."""


def is_compiled_in_place(module: nn.Module) -> bool:
    return getattr(module, COMPILED_CALL, None) is not None


def is_compiled(module: nn.Module) -> bool:
    """Return whether a module runs compiled code: ``torch.compile`` or ``module.compile()``."""
    return type(module).__module__.startswith("torch._dynamo.") or is_compiled_in_place(module)


@contextlib.contextmanager
def compiled_code_noticed(notice: Callable[[], object]) -> Iterator[None]:
    """Call ``notice`` where the body, in this thread, calls what ``torch.compile`` has made.

    Every way of calling it asks what the stance makes of its compiler (torch 2.6 and newer), be it
    a module, one compiled in place, a function or an operator that torch compiles by itself.
    Nothing public tells of such calls. Without that function, or where the body imports the
    compiler, whatever the process has compiled counts.
    """
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    original: Callable[[Any], Any] | None = getattr(dynamo, "_callback_from_stance", None)
    if original is None:
        yield
        if _has_compiled_anything():
            notice()
        return
    thread = threading.get_ident()
    is_forced = getattr(getattr(dynamo, "_stance", None), "stance", "") == "force_eager"

    def from_stance(callback: Any) -> Any:
        compiles = callback is not None and callback is not False and not is_forced
        if compiles and threading.get_ident() == thread:
            notice()
        return original(callback)

    with replaced(dynamo, "_callback_from_stance", from_stance):
        yield


def _has_compiled_anything() -> bool:
    """Return whether this process has compiled code; True if torch does not count it."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    if dynamo is None:
        return False
    counters = getattr(dynamo, "counters", None)
    return counters is None or bool(counters.get("frames"))


def makes_own_graphs(compiled: object) -> bool:
    """Return whether compiled code captures CUDA graphs by itself: ``mode="reduce-overhead"``.

    Only the private configuration of the compiled module or function tells. Where torch has
    another, the capture fails with torch's own message.
    """
    owners = [getattr(compiled, "dynamo_ctx", None)]
    cells = getattr(compiled, "__closure__", None) or ()
    owners += [in_slot(cell, "cell_contents") for cell in cells]
    configs = [getattr(owner, "compiler_config", None) for owner in owners]
    return any(isinstance(c, dict) and c.get("triton.cudagraphs") for c in configs)


# ------------------ Captures


_stream_captures = torch.cuda.is_current_stream_capturing
"""The truth, which :func:`announced_as_cuda_capture` hides."""


def captured_code_runs(device: torch.device) -> bool:
    """Return whether operators of a capture compute: they do unless a GPU records them."""
    return device.type != "cuda" or not _stream_captures()


def _answering(answer: Callable[[str], bool | None]) -> AbstractContextManager[None]:
    """Answer ``torch.cuda.is_current_stream_capturing()`` by the module that asks; None: truly."""
    outer = torch.cuda.is_current_stream_capturing
    # An answer around this one is given to the module, too, and not to ours
    truth: Callable[[str], bool] = getattr(outer, "to", lambda _: outer())

    def to(caller: str) -> bool:
        found = answer(caller)
        return truth(caller) if found is None else found

    def answered() -> bool:
        return to(sys._getframe(1).f_globals.get("__name__", ""))

    answered.to = to  # type: ignore[attr-defined]
    return replaced(torch.cuda, "is_current_stream_capturing", answered)


def announced_as_cuda_capture() -> AbstractContextManager[None]:
    """Let ``torch.cuda.is_current_stream_capturing()`` say yes while a rehearsal captures.

    Libraries ask it and leave out what a capture refuses (transformers reads attention masks on
    the host otherwise). Only torch's own optimizers hear the truth: where there is a GPU they would
    demand ``capturable=True``, which they refuse for parameters on the CPU.
    """
    return _answering(lambda caller: None if caller.startswith("torch.optim") else True)


def capture_unseen(asked: list[str]) -> AbstractContextManager[None]:
    """Tell libraries that no capture is under way, so that they run as in eager steps.

    transformers keeps attention masks in a capture that it drops in an eager step. torch itself
    hears the truth. The names of the modules that heard otherwise are added to a list.
    """

    def answer(caller: str) -> bool | None:
        if caller.partition(".")[0] in ("torch", __name__.partition(".")[0]):
            return None
        asked.append(caller)
        return False

    return _answering(answer)


def empty_host_cache() -> None:
    """Release cached pinned memory before a capture, as ``torch.cuda.graph`` does from 2.11 on."""
    getattr(torch._C, "_host_emptyCache", nothing)()


PoolHandle = tuple[int, int]
"""By what torch knows a memory pool of graphs."""


def abandon_capture_pool(device: int, pool: tuple[int, int]) -> None:
    """Stop routing allocations to the pool of a capture that failed, and give the pool back.

    Up to 2.13 a failing ``capture_end`` does neither (mended in 2.14). The C++ class offers no way.
    """
    end = getattr(torch._C, "_cuda_endAllocateToPool", None)
    release = getattr(torch._C, "_cuda_releasePool", None)
    if end is None or release is None:
        return
    try:
        end(device, pool)
    except RuntimeError:  # the failure came after torch had ended the routing: nothing is held
        return
    release(device, pool)


def demangle(symbol: str) -> str:
    """Return the C++ name behind a symbol, as torch's profiler finds it.

    The symbol itself where it is not mangled (Triton, cuBLAS), or torch lacks the function.
    """
    function: Callable[[str], str] | None = getattr(torch._C, "_demangle", None)
    return symbol if function is None or not symbol.startswith("_Z") else function(symbol)


attention_switches: tuple[Callable[[], bool], ...] = tuple(
    getattr(torch._C, f"_get_{switch}", getattr(torch.backends.cuda, switch))
    for switch in (f"{kind}_sdp_enabled" for kind in ("flash", "mem_efficient", "cudnn", "math"))
)
"""Whether each kernel of attention may be used; the public functions take three times as long."""

# ------------------ Platforms and versions


NEWEST = (2, 15)
"""The newest minor version of torch that the tests have seen."""


def why_no_cuda_graphs() -> str:
    """Why no graph is captured on GPUs here, whatever torch sees; empty if that is supported."""
    if torch.version.hip is not None:
        return "this torch is built for ROCm, and graphs are captured on NVIDIA GPUs only"
    if sys.platform == "win32":
        return "graphs were never tested on Windows, where none is captured; train in WSL 2"
    return ""


def is_newer_than_tested() -> bool:
    """Tell whether this torch is newer than those that the tests have seen."""
    return tuple(map(int, torch.__version__.split(".")[:2])) > NEWEST
