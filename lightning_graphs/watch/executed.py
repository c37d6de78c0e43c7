"""Follows the functions that code calls while it is captured."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import CodeType, FrameType
from typing import Any

_FREE = (3, 4)
"""Identifiers of ``sys.monitoring`` that no kind of tool has for itself."""

Begun = Callable[[FrameType], object]
"""Called with the frame of a function of Python that begins, once for each code at least."""

Called = Callable[[FrameType, Any], object]
"""Called with a frame and what it is about to call, a function of C among others."""


def functions_followed(
    begun: Begun,
    called: Called,
    counts: Callable[[FrameType], bool],  # whether calls of a frame must be seen
) -> AbstractContextManager[None]:
    """Follow the functions that the body calls, in this thread.

    From Python 3.12 on each code is seen once, and calls only where they count. A profiler sees
    all, also what this package does meanwhile, which takes as long as the captured code itself.
    """
    tools: Any = getattr(sys, "monitoring", None)
    free = [tool for tool in _FREE if tools is not None and tools.get_tool(tool) is None]
    if not free:
        return _profiled(begun, called)
    return _monitored(tools, free[0], begun, called, counts)


@contextlib.contextmanager
def _profiled(begun: Begun, called: Called) -> Iterator[None]:
    def see(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            begun(frame)
        elif event == "c_call":
            called(frame, argument)

    sys.setprofile(see)
    try:
        yield
    finally:
        sys.setprofile(None)


@contextlib.contextmanager
def _monitored(
    tools: Any, tool: int, begun: Begun, called: Called, counts: Callable[[FrameType], bool]
) -> Iterator[None]:
    thread = threading.get_ident()

    def begin(code: CodeType, _: int) -> object:
        if threading.get_ident() != thread:
            return None
        begun(sys._getframe(1))
        return tools.DISABLE

    def call(code: CodeType, _: int, function: object, first: object) -> object:
        if threading.get_ident() != thread:
            return None
        frame = sys._getframe(1)
        if not counts(frame):
            return tools.DISABLE
        called(frame, function)
        return None

    events = tools.events
    tools.use_tool_id(tool, __name__)
    try:
        for event, see in (
            (events.PY_START, begin),
            (events.PY_RESUME, begin),
            (events.CALL, call),
        ):
            tools.register_callback(tool, event, see)
        tools.set_events(tool, events.PY_START | events.PY_RESUME | events.CALL)
        tools.restart_events()  # those of earlier bodies
        yield
    finally:
        tools.set_events(tool, tools.events.NO_EVENTS)
        for event in (events.PY_START, events.PY_RESUME, events.CALL):
            tools.register_callback(tool, event, None)
        tools.free_tool_id(tool)
