"""User code: the file and line that led to an operator, its source and its byte code."""

from __future__ import annotations

import ast
import bisect
import contextlib
import dis
import functools
import importlib.util
import inspect
import itertools
import linecache
import os
import re
import sys
import sysconfig
import tempfile
import threading
import tokenize
import types
import weakref
from argparse import Namespace
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from operator import itemgetter
from traceback import walk_tb
from types import CodeType, FrameType
from typing import Any, NamedTuple, TypeVar

import torch

from lightning_graphs.errors import OF_PACKAGE, GraphError, causes_of
from lightning_graphs.private.exchange import TURN, replaced


def _folders_of(packages: Iterable[str]) -> tuple[str, ...]:
    """Return the folders of packages without importing them."""
    found: list[str] = []
    for name in packages:
        with contextlib.suppress(ImportError, ValueError):
            spec = importlib.util.find_spec(name)
            found += [] if spec is None else spec.submodule_search_locations or []
    return tuple(os.path.join(os.path.abspath(path), "") for path in found)


def _own_roots() -> tuple[str, ...]:
    """List folders and files of torch, of this package and of frames in between."""
    folders = [os.path.dirname(os.path.dirname(os.path.abspath(__file__)))]
    folders.append(os.path.dirname(os.path.abspath(torch.__file__)))
    modules = ("contextlib", "copy", "functools", os.path.join("logging", "__init__"))
    standard = [os.path.join(os.path.dirname(os.__file__), f"{name}.py") for name in modules]
    # Where torch.compile writes the code that it has generated
    compiled = os.path.join(tempfile.gettempdir(), "torchinductor_")
    compiled = os.path.abspath(os.environ.get("TORCHINDUCTOR_CACHE_DIR", compiled))
    return (*(os.path.join(path, "") for path in folders), compiled, *standard)


class Libraries:
    """Names the packages whose code is not the user's."""

    def __init__(self) -> None:
        self.framework: frozenset[str] = frozenset()  # packages that run the user's code
        # Packages whose objects keep state of their own; lines of these are shown
        self.opaque = frozenset({"torch", "lightning_graphs", "transformers"})
        self.roots = _own_roots()
        self.step = "the step"  # what user code calls the function that is captured as a step

    @contextlib.contextmanager
    def calling(self, step: str) -> Iterator[None]:
        """Name the captured function otherwise in the body, while other threads wait for it."""
        with TURN, replaced(self, "step", step):
            yield

    def add(self, framework: Iterable[str], opaque: Iterable[str] = ()) -> None:
        """Take code of these packages for that of libraries, too; the client names its own."""
        self.framework |= frozenset(framework)
        self.opaque |= self.framework | frozenset(opaque)
        self.roots += _folders_of(framework)
        is_library.cache_clear()


LIBRARIES = Libraries()
_GENERATED = ("<frozen ", "<eval_with_key>")
"""Code without a file that is not the user's own either, unlike ``<stdin>`` or a notebook cell."""


def file_shown(file: str) -> str:
    """Return a file's name in messages: a notebook's cell as in its tracebacks."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    name_of = getattr(getattr(shell, "compile", None), "format_code_name", lambda _: None)
    return " ".join(name_of(file) or [file])


def package_of(file: str) -> str:
    """Return the installed package of a file; empty for user code."""
    path = os.path.normpath(file).replace(os.sep, "/")
    found = re.search(r".*/(?:site|dist)-packages/([^/]+)", path)
    return found[1].removesuffix(".py") if found else ""


@dataclass(frozen=True, slots=True)
class CallSite:
    """A line of the user's code."""

    file: str = "?"  # where no frame of the user's was on the stack
    line: int = 0  # line number, from 1
    function: str = "?"  # name of the function the line is in
    in_backward: bool = False  # a backward pass ran, where no line is known

    @classmethod
    def of(cls, code: CodeType, line: int) -> CallSite:
        """Return the site of a line in a function's code."""
        return cls(code.co_filename, line, code.co_name)

    def __str__(self) -> str:
        return f"{file_shown(self.file)}:{self.line}"

    @property
    def source(self) -> str:
        """The line; empty where the source cannot be read."""
        return linecache.getline(self.file, self.line).strip()

    def describe(self) -> str:
        """``file.py:12 in forward: loss.item()``, as it appears in messages."""
        if not self.line:
            return f"{NO_LINE}, in the backward pass" if self.in_backward else IN_LIBRARIES
        source = f": {self.source}" if self.source else ""
        package = package_of(self.file)
        whose = f" ({OF_PACKAGE} {package})" if package else ""
        place = f"{self} in {self.function}"
        _described[place] = self
        return f"{place}{whose}{source}"


