"""Records what captured code does on the host, and answers what it reads of the device."""

from __future__ import annotations

import contextlib
import math
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from lightning_graphs.device.host_memory import COPYING_SCALARS, makes_on_host
from lightning_graphs.device.rules import HOST_READ, OF_TWO_FORMULAS, has_other_tangents
from lightning_graphs.device.trace import OperatorCall, OperatorMode, mapped, tensors_in
from lightning_graphs.errors import CaptureError
from lightning_graphs.private.callsite import LIBRARIES, OURS, outside_of
from lightning_graphs.private.engine import current_autograd_node
from lightning_graphs.private.exchange import innermost_modes
from lightning_graphs.private.generators import comparable
from lightning_graphs.private.torch import (
    PLAIN_TENSORS,
    captured_code_runs,
    dispatched_directly,
    functions_out_of_sight,
    memory_of,
    out_of_sight,
    run_kernel,
)
from lightning_graphs.values.memory import empty_as, extent
from lightning_graphs.values.tree import leaves_of
from lightning_graphs.watch.forms import fill_part, tensor_of_numbers
from lightning_graphs.watch.host import (
    OF_SHAPES,
    PACKING,
    PADDING,
    READS,
    READS_LENGTHS,
    REMEDY,
    RULE,
    SHAPES,
    SMALL,
    HostProgram,
    HostTape,
    fully_written,
    is_exact,
    numbers,
    operator_name,
    refuse_write,
)
from lightning_graphs.watch.tracers import ScalarTracer

aten = torch.ops.aten

_COUNTS = (torch.int64, torch.int32)  # dtypes of whole numbers that code counts with
_ALIGNMENT = 256  # bytes, as the allocator has it
_COPYING = COPYING_SCALARS | {
    *(aten._to_copy.default, aten.copy_.default),
    *(aten.index.Tensor, aten.index_put.default, aten.index_put_.default),
}
"""Operators that copy what the host gives them, be it one number; others read that in place."""
_COPYING_IN_BACKWARD = COPYING_SCALARS | {aten.pow.Tensor_Tensor, aten.pow_.Tensor}
"""Operators whose backward pass copies what follows from a number of the host.

That of a power asks whether the exponent is nought; to have that on the device ahead of the forward
pass would round otherwise, as CUDA has kernels of their own for squares and roots.
"""
FROM_PYTHON = frozenset({"tensor", "as_tensor", "asarray", "new_tensor"})
"""Functions that make a tensor of Python's numbers."""
_OF_A_NUMBER = frozenset({"full", "scalar_tensor"})
_QUOTIENTS = ("div", "divide", "true_divide")
_DIVISIONS: dict[str, Callable[..., Tensor]] = {
    **dict.fromkeys(_QUOTIENTS, torch.mul),
    **dict.fromkeys((f"{name}_" for name in _QUOTIENTS), Tensor.mul_),
}
_INDEXING: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("__getitem__", "__setitem__"), lambda index: index),
    **dict.fromkeys(("index_put", "index_put_"), tuple),
}
"""Functions whose second argument is an index, and what makes it one of Python's."""
_MOVING = frozenset({"to", "type_as", "copy_"})
_TO_HOST = ("cpu", "to", "tolist")
_TO_PYTHON = frozenset({"numpy", "tolist", "__array__", "__dlpack__", "data_ptr"})
_UNKNOWN = object()
ONE_GENERATOR = "A rehearsal on a CPU has one random generator for the host and the device."
_ON_A_GPU = "capture the code on a GPU, or rehearse it without dropout"
_COPY_TABLES = (aten._ctc_loss.default, aten._ctc_loss_backward.default)
"""Operators that copy tables to the device, made of the numbers that they are given."""


