"""The host half of captured code: what it computes on the CPU, done again by every replay.

A graph holds what the device does. Code that is captured may also compute on the host: numbers and
tables that it makes there and copies to the device, draws of torch's CPU generator, branches on
them, and on values of its inputs. While it is captured these operators are recorded. What follows
from constants alone is computed once and stays on the device. The rest runs before each replay, in
its order: tensors that go to the device are copied into the graph's inputs, and what Python reads
is compared with what it was: where it is something else, the code would have gone another way.

What the host reads of the device is computed on the host, too, where that is exact (integers,
booleans, comparisons, selections) and follows from inputs of which the host has a copy.
"""

from __future__ import annotations

import gc
import math
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_graphs.core.callsite import CallSiteFinder
from lightning_graphs.core.recorder import tensors_in, written_tensors
from lightning_graphs.core.torch_private import generator_identity, out_of_sight, storage_uses
from lightning_graphs.errors import CaptureError

aten = torch.ops.aten

_ALIGNMENT = 256  # bytes, as the allocator has it
_TRANSFERS = (aten._to_copy.default, aten.copy_.default)
_FACTORIES = frozenset(
    {"arange", "empty", "eye", "full", "linspace", "logspace"}
    | {"ones", "rand", "randint", "randn", "randperm", "scalar_tensor", "zeros"}
)
_FROM_PYTHON = frozenset({"tensor", "as_tensor", "asarray", "new_tensor"})
_TO_PYTHON = frozenset({"numpy", "tolist", "__array__", "__dlpack__", "data_ptr"})
_TIES = ("sort", "argsort", "topk", "argmax", "argmin", "median", "mode", "kthvalue")
"""Operators that may choose otherwise among equal values on another device."""
_SELECTIONS = frozenset(
    {"_to_copy", "clone", "where", "index", "gather", "cat", "stack", "amax", "amin", "max", "min"}
    | {"maximum", "minimum", "abs", "neg", "masked_fill", "flip", "roll", "index_select"}
    | {"constant_pad_nd", "clamp", "zeros", "ones", "full", "zeros_like", "ones_like", "full_like"}
    | {"add", "sub", "rsub", "mul", "div"}  # rounded once, as IEEE 754 has it
)
"""Operators that compute the same for floating-point numbers on every device."""
_RULE = "A replay does again what its code computes on the host, as far as torch shows it."
_REMEDY = "compute it on the device, or hand it in with the batch"


class ArenaFull(CaptureError):
    """The memory for what goes to the device was too small.

    Attributes:
        needed: Bytes that are enough.
    """

    def __init__(self, needed: int) -> None:
        super().__init__(_RULE, f"{needed} bytes go to the device", _REMEDY)
        self.needed = needed


@dataclass(frozen=True, slots=True)
class _Register:
    """The place of a tensor that every replay computes anew."""

    index: int


@dataclass(slots=True)
class _Operation:
    """One operator of the host half.

    Attributes:
        func: The operator.
        args: Its arguments, registers in place of tensors that are computed anew.
        kwargs: Likewise.
        results: The registers of the tensors that it returns.
        draws: The generator that it draws from; None if it draws nothing.
        read: What it told Python, for an operator that returns no tensor.
    """

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: list[int]
    draws: torch.Generator | None = None
    read: Any = None


@dataclass(slots=True)
class _Known:
    """A tensor of the host that was seen while code was captured; kept, so that its id stays.

    Attributes:
        register: Where a replay computes it; None if it is a constant.
        born: It was made by the captured code.
    """

    tensor: Tensor
    register: _Register | None
    born: bool


@dataclass(slots=True)
class _Derived:
    """A tensor of the device that the host can compute.

    Attributes:
        tensor: The tensor.
        storage: Names its memory.
        func: The operator that made it; None for an input.
        args: Its arguments, such records in place of tensors of the device.
        kwargs: Likewise.
        index: Which of its results it is, or which of the inputs.
        value: It, on the host, once somebody asks.
    """

    tensor: weakref.ref[Tensor]
    storage: int
    func: OpOverload | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    index: int
    value: Tensor | None = None


