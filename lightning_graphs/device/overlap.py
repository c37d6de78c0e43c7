"""Captures a step with two streams, where one that is not kept has shown its data flow.

All that both captures see must be equal, operator by operator. What is not a plain operator on this
device's tensors, or launches work unseen by torch's dispatcher, leaves the step a chain.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, UntypedStorage
from torch._ops import OpOverload
from torch.autograd.graph import Node
from torch.nn import Parameter

from lightning_graphs.device.emulated import RecordingCapture
from lightning_graphs.device.inspect import GraphInfo, GraphNode, capture_frontier, short_name
from lightning_graphs.device.schedule import MAIN, SIDE, UPDATE, Schedule, Work, WorkPart, schedule
from lightning_graphs.device.trace import (
    Operation,
    OperatorCall,
    OperatorMode,
    dispatches,
    is_collective,
    tensors_in,
)
from lightning_graphs.errors import GraphError
from lightning_graphs.private.engine import current_autograd_node
from lightning_graphs.private.exchange import dispatch_modes
from lightning_graphs.private.torch import has_memory

aten = torch.ops.aten

_PARTED = {aten.convolution_backward.default: 10}
"""Operators that compute gradients of the input and of the parameters by kernels of their own, and
which argument tells those that are wanted.

That of `LayerNorm` is no such one: its kernels are short, and each wait takes time (H200, one step
in three streams: ViT 4.32 ms, and 4.84 with it, BERT 6.86 and 7.24, GPT-2 4.12 and 4.09).
"""

_BY_TENSOR = ("aten::_fused_adam_", "aten::_fused_adamw_", "aten::_fused_sgd_")
"""Operators whose kernel treats each tensor of their lists by itself, element by element."""

_CAST_AT_ONCE = 2**26
"""Bytes of short copies of weights that are made together, in the order of their use: more than
caches hold, and little memory. All at once take as long (H100: `docs/performance.md`)."""

_KNOWN = ("aten", "prims")
"""Namespaces whose operators read and write what their schemas say."""


# ------------------ Streams


class CudaStreams:
    """The current stream, and others beside it."""

    # Two for each device: cuBLAS keeps memory for each stream
    _beside: ClassVar[dict[int, tuple[torch.cuda.Stream, ...]]] = {}

    def __init__(self) -> None:
        self._main = torch.cuda.current_stream()
        device = self._main.device_index
        if device not in self._beside:
            self._beside[device] = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._all = self._main, *self._beside[device]
        self._events: dict[int, torch.cuda.Event] = {}
        self._forked: set[int] = set()

    def nodes(self) -> int:
        """Count the nodes of the graph under capture."""
        return capture_frontier(self._main.cuda_stream)[1]

    def is_foreign(self) -> bool:
        """Whether user code has made another stream current."""
        return torch.cuda.current_stream().cuda_stream != self._main.cuda_stream

    def wait(self, stream: int, work: int) -> None:
        """Let a stream wait for a work of another one that was marked."""
        self._all[stream].wait_event(self._events[work])
        self._forked.add(stream)

    def mark(self, stream: int, work: int) -> None:
        """Mark the end of a work."""
        event = self._events[work] = torch.cuda.Event()
        event.record(self._all[stream])

    @contextlib.contextmanager
    def on(self, stream: int, work: int) -> Iterator[None]:
        """Launch the body, a work, on a stream."""
        if stream == MAIN:
            yield
            return
        if stream not in self._forked:
            self._all[stream].wait_stream(self._main)
            self._forked.add(stream)
        with torch.cuda.stream(self._all[stream]):
            yield

    def join(self) -> None:
        """Let the main stream wait for all work beside it."""
        for stream in self._forked - {MAIN}:
            self._main.wait_stream(self._all[stream])


class EmulatedStreams:
    """Orders operations as unlike the chain as waits allow.

    Updates run as early as they may, and gradients of weights as late.
    """

    def __init__(self, capture: RecordingCapture) -> None:
        self._operations = capture.operations
        self._queues: tuple[list[tuple[int, list[Operation]]], ...] = ([], [], [])
        self._waits: dict[int, list[int]] = {}  # of a work
        self._next: list[list[int]] = [[], [], []]  # of the next work on each stream
        self._begin = len(self._operations)

    def nodes(self) -> int:
        return len(self._operations)

    def is_foreign(self) -> bool:
        return False

    def wait(self, stream: int, work: int) -> None:
        self._next[stream].append(work)

    def mark(self, stream: int, work: int) -> None:
        """Do nothing: works have numbers."""

    @contextlib.contextmanager
    def on(self, stream: int, work: int) -> Iterator[None]:
        before = len(self._operations)
        yield
        self._waits[work], self._next[stream] = self._next[stream], []
        self._queues[stream].append((work, self._operations[before:]))

    def join(self) -> None:
        queues, done = [queue[::-1] for queue in self._queues], set[int]()
        ordered: list[Operation] = []
        while any(queues):
            for stream in (UPDATE, MAIN, SIDE):
                if queues[stream] and done.issuperset(self._waits[queues[stream][-1][0]]):
                    work, operations = queues[stream].pop()
                    done.add(work)
                    ordered += operations
                    break
        self._operations[self._begin : self._begin + len(ordered)] = ordered
        self._begin += len(ordered)
        self._queues = ([], [], [])


def streams_of_capture() -> CudaStreams | EmulatedStreams:
    """Return the streams of the capture that is under way on this thread."""
    for mode in dispatch_modes():
        if isinstance(mode, RecordingCapture):
            return EmulatedStreams(mode)
    return CudaStreams()


# ------------------ What a capture sees


@functools.cache
def _is_view(func: OpOverload) -> bool:
    """Whether an operator only gives memory another geometry."""
    returns = func._schema.returns
    kinds = [value.alias_info for value in returns]
    is_view = bool(kinds) and all(kind is not None and not kind.is_write for kind in kinds)
    return is_view or torch.Tag.inplace_view in func.tags or func._schema.name in _VIEWS


_VIEWS = ("aten::_unsafe_view", "aten::_reshape_alias", "aten::lift_fresh", "aten::alias")
_MOVES = ("aten::resize_", "aten::resize_as_", "aten::set_")


class SeenOperator(NamedTuple):
    """An operator that a capture has seen, with the numbers of storages; see :class:`Work`."""

    func: OpOverload
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    born: tuple[int, ...]


class _StorageUses(OperatorMode):
    """Sees the operators of a capture, and the storages that they use.

    Args:
        device_type: Of the tensors that count.
    """

    sees_functions = False

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self.why_not = ""  # why the step must stay a chain; empty if it need not
        self.device_type = device_type
        self._names: dict[int, int] = {}  # by address: of what was allocated there last
        self.sizes: list[int] = []  # bytes by name
        self._nodes = 0  # of the graph, behind the last operator
        self.ranges: list[range] = []  # the nodes of each operator

    def __enter__(self) -> Any:
        self._streams = streams_of_capture()
        try:
            self._nodes = self._streams.nodes()
        except GraphError as error:
            self.refuse(error.observed)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if not (error[0] or self.why_not) and self._streams.nodes() != self._nodes:
            self.refuse("after the last operator, work is launched that is no operator of torch")

    def refuse(self, why: str) -> None:
        self.why_not = self.why_not or why

    def takes_other_formula(self, node: Node) -> None:
        self.refuse("a backward pass takes another formula where operators are seen")

    def higher_order(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        self.refuse(f"{func} consists of others")
        return super().higher_order(func, args, kwargs)

    def operator(self, call: OperatorCall) -> Any:
        if self.why_not or _is_view(call.func) or not self._is_on_device(call):
            return call.run()
        if why := self._obstacle(call):
            self.refuse(why)
            return call.run()
        result = self.seen(call)
        if not self.why_not:
            before, self._nodes = self._nodes, self._streams.nodes()
            self.ranges.append(range(before, self._nodes))
        return result

    def seen(self, call: OperatorCall) -> Any:
        """Run an operator that launches work."""
        raise NotImplementedError

    def _is_on_device(self, call: OperatorCall) -> bool:
        if any(map(self._counts, call.inputs)):
            return True
        if call.func.namespace == "profiler":
            return False
        device = call.kwargs.get("device") or "cpu"  # of what it makes
        return torch.device(device).type == self.device_type

    def _counts(self, tensor: Tensor) -> bool:
        return tensor.device.type == self.device_type

    def _obstacle(self, call: OperatorCall) -> str:
        if any(dispatches(type(t)) or not has_memory(t) for t in call.inputs):
            return f"{call.func} is given a tensor of another kind"
        if is_collective(call.func):
            return f"{call.func} exchanges data between ranks"
        if call.func._schema.name in _MOVES:
            return f"{call.func} moves a tensor"
        if self._streams.is_foreign():
            return f"{call.func} runs on a stream of user code"
        if self._streams.nodes() != self._nodes:
            return f"ahead of {call.func} work is launched that is no operator of torch"
        return ""

    def name(self, tensor: Tensor, *, born: bool = False) -> int | None:
        """Return the number of a tensor's storage; None if no work could write it.

        Pinned memory has one: what is copied there is copied back by other work. A number on the
        host has none: it is read when its operator is captured.
        """
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if not address or not (self._counts(tensor) or tensor.dim()):
            return None
        if born or address not in self._names:
            self._names[address] = len(self.sizes)
            self.sizes.append(storage.nbytes())
        return self._names[address]

    def used(self, call: OperatorCall) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the names of what an operator reads, in place too, and of what it writes."""
        reads, writes = map(self.name, call.inputs), map(self.name, call.written)
        return (
            tuple(dict.fromkeys(n for n in reads if n is not None)),
            tuple(dict.fromkeys(n for n in writes if n is not None)),
        )

    def born(self, call: OperatorCall, result: Any) -> tuple[int, ...]:
        """Name the storages that an operator has made, in the order of its results."""
        known = {t.untyped_storage().data_ptr() for t in call.inputs}
        found: list[int] = []
        for tensor in filter(has_memory, tensors_in(result)):
            address = tensor.untyped_storage().data_ptr()
            name = None if address in known else self.name(tensor, born=True)
            known.add(address)
            if name is not None:
                found.append(name)
        return tuple(found)


