"""A report as a figure of matplotlib."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_graphs.errors import UnsupportedError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from lightning_graphs.reporting.report import Report


def figure_of(report: Report) -> Figure:
    """Times of the first steps as bars, and beside them the speed-up of each signature."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UnsupportedError(
            "Report.plot() draws with matplotlib.",
            "it is not installed",
            "pip install matplotlib, or read Report.times",
        ) from None
    times = report.times if report.times_mean_something else ()
    gains = [r for r in report.graphs if times and r.speed_up is not None]
    figure = Figure(figsize=(10 if gains else 6, 4), layout="constrained")
    axes = figure.subplots(1, 2 if gains else 1, squeeze=False)[0]
    missing = "no step was timed" if report.times_mean_something else "rehearsed on the CPU"
    title = "Times of the first steps" if times else f"No times: {missing}"
    axes[0].set(title=title, xlabel="step", ylabel="ms")
    if times:
        for kind, colour in (("eager", "tab:orange"), ("replay", "tab:blue")):
            of_kind = [time for time in times if time.kind == kind]
            steps, heights = [time.step for time in of_kind], [time.ms for time in of_kind]
            axes[0].bar(steps, heights, label=kind, color=colour)
        axes[0].legend()
    if gains:
        # By position: two scopes can have a signature in common.
        bars = axes[1].barh(range(len(gains)), [record.speed_up for record in gains])
        axes[1].bar_label(bars, fmt="%.2fx", label_type="center", color="white")
        axes[1].set_yticks(range(len(gains)), [record.signature for record in gains])
        axes[1].set(title="Speed-up", xlabel="eager time / replay time")
        axes[1].invert_yaxis()
    return figure
