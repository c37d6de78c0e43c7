"""The shape of a graph: order, depth, width, and repeated blocks."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from operator import ne
from typing import TypeAlias

Edge = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Repeat:
    """A block that occurs ``count`` times in a row.

    Attributes:
        count: Occurrences, at least 2.
        start: Position of the first occurrence.
        period: Positions that one occurrence spans.
        body: The first occurrence: positions, and the repeats inside it.
    """

    count: int
    start: int
    period: int
    body: tuple[Item, ...]


Item: TypeAlias = "int | Repeat"
"""A position in the folded sequence, or a repeated block."""


def generations(count: int, edges: Sequence[Edge]) -> list[list[int]]:
    """Nodes by the length of the longest path that leads to them, each generation ascending.

    Args:
        count: Number of nodes, numbered from 0.
        edges: Pairs (before, after), without a cycle.
    """
    import networkx

    graph = networkx.DiGraph()
    graph.add_nodes_from(range(count))
    graph.add_edges_from(edges)
    return [sorted(generation) for generation in networkx.topological_generations(graph)]


def topological_order(count: int, edges: Sequence[Edge]) -> list[int]:
    """A topological order that departs from the numbering only where an edge demands it."""
    if all(before < after for before, after in edges):
        return list(range(count))
    import networkx

    graph = networkx.DiGraph()
    graph.add_nodes_from(range(count))
    graph.add_edges_from(edges)
    return list(networkx.lexicographical_topological_sort(graph))


def fold(tokens: Sequence[Hashable]) -> tuple[Item, ...]:
    """Fold blocks that repeat back to back, the largest first, then inside them and between.

    Takes time quadratic in the number of tokens, at the pace of a byte comparison: below a second
    for 5,000.

    Args:
        tokens: What makes two positions alike, usually the kernels' names in order.

    Returns:
        Positions and repeats, in order. Spelled out (every body ``count`` times) they give
        ``tokens`` again.
    """
    numbers: dict[Hashable, int] = {}
    encoded = [numbers.setdefault(token, len(numbers)) for token in tokens]
    return _fold(encoded, 0)


def representatives(items: Sequence[Item], count: int) -> list[int]:
    """For each of ``count`` positions the one that stands for it in the folded form."""
    result = list(range(count))
    _represent(items, result)
    return result


def _represent(items: Sequence[Item], result: list[int]) -> None:
    for item in items:
        if isinstance(item, Repeat):
            _represent(item.body, result)
            first = result[item.start : item.start + item.period]
            result[item.start : item.start + item.period * item.count] = first * item.count


def _fold(tokens: list[int], offset: int) -> tuple[Item, ...]:
    runs = _disjoint(_runs(tokens), len(tokens))
    if not runs:
        return tuple(range(offset, offset + len(tokens)))
    items: list[Item] = []
    position = 0
    for start, period, count in runs:
        items.extend(_fold(tokens[position:start], offset + position))
        body = _fold(tokens[start : start + period], offset + start)
        items.append(Repeat(count, offset + start, period, body))
        position = start + period * count
    items.extend(_fold(tokens[position:], offset + position))
    return tuple(items)


def _runs(tokens: list[int]) -> Iterator[tuple[int, int, int]]:
    """All maximal repeats as (start, period, count).

    Where the tokens equal themselves shifted by ``period`` over at least ``period`` positions, a
    block of that length repeats. Comparing whole sequences keeps the inner loop out of Python.
    """
    for period in range(1, len(tokens) // 2 + 1):
        differs = bytes(map(ne, tokens, tokens[period:])) + b"\1"
        wanted = bytes(period)
        start = differs.find(wanted)
        while start >= 0:
            stop = differs.index(1, start + period)
            count = 1 + (stop - start) // period
            yield start, period, count
            if period * count == len(tokens):
                return
            start = differs.find(wanted, stop)


def _disjoint(runs: Iterator[tuple[int, int, int]], length: int) -> list[tuple[int, int, int]]:
    """Of overlapping repeats the one that covers most, with the smallest period, leftmost."""
    taken = bytearray(length)
    chosen = []
    for start, period, count in sorted(runs, key=lambda run: (-run[1] * run[2], run[1], run[0])):
        stop = start + period * count
        if not any(taken[start:stop]):
            taken[start:stop] = b"\1" * (stop - start)
            chosen.append((start, period, count))
    return sorted(chosen)
