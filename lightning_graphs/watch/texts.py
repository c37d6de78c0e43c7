"""Texts that code makes of values which a capture does not have, for calls that are kept back.

In ``print(f"loss {loss.item():.3f}")`` a part that no other text has stands for the number, until
the call is made behind a replay. Whatever else might look at such a text is none of these calls:
source and byte code tell, before there is one, where it goes.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map_only

from lightning_graphs.private.callsite import (
    listing_of,
    position_of,
    positions_of,
    statements_around,
    tree_of,
    value_of,
)
from lightning_graphs.watch.tracers import MAKES_TEXT, Method

Position = tuple[int | None, ...]
"""First and last line, first and last column."""

# ------------------ Texts with parts

_PART = re.compile("\ufdd0(\\d+)\ufdd1")  # of characters that Unicode keeps out of texts
_parts: dict[int, Any] = {}
_numbers = itertools.count()


def part_for(value: Any) -> str:
    """Return a text that stands for a value; :func:`spelled` knows it."""
    number = next(_numbers)
    _parts[number] = value
    return f"\ufdd0{number}\ufdd1"


def forget_parts() -> None:
    """End a capture."""
    _parts.clear()


def spelled(given: Any, late: Callable[[list[Any]], Any]) -> Any:
    """Replace texts with such parts, in what a call is given, by what ``late`` makes of them.

    Args:
        given: Arguments of a call.
        late: Is given the pieces of a text, of which some are values.
    """
    if not _parts:
        return given

    def spell(text: str) -> Any:
        pieces: list[Any] = _PART.split(text)
        if len(pieces) == 1:
            return text
        pieces[1::2] = [_parts[int(number)] for number in pieces[1::2]]
        return late(pieces)

    return tree_map_only(str, spell, given)


def joined(pieces: list[Any]) -> str:
    return "".join(pieces)


# ------------------ Where code takes them

_MAKING = ("FORMAT_VALUE", "FORMAT_SIMPLE", "FORMAT_WITH_SPEC", "CONVERT_VALUE")


def is_asked_for_text(callee: FrameType) -> bool:
    """Return whether a function that code has called makes a text of a value."""
    methods = [value for value in callee.f_locals.values() if type(value) is Method]
    return any(m.function in MAKES_TEXT for m in methods) or callee.f_code in _OF_TENSORS


_OF_TENSORS = {getattr(Tensor, f"__{f.__name__}__").__code__ for f in (format, repr)}


def tellers(code: CodeType, offset: int, line: int) -> list[ast.Call]:
    """List the calls that get the text which an instruction makes; none if others may look at it.

    They are statements by themselves: nothing has their result.
    """
    statement = [None, *statements_around(code, line)][-1]
    at = positions_of(code, offset)
    if statement is None or at is None or not _makes_text(code, offset, at, statement):
        return []
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        return [statement.value] if _reach(_texts_in(statement), statement) else []
    if not (isinstance(statement, ast.Assign) and len(statement.targets) == 1):
        return []
    (target,), text = statement.targets, statement.value
    if not isinstance(target, ast.Name) or target.id not in code.co_varnames:
        return []
    is_text = isinstance(text, (ast.JoinedStr, ast.BinOp)) or _is_call_for_text(text)
    if not (is_text and _reach(_texts_in(statement), statement)):
        return []
    found = []
    for use in ast.walk(tree_of(code) or ast.Module([], [])):
        if isinstance(use, ast.Name) and use.id == target.id and isinstance(use.ctx, ast.Load):
            *_, around = statements_around(code, use.lineno)
            is_call = isinstance(around, ast.Expr) and isinstance(around.value, ast.Call)
            if not (is_call and _reach([use], around)):
                return []
            found.append(around.value)  # type: ignore[attr-defined]
    return found


def _makes_text(code: CodeType, offset: int, at: Position, statement: ast.stmt) -> bool:
    listing = listing_of(code)
    if listing.instructions[listing.at(offset)].opname in _MAKING:
        return True
    return any(
        position_of(node) == at for node in _texts_in(statement) if isinstance(node, ast.Call)
    )


def _texts_in(statement: ast.stmt) -> list[ast.AST]:
    """List the expressions that make texts of values."""
    specs = {id(n.format_spec) for n in ast.walk(statement) if isinstance(n, ast.FormattedValue)}
    nodes = (node for node in ast.walk(statement) if id(node) not in specs)
    return [n for n in nodes if isinstance(n, ast.JoinedStr) or _is_call_for_text(n)]


def _is_call_for_text(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    function = node.func
    if isinstance(function, ast.Name):
        return function.id in ("str", "repr", "format") and not node.keywords
    return _is_method_of_text(function, "format")


def _reach(texts: list[Any], statement: ast.stmt) -> bool:
    """Return whether these expressions get to the statement's own one as they are, or as parts."""
    above = {child: node for node in ast.walk(statement) for child in ast.iter_child_nodes(node)}
    root: Any = statement.value  # type: ignore[attr-defined]
    of_call = root.func if isinstance(statement, ast.Expr) else None
    for node in texts:
        while node is not root:
            parent: Any = above[node]
            is_given = of_call not in (None, node) and parent is root
            if not (is_given or _passes_on(parent, node)):
                return False
            node = parent
    specs = (n for n in ast.walk(statement) if isinstance(n, ast.FormattedValue))
    return not any(n.conversion != -1 and n.format_spec is not None for n in specs)


def _passes_on(node: Any, part: ast.AST) -> bool:
    if isinstance(node, ast.FormattedValue):
        return node.conversion == -1 and node.format_spec is None
    if isinstance(node, ast.Dict):
        return any(part is value for value in node.values)
    if isinstance(node, ast.BinOp):
        return isinstance(node.op, ast.Add)
    if isinstance(node, ast.Call):
        return _is_method_of_text(node.func, "join")  # whose own text is a constant
    return isinstance(node, (ast.keyword, ast.List, ast.Tuple, ast.JoinedStr))


def _is_method_of_text(node: Any, name: str) -> bool:
    text = node.value if isinstance(node, ast.Attribute) and node.attr == name else None
    return isinstance(text, ast.Constant) and type(text.value) is str and "!" not in text.value


def function_called(teller: ast.Call, frame: FrameType) -> Any:
    """Return the function that a call is of, as far as names and attributes tell; else None."""
    found = value_of(teller, frame)
    return getattr(found, "__func__", found)


def is_call_there(code: CodeType, teller: ast.Call) -> bool:
    """Return whether an instruction is known to be this call."""
    at = position_of(teller)
    found = (i.offset for i in listing_of(code).instructions if i.opname.startswith("CALL"))
    return any(positions_of(code, offset) == at for offset in found)


def is_statement(code: CodeType, line: int, at: Position | None) -> bool:
    """Return whether nothing has a call's result, given its line and position.

    It is a statement by itself, or further calls and attributes are: ``self.experiment.log(...)``.
    """
    statement = [None, *statements_around(code, line)][-1]
    node: Any = statement.value if isinstance(statement, ast.Expr) else None
    while isinstance(node, (ast.Call, ast.Attribute)) and position_of(node) != at:
        node = node.func if isinstance(node, ast.Call) else node.value
    return node is not None and position_of(node) == at
