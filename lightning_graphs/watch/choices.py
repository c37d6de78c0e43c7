"""Branches that only choose values: the graph computes both, and chooses there.

``if not torch.isfinite(loss): loss = torch.tensor(1e9)`` reads the device, and all that follows
from it is another value in a local variable. Code goes on here as if the condition did not hold; at
the next line its variables become what ``torch.where`` has chosen.
"""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import filterfalse
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import Node

from lightning_graphs.private.callsite import CallSite
from lightning_graphs.private.engine import leaf_of
from lightning_graphs.private.source import compiled, tree_of
from lightning_graphs.watch.branches import (
    LateWarning,
    Way,
    is_telling,
    landings,
)

_PURE = frozenset(
    ("tensor", "zeros_like", "ones_like", "full_like", "zeros", "ones", "full", "detach", "clone")
) | {"new_tensor", "new_zeros", "new_ones", "new_full", "nan_to_num", "clamp", "where", "abs"}
"""Functions and methods that make a tensor, and do nothing else."""
_EXPRESSIONS = (
    *(ast.Name, ast.Attribute, ast.Constant, ast.Call, ast.keyword, ast.BinOp, ast.UnaryOp),
    *(ast.Compare, ast.Tuple, ast.List, ast.Subscript, ast.operator, ast.unaryop, ast.cmpop),
    ast.expr_context,
)


class Choice(NamedTuple):
    """An ``if`` that asks a condition, and whose branches only bind local variables, and warn."""

    frame: FrameType
    node: ast.If
    outcome: bool  # by which code skips the body
    names: tuple[str, ...]  # that either branch binds

    @property
    def site(self) -> CallSite:
        code = self.frame.f_code
        return CallSite(code.co_filename, self.node.lineno, code.co_name)

    @property
    def place(self) -> tuple[CodeType, int]:
        """Its code, and the line of its ``if``."""
        return self.frame.f_code, self.node.lineno

    def of_body(self) -> dict[str, Any]:
        """Compute what the variables would be behind the body."""
        names = dict(self.frame.f_locals)
        exec(compiled([*_binding(self.node.body)], self.frame), self.frame.f_globals, names)
        return {name: names.get(name) for name in self.names}

    def warning(self, held: Callable[[Any], Any]) -> LateWarning | None:
        """Return what warns as the body does; None if it does not."""
        told = tuple(filter(is_telling, self.node.body))
        return LateWarning(Way(self.outcome, self.frame, 0, told), held) if told else None

    def behind(self, choose: Callable[[dict[str, Any]], Mapping[str, Any]]) -> None:
        """Set what the variables become at the first line behind the ``if``, given those then."""
        frame, before, own = self.frame, sys.gettrace(), self.frame.f_trace
        inside = range(self.node.lineno, (self.node.end_lineno or 0) + 1)

        def line(at: FrameType, event: str, _: object) -> Any:
            if event == "line" and at.f_lineno in inside:
                return line
            sys.settrace(before)
            frame.f_trace = own
            if event == "line":
                table = at.f_locals  # each look at it before Python 3.13 would undo changes of it
                table.update(choose(table))
            return own

        sys.settrace(lambda *_: None)
        frame.f_trace = line


def choice_of(frame: FrameType, *, called: bool) -> Choice | None:
    """Return the choice of code that asks now whether a value is true; None if it does more."""
    found = landings(frame, called=called) or {}
    for node in ifs_in(frame.f_code) if len(found) == 2 else ():
        test, statements = node.test, [*node.body, *node.orelse]
        if not test.lineno <= frame.f_lineno <= (test.end_lineno or 0):
            continue
        body = range(node.body[0].lineno, (node.body[-1].end_lineno or 0) + 1)
        entering = [outcome for outcome, line in found.items() if line in body]
        if len(entering) == 1 and all(map(_is_choosing, statements)):
            names = tuple(dict.fromkeys(map(_name_bound, _binding(statements))))
            own = {*frame.f_code.co_varnames, *frame.f_code.co_cellvars}
            return Choice(frame, node, not entering[0], names) if own.issuperset(names) else None
    return None


@functools.lru_cache(maxsize=256)
def ifs_in(code: CodeType) -> tuple[ast.If, ...]:
    tree = tree_of(code)
    return () if tree is None else tuple(n for n in ast.walk(tree) if isinstance(n, ast.If))


def _binding(statements: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    return filterfalse(is_telling, statements)


def _name_bound(statement: Any) -> str:
    name: str = statement.targets[0].id
    return name


def _is_choosing(statement: ast.stmt) -> bool:
    """Return whether a statement binds a variable to a new value, or tells, and no more."""
    if is_telling(statement):
        return True
    if not (isinstance(statement, ast.Assign) and len(statement.targets) == 1):
        return False
    parts = [*ast.walk(statement.value)]
    calls = [node.func for node in parts if isinstance(node, ast.Call)]
    names = (getattr(called, "attr", getattr(called, "id", "")) for called in calls)
    is_name = isinstance(statement.targets[0], ast.Name)
    return is_name and all(isinstance(n, _EXPRESSIONS) for n in parts) and _PURE.issuperset(names)


@dataclass(frozen=True, slots=True)
class Cut:
    """A chosen value by which a step would lose all gradients."""

    choice: Choice
    entering: Tensor  # whether the body is entered
    node: Node  # of the chosen value


def goes_through(node: Node | None, loss: Tensor | None) -> bool:
    """Return whether each gradient of a loss goes through a node."""
    if loss is None or loss.grad_fn is None:
        return False
    seen, pending = {node}, [loss.grad_fn]
    while pending:
        if (each := pending.pop()) in seen:
            continue
        if leaf_of(each) is not None:
            return False
        seen.add(each)
        pending += [after for after, _ in each.next_functions if after is not None]
    return True


class NoGradient:
    """Raises what a backward pass does without gradients, and warns ahead of it.

    Args:
        warning: What warns; None if nothing does.
    """

    reads_late = False

    def __init__(self, warning: LateWarning | None) -> None:
        self._warning = warning

    def make(self, now: Callable[[Any], Any]) -> BaseException:
        """Return the error."""
        error = None if self._warning is None else self._warning.make(now)
        text = "element 0 of tensors does not require grad and does not have a grad_fn"
        return error or RuntimeError(text)


def chosen(entering: Tensor, body: Any, now: Any) -> tuple[Any, Node | None] | None:
    """Return the value that a variable has behind a choice; None if a graph cannot choose it.

    Beside it comes its node, if it has a gradient that it would not have behind the body.
    """
    if not (isinstance(body, Tensor) and isinstance(now, Tensor)):
        return (now, None) if body is now else None
    alike = (type(body), body.shape, body.dtype, body.device, body.is_contiguous())
    if alike != (type(now), now.shape, now.dtype, now.device, now.is_contiguous()):
        return None
    if body is now:
        return now, None
    if body.requires_grad or (now.requires_grad and not torch.is_grad_enabled()):
        return None  # a leaf that has a gradient of zeros has none in eager mode
    value = torch.where(entering, body, now)
    return value, value.grad_fn
