"""A report as one page of HTML: nothing is loaded from anywhere, and nothing runs in it."""

from __future__ import annotations

from html import escape

from lightning_graphs.reporting.charts import kernels, timeline
from lightning_graphs.reporting.report import GraphRecord, Report
from lightning_graphs.reporting.table import (
    COLUMNS_OF_WORDS,
    TIMES_OF_A_REHEARSAL,
    cells,
    columns,
    summary_line,
)

_STYLE = """
:root { color-scheme: light dark; --text: #1d2330; --soft: #5c6575; --page: #f6f7f9; --card: #fff;
  --line: #dde1e8; --eager: #c98a2b; --replay: #2f6fdb; --bar: #2f6fdb22; --memcpy: #2b8a5c;
  --memset: #8a5cc9; --other: #7a8292; }
@media (prefers-color-scheme: dark) { :root { --text: #e4e8ef; --soft: #9aa4b5; --page: #14171d;
  --card: #1c2028; --line: #323946; --eager: #e0a84e; --replay: #6ea2ff; --bar: #6ea2ff2e;
  --memcpy: #57c08b; --memset: #b58cf0; --other: #8e97a8; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--text);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 32px 20px 64px; }
h1 { font-size: 24px; margin: 0; } h2 { font-size: 17px; margin: 0 0 12px; }
h3 { font-size: 14px; margin: 20px 0 8px; font-weight: 600; }
header p, .note { color: var(--soft); margin: 4px 0 0; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  padding: 20px; margin-top: 20px; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th { text-align: left; color: var(--soft); font-weight: 500; font-size: 13px; }
th, td { padding: 6px 10px; border-bottom: 1px solid var(--line); vertical-align: top; }
tr:last-child > td { border-bottom: 0; }
td.number { text-align: right; white-space: nowrap; } th.number { text-align: right; }
code, pre { font: 12.5px/1.5 ui-monospace, "SF Mono", Menlo, Consolas, monospace; }
pre { white-space: pre-wrap; margin: 0; overflow-wrap: anywhere; }
dl { display: flex; flex-wrap: wrap; gap: 16px 40px; margin: 0; }
dt { color: var(--soft); font-size: 13px; } dd { margin: 0; font-size: 20px; font-weight: 600; }
.timeline { width: 100%; height: auto; display: block; }
.timeline .grid { stroke: var(--line); } .timeline .tick { fill: var(--soft); font-size: 11px; }
rect.eager { fill: var(--eager); } rect.replay { fill: var(--replay); }
.key::before { content: ""; display: inline-block; width: 10px; height: 10px; border-radius: 2px;
  margin: 0 6px 0 0; background: var(--replay); } .key { margin-right: 18px; }
.key.eager::before { background: var(--eager); }
.kernels td { padding: 3px 10px; } .kernels td.number { width: 90px; }
.kernel { position: relative; overflow-wrap: anywhere; }
.bar { position: absolute; left: 0; top: 2px; bottom: 2px; background: var(--bar);
  border-radius: 3px; } .kernel code { position: relative; }
summary { cursor: pointer; color: var(--soft); margin-top: 8px; }
"""


def page_of(report: Report) -> str:
    """The whole page."""
    summary = summary_line(report).removeprefix("GraphCapture: ")
    about = ", ".join(filter(None, [report.device, report.torch and f"torch {report.torch}"]))
    sections = [_figures(report), _table(report)]
    if report.times:
        sections.append(_times(report))
    sections += [_graphs(record) for record in report.graphs if record.graphs]
    sections += _reasons("Fallbacks", report.fallbacks) + _reasons("Recaptures", report.recaptures)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>GraphCapture report</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n"
        f"<header><h1>GraphCapture</h1><p>{escape(summary)}</p>"
        f"<p>{escape(about)}</p></header>\n" + "\n".join(sections) + "\n</main>\n</body>\n</html>\n"
    )


def _figures(report: Report) -> str:
    figures = {
        "replayed steps": report.replayed,
        "eager steps": report.eager,
        "graphs": len(report.graphs),
        "fallbacks": len(report.fallbacks),
        "recaptures": len(report.recaptures),
    }
    entries = [
        f'<div><dt>{name}</dt><dd id="{name.replace(" ", "-")}">{count:,d}</dd></div>'
        for name, count in figures.items()
    ]
    verdict = f'<p class="note">{escape(report.verdict)}</p>' if report.verdict else ""
    return f"<section><dl>{''.join(entries)}</dl>{verdict}</section>"


def _table(report: Report) -> str:
    head = "".join(
        f'<th class="{_alignment(at)}">{name}</th>' for at, name in enumerate(columns(report))
    )
    rows = [
        "<tr>"
        + "".join(
            f"<td><code>{escape(cell)}</code></td>"
            if at == 0
            else f'<td class="{_alignment(at)}">{escape(cell)}</td>'
            for at, cell in enumerate(cells(record, report))
        )
        + "</tr>"
        for record in report.graphs
    ]
    if not rows:
        return '<section><h2>Graphs</h2><p class="note">Nothing was captured.</p></section>'
    return (
        f'<section><h2>Graphs</h2><div class="wide"><table id="records">'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div></section>"
    )


def _alignment(column: int) -> str:
    return "number" if column >= COLUMNS_OF_WORDS else "words"


def _times(report: Report) -> str:
    rehearsed = "" if report.times_mean_something else f" {TIMES_OF_A_REHEARSAL}"
    return (
        "<section><h2>Step times</h2>"
        f'{timeline(report.times)}<p class="note"><span class="key eager">eager</span>'
        '<span class="key replay">replay</span>Milliseconds over the position in the fit; the '
        f"first steps only.{rehearsed}</p></section>"
    )


def _graphs(record: GraphRecord) -> str:
    return (
        f"<section><h2>{escape(record.scope)}: <code>{escape(record.signature)}</code></h2>"
        f"{kernels(record.graphs)}</section>"
    )


def _reasons(title: str, reasons: tuple[str, ...]) -> list[str]:
    if not reasons:
        return []
    entries = "".join(f"<li><pre>{escape(reason)}</pre></li>" for reason in reasons)
    return [f"<section><h2>{title}</h2><ol>{entries}</ol></section>"]
