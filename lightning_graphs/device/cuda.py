"""CUDA backend: torch does the capture, cuda.bindings does what torch does not.

Beginning a capture with raw bindings would be unsound: the allocator's pool filters, the philox
state and torch's registry of captures are reachable only through torch's own C++ class.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from queue import Queue
from threading import Condition, Event, Semaphore, Thread, get_ident
from types import FrameType
from typing import Any, Literal

import torch

from lightning_graphs.device.inspect import GraphInfo, capture_frontier, count_kinds, from_cuda
from lightning_graphs.device.rules import (
    AFTERMATH,
    LINEAR_ALGEBRA,
    NOT_RECORDED,
    known_remedy,
    with_known_remedy,
)
from lightning_graphs.device.trace import KnownStorage, Operation, Recorder, refuse_dead_inputs
from lightning_graphs.errors import CaptureError, GraphError, UnsupportedError
from lightning_graphs.private.callsite import OURS, CallSiteFinder, outside_of
from lightning_graphs.private.distributed import collectives_called
from lightning_graphs.private.exchange import Member, exchanged, standing_in, warnings_left_out
from lightning_graphs.private.generators import CapturedDropout, DropoutCapture
from lightning_graphs.private.torch import PoolHandle, abandon_capture_pool, empty_host_cache

_REFUSALS = (
    "when stream is capturing",
    "in a capturing stream",
    "on a capturing blocking stream",
    "capturing stream has unjoined work",
    "on uncaptured work in another stream",
    AFTERMATH,
    "separate capture sequences",
    "thread-local capture sequence",
    "capture was not ended in the same stream",
    "Capture must end on the same stream it began on",
    "cudaErrorStreamCapture",
    "during CUDA graph capture",
    "set_current_seed can be called during stream capture only",
    "Attempting CUDA graph capture of step()",
    "Offset increment outside graph capture",
    "unexpected CUDA generator used during capture",
    "CUDA generator not in capture mode",
    "legacy stream depend on a capturing",
)
"""Fragments of the messages with which CUDA and torch refuse an operation inside a capture."""


class CudaBackend:
    """Captures with ``torch.cuda.CUDAGraph``; owns one default capture stream per device."""

    name: Literal["cuda"] = "cuda"
    device_type: Literal["cuda"] = "cuda"

    def __init__(self) -> None:
        self._capture_streams: dict[int, torch.cuda.Stream] = {}
        self._failed: list[torch.cuda.CUDAGraph] = []
        self.captures: set[int] = set()  # identities of the graphs that are being captured
        self._retired: list[torch.cuda.CUDAGraph] = []
        self._replacements: dict[PoolHandle, PoolHandle] = {}
        self._graphs_of: dict[PoolHandle, weakref.WeakSet[CudaGraph]] = {}

    def new_graph(self, keep_graph: bool) -> CudaGraph:
        return CudaGraph(self, keep_graph)

    def usable_pool(self, pool: PoolHandle | None) -> PoolHandle:
        """Return the pool, a new one for None, or its replacement after a failure."""
        if pool is None:
            return torch.cuda.graph_pool_handle()
        while pool in self._replacements:
            pool = self._replacements[pool]
        if pool in self._graphs_of and not self._graphs_of[pool]:
            # torch gives up a pool with its last graph, and refuses to begin with it again as long
            # as any of its memory is in use: by a tensor of user code, or as pinned memory of a
            # kernel's arguments, such as those that gather and reduce for FSDP2.
            del self._graphs_of[pool]
            another = torch.cuda.graph_pool_handle()
            self._replacements[pool] = another
            return another
        return pool

    def add(self, pool: PoolHandle, graph: CudaGraph) -> None:
        self._graphs_of.setdefault(pool, weakref.WeakSet()).add(graph)

    def drop(self, pool: PoolHandle, graph: CudaGraph) -> None:
        self._graphs_of[pool].discard(graph)

    def bury(self, native: torch.cuda.CUDAGraph, device: int, pool: PoolHandle) -> None:
        """Keep an invalidated capture alive without using it.

        From 2.11 to 2.13 the pinned-memory allocator goes on recording for its pool through a
        filter that reads the graph object, which nothing can end: the object lives on.
        """
        abandon_capture_pool(device, pool)
        self._failed.append(native)
        self._replacements[pool] = torch.cuda.graph_pool_handle()

    def retire(self, native: torch.cuda.CUDAGraph) -> None:
        """Destroy a graph, which would end a capture that is under way: then, after it.

        Of captures without this class the one on the current stream is seen.
        """
        self._retired.append(native)
        self.destroy_retired()

    def destroy_retired(self) -> None:
        if self._retired and not self.captures and not self.is_capturing():
            self._retired = []

    def new_pool(self) -> PoolHandle:
        return torch.cuda.graph_pool_handle()

    def is_capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def default_capture_stream(self, last: torch.cuda.Stream | None) -> torch.cuda.Stream:
        # torch keeps one default stream for all devices, made on whichever came first.
        device = torch.cuda.current_device()
        if last is not None and last.device.index == device:
            return last
        if device not in self._capture_streams:
            self._capture_streams[device] = torch.cuda.Stream(device)
        return self._capture_streams[device]

    def capture_stream(self, stream: torch.cuda.Stream | None) -> torch.cuda.StreamContext:
        return _JoinedStream(stream)

    def side_stream(self) -> torch.cuda.StreamContext:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        return self.capture_stream(stream)

    def prepare_capture(self, *, keeps_cache: bool = False) -> None:
        torch.cuda.synchronize()
        self.destroy_retired()
        if getattr(torch.compiler.config, "force_cudagraph_gc", False):
            gc.collect()
        if not keeps_cache:
            torch.cuda.empty_cache()
        empty_host_cache()

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def refusal(self, error: BaseException | None) -> CaptureError | None:
        if not isinstance(error, RuntimeError) or isinstance(error, CaptureError):
            return None
        return _explained(error) if any(part in str(error) for part in _REFUSALS) else None


class _JoinedStream(torch.cuda.StreamContext):
    """Makes a stream current; the former one waits for it afterwards."""

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        # A capture begins by setting the generators' state there: no replay may overtake.
        if self.stream is not None:
            torch.cuda.current_stream().wait_stream(self.stream)


class CudaGraph:
    dropout: CapturedDropout | None  # cuDNN's random state, where the graph draws from it
    has_collectives = False

    def __init__(self, backend: CudaBackend, keep_graph: bool) -> None:
        self._backend = backend
        self._keep_graph = keep_graph
        self._generators: list[torch.Generator] = []
        self._pool: PoolHandle | None = None
        self._device = 0
        self._stream: torch.cuda.Stream | None = None
        self._recorders = contextlib.ExitStack()
        self._trace: CaptureTrace | None = None
        self._checks_liveness = False
        self._called: int | None = 0  # collectives, ahead of the capture
        self._inspection: GraphInfo | None = None
        self._lives_in: PoolHandle | None = None
        self._renew()

    def capture_begin(
        self, pool: PoolHandle | None, mode: str, annotate: bool, check_liveness: bool
    ) -> None:
        # The handle must be known beforehand: a capture that fails does not tell its pool.
        self._pool = self._backend.usable_pool(pool)
        self._stream = torch.cuda.current_stream()
        self._device = torch.cuda.current_device()
        # What can fail without the GPU comes before the capture, which it would leave open.
        self._checks_liveness = check_liveness
        if check_liveness or annotate:
            self._trace = CaptureTrace(self._stream.cuda_stream if annotate else None)
        self._backend.captures.add(id(self))
        try:
            self._native.capture_begin(
                pool=self._pool,  # type: ignore[arg-type]
                capture_error_mode=mode,
            )
        except RuntimeError:
            self._end_capture()
            if not self._released_by_torch():
                self._backend.bury(self._native, self._device, self._pool)
            self._release_generators()
            self._renew()
            raise
        self._recorders.enter_context(self._draws.noting())
        self._recorders.enter_context(_eigenvectors_refused())
        self._called = collectives_called()
        if self._trace is not None:
            self._recorders.enter_context(self._trace)

    def capture_end(self) -> None:
        self._recorders.close()
        trace, self._trace = self._trace, None
        if trace is not None:
            self._inspection = trace.inspection()
        self._native.capture_end()
        self.has_collectives = collectives_called() != self._called
        self._draws.end()
        self.dropout = self._draws.found
        self._end_capture()
        assert self._pool is not None
        self._backend.add(self._pool, self)
        self._lives_in = self._pool
        if trace is not None and self._checks_liveness:
            # A method of ours would make a cycle, which holds the memory until the next gc.
            self.replay = functools.partial(  # type: ignore[method-assign]
                _checked_replay, trace.inputs(), self._pool, self._native.replay
            )

    def abandon(self) -> None:
        self._recorders.close()
        # The body may have made another stream current, and may have captured nothing at all. torch
        # warns of that; where warnings are errors that would hide the body's own exception.
        with torch.cuda.stream(self._stream), warnings_left_out():
            try:
                self._native.capture_end()
            except RuntimeError:  # the capture was invalidated
                if self._pool is not None and not self._released_by_torch():
                    self._backend.bury(self._native, self._device, self._pool)
            else:
                assert self._pool is not None
                self._backend.add(self._pool, self)  # it may have been the last graph of the pool
                self._lives_in = self._pool
                self._native.reset()
        self._end_capture()
        self._release_generators()
        self._draws.end()
        torch.cuda.synchronize()
        self._renew()

    def _end_capture(self) -> None:
        self._backend.captures.discard(id(self))
        self._backend.destroy_retired()

    def _release_generators(self) -> None:
        """Tell generators that their capture is over.

        A capture that was invalidated leaves them believing that they are captured, and eager code
        cannot draw from them. The next capture that ends well tells them, and this is one. Giving
        them another state instead would part them from the graphs that were captured before.
        """
        if torch.cuda.is_current_stream_capturing():
            return  # another capture is under way, and will tell them when it ends
        native, cell = torch.cuda.CUDAGraph(), torch.zeros((), device=self._device)
        for generator in self._generators:
            native.register_generator_state(generator)
        stream = torch.cuda.Stream(self._device)  # the other one may be why the capture failed
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            native.capture_begin(capture_error_mode="thread_local")
            cell.zero_()
            native.capture_end()
        native.reset()

    @staticmethod
    def _released_by_torch() -> bool:
        """Return whether torch itself frees the pool of a failed capture: from 2.14 on."""
        return tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 14)

    def _renew(self) -> None:
        self._native = torch.cuda.CUDAGraph(keep_graph=self._keep_graph)
        self.replay = self._native.replay  # type: ignore[method-assign]
        self._draws = DropoutCapture()
        self.dropout = None
        self._trace = self._inspection = self._pool = None
        if self._lives_in is not None:
            self._backend.drop(self._lives_in, self)
            self._lives_in = None
        for generator in self._generators:
            self._native.register_generator_state(generator)

    def instantiate(self) -> None:
        self._native.instantiate()

    def replay(self) -> None:
        """Replaced on every instance by torch's own bound method: one call less per step."""
        self._native.replay()

    def reset(self) -> None:
        self._backend.retire(self._native)
        self._renew()

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self._backend.captures.discard(id(self))  # one that was never ended
            self._backend.retire(self._native)

    def pool(self) -> PoolHandle:
        return self._native.pool()

    def keep_template(self) -> None:
        self._keep_graph = True
        self._renew()

    def debug_dump(self, debug_path: str) -> None:
        with warnings_left_out("DEBUG: calling"):  # a trace of torch's own
            self._native.debug_dump(debug_path)

    def raw_cuda_graph(self) -> int:
        return self._native.raw_cuda_graph()

    def raw_cuda_graph_exec(self) -> int:
        handle: int = self._since("2.9", "raw_cuda_graph_exec")()
        return handle

    def get_graph_data(self) -> dict[str, Any]:
        described: dict[str, Any] = self._since("2.13", "get_graph_data")()
        return described

    def _since(self, version: str, name: str) -> Callable[[], Any]:
        """Return a method that torch's graphs have since a version."""
        found: Callable[[], Any] | None = getattr(self._native, name, None)
        if found is None:
            raise UnsupportedError(
                f"{name}() needs torch {version} or newer.",
                f"this is torch {torch.__version__}",
                "update torch, or use raw_cuda_graph() of a CUDAGraph(keep_graph=True)",
            )
        return found

    def register_generator_state(self, generator: torch.Generator) -> None:
        self._generators.append(generator)
        self._native.register_generator_state(generator)

    def inspection(self) -> GraphInfo:
        return self._inspection or from_cuda(self.raw_cuda_graph())

    def node_counts(self) -> Mapping[str, int]:
        try:
            return count_kinds(self.raw_cuda_graph())
        except GraphError:  # no cuda-python, or a driver that does not tell
            return {}


