"""One real step, watched: which modules were called with what, and when their backward ran."""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from lightning_graphs.core.callsite import CallSiteFinder
from lightning_graphs.core.generators import random_place
from lightning_graphs.core.graph import is_current_stream_capturing
from lightning_graphs.core.leaves import alias_groups
from lightning_graphs.core.obstacles import DYNAMIC_SHAPE, operator_obstacle
from lightning_graphs.core.recorder import OperatorMode
from lightning_graphs.core.signature import KernelChoice
from lightning_graphs.core.torch_private import (
    current_autograd_node,
    in_transform,
    version_of,
    will_execute,
)
from lightning_graphs.core.tree import leaves_of, substitute
from lightning_graphs.training.modules.entry import Entry
from lightning_graphs.training.modules.observed_call import ObservedCall

Direction = Literal["forward", "backward"]


@dataclass(slots=True)
class Observation:
    """What one step did."""

    calls: list[ObservedCall] = field(default_factory=list)  # calls in the order of their beginning
    # Forward and backward passes of these calls in the order in which they ran.
    passes: list[tuple[ObservedCall, Direction]] = field(default_factory=list)
    # The first operator whose output shape depends on values; empty if there is none.
    shaped_by: str = ""


@dataclass(frozen=True, slots=True)
class _Seen:
    """A tensor that an observed call was given or has returned.

    It is kept alive, so that its address stays its own.
    """

    call: ObservedCall
    index: int  # its place among the tensors that the call was given or returned
    tensor: Tensor  # the tensor, detached
    version: int  # how often its memory had been written then

    def is_(self, argument: Tensor) -> bool:
        """Whether an argument is this tensor, unchanged."""
        mine = self.tensor
        return (
            version_of(mine) == self.version
            and argument.shape == mine.shape
            and argument.stride() == mine.stride()
            and argument.dtype == mine.dtype
            and argument.device == mine.device
        )


class WatchedForward(Entry):
    """Tells an observer of every call, with the arguments that the original gets.

    It serves all observations of a fit: compiled code that calls the module knows it again.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.observer: StepObserver | None = None  # who is told
        self.name = ""  # qualified name of the module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Answer a call of the module."""
        observer = self.observer
        if torch.compiler.is_compiling() or observer is None:
            return self.original(*args, **kwargs)
        observer.begin(self.name, self._module, args, kwargs)
        output = self.original(*args, **kwargs)
        observer.end(self._module, output)
        return output