class HostHalf(TorchDispatchMode):
    """Records, while it is entered, what runs on the host; :meth:`run` does it again.

    On a CPU, where the emulated backend captures, those tensors are the host's that a factory makes
    without ``device=``, or with ``device="cpu"`` as a string, and what is computed from them. One
    generator serves both halves there: code that draws in both cannot be rehearsed.

    Args:
        device: Where the graph runs.
        inputs: The graph's inputs on the device.
        copies: What the host has of each of them; None where it has nothing.
        capacity: Bytes on the device for what goes there.
    """

    def __init__(
        self,
        device: torch.device,
        inputs: Sequence[Tensor],
        copies: Sequence[Tensor | None],
        capacity: int = 2**20,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self._emulated = device.type == "cpu"
        self._arena = torch.empty(capacity, dtype=torch.uint8, device=device)
        self._needed = 0
        self._states = {torch.default_generator: torch.get_rng_state()}
        self._draws_from: list[torch.Generator] = []
        self._begun: dict[torch.Generator, Tensor] = {}
        self._operations: list[_Operation] = []
        self._constants: list[tuple[Tensor, Tensor]] = []
        self._known: dict[int, _Known] = {}
        self._values: list[Any] = []
        self._makes_on_host = False
        self._device_draws = False
        self._derived: dict[int, _Derived] = {}
        self._written: set[int] = set()
        self._copies = list(copies)
        self._reads_inputs: list[tuple[int, int]] = []
        for i, (tensor, copy) in enumerate(zip(inputs, copies, strict=True)):
            if copy is not None:
                self._derived[id(tensor)] = _record(tensor, None, (), {}, i)
        self._functions = _Functions(self)
        self._sites = CallSiteFinder()

    def __enter__(self) -> HostHalf:
        super().__enter__()  # type: ignore[no-untyped-call]
        self._functions.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exc: Any) -> None:
        self._functions.__exit__(*exc)  # type: ignore[no-untyped-call]
        super().__exit__(*exc)  # type: ignore[no-untyped-call]

    # ------------------------------------------------------------------ replays

    @property
    def read(self) -> tuple[Any, ...]:
        """What Python was told of values that every replay computes anew."""
        return tuple(o.read for o in self._operations if o.func in _READS)

    @torch.no_grad()
    def run(self, copies: Callable[[], Sequence[Tensor | None]]) -> bool:
        """Compute what the coming replay needs.

        Args:
            copies: Tells what the host has of each input.

        Returns:
            Whether Python would be told what it was told then. If not, the generators are where
            they were, and the graph is not for this step.
        """
        values = self._values
        if self._reads_inputs:
            given = copies()
            for register, i in self._reads_inputs:
                if given[i] is None:
                    return False
                values[register] = given[i]
        self._begun = {generator: generator.get_state() for generator in self._draws_from}
        for operation in self._operations:
            args = [_resolved(a, values) for a in operation.args]
            kwargs = {k: _resolved(v, values) for k, v in operation.kwargs.items()}
            result = operation.func(*args, **kwargs)
            if operation.func in _READS:
                if not _same(result, operation.read):
                    self.rewind()
                    return False
                continue
            for register, tensor in zip(operation.results, tensors_in(result), strict=True):
                values[register] = tensor
        return True

    def rewind(self) -> None:
        """Put the generators back to where they were before the last :meth:`run`."""
        for generator, state in self._begun.items():
            generator.set_state(state)

    # ------------------------------------------------------------------ the end of a capture

    def finish(self) -> HostHalf | None:
        """Keep what replays need, at the end of all captures.

        Returns:
            Itself; None where nothing was done on the host that replays need.

        Raises:
            ArenaFull: it needs more memory on the device.
            CaptureError: it cannot be done again by itself, or is kept beyond the captured code.
        """
        if self._needed > self._arena.nbytes:
            raise ArenaFull(self._needed)
        if self._emulated and self._device_draws and any(o.draws for o in self._operations):
            raise CaptureError(
                "One generator serves host and device on a CPU.",
                "the captured code draws in both halves",
                "capture it on a GPU, or rehearse it without dropout",
            )
        self._refuse_what_is_kept()
        with torch.no_grad():
            for static, value in self._constants:
                static.copy_(value)
        drawn = dict(self._states)
        self._draws_from = list({o.draws: None for o in self._operations if o.draws is not None})
        if not self.run(lambda: self._copies) or any(
            not torch.equal(g.get_state(), s) for g, s in drawn.items()
        ):
            self.rewind()
            raise CaptureError(_RULE, "it draws or branches out of sight", _REMEDY)
        self.rewind()
        self._constants.clear()
        self._copies.clear()
        return self if self._operations or self._needed else None

    def _refuse_what_is_kept(self) -> None:
        """A replay would leave another value there."""
        if any(o.func not in _READS for o in self._operations):
            gc.collect()  # frames of the code that was captured
        changing = [k for k in self._known.values() if k.register is not None]
        others = {k.tensor.untyped_storage()._cdata for k in changing if not k.born}
        born = [k.tensor for k in changing if k.tensor.untyped_storage()._cdata not in others]
        del changing
        self._known.clear()
        self._derived.clear()
        uses = Counter(tensor.untyped_storage()._cdata for tensor in born)
        for tensor in born:
            storage = tensor.untyped_storage()
            # Each of our tensors uses it, and so does the name above. Of the tensor know `born`,
            # the values of replays, the name in this loop and the call.
            if storage_uses(storage) > uses[storage._cdata] + 1 or sys.getrefcount(tensor) > 4:
                self._refuse(f"a tensor of the host, {tuple(tensor.shape)}, is kept or returned")

    # ------------------------------------------------------------------ while code is captured

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        inputs = [t for value in (*args, *kwargs.values()) for t in tensors_in(value)]
        hosts = [t for t in inputs if self._is_host(t)]
        if not hosts and (inputs or not self._makes(kwargs)):
            if (found := self._read(func, args, kwargs, inputs)) is not _UNKNOWN:
                return found
            self._device_draws |= torch.Tag.nondeterministic_seeded in func.tags
            return self._derive(func, args, kwargs, func(*args, **kwargs))
        if len(hosts) == len(inputs):
            target = kwargs.get("device")
            if not self._emulated and target is not None and target.type != "cpu":
                return self._copied(args[0], {**kwargs, "device": None})
            return self._on_host(func, args, kwargs, hosts)
        for tensor in written_tensors(func, args, kwargs):
            if self._is_host(tensor):
                return func(*args, **kwargs)  # a host read: refused as ever
        move = self._moving(func, [t for t in inputs if not self._is_host(t)])
        moved = tuple(_mapped(a, move) for a in args)
        named = {k: _mapped(v, move) for k, v in kwargs.items()}
        return self._derive(func, args, kwargs, func(*moved, **named))

    def _is_host(self, tensor: Tensor) -> bool:
        if self._emulated:
            known = self._known.get(id(tensor))
            return known is not None and known.tensor is tensor
        return tensor.device.type == "cpu"

    def _makes(self, kwargs: Mapping[str, Any]) -> bool:
        """Whether an operator without tensors makes one on the host."""
        if self._emulated:
            return self._makes_on_host
        device = kwargs.get("device")
        return device is not None and device.type == "cpu"

    def _on_host(
        self,
        func: OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        inputs: Sequence[Tensor],
    ) -> Any:
        known = [self._know(func, tensor) for tensor in inputs]
        generator = self._generator(func, kwargs)
        changes = generator is not None or any(k.register is not None for k in known)
        written = list(written_tensors(func, args, kwargs))
        for tensor in written:
            self._before_write(func, tensor, changes)
        if changes:
            recorded = tuple(_mapped(a, self._reference) for a in args)
            named = {k: _mapped(v, self._reference) for k, v in kwargs.items()}
        with out_of_sight():
            result = self._drawing(generator, func, args, kwargs)
        outputs = list(tensors_in(result))
        if not changes:
            for tensor in outputs:
                self._meet(tensor, None)
            return result
        if not outputs:
            if func not in _READS:
                self._refuse(f"{func}")
            self._operations.append(_Operation(func, recorded, named, [], read=result))
            return result
        results = [self._meet(tensor, _Register(len(self._values))) for tensor in outputs]
        self._operations.append(_Operation(func, recorded, named, results, generator))
        return result

    def _know(self, func: OpOverload, tensor: Tensor) -> _Known:
        known = self._known.get(id(tensor))
        if known is None or known.tensor is not tensor:
            # What torch makes of Python numbers by itself is a constant. What was there before may
            # change: it is read anew by every replay.
            constant = func is aten.lift_fresh.default
            register = None if constant else _Register(len(self._values))
            if register is not None:
                self._values.append(tensor)
            known = self._known[id(tensor)] = _Known(tensor, register, born=False)
        return known

    def _meet(self, tensor: Tensor, register: _Register | None) -> int:
        """Know a tensor that an operator returned; the place where replays have it, or -1."""
        known = self._known.get(id(tensor))
        if known is not None and known.tensor is tensor:  # it was written in place
            return -1 if known.register is None else known.register.index
        self._known[id(tensor)] = _Known(tensor, register, born=True)
        if register is None:
            return -1
        self._values.append(tensor)
        return register.index

    def _before_write(self, func: OpOverload, tensor: Tensor, changes: bool) -> None:
        """Let a constant that is about to be written be computed anew by replays."""
        known = self._known[id(tensor)]
        if not known.born:
            self._refuse(f"{func} writes a tensor that was there before")
        if not changes or known.register is not None:
            return
        with out_of_sight():
            value = tensor.clone()
        storage = tensor.untyped_storage()._cdata
        others = [k for k in self._known.values() if k is not known]
        # Two references to what nobody else has: that of the record, and that of the call.
        alive = [k for k in others if sys.getrefcount(k.tensor) > 2]
        if any(k.tensor.untyped_storage()._cdata == storage for k in alive):
            self._refuse(f"{func} writes a view")
        known.register = _Register(len(self._values))
        self._values.append(tensor)
        clone = _Operation(aten.clone.default, (value,), {}, [known.register.index])
        self._operations.append(clone)

    def _reference(self, tensor: Tensor) -> Tensor | _Register:
        register = self._known[id(tensor)].register
        return tensor if register is None else register

    def _generator(self, func: OpOverload, kwargs: Mapping[str, Any]) -> torch.Generator | None:
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return None
        given = kwargs.get("generator")
        if given is None:
            return torch.default_generator
        same = (g for g in self._states if generator_identity(g) == generator_identity(given))
        return next(same, given)

    def _drawing(
        self,
        generator: torch.Generator | None,
        func: OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run an operator; the generator that it draws from is left where a capture found it."""
        if generator is None:
            return func(*args, **kwargs)
        found = generator.get_state()
        if generator not in self._states:
            self._states[generator] = found
        generator.set_state(self._states[generator])
        try:
            return func(*args, **kwargs)
        finally:
            self._states[generator] = generator.get_state()
            generator.set_state(found)

    # ------------------------------------------------------------------ reads of the device

    def _derive(
        self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> Any:
        """Note how the host could compute what an operator of the device has returned."""
        for tensor in written_tensors(func, args, kwargs):
            self._written.add(tensor.untyped_storage()._cdata)
        outputs = list(tensors_in(result))
        if not (outputs and _is_exact(func, outputs)):
            return result
        records = []

        def record(tensor: Tensor) -> Any:
            records.append(tensor if self._is_host(tensor) else self._record(tensor))
            return records[-1]

        found = tuple(_mapped(a, record) for a in args)
        named = {k: _mapped(v, record) for k, v in kwargs.items()}
        if None not in records:
            for i, tensor in enumerate(outputs):
                self._derived[id(tensor)] = _record(tensor, func, found, named, i)
        return result

    def _record(self, tensor: Tensor) -> _Derived | None:
        """How the host can compute a tensor of the device; None if it cannot."""
        record = self._derived.get(id(tensor))
        if record is None or record.tensor() is not tensor or record.storage in self._written:
            return None
        return record

    def _read(
        self,
        func: OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        inputs: Sequence[Tensor],
    ) -> Any:
        """The result of an operator by which the host learns a value of the device."""
        target = kwargs.get("device")
        to_host = func is aten._to_copy.default and target is not None and target.type == "cpu"
        shapes = torch.Tag.dynamic_output_shape in func.tags and func.name() in _SHAPES
        if not (func in _READS or shapes or (to_host and not self._emulated)):
            return _UNKNOWN
        records = {id(tensor): self._record(tensor) for tensor in inputs}
        if None in records.values():
            return _UNKNOWN

        def on_host(tensor: Tensor) -> Tensor:
            record = records[id(tensor)]
            assert record is not None
            return self._computed(record)

        own = tuple(_mapped(a, on_host) for a in args)
        named = {k: _mapped(v, on_host) for k, v in kwargs.items()}
        found = self._on_host(func, own, named, [on_host(tensor) for tensor in inputs])
        if not shapes:
            return found
        for tensor in tensors_in(found):
            self._compare(_shape, tensor)
        return _mapped(found, lambda tensor: self._copied(tensor, {}))

    def _compare(self, func: Callable[..., Any], tensor: Tensor) -> None:
        """Let replays compare what Python is told of a tensor of the host."""
        register = self._known[id(tensor)].register
        if register is not None:
            self._operations.append(_Operation(func, (register,), {}, [], read=func(tensor)))

    def _computed(self, record: _Derived) -> Tensor:
        """A tensor of the device, computed on the host."""
        if record.value is None:
            if record.func is None:
                record.value = self._input(record.index)
            else:
                inputs: list[Tensor] = []

                def value(item: Any) -> Any:
                    if isinstance(item, (list, tuple)):
                        return [value(one) for one in item]
                    if isinstance(item, _Derived):
                        item = self._computed(item)
                    if isinstance(item, Tensor):
                        inputs.append(item)
                    return item

                args = tuple(map(value, record.args))
                kwargs = {k: value(v) for k, v in record.kwargs.items()}
                if isinstance(kwargs.get("device"), torch.device):
                    kwargs["device"] = torch.device("cpu")
                found = self._on_host(record.func, args, kwargs, inputs)
                record.value = list(tensors_in(found))[record.index]
        return record.value

    def _input(self, index: int) -> Tensor:
        copy = self._copies[index]
        assert copy is not None
        value = copy.detach()
        register = _Register(len(self._values))
        self._values.append(value)
        self._reads_inputs.append((register.index, index))
        self._known[id(value)] = _Known(value, register, born=False)
        return value

    # ------------------------------------------------------------------ to the device

    def _moving(self, func: OpOverload, on_device: Sequence[Tensor]) -> Callable[[Tensor], Tensor]:
        """How an operator of the device gets what it is given of the host."""

        def moved(tensor: Tensor) -> Tensor:
            if not self._is_host(tensor):
                return tensor
            changes = self._know(func, tensor).register is not None
            if tensor.dim() == 0 and func not in _TRANSFERS:
                if not changes:
                    return tensor  # kernels take it as a constant
                if any(t.is_floating_point() and t.dtype != tensor.dtype for t in on_device):
                    self._refuse(f"{func} rounds a number of the host otherwise on the device")
            return self._copied(tensor, {})

        return moved

    def _copied(self, tensor: Tensor, kwargs: dict[str, Any]) -> Tensor:
        """A tensor of the host on the device, as a copy that the captured code may write."""
        known = self._know(aten._to_copy.default, tensor)
        drop = ("device", "non_blocking", "pin_memory")
        kwargs = {k: v for k, v in kwargs.items() if k not in drop and v is not None}
        with out_of_sight():
            value = aten._to_copy.default(tensor, **kwargs)
            static = self._static(value)
            if self._emulated:  # there the captured code runs
                static.copy_(value)
        if known.register is None:
            self._constants.append((static, value))
        else:
            source = _Register(len(self._values))
            self._values.append(value)
            cast = _Operation(aten._to_copy.default, (known.register,), kwargs, [source.index])
            copy = _Operation(_copy_in, (static, source), {}, [source.index])
            self._operations += [cast, copy]
        return static.clone()

    def _static(self, value: Tensor) -> Tensor:
        """Memory on the device for a tensor of this shape."""
        span = sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True)) + 1
        size = span * value.element_size() if value.numel() else 0
        begin = self._needed
        self._needed += math.ceil(size / _ALIGNMENT) * _ALIGNMENT or _ALIGNMENT
        if self._needed > self._arena.nbytes:  # the capture is done again with more
            return torch.empty_strided(
                value.shape, value.stride(), dtype=value.dtype, device=self._device
            )
        flat = self._arena[begin : begin + size].view(value.dtype)
        return flat.as_strided(value.shape, value.stride(), flat.storage_offset())

    # ------------------------------------------------------------------ functions of Python

    def call(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call a Python function of torch, where the dispatcher would not show what it does."""
        name = getattr(func, "__name__", "")
        data = (*args, None, None)[name == "new_tensor"]
        if name in _TO_PYTHON and (value := self._to_python(name, args[0])) is not None:
            with out_of_sight():
                return func(value, *args[1:], **kwargs)
        if name in _FROM_PYTHON and any(self._changes(t) for t in tensors_in(data)):
            self._refuse(f"{name} of a tensor that changes from step to step")
        if name in _FROM_PYTHON and not isinstance(data, Tensor):
            return self._from_python(func, name, args, kwargs)
        if not self._emulated:
            return func(*args, **kwargs)
        if name in ("to", "cuda") and self._is_host(args[0]) and _names_device(args, kwargs):
            dtype = next((a for a in (*args, *kwargs.values()) if isinstance(a, torch.dtype)), None)
            return self._copied(args[0], {"dtype": dtype})
        if name in _FACTORIES and kwargs.get("device") in (None, "cpu"):
            self._makes_on_host = True
            try:
                return func(*args, **kwargs)
            finally:
                self._makes_on_host = False
        return func(*args, **kwargs)

    def _changes(self, tensor: Tensor) -> bool:
        known = self._known.get(id(tensor))
        return known is not None and known.tensor is tensor and known.register is not None

    def _to_python(self, name: str, tensor: Any) -> Tensor | None:
        """The tensor of the host of which Python is told all values; None if there is none."""
        record = self._record(tensor) if isinstance(tensor, Tensor) else None
        if record is not None and not self._is_host(tensor):
            if name != "tolist":
                return None
            tensor = self._computed(record)
        if not (isinstance(tensor, Tensor) and self._changes(tensor)):
            return tensor if record is not None else None
        if name in ("data_ptr", "__dlpack__"):
            self._refuse(f"{name} of a tensor that changes from step to step")
        with out_of_sight():
            self._compare(_numbers, tensor)
        return tensor

    def _from_python(
        self, func: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """A tensor of Python's numbers: a constant."""
        device = kwargs.get("device")
        if device is None and name == "new_tensor":
            device = args[0].device
        host = {**kwargs, "device": "cpu"}
        if name == "new_tensor":
            host["dtype"] = kwargs.get("dtype") or args[0].dtype
        grad = bool(host.pop("requires_grad", False))
        with out_of_sight():
            value: Tensor = func(*args, **host)
        self._known[id(value)] = _Known(value, None, born=True)
        # On a CPU, what names the device by an object means that of the module.
        on_host = device is None or torch.device(device).type == "cpu"
        on_host = on_host and not (self._emulated and isinstance(device, torch.device))
        result = value if on_host else self._copied(value, {})
        return result.requires_grad_() if grad else result

    def _refuse(self, what: str) -> None:
        raise CaptureError(_RULE, f"{what}, at {self._sites.here().describe()}", _REMEDY)


class _Functions(TorchFunctionMode):
    """Shows Python functions of torch to a host half."""

    def __init__(self, half: HostHalf) -> None:
        super().__init__()
        self._half = half

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return self._half.call(func, args, kwargs or {})


def _copy_in(static: Tensor, value: Tensor) -> Tensor:
    static.copy_(value, non_blocking=True)
    return value


def _shape(value: Tensor) -> torch.Size:
    return value.shape


def _numbers(value: Tensor) -> tuple[torch.Size, tuple[Any, ...]]:
    return value.shape, tuple(value.flatten().tolist())


_UNKNOWN = object()
_SHAPES = ("aten::nonzero", "aten::_unique2", "aten::unique_consecutive", "aten::unique_dim")
_READS = frozenset(
    {aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default}
    | {_shape, _numbers}
)


def _record(
    tensor: Tensor, func: OpOverload | None, args: tuple[Any, ...], kwargs: Any, index: int
) -> _Derived:
    return _Derived(weakref.ref(tensor), tensor.untyped_storage()._cdata, func, args, kwargs, index)


def _is_exact(func: OpOverload, outputs: Sequence[Tensor]) -> bool:
    """Whether an operator computes the same on every device."""
    name = func._schema.name.removeprefix("aten::")
    if name.startswith("empty") or name in _TIES or func.namespace != "aten":
        return False
    if torch.Tag.nondeterministic_seeded in func.tags or func._schema.is_mutable:
        return False
    is_view = any(r.alias_info is not None for r in func._schema.returns)
    return is_view or name in _SELECTIONS or not any(t.is_floating_point() for t in outputs)


def _resolved(value: Any, values: Sequence[Any]) -> Any:
    kind = type(value)
    if kind is _Register:
        return values[value.index]
    if kind is list or kind is tuple:
        return [_resolved(item, values) for item in value]
    return value


def _mapped(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """An argument with its tensors changed; schemas nest lists one deep at most."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, (list, tuple)):
        return [change(item) if isinstance(item, Tensor) else item for item in value]
    return value


def _same(a: Any, b: Any) -> bool:
    return bool(a == b) or (a != a and b != b)


def _names_device(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    given = (*args[1:], kwargs.get("device"), kwargs.get("other"))
    return any(isinstance(a, (torch.device, Tensor)) for a in given)
