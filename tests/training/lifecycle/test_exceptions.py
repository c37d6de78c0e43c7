"""Whatever goes wrong: no patch, stream or graph stays, and a second fit works."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from lightning_graphs.device.graph import CUDAGraph, is_current_stream_capturing
from tests.training.fits import (
    GradientTrace,
    Net,
    Trace,
    assert_nothing_left,
    batches,
    compare,
    prepare,
)


class Mishap(Exception):
    """What the tests raise."""


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[CUDAGraph]]:
    """Every graph that is made."""
    made: list[weakref.ref[CUDAGraph]] = []
    hidden = ContextVar("made", default=made)  # or captured code would be found to change it
    original = CUDAGraph.__init__

    def counted(self: CUDAGraph, *args: Any, **kwargs: Any) -> None:
        hidden.get().append(weakref.ref(self))
        original(self, *args, **kwargs)

    monkeypatch.setattr(CUDAGraph, "__init__", counted)
    return made


def alive(graphs: list[weakref.ref[CUDAGraph]]) -> int:
    gc.collect()
    return sum(ref() is not None for ref in graphs)


class Failing(Net):
    """Raises once, at the n-th run of the Python of ``training_step``."""

    armed = True

    def __init__(self, at: int) -> None:
        super().__init__()
        self._at = at
        self._calls: list[int] = []
        self._count = Counter()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self._count.up()
        if self._count.value == self._at:
            raise Mishap(f"call {self._at}")
        self.log("loss", loss)
        return loss


class Counter:
    """Counts outside of what a capture looks at."""

    value = 0

    def up(self) -> None:
        self.value += 1


# Three warm-up steps, two sightings, and then the capture runs Python for the last time.
@pytest.mark.parametrize("at", [2, 4, 6], ids=["warm-up", "eager", "capture"])
@pytest.mark.parametrize("trace", [Trace, GradientTrace])
def test_exception_in_training_step(
    backend: str, tmp_path: Path, at: int, trace: type[Trace], graphs: Any
) -> None:
    captured = prepare(backend, tmp_path, True, module=lambda: Failing(at), trace=trace)
    with pytest.raises(Mishap, match=f"call {at}"):
        captured.run()
    assert_nothing_left(captured)
    assert alive(graphs) == 0
    again = prepare(backend, tmp_path / "again", True).run()
    compare(prepare(backend, tmp_path, False).run(), again)


HOOKS = [
    "on_train_batch_start", "on_before_zero_grad", "on_before_backward", "on_after_backward",
    "on_before_optimizer_step", "on_train_batch_end", "on_validation_start", "on_train_epoch_end",
    "on_save_checkpoint",
]  # fmt: skip


@pytest.mark.parametrize("kind", [Mishap, KeyboardInterrupt])
@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.usefixtures("interrupts_as_before")
def test_exception_in_a_hook_at_replay(
    backend: str, tmp_path: Path, hook: str, kind: type[BaseException], graphs: Any
) -> None:
    def fail(self: Any, *_: Any) -> None:
        if self.trainer.global_step >= 8 or hook == "on_save_checkpoint":
            raise kind("mishap")

    module = type("Hooked", (Net,), {hook: fail})
    captured = prepare(backend, tmp_path, True, module=module, enable_checkpointing=True)
    expected, match = (SystemExit, "1") if kind is KeyboardInterrupt else (Mishap, "mishap")
    with pytest.raises(expected, match=match):
        captured.run()
    assert captured.statistics.replayed > 0
    assert_nothing_left(captured)
    assert alive(graphs) == 0
    again = prepare(backend, tmp_path / "again", True).run()
    compare(prepare(backend, tmp_path, False).run(), again)


def test_one_trainer_fits_again_after_an_exception(backend: str, tmp_path: Path) -> None:
    class Once(Net):
        failed = False

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if self.trainer.global_step == 8 and not self.failed:
                self.failed = True
                raise Mishap("once")

    fits = [prepare(backend, tmp_path, kind, module=Once) for kind in (False, True)]
    for one in fits:
        with pytest.raises(Mishap, match="once"):
            one.run()
        one.run()
    compare(*fits)


class Breaking(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from batches(9)
        raise Mishap("loader")


def test_failing_data_loader(backend: str, tmp_path: Path, graphs: Any) -> None:
    captured = prepare(
        backend, tmp_path, True, data=lambda: DataLoader(Breaking(), batch_size=None)
    )
    with pytest.raises(Mishap, match="loader"):
        captured.run()
    assert captured.statistics.replayed > 0
    assert_nothing_left(captured)
    assert alive(graphs) == 0


def test_refused_capture_raises_when_asked_to(backend: str, tmp_path: Path, graphs: Any) -> None:
    class Reading(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            return loss * 2 if loss.tolist() > 1 else loss

    captured = prepare(backend, tmp_path, True, module=Reading)
    with pytest.raises(RuntimeError, match=r"(?s)item|local_scalar"):
        captured.run()
    assert_nothing_left(captured)
    assert alive(graphs) == 0


def test_refused_capture_changes_nothing(backend: str, tmp_path: Path) -> None:
    class Reading(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            self.log("loss", loss)
            return loss * 2 if loss.tolist() > 1 else loss

    options: dict[str, Any] = {"module": Reading, "capture": {"on_failure": "eager"}}
    for accumulate in (1, 3):
        options["accumulate_grad_batches"] = accumulate
        eager = prepare(backend, tmp_path / str(accumulate), False, **options).run()
        captured = prepare(backend, tmp_path / str(accumulate), True, **options)
        with pytest.warns(UserWarning, match=r"a step runs eagerly: (?s:.*)test_exceptions\.py"):
            captured.run()
        compare(eager, captured, replayed=False)


def test_a_capture_without_memory_falls_back(backend: str, tmp_path: Path, graphs: Any) -> None:
    class Large(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if is_current_stream_capturing():
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")
            return super().training_step(batch, batch_idx)

    eager = prepare(backend, tmp_path, False).run()
    captured = prepare(backend, tmp_path, True, module=Large, capture={"on_failure": "eager"})
    with pytest.warns(UserWarning, match=r"needs memory of its own(?s:.*)allocate 2 GiB"):
        captured.run()
    compare(eager, captured, replayed=False)
    assert alive(graphs) == 0


def test_graphs_are_gone_after_a_fit(backend: str, tmp_path: Path, graphs: Any) -> None:
    captured = prepare(backend, tmp_path, True).run()
    assert captured.statistics.captures == 1
    assert len(graphs) == 1
    assert alive(graphs) == 0
