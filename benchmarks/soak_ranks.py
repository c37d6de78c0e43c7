"""Long fits of several ranks: replays beside reads and delays, and what a lost rank does to others.

``soak.py --ranks N`` runs this. Each rank is a process of its own, as torchrun would start it, but
nothing ends the others when one is gone.

* Replays under DDP. In every hundredth step the host reads a value while the graph, and the
  reduction of gradients in it, runs, beside a copy of 64 MiB to the host on a second stream (the
  pattern of pytorch#196133). Ranks are delayed at random, on the host and on the device. The first
  losses are those of an eager fit; the last ones are those of an eager fit that goes on from the
  state before them; and all ranks end with the same parameters.
* A rank is killed while the others wait for it, in each of the ways of ``WAITS``: they end, and say
  which rank is gone.
"""

from __future__ import annotations

import contextlib
import copy
import faulthandler
import itertools
import json
import os
import random
import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from harness import Row
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.loggers import Logger
from step import be_quiet
from teams import launched
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_graphs import GraphCapture

MIB = 2**20
READ_EVERY = 100
COPIED = 64 * MIB
DELAYED, LONGEST = 200, 0.02
"""One of so many steps is delayed on some rank, by so many seconds at most."""
EAGER = 200
"""Steps at the beginning, and at the end, whose losses are compared with an eager fit's."""
BUCKETS = 3
"""Steps in which DDP makes its buckets, and makes them again."""
SHORT, LAST = 60, 2 * READ_EVERY - 1
"""Steps ahead of a kill, and of one behind which the host reads, and reads what is logged."""
ENDS_WITHIN, LOOKS_FOR = 30, 45
"""Seconds in which all ranks end when one is gone, and after which the rest is ended."""
QUIET, STALLS = 20, 120
"""Seconds without a note of any rank after which all say where they are, and after which they are
ended. They do not count before all have begun: eight that import on a busy machine take long."""
NOTES_EVERY, SAYS_EVERY = 0.5, 2.0
"""Seconds between two notes of a rank, and between two that are printed."""
BUSY = 2.0
"""Seconds for which the device of the killed rank is busy ahead of its last replay."""
LIMITS = {"resident memory": 32.0, "GPU pages": 32.0, "open files": 0.0, "threads": 0.0}
WAITS = {
    "read": "wait in a read",
    "log": "wait for a value that is logged",
    "step": "go on to their next steps",
    "collective": "wait in an eager collective",
    "barrier": "wait in a barrier",
}
"""Where the other ranks are when one is killed."""
SAID = "rank {} has ended"


class Batches(IterableDataset[tuple[Tensor, Tensor]]):
    """Batches of one rank, from that of a step on."""

    def __init__(self, rank: int, start: int = 0) -> None:
        self._rank, self._start = rank, start

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(self._rank)
        kept = [
            (
                torch.randn(32, 64, generator=generator),
                torch.randint(0, 8, (32,), generator=generator),
            )
            for _ in range(64)
        ]
        for i in itertools.count(self._start):
            yield kept[i % len(kept)]


class Classifier(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(3)]
        self.net = nn.Sequential(*layers, nn.BatchNorm1d(64), nn.Linear(64, 8))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, fused=True)


class Reads(Callback):
    """Reads on the host in every so many steps, while the graph runs."""

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self._codes = torch.arange(4096, device=module.device) % 7
        self._is_gpu = module.device.type == "cuda"
        if self._is_gpu:
            self._stream = torch.cuda.Stream()
            self._large = torch.empty(COPIED, dtype=torch.uint8, device=module.device)
            self._pinned = torch.empty(COPIED, dtype=torch.uint8, pin_memory=True)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        if trainer.global_step % READ_EVERY == 0:
            if self._is_gpu:
                with torch.cuda.stream(self._stream):
                    self._pinned.copy_(self._large, non_blocking=True)
            assert len(torch.unique(self._codes)) == 7
            assert float(outputs["loss"]) >= 0.0


