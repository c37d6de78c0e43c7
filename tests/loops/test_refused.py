"""What no captured function may do is refused with the user's line, in the words of plain torch."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import itertools
import pickle
import re
import runpy
import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import lightning_graphs
from lightning_graphs import GraphError, capture
from lightning_graphs.regions.whole_step import StepRegion
from tests.loops.test_training import adamw, loss_of, training
from tests.loops.twice import Eager, Lab, assert_same, twice
from tests.processes import ROOT

OF_LIGHTNING = ("Trainer", "self.log", "training_step", "on_train", "GraphCapture")


def reading(model: Any, optimizer: Any, batch: Any) -> Any:
    optimizer.zero_grad()
    loss = loss_of(model, batch)
    loss.backward()
    optimizer.step()
    for _ in range(int(loss.item())):
        loss = loss / 2
    return loss.detach()


def reading_in_backward(model: Any, optimizer: Any, batch: Any) -> Any:
    optimizer.zero_grad()
    loss = loss_of(model, batch) + (1 + model(batch["x"])[:2] / 64).prod()
    loss.backward()
    optimizer.step()
    return loss.detach()


def printing(model: Any, optimizer: Any, batch: Any) -> Any:
    optimizer.zero_grad()
    loss = loss_of(model, batch)
    loss.backward()
    optimizer.step()
    sys.stdout.write("")
    return loss.detach()


def stepping_another(model: Any, optimizer: Any, batch: Any) -> Any:
    optimizer.zero_grad()
    loss = loss_of(model, batch)
    loss.backward()
    torch.optim.SGD([model[0].weight], lr=0.1).step()
    return loss.detach()


SCALES = itertools.cycle([1.0, 0.5])


def taking(model: Any, optimizer: Any, batch: Any) -> Any:
    optimizer.zero_grad()
    loss = next(SCALES) * loss_of(model, batch)
    loss.backward()
    optimizer.step()
    return loss.detach()


class Counted:
    """A class whose attribute functions count up."""

    calls = 0


def counting(model: Any, optimizer: Any, batch: Any) -> Any:
    Counted.calls += 1
    optimizer.zero_grad()
    loss = loss_of(model, batch) / Counted.calls
    loss.backward()
    optimizer.step()
    return loss.detach()


def leaving_backward(model: Any, optimizer: Any, batch: Any) -> Any:
    return loss_of(model, batch)


def averaging(model: Any, optimizer: Any, batch: Any) -> Any:
    """NumPy asks for the number, in a function of Python's."""
    optimizer.zero_grad()
    loss = loss_of(model, batch)
    loss = loss / np.mean([loss.item(), 2.0])
    loss.backward()
    optimizer.step()
    return loss.detach()


REFUSED = {
    averaging: r"in averaging: loss = loss / np.mean",
    counting: r"counting changes Counted.calls, named at .* in counting: Counted.calls \+= 1\n",
    taking: r"SCALES, an iterator, is read at .* in taking.*\n.*take batches from iterators in the",
    leaving_backward: r"gradients, returned at .* return loss_of\(model, batch\)\n.*optimizer=\[\]",
    reading: r"in reading: for _ in range\(int\(loss.item\(\)\)\):.*\n.*return the tensor",
    reading_in_backward: r"backward pass of Prod at .*\.prod\(\)\n.*in place of prod",
    printing: r"sys.stdout.write is used at .* in printing: sys.stdout.write.*\n.*after the call",
    stepping_another: r"a step of SGD is taken at .* in stepping_another.*\n.*capture\(\) every",
}


@pytest.mark.parametrize("step", REFUSED, ids=lambda step: step.__name__)
def test_a_refused_function_runs_eagerly(
    step: Callable[..., Any], backend: str, device: torch.device
) -> None:
    def loop(lab: Lab) -> Any:
        Counted.calls = 0
        model = lab.net()
        optimizer = adamw(model)
        captured = lab.capture(step, model, optimizer, on_failure="eager")
        return [captured(model, optimizer, batch) for batch in lab.batches(8)]

    with pytest.warns(
        UserWarning, match=rf"capture\({step.__name__}\): (?s:.*){REFUSED[step]}"
    ) as w:
        lab = twice(loop, backend, device)
    assert lab.replayed == 0
    said = "\n".join(str(warning.message) for warning in w)
    assert not [word for word in OF_LIGHTNING if word in said]


