"""What code does with the outcome of a condition: where it goes on, and whether it only raises.

Byte code tells what follows where Python asks a value whether it is true. A way only raises if all
that comes before its ``raise`` makes a message, or tells one. The source tells how to do so again,
and which ``except`` would catch an error.
"""

from __future__ import annotations

import abc
import ast
import builtins
import contextlib
import dis
import functools
import inspect
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_graphs.private.callsite import (
    OURS,
    STANDARD,
    Listing,
    compiled,
    frames_from,
    frames_of_region,
    is_installed,
    is_library,
    lines_in,
    listing_of,
    names_in,
    raises_by_itself,
    tree_of,
    value_of,
)

# ------------------ Ways that only raise

_MAKES_MESSAGES = (
    *("LOAD_", "BUILD_", "FORMAT_", "BINARY_", "UNARY_", "COMPARE_OP", "IS_OP", "CONTAINS_OP"),
    *("COPY", "SWAP", "ROT_", "DUP_", "PUSH_NULL", "PRECALL", "KW_NAMES", "CONVERT_VALUE"),
    *("STORE_FAST", "NOP", "NOT_TAKEN", "EXTENDED_ARG", "CACHE", "TO_BOOL", "LIST_", "SET_UPDATE"),
    *("MAKE_FUNCTION", "SET_FUNCTION_ATTRIBUTE", "GET_ITER"),
)
"""Beginnings of the names of instructions that compute, and change local variables at most."""
_CALLS = frozenset({"CALL", "CALL_KW", "CALL_METHOD"}) | {
    f"CALL_FUNCTION{kind}" for kind in ("", "_KW", "_EX")
}
_NAMES = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_METHOD", "LOAD_ATTR", "LOAD_FAST", "LOAD_DEREF")
_LOADS = (
    *("LOAD_", "COPY", "SWAP", "ROT_", "DUP_", "PUSH_NULL", "PRECALL", "COMPARE_OP"),
    *("UNARY_N", "NOP", "EXTENDED_ARG", "CACHE", "TO_BOOL"),
)
_TELLING = frozenset(
    ("print", "warn", "warning", "error", "info", "debug", "critical", "exception")
) | {"rank_zero_warn", "rank_zero_info"}
"""Functions that tell a message, and do nothing else."""
_ENDS = ("exit", "quit")
"""Functions that raise ``SystemExit``."""
_TESTS = ("isnan", "isinf", "isfinite", "abs")
_EXACT = ("+", "-", "*", "BINARY_ADD", "BINARY_SUBTRACT", "BINARY_MULTIPLY")
"""Arithmetic that gives the same 64 bits everywhere, as Python versions call it."""
_NO_VALUES = ("TO_BOOL", "NOP", "NOT_TAKEN", "EXTENDED_ARG")
_COMPARISON = 24  # instructions from a number to what is done by a comparison with it, at most


class Way(NamedTuple):
    """How code goes on after a condition whose other outcome only raises, or only warns."""

    outcome: bool  # by which the code goes on
    frame: FrameType  # whose code raises or warns otherwise
    raises: int  # number of the line that raises; 0: it warns
    warns: tuple[ast.stmt, ...] = ()  # the statements that warn


class Branch(NamedTuple):
    """Where code goes on, by the truth of a value that it asks for."""

    frame: FrameType  # that asks, or that gets the answer from a function which it calls
    lands: dict[bool, int | None]  # index of the instruction there; None if that is unclear

    @property
    def listing(self) -> Listing:
        return listing_of(self.frame.f_code)


def branch_at(frame: FrameType, *, called: bool = False) -> Branch | None:
    """Return where code goes on that asks now whether a value is true; None if that is unclear.

    Args:
        frame: The code.
        called: It calls what tells it, and would ask a tensor itself otherwise.
    """
    asking: FrameType | None = frame
    listing = listing_of(frame.f_code)
    at = listing.at(frame.f_lasti)
    is_call = listing.instructions[at].opname in _CALLS
    if is_call and not (called or _called(listing, at) == "bool"):
        return None
    is_value = is_call or listing.instructions[at].opname in ("UNARY_NOT", "TO_BOOL")
    # From Python 3.13 on a comparison asks what it has found, ahead of the jump
    at, inverted = at + (is_call or listing.instructions[at].opname == "COMPARE_OP"), False
    while is_value and asking is not None:  # it may be stored, or returned
        at, inverted = _read_again(listing, at, inverted)
        if not listing.instructions[at].opname.startswith("RETURN_VALUE"):
            break
        name, asking = asking.f_code.co_name, asking.f_back
        if asking is None:
            return None
        listing = listing_of(asking.f_code)
        at = listing.at(asking.f_lasti)
        if listing.instructions[at].opname not in _CALLS or _called(listing, at) != name:
            return None
        at += 1
    if asking is None:
        return None
    lands = {outcome: _landing(listing, at, outcome is not inverted) for outcome in (True, False)}
    return Branch(asking, lands)


