"""Calls that captures keep back: every replay makes them, with the outputs of its graphs.

A call that reads values on the host cannot be captured. Where its result is only logged or stored,
it need not be: a capture that is refused inside of such a call learns its place in the code, and
the next one gives a tracer for its result, on which user code may compute further.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import sys
import weakref
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import BuiltinFunctionType, FrameType, MethodType
from typing import Any, NoReturn

import torch
from torch import Tensor

from lightning_graphs.private.callsite import OURS, frames_from, instruction_at
from lightning_graphs.private.exchange import called_from, in_inference_mode
from lightning_graphs.private.torch import is_wrapped, version_of
from lightning_graphs.values.memory import Given, addresses_of, clone_all, storage_address
from lightning_graphs.values.tree import leaves_of, substitute
from lightning_graphs.watch.texts import joined, spelled
from lightning_graphs.watch.tracers import METHODS, Kind, Method, Tracer, present, special

Keep = Callable[[Callable[..., Any], Given, "LatePolicy"], "LateValue"]
"""Keeps a call back: its function, its arguments and what its result is; gives the tracer."""

# ------------------ What a kept call gives


@dataclass(frozen=True)
class LatePolicy:
    """Policy for a value that a capture does not have: what may be done with it."""

    name: str
    refuse: Callable[[str], NoReturn]  # raises the refusal of a use, given the name
    is_own: Callable[[FrameType], bool]  # whether a frame runs user code
    keep: Keep
    is_pure: bool = False  # without it there is no need for the call


class LateValue(Tracer):
    """Tracer for the result of a call that is kept back.

    What user code computes with it is kept back as well. Whatever else looks at it is refused: a
    branch, a torch operator whose result the loss needs, code of libraries.
    """

    sizes: Sequence[int] = ()  # of its dimensions, as far as the capture knows them
    _sizes_given: Sequence[int] = ()  # those of what it gives if it is called
    length: Callable[[], Any] | None = None  # of a list: gives how long it is by now

    def __init__(self, policy: LatePolicy) -> None:
        self._value: Any = None
        self._policy = policy
        self.kind: type | None = None  # ``float`` or ``int``, where it is known to be one
        itself = weakref.ref(self)  # no cycle: a pure call is dropped once its tracer is gone
        super().__init__(policy.name, lambda: getattr(itself(), "_value", None), policy.refuse)

    def give(self, value: Any) -> None:
        """Take the value of the present replay."""
        self._value = value

    def class_for(self, frame: FrameType) -> type:
        if not self._policy.is_own(frame):
            return type(self)
        if self.kind is None:  # the code goes one way or the other by the type
            self.refuse()
        return self.kind or type(self)

    def applied(self, function: Callable[..., Any], args: Sequence[Any]) -> Any:
        """Keep back ``float``, ``int``, functions of ``math`` and of lists."""
        if function is self.kind:
            return self
        if function is len and self.length is not None:
            return self.length()
        frame = _caller_past(OURS)
        if frame is None or not self._policy.is_own(frame):
            self.refuse()
        return self._policy.keep(function, (args, {}), self._policy)

    def use(self, method: Method, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Keep back what a special method does, but for those that need the value."""
        if method.kind not in _LATER and method.name not in ("__getitem__", "__round__"):
            return super().use(method, args, kwargs)
        operands = (*args, self) if method.is_swapped else (self, *args)
        return self._kept(method.function, *operands, depth=3)

    def _kept(
        self, function: Callable[..., Any], *args: Any, depth: int = 2, **kwargs: Any
    ) -> LateValue:
        if not self._policy.is_own(sys._getframe(depth)):
            self.refuse()
        return self._policy.keep(function, (args, kwargs), self._policy)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # torch and copy ask whether there is such a protocol
            raise AttributeError(name)
        frame = sys._getframe(1)
        asks = not instruction_at(frame).opname.startswith("LOAD_")  # hasattr
        if asks or name.endswith("_") or name in _NOT_LATER:
            self.refuse()
        found = self._kept(getattr, self, name)
        if name in OF_ONE_SHAPE:
            found._sizes_given = self.sizes
        return found

    def __call__(self, *args: Any, **kwargs: Any) -> LateValue:
        returned = self._kept(_call, self, *args, **kwargs)
        returned.sizes = self._sizes_given
        return returned

    def __len__(self) -> int:
        if not self.sizes:
            self.refuse()
        return self.sizes[0]

    def __iadd__(self, values: Any) -> Any:
        if self.length is None:
            return NotImplemented
        self._kept(operator.iadd, self, values)
        return self

    def __setitem__(self, key: Any, value: Any) -> None:
        self._change(operator.setitem, key, value)

    def __delitem__(self, key: Any) -> None:
        self._change(operator.delitem, key)

    def _change(self, function: Callable[..., Any], *args: Any) -> None:
        """Change a list; what changes another value could be seen through other names."""
        if self.length is None:
            self.refuse()
        self._kept(function, self, *args, depth=3)

    __enter__ = __exit__ = Tracer._refuse  # as of an open file

    def __iter__(self) -> Iterator[Any]:
        """Give all rows, or as many parts as the statement that unpacks it has targets."""
        frame = sys._getframe(1)
        unpacks = instruction_at(frame)
        rows = unpacks.arg if unpacks.opname == "UNPACK_SEQUENCE" else (*self.sizes, None)[0]
        if rows is None or rows > _MOST_ROWS or not self._policy.is_own(frame):
            self.refuse()
        found = [
            self._policy.keep(operator.getitem, ((self, i), {}), self._policy)
            for i in range(rows or 0)
        ]
        for row in found:
            row.sizes = self.sizes[1:]
        return iter(found)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Keep back what user code computes with it and with tensors, in functions of torch."""
        late = leaves_of((args, kwargs), LateValue)[0]
        frame = _caller_past("torch.", OURS)
        if frame is None or not late._policy.is_own(frame):
            late.refuse()
        if acts(getattr(function, "__name__", ""), kwargs or {}):
            late.refuse()
        return late._policy.keep(function, (args, kwargs or {}), late._policy)

    def __array_function__(
        self, function: Any, types: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> LateValue:
        if acts(function.__name__, kwargs):
            self.refuse()
        return self._kept(function, *args, **kwargs)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> LateValue:
        if acts(method, kwargs):
            self.refuse()
        return self._kept(getattr(ufunc, method), *inputs, **kwargs)


LateValue.__rmatmul__ = special(METHODS["__rmatmul__"])  # type: ignore[attr-defined]
_LATER = (Kind.ARITHMETIC, Kind.COMPARISON, Kind.UNARY)
OF_ONE_SHAPE = ("cpu", "to", "detach", "clone", "float", "numpy", "astype", "tolist")
"""Methods whose result has the shape of what they are called on."""
_MOST_ROWS = 1024  # that a loop goes through
_NOT_LATER = frozenset({"backward", "grad", "grad_fn", "register_hook"})
"""Attributes of tensors that reach into the step."""

_ACTING = frozenset({"backward", "grad", "__setitem__", "at", "copyto", "place", "put", "putmask"})
_ACTING |= {"fill_diagonal", "put_along_axis", "save", "savez", "savez_compressed", "savetxt"}
_DRAWING = frozenset(
    {"dropout", "alpha_dropout", "feature_dropout", "bernoulli", "multinomial", "normal"}
    | {"poisson", "rand_like", "randn_like", "randint_like", "rrelu", "gumbel_softmax"}
)


def acts(name: str, kwargs: Mapping[str, Any]) -> bool:
    """Return whether a function of torch or NumPy writes, draws or runs a backward pass."""
    if name.endswith("__"):  # of operators: "__iadd__" and the like write
        writes = name.startswith("__i") and name not in ("__invert__", "__index__", "__int__")
    else:
        writes = name.endswith("_")
    return writes or name in _ACTING or name in _DRAWING or kwargs.get("out") is not None


def _caller_past(*packages: str) -> FrameType | None:
    """Return the innermost frame outside of these packages; None inside of a layer of torch."""
    for frame in frames_from(sys._getframe(2)):
        name = frame.f_globals.get("__name__", "")
        if name.startswith("torch.nn.modules."):  # which writes buffers
            return None
        if not name.startswith(packages):
            return frame
    return None


def _call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def kept_if_late(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return what keeps a function in C back if it is given what comes late; the frame is first."""

    def call(frame: FrameType, *args: Any, **kwargs: Any) -> Any:
        late = next((a for a in args if isinstance(a, LateValue)), None)
        if late is None:
            return called_from(frame, function)(*args, **kwargs)
        return late.applied(functools.partial(function, **kwargs) if kwargs else function, args)

    return call


