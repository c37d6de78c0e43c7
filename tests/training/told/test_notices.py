"""What is said of shapes that take turns, and of attributes that keep changing."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn

from lightning_graphs.errors import CaptureError
from lightning_graphs.report.messages import Messages, Statistics
from tests.programs.table import of_sizes as lengths
from tests.programs.test_forks import Refused
from tests.training.fits import Net, adamw, batches, compare, examined, fit_twice, prepare, rows

INFO = logging.getLogger("lightning.pytorch.utilities.rank_zero")
Lines = Callable[[str], list[str]]


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Lines:
    """The lines of the log that contain a text."""
    caplog.set_level(logging.INFO, logger=INFO.name)
    return lambda part: [r.getMessage() for r in caplog.records if part in r.getMessage()]


def taking_turns(*sizes: int, max_graphs: int, **options: Any) -> dict[str, Any]:
    capture = {"max_graphs": max_graphs, "min_repeats": 0, "warmup_steps": 1}
    return {"data": lengths(*sizes), "capture": {**capture, **options}}


@pytest.mark.filterwarnings("ignore:GraphCapture. steps run eagerly. max_graphs")
def test_shapes_that_take_turns_in_too_few_graphs(
    backend: str, tmp_path: Path, lines: Lines
) -> None:
    options = taking_turns(4, 8, 12, 16, 20, max_graphs=2)
    eager, captured = fit_twice(backend, tmp_path, max_epochs=8, **options)
    compare(eager, captured, replayed=False)
    statistics = captured.statistics
    assert statistics.captures == 2
    assert statistics.replayed >= 2 * 7
    assert len(lines("captured another graph")) == 1
    (reason,) = statistics.fallbacks
    assert reason.startswith("steps run eagerly: max_graphs=2 allows no more graphs; raise it")


def test_enough_graphs_for_all_shapes(backend: str, tmp_path: Path, lines: Lines) -> None:
    options = taking_turns(*range(4, 16), max_graphs=12)
    eager, captured = fit_twice(backend, tmp_path, max_epochs=16, **options)
    compare(eager, captured)
    assert captured.statistics.captures == 12
    assert len(captured.statistics.recaptures) == 11
    said = lines("captured another graph")
    assert len(said) == 8
    assert said[-1].endswith("further ones are listed in the report")


KEPT: list[torch.Tensor] = []


def move(weight: torch.Tensor) -> None:
    """Give a parameter other memory, which another object uses, too."""
    KEPT[:] = [weight.data.clone()]
    weight.data = KEPT[0]


class Thawing(Net):
    """A parameter moves before every epoch, so that all graphs are dropped."""

    def on_train_epoch_start(self) -> None:
        move(self.net[0].weight)


@pytest.mark.parametrize(("steps", "captures"), [(2, 9), (30, 12)])
def test_graphs_that_are_dropped_must_have_been_repaid(
    backend: str, tmp_path: Path, steps: int, captures: int
) -> None:
    options = taking_turns(*[4] * steps, max_graphs=2, on_failure="eager")
    eager, captured = fit_twice(
        backend, tmp_path, module=Thawing, max_epochs=12, validation=0, **options
    )
    compare(eager, captured, replayed=captures == 12)
    assert captured.statistics.captures == captures


class Stepwise(Net):
    """Reads an attribute that moves on after every so many batches."""

    every, of_text = 1, False

    def on_train_batch_start(self, *_: Any) -> None:
        self.share: Any = 0.5 + 2.0 ** -(
            1 + self.trainer.fit_loop.epoch_loop.total_batch_idx // type(self).every
        )
        if self.of_text:
            self.share = str(self.share)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) * (len(self.share) if self.of_text else self.share)


def moving(every: int, *, of_text: bool = False) -> type[Stepwise]:
    return type("Stepwise", (Stepwise,), {"every": every, "of_text": of_text})


KEEPS_CHANGING = r"a step runs eagerly: .*which keeps changing: self\.share: '0\.\d+' -> '0\.\d+"


@pytest.mark.parametrize("every", [1, 4])
def test_a_number_that_keeps_changing_is_read_by_each_replay(
    backend: str, tmp_path: Path, every: int
) -> None:
    eager, captured = fit_twice(
        backend, tmp_path, module=moving(every), data=lambda: lengths(*[8] * 50)(), max_epochs=1,
        capture={"warmup_steps": 1},
    )  # fmt: skip
    compare(eager, captured)
    assert captured.statistics.replayed > 30
    assert captured.statistics.captures < 6


@pytest.mark.parametrize("every", [1, 4])
def test_an_attribute_that_keeps_changing_is_named_once(
    backend: str, tmp_path: Path, lines: Lines, every: int
) -> None:
    options: dict[str, Any] = {
        "module": moving(every, of_text=True),
        "data": lambda: lengths(*[8] * (50 if every == 1 else 120))(),
        "capture": {"warmup_steps": 1, "on_failure": "eager"},
    }
    with pytest.warns(UserWarning, match=KEEPS_CHANGING):
        eager, captured = fit_twice(backend, tmp_path, max_epochs=1, **options)
    compare(eager, captured, replayed=False)
    (reason,) = captured.statistics.fallbacks
    assert "keep the value in a buffer that a hook fills" in reason
    assert len(lines("captured another graph")) <= 8
    assert captured.statistics.captures == (1 if every == 1 else 10)


@pytest.mark.filterwarnings("ignore:GraphCapture")
def test_a_fit_that_ends_soon_after_its_first_graph_says_why(backend: str, tmp_path: Path) -> None:
    fit = prepare(
        backend, tmp_path, True, module=moving(1, of_text=True),
        data=lambda: lengths(*[8] * 20)(), max_epochs=1, validation=0, capture={"warmup_steps": 1},
    ).run()  # fmt: skip
    report = fit.capture.report
    assert (report.replayed, report.eager) == (1, 19)
    (reason,) = report.fallbacks
    assert re.search(r"The last two steps differ: self\.share: '0\.5\d*' -> '0\.5", reason)


def test_an_attribute_that_moves_after_many_replays(backend: str, tmp_path: Path) -> None:
    capture = {"max_graphs": 1, "warmup_steps": 1, "min_repeats": 0}
    eager, captured = fit_twice(
        backend, tmp_path, module=moving(21), data=lambda: lengths(*[4] * 100)(), max_epochs=1,
        capture=capture,
    )  # fmt: skip
    compare(eager, captured)
    assert captured.statistics.captures == 5


SAYS = pytest.mark.filterwarnings("ignore:GraphCapture")


@SAYS
@pytest.mark.parametrize("scope", ["auto", "step", "modules"])
@pytest.mark.parametrize("steps", [1, 3, 4, 5])
def test_a_fit_that_ends_before_its_first_graph_says_why(
    backend: str, tmp_path: Path, scope: str, steps: int
) -> None:
    fit = prepare(
        backend, tmp_path, True, capture={"scope": scope}, max_steps=steps, validation=0
    ).run()
    report = fit.capture.report
    assert (report.replayed, report.eager) == (0, steps)
    (reason,) = report.fallbacks
    assert reason.startswith("steps run eagerly: ")
    assert f"the fit ended after {steps} " in reason
    assert "warmup_steps=3" in reason
    assert reason.endswith("; longer fits have graphs")


@SAYS
def test_a_fit_that_ends_before_a_replay_says_why(backend: str, tmp_path: Path) -> None:
    data = [{**batch, "x": batch["x"].abs()} for batch in batches(12)]  # no row is left out
    steps = {"module": Refused, "data": lambda: data, "max_steps": 12, "validation": 0}
    (reason,) = prepare(backend, tmp_path, True, **steps).run().capture.report.fallbacks
    assert "no step came back to a capture in the 12 steps of the fit" in reason


@SAYS
def test_a_fast_dev_run_says_why(backend: str, tmp_path: Path) -> None:
    fit = prepare(backend, tmp_path, True, fast_dev_run=True, logger=False, validation=0).run()
    (reason,) = fit.capture.report.fallbacks
    assert "the fit ended after 1 step," in reason


class Moments(Callback):
    """After which step something was said."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        [graphs] = [one for one in trainer.callbacks if hasattr(one, "report")]
        if graphs.report.fallbacks and not self.steps:
            self.steps.append(trainer.global_step)