def way_on(frame: FrameType, *, called: bool = False) -> Way | None:
    """Return how code goes on that asks now whether a value is true; None if both ways do more.

    The error must reach the end of the region: code that would catch it does more as well.

    Args:
        frame: The code.
        called: As in :func:`branch_at`.
    """
    if (way := way_without_error(frame, called=called)) is None:
        return None
    catching = list(filter(_may_catch, _passed(way.frame)))
    return way if not catching else _way_of_handler(way, catching[0])


def way_without_error(frame: FrameType, *, called: bool = False) -> Way | None:
    """Return how code goes on whose other way raises an error, caught or not; None if it does not.

    Args:
        frame: The code.
        called: As in :func:`branch_at`.
    """
    if (branch := branch_at(frame, called=called)) is None:
        return None
    ends = {outcome: _raises(branch.listing, there) for outcome, there in branch.lands.items()}
    raising = [outcome for outcome, lines in ends.items() if lines]
    if len(raising) != 1:
        return None
    (outcome,) = raising
    return Way(not outcome, branch.frame, min(ends[outcome]))


def _way_of_handler(way: Way, catching: FrameType) -> Way | None:
    """Return how code goes on whose error is caught by code that only warns.

    The error ends a function whose last statement raises it, and the ``try`` calls that alone.
    """
    tree, raising = tree_of(catching.f_code), tree_of(way.frame.f_code)
    if way.frame.f_back is not catching or tree is None or raising is None:
        return None
    function = next((n for n in ast.walk(raising) if isinstance(n, ast.FunctionDef)), None)
    if function is None or way.raises not in lines_in(function.body[-1]):
        return None
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Try) and catching.f_lineno in lines_in(*node.body)):
            continue
        handlers, body = node.handlers, node.body
        alone = len(body) == 1 and isinstance(body[0], ast.Expr) and len(handlers) == 1
        if not alone or node.orelse or node.finalbody or handlers[0].name:
            return None
        told = handlers[0].body
        if all(is_telling(each) or isinstance(each, ast.Pass) for each in told):
            return Way(way.outcome, catching, 0, tuple(told))
    return None


def is_telling(node: ast.stmt) -> bool:
    """Return whether a statement only tells a message."""
    if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
        return False
    called = node.value.func
    name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
    return name in _TELLING


def is_warning(node: ast.stmt) -> bool:
    """Return whether a statement warns: Python itself shows a warning of a line once."""
    names = {"warn", "rank_zero_warn"}
    return is_telling(node) and not names.isdisjoint(names_in(node.value.func))  # type: ignore[attr-defined]


def _landing(listing: Listing, at: int, outcome: bool) -> int | None:
    """Return where code goes on after an outcome; None if that is unclear."""
    known: tuple[bool, ...] = (outcome,)
    while known:
        instruction = listing.instructions[at]
        name, at = instruction.opname, at + 1
        if "JUMP" in name and "IF" in name and "NONE" not in name:
            jumps = known[-1] is ("TRUE" in name)
            known = known if jumps and "OR_POP" in name else known[:-1]
            at = listing.at(instruction.argval) if jumps else at
        elif name == "UNARY_NOT":
            known = (*known[:-1], not known[-1])
        elif name not in ("TO_BOOL", "NOP", "NOT_TAKEN", "EXTENDED_ARG"):
            return None
    return at


def compares_to_raise(frame: FrameType) -> bool:
    """Return whether code compares the number that it calls for now, and that only to raise."""
    listing = listing_of(frame.f_code)
    at, _ = _read_again(listing, listing.at(frame.f_lasti) + 1, False)
    compares = False
    for instruction in listing.instructions[at : at + _COMPARISON]:
        name = instruction.opname
        if "JUMP" in name and "IF" in name:
            lands = (_landing(listing, at, outcome) for outcome in (True, False))
            ends = [bool(_raises(listing, there)) for there in lands]
            return compares and sorted(ends) == [False, True] and not is_caught(frame)
        is_test = name in _CALLS and _called(listing, at) in _TESTS
        compares |= name == "COMPARE_OP" or is_test
        computes = name.startswith("BINARY_") and (instruction.argrepr or name) in _EXACT
        if not (is_test or computes or name.startswith(_LOADS)):
            return False
        at += 1
    return False