class DataFlow(_StorageUses):
    """Records the data flow of a capture, which is not kept."""

    def __init__(self, device_type: str) -> None:
        super().__init__(device_type)
        self.operators: list[SeenOperator] = []
        # Weights with the type that they are cast to, by the number of the use
        self.casts: dict[int, tuple[Tensor, torch.dtype]] = {}
        self._works: list[Work] = []
        self._made: set[int] = set()  # names of what the step has written so far

    def seen(self, call: OperatorCall) -> Any:
        in_backward = current_autograd_node() is not None
        (reads, writes), wants = self.used(call), _parts_of(call)
        result = call.run()
        born = self.born(call, result)
        name, number = call.func._schema.name, len(self.operators)
        is_barrier = call.func.namespace not in _KNOWN
        self.operators.append(SeenOperator(call.func, reads, writes, born))
        if _is_cast(call, result) and not (in_backward or self._made.intersection(reads)):
            self.casts[number] = call.inputs[0], result.dtype
        self._made.update(writes, born)
        if is_barrier:
            self._made.update(reads)
        if not wants or len(born) != sum(wants) or is_barrier:
            work = Work(number, name, reads, writes, born, in_backward, is_barrier)
            if name in _BY_TENSOR:
                work.tensors = self._by_tensor(call)
            self._works.append(work)
            return result
        for part, names in ((WorkPart.FIRST, born[:1]), (WorkPart.REST, born[1:])):
            self._works.append(Work(number, name, reads, (), names, in_backward, part=part))
        return result

    def _by_tensor(self, call: OperatorCall) -> tuple[tuple[int, ...], ...]:
        """Name the storages of each tensor that is updated, and of what belongs to it."""
        lists = [value for value in call.args if isinstance(value, (list, tuple)) and value]
        found = [tuple(map(self.name, tensors)) for tensors in zip(*lists, strict=False)]
        names = [tuple(name for name in one if name is not None) for one in found]
        is_apart = len(set(itertools.chain(*names))) == sum(map(len, names))
        return tuple(names) if is_apart and len({*map(len, lists)}) == 1 else ()

    def schedule(self, room: int) -> Schedule:
        """Choose what runs beside; see :func:`schedule`."""
        return schedule(self._works, self.sizes, room)


