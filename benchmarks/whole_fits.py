"""Whole fits with the callback's defaults: wall time, with captures, verifications and warm-up.

Each row trains one model from the same weights: eager, with ``GraphCapture()``, and with settings
that a user who knows the program might choose; one after the other, ``--rounds`` times in both
orders, and up to five times as often where fits are short: the same fit takes 5 % more or less from
one time to the next. From the second round on only what is near the best of the settings runs, and
the eager fit only where the defaults are near it. Medians are compared with those of the eager fit
and of the best of the settings. Before that the process trains the model eagerly for a while, and a
tiny one with the callback, so that kernels are loaded and modules imported. The losses of all steps
are compared in the fits that are timed: they equal those of the eager fits, of which that while is
one, to the last bit where these equal each other; otherwise they differ by at most 1e-3 of the loss
and ten times what lies between eager fits up to that step.

Memory is what the allocator reserves at most, in the whole fit and in its last third, over the same
of the eager fit. It has limits where the eager fit takes 4 GiB or more; of less, much is the
workspaces of libraries.

Every row runs in a process of its own, ``--jobs`` at a time on one GPU; ratios are taken within a
process, and the row that is bound by the GPU waits until it has that for itself.

    python benchmarks/whole_fits.py [--rows "13 lengths,15 steps"] [--jobs 6] [--seconds 100]
        [--json PATH]

``--tiny`` runs all of it small, on the CPU and the emulated backend; no time means anything then.
"""

from __future__ import annotations

import argparse
import copy
import math
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import step
import torch
from cases import ROWS, Batch, Case, Settings
from harness import (
    LAST_THIRD_LIMIT,
    PEAK_LIMIT,
    Lab,
    Row,
    gpu_time,
    measure_rows,
    peak_memory,
    verdict_of,
)
from lightning.pytorch import Callback, Trainer
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_graphs import GraphCapture
from lightning_graphs.report.messages import Statistics

TO_EAGER, TO_BEST = 1.02, 1.10
SHORT, SHORT_TO_EAGER = 2.0, 1.05
"""Fits of fewer seconds scatter by more than the limit of others."""
NEAR = 0.85
"""The faster of two fits takes at least this part of the slower one's time: both run once more."""
WORTH_A_LIMIT = 4096  # MiB
CLOSE, SPREAD = 1e-3, 10
VALIDATE_EVERY = 20  # steps


@dataclass(frozen=True)
class Outcome:
    """One fit.

    Attributes:
        seconds: Wall time.
        losses: Of each step.
        peak: MiB that the allocator reserved at most.
        last_third: The same in the last third of the steps.
        captures, replayed, fallbacks: What the callback counted.
    """

    seconds: float
    losses: list[float]
    peak: float
    last_third: float
    captures: int
    replayed: int
    fallbacks: list[str]


class Module(step.Module):
    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("validation_loss", self.net(*batch))


class Probe(Callback):
    """Keeps the loss of each step, and the peak of memory before the last third of them."""

    def __init__(self, steps: int) -> None:
        self.losses: list[Tensor] = []
        self.peak = 0.0
        self._last_third = steps * 2 // 3

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, *args: Any) -> None:
        self.losses.append(outputs["loss"].detach().clone())
        if len(self.losses) == self._last_third:
            self.peak = peak_memory()