ITEM = Tensor.item


class LateCall:
    """A call that every replay makes, on copies of its tensors, in the modes of the capture."""

    def __init__(
        self, function: Callable[..., Any], given: Given, tensors: list[Tensor], device: str
    ) -> None:
        self._function, self.tensors = function, tensors
        # A number is read where it is
        self._number = function is ITEM and len(given[0]) == 1 and isinstance(given[0][0], Tensor)
        self._template = substitute(given, tensors)
        self._has_tracers = bool(leaves_of(given, Tracer))
        # Of autocast: the type of the device, and in which type it computes; None if it is off
        self._casts: tuple[str, torch.dtype] | None = None
        if torch.is_autocast_enabled(device):
            self._casts = device, torch.get_autocast_dtype(device)
        self._infers = in_inference_mode()  # what it has made there may be written nowhere else
        self.take: Callable[[Any], object] = lambda value: None  # called with each result
        # Whether something refers to its result, of which every replay has one
        self.is_needed: Callable[[], object] = lambda: True
        self._reads_number = getattr(function, "__name__", "") == "item" and not given[1]
        self._late: Callable[[], LateValue | None] = lambda: None

    def give(self, late: LateValue, *, is_pure: bool) -> None:
        """Give each result to a tracer; a pure call is needed as long as there is the tracer."""
        self._late = known = weakref.ref(late)

        def take(value: Any) -> None:
            if (tracer := known()) is not None:
                tracer.give(value)

        self.take = take
        if is_pure:
            self.is_needed = lambda: known() is not None

    def number_read(self, late: LateValue) -> Tensor | None:
        """Return the tensor whose one number a tracer of it stands for; None for other results."""
        is_that = self._reads_number and not self._has_tracers and self._late() is late
        return self.tensors[0] if is_that and len(self.tensors) == 1 else None

    def reissue(self, _: object = None) -> None:
        if self._number:
            self.take(self.tensors[0].item())
            return
        args, kwargs = substitute(self._template, clone_all(self.tensors))
        if self._has_tracers:
            args, kwargs = present((args, kwargs))
        if self._casts is None and not self._infers:
            self.take(self._function(*args, **kwargs))
            return
        with contextlib.ExitStack() as modes:
            if self._casts is not None:
                modes.enter_context(torch.autocast(self._casts[0], self._casts[1]))
            if self._infers:
                modes.enter_context(torch.inference_mode())
            self.take(self._function(*args, **kwargs))


