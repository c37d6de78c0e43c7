"""The report of a fit: plain data, text and a table; its picture, and its names in traces."""

from __future__ import annotations

import gzip
import json
import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from pathlib import Path
from textwrap import indent
from typing import TYPE_CHECKING, Any, Literal

from lightning_graphs.errors import UnsupportedError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from lightning_graphs.device.inspect import GraphNode
    from lightning_graphs.report.diagnosis import Diagnosis


@dataclass(kw_only=True, slots=True)
class GraphRecord:
    """What is known of one captured signature.

    Attributes:
        signature: The batch in words, such as ``x f32[32,128], y i64[32]``.
        scope: ``"step"``, or ``"module encoder.layers.0"``.
        parts: Its graphs: more than one where hooks look in between, for the backward pass of a
            module, and for several calls of it in a step.
        nodes: Nodes of all parts; None beyond eight graphs, and if they cannot be counted.
        kernels: Kernel launches among them; None if those are not counted.
        captures: How often it was captured; more than once after a release or a recapture.
        capture_ms: Time of the last capture, in milliseconds.
        pool_mib: Memory that the last capture added to the pool of graphs, in MiB; None without a
            GPU.
        replays: Replays of it: steps, or calls of a module.
        eager_ms: Median time of an eager step of this signature; None if none was timed.
        replay_ms: Median time of a replayed step; None if none was timed.
        overlap: Whether its graph runs in one stream or in two, and why; empty if two were not
            tried.
        waits: Lines of the step at which each replay waits for the device: code branches there
            by its values.
        launches: With ``annotate=True``, the nodes of each graph that was captured, in the order of
            their capture, each with the submodule, operator and line that launched it.
    """

    signature: str
    scope: str = "step"
    parts: int = 1
    nodes: int | None = None
    kernels: int | None = None
    captures: int = 1
    capture_ms: float = 0.0
    pool_mib: float | None = None
    replays: int = 0
    eager_ms: float | None = None
    replay_ms: float | None = None
    overlap: str = ""
    waits: Sequence[str] = ()
    launches: Sequence[Sequence[GraphNode]] = ()

    @property
    def speed_up(self) -> float | None:
        """Time of an eager step over that of a replayed one; None if either is unknown."""
        if self.eager_ms is None or not self.replay_ms:
            return None
        return self.eager_ms / self.replay_ms


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """One step that was timed.

    Attributes:
        step: Position of the micro-batch in the fit, from 0.
        kind: Whether it ran eagerly or was replayed.
        ms: From the begin of the step to the end of backward pass or optimizer step, in
            milliseconds: on the GPU by its own clock, else by the host's.
    """

    step: int
    kind: Literal["eager", "replay"]
    ms: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """Steps of a fit in a row that ran in one way.

    Attributes:
        kind: ``"captured"`` for a step with a capture, which ran eagerly or was replayed, too.
        begin: Position of the first micro-batch in the fit, from 0.
        steps: How many there are.
    """

    kind: Literal["eager", "captured", "replayed"]
    begin: int
    steps: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Padding:
    """Lengths to which batches might be padded, so that few graphs serve them all.

    Attributes:
        tensors: The tensors of the batch that have the length, as a ``PadTo`` takes their names.
        seen: How many lengths came.
        lengths: Those to pad to.
        added: How much longer batches are then in the mean, as a part of what they are.
        saves_ms: What the fit would have taken less, in milliseconds; None if nothing was measured.
    """

    tensors: Sequence[str]
    seen: int
    lengths: Sequence[int]
    added: float
    saves_ms: float | None = None

    def __str__(self) -> str:
        names = ", ".join(f"{name}: ..." for name in self.tensors)
        saves = "" if self.saves_ms is None else f", and about {self.saves_ms / 1e3:.1f} s less"
        return (
            f"{self.seen} lengths came. {len(self.lengths)} would do, with {self.added:.0%} of "
            f"padding{saves}, if the step leaves padding out (a mask, ignore_index):\n"
            f"  collate_fn=PadTo({[*self.lengths]}, {{{names}}}, collate_fn)"
        )