def _eigenvectors_refused() -> contextlib.AbstractContextManager[None]:
    """Refuse the functions of torch that would leave cuSOLVER behind with an error.

    A capture that CUDA ends inside of its eigensolver makes the next eager call fail, too, with
    ``CUSOLVER_STATUS_EXECUTION_FAILED`` (torch 2.11, CUDA 13.0).
    """

    thread = get_ident()

    def refusing(name: str) -> Callable[..., Any]:
        own = getattr(torch.linalg, name)

        @functools.wraps(own)
        def call(*args: Any, **kwargs: Any) -> Any:
            if get_ident() == thread:
                obstacle = with_known_remedy(LINEAR_ALGEBRA)
                obstacle.stop_here(f"torch.linalg.{name} is called")
            return own(*args, **kwargs)

        return call

    return exchanged([(torch.linalg, name, refusing(name)) for name in ("eigh", "eigvalsh")])


class CaptureTrace(Recorder):
    """The operators of a capture, for the names of its nodes and the tensors that it reads.

    torch has a part of both, in private classes: ranges that code marks for it (2.12, with a driver
    of CUDA 13.1), and a check of inputs that cannot name the tensor (2.13). Kernels that are
    launched outside of torch's dispatcher are invisible to it, and to torch's own.
    """

    def __init__(self, stream: int | None) -> None:
        super().__init__(strict=False)
        self._stream = stream  # whose nodes are counted after each operator, if it is given
        self._places_of_nodes: list[tuple[str, str]] = []

    def keep(self, operation: Operation) -> None:
        super().keep(operation)
        if self._stream is not None:
            _, count = capture_frontier(self._stream)
            label = f"{operation.scope}: {operation.name}".removeprefix(": ")
            new = count - len(self._places_of_nodes)
            self._places_of_nodes.extend([(label, operation.line)] * new)

    def inspection(self) -> GraphInfo | None:
        """Return nodes with their scopes; call it while the capture is under way."""
        if self._stream is None:
            return None
        graph, _ = capture_frontier(self._stream)
        return from_cuda(graph, self._places_of_nodes)

    def inputs(self) -> list[KnownStorage]:
        """List the tensors from outside that the capture reads."""
        found: dict[int, KnownStorage] = {}
        for operation in self.operations:
            touched = [self.storages[i] for i in (*operation.reads, *operation.writes)]
            if any(known.device_type == "cuda" for known in touched):  # it ran on the GPU
                # A 0-d CPU tensor enters a kernel as a constant; a larger one can only be the
                # pinned source of a copy, which a replay reads again.
                found |= {
                    i: known
                    for i, known in zip(operation.reads, touched, strict=False)
                    if not known.born and (known.device_type == "cuda" or not known.scalar)
                }
        return list(found.values())


