"""Observes one real step: which modules are called with what, and when their backward runs."""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from lightning_graphs.autograd.callables import KnownOfCall
from lightning_graphs.device.graph import is_current_stream_capturing
from lightning_graphs.device.rules import DYNAMIC_SHAPE, operator_obstacle
from lightning_graphs.device.trace import OperatorCall, OperatorsSeen
from lightning_graphs.errors import CaptureError
from lightning_graphs.private.callsite import CallSiteFinder
from lightning_graphs.private.engine import (
    current_autograd_node,
    leaf_of,
    nodes_behind,
    nodes_recorded,
    number_of,
    recorded_before,
    will_execute,
)
from lightning_graphs.private.generators import random_place
from lightning_graphs.private.torch import (
    caches_weights,
    in_transform,
    is_strided,
    memory_of,
    out_of_sight,
    version_of,
)
from lightning_graphs.values.signature import BackendFlags, Modes, Signature
from lightning_graphs.values.tree import (
    alias_groups,
    leaves_of,
    named_leaves,
    own_class,
    substitute,
)

Direction = Literal["forward", "backward"]
Pass = tuple["ObservedCall", Direction]


@dataclass(eq=False, slots=True)
class ObservedCall:
    """One call of a module in the observed step."""

    name: str  # qualified name of the module
    module: nn.Module
    original: Callable[..., Any]  # what a call of the module runs by itself
    args: tuple[Any, ...]  # its positional arguments, detached from the autograd graph
    kwargs: Mapping[str, Any]  # its keyword arguments, detached
    device_type: str  # of what the fit runs on
    parent: ObservedCall | None = None  # the call of another observed module that made this one
    ordinal: int = 0  # which call of the module in the step it is, counted from 0
    kernels: BackendFlags = field(default_factory=BackendFlags.now)  # of operators
    grad_enabled: bool = field(default_factory=torch.is_grad_enabled)  # autograd was recording
    autocast: torch.dtype | None = field(init=False)  # data type of autocast; None while it was off
    # The module's parameters that required no gradient
    frozen: frozenset[nn.Parameter] = field(init=False)
    training: tuple[bool, ...] = field(init=False)  # the train/eval flag of each submodule
    requires_grad: bool = False  # whether an output requires grad
    # The call was made by a backward pass, as activation checkpointing does.
    recomputed: bool = field(default_factory=lambda: current_autograd_node() is not None)
    backwards: int = 0  # how often a backward pass went through its outputs
    # A backward pass was not for all of the module's parameters, or goes from the call on to others
    # of their uses
    partial: bool = False
    # For each argument, by its index among the tensors of the arguments, earlier calls that have
    # returned it; or, if there are none and it has no gradient, those that were given it, too.
    sources: dict[int, list[Seen]] = field(default_factory=dict)
    # Why it cannot be a graph, in words that follow its name; empty if it can, as far as is known
    # without a look at its code.
    obstacle: str = ""
    known: KnownOfCall = field(default_factory=KnownOfCall)  # what its capture should know
    # How many nodes autograd had recorded as it began, and as it ended
    nodes: tuple[int, int] | None = None
    shaped_by: str = ""  # an operator inside of it whose output shape depends on values; or empty
    # Such an operator ran before it in the step: its arguments may have any shape in the next one.
    follows_values: bool = False

    def __post_init__(self) -> None:
        is_cast = torch.is_autocast_enabled(self.device_type)
        self.autocast = torch.get_autocast_dtype(self.device_type) if is_cast else None
        self.frozen = frozenset(p for p in self.module.parameters() if not p.requires_grad)
        self.training = tuple(m.training for m in self.module.modules())

    @property
    def work(self) -> float:
        """The number of nodes that autograd has recorded for it; infinite if it recorded none."""
        return self.nodes[1] - self.nodes[0] if self.nodes is not None else float("inf")

    def made(self, nodes: Sequence[Node]) -> int:
        """Count those of these nodes that autograd has recorded for it."""
        start, end = self.nodes or (0, 0)
        return sum(recorded_before(n, end) and not recorded_before(n, start) for n in nodes)

    def key(self) -> Hashable:
        """Return what tells this call from another one of its module."""
        # Torch's switches are in `kernels`, as they were; those of now are equal for all calls.
        modes = Modes.current("cpu")
        try:
            signature: Hashable = Signature.of(
                self.args, self.kwargs, modes=modes, host_values=True
            )[0]
        except CaptureError:
            signature = None
        return self.name, signature, self.autocast, self.grad_enabled, self.frozen, self.training


