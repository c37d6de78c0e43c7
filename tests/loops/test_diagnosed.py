"""``capture(..., diagnose=True)``: obstacles with their lines; calls are those of eager loops."""

from __future__ import annotations

import inspect
import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lightning_graphs import capture
from tests.loops.test_refused import OF_LIGHTNING, REFUSED, Counted
from tests.loops.test_training import adamw, loss_of
from tests.loops.twice import Lab, twice
from tests.training.fits import line


def many(model: Any, optimizer: Any, batch: Any) -> Any:
    optimizer.zero_grad()
    loss = loss_of(model, batch)
    if loss.tolist() > 100:  # item
        for _ in range(int(loss)):
            loss = loss + 1
    chosen = torch.masked_select(batch["x"], batch["x"] > loss).sum()  # masked_select
    weights = torch.tensor([1.0, 2.0, 3.0], device=loss.device)  # from numbers
    loss = loss * float(str(random.random())) + 1e-3 * (chosen + weights.sum())  # random
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)  # clipped
    optimizer.step()
    print(end="")  # which replays do again
    return loss.detach()


def plain(model: Any, optimizer: Any, batch: Any) -> Any:
    optimizer.zero_grad()
    loss = loss_of(model, batch)
    loss.backward()
    optimizer.step()
    return loss.item()


def loop_of(step: Callable[..., Any], **options: Any) -> Callable[[Lab], Any]:
    def loop(lab: Lab) -> Any:
        Counted.calls = 0
        random.seed(0)
        model = lab.net()
        optimizer = adamw(model)
        captured = lab.capture(step, model, optimizer, diagnose=True, **options)
        return [captured(model, optimizer, batch) for batch in lab.batches(8)]

    return loop


def test_every_obstacle_is_listed_with_its_line(
    backend: str, device: torch.device, capsys: pytest.CaptureFixture[str]
) -> None:
    report = twice(loop_of(many), backend, device).steps[0].report
    found = report.diagnosis
    assert capsys.readouterr().out == f"{found}\n"
    assert (report.eager, report.replayed, found.steps) == (8, 0, 3)
    rows = {(row.kind, row.line): row for row in found.findings}
    for kind, text in [
        ("host-read", "item"),
        ("data-dependent-shape", "masked_select"),
        ("host-data", "from numbers"),
        ("python-state", "random"),
    ]:
        row = rows.pop((kind, line(many, text)))
        assert (row.file, row.function) == (__file__, "many")
        assert row.count > 1
    assert {line for _, line in rows} <= {0, line(many, "item") + 1}
    said = str(found)
    assert said.startswith("capture(many), doctor: ")
    assert "(3 calls observed)" in said
    assert not [word for word in OF_LIGHTNING if word in said]


@pytest.mark.parametrize("step", [*REFUSED][::2], ids=lambda step: step.__name__)
def test_what_captures_refuse_is_listed(
    step: Callable[..., Any], backend: str, device: torch.device
) -> None:
    found = twice(loop_of(step), backend, device).steps[0].report.diagnosis
    source, first = inspect.getsourcelines(step)
    inside = range(first, first + len(source))
    assert [row for row in found.obstacles if row.line in inside], found


@pytest.mark.parametrize("options", [{}, {"backend": "auto"}], ids=["backend", "auto"])
def test_nothing_stands_in_the_way(
    options: dict[str, str], device: torch.device, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Lab("", device).net()
    optimizer = adamw(model)
    step = capture(plain, model, optimizer, diagnose=True, **options)
    for batch in Lab("", device).batches(3):
        step(model, optimizer, batch)
    assert capsys.readouterr().out == ""
    step.close()
    said = "capture(plain), doctor: nothing stands in the way (2 calls observed)\n"
    assert capsys.readouterr().out == said
    assert step.report.diagnosis.obstacles == []


@pytest.mark.parametrize("diagnose", [False, True])
def test_an_evaluation_is_examined(diagnose: bool, backend: str, device: torch.device) -> None:
    def loop(lab: Lab) -> Any:
        model = lab.net().eval()

        @torch.no_grad()
        def evaluate(batch: Any) -> Any:
            scores = model(batch["x"])
            return scores[: int(scores.sum().abs())].sum()  # the bound of a slice

        step = lab.capture(evaluate, model, diagnose=diagnose, on_failure="eager")
        return [step(batch) for batch in lab.batches(6)]

    if not diagnose:
        with pytest.warns(UserWarning, match="in evaluate: return scores"):
            assert twice(loop, backend, device).replayed == 0
        return
    found = twice(loop, backend, device).steps[0].report.diagnosis
    assert {row.kind for row in found.obstacles} == {"host-read"}


def test_shapes_that_never_come_back(backend: str, device: torch.device) -> None:
    sizes = itertools.cycle(range(8, 16))

    def loop(lab: Lab) -> Any:
        model = lab.net()
        optimizer = adamw(model)
        step = lab.capture(plain, model, optimizer, diagnose=True)
        batches = (next(lab.batches(1, next(sizes))) for _ in range(8))
        return [step(model, optimizer, batch) for batch in batches]

    found = twice(loop, backend, device).steps[0].report.diagnosis
    assert [row.kind for row in found.obstacles] == ["changing-shape"]


def test_an_optimizer_that_no_graph_steps(backend: str, device: torch.device) -> None:
    def loop(lab: Lab) -> Any:
        model = nn.Linear(8, 3).to(lab.device)
        optimizer = torch.optim.Adagrad(model.parameters())
        optimizer.register_step_post_hook(lambda *_: None)
        step = lab.capture(plain, model, optimizer, diagnose=True)
        return [step(model, optimizer, batch) for batch in lab.batches(6)]

    found = twice(loop, backend, device).steps[0].report.diagnosis
    [row] = found.obstacles
    assert (row.kind, row.operator, row.effect) == ("optimizer", "Adagrad", "eager optimizer step")
