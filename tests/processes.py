"""Processes that tests start."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).parents[1]


def environment(**variables: str) -> dict[str, str]:
    """The environment of a process that imports this checkout, and what this one imports."""
    known = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([str(ROOT), *([known] if known else [])])
    return {**os.environ, "PYTHONPATH": path, **variables}
