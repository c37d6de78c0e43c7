"""The head of a step: Python that runs in every replay, ahead of the graph.

A step may begin with work on its batch alone that no graph can hold: filters, draws of indices,
reads on the host. Its graph begins at a statement behind that. In a replay the step's code runs up
to this statement, where :class:`HeadEnded` ends it, and the graph does the rest with what local
variables hold there.
"""

from __future__ import annotations

import ast
import contextlib
import dis
import sys
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import dropwhile
from threading import get_ident
from traceback import walk_tb
from types import CodeType, FrameType, FunctionType
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
from torch import Tensor, nn

from lightning_graphs.device.trace import FunctionMode
from lightning_graphs.errors import CaptureError, causes_of, stop
from lightning_graphs.private.callsite import (
    SUSPENDED,
    CallSite,
    CallSiteFinder,
    calls_observed,
    frames_of_region,
    is_library,
    lines_in,
    listing_of,
    offsets_at,
    position_of,
    positions_of,
    statements_around,
    tell,
)
from lightning_graphs.private.exchange import exchanged
from lightning_graphs.private.torch import version_of
from lightning_graphs.values.guards import REALS, Identity
from lightning_graphs.values.memory import storage_address
from lightning_graphs.values.signature import Signature
from lightning_graphs.values.tree import Unread, leaves_of

Returned = TypeVar("Returned")

# ------------------ Where it ends


@dataclass(frozen=True)
class Caller:
    """A function that waits for the one with the statement, or for another one of these."""

    code: CodeType
    line: int
    offsets: range  # of its instruction that calls
    live: tuple[str, ...]  # local variables that it reads behind the call


@dataclass(frozen=True)
class Ending:
    """The statement of user code at which the graph of a step begins."""

    code: CodeType  # of the function that has it
    lines: range
    live: tuple[str, ...]  # local variables that the code from there on reads
    callers: tuple[Caller, ...] = ()  # the innermost one first

    @property
    def site(self) -> CallSite:
        return CallSite.of(self.code, self.lines.start)

    @property
    def codes(self) -> frozenset[CodeType]:
        """The functions that run at the end of the head."""
        return frozenset([self.code, *[caller.code for caller in self.callers]])

    def is_behind(self, lines: Mapping[CodeType, int]) -> bool:
        """Return whether it comes after something else, given the lines that led to that."""
        for caller in reversed(self.callers):
            if (line := lines.get(caller.code, caller.line)) != caller.line:
                return line < caller.line
        return lines.get(self.code, 0) < self.lines.start


class Lasting(tuple[Identity, ...]):
    """Stands for a list, or a tuple, of what lasts for the whole fit."""


class HeadEnded(BaseException):
    """Ends the code of a step whose graph does the rest; no handler for errors catches it."""


AtEnd = Callable[[dict[str, Any]], Mapping[str, Any] | None]
"""Called once with the variables that are live, and their values, at the end of a head.

It may give variables to be set, or raise :class:`HeadEnded`, and so end the step.
"""
_PLAIN = frozenset({Tensor, dict, str, int, float, bool, type(None)})
"""Classes of variables that are none of a step's modules or optimizers, and wrap none."""


