"""Where the callback begins and ends, and what it leaves alone."""

from __future__ import annotations

import copy
import pickle
import warnings
import weakref
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import optim

from lightning_graphs import GraphCapture
from lightning_graphs.watch.assertions import Room
from tests.training.fits import (
    Net,
    assert_nothing_left,
    batches,
    close,
    compare,
    fit_twice,
    loader_of,
    prepare,
    warned,
)


def test_nothing_is_left_behind(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is memory for assertions of a next graph, before the trainer itself is collected."""
    own, rooms = Room.on, []

    def on(device: torch.device) -> Room:
        room = own(device)
        rooms.append(weakref.ref(room.holds))
        return room

    monkeypatch.setattr(Room, "on", on)
    _, captured = fit_twice(backend, tmp_path)
    assert_nothing_left(captured)
    assert [room() for room in rooms] == [None, None]  # of training and of validation


def test_what_a_user_has_exchanged_in_the_strategy_stays(backend: str, tmp_path: Path) -> None:
    fits = []
    for graphs in (False, True):
        one = prepare(backend, tmp_path, graphs)
        strategy, seen = one.trainer.strategy, []
        own = strategy.training_step

        def counting(*args: Any, own: Any = own, seen: list[int] = seen) -> Any:
            seen.append(len(seen))
            return own(*args)

        vars(strategy)["training_step"] = counting
        fits.append(one.run())
        assert vars(strategy)["training_step"] is counting
        assert "backward" not in vars(strategy)
        assert seen
    compare(*fits)


def test_fit_twice_with_one_trainer(backend: str, tmp_path: Path) -> None:
    eager, captured = fit_twice(backend, tmp_path)
    for one in (eager, captured):
        one.trainer.fit_loop.max_epochs = 4
        one.run()
    compare(eager, captured)
    assert captured.trainer.global_step == 40
    assert_nothing_left(captured)


def test_fit_one_module_with_two_trainers(backend: str, tmp_path: Path) -> None:
    eager, captured = fit_twice(backend, tmp_path)
    again = []
    for one, kind in ((eager, False), (captured, True)):
        other = prepare(backend, tmp_path / "again", kind)
        other.module = one.module
        again.append(other.run())
    compare(*again)


def test_one_callback_in_two_trainers(backend: str, tmp_path: Path) -> None:
    first = prepare(backend, tmp_path / "first", True).run()
    second = prepare(backend, tmp_path / "second", True)
    second.trainer.callbacks[-1] = second.capture = first.capture
    compare(prepare(backend, tmp_path, False).run(), second.run())


def test_should_stop(backend: str, tmp_path: Path) -> None:
    class Stopping(Net):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.trainer.should_stop = self.trainer.global_step == 14

    eager, captured = fit_twice(backend, tmp_path, module=Stopping, max_epochs=5, min_epochs=1)
    compare(eager, captured)
    assert captured.trainer.global_step == 14


def test_max_time(backend: str, tmp_path: Path) -> None:
    compare(*fit_twice(backend, tmp_path, max_time=timedelta(hours=1)))


def test_max_time_that_is_over(backend: str, tmp_path: Path) -> None:
    captured = prepare(
        backend, tmp_path, True, max_time=timedelta(microseconds=1), max_epochs=-1,
        capture={"on_failure": "eager"},
    ).run()  # fmt: skip
    assert captured.trainer.global_step <= 10
    assert_nothing_left(captured)


@pytest.mark.parametrize("options", [{"fast_dev_run": 7}, {"overfit_batches": 5}])
def test_short_runs(backend: str, tmp_path: Path, options: dict[str, Any]) -> None:
    compare(*fit_twice(backend, tmp_path, **options))


@pytest.mark.filterwarnings("ignore:.* does not have many workers")
def test_validate_test_and_predict_are_untouched(backend: str, tmp_path: Path) -> None:
    class Complete(Net):
        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log("test", self.loss(batch))

        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return self.net(batch["x"])

    results = []
    for one in fit_twice(backend, tmp_path, module=Complete):
        loader = loader_of(batches(3))
        results.append(
            (
                one.trainer.validate(one.module, loader, verbose=False),
                one.trainer.test(one.module, loader, verbose=False),
                [p.tolist() for p in one.trainer.predict(one.module, loader)],
            )
        )
    assert results[0] == results[1]
    # Before any fit, too.
    fresh = prepare(backend, tmp_path / "fresh", True, module=Complete)
    assert fresh.trainer.validate(fresh.module, loader_of(batches(3)), verbose=False)
    assert fresh.statistics.replayed == 0


def test_trained_module_is_used_eagerly_afterwards(backend: str, tmp_path: Path) -> None:
    for one in fit_twice(backend, tmp_path):
        one.module.cpu().train()
        optimizer = optim.SGD(one.module.parameters(), lr=0.5)
        one.module.loss(batches(1)[0]).backward()
        optimizer.step()
        copy.deepcopy(one.module)


def test_inactive_on_a_cpu_without_the_emulated_backend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    monkeypatch.setattr("lightning_graphs.lightning.callback.rank_zero_info", lines.append)
    eager = prepare("emulated", tmp_path, False).run()
    captured = prepare("emulated", tmp_path, True, capture={"backend": "auto"}).run()
    assert len(lines) == 1
    assert 'GraphCapture(backend="emulated")' in lines[0]
    compare(eager, captured, replayed=False)
    assert (captured.statistics.replayed, captured.statistics.eager) == (0, 20)
    assert [f"GraphCapture is {why}." for why in captured.statistics.fallbacks] == lines


class Manual(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step(lambda: self.loss(batch))

    def configure_optimizers(self) -> Any:
        return optim.LBFGS(self.parameters(), max_iter=2)


class Lbfgs(Net):
    configure_optimizers = Manual.configure_optimizers


@pytest.mark.parametrize(
    ("module", "options", "reason"),
    [
        (
            Manual,
            {},
            "optimizes manually, and its optimizer cannot be captured: LBFGS calls",
        ),
        (Lbfgs, {}, "LBFGS calls the training step several times"),
        (Net, {"detect_anomaly": True}, "detect_anomaly"),
    ],
)
def test_inactive_with_a_reason(
    backend: str, tmp_path: Path, module: Any, options: dict[str, Any], reason: str
) -> None:
    said = f"GraphCapture is inactive: .*{reason}"
    _, captured = warned(backend, tmp_path, said, module=module, **options)
    assert captured.statistics.replayed == 0
    assert reason in captured.statistics.fallbacks[0]


def test_the_callback_can_be_pickled_and_copied(backend: str, tmp_path: Path) -> None:
    made = GraphCapture(warmup_steps=5, backend="emulated")
    for other in (pickle.loads(pickle.dumps(made)), copy.deepcopy(made)):
        assert other.options == made.options


# torch's compiler imports a module of torch that still uses torch.jit.
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
# A rehearsal follows the modules by global hooks, and torch warns of them before it is refused.
@pytest.mark.filterwarnings(
    "ignore:Using .torch.compile.module.. when there are global:UserWarning"
)
def test_compiled_module(backend: str, tmp_path: Path) -> None:
    class Compiled(Net):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.compile(self.net)

    if backend == "cuda":
        with warnings.catch_warnings():
            # The compiler has hints for faster matrix products and deprecated calls of its own.
            warnings.simplefilter("ignore")
            eager, captured = fit_twice(backend, tmp_path, module=Compiled)
        compare(eager, captured, tolerance=1e-3)
        return
    # In a rehearsal it is refused without being compiled.
    options: dict[str, Any] = {"capture": {"on_failure": "eager"}, "validation": 0}
    with torch.compiler.set_stance("force_eager"):
        eager = prepare(backend, tmp_path, False, module=Compiled, **options).run()
        captured = prepare(backend, tmp_path, True, module=Compiled, **options)
        with pytest.warns(UserWarning, match="compiled"):
            captured.run()
    compare(eager, captured, replayed=False)
    close(captured.module.state_dict(), eager.module.state_dict(), 0.0, "module")
    assert captured.statistics.replayed == 0


def test_two_trainers_take_turns(backend: str, tmp_path: Path) -> None:
    """A fit inside of a hook of another one, as tuners do."""

    class Nesting(Net):
        def on_train_epoch_end(self) -> None:
            if self.current_epoch == 0:
                state = torch.get_rng_state()
                inner = prepare(backend, tmp_path / "inner", True, max_epochs=1).run()
                torch.set_rng_state(state)
                assert inner.statistics.replayed > 0

    captured = prepare(backend, tmp_path, True, module=Nesting, max_epochs=3).run()
    eager = prepare(backend, tmp_path, False, module=Nesting, max_epochs=3).run()
    close(captured.module.state_dict(), eager.module.state_dict(), 0.0, "module")


class Streams(Net):
    """Notes the current stream where programs fetch gradient nodes, and where they train."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def on_fit_start(self) -> None:
        self.seen.append(torch.cuda.current_stream(None))

    def on_train_batch_start(self, *_: Any) -> None:
        self.seen.append(torch.cuda.current_stream(None))


def test_gradient_nodes_belong_to_the_capture_stream(backend: str, tmp_path: Path) -> None:
    fit = prepare(backend, tmp_path, True, module=Streams)
    with pytest.MonkeyPatch.context() as patch:
        if backend == "emulated":  # whose streams are names
            current: list[Any] = [SimpleNamespace(wait_stream=lambda other: None)]
            patch.setattr(torch.cuda, "current_stream", lambda _: current[-1])
            patch.setattr(torch.cuda, "default_stream", lambda _: current[0])
            patch.setattr(torch.cuda, "set_stream", current.append)
            patch.setattr(torch.cuda, "device", lambda _: nullcontext())
            own: Any = SimpleNamespace(wait_stream=lambda other: None)
            fit.capture._stream = own
        default = torch.cuda.current_stream(None)
        fit.run()
        assert torch.cuda.current_stream(None) == default
    at_start, *training = fit.module.seen
    if backend == "emulated":
        assert at_start is own
    else:
        assert at_start != default
        assert set(training) == {at_start}
