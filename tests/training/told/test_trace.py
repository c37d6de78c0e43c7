"""Kernels of replays carry submodule and line in the traces of a profiler."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lightning_graphs.errors import UnsupportedError
from lightning_graphs.report import Report
from tests.training.fits import compare, fit_twice


def _launched(nodes: Any, correlation: int, *, numbered: bool) -> list[dict[str, Any]]:
    """The events of one launch of a graph, as torch's profiler writes them.

    A copy of memory may be a kernel, too. Newer versions give the numbers of nodes.
    """
    call = {"name": "cudaGraphLaunch", "ts": 0, "args": {"correlation": correlation}}
    events = [call]
    for i, node in enumerate(nodes):
        args = {"correlation": correlation, **({"graph node id": 2**32 + i} if numbered else {})}
        name = node.name if node.kind == "kernel" else "memcpy32_post"
        time = -i if numbered else i
        events.append({"cat": "kernel", "name": name, "ts": time, "args": args})
    return events


@pytest.mark.parametrize("scope", ["step", "modules"])
def test_kernels_of_replays_get_names(backend: str, tmp_path: Path, scope: str) -> None:
    """Those of other launches keep theirs."""
    eager, captured = fit_twice(backend, tmp_path, capture={"annotate": True, "scope": scope})
    compare(eager, captured)
    report, path = captured.capture.report, tmp_path / "trace.json"
    graphs = [graph for record in report.graphs for graph in record.launches]
    numbered = scope == "step"
    launches = [_launched(nodes, i + 1, numbered=numbered) for i, nodes in enumerate(graphs)]
    events = [event for launch in launches for event in launch]
    other = {"cat": "kernel", "name": "another", "ts": 0, "args": {"correlation": 0}}
    path.write_text(json.dumps({"traceEvents": [other, *reversed(events)]}))
    named = report.name_trace(path)
    found = json.loads(path.read_text())["traceEvents"]
    assert named == sum(" | " in event["name"] for event in found) > len(events) / 2
    assert found[0] == other
    root = "Sequential.0" if scope == "step" else "net/"
    linear = [event for event in found if event["name"].startswith(root)]
    assert linear
    assert any("(backward)" in event["name"] for event in linear)
    lines = [event["args"]["line"] for event in linear]
    assert scope == "modules" or any("fits.py:" in line for line in lines)


def test_without_names_there_are_none(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="capture with annotate=True"):
        Report().name_trace(tmp_path / "trace.json")
