"""Kernels of replays carry submodule and line in the traces of a profiler."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lightning_graphs.errors import UnsupportedError
from lightning_graphs.report import Report
from tests.training.fits import compare, fit_twice


def _launched(nodes: Any, correlation: int) -> list[dict[str, Any]]:
    """The events of one launch of a graph, as torch's profiler writes them."""
    kernels = [node for node in nodes if node.kind == "kernel"]
    return [
        {
            "cat": "kernel",
            "name": node.name,
            "ts": 100 * correlation + i,
            "args": {"graph node id": 2**32 + node.index, "correlation": correlation},
        }
        for i, node in enumerate(kernels)
    ]


@pytest.mark.parametrize("scope", ["step", "modules"])
def test_kernels_of_replays_get_names(backend: str, tmp_path: Path, scope: str) -> None:
    """Those of other launches keep theirs."""
    eager, captured = fit_twice(backend, tmp_path, capture={"annotate": True, "scope": scope})
    compare(eager, captured)
    report, path = captured.capture.report, tmp_path / "trace.json"
    graphs = [graph for record in report.graphs for graph in record.launches]
    events = [event for i, nodes in enumerate(graphs) for event in _launched(nodes, i + 1)]
    other = {"cat": "kernel", "name": "another", "ts": 0, "args": {"correlation": 0}}
    path.write_text(json.dumps({"traceEvents": [other, *reversed(events)]}))
    named = report.name_trace(path)
    found = json.loads(path.read_text())["traceEvents"]
    assert named == sum(" | " in event["name"] for event in found) > len(events) / 2
    assert found[0] == other
    linear = [event for event in found if "Sequential.0" in event["name"]]
    assert linear
    assert any("(backward)" in event["name"] for event in linear)
    assert any("fits.py:" in event["args"]["line"] for event in linear)


def test_without_names_there_are_none(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="capture with annotate=True"):
        Report().name_trace(tmp_path / "trace.json")
