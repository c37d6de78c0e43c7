"""The emulated backend: a CPU that captures and replays operators, and undoes their writes.

It proves semantics: what a capture records, what a replay computes, what CUDA would refuse. It
never proves speed, nor that a kernel is legal to capture.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, UntypedStorage
from torch._ops import OpOverload
from torch.autograd.graph import Node
from torch.nn import functional

from lightning_graphs.device.host_memory import copies_between, given_on_host, is_of_host
from lightning_graphs.device.inspect import GraphInfo, from_recording
from lightning_graphs.device.rules import (
    CLASSES,
    COMPILED,
    MOVED_STORAGE,
    MOVES_STORAGE,
    SET_GENERATOR,
    Obstacle,
    know_cause,
)
from lightning_graphs.device.trace import (
    KnownStorage,
    Operation,
    OperatorCall,
    OperatorMode,
    Recorder,
    dispatches,
    is_collective,
    mapped,
    only_views,
    refuse_dead_inputs,
    tensors_in,
    wait_for,
    written_arguments,
)
from lightning_graphs.errors import CaptureError, ReplayError, UnsupportedError
from lightning_graphs.private.callsite import CallSite
from lightning_graphs.private.engine import current_autograd_node, saved_tensors_hooks
from lightning_graphs.private.exchange import dispatch_modes
from lightning_graphs.private.torch import (
    PoolHandle,
    announced_as_cuda_capture,
    dispatched_directly,
    has_memory,
    memory_of,
    out_of_sight,
)
from lightning_graphs.values.memory import bytes_of

# ------------------ What is written


def _put_back(storage: UntypedStorage, value: UntypedStorage) -> None:
    """Write a value back; a storage that an ``out=`` made larger stays so, as do its tensors."""
    if storage.nbytes() < value.nbytes():
        storage.resize_(value.nbytes())
    bytes_of(storage)[: value.nbytes()].copy_(bytes_of(value))


class Effect(enum.Enum):
    """What an operator does to memory, as its schema says."""

    WRITES = enum.auto()
    MAKES = enum.auto()
    VIEWS = enum.auto()


def effect_of(func: object) -> Effect:
    """Return what an operator does to memory; of those of a higher order nothing is known."""
    if not isinstance(func, OpOverload) or written_arguments(func):
        return Effect.WRITES
    returns = func._schema.returns
    is_view = bool(returns) and all(one.alias_info is not None for one in returns)
    return Effect.VIEWS if is_view else Effect.MAKES


_KNOWN: dict[int, tuple[Effect, object]] = {}
"""What each operator does, and itself, by its ``id``: its hash is a function of Python."""


@dispatched_directly
class WriteWatch(OperatorMode):
    """Watches which storages from before its entry code writes, and can undo that.

    A dispatch mode changes formulas of torch, and compiled code runs eagerly under one, so that
    results may have other bits. It takes no notes of operators, which would take longer than these.

    Args:
        left_out: Addresses of storages that are saved elsewhere.
    """

    sees_functions = False

    def __init__(self, left_out: Collection[int]) -> None:
        super().__init__()
        self._left_out = left_out
        self.packs = False  # code packs what autograd saves, and unpacks it in a backward pass
        self._made: set[int] = set()  # inside of the body; none from before can be among them
        self._saved: dict[int, tuple[UntypedStorage, UntypedStorage]] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        effect, _ = _KNOWN.get(id(func)) or _KNOWN.setdefault(id(func), (effect_of(func), func))
        if saved_tensors_hooks() is not None:
            self.packs = True
        if effect is Effect.WRITES or (types and any(map(dispatches, types))):
            return super().__torch_dispatch__(func, types, args, kwargs)
        result = func(*args, **kwargs) if kwargs else func(*args)
        if effect is Effect.VIEWS:
            return result
        made = self._made
        for tensor in (result,) if isinstance(result, Tensor) else tensors_in(result):
            if tensor.layout is not torch.strided or (key := memory_of(tensor)) in made:
                continue
            # Unless it is that of an input: schemas do not tell of all views
            if not _is_memory_of(key, args) and not (
                kwargs and _is_memory_of(key, kwargs.values())
            ):
                made.add(key)
        return result

    @staticmethod
    def pausable() -> WriteWatch | None:
        """Return the watch that surrounds this code, if it is the only mode."""
        modes = dispatch_modes()
        return modes[0] if len(modes) == 1 and isinstance(modes[0], WriteWatch) else None

    def takes_other_formula(self, node: Node) -> None:
        """Accept it: that formula reads nothing on the host, and writes equal storages."""

    def leave_out(self, tensors: Iterable[Tensor]) -> None:
        """Do not save what code out of sight has made, or what is saved elsewhere."""
        self._made.update(map(memory_of, filter(has_memory, tensors)))

    def operator(self, call: OperatorCall) -> Any:
        if any(map(dispatches, {*map(type, call.inputs)})):
            return NotImplemented  # a subclass unwraps itself; the operators on its parts are seen
        for tensor in filter(has_memory, call.written):
            self._save(tensor)
        result = call.run()
        if result is not None and not only_views(call.func):
            returned = set(map(memory_of, filter(has_memory, tensors_in(result))))
            self._made |= returned.difference(map(memory_of, filter(has_memory, call.inputs)))
        return result

    def _save(self, tensor: Tensor) -> None:
        key, storage = memory_of(tensor), tensor.untyped_storage()
        is_known = key in self._made or key in self._saved
        if is_known or storage.data_ptr() in self._left_out:
            return
        with out_of_sight():  # of functions that are traced while captured, as by ``linearize``
            # A GPU's allocator may be giving out memory of a graph, which its replay overwrites
            self._saved[key] = storage, storage.cpu() if storage.is_cuda else storage.clone()

    def restore(self) -> None:
        """Restore the value of every written storage; may be called again."""
        # Backwards: where two storages share memory, the first one saved has the oldest value.
        for storage, value in reversed(self._saved.values()):
            if storage.nbytes():  # its memory was not let go of
                _put_back(storage, value)

    def found(self) -> list[UntypedStorage]:
        """Return the storages that it has copied."""
        return [storage for storage, _ in self._saved.values()]


def _is_memory_of(key: int, arguments: Iterable[Any]) -> bool:
    """Return whether a tensor in these arguments has this storage."""
    for given in arguments:
        if isinstance(given, Tensor):
            if given.layout is torch.strided and memory_of(given) == key:
                return True
        elif isinstance(given, (list, tuple)) and _is_memory_of(key, given):
            return True
    return False


# ------------------ The CPU backend

aten = torch.ops.aten

_NO_KERNEL = ("aten.empty", "aten.new_empty")
"""Allocations: on CUDA they launch nothing, so a replay leaves their memory as it is."""


class _Geometry(NamedTuple):
    """The geometry of a tensor over its storage."""

    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]
    conj: bool
    neg: bool

    @classmethod
    def of(cls, tensor: Tensor) -> _Geometry:
        offset, stride = int(tensor.storage_offset()), tensor.stride()
        return cls(tensor.dtype, offset, tensor.shape, stride, tensor.is_conj(), tensor.is_neg())

    def over(self, storage: UntypedStorage) -> Tensor:
        """Make a tensor over a storage that shares only memory with the original.

        It has a version counter of its own, as a replay leaves autograd's counters alone, and is no
        inference tensor, which could not be written outside of inference mode.
        """
        with torch.inference_mode(False):
            tensor = torch.empty(0, dtype=self.dtype, device=storage.device)
            tensor.set_(storage, self.offset, self.size, self.stride)
            if self.conj:
                tensor = tensor.conj()
            return torch._neg_view(tensor) if self.neg else tensor


def _own_view(tensor: Tensor) -> Tensor:
    return _Geometry.of(tensor).over(tensor.untyped_storage())


@dataclass(frozen=True, slots=True)
class _ExternalTensor:
    """A tensor over a storage from before the capture: weakly held, as by a CUDA graph."""

    storage: KnownStorage
    geometry: _Geometry

    def resolve(self) -> Tensor:
        storage = self.storage.storage()
        self.storage.note_release()
        if storage is None or self.storage.address not in (None, storage.data_ptr()):
            refuse_dead_inputs([self.storage])
        assert storage is not None
        return self.geometry.over(storage)


def _resolve(value: Any) -> Any:
    if isinstance(value, _ExternalTensor):
        return value.resolve()
    return [_resolve(v) for v in value] if isinstance(value, list) else value


def _fill_with_sentinel(storage: UntypedStorage, dtype: torch.dtype) -> None:
    # A tensor of its own over the storage: the version counters of the user's tensors stay.
    view = torch.empty(0, dtype=dtype, device=storage.device).set_(storage)
    if dtype.is_floating_point or dtype.is_complex:
        view.fill_(float("nan"))
    elif dtype is torch.bool:
        view.fill_(True)
    else:
        view.fill_(torch.iinfo(dtype).min if dtype.is_signed else torch.iinfo(dtype).max)


class Recording:
    """Operators in order, and the storages that were born with them."""

    def __init__(
        self, operations: list[Operation], born: Sequence[tuple[UntypedStorage, torch.dtype]]
    ) -> None:
        self.operations = operations
        # Those that launch work
        self.launched = [o for o in operations if not o.name.startswith(_NO_KERNEL)]
        self._born = born
        self._hidden: list[UntypedStorage] = []

    def poison(self) -> None:
        """Overwrite what the capture computed, so that a missing replay shows."""
        self._hidden = [storage.clone() for storage, _ in self._born]
        for storage, dtype in self._born:
            _fill_with_sentinel(storage, dtype)

    def reveal(self) -> None:
        for (storage, _), value in zip(self._born, self._hidden, strict=False):
            storage.copy_(value)

    def run(self) -> None:
        """Execute every operator once and write its results into the recorded storages."""
        with torch.inference_mode(False), torch.autocast("cpu", enabled=False):
            for operation in self.launched:
                with torch.set_grad_enabled(operation.grad_mode):
                    result = operation.func(
                        *[_resolve(a) for a in operation.args],
                        **{k: _resolve(v) for k, v in operation.kwargs.items()},
                    )
                if is_collective(operation.func):
                    wait_for(result)
                if operation.result is not None:
                    _write_back(operation, result)
        self._hidden = []  # there are real values from now on


def _write_back(operation: Operation, result: Any) -> None:
    for recorded, computed in zip(tensors_in(operation.result), tensors_in(result), strict=True):
        if recorded.shape != computed.shape:
            raise ReplayError(
                "A replayed operator must return the shapes that it returned at capture.",
                f"{operation.name} at {operation.site}: {tuple(recorded.shape)} -> "
                f"{tuple(computed.shape)}",
                "keep shapes independent of values inside the captured code",
            )
        if recorded.data_ptr() != computed.data_ptr():
            recorded.copy_(computed)


_OF_LARGEST = ("MaxBackward1", "MinBackward1", "MedianBackward0", "NanmedianBackward0")


def _spreads_evenly(node: object) -> bool:
    """Return whether a backward pass spreads a gradient evenly over all largest values.

    On a CPU it fills the share in. Under a mode, and on CUDA, it multiplies the share by a mask,
    which makes negative zeros and NaN: ``evenly_distribute_backward`` in
    torch/csrc/autograd/FunctionsManual.cpp.
    """
    return type(node).__name__ in _OF_LARGEST


# ------------------ Captures that are undone


def _one_hot(tensor: Tensor, num_classes: int = -1) -> Tensor:
    # With a number of classes, a GPU's kernels look for themselves whether it is large enough; see
    # ``one_hot`` in aten/src/ATen/native/Onehot.cpp.
    if num_classes < 0:
        return functional.one_hot(tensor, num_classes)
    zeros = tensor.new_zeros((*tensor.shape, num_classes))
    return zeros.scatter_(-1, tensor.unsqueeze(-1), 1)


def _ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    # For a mean torch divides by a table of lengths, which it writes out of the dispatcher's sight.
    means = reduction == "mean" and not isinstance(target_lengths, Tensor)
    given = (log_probs, targets, input_lengths, target_lengths, blank)
    losses = functional.ctc_loss(*given, "none" if means else reduction, zero_infinity)
    if not means:
        return losses
    return (losses / torch.stack([losses.new_full((), max(1, n)) for n in target_lengths])).mean()


REHEARSED: Mapping[Any, Callable[..., Any]] = {
    functional.one_hot: _one_hot,
    functional.ctc_loss: _ctc_loss,
}
"""Functions that read values on a CPU only, and what a rehearsal runs in their place."""

know_cause(f"{__name__.replace('.', '/')}.py", "_one_hot", CLASSES)


class UndoneCapture(Recorder):
    """Recorder of a capture that runs, refuses what CUDA does, and undoes writes; it keeps nothing.

    It copies memory from before its entry ahead of the first write to it.
    """

    is_rehearsal = True  # of what a GPU captures; else the GPU may capture more
    instead = REHEARSED

    def __init__(self, generators: Sequence[torch.Generator]) -> None:
        super().__init__(generators)
        self._saved: dict[int, tuple[UntypedStorage, UntypedStorage]] = {}
        self._drawn: dict[torch.Generator, Tensor] = {}  # states of those that are not registered

    @out_of_sight()  # of a function that is traced while it is captured, as ``linearize`` does
    def before_write(self, tensor: Tensor, known: KnownStorage) -> None:
        if not known.born and known.id not in self._saved:
            storage = tensor.untyped_storage()
            self._saved[known.id] = storage, storage.clone()

    def restore(self) -> None:
        """Restore the value of every written storage; may be called again."""
        for generator, state in self._drawn.items():
            generator.set_state(state)
        for known in self.storages:
            known.note_release()
        # Backwards: where two storages share memory, the first one saved has the oldest value.
        for key, (storage, value) in reversed(self._saved.items()):
            if self.storages[key].address is not None:
                _put_back(storage, value)

    def call(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        result = super().call(func, args, kwargs)
        is_one = isinstance(result, Tensor) and not dispatches(type(result)) and has_memory(result)
        if is_one and self.is_rehearsal:
            on_host = given_on_host(getattr(func, "__name__", ""), args, kwargs)
            if on_host is not None:
                self.know(result).on_host = on_host
        return result

    def _run(self, call: OperatorCall) -> Any:
        result = super()._run(call)
        if is_of_host(call, self.know):
            for tensor in filter(has_memory, tensors_in(result)):
                self.know(tensor, born=True).on_host = True
        for known in map(self.know, call.written):
            if known.id in self._saved:
                storage, value = self._saved[known.id]
                if storage.nbytes() != value.nbytes():
                    self.refuse(str(call.func), MOVED_STORAGE)
        return result

    def refuse(self, operator: str, obstacle: Obstacle, site: CallSite | None = None) -> None:
        """Refuse what a capture cannot contain, and what a rehearsal cannot, if it is one.

        Compiled code runs eagerly under a dispatch mode, and so in full sight.
        """
        if self.is_rehearsal or not (obstacle.rehearsal or obstacle is COMPILED):
            super().refuse(operator, obstacle, site)

    def _check(self, call: OperatorCall) -> None:
        generator = call.kwargs.get("generator")
        if isinstance(generator, torch.Generator) and generator not in self._generators:
            self._drawn.setdefault(generator, generator.get_state())
        # As cuDNN's layers do; a rehearsal cannot follow that
        moves_own = call.func.overloadpacket in MOVES_STORAGE and not self.is_rehearsal
        if not (moves_own and all(self.know(tensor).born for tensor in call.written)):
            super()._check(call)
        if (obstacle := copies_between(call, self.know)) is not None:
            self.refuse(str(call.func), obstacle)

    @out_of_sight()
    def refuse_rewound(self) -> None:
        """Refuse generators that were set behind the last draw: the next step would draw again."""
        drawn_at = self._drawn_at
        if drawn_at is not None and not all(map(torch.equal, self._states(), self._as_left)):
            self.refuse("a draw", SET_GENERATOR, drawn_at)

    def keep(self, operation: Operation) -> None:
        """Keep the names of collectives alone."""
        if is_collective(operation.func):
            super().keep(operation)

    def finish(self) -> Recording:
        """Restore every storage that existed before the capture."""
        self.restore()
        self._saved.clear()
        return Recording(self.operations, [])


class RecordingCapture(UndoneCapture):
    """Recorder of a capture: records operations for replays."""

    def __init__(self, generators: Sequence[torch.Generator]) -> None:
        super().__init__(generators)
        self._born: dict[int, tuple[UntypedStorage, torch.dtype]] = {}

    def operator(self, call: OperatorCall) -> Any:
        if call.func is aten.mul.Tensor and _spreads_evenly(current_autograd_node()):
            call = OperatorCall(aten.where.ScalarOther, (*call.args, 0), {})
        return super().operator(call)

    @out_of_sight()
    def keep(self, operation: Operation) -> None:
        for tensor in tensors_in(operation.result):
            known = self.know(tensor)
            if known.born:
                self._born.setdefault(known.id, (tensor.untyped_storage(), tensor.dtype))
        operation.args = tuple(mapped(a, self._reference) for a in operation.args)
        operation.kwargs = {k: mapped(v, self._reference) for k, v in operation.kwargs.items()}
        operation.result = mapped(operation.result, _own_view)
        self.operations.append(operation)

    def _reference(self, tensor: Tensor) -> Tensor | _ExternalTensor:
        if not has_memory(tensor):
            return tensor.detach()
        known = self.know(tensor)
        if known.born:
            return _own_view(tensor)
        return _ExternalTensor(known, _Geometry.of(tensor))

    def finish(self) -> Recording:
        super().finish()
        return Recording(self.operations, [*self._born.values()])


class EmulatedBackend:
    """Captures and replays on the CPU, in the calling thread."""

    name: Literal["emulated"] = "emulated"
    device_type = "cpu"
    capture: type[UndoneCapture] = RecordingCapture
    generators: Sequence[torch.Generator] = (torch.default_generator,)
    """Those that operators of a capture may draw from."""

    def __init__(self) -> None:
        self._pools = itertools.count(1)
        self.unreplayed: weakref.WeakSet[Recording] = weakref.WeakSet()

    def new_graph(self, keep_graph: bool) -> EmulatedGraph:
        return EmulatedGraph(self)

    def new_pool(self) -> PoolHandle:
        return (0, next(self._pools))

    def default_capture_stream(self, last: torch.cuda.Stream | None) -> None:
        """Return None: a CPU has no streams."""

    def capture_stream(self, stream: torch.cuda.Stream | None) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def side_stream(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def prepare_capture(self, *, keeps_cache: bool = False) -> None:
        """Do nothing: CPU memory needs no preparation."""

    def synchronize(self) -> None:
        """Do nothing: a CPU computes at once."""

    def refusal(self, error: BaseException | None) -> None:
        """Return None: the recorder has already refused."""

    def is_capturing(self) -> bool:
        return any(isinstance(mode, UndoneCapture) for mode in dispatch_modes())

    @contextlib.contextmanager
    def revealed(self) -> Iterator[None]:
        """Show the values of earlier captures while a capture runs.

        On CUDA nothing executes during a capture. Here it does, and sentinel values would lead
        integer indices out of bounds.
        """
        hidden = list(self.unreplayed)
        for recording in hidden:
            recording.reveal()
        try:
            yield
        finally:
            for recording in hidden:
                recording.poison()


class _CaptureOfGPU(UndoneCapture):
    is_rehearsal = False


class UndoingBackend(EmulatedBackend):
    """Runs what is captured on a CPU or a GPU, and undoes it: there is nothing to replay."""

    def __init__(self, device: torch.device, *, is_rehearsal: bool) -> None:
        super().__init__()
        self.device_type = device.type
        self.capture = UndoneCapture if is_rehearsal else _CaptureOfGPU
        if device.type == "cuda":
            own = torch.cuda.default_generators[device.index or 0]
            self.generators = (torch.default_generator, own)


_captures = itertools.count(2**41)  # seeds that no program gives


class EmulatedGraph:
    """A recording: template and executable graph in one."""

    dropout = None  # on a CPU recurrent layers draw from torch's generator

    def __init__(self, backend: EmulatedBackend) -> None:
        self.recording: Recording | None = None
        self._backend = backend
        self._generators: list[torch.Generator] = []
        self._pool: PoolHandle | None = None
        self._capture: UndoneCapture | None = None
        self._around = contextlib.ExitStack()

    def capture_begin(
        self, pool: PoolHandle | None, mode: str, annotate: bool, check_liveness: bool
    ) -> None:
        # Annotations and input liveness cost nothing here: a recording always knows both.
        self._pool = pool if pool is not None else self._backend.new_pool()
        generators = [*self._backend.generators, *self._generators]
        try:
            for generator in generators:  # code that rewinds one to another capture's state is seen
                self._around.callback(generator.set_state, generator.get_state())
                generator.manual_seed(next(_captures))
            self._around.enter_context(self._backend.revealed())
            self._around.enter_context(announced_as_cuda_capture())
            self._capture = self._backend.capture(generators)
            self._capture.__enter__()
        except BaseException:
            if not self._backend.is_capturing():  # interrupted before it began
                self._around.close()
            raise

    def _leave_capture(self, capture: UndoneCapture) -> Recording:
        self._capture = None
        with self._around:
            capture.__exit__(None, None, None)
            return capture.finish()

    def capture_end(self) -> None:
        capture = self._capture
        assert capture is not None
        capture.refuse_rewound()
        recording = self.recording = self._leave_capture(capture)
        if not recording.operations:
            warnings.warn(
                "The CUDA Graph is empty. This usually means that the graph was attempted to be "
                "captured on wrong device or stream.",
                stacklevel=3,
            )
        recording.poison()
        capture.refuse_what_was_refused()
        self._backend.unreplayed.add(recording)

    def abandon(self) -> None:
        if self._capture is not None:  # on CUDA nothing of it was computed
            self._leave_capture(self._capture).poison()
        self.reset()

    def instantiate(self) -> None:
        """Do nothing: a recording is executable."""

    def replay(self) -> None:
        if self._backend.is_capturing():
            raise CaptureError(
                "A capture cannot contain a replay.",
                "replay() was called while this thread is capturing",
                "call replay() before or after the capture, or call the captured code itself",
            )
        assert self.recording is not None
        self.recording.run()
        self._backend.unreplayed.discard(self.recording)

    def reset(self) -> None:
        self.recording = self._pool = None

    def pool(self) -> PoolHandle:
        assert self._pool is not None
        return self._pool

    def keep_template(self) -> None:
        """Do nothing: a recording is its own template."""

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

    def get_graph_data(self) -> dict[str, Any]:
        return self.inspection().as_graph_data()

    def register_generator_state(self, generator: torch.Generator) -> None:
        self._generators.append(generator)

    @property
    def has_collectives(self) -> bool:
        assert self.recording is not None
        return any(is_collective(operation.func) for operation in self.recording.operations)

    def node_counts(self) -> Mapping[str, int]:
        return self.inspection().counts

    def inspection(self) -> GraphInfo:
        assert self.recording is not None
        return from_recording(self.recording.launched)
