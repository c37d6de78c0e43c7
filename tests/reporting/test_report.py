"""A report by itself: JSON, the plot, the tables."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pytest

from lightning_graphs.errors import UnsupportedError
from lightning_graphs.reporting import GraphRecord, Report, StepTime, render, summary_line


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


class TestPlot:
    def test_bars_are_as_tall_as_the_steps_are_long(self) -> None:
        pytest.importorskip("matplotlib")
        times, gains = example().plot().axes
        eager, replay = times.containers
        assert [(bar.get_center()[0], bar.get_height()) for bar in eager] == [(1, 5.5), (2, 5.25)]
        assert [(bar.get_center()[0], bar.get_height()) for bar in replay] == [(4, 2.125)]
        assert [text.get_text() for text in times.get_legend().get_texts()] == ["eager", "replay"]
        (bar,) = gains.patches  # the other signature was not timed
        assert bar.get_width() == 5.25 / 2.1
        assert [text.get_text() for text in gains.texts] == ["2.50x"]
        assert [text.get_text() for text in gains.get_yticklabels()] == ["x f32[32,128], y i64[32]"]

    def test_a_rehearsal_has_no_times(self) -> None:
        pytest.importorskip("matplotlib")
        (axes,) = example(backend="emulated").plot().axes
        assert list(axes.containers) == []
        assert "rehearsed on the CPU" in axes.get_title()

    @pytest.mark.parametrize("changes", [{}, {"times": ()}, {"graphs": ()}], ids=str)
    def test_it_becomes_a_picture(self, changes: dict[str, Any], tmp_path: Path) -> None:
        pytest.importorskip("matplotlib")
        example(**changes).plot().savefig(tmp_path / "report.png")
        assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")

    def test_without_matplotlib(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
        with pytest.raises(UnsupportedError, match=r"pip install matplotlib"):
            example().plot()


class TestTable:
    def test_it_shows_every_figure(self, capsys: pytest.CaptureFixture[str]) -> None:
        report = example()
        text = render(report)
        report.show()
        assert capsys.readouterr().out == f"{text}\n"
        row = text.splitlines()[1].split()
        assert row[-8:] == ["1,412", "1,400", "35.5", "1,200", "310", "5.250", "2.100", "2.50x"]
        assert "1,200 steps replayed, 9 eager." in text
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
        for text in ("2.50x", "5.250", "2.100", "speed-up", "captured in", "310", "330"):
            assert text not in f"{render(rehearsed)} {summary_line(rehearsed)}"
        assert "speed-up" in render(real)
        assert not {"speed_up", "eager_ms", "replay_ms", "capture_ms"} & {
            name.removeprefix("graphs/") for name in rehearsed.metrics()
        }
        assert "say nothing about a GPU" not in render(real)
        assert summary_line(real).endswith(
            "2.100 ms a step instead of 5.250 ms (2.50x), 1 fallback"
        )
        assert real.metrics()["graphs/speed_up"] == 2.5

    def test_repr_is_one_short_line(self) -> None:
        assert repr(example()) == "<Report: 1200 replayed, 9 eager, 3 captures, 2.50x as fast>"
        assert repr(Report()) == "<Report: 0 replayed, 0 eager, 0 captures>"
        assert " 1 capture>" in repr(Report(graphs=example().graphs[1:]))

    def test_a_notebook_shows_the_table(self) -> None:
        text = example()._repr_html_()
        assert text.startswith("<pre>signature ")
        assert "5.250           2.100     2.50x" in text
        assert "&lt;script&gt;" in text
        assert "0 steps replayed" in Report()._repr_html_()

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
