"""CUDA graphs for PyTorch Lightning: a training step as one graph launch.

``core`` and ``GraphCapture`` are resolved on first use (PEP 562), so that ``import
lightning_graphs`` imports neither torch nor Lightning and touches no GPU.
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

__version__ = "0.1.0"

__all__ = [
    "CaptureError",
    "GraphCapture",
    "GraphError",
    "ReplayError",
    "SignatureError",
    "UnsupportedError",
    "VerificationError",
    "__version__",
    "core",
]


register(__name__)


def __getattr__(name: str) -> object:
    if name == "core":
        return import_module("lightning_graphs.core")
    if name == "GraphCapture":
        return import_module("lightning_graphs.lightning.callback").GraphCapture
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