class _ShapesOfValues(OperatorMode):
    """Calls ``found`` with every operator whose output shape depends on values."""

    sees_functions = False

    def __init__(self, found: Callable[[Any], None]) -> None:
        super().__init__()
        self._found = found

    def operator(
        self, func: OpOverload, types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if operator_obstacle(func, args, kwargs, (), _is_constant) is DYNAMIC_SHAPE:
            self._found(func)
        return func(*args, **kwargs)


def _is_constant(value: Tensor) -> bool:
    """Whether a value that a mask assigns may be a Python number: benefit of the doubt."""
    return True


class _Token:
    """Lives as long as the autograd graph of some outputs."""


class StepObserver:
    """Watches the calls of modules; with :meth:`remove` nothing of it is left."""

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        # What stands for modules while they are watched; it is added to.
        known: dict[nn.Module, WatchedForward],
        device_type: str,
        # Whether a training step's own code is running: other calls, of validation and of hooks, do
        # not count, but for those that a backward pass makes.
        is_stepping: Callable[[], bool] = lambda: True,
        *,
        # Operators whose output shape depends on values are looked for, under a dispatch mode,
        # which would let compiled code run eagerly.
        looks_at_shapes: bool = False,
    ) -> None:
        self.observation = Observation()
        self._made: dict[int, list[_Seen]] = {}
        self._shared: list[_Seen] = []
        self._given: dict[int, list[_Seen]] = {}
        self._device_type = device_type
        self._kernels = KernelChoice.now()
        self._is_stepping = is_stepping
        self._open: list[ObservedCall] = []
        self._places: dict[ObservedCall, tuple[int, ...]] = {}
        self._originals: dict[ObservedCall, list[Tensor]] = {}
        self._graphs: list[tuple[ObservedCall, weakref.ref[_Token]]] = []
        self._times: Counter[nn.Module] = Counter()
        self._handles: list[RemovableHandle] = []
        self._forwards: list[WatchedForward] = []
        for name, module in modules.items():
            if not isinstance(module, torch.jit.ScriptModule):  # those run no Python
                forward = known.setdefault(module, WatchedForward(module))
                forward.name, forward.observer = name, self
                self._forwards.append(forward)
        self._is_watching = False
        self._sites = CallSiteFinder()
        self._looks_at_shapes = looks_at_shapes

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """See the calls that the body makes, which is the step's own code or its backward pass."""
        if self._is_watching:  # such a backward pass may be inside of the step's own code
            yield
            return
        forwards, self._is_watching = self._forwards, True
        for forward in forwards:
            forward.install()
        stepping = self._looks_at_shapes and self._is_stepping()
        try:
            with _ShapesOfValues(self._takes_shape) if stepping else contextlib.nullcontext():
                yield
        finally:
            self._is_watching = False
            for forward in forwards:
                forward.uninstall()

    def _takes_shape(self, func: Any) -> None:
        """Note that an operator took the shape of its output from values."""
        reason = f"{func} at {self._sites.here().describe()}"
        self.observation.shaped_by = self.observation.shaped_by or reason
        for call in self._open:
            call.shaped_by = call.shaped_by or reason

    def begin(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Note that a call of a module begins."""
        if not self._counts():
            return
        transformed = in_transform()
        originals = _tensors_in((args, kwargs))
        args, kwargs = ((), {}) if transformed else _detached((args, dict(kwargs)))
        parent = self._open[-1] if self._open else None
        call = ObservedCall.now(name, module, args, kwargs, self._device_type, parent)
        call.ordinal = self._times[module]
        call.follows_values = bool(self.observation.shaped_by)
        call.transformed = transformed
        # Precision plugins set the default dtype for the step's own code alone.
        call.switched = self._kernels._replace(dtype=call.kernels.dtype).changes(call.kernels)
        self._times[module] += 1
        self._find_sources(call)
        self._places[call] = random_place(self._device_type)
        self._originals[call] = originals
        self._open.append(call)
        self.observation.calls.append(call)

    def _find_sources(self, call: ObservedCall) -> None:
        """Note which arguments are what an observed call has returned, unchanged since."""
        arguments = _tensors_in((call.args, call.kwargs))
        if not all(map(_has_address, arguments)):
            return  # such a call is no graph
        for i, first in enumerate(alias_groups(arguments)):
            found = [m for m in self._made.get(arguments[i].data_ptr(), ()) if m.is_(arguments[i])]
            if found and first == i:
                call.sources[i] = [(made.call, made.index) for made in found]
            elif first == i and not (arguments[i].requires_grad or arguments[i].is_inference()):
                self._find_shared(call, i, arguments[i])

    def _find_shared(self, call: ObservedCall, index: int, argument: Tensor) -> None:
        """Note which calls were given an argument before, unchanged since."""
        known = self._given.setdefault(argument.data_ptr(), [])
        if found := [(seen.call, seen.index) for seen in known if seen.is_(argument)]:
            call.shared[index] = found
        known.append(_Seen(call, index, argument, version_of(argument)))

    def _counts(self) -> bool:
        if is_current_stream_capturing():  # a call without autograd
            return False
        return self._is_stepping() or current_autograd_node() is not None

    def end(self, module: nn.Module, output: Any) -> None:
        """Note what a call has returned."""
        if not self._counts():
            return
        while self._open and self._open[-1].module is not module:
            self._open.pop()  # an exception of the user's left it
        if not self._open:
            return
        call = self._open.pop()
        call.draws = random_place(self._device_type) != self._places.pop(call)
        given = self._originals.pop(call)
        if call.transformed:
            return
        self.observation.passes.append((call, "forward"))
        tensors = _tensors_in(output)
        self._remember(call, tensors)
        returned = {i: tensor for i, tensor in enumerate(tensors) if tensor.requires_grad}
        # An argument that is handed on has its gradient when the call that made it has.
        outputs = {i: t for i, t in returned.items() if not any(t is one for one in given)}
        call.requires_grad = bool(returned)
        call.hands_on = bool(returned) and not outputs
        if outputs and not call.recomputed:
            self._await_backward(call, outputs)

    def _remember(self, call: ObservedCall, tensors: Sequence[Tensor]) -> None:
        """Know these outputs again where they are arguments of other calls."""
        for i, tensor in enumerate(tensors):
            if not _has_address(tensor) or tensor.is_inference():
                continue
            made = _Seen(call, i, tensor.detach(), version_of(tensor))
            self._made.setdefault(tensor.data_ptr(), []).append(made)
            if self._is_shared(call, tensor, tensors):
                self._shared.append(made)

    def _await_backward(self, call: ObservedCall, outputs: Mapping[int, Tensor]) -> None:
        """Note when a backward pass goes through these outputs, and what it brings."""
        for output in outputs.values():
            self._follow(call, output)
        trainable = next((p for p in call.module.parameters() if p.requires_grad), None)

        def backward(gradients: Sequence[Tensor | None]) -> None:
            call.backwards += 1
            for i, gradient in zip(outputs, gradients, strict=True):
                if gradient is not None and _has_address(gradient):
                    call.gradient_strides[i] = gradient.stride()
            call.twice_differentiable |= torch.is_grad_enabled()
            if trainable is not None:
                node = torch.autograd.graph.get_gradient_edge(trainable).node
                call.partial |= not _accumulates(node)
            if call.backwards == 1:
                self.observation.passes.append((call, "backward"))

        found = list(outputs.values())
        self._handles.append(
            torch.autograd.graph.register_multi_grad_hook(found, backward, mode="all")
        )

    @staticmethod
    def _is_shared(call: ObservedCall, output: Tensor, outputs: Sequence[Tensor]) -> bool:
        """Whether another output or an argument is in the memory of an output."""
        given = _tensors_in((call.args, call.kwargs))
        return (
            list(map(_memory, filter(_has_address, (*given, *outputs)))).count(_memory(output)) > 1
        )

    def _follow(self, call: ObservedCall, output: Tensor) -> None:
        """Be able to tell, after the step, whether the autograd graph of an output is alive."""
        if output.grad_fn is not None:
            token = _Token()
            metadata: Any = output.grad_fn.metadata  # a dict, whatever its annotation says
            metadata[id(token)] = token
            self._graphs.append((call, weakref.ref(token)))

    def remove(self) -> None:
        """End the observation; may be called again."""
        for forward in self._forwards:
            forward.observer = None
        self._forwards = []
        # Before that, the hooks keep the graphs alive that they are hooks of.
        while self._handles:
            self._handles.pop().remove()
        for call, token in self._graphs:
            call.outlives |= call.backwards == 0 and token() is not None
        for made in self._shared:
            made.call.rewritten |= version_of(made.tensor) != made.version
        for held in (self._graphs, self._shared, self._open, self._made, self._given):
            held.clear()

    def discard(self) -> None:
        """End the observation, and let go of what it holds while a step still runs under it."""
        self.remove()
        self._originals.clear()
        self.observation = Observation()


def _has_address(tensor: Tensor) -> bool:
    """Whether a tensor is one piece of memory, unlike sparse and nested ones."""
    return tensor.layout is torch.strided and not tensor.is_nested


def _tensors_in(tree: Any) -> list[Tensor]:
    return [leaf for leaf in leaves_of(tree) if isinstance(leaf, Tensor)]


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _accumulates(leaf: Node) -> bool:
    """Whether the backward pass that is running adds to this leaf's ``.grad``."""
    try:
        return will_execute(leaf)
    except RuntimeError:  # torch answers so for a leaf whose gradient autograd.grad returns
        return False


def _detached(tree: Any) -> Any:
    """The tree with leaves of their own for autograd; the same tensor stays the same tensor."""
    tensors = _tensors_in(tree)
    leaves = {id(t): t.detach().requires_grad_(t.requires_grad) for t in tensors}
    return substitute(tree, [leaves[id(t)] for t in tensors])
