"""CUDA graphs for PyTorch Lightning and for plain loops: a training step as one graph launch.

What needs torch is resolved on first use (PEP 562), so that ``import lightning_graphs`` imports
neither torch nor Lightning and touches no GPU.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from lightning_graphs.errors import (
    CaptureError,
    GraphError,
    ReplayError,
    SignatureError,
    UnsupportedError,
    VerificationError,
)
from lightning_graphs.moved import register

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


register(__name__)


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