class Head:
    """Runs the head of a step.

    Args:
        ending: Where the graph begins.
    """

    def __init__(self, ending: Ending) -> None:
        self.ending = ending
        self.numbers_left: dict[str, int | float] = {}  # in variables, when it ended last
        # The ``id`` of each module, parameter, buffer, optimizer and scheduler: a variable that is
        # one of them, or wraps an optimizer, stays it
        self.state: Container[int] = ()
        self._waits: tuple[int, AtEnd] | None = None  # with its thread, and what is called then
        self._is_told = tell(ending.code, ending.lines, self.reached)

    def run(self, step: Callable[[], Returned], at_end: AtEnd) -> Returned:
        """Run a step, which may end without having come to the end of its head.

        The variables that ``at_end`` returns are set.
        """
        code, lines, before = self.ending.code, self.ending.lines, sys.gettrace()

        def line(frame: FrameType, event: str, _: object) -> Any:
            if event != "line" or frame.f_lineno not in lines:
                return line
            if (leaving := self._leaving(frame, frame.f_locals)) is None:
                return line
            self._note(leaving)
            sys.settrace(before)
            frame.f_trace = None
            left = at_end(leaving) or {}
            # Before Python 3.13 this is a table that is written back to the variables, enclosing
            # ones among them, when tracing ends. A look at it reads them: they hold others by now
            frame.f_locals.update(left)
            return None

        def call(frame: FrameType, event: str, _: object) -> Any:
            return line if frame.f_code is code else None

        sys.settrace(call)
        try:
            return step()
        finally:
            sys.settrace(before)

    def run_ahead(self, step: Callable[[], Returned], at_end: AtEnd) -> Returned:
        """Run a step as :meth:`run` does, for a replay: no variable is set."""
        if not self._is_told:
            return self.run(step, at_end)
        self._waits = get_ident(), at_end
        try:
            return step()
        finally:
            self._waits = None

    def reached(self, frame: FrameType) -> None:
        """Note that the function with the statement has come to it."""
        waits = self._waits
        if waits is not None and waits[0] == get_ident():
            leaving = self._leaving(frame, frame.f_locals)
            if leaving is not None:
                self._note(leaving)
                self._waits = None
                waits[1](leaving)

    def _note(self, leaving: Mapping[str, Any]) -> None:
        """Keep no tensor: what a compared step makes may lie in the memory of a graph."""
        left = {name: value for name, value in leaving.items() if isinstance(value, (int, float))}
        self.numbers_left = left

    def _leaving(self, frame: FrameType, table: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the variables of callers, and those at the end; None if others have called."""
        found: dict[str, Any] = {}
        at: FrameType | None = frame
        for i, caller in enumerate(self.ending.callers):
            at = at and at.f_back
            if at is None or at.f_code is not caller.code or at.f_lasti not in caller.offsets:
                return None
            if caller.live:
                name = f"{CALLER}{i} {caller.code.co_name}"
                found[name] = self._live(caller.code, caller.live, at.f_locals)
        return {**found, **self._live(self.ending.code, self.ending.live, table)}

    def _live(
        self, code: CodeType, names: Sequence[str], table: Mapping[str, Any]
    ) -> dict[str, Any]:
        found: dict[str, Any] = {}
        state = self.state
        for name in names:
            value = table.get(name, code)
            if id(value) in state:
                value = Identity(value)
            elif type(value) in _PLAIN:
                pass
            elif isinstance(value, (list, tuple)):
                if value and all(map(self._is_lasting, value)):
                    value = Lasting(map(Identity, value))
            elif self._is_lasting(value):
                value = Identity(value)
            # Another one in each call; the variables that it has are among these
            elif isinstance(value, FunctionType) and value.__code__ in code.co_consts:
                continue
            if value is not code:
                found[name] = value
        return found

    def _is_lasting(self, value: Any) -> bool:
        return id(value) in self.state or id(getattr(value, "optimizer", None)) in self.state

    def numbers(self, signature: Signature) -> dict[str, Callable[[], Any]]:
        """Return readers of those numbers in variables that a signature of all leaves out."""
        kinds = dict(zip(signature.names, signature.leaves, strict=True))
        found: dict[str, Callable[[], Any]] = {}
        for name in self.ending.live:
            leaf = kinds.get(f'{VARIABLES}["{name}"]')
            if isinstance(leaf, Unread) and leaf.kind in REALS:
                found[name] = partial(self._now, name)
        return found

    def _now(self, name: str) -> Any:
        return self.numbers_left.get(name)


CALLER = "caller "
"""Begins the names of tables with the variables of a caller."""
VARIABLES = "variables"
"""The name of all that leaves a head."""


def is_callers(name: str) -> bool:
    """Return whether what leaves a head under this name is a caller's."""
    return name.startswith(f'{VARIABLES}["{CALLER}')


# ------------------ Its tensors

_SHARING = frozenset({"from_numpy", "as_tensor", "asarray", "frombuffer", "from_dlpack"})
"""Functions of torch that may give a tensor in memory which was there before."""


_GRADIENT = Tensor.grad.__get__  # type: ignore[union-attr]


class Made(FunctionMode):
    """Notes the memory of tensors that code makes while it is entered, and keeps it alive."""

    def __init__(self, own: Iterable[Tensor]) -> None:
        super().__init__(self._called)
        self.tensors = {storage_address(tensor): tensor for tensor in own}  # by their addresses
        self._others: set[int] = set()

    def _called(self, function: Any, args: Any, kwargs: Any) -> Any:
        for tensor in leaves_of((args, kwargs), Tensor):
            if (address := storage_address(tensor)) not in self.tensors:
                self._others.add(address)
        result = function(*args, **kwargs)
        is_there = function == _GRADIENT or getattr(function, "__name__", "") in _SHARING
        if not is_there:
            for tensor in leaves_of(result, Tensor):
                if (address := storage_address(tensor)) not in self._others:
                    self.tensors.setdefault(address, tensor)
        return result

    def refused_behind(self, given: Iterable[Tensor], ending: Ending) -> FunctionMode:
        """Refuse uses of these tensors in the body, captured code, but for those that are given.

        A replay knows where a head leaves tensors in variables and attributes, and nowhere else.
        """
        lost = self.tensors.keys() - {storage_address(tensor) for tensor in given} - {0}

        def called(function: Any, args: Any, kwargs: Any) -> Any:
            for tensor in leaves_of((args, kwargs), Tensor):
                if storage_address(tensor) in lost:
                    stop(
                        CaptureError(
                            "What a graph reads of the code ahead of it must be in local "
                            "variables, or in attributes.",
                            f"{CallSiteFinder().here().describe()} uses another tensor, and the "
                            f"graph begins at {ending.site.describe()}",
                            "keep the tensor in a variable of the function that calls the module",
                        )
                    )
            return function(*args, **kwargs)

        return FunctionMode(called)


# ------------------ Finding it

_FREEZING = (Tensor.requires_grad.__set__, Tensor.requires_grad_)  # type: ignore[attr-defined]
_WITHOUT_VALUES = (type(None), bool, torch.Size, torch.dtype, torch.device, torch.layout)


class Used(HeadEnded):
    """Ends a step at its first use of a parameter, or where it changes a buffer, or optimizes."""


class FirstUse(NamedTuple):
    """Where a step first uses a parameter, or changes a buffer."""

    # The functions that run there, the outermost one of user code first; none if the step ends, or
    # raises an error, before
    stack: list[Running]
    reads: bool  # it has read tensors on the host before


class Running(NamedTuple):
    """A function that runs."""

    code: CodeType
    line: int
    offset: int  # of its present instruction


class Uses:
    """Ends code at its first use of a parameter, or of a buffer that it changes.

    It uses a parameter that it freezes or gathers, and all of them where an optimizer or a
    scheduler steps.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        buffers: Sequence[Tensor],
        stepping: Iterable[object] = (),  # optimizers and schedulers
        units: Iterable[nn.Module] = (),  # modules that gather their parameters
    ) -> None:
        self.stack: list[Running] = []
        self.reads = False  # tensors were read on the host
        self._trained = set(map(id, parameters))
        self._state = self._trained.union(map(id, buffers))
        self._stepping, self._units = stepping, units
        self._watch = contextlib.ExitStack()
        self._is_over = False

    @contextlib.contextmanager
    def ending(self) -> Iterator[None]:
        """End the code of the body at its first use, by :class:`Used`."""
        # Of units alone: a module that has a hook is called through further functions
        for unit in self._units:
            hook = unit.register_forward_pre_hook(self._use, prepend=True)
            self._watch.callback(hook.remove)
        with self._watch, FunctionMode(self._called):
            self._watch.enter_context(exchanged((one, "step", self._use) for one in self._stepping))
            yield

    def allow(self) -> None:
        """Let the code that runs go on to use them."""
        self._is_over = True
        self._watch.close()

    def _called(self, function: Any, args: Any, kwargs: Any) -> Any:
        if self._is_over:
            return function(*args, **kwargs)
        state, trained = self._state, self._trained
        touched = [tensor for tensor in leaves_of((args, kwargs), Tensor) if id(tensor) in state]
        before = [(tensor, version_of(tensor)) for tensor in touched]
        if function in _FREEZING and any(id(tensor) in trained for tensor in touched):
            self._use()
        result = function(*args, **kwargs)
        if isinstance(result, _WITHOUT_VALUES):
            return result
        made = bool(leaves := leaves_of(result, Tensor))
        self.reads |= not made
        is_use = any(tensor.requires_grad for tensor in leaves)
        reads_gradient = function == _GRADIENT  # as zeroing it does
        is_use |= made and not reads_gradient and any(id(tensor) in trained for tensor in touched)
        if is_use or any(version_of(tensor) != version for tensor, version in before):
            self._use()
        return result

    def _use(self, *_: Any, **__: Any) -> NoReturn:
        frames = frames_of_region(sys._getframe(1))
        self.stack.extend(Running(f.f_code, f.f_lineno, f.f_lasti) for f in frames)
        raise Used


@calls_observed
def first_use(step: Callable[[], object], uses: Uses) -> FirstUse:
    """Run a step up to its first use of a parameter, or of a buffer that it changes."""
    with contextlib.suppress(Used), uses.ending():
        step()
    found = dropwhile(lambda each: is_library(each.code.co_filename), reversed(uses.stack))
    return FirstUse(list(found), uses.reads)


def lines_of(error: BaseException) -> dict[CodeType, int]:
    """Return the line in each function of user code that led to an error."""
    found: dict[CodeType, int] = {**getattr(error, "lines", {})}
    for each in causes_of(error, stated=True):
        for frame, line in walk_tb(each.__traceback__):
            if not is_library(frame.f_code.co_filename):
                found.setdefault(frame.f_code, line)
    return found


_CLOSED = (ast.With, ast.AsyncWith, ast.For, ast.AsyncFor, ast.While, ast.Try)
"""Statements in which no graph begins: code that leaves them runs, or waits, behind it."""


def endings_along(stack: Sequence[Running]) -> Iterator[Ending]:
    """Yield the statements at which a graph may begin ahead of the last of these functions.

    The earliest one comes first. None is inside of a ``with``, a ``try`` or a loop, nor where a
    caller has computed something that is in no variable.
    """
    callers: tuple[Caller, ...] = ()
    for code, line, offset in stack:
        if code.co_flags & SUSPENDED:
            return
        if is_library(code.co_filename):
            live: set[str] | None = set()
        else:
            statement = None
            for statement in statements_around(code, line):
                lines = lines_in(statement)
                starts = dict(dis.findlinestarts(code))
                first = next((o for o, found in starts.items() if found in lines), None)
                if first is not None:
                    yield Ending(code, lines, live_at(code, first), callers)
                if isinstance(statement, _CLOSED):
                    return
            live = None if statement is None else _waiting(code, offset, statement)
        if live is None:
            return
        live |= {*live_at(code, offset, after=True)}
        now = offsets_at(code, offset)
        callers = (Caller(code, line, now, tuple(sorted(live))), *callers)


_PASSING = (
    *(ast.Call, ast.keyword, ast.Tuple, ast.List, ast.Dict, ast.BinOp, ast.UnaryOp, ast.Compare),
    *(ast.Attribute, ast.Subscript, ast.Starred, ast.BoolOp, ast.NamedExpr),
)
"""Expressions that evaluate parts of theirs one after the other."""


def _waiting(code: CodeType, offset: int, statement: ast.stmt) -> set[str] | None:
    """List the variables that a statement has read, and will use behind the call that it makes now.

    None if it has computed something by then that is in no variable.
    """
    names: set[str] = set()
    if isinstance(statement, ast.AugAssign):
        if not isinstance(statement.target, ast.Name):
            return None
        names.add(statement.target.id)
    calls = [node for node in _expressions_in(statement) if isinstance(node, ast.Call)]
    if (now := positions_of(code, offset)) is not None:
        calls = [call for call in calls if position_of(call) == now]
    value = getattr(statement, "value", None) or getattr(statement, "test", None)
    for call in calls:
        known = None if value is None else _read_before(value, call)
        if known is None:
            return None
        names |= known
    return names if calls else None


def _expressions_in(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.stmt):
            yield child
            yield from _expressions_in(child)


def _read_before(inside: ast.AST, call: ast.Call) -> set[str] | None:
    """List the variables that an expression has read ahead of a call in it."""
    names: set[str] = set()
    while inside is not call:
        if not isinstance(inside, _PASSING):
            return None
        for child in ast.iter_child_nodes(inside):
            if any(node is call for node in ast.walk(child)):
                inside = child
                break
            root: Any = child.value if isinstance(child, ast.Starred) else child
            while isinstance(inside, ast.Call) and child is inside.func and _is_step(root):
                root = root.value
            if isinstance(root, ast.Name):
                names.add(root.id)
            elif isinstance(root, ast.expr) and not isinstance(root, ast.Constant):
                return None
        else:
            return None
    return names


def _is_step(node: Any) -> bool:
    """Return whether an expression is an attribute, or an item under a constant key."""
    is_item = isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant)
    return isinstance(node, ast.Attribute) or is_item


# ------------------ Variables that are read later

_ENDS = ("RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE")
_JUMPS = frozenset({*dis.hasjrel, *dis.hasjabs})
_ALL_NAMES = frozenset({"locals", "vars", "eval", "exec", "dir"})


def live_at(code: CodeType, offset: int, *, after: bool = False) -> tuple[str, ...]:
    """List the local variables that code reads, before it sets them, from an instruction on.

    Those that nested functions have count as read.

    Args:
        code: Of the function.
        offset: Of the instruction.
        after: From the next one on.
    """
    own = {*code.co_varnames, *code.co_cellvars}
    if _ALL_NAMES & {*code.co_names}:
        return tuple(sorted(own))
    steps = listing_of(code).instructions
    place = {step.offset: i for i, step in enumerate(steps)}
    # What an error may lead to
    handlers = {i for i, step in enumerate(steps) if step.opname == "PUSH_EXC_INFO"}
    handlers |= {place.get(s.argval, 0) for s in steps if s.opname.startswith("SETUP_")}
    ahead: list[set[str]] = [set() for _ in steps]
    behind: list[set[str]] = [set() for _ in steps]
    changed = True
    while changed:
        changed = False
        for i in reversed(range(len(steps))):
            step = steps[i]
            follow = {*handlers, place.get(step.argval, i)} if step.opcode in _JUMPS else handlers
            name = step.opname
            ends = name in _ENDS or (name.startswith("JUMP_") and not name.startswith("JUMP_IF"))
            behind[i] = set().union(*(ahead[j] for j in {*follow, *([] if ends else [i + 1])}))
            before = _read_by(step, behind[i]) & own
            if before != ahead[i]:
                ahead[i], changed = before, True
    now = place[offsets_at(code, offset).start]
    found = behind[now] if after else ahead[now]
    return tuple(sorted({*found, *code.co_cellvars}))


def _read_by(step: dis.Instruction, after: set[str]) -> set[str]:
    """Return what is live before an instruction, of what is live after it."""
    name, given = step.opname, step.argval
    names = given if isinstance(given, tuple) else (given,)
    if name.startswith(("LOAD_FAST", "LOAD_DEREF", "LOAD_CLOSURE", "LOAD_CLASSDEREF", "DELETE_")):
        return {*after, *names}
    if name == "STORE_FAST_LOAD_FAST":
        return ({*after, names[1]}) - {names[0]}
    if name.startswith(("STORE_FAST", "STORE_DEREF")):
        return after - {*names}
    return after
