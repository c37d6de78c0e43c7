"""Fits with the doctor, and what it found in them."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from lightning_graphs.report.diagnosis import Finding
from tests.training.fits import TrainingContext, prepare


def line(function: Any, text: str) -> int:
    """The number of the line of ``function`` that ends with the comment ``text``."""
    lines, first = inspect.getsourcelines(function)
    return next(first + i for i, each in enumerate(lines) if each.rstrip().endswith(f"# {text}"))


def examined(backend: str, root: Path, **options: Any) -> TrainingContext:
    """A fit with the doctor."""
    capture = {"diagnose": True, **options.pop("capture", {})}
    return prepare(backend, root, True, capture=capture, **options).run()


def rows(fit: TrainingContext, kind: str) -> list[Finding]:
    assert fit.capture.report.diagnosis is not None
    return [finding for finding in fit.capture.report.diagnosis.findings if finding.kind == kind]