def _called(listing: Listing, at: int) -> str:
    """Return the name of what an instruction calls; empty if that is not plain."""
    count, depth, attribute = listing.instructions[at].arg or 0, 0, ""
    for instruction in reversed(listing.instructions[:at]):
        if instruction.opname in ("PRECALL", "KW_NAMES") and depth == 0:
            continue
        if "JUMP" in instruction.opname:
            return ""
        depth += dis.stack_effect(instruction.opcode, instruction.arg)
        if depth == count and instruction.opname == "LOAD_ATTR":  # of a module
            attribute = attribute or instruction.argval
        elif depth > count and instruction.opname.startswith(_NAMES):
            return attribute or str(instruction.argval)
    return ""


def _read_again(listing: Listing, at: int, inverted: bool) -> tuple[int, bool]:
    """Follow a value into a variable that is read once; return where it is on the stack again."""
    while (name := listing.instructions[at].opname) in ("UNARY_NOT", "TO_BOOL", "STORE_FAST"):
        variable = listing.instructions[at].argval
        at += 1
        if name == "UNARY_NOT":
            inverted = not inverted
        elif name == "STORE_FAST":
            uses = [i for i, each in enumerate(listing.instructions) if _names(each, variable)]
            if len(uses) != 2 or uses[0] != at - 1:
                break
            at = uses[1] + 1
    return at, inverted


def _names(instruction: dis.Instruction, variable: str) -> bool:
    given = instruction.argval
    return "FAST" in instruction.opname and (
        given == variable or (isinstance(given, tuple) and variable in given)
    )


def _raises(listing: Listing, at: int | None) -> set[int]:
    """List the lines that raise from an instruction on; none if the code may do anything else."""
    lines: set[int] = set()
    seen: set[int] = set()
    pending = [] if at is None else [at]
    while pending:
        at = pending.pop()
        is_fresh = True  # nothing was computed since the jump to here
        is_told = False  # the last call tells a message
        while at not in seen:
            seen.add(at)
            instruction = listing.instructions[at]
            name, target = instruction.opname, instruction.argval
            at += 1
            is_raised = name == "RAISE_VARARGS" and instruction.arg
            if is_raised or (name in _CALLS and _called(listing, at - 1) in _ENDS):
                lines.add(listing.lines[at - 1])
                break
            if "JUMP" in name:
                if target < instruction.offset:
                    return set()
                there = listing.at(target)
                if "IF" not in name:
                    at = there
                else:
                    pending.append(there)
                is_fresh = True
            elif name == "POP_TOP":
                if not (is_fresh or is_told):  # the value of a statement, which had an effect
                    return set()
                is_told = False
            elif name.startswith(_MAKES_MESSAGES) or name in _CALLS:
                if name in _CALLS:
                    is_told = _called(listing, at - 1) in _TELLING
                is_fresh = is_fresh and name in _NO_VALUES
            else:
                return set()
    return lines


# ------------------ Errors and messages that come late

TORCH_FOLDER = os.path.join(os.path.dirname(torch.__file__), "")
_MODULE = inspect.getfile(torch.nn.Module)  # calls hooks that are for errors, too
_PASSING = ("<frozen", STANDARD)
"""Beginnings of files whose frames only pass a call on."""
_CATCHING = ("suppress", "raises", "assertRaises")
"""Names of contexts that take an error away."""
_EXITS = frozenset({"KeyboardInterrupt", "SystemExit"})
"""Names of what is raised to end a program, which is no error."""


def _passed(frame: FrameType) -> Iterator[FrameType]:
    """Yield the frames through which an error would go, but those that only pass it on.

    Of torch's own some try something else where they meet an error.
    """
    within = [*frames_of_region(frame)]
    for found in within:
        file = found.f_code.co_filename
        if not is_library(file) or (file.startswith(TORCH_FOLDER) and file != _MODULE):
            yield found
    yield from _around(within[-1].f_back)


