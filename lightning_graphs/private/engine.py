"""Private corners of autograd: its nodes, their hooks, and the passes through them."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections import deque
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import islice
from types import CellType, FrameType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_graphs.errors import CaptureError
from lightning_graphs.private.callsite import frames_from, is_library, package_of, variables_of
from lightning_graphs.private.exchange import nothing, replaced
from lightning_graphs.private.torch import (
    PLAIN_TENSORS,
    hide_modes,
    is_batched,
    is_composed,
    is_wrapped,
    local,
    out_of_sight,
    tensor_uses,
)

# ------------------ Nodes


def nodes_from(pending: list[Node | None]) -> Iterator[Node]:
    """Yield these autograd nodes and all behind them, once; the list is consumed."""
    return (node for node, _ in edges_from(pending))


def edges_from(pending: list[Node | None]) -> Iterator[tuple[Node, Any]]:
    """Yield these nodes with their ``next_functions``, which torch makes anew for each reader."""
    seen: set[Node] = set()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node, (edges := node.next_functions)
        pending += [parent for parent, _ in edges if parent not in seen]


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
    known = {id(leaf): uses for leaf, uses in found.items()}  # hashing a tensor is Python
    for node, edges in edges_from([output.grad_fn for output in outputs] if found else []):
        for i, (parent, _) in enumerate(edges):
            leaf = None if parent is None else leaf_of(parent)
            if leaf is not None and id(leaf) in known:
                known[id(leaf)].append((node, i))
    return found


def outputs_of(node: Node) -> Sequence[Any]:
    """Return dtype, device and shape of each output of an operator, given its backward node."""
    found: Sequence[Any] = getattr(node, "_input_metadata", ())
    return found


nodes_recorded: Callable[[], int] = getattr(torch._C._autograd, "_get_sequence_nr", lambda: 0)
"""How many nodes autograd has numbered in this thread; 0 where nothing tells."""


def number_of(node: Any) -> int:
    """Return the number of a node, in the order in which this thread has recorded them.

    Autograd does not say so in public. Those of leaves have the highest number of all, and so have
    all nodes in a version of torch without numbers.
    """
    number: Callable[[], int] | None = getattr(node, "_sequence_nr", None)
    return sys.maxsize if number is None else number()


def recorded_before(node: Any, number: int) -> bool:
    """Return whether a node is older than a call of :func:`nodes_recorded` in this thread."""
    return number_of(node) < number


def is_node_of_torch(node: object) -> bool:
    """Return whether a node of autograd is one of torch's own, which alone have classes there."""
    kind = type(node)
    return getattr(torch._C._functions, kind.__name__, None) is kind


def is_compiled_node(node: object) -> bool:
    """Return whether a Python autograd node is the backward pass of compiled code.

    Its class is made of a function that only its module tells from an author's. Fallback: an
    author's.
    """
    function = getattr(type(node), "_forward_cls", None)
    return getattr(function, "__module__", "").startswith("torch._functorch.")


def has_python_nodes(outputs: Sequence[Tensor]) -> bool:
    """Return whether a backward pass of these outputs runs a ``torch.autograd.Function``."""
    return any(isinstance(node, BackwardCFunction) for node in nodes_behind(outputs))


saved_tensors_hooks: Callable[[], object] = partial(
    getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", nothing), False
)
"""The hooks for what autograd saves now, or None; torch has contexts for them, and no reader.

Where it lacks the function there seem to be none.
"""

# ------------------ Hooks


def tensor_hooks(tensor: Tensor) -> dict[int, Callable[..., Any]]:
    """Return the hooks on a tensor and on its gradient, each by the number of its handle.

    The numbers are unique among all hooks of torch.
    """
    return {number: hook for table in tensor_hook_tables(tensor) for number, hook in table.items()}


def tensor_hook_tables(tensor: Tensor) -> list[dict[int, Callable[..., Any]]]:
    """Return the tables of these hooks that a tensor has; torch has no public reader of either."""
    tables = tensor._backward_hooks, tensor._post_accumulate_grad_hooks
    return [table for table in tables if table is not None]


