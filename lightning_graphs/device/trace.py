"""Records the operators of a capture, with the lines and modules that called them.

The emulated backend replays what it recorded; liveness and annotations on CUDA are read off it.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.autograd.graph import Node
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import Self

from lightning_graphs.device import rules
from lightning_graphs.device.rules import READ_IN_BACKWARD, Obstacle, refuse
from lightning_graphs.errors import CaptureError, ReplayError, stop
from lightning_graphs.private.callsite import CallSite, CallSiteFinder, inside_compiled_module
from lightning_graphs.private.engine import (
    current_autograd_node,
    nodes_out_of_sight,
    nodes_recorded,
    recorded_before,
)
from lightning_graphs.private.torch import (
    asked_without,
    asks_for_shapes,
    dispatched_directly,
    eager_attention,
    has_memory,
    is_strided,
    let_higher_order_operators_in,
    out_of_sight,
    storage_reference,
    unwraps_itself,
)
from lightning_graphs.values.tree import leaves_of


class FunctionMode(TorchFunctionMode):
    """Function mode that passes every call of a torch function to a handler."""

    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self.handler = call
        self._asked = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self._asked.enter_context(asked_without(FunctionMode))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._asked.close()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if torch.compiler.is_dynamo_compiling():  # it would compile the handler, too
            return func(*args, **given)
        if func is torch.ops.higher_order.cond:
            return _cond(functools.partial(self.handler, func), *args)
        return self.handler(func, args, given)


def _cond(call: Callable[..., Any], choice: Any, *rest: Any) -> Any:
    """Call the operator of ``torch.cond``, whose backward pass wants tuples from its branches.

    torch's compiler makes them of tensors, and no mode lets it compile.
    """
    *branches, inputs = rest
    is_single = False

    def in_tuple(branch: Callable[..., Any], *given: Any) -> Any:
        nonlocal is_single
        result = branch(*given)
        is_single = isinstance(result, Tensor)
        return (result,) if is_single else result

    result = call(
        (choice, *(functools.partial(in_tuple, branch) for branch in branches), inputs), {}
    )
    return result[0] if is_single else result


# ------------------ Collectives without communication

_NAMESPACES = ("c10d", "_c10d_functional", "c10d_functional")
_GATHERED = "fsdp::all_gather_copy_in"
_SENDS = ("send", "barrier", "monitored_barrier_")
_ONE_RANK = timedelta(seconds=60)


def is_collective(func: OpOverload) -> bool:
    return func.namespace in _NAMESPACES


def written_position(func: OpOverload) -> tuple[int, ...]:
    """Return which argument a collective writes; its schema does not say so.

    Nor does that of the copy with which FSDP2 prepares one.
    """
    if func._schema.name == _GATHERED:
        return (1,)
    return (0,) if func.namespace == "c10d" and func._opname not in _SENDS else ()


def returned_alone(func: OpOverload, args: Sequence[Any]) -> Any:
    """Run a collective for this rank alone: its tensors stay, its return value is right.

    During the capture of a CUDA graph nothing is exchanged either. So a rank may record, and fail
    to, by itself.
    """
    if func.namespace != "c10d":
        found = func(*(a.to("meta") if isinstance(a, Tensor) else a for a in args))
        is_wait = func._opname == "wait_tensor"
        return args[0] if is_wait else torch.zeros_like(found, device=args[0].device)
    reduced = args[0] if func is torch.ops.c10d.allreduce_.default else [torch.empty(0)]
    work = _alone().allreduce(reduced).boxed()  # its future holds these tensors
    return work if len(func._schema.returns) == 1 else (args[0], work)


@functools.cache
def _alone() -> Any:
    from torch.distributed import HashStore, ProcessGroupGloo  # type: ignore[attr-defined]

    return ProcessGroupGloo(HashStore(), 0, 1, _ONE_RANK)


def wait_for(result: Any) -> None:
    """Wait until a collective that was called has written its tensors."""
    if isinstance(result, Tensor):
        torch.ops._c10d_functional.wait_tensor(result)
        return
    work = result[-1] if isinstance(result, tuple) else result
    torch.distributed.Work.unbox(work).wait()


# ------------------ Scopes of launched work

_LABEL = "lightning_graphs.scope"


def _label_unlabelled(value: object, scope: str) -> None:
    """Write ``scope`` on every autograd node behind ``value`` that has no label yet."""
    # torch declares `metadata`, a dict, as a method.
    pending: list[Any] = [tensor.grad_fn for tensor in leaves_of(value, Tensor)]
    while pending:
        node = pending.pop()
        if node is not None and _LABEL not in node.metadata:
            node.metadata[_LABEL] = scope
            pending.extend(parent for parent, _ in node.next_functions)


class ScopeStack:
    """Follows module calls and profiler ranges of the calling thread while it is entered.

    A backward operator gets the scope of the forward code whose gradient it computes: the autograd
    nodes of a module's output are labelled when the module returns.
    """

    def __init__(self) -> None:
        self._stack: list[str] = []
        self._names: dict[int, str] = {}
        self._roots: list[nn.Module] = []
        self._hooks = contextlib.ExitStack()

    def __enter__(self) -> None:
        self._hooks.enter_context(register_module_forward_pre_hook(self._enter))
        self._hooks.enter_context(register_module_forward_hook(self._leave, always_call=True))

    def __exit__(self, *_: object) -> None:
        self._hooks.close()
        self._stack.clear()
        self._roots.clear()
        self._names.clear()

    def current(self) -> str:
        """The scope of an operator that runs now, such as ``Bert.encoder.layer.0``."""
        node: Any = current_autograd_node()
        if node is not None:
            scope = node.metadata.get(_LABEL, "")
            return f"{scope} (backward)".lstrip()
        return self._top()

    def note_range(self, func: object, args: tuple[Any, ...]) -> None:
        """Note that an operator of the profiler opens or closes a range."""
        if "enter" in str(func):
            self._push(str(args[0]))
        elif self._stack:
            self._stack.pop()

    def _top(self) -> str:
        return self._stack[-1] if self._stack else ""

    def _push(self, name: str) -> None:
        """Open a scope; a path that continues the innermost one takes its place."""
        outer, _, inner = self._top().rpartition("/")
        if inner and name.startswith(inner + "."):
            inner = name
        else:
            outer, inner = self._top(), name
        self._stack.append(f"{outer}/{inner}" if outer else inner)

    def _enter(self, module: nn.Module, inputs: Any) -> None:
        _label_unlabelled(inputs, self._top())
        name = self._names.get(id(module))
        if name is None:
            root = type(module).__name__
            self._roots.append(module)
            for path, child in module.named_modules():
                self._names.setdefault(id(child), f"{root}.{path}" if path else root)
            name = self._names[id(module)]
        self._push(name)

    def _leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        _label_unlabelled(output, self._top())
        if self._stack:
            self._stack.pop()


# ------------------ Operators, their memory and lines

aten = torch.ops.aten

UNDECLARED_WRITES: Mapping[OpOverload, tuple[int, ...]] = {
    aten.native_batch_norm.default: (3, 4),
    aten.cudnn_batch_norm.default: (3, 4),
    aten.batch_norm_update_stats.default: (1, 2),
    aten.batch_norm_gather_stats.default: (3, 4),
    aten.batch_norm_gather_stats_with_counts.default: (3, 4),
    aten._cudnn_rnn.default: (15,),
}
"""Operators that update running statistics, or cuDNN's random state for dropout, although their
schema declares no write."""

_OF_MEMORY = frozenset({"aten::resize_", "aten::resize_as_", "aten::set_"})
"""Operators in place that torch tags as those of a view, although they touch memory."""


def tensors_in(value: object) -> Iterator[Tensor]:
    """List the tensors of an operator's argument or result."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)


