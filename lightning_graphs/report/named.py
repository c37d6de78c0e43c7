"""Names of submodules and lines in the traces of ``torch.profiler``."""

from __future__ import annotations

import gzip
import json
import os
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_graphs.device.inspect import GraphNode
from lightning_graphs.errors import UnsupportedError

_NODE = "graph node id"
"""The argument of a kernel's event that tells which node of a graph has launched it."""


def name_kernels(path: str | os.PathLike[str], graphs: Sequence[Sequence[GraphNode]]) -> int:
    """Name kernels in a trace by the nodes of these graphs; see ``Report.name_trace``."""
    if not any(node.scope for nodes in graphs for node in nodes):
        raise UnsupportedError(
            "Kernels of a trace can be named only if captures have noted what launches them.",
            "no graph of this report has names",
            "capture with annotate=True, and ask the report after the capture",
        )
    file, packed = Path(path), str(path).endswith(".gz")
    content = gzip.decompress(file.read_bytes()) if packed else file.read_bytes()
    trace = json.loads(content)
    known = {tuple(n.name for n in kernels): kernels for kernels in map(_kernels, graphs)}
    launches: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    for event in trace["traceEvents"]:
        given = event.get("args", {})
        if event.get("cat") == "kernel" and given.get(_NODE):
            launches[given.get("correlation")].append(event)
    named = sum(_name(launch, known) for launch in launches.values())
    text = json.dumps(trace).encode()
    file.write_bytes(gzip.compress(text) if packed else text)
    return named


def _kernels(nodes: Sequence[GraphNode]) -> list[GraphNode]:
    return [node for node in nodes if node.kind == "kernel"]


def _name(launch: list[dict[str, Any]], known: dict[tuple[str, ...], list[GraphNode]]) -> int:
    """Name the kernels of one launch of a graph; return how many have a name."""
    # Nodes have numbers in the order of their capture. Kernels of one stream run in it, too.
    for order in (lambda event: event["args"][_NODE], lambda event: event["ts"]):
        events = sorted(launch, key=order)
        if nodes := known.get(tuple(event["name"] for event in events)):
            break
    else:
        return 0
    for event, node in zip(events, nodes, strict=True):
        if node.scope:
            event["name"] = f"{node.scope} | {node.name}"
            event["args"] |= {"kernel": node.name, "launched by": node.scope, "line": node.line}
    return sum(bool(node.scope) for node in nodes)
