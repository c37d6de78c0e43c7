"""What is worth a capture: decided by given times, and by what comes back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from lightning_graphs.core.cache import PlanCache
from lightning_graphs.training import investment as module
from lightning_graphs.training.investment import Investment
from lightning_graphs.training.options import Options
from lightning_graphs.training.statistics import Statistics


class Plan:
    def __init__(self, key: Any) -> None:
        self.key = key
        self.uses = 0


class Fit:
    """Steps of given shapes: each takes 40 ms, or 5 ms where it has a graph.

    Attributes:
        graphs: Shapes that were captured, in order.
        cache: Their plans.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        *,
        eager: float = 40.0,
        behind: float = 0.0,
        replay: float = 5.0,
        capture: float = 100.0,
        **options: Any,
    ) -> None:
        self.now = 0.0
        monkeypatch.setattr(module, "perf_counter", lambda: self.now)
        self._times = eager, behind, replay, capture
        self.statistics = Statistics()
        self.steps: Sequence[Any] = ()
        self.done = 0
        self.investment = Investment(
            Options(**options), self.statistics, lambda: len(self.steps) - self.done, timed=True
        )
        self.cache: PlanCache[Any, Plan] = PlanCache(
            self.investment,
            lambda plan: plan.uses,
            lambda plan: None,
            capacity=options.get("max_graphs"),
        )
        self.graphs: list[Any] = []

    def run(self, steps: Sequence[Any]) -> Fit:
        eager, behind, replay, capture = self._times
        self.steps = steps
        for self.done, shape in enumerate(steps):
            plan = self.cache.get(shape)
            if plan is None and self.done >= 3 and self.cache.is_due(shape):
                with self.investment.paying():
                    self.now += capture / 1e3
                plan = Plan(shape)
                self.cache.add(shape, plan)
                self.graphs.append(shape)
            if plan is None:
                if self.done < 3:
                    self.cache.see(shape)
                self.statistics.eager += 1
                self.statistics.pace.eager.append(eager)
                self.statistics.pace.behind.append(behind)
                self.now += eager / 1e3
            else:
                plan.uses += 1
                self.statistics.replayed += 1
                self.statistics.pace.replayed.append(replay)
                self.now += replay / 1e3
        return self

    @property
    def seconds(self) -> float:
        return self.now


def in_turn(kinds: int, count: int) -> list[int]:
    """The same sequence in every run, in which each of the kinds comes as often as any other."""
    return [(i * i * 7 + i * 3 + i // kinds) % kinds for i in range(count)]


def test_one_shape_is_captured_after_the_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    fit = Fit(monkeypatch).run(["x"] * 100)
    assert fit.graphs == ["x"]
    assert (fit.statistics.eager, fit.statistics.replayed) == (3, 97)


@pytest.mark.parametrize("steps", [15, 20])
def test_too_few_steps_are_left(monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    fit = Fit(monkeypatch).run(["x"] * steps)
    assert fit.graphs == []
    assert fit.seconds == pytest.approx(steps * 0.04)
    # 5 steps and 150 ms for a first capture, one and a half times, at 28 ms a replay.
    assert "fewer steps are left than repay a capture (about 19)" in fit.cache.why_not
    assert fit.investment.is_over


def test_little_to_save_now_is_not_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    fit = Fit(monkeypatch, behind=13.3).run(["x"] * 100)
    for left, is_over in ((50, False), (10, True)):
        fit.done = 100 - left
        assert not fit.cache.is_due("x")
        assert "fewer steps are left" in fit.cache.why_not
        assert fit.investment.is_over == is_over


def test_a_busy_gpu_gets_no_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    fit = Fit(monkeypatch, eager=150.0, behind=110.0).run(["x"] * 400)
    assert fit.graphs == []
    assert "the GPU is busy all the time" in fit.cache.why_not


@pytest.mark.parametrize(("kinds", "most"), [(13, 0.40), (60, 0.75)])
def test_shapes_that_come_back_each_get_a_graph(
    monkeypatch: pytest.MonkeyPatch, kinds: int, most: float
) -> None:
    steps = in_turn(kinds, 400)
    fit = Fit(monkeypatch).run(steps)
    assert len(fit.graphs) == len(set(fit.graphs))
    assert fit.seconds < most * 400 * 0.04


def test_a_new_shape_in_each_step_gets_none(monkeypatch: pytest.MonkeyPatch) -> None:
    fit = Fit(monkeypatch).run(range(400))
    assert fit.graphs == []
    assert fit.seconds == pytest.approx(400 * 0.04)


def test_no_more_graphs_than_allowed_and_none_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    fit = Fit(monkeypatch, max_graphs=4).run(in_turn(13, 400))
    assert len(fit.graphs) == 4
    assert len(fit.cache) == 4


def test_a_graph_that_is_used_no_more_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    fit = Fit(monkeypatch, max_graphs=1).run(["x"] * 20 + ["y"] * 200)
    assert fit.graphs == ["x", "y"]
    assert [plan.key for plan in fit.cache.plans()] == ["y"]


def test_graphs_that_are_always_dropped_end(monkeypatch: pytest.MonkeyPatch) -> None:
    fit = Fit(monkeypatch)
    add = fit.cache.add

    def dropped(key: Any, plan: Plan) -> None:
        add(key, plan)
        fit.cache.clear()

    monkeypatch.setattr(fit.cache, "add", dropped)
    fit.run(["x"] * 400)
    assert len(fit.graphs) == 9
    assert "graphs have to be dropped before they have paid off (9 graphs" in fit.cache.why_not


@pytest.mark.parametrize("given", [{"min_repeats": 1}, {"only_if_faster": False}])
def test_sightings_decide_alone_where_asked(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, Any]
) -> None:
    fit = Fit(monkeypatch, **given).run(["x"] * 15)
    assert fit.graphs == ["x"]


def test_further_verifications_take_a_twentieth_of_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fit = Fit(monkeypatch)
    investment, verified = fit.investment, []
    for second in range(100):
        fit.now = float(second)
        if investment.affords_verification:
            verified.append(second)
            with investment.verifying():
                fit.now += 0.5
    assert verified[0] == 0
    assert 100 * 0.05 / 0.5 - 1 <= len(verified) <= 100 * 0.05 / 0.5 + 2