@dataclass(kw_only=True, slots=True, repr=False)
class Report:
    """What the graphs of a fit did.

    Attributes:
        backend: ``"cuda"``, ``"emulated"``, or empty where nothing was to be captured.
        device: The device in words.
        torch: Version of torch.
        graphs: A record for each captured signature, in the order of their first capture.
        modules: Names of the submodules that have graphs.
        eager: Micro-batches that ran eagerly.
        replayed: Micro-batches that were replayed, as a whole or with a call of a submodule.
        head_ms: How long Python runs ahead of the graph in a replayed step, in the mean; 0 if steps
            begin with their graph.
        fused: Optimizers that run their fused kernel, and by themselves would run another one.
        fallbacks: Why steps ran eagerly, a reason each.
        recaptures: What changed, for each capture after the first.
        times: The steps that were timed: the first ones of the fit.
        timeline: Which steps ran eagerly and which were replayed, in order, and behind them those
            with a capture; of fits that change very often the beginning.
        verdict: What the times say, where replay is not (much) faster; else empty.
        padding: Lengths to pad to, where many lengths came and few would do; else None.
        evaluation: What the graphs of ``"validation_step"``, ``"test_step"`` and ``"predict_step"``
            did, each a report of its own.
        diagnosis: What ``diagnose=True`` found; else None.
    """

    backend: str = ""
    device: str = ""
    torch: str = ""
    graphs: Sequence[GraphRecord] = ()
    modules: Sequence[str] = ()
    eager: int = 0
    replayed: int = 0
    head_ms: float = 0.0
    fused: Sequence[str] = ()
    fallbacks: Sequence[str] = ()
    recaptures: Sequence[str] = ()
    times: Sequence[StepTime] = ()
    timeline: Sequence[Span] = ()
    verdict: str = ""
    padding: Padding | None = None
    evaluation: Mapping[str, Report] = field(default_factory=dict)
    diagnosis: Diagnosis | None = None

    @property
    def times_mean_something(self) -> bool:
        """False for a rehearsal on the CPU, which replays operator by operator."""
        return self.backend != "emulated"

    @property
    def busiest(self) -> GraphRecord | None:
        """The record with most replays; None if nothing was captured."""
        return max(self.graphs, key=lambda record: record.replays, default=None)

    @property
    def speed_up(self) -> float | None:
        """The speed-up of the busiest record; None if it is unknown, and for a rehearsal."""
        busiest = self.busiest
        return busiest.speed_up if busiest and self.times_mean_something else None

    @property
    def share(self) -> str:
        """The steps that were replayed, as a part of all, such as ``"98 %"``."""
        return share_of(self.replayed, self.eager)

    def metrics(self) -> dict[str, float]:
        """Figures for a logger, named ``graphs/...``.

        Sizes are sums over all graphs, times those of the most replayed one. What is unknown is
        absent, and so are the times of a rehearsal.
        """
        busiest = self.busiest
        found: dict[str, float | None] = {
            "captures": sum(record.captures for record in self.graphs),
            "nodes": _total(record.nodes for record in self.graphs),
            "kernels": _total(record.kernels for record in self.graphs),
            "capture_ms": sum(record.capture_ms for record in self.graphs),
            "pool_mib": _total(record.pool_mib for record in self.graphs),
            "replayed_steps": self.replayed,
            "eager_steps": self.eager,
            "fallbacks": len(self.fallbacks),
            "recaptures": len(self.recaptures),
            "eager_ms": busiest.eager_ms if busiest else None,
            "replay_ms": busiest.replay_ms if busiest else None,
            "speed_up": self.speed_up,
        }
        if not self.times_mean_something:
            found = {name: v for name, v in found.items() if not name.endswith("_ms")}
        return {f"graphs/{name}": float(v) for name, v in found.items() if v is not None}

    def to_json(self) -> str:
        """Return the report as JSON text, for other programs: an object keyed by its fields."""
        found = self.diagnosis and self.diagnosis.to_dict()
        return json.dumps({"version": 1, **asdict(self), "diagnosis": found}, indent=1)

    def show(self) -> None:
        """Print the table, below it why steps ran eagerly, and what the doctor found."""
        print(self)

    def plot(self, path: str | os.PathLike[str] | None = None) -> Figure:
        """Draw which steps ran eagerly, were captured and replayed, and the times of the first.

        Args:
            path: The file for the picture, such as ``"fit.png"``; None writes none.

        Returns:
            The picture, a figure of matplotlib.

        Raises:
            UnsupportedError: matplotlib is not installed.
        """
        figure = draw(self.timeline, self.times, _headline(self)[0])
        if path is not None:
            figure.savefig(path)
        return figure

    def name_trace(self, path: str | os.PathLike[str]) -> int:
        """Name the kernels of replays in a trace that ``torch.profiler`` has exported as a file.

        With ``annotate=True`` each kernel is then ``submodule: operator | kernel``, with the user's
        line among its arguments. Kernels of a replay belong to the nodes of a graph in their order;
        where their names differ from those of all graphs, they stay as they are.

        Args:
            path: The file of ``export_chrome_trace``; it is written again.

        Returns:
            The number of kernels that were named.

        Raises:
            UnsupportedError: No graph of the report has names.
        """
        return name_kernels(
            path, [graph for record in self._records() for graph in record.launches]
        )

    def _records(self) -> list[GraphRecord]:
        """List the records of this report and of those in it."""
        inside = (record for each in self.evaluation.values() for record in each._records())
        return [*self.graphs, *inside]

    def __str__(self) -> str:
        return render(self)

    def __repr__(self) -> str:
        captures = sum(record.captures for record in self.graphs)
        counted = f"{captures} capture{'s' * (captures != 1)}"
        if self.speed_up is not None:
            counted += f", {self.speed_up:.2f}x as fast"
        if self.diagnosis is not None:
            counted += f", {self.diagnosis.summary}"
        return f"<Report: {self.replayed} replayed, {self.eager} eager, {counted}>"

    def _repr_html_(self) -> str:
        return render_html(self)