def has_gradient_hooks(leaf: Tensor, node: Node | None = None) -> bool:
    """Return whether a leaf, or its node, which may be given, has hooks that see its gradient.

    Code keeps the node that accumulates a gradient to put hooks on it, as Megatron-LM and apex do.
    Only the handle of one more knows these: where that says nothing, there are some.
    """
    if tensor_hooks(leaf):
        return True
    if not leaf.requires_grad:
        return False
    if node is None:
        with torch.inference_mode(False):
            node = get_gradient_edge(leaf).node
    handles = node.register_hook(nothing), node.register_prehook(nothing)
    tables = [getattr(handle, "hooks_dict_ref", nothing)() for handle in handles]
    for handle in handles:
        handle.remove()
    return any(table is None or len(table) > 0 for table in tables)


@contextlib.contextmanager
def without_hooks(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Take the tensor hooks off the parameters for a while.

    ``torch.autograd.grad`` runs them. In a captured backward they would become part of the graph,
    and autograd would then apply them to the replayed gradient once more.
    """
    hooked = [(p, p._backward_hooks) for p in parameters if p._backward_hooks]
    for parameter, _ in hooked:
        parameter._backward_hooks = None
    try:
        yield
    finally:
        for parameter, hooks in hooked:
            parameter._backward_hooks = hooks


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


def runs_code(outputs: Sequence[Tensor], adds_to: Container[int] | None = None) -> bool:
    """Return whether a backward pass of these outputs runs code that may look at ``.grad``.

    It has a ``torch.autograd.Function`` that compiled code has not made, or hooks at its leaves.
    With ``adds_to``, also whether it may write anything but gradients of the leaves with an ``id``
    there: it adds to others, or has a node that is not torch's own.
    """
    if any(output.grad_fn is None for output in outputs):
        return True
    kinds: dict[type, tuple[bool, bool]] = {}  # whether nodes of it are leaves', or say so alone
    nodes: Iterator[Any] = nodes_behind(outputs)
    for node in nodes:
        kind = type(node)
        if kind not in kinds:
            says = isinstance(node, BackwardCFunction) and not is_compiled_node(node)
            says |= adds_to is not None and not is_node_of_torch(node)
            kinds[kind] = leaf_of(node) is not None, says
        is_of_leaf, says = kinds[kind]
        leaf = leaf_of(node) if is_of_leaf else None
        if leaf is None:
            if says:
                return True
        elif has_gradient_hooks(leaf, node) or (adds_to is not None and id(leaf) not in adds_to):
            return True
    return False


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


# ------------------ Backward passes


_backward = torch.autograd.backward  # not what may watch in its place


@contextlib.contextmanager
def stale_gradient_nodes_tolerated() -> Iterator[None]:
    """Let a backward pass run on our stream though the user's autograd graph lives on another.

    A parameter has one AccumulateGrad node, of the stream of the first graph that is still alive.
    From 2.13 on torch has an option to use the capture stream nonetheless, and a private reader of
    it.
    """
    override = getattr(torch.autograd.graph, "set_override_stale_capture_stream", nothing)
    before = bool(getattr(torch._C, "_override_stale_capture_stream", nothing)())
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
    warn = getattr(torch.autograd.graph, "set_warn_on_accumulate_grad_stream_mismatch", nothing)
    warns = getattr(torch._C, "_warn_on_accumulate_grad_stream_mismatch", lambda: True)
    before = bool(warns())
    warn(False)
    try:
        yield
    finally:
        warn(before)


@contextlib.contextmanager
def allocating_from(pool: tuple[int, int], device: torch.device) -> Iterator[None]:
    """Let the current stream take memory from a pool, in the engine's threads, too.

    ``torch.cuda.use_mem_pool`` is for one thread, which would have to run the backward pass: it
    knows none of the plans that cuDNN has made for the engine's thread (2 s for ConvNeXt-tiny on an
    H100), and the workspace of its cuBLAS would stay in the pool. It serves where torch lacks the
    other, and on the default stream, which that refuses.
    """
    begin = getattr(torch._C, "_cuda_beginAllocateCurrentStreamToPool", None)
    if begin is None or not torch.cuda.current_stream(device).cuda_stream:
        # It asks a pool for its id only, and torch makes no object of a graph's pool
        own = torch.cuda.use_mem_pool(SimpleNamespace(id=pool), device)  # type: ignore[arg-type]
        with torch.autograd.set_multithreading_enabled(False), own:
            yield
        return
    index = torch.cuda.current_device() if device.index is None else device.index
    begin(index, pool)
    try:
        yield
    finally:
        torch._C._cuda_endAllocateToPool(index, pool)
        torch._C._cuda_releasePool(index, pool)


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
    reenters: Callable[[], object] = nothing,
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


def current_autograd_node() -> Node | None:
    """Return the autograd node that runs backward on this thread; None if torch lacks it."""
    getter: Callable[[], Node | None] = getattr(torch._C, "_current_autograd_node", nothing)
    return getter()


def will_execute(node: Node) -> bool:
    """Return whether the backward pass that runs on this thread goes through ``node``.

    Nothing public tells a ``backward()`` from a ``torch.autograd.grad()``. The function raises
    where the latter returns the gradient of the node's leaf.
    """
    function = getattr(torch._C, "_will_engine_execute_node", None)
    try:
        return True if function is None else bool(function(node))
    except RuntimeError:
        return False


def after_backward(call: Callable[[], None]) -> None:
    """Call this at the end of this thread's backward pass, as torch's data parallelism does."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


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
    if len(users) != 1 or type(parameter) not in PLAIN_TENSORS:
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
        if type(leaf) in PLAIN_TENSORS and leaf.is_cuda and leaf.is_leaf and leaf.requires_grad
        if tensor_uses(leaf) != 1 and not leaf.is_inference()  # a node that lives is a further one
        if not is_wrapped(leaf)
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


