"""``CUDAGraph`` and ``graph``, torch's documented API over either backend, and pools of graphs."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Literal, NoReturn

import torch

from lightning_graphs.device.cuda import CudaBackend, CudaGraph
from lightning_graphs.device.emulated import EmulatedBackend, EmulatedGraph
from lightning_graphs.device.inspect import GraphInfo
from lightning_graphs.errors import CaptureError, ReplayError, UnsupportedError
from lightning_graphs.private.engine import (
    leaves_in_reach,
    renew_gradient_nodes,
    stale_gradient_nodes_tolerated,
)
from lightning_graphs.private.exchange import warnings_left_out
from lightning_graphs.private.generators import CapturedDropout
from lightning_graphs.private.torch import PoolHandle, why_no_cuda_graphs

BackendName = Literal["auto", "cuda", "emulated"]

Backend = CudaBackend | EmulatedBackend
"""Operations of a backend outside of a single graph; a CPU needs no streams."""

CapturedGraph = CudaGraph | EmulatedGraph
"""One graph of one backend, under :class:`CUDAGraph`.

The methods mean what torch documents for ``torch.cuda.CUDAGraph``; ``abandon`` leaves a capture
that failed. Capture has no effect on the world: afterwards every tensor that existed before, every
random generator, the allocator and the modes are as they were.
"""


BACKENDS: Mapping[str, Literal["cuda", "emulated"]] = {"cuda": "cuda", "cpu": "emulated"}
"""Type of the device on which code computes -> the backend of its captures."""


@functools.cache
def _backend(name: str) -> Backend:
    return CudaBackend() if name == "cuda" else EmulatedBackend()


def get_backend(name: BackendName | Backend = "auto") -> Backend:
    """Return the backend of a name; ``"auto"`` is CUDA when torch sees a GPU, else emulated."""
    if not isinstance(name, str):
        return name
    if name == "emulated" or (name == "auto" and not torch.cuda.is_available()):
        return _backend("emulated")
    if name not in ("auto", "cuda"):
        raise UnsupportedError(
            "backend must be one of 'auto', 'cuda', 'emulated'.",
            f"got {name!r}",
            "write backend='auto', or one of the others",
        )
    if not torch.cuda.is_available():
        raise UnsupportedError(
            "The CUDA backend needs a GPU that torch can see.",
            f"torch {torch.__version__}, torch.cuda.is_available() is False",
            "use backend='emulated' to rehearse on the CPU, or install a CUDA build of torch",
        )
    if why := why_no_cuda_graphs():
        raise UnsupportedError(
            "The CUDA backend needs an NVIDIA GPU, and Linux.",
            why,
            "use backend='emulated' to rehearse on the CPU, or another machine",
        )
    return _backend("cuda")


def graph_pool_handle(*, backend: BackendName = "auto") -> PoolHandle:
    """Return an opaque token for a memory pool that several graphs may share.

    Share a pool among graphs that replay in the order of their capture and never at the same time.
    """
    return get_backend(backend).new_pool()


def is_current_stream_capturing() -> bool:
    """Return whether the current CUDA stream captures, or this thread does if emulated."""
    if torch.cuda.is_available() and get_backend("cuda").is_capturing():
        return True
    return get_backend("emulated").is_capturing()


class CUDAGraph:
    """A graph of captured work, with the API that torch documents for ``torch.cuda.CUDAGraph``.

    Args:
        keep_graph: With False, ``capture_end`` instantiates the graph and drops its template. With
            True, the template stays: it may be inspected and edited, and :meth:`instantiate` or
            the first :meth:`replay` makes it executable.
        backend: ``"cuda"``, ``"emulated"``, or ``"auto"``: CUDA when torch sees a GPU.

    Raises:
        UnsupportedError: ``backend="cuda"`` without a GPU.
        ReplayError: By methods that need a capture, or the template, where there is none.
    """

    def __init__(
        self, keep_graph: bool = False, *, backend: BackendName | Backend = "auto"
    ) -> None:
        self.backend = get_backend(backend)
        """The backend that captures and replays this graph."""
        self._keep_graph = keep_graph
        self._captured: CapturedGraph = self.backend.new_graph(keep_graph)
        self._capturing = self.is_annotated = False
        self._replay = _replay_of_nothing

    def capture_begin(
        self,
        pool: PoolHandle | None = None,
        capture_error_mode: str = "global",
        check_input_liveness: bool = False,
        *,
        enable_annotations: bool = False,
    ) -> None:
        """Begin to capture; :class:`graph`, which has the same arguments, does it for you.

        Raises:
            CaptureError: a capture is under way, or the graph holds one already.
        """
        if capture_error_mode not in ("global", "thread_local", "relaxed"):
            raise CaptureError(
                "capture_error_mode must be one of 'global', 'thread_local', 'relaxed'.",
                f"got {capture_error_mode!r}",
                "write 'thread_local' where other threads use the GPU, as data loaders do",
            )
        is_handle = isinstance(pool, tuple) and [type(part) for part in pool] == [int, int]
        if pool is not None and not is_handle:
            raise CaptureError(
                "pool must be what graph_pool_handle() or another graph's pool() returns.",
                f"got {pool!r}",
                "write pool=lightning_graphs.core.graph_pool_handle()",
            )
        refuse_nested(self.backend, "capture_begin()")
        if self._capturing or self._replay is not _replay_of_nothing:
            raise CaptureError(
                "A CUDAGraph can hold one capture only.",
                "capture_begin() was called on one that was captured before",
                "call reset() first, or create another CUDAGraph",
            )
        self._captured.capture_begin(
            pool, capture_error_mode, enable_annotations, check_input_liveness
        )
        self._capturing, self.is_annotated = True, enable_annotations

    def capture_end(self) -> None:
        """End the capture; :meth:`replay` may be called afterwards.

        Raises:
            CaptureError: no capture is under way, or something in it was refused.
        """
        if not self._capturing:
            raise CaptureError(
                "capture_end() needs a capture_begin() before it.",
                "no capture of this graph is under way",
                "capture with lightning_graphs.core.graph(cuda_graph)",
            )
        try:
            self._captured.capture_end()
        except BaseException as error:
            self.abandon_capture()
            if (refusal := self.backend.refusal(error)) is not None:
                raise refusal from error
            raise
        self._capturing = False
        self._replay = self._captured.replay

    def abandon_capture(self) -> None:
        """Leave a capture whose body failed; the graph is empty and may be captured again."""
        self._capturing = False
        self._captured.abandon()

    def instantiate(self) -> None:
        """Make the template executable; with ``keep_graph=True`` it may be repeated after edits."""
        self._require_capture("instantiate()", template=True)
        self._captured.instantiate()

    def replay(self) -> None:
        """Launch the captured work on the current stream.

        Raises:
            ReplayError: An input was freed (``check_input_liveness``; always if emulated).
        """
        self._replay()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UnsupportedError(
            "A CUDAGraph can be neither copied nor pickled, because its work is bound to the "
            "memory of its capture.",
            "copy or pickle was called on it, or on an object that holds it",
            "keep it out of what is copied, and capture the copy",
        )

    @property
    def launch(self) -> Callable[[], None]:
        """What :meth:`replay` calls, for callers that prepare it; not valid after :meth:`reset`."""
        return self._replay

    def _require_capture(self, call: str, *, template: bool = False) -> None:
        if self._replay is _replay_of_nothing:
            raise _needs_capture(call)
        if template and not self._keep_graph:
            raise ReplayError(
                f"{call} needs the cudaGraph_t of the graph.",
                "keep_graph=False drops the cudaGraph_t at capture_end",
                "create the graph with CUDAGraph(keep_graph=True)",
            )

    def reset(self) -> None:
        """Drop the captured work and its memory; the graph may be captured again.

        A capture that is under way is abandoned.
        """
        if self._capturing:
            self.abandon_capture()
        self._replay = _replay_of_nothing
        self._captured.reset()

    @property
    def dropout(self) -> CapturedDropout | None:
        """cuDNN's random state, where captured recurrent layers draw their dropout from it."""
        return self._captured.dropout

    def pool(self) -> PoolHandle:
        """The token of this graph's memory pool."""
        self._require_capture("pool()")
        return self._captured.pool()

    def enable_debug_mode(self) -> None:
        """Keep what :meth:`debug_dump` needs; to be called before the capture."""
        self._keep_graph = True
        self._captured.keep_template()

    def debug_dump(self, debug_path: str) -> None:
        """Write the graph as DOT to ``debug_path``, if debug mode was enabled."""
        self._require_capture("debug_dump()")
        if not self._keep_graph:  # torch's words
            message = "CUDA Graphs debug not enabled, set with CUDAGraph.enable_debug_mode()"
            warnings.warn(message, stacklevel=2)
            return
        self._captured.debug_dump(debug_path)

    def raw_cuda_graph(self) -> int:
        """The ``cudaGraph_t``; it exists with ``keep_graph=True`` and on CUDA only."""
        self._require_capture("raw_cuda_graph()", template=True)
        return self._captured.raw_cuda_graph()

    def raw_cuda_graph_exec(self) -> int:
        """The ``cudaGraphExec_t``; valid until the next :meth:`instantiate` or :meth:`reset`."""
        self._require_capture("raw_cuda_graph_exec()")
        return self._captured.raw_cuda_graph_exec()

    def get_graph_data(self) -> dict[str, Any]:
        """Describe nodes and edges as torch does, with the ids by which a profiler calls them.

        It has the keys that torch documents: ``"exec_graph_id"`` and, in ``"nodes"``, a dict for
        each with its ``"index"``, ``"node_type"``, ``"tools_id"``, ``"graph_id"``, ``"node_id"``,
        ``"kernel_name"``, and indices of its ``"dependencies"`` and ``"dependents"``. If emulated,
        ids are positions. :meth:`instantiate` comes before it, and ``keep_graph=True``.

        Raises:
            UnsupportedError: torch is older than 2.13.
        """
        self._require_capture("get_graph_data()", template=True)
        return self._captured.get_graph_data()

    def register_generator_state(self, generator: torch.Generator) -> None:
        """Let the captured code draw from ``generator``: replays advance it as eager code would."""
        if not isinstance(generator, torch.Generator):
            raise CaptureError(
                "register_generator_state() must be given a torch.Generator.",
                f"got a {type(generator).__qualname__}",
                "pass the generator that the captured code draws from",
            )
        self._captured.register_generator_state(generator)

    def inspection(self) -> GraphInfo:
        """Nodes and edges; :func:`lightning_graphs.device.inspect.inspect` calls it."""
        self._require_capture("inspection()")
        if not (self._keep_graph or self.is_annotated):
            raise UnsupportedError(
                "Inspecting a graph needs its cudaGraph_t.",
                "keep_graph=False drops the cudaGraph_t at capture_end",
                "create the graph with CUDAGraph(keep_graph=True), or capture it with "
                "graph(..., enable_annotations=True)",
            )
        return self._captured.inspection()

    @property
    def has_collectives(self) -> bool:
        """Whether the captured code has called collectives, which every rank must replay."""
        self._require_capture("has_collectives")
        return self._captured.has_collectives

    def node_counts(self) -> Mapping[str, int]:
        """Number of nodes by kind (``"kernel"``, ``"memcpy"``, ``"memset"``, ...).

        The mapping is empty on CUDA where cuda-python is missing or the driver does not tell.
        """
        self._require_capture("node_counts()", template=True)
        return self._captured.node_counts()


