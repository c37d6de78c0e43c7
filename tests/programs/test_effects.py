"""Steps that do something outside of their module, and what a fit of them has done there."""

from __future__ import annotations

import collections
import contextlib
import csv
import functools
import io
import json
import logging
import multiprocessing
import os
import pickle
import queue
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import rich
import torch
import tqdm
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import nn

from tests.programs.table import Promises, copied, stepping, table
from tests.training.fits import Net, batches

LOGGER = logging.getLogger("tests.side_effects")
FILE = Path()
STEPS: list[int] = []
COUNTS: dict[str, list[int]] = collections.defaultdict(list)
BOARD = SimpleNamespace(seen=set())
LAST: Any = None
counter = 0


class Printing(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        print("a step")
        return self.loss(batch)


class PrintingByLightning(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.print("a step")
        return self.loss(batch)


class PrintingInAHelper(Net):
    def loss(self, batch: Any) -> Any:
        for _ in range(2):
            print("a loss")
        return super().loss(batch)


class PrintingBehindAnExcept(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with contextlib.suppress(Exception):
            print("a step")
        return self.loss(batch)


class WritingToTheConsole(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        sys.stdout.write("a step\n")
        return self.loss(batch)


class PrintingByRich(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        rich.print("a step")
        return self.loss(batch)


class LoggingOfPython(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        LOGGER.warning("a step of %d samples", len(batch["x"]))
        return self.loss(batch)


class LoggingOnRankZero(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        rank_zero_info("a step")
        return self.loss(batch)


class Writing(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with open(FILE, "a", encoding="utf-8") as file:
            file.write("a step\n")
        return self.loss(batch)


class WritingAPath(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with FILE.open("a", encoding="utf-8") as file:
            file.write("a step\n")
        return self.loss(batch)


class LoggingToTheLogger(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.logger.log_metrics({"samples": len(batch["x"])})
        return self.loss(batch)


class LoggingToTheExperiment(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.logger.experiment.log_metrics({"samples": len(batch["x"])})
        return self.loss(batch)


class LoggingToTheTrainersLoggers(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        for logger in self.trainer.loggers:
            logger.log_metrics({"samples": len(batch["x"])})
        return self.loss(batch)


class LoggingToTheTrainersLogger(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.trainer.logger.log_metrics({"samples": len(batch["x"])})
        return self.loss(batch)


class Appending(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        STEPS.append(len(batch["x"]))
        return self.loss(batch)


class AppendingInAComprehension(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        [STEPS.append(size) for size in (1, 2)]
        return self.loss(batch)


def note(size: int) -> None:
    COUNTS["sizes"].append(size)


note.calls = 0


def noting(step: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(step)
    def noted(self: Any, batch: Any, batch_idx: int) -> Any:
        note(len(batch["x"]))
        return step(self, batch, batch_idx)

    return noted


class AppendingInADecorator(Net):
    @noting
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)


class CountingInAFunction(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        note.calls += 1
        return self.loss(batch)


class AddingToAnObject(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        BOARD.seen.add(f"step {len(BOARD.seen)}")
        return self.loss(batch)


class Counting(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        global counter
        counter += 1
        return self.loss(batch)


class Keeping(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        global LAST
        loss = self.loss(batch)
        LAST = loss.detach()
        return loss


class InASubmodule(Net):
    class Layer(nn.Linear):
        def forward(self, x: Any) -> Any:
            STEPS.append(len(x))
            return super().forward(x)

    def __init__(self) -> None:
        super().__init__()
        self.net[4] = self.Layer(16, 3)


class CountingInTheClass(Net):
    calls = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        type(self).calls += 1
        return self.loss(batch)


class CountingInTheNamedClass(Net):
    calls = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        CountingInTheNamedClass.calls += 1
        return self.loss(batch)


class AppendingToTheClass(Net):
    sizes: list[int] = []  # noqa: RUF012

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.sizes.append(len(batch["x"]))
        return self.loss(batch)


def enclosed() -> LightningModule:
    """A module whose step stores in variables of the function that made it."""
    calls = 0
    COUNTS["enclosed"] = sizes = []

    class Enclosed(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            nonlocal calls
            calls += 1
            sizes.append(calls)
            return self.loss(batch)

    return Enclosed()


@functools.lru_cache(maxsize=1)
def ramp(size: int, device: torch.device) -> torch.Tensor:
    return torch.linspace(0.5, 1.5, size, device=device)[:, None]


class Caching(Net):
    """Validation with another size empties the cache before steps are captured."""

    def loss(self, batch: Any) -> Any:
        return super().loss({**batch, "x": batch["x"] * ramp(len(batch["x"]), self.device)})

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        ramp(5, self.device)


class CachingAndRefused(Caching):
    """The capture fills the cache and is given up."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        return loss * (2.0 if loss.tolist() > 1.0 else 1.0)


class CachingLayer(nn.Linear):
    def forward(self, x: Any) -> Any:
        return super().forward(x * ramp(len(x), x.device))


class ReadingLayer(nn.Linear):
    def forward(self, x: Any) -> Any:
        return super().forward(x) * (2.0 if x.sum().item() > 0 else 1.0)


class CachingInSubmodules(Caching):
    """The capture of one submodule fills the cache, and that of the next one is refused."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(CachingLayer(8, 16), nn.ReLU(), ReadingLayer(16, 3))


class Quiet(Net):
    """Reads what the others change, asks for loggers that are not there, logs below the level."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        LOGGER.debug("not shown")
        if self.logger is not None and self.trainer.loggers:
            self.logger.log_metrics({"samples": 1.0})
        return super().training_step(batch, batch_idx) * (1.0 + len(STEPS) + counter)


TOLD = (
    *(Printing, PrintingByLightning, PrintingInAHelper, PrintingBehindAnExcept, PrintingByRich),
    *(LoggingOfPython, LoggingOnRankZero),
    *(LoggingToTheLogger, LoggingToTheExperiment, LoggingToTheTrainersLogger),
)
"""Replays do these things behind their graphs."""


def texts(self: Any, batch: Any, batch_idx: int) -> Any:
    """Texts of numbers of the device and of the trainer, for calls that only show them."""
    loss = self.loss(batch)
    value = loss.item()
    print(f"a step {batch_idx} of {self.trainer.current_epoch}: {value:8.3f}, {2 * value!r}")
    print("a step", value, round(value, 2), sep=" ")
    LOGGER.info("a step has %.4f", loss.detach())
    if batch_idx % 2:
        message = "a step: " + ", ".join([f"{value:.2f}", str(value * 2)])
        LOGGER.warning(message)
    self.logger.experiment.log_metrics({"direct": loss.detach(), "index": self.global_step})
    return loss


class Profiled(Net):
    """Each step is one of a profiler, whose schedule counts them."""

    def __init__(self) -> None:
        super().__init__()
        idle = torch.profiler.ProfilerAction.NONE
        self.profiler = torch.profiler.profile(schedule=lambda step: idle)

    @property
    def seen(self) -> int:
        return self.profiler.step_num

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.profiler.step()
        return loss


class Barred(Net):
    """Shows its loss on a bar of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.bar = tqdm.tqdm(disable=True)
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.bar.set_description(f"loss {loss:.4f} at {batch_idx}")
        self.bar.set_postfix({"loss": loss.item(), "rounded": f"{loss.item():.2f}"}, refresh=False)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append((self.bar.desc, self.bar.postfix))


def printing_a_history(self: Any, batch: Any, batch_idx: int) -> Any:
    """Of a tensor with its function, which a replay has not."""
    loss = self.loss(batch)
    print("a step", loss)
    return loss


def comparing_a_text(self: Any, batch: Any, batch_idx: int) -> Any:
    loss = self.loss(batch)
    if f"{loss.item():.1f}" == "1.1":
        return loss * 2.0
    return loss


def keyed_by_a_text(self: Any, batch: Any, batch_idx: int) -> Any:
    loss = self.loss(batch)
    BOARD.seen.add(f"step {loss.item():.1f}")
    return loss


def shortened(text: str) -> str:
    return text[:10]


def given_to_a_function(self: Any, batch: Any, batch_idx: int) -> Any:
    loss = self.loss(batch)
    print(shortened(f"a step {loss.item()}"))
    return loss


def padded(self: Any, batch: Any, batch_idx: int) -> Any:
    loss = self.loss(batch)
    message = f"{loss.item():.2f}"
    print(f"a step {message:>10}")
    return loss


class Worker:
    """A thread that takes from a queue what steps give it."""

    def __init__(self) -> None:
        self.jobs: queue.Queue[Any] = queue.Queue()
        # A capture would undo what the thread adds to a list meanwhile
        self.done = queue.SimpleQueue[Any]()
        self.rows: list[Any] = []
        self.threads = ThreadPoolExecutor(1)
        threading.Thread(target=self.work, daemon=True).start()

    def work(self) -> None:
        for step, loss in iter(self.jobs.get, None):
            self.done.put((step, float(loss)))
            self.jobs.task_done()

    def found(self) -> Any:
        deadline = time.monotonic() + 5  # of a queue that counts more than the thread gets
        while self.jobs.unfinished_tasks and time.monotonic() < deadline:
            time.sleep(0.001)
        self.threads.shutdown()
        done = [self.done.get() for _ in range(self.done.qsize())]
        return self.jobs.unfinished_tasks, done, self.rows


class Held:
    """What programs hold whose state is in C or in threads, and what the last fit has left."""

    @contextlib.contextmanager
    def opened(self, folder: str) -> Iterator[None]:
        self.text, self.bytes, self.queue = io.StringIO(), io.BytesIO(), queue.SimpleQueue[int]()
        self.worker, self.permits = Worker(), threading.Semaphore(0)
        shared = multiprocessing.Value("i", 0, lock=False)
        vars(self).update(objects=np.array([0, None]), shared=shared)
        vars(self)["array"] = np.memmap(Path(folder) / "mapped", dtype="f8", shape=3, mode="w+")
        with (Path(folder) / "held").open("w+", encoding="utf-8") as self.file:
            yield
        self.worker.jobs.put(None)

    def found(self) -> Any:
        self.file.seek(0)
        size = self.queue.qsize()
        counts = self.objects[0], self.shared.value, self.permits._value
        texts = self.text.getvalue(), self.bytes.getvalue(), self.file.read()
        return texts, size, [*self.array], counts, self.worker.found()


HELD = Held()


def to_memory(self: Any, batch: Any, batch_idx: int) -> Any:
    HELD.text.write("a step")
    return self.loss(batch)


def to_a_file(self: Any, batch: Any, batch_idx: int) -> Any:
    HELD.file.write("a step")
    return self.loss(batch)


def to_a_queue(self: Any, batch: Any, batch_idx: int) -> Any:
    HELD.queue.put(1)
    return self.loss(batch)


def to_a_table(self: Any, batch: Any, batch_idx: int) -> Any:
    csv.writer(HELD.file).writerow(["a step"])
    return self.loss(batch)


def pickled(self: Any, batch: Any, batch_idx: int) -> Any:
    pickle.dump("a step", HELD.bytes)
    return self.loss(batch)


def by_numpy(self: Any, batch: Any, batch_idx: int) -> Any:
    np.save(HELD.bytes, np.arange(2))
    return self.loss(batch)


def by_numpy_of_the_device(self: Any, batch: Any, batch_idx: int) -> Any:
    loss = self.loss(batch)
    np.save(HELD.bytes, loss.detach().cpu().numpy())
    return loss


def to_mapped_memory(self: Any, batch: Any, batch_idx: int) -> Any:
    HELD.array[0] += 1
    return self.loss(batch)


def to_the_environment(self: Any, batch: Any, batch_idx: int) -> Any:
    os.environ["TESTS_STEPS"] = "a step"
    return self.loss(batch)


def to_the_system(self: Any, batch: Any, batch_idx: int) -> Any:
    os.truncate(HELD.file.fileno(), 0)
    return self.loss(batch)


def dumped(self: Any, batch: Any, batch_idx: int) -> Any:
    """By calls of Python, which replays make; and in memory of its own."""
    loss = self.loss(batch)
    json.dump({"a step": loss.item()}, HELD.text)
    text = io.StringIO()
    text.write("a step")
    self.seen = len(text.getvalue())
    return loss


def to_a_thread(self: Any, batch: Any, batch_idx: int) -> Any:
    """A replay does as the step: the queue counts, and wakes the thread that waits for it."""
    loss = self.loss(batch)
    HELD.worker.jobs.put((batch_idx, loss.detach()))
    HELD.permits.release()
    return loss


def by_an_executor(self: Any, batch: Any, batch_idx: int) -> Any:
    """A capture has another list in its place."""
    loss = self.loss(batch)
    HELD.worker.threads.submit(HELD.worker.rows.append, loss.detach())
    return loss


def in_a_thread(self: Any, batch: Any, batch_idx: int) -> Any:
    loss = self.loss(batch)
    threading.Thread(target=HELD.worker.jobs.put, args=((0, loss.detach()),)).start()
    return loss


def to_objects(self: Any, batch: Any, batch_idx: int) -> Any:
    HELD.objects[0] += 1
    return self.loss(batch) * (1 + HELD.objects[0] / 64)


def to_shared_memory(self: Any, batch: Any, batch_idx: int) -> Any:
    HELD.shared.value += 1
    return self.loss(batch) * (1 + HELD.shared.value / 64)


def from_a_file(self: Any, batch: Any, batch_idx: int) -> Any:
    """Of a call with effects the result is needed, if only for a log."""
    self.log("read", float(FILE.read_text(encoding="utf-8").split()[1]))
    return self.loss(batch)


HELD_STEPS = {
    by_an_executor: "SimpleQueue.put is used at .* in by_an_executor: HELD",
    in_a_thread: "threading.Thread.start is used at .* in in_a_thread: threading",
    to_objects: r"changes HELD\.objects, named at .* in to_objects: HELD",
    to_shared_memory: r"changes HELD\.shared, named at .* in to_shared_memory: HELD",
    to_memory: "StringIO.write is used at .* in to_memory: HELD",
    to_a_file: "TextIOWrapper.write is used at .* in to_a_file: HELD",
    to_a_queue: "SimpleQueue.put is used at .* in to_a_queue: HELD",
    to_a_table: "writer.writerow is used at .* in to_a_table: csv",
    pickled: "pickle.dump is used at .* in pickled: pickle",
    by_numpy: "BytesIO.write is used at .* in by_numpy: np",
    by_numpy_of_the_device: "in by_numpy_of_the_device: np",
    to_mapped_memory: r"changes HELD\.array, named at .* in to_mapped_memory: HELD",
    to_the_environment: "os.putenv is used at .* in to_the_environment: os",
    to_the_system: "os.truncate is used at .* in to_the_system: os",
    from_a_file: "open is used at .* in from_a_file: self",
}
REFUSED_STEPS = {
    printing_a_history: "print is used at .* in printing_a_history",
    comparing_a_text: "in comparing_a_text: if f",
    keyed_by_a_text: "in keyed_by_a_text: ",
    given_to_a_function: "in given_to_a_function: ",
    padded: "in padded: ",
}
REFUSED = {
    WritingToTheConsole: "sys.stdout.write is used at .* in training_step: sys",
    Writing: "open is used at .* in training_step",
    WritingAPath: "open is used at .* in training_step",
    LoggingToTheTrainersLoggers: "trainer.loggers is used at .* in training_step: for",
    Appending: "training_step changes STEPS, named at .* in training_step: STEPS.append",
    AppendingInAComprehension: "training_step changes STEPS",
    AppendingInADecorator: r"changes COUNTS\['sizes'\], named at .* in note: COUNTS",
    CountingInAFunction: "training_step changes note.calls, named at .* in training_step: note",
    AddingToAnObject: "changes BOARD.seen, named at .* in training_step: BOARD.seen.add",
    Counting: "training_step changes counter, named at .* in training_step: counter ",
    Keeping: "training_step changes LAST, named at .* in training_step: LAST =",
    CountingInTheClass: r"changes CountingInTheClass.calls, named at .*: type\(self\).calls",
    CountingInTheNamedClass: "changes CountingInTheNamedClass.calls, named at .*: Counting",
    AppendingToTheClass: "changes AppendingToTheClass.sizes, named at .*: self.sizes.app",
    enclosed: "changes calls, sizes, named at .* in training_step: calls ",
}


class Effects(logging.Handler):
    """Everything that the last fit has done outside of its module."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.lines = io.StringIO()
        self.folder = Path()

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Begin with nothing; the loggers of Lightning show what they are given."""
        global FILE, LAST, counter
        self.texts.clear()
        self.lines = io.StringIO()
        LAST, counter = None, 0
        for held in (STEPS, COUNTS, BOARD.seen, AppendingToTheClass.sizes):
            held.clear()
        CountingInTheClass.calls = CountingInTheNamedClass.calls = note.calls = 0
        ramp.cache_clear()
        names = [f"lightning.{part}.utilities.rank_zero" for part in ("pytorch", "fabric")]
        loggers = [LOGGER, *map(logging.getLogger, names)]
        levels = [logger.level for logger in loggers]
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(self.lines):
            FILE = Path(folder) / "written.txt"
            FILE.write_text("0 1 ", encoding="utf-8")
            for logger in loggers:
                logger.setLevel(logging.INFO)
                logger.addHandler(self)
            with HELD.opened(folder):
                yield
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
            logger.removeHandler(self)

    def found(self) -> Any:
        """What was printed, logged, written and stored."""
        lines = self.lines.getvalue().splitlines()
        return (
            [line for line in lines if line.startswith(("a step", "a loss"))],
            [text for text in self.texts if text.startswith("a step")],
            FILE.read_text(encoding="utf-8"), HELD.found(),
            STEPS, COUNTS, sorted(BOARD.seen), counter, note.calls, LAST, CountingInTheClass.calls,
            CountingInTheNamedClass.calls, AppendingToTheClass.sizes,
        )  # fmt: skip


EFFECTS = Effects()
SIX = {"max_epochs": 3, "data": lambda: batches(6)}
NOTED = {"around": EFFECTS.noted, "outside": lambda: copied(EFFECTS.found())}
ROWS = (
    table(each=REFUSED, also="auto", **NOTED)
    | stepping(Net, each={**REFUSED_STEPS, **HELD_STEPS}, **NOTED)
    | stepping(Net, to_a_thread, max_epochs=3, replayed=15, also="verified", found=None, **NOTED)
    | stepping(Net, dumped, max_epochs=3, replayed=15, also="verified", **NOTED)
    | table(*TOLD, max_epochs=3, replayed=15, also="verified; accumulated", **NOTED)
    | stepping(Net, texts, max_epochs=3, replayed=9, also="verified; accumulated", **NOTED)
    | table(Barred, Profiled, max_epochs=3, replayed=15, also="verified", **NOTED)
    | table(each={InASubmodule: "training_step changes STEPS, named at "}, **NOTED)
    | table(Quiet, logger=False, **NOTED)
    # A cache holds no memory of a capture.
    | table(Caching, CachingInSubmodules, said=None, **SIX, **NOTED)
    | table(CachingAndRefused, said="if loss.tolist", also="auto", **SIX, **NOTED)
)  # fmt: skip


class TestEffects(Promises):
    rows = ROWS