def dispatches(kind: type) -> bool:
    """Return whether a tensor class has operators of its own; torch 2.11 names plain ones, too."""
    return getattr(kind, "__torch_dispatch__", None) is not Tensor.__torch_dispatch__


@functools.cache
def only_views(func: OpOverload) -> bool:
    """Return whether an operator only makes or changes views."""
    return torch.Tag.inplace_view in func.tags and func._schema.name not in _OF_MEMORY


def _is_plain(tensor: Tensor) -> bool:
    return is_strided(tensor) and not tensor.is_quantized and not dispatches(type(tensor))


@functools.cache
def written_arguments(func: OpOverload) -> list[tuple[int, str]]:
    """List position and name of written arguments, by schema or :data:`UNDECLARED_WRITES`."""
    named = list(enumerate(argument.name for argument in func._schema.arguments))
    kinds = [argument.alias_info for argument in func._schema.arguments]
    undeclared = [named[i] for i in UNDECLARED_WRITES.get(func, ()) or written_position(func)]
    declared = [at for at, kind in zip(named, kinds, strict=True) if kind and kind.is_write]
    return undeclared + declared


def mapped(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """Map the tensors in an argument; schemas nest lists one deep at most."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, (list, tuple)):
        return [change(item) if isinstance(item, Tensor) else item for item in value]
    return value


@dataclass(eq=False)
class OperatorCall:
    """An operator that is about to run."""

    func: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @functools.cached_property
    def inputs(self) -> list[Tensor]:
        return list(tensors_in((*self.args, *self.kwargs.values())))

    @functools.cached_property
    def written(self) -> list[Tensor]:
        places = written_arguments(self.func)
        args, kwargs = self.args, self.kwargs
        found = [args[at] if at < len(args) else kwargs.get(name) for at, name in places]
        return list(tensors_in(found))

    def run(self) -> Any:
        return self.func(*self.args, **self.kwargs)

    def mapped(self, change: Callable[[Tensor], Any]) -> OperatorCall:
        named = {key: mapped(value, change) for key, value in self.kwargs.items()}
        return OperatorCall(self.func, tuple(mapped(a, change) for a in self.args), named)


@dataclass(slots=True)
class Operation:
    """One operator call as it was recorded; :meth:`Recorder.keep` changes what it holds."""

    func: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any
    reads: tuple[int, ...]  # ids of storages; an id names one allocation, never an address
    writes: tuple[int, ...]  # those that it wrote or allocated
    nbytes: int  # of the tensors that it wrote or returned
    scope: str  # the Python scopes around it: module path and ``record_function`` ranges
    site: CallSite
    grad_mode: bool  # oneDNN's LSTM, for one, keeps a workspace where gradients are enabled

    @property
    def name(self) -> str:
        return str(self.func)

    @property
    def line(self) -> str:
        """The user's line, as ``file.py:12``; empty if none is known, as in a backward pass."""
        return str(self.site) if self.site.line else ""


class KnownStorage:
    """A storage that the recorder met in a tensor, weakly held."""

    def __init__(self, number: int, tensor: Tensor, site: CallSite, *, born: bool) -> None:
        storage = tensor.untyped_storage()
        shape = "x".join(map(str, tensor.shape)) or "scalar"
        self.id = number
        self.born = born  # whether it was made inside the recorded code
        self.first = f"{str(tensor.dtype).removeprefix('torch.')}[{shape}] on {tensor.device}"
        self.device_type = tensor.device.type
        self.scalar = tensor.dim() == 0
        self.site = site  # the user's line that touched it first
        # None where the recorded code lets go of it and gets it again, as FSDP2 does with the
        # parameters that it gathers
        self.address: int | None = None
        with contextlib.suppress(RuntimeError):  # zeros of forward-mode autograd have no memory
            self.address = storage.data_ptr()
        self.on_host = False  # of a rehearsal, where it would be the host's on a GPU's machine
        self.constant = False  # made of Python numbers: kernels get its value, not its address
        self.storage = storage_reference(storage)
        self._end = weakref.ref(storage, self._on_freed)
        self.freed: CallSite | None = None  # where it was freed; torch 2.8 does not tell

    @property
    def is_alive(self) -> bool:
        """Return whether it still has its former memory."""
        storage = self.storage()
        return storage is not None and storage.data_ptr() == self.address

    def note_release(self) -> None:
        """Note whether its memory was freed while the storage itself lives."""
        storage = self.storage()
        if storage is not None and self.address and not storage.nbytes():
            self.address = None

    def _on_freed(self, _: object) -> None:
        self.freed = CallSiteFinder().here()

    def __str__(self) -> str:
        end = "freed" if self.storage() is None else "moved"
        if end == "freed" and self.freed is not None:
            end = f"freed at {self.freed.describe()}"
        return f"{self.first}, first used at {self.site.describe()}, {end}"


def refuse_dead_inputs(dead: Sequence[KnownStorage]) -> None:
    """Refuse a replay that would read freed memory."""
    if dead:
        raise ReplayError(
            "A graph cannot replay after a tensor that it reads was freed or moved.",
            "; ".join(map(str, dead[:3])),
            "keep a reference to the tensor as long as the graph, and copy new values into it",
        )


@dispatched_directly
class OperatorMode(TorchDispatchMode):
    """Sees every operator of the calling thread, and functions that the dispatcher never shows."""

    sees_functions = True
    is_real = False  # a real step runs under it, and computes what it computes without
    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._functions, self._around = contextlib.ExitStack(), contextlib.ExitStack()
        # Called with each error of an operator, which user code may catch
        self.on_error: Callable[[RuntimeError], object] = lambda error: None
        # After how many nodes of autograd one was made that reads in its backward pass, and where
        self._differentiable: list[tuple[int, CallSite]] = []

    def __enter__(self) -> Self:
        if "torch._dynamo" in sys.modules:
            # Compiled code runs eagerly under a dispatch mode. torch keeps that so afterwards, or
            # raises with fullgraph=True, as flex_attention and cond have it, without this stance.
            self._around.enter_context(torch.compiler.set_stance("force_eager"))
        if self.is_real:
            self._around.enter_context(nodes_out_of_sight(rules.WITH_TWO_FORMULAS, self._look_at))
        let_higher_order_operators_in(type(self))
        super().__enter__()  # type: ignore[no-untyped-call]
        if self.sees_functions:
            self._functions.enter_context(FunctionMode(self.call))
        return self

    def __exit__(self, *exc: Any) -> None:
        self._functions.close()  # and with it a cycle, which would keep tensors until the next gc
        super().__exit__(*exc)  # type: ignore[no-untyped-call]
        self._around.close()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if asks_for_shapes():
            return func(*args, **(kwargs or {}))
        if unwraps_itself(types):
            return NotImplemented  # the operators on its shards are seen
        self._look_at(current_autograd_node())
        if not isinstance(func, OpOverload):
            return self.higher_order(func, args, kwargs or {})
        if torch.is_inference_mode_enabled():  # torch shows whole what it shows in parts elsewhere
            with self.seeing_further():
                found = func.decompose(*args, **(kwargs or {}))
            if found is not NotImplemented:
                return found
        try:
            return self.operator(OperatorCall(func, args, kwargs or {}))
        except RuntimeError as error:
            self.on_error(error)
            raise

    def _look_at(self, node: Node | None) -> None:
        if node is not None and rules.reads_in_backward(node):
            self.takes_other_formula(node)

    def takes_other_formula(self, node: Node) -> None:
        """React to a backward pass that takes another formula because this mode is on."""
        what = f"the backward pass of {rules.name_of_node(node)}"
        site = self.made_at(node) or CallSiteFinder().of_refusal()
        stop(READ_IN_BACKWARD.refused(f"{what} at {site.describe()}"))

    def note_node(self, func: OpOverload) -> bool:
        """Note where code calls an operator whose backward pass may read; tell if this is one."""
        reads = func in rules.OF_TWO_FORMULAS
        if reads:
            self._differentiable.append((nodes_recorded(), CallSiteFinder().here()))
        return reads

    def made_at(self, node: Node) -> CallSite | None:
        """Return the line that has called the operator of such a node."""
        later = (site for end, site in self._differentiable if recorded_before(node, end))
        return next(later, None)

    def higher_order(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run a higher-order operator; attention consists of others, which are recorded."""
        if (kernel := eager_attention(func)) is None:
            return func(*args, **kwargs)
        with self.seeing_further():
            return kernel(*args, **kwargs)

    @contextlib.contextmanager
    def seeing_further(self) -> Iterator[None]:
        """Record operators within the one that runs."""
        super().__enter__()  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            super().__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def operator(self, call: OperatorCall) -> Any:
        return call.run()

    def call(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call a Python function of torch (``numpy``, ``tolist``, tensors from numbers).

        Where operators are seen, ``ctc_loss`` hands the device lengths as tensors, wherever these
        are; else it reads them (``areAnyTensorSubclassLike`` in aten/src/ATen/native/LossCTC.cpp).
        """
        reads = getattr(func, "__name__", "") == "ctc_loss" or rules.has_other_tangents(func)
        with out_of_sight() if reads else contextlib.nullcontext():
            return func(*args, **kwargs)


class OperatorsSeen(OperatorMode):
    """Calls a function with each operator of the calling thread that has run, and with its result.

    Args:
        see: The function.
        real: A real step runs under it, which computes what it computes without.
    """

    def __init__(self, see: Callable[[OperatorCall, Any], object], *, real: bool = False) -> None:
        super().__init__()
        self._see = see
        self.sees_functions = self.is_real = real

    def takes_other_formula(self, node: Node) -> None:
        """Ignore it: a real step takes it only in nodes of a differentiable backward pass."""
        if not self.is_real:
            super().takes_other_formula(node)

    def operator(self, call: OperatorCall) -> Any:
        result = call.run()
        self._see(call, result)
        return result


class Recorder(OperatorMode):
    """Records every operator of the calling thread.

    Args:
        generators: Random generators that may be drawn from.
        strict: Refuse with :class:`CaptureError` what CUDA refuses. Off, the recorder only watches,
            as it does during a real capture, where CUDA itself refuses.
    """

    instead: Mapping[Any, Callable[..., Any]] = {}  # what runs in place of functions

    def __init__(self, generators: Sequence[torch.Generator] = (), *, strict: bool = True) -> None:
        super().__init__()
        self.sees_functions = strict
        self.operations: list[Operation] = []
        self.storages: list[KnownStorage] = []
        self._by_identity: dict[int, KnownStorage] = {}
        self._generators = tuple(generators)
        self._as_left: list[Tensor] = []  # the states of the generators after the last operator
        self._drawn_at: CallSite | None = None  # where one drew last
        self._strict = strict
        self._sites, self._scopes = CallSiteFinder(), ScopeStack()
        self._refused: Callable[[], CaptureError] | None = None  # makes the last refusal again

    def __enter__(self) -> Self:
        super().__enter__()
        self._as_left = self._states()  # whatever set them before is of no interest
        self._around.enter_context(self._scopes)
        return self

    def call(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        name = getattr(func, "__name__", "")
        rule = rules.FUNCTION_RULES.get(name)
        if rule is not None and (obstacle := rule(args, kwargs)) is not None:
            self.refuse(name, obstacle)
        return self.instead.get(func, func)(*args, **kwargs)

    def higher_order(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if self._strict and eager_attention(func) is None:
            self.refuse(str(func), rules.CONTROL_FLOW)
        return super().higher_order(func, args, kwargs)

    def takes_other_formula(self, node: Node) -> None:
        what = f"the backward pass of {rules.name_of_node(node)}"
        self.refuse(what, READ_IN_BACKWARD, self.made_at(node))

    def refuse(self, operator: str, obstacle: Obstacle, site: CallSite | None = None) -> None:
        observed = f"{rules.worded(operator)} at {(site or self._sites.of_refusal()).describe()}"
        self._refused = functools.partial(rules.with_known_remedy(obstacle).refused, observed)
        if obstacle is rules.MOVED_STORAGE:  # which no capture could undo
            stop(self._refused())
        refuse(self._refused())
        self._refused = None  # it is noted

    def refuse_what_was_refused(self) -> None:
        """Raise an earlier refusal again at the end of a capture: code may have caught it."""
        if self._refused:
            raise self._refused()

    def know(self, tensor: Tensor, *, born: bool = False) -> KnownStorage:
        """Return the entry of the tensor's storage."""
        storage = tensor.untyped_storage()
        known = self._by_identity.get(id(storage))
        if known is None or known.storage() is not storage:
            known = KnownStorage(len(self.storages), tensor, self._sites.here(), born=born)
            self._by_identity[id(storage)] = known
            self.storages.append(known)
        return known

    def _meet_constant(self, tensor: Tensor) -> None:
        """Note a tensor that torch made of Python numbers, out of sight of the dispatcher.

        A scalar enters kernels as a constant. More numbers are a copy from host memory.
        """
        if self._strict and tensor.dim() > 0 and tensor.numel() > 0:
            self.refuse("a tensor of Python numbers", rules.HOST_DATA)
        self.know(tensor, born=True).constant = tensor.numel() > 0

    def before_write(self, tensor: Tensor, known: KnownStorage) -> None:
        """React to an operator before it writes."""

    def keep(self, operation: Operation) -> None:
        """Record a finished operation; the default keeps names and ids, no tensor."""
        operation.args, operation.kwargs, operation.result = (), {}, None
        self.operations.append(operation)

    def operator(self, call: OperatorCall) -> Any:
        func = call.func
        if func.namespace == "profiler":
            self._scopes.note_range(func, call.args)
            return call.run()
        if any(dispatches(type(t)) for t in call.inputs):
            return NotImplemented  # a subclass unwraps itself; the operators on its parts are seen
        if func is aten.lift_fresh.default:
            self._meet_constant(call.inputs[0])
        if self._strict:
            self._check(call)
        self.note_node(func)
        if only_views(func):
            return call.run()  # its geometry is part of whatever uses it
        call.inputs = list(filter(has_memory, call.inputs))
        reads = tuple(dict.fromkeys(self.know(t).id for t in call.inputs))
        for tensor in call.written:
            known = self.know(tensor)
            if self._strict and known.constant:
                self.refuse(str(func), rules.HOST_DATA)
            self.before_write(tensor, known)
        result = self._run(call)
        known_before = {id(t.untyped_storage()) for t in call.inputs}
        outputs = list(tensors_in(result))
        if self._strict and not all(map(_is_plain, outputs)):
            self.refuse(str(func), rules.UNSUPPORTED_LAYOUT)
        outputs = list(filter(has_memory, outputs))
        fresh = [t for t in outputs if id(t.untyped_storage()) not in known_before]
        if outputs and not fresh and not call.written:
            return result  # a view: its geometry is part of whatever uses it
        writes = [self.know(t).id for t in call.written]
        writes += [self.know(t, born=True).id for t in fresh]
        touched = {id(t): t for t in (*call.written, *fresh)}.values()
        nbytes = sum(t.numel() * t.element_size() for t in touched)
        self.keep(
            Operation(
                func,
                call.args,
                call.kwargs,
                result if fresh else None,
                reads,
                tuple(dict.fromkeys(writes)),
                nbytes,
                self._scopes.current(),
                self._sites.here(),
                torch.is_grad_enabled(),
            )
        )
        return result

    def _run(self, call: OperatorCall) -> Any:
        """Run the operator; refuse it if its generator was set other than by an operator."""
        before = self._states()
        draws = torch.Tag.nondeterministic_seeded in call.func.tags
        if draws and not all(map(torch.equal, before, self._as_left)):
            self.refuse(str(call.func), rules.SET_GENERATOR)
        if self._strict and is_collective(call.func):
            return returned_alone(call.func, call.args)
        result = call.run()
        after = self._states()
        if draws or not all(map(torch.equal, before, after)):
            self._as_left = after
            self._drawn_at = self._sites.here()
        return result

    def _states(self) -> list[Tensor]:
        return [generator.get_state() for generator in self._generators]

    def _check(self, call: OperatorCall) -> None:
        given = call.func, call.args, call.kwargs, self._generators
        obstacle = rules.operator_obstacle(*given, lambda tensor: self.know(tensor).constant)
        if obstacle is None and not all(map(_is_plain, call.inputs)):
            obstacle = rules.UNSUPPORTED_LAYOUT
        if obstacle is None and inside_compiled_module():
            obstacle = rules.COMPILED
        if obstacle is not None:
            self.refuse(str(call.func), obstacle)
