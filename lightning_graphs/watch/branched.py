"""Branches of an optimizer's step by a value of the device: the graph computes both ways.

The step goes on without the body of such an ``if``, which has run ahead: what that has written was
undone. At the first line behind the ``if`` the graph chooses what is in memory, and what the
variables are that either way has bound.
"""

from __future__ import annotations

import ast
import functools
import math
from collections.abc import Iterator, Sequence
from types import CodeType, FrameType
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_graphs.device.rules import HOST_READ
from lightning_graphs.private.callsite import compiled, evaluated, lines_in, tree_of, variables_of
from lightning_graphs.watch.forks import Asking, UpToTheEnd, if_asking


class Way(Protocol):
    """Records what one way writes."""

    written: dict[int, tuple[Tensor, Tensor, Tensor]]
    """By the address of a storage: all of it, what was there, and what the way leaves there."""

    def __enter__(self) -> Any: ...
    def __exit__(self, *_: object) -> Any: ...
    def undo(self) -> None:
        """Put back what was there."""


class Ways(Protocol):
    """What a capture knows of values."""

    def way(self) -> Way:
        """Return what records a way."""

    def scalar(self, value: Any) -> Tensor | bool | None:
        """Return the truth of a value, of one of the device a scalar; None if it has none."""

    def either(self, condition: Tensor, one: Any, other: Any) -> Any:
        """Return one value where a condition holds, and the other one elsewhere."""


class Branch(UpToTheEnd):
    """An ``if`` that asks the device, and the trace function of its frame up to the line behind it.

    Its branches do no more than to compute, to bind variables, and to write tensors in place.
    """

    def __init__(self, asking: Asking) -> None:
        self._asking = asking
        otherwise = asking.node.orelse
        self._else = lines_in(*otherwise) if otherwise else range(0)
        self._code = asking.frame.f_code

    @classmethod
    def of(cls, frame: FrameType, *, called: bool) -> Branch | None:
        """Return the branch for which code asks now; None if it is none, or does more.

        Args:
            frame: The code.
            called: It calls what asks, and would ask a tensor itself otherwise.
        """
        asking = if_asking(frame, called=called)
        if asking is None or not _only_computes(asking.node):
            return None
        known = asking.frame.f_trace
        if not isinstance(known, Branch):
            return cls(asking)
        if known._asking.node is not asking.node:  # one inside of the other
            return None
        known._asking = asking  # its condition asks once more
        return known

    def answer(self, truth: Tensor, ways: Ways) -> bool | None:
        """Answer so that code goes on without the body; None if it cannot."""
        asking = self._asking
        if asking.frame.f_trace is self:
            return asking.leaving
        with torch.no_grad():
            if asking.entering is not None and not isinstance(asking.node.test, ast.BoolOp):
                enters: Tensor | bool | None = truth.ne(0) if asking.entering else truth.eq(0)
            else:
                enters = self._value_of(asking.node.test, ways)
        if not isinstance(enters, Tensor):  # the host knows
            return None if enters is None else asking.leaving is not enters
        self._run_ahead(enters, ways)
        return asking.leaving

    def _value_of(self, test: ast.expr, ways: Ways) -> Tensor | bool | None:
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            value = self._value_of(test.operand, ways)
            if isinstance(value, Tensor):
                return value.logical_not()
            return None if value is None else not value
        if not isinstance(test, ast.BoolOp):
            return ways.scalar(evaluated(test, self._asking.frame))
        decides = isinstance(test.op, ast.Or)  # by which further operands do not count
        found: list[Tensor] = []
        for part in test.values:
            value = self._value_of(part, ways)
            if value is None or value is decides:
                return value
            found += [value] if isinstance(value, Tensor) else []
        both = torch.logical_or if decides else torch.logical_and
        return functools.reduce(both, found) if found else not decides

    def _run_ahead(self, enters: Tensor, ways: Ways) -> None:
        frame, node = self._asking.frame, self._asking.node
        self._enters, self._ways = enters, ways
        self._variables = variables_of(frame)
        self._body, self._without = ways.way(), ways.way()
        with self._body:
            exec(compiled(node.body, frame), frame.f_globals, self._variables)
        self._body.undo()
        self._is_inside = False  # of the other way, which has statements
        self.begin(frame, node)

    def passes(self, line: int) -> None:
        if line in self._else and not self._is_inside:
            self._is_inside = True
            self._without.__enter__()

    def ends(self, table: dict[str, Any] | None) -> None:
        if self._is_inside:
            self._without.__exit__(None, None, None)
        if table is not None:
            with torch.no_grad():
                self._choose_memory()
                table.update(dict(self._chosen(table)))

    def _choose_memory(self) -> None:
        body, without = self._body.written, self._without.written
        for address, (whole, before, _) in {**without, **body}.items():
            one = body[address][2] if address in body else before
            if address in body and address in without and without[address][0].dtype != whole.dtype:
                HOST_READ.stop_here("a branch writes memory as of other types on another way")
            whole.copy_(torch.where(self._enters, one, whole))

    def _chosen(self, table: dict[str, Any]) -> Iterator[tuple[str, Any]]:
        for name in _names_needed(self._code, self._asking.node):
            if name in self._variables and name in table:
                both = self._variables[name], table[name]
                yield name, self._ways.either(self._enters, *both)
            elif name in self._variables:  # code that goes the other way does not ask for it
                yield name, self._variables[name]


