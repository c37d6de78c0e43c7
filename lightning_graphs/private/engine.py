"""Private corners of autograd's engine, modules, DDP, FSDP2 (``fully_shard``) and ``DTensor``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from sys import getrefcount
from typing import Any, cast
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.hooks import RemovableHandle

from lightning_graphs.errors import CaptureError
from lightning_graphs.private.exchange import exchanged, nothing, replaced
from lightning_graphs.private.torch import (
    has_gradient_hooks,
    hide_modes,
    is_compiled_node,
    is_node_of_torch,
    outputs_of,
    tensor_uses,
)

# ------------------ Autograd: its nodes, and the passes through them


_PLAIN = (Tensor, nn.Parameter)
_backward = torch.autograd.backward  # not what may watch in its place


def _nothing(*_: object) -> None:
    """Replace a function that torch lacks."""


@contextlib.contextmanager
def stale_gradient_nodes_tolerated() -> Iterator[None]:
    """Let a backward pass run on our stream though the user's autograd graph lives on another.

    A parameter has one AccumulateGrad node, of the stream of the first graph that is still alive.
    From 2.13 on torch has an option to use the capture stream nonetheless, and a private reader of
    it.
    """
    override = getattr(torch.autograd.graph, "set_override_stale_capture_stream", _nothing)
    before = bool(getattr(torch._C, "_override_stale_capture_stream", _nothing)())
    override(True)
    try:
        with _unwarned_of_streams():
            yield
    finally:
        override(before)


@contextlib.contextmanager
def _unwarned_of_streams() -> Iterator[None]:
    """Suppress torch's warning (2.9) about nodes of another stream: we chose the streams.

    It comes once in a process, so that it must not be spent on ours. Whether the user wants it,
    torch tells privately; where it does not, its default comes back.
    """
    warn = getattr(torch.autograd.graph, "set_warn_on_accumulate_grad_stream_mismatch", _nothing)
    warns = getattr(torch._C, "_warn_on_accumulate_grad_stream_mismatch", lambda: True)
    before = bool(warns())
    warn(False)
    try:
        yield
    finally:
        warn(before)


def exchanged_engine(run: Callable[..., Any]) -> AbstractContextManager[None]:
    """Route each backward pass through this function, which gets torch's own one first.

    ``backward`` and ``grad`` end in that one function, which has no hook. Where torch has another,
    passes run as they are.
    """
    engine = getattr(torch.autograd, "_engine_run_backward", None)
    if engine is None:
        return contextlib.nullcontext()
    return replaced(torch.autograd, "_engine_run_backward", partial(run, engine))


@contextlib.contextmanager
def backward_passes_observed(
    accumulates: Callable[[Sequence[Tensor], Sequence[Tensor]], None],
    reenters: Callable[[], object] = _nothing,
) -> Iterator[None]:
    """Report each backward pass that code in the body begins, before it changes ``.grad``.

    The first function hears the roots, and the leaves that are asked for if these are named. The
    second hears from code that asks whether it may begin one in a pass that ``.grad`` has no part
    in, as reentrant checkpointing does; where torch lacks the question, it hears nothing.
    """
    valid: Callable[[], bool] | None = getattr(torch.autograd, "_is_checkpoint_valid", None)

    def run(
        engine: Callable[..., Any],
        roots: Any, gradients: Any, keep: Any, create: Any, inputs: Any, *rest: Any, **k: Any,
    ) -> Any:  # fmt: skip
        if k.get("accumulate_grad"):
            accumulates([r for r in roots if isinstance(r, Tensor)], inputs)
        return engine(roots, gradients, keep, create, inputs, *rest, **k)

    def is_valid() -> bool:
        assert valid is not None
        if not (found := valid()):
            reenters()
        return found

    with contextlib.ExitStack() as stack:
        stack.enter_context(exchanged_engine(run))
        if valid is not None:
            stack.enter_context(replaced(torch.autograd, "_is_checkpoint_valid", is_valid))
        yield


def nodes_from(pending: list[Node | None]) -> Iterator[Node]:
    """Yield these autograd nodes and all behind them, once; the list is consumed."""
    seen: set[Node] = set()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        pending += [parent for parent, _ in node.next_functions]


def nodes_behind(outputs: Sequence[Tensor]) -> Iterator[Node]:
    """Yield every node behind these outputs, once."""
    return nodes_from([output.grad_fn for output in outputs])


def leaf_of(node: Node) -> Tensor | None:
    """Return the leaf whose gradient this node accumulates; None for other nodes."""
    if type(node).__name__ != "AccumulateGrad":  # `name()` is a Function's own to overwrite
        return None
    leaf: Tensor | None = getattr(node, "variable", None)
    return leaf


def leaves_behind(outputs: Sequence[Tensor]) -> list[Tensor]:
    """List the leaves of autograd on which these outputs depend, leaves among them included."""
    found = dict.fromkeys(output for output in outputs if output.grad_fn is None)
    found |= {leaf: None for node in nodes_behind(outputs) if (leaf := leaf_of(node)) is not None}
    return list(found)


def uses_of(
    leaves: Iterable[Tensor], outputs: Sequence[Tensor]
) -> dict[Tensor, list[tuple[Node, int]]]:
    """Map each leaf to the nodes behind these outputs that use it, and their input index."""
    found: dict[Tensor, list[tuple[Node, int]]] = {leaf: [] for leaf in leaves}
    for node in nodes_behind(outputs) if found else ():
        for i, (parent, _) in enumerate(node.next_functions):
            leaf = None if parent is None else leaf_of(parent)
            if leaf in found:
                found[leaf].append((node, i))
    return found


def runs_code(outputs: Sequence[Tensor], adds_to: Container[int] | None = None) -> bool:
    """Return whether a backward pass of these outputs runs code that may look at ``.grad``.

    It has a ``torch.autograd.Function`` that compiled code has not made, or hooks at its leaves.
    With ``adds_to``, also whether it may write anything but gradients of the leaves with an ``id``
    there: it adds to others, or has a node that is not torch's own.
    """
    if any(output.grad_fn is None for output in outputs):
        return True
    nodes: Iterator[Any] = nodes_behind(outputs)
    for node in nodes:
        leaf = leaf_of(node)
        if leaf is None and isinstance(node, BackwardCFunction) and not is_compiled_node(node):
            return True
        if leaf is not None and has_gradient_hooks(leaf, node):
            return True
        if adds_to is not None and not (
            is_node_of_torch(node) if leaf is None else id(leaf) in adds_to
        ):
            return True
    return False


def has_python_nodes(outputs: Sequence[Tensor]) -> bool:
    """Return whether a backward pass of these outputs runs a ``torch.autograd.Function``."""
    return any(isinstance(node, BackwardCFunction) for node in nodes_behind(outputs))


@contextlib.contextmanager
def removed(hooks: Iterable[RemovableHandle]) -> Iterator[None]:
    """Make these hooks at the beginning of the body, and remove them at its end."""
    made: list[RemovableHandle] = []
    try:
        made.extend(hooks)
        yield
    finally:
        for hook in made:
            hook.remove()


def ahead_of_casts(
    outputs: Sequence[Tensor], parameters: Sequence[Tensor]
) -> list[Tensor | GradientEdge]:
    """Find where to ask autograd for parameter gradients that are copied anyway."""
    # The gradient is taken ahead of a cast where that is the parameter's only use. No other code
    # may read that gradient or write into it, so no Python code takes part in the backward pass.
    users, returned = uses_of(parameters, outputs), set(outputs)
    return [
        GradientEdge(users[parameter][0][0], 0)
        if parameter not in returned and _is_cast(parameter, users[parameter])
        else parameter
        for parameter in parameters
    ]


def _is_cast(parameter: Tensor, users: Sequence[tuple[Node, int]]) -> bool:
    if len(users) != 1 or type(parameter) not in (Tensor, Parameter):
        return False
    user = users[0][0]
    made = outputs_of(user)
    return (
        type(user).__name__ == "ToCopyBackward0"
        and len(made) == 1
        and made[0].dtype.is_floating_point
        and made[0].device == parameter.device
        and parameter.is_floating_point()
        and getattr(parameter, "grad_dtype", None) in (None, parameter.dtype)
    )


def nodes_out_of_sight(
    names: Collection[str], ahead: Callable[[Node], object]
) -> AbstractContextManager[None]:
    """Run nodes of these names unseen by modes, in all backward passes of user code, too.

    ``ahead`` is called with each node before it runs.
    """

    def run(engine: Callable[..., Any], outputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        shown: list[Callable[[], None]] = []

        def hide(node: Node, _: Any) -> None:
            ahead(node)
            shown.append(hide_modes())

        found = [getattr(output, "node", None) or output.grad_fn for output in outputs]
        nodes = [node for node in nodes_from(found) if type(node).__name__ in names]
        handles = [node.register_prehook(partial(hide, node)) for node in nodes]
        handles += [node.register_hook(lambda *_: shown.pop()()) for node in nodes]
        try:
            return engine(outputs, *args, **kwargs)
        finally:
            for handle in handles:
                handle.remove()
            while shown:  # a node has raised
                shown.pop()()

    return exchanged_engine(run)


def after_backward(call: Callable[[], None]) -> None:
    """Call this at the end of this thread's backward pass, as torch's data parallelism does."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


