"""A report by itself: JSON, and the tables."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pytest

from lightning_graphs.device.rules import HOST_DATA, HOST_READ
from lightning_graphs.report import GraphRecord, Report, Span, StepTime, render, summary_line
from lightning_graphs.report.diagnosis import Diagnosis

PARTS = ("first", "inner", "last")


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


def test_json_has_every_field() -> None:
    report = example(verdict="a replayed step takes longer")
    read = json.loads(report.to_json())
    assert read.keys() == {"version", *(field.name for field in fields(Report))}
    assert read["graphs"][0]["signature"] == report.graphs[0].signature
    assert read["times"] == [asdict(time) for time in report.times]


class TestTable:
    def test_it_shows_every_figure(self, capsys: pytest.CaptureFixture[str]) -> None:
        report = example()
        text = render(report)
        report.show()
        assert capsys.readouterr().out == f"{text}\n"
        first, _, titles, row, *_ = text.splitlines()
        assert first == "2.50x as fast: 2.100 ms a step replayed, 5.250 ms eager."
        assert titles.startswith("speed-up ")
        row = row.split()
        assert row[:8] == ["2.50x", "5.250", "2.100", "1,200", "310", "1,412", "1,400", "35.5"]
        assert "1,200 steps replayed, 9 eager (99 %)." in text
        assert "Fallbacks:" in text
        assert "Recaptures:" in text

    def test_many_graphs_and_reasons_end_with_their_number(self) -> None:
        graphs = tuple(GraphRecord(signature=f"x f32[{i}]") for i in range(33))
        text = render(example(graphs=graphs, fallbacks=tuple(map(str, range(25)))))
        assert "and 13 more" in text
        assert "  and 5 more" in text
        assert "x f32[19]" in text
        assert "x f32[20]" not in text

    def test_a_rehearsal_shows_no_times_of_steps(self) -> None:
        rehearsed, real = example(backend="emulated"), example()
        assert "say nothing about a GPU" in render(rehearsed)
        for text in ("2.50x", "5.250", "2.100", "speed-up", "for the capture", "310", "330"):
            assert text not in f"{render(rehearsed)} {summary_line(rehearsed)}"
        assert "speed-up" in render(real)
        assert not {"speed_up", "eager_ms", "replay_ms", "capture_ms"} & {
            name.removeprefix("graphs/") for name in rehearsed.metrics()
        }
        assert "say nothing about a GPU" not in render(real)
        assert summary_line(real).endswith(
            "2.100 ms a step instead of 5.250 ms (2.50x), "
            "1 reason for eager work (report.fallbacks)"
        )
        assert real.metrics()["graphs/speed_up"] == 2.5

    def test_the_parts_of_an_accumulation_window_have_rows_of_their_own(self) -> None:
        batch = "batch[0] f32[16,32], batch[1] i64[16]"
        parts = [GraphRecord(signature=f"{batch}; {part} micro-batch of 4") for part in PARTS]
        rows = render(example(graphs=tuple(parts))).splitlines()[2:5]
        assert len({row.partition("batch[0]")[2] for row in rows}) == 3

    def test_a_long_batch_is_cut_and_what_follows_is_not(self) -> None:
        batch = ", ".join(f"feature_{i} f32[16,32]" for i in range(9))
        report = example(graphs=(GraphRecord(signature=f"{batch}; 2 calls"),))
        row = render(report).splitlines()[2]
        assert row.endswith("step   feature_0 f32[16,32], feature_1 f32[16,32], ...; 2 calls")

    def test_repr_is_one_short_line(self) -> None:
        assert repr(example()) == "<Report: 1200 replayed, 9 eager, 3 captures, 2.50x as fast>"
        assert repr(Report()) == "<Report: 0 replayed, 0 eager, 0 captures>"
        assert " 1 capture>" in repr(Report(graphs=example().graphs[1:]))

    def test_a_notebook_shows_the_table(self) -> None:
        text = example()._repr_html_()
        assert text.startswith("<p><b>2.50x as fast: ")
        assert "<td>2.50x</td><td>5.250</td><td>2.100</td><td>1,200</td>" in text
        assert "&lt;script&gt;" in text
        assert "0 steps replayed" in Report()._repr_html_()

    def test_printing_shows_the_table(self) -> None:
        assert str(example()) == render(example()) != repr(example())

    def test_a_picture_shows_steps_and_times(self, tmp_path: Path) -> None:
        pytest.importorskip("matplotlib")
        spans = (
            Span(kind="eager", begin=0, steps=9),
            Span(kind="replayed", begin=9, steps=1200),
            Span(kind="captured", begin=9, steps=1),
        )
        figure = example(timeline=spans).plot(tmp_path / "fit.png")
        assert (tmp_path / "fit.png").read_bytes().startswith(b"\x89PNG")
        strip, times = figure.axes
        assert strip.get_title() == "2.50x as fast: 2.100 ms a step replayed, 5.250 ms eager."
        labels = [text.get_text() for text in strip.get_legend().get_texts()]
        assert labels == ["eager (9)", "captured (1)", "replayed (1,200)"]
        assert [bar.get_height() for bar in times.patches] == [5.5, 5.25, 2.125]
        assert len(example(times=()).plot().axes) == 1

    def test_metrics_are_sums_and_the_busiest_graphs_times(self) -> None:
        assert example().metrics() == {
            "graphs/captures": 3.0,
            "graphs/nodes": 1412.0,
            "graphs/kernels": 1400.0,
            "graphs/capture_ms": 330.4,
            "graphs/pool_mib": 35.5,
            "graphs/replayed_steps": 1200.0,
            "graphs/eager_steps": 9.0,
            "graphs/fallbacks": 1.0,
            "graphs/recaptures": 1.0,
            "graphs/eager_ms": 5.25,
            "graphs/replay_ms": 2.1,
            "graphs/speed_up": 2.5,
        }


def test_the_doctor_names_what_is_in_the_way_before_its_remarks() -> None:
    diagnosis = Diagnosis(steps=3)
    diagnosis.add(HOST_DATA, "tensor", effect="runs ahead of the graph")
    diagnosis.add(HOST_READ, "item")
    said = str(diagnosis)
    assert said.index("host-read: ") < said.index("host-data: ")
