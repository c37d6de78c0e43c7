"""The line that a warning names: the user's, not the one that happens to print it."""

from __future__ import annotations

import sys
from types import FrameType

from lightning_graphs.core.callsite import CallSiteFinder

_OWN_LEVELS = 4
"""The ``stacklevel`` with which ``rank_zero_warn`` names the line that calls it."""


def stacklevel_of_user() -> int:
    """The ``stacklevel`` with which ``rank_zero_warn`` names the user's line, such as the fit's."""
    is_library = CallSiteFinder().is_library
    level = _OWN_LEVELS
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and is_library(frame.f_code.co_filename):
        frame = frame.f_back
        level += 1
    return level