def renew_gradient_nodes(leaves: Iterable[Tensor]) -> None:
    """Renew AccumulateGrad nodes of leaves if they belong to the default stream of a GPU.

    CUDA refuses to capture a backward pass to such a node, and up to 2.12 torch has no option to
    run it on the capture stream. torch lets go of a leaf's node where its ``data`` changes its
    dtype (``VariableHooks::set_data``); an autograd graph that holds the old one goes on adding to
    ``.grad``. Leaves with hooks keep theirs, and under DDP all do: nothing tells of its hooks.
    ``torch.autograd.grad`` must not have gradients of their graphs to compute any more.
    """
    graph, distributed = torch.autograd.graph, torch.distributed
    if hasattr(graph, "set_override_stale_capture_stream") or not torch.cuda.is_available():
        return
    if distributed.is_available() and distributed.is_initialized():
        return
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        return  # what is asked of the nodes would become a part of that capture
    found = dict.fromkeys(
        leaf
        for leaf in leaves
        if type(leaf) in _PLAIN and leaf.is_cuda and leaf.is_leaf and leaf.requires_grad
        if tensor_uses(leaf) != 1 and not leaf.is_inference()  # a node that lives is a further one
        if not _is_wrapped(leaf)
    )
    for leaf in _of_default_stream(list(found)):
        data, other = leaf.data, torch.float16 if leaf.dtype != torch.float16 else torch.float32
        leaf.data = data.new_empty(0, dtype=other)
        leaf.data = data


