"""A report by itself: JSON there and back, the page, the tables."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from lightning_graphs.errors import GraphError
from lightning_graphs.reporting import GraphRecord, Report, render, show, summary_line
from tests.reporting.pages import Page, example, info_of


class TestJson:
    def test_there_and_back(self) -> None:
        report = example(verdict="a replayed step takes longer")
        assert Report.from_json(report.to_json()) == report

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda d: d.pop("eager"), "report has no key 'eager'"),
            (lambda d: d.update(more=1), "report has an unknown key 'more'"),
            (lambda d: d.update(version=9), "no object with version 1"),
            (lambda d: d.update(eager="9"), r"report\.eager is '9'"),
            (lambda d: d.update(fallbacks="x"), r"report\.fallbacks is str, no list"),
            (lambda d: d["graphs"][1].pop("scope"), r"report\.graphs\[1\] has no key 'scope'"),
            (lambda d: d["graphs"][0].update(nodes=1.5), r"report\.graphs\[0\]\.nodes is 1\.5"),
            (lambda d: d["graphs"][0].update(parts=True), r"graphs\[0\]\.parts is True"),
            (lambda d: d["times"].append(3), r"report\.times\[3\] is int, no object"),
            (lambda d: d["times"][0].update(kind="idle"), r"times\[0\]\.kind is 'idle'"),
            (lambda d: d["graphs"][0]["graphs"][0].pop("edges"), r"graphs\[0\]: KeyError"),
        ],
    )
    def test_anything_else_is_refused(self, change: Any, message: str) -> None:
        data = json.loads(example().to_json())
        change(data)
        with pytest.raises(GraphError, match=message):
            Report.from_json(json.dumps(data))

    def test_broken_text_names_the_line(self) -> None:
        with pytest.raises(GraphError, match=r"line 2: Expecting"):
            Report.from_json('{"version": 1,\n nonsense')

    def test_text_that_is_nested_too_deeply(self) -> None:
        with pytest.raises(GraphError, match="nested too deeply"):
            Report.from_json("[" * 200_000)


class TestPage:
    def test_its_figures_are_those_of_the_report(self) -> None:
        report = example()
        page = Page(report.to_html())
        assert page.figures == {
            "replayed-steps": "1,200",
            "eager-steps": "9",
            "graphs": "2",
            "fallbacks": "1",
            "recaptures": "1",
        }
        head, *rows = page.tables[0]
        assert head[:4] == ["signature", "scope", "nodes", "kernels"]
        assert ["|".join(row) for row in rows] == [
            "x f32[32,128], y i64[32]|step|1,412|1,400|310|35.5|1,200|5.250|2.100|2.50x",
            "x f32[7,128]|module encoder.layers.0|-|-|20|-|0|-|-|-",
        ]
        steps = [text for text in page.titles if text.startswith("step ")]
        assert steps == [
            "step 1, eager: 5.500 ms",
            "step 2, eager: 5.250 ms",
            "step 4, replay: 2.125 ms",
        ]
        assert page.tags["rect"] == 3

    def test_bars_are_as_tall_as_the_steps_are_long(self) -> None:
        bars = re.findall(r'<rect class="(\w+)".*?height="([\d.]+)"', example().to_html())
        heights = [float(height) for _, height in bars]
        assert [kind for kind, _ in bars] == ["eager", "eager", "replay"]
        assert heights[2] / heights[0] == pytest.approx(2.125 / 5.5, rel=0.01)

    def test_kernels_by_count(self) -> None:
        kernels = Page(example().to_html()).tables[1]
        assert kernels[0] == ["launches", "kernel"]
        assert {row[1]: int(row[0]) for row in kernels[1:]} == info_of().kernels

    def test_nothing_in_it_is_markup_but_ours(self) -> None:
        page = Page(example().to_html())
        assert page.tags["script"] == 0
        assert "NVIDIA <H100> & more, torch 2.13.0" in page.texts
        assert "a step runs eagerly: <script>alert(1)</script>" in page.texts

    def test_it_loads_nothing(self) -> None:
        text = example().to_html()
        page = Page(text)
        assert page.tags["link"] == page.tags["img"] == 0
        assert not {name for name, _ in page.attributes} & {"src", "href"}
        assert "url(" not in text
        assert "@import" not in text
        assert "prefers-color-scheme: dark" in text

    def test_of_nothing(self) -> None:
        assert "Nothing was captured." in Page(Report().to_html()).texts

    def test_a_file_is_replaced_only_when_asked(self, tmp_path: Path) -> None:
        path = tmp_path / "report.html"
        path.write_text("precious")
        with pytest.raises(GraphError, match=r"replaces no file(.|\n)*report\.html exists"):
            example().to_html(path)
        assert path.read_text() == "precious"
        page = example().to_html(path, overwrite=True)
        assert path.read_text(encoding="utf-8") == page
        other = tmp_path / "other.html"
        assert example().to_html(other) == other.read_text(encoding="utf-8") == page


class TestTable:
    def test_plain_and_rich_show_the_same_figures(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        report = example()
        rich = render(report)
        show(report)
        assert capsys.readouterr().out.split() == rich.split()
        monkeypatch.setitem(sys.modules, "rich.console", None)
        plain = render(report)
        show(report)
        assert capsys.readouterr().out.rstrip("\n") == plain
        row = plain.splitlines()[1].split()
        assert row[-8:] == ["1,412", "1,400", "310", "35.5", "1,200", "5.250", "2.100", "2.50x"]
        assert set(row) <= set(rich.split())
        for text in (plain, rich):
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
        for text in ("2.50x", "5.250", "2.100", "speed-up"):
            assert text not in render(rehearsed) + summary_line(rehearsed)
        assert Page(rehearsed.to_html()).tables[0][0][-2:] == ["pool MiB", "replays"]
        assert "speed-up" in render(real)
        assert "graphs/speed_up" not in rehearsed.metrics()
        assert "say nothing about a GPU" not in render(real)
        assert summary_line(real).endswith(
            "2.100 ms a step instead of 5.250 ms (2.50x), 1 fallback"
        )
        assert real.metrics()["graphs/speed_up"] == 2.5

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