def share_of(replayed: int, eager: int) -> str:
    """Write the steps that were replayed as a part of all, such as ``"98 %"``."""
    return f"{100 * replayed // max(1, replayed + eager)} %"


def _total(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


# ------------------------------------------------------------------ as text

_TIMES_OF_A_REHEARSAL = (
    "Rehearsed on the CPU: the emulated backend replays operator by operator, and its times say "
    "nothing about a GPU."
)
_ROWS = 20
# Of long batches; what follows a semicolon (the place in an accumulation window) tells rows apart.
_REST = re.compile(r"(?<=^[^;]{44})[^;]{5,}")


# Title, attribute and form of each column, and those that a rehearsal leaves out.
_COLUMNS = (
    ("speed-up", "speed_up", "{:.2f}x"),
    ("eager ms/step", "eager_ms", "{:.3f}"),
    ("replay ms/step", "replay_ms", "{:.3f}"),
    ("replays", "replays", "{:,d}"),
    ("capture ms", "capture_ms", "{:.0f}"),
    ("nodes", "nodes", "{:,d}"),
    ("kernels", "kernels", "{:,d}"),
    ("pool MiB", "pool_mib", "{:,.1f}"),
    ("scope", "scope", "{}"),
    ("batch", "signature", "{}"),
)
_OF_A_GPU = "speed_up", "eager_ms", "replay_ms", "capture_ms", "pool_mib"
_TEXTS = "scope", "batch"
_SUMMARY = {
    "graphs/nodes": "{:,.0f} nodes",
    "graphs/capture_ms": "{:.0f} ms for the capture",
    "graphs/pool_mib": "{:,.1f} MiB of memory",
}


def _headline(report: Report) -> list[str]:
    """Say in a line or two what a reader looks for first: the gain, and how much is replayed."""
    said, busiest = [], report.busiest
    if report.speed_up is not None and busiest is not None:
        said.append(
            f"{report.speed_up:.2f}x as fast: {busiest.replay_ms:.3f} ms a step replayed, "
            f"{busiest.eager_ms:.3f} ms eager."
        )
    steps = "step" if report.replayed == 1 else "steps"
    share = f" ({report.share})" if report.replayed else ""
    return [*said, f"{report.replayed:,d} {steps} replayed, {report.eager:,d} eager{share}."]


def _notes(report: Report, *, is_part: bool = False) -> list[str]:
    """Write what is said below the table, a sentence each, reasons indented below theirs.

    Args:
        is_part: It is below another report, which has said what holds for both.
    """
    said = []
    if report.graphs and not (report.times_mean_something or is_part):
        said.append(_TIMES_OF_A_REHEARSAL)
    if report.head_ms and report.times_mean_something:
        said.append(f"{report.head_ms:.3f} ms of Python run ahead of the graph in each step.")
    if report.busiest is not None and report.busiest.waits:
        said.append(f"Each replay waits for the GPU, as eager steps do: {report.busiest.waits[0]}")
        said += [f"  and {line}" for line in report.busiest.waits[1:]]
    if report.busiest is not None and report.busiest.overlap:
        said.append(f"Overlap, {report.busiest.overlap}.")
    if report.verdict:
        said.append(report.verdict)
    if report.fused:
        said.append(
            f"Fused kernel: {', '.join(report.fused)}. It rounds differently from torch's default; "
            "optimizer_kernel='own' does without it."
        )
    for title, reasons in (("Fallbacks", report.fallbacks), ("Recaptures", report.recaptures)):
        counts = Counter(reasons)
        texts = [f"{r} ({n:,d} times)" if n > 1 else r for r, n in counts.items()]
        if texts:
            said += [f"{title}:", *(indent(text, "  ") for text in texts[:_ROWS])]
        if len(texts) > _ROWS:
            said.append(f"  and {len(texts) - _ROWS:,d} more")
    if report.padding is not None:
        said.append(str(report.padding))
    if report.diagnosis is not None:
        said += ["", str(report.diagnosis)]
    return said


def summary_line(report: Report, who: str = "GraphCapture") -> str:
    """Give the report in one line: number, size and cost of the graphs, and what they gain."""
    figures = report.metrics()
    parts = [f"captured {len(report.graphs)} graph{'s' * (len(report.graphs) != 1)}"]
    parts += [text.format(figures[name]) for name, text in _SUMMARY.items() if figures.get(name)]
    if "graphs/speed_up" in figures:
        before, now = figures["graphs/eager_ms"], figures["graphs/replay_ms"]
        parts.append(f"{now:.3f} ms a step instead of {before:.3f} ms ({before / now:.2f}x)")
    if report.fallbacks:
        count = len(report.fallbacks)
        parts.append(f"{count} reason{'s' * (count != 1)} for eager work (report.fallbacks)")
    return f"{who}: " + ", ".join(parts)


def _table(report: Report) -> list[list[str]]:
    """Make the cells: a row of titles, one for each record, a dash for the unknown."""
    columns = [c for c in _COLUMNS if report.times_mean_something or c[1] not in _OF_A_GPU]
    table = [[title for title, *_ in columns]]
    for record in report.graphs[:_ROWS]:
        found = [(getattr(record, name), form) for _, name, form in columns]
        cells = ["-" if value is None else form.format(value) for value, form in found]
        table.append([*cells[:-1], _REST.sub("...", record.signature)])
    return table if report.graphs else []


def _hidden(report: Report) -> list[str]:
    hidden = len(report.graphs) - _ROWS
    return [f"and {hidden:,d} more"] if hidden > 0 else []


def _parts(report: Report) -> dict[str, Report]:
    """Find the reports of evaluations that have something to say."""
    return {
        name: part
        for name, part in report.evaluation.items()
        if part.graphs or part.fallbacks or (part.diagnosis and part.diagnosis.findings)
    }


def render(report: Report, *, is_part: bool = False) -> str:
    """Write what was gained, the table, and what is to be said below it."""
    table = _table(report)
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    sides = ["<" if title in _TEXTS else ">" for title in (table or [[]])[0]]
    form = "  ".join(f"{{:{side}{width}}}" for side, width in zip(sides, widths, strict=True))
    lines = [*_headline(report), *(form.format(*row).rstrip() for row in table)]
    lines += [*_hidden(report), *_notes(report, is_part=is_part)]
    for name, part in _parts(report).items():
        lines += [f"{name}:", indent(render(part, is_part=True), "  ")]
    return "\n".join(lines)


def render_html(report: Report, *, is_part: bool = False) -> str:
    """Write what :func:`render` writes, for a notebook."""
    first, *further = map(escape, _headline(report))
    parts = [f"<p><b>{first}</b>{''.join(f'<br>{line}' for line in further)}</p>"]
    if table := _table(report):
        titles, *rows = ([escape(cell) for cell in row] for row in table)
        cells = [f"<tr>{''.join(f'<th>{title}</th>' for title in titles)}</tr>"]
        cells += [f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows]
        parts.append(f"<table>{''.join(cells)}</table>")
    if notes := [*_hidden(report), *_notes(report, is_part=is_part)]:
        parts.append(f"<pre>{escape(chr(10).join(notes).strip())}</pre>")
    for name, part in _parts(report).items():
        parts += [f"<p>{escape(name)}:</p>", render_html(part, is_part=True)]
    return "\n".join(parts)


# ------------------ As a picture

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


# ------------------ In traces of torch.profiler

_LAUNCH = "GraphLaunch"
"""Part of the names of calls that launch a graph: its kernels have the number of the call."""
_NODE = "graph node id"
"""The argument of a kernel's event that tells which node of a graph it is, where torch has it."""


def name_kernels(path: str | os.PathLike[str], graphs: Sequence[Sequence[GraphNode]]) -> int:
    """Name kernels in a trace by the nodes of these graphs; see ``Report.name_trace``."""
    if not any(node.scope for nodes in graphs for node in nodes):
        raise UnsupportedError(
            "Kernels of a trace can be named only if captures have noted what launches them.",
            "no graph of this report has names",
            "capture with annotate=True, and ask the report after the capture",
        )
    file, packed = Path(path), str(path).endswith(".gz")
    content = gzip.decompress(file.read_bytes()) if packed else file.read_bytes()
    trace = json.loads(content)
    events = [event for event in trace["traceEvents"] if "correlation" in event.get("args", {})]
    graph_launches = {_call(event) for event in events if _LAUNCH in event.get("name", "")}
    launches: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event.get("cat") == "kernel" and _call(event) in graph_launches:
            launches[_call(event)].append(event)
    named = sum(_name(launch, graphs) for launch in launches.values())
    text = json.dumps(trace).encode()
    file.write_bytes(gzip.compress(text) if packed else text)
    return named


def _call(event: dict[str, Any]) -> Any:
    return event["args"]["correlation"]


def _name(launch: list[dict[str, Any]], graphs: Sequence[Sequence[GraphNode]]) -> int:
    """Name the kernels of one launch of a graph; return how many have a name."""
    # Kernels of one stream run in the order of their capture, in which nodes have their numbers
    events = sorted(launch, key=lambda event: (event["args"].get(_NODE, 0), event["ts"]))
    pairs = next(filter(None, (_matched(events, nodes) for nodes in graphs)), [])
    for event, node in pairs:
        event["name"] = f"{node.scope} | {node.name}"
        event["args"] |= {"kernel": node.name, "launched by": node.scope, "line": node.line}
    return len(pairs)


def _matched(
    events: Sequence[dict[str, Any]], nodes: Sequence[GraphNode]
) -> list[tuple[dict[str, Any], GraphNode]]:
    """Pair kernels with the nodes of a graph, those with a scope; empty if they are of another one.

    Nodes that copy or fill memory may run as kernels, too, which have other names.
    """
    pairs: list[tuple[dict[str, Any], GraphNode]] = []
    rest = iter(events)
    others = 0
    for node in nodes:
        if node.kind != "kernel":
            others += 1
            continue
        event = next((event for event in rest if _bare(event["name"]) == _bare(node.name)), None)
        if event is None:
            return []
        pairs.append((event, node))
    is_same = len(pairs) <= len(events) <= len(pairs) + others
    return [(event, node) for event, node in pairs if node.scope] if is_same else []


def _bare(name: str) -> str:
    """A kernel's name without spaces, which demanglers set otherwise."""
    return name.replace(" ", "")