class Delays(Callback):
    """Holds up one rank at random, on the host or on the device."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        comes, rank, seconds, on_host = (self._draw.random() for _ in range(4))
        if comes < 1 / DELAYED and int(rank * trainer.world_size) == trainer.global_rank:
            if on_host < 0.5 or not torch.cuda.is_available():
                time.sleep(seconds * LONGEST)
            else:
                torch.cuda._sleep(int(seconds * LONGEST * 1.5e9))


class Losses(Callback):
    """Keeps the losses of some steps, and the state ahead of them."""

    def __init__(self, steps: range) -> None:
        self._steps = steps
        self.losses: list[Tensor] = []
        self.state: Any = None

    def on_train_batch_start(self, trainer: Any, module: Any, *_: Any) -> None:
        if trainer.global_step == self._steps.start > 0:
            state = module.state_dict(), trainer.optimizers[0].state_dict()
            self.state = copy.deepcopy(state)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        if trainer.global_step - 1 in self._steps:
            self.losses.append(outputs["loss"].detach().clone())

    def numbers(self) -> list[float]:
        return torch.stack(self.losses).tolist()


class Began(Callback):
    """Begins with a state once DDP has made its buckets, on which the order of sums depends."""

    def __init__(self, state: Any) -> None:
        self._state = state

    def on_train_batch_start(self, trainer: Any, module: Any, *_: Any) -> None:
        if trainer.global_step == BUCKETS:
            module.load_state_dict(self._state[0])
            trainer.optimizers[0].load_state_dict(self._state[1])


class Notes(Callback):
    """Writes to a file how far a fit is.

    Args:
        path: The file.
        fit: Which one.
    """

    def __init__(self, path: Path, fit: str) -> None:
        self._path, self._fit, self._last = path, fit, 0.0

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if (now := time.monotonic()) - self._last > NOTES_EVERY:
            self._last = now
            self._path.write_text(f"{self._fit}, step {trainer.global_step}")


class Looks(Callback):
    """Looks what grows, and what weights are in the end."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self.found: dict[str, Any] = {}

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        if trainer.global_step == max(self._steps // 10, 30):
            self._in_use, self._began = _in_use(), time.monotonic()
        if trainer.global_step == self._steps:
            grown = {name: size - self._in_use[name] for name, size in _in_use().items()}
            weights = nn.utils.parameters_to_vector([p.detach() for p in module.parameters()])
            seconds = time.monotonic() - self._began
            self.found = {"grown": grown, "weights": weights.tolist(), "seconds": seconds}


class Killed(Callback):
    """Ends this process while its device is busy ahead of a replay that the others wait for."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self._step:
            if torch.cuda.is_available():
                torch.cuda._sleep(int(BUSY * 1.5e9))
            kill = (os.getpid(), signal.SIGKILL)
            threading.Timer(BUSY / 4, os.kill, kill).start()


class Waits(Callback):
    """Waits for the other ranks behind the step that one of them does not do."""

    def __init__(self, way: str, step: int) -> None:
        self._way, self._step = way, step

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        if trainer.global_step == self._step + 1:
            if self._way == "collective":
                value = torch.ones(1, device=module.device)
                torch.distributed.all_reduce(value)
                float(value)
            if self._way == "barrier":
                trainer.strategy.barrier()


class Nowhere(Logger):
    """Takes what is logged, as numbers."""

    name, version = "nowhere", 0

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        pass

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        pass


def _in_use() -> dict[str, float]:
    """What the process has now: memory in MiB, and the number of other things."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    found = {"resident memory": pages * os.sysconf("SC_PAGE_SIZE") / MIB}
    for name, folder in ("open files", "fd"), ("threads", "task"):
        found[name] = float(len(os.listdir(f"/proc/self/{folder}")))
    if torch.cuda.is_available():
        found["GPU pages"] = torch.cuda.memory_reserved() / MIB
    return found


def fit(
    steps: int, callbacks: Sequence[Callback], graphs: GraphCapture | None, start: int = 0
) -> None:
    gpu = torch.cuda.is_available()
    seed_everything(1, verbose=False)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    trainer = Trainer(
        accelerator="gpu" if gpu else "cpu",
        devices=ranks,
        strategy="ddp",
        max_steps=steps,
        max_epochs=-1,
        use_distributed_sampler=False,
        logger=Nowhere(),
        log_every_n_steps=READ_EVERY,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        callbacks=[*callbacks, *[graphs] * (graphs is not None)],
    )
    trainer.fit(Classifier(), DataLoader(Batches(rank, start), batch_size=None, pin_memory=gpu))
    faulthandler.register(signal.SIGUSR1)  # the end of a fit of Lightning has taken it back


def program(folder: Path, rank: int, steps: int, way: str, victim: int, seed: int) -> None:
    """What each rank runs: eager and long fits, and steps in which one of them is killed."""
    for stream in (1, 2):
        os.dup2(os.open(folder / f"{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    be_quiet()
    options: dict[str, Any] = {
        "on_failure": "raise",
        "backend": "cuda" if torch.cuda.is_available() else "emulated",
        "only_if_faster": False,
    }
    faulthandler.register(signal.SIGUSR1)
    at = folder / f"{rank}.at"
    at.write_text("begun")
    if steps:
        found = _long(steps, seed, GraphCapture(**options), at)
        (folder / f"{rank}.json").write_text(json.dumps(found))
    if way:
        last = SHORT if way == "step" else LAST
        callbacks: list[Callback] = [Notes(at, "ahead of a kill"), Waits(way, last)]
        callbacks += [Reads()] * (way == "read")
        if rank == victim:
            callbacks[1] = Killed(last)
        fit(last + 10 * READ_EVERY, callbacks, GraphCapture(**options))


def _long(steps: int, seed: int, graphs: GraphCapture, at: Path) -> dict[str, Any]:
    """Train long with graphs, and eagerly what comes first and last; what came of it."""
    count = min(EAGER, steps // 2)
    first, last = range(count), range(steps - count, steps)
    eager = [Losses(first), Losses(range(BUCKETS, BUCKETS + count))]
    captured = [Losses(first), Losses(last)]
    fit(count, [eager[0], Notes(at, "first eager steps")], None)
    looks, notes = Looks(steps), Notes(at, "captured steps")
    fit(steps, [*captured, Reads(), Delays(seed), looks, notes], graphs)
    began, notes = Began(captured[1].state), Notes(at, "last eager steps")
    fit(BUCKETS + count, [began, eager[1], notes], None, last.start - BUCKETS)
    said = graphs._statistics
    return {
        **looks.found,
        "losses": [[one.numbers() for one in ways] for ways in (eager, captured)],
        "decisions": [said.captures, said.replayed, said.fallbacks],
    }


# ---------------------------------------------------------------------- the parent


def run(
    steps: int, way: str, ranks: int, seed: int, seconds: float, victim: int | None = None
) -> Iterator[Row]:
    """Start the ranks, see them end, and judge what they have written and said.

    Args:
        steps: Of the long fit; without any there is none.
        way: How the others wait when a rank is killed; empty if none is.
        ranks: Their number.
        seed: Of the steps in which ranks are delayed, and of which one is killed.
        seconds: How long all may take.
        victim: The rank that is killed, if it is not drawn.
    """
    if victim is None:
        victim = random.Random(seed).randrange(ranks)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        given = [(folder, rank, steps, way, victim, seed) for rank in range(ranks)]
        started = launched(program, given, {})
        ended: dict[int, float] = {}
        try:
            _wait(started, ended, folder, seconds)
        finally:
            _end(started, folder)
        logs = [_text(folder / f"{rank}.log") for rank in range(ranks)]
        found = {rank: _text(folder / f"{rank}.json") for rank in range(ranks)}
    if steps:
        yield from _judged([json.loads(text) for text in found.values() if text], ranks, steps)
        for rank in [rank for rank, text in found.items() if not text]:
            print(f"  rank {rank} said: {logs[rank][-3500:]}", flush=True)
    if way:
        yield from _lost(started, ended, logs, way, victim)


def _wait(started: Sequence[Any], ended: dict[int, float], folder: Path, seconds: float) -> None:
    """Wait until all ranks have ended, some do not after others have, or none goes on.

    Args:
        started: Their processes.
        ended: Is given the seconds after which each has ended.
        folder: Where they write how far they are; that of rank 0 is printed.
        seconds: How long all may take.
    """
    begun = heard = time.monotonic()
    said, notes, is_quiet = begun, [""] * len(started), False
    while len(ended) < len(started):
        time.sleep(0.05)
        now = time.monotonic()
        for rank, process in enumerate(started):
            if rank not in ended and not process.is_alive():
                ended[rank], heard = now - begun, now
        found = [_text(folder / f"{rank}.at") or note for rank, note in enumerate(notes)]
        if found != notes or not all(notes):
            if is_quiet:
                print(f"  they go on after {now - heard:.0f} s", flush=True)
            notes, heard, is_quiet = found, now, False
            if now - said > SAYS_EVERY:
                said = now
                print(f"  {notes[0] or 'not begun'}, after {now - begun:.0f} s", flush=True)
        if now - heard > QUIET and not is_quiet:
            is_quiet = True
            _say_where(started, folder, f"has said nothing for {QUIET} s")
        first = min(ended.values(), default=float("inf"))
        if now - begun > min(seconds, first + LOOKS_FOR) or now - heard > STALLS:
            break


def _end(started: Sequence[Any], folder: Path) -> None:
    """End the ranks that have not ended, and print where they waited."""
    _say_where(started, folder, "is ended")
    for process in started:
        process.kill()
    for process in started:
        process.join(LOOKS_FOR)  # a device may hold it


def _say_where(started: Sequence[Any], folder: Path, why: str) -> None:
    """Print where the ranks are that have not ended: their Python, and what each thread does."""
    alive = [rank for rank, process in enumerate(started) if process.is_alive()]
    notes = {rank: _text(folder / f"{rank}.at") for rank in alive}
    for rank in alive:
        if notes[rank]:  # else the signal would end it
            os.kill(started[rank].pid, signal.SIGUSR1)
    time.sleep(1.0 if alive else 0.0)
    for rank in alive:
        print(f"  rank {rank} {why} ({notes[rank] or 'not begun'})", flush=True)
        print(f"    threads: {_threads(started[rank].pid)}", flush=True)
        print(f"    said: {_text(folder / f'{rank}.log')[-7000:]}", flush=True)


def _threads(process: int) -> str:
    """What the threads of a process are called, and do: run (R), or wait for what (S, D)."""
    found = []
    for task in Path(f"/proc/{process}/task").glob("*"):
        with contextlib.suppress(OSError):
            name, _, rest = (task / "stat").read_text().partition("(")[2].rpartition(") ")
            found.append(f"{name} {rest[0]} {_text(task / 'wchan')}".rstrip(" 0"))
    return ", ".join(sorted(found))


def _text(path: Path) -> str:
    """What a rank has written; empty if there is nothing."""
    return path.read_text(errors="replace") if path.exists() else ""


def _judged(found: Sequence[dict[str, Any]], ranks: int, steps: int) -> Iterator[Row]:
    name = f"{ranks} ranks, {steps} steps"
    if len(found) < ranks:
        yield Row(f"{name}: ranks that did not get there", ranks - len(found), "", 0.0, False)
        return
    differ = [one for one in found if one["weights"] != found[0]["weights"]]
    pairs = [zip(*ways, strict=True) for one in found for ways in zip(*one["losses"], strict=True)]
    wrong, compared = 0, 0
    for eager, captured in itertools.chain.from_iterable(pairs):
        wrong, compared = wrong + (eager != captured), compared + 1
    captures, replayed, fallbacks = found[0]["decisions"]
    same = all(one["decisions"] == found[0]["decisions"] for one in found) and not fallbacks
    detail = f"{replayed} replays, {captures} captures, {max(o['seconds'] for o in found):.0f} s"
    healthy = same and replayed > steps * 0.8 - 40
    yield Row(f"{name}: ranks that differ from rank 0", len(differ), "", 0.0, healthy, detail)
    detail = f"of {compared}, of the first and of the last steps"
    yield Row(f"{name}: losses unlike eager's", wrong, "", 0.0, healthy, detail)
    for what in found[0]["grown"]:
        grown = max(one["grown"][what] for one in found)
        unit = "MiB" if LIMITS[what] else ""
        yield Row(f"{name}: {what} grew by", grown, unit, LIMITS[what], healthy)


def _lost(
    started: Sequence[Any], ended: dict[int, float], logs: Sequence[str], way: str, victim: int
) -> Iterator[Row]:
    others = [rank for rank in range(len(started)) if rank != victim]
    late = max((ended.get(rank, float("inf")) for rank in others), default=0.0)
    seconds = late - ended.get(victim, 0.0)
    name = f"rank {victim} killed, others {WAITS[way]}"
    codes = [process.exitcode for process in started]
    was_killed = codes[victim] == -signal.SIGKILL and victim in ended
    yield Row(
        f"{name}: seconds until all had ended", seconds, "s", ENDS_WITHIN, was_killed, str(codes)
    )
    silent = [rank for rank in others if logs[rank].count(SAID.format(victim)) != 1]
    yield Row(f"{name}: ranks that do not say so once", len(silent), "", 0.0, was_killed)
    for rank in others:
        for line in logs[rank].splitlines():
            if SAID.format(victim) in line:
                print(f"  rank {rank}: {line}", flush=True)
    for rank in silent:
        print(f"  rank {rank} said: {logs[rank][-3500:]}", flush=True)