@dataclass(slots=True)
class Observation:
    """What one step did."""

    calls: list[ObservedCall] = field(default_factory=list)  # calls in the order of their beginning
    # Forward and backward passes of these calls in the order in which they ran.
    passes: list[Pass] = field(default_factory=list)
    # The first operator whose output shape depends on values; empty if there is none.
    shaped_by: str = ""
    # Of each leaf the numbers of the nodes that use it, as far as backward passes go
    uses: dict[Tensor, list[int]] = field(default_factory=dict)

    def among_uses(self, calls: Sequence[ObservedCall]) -> set[ObservedCall]:
        """Find those of these calls whose gradients are added up amid those of other code.

        Autograd adds them from the last use of a parameter to the first one. What code outside of
        all of these calls gives is one sum if graphs write their gradients themselves.
        """
        inside = [call.nodes for call in calls if call.nodes is not None]
        found = set()
        for call in calls:
            start, end = call.nodes or (0, 0)
            for parameter in call.module.parameters():
                used = self.uses.get(parameter, ())
                others = [n for n in used if not any(first <= n < last for first, last in inside)]
                before = sum(number < start for number in others)
                if before > 1 or (before and max(others) >= end):
                    found.add(call)
        return found

    def adds_otherwise(self, call: ObservedCall) -> bool:
        """Whether a graph would add its own uses of a parameter up before it adds later ones."""
        start, end = call.nodes or (0, 0)
        used = [self.uses.get(parameter, ()) for parameter in call.module.parameters()]
        return any(
            sum(start <= number < end for number in numbers) > 1 and max(numbers) >= end
            for numbers in used
        )


@dataclass(frozen=True, slots=True)
class Seen:
    """A tensor that an observed call was given or has returned.

    It is kept alive, so that its address stays its own.
    """

    call: ObservedCall
    index: int  # its place among the tensors that the call was given or returned
    tensor: Tensor  # the tensor, detached
    version: int  # how often its memory had been written then
    returned: bool  # and not given

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


class _Token:
    """Lives as long as the autograd graph of some outputs."""


@dataclass(slots=True)
class BegunCall:
    """A call that is under way."""

    call: ObservedCall
    given: list[Tensor]  # the tensors among its arguments
    place: tuple[int, ...]  # of the random generators, as it began