def fit(case: Case, settings: Settings | None, lab: Lab, steps: int = -1) -> Outcome:
    """One fit, with the callback unless ``settings`` is None."""
    graphs = None
    if settings is not None:
        graphs = GraphCapture(**settings, backend="emulated" if lab.dry else "auto")
    probe = Probe(len(case.batches))
    module = Module(copy.deepcopy(case.net))
    trainer = Trainer(
        accelerator="cpu" if lab.dry else "gpu",
        devices=1,
        precision="bf16-mixed",
        max_epochs=1,
        max_steps=steps,
        val_check_interval=VALIDATE_EVERY if case.validation else None,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        callbacks=[probe] if graphs is None else [probe, graphs],
    )
    train, validation = (DataLoader(b, batch_size=None) for b in (case.batches, case.validation))
    torch.manual_seed(1)
    lab.clean()
    peak_memory()
    started = time.perf_counter()
    trainer.fit(module, train, validation if case.validation else None)
    lab.synchronize()
    seconds = time.perf_counter() - started
    last_third = peak_memory()
    counted = Statistics() if graphs is None else graphs._statistics
    return Outcome(
        seconds,
        torch.stack(probe.losses).tolist(),
        max(probe.peak, last_third),
        last_third,
        counted.captures,
        counted.replayed,
        counted.fallbacks,
    )


def equal_eager(losses: list[float], eager: Sequence[list[float]]) -> bool:
    """Whether losses are those of the eager fits; the text above says what that means.

    All but the first of those may have fewer steps.
    """
    first, *others = eager
    if are_equal(eager):
        return losses == first
    spread = 0.0
    for i, (loss, reference) in enumerate(zip(losses, first, strict=True)):
        further = [other[i] for other in others if i < len(other)]
        spread = max([spread, *(abs(other - reference) for other in further)])
        if not abs(loss - reference) <= CLOSE * abs(reference) + SPREAD * spread:
            return False
    return True


def are_equal(eager: Sequence[list[float]]) -> bool:
    """Whether eager fits equal each other, as far as they go."""
    first, *others = eager
    return all(other == first[: len(other)] for other in others)