def _checked_replay(
    inputs: Sequence[KnownStorage], pool: PoolHandle, replay: Callable[[], None]
) -> None:
    refuse_dead_inputs([k for k in inputs if not k.is_alive and not _holds(pool, k.address or 0)])
    replay()


def _holds(pool: PoolHandle, address: int) -> bool:
    """Return whether memory is still the pool's: an earlier graph of the pool refills it.

    The tensor may be gone and its block be free for later captures. Graphs of one pool replay in
    the order of their capture, so that the earlier graph has written the memory again.
    """
    # All pools are listed and ours chosen here: given the handle of a pool, torch 2.11 takes a
    # reference away from its numbers, and those above 256 are then freed while in use.
    segments: list[dict[str, Any]] = torch.cuda.memory_snapshot()
    return any(
        segment["address"] <= address < segment["address"] + segment["total_size"]
        for segment in segments
        if tuple(segment["segment_pool_id"]) == pool
    )


def _explained(error: BaseException) -> CaptureError:
    finder = CallSiteFinder()
    site = finder.of_exception(error)
    if not (site.line or site.in_backward):  # raised by the end of the capture, not by the body
        site = finder.here()
    reason = str(error).splitlines()[0]
    observed = f"{site.describe()} ({reason})" if site.line else f"{reason} at {site.describe()}"
    if "legacy stream depend on a capturing" in reason:
        return CaptureError(
            "A backward pass can be captured only if the AccumulateGrad nodes of the parameters "
            "belong to the capture stream.",
            observed,
            "delete or detach the tensors of an earlier autograd graph (del loss, output), which "
            "keep such nodes, and fetch nodes that you keep when training has begun; or use torch "
            "2.13 or newer",
        )
    return CaptureError(NOT_RECORDED.rule, observed, known_remedy(error, NOT_RECORDED.remedy))