def _of_default_stream(leaves: list[Tensor]) -> list[Tensor]:
    """List leaves without hooks whose nodes belong to that stream, by running a pass to them.

    It adds nothing to any ``.grad``, and leaves no hook.
    """
    found = []

    def note(leaf: Tensor, _: object) -> tuple[None]:
        if torch.cuda.current_stream(leaf.device) == torch.cuda.default_stream(leaf.device):
            found.append(leaf)
        return (None,)  # nothing to add to its `.grad`

    with contextlib.ExitStack() as stack, torch.inference_mode(False), _unwarned_of_streams():
        nodes = ((leaf, torch.autograd.graph.get_gradient_edge(leaf)) for leaf in leaves)
        edges = {leaf: edge for leaf, edge in nodes if not has_gradient_hooks(leaf, edge.node)}
        for leaf, edge in edges.items():
            stack.enter_context(edge.node.register_prehook(partial(note, leaf)))
        zeros = {
            kind: torch.zeros((), dtype=kind[0], device=kind[1]) for kind in {*map(_kind, edges)}
        }
        if edges:
            given = [zeros[_kind(leaf)].expand(leaf.shape) for leaf in edges]
            _backward([*edges.values()], given)
    return found


_is_wrapped: Callable[[Tensor], bool] = getattr(
    torch._C._functorch, "is_functorch_wrapped_tensor", lambda tensor: False
)
"""Whether a tensor is one of a transform of ``torch.func``, which may be over; private to torch.

Without the function such a leaf that outlives its transform raises.
"""


def _kind(leaf: Tensor) -> tuple[torch.dtype, torch.device]:
    return leaf.dtype, leaf.device


# ------------------ Trees of modules


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
            above = f"{path}." if path else ""
            inside = reversed([*module._modules.items()])
            pending += [(above + key, child) for key, child in inside if child is not None]
    return [*found.values()]


def _named(table: str, modules: Iterable[tuple[str, nn.Module]]) -> list[tuple[str, Any]]:
    found: dict[int, tuple[str, Tensor]] = {}
    for path, module in modules:
        for key, tensor in getattr(module, table).items():
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


# ------------------ DDP, FSDP2 and ``DTensor``