def _is_cast(call: OperatorCall, result: Any) -> bool:
    """Whether an operator casts a weight to a shorter type, as autocast does."""
    if call.func is not aten._to_copy.default or type(call.inputs[0]) is not Parameter:
        return False
    weight = call.inputs[0]
    is_alike = result.is_floating_point() and result.device == weight.device
    return bool(
        is_alike and result.stride() == weight.stride() and result.itemsize < weight.itemsize
    )


def _parts_of(call: OperatorCall) -> list[bool]:
    """Return which results an operator is asked for if it may be parted; else nothing.

    Parts are for dense tensors: of others each would make a copy. Kernels of grouped convolutions
    come in another order then.
    """
    position = _PARTED.get(call.func)
    if position is None or len(call.args) <= position:
        return []
    first, *rest = call.args[position]
    is_plain = call.args[position - 1] == 1 and all(t.is_contiguous() for t in call.inputs)
    may = first and any(rest) and is_plain
    return [first, *rest] if may else []


def _part(call: OperatorCall, work: Work) -> OperatorCall:
    part = work.part
    if part is WorkPart.WHOLE:
        return call
    if part is WorkPart.SHARE:
        shares = (
            [a[i] for i in work.share] if isinstance(a, (list, tuple)) and a else a
            for a in call.args
        )
        return OperatorCall(call.func, tuple(shares), call.kwargs)
    args, position = list(call.args), _PARTED[call.func]
    first, *rest = args[position]
    is_first = part is WorkPart.FIRST
    args[position] = [is_first and first, *(not is_first and one for one in rest)]
    return OperatorCall(call.func, tuple(args), call.kwargs)


