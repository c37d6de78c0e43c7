"""CPU backend: replays a recording into the recorded storages.

It proves semantics: what a capture records, what a replay computes, what CUDA would refuse. It
never proves speed, nor that a kernel is legal to capture.
"""

from __future__ import annotations

import contextlib
import itertools
import warnings
import weakref
from collections.abc import Iterator
from typing import Literal

import torch

from lightning_graphs.core.backend import Backend, CapturedGraph, PoolHandle
from lightning_graphs.core.inspect import GraphInfo, from_recording
from lightning_graphs.core.recording import GraphMemory, Recording, RecordingCapture
from lightning_graphs.core.torch_private import announced_as_cuda_capture, dispatch_modes
from lightning_graphs.errors import CaptureError, UnsupportedError


class EmulatedBackend(Backend):
    """Captures and replays on the CPU, in the calling thread."""

    name: Literal["emulated"] = "emulated"
    device_type: Literal["cpu"] = "cpu"

    def __init__(self) -> None:
        self._pools = itertools.count(1)
        self._unreplayed: weakref.WeakSet[GraphMemory] = weakref.WeakSet()

    def new_graph(self, keep_graph: bool) -> CapturedGraph:
        return EmulatedGraph(self, keep_graph)

    def new_pool(self) -> PoolHandle:
        return (0, next(self._pools))

    def is_capturing(self) -> bool:
        return any(isinstance(mode, RecordingCapture) for mode in dispatch_modes())

    def poison(self, memory: GraphMemory) -> None:
        """Hide what a capture computed until the first replay computes it for real."""
        memory.poison()
        self._unreplayed.add(memory)

    def replayed(self, memory: GraphMemory) -> None:
        """The memory holds real values from now on."""
        memory.forget_hidden()
        self._unreplayed.discard(memory)

    @contextlib.contextmanager
    def revealed(self) -> Iterator[None]:
        """While a capture runs, earlier captures show the values that they computed.

        On CUDA nothing executes during a capture, so a backward pass may be captured over
        activations that no replay has filled yet. Here it executes, and sentinel values would lead
        integer indices out of bounds.
        """
        hidden = list(self._unreplayed)
        for memory in hidden:
            memory.reveal()
        try:
            yield
        finally:
            for memory in hidden:
                memory.poison()


_captures = itertools.count()


class EmulatedGraph(CapturedGraph):
    """A recording and, once instantiated, the list of operators that a replay runs.

    Attributes:
        recording: The template: edits of its operations take effect at the next
            :meth:`instantiate`. None before the capture, and where it is not kept.
    """

    def __init__(self, backend: EmulatedBackend, keep_graph: bool) -> None:
        self.recording: Recording | None = None
        self._backend = backend
        self._keep_graph = keep_graph
        self._generators: list[torch.Generator] = []
        self._pool: PoolHandle | None = None
        self._capture: RecordingCapture | None = None
        self._revealed = contextlib.ExitStack()
        self._rng: list[tuple[torch.Generator, torch.Tensor]] = []
        self._executable: Recording | None = None

    def capture_begin(
        self,
        pool: PoolHandle | None,
        capture_error_mode: str,
        *,
        annotate: bool,
        check_input_liveness: bool,
    ) -> None:
        # Annotations and input liveness cost nothing here: a recording always knows both.
        self._pool = pool if pool is not None else self._backend.new_pool()
        generators = [torch.default_generator, *self._generators]
        self._rng = [(generator, generator.get_state()) for generator in generators]
        self._revealed = contextlib.ExitStack()
        try:
            for generator in generators:  # who rewinds one to where another capture was is seen
                generator.manual_seed(next(_captures))
            self._revealed.enter_context(self._backend.revealed())
            self._revealed.enter_context(announced_as_cuda_capture())
            self._capture = RecordingCapture(generators)
            self._capture.__enter__()
        except BaseException:
            if not self._backend.is_capturing():  # interrupted before it began
                self._revealed.close()
                self._restore_generators()
            raise

    def _leave_capture(self, capture: RecordingCapture) -> Recording:
        self._capture = None
        with self._revealed:
            capture.__exit__(None, None, None)
            capture.restore_world()
            self._restore_generators()
        return capture.finish()

    def _restore_generators(self) -> None:
        for generator, state in self._rng:
            generator.set_state(state)

    def capture_end(self) -> None:
        assert self._capture is not None
        recording = self.recording = self._leave_capture(self._capture)
        if not recording.operations:
            warnings.warn(
                "The CUDA Graph is empty. This usually means that the graph was attempted to be "
                "captured on wrong device or stream.",
                stacklevel=3,
            )
        self._backend.poison(recording.memory)
        if not self._keep_graph:
            self.instantiate()
            self.recording = None

    def abandon(self) -> None:
        if self._capture is not None:  # on CUDA nothing of it was computed
            self._leave_capture(self._capture).memory.poison()
        self.reset()

    def instantiate(self) -> None:
        assert self.recording is not None
        self._executable = self.recording.snapshot()

    def replay(self) -> None:
        if self._backend.is_capturing():
            raise CaptureError(
                "A replay cannot be part of a capture.",
                "replay() was called while this thread is capturing",
                "replay before or after it, or call the captured code itself",
            )
        if self._executable is None:
            self.instantiate()
        assert self._executable is not None
        self._executable.run()
        self._backend.replayed(self._executable.memory)

    def reset(self) -> None:
        self.recording = self._executable = self._pool = None

    def pool(self) -> PoolHandle:
        assert self._pool is not None
        return self._pool

    def keep_template(self) -> None:
        self._keep_graph = True

    def debug_dump(self, debug_path: str) -> None:
        with open(debug_path, "w", encoding="utf-8") as file:
            info = self.inspection()
            nodes = [f'n{node.index} [label="{node.name}"];' for node in info.nodes]
            edges = [f"n{before} -> n{after};" for before, after in info.edges]
            file.write("\n".join(["digraph {", *nodes, *edges, "}"]) + "\n")

    def raw_cuda_graph(self) -> int:
        raise UnsupportedError(
            "The emulated backend has neither cudaGraph_t nor cudaGraphExec_t.",
            "a raw handle was asked for on backend='emulated'",
            "use lightning_graphs.core.inspect, which reads both backends",
        )

    raw_cuda_graph_exec = raw_cuda_graph

    def register_generator_state(self, generator: torch.Generator) -> None:
        self._generators.append(generator)

    def inspection(self) -> GraphInfo:
        recording = self.recording or self._executable
        assert recording is not None
        return from_recording(recording.launched())