def _around(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield frames of users around a region that may go on after an error.

    They are hooks around a step, and the loop that calls a captured function. Code that has called
    a library to train has the error in any case.
    """
    users: list[FrameType] = []
    is_loop = True
    for found in frames_from(frame):
        file = found.f_code.co_filename
        is_ours = found.f_globals.get("__name__", "").startswith(OURS)
        if (
            is_ours
            or (file.startswith(_PASSING) and not is_installed(file))
            or file.startswith(TORCH_FOLDER)
        ):
            continue
        if is_library(file):
            is_loop = False
            yield from users
            users.clear()
        elif is_loop and not is_installed(file):
            yield found
        else:
            is_loop = False
            users.append(found)


def is_caught(frame: FrameType) -> bool:
    """Return whether an error that is raised here may be caught before the region ends."""
    return any(map(_may_catch, _passed(frame)))


def _may_catch(frame: FrameType) -> bool:
    """Return whether an error that is raised or passes here may be caught here."""
    surrounding = _surrounding(frame.f_code)
    if surrounding is None:
        opcodes = {instruction.opname for instruction in listing_of(frame.f_code).instructions}
        return bool(opcodes & {"SETUP_FINALLY", "PUSH_EXC_INFO"})
    for node in surrounding:
        if frame.f_lineno not in lines_in(*node.body):
            continue
        given = node.items if isinstance(node, ast.With) else []
        made = (value_of(item.context_expr, frame) for item in given)
        if _takes_away(node) or any(map(_catches, made)):
            return True
    return False


@functools.lru_cache(maxsize=256)  # each check of a distribution asks for all of its callers
def _surrounding(code: CodeType) -> list[ast.Try | ast.With] | None:
    """List statements of a function that may catch errors of their bodies; None without source."""
    tree = tree_of(code)
    if tree is None:
        return None
    return [node for node in ast.walk(tree) if isinstance(node, (ast.Try, ast.With))]


def _takes_away(node: ast.AST) -> bool:
    """Return whether a statement, by its own words, may take away the errors of its body."""
    if isinstance(node, ast.With):
        names = (name for item in node.items for name in names_in(item.context_expr))
        return any(name in _CATCHING for name in names)
    return isinstance(node, ast.Try) and not all(map(_is_of_exits, node.handlers))


def _is_of_exits(handler: ast.ExceptHandler) -> bool:
    names = [] if handler.type is None else names_in(handler.type)
    return bool(names) and _EXITS.issuperset(names)


def _catches(context: Any) -> bool:
    """Return whether a context may take an error away, by its code."""
    function = inspect.unwrap(getattr(context, "__func__", context))
    if not inspect.isfunction(function):  # else the generator of a context
        kind = context if isinstance(context, type) else type(context)
        function = getattr(kind, "__exit__", None)
    code = getattr(function, "__code__", None)
    if not isinstance(code, CodeType) or is_library(code.co_filename):
        return False
    tree = tree_of(code)
    nodes = [] if tree is None else [*ast.walk(tree)]
    if code.co_name != "__exit__":
        return any(map(_takes_away, nodes))
    returned = [n.value for n in nodes if isinstance(n, ast.Return) and n.value is not None]
    return not all(isinstance(value, ast.Constant) and not value.value for value in returned)


class NotKept:
    """Stands for a tensor in a message: a replay keeps its shape, and not its values."""

    def __init__(self, tensor: Tensor) -> None:
        self.shape, self.dtype, self.ndim = tensor.shape, tensor.dtype, tensor.ndim

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return self.ndim

    def numel(self) -> int:
        return self.shape.numel()

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        return f"<{kind} tensor of shape {tuple(self.shape)}, whose values are gone>"

    def __format__(self, _: str) -> str:
        return repr(self)


_ERROR = "__error__"
NotKept.__name__ = Tensor.__name__  # which messages show


class LateError(abc.ABC):
    """Makes the error of a failed assertion, or warns."""

    reads_late = False
    """Whether it may read attributes that have changed since."""

    @abc.abstractmethod
    def make(self, now: Callable[[Any], Any]) -> BaseException | None:
        """Return the error; ``now`` gives the present value of what is held."""


class _OfCode(LateError):
    """Runs statements of user code late, with its globals, and what stands for its variables."""

    def __init__(
        self, frame: FrameType, statements: list[ast.stmt], held: Callable[[Any], Any]
    ) -> None:
        self._told = [compiled([each], frame) for each in statements if is_telling(each)]
        self._code = compiled([each for each in statements if not is_telling(each)], frame)
        named = {name for code in (self._code, *self._told) for name in code.co_names}
        self._globals, known = frame.f_globals, frame.f_locals
        self._locals = {name: held(known[name]) for name in sorted(named) if name in known}

    def names(self, now: Callable[[Any], Any]) -> dict[str, Any]:
        """Return the variables, of the present."""
        return {**self._globals, **{name: now(value) for name, value in self._locals.items()}}


class Raising(_OfCode):
    """Makes the error that a way raises.

    Args:
        way: The way, whose error can be raised late.
        held: Makes what stands for a local value of which the message is made.
    """

    def __init__(self, way: Way, held: Callable[[Any], Any]) -> None:
        frame, statements = way.frame, _statements(way)
        super().__init__(frame, statements, held)
        nodes = [node for statement in statements for node in ast.walk(statement)]
        called = {id(node.func) for node in nodes if isinstance(node, ast.Call)}
        # Whether its message has attributes, which may have changed since
        self.reads_late = any(
            isinstance(node, ast.Attribute) and id(node) not in called for node in nodes
        )
        (raised, exc) = statements[-1], statements[-1].exc  # type: ignore[attr-defined]
        kind = exc.func if isinstance(exc, ast.Call) else exc
        self._kind = compiled([ast.Assign([ast.Name(_ERROR, ast.Store())], kind)], frame)
        alone = ast.copy_location(ast.Raise(ast.Name(_ERROR, ast.Load()), None), raised)
        self._raise = compiled([alone], frame)

    def make(self, now: Callable[[Any], Any]) -> BaseException:
        names = self.names(now)
        for told in self._told:
            with contextlib.suppress(Exception):  # it may need values that are gone
                exec(told, names)
        try:
            exec(self._code, names)  # the user's own lines
        except BaseException as error:  # as it is, `raise KeyboardInterrupt` as well
            if raises_by_itself(error, self._code):
                return error
        names[_ERROR] = AssertionError()
        with contextlib.suppress(Exception):  # its message needs values that are gone
            exec(self._kind, names)
            kind, names[_ERROR] = names[_ERROR], AssertionError()
            found = kind() if isinstance(kind, type) else kind
            names[_ERROR] = found if isinstance(found, BaseException) else names[_ERROR]
        try:
            exec(self._raise, names)
        except BaseException as error:
            return error
        return AssertionError()


class LateWarning(_OfCode):
    """Warns as a way does, whose warnings can come late."""

    def __init__(self, way: Way, held: Callable[[Any], Any]) -> None:
        super().__init__(way.frame, [*way.warns], held)

    def make(self, now: Callable[[Any], Any]) -> BaseException | None:
        """Warn; return the error if warnings are errors."""
        names = self.names(now)
        for code in self._told:
            try:
                exec(code, names)
            except Warning as error:
                return error
            except Exception:  # its message needs values that are gone
                warnings.warn(
                    f"a warning of {code.co_filename}, whose values are gone", stacklevel=2
                )
        return None


def late_of(way: Way, held: Callable[[Any], Any]) -> Raising | LateWarning:
    """Return what does late what a way does."""
    return LateWarning(way, held) if way.warns else Raising(way, held)


def can_be_raised_late(way: Way) -> bool:
    """Return whether the error of a way can be made again, and does not end a loop of callers."""
    if way.warns:
        return True
    statements = _statements(way)
    raised = [node.exc for node in statements if isinstance(node, ast.Raise)]
    loops = any("StopIteration" in names_in(node) for node in raised if node is not None)
    return bool(statements) and not loops


def _statements(way: Way) -> list[ast.stmt]:
    """Return the statements that raise, and those ahead of it that make its message."""
    tree = tree_of(way.frame.f_code)
    for node in () if tree is None else ast.walk(tree):
        for block in (getattr(node, name, None) for name in ("body", "orelse")):
            if not isinstance(block, list):
                continue
            for place, statement in enumerate(block):
                if way.raises not in lines_in(statement):
                    continue
                if isinstance(statement, ast.Assert):
                    kind, given = ast.Name("AssertionError", ast.Load()), statement.msg
                    made = ast.Call(kind, [] if given is None else [given], [])
                    return [ast.copy_location(ast.Raise(made, None), statement)]
                raised = _exit_of(statement, way.frame)
                if isinstance(raised, ast.Raise):
                    asked = way.frame.f_lineno
                    return [s for s in block[:place] if s.lineno > asked] + [raised]
    return []


def _exit_of(statement: ast.stmt, frame: FrameType) -> ast.stmt:
    """Return what a statement raises that ends the program; others as they are."""
    call = statement.value if isinstance(statement, ast.Expr) else None
    if not isinstance(call, ast.Call) or value_of(call.func, frame) not in _EXITING:
        return statement
    given = [*call.args, *(keyword.value for keyword in call.keywords)]
    raised = ast.Raise(ast.Call(ast.Name("SystemExit", ast.Load()), given, []), None)
    return ast.fix_missing_locations(ast.copy_location(raised, statement))


_EXITING = [sys.exit, *(getattr(builtins, name) for name in _ENDS if hasattr(builtins, name))]
"""Those functions themselves; Python may have been started without the two of its prompt."""