_OF_A_STEP = (
    "all_gather_state",
    "reduce_scatter_state",
    "reduce_scatter_states",
    "post_forward_order",
    "iter_forward_root",
    "_last_post_reduce_events",
    "_modules_to_run_forward",
    "_all_gather_result",
    "_post_reduce_event",
    "_all_reduce_state",
    "_reshard_after_forward_event",
    "_partial_reduce_output",
    "_post_forward_indices",
    "unsharded_accumulated_grad",
)
"""What FSDP2 has of a step that is under way, in its various versions: None or empty after it."""


def local(tensor: Tensor) -> Tensor:
    """Return the tensor itself, or this rank's part of a ``DTensor``.

    ``DTensor.to_local()`` makes another tensor where autograd looks, with an address of its own.
    """
    found: Tensor = getattr(tensor, "_local_tensor", tensor)
    return found


def is_composed(tensor: Tensor) -> bool:
    """Return whether other tensors hold the values of one, as those of a quantized weight do."""
    found: bool = type(tensor) not in _PLAIN and is_traceable_wrapper_subclass(tensor)
    return found


def require_plain_gradients(gradients: Sequence[Tensor | None]) -> None:
    """Refuse gradients that are not one piece of memory, or a shard of one."""
    if any(g is not None and g.layout is not torch.strided for g in gradients):
        raise CaptureError(
            "A graph cannot write sparse gradients, which have no fixed address.",
            "the backward pass computes one",
            "write nn.Embedding(..., sparse=False)",
        )
    for gradient in gradients:
        if gradient is not None and local(gradient) is gradient and is_composed(gradient):
            kind = type(gradient).__name__
            raise CaptureError(
                "A graph can write plain gradients only, also of parameters of a tensor subclass.",
                f"the backward pass computes a {kind}",
                f"return plain tensors from the backward pass of operators on {kind}",
            )


def hides_memory(tensor: Tensor) -> bool:
    """Return whether a subclass without ``__tensor_flatten__`` keeps its values in other tensors.

    Nothing public tells. Its own storage has no address, which torch says in an error.
    """
    kind = type(tensor)
    own = getattr(kind, "__torch_dispatch__", None) is not Tensor.__torch_dispatch__
    if kind in _PLAIN or not own or is_composed(tensor):
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
    if type(tensor) in _PLAIN:
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


class FsdpModules:
    """The units that ``fully_shard`` has made of a module, each with gathered parameters."""

    def __init__(self, module: nn.Module) -> None:
        found = (m for m in module.modules() if hasattr(m, "_get_fsdp_state"))
        states = (cast(Any, m)._get_fsdp_state() for m in found)
        self._states: list[Any] = list(dict.fromkeys(states))
        self._groups = [group for state in self._states for group in _groups(state)]

    def __len__(self) -> int:
        return len(self._states)

    def shard(self) -> bool:
        """Free parameters that a forward pass outside of a step gathered; whether steps reduce all.

        ``FSDPModule.reshard`` lets go, too, and looks at every unit with locks and hooks.
        """
        reduces = True
        for group in self._groups:
            if not group.is_sharded:
                group.reshard()
            reduces = reduces and group.reduce_grads and group.all_reduce_grads
        return reduces

    def forget_step(self) -> None:
        """Reset the state of a step that raised.

        ``FSDPModule.reset_iter_state`` (torch 2.13) waits for events, and those of a capture that
        has failed cannot be waited for.
        """
        for holder in self._holders():
            for name in _OF_A_STEP:
                value: Any = getattr(holder, name, None)
                if hasattr(value, "clear"):
                    value.clear()
                elif value is not None:
                    setattr(holder, name, None)
        for state in self._states:
            state._state_ctx.post_backward_final_callback_queued = False
            state._training_state = type(state._training_state).IDLE
        for group in self._groups:
            group._training_state = type(group._training_state).IDLE
            group._to_sharded()

    def _holders(self) -> Iterator[Any]:
        for state in self._states:
            yield from (state, state._state_ctx, state._comm_ctx)
        for group in self._groups:
            yield group
            for parameter in group.fsdp_params:
                yield parameter
                if hasattr(parameter, "_unsharded_param"):
                    parameter._unsharded_param.grad = None


def _groups(state: Any) -> list[Any]:
    """Return the groups of a unit: one, before torch 2.12."""
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [state._fsdp_param_group]
    return [group for group in groups if group is not None]