def _ordered(device: torch.device, stream: torch.cuda.Stream) -> AbstractContextManager[None]:
    """Order the work of this thread, on a stream of its own, with what other threads do.

    These use the default stream, as this one without graphs: what they are handed is ready there,
    such as the tensors that Lightning's AsyncCheckpointIO writes. Here that stream waits where this
    thread hands over, and this one's where it takes. Processes that are forked meanwhile, such as
    workers of a loader, inherit these methods, and have no CUDA.
    """
    default, process = torch.cuda.default_stream(device), os.getpid()

    def member(owner: type, name: str, *, takes: bool) -> Member:
        own = getattr(owner, name)

        def call(_: object, *args: Any, **kwargs: Any) -> Any:
            if os.getpid() != process or torch.cuda.is_current_stream_capturing():
                return own(*args, **kwargs)
            if not takes:
                default.wait_stream(stream)
            returned = own(*args, **kwargs)
            if takes:
                stream.wait_stream(default)
            return returned

        return owner, name, standing_in(own, call, _is_of_others)

    takes, gives = (functools.partial(member, takes=is_so) for is_so in (True, False))
    return exchanged([*(takes(*each) for each in _TAKING), *(gives(*each) for each in _GIVING)])


def _is_of_others(frame: FrameType) -> bool:
    """Return whether other code than this package's waits or wakes: it may do so amid a failure."""
    asking = outside_of(frame, "threading", "queue", "concurrent.")
    return not asking.f_globals.get("__name__", "").startswith(OURS)


_GIVING = (Thread, "start"), (Condition, "notify"), (ThreadPoolExecutor, "submit")
_TAKING = (
    *((Condition, "wait"), (Event, "wait"), (Semaphore, "acquire"), (Thread, "join")),
    *((Queue, "get"), (Future, "result")),
)
"""Methods by which a thread hands over to another one, and takes from it."""


@contextlib.contextmanager
def joined_stream(
    device: torch.device, stream: torch.cuda.Stream | None
) -> Iterator[torch.cuda.Stream]:
    """Make ``stream``, or a new one, the current stream, with waits on both ends."""
    before = torch.cuda.current_stream(device)
    stream = stream or torch.cuda.Stream(device)
    stream.wait_stream(before)
    with torch.cuda.device(device):  # a stream that is set makes its device the current one
        torch.cuda.set_stream(stream)
        try:
            # Inside of a fit its stream may be the current one already
            with contextlib.nullcontext() if stream == before else _ordered(device, stream):
                yield stream
        finally:
            torch.cuda.set_stream(before)
            before.wait_stream(stream)
