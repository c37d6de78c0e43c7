"""A graph as DOT text, with repeated blocks folded.

Written directly: a library that builds the picture node by node takes most of a minute for a
training step of 5,000 nodes, and cannot fold.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from lightning_graphs.core.names import short_name
from lightning_graphs.core.topology import (
    Edge,
    Item,
    Repeat,
    fold,
    representatives,
    topological_order,
)

if TYPE_CHECKING:
    from lightning_graphs.core.info import GraphNode

_SHAPES = {"kernel": "box", "memcpy": "cds", "memset": "note", "child": "box3d"}
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def format_bytes(count: int) -> str:
    """A number of bytes for reading: ``512 B``, ``4.0 KiB``."""
    value = float(count)
    for unit in _UNITS:
        if value < 1024 or unit == _UNITS[-1]:
            break
        value /= 1024
    return f"{count} B" if unit == "B" else f"{value:.1f} {unit}"


def to_dot(nodes: Sequence[GraphNode], edges: Sequence[Edge], *, fold_repeats: bool) -> str:
    """DOT text of a graph, to be rendered with Graphviz.

    Args:
        nodes: The nodes; ``nodes[i].index == i``.
        edges: Pairs (before, after) of node indices.
        fold_repeats: Draw a block that repeats back to back once, in a frame that says how often.
            An edge from one occurrence to the next is dashed.
    """
    order = topological_order(len(nodes), edges)
    ordered = [nodes[index] for index in order]
    items: tuple[Item, ...] = tuple(range(len(nodes)))
    if fold_repeats:
        items = fold([(node.kind, node.name) for node in ordered])
    stands_for = representatives(items, len(nodes))
    position = {index: stands_for[at] for at, index in enumerate(order)}
    lines = ["digraph graph_capture {", '  node [shape=box, fontname="monospace"];']
    lines.extend(_items(items, ordered, "  ", folded=False))
    drawn = dict.fromkeys((position[before], position[after]) for before, after in edges)
    for before, after in drawn:
        # Positions are topological: an edge that does not lead forward leaves its occurrence.
        style = "" if before < after else " [style=dashed, constraint=false]"
        lines.append(f"  n{ordered[before].index} -> n{ordered[after].index}{style};")
    lines.append("}")
    return "\n".join(lines) + "\n"


def _items(
    items: Sequence[Item], ordered: Sequence[GraphNode], indent: str, *, folded: bool
) -> Iterator[str]:
    for item in items:
        if isinstance(item, int):
            yield indent + _node(ordered[item], folded=folded)
        elif isinstance(single := item.body[0], int) and item.period == 1:
            yield indent + _node(ordered[single], count=item.count, folded=True)
        else:
            yield from _cluster(item, ordered, indent)


def _cluster(repeat: Repeat, ordered: Sequence[GraphNode], indent: str) -> Iterator[str]:
    # Nested repeats may start at the same position; their periods then differ.
    yield f"{indent}subgraph cluster_{repeat.start}_{repeat.period} {{"
    yield f'{indent}  label="x{repeat.count}"; labeljust=r;'
    yield from _items(repeat.body, ordered, indent + "  ", folded=True)
    yield f"{indent}}}"


def _node(node: GraphNode, *, count: int = 1, folded: bool) -> str:
    label = [short_name(node.name) + (f" x{count}" if count > 1 else "")]
    # A folded node stands for several, which agree in their names only.
    if not folded:
        if node.bytes:
            label.append(format_bytes(node.bytes))
        if node.scope:
            label.append(node.scope)
    text = "\\n".join(_escape(part) for part in label)
    shape = _SHAPES.get(node.kind, "ellipse")
    return f'n{node.index} [label="{text}", tooltip="{_escape(node.name)}", shape={shape}];'


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
