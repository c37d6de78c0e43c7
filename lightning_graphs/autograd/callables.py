"""Captures callables: `make_graphed_callables` with torch's documented API."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import Parameter

from lightning_graphs.autograd.backward import (
    AliasedGradients,
    DirectGradients,
    GradientMemory,
    HookedInOrder,
    OutputGradients,
    PerUseGradients,
    accumulation_refused,
    gradients_behind,
    refuse_parameter_hooks,
    saved_for_graphs,
    zero_gradient,
)
from lightning_graphs.autograd.graphed import (
    BackwardPass,
    Bindings,
    FreeVariables,
    GraphedCallable,
    ReplayOrder,
    SharedArgument,
    Source,
    Stores,
)
from lightning_graphs.device.graph import BackendName, GraphPool, get_backend, refuse_nested
from lightning_graphs.device.rules import REBOUND, SET_GENERATOR
from lightning_graphs.errors import CaptureError, CaptureStopped, ReplayError, stop
from lightning_graphs.private.callsite import codes_in, named_at
from lightning_graphs.private.engine import (
    ahead_of_casts,
    has_gradient_hooks,
    has_python_nodes,
    leaves_behind,
    nodes_behind,
    nodes_recorded,
    recorded_before,
    renew_gradient_nodes,
    require_plain_gradients,
    saved_tensors_hooks,
    stale_gradient_nodes_tolerated,
)
from lightning_graphs.private.exchange import replaced
from lightning_graphs.private.generators import random_place, random_states
from lightning_graphs.private.torch import PoolHandle, hooks_registered, version_of
from lightning_graphs.values.memory import (
    NO_CACHE,
    Bound,
    OutputPlan,
    StaticInputs,
    entries_bound,
    take_attributes,
)
from lightning_graphs.values.signature import CallPlan, Modes, Signature
from lightning_graphs.values.snapshot import (
    Snapshot,
    contents_of,
    fingerprints_of,
    is_of_transformers,
)
from lightning_graphs.values.tree import substitute

# ------------------ One callable


@dataclass(frozen=True, slots=True)
class CaptureSettings:
    pool: GraphPool
    order: ReplayOrder  # of the captures over that pool
    direct: bool = False  # backward graphs write the gradients of parameters themselves
    allow_unused: bool = False  # inputs and parameters may get no gradient
    static_outputs: bool = False  # outputs are handed out without a copy
    gradients: GradientMemory = field(default_factory=GradientMemory)  # of parameters, if direct


@dataclass(slots=True)
class KnownOfCall:
    """Observations of earlier runs of a call, for its capture."""

    draws: bool = False  # it draws random numbers on a GPU
    # In which strides the gradients of its outputs come, by the index of each
    gradient_strides: dict[int, tuple[int, ...]] = field(default_factory=dict)
    # Arguments, by index, with a gradient of several uses inside of the call and of others outside
    used_elsewhere: set[int] = field(default_factory=set)


class CallableCapture:
    """Captures the forward and the backward pass of one callable.

    Call, in this order: optionally :meth:`warm_up`; :meth:`begin`, :meth:`capture_forward` and
    :meth:`capture_backward`; :meth:`finish`, or :meth:`abandon` if any of these raised.
    """

    outputs: OutputPlan  # what the call returns, once its forward pass is captured
    binds = False  # the call may bind attributes of modules, and entries of dicts that it is given
    bound: Sequence[Bound] = ()  # those that it has bound

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        settings: CaptureSettings,
        original: Callable[..., Any] | None = None,
        known: KnownOfCall | None = None,
    ) -> None:
        modes = Modes.current(settings.pool.backend.device_type)
        self._signature, tensors = Signature.of(args, kwargs, modes=modes, host_values=True)
        self._function = function
        self._original = original or _original_of(function)
        self._inputs = StaticInputs(tensors)
        self._args, self._kwargs = substitute((args, dict(kwargs)), self._tensors)
        self._settings = settings
        self._known = known or KnownOfCall()
        self._given = contents_of(args, kwargs)
        self._held = FreeVariables(function)
        self._bindings = Bindings(self._held)
        self._registers_hooks = False
        own = function.parameters() if isinstance(function, nn.Module) else ()
        self._parameters: list[Parameter] = [p for p in own if p.requires_grad]
        # By the index of a tensor of the call, the memory where it is read in place; and what tells
        # later calls whether they are given the same tensor.
        self._aliased_inputs: tuple[tuple[int, Source], ...] = ()
        self._shared: dict[int, SharedArgument] = {}
        self._backward: BackwardPass | None = None
        self._held.refuse_what_is_unfit()

    @property
    def _tensors(self) -> list[Tensor]:
        return self._inputs.tensors

    def alias_output(self, output: int) -> tuple[Tensor, Source]:
        """Alias an output of the captured forward, as an argument of a later call."""
        return self.outputs.tensors[output], self.outputs.alias_output(output)

    def share(self, leaf: int) -> tuple[Tensor, SharedArgument]:
        """Share the static input of an argument with later calls that get that tensor."""
        return self._tensors[leaf], self._shared.setdefault(leaf, SharedArgument())

    def alias_gradient(self, leaf: int) -> tuple[Tensor, AliasedGradients] | None:
        """Alias the memory of an argument's gradient; None if it has none."""
        backward = self._backward
        if backward is None or backward.input_positions.count(leaf) != 1:
            return None
        buffer = backward.handed.buffers[backward.input_positions.index(leaf)]
        return (buffer, backward.handed) if buffer is not None else None

    def warm_up(self, iterations: int) -> None:
        """Run the callable on a side stream; state and generators stay.

        It must have run once: what its code keeps in caches (``functools.lru_cache``) holds values
        then, and not memory of a capture, where nothing is computed.
        """
        backend = self._settings.pool.backend
        # Parameters too: an embedding with max_norm, for one, writes its weight in its forward.
        state = Snapshot(self._held.state(), *random_states(self._tensors, self._held.submodules))
        with backend.side_stream(), stale_gradient_nodes_tolerated(), state.undone():
            place = random_place(backend.device_type)
            self._check_gradients(self._pull_back(self._first_call()))
            self._known.draws = random_place(backend.device_type) != place
            for _ in range(iterations - 1):
                self._pull_back(OutputPlan(self._call(), static=True))
        backend.synchronize()
        self._held = FreeVariables(self._function)  # code may make its modules when it first runs

    def _call_leaving_arguments(self, before: Bindings | None, *, static: bool) -> OutputPlan:
        tensors = self._tensors
        versions = list(map(version_of, tensors))
        given = contents_of(self._args, self._kwargs)
        returned = self._call()
        if self.binds:
            own = [] if before is None else take_attributes(before.changes())
            entries = entries_bound(given.changes(), (self._args, self._kwargs))
            if entries:
                given.restore()
            self.bound = [*own, *entries]
        written = [version_of(t) != v for t, v in zip(tensors, versions, strict=True)]
        self._refuse_written(written)
        return OutputPlan(returned, static=static, state=self._held.state, bound=self.bound)

    def _look_behind(self, outputs: OutputPlan, start: int) -> None:
        """Find the leaves on which outputs depend; so many autograd nodes were recorded before."""
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
        self._parameters = list(dict.fromkeys([*self._parameters, *leaves]))

    def _refuse_written(self, written: Iterable[bool]) -> None:
        for name, is_written in zip(self._signature.tensor_names, written, strict=True):
            if is_written:
                raise CaptureError(
                    "A graphed callable must not change its arguments, because a replay changes "
                    "its static inputs instead of the caller's tensors.",
                    f"{name} is written in place",
                    "work on a copy (x = x + 1 instead of x += 1), or return the new value",
                )

    def _first_call(self) -> OutputPlan:
        """Call it as in the capture; refuse it if it writes its arguments unseen by autograd."""
        tensors = self._tensors
        # Kernels outside of torch, and ``x.data``, write a tensor and leave its version as it is.
        before, start = fingerprints_of(tensors), nodes_recorded()
        outputs = self._call_leaving_arguments(None, static=True)
        written = map(operator.ne, before, fingerprints_of(tensors))
        self._refuse_written(written)
        self._look_behind(outputs, start)
        return outputs

    def _pull_back(self, outputs: OutputPlan) -> Sequence[Tensor | None]:
        """Return the gradients of all targets; none if nothing is differentiable."""
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
        how: dict[str, Any] = {"hooked": self._parameters, "apart": apart}
        with accumulation_refused(self._trained()):
            return gradients_behind(outputs, targets, given, keep=keep, came=came, **how)

    def _check_gradients(self, gradients: Sequence[Tensor | None]) -> None:
        require_plain_gradients(gradients)
        unused = {id(t) for t, g in zip(self._targets(), gradients, strict=False) if g is None}
        if not unused or self._settings.allow_unused:
            return
        inputs = zip(self._signature.tensor_names, self._tensors, strict=True)
        names = [name for name, tensor in (*inputs, *self._named()) if id(tensor) in unused]
        raise CaptureError(
            "Every input and parameter that requires grad must be used for an output.",
            f"no output depends on {', '.join(names)}",
            "pass allow_unused_input=True, or call requires_grad_(False) on what is not used",
        )

    def _call(self) -> Any:
        modes = self._signature.modes
        with (
            accumulation_refused(self._trained()),
            torch.autocast(
                modes.device_type,
                dtype=modes.autocast_dtype,
                enabled=modes.autocast_enabled,
                cache_enabled=False,
            ),
        ):
            return self._original(*self._args, **self._kwargs)

    def _targets(self) -> list[Tensor]:
        inputs = [t for t in self._tensors if t.requires_grad]
        return [*dict.fromkeys(inputs), *self._parameters]

    def begin(self) -> None:
        """Prepare the capture, ahead of all passes of all calls in it."""
        renew_gradient_nodes(self._parameters)

    def capture_forward(self, in_place: Mapping[int, tuple[Tensor, Source]] | None = None) -> None:
        """Capture the call; nothing executes. Some arguments alias memory of earlier graphs."""
        if in_place:
            self._aliased_inputs = tuple((leaf, source) for leaf, (_, source) in in_place.items())
            given = {leaf: tensor for leaf, (tensor, _) in in_place.items()}
            self._inputs = StaticInputs(self._tensors, given=given)
            self._args, self._kwargs = substitute((self._args, self._kwargs), self._tensors)
        before, start = Bindings(self._held), nodes_recorded()
        static = self._settings.static_outputs
        try:
            repeat = any(0 in stride for stride in self._known.gradient_strides.values())
            with (
                self._settings.pool.capture() as captured,
                _contents_undone(self._args, self._kwargs),
                saved_for_graphs() if repeat else nullcontext(),
            ):
                hooks = hooks_registered()
                self.outputs = self._call_leaving_arguments(before, static=static)
                self._registers_hooks = hooks_registered() != hooks
            self._look_behind(self.outputs, start)
        except (CaptureError, CaptureStopped):
            self._given.restore()  # what the warm-up has left
            raise
        for name in before.rebound():
            code = getattr(self._original, "__code__", None)
            line = named_at(name, codes_in(code) if code is not None else ())
            raise REBOUND.refused(f"`{name}` is set to another tensor in every call{line}")
        self._forward_graph, self._place = captured, self._settings.order.place()

    def capture_backward(
        self, in_place: Mapping[int, tuple[Tensor, AliasedGradients]] | None = None
    ) -> None:
        """Capture the backward pass, if any; some of its inputs alias memory of later graphs."""
        outputs, targets = self.outputs.requiring_grad, self._targets()
        if outputs and targets:
            self._backward = self._captured_backward(outputs, targets, in_place or {})
        self.outputs.finish_capture()

    def _captured_backward(
        self,
        outputs: Sequence[Tensor],
        targets: list[Tensor],
        in_place: Mapping[int, tuple[Tensor, AliasedGradients]],
    ) -> BackwardPass:
        static, producers = self._output_gradients(outputs, in_place)
        may_write = self._registers_hooks or has_python_nodes(outputs)  # into gradients
        shared = () if may_write else self._known.used_elsewhere
        uses = PerUseGradients(outputs, [self._tensors[leaf] for leaf in shared])
        ids = list(map(id, self._tensors))
        inputs = targets[: len(targets) - len(self._parameters)]
        given = [tensor for tensor in inputs for _ in range(uses.number.get(tensor, 1))]
        direct = None
        if self._settings.direct:
            refuse_parameter_hooks(self._named())
            memory, own = self._settings.gradients, self._parameters
            direct = DirectGradients(own, memory.of(own), memory)
        parameters = () if direct is not None else tuple(self._parameters)
        to_autograd = [*given, *parameters]
        handed = AliasedGradients(to_autograd)
        reach = tuple(frozenset(leaves_behind([output])) for output in outputs)
        self._refuse_hooks_of_parts(reach)
        asked: list[Tensor | GradientEdge] = [*targets]
        if direct is not None and not may_write:  # it copies to `.grad`, which casts as well
            asked[len(inputs) :] = ahead_of_casts(outputs, self._parameters)
        given_gradients = OutputGradients(static, producers)
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

        with self._settings.pool.capture() as captured, rewinding_refused(self._known.draws):
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
            self._settings.order.place(),
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
        self, outputs: Sequence[Tensor], in_place: Mapping[int, tuple[Tensor, AliasedGradients]]
    ) -> tuple[list[Tensor], dict[int, AliasedGradients]]:
        """Return static gradients of the outputs, and the later graphs that write some of them."""
        static: list[Tensor] = []
        producers: dict[int, AliasedGradients] = {}
        for i, (index, output) in enumerate(
            zip(self.outputs.differentiable_indices, outputs, strict=True)
        ):
            buffer = zero_gradient(output, self._known.gradient_strides.get(index))
            if index in in_place:
                memory, producer = in_place[index]
                fits = (memory.shape, memory.stride()) == (buffer.shape, buffer.stride())
                fits = fits and memory.dtype == buffer.dtype
                if fits and all(memory is not known for known in static):
                    buffer, producers[i] = memory, producer
            static.append(buffer)
        return static, producers

    def finish(
        self,
        stores: tuple[Stores, Stores] = ((), ()),
        explain: Callable[[ReplayError], object] = lambda error: None,
    ) -> GraphedCallable:
        """Make the graphed callable; its forward and its backward pass set these attributes."""
        return GraphedCallable(
            self._original,
            self._function if isinstance(self._function, nn.Module) else None,
            CallPlan(self._signature, check_modes="autocast"),
            self._settings.pool,
            self._settings.order,
            self._inputs,
            self.outputs,
            self._forward_graph,
            self._backward,
            self._place,
            self._aliased_inputs,
            tuple(self._shared.items()),
            stores,
            self._held.submodules,
            self._held.guards(self._parameters),
            self._parameters[0] if self._parameters else None,
            explain,
        )

    def abandon(self) -> None:
        self._bindings.rebound()

    def _trained(self) -> dict[Tensor, str]:
        """Return by name all tensors that may have a gradient, but for arguments."""
        held = {tensor: name for name, tensor in self._held.parameters}
        own = {parameter: name for name, parameter in self._named()}
        return own | {t: name for name, t in self._held.tensors.items() if t.requires_grad} | held

    def _named(self) -> list[tuple[str, Parameter]]:
        named = (*self._held.parameters, *self._held.tensors.items())
        names = {id(tensor): name for name, tensor in named}
        return [(names.get(id(p), f"parameter {i}"), p) for i, p in enumerate(self._parameters)]


