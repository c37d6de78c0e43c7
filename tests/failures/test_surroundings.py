"""What goes on around a captured fit: threads, garbage, other fits, and the end of the process.

| surroundings                                      | scopes        | backend  |
| ------------------------------------------------- | ------------- | -------- |
| another thread allocates during the capture       | step, modules | both     |
| a loader thread pins memory during the capture    | step, modules | CUDA     |
| old graphs are collected during the capture       | step, modules | both     |
| fit in a thread                                   | step, modules | both     |
| two trainers in turn in one process               | step, modules | both     |
| fits in two threads at once                       | step, modules | both     |
| a fit inside of a hook of another fit             | step, modules | both     |
| a cell is run again after an exception            | step, modules | both     |
| ``sys.exit`` while another thread fits            | step          | both     |

Other surroundings of every day, each with its tests:

| surroundings                                      | tests                                       |
| ------------------------------------------------- | ------------------------------------------- |
| Ctrl-C, SIGTERM: capture, verification, hooks     | ``failures/test_interruptions.py``          |
| the same in functions, and between replays        | ``failures/test_interrupted_loops.py``      |
| Ctrl-C before any line of a capture or a replay   | ``failures/test_any_line.py``, and there    |
| ``fit`` twice, two trainers with one module       | ``training/lifecycle/test_lifecycle.py``    |
| LRFinder, BatchSizeFinder, ``weights_only=True``  | ``training/lifecycle/test_tuning.py``       |
| captured functions in two threads                 | ``loops/test_refused.py``                   |
| free memory after a fit as before it              | ``failures/conftest.py``, after each test   |
| a GPU other than the first, a model over two      | ``gpu/test_other_devices.py``               |
| an unknown torch or Lightning, ROCm, Windows      | ``training/told/test_report.py``            |
| XPU, MPS                                          | ``loops/test_refused.py``                   |
| a wheel in an empty environment                   | ``tests/wheel.py``, in CI                   |
"""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader

from lightning_graphs import core
from tests.failures.support import (
    PHASE_OF_CAPTURE,
    Mishap,
    assert_nothing_lost,
    raise_mishap,
    tripping,
)
from tests.training.fits import Net, batches, compare, fit_twice, prepare

ROOT = Path(__file__).parents[2]


def at_capture(
    backend: str, root: Path, scope: dict[str, Any], action: Callable[[], object]
) -> None:
    """Assert that a fit gives eager's values if this happens inside of its capture."""
    eager_call, call = PHASE_OF_CAPTURE[scope["scope"]]
    fits = tripping(backend, root, scope, eager=eager_call, captured=call, action=action)
    for one in fits:
        one.run()
        assert one.module.net[1].trip.calls >= 7
    compare(*fits)
    assert_nothing_lost(*fits)


def test_a_thread_that_allocates_during_a_capture(
    backend: str, tmp_path: Path, scope: dict[str, Any], device: torch.device
) -> None:
    """It was there before: a step that starts one is refused, as each would start its own."""
    ended = threading.Event()
    sums: set[float] = set()

    def allocate() -> None:
        while not ended.is_set():
            sums.add(float(torch.arange(1000, dtype=torch.float64).sum()))
            if device.type == "cuda":
                sums.add(float(torch.ones(1000).pin_memory().sum() + 498500.0))

    thread = threading.Thread(target=allocate)
    thread.start()
    try:
        at_capture(backend, tmp_path, scope, partial(time.sleep, 0.05))
    finally:
        ended.set()
        thread.join()
    assert sums == {499500.0}


if torch.cuda.is_available():

    @pytest.mark.gpu
    def test_a_loader_that_pins_memory(tmp_path: Path, scope: dict[str, Any]) -> None:
        """Its thread pins batches ahead, all through the fit."""

        def loader() -> DataLoader[Any]:
            samples = [
                {key: value[i] for key, value in batch.items()}
                for batch in batches(20)
                for i in range(8)
            ]
            return DataLoader(samples, batch_size=8, pin_memory=True, num_workers=1)

        fits = fit_twice("cuda", tmp_path, capture=scope, data=loader)
        compare(*fits)
        assert_nothing_lost(*fits)


def test_old_graphs_that_are_collected_during_a_capture(
    backend: str, tmp_path: Path, scope: dict[str, Any], device: torch.device
) -> None:
    collected: list[int] = []

    class Cycle:
        """Holds a graph until the collector finds it."""

        def __init__(self) -> None:
            self.me = self
            static = torch.ones(4, device=device)
            self.graph = core.CUDAGraph(backend="cuda" if device.type == "cuda" else "emulated")
            with core.graph(self.graph):
                self.result = static * 2
            self.static = static
            self.graph.replay()

        def __del__(self) -> None:
            collected.append(1)

    def collect() -> None:
        gc.collect()
        assert collected

    gc.collect()
    gc.disable()
    try:
        Cycle()
        at_capture(backend, tmp_path, scope, collect)
    finally:
        gc.enable()
    assert collected == [1]


def test_fit_in_a_thread(backend: str, tmp_path: Path, scope: dict[str, Any]) -> None:
    eager = prepare(backend, tmp_path, False, capture=scope).run()
    captured = prepare(backend, tmp_path, True, capture=scope)
    thread = threading.Thread(target=captured.run)
    thread.start()
    thread.join()
    compare(eager, captured)
    assert_nothing_lost(eager, captured)


