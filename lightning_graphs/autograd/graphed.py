"""A captured call: its graphs, its guards, and how it stands in for the eager one."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import operator
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_graphs.autograd.backward import (
    AliasedGradients,
    DirectGradients,
    HookedInOrder,
    OutputGradients,
)
from lightning_graphs.device.graph import CUDAGraph, GraphPool
from lightning_graphs.errors import ArgumentElsewhereError, CaptureError, ReplayError
from lightning_graphs.private.callsite import codes_in
from lightning_graphs.private.engine import saved_tensors_hooks, will_execute
from lightning_graphs.private.exchange import bind
from lightning_graphs.private.torch import (
    in_transform,
    is_strided,
    named_buffers_in,
    named_modules_in,
    named_parameters_in,
    tables_of,
    version_of,
)
from lightning_graphs.values.memory import (
    AddressGuard,
    AliasedBuffer,
    OutputPlan,
    StaticInputs,
    are_apart,
)
from lightning_graphs.values.signature import CallPlan
from lightning_graphs.values.snapshot import PythonSnapshot

# ------------------ Graphed callables

Stores = tuple[tuple[nn.Module, str, Any], ...]
"""Module, name and value of attributes that code sets; the values are plain ones."""


def set_again(stores: Stores) -> None:
    """Set these attributes, past ``__setattr__`` of the module, which ran at capture."""
    for module, name, value in stores:
        vars(module)[name] = value


class SharedArgument:
    """The static input that several calls with one argument tensor share."""

    def __init__(self) -> None:
        self._tensor: Tensor | None = None
        self._version = 0

    def put(self, argument: Tensor) -> None:
        """Note the tensor whose value was copied in; a reference keeps its identity unique."""
        if argument.is_inference():  # it has no version counter
            self._tensor = None
            return
        self._tensor = argument
        self._version = version_of(argument)

    def holds(self, argument: Tensor) -> bool:
        """Return whether an argument is that tensor, unwritten since."""
        return argument is self._tensor and version_of(argument) == self._version


Source = AliasedBuffer | SharedArgument
"""Memory of an earlier graph that a later one reads as an argument."""


@dataclass(eq=False, slots=True)
class PendingBackward:
    """A forward pass whose backward has not run."""

    after: int  # place of its forward graph
    before: int  # place of its backward graph
    is_void: bool = False  # whether a graph has overwritten what the backward pass needs
    is_done: bool = False


class ReplayOrder:
    """Checks that graphs over one pool replay in the order of their capture.

    What one graph had freed when another was captured, the other may use. So between a forward and
    its backward only such graphs may be replayed as were captured between the two.
    """

    def __init__(self) -> None:
        self._captured = 0
        self._pending: dict[PendingBackward, None] = {}
        self.last = -1  # place of the graph that was replayed last; -1 at the beginning

    def place(self) -> int:
        """The place of a graph that is captured now."""
        self._captured += 1
        return self._captured - 1

    def begin(self) -> None:
        """Begin again with the first graph: pending backward passes will not run."""
        for pending in self._pending:
            pending.is_void = True
        self._pending.clear()
        self.last = -1

    def replay(self, place: int) -> None:
        """Note a replay; costs nothing as long as replays keep to the order of capture."""
        if place != self.last + 1 and self._pending:
            spoilt = [p for p in self._pending if not p.after < place < p.before]
            for pending in spoilt:
                pending.is_void = True
                del self._pending[pending]
        self.last = place

    def wait(self, after: int, before: int) -> PendingBackward:
        """Expect the backward at one place of the forward at another."""
        pending = PendingBackward(after, before)
        self._pending[pending] = None
        return pending

    def finish(self, pending: PendingBackward) -> None:
        pending.is_done = True
        del self._pending[pending]
        self.replay(pending.before)


@dataclass(frozen=True, slots=True)
class BackwardPass:
    graph: CUDAGraph  # computes the gradients from ``output_gradients``
    output_gradients: OutputGradients  # its static inputs, one for each output that requires grad
    reach: tuple[frozenset[Tensor], ...]  # the leaves of autograd that each of these depends on
    targets: tuple[Tensor, ...]  # the leaves whose gradients autograd is given, in their order
    # Of inputs that require grad, among the call's tensors; several times where each use counts
    input_positions: tuple[int, ...]
    parameters: HookedInOrder  # whose gradients autograd is given; none if direct
    handed: AliasedGradients  # hands autograd the gradients of those inputs, then parameters
    direct: DirectGradients | None  # writes the parameters' gradients, where autograd does not
    place: int  # its place in the order of captures
    # Computes all of these gradients without the graph, from what its forward graph has left, for
    # gradients of outputs that do not repeat themselves as those of the capture do.
    pull: Callable[[Sequence[Tensor]], Sequence[Tensor | None]] | None

    def reached(self, gradients: Sequence[Tensor | None]) -> frozenset[Tensor]:
        """List the leaves on which outputs with a gradient depend."""
        pairs = zip(self.reach, gradients, strict=True)
        return frozenset().union(*(leaves for leaves, g in pairs if g is not None))


@dataclass(eq=False, repr=False)
class GraphedCallable:
    """Runs a callable as a forward graph and, inside one autograd node, a backward graph.

    Calls must equal the captured one in everything but values. Where the train/eval flag of any
    submodule, or of a module that a function holds, differs from its state at capture, the original
    runs instead; also inside of a transform (``torch.func``, forward-mode autograd), where a replay
    would overwrite an aliased output that the caller has kept, and in the first call of a recurrent
    layer with dropout after a seed was set, which renews cuDNN's random state.

    Made by :func:`~lightning_graphs.core.make_graphed_callables`; for a module it stands in place
    of ``module.forward``.
    """

    original: Callable[..., Any]
    module: nn.Module | None  # whose forward it is, if a module's
    plan: CallPlan  # the check of its arguments
    pool: GraphPool
    order: ReplayOrder  # of the captures over that pool
    inputs: StaticInputs
    outputs: OutputPlan
    forward_graph: CUDAGraph
    backward_pass: BackwardPass | None
    place: int  # of the forward graph, in the order of captures
    # By the index of a tensor of the call, the memory where it is read in place; and what tells
    # later calls whether they get that tensor.
    aliased_inputs: tuple[tuple[int, Source], ...]
    shared: tuple[tuple[int, SharedArgument], ...]
    stores: tuple[Stores, Stores]  # attributes that its forward sets, and its backward
    modules: Sequence[nn.Module]  # all that it holds
    guards: Sequence[AddressGuard]  # of the tensors in these
    # Optimizers change all parameters together: one tells, at no cost that grows with them.
    witness: Tensor | None
    # Rewords the error of a refused backward pass for the maker of the graphs; as it is,
    # it speaks to callers of make_graphed_callables.
    explain: Callable[[ReplayError], object]

    def __post_init__(self) -> None:
        self.__wrapped__ = self.original  # inspect.signature shows the original's arguments
        # Autograd records a node only if an input of it requires grad; parameters whose gradients
        # are direct do not pass through it.
        with torch.inference_mode(False):
            device = self.plan.signature.modes.device_type
            self._anchor = torch.empty(0, device=device, requires_grad=True)
            self._anchor_node = torch.autograd.graph.get_gradient_edge(self._anchor).node
        self._training = [m.training for m in self.modules]
        self._replay_forward, self._dropout = self.forward_graph.replay, self.forward_graph.dropout
        self._forward_stores, self._backward_stores = self.stores
        self._fills = any(each.path for each in self.outputs.bound)
        self._witness = self._anchor if self.witness is None else self.witness
        self._version = version_of(self._witness)
        self._pending: PendingBackward | None = None
        self._released = False

    def follow(self, instruction: Callable[[], object]) -> None:
        """Run an instruction after each replay of the forward graph."""
        replay = self._replay_forward

        def both() -> None:
            replay()
            instruction()

        self._replay_forward = both

    def is_seeded(self) -> bool:
        """Return whether a call renews cuDNN's random state, from which the graph draws."""
        return self._dropout is not None and not self._dropout.is_current()

    def _refuse_arguments_elsewhere(self, tensors: Sequence[Tensor]) -> None:
        for leaf, source in self.aliased_inputs:
            if not source.holds(tensors[leaf]):
                raise ArgumentElsewhereError(
                    "An argument must be the tensor of an earlier graph, as it was at the capture.",
                    f"got another tensor as {self.plan.signature.tensor_names[leaf]}",
                    "pass what the earlier call returned or was given, or capture again",
                )

    def accepts(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Return whether these arguments have a replay under the switches now in force."""
        return (
            not self._released
            and [m.training for m in self.modules] == self._training
            and self.plan.match(args, kwargs) is not None
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.original(*args, **kwargs) if self.is_seeded() else self.call(args, kwargs)

    def call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Replay a call, after :meth:`is_seeded` was asked."""
        changed = self._released or [m.training for m in self.modules] != self._training
        if changed or in_transform():
            return self.original(*args, **kwargs)
        if saved_tensors_hooks() is not None and torch.is_grad_enabled():
            raise ReplayError(
                "A graphed callable cannot call hooks for saved tensors, because a replay saves "
                "none.",
                "it is called inside of torch.autograd.graph.saved_tensors_hooks (save_on_cpu)",
                "enter the hooks in the callable itself, which makes them a part of its graphs; or "
                "leave it ungraphed",
            )
        tensors = self.plan.tensors(args, kwargs)
        backward = self.backward_pass if torch.is_grad_enabled() else None
        for guard in self.guards:  # ahead of the replay, which writes buffers and draws
            guard.check(trainable=backward is not None)
        self._refuse_arguments_elsewhere(tensors)
        if self._fills:
            if not are_apart((args, kwargs)):
                return self.original(*args, **kwargs)
            self.outputs.given = args, kwargs
        if self.outputs.is_kept:  # a replay would overwrite what a caller has kept
            return self.original(*args, **kwargs)
        self.inputs.copy_in(tensors, given=not self.aliased_inputs)
        for leaf, argument in self.shared:
            argument.put(tensors[leaf])
        self._replay_forward()
        if self._forward_stores:
            set_again(self._forward_stores)
        self.order.replay(self.place)
        if backward is None:
            return self.outputs.hand_out()
        self._pending = self.order.wait(self.place, backward.place)
        self._version = version_of(self._witness)
        differentiable = [tensors[i] for i in backward.input_positions]
        given = *differentiable, *backward.parameters.given()
        results = _GraphedNode.apply(self, self._anchor, *given)  # type: ignore[no-untyped-call]
        return self.outputs.hand_out(results)

    def bring_back(self) -> bool:
        """Move tensors back to their captured memory; return whether that was possible."""
        return any([guard.bring_back() for guard in self.guards])

    def run_backward(
        self, pending: PendingBackward, gradients: Sequence[Tensor | None]
    ) -> Sequence[Tensor | None]:
        """Replay the backward graph; return gradients of inputs, then of parameters."""
        # What depends only on outputs that have no gradient has none, as in eager mode.
        try:
            self._refuse_unsound_backward(pending)
            backward = self.backward_pass
            assert backward is not None
            direct = backward.direct
            if direct is not None:
                self._refuse_partial_backward()
                direct.refuse_hooks()
        except ReplayError as error:
            self.explain(error)
            raise
        self.order.finish(pending)
        reached: frozenset[Tensor] | None = None
        given: Sequence[Any] = gradients
        if any([g is None for g in gradients]):
            reached = backward.reached(gradients)
            if not reached:
                return [None] * len(backward.targets)
            given = backward.output_gradients.completed(gradients)
        displaced: Sequence[tuple[Tensor, Tensor]] = ()
        if backward.pull is not None and not backward.output_gradients.fit(given):
            found = backward.pull(given)
            handed = found[: len(backward.targets)]
            if direct is not None:
                own = [g for g in found[len(handed) :] if g is not None]
                direct.replay(partial(direct.write, own), reached)
        else:
            displaced = backward.output_gradients.take(given)
            replay = backward.graph.replay
            if direct is not None:
                replay = partial(direct.replay, replay, reached)
            handed = backward.handed.replay(replay)
        if self._backward_stores:
            set_again(self._backward_stores)
        if reached is not None:
            pairs = zip(backward.targets, handed, strict=True)
            handed = [gradient if target in reached else None for target, gradient in pairs]
        for buffer, value in displaced:
            buffer.copy_(value)
        return handed

    def _refuse_unsound_backward(self, pending: PendingBackward) -> None:
        if torch.is_grad_enabled():
            raise ReplayError(
                "A graphed callable does not support double backward.",
                "backward was called with create_graph=True",
                "keep the part that is differentiated twice out of the graphed callable",
            )
        if self._released:
            raise ReplayError(
                "A graphed callable cannot run its backward pass after reset().",
                "its graphs were released",
                "call reset() after the backward pass",
            )
        if pending.is_done:
            raise ReplayError(
                "A graphed callable can run one backward pass for each forward.",
                "backward was called twice for the same forward (retain_graph=True)",
                "run the forward again before the second backward",
            )
        if pending.is_void:
            raise ReplayError(
                "A graphed callable can run backward for its latest forward only.",
                "another forward of this callable, or an earlier callable of its tuple, overwrote "
                "the activations",
                "run backward before the next forward; or give make_graphed_callables a tuple with "
                "the callable (a module as its bound forward) once for every call between two "
                "backward passes, in the order of the calls",
            )
        if version_of(self._witness) != self._version:
            raise ReplayError(
                "A backward pass needs the parameters that its forward pass computed with.",
                "parameters were changed in place after the forward pass, as by optimizer.step()",
                "run backward before parameters change, or run the forward again",
            )

    def _refuse_partial_backward(self) -> None:
        if will_execute(self._anchor_node):
            return
        # A capture may renew the gradient nodes of all leaves, that of the anchor among them.
        self._anchor_node = torch.autograd.graph.get_gradient_edge(self._anchor).node
        if not will_execute(self._anchor_node):
            raise ReplayError(
                'A graph with param_grads="direct" cannot compute some gradients only.',
                "torch.autograd.grad or backward(inputs=...) was called",
                'call loss.backward(), or use param_grads="autograd"',
            )

    def reset(self) -> None:
        """Give the original ``forward`` back and release the graphs; may be called again."""
        if self._released:
            return
        self._released = True
        if self.module is not None and self.module.__dict__.get("forward") is self:
            del self.module.__dict__["forward"]
            if not isinstance(self.original, types.MethodType) or (
                self.original.__func__ is not type(self.module).forward
            ):
                self.module.__dict__["forward"] = self.original
        backward = self.backward_pass
        if backward is not None:
            self.pool.release(backward.graph)
        self.pool.release(self.forward_graph)
        self.backward_pass = None
        self.inputs = StaticInputs(())
        self.outputs = OutputPlan((), static=True)
        self.guards = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        """Copy the original, bound to the copied module, whose parameters no graph knows."""
        copied: Callable[..., Any] = copy.deepcopy(self.original, memo)
        return copied

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the original, so that loading it does not need this package."""
        return operator.getitem, ([self.original], 0)


class _GraphedNode(torch.autograd.Function):
    """The autograd node of a call whose forward graph has just been replayed."""

    @staticmethod
    def forward(ctx: Any, graphed: GraphedCallable, *inputs: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.graphed = graphed
        ctx.pending = graphed._pending
        return graphed.outputs.differentiable()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        return (None, None, *ctx.graphed.run_backward(ctx.pending, gradients))


# ------------------ Free variables


class FreeVariables:
    """The free variables of a callable: modules and tensors that it refers to itself.

    Those are the callable where it is a module, and otherwise what it finds in its closure, its
    globals, ``self`` with its attributes, and the arguments of a ``functools.partial``.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        found = [("", function)] if isinstance(function, nn.Module) else list(_held(function))
        # Root modules by the name that the callable has for them; its own is empty.
        self.modules: dict[str, nn.Module] = {}
        self.tensors: dict[str, Tensor] = {}  # other tensors by name
        for name, value in found:
            if isinstance(value, nn.Module) and all(value is not m for m in self.modules.values()):
                self.modules[name] = value
            elif isinstance(value, Tensor):
                self.tensors[name] = value
        # All modules with their paths, each once, as they were at construction.
        self.owners = named_modules_in(*self.modules.items())
        self.submodules = [owner for _, owner in self.owners]

    @functools.cached_property
    def parameters(self) -> list[tuple[str, Tensor]]:
        """List the parameters of all modules by full name, as they were when it was read first."""
        return named_parameters_in(self.owners)

    def state(self) -> list[Tensor]:
        """List every tensor that a call may read or write next to its arguments."""
        tree = [tables_of(owner) for _, owner in named_modules_in(*self.modules.items())]
        tables = chain([t for t, _, _ in tree], [t for _, t, _ in tree])
        named = {id(t): t for table in tables for t in table.values() if t is not None}
        attributes = (v for owner in self.submodules for v in vars(owner).values())
        plain = [value for value in attributes if isinstance(value, Tensor)]
        return list(filter(is_strided, (*named.values(), *self.tensors.values(), *plain)))

    def guards(self, parameters: Sequence[Tensor]) -> list[AddressGuard]:
        guards = [AddressGuard.of_module(root, name) for name, root in self.modules.items()]
        known = set(map(id, self.state()))
        loose = [(f"tensor `{name}`", tensor) for name, tensor in self.tensors.items()]
        loose += [(f"parameter {i}", p) for i, p in enumerate(parameters) if id(p) not in known]
        return [*guards, AddressGuard([("", dict(loose))])] if loose else guards

    def refuse_what_is_unfit(self) -> None:
        """Refuse modules that cannot be captured."""
        forwards = (vars(module).get("forward") for module in self.submodules)
        if any(isinstance(forward, GraphedCallable) for forward in forwards):
            raise CaptureError(
                "A graphed callable cannot contain another one.",
                "a module inside of it is graphed already",
                "call .forward.reset() on that module first, or leave that module out",
            )
        buffers = named_buffers_in(self.owners)
        trainable = next((name for name, buffer in buffers if buffer.requires_grad), None)
        if trainable is not None:
            raise CaptureError(
                "A graphed module can train parameters, but no buffers.",
                f"buffer `{trainable}` requires grad",
                "make the buffer an nn.Parameter, or call requires_grad_(False) on it",
            )
        named = (*self.parameters, *buffers)
        lazy = next((name for name, tensor in named if is_lazy(tensor)), None)
        if lazy is not None:
            raise CaptureError(
                "A module with uninitialized parameters cannot be graphed.",
                f"`{lazy}` is not initialized yet",
                "call the module once before the capture",
            )


class Bindings(PythonSnapshot):
    """The tensors that modules were holding, to find and undo a rebinding.

    Parameters, buffers and plain attributes count, and the memory of each (``x.data = ...``).
    """

    def __init__(self, held: FreeVariables) -> None:
        super().__init__()
        self._memory: list[tuple[str, Tensor, Tensor]] = []
        for path, owner in held.owners:
            tables = tables_of(owner)[:2]
            for holder in (owner, *tables):
                self.add(path, holder)
            self._memory += [
                (f"{path}.{key}.data".removeprefix("."), tensor, tensor.detach())
                for table in (*tables, vars(owner))
                for key, tensor in table.items()
                if isinstance(tensor, Tensor) and not is_lazy(tensor)
            ]

    def rebound(self) -> list[str]:
        """Bind every tensor as before; return the names that were bound to something else."""
        names = []
        for name, tensor, was in self._memory:
            if tensor.layout is torch.strided and tensor.data_ptr() != was.data_ptr():
                names.append(name)
                tensor.data = was
        for change in list(self.changes()):
            if isinstance(change.before, Tensor) or isinstance(change.now, Tensor):
                names.append(change.name.removeprefix("."))
                bind(change.table, change.key, change.before)
        return names


def _held(function: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(function, functools.partial):
        yield from ((f"args[{i}]", value) for i, value in enumerate(function.args))
        yield from function.keywords.items()
        yield from _held(function.func)
        return
    if isinstance(function, nn.Module):
        yield type(function).__name__, function
        return
    owner = getattr(function, "__self__", None)
    if owner is not None and not inspect.ismodule(owner):
        yield "self", owner
        if not isinstance(owner, nn.Module):
            yield from getattr(owner, "__dict__", {}).items()
    plain = getattr(function, "__func__", function)
    if inspect.isfunction(plain):
        for name, cell in zip(plain.__code__.co_freevars, plain.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # a cell that is not filled yet
                yield name, cell.cell_contents
        used = dict.fromkeys(n for code in codes_in(plain.__code__) for n in code.co_names)
        yield from ((n, plain.__globals__[n]) for n in used if n in plain.__globals__)
    else:
        yield from getattr(plain, "__dict__", {}).items()