_described: dict[str, CallSite] = {}
"""Lines in messages."""


def site_in(text: str) -> CallSite:
    """Return the first line that a message names."""
    found = [(text.index(place), site) for place, site in _described.items() if place in text]
    return min(found, default=(0, CallSite()), key=itemgetter(0))[1]


def frames_from(frame: types.FrameType | None) -> Iterator[types.FrameType]:
    """Yield a frame and its callers, outward; `traceback.walk_stack` would compute lines."""
    while frame is not None:
        yield frame
        frame = frame.f_back


OURS = "lightning_graphs."
"""Begins the names of the modules of this package."""


def outside_of(frame: types.FrameType, *packages: str) -> types.FrameType:
    """Return the innermost frame from this one on whose module is in none of these packages."""
    names = ((found, found.f_globals.get("__name__", "")) for found in frames_from(frame))
    return next((found for found, name in names if not name.startswith(packages)), frame)


_HOLDERS = 3
"""References to the table of a frame that nothing but the frame holds, where code counts them."""


def variables_of(frame: types.FrameType) -> dict[str, Any]:
    """Return the variables of a frame without having the frame hold their values.

    Up to Python 3.12 a frame that is asked for its variables keeps the table, and with it the
    values, until it ends: a tensor would outlive its ``del``. What code stored in the table itself
    stays, and all of it while a function of Python traces (the table is written back then).
    """
    table, code = frame.f_locals, frame.f_code
    if not code.co_flags & inspect.CO_OPTIMIZED:
        return table  # the namespace itself
    found = dict(table)
    is_tracing = sys.gettrace() is not None or sys.getprofile() is not None
    if type(table) is dict and sys.getrefcount(table) == _HOLDERS and not is_tracing:
        for name in (*code.co_varnames, *code.co_cellvars, *code.co_freevars):
            table.pop(name, None)
    return found


@functools.cache
def is_library(filename: str) -> bool:
    """Return whether a file is part of torch, of the client's framework or of this package."""
    # A path in sys.path may be `project/.` or `tests/..`; code keeps it as it is.
    return os.path.normpath(filename).startswith(LIBRARIES.roots + _GENERATED)


NUMERIC = "numpy", "scipy", "pandas"
"""Packages that compute on behalf of their callers, whose lines explain what they are asked for."""


def _has_users_lines(filename: str) -> bool:
    return not is_library(filename) and package_of(filename) not in NUMERIC


STANDARD = sysconfig.get_paths()["stdlib"]
_INSTALLED = {"site-packages", "dist-packages"}


def is_installed(path: str) -> bool:
    """Return whether a file is part of an installed package."""
    return not _INSTALLED.isdisjoint(path.split(os.sep))


def is_of_library(kind: type) -> bool:
    """Return whether a class is of Python, torch or another known library."""
    package = kind.__module__.partition(".")[0]
    if package in sys.stdlib_module_names:
        return kind is not Namespace and not _is_made_for_others(kind)
    return package in LIBRARIES.opaque


def _is_made_for_others(kind: type) -> bool:
    """Return whether a class of the standard library's was made at run time for other code.

    ``make_dataclass`` makes such, and so do metaclasses, as that of PyTorch Geometric's batches.
    """
    module, outer = sys.modules.get(kind.__module__), kind.__qualname__.partition(".")[0]
    if not kind.__dictoffset__ or hasattr(module, outer):
        return False
    return not any(is_of_library(base) for base in kind.__bases__ if base is not object)


NO_LINE = "no line of yours"
"""In place of a line that is not known."""

IN_LIBRARIES = f"{NO_LINE}, in code of libraries"
_LINE = re.compile(r":\d+ in ")