class StepObserver:
    """Records the calls of modules in a step; :meth:`remove` takes its hooks away."""

    def __init__(
        self,
        device_type: str,
        # Whether a training step's own code is running: other calls, of validation and of hooks, do
        # not count, but for those that a backward pass makes.
        is_stepping: Callable[[], bool],
        *,
        # Operators whose output shape depends on values are looked for, under a dispatch mode,
        # which would let compiled code run eagerly.
        looks_at_shapes: bool = False,
    ) -> None:
        self.observation = Observation()
        self.is_over = False
        self._seen: dict[int, list[Seen]] = {}
        self._shared: list[Seen] = []
        self._device_type = device_type
        self._kernels = BackendFlags.now()
        self._is_stepping = is_stepping
        self._open: list[BegunCall] = []
        # The calls that were given a tensor, known by its gradient, and where
        self._users: dict[tuple[Node, int], list[tuple[ObservedCall, int]]] = {}
        self._graphs: list[tuple[ObservedCall, weakref.ref[_Token]]] = []
        self._times: Counter[nn.Module] = Counter()
        self._handles: list[RemovableHandle] = []
        self._sites = CallSiteFinder()
        self._looks_at_shapes = looks_at_shapes

    def looking_at_shapes(self) -> AbstractContextManager[Any]:
        """Find operators of data-dependent shape in the body, if ``looks_at_shapes`` was set."""
        looks = self._looks_at_shapes and self._is_stepping()
        return OperatorsSeen(self._see, real=True) if looks else contextlib.nullcontext()

    def _see(self, operator: OperatorCall, _: Any) -> None:
        """Note an operator that took the shape of its output from values."""
        given = operator.func, operator.args, operator.kwargs
        # Whether a value that a mask assigns is a Python number: benefit of the doubt.
        if operator_obstacle(*given, (), lambda _: True) is not DYNAMIC_SHAPE:
            return
        reason = f"{operator.func} at {self._sites.here().describe()}"
        self.observation.shaped_by = self.observation.shaped_by or reason
        for begun in self._open:
            begun.call.shaped_by = begun.call.shaped_by or reason

    # No mode sees what the observer asks of tensors: it is more than what the step computes
    @out_of_sight()
    def begin(
        self, name: str, module: nn.Module, original: Callable[..., Any], args: Any, kwargs: Any
    ) -> BegunCall | None:
        """Record the begin of a module's call; return None if it does not count."""
        if self.is_over or is_current_stream_capturing():  # of a call without autograd
            return None
        if not self._is_stepping() and current_autograd_node() is None:
            return None
        transformed = in_transform()
        given = leaves_of((args, kwargs), Tensor)
        is_special = any(map(own_class, given))  # methods of its own may not bear a copy
        call_args, call_kwargs = args, kwargs
        is_kept = not (transformed or is_special)
        args, kwargs = _detached((args, dict(kwargs))) if is_kept else ((), {})
        parent = self._open[-1].call if self._open else None
        this = name, module, original, args, kwargs, self._device_type, parent
        call = ObservedCall(*this, ordinal=self._times[module])
        call.follows_values = bool(self.observation.shaped_by)
        # Precision plugins set the default dtype for the step's own code alone.
        here = self._kernels._replace(default_dtype=call.kernels.default_dtype)
        if is_special:
            call.obstacle = _special_class(call_args, call_kwargs)
        elif transformed:
            call.obstacle = "is made inside of a transform (torch.func, forward-mode autograd)"
        elif call.grad_enabled and call.kernels.saved_tensors_hooks:
            call.obstacle = (
                "is made inside of torch.autograd.graph.saved_tensors_hooks (save_on_cpu), which a "
                "replay would not call"
            )
        elif caches_weights(module):
            call.obstacle = (
                "is made inside of torch.nn.utils.parametrize.cached(), where calls share weights "
                "that are computed, and their gradient"
            )
        elif any(parameter.grad_fn is not None for parameter in module.parameters()):
            call.obstacle = (
                "is made with weights that the step has computed (torch.func.functional_call), and "
                "a graph has those of its capture"
            )
        elif switched := ", ".join(here.changes(call.kernels)):
            call.obstacle = (
                f"is made under switches of torch that the step has set just for it: {switched}"
            )
        self._times[module] += 1
        self._find_sources(call)
        if call.grad_enabled and not (transformed or call.recomputed):
            for i, tensor in enumerate(given):
                if tensor.requires_grad:
                    node, output = get_gradient_edge(tensor)[:2]
                    self._users.setdefault((node, output), []).append((call, i))
            call.nodes = nodes_recorded(), 0
        self._open.append(BegunCall(call, given, random_place(self._device_type)))
        self.observation.calls.append(call)
        return self._open[-1]

    def look_behind(self, loss: Any) -> None:
        """Ahead of a backward pass, see which arguments are used in their call and elsewhere."""
        users: dict[tuple[Node, int], list[Node]] = {edge: [] for edge in self._users}
        for node in nodes_behind(leaves_of(loss, Tensor)):
            for edge in node.next_functions:
                if edge in users:
                    users[edge].append(node)
                if edge[0] is not None and (found := leaf_of(edge[0])) is not None:
                    self.observation.uses.setdefault(found, []).append(number_of(node))
        for edge, calls in self._users.items():
            for call, leaf in calls:
                if 1 < call.made(users[edge]) < len(users[edge]):
                    call.known.used_elsewhere.add(leaf)

    def _find_sources(self, call: ObservedCall) -> None:
        """Note which arguments other calls have returned or were given, unchanged since."""
        arguments = leaves_of((call.args, call.kwargs), Tensor)
        if not all(map(is_strided, arguments)):
            return  # such a call is no graph
        for i in set(alias_groups(arguments)):
            argument = arguments[i]
            known = self._seen.setdefault(argument.data_ptr(), [])
            found = [seen for seen in known if seen.is_(argument)]
            returned = [seen for seen in found if seen.returned]
            if returned:
                call.sources[i] = returned
            elif not (argument.requires_grad or argument.is_inference()):
                call.sources[i] = found
                known.append(Seen(call, i, argument, version_of(argument), returned=False))

    @out_of_sight()
    def end(self, begun: BegunCall | None, output: Any) -> None:
        """Record the end of a call, given what :meth:`begin` returned for it."""
        if begun is None or self.is_over:
            return
        while self._open.pop() is not begun:  # an exception of user code has ended it
            pass
        call = begun.call
        call.known.draws = random_place(self._device_type) != begun.place
        if call.nodes is not None:
            call.nodes = call.nodes[0], nodes_recorded()
        if in_transform():
            return
        self.observation.passes.append((call, "forward"))
        tensors = leaves_of(output, Tensor)
        self._remember(begun, tensors)
        returned = {i: tensor for i, tensor in enumerate(tensors) if tensor.requires_grad}
        # An argument that is handed on has its gradient when the call that made it has.
        outputs = {i: t for i, t in returned.items() if not any(t is one for one in begun.given)}
        call.requires_grad = bool(returned)
        if returned and not outputs and not call.obstacle:
            call.obstacle = "returns only its arguments, so that a graph would compute nothing"
        if outputs and not call.recomputed:
            self._await_backward(call, outputs)

    def _remember(self, begun: BegunCall, tensors: Sequence[Tensor]) -> None:
        """Remember these outputs, to find them among the arguments of other calls."""
        users = Counter(map(memory_of, filter(is_strided, (*begun.given, *tensors))))
        for i, tensor in enumerate(tensors):
            if not is_strided(tensor) or tensor.is_inference():
                continue
            made = Seen(begun.call, i, tensor.detach(), version_of(tensor), returned=True)
            self._seen.setdefault(tensor.data_ptr(), []).append(made)
            if users[memory_of(tensor)] > 1:  # another output or an argument shares its memory
                self._shared.append(made)

    def _await_backward(self, call: ObservedCall, outputs: Mapping[int, Tensor]) -> None:
        """Note when a backward pass goes through these outputs, and what it brings."""
        for output in outputs.values():
            if output.grad_fn is not None:  # shows whether the autograd graph outlives the step
                token = _Token()
                metadata: Any = output.grad_fn.metadata  # a dict, whatever its annotation says
                metadata[id(token)] = token
                self._graphs.append((call, weakref.ref(token)))
        trainable = [p for p in call.module.parameters() if p.requires_grad]

        def backward(_: Tensor) -> None:
            call.backwards += 1
            if torch.is_grad_enabled() and not call.obstacle:
                call.obstacle = "is differentiated twice (create_graph=True)"
            if call.backwards > 1 and not call.obstacle:
                call.obstacle = "has more than one backward pass through it (retain_graph=True)"
            if not all(p.requires_grad for p in trainable):  # frozen since, as a discriminator is
                call.partial = True
            elif trainable:
                node = get_gradient_edge(trainable[0]).node
                try:  # whether the pass that is running adds to its `.grad`
                    call.partial |= not will_execute(node)
                except RuntimeError:  # so torch answers if autograd.grad returns its gradient
                    call.partial = True

        def came(i: int, gradient: Tensor | None) -> None:
            if gradient is not None and is_strided(gradient):  # cuDNN gives none of unused states
                call.known.gradient_strides[i] = gradient.stride()
            if call.backwards == 1:  # it runs once the last of them has come
                if ended in (passes := self.observation.passes):
                    passes.remove(ended)
                passes.append(ended)

        ended: tuple[ObservedCall, Direction] = (call, "backward")
        # Its mode "all" misses a pass that begins at the only output, as a gradient penalty does.
        hook = torch.autograd.graph.register_multi_grad_hook
        self._handles.append(hook(list(outputs.values()), backward, mode="any"))
        self._handles += [t.register_hook(partial(came, i)) for i, t in outputs.items()]

    def remove(self) -> None:
        """End the observation; may be called again."""
        self.is_over = True
        self._users.clear()
        # Before that, the hooks keep the graphs alive that they are hooks of.
        while self._handles:
            self._handles.pop().remove()
        for call, token in self._graphs:
            if call.backwards == 0 and token() is not None and not call.obstacle:
                call.obstacle = "has an output whose autograd graph is kept for a later step"
        for made in self._shared:
            if version_of(made.tensor) != made.version and not made.call.obstacle:
                made.call.obstacle = (
                    "returns a tensor in the memory of another output or of an argument, and the "
                    "step writes there; what a graph returns has memory of its own"
                )
        for call in self.observation.calls:
            if not call.obstacle and self.observation.adds_otherwise(call):
                call.obstacle = (
                    "uses a parameter more than once that later code uses, too, and a graph would "
                    "add the gradients up in another order"
                )
        for held in (self._graphs, self._shared, self._open, self._seen):
            held.clear()

    def discard(self) -> None:
        """End the observation, and let go of what it holds while a step still runs under it."""
        self.remove()
        self.observation = Observation()


def _detached(tree: Any) -> Any:
    """Copy a tree with leaves of its own for autograd; a tensor that occurs twice stays one."""
    tensors = leaves_of(tree, Tensor)
    leaves: dict[int, Tensor] = {}
    for tensor in tensors:
        kind = Tensor if isinstance(tensor, nn.Parameter) else type(tensor)
        own = tensor.detach()
        # Before torch 2.13 it raises for a sparse one, also where it already is of this class
        leaves[id(tensor)] = own if type(own) is kind else own.as_subclass(kind)
        leaves[id(tensor)].requires_grad_(tensor.requires_grad)
    return substitute(tree, [leaves[id(t)] for t in tensors])


def _special_class(args: Any, kwargs: Any) -> str:
    """Say that a call is given a tensor of a class with operators of its own, and at which line."""
    for name, leaf in (*named_leaves(tuple(args), "args"), *named_leaves(dict(kwargs), "kwargs")):
        if isinstance(leaf, Tensor) and (kind := own_class(leaf)):
            return f"is given {kind} as {name} at {CallSiteFinder().here().describe()}; {_PLAIN}"
    return ""


_PLAIN = "give it a plain tensor: x.as_subclass(torch.Tensor)"
