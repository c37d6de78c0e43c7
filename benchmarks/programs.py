"""Lightning programs as people write them, tiny: what is replayed, is it right, what is said?

Each row is a program of `program_modules.py`. It is trained three times from the same weights on
the same batches: twice without the callback, and with ``GraphCapture(only_if_faster=False)``. A row
says

- what was replayed: the whole step, submodules, or nothing (``eager``), and if it is not the whole
  step, what the refusal says that it has observed, with file and line;
- how many captures and replays there were;
- whether what the program logs at each step, and its parameters and buffers at the end, are to the
  last bit those of the eager fit, where two eager fits are the same.

The exit status is 1 unless 75 % of the programs are whole steps, not more than 2 % replay nothing,
none crashed, and every row whose eager fits are equal equals them.

    python benchmarks/programs.py [--rows NAME,NAME] [--jobs 10] [--json PATH] [--markdown PATH]

``--tiny`` runs it on the CPU and the emulated backend.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import step
import torch
import zoo
from harness import Lab, describe_environment
from lightning.pytorch import Callback, Trainer, seed_everything
from program_modules import PROGRAMS
from torch import Tensor
from zoo import Found, Outcome

from lightning_graphs import GraphCapture

EPOCHS, STEPS = 2, 24
NOT_WHOLE_LIMIT, EAGER_LIMIT = 25.0, 2.0  # percent


class Logged(Callback):
    """Keeps what a program has logged after each step, one number for all of it."""

    def __init__(self) -> None:
        self.steps: list[Tensor] = []

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        values = [torch.as_tensor(v).double().cpu() for v in trainer.callback_metrics.values()]
        self.steps.append(torch.stack(values).sum())


def fit(name: str, lab: Lab, graphs: GraphCapture | None = None) -> Outcome:
    """Train a program."""
    program, logged = PROGRAMS[name], Logged()
    seed_everything(1, verbose=False)
    module = program.module()
    trainer = Trainer(
        accelerator="cpu" if lab.dry else "gpu",
        devices=1,
        max_epochs=EPOCHS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[logged, *([] if graphs is None else [graphs])],
        **program.trainer,
    )
    trainer.fit(module, program.data())
    state = {key: value.detach().cpu().clone() for key, value in module.state_dict().items()}
    return Outcome(torch.stack(logged.steps), state)


def measure(name: str, lab: Lab) -> Found:
    """All fits of one row."""
    lab.clean()
    started = time.perf_counter()
    found: Found = {"row": name}
    graphs = GraphCapture(only_if_faster=False, backend="emulated" if lab.dry else "auto")
    try:
        first, second = fit(name, lab), fit(name, lab)
    except Exception as error:
        return {**found, "scope": "unavailable", **zoo.failure(error, lab)}
    try:
        captured = fit(name, lab, graphs)
    except Exception as error:
        return {**found, "scope": "crashed", **zoo.failure(error, lab)}
    counted = graphs.report
    return {
        **found,
        "losses": first.losses.tolist(),
        "scope": zoo.scope_of(graphs, STEPS),
        "why": zoo.reason(counted.fallbacks),
        "captures": sum(record.captures for record in counted.graphs),
        "replayed": counted.replayed,
        "fallbacks": counted.fallbacks,
        "repeatable": not second.differs(first) and bool(first.losses.isfinite().all()),
        "differs": captured.differs(first),
        "difference": captured.difference(first),
        "seconds": time.perf_counter() - started,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rows", help="names, commas between (default: all)")
    parser.add_argument("--jobs", type=int, default=10, help="processes (default: %(default)s)")
    parser.add_argument("--limit", type=float, default=60, help="seconds for each row")
    parser.add_argument("--json", type=Path, help="write everything to this file")
    parser.add_argument("--markdown", type=Path, help="write a table to this file")
    parser.add_argument("--tiny", action="store_true", help="a rehearsal on the CPU")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if not (options.tiny or torch.cuda.is_available()):
        print("This benchmark needs a GPU; --tiny rehearses it on the CPU.")
        return 0
    if options.worker:
        step.be_quiet()
        torch.set_num_threads(1)  # there are as many processes
        zoo.work(partial(measure, lab=Lab(options.tiny)))
        return 0
    names = list(PROGRAMS) if options.rows is None else options.rows.split(",")
    if unknown := [name for name in names if name not in PROGRAMS]:
        parser.error(f"--rows: there is no {', '.join(unknown)}")
    environment = describe_environment()
    print(f"{environment}: {' '.join(sys.argv)}", flush=True)
    flags = ["--tiny"] if options.tiny else []
    jobs = min(options.jobs, len(names))
    found = zoo.in_processes(__file__, names, flags, jobs, options.limit)
    rows = zoo.summary(found, limits=True, not_whole=NOT_WHOLE_LIMIT, eager=EAGER_LIMIT)
    said = zoo.totals(found, "programs")
    parts = ["# Programs", f"{environment}: `python benchmarks/programs.py`.", f"{said}."]
    page = "\n\n".join([*parts, zoo.table("program", found)]) + "\n"
    verdict = zoo.conclude(found, rows, said, options, page)
    return 0 if verdict == "PASS" else 1


if __name__ == "__main__":
    sys.exit(main())
