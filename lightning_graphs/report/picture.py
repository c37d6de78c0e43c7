"""Draws a fit with matplotlib: which steps were eager, captured and replayed, and their times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lightning_graphs.errors import UnsupportedError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLORS = {"eager": "tab:orange", "captured": "tab:red", "replayed": "tab:green"}


def draw(timeline: Sequence[Any], times: Sequence[Any], title: str) -> Figure:
    """Draw a strip of all steps, and below it the times of the first ones, if these are known.

    Args:
        timeline: Spans of steps, as a report has them.
        times: The steps that were timed.
        title: What is written above.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UnsupportedError(
            "A picture of a report needs the package matplotlib.",
            f"importing it failed: {error}",
            "run pip install matplotlib, or print the report",
        ) from error
    figure = Figure(figsize=(9, 4 if times else 1.8), layout="constrained")
    strip = figure.subplots() if not times else None
    if strip is None:
        strip, below = figure.subplots(2, 1, height_ratios=[1, 3])
        _draw_times(times, below)
    _draw_strip(timeline, strip)
    strip.set_title(title)
    return figure


def _draw_strip(timeline: Sequence[Any], axes: Axes) -> None:
    """Draw all steps from left to right, in the color of what became of them."""
    from matplotlib.patches import Patch

    legend = []
    for kind, color in _COLORS.items():
        spans = [(span.begin, span.steps) for span in timeline if span.kind == kind]
        if kind == "captured":  # one of many steps would be too thin to be seen
            axes.vlines([begin + 0.5 for begin, _ in spans], 0, 1, color=color)
        else:
            axes.broken_barh(spans, (0, 1), color=color)
        steps = sum(count for _, count in spans)
        legend.append(Patch(color=color, label=f"{kind} ({steps:,d})"))
    axes.set_xlim(0, max((span.begin + span.steps for span in timeline), default=1))
    axes.set_ylim(0, 1)
    axes.set_yticks([])
    axes.set_xlabel("step")
    axes.legend(handles=legend, loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)


def _draw_times(times: Sequence[Any], axes: Axes) -> None:
    for kind, name in (("eager", "eager"), ("replay", "replayed")):
        timed = [time for time in times if time.kind == kind]
        xs, ys = [time.step for time in timed], [time.ms for time in timed]
        axes.bar(xs, ys, color=_COLORS[name], label=name)
    axes.set_xlabel("step (those that were timed)")
    axes.set_ylabel("ms")
