"""The report of a real fit: its figures, what is said, what is logged."""

from __future__ import annotations

import csv
import io
import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import TQDMProgressBar
from torch import nn

from lightning_graphs import GraphCapture, core
from lightning_graphs.lightning.fit import SHARE, TIME
from lightning_graphs.private.torch import why_no_cuda_graphs
from lightning_graphs.report import GraphRecord, render, summary_line
from lightning_graphs.report.messages import CaptureCost, Statistics
from tests.programs.test_heads import Windows
from tests.training.fits import Fit, adamw, batches, compare, csv_of, fit_twice, prepare
from tests.training.told.test_notices import Thawing

INFO = logging.getLogger("lightning.pytorch.utilities.rank_zero")


def fitted(backend: str, root: Path, **options: Any) -> Fit:
    """Two epochs of ten batches, the last of each short; more where the options say so."""
    given: dict[str, Any] = {"data": lambda: batches(10, last=3), "max_epochs": 4, **options}
    return prepare(backend, root, True, **given).run()


class TestOfAFit:
    def test_the_head_of_a_step_has_its_time(self, backend: str, tmp_path: Path) -> None:
        fit = fitted(backend, tmp_path, module=Windows, data=batches, validation=0)
        report = fit.capture.report
        assert report.replayed > 0
        assert report.head_ms > 0
        said = f"{report.head_ms:.3f} ms of Python run ahead of the graph in each step."
        assert said in str(replace(report, backend="cuda"))
        assert fitted(backend, tmp_path).capture.report.head_ms == 0

    def test_counts_are_those_of_the_fit(self, backend: str, tmp_path: Path) -> None:
        fit = fitted(backend, tmp_path)
        report = fit.capture.report
        # Whole batches: three to warm up, two seen, then captured. The short one of each epoch
        # comes last: in the first two epochs it is seen, in the third captured.
        assert (report.eager, report.replayed) == (7, 33)
        assert [record.signature for record in report.graphs] == [
            "x f32[8,8], y i64[8]",
            "x f32[3,8], y i64[3]",
        ]
        assert [record.replays for record in report.graphs] == [31, 2]
        assert [(r.scope, r.captures, r.parts) for r in report.graphs] == [("step", 1, 1)] * 2
        assert report.backend == backend
        assert len(report.recaptures) == 1
        assert report.fallbacks == ()
        assert [(span.kind, span.begin, span.steps) for span in report.timeline] == [
            ("eager", 0, 5), ("replayed", 5, 4), ("eager", 9, 1), ("replayed", 10, 9),
            ("eager", 19, 1), ("replayed", 20, 20), ("captured", 5, 1), ("captured", 29, 1),
        ]  # fmt: skip
        for record in report.graphs:
            assert record.nodes is not None
            assert record.kernels is not None
            assert record.nodes >= record.kernels > 10
            assert record.capture_ms > 0
            assert (record.pool_mib is None) is (backend == "emulated")

    def test_first_steps_are_timed_and_no_more(self, backend: str, tmp_path: Path) -> None:
        fit = fitted(backend, tmp_path)
        report, times = fit.capture.report, fit.statistics.times
        # A rehearsal keeps its own to itself
        assert list(report.times) == ([] if backend == "emulated" else times)
        # The first eager step and the one that captured are left out.
        whole = [(time.step, time.kind) for time in times]
        assert whole == [(i, "eager") for i in (1, 2, 3, 4)] + [
            (i, "replay") for i in (6, 7, 8, 10, 11, 12, 13, 14)
        ]
        assert min(time.ms for time in times) > 0
        timed, late = report.graphs
        assert (timed.eager_ms or 0) > 0
        assert (timed.replay_ms or 0) > 0
        assert (late.eager_ms, late.replay_ms) == (None, None)

    def test_a_replay_passes_no_stopwatch_afterwards(self, backend: str, tmp_path: Path) -> None:
        fit = prepare(backend, tmp_path, True, max_epochs=3)
        handlers: list[str] = []

        def note(trainer: Any, *_: Any) -> None:
            handlers.append(type(vars(trainer.strategy)["optimizer_step"].__self__).__name__)

        fit.trace.on_train_batch_end = note  # type: ignore[method-assign]
        fit.run()
        assert handlers[:5] == ["StrategyHandler"] * 5
        assert handlers[-5:] == ["StepRunner"] * 5

    def test_accumulation_has_a_record_for_each_phase(self, backend: str, tmp_path: Path) -> None:
        fit = prepare(backend, tmp_path, True, accumulate_grad_batches=2, max_epochs=4).run()
        words = sorted(record.signature for record in fit.capture.report.graphs)
        assert words == [
            "x f32[8,8], y i64[8]; first micro-batch of 2",
            "x f32[8,8], y i64[8]; last micro-batch of 2",
        ]
        assert all(record.replay_ms for record in fit.capture.report.graphs)
        (change,) = fit.capture.report.recaptures
        assert change.startswith("gradient accumulation: ")
        assert ";" not in change

    def test_a_signature_captured_again_keeps_its_record(
        self, backend: str, tmp_path: Path
    ) -> None:
        fit = fitted(backend, tmp_path, capture={"min_repeats": 0}, module=Thawing)
        report = fit.capture.report
        assert sum(record.captures for record in report.graphs) == fit.statistics.captures > 2
        assert sum(record.replays for record in report.graphs) == report.replayed

    def test_no_graph_outlives_the_fit(self, backend: str, tmp_path: Path) -> None:
        fit = fitted(backend, tmp_path)
        assert fit.statistics._alive == {}

    def test_a_report_is_a_snapshot(self) -> None:
        statistics = Statistics()
        statistics.graphs.append(GraphRecord(signature="x", replays=3))
        report = statistics.report()
        statistics.graphs[0].replays = 4
        statistics.fallbacks.append("a reason")
        assert (report.graphs[0].replays, report.fallbacks) == (3, ())

    def test_nodes_are_counted_before_a_graph_goes(self) -> None:
        statistics, cell = Statistics(), torch.zeros(4)
        graphs = [core.CUDAGraph(keep_graph=True, backend="emulated") for _ in range(3)]
        for name, graph in zip("abc", graphs, strict=True):
            with core.graph(graph):
                cell.add_(1).mul_(2)
            statistics.captured(name, [graph], CaptureCost(ms=2.0))
        statistics.released(graphs[0])
        records = statistics.report().graphs
        assert [(r.nodes, r.kernels, r.capture_ms) for r in records] == [(2, 2, 2.0)] * 3
        statistics.released(graphs[1])
        assert [r.nodes for r in statistics.graphs] == [2, 2, 2]

    def test_before_any_fit_the_report_is_empty(self) -> None:
        report = GraphCapture().report
        assert (report.graphs, report.replayed, report.backend) == ((), 0, "")
        assert summary_line(report) == "GraphCapture: captured 0 graphs"


