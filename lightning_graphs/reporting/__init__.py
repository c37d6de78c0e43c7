"""What a fit reports of its graphs: plain data, a table for the terminal, a page for a browser."""

from lightning_graphs.reporting.report import GraphRecord, Report, StepTime
from lightning_graphs.reporting.table import render, show, summary_line

__all__ = ["GraphRecord", "Report", "StepTime", "render", "show", "summary_line"]
