"""A report as text: one line at the end of the warm-up, a table at the end of the fit."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from textwrap import indent
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_graphs.reporting.report import GraphRecord, Report

_TIMES_OF_A_REHEARSAL = (
    "Rehearsed on the CPU: the emulated backend replays operator by operator, and its times say "
    "nothing about a GPU."
)
_ROWS = 20
# Of long batches; what follows a semicolon (the place in an accumulation window) tells rows apart.
_REST = re.compile(r"(?<=^[^;]{44})[^;]{5,}")


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


_WORDS: dict[str, Callable[[GraphRecord], str]] = {
    "signature": lambda r: _REST.sub("...", r.signature),
    "scope": lambda r: r.scope,
}
_SIZES: dict[str, Callable[[GraphRecord], str]] = {
    "nodes": lambda r: _number(r.nodes, ",d"),
    "kernels": lambda r: _number(r.kernels, ",d"),
    "pool MiB": lambda r: _number(r.pool_mib, ",.1f"),
    "replays": lambda r: _number(r.replays, ",d"),
}
_TIMES: dict[str, Callable[[GraphRecord], str]] = {
    "capture ms": lambda r: _number(r.capture_ms, ".0f"),
    "eager ms/step": lambda r: _number(r.eager_ms, ".3f"),
    "replay ms/step": lambda r: _number(r.replay_ms, ".3f"),
    "speed-up": lambda r: _number(r.speed_up, ".2f") + "x" * (r.speed_up is not None),
}
_SUMMARY = {
    "graphs/nodes": "{:,.0f} nodes",
    "graphs/capture_ms": "captured in {:.0f} ms",
    "graphs/pool_mib": "{:,.1f} MiB",
}


def _notes(report: Report) -> list[str]:
    """What is said below the table, a sentence each, reasons indented below theirs."""
    steps = "step" if report.replayed == 1 else "steps"
    said = [f"{report.replayed:,d} {steps} replayed, {report.eager:,d} eager."]
    if not report.times_mean_something:
        said.append(_TIMES_OF_A_REHEARSAL)
    if report.verdict:
        said.append(report.verdict)
    for title, reasons in (("Fallbacks", report.fallbacks), ("Recaptures", report.recaptures)):
        counts = Counter(reasons)
        texts = [f"{r} ({n:,d} times)" if n > 1 else r for r, n in counts.items()]
        if texts:
            said += [f"{title}:", *(indent(text, "  ") for text in texts[:_ROWS])]
        if len(texts) > _ROWS:
            said.append(f"  and {len(texts) - _ROWS:,d} more")
    if report.diagnosis is not None:
        said += ["", str(report.diagnosis)]
    return said


def summary_line(report: Report) -> str:
    """The report in one line: number, size and cost of the graphs, and what they gain."""
    figures = report.metrics()
    parts = [f"{len(report.graphs)} graph{'s' * (len(report.graphs) != 1)}"]
    parts += [text.format(figures[name]) for name, text in _SUMMARY.items() if figures.get(name)]
    if "graphs/speed_up" in figures:
        before, now = figures["graphs/eager_ms"], figures["graphs/replay_ms"]
        parts.append(f"{now:.3f} ms a step instead of {before:.3f} ms ({before / now:.2f}x)")
    if report.fallbacks:
        parts.append(f"{len(report.fallbacks)} fallback{'s' * (len(report.fallbacks) != 1)}")
    return "GraphCapture: " + ", ".join(parts)


def render(report: Report) -> str:
    """The table, with a dash for the unknown, and what is to be said below it."""
    columns = _WORDS | _SIZES | (_TIMES if report.times_mean_something else {})
    rows = [[text(r) for text in columns.values()] for r in report.graphs[:_ROWS]]
    hidden = len(report.graphs) - _ROWS
    if hidden > 0:
        rows.append([f"and {hidden:,d} more", *[""] * (len(columns) - 1)])
    table = [list(columns), *rows] if rows else []
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(width) if i < len(_WORDS) else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in table
    ]
    return "\n".join([*lines, *_notes(report)])
