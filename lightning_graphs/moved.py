"""Former dotted names of modules, and the modules that have their contents now.

Entry points of an installed package, ``class_path`` in configuration files and pickles hold them.
Each name is a module that finds its members in the present one when they are asked for.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

BEFORE = {
    "cli": "__main__",
    "training": "lightning",
    "training.callback": "lightning.callback",
    "training.options": "policy.options",
    "training.plugins": "lightning.plugins",
    "reporting": "report",
    "reporting.report": "report.report",
    "reporting.diagnosis": "report.diagnosis",
}
"""Former module -> present module, below the package."""


class _Moved(ModuleType):
    """Stands for a former module: looks its members up in the present one."""

    def __init__(self, package: str, before: str) -> None:
        super().__init__(f"{package}.{before}")
        self.__file__ = __file__  # what asks modules for theirs looks nothing up
        self._present = f"{package}.{BEFORE[before]}"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(import_module(self._present), name)


def register(package: str) -> None:
    """Make the names of :data:`BEFORE` importable; members are looked up on use."""
    sys.modules.update({f"{package}.{name}": _Moved(package, name) for name in BEFORE})
