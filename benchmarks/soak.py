"""Long fits with graphs: bounded memory, and the same trajectory after every kill.

Three things are shown, each with a figure and a limit; the exit code is 1 if one is missed.

* Replays: a fit of one shape. Memory of the host (resident, and Python's own) and of the device is
  compared with what it was after the first tenth.
* Recaptures: a fit in which a parameter moves again and again, so that every move releases the
  graphs and captures others; as whole steps and as submodules.
* Kills: a process that trains and writes checkpoints gets SIGKILL at a random step, another one
  resumes from the last checkpoint, and so on. The loss of every step is that of a fit that was not
  killed, to the last bit.

    python benchmarks/soak.py [--replays 20000] [--moves 300] [--kills 3] [--json PATH]
    python benchmarks/soak.py --ranks 4 [--replays 20000]

With ``--ranks`` another fit is made in their place, on so many GPUs; see ``soak_ranks.py``.

Runs on a GPU where there is one; without, the rehearsal on the CPU shows the host's part.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import tracemalloc
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import soak_ranks
import torch
from harness import Row, describe_environment
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_graphs import GraphCapture

MIB = 2**20
SAMPLES = 10  # of memory, in the course of a fit
VISIT = 16  # steps between two moves of a parameter: replays repay most of the captures
CHECKPOINT_EVERY = 5
STEPS_PER_KILL = 25
# Growth in MiB. The allocators of C and of the driver keep pages, Python's own memory may not grow.
LIMITS = {"resident memory": 32.0, "Python's memory": 1.0, "GPU memory": 1.0, "GPU pages": 32.0}
Shape = Callable[[int], int]


def one_shape(_: int) -> int:
    return 32


class Moving(Callback):
    """Gives a parameter memory of its own after so many steps, again and again."""

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        if trainer.global_step % VISIT == 0:
            weight = next(module.parameters())
            self._memory = weight.data.clone()
            weight.data = self._memory


class Batches(IterableDataset[tuple[Tensor, Tensor]]):
    """The batch of every step from ``start`` on; each depends on the number of its step only."""

    def __init__(self, shape: Shape, start: int, stop: int) -> None:
        self._shape = shape
        self._steps = range(start, stop)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator()
        for step in self._steps:
            generator.manual_seed(step)
            rows = self._shape(step)
            yield (
                torch.randn(rows, 32, generator=generator),
                torch.randint(0, 8, (rows,), generator=generator),
            )


class Classifier(LightningModule):
    """Small, with random numbers, buffers and an optimizer that has state."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(32, 64), nn.BatchNorm1d(64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 8)
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, fused=True)