def add_line(error: GraphError, how: str, site: CallSite) -> None:
    """Add a line to an error without one, and how it was found."""
    if not _LINE.search(error.observed):
        known = site.line and not is_library(site.file)
        found = error.observed.removesuffix(f" at {IN_LIBRARIES}")
        error.observed = f"{found}, {how} {site.describe()}" if known else found
        error.args = (error.rule, error.observed, error.remedy)


_RAISE = dis.opmap["RAISE_VARARGS"]
_CALLERS: set[types.CodeType] = set()
"""Of functions that call the code which is captured or observed."""

Caller = TypeVar("Caller", bound=Callable[..., Any])


def calls_observed(function: Caller) -> Caller:
    """Mark a function that calls the code which is captured or observed.

    Outside of it lie lines such as ``trainer.fit``, which are the user's and explain nothing.
    """
    _CALLERS.add(inspect.unwrap(function).__code__)
    return function


def frames_of_region(frame: types.FrameType) -> Iterator[types.FrameType]:
    """Yield a frame and its callers, up to the function that calls captured or observed code."""
    return takewhile(lambda found: found.f_code not in _CALLERS, frames_from(frame))


class CallSiteFinder:
    """Finds the innermost frame that is the user's."""

    def here(self) -> CallSite:
        """Return the user's line that the calling thread executes."""
        # On a GPU a backward pass has a thread of its own.
        in_thread = threading.current_thread() is not threading.main_thread()
        return self._in(sys._getframe(1), in_backward=in_thread)

    def _in(self, innermost: types.FrameType, *, in_backward: bool = False) -> CallSite:
        for frame in frames_from(innermost):
            code = frame.f_code
            if code in _CALLERS:
                break
            if _has_users_lines(code.co_filename):
                return CallSite.of(code, frame.f_lineno)
            in_backward |= code.co_name == "_engine_run_backward"
        return CallSite(in_backward=in_backward)

    def of_refusal(self) -> CallSite:
        """Return the user's line; that which waits for a backward pass with its own thread."""
        found = self.here()
        if found.line or threading.current_thread() is threading.main_thread():
            return found
        waiting = [
            frame
            for frame in sys._current_frames().values()
            if any(each.f_code.co_name == "_engine_run_backward" for each in frames_from(frame))
        ]
        return self._in(waiting[0]) if len(waiting) == 1 else found

    def of_exception(self, error: BaseException) -> CallSite:
        """Return the user's line nearest to where ``error`` was raised."""
        site = CallSite()
        for frame, line in walk_tb(error.__traceback__):
            code = frame.f_code
            if _has_users_lines(code.co_filename):
                site = CallSite.of(code, line)
            elif code.co_name == "_engine_run_backward" and not site.line:
                site = CallSite(in_backward=True)
        return site


def line_of_class(error: BaseException, kind: type) -> CallSite:
    """Return the innermost line of a class's own files that ``error`` passed; unknown if none.

    Those of its bases count, too: the line of an optimizer is one of a package's.
    """
    files = {getattr(sys.modules.get(each.__module__), "__file__", None) for each in kind.__mro__}
    site = CallSite()
    for frame, line in walk_tb(error.__traceback__):
        code = frame.f_code
        if code.co_filename in files:
            site = CallSite.of(code, line)
    return site


def definition_of(function: Any) -> CallSite:
    """Return where a function, method or callable object is defined; unknown for C code."""
    function = inspect.unwrap(getattr(function, "__func__", function))
    if not hasattr(function, "__code__"):
        function = type(function).__call__
    code = getattr(function, "__code__", None)
    return CallSite() if code is None else CallSite.of(code, code.co_firstlineno)


def returned_by(function: Any) -> CallSite:
    """Return the line of a function's only ``return``, or of its definition if it has several."""
    site = definition_of(function)
    function = inspect.unwrap(getattr(function, "__func__", function))
    code = getattr(function, "__code__", None)
    if code is None or code.co_flags & (inspect.CO_GENERATOR | inspect.CO_COROUTINE):
        return site
    returns = ("RETURN_VALUE", "RETURN_CONST")
    listed = listing_of(code)
    lines = {line for line, found in listed.with_lines() if found.opname in returns}
    return replace(site, line=lines.pop()) if len(lines) == 1 else site


