"""Which calls captures keep back, and how those are found.

A capture that is refused inside of a call learns its place in the code, and the next one gives what
stands for its result. So do calls that print or log, with texts which code makes for them.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from types import CodeType, FrameType, FunctionType
from typing import Any, NamedTuple, NoReturn

import numpy
import torch
from torch import Tensor, nn

from lightning_graphs.device.rules import (
    DYNAMIC_SHAPE,
    FILLED,
    HOST_READ,
    LINEAR_ALGEBRA,
    NOT_RECORDED,
    SIDE_EFFECT,
    STORED,
)
from lightning_graphs.device.trace import FunctionMode
from lightning_graphs.errors import CaptureError, causes_of, stop
from lightning_graphs.private.callsite import OURS, SUSPENDED, outside_of, position_of, positions_of
from lightning_graphs.private.exchange import (
    Member,
    called_from,
    called_instead,
    exchanged,
    is_exchanged,
    standing_in,
)
from lightning_graphs.values.guards import is_object
from lightning_graphs.values.memory import RETURNED, Given
from lightning_graphs.values.tree import leaves_of
from lightning_graphs.watch.host import RULE as ON_HOST
from lightning_graphs.watch.late import (
    ITEM,
    OF_ONE_SHAPE,
    Keep,
    LatePolicy,
    LateValue,
    acts,
    kept_if_late,
)
from lightning_graphs.watch.texts import (
    forget_parts,
    function_called,
    is_asked_for_text,
    is_call_there,
    is_statement,
    part_for,
    tellers,
)
from lightning_graphs.watch.tracers import (
    Asks,
    Nothing,
    Question,
    Tracer,
    calls_followed,
    tensors_asked,
    texts_made,
)
from lightning_graphs.watch.user_code import UserCode, objects_in

Site = tuple[CodeType, object]
"""Code that calls, and where in it: a call has several instructions, of which each may fail."""


RaisedAt = tuple[FrameType, int, int]
"""A frame of a stack, with the offset of its instruction and its line."""


class CallAt(NamedTuple):
    """A call in user code."""

    code: CodeType
    offset: int  # of its instruction
    line: int
    module: str  # whose code it is

    @classmethod
    def of(cls, entry: RaisedAt) -> CallAt:
        frame, offset, line = entry
        return cls(frame.f_code, offset, line, frame.f_globals.get("__name__", ""))


Texts = tuple[str, str, str]
"""Rule, what was observed, and remedy."""


def _site(code: CodeType, offset: int) -> Site:
    return code, positions_of(code, offset) or offset


LATE_RULES = {o.rule for o in (HOST_READ, DYNAMIC_SHAPE, LINEAR_ALGEBRA, NOT_RECORDED, SIDE_EFFECT)}
"""Of what a call may be refused for that is kept back."""
_KEPT_RULES = {ON_HOST, STORED.rule, RETURNED}
"""Of what a step is refused for that keeps what it has read on the host."""
_MOST = 24
"""Calls of one fit that are kept back."""


def first_read(error: CaptureError) -> CaptureError:
    """Return the refused read of the device in whose ``except`` clause an error was raised."""
    found = (e for e in causes_of(error) if isinstance(e, CaptureError) and e.rule in LATE_RULES)
    return error if error.rule in LATE_RULES else next(found, error)


@dataclass(eq=False)
class _Kept:
    """A call that is kept back."""

    name: str
    error: Texts  # the refusal inside of it
    functions: Sequence[FunctionType]  # that run its code; none if it is in C
    module: str  # whose code calls it
    acts: bool = False  # nothing has its result, and a run that is undone goes without it
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
        # Names of those whose tensors the step changes later on: captures give them copies
        self.copied: set[str] = set()
        self._copies_more = False  # than the last capture
        self._keep: Keep | None = None  # of the capture that runs
        # By their ``id``, objects whose methods are kept back, and give nothing that code has
        self.called: dict[int, object] = {}

    def learn(self, error: CaptureError, reads: Iterable[CallAt] = ()) -> bool:
        """Find the call that a refusal arose in; whether the next capture keeps back another one.

        A call whose value was used is a part of the step again, unless what used it is a call that
        can be kept back in turn. Of reads which the host has answered, a number that is only logged
        needs no answer: all of them are kept back where the step logs one that changes.
        """
        used = {site: kept for site, kept in self.known.items() if kept.is_used}
        texts = next((kept.error for kept in used.values()), None)
        may = error.rule in LATE_RULES or error.rule == FILLED.rule
        if texts is None and (may or error.__cause__ is not None):
            texts = error.rule, error.observed, error.remedy
        for at in causes_of(error):
            frames = [*_entries(at)]
            if texts is None and any(is_asked_for_text(frame) for frame, *_ in frames):
                texts = error.rule, error.observed, error.remedy
            if texts is not None and any(self.own.runs_in(frame) for frame, *_ in frames):
                anyway = bool(used) or may
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

    def copy(self, name: str) -> None:
        """Let captures give a call copies of its tensors."""
        self._copies_more |= name not in self.copied
        self.copied.add(name)

    def learns(self) -> bool:
        """Whether the next capture gives more calls copies than the last one."""
        more, self._copies_more = self._copies_more, False
        return more

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

    def learn_call(self, frames: Sequence[RaisedAt], error: Texts, *, anyway: bool) -> str:
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
        if any(inner.f_code in _BACKWARD for inner, *_ in frames[inside[-1] :]):
            return ""  # its gradients are the step's, whatever it returns
        if callee is not None and is_asked_for_text(callee):
            return self._learn_text((frame, offset, line), error)
        if not anyway and (callee is None or not leaves_of([*callee.f_locals.values()], LateValue)):
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

    def _learn_text(self, entry: RaisedAt, error: Texts) -> str:
        """Keep back a text that code makes, and the calls that get it, if all of them can be."""
        frame, offset, line = entry
        code, own = frame.f_code, CallAt.of(entry)
        found = [(teller, function_called(teller, frame)) for teller in tellers(code, offset, line)]
        if not found or not all(
            is_call_there(code, teller) and (function is print or type(function) is FunctionType)
            for teller, function in found
        ):
            return ""
        for teller, function in found:
            functions = [function] if type(function) is FunctionType else []
            known = self.known.get((code, position_of(teller)))
            if known is None:
                name = f"what is kept back at {code.co_filename}:{teller.lineno}"
                known = self.known[code, position_of(teller)] = _Kept(
                    name, error, [], own.module, acts=True
                )
            known.functions = [*dict.fromkeys([*known.functions, *functions])]
        return self._keep_at(own, error, ())

    def text_of(
        self,
        keep: Keep,
        value: Any,  # a tracer, or a tensor
        function: Callable[..., Any],
        args: Sequence[Any],
        frame: FrameType,
    ) -> str | None:
        """Return a part of a text, if all that gets the text is kept back; else None."""
        policy, code = self.policy_at(frame, keep), frame.f_code
        if policy is None:
            return None
        for teller in tellers(code, frame.f_lasti, frame.f_lineno):
            known = self.known.get((code, position_of(teller)))
            called = function_called(teller, frame)
            is_kept = type(called) is LateValue or is_exchanged(called)
            if known is None or not (is_kept or called in known.functions):
                return None
        return part_for(keep(function, ((value, *args), {}), replace(policy, is_pure=True)))

    def _learn_reads(self, error: CaptureError, reads: Iterable[CallAt]) -> bool:
        texts = error.rule, error.observed, error.remedy
        sites = {_site(at.code, at.offset): at for at in reads}
        new = [at for site, at in sites.items() if site not in self._unfit | self.known.keys()]
        for at in new[: _MOST - len(self.known)]:
            self._keep_at(at, texts, ())
        return bool(new) and len(self.known) < _MOST

    def _keep_at(self, at: CallAt, error: Texts, functions: Sequence[FunctionType]) -> str:
        name = f"what is kept back at {at.code.co_filename}:{at.line}"
        site = _site(at.code, at.offset)
        acts = is_statement(at.code, at.line, positions_of(at.code, at.offset))
        if error[0] == SIDE_EFFECT.rule and not acts:
            self._unfit.add(site)  # a run that is undone can neither make the call nor go without
            return ""
        self.known[site] = _Kept(name, error, functions, at.module, acts)
        return name

    @contextlib.contextmanager
    def exchanged(self, keep: Keep) -> Iterator[None]:
        """Keep back the known calls of Python functions in the body, a capture."""
        if not self.known:
            yield
            return
        functions = dict.fromkeys(f for kept in self.known.values() for f in kept.functions)
        instead = {function: partial(self._instead, keep) for function in functions}
        self._keep, before = keep, self._keep
        try:
            with called_instead(instead), texts_made(partial(self.text_of, keep)):
                yield
        finally:
            self._keep = before
            forget_parts()

    @contextlib.contextmanager
    def left_out(self, watching: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
        """Do without the known calls that nothing has the result of, in a run that is undone.

        Args:
            watching: Watches for calls that print or log, see :meth:`effect`.
        """
        acting = {site: kept for site, kept in self.known.items() if kept.acts}
        if not acting:
            yield
            return

        def leave(*_: Any) -> Any:
            return Nothing()

        def instead(function: Any, frame: FrameType, *args: Any, **kwargs: Any) -> Any:
            is_known = _site(frame.f_code, frame.f_lasti) in acting
            return Nothing() if is_known else function(*args, **kwargs)

        functions = dict.fromkeys(f for kept in acting.values() for f in kept.functions)
        self._keep, before = leave, self._keep
        try:
            with called_instead(dict.fromkeys(functions, instead)), watching():
                yield
        finally:
            self._keep = before

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
            policy = self.policy_at(asked.frame, keep) if asked.asks is Asks.NUMBER else None
            if policy is None or tensor.numel() != 1:
                return None
            late = keep(ITEM, ((tensor,), {}), replace(policy, is_pure=True))
            is_real = tensor.dtype is not torch.bool and not tensor.is_complex()
            if type(late) is LateValue and is_real:
                late.kind = float if tensor.is_floating_point() else int
            return late

        modules = asking & sys.modules.keys()
        conversions = {(name, kind) for name in modules for kind in (float, int)}
        instead = {f.__name__: standing_in(f, kept_if_late(f)) for f in (max, min)}
        chosen = [(sys.modules[m], *pair) for m in modules for pair in instead.items()]
        calls = _CallsOfTorch(self, keep)
        reads = exchanged(calls.members) if by_methods else calls
        with calls_followed(conversions), tensors_asked(number), exchanged(chosen), reads:
            yield

    def policy_at(self, frame: FrameType, keep: Keep) -> LatePolicy | None:
        """Return what is to be kept back of the call that a frame makes; None for another call."""
        if frame.f_code not in {code for code, _ in self.known}:
            return None
        kept = self.known.get(_site(frame.f_code, frame.f_lasti))
        if kept is None:
            return None
        return LatePolicy(kept.name, functools.partial(_refuse, kept), self.own.runs_in, keep)

    def _instead(
        self, keep: Keep, function: Callable[..., Any], frame: FrameType, *args: Any, **kwargs: Any
    ) -> Any:
        policy = self.policy_at(frame, keep)
        if policy is None:
            return function(*args, **kwargs)
        known = self.known[_site(frame.f_code, frame.f_lasti)]
        if not known.acts:
            return keep(function, (args, kwargs), policy)
        if args and is_object(args[0]) and not isinstance(args[0], (nn.Module, Tracer)):
            self.called[id(args[0])] = args[0]
        _refuse_histories(function, (args, kwargs), policy)
        return keep(called_from(frame, function), (args, kwargs), policy)

    def effect(self, frame: FrameType, function: Callable[..., Any], given: Given) -> Any:
        """Keep back a call that prints or logs; None if it is not known to be kept back."""
        policy = None if self._keep is None else self.policy_at(frame, self._keep)
        if policy is None or self._keep is None:
            return None
        _refuse_histories(function, given, policy)
        return self._keep(called_from(frame, function), given, policy)


_SHOWING = ("builtins", "logging", "rich", "tqdm", "lightning", "pytorch_lightning")


def _refuse_histories(function: Any, given: Given, policy: LatePolicy) -> None:
    """Refuse to show tensors whose text names what has computed them: no replay has that."""
    shows = (getattr(function, "__module__", None) or "").partition(".")[0] in _SHOWING
    if shows and any(tensor.requires_grad for tensor in leaves_of(given, Tensor)):
        policy.refuse(policy.name)


_READING = frozenset(
    {"item", "tolist", "numpy", "cpu", "to", "__getitem__", "nonzero", "argwhere", "bincount"}
    | {"masked_select", "svd", "svdvals", "eigh", "eigvalsh", "eig", "eigvals", "matrix_rank"}
    | {"tensor", "as_tensor"}
)
"""Functions that read values on the host, also for the shapes of their results."""


_FORMAT = Tensor.__format__


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
        passing = ("torch.",) if function == _FORMAT else ()
        frame = outside_of(frame, OURS, *passing)  # past what passes calls of tensors' methods on
        policy = self._kept.policy_at(frame, self._keep)
        name = getattr(function, "__name__", "").removeprefix("linalg_")
        if function == _FORMAT:
            text = self._kept.text_of(self._keep, args[0], format, args[1:], frame)
            return function(*args, **kwargs) if text is None else text
        if policy is None or name not in _READING:
            return function(*args, **kwargs)
        late = self._keep(function, (args, kwargs), replace(policy, is_pure=True))
        if name in OF_ONE_SHAPE and type(late) is LateValue:  # the doctor makes the call
            late.sizes = tuple(args[0].shape)
        return late


def _refuse(kept: _Kept, _: str) -> NoReturn:
    kept.is_used = True
    stop(CaptureError(*kept.error))


def _entries(error: BaseException) -> Iterator[RaisedAt]:
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
    is_special = code.co_name.startswith("__") or code.co_flags & SUSPENDED
    if is_special or isinstance(first, nn.Module) or _holds_modules(callee.f_locals.values()):
        return []
    kinds = first.__mro__ if isinstance(first, type) else type(first).__mro__
    tables: list[Mapping[str, Any]] = [vars(kind) for kind in kinds]
    tables += [getattr(module, "__dict__", {}) for module in list(sys.modules.values())]
    held = (_function_in(value) for table in tables for value in list(table.values()))
    return [*{f: None for f in held if f is not None and f.__code__ is code}]


def _function_in(value: Any) -> FunctionType | None:
    if type(value) is FunctionType:
        return value
    is_of_numpy = type(value) is _DISPATCHER and not acts(value.__name__, {})
    value = value.__wrapped__ if is_of_numpy or type(value) is staticmethod else None
    return value if type(value) is FunctionType else None


_DISPATCHER: Any = type(numpy.mean)
"""The class of NumPy's functions that call one of Python, or of other arrays: in C since 1.25."""


_BACKWARD = {function.__code__ for function in (torch.autograd.backward, torch.autograd.grad)}


def _holds_modules(values: Iterable[Any]) -> bool:
    """Return whether a module is in one of these values: what computes with it is the step's."""
    seen: dict[int, Any] = {}
    given = (value for value in values if not isinstance(value, Tracer))
    held = (v for value in given for _, v in objects_in("", value, seen))
    return any(isinstance(v, (nn.Module, nn.Parameter)) for v in held)
