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

_LAUNCH = "GraphLaunch"
"""Part of the names of calls that launch a graph: its kernels have the number of the call."""
_NODE = "graph node id"
"""The argument of a kernel's event that tells which node of a graph it is, where torch has it."""


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
    events = [event for event in trace["traceEvents"] if "correlation" in event.get("args", {})]
    graph_launches = {_call(event) for event in events if _LAUNCH in event.get("name", "")}
    launches: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event.get("cat") == "kernel" and _call(event) in graph_launches:
            launches[_call(event)].append(event)
    named = sum(_name(launch, graphs) for launch in launches.values())
    text = json.dumps(trace).encode()
    file.write_bytes(gzip.compress(text) if packed else text)
    return named


def _call(event: dict[str, Any]) -> Any:
    return event["args"]["correlation"]


def _name(launch: list[dict[str, Any]], graphs: Sequence[Sequence[GraphNode]]) -> int:
    """Name the kernels of one launch of a graph; return how many have a name."""
    # Kernels of one stream run in the order of their capture, in which nodes have their numbers
    events = sorted(launch, key=lambda event: (event["args"].get(_NODE, 0), event["ts"]))
    pairs = next(filter(None, (_matched(events, nodes) for nodes in graphs)), [])
    for event, node in pairs:
        event["name"] = f"{node.scope} | {node.name}"
        event["args"] |= {"kernel": node.name, "launched by": node.scope, "line": node.line}
    return len(pairs)


def _matched(
    events: Sequence[dict[str, Any]], nodes: Sequence[GraphNode]
) -> list[tuple[dict[str, Any], GraphNode]]:
    """Pair kernels with the nodes of a graph, those with a scope; empty if they are of another one.

    Nodes that copy or fill memory may run as kernels, too, which have other names.
    """
    pairs: list[tuple[dict[str, Any], GraphNode]] = []
    rest = iter(events)
    others = 0
    for node in nodes:
        if node.kind != "kernel":
            others += 1
            continue
        event = next((event for event in rest if _bare(event["name"]) == _bare(node.name)), None)
        if event is None:
            return []
        pairs.append((event, node))
    is_same = len(pairs) <= len(events) <= len(pairs) + others
    return [(event, node) for event, node in pairs if node.scope] if is_same else []


def _bare(name: str) -> str:
    """A kernel's name without spaces, which demanglers set otherwise."""
    return name.replace(" ", "")