_PARTS = (
    *(ast.Name, ast.Attribute, ast.Constant, ast.Call, ast.keyword, ast.BinOp, ast.UnaryOp),
    *(ast.Compare, ast.BoolOp, ast.Tuple, ast.List, ast.Subscript, ast.Slice, ast.Starred),
    *(ast.operator, ast.unaryop, ast.cmpop, ast.boolop, ast.expr_context),
)
_OF_PYTHON = ("abs", "bool", "float", "get", "int", "isinstance", "len", "max", "min", "sum")


@functools.lru_cache(maxsize=256)
def _only_computes(node: ast.If) -> bool:
    """Return whether an ``if`` only computes, binds variables, and writes tensors in place."""
    is_below = node.body[0].lineno > (node.test.end_lineno or 0)
    return is_below and _is_computed(node.test) and all(map(_computes, [*node.body, *node.orelse]))


def _computes(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.If):
        inner = [*statement.body, *statement.orelse]
        return _is_computed(statement.test) and all(map(_computes, inner))
    if isinstance(statement, (ast.Assign, ast.AugAssign)):
        targets = _targets_of(statement)
        return all(isinstance(t, ast.Name) for t in targets) and _is_computed(statement.value)
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        return _called(statement.value).endswith("_") and _is_computed(statement.value)
    return isinstance(statement, ast.Pass)


def _targets_of(statement: ast.Assign | ast.AugAssign) -> Iterator[ast.expr]:
    for target in statement.targets if isinstance(statement, ast.Assign) else [statement.target]:
        yield from target.elts if isinstance(target, (ast.Tuple, ast.List)) else [target]


def _called(call: ast.Call) -> str:
    name: str = getattr(call.func, "attr", getattr(call.func, "id", ""))
    return name


def _is_computed(expression: ast.expr) -> bool:
    parts = [*ast.walk(expression)]
    names = {_called(part) for part in parts if isinstance(part, ast.Call)}
    return all(isinstance(part, _PARTS) for part in parts) and all(map(_is_known, names))


def _is_known(name: str) -> bool:
    return name in _OF_PYTHON or any(hasattr(owner, name) for owner in (Tensor, torch, math))


@functools.lru_cache(maxsize=256)
def _names_needed(code: CodeType, node: ast.If) -> tuple[str, ...]:
    """Return the variables that an ``if`` binds, and that code may read later."""
    lines = lines_in(node)
    outside = {n.id for n in _names_in(tree_of(code)) if _is_read(n) and n.lineno not in lines}
    bound = dict.fromkeys(n.id for n in _names_in(node) if not _is_read(n))
    ways = node.body, node.orelse
    return tuple(n for n in bound if n in outside or any(_reads_first(way, n) for way in ways))


def _names_in(node: ast.AST | None) -> Iterator[ast.Name]:
    return (n for n in ast.walk(node or ast.Module([], [])) if isinstance(n, ast.Name))


def _is_read(name: ast.Name) -> bool:
    return isinstance(name.ctx, ast.Load)


def _reads_first(statements: Sequence[ast.stmt], name: str) -> bool:
    """Return whether statements in a row may read a variable ahead of binding it."""
    for statement in statements:
        found = [each for each in _names_in(statement) if each.id == name]
        if any(map(_is_read, found)) or (found and isinstance(statement, ast.AugAssign)):
            return True
        if found and not isinstance(statement, ast.If):
            return False
    return False
