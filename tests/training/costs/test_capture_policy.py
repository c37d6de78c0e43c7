"""What is worth a capture: decided by given times, and by what comes back."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
from lightning.pytorch import Callback, Trainer
from torch.utils.data import DataLoader

from lightning_graphs import GraphCapture
from lightning_graphs.lightning.trainer import evaluations_left, steps_left
from lightning_graphs.policy import worth as module
from lightning_graphs.policy.options import Options
from lightning_graphs.policy.worth import CapturePolicy, Experience
from lightning_graphs.regions.lifecycle import PlanCache
from lightning_graphs.report.messages import Statistics
from lightning_graphs.values.signature import Sightings
from tests.training.fits import Net, batches


class Plan:
    def __init__(self, key: Any) -> None:
        self.key = key
        self.uses = 0


@dataclass(frozen=True)
class Times:
    """What one thing takes, in milliseconds."""

    eager: float = 40.0
    behind: float = 0.0  # the GPU is still busy once all of it is launched
    replay: float = 5.0
    first: float = 100.0  # capture
    further: float = 100.0
    refused: float = 0.0  # the capture that shows that the step reads on the host, if it does
    learning: tuple[float, ...] = ()  # further attempts, each of which learns of the step
    verification: float = 0.0
    refuses: float = 0.0  # this part of the further captures, each as long as one that succeeds


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
        times: Times = Times(),
        experience: Experience | None = None,
        **options: Any,
    ) -> None:
        self.now = 0.0
        monkeypatch.setattr(module, "perf_counter", lambda: self.now)
        self._times = times
        self._is_known = not times.refused
        self.statistics = Statistics(backend="cuda")
        self.steps: Sequence[Any] = ()
        self.done = 0
        self.policy = CapturePolicy(
            Options(**options),
            self.statistics,
            lambda: len(self.steps) - self.done,
            experience,
        )
        self._learning = list(times.learning)
        self._numbers = random.Random(0)
        self.cache: PlanCache[Any, Plan] = PlanCache(
            self.policy,
            lambda plan: None,
            capacity=options.get("max_graphs"),
        )
        self.graphs: list[Any] = []

    def run(self, steps: Sequence[Any]) -> Fit:
        times = self._times
        self.steps = steps
        for self.done, shape in enumerate(steps):
            plan = self.cache.get(shape)
            is_asked = plan is None and self.done >= 3 and not self.policy.is_over
            if is_asked and self.cache.is_due(shape):
                plan = self._captured(shape)
            if plan is None:
                if self.done < 3:
                    self.cache.see(shape)
                self.statistics.eager += 1
                self.statistics.step_times.eager.append(times.eager)
                self.statistics.step_times.behind.append(times.behind)
                self.now += times.eager / 1e3
            else:
                plan.uses += 1
                self.statistics.replayed += 1
                self.statistics.step_times.replayed.append(times.replay)
                self.now += times.replay / 1e3
        return self

    def _captured(self, shape: Any) -> Plan | None:
        times, policy = self._times, self.policy
        with policy.timing_capture():
            if not self._is_known:
                self._is_known = True
                self.now += times.refused / 1e3
                policy.follows_host()
                if not policy.goes_on():
                    return None
                policy.tries_again()
            while self._learning:
                self.now += self._learning.pop(0) / 1e3
                if not policy.goes_on():
                    return None
                policy.tries_again()
            self.now += (times.further if self.graphs else times.first) / 1e3
            refuses = bool(self.graphs) and self._numbers.random() < times.refuses
        if refuses:
            self.cache.refuse(shape)
            return None
        policy.succeeded()
        if times.verification and policy.affords_verification:
            with policy.verifying():
                self.now += times.verification / 1e3
        plan = Plan(shape)
        self.cache.add(shape, plan)
        self.graphs.append(shape)
        return plan

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


@pytest.mark.parametrize(("refused", "least"), [(0.0, 159), (50.0, 417)])
def test_a_short_fit_of_short_steps_has_three_eager_ones(
    monkeypatch: pytest.MonkeyPatch, refused: float, least: int
) -> None:
    times = Times(eager=12.0, replay=2.0, first=150.0, refused=refused)
    fit = Fit(monkeypatch, times=times).run(["x"] * least)
    assert (fit.graphs, fit.statistics.eager) == (["x"], 3)
    assert fit.seconds < 0.4 * least * 0.012
    assert Fit(monkeypatch, times=times).run(["x"] * (least - 2)).graphs == []


def known(has_succeeded: bool = True, price: float = 0.0) -> Experience:
    found = Experience()
    found.has_succeeded, found.price = has_succeeded, price
    return found


@pytest.mark.parametrize("steps", [15, 20])
def test_too_few_steps_are_left(monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    fit = Fit(monkeypatch, experience=known()).run(["x"] * steps)
    assert fit.graphs == []
    assert fit.seconds == pytest.approx(steps * 0.04)
    # 3 steps and 80 ms for a first capture, 3 and 20 ms to compare, one and a half times, at 28 ms.
    assert "too few steps are left to repay a capture (about 18)" in fit.cache.why_not
    assert fit.policy.is_over


ENDLESS = (110.0,) * 100


def test_what_serves_no_whole_step_is_spent_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    fit = Fit(monkeypatch, times=Times(eager=10.0)).run(["x"] * 8)
    fit.steps, fit.policy.is_over = ["x"] * 1000, False
    assert fit.cache.is_due("x")
    with fit.policy.spending():  # the update as a graph of its own
        fit.now += 0.1
    began = fit.now
    fit.now += 0.08
    fit.policy.observed(began)  # in an observed step, which is a step
    # 100 ms, 70 ms, 1.5 steps and 20 ms are 2 % of 1,025 steps, of which 8 have been
    assert not fit.cache.is_due("x")
    assert fit.cache.why_not.endswith("(about 1017 would do)")
    fit.policy.met = "loss.item() at train.py:3"
    assert not fit.cache.is_due("x")
    assert fit.cache.why_not.endswith("; the last attempt met this: loss.item() at train.py:3")


def test_a_graph_that_computes_something_else_was_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    fit = Fit(monkeypatch, times=Times(eager=10.0, first=150.0, verification=80.0))
    fit.steps = ["x"] * 1000
    fit.statistics.step_times.eager.append(10.0)
    fit.statistics.step_times.behind.append(0.0)
    assert fit._captured("x") is not None
    fit.policy.refuted()
    assert not fit.cache.is_due("y")
    assert "which may fail (about 1900 would do)" in fit.cache.why_not


@pytest.mark.parametrize("eager", [2.0, 5.0, 10.0, 20.0, 40.0])
@pytest.mark.parametrize("steps", [200, 2000])
@pytest.mark.parametrize("learning", [ENDLESS, (300.0, *ENDLESS), (30.0, 60.0, 100.0, 150.0)])
def test_a_fit_whose_captures_fail_is_hardly_longer(
    monkeypatch: pytest.MonkeyPatch, eager: float, steps: int, learning: tuple[float, ...]
) -> None:
    times = Times(eager, replay=eager / 4, first=150.0, learning=learning, verification=80.0)
    fit = Fit(monkeypatch, times=times).run(["x"] * steps)
    alone = steps * eager / 1e3
    # The first one is estimated, and each of the others to cost as much as the longest before
    beyond = max(learning[0] - (1.5 * eager + 20.0), *(b - a for a, b in pairwise(learning)), 0.0)
    assert fit.seconds <= 1.02 * alone + beyond / 1e3
    assert fit.graphs or fit.policy.is_over


def test_a_short_fit_is_left_alone_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    fit = Fit(monkeypatch, times=Times(eager=5.0, replay=1.0))
    assert fit.policy.is_likely  # nothing is known yet
    fit.run(["x"] * 200)
    assert fit.seconds == pytest.approx(1.0)
    assert not fit.policy.is_likely
    # 1.5 steps and 20 ms are 2 % of 275 steps, of which 8 have been.
    assert fit.cache.why_not == (
        "too few steps are left to try a capture, which may fail (about 267 would do)"
    )


def test_what_captures_of_a_class_have_cost_is_known_to_its_next_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times = Times(eager=10.0, replay=2.0, first=150.0, learning=(100.0,), verification=50.0)
    shared = Experience()
    assert Fit(monkeypatch, times=times, experience=shared).run(["x"] * 1000).graphs == ["x"]
    assert (shared.has_succeeded, round(shared.price)) == (True, 300)
    # 300 ms, one and a half times, at 7 ms a step
    for left, graphs in ((64, []), (66, ["x"])):
        fit = Fit(monkeypatch, times=times, experience=known(price=300.0))
        assert fit.run(["x"] * (3 + left)).graphs == graphs


def test_a_class_whose_captures_have_failed_is_tried_again_in_long_fits_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times = Times(eager=10.0, replay=2.0, learning=ENDLESS)
    shared = Experience()
    fit = Fit(monkeypatch, times=times, experience=shared).run(["x"] * 1000)
    assert (fit.graphs, shared.has_succeeded) == ([], False)
    assert shared.price == pytest.approx(110.0)  # one attempt
    for steps, tries in ((500, False), (1200, True)):
        fit = Fit(monkeypatch, times=times, experience=known(False, shared.price))
        assert (fit.run(["x"] * steps).seconds > steps * 0.0101) is tries


def test_little_to_save_now_is_not_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    fit = Fit(monkeypatch, times=Times(behind=12.0)).run(["x"] * 100)
    for left, is_over in ((50, False), (10, True)):
        fit.done = 100 - left
        assert not fit.cache.is_due("x")
        assert "too few steps are left" in fit.cache.why_not
        assert fit.policy.is_over == is_over


def test_a_busy_gpu_gets_no_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    fit = Fit(monkeypatch, times=Times(eager=150.0, behind=110.0)).run(["x"] * 400)
    assert fit.graphs == []
    assert "the GPU is busy all the time" in fit.cache.why_not


def test_a_busy_gpu_gets_one_in_a_long_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    fit = Fit(monkeypatch, times=Times(eager=150.0, behind=110.0, replay=147.0)).run(["x"] * 2000)
    assert fit.graphs == ["x"]
    assert fit.seconds < 2000 * 0.15


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


def shuffled(steps: list[int]) -> list[int]:
    random.Random(0).shuffle(steps)
    return steps


TEXTS = {168: 38, 176: 30, 160: 24, 184: 17, 192: 17, 208: 15, 152: 14, 224: 8, 216: 8, 200: 7}
TEXTS |= {256: 5, 240: 4, 248: 4, 144: 3, 136: 2, 304: 2, 232: 2}


def texts(epochs: int) -> list[int]:
    """The padded length of each batch."""
    return shuffled([n for n, count in TEXTS.items() for _ in range(epochs * count)])


LLAMA = {"eager": 54.0, "replay": 5.0, "verification": 200.0}
BUSY_LLAMA = {"eager": 46.0, "replay": 13.0, "verification": 120.0}
BERT = {"eager": 53.0, "replay": 12.0, "refused": 80.0, "verification": 200.0}
BUSY_BERT = {"eager": 43.5, "replay": 28.5, "refused": 130.0, "verification": 150.0}
READING = {"eager": 48.0, "replay": 6.0, "refused": 19.0, "verification": 200.0}
GPT2 = {"eager": 36.0, "replay": 4.3}
QUICK, SLOW, SLOWER, SLOWEST = (200.0, 100.0), (400.0, 150.0), (800.0, 250.0), (800.0, 690.0)
# The shapes of the steps; what they take; what captures take; how much of the eager time, at most.
WHOLE_FITS = {
    "13 lengths": (shuffled([i % 13 for i in range(400)]), LLAMA, SLOW, 0.42),
    "13 lengths, quick": (shuffled([i % 13 for i in range(400)]), LLAMA, QUICK, 0.38),
    "60 lengths": (shuffled([i % 60 for i in range(400)]), LLAMA, SLOW, 0.6),
    "60 lengths, busy": (shuffled([i % 60 for i in range(400)]), BUSY_LLAMA, SLOW, 0.89),
    "60 lengths, slower": (shuffled([i % 60 for i in range(400)]), LLAMA, (500.0, 200.0), 0.8),
    # Its mask is read on the host, as the first attempt shows
    "60 lengths, read": (shuffled([i % 60 for i in range(400)]), READING, (250.0, 150.0), 0.7),
    # A capture costs all that its graph saves
    "60 lengths, slowest": (shuffled([i % 60 for i in range(400)]), LLAMA, (500.0, 270.0), 1.03),
    "new length at each step": (list(range(400)), LLAMA, SLOW, 1.0),
    "texts": (texts(1), BERT, SLOWER, 0.8),
    "texts, slow": (texts(1), BERT, SLOW, 0.65),
    "texts, host": (texts(1), {**BERT, "refused": 34.0}, (293.0, 200.0), 0.7),
    # A capture costs 18 steps, and saves a third of them
    "texts, slowest": (texts(1), BUSY_BERT, SLOWEST, 1.02),
    "ten epochs": (texts(5), BUSY_BERT, SLOW, 0.75),
    "lengths that grow": ([i // 40 for i in range(400)], LLAMA, SLOW, 0.5),
    "images of five sizes": ([i // 10 % 5 for i in range(400)], LLAMA, SLOW, 0.4),
    "last batches": ([i % 20 == 19 for i in range(400)], LLAMA, SLOW, 0.35),
    "accumulation": ([(i % 2, i // 2 * 7 % 10) for i in range(400)], LLAMA, SLOW, 0.4),
    "mixture of experts": (["x"] * 250, {"eager": 31.0, "replay": 20.0}, SLOW, 0.72),
    "validation every 20 steps": (["x"] * 300, GPT2, SLOW, 0.2),
    "15 steps": (["x"] * 15, GPT2, QUICK, 1.0),
    "GPT-2 350M": (["x"] * 80, {"eager": 300.0, "behind": 250.0, "replay": 298.0}, QUICK, 1.0),
}


@pytest.mark.parametrize("row", WHOLE_FITS)
def test_whole_fits_gain_or_lose_hardly_anything(monkeypatch: pytest.MonkeyPatch, row: str) -> None:
    steps, given, (first, further), most = WHOLE_FITS[row]
    fit = Fit(monkeypatch, times=Times(first=first, further=further, **given)).run(steps)
    eager = len(steps) * given["eager"] / 1e3
    assert fit.seconds <= most * eager * 1.0001


COSTLY = Times(eager=40.0, replay=8.0, first=600.0, further=300.0, verification=200.0)


@pytest.mark.parametrize("seed", range(3))
def test_where_shapes_come_back_a_new_one_is_captured_at_once(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    steps = [i % 13 for i in range(400)]
    random.Random(seed).shuffle(steps)
    fit = Fit(monkeypatch, times=COSTLY).run(steps)
    assert len(fit.graphs) == 13
    assert fit.statistics.eager <= 4  # three of them before the first capture
    by_hand = Fit(monkeypatch, times=replace(COSTLY, verification=0.0), min_repeats=1).run(steps)
    assert fit.seconds < by_hand.seconds


def test_shapes_that_are_rare_get_no_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = random.Random(0)
    steps = [int(numbers.paretovariate(0.8)) for _ in range(400)]
    fit = Fit(monkeypatch, times=replace(COSTLY, first=400.0, further=170.0)).run(steps)
    assert len(set(steps)) == 52
    assert len(fit.graphs) <= 22
    assert fit.seconds < 0.55 * 400 * 0.04


def test_the_first_capture_is_repaid_by_those_that_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = shuffled([i % 60 for i in range(400)])
    fit = Fit(monkeypatch, times=Times(first=400.0, further=150.0, **LLAMA)).run(steps)
    # None of them is expected to come 19 times, as the first capture wants by itself.
    assert len(fit.graphs) > 50
    assert fit.statistics.eager < 40


@pytest.mark.parametrize(
    ("kinds", "seen", "expected"),
    [(60, 30, 1 / 60), (60, 200, 1 / 60), (13, 20, 1 / 13), (2, 40, 0.5)],
)
def test_equal_shares_are_estimated_well(kinds: int, seen: int, expected: float) -> None:
    estimates = []
    for seed in range(40):
        numbers, sightings = random.Random(seed), Sightings()
        for _ in range(seen):
            sightings.see(numbers.randrange(kinds))
        estimates += sightings.shares().values()
    assert sum(estimates) / len(estimates) == pytest.approx(expected, rel=0.25)
    assert max(estimates) < 3 * expected


def test_unequal_shares_are_those_of_the_counts() -> None:
    sightings = Sightings()
    sightings.add({"often": 80, "rare": 10, "twice": 2, "once": 1})
    shares = sightings.shares()
    assert shares["often"] == pytest.approx(0.85, abs=0.05)
    assert shares["rare"] == pytest.approx(0.11, abs=0.03)
    assert shares["often"] > shares["rare"] > shares["twice"] > shares["once"] > 0.0
    assert sum(shares.values()) < 1.0  # something new may come
    assert Sightings().shares() == {}


def test_what_never_came_back_has_no_share() -> None:
    sightings = Sightings()
    for shape in range(9):
        sightings.see(shape)
    assert set(sightings.shares().values()) == {0.0}


def test_what_goes_on_is_no_return() -> None:
    sightings = Sightings()
    for _ in range(3):
        sightings.see("x")
    assert sightings.rest("x") == float("inf")  # nothing else came
    sightings.see("y")
    sightings.add({"y": 4, "x": 0})
    assert sightings.rest("y") == 5.0
    assert (sightings.rest("x"), sightings.count("y")) == (0.0, 5.0)
    assert set(sightings.shares().values()) == {0.0}
    sightings.see("x")
    # One of three visits was a single one. Those of x are as many as of y, and shorter than usual
    assert sightings.shares()["x"] == pytest.approx(1 / 3 * 2 / 3)


def sizes_in_a_row(most: int, count: int) -> list[int]:
    """Each size comes for a while, and never again."""
    numbers, steps = random.Random(0), []
    while len(steps) < count:
        steps += [len(steps)] * numbers.randint(1, most)
    return steps[:count]


SIXTY = shuffled([i % 60 for i in range(400)])
NORMAL = [round(random.Random(i).gauss(100, 15)) for i in range(400)]
DISAPPOINTING = {
    "sizes in a row": (sizes_in_a_row(12, 2000), Times(10.0, 0.0, 1.5, 400.0, 480.0)),
    "quick captures": (sizes_in_a_row(12, 800), Times(40.0, 0.0, 6.0, 300.0, 60.0)),
    "a few in a row": (sizes_in_a_row(4, 400), Times(40.0, 0.0, 12.0, 500.0, 500.0)),
    "no cheaper": (texts(1), replace(COSTLY, eager=20.0, replay=3.0, first=600.0, further=700.0)),
    "slow replays": (texts(1), replace(COSTLY, replay=34.0, further=600.0)),
    "normal": (NORMAL, replace(COSTLY, eager=20.0, replay=6.0, further=600.0)),
    "60 lengths": (SIXTY, replace(COSTLY, replay=12.0, further=600.0)),
    "most are refused": (SIXTY, replace(COSTLY, refuses=0.8)),
    "all are refused": (texts(1), replace(COSTLY, further=200.0, refuses=1.0)),
}


@pytest.mark.parametrize("row", DISAPPOINTING)
def test_where_graphs_disappoint_hardly_more_than_the_first_is_lost(
    monkeypatch: pytest.MonkeyPatch, row: str
) -> None:
    steps, times = DISAPPOINTING[row]
    fit = Fit(monkeypatch, times=times).run(steps)
    first = (times.first + times.verification) / 1e3
    assert fit.seconds <= 1.02 * len(steps) * times.eager / 1e3 + first * bool(fit.graphs)


def test_a_read_on_the_host_asks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    few = Fit(monkeypatch, times=Times(refused=50.0)).run(["x"] * 120)
    assert few.graphs == []
    assert few.seconds == pytest.approx(120 * 0.04 + 0.05)  # the capture that showed it
    assert Fit(monkeypatch, times=Times(refused=50.0)).run(["x"] * 300).graphs == ["x"]


@pytest.mark.parametrize(
    ("left", "part", "goes_on"),
    [(350, 0.05, False), (5000, 0.05, True), (350, 0.9, True), (90, 0.9, False), (350, 0.0, False)],
)
def test_a_part_of_each_step_is_worth_less(
    monkeypatch: pytest.MonkeyPatch, left: int, part: float, goes_on: bool
) -> None:
    fit = Fit(monkeypatch, times=Times(eager=60.0))
    fit.run(["x"] * 3)
    fit.done = len(fit.steps) - left
    assert fit.cache.is_due("x") is True
    # 3.5 times 3 steps and 80 ms, 3 and 20 ms to compare, one and a half times, at that part of
    # 42 ms a step; 3.5 times 1.5 steps and 20 ms are 2 % of the fit at most.
    assert fit.policy.goes_on_with_part(part) is goes_on
    assert fit.cache.is_due("x") is goes_on
    if not goes_on:
        assert "steps are left" in fit.cache.why_not


def test_no_more_graphs_than_allowed_and_none_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    fit = Fit(monkeypatch, max_graphs=4).run(in_turn(13, 400))
    assert len(fit.graphs) == 4
    assert len(fit.cache) == 4


def test_steps_that_graphs_make_slower_make_no_graph_worth_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fit = Fit(monkeypatch).run(in_turn(4, 100))
    before = fit.policy.break_even
    fit.statistics.step_times.eager.extend([400.0] * 100)
    assert fit.policy.break_even == before


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


def test_further_verifications_take_a_fiftieth_of_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fit = Fit(monkeypatch)
    policy, verified = fit.policy, []
    for second in range(100):
        fit.now = float(second)
        if policy.affords_verification:
            verified.append(second)
            with policy.verifying():
                fit.now += 0.5
    assert verified[0] == 0
    assert 100 * 0.02 / 0.5 - 1 <= len(verified) <= 100 * 0.02 / 0.5 + 2


class Left(Callback):
    """Notes how many steps and evaluated batches a fit expects ahead of each of them."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.evaluated: list[int] = []

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        self.steps.append(steps_left(trainer))

    def on_validation_batch_start(self, trainer: Trainer, *_: Any) -> None:
        self.evaluated.append(evaluations_left(trainer))

    on_test_batch_start = on_predict_batch_start = on_validation_batch_start