class Memory(Callback):
    """How much memory there is, at equal distances in a fit.

    Args:
        every: Steps between two looks.
    """

    def __init__(self, every: int) -> None:
        self._every = every
        self.samples: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step % self._every == 0:
            if not tracemalloc.is_tracing():
                tracemalloc.start()  # later than what the first capture imports
            self.samples.append(memory())

    def growth(self) -> dict[str, float]:
        """MiB by which anything grew after the first tenth of the fit."""
        settled, *later = self.samples[max(1, len(self.samples) // 10) :]
        return {name: max(s[name] for s in later) - settled[name] for name in settled}


def memory() -> dict[str, float]:
    """MiB in use now: by the process, by Python's objects, on the device; garbage is no use."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    found = {
        "resident memory": pages * os.sysconf("SC_PAGE_SIZE") / MIB,
        "Python's memory": tracemalloc.get_traced_memory()[0] / MIB,
    }
    if torch.cuda.is_available():
        found["GPU memory"] = torch.cuda.memory_allocated() / MIB
        found["GPU pages"] = torch.cuda.memory_reserved() / MIB
    return found


class Ledger(Callback):
    """Writes the loss of every step, exactly, and ends the process at one of them.

    Dropout depends on the step alone, so that a resumed fit draws what the killed one would have.

    Args:
        path: The file.
        killed_at: The step after which the process gets SIGKILL; never, if negative.
    """

    def __init__(self, path: Path, killed_at: int = -1) -> None:
        self.path = path
        self._killed_at = killed_at

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        torch.manual_seed(trainer.global_step)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        with self.path.open("a") as file:
            file.write(f"{trainer.global_step} {float(outputs['loss']).hex()}\n")
        if trainer.global_step == self._killed_at:
            os.kill(os.getpid(), signal.SIGKILL)


def losses(path: Path) -> dict[int, str]:
    """The loss of each step; what was trained twice counts as the last one had it."""
    return dict((int(step), loss) for step, loss in map(str.split, path.read_text().splitlines()))


def fit(
    scope: str,
    shape: Shape,
    steps: int,
    callbacks: Sequence[Callback],
    *,
    start: int = 0,
    checkpoint: Path | None = None,
) -> GraphCapture:
    """Train up to ``steps``; the callback that did it."""
    seed_everything(1, verbose=False)
    gpu = torch.cuda.is_available()
    graphs = GraphCapture(
        scope=scope,
        modules=["net"] if scope == "modules" else None,
        on_failure="raise",
        backend="cuda" if gpu else "emulated",
    )
    trainer = Trainer(
        accelerator="gpu" if gpu else "cpu",
        devices=1,
        max_steps=steps,
        max_epochs=-1,
        logger=False,
        enable_checkpointing=any(isinstance(one, ModelCheckpoint) for one in callbacks),
        enable_model_summary=False,
        enable_progress_bar=False,
        callbacks=[*callbacks, graphs],
    )
    loader = DataLoader(Batches(shape, start, steps), batch_size=None, pin_memory=gpu)
    trainer.fit(Classifier(), loader, ckpt_path=checkpoint)
    assert trainer.global_step == steps
    return graphs


# ---------------------------------------------------------------------- memory


def soaked(
    name: str, scope: str, steps: int, every: int, others: Sequence[Callback] = ()
) -> Iterator[Row]:
    """Rows about the memory of one long fit."""
    looks = Memory(every)
    begun = time.perf_counter()
    done = fit(scope, one_shape, steps, [looks, *others])._statistics
    took = time.perf_counter() - begun
    tracemalloc.stop()
    detail = f"{done.replayed} replays, {done.captures} captures in {took:.0f} s"
    healthy = not done.fallbacks and done.replayed > 0
    for what, grown in looks.growth().items():
        yield Row(f"{name}, {what} grew by", grown, "MiB", LIMITS[what], healthy, detail)


def replays(count: int) -> Iterator[Row]:
    """One shape: five eager steps, and then nothing but replays."""
    steps = count + 5
    yield from soaked(f"{count} replays", "step", steps, max(1, steps // SAMPLES))


def recaptures(count: int, scope: str) -> Iterator[Row]:
    """Memory is compared ahead of the moves."""
    name = f"{count} recaptures, scope={scope!r}"
    yield from soaked(name, scope, count * VISIT, VISIT, [Moving()])


# ---------------------------------------------------------------------- kills


def resumed(directory: Path, steps: int, killed_at: int) -> None:
    """Train on from the last checkpoint there is, and write checkpoints and losses."""
    found = {int(path.stem): path for path in directory.glob("*.ckpt")}
    start = max(found, default=0)
    keeping = ModelCheckpoint(
        directory,
        filename="{step}",
        auto_insert_metric_name=False,
        every_n_train_steps=CHECKPOINT_EVERY,
        save_top_k=-1,
    )
    ledger = Ledger(directory / "losses.txt", killed_at)
    fit("step", one_shape, steps, [ledger, keeping], start=start, checkpoint=found.get(start))


def kills(count: int, draw: random.Random) -> Row:
    """Killed ``count`` times at random steps, against a fit that was not."""
    steps = (count + 1) * STEPS_PER_KILL
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        killed_at = sorted(draw.sample(range(CHECKPOINT_EVERY, steps), count))
        for step in killed_at:
            command = [sys.executable, __file__, "--train", name, str(steps), str(step)]
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, check=False
            )
            if done.returncode != -signal.SIGKILL:
                raise RuntimeError(f"the process that was to be killed said: {done.stderr}")
        resumed(directory, steps, -1)
        whole = directory / "whole.txt"
        fit("step", one_shape, steps, [Ledger(whole)])
        mine, theirs = losses(directory / "losses.txt"), losses(whole)
    wrong = [step for step in theirs if mine.get(step) != theirs[step]]
    complete = len(theirs) == steps and mine.keys() == theirs.keys()
    name = f"{count} kills: losses unlike those of an uninterrupted fit"
    detail = f"{steps} steps, killed after {', '.join(map(str, killed_at))}"
    return Row(name, float(len(wrong)), "", 0.0, complete and not wrong, detail)


# ---------------------------------------------------------------------- command line


def be_quiet() -> None:
    """Say nothing but results; a step that runs eagerly is an error of this benchmark."""
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--replays", type=int, default=20_000)
    parser.add_argument(
        "--moves",
        type=int,
        default=300,
        help="moves of a parameter, 18 at least; on a GPU more, for workspaces of libraries",
    )
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--ranks", type=int, help="train on so many ranks in place of all this")
    several = {"type": lambda text: text.split(","), "default": [*soak_ranks.WAITS]}
    parser.add_argument("--waits", help="how others wait for the rank that is killed", **several)
    parser.add_argument("--seconds", type=float, default=900, help="of a fit on several ranks")
    parser.add_argument("--seed", type=int, help="of the steps at which processes are killed")
    parser.add_argument("--json", type=Path, help="write environment and rows to this file")
    parser.add_argument("--train", nargs=3, help=argparse.SUPPRESS)  # what a killed process runs
    options = parser.parse_args(arguments)
    be_quiet()
    if options.train:
        directory, steps, killed_at = options.train
        resumed(Path(directory), int(steps), int(killed_at))
        return 0
    begun = time.perf_counter()
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(2**32)
    print(f"{describe_environment()}, seed {seed}", flush=True)
    rows: list[Row] = []
    sections = [
        replays(options.replays),
        recaptures(options.moves, "step"),
        recaptures(options.moves, "modules"),
        iter([kills(options.kills, random.Random(seed))]),
    ]
    if options.ranks:
        given = (options.ranks, seed, options.seconds)
        sections = [soak_ranks.run(options.replays, options.waits[0], *given)]
        sections += [soak_ranks.run(0, way, *given) for way in options.waits[1:]]
    for section in sections:
        for row in section:
            rows.append(row)
            figure = f"{row.figure:8.2f} {row.unit:3} (limit {row.limit:g})"
            print(f"{row.name:<58}{figure:<28}{row.verdict:<6}{row.detail}", flush=True)
    print(f"{time.perf_counter() - begun:.0f} s in all")
    if options.json:
        found = [{**asdict(row), "verdict": row.verdict} for row in rows]
        written = {"environment": describe_environment(), "seed": seed, "rows": found}
        options.json.write_text(json.dumps(written, indent=1))
    return 0 if all(row.verdict == "PASS" for row in rows) else 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ranks are ended, and say where
    sys.exit(main())
