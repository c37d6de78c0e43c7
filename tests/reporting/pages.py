"""A report with everything in it, and a reader of its page."""

from __future__ import annotations

from collections import Counter
from html.parser import HTMLParser
from typing import Any

import torch

from lightning_graphs import core
from lightning_graphs.core.inspect import inspect
from lightning_graphs.reporting import GraphRecord, Report, StepTime


def info_of(repeats: int = 3) -> Any:
    """A graph with a block that repeats, and a name that HTML must not take for markup."""
    x = torch.ones(4)
    graph = core.CUDAGraph(keep_graph=True, backend="emulated")
    with core.graph(graph):
        for _ in range(repeats):
            x.mul_(2)
            x.add_(1)
        x.copy_(x + 1)
    return inspect(graph)


def example(**changes: Any) -> Report:
    """A report with everything in it."""
    values: dict[str, Any] = {
        "backend": "cuda",
        "device": "NVIDIA <H100> & more",
        "torch": "2.13.0",
        "graphs": (
            GraphRecord(
                signature="x f32[32,128], y i64[32]",
                parts=2,
                nodes=1412,
                kernels=1400,
                captures=2,
                capture_ms=310.4,
                pool_mib=35.5,
                replays=1200,
                eager_ms=5.25,
                replay_ms=2.1,
                graphs=(info_of(),),
            ),
            GraphRecord(signature="x f32[7,128]", scope="module encoder.layers.0", capture_ms=20.0),
        ),
        "eager": 9,
        "replayed": 1200,
        "fallbacks": ("a step runs eagerly: <script>alert(1)</script>",),
        "recaptures": ('batch["x"]: f32[32,128] -> f32[7,128]',),
        "times": (
            StepTime(step=1, kind="eager", ms=5.5),
            StepTime(step=2, kind="eager", ms=5.25),
            StepTime(step=4, kind="replay", ms=2.125),
        ),
        "verdict": "",
    }
    return Report(**(values | changes))


class Page(HTMLParser):
    """Takes a page apart, and insists that every tag is closed where it must be."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, str]] = []
        self.tables: list[list[list[str]]] = []
        self.figures: dict[str, str] = {}
        self.titles: list[str] = []
        self.texts: list[str] = []
        self._figure = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag != "meta":
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        if tag == "tr":
            self.tables[-1].append([])
        if tag in ("td", "th"):
            self.tables[-1][-1].append("")
        self._figure = dict(attrs).get("id") or "" if tag == "dd" else ""

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)
        if "td" in self.open or "th" in self.open:
            self.tables[-1][-1][-1] += data
        if self.open[-1:] == ["dd"]:
            self.figures[self._figure] = data
        if self.open[-1:] == ["title"]:
            self.titles.append(data)
