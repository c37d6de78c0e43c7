"""Calls that captures keep back: every replay makes them, with the outputs of its graphs.

A call that reads values on the host cannot be captured. Where its result is only logged or stored,
it need not be: a capture that is refused inside of such a call learns its place in the code, and
the next one gives a tracer for its result, on which user code may compute further.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import operator
import sys
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from types import CodeType, FrameType, FunctionType
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from lightning_graphs.device.rules import (
    DYNAMIC_SHAPE,
    HOST_READ,
    LINEAR_ALGEBRA,
    NOT_RECORDED,
    STORED,
)
from lightning_graphs.device.trace import FunctionMode
from lightning_graphs.errors import CaptureError, causes_of
from lightning_graphs.private.exchange import Member, called_instead, exchanged, standing_in
from lightning_graphs.private.source import instruction_at
from lightning_graphs.private.torch import plain, version_of
from lightning_graphs.values.memory import RETURNED, clone_all, storage_address
from lightning_graphs.values.tree import leaves_of, substitute
from lightning_graphs.watch.host import RULE as ON_HOST
from lightning_graphs.watch.tracers import (
    OPERATIONS,
    OURS,
    Asks,
    Kind,
    Operation,
    Question,
    Tracer,
    calls_followed,
    is_of_others,
    present,
    special,
    tensors_asked,
)
from lightning_graphs.watch.user_code import UserCode, objects_in

Given = tuple[Sequence[Any], Mapping[str, Any]]
"""Arguments of a call, by place and by name."""

Keep = Callable[[Callable[..., Any], Given, "Use"], "LateValue"]
"""Keeps a call back: its function, its arguments and what its result is; gives the tracer."""

# ------------------ What a kept call gives


@dataclass(frozen=True)
class Use:
    """What a capture says of a value that it does not have."""

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

    def __init__(self, use: Use) -> None:
        self._value: Any = None
        self._use = use
        self.kind: type | None = None  # ``float`` or ``int``, where it is known to be one
        itself = weakref.ref(self)  # no cycle: a pure call is dropped once its tracer is gone
        super().__init__(use.name, lambda: getattr(itself(), "_value", None), use.refuse)

    def give(self, value: Any) -> None:
        """Take the value of the present replay."""
        self._value = value

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        frame: Any = sys._getframe(1)
        if self._use.is_own(frame):  # it goes one way or the other by the type
            self.refuse()
        return type(self)

    def applied(self, function: Callable[..., Any], args: Sequence[Any]) -> LateValue:
        """Keep back ``float``, ``int`` and functions of ``math``."""
        if function is self.kind:
            return self
        frame = _caller_past(OURS)
        if frame is None or not self._use.is_own(frame):
            self.refuse()
        return self._use.keep(function, (args, {}), self._use)

    def use(self, operation: Operation, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Keep back what a special method does, but for those that need the value."""
        if operation.kind not in _LATER and operation.name not in ("__getitem__", "__round__"):
            return super().use(operation, args, kwargs)
        operands = (*args, self) if operation.is_swapped else (self, *args)
        return self._kept(operation.function, *operands, depth=3)

    def _kept(
        self, function: Callable[..., Any], *args: Any, depth: int = 2, **kwargs: Any
    ) -> LateValue:
        if not self._use.is_own(sys._getframe(depth)):
            self.refuse()
        return self._use.keep(function, (args, kwargs), self._use)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # torch and copy ask whether there is such a protocol
            raise AttributeError(name)
        frame = sys._getframe(1)
        asks = not instruction_at(frame).opname.startswith("LOAD_")  # hasattr
        if asks or name.endswith("_") or name in _NOT_LATER:
            self.refuse()
        found = self._kept(getattr, self, name)
        if name in _OF_ONE_SHAPE:
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

    def __iter__(self) -> Iterator[Any]:
        """Give all rows, or as many parts as the statement that unpacks it has targets."""
        frame = sys._getframe(1)
        unpacks = instruction_at(frame)
        rows = unpacks.arg if unpacks.opname == "UNPACK_SEQUENCE" else (*self.sizes, None)[0]
        if rows is None or rows > _MOST_ROWS or not self._use.is_own(frame):
            self.refuse()
        found = [
            self._use.keep(operator.getitem, ((self, i), {}), self._use) for i in range(rows or 0)
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
        if frame is None or not late._use.is_own(frame):
            late.refuse()
        if _acts(getattr(function, "__name__", ""), kwargs or {}):
            late.refuse()
        return late._use.keep(function, (args, kwargs or {}), late._use)

    def __array_function__(
        self, function: Any, types: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> LateValue:
        if _acts(function.__name__, kwargs):
            self.refuse()
        return self._kept(function, *args, **kwargs)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> LateValue:
        if _acts(method, kwargs):
            self.refuse()
        return self._kept(getattr(ufunc, method), *inputs, **kwargs)


LateValue.__rmatmul__ = special(OPERATIONS["__rmatmul__"])  # type: ignore[attr-defined]
_LATER = (Kind.ARITHMETIC, Kind.COMPARISON, Kind.UNARY)
_OF_ONE_SHAPE = ("cpu", "to", "detach", "clone", "float", "numpy", "astype", "tolist")
"""Methods whose result has the shape of what they are called on."""
_MOST_ROWS = 1024  # that a loop goes through
_NOT_LATER = frozenset({"backward", "grad", "data", "grad_fn", "register_hook"})
"""Attributes of tensors that reach into the step."""

_ACTING = frozenset({"backward", "grad", "__setitem__", "at", "copyto", "place", "put", "putmask"})
_DRAWING: tuple[str, ...] = (
    "dropout",
    "alpha_dropout",
    "feature_dropout",
    "bernoulli",
    "multinomial",
    "normal",
)
_DRAWING += ("poisson", "rand_like", "randn_like", "randint_like", "rrelu", "gumbel_softmax")


def _acts(name: str, kwargs: Mapping[str, Any]) -> bool:
    """Return whether a function of torch or NumPy writes, draws or runs a backward pass."""
    if name.endswith("__"):  # of operators: "__iadd__" and the like write
        writes = name.startswith("__i") and name not in ("__invert__", "__index__", "__int__")
    else:
        writes = name.endswith("_")
    return writes or name in _ACTING or name in _DRAWING or kwargs.get("out") is not None


def _caller_past(*packages: str) -> FrameType | None:
    """Return the innermost frame outside of these packages; None inside of a layer of torch."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.startswith("torch.nn.modules."):  # which writes buffers
            return None
        if not name.startswith(packages):
            break
        frame = frame.f_back
    return frame


def _call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


class LateCall:
    """A call that every replay makes, on copies of its tensors, in the modes of the capture."""

    def __init__(
        self, function: Callable[..., Any], given: Given, tensors: list[Tensor], device: str
    ) -> None:
        self._function, self.tensors = function, tensors
        # A number is read where it is
        self._number = function is _ITEM and len(given[0]) == 1 and isinstance(given[0][0], Tensor)
        self._template = substitute(given, tensors)
        self._has_tracers = bool(leaves_of(given, Tracer))
        # Of autocast: the type of the device, and in which type it computes; None if it is off
        self._casts: tuple[str, torch.dtype] | None = None
        if torch.is_autocast_enabled(device):
            self._casts = device, torch.get_autocast_dtype(device)
        self.take: Callable[[Any], object] = lambda value: None  # called with each result
        # Whether something refers to its result, of which every replay has one
        self.is_needed: Callable[[], object] = lambda: True
        self._reads_number = getattr(function, "__name__", "") == "item" and not given[1]
        self._late: Callable[[], LateValue | None] = lambda: None

    def give(self, late: LateValue, *, is_pure: bool) -> None:
        """Give each result to a tracer; a pure call is needed as long as there is the tracer."""
        self.take, self._late = late.give, weakref.ref(late)
        if is_pure:
            known = self._late
            self.is_needed = lambda: known() is not None

            def take(value: Any) -> None:
                if (tracer := known()) is not None:
                    tracer.give(value)

            self.take = take

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
        if self._casts is None:
            self.take(self._function(*args, **kwargs))
            return
        with torch.autocast(self._casts[0], self._casts[1]):
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
        self._state = frozenset(storage_address(t) for t in plain(state)) - {0}
        self._device, self._copied = device, copied
        self._versions: list[tuple[str, Tensor, int]] = []
        self._is_finished = False  # the forward pass is over, and with it what may be kept back

    def keep(self, function: Callable[..., Any], given: Given, use: Use) -> LateValue:
        """Keep a call back; see :data:`Keep`."""
        if self._is_finished:
            use.refuse(use.name)
        late = LateValue(use)
        self.add(function, given, use.name).give(late, is_pure=use.is_pure)
        return late

    def add(self, function: Callable[..., Any], given: Given, name: str) -> LateCall:
        """Add a call, whose result nothing has yet."""
        bounds = [(part.start, part.stop, part.step) for part in leaves_of(given, slice)]
        for tracer in leaves_of(bounds, Tracer):  # in a slice no replay would find it
            tracer.refuse()
        for tracer in leaves_of(given, Tracer):
            if not tracer.may_be_kept:
                tracer.refuse()
            tracer.now()  # or a refusal, where no replay has the value
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


# ------------------ Which calls are kept back

Site = tuple[CodeType, object]
"""Code that calls, and where in it: a call has several instructions, of which each may fail."""


Entry = tuple[FrameType, int, int]
"""A frame of a stack, with the offset of its instruction and its line."""


class CallAt(NamedTuple):
    """A call in user code."""

    code: CodeType
    offset: int  # of its instruction
    line: int
    module: str  # whose code it is

    @classmethod
    def of(cls, entry: Entry) -> CallAt:
        frame, offset, line = entry
        return cls(frame.f_code, offset, line, frame.f_globals.get("__name__", ""))


Texts = tuple[str, str, str]
"""Rule, what was observed, and remedy."""


def _site(code: CodeType, offset: int) -> Site:
    positions = getattr(code, "co_positions", None)  # since Python 3.11
    return code, offset if positions is None else next(islice(positions(), offset // 2, None))


LATE_RULES = {o.rule for o in (HOST_READ, DYNAMIC_SHAPE, LINEAR_ALGEBRA, NOT_RECORDED)}
"""Of what a call may be refused for that is kept back."""
_KEPT_RULES = {ON_HOST, STORED.rule, RETURNED}
"""Of what a step is refused for that keeps what it has read on the host."""
_MOST = 24
"""Calls of one fit that are kept back."""


@dataclass(eq=False)
class _Kept:
    """A call that is kept back."""

    name: str
    error: Texts  # the refusal inside of it
    functions: Sequence[FunctionType]  # that run its code; none if it is in C
    module: str  # whose code calls it
    is_used: bool = False  # a capture needs its value


class KeptCalls:
    """Learns which calls of a fit's steps are kept back, and keeps them back in captures."""

    def __init__(self, own: UserCode, freezing: str = "") -> None:
        self.own = own
        self._freezing = freezing  # the rule against numbers that a graph would log for ever
        self.known: dict[Site, _Kept] = {}
        self._unfit: set[Site] = set()  # their values are needed by the step
        # Also reads of what the host has ahead of a replay; else those are no calls behind it
        self.keeps_known = False
        self._declined: set[Site] = set()  # such reads
        self._has_answered = False  # or there were some, whose values the step has got
        self.logged: set[str] = set()  # names under which such values are logged

    def learn(self, error: CaptureError, reads: Iterable[CallAt] = ()) -> bool:
        """Find the call that a refusal arose in; whether the next capture keeps back another one.

        A call whose value was used is a part of the step again, unless what used it is a call that
        can be kept back in turn. Of reads which the host has answered, a number that is only logged
        needs no answer: all of them are kept back where the step logs one that changes.
        """
        used = {site: kept for site, kept in self.known.items() if kept.is_used}
        texts = next((kept.error for kept in used.values()), None)
        if texts is None and (error.rule in LATE_RULES or error.__cause__ is not None):
            texts = error.rule, error.observed, error.remedy
        for at in causes_of(error):
            frames = [*_entries(at)]
            if texts is not None and any(self.own.runs_in(frame) for frame, *_ in frames):
                anyway = bool(used) or error.rule in LATE_RULES
                if self.learn_call(frames, texts, anyway=anyway):
                    for kept in used.values():
                        kept.is_used = False
                    return True
                break
        # With the values that the host has ahead of a replay it may succeed
        declined = {site: self.known[site] for site in self._declined & self.known.keys()}
        answered = {site for site, kept in declined.items() if kept.error == texts}
        if not answered and error.__cause__ is not None:  # C code may not ask what it is given
            answered = set(declined)
        dropped = self.drop_used()
        for site in answered:
            self.known.pop(site, None)
        self._unfit |= answered
        self._declined -= answered
        asks = self._has_answered and error.rule in _KEPT_RULES and not self.keeps_known
        self.keeps_known |= asks
        if error.rule == self._freezing:
            return self._learn_reads(error, reads) or dropped
        return bool(answered) or asks or dropped

    def declines(self, frame: FrameType) -> bool:
        """Whether a read that a frame makes is kept back, though a replay could repeat it ahead."""
        if not self.own.runs_in(frame) or len(self.known) >= _MOST:
            return False
        site = _site(frame.f_code, frame.f_lasti)
        self._has_answered |= not self.keeps_known
        if not self.keeps_known or site in self._unfit:
            return False
        self._declined.add(site)
        return True

    def drop_used(self) -> bool:
        """Let steps make those calls again whose values were used; tell if there are any."""
        used = [site for site, kept in self.known.items() if kept.is_used]
        for site in used:
            del self.known[site]
            self._unfit.add(site)
        return bool(used)

    def learn_call(self, frames: Sequence[Entry], error: Texts, *, anyway: bool) -> str:
        """Keep back the innermost call from user code; its name, empty if that cannot be.

        Args:
            frames: The stack, outer frames first.
            error: The refusal inside of it.
            anyway: Also if it is given nothing that is kept back.
        """
        inside = [i for i, (frame, *_) in enumerate(frames) if self.own.runs_in(frame)]
        if not inside or len(self.known) >= _MOST:
            return ""
        frame, offset, line = frames[inside[-1]]
        site = _site(frame.f_code, offset)
        callee = next((f for f, *_ in frames[inside[-1] + 1 :]), None)
        known = self.known.get(site)
        if site in self._unfit or (known is not None and (known.is_used or not known.functions)):
            return ""
        if not anyway and (callee is None or not _is_given_late(callee)):
            return ""
        functions: list[FunctionType] = []
        if callee is not None and not callee.f_globals.get("__name__", "").startswith(OURS):
            functions = _functions_of(callee)
            if not functions:
                return ""
        if known is not None:  # one that calls several functions in turn
            new = [function for function in functions if function not in known.functions]
            known.functions = [*known.functions, *new]
            return known.name if new else ""
        return self._keep_at(CallAt.of((frame, offset, line)), error, functions)

    def _learn_reads(self, error: CaptureError, reads: Iterable[CallAt]) -> bool:
        texts = error.rule, error.observed, error.remedy
        sites = {_site(at.code, at.offset): at for at in reads}
        new = [at for site, at in sites.items() if site not in self._unfit | self.known.keys()]
        for at in new[: _MOST - len(self.known)]:
            self._keep_at(at, texts, ())
        return bool(new) and len(self.known) < _MOST

    def _keep_at(self, at: CallAt, error: Texts, functions: Sequence[FunctionType]) -> str:
        name = f"what is kept back at {at.code.co_filename}:{at.line}"
        self.known[_site(at.code, at.offset)] = _Kept(name, error, functions, at.module)
        return name

    @contextlib.contextmanager
    def exchanged(self, keep: Keep) -> Iterator[None]:
        """Keep back the known calls of Python functions in the body, a capture."""
        functions = dict.fromkeys(f for kept in self.known.values() for f in kept.functions)
        with called_instead({function: partial(self._instead, keep) for function in functions}):
            yield

    @contextlib.contextmanager
    def of_torch(self, keep: Keep, *, by_methods: bool) -> Iterator[None]:
        """Keep back the known calls of functions in C in the body, code under capture.

        These are torch's, and ``float`` and ``int`` of a tensor.

        Args:
            keep: Keeps them back.
            by_methods: Only calls of the methods that most often read. For a mode of functions
                compiled code in the body would be compiled again, in the capture.
        """
        asking = {kept.module for kept in self.known.values() if not kept.functions}
        if not asking:
            yield
            return

        def number(asked: Question) -> LateValue | None:
            (tensor, *_) = asked.tensors
            use = self.use_at(asked.frame, keep) if asked.asks is Asks.NUMBER else None
            if use is None or tensor.numel() != 1:
                return None
            late = keep(_ITEM, ((tensor,), {}), replace(use, is_pure=True))
            is_real = tensor.dtype is not torch.bool and not tensor.is_complex()
            if type(late) is LateValue and is_real:
                late.kind = float if tensor.is_floating_point() else int
            return late

        modules = asking & sys.modules.keys()
        conversions = {(name, kind) for name in modules for kind in (float, int)}
        chosen = [(sys.modules[m], f.__name__, _among_late(f)) for m in modules for f in (max, min)]
        calls = _CallsOfTorch(self, keep)
        reads = exchanged(calls.members) if by_methods else calls
        with calls_followed(conversions), tensors_asked(number), exchanged(chosen), reads:
            yield

    def use_at(self, frame: FrameType, keep: Keep) -> Use | None:
        """Return what is to be kept back of the call that a frame makes; None for another call."""
        if frame.f_code not in {code for code, _ in self.known}:
            return None
        kept = self.known.get(_site(frame.f_code, frame.f_lasti))
        if kept is None:
            return None
        return Use(kept.name, functools.partial(_refuse, kept), self.own.runs_in, keep)

    def _instead(
        self, keep: Keep, function: Callable[..., Any], frame: FrameType, *args: Any, **kwargs: Any
    ) -> Any:
        use = self.use_at(frame, keep)
        return function(*args, **kwargs) if use is None else keep(function, (args, kwargs), use)


_READING = frozenset(
    {"item", "tolist", "numpy", "cpu", "to", "__getitem__", "nonzero", "argwhere", "bincount"}
    | {"masked_select", "svd", "svdvals", "eigh", "eigvalsh", "eig", "eigvals", "matrix_rank"}
)
"""Functions that read values on the host, also for the shapes of their results."""


class _CallsOfTorch(FunctionMode):
    """Keeps back calls of torch's functions in C.

    Exchanged in their class, methods such as ``__getitem__`` would leave another class behind.
    """

    def __init__(self, kept: KeptCalls, keep: Keep) -> None:
        super().__init__(self._see)
        self._kept, self._keep = kept, keep

    def _see(self, function: Any, args: Any, kwargs: Any) -> Any:
        return self._called(function, sys._getframe(1), args, kwargs)

    @property
    def members(self) -> list[Member]:
        """The methods that most often read, each with what keeps its calls back."""
        return [self._member(name) for name in ("item", "tolist", "cpu", "numpy", "to")]

    def _member(self, name: str) -> Member:
        own = getattr(Tensor, name)

        def read(frame: FrameType, *args: Any, **kwargs: Any) -> Any:
            return self._called(own, frame, args, kwargs)

        return Tensor, name, standing_in(own, read)

    def _called(self, function: Any, frame: Any, args: Any, kwargs: Any) -> Any:
        while not is_of_others(frame):  # what passes calls of tensors' methods on
            frame = frame.f_back
        use = self._kept.use_at(frame, self._keep)
        name = getattr(function, "__name__", "").removeprefix("linalg_")
        if use is None or name not in _READING:
            return function(*args, **kwargs)
        late = self._keep(function, (args, kwargs), replace(use, is_pure=True))
        if name in _OF_ONE_SHAPE and type(late) is LateValue:  # the doctor makes the call
            late.sizes = tuple(args[0].shape)
        return late


def _among_late(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(_: FrameType, *args: Any, **kwargs: Any) -> Any:
        late = next((a for a in args if isinstance(a, LateValue)), None)
        if late is None or kwargs:
            return function(*args, **kwargs)
        return late.applied(function, args)

    return standing_in(function, call)


_ITEM = Tensor.item


def _refuse(kept: _Kept, _: str) -> NoReturn:
    kept.is_used = True
    raise CaptureError(*kept.error)


def _is_given_late(frame: FrameType) -> bool:
    return bool(leaves_of([*frame.f_locals.values()], LateValue))


def _entries(error: BaseException) -> Iterator[Entry]:
    """Yield the entries of a traceback, outer ones first."""
    traceback = error.__traceback__
    while traceback is not None:
        yield traceback.tb_frame, traceback.tb_lasti, traceback.tb_lineno
        traceback = traceback.tb_next


def _functions_of(callee: FrameType) -> list[FunctionType]:
    """List the functions whose code a frame runs, of those that a class or module of Python holds.

    None where it may compute with modules.
    """
    code = callee.f_code
    first = callee.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
    is_special = code.co_name.startswith("__") or code.co_flags & _OF_GENERATORS
    if is_special or isinstance(first, nn.Module) or _holds_modules(callee.f_locals.values()):
        return []
    kinds = first.__mro__ if isinstance(first, type) else type(first).__mro__
    tables: list[Mapping[str, Any]] = [vars(kind) for kind in kinds]
    tables += [getattr(module, "__dict__", {}) for module in list(sys.modules.values())]
    held = (_function_in(value) for table in tables for value in list(table.values()))
    return [*{f: None for f in held if f is not None and f.__code__ is code}]


def _function_in(value: Any) -> FunctionType | None:
    value = value.__func__ if type(value) is staticmethod else value
    return value if type(value) is FunctionType else None


_OF_GENERATORS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


def _holds_modules(values: Iterable[Any]) -> bool:
    """Return whether a module is in one of these values: what computes with it is the step's."""
    seen: dict[int, Any] = {}
    given = (value for value in values if not isinstance(value, Tracer))
    held = (v for value in given for _, v in objects_in("", value, seen))
    return any(isinstance(v, (nn.Module, nn.Parameter)) for v in held)
