"""The drawings of a report's page: step times as SVG, kernels by count."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING

from lightning_graphs.reporting.report import StepTime

if TYPE_CHECKING:
    from lightning_graphs.core.info import GraphInfo

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 880, 240, 56, 26, 12
_KERNELS = 30


def timeline(times: Sequence[StepTime]) -> str:
    """Step times as bars over the steps, in the order in which they ran."""
    ceiling = _ceiling(max(time.ms for time in times))
    height = _HEIGHT - _BOTTOM - _TOP
    pitch = (_WIDTH - _LEFT) / len(times)
    lines = [
        f'<svg class="timeline" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        'aria-label="Time of each step in milliseconds">'
    ]
    for tick in range(5):
        value = ceiling * tick / 4
        y = _TOP + height - height * tick / 4
        lines.append(
            f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text class="tick" x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>'
        )
    every = 1 + len(times) // 24
    for at, time in enumerate(times):
        tall = height * time.ms / ceiling
        x, y = _LEFT + pitch * at, _TOP + height - tall
        lines.append(
            f'<rect class="{time.kind}" x="{x + pitch * 0.1:.1f}" y="{y:.1f}" '
            f'width="{pitch * 0.8:.1f}" height="{tall:.1f}" rx="2">'
            f"<title>step {time.step}, {time.kind}: {time.ms:.3f} ms</title></rect>"
        )
        if at % every == 0:
            lines.append(
                f'<text class="tick" x="{x + pitch / 2:.1f}" y="{_HEIGHT - 8}" '
                f'text-anchor="middle">{time.step}</text>'
            )
    return "\n".join([*lines, "</svg>"])


def _ceiling(value: float) -> float:
    """A round number at or above ``value``, to which an axis is drawn."""
    step = 1e-4
    while value > step * 10:
        step *= 10
    return next((step * n for n in (1, 2, 4, 8, 10) if step * n >= value), value)


def kernels(graphs: Sequence[GraphInfo]) -> str:
    """Launches by kernel name as a table with bars, the most frequent first."""
    from lightning_graphs.core.names import short_name

    counts: Counter[str] = Counter()
    for info in graphs:
        counts.update(info.kernels)
    ranked = counts.most_common()
    most = ranked[0][1] if ranked else 1

    def rows(part: Sequence[tuple[str, int]]) -> Iterator[str]:
        for name, count in part:
            yield (
                f'<tr><td class="number">{count}</td>'
                f'<td class="kernel" title="{escape(name)}">'
                f'<span class="bar" style="width:{100 * count / most:.1f}%"></span>'
                f"<code>{escape(short_name(name))}</code></td></tr>"
            )

    head = "<tr><th>launches</th><th>kernel</th></tr>"
    shown = f'<table class="kernels">{head}{"".join(rows(ranked[:_KERNELS]))}</table>'
    hidden = ranked[_KERNELS:]
    if not hidden:
        return shown
    return (
        f"{shown}<details><summary>{len(hidden)} more kernels</summary>"
        f'<table class="kernels">{"".join(rows(hidden))}</table></details>'
    )