def never_back(kind: str) -> list[dict[str, Any]]:
    if kind == "lengths":
        return lengths(*range(4, 44))()
    return [{**batch, "boxes": [torch.ones(4)] * i} for i, batch in enumerate(batches(40))]


@pytest.mark.parametrize("scope", ["step", "modules"])
@pytest.mark.parametrize(("kind", "remedy"), [("lengths", "pad "), ("boxes", "tensors of")])
def test_batches_of_which_none_comes_back_are_said_after_eight(
    backend: str, tmp_path: Path, scope: str, kind: str, remedy: str
) -> None:
    moments = Moments()
    fit = prepare(
        backend, tmp_path, True, data=lambda: never_back(kind), capture={"scope": scope},
        callbacks=lambda: [moments], validation=0, max_epochs=1,
    )  # fmt: skip
    with pytest.warns(UserWarning, match=rf"The last two steps differ: .*\n  Fix: .*{remedy}"):
        fit.run()
    assert moments.steps == [3 + 8]
    (reason,) = fit.capture.report.fallbacks
    assert len(reason) < 400


class Reading(nn.Linear):
    """Reads a value on the host."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x * 2 if x.sum().tolist() > 100 else x


class ManyReads(Net):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), Reading(8, 8)) for _ in range(6)))


def test_the_same_refusal_of_many_modules_is_said_once(
    backend: str, tmp_path: Path, recwarn: pytest.WarningsRecorder, lines: Lines
) -> None:
    capture = {"scope": "auto", "on_failure": "eager"}
    fits = fit_twice(backend, tmp_path, module=ManyReads, capture=capture, validation=0)
    compare(*fits, replayed=False)
    said = [str(w.message) for w in recwarn if "GraphCapture" in str(w.message)]
    assert len(said) == 1
    whole, modules = fits[1].capture.report.fallbacks
    assert whole.startswith("cannot capture the whole step; capturing submodules instead: ")
    names, _, observed = modules.partition(" run eagerly for the same reason: ")
    assert names == "`net`, `net.0`, `net.0.1` and 10 more"
    assert "test_notices.py" in observed
    assert whole.splitlines()[0].endswith(f": {observed}")
    (graphs,) = lines("graphs for")
    assert graphs.endswith("graphs for net.*.0 (6)")


class ReadsInBranches(Net):
    """The first refusal may be one of a branch alone."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        if batch_idx % 2 == 0:
            loss = loss * 1.5
        return loss * 2 if loss.tolist() > 100 else loss


