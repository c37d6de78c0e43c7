"""Warms up and captures one callable, forward and backward."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import Parameter

from lightning_graphs.core.arguments.buffers import StateSnapshot, StaticInputs
from lightning_graphs.core.arguments.contents import contents_left, contents_of
from lightning_graphs.core.arguments.fingerprints import fingerprints_of
from lightning_graphs.core.arguments.held import Bindings, Held
from lightning_graphs.core.arguments.outputs import OutputPlan
from lightning_graphs.core.arguments.signature import CallPlan, Modes, Signature
from lightning_graphs.core.arguments.tree import substitute
from lightning_graphs.core.autograd.accumulation import accumulation_refused
from lightning_graphs.core.autograd.backward import (
    DirectGradients,
    GradientMemory,
    HookedInOrder,
    LentGradients,
    OutputGradients,
    refuse_parameter_hooks,
    refuse_sparse_gradients,
    zero_gradient,
)
from lightning_graphs.core.autograd.lending import ReplayOrder, SharedArgument, Source
from lightning_graphs.core.autograd.nodes import (
    UsesApart,
    ahead_of_casts,
    gradients_behind,
    has_python_nodes,
    leaves_behind,
    nodes_behind,
    saved_for_graphs,
)
from lightning_graphs.core.callsite import codes_in, named_at
from lightning_graphs.core.generators import random_place, rewinding_refused, same_random_numbers
from lightning_graphs.core.graph import GraphPool
from lightning_graphs.core.graphed import BackwardPass, GraphedCallable
from lightning_graphs.core.obstacles import REBOUND
from lightning_graphs.core.private.autograd import (
    renew_gradient_nodes,
    stale_gradient_nodes_tolerated,
)
from lightning_graphs.core.private.torch import (
    has_gradient_hooks,
    hooks_registered,
    nodes_recorded,
    recorded_before,
    version_of,
)
from lightning_graphs.errors import CaptureError


@dataclass(frozen=True, slots=True)
class CaptureSettings:
    pool: GraphPool
    order: ReplayOrder  # of the captures over that pool
    direct: bool = False  # backward graphs write the gradients of parameters themselves
    allow_unused: bool = False  # inputs and parameters may get no gradient
    static_outputs: bool = False  # outputs are handed out without a copy
    gradients: GradientMemory = field(default_factory=GradientMemory)  # of parameters, if direct


class CallableCapture:
    """The passes of one callable while they are being captured."""

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        settings: CaptureSettings,
        original: Callable[..., Any] | None = None,
    ) -> None:
        modes = Modes.current(settings.pool.backend.device_type)
        signature, tensors = Signature.of(args, kwargs, modes=modes)
        module = function if isinstance(function, nn.Module) else None
        self._made = GraphedCallable(
            original or _original_of(function),
            module,
            CallPlan(signature, check_modes="autocast"),
            settings.pool,
            settings.order,
            tensors,
        )
        if module is not None:
            self._made.parameters = [p for p in module.parameters() if p.requires_grad]
        self._args, self._kwargs = substitute((args, dict(kwargs)), self._tensors)
        self._settings = settings
        self.draws = False  # random numbers, on a GPU
        self.gradient_strides: Mapping[int, tuple[int, ...]] = {}  # of outputs, where known
        # Arguments, by their index among the tensors, that eager code uses in between, too
        self.used_elsewhere: Collection[int] = ()
        self._given = contents_of(args, kwargs)
        self._function = function
        self._held = Held(function)
        self._bindings = Bindings(self._held)
        self._lenders: dict[int, tuple[Tensor, LentGradients]] = {}
        self._registers_hooks = False
        self._held.refuse_what_is_unfit()

    @property
    def outputs(self) -> OutputPlan:
        """What the captured call returns; there is one once the forward pass is captured."""
        return self._made.outputs

    @property
    def _tensors(self) -> list[Tensor]:
        return self._made.inputs.tensors

    def lend(self, output: int) -> tuple[Tensor, Source]:
        """An output of the captured forward, for a later call that is given it."""
        return self.outputs.tensors[output], self.outputs.lend(output)

    def share(self, leaf: int) -> tuple[Tensor, SharedArgument]:
        """The static input of an argument, for later calls that are given the same tensor."""
        return self._tensors[leaf], self._made.shared.setdefault(leaf, SharedArgument())

    def lent_gradient(self, leaf: int) -> tuple[Tensor, LentGradients] | None:
        """Where the captured backward pass writes the gradient of an argument; None if nowhere."""
        backward = self._made.backward_pass
        if backward is None or backward.input_positions.count(leaf) != 1:
            return None
        buffer = backward.handed.buffers[backward.input_positions.index(leaf)]
        return (buffer, backward.handed) if buffer is not None else None

    def read_in_place(self, arguments: Mapping[int, tuple[Tensor, Source]]) -> None:
        """Read arguments where earlier graphs have them; before the forward is captured."""
        self._made.borrowed = tuple((leaf, source) for leaf, (_, source) in arguments.items())
        given = {leaf: tensor for leaf, (tensor, _) in arguments.items()}
        self._made.inputs = StaticInputs(self._tensors, given=given)
        self._args, self._kwargs = substitute((self._args, self._kwargs), self._tensors)

    def read_gradients_in_place(
        self, gradients: Mapping[int, tuple[Tensor, LentGradients]]
    ) -> None:
        """Read gradients where later graphs write them; before the backward is captured."""
        self._lenders = dict(gradients)

    def warm_up(self, iterations: int) -> None:
        """Run it on a side stream, leaving no trace in state or generators.

        It must have run once: what its code keeps in caches (``functools.lru_cache``) holds values
        then, and not memory of a capture, where nothing is computed.
        """
        backend = self._made.pool.backend
        # Parameters too: an embedding with max_norm, for one, writes its weight in its forward.
        state = StateSnapshot(self._held.state())
        with (
            same_random_numbers(self._tensors, self._held.submodules),
            backend.side_stream(),
            stale_gradient_nodes_tolerated(),
        ):
            try:
                place = random_place(backend.device_type)
                self._check_gradients(self._pull_back(self._first_call()))
                self.draws = random_place(backend.device_type) != place
                for _ in range(iterations - 1):
                    self._pull_back(OutputPlan(self._call(), static=True))
            finally:
                state.restore()
        backend.synchronize()
        self._held = Held(self._function)  # code may make its modules when it first runs

    def _call_leaving_arguments(self, *, static: bool) -> OutputPlan:
        tensors = self._tensors
        versions = list(map(version_of, tensors))
        returned = self._call()
        written = [version_of(t) != v for t, v in zip(tensors, versions, strict=True)]
        self._refuse_written(written)
        return OutputPlan(returned, static=static, state=self._held.state())

    def _look_behind(self, outputs: OutputPlan, start: int) -> None:
        """Find out which leaves the outputs depend on; before them so many nodes were recorded."""
        found = outputs.requiring_grad
        for node in nodes_behind(found):
            if recorded_before(node, start):
                raise CaptureError(
                    "A graphed callable can pass gradients back to its arguments and parameters "
                    "only.",
                    "an output depends on a tensor that "
                    f"{type(node).__name__.partition('Backward')[0]} computed before the call, "
                    "found in an attribute, a variable or an object",
                    "pass that tensor as an argument, or detach it",
                )
        # A function does not say which parameters it uses, and a module may use some that are not
        # its own. Without this walk they would silently get no gradient.
        given = set(map(id, self._tensors))
        leaves: Any = [leaf for leaf in leaves_behind(found) if id(leaf) not in given]
        self._made.parameters = list(dict.fromkeys([*self._made.parameters, *leaves]))

    def _refuse_written(self, written: Iterable[bool]) -> None:
        names = self._made.plan.signature.tensor_names
        for name, is_written in zip(names, written, strict=True):
            if is_written:
                raise CaptureError(
                    "A graphed callable must not change its arguments, because a replay changes "
                    "its static inputs instead of the caller's tensors.",
                    f"{name} is written in place",
                    "work on a copy (x = x + 1 instead of x += 1), or return the new value",
                )

    def _first_call(self) -> OutputPlan:
        """Call it as it is captured, and refuse it if it writes its arguments past autograd."""
        tensors = self._tensors
        # Kernels outside of torch, and ``x.data``, write a tensor and leave its version as it is.
        before, start = fingerprints_of(tensors), nodes_recorded()
        outputs = self._call_leaving_arguments(static=True)
        written = map(operator.ne, before, fingerprints_of(tensors))
        self._refuse_written(written)
        self._look_behind(outputs, start)
        return outputs

    def _pull_back(self, outputs: OutputPlan) -> Sequence[Tensor | None]:
        """The gradients of all targets; none where nothing is differentiable."""
        targets = self._targets()
        if not outputs.requiring_grad or not targets:
            return ()
        zeros = [torch.zeros_like(output) for output in outputs.requiring_grad]
        return self._gradients(outputs.requiring_grad, targets, zeros)

    def _gradients(
        self,
        outputs: Sequence[Tensor],
        targets: Sequence[Tensor | GradientEdge],
        given: Sequence[Tensor],
        apart: Sequence[Tensor] = (),
        *,
        keep: bool = False,
        came: list[Tensor] | None = None,
    ) -> tuple[Tensor | None, ...]:
        how: dict[str, Any] = {"hooked": self._made.parameters, "apart": apart}
        with accumulation_refused(self._trained()):
            return gradients_behind(outputs, targets, given, keep=keep, came=came, **how)

    def _check_gradients(self, gradients: Sequence[Tensor | None]) -> None:
        refuse_sparse_gradients(gradients)
        unused = {id(t) for t, g in zip(self._targets(), gradients, strict=False) if g is None}
        if not unused or self._settings.allow_unused:
            return
        inputs = zip(self._made.plan.signature.tensor_names, self._tensors, strict=True)
        names = [name for name, tensor in (*inputs, *self._named()) if id(tensor) in unused]
        raise CaptureError(
            "Every input and parameter that requires grad must be used for an output.",
            f"no output depends on {', '.join(names)}",
            "pass allow_unused_input=True, or call requires_grad_(False) on what is not used",
        )

    def _call(self) -> Any:
        modes = self._made.modes
        with (
            accumulation_refused(self._trained()),
            torch.autocast(
                modes.device_type,
                dtype=modes.autocast_dtype,
                enabled=modes.autocast_enabled,
                cache_enabled=False,
            ),
        ):
            return self._made.original(*self._args, **self._kwargs)

    def _targets(self) -> list[Tensor]:
        inputs = [t for t in self._tensors if t.requires_grad]
        return [*dict.fromkeys(inputs), *self._made.parameters]

    def begin(self) -> None:
        """Be ready for a capture, ahead of every pass of those that it belongs to."""
        renew_gradient_nodes(self._made.parameters)

    def capture_forward(self) -> None:
        """Capture the call; nothing executes."""
        before, start = Bindings(self._held), nodes_recorded()
        static = self._settings.static_outputs
        try:
            repeat = any(0 in stride for stride in self.gradient_strides.values())
            with (
                self._made.pool.capture() as captured,
                contents_left(self._args, self._kwargs),
                saved_for_graphs() if repeat else nullcontext(),
            ):
                hooks = hooks_registered()
                self._made.outputs = self._call_leaving_arguments(static=static)
                self._registers_hooks = hooks_registered() != hooks
            self._look_behind(self._made.outputs, start)
        except CaptureError:
            self._given.restore()  # what the warm-up has left
            raise
        for name in before.rebound():
            code = getattr(self._made.original, "__code__", None)
            line = named_at(name, codes_in(code) if code is not None else ())
            raise REBOUND.refused(f"`{name}` is set to another tensor in every call{line}")
        self._made.forward_graph = captured
        self._made.place = self._made.order.place()

    def capture_backward(self) -> None:
        outputs, targets = self._made.outputs.requiring_grad, self._targets()
        if outputs and targets:
            self._made.backward_pass = self._captured_backward(outputs, targets)
        self._made.outputs.finish_capture()

    def _captured_backward(self, outputs: Sequence[Tensor], targets: list[Tensor]) -> BackwardPass:
        static, lenders = self._output_gradients(outputs)
        may_write = self._registers_hooks or has_python_nodes(outputs)  # into gradients
        shared = () if may_write else self.used_elsewhere
        uses = UsesApart(outputs, [self._tensors[leaf] for leaf in shared])
        ids = list(map(id, self._tensors))
        inputs = targets[: len(targets) - len(self._made.parameters)]
        given = [tensor for tensor in inputs for _ in range(uses.number.get(tensor, 1))]
        direct = None
        if self._settings.direct:
            refuse_parameter_hooks(self._named())
            memory, own = self._settings.gradients, self._made.parameters
            direct = DirectGradients(own, memory.of(own), memory)
        parameters = () if direct is not None else tuple(self._made.parameters)
        to_autograd = [*given, *parameters]
        handed = LentGradients(to_autograd)
        reach = tuple(frozenset(leaves_behind([output])) for output in outputs)
        self._refuse_hooks_of_parts(reach)
        asked: list[Tensor | GradientEdge] = [*targets]
        if direct is not None and not may_write:  # it copies to `.grad`, which casts as well
            asked[len(inputs) :] = ahead_of_casts(outputs, self._made.parameters)
        given_gradients = OutputGradients(static, lenders)
        if given_gradients.repeat:  # a leaf may have another node by the time
            asked = [t if isinstance(t, GradientEdge) else get_gradient_edge(t) for t in asked]
        apart = targets if may_write else ()
        came: list[Tensor] | None = [] if parameters else None

        def pull(gradients: Sequence[Tensor]) -> Sequence[Tensor | None]:
            with uses.taken():
                keep, first = given_gradients.repeat, None if came else came
                how: dict[str, Any] = {"apart": apart, "keep": keep, "came": first}
                found = self._gradients(outputs, asked, gradients, **how)
            self._check_gradients(found)
            pairs = zip(targets, found, strict=True)
            return [part for target, whole in pairs for part in uses.of(target, whole)]

        with self._made.pool.capture() as captured, rewinding_refused(self.draws):
            gradients = pull(static)
            handed.capture(gradients[: len(to_autograd)])
            if direct is not None:
                direct.capture(gradients[len(to_autograd) :])
        return BackwardPass(
            captured,
            given_gradients,
            reach,
            tuple(to_autograd),
            tuple(ids.index(id(tensor)) for tensor in given),
            HookedInOrder(parameters, came or ()),
            handed,
            direct,
            self._made.order.place(),
            pull if given_gradients.repeat else None,
        )

    def _refuse_hooks_of_parts(self, reach: Sequence[Collection[Tensor]]) -> None:
        """Refuse hooks on parameters that a backward pass may not reach: they would get None."""
        for name, parameter in self._named() if len(reach) > 1 else ():
            reached = [parameter in leaves for leaves in reach]
            if any(reached) and not all(reached) and has_gradient_hooks(parameter):
                raise CaptureError(
                    "A graphed callable can call hooks on parameters only where all of its outputs "
                    "depend on these.",
                    f"`{name}` has a hook, and an output that does not depend on it",
                    "graph the modules inside of it, which have one output each",
                )

    def _output_gradients(
        self, outputs: Sequence[Tensor]
    ) -> tuple[list[Tensor], dict[int, LentGradients]]:
        """Static gradients of the outputs, and who lends those that a later graph writes."""
        static: list[Tensor] = []
        lenders: dict[int, LentGradients] = {}
        for i, (index, output) in enumerate(
            zip(self.outputs.differentiable_indices, outputs, strict=True)
        ):
            buffer = zero_gradient(output, self.gradient_strides.get(index))
            if index in self._lenders:
                lent, lender = self._lenders[index]
                fits = (lent.shape, lent.stride()) == (buffer.shape, buffer.stride())
                fits = fits and lent.dtype == buffer.dtype
                if fits and all(lent is not known for known in static):
                    buffer, lenders[i] = lent, lender
            static.append(buffer)
        return static, lenders

    def finish(self) -> GraphedCallable:
        guards = self._held.guards(self._made.parameters)
        return self._made.finish_capture(self._held.submodules, guards)

    def abandon(self) -> None:
        self._bindings.rebound()

    def _trained(self) -> dict[Tensor, str]:
        """Everything that may have a gradient, but for arguments, by name."""
        held = {tensor: name for name, tensor in self._held.named("parameters")}
        own = {parameter: name for name, parameter in self._named()}
        return own | {t: name for name, t in self._held.tensors.items() if t.requires_grad} | held

    def _named(self) -> list[tuple[str, Parameter]]:
        named = (*self._held.named("parameters"), *self._held.tensors.items())
        names = {id(tensor): name for name, tensor in named}
        return [
            (names.get(id(p), f"parameter {i}"), p) for i, p in enumerate(self._made.parameters)
        ]


def _original_of(function: Callable[..., Any]) -> Callable[..., Any]:
    forward = function.forward if isinstance(function, nn.Module) else function
    if isinstance(forward, GraphedCallable):
        raise CaptureError(
            "A callable cannot be graphed twice.",
            f"{type(function).__qualname__} has a graphed forward already",
            "call .forward.reset() on the module (or .reset() on the function) first",
        )
    return forward