def test_an_exception_in_a_thread(backend: str, tmp_path: Path, scope: dict[str, Any]) -> None:
    calls = PHASE_OF_CAPTURE[scope["scope"]]
    eager, captured = tripping(
        backend, tmp_path, scope, eager=calls[0], captured=calls[1], action=raise_mishap
    )
    raised: list[str] = []

    def run(one: Any) -> None:
        with pytest.raises(Exception, match="on purpose") as caught:
            one.run()
        raised.append(str(caught.value))

    for one in (eager, captured):
        thread = threading.Thread(target=run, args=(one,))
        thread.start()
        thread.join()
    assert len(raised) == 2
    assert_nothing_lost(eager, captured)
    for one in (eager, captured):  # in this thread
        one.run()
    compare(eager, captured)


class Plain(Net):
    """Draws nothing: threads share torch's generator. Its hooks read what captures watch."""

    def __init__(self) -> None:
        super().__init__()
        self.net[3] = nn.Identity()
        self.norms: list[float] = []

    def on_train_batch_end(self, *_: Any) -> None:
        gradients = [p.grad for p in self.parameters() if p.grad is not None]
        self.norms.append(float(torch.nn.utils.get_total_norm(gradients)))


def test_fits_in_two_threads_at_once(backend: str, tmp_path: Path, scope: dict[str, Any]) -> None:
    """They begin each step together, those of their captures, too."""
    together = threading.Barrier(2)

    class Meeting(Plain):
        def on_train_batch_start(self, *_: Any) -> None:
            together.wait(60)

    eager = prepare(backend, tmp_path, False, module=Plain).run()
    members = vars(torch.nn.Parameter).get("grad"), LightningModule.log
    both = [
        prepare(backend, tmp_path / name, True, capture=scope, module=Meeting)
        for name in ("one", "two")
    ]
    threads = [threading.Thread(target=one.run) for one in both]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one in both:
        assert one.statistics.fallbacks == []
        assert one.statistics.replayed > 0
        assert one.module.norms == eager.module.norms
        for mine, other in zip(one.module.parameters(), eager.module.parameters(), strict=True):
            assert torch.equal(mine, other)
    assert members == (vars(torch.nn.Parameter).get("grad"), LightningModule.log)


def test_a_fit_inside_of_a_hook(backend: str, tmp_path: Path, scope: dict[str, Any]) -> None:
    results = []
    for graphs in (False, True):
        inner = prepare(backend, tmp_path / "inner", graphs, module=Plain, capture=scope)

        class Outer(Plain):
            def on_train_batch_start(self, *_: Any, inner: Any = inner) -> None:
                if self.trainer.global_step == 8:
                    inner.run()

        outer = prepare(backend, tmp_path / "outer", graphs, module=Outer, capture=scope).run()
        results.append((outer, inner))
    for eager, captured in zip(*results, strict=True):
        assert captured.statistics.replayed > 0
        compare(eager, captured)
        assert_nothing_lost(eager, captured)


def test_two_trainers_in_turn(backend: str, tmp_path: Path, scope: dict[str, Any]) -> None:
    """One module, trained a bit by the one and a bit by the other trainer, over and over."""
    results = []
    for graphs in (False, True):
        first, second = (
            prepare(backend, tmp_path / name, graphs, capture=scope, max_epochs=1)
            for name in ("first", "second")
        )
        second.module = first.module
        for epochs in (1, 2):
            for one in (first, second):
                one.trainer.fit_loop.max_epochs = epochs
                one.run()
                if graphs:
                    assert one.statistics.replayed > 0
                    assert one.statistics.fallbacks == []
        results.append((first, second))
    for eager, captured in zip(*results, strict=True):
        compare(eager, captured)
        assert_nothing_lost(eager, captured)


def test_a_cell_that_is_run_again_after_an_exception(
    backend: str, tmp_path: Path, scope: dict[str, Any]
) -> None:
    """A notebook keeps the exception, its frames with it, and the names of the cell."""

    class Once(Net):
        failed = False

        def on_train_batch_end(self, *_: Any) -> None:
            if self.trainer.global_step == 8 and not self.failed:
                self.failed = True
                raise_mishap()

    kept: list[BaseException] = []
    results = []
    for graphs in (False, True):
        one = prepare(backend, tmp_path, graphs, module=Once, capture=scope)
        try:
            one.run()
        except Mishap as error:
            kept.append(error)
        for _ in range(2):  # the cell makes a new trainer and a new callback, the module stays
            again = prepare(backend, tmp_path, graphs, capture=scope)
            again.module = one.module
            again.run()
        results.append(again)
    assert len(kept) == 2
    compare(*results)
    assert_nothing_lost(*results)


PROGRAM = """
import sys, threading
from pathlib import Path
from tests.training.fits import Net, prepare

replayed = threading.Event()

def wait():
    replayed.set()
    threading.Event().wait()

def made(name, end):
    class Ending(Net):
        def on_train_batch_end(self, *_):
            if self.trainer.global_step == 8:
                assert fit.statistics.replayed > 0
                end()

    fit = prepare({backend!r}, Path({root!r}) / name, True, module=Ending)
    return fit

threading.Thread(target=made("waiting", wait).run, daemon=True).start()
assert replayed.wait(60)
made("exiting", lambda: sys.exit(3)).run()
"""


def test_the_process_ends_without_a_teardown(backend: str, tmp_path: Path) -> None:
    """``sys.exit`` in a hook, while the graphs of another thread wait for their next replay."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM.format(backend=backend, root=str(tmp_path))],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 3, done.stderr
    for word in ("Traceback", "Error", "error", "terminate called"):
        assert word not in done.stderr