def test_a_refusal_of_a_branch_and_of_the_whole_step_is_one_sentence(
    backend: str, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    capture = {"scope": "auto", "on_failure": "eager"}
    options: dict[str, Any] = {"module": ReadsInBranches, "capture": capture, "validation": 0}
    compare(*(fits := fit_twice(backend, tmp_path, **options)), replayed=False)
    (reason,) = fits[1].capture.report.fallbacks
    assert reason.startswith("cannot capture the whole step; capturing submodules instead: ")
    first, second = (str(w.message) for w in recwarn if "GraphCapture" in str(w.message))
    # On a GPU it is CUDA that refuses the read.
    rule = "contain an operation that CUDA refuses" if backend == "cuda" else "read a value"
    assert first.startswith(f"GraphCapture: a step runs eagerly: A capture cannot {rule}")
    assert first.splitlines()[2].strip() == 'self.log("loss", loss)  # the tensor, without item()'
    assert "instead for the same reason: " in second
    assert "\n" not in second


class Unstructured(LightningModule):
    """Computes with a parameter, and calls no submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 3))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(batch["x"] @ self.weight, batch["y"])

    configure_optimizers = adamw


class Uncalled(Unstructured):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 3, bias=False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = batch["x"] @ self.weight + batch["x"] @ self.layer.weight.T
        return nn.functional.cross_entropy(logits, batch["y"])


@SAYS
@pytest.mark.parametrize("module", [Unstructured, Uncalled])
def test_a_step_that_calls_no_submodule_is_told_of_the_other_scope(
    backend: str, tmp_path: Path, module: Any
) -> None:
    options: dict[str, Any] = {"module": module, "validation": 0}
    capture = {"scope": "modules", "on_failure": "eager"}
    fits = fit_twice(backend, tmp_path, capture=capture, **options)
    compare(*fits, replayed=False)
    (reason,) = fits[1].capture.report.fallbacks
    assert reason.startswith("steps run eagerly: they call no submodule that has parameters")
    assert reason.endswith('. scope="step" tries the whole step')
    compare(fits[0], prepare(backend, tmp_path / "whole", True, **options).run())
    (row,) = rows(
        examined(backend, tmp_path / "doctor", capture={"scope": "modules"}, **options),
        "configuration",
    )
    assert row.effect == "eager step"
    assert row.code == 'GraphCapture(scope="step")'


class Branching(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        return loss * 2 if loss.tolist() > 0.5 else loss


@pytest.mark.parametrize("scope", ["auto", "step", "modules"])
@pytest.mark.parametrize("module", [Branching, ManyReads, moving(1)])
def test_a_warning_has_two_lines_and_code(
    backend: str, tmp_path: Path, recwarn: pytest.WarningsRecorder, lines: Lines,
    module: Any, scope: str,
) -> None:  # fmt: skip
    capture = {"scope": scope, "on_failure": "eager"}
    data = {"data": lambda: batches(50), "max_epochs": 1, "validation": 0}
    fit = prepare(backend, tmp_path, True, module=module, capture=capture, **data).run()
    said = [str(w.message) for w in recwarn if "GraphCapture" in str(w.message)]
    for text in said:  # what was found, the fix, and that as code
        assert all(line.startswith("    ") for line in text.splitlines()[2:])
    reasons = fit.capture.report.fallbacks
    refused = [text for text in said if "\n" in text]
    assert refused or (scope, module) == ("modules", Branching) or module.__name__ == "Stepwise"
    for text in refused:
        what, remedy, *_ = text.splitlines()
        assert "test_notices.py:" in what or "self.share" in what
        assert remedy.startswith("  Fix: ")
    assert sum("\n  Fix: " in reason for reason in reasons) >= len(refused)
    assert not lines("become graphs, since")


class Replaced(Net):
    """Exchanges the memory of a parameter after every step."""

    def on_train_batch_end(self, *_: Any) -> None:
        move(self.net[0].weight)


@SAYS
@pytest.mark.parametrize("scope", ["step", "modules"])
def test_the_same_reason_to_capture_again_is_said_once(
    backend: str, tmp_path: Path, lines: Lines, scope: str
) -> None:
    capture = {"scope": scope, "on_failure": "eager", "min_repeats": 0}
    fits = fit_twice(
        backend, tmp_path, module=Replaced, data=lambda: batches(60), max_epochs=1, capture=capture
    )
    compare(*fits, replayed=False)
    said, reasons = lines("recapturing"), fits[1].capture.report.recaptures
    assert len(said) == len(set(reasons)) < len(reasons)
    (table,) = lines("steps replayed")
    shown = table.partition("Recaptures:\n")[2].splitlines()
    assert shown == [f"  {text} ({reasons.count(text)} times)" for text in dict.fromkeys(reasons)]


def test_a_report_has_all_that_a_warning_leaves_out() -> None:
    statistics = Statistics()
    messages = Messages(statistics)
    error = CaptureError("A rule.", f"{'x' * 400}\nsecond", "write it")
    with pytest.warns(UserWarning, match=r"eagerly: A rule: x{300} \.\.\.\n  Fix: write it$"):
        messages.note("a step runs eagerly", error)
    reason = f"a step runs eagerly: A rule: {'x' * 400}\nsecond\n  Fix: write it"
    assert statistics.fallbacks == [reason]
