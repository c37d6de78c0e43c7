"""``make_graphed_callables``: forward and backward as graphs inside one autograd node."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from lightning_graphs.core.autograd.lending import ReplayOrder
from lightning_graphs.core.backends.backend import BackendName, PoolHandle
from lightning_graphs.core.graph import GraphPool, get_backend, refuse_nested
from lightning_graphs.core.graphed import GraphedCallable
from lightning_graphs.core.passes import CallableCapture, CaptureSettings
from lightning_graphs.core.private.torch import saved_tensors_hooks
from lightning_graphs.errors import CaptureError

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
    :class:`~lightning_graphs.core.graphed.GraphedCallable`; ``module.forward.reset()`` gives the
    original back and frees the graphs. Hooks of the module itself keep firing at every call; hooks
    of its submodules run at capture, and what they compute on tensors is part of the graph.

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
        param_grads: ``"autograd"``: autograd accumulates parameter gradients as ever.
            ``"direct"``: the backward graph writes them and ``.grad`` is set without autograd, so
            that a call costs the same however many parameters there are; for ``loss.backward()``
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
    if num_warmup_iters < 1:
        raise CaptureError(
            "num_warmup_iters must be a whole number of at least 1.",
            f"got {num_warmup_iters}: libraries and caches initialize in the warm-up",
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
