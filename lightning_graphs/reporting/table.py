"""A report as text: one line at the end of the warm-up, a table at the end of the fit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from html import escape
from textwrap import indent, shorten
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_graphs.reporting.report import GraphRecord, Report

_COLUMNS = (
    "signature",
    "scope",
    "nodes",
    "kernels",
    "capture ms",
    "pool MiB",
    "replays",
    "eager ms/step",
    "replay ms/step",
    "speed-up",
)
_TIMES = ("capture ms", "eager ms/step", "replay ms/step", "speed-up")
"""Columns of times, of which a rehearsal has none that count."""

_TIMES_OF_A_REHEARSAL = (
    "Rehearsed on the CPU: the emulated backend replays operator by operator, and its times say "
    "nothing about a GPU."
)
_ROWS = 20
_WIDEST = 48
_COLUMNS_OF_WORDS = 2
"""So many columns, from the left, hold words; the others hold numbers."""

_LINE = 100
"""Characters of a line where the terminal has fewer, or there is none."""


def columns(report: Report) -> tuple[str, ...]:
    """What stands above the columns of a report's table."""
    return _shown(_COLUMNS, report)


def cells(record: GraphRecord, report: Report) -> tuple[str, ...]:
    """A record of a report as text, in the order of :func:`columns`; a dash for the unknown."""
    speed_up = record.speed_up
    every = (
        record.signature,
        record.scope,
        _number(record.nodes, ",d"),
        _number(record.kernels, ",d"),
        _number(record.capture_ms, ".0f"),
        _number(record.pool_mib, ",.1f"),
        _number(record.replays, ",d"),
        _number(record.eager_ms, ".3f"),
        _number(record.replay_ms, ".3f"),
        "-" if speed_up is None else f"{speed_up:.2f}x",
    )
    return _shown(every, report)


def _shown(every: tuple[str, ...], report: Report) -> tuple[str, ...]:
    if report.times_mean_something:
        return every
    return tuple(t for name, t in zip(_COLUMNS, every, strict=True) if name not in _TIMES)


def notes(report: Report) -> list[str]:
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
    return said


def summary_line(report: Report) -> str:
    """The report in one line: number, size and cost of the graphs, and what they gain."""
    graphs = report.graphs
    nodes = [record.nodes for record in graphs]
    parts = [f"{len(graphs)} graph{'s' * (len(graphs) != 1)}"]
    if graphs and None not in nodes:
        parts.append(f"{sum(count or 0 for count in nodes):,d} nodes")
    if graphs and report.times_mean_something:
        parts.append(f"captured in {sum(record.capture_ms for record in graphs):.0f} ms")
    pools = [record.pool_mib for record in graphs if record.pool_mib is not None]
    if pools:
        parts.append(f"{sum(pools):,.1f} MiB")
    busiest = report.busiest
    if busiest is not None and report.speed_up is not None:
        parts.append(
            f"{busiest.replay_ms:.3f} ms a step instead of {busiest.eager_ms:.3f} ms "
            f"({report.speed_up:.2f}x)"
        )
    if report.fallbacks:
        parts.append(f"{len(report.fallbacks)} fallback{'s' * (len(report.fallbacks) != 1)}")
    return "GraphCapture: " + ", ".join(parts)


def render(report: Report) -> str:
    """The table and what is to be said below it, as text, as :func:`show` prints it."""
    console = _console(no_color=True, force_terminal=False)
    if console is None:
        lines = _plain_table(columns(report), _rows(report)) if report.graphs else []
        return "\n".join([*lines, *notes(report)])
    with console.capture() as captured:
        _print(console, report)
    text: str = captured.get()
    return text.rstrip("\n")


def show(report: Report) -> None:
    """Print the table: with rich where it is installed, otherwise as aligned text."""
    console = _console()
    if console is None:
        print(render(report))
    else:
        _print(console, report)


def html(report: Report) -> str:
    """The table and what is to be said below it, for a notebook."""
    rows = [columns(report), *_rows(report)] if report.graphs else []
    cells = ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows]
    body = "".join(f"<tr>{row}</tr>" for row in cells)
    return f"<table>{body}</table><pre>{escape(chr(10).join(notes(report)))}</pre>"


def _console(**options: Any) -> Any:
    """A console of rich, None where rich is missing."""
    try:
        from rich.console import Console
    except ImportError:
        return None
    console = Console(highlight=False, soft_wrap=True, **options)
    console.width = max(console.width, _LINE)
    return console


def _print(console: Any, report: Report) -> None:
    """Print to a console of rich."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    if report.graphs:
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
        for i, column in enumerate(columns(report)):
            # Numbers take what they need, and the signature what is left.
            words = i < _COLUMNS_OF_WORDS
            header = column if words else column.replace(" ", "\n")
            justify: Any = "left" if words else "right"
            table.add_column(header, justify=justify, no_wrap=not words, overflow="fold")
        for row in _rows(report):
            table.add_row(*map(Text, row))  # brackets of a shape are no markup
        console.print(table)
    console.print("\n".join(notes(report)), markup=False)


def _rows(report: Report) -> list[tuple[str, ...]]:
    rows = [cells(record, report) for record in report.graphs[:_ROWS]]
    rows = [(shorten(row[0], _WIDEST, placeholder=" ..."), *row[1:]) for row in rows]
    hidden = len(report.graphs) - _ROWS
    if hidden > 0:
        rows.append((f"and {hidden:,d} more", *[""] * (len(columns(report)) - 1)))
    return rows


def _plain_table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if i < _COLUMNS_OF_WORDS else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in [head, *rows]
    ]


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