def is_raised_by_user(error: BaseException) -> bool:
    """Return whether an error began with ``raise`` or ``assert`` outside of torch and this package.

    What an operator or torch's own code raises may be due to a mode around them.
    """
    *_, first = causes_of(error)
    traceback = _end_of(first)
    if traceback is None or is_library(traceback.tb_frame.f_code.co_filename):
        return False
    return traceback.tb_frame.f_code.co_code[traceback.tb_lasti] == _RAISE


def raises_by_itself(error: BaseException, code: types.CodeType) -> bool:
    """Return whether an error began with a ``raise`` of this code, not of what that calls."""
    end = _end_of(error)
    return end is not None and end.tb_frame.f_code is code and code.co_code[end.tb_lasti] == _RAISE


def _end_of(error: BaseException) -> types.TracebackType | None:
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    return traceback


def codes_in(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield a function's code and that of nested functions and comprehensions."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes_in(constant)


def site_naming(name: str, codes: Iterable[types.CodeType]) -> CallSite:
    """Return the first line of some functions that binds a name, else the first that reads it."""
    words = [*reversed(re.findall(r"\w+", name.partition(": ")[0]))]
    for word, is_text in [*((w, False) for w in words), *((w, True) for w in words)]:
        found = [
            (instruction.opname.startswith("STORE"), CallSite.of(code, line))
            for code in codes
            for line, instruction in listing_of(code).with_lines()
            if instruction.argval == word
            if is_text == (instruction.opname == "LOAD_CONST")
            if is_text or word in (*code.co_names, *code.co_freevars)
        ]
        if found:
            return max(found, key=lambda place: place[0])[1]
    return CallSite()


def site_using(name: str, function: Any) -> CallSite:
    """Return the first line of a function that names a value, else where it is defined."""
    defined = definition_of(function)
    code = getattr(inspect.unwrap(getattr(function, "__func__", function)), "__code__", None)
    found = site_naming(name, [] if code is None else [*codes_in(code)])
    return found if found.line else defined


def with_keyword(names: Collection[str], codes: Iterable[types.CodeType]) -> CallSite:
    """Return the first line of some functions that passes a keyword of these names."""
    for code in codes:
        for line, instruction in listing_of(code).with_lines():
            given = instruction.argval
            if instruction.opname == "KW_NAMES":  # of which dis tells nothing on Python 3.11
                given = code.co_consts[instruction.arg or 0]
            if type(given) is tuple and any(name in given for name in names):
                return CallSite.of(code, line)
    return CallSite()


def reached_by_name(
    starts: Collection[str], codes: Sequence[types.CodeType]
) -> list[types.CodeType]:
    """List the functions of these names, those that they name, and so on."""
    reached: dict[types.CodeType, None] = {}
    names, before = set(starts), -1
    while before != len(reached):
        before = len(reached)
        reached.update((code, None) for code in codes if code.co_name in names)
        names.update(name for code in list(reached) for c in codes_in(code) for name in c.co_names)
    return list(dict.fromkeys(part for code in reached for part in codes_in(code)))


def named_at(name: str, codes: Iterable[types.CodeType]) -> str:
    """Return a line's place as a suffix for a message; empty for an unknown line."""
    site = site_naming(name, codes)
    return f", named at {site.describe()}" if site.line else ""


def inside_compiled_module() -> bool:
    """Return whether this thread is inside a ``torch.compile``d function or module.

    torch runs such a call eagerly, not compiled, while a dispatch mode is active (observed on
    torch 2.11 and 2.13); the frame of its wrapper is what gives the call away.
    """
    for frame in frames_from(sys._getframe(1)):
        code = frame.f_code
        if code.co_name == "compile_wrapper" and code.co_filename.endswith("eval_frame.py"):
            return True
    return False


_OWN_LEVELS = 4
"""The ``stacklevel`` with which ``rank_zero_warn`` names the line that calls it."""


def stacklevel_of_user() -> int:
    """The ``stacklevel`` with which ``rank_zero_warn`` names the user's line, such as the fit's."""
    files = (frame.f_code.co_filename for frame in frames_from(sys._getframe(1)))
    return _OWN_LEVELS + sum(1 for _ in takewhile(is_library, files))


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


def names_global(code: CodeType, name: str) -> bool:
    """Return whether code names a global or builtin so, rather than an attribute alone."""
    return name in code.co_names and any(
        each.argval == name and each.opname in ("LOAD_GLOBAL", "LOAD_NAME")
        for each in listing_of(code).instructions
    )


_FRAMES = frozenset({"locals", "vars", "eval", "exec", "_getframe", "currentframe", "stack"})
"""Names in code that may look at variables of its own."""


def leaves_unread(function: Any, place: int) -> bool:
    """Return whether a function surely does not look at the argument in this place."""
    code = getattr(function, "__code__", None)
    return code is not None and _is_unread(code, place)


@functools.lru_cache(maxsize=256)
def _is_unread(code: CodeType, place: int) -> bool:
    if code.co_argcount <= place or not _FRAMES.isdisjoint(code.co_names):
        return False
    name = code.co_varnames[place]
    used = (instruction.argval for instruction in listing_of(code).instructions)
    return not any(name in value if type(value) is tuple else value == name for value in used)


def instruction_at(frame: FrameType) -> dis.Instruction:
    """Return the instruction that a frame executes."""
    listing = listing_of(frame.f_code)
    return listing.instructions[listing.at(frame.f_lasti)]


def is_result_dropped() -> bool:
    """Return whether user code does nothing with the result of the call that it makes."""
    own = (f for f in frames_from(sys._getframe(1)) if not is_library(f.f_code.co_filename))
    if (frame := next(own, None)) is None:
        return False
    listing = listing_of(frame.f_code)
    return listing.instructions[listing.at(frame.f_lasti) + 1].opname == "POP_TOP"


def offsets_at(code: CodeType, offset: int) -> range:
    """Return the offsets of an instruction with what follows it in its caches."""
    listing = listing_of(code)
    at, ends = listing.at(offset), [*listing.offsets, len(code.co_code)]
    return range(ends[at], ends[at + 1])


def positions_of(code: CodeType, offset: int) -> tuple[int | None, ...] | None:
    """Return first and last line, first and last column of an instruction; None before 3.11."""
    positions = getattr(code, "co_positions", None)
    return None if positions is None else next(itertools.islice(positions(), offset // 2, None))


def position_of(node: Any) -> tuple[int | None, ...]:
    """Return first and last line, first and last column of a node of source text."""
    return node.lineno, node.end_lineno, node.col_offset, node.end_col_offset


SUSPENDED = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
"""Flags of code that waits in the middle."""

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


def lines_in(*nodes: ast.stmt | ast.expr) -> range:
    """Return the lines of statements in a row, or of an expression."""
    return range(nodes[0].lineno, (nodes[-1].end_lineno or 0) + 1)


def statements_around(code: CodeType, line: int) -> Iterator[ast.stmt]:
    """Yield the statements of a function that have a line, outer ones first."""
    tree = tree_of(code)
    functions = (n for n in ast.walk(tree or ast.Module([], [])) if isinstance(n, ast.FunctionDef))
    inside: Any = next((each for each in functions if each.name == code.co_name), None)
    while inside is not None:
        inside = next((n for n in _statements_in(inside) if line in lines_in(n)), None)
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


def value_of(node: ast.expr, frame: FrameType) -> Any:
    """Return what names and attributes of a frame stand for; of a call, what it calls.

    None of other expressions.
    """
    node = node.func if isinstance(node, ast.Call) else node
    if isinstance(node, ast.Attribute):
        owner = value_of(node.value, frame)
        with contextlib.suppress(Exception):  # a property may raise
            return getattr(owner, node.attr)
    if isinstance(node, ast.Name):  # which the frame may have bound again
        return {**frame.f_builtins, **frame.f_globals, **variables_of(frame)}.get(node.id)
    return None


def evaluated(expression: ast.expr, frame: FrameType) -> Any:
    """Evaluate an expression of a frame's function where that is now."""
    tree = ast.fix_missing_locations(ast.Expression(expression))
    code = compile(tree, frame.f_code.co_filename, "eval", dont_inherit=True)
    return eval(code, frame.f_globals, variables_of(frame))


def compiled(statements: list[ast.stmt], frame: FrameType) -> CodeType:
    """Compile statements of a frame's function, to be run by themselves."""
    module = ast.fix_missing_locations(ast.Module(statements, []))
    found = compile(module, frame.f_code.co_filename, "exec", dont_inherit=True)
    return found.replace(co_name=frame.f_code.co_name)  # by which messages name it


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