class LateCalls:
    """The calls that one capture keeps back, in their order.

    Each is made after the whole step, on its tensors as they were: it gets copies of those that the
    step changes.

    Args:
        calls: Where they are added; the client may have its own between them.
        state: Parameters and buffers, which the step changes later on.
        device: The type of the device.
        copied: Names of calls whose tensors are copied, too.
    """

    def __init__(
        self, calls: list[Any], state: Iterable[Tensor], device: str, copied: Container[str]
    ) -> None:
        self.all = calls
        self._state = addresses_of(state)
        self._device, self._copied = device, copied
        self._versions: list[tuple[str, Tensor, int]] = []
        self._is_finished = False  # the forward pass is over, and with it what may be kept back

    def keep(self, function: Callable[..., Any], given: Given, policy: LatePolicy) -> LateValue:
        """Keep a call back; see :data:`Keep`."""
        methods = leaves_of(given, (MethodType, BuiltinFunctionType))
        # A capture has tracers, and copies, for containers that are state
        fills = any(isinstance(m.__self__, (Tracer, list, deque, dict, set)) for m in methods)
        ends = any(map(is_wrapped, leaves_of(given, Tensor)))  # before the call could be made
        if self._is_finished or fills or ends:
            policy.refuse(policy.name)
        given = spelled(
            given, lambda pieces: self._late(joined, ((pieces,), {}), policy, is_pure=True)
        )
        return self._late(function, given, policy, is_pure=policy.is_pure)

    def _late(
        self, function: Callable[..., Any], given: Given, policy: LatePolicy, *, is_pure: bool
    ) -> LateValue:
        late = LateValue(policy)
        self.add(function, given, policy.name).give(late, is_pure=is_pure)
        return late

    def add(self, function: Callable[..., Any], given: Given, name: str) -> LateCall:
        """Add a call, whose result nothing has yet."""
        bounds = [(part.start, part.stop, part.step) for part in leaves_of(given, slice)]
        for tracer in leaves_of(bounds, Tracer):  # in a slice no replay would find it
            tracer.refuse()
        for tracer in leaves_of(given, Tracer):
            if not tracer.may_be_kept:
                tracer.refuse()
        call = LateCall(function, given, self._own(name, given), self._device)
        self.all.append(call)
        return call

    def _own(self, name: str, given: Any) -> list[Tensor]:
        own = [tensor.detach() for tensor in leaves_of(given, Tensor)]
        copies = name in self._copied
        own = [t.clone() if copies or storage_address(t) in self._state else t for t in own]
        self._versions += [(name, t, version_of(t)) for t in own]
        return own

    def finish(self) -> Iterator[str]:
        """End the step's own code; name the calls whose tensors were changed since."""
        self._is_finished = True
        for late in [call for call in reversed(self.all) if isinstance(call, LateCall)]:
            if not late.is_needed():  # nor is what it was given, unless something else needs that
                self.all.remove(late)
        versions, self._versions = self._versions, []
        return (name for name, tensor, version in versions if version_of(tensor) != version)