def is_made_ahead(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a function of torch makes a host tensor from numbers, as replays do again."""
    on_host = kwargs.get("device") in (None, "cpu")
    of_table = name == "__getitem__" and args[0].device.type == "cpu" and isinstance(args[1], int)
    return name in FROM_PYTHON or (name in _OF_A_NUMBER and on_host) or of_table


@cache
def _is_special(func: OpOverload) -> bool:
    """Return whether an operator matters even if the host has no copy of its tensors."""
    draws = torch.Tag.nondeterministic_seeded in func.tags
    makes = func is aten.lift_fresh.default or operator_name(func) in OF_SHAPES
    return draws or makes or func in _COPY_TABLES or func in OF_TWO_FORMULAS


_PASSING: dict[int, tuple[bool, object]] = {}
"""Whether an operator passes that is given nothing which is followed, and itself, by its ``id``."""


class ArenaFull(CaptureError):
    """The memory for host-to-device copies was too small."""

    needed = 0  # bytes that are enough


class Arena:
    """Memory of the device that host tensors are copied to, in one piece for a captured step."""

    def __init__(self, capacity: int, device: torch.device) -> None:
        self._memory = torch.empty(capacity, dtype=torch.uint8, device=device)
        self._needed = 0
        self._constants: list[tuple[Tensor, Tensor]] = []
        self.read_in_place: list[Tensor] = []  # host tensors that the graph reads where they are

    def reserve(self, value: Tensor) -> Tensor:
        """Reserve memory for a tensor of this shape."""
        size = extent(value) * value.element_size() if value.numel() else 0
        begin = self._needed
        self._needed += math.ceil(size / _ALIGNMENT) * _ALIGNMENT or _ALIGNMENT
        if self._needed > self._memory.nbytes:  # the capture is done again with more
            return empty_as(value, self._memory.device)
        flat = self._memory[begin : begin + size].view(value.dtype)
        return flat.as_strided(value.shape, value.stride(), flat.storage_offset())

    def write_once(self, static: Tensor, value: Tensor) -> None:
        """Write a constant behind the capture."""
        self._constants.append((static, value))

    def require_room(self) -> None:
        """Raise :class:`ArenaFull` if the capture needed more."""
        if self._needed > self._memory.nbytes:
            full = ArenaFull(RULE, f"{self._needed} bytes are copied to the device", REMEDY)
            full.needed = self._needed
            raise full

    @torch.no_grad()
    def finish(self) -> tuple[Tensor, ...]:
        """Write the constants; return all memory that the graph reads, nothing if it reads none."""
        for static, value in self._constants:
            static.copy_(value)
        self._constants.clear()
        own = (self._memory,) if self._needed else ()
        return *own, *self.read_in_place


class Shadows:
    """Copies on the host of what tensors of the device have."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Tensor], Tensor]] = {}

    def __contains__(self, tensor: Tensor) -> bool:
        return id(tensor) in self._known

    def of(self, tensor: Tensor) -> Tensor | None:
        known, shadow = self._known.get(id(tensor), (None, None))
        return shadow if known is not None and known() is tensor else None

    def add(self, tensors: Iterable[Tensor], result: Any) -> None:
        for tensor, shadow in zip(tensors, tensors_in(result), strict=True):
            self._known[id(tensor)] = weakref.ref(tensor), shadow

    def drop(self, lost: Tensor) -> None:
        """Drop all copies in the memory of one that is no longer right."""
        memory = memory_of(lost)
        for key in [k for k, (_, other) in self._known.items() if memory_of(other) == memory]:
            del self._known[key]


@dispatched_directly
class LightMode(OperatorMode):
    """Operator mode that looks into few operators, and may be left while code under it goes on."""

    has_left = False

    def follows(self, tensor: Tensor) -> bool:
        """Return whether operators on a tensor are looked into."""
        return True

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        given = (*args, *kwargs.values()) if kwargs else args
        is_plain = all(kind in PLAIN_TENSORS for kind in types)
        if not is_plain or current_autograd_node() is not None or self._looks_into(func, given):
            return super().__torch_dispatch__(func, types, args, kwargs)
        try:
            return func(*args, **kwargs) if kwargs else func(*args)
        except RuntimeError as error:
            self.on_error(error)
            raise

    def _looks_into(self, func: Any, given: Sequence[Any]) -> bool:
        if id(func) not in _PASSING:  # the hash of an operator is a function of Python
            is_special = not isinstance(func, OpOverload) or _is_special(func)
            _PASSING[id(func)] = not is_special, func
        passes = False
        for value in given:
            if isinstance(value, Tensor):
                passes = True
                if self.follows(value):
                    return True
            elif isinstance(value, (list, tuple)):
                tensors = [item for item in value if isinstance(item, Tensor)]
                passes |= bool(tensors)
                if any(map(self.follows, tensors)):
                    return True
        return not (passes and _PASSING[id(func)][0])  # one without tensors may make one

    def leave(self) -> None:
        """See no further, unless other modes were entered since."""
        operators, functions = innermost_modes()
        if operators is self and getattr(functions, "handler", None) == self.call:
            super().__exit__(None, None, None)
            self.has_left = True

    def __exit__(self, *exc: Any) -> None:
        if not self.has_left:
            super().__exit__(*exc)


class HostTracer(LightMode):
    """Records, while it is entered, what runs on the host.

    On a CPU, where the emulated backend captures, those tensors are the host's that a factory makes
    without ``device=``, or with ``device="cpu"`` as a string, and what is computed from them. One
    generator serves both halves there: code that draws in both cannot be rehearsed.
    """

    def __init__(
        self,
        device: torch.device,
        inputs: Sequence[Tensor],
        copies: Sequence[Tensor | None],
        capacity: int,
        lasting: Sequence[torch.Generator],  # generators that outlive a step
    ) -> None:
        super().__init__()
        self._device = device
        self._emulated = device.type == "cpu"
        self._arena = Arena(capacity, device)
        self._makes_on_host = self._device_draws = False
        self.leaves_reals = True  # real numbers that code reads of the device stay there
        self.has_left_reals = self.has_answered = False
        self.tape = HostTape(lasting)
        # Reads the present value of data with live numbers in it
        self.reader_of: Callable[[Any], Callable[[], Any] | None] = lambda _: None
        # Whether user code in a frame gets no copy of what changes, but later, behind the graph
        self.declines: Callable[[FrameType], bool] = lambda _: False
        self.in_backward = False  # whether the backward pass copies from the host, or reads there
        self.has_given = False  # tensors of the host to the code
        self.on_read: Callable[[FrameType], object] = id  # hears who reads numbers of the host
        self._copies = copies
        self._shadows = Shadows()
        for i, (tensor, copy) in enumerate(zip(inputs, copies, strict=True)):
            if copy is not None:
                shadow = copy.detach() if self._emulated or tensor.is_cuda else tensor  # as read
                self.tape.input(shadow, i)
                self._shadows.add([tensor], shadow)

    def leave(self) -> None:
        """Record no further, if nothing of the host is in the hands of the code.

        From here on captures refuse what they refuse without a tracer.
        """
        if not (self.has_given or self.in_backward or self.tape.draws):
            super().leave()
            self._shadows = Shadows() if self.has_left else self._shadows

    def finish(self) -> HostProgram | None:
        """Return the host program at the end of all captures; None if it is empty."""
        tape = self.tape
        self._arena.require_room()
        draws = any(isinstance(generator, torch.Generator) for generator in tape.draws)
        tape.refuse_set(with_device=self._emulated and self._device_draws)
        if self._emulated and self._device_draws and draws:
            raise CaptureError(ONE_GENERATOR, "the captured code draws for both", _ON_A_GPU)
        self._shadows = Shadows()
        tape.drop_unread()
        tape.refuse_kept_tensors()
        held = self._arena.finish()
        program = HostProgram(tape.operations, tape.values, tape.inputs, held)
        goes_the_same_way = program.run(lambda: self._copies)
        drawn = all(comparable(g.get_state()) == comparable(s) for g, s in tape.states.items())
        program.restore()
        drawn = drawn and not (self.has_left and tape.draws)
        if not (goes_the_same_way and drawn):
            raise CaptureError(RULE, "the code draws or branches out of torch's sight", REMEDY)
        return program if tape.operations or held else None

    # ------------------------------------------------------------------ operators

    def follows(self, tensor: Tensor) -> bool:
        return tensor in self._shadows or self._is_host(tensor)

    def operator(self, call: OperatorCall) -> Any:
        func, kwargs = call.func, call.kwargs
        self.in_backward |= self.note_node(func)
        if func is aten.lift_fresh.default and call.inputs[0].dim():
            self.has_given = True
            return self.tape.run(call)  # torch has made it of Python numbers: torch.LongTensor([1])
        # One without tensors may make one.
        concerned = not call.inputs or any(self._shadow(t) is not None for t in call.inputs)
        if not (concerned or _is_special(func)):
            return call.run()
        hosts = [t for t in call.inputs if self._is_host(t)]
        device = kwargs.get("device")
        makes = self._makes_on_host if self._emulated else getattr(device, "type", "") == "cpu"
        if not hosts and (call.inputs or not makes):
            if (found := self._read(call)) is not _UNKNOWN:
                return found
            with self._noting_draws(func):
                result = self._opened(call) if func in _COPY_TABLES else call.run()
            return self._follow(call, result)
        self.has_given = True
        self.in_backward |= func in _COPYING_IN_BACKWARD
        if len(hosts) == len(call.inputs):
            if not self._emulated and device is not None and device.type != "cpu":
                return self._copied(call.args[0], kwargs)
            return self.tape.of_known_shape(func, self.tape.run(call))
        if any(map(self.tape.knows, call.written)):
            refuse_write(func)
        if any(map(self._is_host, call.written)) or func is aten._pack_padded_sequence.default:
            return call.run()  # what a graph may do the recorder decides; or it reads constants
        move = self._moving(func, [t for t in call.inputs if not self._is_host(t)])
        call = call.mapped(move)
        return self._follow(call, call.run())

    def _opened(self, call: OperatorCall) -> Any:
        """Run an operator and see those that it is made of: its tables are constants here."""
        self.in_backward = True
        if self._emulated:
            return call.run()
        with self.seeing_further():
            return run_kernel(call.func, self._device, *call.args, **call.kwargs)

    @contextlib.contextmanager
    def _noting_draws(self, func: OpOverload) -> Iterator[None]:
        """Note whether an operator of the device draws, where both halves have one generator."""
        if not (self._emulated and torch.Tag.nondeterministic_seeded in func.tags):
            yield
            return
        before = torch.default_generator.get_state()
        yield
        with out_of_sight():
            self._device_draws |= not torch.equal(torch.default_generator.get_state(), before)

    def _is_host(self, tensor: Tensor) -> bool:
        return self.tape.knows(tensor) if self._emulated else tensor.device.type == "cpu"

    # ------------------------------------------------------------------ reads of the device

    def _shadow(self, tensor: Tensor) -> Tensor | None:
        """Return a tensor's host copy: itself if on the CPU, else its shadow; None if unknown."""
        return tensor if self._is_host(tensor) else self._shadows.of(tensor)

    def _follow(self, call: OperatorCall, result: Any) -> Any:
        """Run a device operator on the host as well, if that is exact."""
        outputs = list(tensors_in(result))
        if operator_name(call.func) in OF_SHAPES:
            call = call.mapped(self.tape.of_shape)
        changes = any(self.tape.changes(t) for t in map(self._shadow, call.inputs) if t is not None)
        if (
            all(self._shadow(t) is not None for t in call.inputs)
            and is_exact(call.func, outputs, SMALL if changes else 16 * SMALL)
            and all(self.tape.made(self._shadow(t)) for t in call.written)
        ):
            self._shadows.add(outputs, self.tape.run(_on_host(call.mapped(self._shadow))))
            return result
        for tensor in call.written:
            if (shadow := self._shadow(tensor)) is not None:
                self._shadows.drop(shadow)
        return result

    def _read(self, call: OperatorCall) -> Any:
        """Answer an operator by which the host reads a device value."""
        func, target = call.func, call.kwargs.get("device")
        to_host = func is aten._to_copy.default and target is not None and target.type == "cpu"
        shapes = func._schema.name in SHAPES
        if not (func in READS or shapes or (to_host and not self._emulated)):
            return _UNKNOWN
        known = [t for t in map(self._shadow, call.inputs) if t is not None]
        if len(known) < len(call.inputs):
            return _UNKNOWN
        if self.leaves_reals and _reads_real(func, known) and self.tape.changes(known[0]):
            self.has_left_reals = True
            return _UNKNOWN
        found = self.tape.run(_on_host(call.mapped(self._shadow)))
        self.has_answered = True
        if not shapes:
            self.has_given |= to_host
            self.on_read(sys._getframe())
            return found
        found = self.tape.of_known_shape(func, found)
        return mapped(found, lambda tensor: self._copied(tensor, {}))

    # ------------------------------------------------------------------ to the device

    def _moving(self, func: OpOverload, on_device: Sequence[Tensor]) -> Callable[[Tensor], Tensor]:
        """Bring host arguments of a device operator to the device."""

        def moved(tensor: Tensor) -> Tensor:
            if not self._is_host(tensor):
                return tensor
            changes = self.tape.know(func, tensor) is not None
            if tensor.dim() == 0 and func not in _COPYING:
                if not changes:  # kernels take it as a constant; a rehearsal reads it
                    if self._emulated:
                        self._arena.read_in_place.append(tensor)
                    return tensor
                if any(t.is_floating_point() and t.dtype != tensor.dtype for t in on_device):
                    self.tape.refuse(f"{func} rounds a CPU number differently on the device")
            return self._copied(tensor, {})

        return moved

    def _copied(self, tensor: Tensor, kwargs: dict[str, Any]) -> Tensor:
        """Copy a host tensor to the device; the captured code may write the copy."""
        drop = ("device", "non_blocking", "pin_memory")
        kwargs = {k: v for k, v in kwargs.items() if k not in drop and v is not None}
        value: Tensor = self.tape.run(OperatorCall(aten._to_copy.default, (tensor,), kwargs))
        with out_of_sight():
            static = self._arena.reserve(value)
            if captured_code_runs(self._device):
                static.copy_(value)
        if self.tape.changes(value):
            self.tape.copy(static, value)
        else:
            self._arena.write_once(static, value)
        result = static.clone()
        self._shadows.add([result], self.tape.run(OperatorCall(aten.clone.default, (value,), {})))
        return result

    # ------------------------------------------------------------------ functions of Python

    def call(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call a Python function of torch that the dispatcher would not show."""
        name = getattr(func, "__name__", "")
        data = (*args, None, None)[name == "new_tensor"]
        shadow = None if name not in _TO_HOST or self._is_host(args[0]) else self._shadow(args[0])
        moves = shadow is not None and _asks_for_host(name, args, kwargs, emulated=self._emulated)
        reads = shadow is not None and (moves or name == "tolist") and self.tape.changes(shadow)
        # A call behind the graph can make it
        if reads and self.declines(outside_of(sys._getframe(1), OURS)):
            HOST_READ.stop_here(f"{name} is called")
        if name in _TO_PYTHON and (value := self._to_python(name, args[0])) is not None:
            with out_of_sight():
                return func(value, *args[1:], **kwargs)
        if name == "ctc_loss":
            args = self._with_lengths(*args)
        func = fully_written(func, sys._getframe(2))
        if name in READS_LENGTHS and any(map(self._is_of_host, args)):
            return self._with_packed(func, name, args, kwargs)
        if shadow is not None and moves and (self._emulated or len(args) + len(kwargs) <= 2):
            self.has_given = True
            self.on_read(sys._getframe())
            return self.tape.run(OperatorCall(aten.clone.default, (shadow,), {}))
        if name == "__setitem__" and type(args[2]) in (bool, int, float) and fill_part(*args):
            return None
        is_full = name in _OF_A_NUMBER and is_made_ahead(name, args, kwargs)
        if is_full and any(self.reader_of(arg) is not None for arg in args):
            return self._from_python(func, name, args, kwargs)
        if name == "__getitem__" and self._is_host(args[0]) and (read := self.reader_of(args[1])):
            self.has_given = True
            return self.tape.entry(args[0], args[1], read)
        func, args, kwargs = _with_copies(self, func, name, args, kwargs)
        if name in _INDEXING and len(args) > 1 and not self._is_host(args[0]):
            index = self._index(args[0], _INDEXING[name](args[1]))
            written = (self._written(args[0], index, value) for value in args[2:3])
            return func(args[0], index, *written, *args[3:], **kwargs)
        if name == "tensor" and isinstance(data, Tensor) and not (kwargs or data.requires_grad):
            return data.clone()  # as torch does, out of sight
        if name in FROM_PYTHON and any(self.tape.changes(t) for t in tensors_in(data)):
            self.tape.refuse(f"{name} is called on a tensor that changes from step to step")
        is_made = name in FROM_PYTHON and not isinstance(data, Tensor)
        if is_made and all(map(self._is_host, tensors_in(data))):  # others inside of it are read
            return self._from_python(func, name, args, kwargs)
        if not self._emulated:
            with out_of_sight() if has_other_tangents(func) else contextlib.nullcontext():
                return func(*args, **kwargs)
        if name in ("to", "cuda") and self._is_host(args[0]):
            given = (*args[1:], *kwargs.values())
            if any(isinstance(a, (torch.device, Tensor)) for a in given):
                dtypes = (a.dtype if isinstance(a, Tensor) else a for a in given)
                dtype = next((d for d in dtypes if isinstance(d, torch.dtype)), None)
                return self._copied(args[0], {"dtype": dtype})
        self._makes_on_host = makes_on_host(name, kwargs)
        try:
            return func(*args, **kwargs)
        finally:
            self._makes_on_host = False

    def _with_lengths(self, log_probs: Tensor, targets: Tensor, *given: Any) -> tuple[Any, ...]:
        """Return arguments of ``ctc_loss`` with lengths as numbers, since it reads them itself.

        For targets of 32 bits it may choose cuDNN, which takes the lengths as tensors.
        """

        def traced(lengths: Any) -> Any:
            shadow = self._shadow(lengths) if isinstance(lengths, Tensor) else None
            if shadow is None or targets.dtype is torch.int32:
                return lengths
            self.tape.know(aten._ctc_loss.Tensor, shadow)
            with out_of_sight():
                self.tape.compare(numbers, shadow)
                return shadow.tolist()

        return (log_probs, targets, *map(traced, given[:2]), *given[2:])

    def _is_of_host(self, value: Any) -> bool:
        """Return whether a function reads an argument on the host: lengths, or numbers of rows."""
        is_whole = isinstance(value, Tensor) and value.dtype is torch.int64
        return is_whole and self._shadow(value) is not None

    def _with_packed(
        self, func: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Pack, unpack or compute with a packed sequence: of its lengths a graph has the values."""

        def constant(value: Any) -> Any:
            shadow = self._shadow(value) if self._is_of_host(value) else None
            return value if shadow is None else self._frozen(shadow)

        self.has_given = True
        with functions_out_of_sight():
            result = func(*map(constant, args), **kwargs)
        if name in (PACKING, PADDING):
            self.tape.constant(result[1])  # a rehearsal would write its memory again
            result = result[0], self._frozen(result[1])
        return result

    def _frozen(self, value: Tensor) -> Tensor:
        self._arena.read_in_place.append(self.tape.frozen(value))
        return self._arena.read_in_place[-1]

    def _index(self, tensor: Tensor, index: Any) -> Any:
        """An index without lists and tensors of the host: autograd would keep them as they are."""
        if isinstance(index, tuple):
            return tuple(part for item in index for part in self._parts(tensor, item))
        if isinstance(index, range):
            index = [*index]
        if isinstance(index, list) and index and all(type(i) in (int, bool) for i in index):
            return self._from_python(torch.tensor, "tensor", (index,), {"device": tensor.device})
        if not isinstance(index, (Tensor, int, slice, type(None), type(...))):
            read = self.reader_of(index)
            data = index if read is None else read()
            if hasattr(data, "__len__") and hasattr(data, "__array_interface__"):
                index = self._from_python(torch.as_tensor, "as_tensor", (index,), {})
        if not (isinstance(index, Tensor) and index.dim()):
            return index
        shadow = self._shadow(index)
        if shadow is not None and index.dtype is torch.bool:
            return index.nonzero(as_tuple=True)  # as many of them at every replay
        return self._copied(index, {}) if self._is_host(index) else index

    def _written(self, tensor: Tensor, index: Any, value: Any) -> Any:
        """What is written at an index that has tensors, on the device.

        The backward pass makes zeros like it, and copies them there, out of this mode's sight.
        """
        parts = index if type(index) is tuple else (index,)
        if not any(isinstance(part, Tensor) for part in parts):
            return value
        if type(value) in (bool, int, float, complex):
            return torch.full((), value, dtype=tensor.dtype, device=tensor.device)
        is_of_host = isinstance(value, Tensor) and self._is_host(value)
        return self._copied(value, {}) if is_of_host else value

    def _parts(self, tensor: Tensor, index: Any) -> tuple[Any, ...]:
        found = self._index(tensor, index)
        return found if isinstance(index, Tensor) and isinstance(found, tuple) else (found,)

    def _to_python(self, name: str, tensor: Any) -> Tensor | None:
        """Return the host tensor whose values Python reads as a whole; None if there is none."""
        if not isinstance(tensor, Tensor) or (name != "tolist" and not self._is_host(tensor)):
            return None
        shadow: Tensor | None = self._shadow(tensor)
        if shadow is None or not self.tape.changes(shadow):
            return shadow
        if name in ("data_ptr", "__dlpack__"):
            self.tape.refuse(f"{name} is called on a tensor that changes from step to step")
        with out_of_sight():
            self.tape.compare(numbers, shadow)
        self.on_read(sys._getframe())
        return shadow

    def _from_python(
        self, func: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Make a tensor of Python numbers: a constant, unless it is made to be logged."""
        caller: str = outside_of(sys._getframe(2), OURS).f_globals.get("__name__", "")
        if caller.partition(".")[0] in LIBRARIES.framework:
            self.tape.refuse("a number that may change in each step is logged")
        device, host = kwargs.get("device"), {**kwargs, "device": "cpu"}
        if name == "new_tensor":
            device = args[0].device if device is None else device
            host["dtype"] = kwargs.get("dtype") or args[0].dtype
        given = leaves_of(args, ScalarTracer)
        if name in FROM_PYTHON and any(number.is_of_device for number in given):
            own = {**kwargs, "device": device, "dtype": host.get("dtype")}
            made = tensor_of_numbers(given[0].numbers, args[-1], **own)
            if made is not None:
                return made
        grad = bool(host.pop("requires_grad", False))
        value = self.tape.made_by(func, args, host, [self.reader_of(arg) for arg in args])
        # On a CPU, what names the device by an object means that of the module.
        on_host = device is None or torch.device(device).type == "cpu"
        on_host = on_host and not (self._emulated and isinstance(device, torch.device))
        self.has_given |= on_host
        result = value if on_host else self._copied(value, {})
        return result.requires_grad_() if grad else result


def _with_copies(
    tracer: HostTracer, func: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Any, Sequence[Any], Mapping[str, Any]]:
    """Return a call with copies of what autograd may keep of the host.

    On CUDA these are numbers, by which it divides by multiplying with their inverse; in a
    rehearsal, tensors of any shape.
    """
    given, emulated = [*args, *kwargs.values()], tracer._emulated
    others = [t for t in given if isinstance(t, Tensor) and not tracer._is_host(t)]
    dtypes = {t.dtype for t in others if t.is_floating_point()}

    def is_kept(arg: Any) -> bool:
        if not isinstance(arg, Tensor) or not tracer._is_host(arg) or arg.requires_grad:
            return False
        is_scalar = arg.dim() == 0 and dtypes <= {arg.dtype} and tracer.tape.changes(arg)
        return is_scalar or (emulated and arg.dim() > 0 and name not in _INDEXING)

    def copied(arg: Any) -> Any:
        return tracer._copied(arg, {}) if is_kept(arg) else arg

    if not (others and any(map(is_kept, given))) or name in _MOVING or "out" in kwargs:
        return func, args, kwargs
    if not emulated and name in _DIVISIONS and is_kept(args[1]):
        func, args = _DIVISIONS[name], (args[0], args[1].reciprocal())
    writes = name.startswith("__i") or (name.endswith("_") and not name.endswith("__"))
    args = [*args[:writes], *map(copied, args[writes:])]  # what it writes stays itself
    return func, args, {k: copied(v) if getattr(v, "ndim", 0) else v for k, v in kwargs.items()}


def counted(tracer: HostTracer, tensor: Tensor) -> Tensor | None:
    """Return the host copy of a whole number that replays compute again; None of others."""
    shadow = tracer._shadow(tensor)
    if shadow is None or shadow.numel() != 1 or shadow.dtype not in _COUNTS:
        return None
    return shadow if tracer.tape.changes(shadow) else None


def _on_host(call: OperatorCall) -> OperatorCall:
    """Return an operator on the copies of its tensors that makes its results on the host."""
    if isinstance(call.kwargs.get("device"), torch.device):
        call.kwargs["device"] = torch.device("cpu")
    return call


def _reads_real(func: OpOverload, given: Sequence[Tensor]) -> bool:
    """Whether an operator reads a real number, of which a graph for each would serve one batch."""
    return func is aten._local_scalar_dense.default and given[0].is_floating_point()


def _asks_for_host(
    name: str, args: Sequence[Any], kwargs: Mapping[str, Any], *, emulated: bool
) -> bool:
    """Return whether a function moves a tensor to the host.

    On a CPU only what calls that by its name means the host.
    """
    kinds = (str,) if emulated else (str, torch.device)
    given = [a for a in (*args[1:], kwargs.get("device")) if isinstance(a, kinds)]
    return name == "cpu" or (name == "to" and "cpu" in [torch.device(a).type for a in given])