def _original_of(function: Callable[..., Any]) -> Callable[..., Any]:
    forward = function.forward if isinstance(function, nn.Module) else function
    if isinstance(forward, GraphedCallable):
        raise CaptureError(
            "A callable cannot be graphed twice.",
            f"{type(function).__qualname__} has a graphed forward already",
            "call .forward.reset() on the module (or .reset() on the function) first",
        )
    return forward


# ------------------ Several callables

ParamGrads = Literal["autograd", "direct"]
_C = TypeVar("_C", bound=Callable[..., Any] | tuple[Callable[..., Any], ...])


def make_graphed_callables(
    callables: _C,
    sample_args: tuple[Any, ...],
    num_warmup_iters: int = 3,
    allow_unused_input: bool = False,
    pool: PoolHandle | None = None,
    *,
    sample_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
    param_grads: ParamGrads = "autograd",
    static_outputs: bool = False,
    stream: torch.cuda.Stream | None = None,
    capture_error_mode: str = "thread_local",
    backend: BackendName = "auto",
) -> _C:
    """Graph the forward and backward of callables; a drop-in for torch's function of that name.

    Each call of a graphed callable replays its forward graph and records one autograd node, whose
    backward replays its backward graph. Parameters, buffers, gradients, torch's random generators
    and the sample arguments are afterwards as they were before. For a function that holds for the
    modules and tensors that it names itself (closure, globals, ``self``, ``functools.partial``);
    for these alone are moved parameters and train/eval flags looked at, too.

    A module is returned as itself with its ``forward`` replaced by a
    :class:`~lightning_graphs.autograd.graphed.GraphedCallable`; ``module.forward.reset()`` gives
    the original back and frees the graphs. Hooks of the module itself keep firing at every
    call; hooks of its submodules run at capture, and what they compute on tensors is part of the
    graph.

    Args:
        callables: A module or function, or a tuple of them in the order in which they will run.
        sample_args: Positional arguments of a typical call, for a tuple one tuple each: any
            containers of tensors and constants. Their shapes, strides, dtypes, devices,
            ``requires_grad`` and constants are what later calls must have.
        num_warmup_iters: How often each callable runs before capture. DistributedDataParallel
            needs 11.
        allow_unused_input: Accept inputs and parameters that no output depends on; they get no
            gradient.
        pool: Memory pool to share (:func:`~lightning_graphs.core.graph_pool_handle`) with graphs
            that replay in the order of their capture. Callables of two calls over one pool must
            each run backward before the other's forward.
        sample_kwargs: Keyword arguments of a typical call, for a tuple one mapping each.
        param_grads: ``"autograd"``: autograd accumulates parameter gradients.
            ``"direct"``: the backward graph writes them and ``.grad`` is set without autograd, so
            that the cost of a call does not grow with the parameters; for ``loss.backward()``
            only: ``torch.autograd.grad`` is refused. ``.grad`` then is a buffer that a later
            backward overwrites, also where ``zero_grad`` has let go of it: clone what you keep.
        static_outputs: Return the graph's own output tensors, which the next call overwrites, as
            torch's function does; by default outputs are tensors of the caller's own.
        stream: Capture stream; the device's default one otherwise.
        capture_error_mode: ``cudaStreamCaptureMode``.
        backend: ``"cuda"``, ``"emulated"`` or ``"auto"``.

    Returns:
        The graphed callables, a tuple if a tuple was given.

    Raises:
        CaptureError: a callable cannot be captured; everything is as before the call.
        SignatureError: raised by later calls that differ from the sample.
    """
    chosen = get_backend(backend)
    refuse_nested(chosen, "make_graphed_callables()")
    device_type = chosen.device_type
    if torch.is_autocast_enabled(device_type) and torch.is_autocast_cache_enabled():
        raise CaptureError(
            "make_graphed_callables does not support the autocast caching, because cached casts "
            "live outside of the graph.",
            "the call is inside of torch.autocast(..., cache_enabled=True)",
            "write torch.autocast(..., cache_enabled=False)",
        )
    if saved_tensors_hooks() is not None:
        raise CaptureError(
            "make_graphed_callables does not support hooks for saved tensors around it, because "
            "replays save none.",
            "the call is inside of torch.autograd.graph.saved_tensors_hooks (save_on_cpu)",
            "enter the hooks in the callable itself, which makes them a part of its graphs",
        )
    if param_grads not in ("autograd", "direct"):
        raise CaptureError(
            "param_grads must be 'autograd' or 'direct'.",
            f"got {param_grads!r}",
            "write param_grads='autograd', or 'direct' for loss.backward() loops",
        )
    if not isinstance(num_warmup_iters, int) or num_warmup_iters < 1:
        raise CaptureError(
            "num_warmup_iters must be a whole number of at least 1.",
            f"got {num_warmup_iters!r}: libraries and caches initialize in the warm-up",
            "write num_warmup_iters=1 or more",
        )
    several = isinstance(callables, tuple)
    functions: Any = callables if several else (callables,)
    args = sample_args if several else (sample_args,)
    kwargs: Any = (sample_kwargs if several else (sample_kwargs,)) if sample_kwargs else None
    kwargs = kwargs or ({},) * len(functions)
    _refuse_misfits(functions, args, kwargs)
    shared = GraphPool(pool, stream=stream, capture_error_mode=capture_error_mode, backend=backend)
    direct = param_grads == "direct"
    settings = CaptureSettings(shared, ReplayOrder(), direct, allow_unused_input, static_outputs)
    captures = [
        CallableCapture(function, _positional(arguments), keywords or {}, settings)
        for function, arguments, keywords in zip(functions, args, kwargs, strict=True)
    ]
    graphed = _capture_all(captures, shared, num_warmup_iters)
    installed: Any = tuple(map(_install, functions, graphed))
    return installed if several else installed[0]  # type: ignore[no-any-return]