def measure(name: str, rounds: int, tiny: bool, seconds: float = math.inf) -> dict[str, Any]:
    """All fits of one row; after so many seconds no further round begins."""
    began = time.perf_counter()
    lab = Lab(tiny)
    torch.manual_seed(0)
    case = ROWS[name](tiny)
    settings: dict[str, Settings | None] = {"eager": None, "defaults": {}}
    settings |= {", ".join(f"{k}={v!r}" for k, v in by.items()): by for by in case.by_hand}
    found: dict[str, list[Outcome]] = {key: [] for key in settings}
    with nullcontext() if tiny else gpu_time(alone=case.alone):
        if not tiny:
            case = replace(case, batches=pinned(case.batches), validation=pinned(case.validation))
        before = fit(case, None, lab, steps=max(15, len(case.batches) // 8)).losses
        net, batch = step.tiny()
        fit(Case(net, [batch() for _ in range(12)], ()), {}, lab)
        for i in range(rounds * case.repeats):
            if time.perf_counter() - began < seconds:
                for key in in_round(i, found):
                    found[key].append(fit(case, settings[key], lab))
    return summary(name, found, before, case.to_eager, tiny)


def in_round(number: int, found: dict[str, list[Outcome]]) -> list[str]:
    """What runs in a round: all, later what decides. Every second round is in reverse order."""
    keys = list(found)
    if number:
        seconds = {key: statistics.median(one.seconds for one in found[key]) for key in keys}
        best = min(seconds[key] for key in keys[2:])
        eager = ["eager"] if seconds["defaults"] >= NEAR * seconds["eager"] else []
        keys = [*eager, "defaults", *(k for k in keys[2:] if NEAR * seconds[k] <= best)]
    return keys[:: -1 if number % 2 else 1]


def summary(
    name: str,
    found: dict[str, list[Outcome]],
    before: list[float],
    to_eager: float | None,
    tiny: bool,
) -> dict[str, Any]:
    """What the fits of a row show; ``before`` has losses of an eager one, which may be shorter."""
    seconds = {key: statistics.median(one.seconds for one in fits) for key, fits in found.items()}
    (eager, *_), (default, *_) = found["eager"], found["defaults"]
    best = min(list(found)[2:], key=seconds.__getitem__)
    expected = [*(one.losses for one in found["eager"]), before]
    wrong = [k for k, f in found.items() if not all(equal_eager(o.losses, expected) for o in f)]
    peak, end = default.peak / eager.peak, default.last_third / eager.last_third
    limits = (PEAK_LIMIT, LAST_THIRD_LIMIT) if eager.peak >= WORTH_A_LIMIT else (None, None)
    to_eager = to_eager or (TO_EAGER if seconds["eager"] >= SHORT else SHORT_TO_EAGER)
    rows = [
        Row("to eager", seconds["defaults"] / seconds["eager"], "x", to_eager, not wrong),
        Row("to best", seconds["defaults"] / seconds[best], "x", TO_BEST, not wrong),
        Row("memory", peak, "x", limits[0], not wrong),
        Row("memory of the last third", end, "x", limits[1], not wrong),
    ]
    if tiny:
        rows = [replace(row, limit=None) for row in rows]
    return {
        "row": name,
        "seconds": seconds,
        "fits": {key: len(fits) for key, fits in found.items()},
        "best": best,
        "captures": default.captures,
        "replayed": default.replayed,
        "fallbacks": default.fallbacks,
        "eager fits equal": are_equal(expected),
        "wrong": wrong,
        "figures": {row.name: row.figure for row in rows if row.figure == row.figure},
        "verdict": verdict_of(rows),
    }


def pinned(batches: Sequence[Batch]) -> list[Batch]:
    """In memory that is copied to the GPU as the workers of a loader deliver it."""
    return [tuple(tensor.pin_memory() for tensor in batch) for batch in batches]


TABLE = "{:<30}{:>8}{:>8}{:>7}{:>8}{:>8}{:>7}{:>9}{:>9}{:>10}  {:<13}{}"
TITLES = ("", "eager s", "with s", "ratio", "to best", "memory", "end", "captures", "replayed")
TITLES += ("fallbacks", "", "best by hand")


def line(found: dict[str, Any]) -> str:
    """A row of the table, and which fits had other losses than the eager ones."""
    if "error" in found:
        return f"{found['row']:<30}{found['verdict']}\n{found['error']}"
    seconds, best = found["seconds"], found["best"]
    times = (f"{seconds[key]:.2f}" for key in ("eager", "defaults"))
    figures = [f"{figure:.3f}" for figure in found["figures"].values()]
    figures += ["-"] * (4 - len(figures))  # no memory without a GPU
    counts = (found["captures"], found["replayed"], len(found["fallbacks"]))
    count = found["fits"]["defaults"]
    remark = f"{seconds[best]:.2f} s: {best}, of {count} fits"
    row = TABLE.format(found["row"], *times, *figures, *counts, found["verdict"], remark)
    return "\n    other losses with ".join([row, *found["wrong"]])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rows", default=",".join(ROWS), help="names, with commas between")
    parser.add_argument("--rounds", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--jobs", type=int, default=6, help="rows at a time (default: %(default)s)")
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="of a row: then no further round begins"
    )
    parser.add_argument("--json", "--out", type=Path, help="write everything to this file")
    parser.add_argument("--tiny", action="store_true", help="small and on the CPU, without limits")
    options = parser.parse_args(arguments)
    names = options.rows.split(",")
    if unknown := [name for name in names if name not in ROWS]:
        parser.error(f"--rows: {', '.join(unknown)} is none of {', '.join(ROWS)}")
    if not (options.tiny or torch.cuda.is_available()):
        print("This benchmark needs a GPU: times on a CPU say nothing about CUDA graphs.")
        return 0
    step.be_quiet()
    heading = TABLE.format(*TITLES)
    flags = ["--rounds", str(options.rounds), "--seconds", str(options.seconds)]
    flags += ["--tiny"] if options.tiny else []
    here = partial(measure, rounds=options.rounds, seconds=options.seconds, tiny=options.tiny)
    jobs, path = options.jobs, options.json
    return measure_rows(__file__, names, flags, here, line, heading, jobs=jobs, path=path)


if __name__ == "__main__":
    sys.exit(main())
