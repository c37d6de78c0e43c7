"""CUDA graphs for PyTorch Lightning and for plain loops: a training step as one graph launch.

What needs torch is resolved on first use (PEP 562), so that ``import lightning_graphs`` imports
neither torch nor Lightning and touches no GPU.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from lightning_graphs.errors import (
    CaptureError,
    GraphError,
    ReplayError,
    SignatureError,
    UnsupportedError,
    VerificationError,
)

if TYPE_CHECKING:
    from lightning_graphs import core
    from lightning_graphs.lightning.callback import GraphCapture
    from lightning_graphs.loops.function import capture
    from lightning_graphs.padding import PadTo, choose_lengths

__version__ = "0.1.0"

__all__ = [
    "CaptureError",
    "GraphCapture",
    "GraphError",
    "PadTo",
    "ReplayError",
    "SignatureError",
    "UnsupportedError",
    "VerificationError",
    "__version__",
    "capture",
    "choose_lengths",
    "core",
]


def __getattr__(name: str) -> object:
    if name == "core":
        return import_module("lightning_graphs.core")
    if name == "GraphCapture":
        return import_module("lightning_graphs.lightning.callback").GraphCapture
    if name in ("PadTo", "choose_lengths"):
        return getattr(import_module("lightning_graphs.padding"), name)
    if name == "capture":
        return import_module("lightning_graphs.loops.function").capture
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)


# ------------------ Former names of modules

FORMER = {
    "cli": "__main__",
    "training": "lightning",
    "training.callback": "lightning.callback",
    "training.options": "policy.options",
    "training.plugins": "lightning.plugins",
    "reporting": "report",
    "reporting.report": "report.report",
    "reporting.diagnosis": "report.diagnosis",
}
"""Former module -> present module, below the package.

Entry points of an installed package, ``class_path`` in configuration files and pickles hold them.
"""


class _Moved(ModuleType):
    """Stands for a former module: looks its members up in the present one, on use."""

    def __init__(self, before: str) -> None:
        super().__init__(f"{__name__}.{before}")
        self.__file__ = __file__  # what asks modules for theirs looks nothing up
        self._present = f"{__name__}.{FORMER[before]}"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(import_module(self._present), name)


sys.modules.update({f"{__name__}.{name}": _Moved(name) for name in FORMER})