def _refuse_misfits(
    functions: Sequence[Callable[..., Any]], args: Sequence[Any], kwargs: Sequence[Any]
) -> None:
    if not len(functions) == len(args) == len(kwargs):
        raise CaptureError(
            "A tuple of callables must come with a sample_args and a sample_kwargs for each.",
            f"got {len(functions)} callables, {len(args)} sample_args, {len(kwargs)} sample_kwargs",
            "pass a tuple of arguments for each callable: ((x,), (y,))",
        )
    for function in functions:
        if not callable(function):
            raise CaptureError(
                "callables must be a module, a function, or a tuple of these.",
                f"got a {type(function).__qualname__}",
                "write a tuple for several: (first, second)",
            )
    modules = [f for f in functions if isinstance(f, nn.Module)]
    if len(set(modules)) < len(modules):
        raise CaptureError(
            "A tuple of callables must have each module once.",
            "got a module twice: a module has one forward to graph",
            "pass its bound forward (module.forward) once for every call of the module",
        )


def _positional(arguments: Any) -> tuple[Any, ...]:
    if not isinstance(arguments, (tuple, list)):
        raise CaptureError(
            "sample_args must be a tuple of the positional arguments.",
            f"got a {type(arguments).__qualname__}",
            "write (x,) for a single argument",
        )
    return tuple(arguments)