class Parts(LightningModule):
    """Two parts, of which a step calls one or none."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3)) for _ in "ab")
        self.plain = nn.Parameter(torch.randn(8, 3))

    def part(self, i: int) -> Any:
        return self.a

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        part = self.part(batch_idx)
        logits = batch["x"] @ self.plain if part is None else part(batch["x"])
        return nn.functional.cross_entropy(logits, batch["y"])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.a(batch["x"]).sum())

    configure_optimizers = adamw


class Bypassed(Parts):
    def part(self, i: int) -> Any:
        return self.a if self.global_step < 12 else None


class Exchanged(Parts):
    def part(self, i: int) -> Any:
        return self.a if self.global_step < 12 else self.b


class EverySecond(Parts):
    def part(self, i: int) -> Any:
        return self.a if i % 2 else None


class FellBack(Parts):
    """From some step on its graphs do not fit: other switches of torch are set for the call."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.global_step >= 12):
            return super().training_step(batch, batch_idx).float()


class Skipping(Parts):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx == 7 else super().training_step(batch, batch_idx)


STEPS = [Parts, Bypassed, Exchanged, EverySecond, FellBack, Skipping]


class TestStepsOfSubmodules:
    """A step is replayed where a call in it was: each step here makes one call at most."""

    @pytest.mark.filterwarnings("ignore:GraphCapture")
    @pytest.mark.parametrize("module", STEPS)
    @pytest.mark.parametrize("window", [1, 2])
    def test_figures_are_those_of_calls(
        self, backend: str, tmp_path: Path, module: Any, window: int
    ) -> None:
        capture = {"scope": "modules", "on_failure": "eager", "only_if_faster": False}
        options: dict[str, Any] = {
            "module": module, "capture": capture, "accumulate_grad_batches": window,
            "data": lambda: batches(20),
        }  # fmt: skip
        eager, captured = fit_twice(backend, tmp_path, **options)
        compare(eager, captured, replayed=False)
        report = captured.capture.report
        replays = sum(record.replays for record in report.graphs)
        assert report.replayed == replays > 0
        assert report.replayed + report.eager == 40
        figures = report.metrics()
        assert (figures["graphs/replayed_steps"], figures["graphs/eager_steps"]) == (
            replays, 40 - replays,
        )  # fmt: skip
        assert repr(report).startswith(f"<Report: {replays} replayed, {40 - replays} eager, ")
        assert f"{replays} steps replayed, {40 - replays} eager" in render(report)
        found = json.loads(report.to_json())
        assert (found["replayed"], found["eager"]) == (replays, 40 - replays)
        if module is Bypassed:
            assert "steps run eagerly that call no graphed module" in report.fallbacks
        if module is Exchanged:  # another part takes its place
            assert list(report.modules) == ["a", "b"]