@pytest.mark.parametrize("bind", [functools.partial, lambda function, taken: function])
def test_an_iterator_is_not_an_argument(
    bind: Callable[..., Any], backend: str, device: torch.device
) -> None:
    lab = Lab(backend, device, {})
    model = lab.net()
    optimizer = adamw(model)
    batches = lab.batches(12)

    def train_step(taken: Any, weight: float) -> Any:
        optimizer.zero_grad()
        (weight * loss_of(model, next(taken))).backward()
        optimizer.step()

    bound = bind(train_step, batches)
    step = lab.capture(bound, model, optimizer, on_failure="eager")
    given = [[batches] * 12] if bound is train_step else []
    with pytest.warns(UserWarning, match="takes an iterator"):
        list(map(step, *given, [1.0] * 12))
    assert step.report.eager == 12


def test_an_evaluation_leaves_gradients_alone(backend: str, device: torch.device) -> None:
    lab = Lab(backend, device, {})
    model = lab.net()

    def score(batch: Any) -> Any:
        loss = loss_of(model, batch)
        loss.backward()
        return loss.detach()

    step = lab.capture(score, model)
    batches = list(lab.batches(8))
    with pytest.raises(GraphError, match=r"optimizer=\[\]"):
        list(map(step, batches))


def test_a_model_on_another_kind_of_device_is_named() -> None:
    """As on XPU and MPS."""
    model = torch.nn.Linear(2, 2, device="meta")
    step = capture(model.forward, model)
    said = (
        "capture.forward.: calls run eagerly: it captures on NVIDIA GPUs, and the model is on meta"
    )
    with pytest.warns(UserWarning, match=said):
        assert step(torch.ones(1, 2, device="meta")).shape == (1, 2)
    with pytest.raises(GraphError, match="it captures on NVIDIA GPUs"):
        capture(model.forward, model, on_failure="raise")(torch.ones(1, 2, device="meta"))


def test_a_captured_function_is_neither_pickled_nor_copied(device: torch.device) -> None:
    model = torch.nn.Linear(2, 2)
    step = capture(torch.relu, model)
    for copying in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(GraphError, match="call capture"):
            copying(step)


def test_a_backend_of_another_device_is_named() -> None:
    model = torch.nn.Linear(2, 2)
    with pytest.raises(GraphError, match="got 'cuda' with a model on cpu"):
        capture(model.forward, model, backend="cuda")(torch.ones(1, 2))


def test_a_captured_function_is_captured_anew_and_says_what_it_did(
    backend: str, device: torch.device
) -> None:
    lab = Lab(backend, device, {})
    model = lab.net(0.0).eval().requires_grad_(False)

    def predict(batch: Any) -> Any:
        return model(batch["x"])

    first = lab.capture(predict, model)
    second = lab.capture(first, model)
    for batch in lab.batches(12):
        assert torch.equal(second(batch), predict(batch))
    done = second.report
    assert done.replayed > 5
    assert repr(second) == f"<captured predict: {done.replayed} calls replayed, {done.eager} eager>"
    assert repr(first) == "<captured predict: 0 calls replayed, 0 eager>"


def test_a_closed_function_hands_its_optimizer_back(backend: str, device: torch.device) -> None:
    lab = Lab(backend, device, {})
    model = lab.net()
    optimizer = adamw(model)

    def train_step(batch: Any) -> Any:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()

    step = lab.capture(train_step, model, optimizer)
    for batch in lab.batches(8):
        step(batch)
    assert lab.replayed
    assert "step" in vars(optimizer)
    step.close()
    assert "step" not in vars(optimizer)
    gone = weakref.ref(batch["x"])
    del batch
    gc.collect()
    assert gone() is None
    step(next(lab.batches(1)))
    assert step.report.eager == 6


def test_an_object_that_keeps_its_captured_method_is_released(
    backend: str, device: torch.device
) -> None:
    class Learner:
        def __init__(self, lab: Lab) -> None:
            self.model = lab.net()
            self.optimizer = adamw(self.model)
            self.step = lab.capture(self.train, self.model, self.optimizer)

        def train(self, batch: Any) -> None:
            self.optimizer.zero_grad()
            loss_of(self.model, batch).backward()
            self.optimizer.step()

    lab = Lab(backend, device, {})
    learner, optimizer = Learner(lab), lab.given[-1]
    for batch in lab.batches(8):
        learner.step(batch)
    assert "step" in vars(optimizer)
    lab.steps.clear()
    gone = weakref.ref(learner)
    del learner
    gc.collect()
    assert "step" not in vars(optimizer)
    gc.collect()  # what was handed back refers to it once more
    assert gone() is None


