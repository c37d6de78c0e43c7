"""Plain floats that code makes of a number only to log them: ``self.log("step", float(step))``."""

from __future__ import annotations

import ast
import linecache
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

from lightning_graphs.core.callsite import CallSite, CallSiteFinder

Now = Callable[[], Any]


@dataclass(eq=False, slots=True)
class _Made:
    name: str
    value: float
    now: Now
    code: CodeType
    site: CallSite


class LoggedFloats:
    """Follows a float from where it is made of a number to where it is logged.

    ``float()`` hands out the object that it gets, and nobody sees what is computed with it. So the
    statement must do nothing else with it, and the object must arrive.
    """

    def __init__(self) -> None:
        self._made: list[_Made] = []

    def made(self, name: str, value: Any, now: Now, frame: FrameType) -> float | None:
        """A float for code that asks for one; None if it does more with it than log it."""
        if not is_logged_at_once(frame):
            return None
        own = float(repr(float(value)))  # an object of its own
        self._made.append(_Made(name, own, now, frame.f_code, CallSiteFinder().here()))
        return own

    def logged(self, value: Any) -> Now | None:
        """What gives the present value of something that is logged; None if it was not made here.

        To be called by what stands for ``LightningModule.log``.
        """
        for made in self._made:
            if made.value is value and next(_users_code(), None) is made.code:
                self._made.remove(made)
                return made.now
        return None

    def elsewhere(self) -> list[tuple[str, CallSite]]:
        """Of which numbers floats were made that were not logged, and where."""
        return [(made.name, made.site) for made in self._made]


def constants_around() -> Iterator[Any]:
    """The constants in the text of the author's functions that are running."""
    for code in _users_code():
        yield from code.co_consts


def _users_code() -> Iterator[CodeType]:
    """The functions that are running and are no library's, innermost first."""
    is_library = CallSiteFinder().is_library
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not is_library(frame.f_code.co_filename):
            yield frame.f_code
        frame = frame.f_back


def is_logged_at_once(frame: FrameType) -> bool:
    """Whether the statement that runs hands every ``float(...)`` in it to a log, and nowhere else.

    It is ``self.log(name, float(...), ...)``, or ``self.log_dict({name: float(...)}, ...)``.
    """
    lines = linecache.getlines(frame.f_code.co_filename, frame.f_globals)
    try:
        tree = ast.parse("".join(lines))
    except SyntaxError:
        return False
    found = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.stmt) and _covers(node, frame.f_lineno)
    ]
    pairs = [(_floats_in(node), _logged_in(node)) for node in found]
    logs = any(floats & logged for floats, logged in pairs)
    return logs and not any(floats - logged for floats, logged in pairs)


def _covers(node: ast.stmt, line: int) -> bool:
    if hasattr(node, "body"):  # its own expressions; what is inside is another statement
        return node.lineno == line
    return node.lineno <= line <= (node.end_lineno or node.lineno)


def _floats_in(node: ast.AST) -> set[ast.AST]:
    calls = (inner for inner in ast.walk(node) if isinstance(inner, ast.Call))
    return {c for c in calls if isinstance(c.func, ast.Name) and c.func.id == "float"}


def _logged_in(node: ast.stmt) -> set[ast.AST]:
    """What a statement hands to a log, if that is all that it does."""
    call = node.value if isinstance(node, ast.Expr) else None
    if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)):
        return set()
    if call.func.attr not in ("log", "log_dict"):
        return set()
    given: list[ast.AST] = [*call.args, *(keyword.value for keyword in call.keywords)]
    return {*given, *(v for each in given if isinstance(each, ast.Dict) for v in each.values)}