def _capture_all(
    captures: Sequence[CallableCapture], pool: GraphPool, num_warmup_iters: int
) -> list[GraphedCallable]:
    """Warm up, then capture forwards in order and backwards in reverse: the order of replays."""
    try:
        # Calls under no_grad or inference mode replay the same graphs, so these need a backward.
        with torch.inference_mode(False), torch.enable_grad():
            for capture in captures:
                capture.warm_up(num_warmup_iters)
            for capture in captures:
                capture.begin()
            for capture in captures:
                capture.capture_forward()
            for capture in reversed(captures):
                capture.capture_backward()
            return [capture.finish() for capture in captures]
    except BaseException:
        for capture in captures:
            capture.abandon()
        pool.close()
        raise


def _install(original: Callable[..., Any], graphed: GraphedCallable) -> Callable[..., Any]:
    if not isinstance(original, nn.Module):
        return graphed
    original.forward = graphed
    return original


def rewinding_refused(draws: bool) -> AbstractContextManager[None]:
    """Refuse to set CUDA's generators in the body, the capture of a backward pass that draws.

    Activation checkpointing sets them to where the forward pass began, for equal dropout. A graph
    of its own begins where the forward graph has ended.
    """

    def refuse(*_: Any, **__: Any) -> NoReturn:
        called = "torch.cuda.set_rng_state is called in the backward pass, which draws numbers"
        stop(SET_GENERATOR.refused(called))

    return replaced(torch.cuda, "set_rng_state", refuse) if draws else nullcontext()


def _contents_undone(
    args: Sequence[Any], kwargs: Mapping[str, Any]
) -> AbstractContextManager[None]:
    """Undo and refuse what the body, the capture of a call, changes in its arguments."""
    remedy = "return the new value, and let the caller store it"
    if any(map(is_of_transformers, [*args, *kwargs.values()])):
        remedy = NO_CACHE

    def refuse(names: Sequence[str]) -> None:
        raise CaptureError(
            "A graphed callable must not change its arguments, because a replay leaves containers "
            "and objects of the caller as they are.",
            f"the call changes {', '.join(names[:3])}",
            remedy,
        )

    return contents_of(args, kwargs).changes_undone(refuse)