def _kind(leaf: Tensor) -> tuple[torch.dtype, torch.device]:
    return leaf.dtype, leaf.device


# ------------------ Passes through nodes that are older than the code that runs them


_IN = "lightning_graphs: recorded in"


def _metadata(node: Node) -> dict[str, Any]:
    found: Any = node.metadata  # a property, which torch declares as a method
    return cast("dict[str, Any]", found)


class RecordedNodes:
    """Tells the nodes that autograd records from now on from older ones.

    Autograd numbers the nodes of each thread apart. A pass with ``create_graph`` records nodes too,
    on a GPU in the thread of the device, where numbers say nothing: these are marked when it ends.
    """

    def __init__(self) -> None:
        self._begin = nodes_recorded()

    def lacks(self, node: Node) -> bool:
        """Return whether a node is older, or of another thread and not marked."""
        number, end = number_of(node), nodes_recorded() or sys.maxsize
        if self._begin <= number < end or number >= sys.maxsize:  # those of leaves are the largest
            return False
        return _metadata(node).get(_IN) is not self

    def add(self, nodes: Iterable[Node]) -> None:
        """Mark nodes as recorded since."""
        for node in filter(self.lacks, nodes):
            _metadata(node)[_IN] = self  # which keeps no node alive, as a set of them would


def _inside(tensor: Tensor) -> Tensor | None:
    """Return what a tensor wraps that stands for it in a transform, if it is one.

    What tensors of ``torch.func`` and of ``is_grads_batched`` wrap is private to torch. If they are
    not known, double backward passes of such code are refused on a GPU.
    """
    if is_wrapped(tensor):
        wrapped: Tensor = torch._C._functorch.get_unwrapped(tensor)
        return wrapped
    if is_batched(tensor):
        level = torch._C._vmapmode_increment_nesting() - 1
        torch._C._vmapmode_decrement_nesting()
        return torch._remove_batch_dim(tensor, level, 1, 0)
    return None


def _nodes_behind(tensors: Iterable[Tensor | GradientEdge | None]) -> Iterator[Node]:
    """Yield every node behind these, once, also behind what they wrap in transforms."""
    found: list[Node | None] = []
    for tensor in tensors:
        if isinstance(tensor, GradientEdge):
            found.append(tensor.node)
            continue
        inner = tensor
        while inner is not None:
            found.append(inner.grad_fn)
            inner = _inside(inner)
    return nodes_from(found)


