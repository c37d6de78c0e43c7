"""The user's line: which file and line of somebody's own code led to an operator."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import itertools
import linecache
import os
import sys
import types
from dataclasses import dataclass
from typing import Any

import torch


def _library_roots() -> tuple[str, ...]:
    """Folders whose frames are never the user's own code."""
    ours = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    torch_folder = os.path.dirname(os.path.abspath(torch.__file__))
    # By their names, without importing them: the core knows nothing of lightning.
    lightning = ("lightning", "pytorch_lightning", "lightning_fabric", "lightning_utilities")
    specs = map(importlib.util.find_spec, (*lightning, "torchmetrics"))
    packages = [
        os.path.abspath(folder)
        for spec in specs
        if spec is not None
        for folder in spec.submodule_search_locations or ()
    ]
    standard = [os.path.join(os.path.dirname(os.__file__), n) for n in ("contextlib", "functools")]
    folders = tuple(os.path.join(path, "") for path in (ours, torch_folder, *packages))
    return (*folders, *(f"{path}.py" for path in standard))


LIBRARY_ROOTS = _library_roots()
GENERATED = ("<frozen ", "<eval_with_key>")
"""Code without a file that is not the user's own either, unlike ``<stdin>`` or a notebook cell."""


@dataclass(frozen=True, slots=True)
class CallSite:
    """A line of the user's code.

    Attributes:
        file: Path of the source file, or ``"?"`` where no frame of the user's was on the stack.
        columns: Where in the line the failing expression begins and ends, if that is known.
    """

    file: str = "?"
    line: int = 0  # line number, from 1
    function: str = "?"  # name of the function the line is in
    columns: tuple[int, int] | None = None

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"

    @property
    def source(self) -> str:
        """The failing expression, or else the line; empty where the source cannot be read."""
        text = linecache.getline(self.file, self.line)
        if self.columns is not None:
            # Columns count bytes of UTF-8.
            text = text.encode()[slice(*self.columns)].decode(errors="replace")
        return text.strip()

    def describe(self) -> str:
        """``file.py:12 in training_step: loss.item()``, as it appears in messages."""
        source = f": {self.source}" if self.source else ""
        return f"{self} in {self.function}{source}"


class CallSiteFinder:
    """Finds the innermost frame that is the user's, remembering which files are not.

    A finder lives as long as one recording; the verdict on a file is taken once.

    Args:
        until: Code of the function that calls what is observed: outside of it lie lines such as
            ``trainer.fit``, which are the user's and explain nothing.
    """

    def __init__(self, until: types.CodeType | None = None) -> None:
        self._until = until
        self._is_library: dict[str, bool] = {}

    def is_library(self, filename: str) -> bool:
        """Whether a file is part of torch, Lightning or this package."""
        verdict = self._is_library.get(filename)
        if verdict is None:
            # A path in sys.path may be `project/.` or `tests/..`; code keeps it as it is.
            verdict = os.path.normpath(filename).startswith(LIBRARY_ROOTS + GENERATED)
            self._is_library[filename] = verdict
        return verdict

    def here(self) -> CallSite:
        """The user's line that is being executed by the calling thread."""
        frame: types.FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code is not self._until:
            if not self.is_library(frame.f_code.co_filename):
                code = frame.f_code
                return CallSite(code.co_filename, frame.f_lineno, code.co_name)
            frame = frame.f_back
        return CallSite()

    def of_exception(self, error: BaseException) -> CallSite:
        """The user's line nearest to where ``error`` was raised."""
        site = CallSite()
        traceback = error.__traceback__
        while traceback is not None:
            code = traceback.tb_frame.f_code
            if not self.is_library(code.co_filename):
                columns = _columns(code, traceback.tb_lasti, traceback.tb_lineno)
                site = CallSite(code.co_filename, traceback.tb_lineno, code.co_name, columns)
            traceback = traceback.tb_next
        return site


def definition_of(function: Any) -> CallSite:
    """Where a function, a method or a callable object is defined; unknown for those of C."""
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(getattr(function, "__func__", function))
    if not hasattr(function, "__code__"):
        function = type(function).__call__
    code = getattr(function, "__code__", None)
    if code is None:
        return CallSite()
    return CallSite(code.co_filename, code.co_firstlineno, code.co_name)


def _columns(code: types.CodeType, instruction: int, line: int) -> tuple[int, int] | None:
    """Columns of an instruction's expression, where Python knows them (3.11) and it is one line."""
    if sys.version_info < (3, 11):
        return None
    first, last, start, end = next(
        itertools.islice(code.co_positions(), instruction // 2, None), (None,) * 4
    )
    if first != line or last != line or start is None or end is None:
        return None
    return start, end


def inside_compiled_module() -> bool:
    """Whether the calling thread is inside a call of a ``torch.compile``d function or module.

    torch runs such a call eagerly, not compiled, while a dispatch mode is active (observed on
    torch 2.11 and 2.13); the frame of its wrapper is what gives the call away.
    """
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "compile_wrapper" and code.co_filename.endswith("eval_frame.py"):
            return True
        frame = frame.f_back
    return False


_OWN_LEVELS = 4
"""The ``stacklevel`` with which ``rank_zero_warn`` names the line that calls it."""


def stacklevel_of_user() -> int:
    """The ``stacklevel`` with which ``rank_zero_warn`` names the user's line, such as the fit's."""
    is_library = CallSiteFinder().is_library
    level = _OWN_LEVELS
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and is_library(frame.f_code.co_filename):
        frame = frame.f_back
        level += 1
    return level
