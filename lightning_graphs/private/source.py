"""Source, byte code and lines of the functions that user code runs."""

from __future__ import annotations

import ast
import bisect
import contextlib
import dis
import functools
import inspect
import itertools
import linecache
import re
import sys
import tokenize
import weakref
from collections.abc import Container, Iterator
from types import CodeType, FrameType
from typing import Any, NamedTuple

# ------------------ Byte code


class Listing(NamedTuple):
    """The instructions of a function."""

    instructions: list[dis.Instruction]
    lines: list[int]  # of each
    offsets: list[int]  # of each

    def with_lines(self) -> Iterator[tuple[int, dis.Instruction]]:
        """Pair each instruction with its line."""
        return zip(self.lines, self.instructions, strict=True)

    def at(self, offset: int) -> int:
        """Return the index of the instruction at an offset, or of which a cache is there."""
        return bisect.bisect_right(self.offsets, offset) - 1


@functools.lru_cache(maxsize=256)
def listing_of(code: CodeType) -> Listing:
    found = list(dis.get_instructions(code))
    starts, line, lines = dict(dis.findlinestarts(code)), code.co_firstlineno, []
    for instruction in found:
        line = starts.get(instruction.offset) or line
        lines.append(line)
    return Listing(found, lines, [instruction.offset for instruction in found])


def instruction_at(frame: FrameType) -> dis.Instruction:
    """Return the instruction that a frame executes."""
    listing = listing_of(frame.f_code)
    return listing.instructions[listing.at(frame.f_lasti)]


def offsets_at(code: CodeType, offset: int) -> range:
    """Return the offsets of an instruction with what follows it in its caches."""
    listing = listing_of(code)
    at, ends = listing.at(offset), [*listing.offsets, len(code.co_code)]
    return range(ends[at], ends[at + 1])


def positions_of(code: CodeType, offset: int) -> tuple[int | None, ...] | None:
    """Return first and last line, first and last column of an instruction; None before 3.11."""
    positions = getattr(code, "co_positions", None)
    return None if positions is None else next(itertools.islice(positions(), offset // 2, None))


# ------------------ Source


@functools.lru_cache(maxsize=256)
def tree_of(code: CodeType) -> ast.Module | None:
    """Return the source of a function, with its line numbers; None if there is none."""
    unreadable = OSError, TypeError, SyntaxError, IndexError, tokenize.TokenError
    with contextlib.suppress(*unreadable):
        lines, first = _source_of(code)
        above = ["if True:\n"] if lines[0][:1].isspace() else []  # as a method stands in a class
        tree = ast.parse("".join([*above, *lines]))
        return ast.increment_lineno(tree, max(first, 1) - 1 - len(above))
    return None


def _source_of(code: CodeType) -> tuple[list[str], int]:
    """Return the lines of a function, and the number of the first, as ``inspect`` finds them.

    ``inspect.getsourcelines`` first looks for the module of a code object, through all that are
    imported, which takes half a second where there are thousands.
    """
    lines = linecache.getlines(code.co_filename)
    first = code.co_firstlineno - 1
    while first > 0 and not _BEGINS.match(lines[first]):
        first -= 1
    return inspect.getblock(lines[first:]), first + 1


_BEGINS = re.compile(r"\s*(async\s+)?def\s|.*(?<!\w)lambda(:|\s)|\s*@")


def statements_around(code: CodeType, line: int) -> Iterator[ast.stmt]:
    """Yield the statements of a function that have a line, outer ones first."""
    tree = tree_of(code)
    functions = (n for n in ast.walk(tree or ast.Module([], [])) if isinstance(n, ast.FunctionDef))
    inside: Any = next((each for each in functions if each.name == code.co_name), None)
    while inside is not None:
        inside = next(
            (
                node
                for node in _statements_in(inside)
                if node.lineno <= line <= (node.end_lineno or node.lineno)
            ),
            None,
        )
        if inside is not None:
            yield inside


def _statements_in(node: ast.AST) -> Iterator[ast.stmt]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt):
            yield child
        elif not isinstance(child, ast.expr):  # handlers of errors, cases of a match
            yield from _statements_in(child)


def names_in(node: ast.AST) -> Iterator[str]:
    """Yield the names of variables and attributes in an expression or a statement."""
    for part in ast.walk(node):
        if isinstance(part, ast.Name):
            yield part.id
        elif isinstance(part, ast.Attribute):
            yield part.attr


def compiled(statements: list[ast.stmt], frame: FrameType) -> CodeType:
    """Compile statements of a frame's function, to be run by themselves."""
    module = ast.fix_missing_locations(ast.Module(statements, []))
    return compile(module, frame.f_code.co_filename, "exec", dont_inherit=True)


# ------------------ Lines, as they run

# Other lines than those that are asked for, and all other code, run at full speed:
# ``sys.monitoring`` does that from Python 3.12 on. There a trace function would cost most: to set
# one makes the interpreter prepare the byte code of every function again.

_Told = tuple[Container[int], "weakref.WeakMethod[Any]"]

_told: dict[CodeType, list[_Told]] = {}
_monitoring: Any = getattr(sys, "monitoring", None)
_place: list[int] = []  # that is taken among the tools that monitor


def tell(code: CodeType, lines: Container[int], method: Any) -> bool:
    """Call a bound method with the frame of a function whenever that comes to one of these lines.

    An error that it raises is one of that line. It is called as long as its object lives. False: it
    never is, on older versions of Python, or because other tools have taken all places.
    """
    if _monitoring is None or not (_told or _has_place()):
        return False
    _told.setdefault(code, []).append((lines, weakref.WeakMethod(method)))
    # Off first: lines that were of no use before may be of use now
    for events in (0, _monitoring.events.LINE):
        _monitoring.set_local_events(_place[0], code, events)
    weakref.finalize(method.__self__, _forget, code).atexit = False
    return True


def _has_place() -> bool:
    """Take a place among the tools that monitor; return whether there is one."""
    _place[:] = [i for i in (4, 3) if _monitoring.get_tool(i) is None][:1]
    for i in _place:
        _monitoring.use_tool_id(i, "lightning-graphs")
        _monitoring.register_callback(i, _monitoring.events.LINE, _comes_to)
    return bool(_place)


def _comes_to(code: CodeType, line: int) -> Any:
    is_known = False
    for lines, known in _told.get(code, ()):
        if line in lines:
            is_known = True
            if (method := known()) is not None:
                method(sys._getframe(1))
    return None if is_known else _monitoring.DISABLE


def _forget(code: CodeType) -> None:
    known = _told.pop(code, [])
    found = [each for each in known if each[1]() is not None]
    if found:
        _told[code] = found
    if found or not known:
        return
    _monitoring.set_local_events(_place[0], code, 0)
    if not _told:
        _monitoring.free_tool_id(_place[0])