@contextlib.contextmanager
def backward_passes_noted(goes_outside: Callable[[], object]) -> Iterator[list[object]]:
    """Yield a list that is empty until code in the body runs a backward pass, or ``grad``.

    Where torch has another engine the list is not empty. ``goes_outside`` is called ahead of a pass
    through nodes from before the body, which it frees.
    """
    passes: list[object] = []
    recorded, is_inside = RecordedNodes(), False

    def run(
        engine: Callable[..., Any], roots: Sequence[Any], gradients: Any, keep: Any, create: Any,
        *rest: Any, **kwargs: Any,
    ) -> Any:  # fmt: skip
        nonlocal is_inside
        if is_inside:  # as of reentrant checkpointing: perhaps in the thread of the device
            return engine(roots, gradients, keep, create, *rest, **kwargs)
        with out_of_sight():
            nodes = list(_nodes_behind(roots))
            goes_on = any(map(recorded.lacks, nodes))
        if goes_on:
            goes_outside()
        passes.append(engine)
        leaves = [leaf for node in nodes if create and (leaf := leaf_of(node)) is not None]
        with out_of_sight():  # what the graph of a gradient consists of next to what the pass makes
            parts = [*gradients, *(leaf.grad for leaf in leaves)] if create else []
            older = set(filter(recorded.lacks, _nodes_behind(parts)))
        del nodes
        is_inside = True
        try:
            found = engine(roots, gradients, keep, create, *rest, **kwargs)
        finally:
            is_inside = False
        if create:
            with out_of_sight():
                made = _nodes_behind([*(found or ()), *(leaf.grad for leaf in leaves)])
                recorded.add(node for node in made if node not in older)
        return found

    exchanged = exchanged_engine(run)
    if isinstance(exchanged, contextlib.nullcontext):
        passes.append(exchanged)
    with exchanged:
        yield passes


# ------------------ Leaves that are alive, or that code can reach


def leaves_alive() -> Iterator[Tensor]:
    """Yield every tensor known to Python that may be a leaf of autograd; the look takes 40 ms."""
    # What refers to these classes is found in half the time of a look at all objects.
    found = gc.get_referrers(*PLAIN_TENSORS)
    yield from [tensor for tensor in found if type(tensor) in PLAIN_TENSORS]


_LOOKS, _DEPTH, _ENTRIES, _DATA = 2048, 4, 512, 2**14
"""Objects that are looked into at most, how deep inside of others, and of how many in a container;
and where in one of more there are tensors. A look at all that there are takes no longer."""

_HAS_NONE = frozenset({type(None), bool, int, float, str, bytes, type, ModuleType})


def _is_tensor(value: object) -> bool:
    return issubclass(type(value), Tensor)  # what it says to be its class may be another one


def leaves_in_reach(frame: FrameType | None) -> Iterator[Tensor]:
    """Yield the tensors that may be leaves of autograd, and that an author's frames can reach.

    By variables, closures, containers, modules, and attributes of objects. Where these are many, it
    yields all that are alive. What is missing, CUDA refuses.
    """
    pending: deque[tuple[int, Any]] = deque()
    for each in frames_from(frame):
        file = each.f_code.co_filename
        if not (is_library(file) or package_of(file)):
            pending += [(0, variables_of(each)), (0, each.f_globals)]
    found: dict[int, Tensor] = {}
    seen: dict[int, Any] = {}  # with each, so that an ``id`` stays its own
    while pending:
        depth, value = pending.popleft()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        if issubclass(type(value), nn.Module):
            pending += [(depth, child) for child in value._modules.values() if child is not None]
        for held in _held_by(value):
            if _is_tensor(held):
                found[id(held)] = held
            elif depth < _DEPTH and type(held) not in _HAS_NONE:
                pending.append((depth + 1, held))
        if len(seen) > _LOOKS:
            yield from leaves_alive()
            return
    yield from found.values()


def _held_by(value: Any) -> Iterable[Any]:
    """List what a value refers to; of modules, tensors alone."""
    kind = type(value)
    if issubclass(kind, nn.Module):
        held = (*value._parameters.values(), *vars(value).values())
        return filter(_is_tensor, held)
    if issubclass(kind, Optimizer):
        return [parameter for group in value.param_groups for parameter in group["params"]]
    if issubclass(kind, (dict, list, tuple, set)):
        entries = value.values() if issubclass(kind, dict) else value
        is_short = len(value) <= _ENTRIES
        return entries if is_short else filter(_is_tensor, islice(entries, _DATA))
    if kind is FunctionType:
        return value.__closure__ or ()
    if kind is MethodType:
        return value.__self__, value.__func__
    if kind is partial:
        return value.func, value.args, value.keywords
    if issubclass(kind, (type, ModuleType)):
        return ()
    with contextlib.suppress(AttributeError, ValueError):  # there is none; a cell is not filled yet
        if kind is CellType:
            return (value.cell_contents,)
        table = object.__getattribute__(value, "__dict__")
        return table.values() if type(table) is dict else ()
    return ()