@contextlib.contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Let the body leave garbage that refers to itself, a capture or what follows one.

    The collector would find old graphs, and destroying one ends a capture (#161037). A capture
    makes so many objects that it soon looks at all that there are, which takes as long as many
    steps.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class graph:
    """Context manager that captures its body into a :class:`CUDAGraph`.

    Whatever happens in the body, afterwards the current stream, the allocator and the random
    generators are as before, and the next capture works. An exception of the body wins over one of
    ending the capture. As torch's class it may be subclassed, entered by hand, and entered again
    once its graph was reset.

    Args:
        cuda_graph: The graph to capture into.
        pool: Token of :func:`graph_pool_handle` or :meth:`CUDAGraph.pool`.
        stream: Stream to capture on; each device has a default one. Captures that share a pool
            should share the stream, so that the allocator can reuse memory.
        capture_error_mode: ``"global"``, ``"thread_local"`` or ``"relaxed"``: which unsafe calls
            end the capture, those of all threads, of this one, or none (``cudaStreamCaptureMode``).
        enable_annotations: Name the Python scopes (module path, ``record_function``) that launched
            each node; they appear in :func:`lightning_graphs.device.inspect.inspect`. A dispatch
            mode does it: ``torch.compile``d modules run eagerly in such a capture.
        check_input_liveness: Let every replay refuse to read an input that was freed. It is a
            dispatch mode, too.

    Raises:
        CaptureError: what the body did cannot be captured; it names the user's file and line.
    """

    default_capture_stream: torch.cuda.Stream | None = None
    """Where captures without ``stream`` run, if it is of their device; the last such one."""

    def __init__(
        self,
        cuda_graph: CUDAGraph,
        pool: PoolHandle | None = None,
        stream: torch.cuda.Stream | None = None,
        capture_error_mode: str = "global",
        enable_annotations: bool = False,
        check_input_liveness: bool = False,
    ) -> None:
        backend = cuda_graph.backend
        if stream is None:
            kind = type(self)
            stream = backend.default_capture_stream(kind.default_capture_stream)
            kind.default_capture_stream = stream or kind.default_capture_stream
        self.cuda_graph = cuda_graph
        self.pool: tuple[()] | tuple[PoolHandle] = () if pool is None else (pool,)
        self.capture_stream = stream
        """Where the body runs; None if emulated, unless a stream was given."""
        self.stream_ctx = backend.capture_stream(stream)
        self.capture_error_mode = capture_error_mode
        self.enable_annotations = enable_annotations
        self.check_input_liveness = check_input_liveness
        self._capture: AbstractContextManager[None] | None = None

    def __enter__(self) -> None:
        renew_gradient_nodes(leaves_in_reach(sys._getframe(1)))
        capture = self._captured()
        capture.__enter__()
        self._capture = capture

    def __exit__(self, *error: Any) -> None:
        capture, self._capture = self._capture, None
        if capture is None:
            self.cuda_graph.capture_end()  # which says that nothing has begun
        else:
            capture.__exit__(*(error or (None, None, None)))

    @contextlib.contextmanager
    def _captured(
        self,
        # Surrounds the end of a capture that succeeds
        ending: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext,
        *,
        keeps_cache: bool = False,  # memory that eager code has freed stays with the allocator
    ) -> Iterator[None]:
        captured = self.cuda_graph
        backend = captured.backend
        refuse_nested(backend, "capture_begin()")
        backend.prepare_capture(keeps_cache=keeps_cache)
        try:
            with without_garbage_collection(), self.stream_ctx, stale_gradient_nodes_tolerated():
                try:
                    captured.capture_begin(
                        self.pool[0] if self.pool else None,
                        self.capture_error_mode,
                        self.check_input_liveness,
                        enable_annotations=self.enable_annotations,
                    )
                    yield
                    with ending():
                        captured.capture_end()
                except BaseException:  # of the body, or an interrupt
                    if captured._capturing or backend.is_capturing():
                        captured.abandon_capture()
                    raise
        except BaseException as error:
            if (refusal := backend.refusal(error)) is not None:
                raise refusal from error
            raise


def _replay_of_nothing() -> None:
    raise _needs_capture("replay()")


def _needs_capture(call: str) -> ReplayError:
    return ReplayError(
        f"{call} needs a finished capture.",
        "the CUDAGraph is empty",
        "capture with lightning_graphs.core.graph(cuda_graph) first",
    )


def refuse_nested(backend: Backend, call: str) -> None:
    """Refuse a nested capture before any work: synchronizing would end the outer one."""
    if backend.is_capturing():
        raise CaptureError(
            "A capture cannot begin inside of another one.",
            f"{call} was called during a capture",
            "end the other capture first",
        )


def _may_be_empty() -> AbstractContextManager[None]:
    """Leave out torch's warning of an empty graph: code may find all that it needs in a cache."""
    return warnings_left_out("The CUDA Graph is empty")


class GraphPool:
    """Graphs that share one memory pool and one capture stream, and are released together.

    They must replay in the order of their capture: the memory that one has freed, the next one
    uses. Data loaders pin memory in threads, of which a capture in ``"global"`` mode dies.
    """

    def __init__(
        self,
        pool: PoolHandle | None = None,
        *,
        stream: torch.cuda.Stream | None = None,
        keep_graphs: bool = False,
        capture_error_mode: str = "thread_local",
        backend: BackendName | Backend = "auto",
    ) -> None:
        self.backend = get_backend(backend)
        self.handle = pool if pool is not None else self.backend.new_pool()
        self.stream = stream
        self._keep_graphs = keep_graphs
        self._capture_error_mode = capture_error_mode
        self._graphs: list[CUDAGraph] = []
        # Whether so much memory is free that further captures, which find that of earlier ones in
        # the pool, may leave eager code its cache
        self.is_roomy: Callable[[], bool] = lambda: False
        self.annotates = False  # whether captures note which module and line launches each node

    def beside(self, pool: PoolHandle | None = None) -> GraphPool:
        """Make another pool with these settings, which releases its own graphs."""
        another = copy.copy(self)
        another.handle = pool if pool is not None else self.backend.new_pool()
        another._graphs = []
        return another

    @contextlib.contextmanager
    def capture(self) -> Iterator[CUDAGraph]:
        captured = CUDAGraph(self._keep_graphs, backend=self.backend)
        mode, annotates = self._capture_error_mode, self.annotates
        capture = graph(captured, self.handle, self.stream, mode, annotates)
        keeps_cache = bool(self._graphs) and self.is_roomy()
        with capture._captured(_may_be_empty, keeps_cache=keeps_cache):
            yield captured
        self._graphs.append(captured)

    @property
    def is_empty(self) -> bool:
        """Whether no graph is in it."""
        return not self._graphs

    def release(self, captured: CUDAGraph) -> None:
        """Reset one graph of this pool; its memory serves the next capture."""
        self._graphs.remove(captured)
        captured.reset()

    def close(self) -> None:
        """Reset every graph; may be called again."""
        while self._graphs:
            self._graphs.pop().reset()
