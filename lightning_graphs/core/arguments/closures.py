"""What functions bring along for their code: closures, defaults, arguments that are bound."""

from __future__ import annotations

from functools import partial
from types import (
    BuiltinFunctionType,
    CellType,
    FunctionType,
    GeneratorType,
    MethodType,
    ModuleType,
)
from typing import Any

from lightning_graphs.core.callsite import is_library


def brought_along(value: Any) -> list[tuple[str, Any]] | None:
    """What a function, or what stands for a call of one, brings along for its code."""
    if isinstance(value, partial):
        return [(key, getattr(value, key)) for key in ("func", "args", "keywords")]
    if isinstance(value, GeneratorType):
        return [*value.gi_frame.f_locals.items()] if value.gi_frame is not None else []
    if isinstance(value, (MethodType, BuiltinFunctionType)):
        owner = value.__self__
        function = getattr(value, "__func__", None)
        pairs = [("__self__", owner), ("__func__", function)]
        return [] if isinstance(owner, ModuleType) else pairs
    if not isinstance(value, FunctionType):
        return None
    code, keywords = value.__code__, value.__kwdefaults__ or {}
    defaults = value.__defaults__ or ()
    named = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
    cells = list(map(_content, value.__closure__ or ()))
    found = [*zip(code.co_freevars, cells, strict=True), *zip(named, defaults, strict=True)]
    found += keywords.items()
    if is_library(code.co_filename):  # what it keeps of its own is no state of the author's
        found = [(name, held) for name, held in found if callable(held)]
    return found


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is not filled yet
        return None