def test_options_are_those_of_the_callback() -> None:
    of_callback = inspect.signature(lightning_graphs.GraphCapture).parameters
    options = [*inspect.signature(capture).parameters.values()][3:]
    assert len(options) >= 12
    for option in options:
        known = of_callback[option.name]
        assert known.annotation == option.annotation
        # Tests of fits keep graphs that gain nothing
        assert known.default == option.default or option.name == "only_if_faster"


@pytest.mark.parametrize(
    "given", [(1, torch.nn.Linear(2, 2)), (print, "model"), (print, [torch.nn.Linear(2, 2)], [1])]
)
def test_wrong_arguments_are_told(given: tuple[Any, ...]) -> None:
    with pytest.raises(GraphError, match=r"got .*\n.*write capture"):
        capture(*given)


def test_the_example_learns(capsys: pytest.CaptureFixture[str]) -> None:
    assert runpy.run_path(str(ROOT / "examples/plain_loop.py"))["main"](epochs=4) > 0.8
    said = capsys.readouterr().out
    assert "replayed" in said
    assert "train/eval mode of 5 modules" in said  # and not of each module once more
    assert ".training" not in said


@pytest.mark.parametrize(
    ("name", "library", "most", "page"),
    [
        ("accelerate_loop", "accelerate", 20, "accelerate"),
        ("hf_trainer", "transformers", 20, "hf-trainer"),
        ("fabric_loop", "lightning", 30, ""),
    ],
)
@pytest.mark.filterwarnings("ignore")  # what the libraries advise
def test_examples_for_libraries_compute_what_eager_loops_do(
    name: str, library: str, most: int, page: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip(library)
    path = ROOT / f"examples/{name}.py"
    text = path.read_text(encoding="utf-8").partition('"""\n\n')[2]
    assert len([line for line in text.splitlines() if line.strip()]) <= most
    assert not page or text in (ROOT / f"docs/{page}.md").read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    found = []
    for captured in (False, True):
        with monkeypatch.context() as patched:
            if not captured:
                patched.setattr(
                    lightning_graphs, "capture", lambda function, *_, **__: Eager(function)
                )
            torch.manual_seed(0)
            names = runpy.run_path(str(path))
        trainer = names.get("trainer")
        logged = [row.get("loss") for row in trainer.state.log_history] if trainer else []
        found.append(([*logged, *names.get("losses", ())], names["model"].state_dict()))
    assert_same(*found)
    assert len(found[0][0]) >= 40
    report = (names["step"] if trainer is None else trainer.step).report
    assert report.replayed >= 25, report
    assert name != "fabric_loop" or report.recaptures[0].startswith("last: False -> True")


def test_threads_capture_one_function_each(backend: str, device: torch.device) -> None:
    """What one of them captures is no matter of the others, which step their own optimizers."""
    labs = [Lab(backend, device, options) for options in (None, {}, {})]
    models = [torch.nn.Linear(8, 3).to(device) for _ in labs]
    for model in models[1:]:
        model.load_state_dict(models[0].state_dict())
    begin = threading.Barrier(2)

    def run(lab: Lab, model: Any) -> list[float]:
        optimizer = adamw(model)
        train_step = training(model, optimizer, torch.Tensor.item)
        step, losses = lab.capture(train_step, model, optimizer, on_failure="eager"), []
        for batch in lab.batches(20):
            if lab.options is not None:
                begin.wait()
            losses.append(step(batch))
        return losses

    expected = run(labs[0], models[0])
    with ThreadPoolExecutor(2) as threads, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a hook of a capture may be seen by the other thread
        found = [*threads.map(run, labs[1:], models[1:])]
    assert found == [expected, expected]
    for model in models[1:]:
        assert torch.equal(model.weight, models[0].weight)
    assert all(lab.replayed for lab in labs[1:])


@pytest.mark.filterwarnings("ignore:capture")
def test_captures_that_always_fail_are_told(
    backend: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where each one finds something that lets the next one succeed."""
    monkeypatch.setattr(StepRegion, "may_succeed", lambda *_: True)
    monkeypatch.setattr("lightning_graphs.regions.lifecycle._FAILURES", 3)
    lab = Lab(backend, device, {"on_failure": "eager"})
    model = torch.nn.Linear(8, 3).to(device)
    optimizer = adamw(model)

    def train_step(batch: Any) -> Any:
        return reading(model, optimizer, batch)

    step = lab.capture(train_step, model, optimizer)
    for batch in lab.batches(12):
        step(batch)
    assert step.report.replayed == 0
    assert len(step.report.fallbacks) == 1
    assert re.search(r"test_refused.py:\d+ in reading", step.report.fallbacks[0])