class TestSaid:
    @pytest.mark.parametrize(
        ("options", "step"),
        [({}, 5), ({"min_repeats": 0, "warmup_steps": 1}, 1), ({"only_if_faster": True}, (5, 3))],
    )
    def test_a_line_at_the_start_says_when_to_expect_a_graph(
        self, backend: str, tmp_path: Path, caplog: pytest.LogCaptureFixture,
        options: Any, step: Any,
    ) -> None:  # fmt: skip
        with caplog.at_level(logging.INFO, logger=INFO.name):
            prepare(backend, tmp_path, True, capture=options, max_steps=1).run()
        said = [r.getMessage() for r in caplog.records if "GraphCapture" in r.getMessage()]
        step = step[backend == "cuda"] if isinstance(step, tuple) else step
        steps = "step" if step == 1 else "steps"
        assert said[0].startswith(
            f"GraphCapture: the first graph comes after {step} {steps} at the earliest ("
        )

    def test_a_torch_that_was_not_tested_is_named(
        self, backend: str, tmp_path: Path, caplog: pytest.LogCaptureFixture,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:  # fmt: skip
        monkeypatch.setattr("lightning_graphs.private.torch.NEWEST", (2, 0))
        with caplog.at_level(logging.INFO, logger=INFO.name):
            prepare(backend, tmp_path, True, max_steps=1).run()
        said = f"GraphCapture: torch {torch.__version__} was not tested yet; public ways are used"
        assert [r.getMessage() for r in caplog.records].count(said) == 1

    @pytest.mark.parametrize(
        ("owner", "name", "value", "said"),
        [("torch.version", "hip", "6.4", "for ROCm"), ("sys", "platform", "win32", "on Windows")],
    )
    def test_a_platform_that_is_not_supported(
        self, monkeypatch: pytest.MonkeyPatch, owner: str, name: str, value: str, said: str
    ) -> None:
        assert why_no_cuda_graphs() == ""
        monkeypatch.setattr(f"{owner}.{name}", value)
        assert said in why_no_cuda_graphs()

    def test_a_line_once_settled_and_a_table_at_the_end(
        self, backend: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level(logging.INFO, logger=INFO.name):
            fit = fitted(backend, tmp_path)
        said = [r.getMessage() for r in caplog.records if "GraphCapture" in r.getMessage()]
        nodes = fit.capture.report.graphs[0].nodes
        lines = [text for text in said if text.startswith("GraphCapture: captured 1 graph, ")]
        assert len(lines) == 1
        assert lines[0].startswith(f"GraphCapture: captured 1 graph, {nodes} nodes")
        assert ("for the capture" in lines[0]) is (backend == "cuda")
        assert said[-1] == f"GraphCapture:\n{render(fit.capture.report)}"
        assert "33 steps replayed, 7 eager (82 %)." in said[-1]

    def test_a_failing_fit_shows_no_table(
        self, backend: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        fit = prepare(backend, tmp_path, True)

        def fail(*_: Any) -> None:
            raise OSError("the disk is full")

        fit.trace.on_train_epoch_end = fail  # type: ignore[method-assign]
        with (
            caplog.at_level(logging.INFO, logger=INFO.name),
            pytest.raises(OSError, match="the disk is full"),
        ):
            fit.run()
        assert not [r for r in caplog.records if "steps replayed" in r.getMessage()]
        assert fit.capture.report.replayed > 0


class TestLoggers:
    def test_figures_are_columns_beside_the_users_own(self, backend: str, tmp_path: Path) -> None:
        plain = fitted(backend, tmp_path / "plain")
        logged = fitted(backend, tmp_path / "logged", capture={"log_metrics": True})
        assert "graphs/" not in plain.csv
        rows = list(csv.DictReader(io.StringIO(csv_of(logged.trainer))))
        ours = [row for row in rows if row["graphs/captures"]]
        assert len(ours) == 2
        report = logged.capture.report
        final = {n: float(v) for n, v in ours[-1].items() if n.startswith("graphs/") and v}
        assert final == pytest.approx(report.metrics())
        assert final["graphs/replayed_steps"] == 33
        assert final["graphs/eager_steps"] == 7
        assert int(ours[-1]["step"]) == logged.trainer.global_step == 40
        theirs = [
            {n: v for n, v in row.items() if not n.startswith("graphs/")}
            for row in rows
            if not (row["graphs/captures"] or row[TIME])
        ]
        assert theirs == list(csv.DictReader(io.StringIO(plain.csv)))

    def test_the_time_of_a_step_at_the_rhythm_of_the_log(
        self, backend: str, tmp_path: Path
    ) -> None:
        """With several optimizers, too, and once in a window of accumulation."""
        options = {"capture": {"log_metrics": True}, "log_every_n_steps": 4}
        fit = fitted(backend, tmp_path, accumulate_grad_batches=2, **options)
        rows = [r for r in csv.DictReader(io.StringIO(csv_of(fit.trainer))) if r[TIME]]
        assert [int(row["step"]) for row in rows] == [3, 7, 11, 15, 19]
        assert all(float(row[TIME]) > 0 for row in rows)
        assert [float(row[SHARE]) for row in rows][::4] == [0.0, 100.0]
        assert not vars(fit.capture).get("on_train_batch_end")


class TestBar:
    def test_it_shows_the_share_when_it_is_drawn(self, backend: str, tmp_path: Path) -> None:
        bar = TQDMProgressBar(refresh_rate=10)
        fit = fitted(backend, tmp_path, callbacks=lambda: [bar], enable_progress_bar=True)
        assert fit.capture.report.share == "82 %"
        assert "graphs=82 %" in bar.train_progress_bar.postfix
        assert "get_metrics" not in vars(bar)

    def test_a_users_own_item_stays(self, backend: str, tmp_path: Path) -> None:
        class Bar(TQDMProgressBar):
            def get_metrics(self, *given: Any) -> Any:
                return {"graphs": "mine", **super().get_metrics(*given)}

        bar = Bar()
        fitted(backend, tmp_path, callbacks=lambda: [bar], enable_progress_bar=True)
        assert "graphs=mine" in bar.train_progress_bar.postfix


class TestShown:
    def test_json(self, backend: str, tmp_path: Path) -> None:
        report = fitted(backend, tmp_path).capture.report
        assert json.loads(report.to_json())["replayed"] == report.replayed > 0