def reducer_is_warm(ddp: DistributedDataParallel) -> bool:
    """Return whether DDP's reducer has its final buckets and times no more iterations.

    In its first ten iterations it records events, which it reads on the host (reducer.hpp,
    ``should_collect_runtime_stats``). No public method tells how far it is; torch documents eleven
    warm-up iterations.
    """
    iteration = int(ddp._get_ddp_logging_data().get("iteration", 0))
    return iteration >= 10 and getattr(ddp, "_has_rebuilt_buckets", True)


def take_no_more_times(ddp: DistributedDataParallel) -> None:
    """Stop the reducer from timing every hundredth iteration, which may be captured.

    No public method does.
    """
    never = 2**31 - 1
    ddp._set_ddp_runtime_logging_sample_rate(never)


def buffers_left(wrappers: Iterable[DistributedDataParallel]) -> AbstractContextManager[None]:
    """Let forward passes of the body leave buffers as they are, which rank 0 would send to all.

    No public method does. Without the private one, ranks that run the body unlike times wait for
    each other.
    """
    return exchanged((ddp, "_sync_buffers", nothing) for ddp in wrappers)


def buckets_of(ddp: DistributedDataParallel) -> list[list[nn.Parameter]]:
    """List the parameters of each bucket of DDP's reducer, in the order of reduction.

    Torch's join of uneven inputs asks this way, too. No public method tells. Fallback: no buckets,
    with which the reducer itself is captured.
    """
    zeros = getattr(ddp.reducer, "_get_zeros_like_grad_buckets", list)
    return [bucket.parameters() for bucket in zeros()]


def is_within_backward(ddp: DistributedDataParallel) -> bool:
    """Return whether the reducer waits for gradients of a backward pass that has failed.

    No public method tells. Without the private one, the next step raises.
    """
    check = getattr(ddp.reducer, "_check_reducer_finalized", None)
    try:
        if check is not None:
            check()
    except RuntimeError:
        return True
    return False


def forget_backward(ddp: DistributedDataParallel) -> None:
    """Let the reducer forget its backward pass, and make its buckets again after the next one.

    To be called on all ranks, which make them together; no public method does it.
    """
    reset = getattr(ddp.reducer, "_reset_state", None)
    if reset is not None:
        ddp._has_rebuilt_buckets = False
        reset()


_renewed: WeakSet[DistributedDataParallel] = WeakSet()


def renew_reducer(wrapper: DistributedDataParallel) -> bool:
    """Let DDP accumulate gradients on the present stream; whether it does.

    Its reducer keeps the AccumulateGrad nodes of the stream on which it was made, mostly the
    default one, whose nodes CUDA refuses to capture; from 2.13 on torch has an option (see
    :func:`stale_gradient_nodes_tolerated`). So the reducer is made once more, as unpickling DDP
    does: no public method moves it. All ranks are to do it together; it counts its iterations from
    then on.
    """
    if hasattr(torch.autograd.graph, "set_override_stale_capture_stream") or wrapper in _renewed:
        return True
    ddp: Any = wrapper
    try:
        parameters, sparse = ddp._build_params_for_reducer()
        names = ddp._build_debug_param_to_name_mapping(parameters)
        hooks, make = [*ddp._comm_hooks], ddp._ddp_init_helper
    except AttributeError:
        return False
    if any(getrefcount(vars(ddp)[name]) > 2 for name in ("reducer", "logger")):
        return False  # another owner would keep the hooks of the old one
    del ddp.logger, ddp.reducer
    make(parameters, sparse, names, ddp.static_graph)
    if ddp.static_graph:
        ddp.reducer._set_static_graph()
        ddp.logger._set_static_graph()
    ddp._has_rebuilt_buckets = False
    c10d: Any = dist
    for hook, state in hooks:
        if isinstance(hook, c10d.BuiltinCommHookType):
            c10d._register_builtin_comm_hook(ddp.reducer, hook)
        else:
            c10d._register_comm_hook(ddp.reducer, state, hook)
    _renewed.add(wrapper)
    return True


def ahead_of_destruction(call: Callable[[], object]) -> AbstractContextManager[None]:
    """Call this before the program destroys all process groups, while the body runs.

    NCCL waits for the end of graphs that hold its collectives, and for ever for those that live.
    Nothing public tells of the end of a group.
    """
    own = dist.destroy_process_group

    def destroy(group: Any = None) -> None:
        if group is None or group is dist.group.WORLD:
            call()
        own(group)

    name = "destroy_process_group"
    return exchanged([(dist, name, destroy), (dist.distributed_c10d, name, destroy)])
