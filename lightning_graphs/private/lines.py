"""Tells when a function comes to a line; other lines, and all other code, run at full speed.

``sys.monitoring`` does that from Python 3.12 on. There a trace function would cost most: to set one
makes the interpreter prepare the byte code of every function again.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Container
from types import CodeType
from typing import Any

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
