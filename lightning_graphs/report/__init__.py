"""What a fit reports of its graphs: plain data, and a table."""

from lightning_graphs.report.report import (
    GraphRecord,
    Padding,
    Report,
    Span,
    StepTime,
    render,
    summary_line,
)

__all__ = ["GraphRecord", "Padding", "Report", "Span", "StepTime", "render", "summary_line"]
