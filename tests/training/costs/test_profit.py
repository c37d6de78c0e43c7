"""Whether graphs pay off: the verdict on given times, and what follows from it in a fit."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback

from lightning_graphs import GraphCapture
from lightning_graphs.lightning import fit as summary
from lightning_graphs.lightning.runner import StrategyHandler
from lightning_graphs.policy.worth import SAMPLES, StepTiming
from lightning_graphs.report import GraphRecord
from lightning_graphs.report.messages import Statistics
from tests.training.fits import Fit, Net, compare, prepare

INFO = logging.getLogger("lightning.pytorch.utilities.rank_zero")


def timed(eager: float | None, replay: float | None, replays: int = 8) -> GraphRecord:
    return GraphRecord(signature="x", eager_ms=eager, replay_ms=replay, replays=replays)


def judged(*records: GraphRecord) -> tuple[bool, str]:
    """Whether graphs pay off by these times, and what is said of that."""
    statistics = Statistics(graphs=[*records])
    return statistics.judge(), statistics.verdict


class TestVerdict:
    @pytest.mark.parametrize(
        ("eager", "replay", "profitable", "sentence"),
        [
            (5.0, 2.0, True, ""),
            (1.0, 0.94, True, ""),
            (1.0, 0.95, True, "takes 0.950 ms and an eager one 1.000 ms: the GPU is busy"),
            (1.0, 0.999, True, "torch.compile"),
            (1.0, 1.0, False, "torch.compile"),
            (1.0, 1.05, False, "the GPU is busy all the time"),
            (1.0, 1.2, False, "takes 1.200 ms and an eager one 1.000 ms: graphs make this step"),
        ],
    )
    def test_of_one_graph(
        self, eager: float, replay: float, profitable: bool, sentence: str
    ) -> None:
        pays, said = judged(timed(eager, replay))
        assert pays is profitable
        assert sentence in said
        assert bool(sentence) is bool(said)

    def test_far_slower_replays_are_not_put_down_to_a_busy_gpu(self) -> None:
        assert "busy" not in judged(timed(1.0, 1.2))[1]

    def test_a_graph_counts_as_often_as_it_is_replayed(self) -> None:
        slow, fast = timed(1.0, 2.0, replays=1), timed(4.0, 1.0, replays=9)
        assert judged(slow, fast)[0]
        pays, said = judged(timed(1.0, 2.0, replays=9), timed(4.0, 1.0, replays=1))
        assert not pays
        assert "takes 1.900 ms and an eager one 1.300 ms" in said

    @pytest.mark.parametrize("records", [[], [timed(None, 1.0)], [timed(1.0, None)]])
    def test_without_both_times_it_says_nothing(self, records: list[GraphRecord]) -> None:
        assert judged(*records) == (True, "")


class Given:
    """A stopwatch with given times: a mark is the number of replays so far."""

    def __init__(self, fit: Fit, eager: float, replay: float, *, meaningful: bool = True) -> None:
        self.meaningful = meaningful
        self._fit = fit
        self._times = eager, replay

    def mark(self) -> int:
        return int(self._fit.statistics.replayed)

    def milliseconds(self, start: int, end: int, *, wait: bool) -> float | None:
        return self._times[end > start]

    def behind(self, mark: int) -> float:
        return 0.0


def given(
    monkeypatch: pytest.MonkeyPatch,
    fit: Fit,
    eager: float,
    replay: float,
    **options: bool,
) -> Fit:
    """The fit, its steps taking the given milliseconds."""
    stopwatch = Given(fit, eager, replay, **options)
    monkeypatch.setattr(summary, "Stopwatch", lambda device: stopwatch)
    return fit


class PlainAdam(Net):
    """Its optimizer is asked for no kernel."""

    def __init__(self) -> None:
        super().__init__(lambda module: torch.optim.AdamW(module.parameters(), lr=1e-2))


class TestInAFit:
    def test_slower_graphs_switch_themselves_off(
        self, backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        eager = prepare(backend, tmp_path, False, max_epochs=3).run()
        fit = prepare(
            backend,
            tmp_path,
            True,
            max_epochs=3,
            capture={"only_if_faster": True, "min_repeats": 2},
        )
        taken_over: list[bool] = []

        def look(trainer: Any, *_: Any) -> None:
            taken_over.append("training_step" in vars(trainer.strategy))

        monkeypatch.setattr(fit.trace, "on_train_epoch_end", look)
        with pytest.warns(
            UserWarning, match=r"switched off by only_if_faster: a replayed step take"
        ):
            given(monkeypatch, fit, 1.0, 1.5).run()
        # Five eager steps, one that captured and replayed, eight that were timed.
        assert fit.statistics.replayed == 1 + SAMPLES
        assert fit.statistics.eager == 30 - 1 - SAMPLES
        assert taken_over == [True, False, False]
        report = fit.capture.report
        assert (report.graphs[0].eager_ms, report.graphs[0].replay_ms) == (1.0, 1.5)
        assert "takes 1.500 ms and an eager one 1.000 ms" in report.fallbacks[0]
        fit.trace.events = [e for e in fit.trace.events if e[0] != "on_train_epoch_end"]
        eager.trace.events = [e for e in eager.trace.events if e[0] != "on_train_epoch_end"]
        compare(eager, fit, replayed=False)

    @pytest.mark.parametrize("scope", ["modules", "step"])
    def test_then_they_equal_a_fit_that_exchanges_its_kernel_at_the_same_steps(
        self, backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scope: str
    ) -> None:
        """The optimizer's own kernel comes back in the middle of the fit."""
        kernels: list[bool] = []

        class Noting(Callback):
            """Notes the kernel of each step."""

            def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
                kernels.append("step" in vars(trainer.optimizers[0]))

        class Exchanging(Callback):
            """Runs the same kernels without graphs."""

            def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
                kernel = kernels[trainer.global_step] or None
                trainer.optimizers[0].param_groups[0]["fused"] = kernel
                for state in trainer.optimizers[0].state.values() if kernel is None else ():
                    state["step"] = state["step"].cpu()  # where the other kernel reads it

        capture = {"scope": scope, "only_if_faster": True, "min_repeats": 2}
        options: dict[str, Any] = {"max_epochs": 3, "capture": capture, "module": PlainAdam}
        fit = prepare(backend, tmp_path, True, callbacks=lambda: [Noting()], **options)
        with pytest.warns(UserWarning, match="switched off by only_if_faster"):
            given(monkeypatch, fit, 1.0, 1.5).run()
        changes = [n for n, pair in enumerate(pairwise(kernels), 1) if pair[0] != pair[1]]
        assert (kernels[0], kernels[-1]) == (True, False)
        assert 1 < changes[0] < len(kernels) == fit.trainer.global_step
        eager = prepare(backend, tmp_path, False, callbacks=lambda: [Exchanging()], **options)
        compare(eager.run(), fit, replayed=False)

    @pytest.mark.parametrize(("replay", "gate"), [(0.5, True), (0.97, True), (1.5, False)])
    def test_otherwise_they_stay(
        self,
        backend: str,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        replay: float,
        gate: bool,
    ) -> None:
        fit = prepare(backend, tmp_path, True, capture={"only_if_faster": gate, "min_repeats": 2})
        given(monkeypatch, fit, 1.0, replay).run()
        assert (fit.statistics.eager, fit.statistics.replayed) == (5, 15)
        assert fit.statistics.fallbacks == []

    def test_without_the_gate_a_sentence_says_so(
        self,
        backend: str,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        _, lines = self._told(prepare(backend, tmp_path, True), 1.5, monkeypatch, caplog)
        said = [line for line in lines if "only_if_faster" in line]
        assert len(said) == 1
        assert re.search(r"takes 1\.500 ms .* GraphCapture\(only_if_faster=True\)", said[0])

    def test_a_busy_gpu_is_told_of_torch_compile(
        self,
        backend: str,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        fit, lines = self._told(prepare(backend, tmp_path, True), 0.98, monkeypatch, caplog)
        assert any("torch.compile" in line for line in lines)
        assert not any("only_if_faster" in line for line in lines)
        assert "torch.compile" in fit.capture.report.verdict

    @staticmethod
    def _told(
        fit: Fit,
        replay: float,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> tuple[Fit, list[str]]:
        """A fit whose replays take so many times what eager steps take, and what it says."""
        with caplog.at_level(logging.INFO, logger=INFO.name):
            given(monkeypatch, fit, 1.0, replay).run()
        return fit, [record.getMessage() for record in caplog.records]

    def test_a_rehearsal_is_not_judged(
        self, backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fit = prepare(backend, tmp_path, True, capture={"only_if_faster": True, "min_repeats": 2})
        given(monkeypatch, fit, 1.0, 9.0, meaningful=False).run()
        assert fit.statistics.replayed == 15
        assert fit.capture.report.verdict == ""

    def test_the_host_says_nothing_about_graphs(self) -> None:
        assert not summary.Stopwatch(torch.device("cpu")).meaningful


@pytest.mark.parametrize("name", ["only_if_faster", "log_metrics"])
def test_the_options_are_switches(name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name} must be one of True, False, got 'yes'"):
        GraphCapture(**{name: "yes"})


class Device:
    """A stopwatch whose device is late: times are known once ``done`` marks are behind it."""

    meaningful = True

    def __init__(self) -> None:
        self.marks = self.done = 0
        self.waited = False

    def mark(self) -> int:
        self.marks += 1
        return self.marks

    def milliseconds(self, start: int, end: int, *, wait: bool) -> float | None:
        self.waited = self.waited or wait
        return 2.0 if wait or end <= self.done else None

    def behind(self, mark: int) -> float:
        return 0.5


class Steps:
    """Eager steps, then replays, under a stopwatch whose device comes to them at the 16th replay.

    Attributes:
        statistics: Where they are counted.
        settled: After which step the timing ended, if it did.
    """

    def __init__(self, device: Device, *, verified: Sequence[int] = (), **options: Any) -> None:
        self.statistics = Statistics()
        self._verified = verified
        self.settled: list[int] = []
        self._device = device
        self._record = GraphRecord(signature="x")
        self.statistics.graphs.append(self._record)
        self._ran = 0
        runner: Any = SimpleNamespace(
            has_failed=False,
            training_step=self._training_step,
            backward=lambda loss, optimizer: loss,
            optimizer_step=lambda optimizer, closure, model: closure(),
        )
        timing = StepTiming(self.statistics, device, **options)  # type: ignore[arg-type]
        recovery: Any = SimpleNamespace(is_open=False, repetition=None)
        parts = recovery, self.statistics, timing, lambda: self.settled.append(self._ran)
        self._handler = StrategyHandler(runner, lambda _: runner, *parts)
        self._handler.take_over(SimpleNamespace(**vars(runner)))  # type: ignore[arg-type]

    def _training_step(self, batch: Any) -> None:
        self.statistics.comparisons += self._ran in self._verified
        self._ran += 1
        if self._ran <= 3:
            self.statistics.eager += 1
            return
        self._record.replays += 1
        if self._record.replays == 16:
            self._device.done = self._device.marks

    def _closure(self) -> None:
        self._handler.training_step({"x": torch.ones(2)})
        self._handler.backward(torch.ones(()), None)

    def run(self, *, stepping: bool = True) -> Steps:
        for _ in range(23):
            if self.settled:
                break
            if stepping:
                self._handler.optimizer_step(None, self._closure)
            else:
                self._closure()
        return self

    @property
    def times(self) -> list[tuple[int, str]]:
        return [(time.step, time.kind) for time in self.statistics.times]


def test_a_step_of_several_graphs_is_timed_for_each() -> None:
    statistics, device = Statistics(), Device()
    device.done = 99
    graphs = [GraphRecord(signature="x", scope=f"module {name}") for name in "ab"]

    timing = StepTiming(statistics, device, manual=True)  # type: ignore[arg-type]

    def training_step(batch: Any) -> None:
        timing.begin((batch,))
        eager = statistics.eager < 3
        statistics.eager += eager
        for record in [] if eager else graphs:
            record.replays += 2
        timing.end()
        timing.read()

    statistics.graphs += graphs
    for _ in range(5):
        training_step({"x": torch.ones(2)})
    assert [(record.eager_ms, record.replay_ms) for record in graphs] == [(2.0, 2.0)] * 2
    assert [time.kind for time in statistics.times] == ["eager"] * 2 + ["replay"] * 2


ALL = [(1, "eager"), (2, "eager"), *((3 + i, "replay") for i in range(SAMPLES))]


class TestTiming:
    def test_no_step_waits_for_the_device(self) -> None:
        device = Device()
        steps = Steps(device).run()
        assert steps.settled == [3 + 16]
        assert not device.waited
        assert steps.times == ALL

    def test_manual_optimization_ends_with_the_training_step(self) -> None:
        steps = Steps(Device(), manual=True).run(stepping=False)
        assert steps.settled == [3 + 16]
        assert steps.times == ALL

    def test_it_does_not_end_between_micro_batches(self) -> None:
        assert Steps(Device()).run(stepping=False).settled == []

    def test_a_verified_step_is_left_out(self) -> None:
        steps = Steps(Device(), verified=[4, 8, 12]).run()
        replays = [step for step, kind in steps.times if kind == "replay"]
        assert replays == [3, 5, 6, 7, 9, 10, 11, 13]