class Several(Net):
    """Is evaluated on several loaders."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.loss(batch)

    test_step = predict_step = validation_step


@pytest.mark.filterwarnings("ignore:predict returned None")
@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.parametrize(
    ("options", "steps", "validations"),
    [
        ({}, 24, 4),
        ({"check_val_every_n_epoch": 2}, 24, 2),
        ({"check_val_every_n_epoch": None, "val_check_interval": 7}, 24, 3),
        ({"max_steps": 12}, 12, 2),
        ({"val_check_interval": 0.5}, 24, 8),
    ],
)
def test_what_is_left_is_counted_down(
    options: dict[str, Any], steps: int, validations: int
) -> None:
    left, module = Left(), Several()
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=4,
        num_sanity_val_steps=0,
        callbacks=[GraphCapture(backend="emulated"), left],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    loaders = [DataLoader(batches(count), batch_size=None) for count in (6, 3, 4)]
    trainer.fit(module, loaders[0], loaders[1:])
    assert left.steps == [*range(steps, 0, -1)]
    assert left.evaluated == [*range(7 * validations, 0, -1)]
    for evaluate in (trainer.validate, trainer.test, trainer.predict):
        left.evaluated.clear()
        evaluate(module, loaders[1:])
        assert left.evaluated == [*range(7, 0, -1)]