class Overlapping(_StorageUses):
    """Launches what a schedule lets run beside on the side stream of the capture.

    Where the capture sees something else than its data flow was, it goes on as a chain.

    Args:
        copy: Copies many tensors to others, of other types, at once; with it, weights are cast
            together.
    """

    def __init__(
        self,
        flow: DataFlow,
        found: Schedule,
        device_type: str,
        copy: Callable[[Sequence[Tensor], Sequence[Tensor]], None] | None = None,
    ) -> None:
        super().__init__(device_type)
        self._expected, self._found = flow.operators, found
        self._works, self._marks = found.of_operators(), found.marks
        # On the main stream, whose order is theirs: no other one waits for a cast made ahead
        on_main = (n for n in flow.casts if found.streams[self._works[n][0]] == MAIN)
        self._weights = {} if copy is None else {n: flow.casts[n] for n in on_main}
        self._copy = copy
        # Made ahead, each with the address of its weight, by the number of the use
        self._casts: dict[int, tuple[int, Tensor]] = {}
        self._count = 0
        self._alone = flow.ranges
        self._holds: dict[int, list[UntypedStorage]] = {}

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if self._count != len(self._expected):
            self.refuse("it has other operators than before")
        with contextlib.suppress(RuntimeError) if error[0] else contextlib.nullcontext():
            self._join()

    def refuse(self, why: str) -> None:
        if not self.why_not:
            super().refuse(why)
            self._join()

    def _join(self) -> None:
        self._streams.join()
        self._holds.clear()

    def difference(self, chain: GraphInfo, beside: GraphInfo) -> str:
        """Tell how its work differs from that of the chain; empty if it does not.

        The nodes must be the same, in order of launch. An operator that takes many tensors has
        others for a few, of the same kernels.
        """
        ours, theirs = [*chain.nodes], [*beside.nodes]
        shared = {w.operator for w in self._found.works if w.part is WorkPart.SHARE}
        for operator in sorted({*shared, *self._weights}, reverse=True):
            here, there = self._alone[operator], self.ranges[operator]
            names = ({n.name for n in x} for x in (ours[_slice(here)], theirs[_slice(there)]))
            if operator in shared and len({*map(frozenset, names)}) > 1:
                return f"{self._expected[operator].func} has other kernels for a few tensors"
            del ours[_slice(here)], theirs[_slice(there)]
        ours, theirs = ([n for n in nodes if n.kind in _WORK] for nodes in (ours, theirs))
        if len(ours) != len(theirs):
            return f"{len(ours)} nodes become {len(theirs)}"
        pairs = zip(ours, theirs, strict=True)
        changed = (
            f"{short_name(a.name)} becomes {short_name(b.name)}"
            for a, b in pairs
            if _what(a) != _what(b)
        )
        return next(changed, "")

    def seen(self, call: OperatorCall) -> Any:
        (reads, writes), number = self.used(call), self._count
        expected = self._expected[number] if number < len(self._expected) else None
        if expected is None or (call.func, reads, writes) != expected[:3]:
            self.refuse(f"{call.func} is not what it was before")
            return call.run()
        self._count += 1
        results = [self._run(work, call) for work in self._works[number]]
        result = results[0]
        if self._found.works[self._works[number][-1]].part is WorkPart.REST:
            result = (result[0], *results[1][1:])
        if self.born(call, result) != expected.born:
            self.refuse(f"{call.func} makes something else than before")
        return result

    def _run(self, work: int, call: OperatorCall) -> Any:
        found, streams = self._found, self._streams
        stream = found.streams[work]
        for other in found.waits[work]:
            streams.wait(stream, other)
        for ended in found.releases[work]:
            del self._holds[ended]
        if held := found.held[work]:
            storages = {self.name(t): t.untyped_storage() for t in call.inputs}
            self._holds[work] = [storages[name] for name in held]
        with streams.on(stream, work):
            result = self._cast(found.works[work].operator, call)
            if result is None:
                result = _part(call, found.works[work]).run()
        if work in self._marks:
            streams.mark(stream, work)
        return result

    def _cast(self, number: int, call: OperatorCall) -> Tensor | None:
        """Return the short copy of a weight, made with those of others; None for other calls."""
        weight, dtype = self._weights.get(number, (None, None))
        if weight is None or self._copy is None:
            return None
        if call.inputs[0] is not weight or call.kwargs.get("dtype") is not dtype:
            self.refuse("it casts another weight than before")
            return None
        taken = 0
        for other, (source, short) in self._weights.items() if number not in self._casts else ():
            if other >= number and taken < _CAST_AT_ONCE:
                cast = torch.empty_like(source, dtype=short)
                self._casts[other] = source.data_ptr(), cast
                taken += cast.nbytes
        if taken:
            sources = [self._weights[other][0].detach() for other in self._casts]
            self._copy([cast for _, cast in self._casts.values()], sources)
        address, cast = self._casts.pop(number)
        return cast if address == weight.data_ptr() else None  # user code may exchange its memory


_WORK = ("kernel", "memcpy", "memset", "host", "child")


def _slice(nodes: range) -> slice:
    return slice(nodes.start, nodes.stop)


def _what(node: GraphNode) -> tuple[object, ...]:
    return node.kind, node.name, node.bytes, node.grid, node.block
