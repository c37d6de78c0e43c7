"""Published architectures, tiny and with random weights: what is replayed, and is it right?

Each row is a class of transformers or a model of timm. It is trained three times from the same
weights on the same batches, under Lightning in bf16-mixed with a fused AdamW: twice eagerly, and
with ``GraphCapture(only_if_faster=False, warmup_steps=3)``. A row says

- what was replayed: the whole step, submodules, or nothing (``eager``), and if it is not the whole
  step, what the refusal says that it has observed, with file and line;
- how many captures and replays there were;
- whether the losses of all steps and the parameters and buffers at the end are, to the last bit,
  those of the eager fit, and whether those of the two eager fits are the same: where they are not,
  or not finite, nothing can be said.

A model that the installed version does not have, or that does not train without the callback, is
``unavailable``; one that fails with it, or takes longer than ``--limit``, has ``crashed``. The exit
status is 1 unless 95 % of the available rows are whole steps, nothing is eager, nothing crashed,
and every row whose eager fits are equal equals them.

Processes, ``--jobs`` of them, take row after row.

    python benchmarks/zoo.py [--rows NAME,NAME] [--jobs 10] [--json PATH] [--markdown PATH]

``--tiny`` runs it on the CPU and the emulated backend; there one generator serves both halves of a
step, so that models that draw on the host are without dropout. ``--eager`` trains two steps without
the callback, to see that a model and its batches fit each other.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gc
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Event, Timer
from typing import Any

import step
import torch
from architectures import ARCHITECTURES, Batch
from harness import Lab, Row, describe_environment, verdict_of
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_graphs import GraphCapture

STEPS = 16
ROOT = Path(__file__).parents[1]
NOT_WHOLE_LIMIT = 5.0  # percent

Found = dict[str, Any]


# ---------------------------------------------------------------------- one row


@dataclass(frozen=True)
class Outcome:
    """What a fit has come to.

    Attributes:
        losses: Of each step.
        state: Parameters and buffers at its end.
    """

    losses: Tensor
    state: dict[str, Tensor]

    def differs(self, other: Outcome) -> str:
        """What is not the same to the last bit, in words; empty if all is."""
        if not _same(self.losses, other.losses):
            return "losses"
        different = (n for n, value in self.state.items() if not _same(value, other.state[n]))
        return next(different, "")

    def difference(self, other: Outcome) -> float:
        """The largest difference of two losses, over the loss."""
        return float(((self.losses - other.losses) / other.losses).abs().max())


def _same(one: Tensor, other: Tensor) -> bool:
    """As ``torch.equal``, but NaN is NaN."""
    both_nan = one.isnan() & other.isnan()
    return one.shape == other.shape and bool(((one == other) | both_nan).all())


class Module(LightningModule):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(**batch)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=2.0**-10, fused=True)


class Losses(Callback):
    """Keeps the loss of each step."""

    def __init__(self) -> None:
        self.losses: list[Tensor] = []

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, *args: Any) -> None:
        self.losses.append(outputs["loss"].detach().clone())


def fit(
    net: nn.Module, batches: Sequence[Batch], lab: Lab, graphs: GraphCapture | None = None
) -> Outcome:
    """Train a copy of a model, a step for each batch."""
    losses, module = Losses(), Module(copy.deepcopy(net))
    trainer = Trainer(
        accelerator="cpu" if lab.dry else "gpu",
        devices=1,
        precision="32-true" if lab.dry else "bf16-mixed",
        max_steps=len(batches),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[losses, *([] if graphs is None else [graphs])],
    )
    seed_everything(1, verbose=False)
    trainer.fit(module, DataLoader(batches, batch_size=None))
    state = {name: value.detach().cpu() for name, value in module.net.state_dict().items()}
    return Outcome(torch.stack(losses.losses).float().cpu(), state)


def measure(name: str, lab: Lab, *, eager: bool = False) -> Found:
    """All fits of one row."""
    lab.clean()
    started = time.perf_counter()
    architecture = ARCHITECTURES[name]
    found: Found = {"row": name}
    graphs = GraphCapture(
        only_if_faster=False, warmup_steps=3, backend="emulated" if lab.dry else "auto"
    )
    try:
        seed_everything(0, verbose=False)
        net = architecture.build(host_draws_alone=lab.dry)
        batches = [architecture.batch(net) for _ in range(2 if eager else STEPS)]
        first = fit(net, batches, lab)
        found["losses"] = first.losses.tolist()
        if eager:
            return {**found, "scope": "eager only", "seconds": time.perf_counter() - started}
        second = fit(net, batches, lab)
    except Exception as error:
        return {**found, "scope": "unavailable", **failure(error, lab)}
    try:
        captured = fit(net, batches, lab, graphs)
    except Exception as error:
        return {**found, "scope": "crashed", **failure(error, lab)}
    counted = graphs.report
    found |= {
        "scope": scope_of(graphs, STEPS),
        "why": reason(counted.fallbacks),
        "captures": sum(record.captures for record in counted.graphs),
        "replayed": counted.replayed,
        "fallbacks": counted.fallbacks,
        "recaptures": counted.recaptures,
        "repeatable": not second.differs(first) and bool(first.losses.isfinite().all()),
        "eager differs": second.differs(first),
        "differs": captured.differs(first),
        "eager difference": second.difference(first),
        "difference": captured.difference(first),
    }
    return {**found, "seconds": time.perf_counter() - started}


def scope_of(graphs: GraphCapture, steps: int) -> str:
    """What was replayed; a whole step counts if the fit stayed with it."""
    records = [record for record in graphs.report.graphs if record.replays]
    if any(record.scope != "step" for record in records):
        return "submodules"
    whole = sum(record.replays for record in records)
    return "whole step" if whole >= steps // 2 else "eager"


def reason(fallbacks: Sequence[str]) -> str:
    """What the first refusal has observed, or else its first sentence."""
    if not fallbacks:
        return ""
    said, *fix = fallbacks[0].splitlines()
    if fix:  # what was tried, the rule, what was observed
        said = said.split(": ", 2)[-1]
    return re.sub(rf"\S*/(site|dist)-packages/|{re.escape(str(ROOT))}/", "", said)


def failure(error: Exception, lab: Lab) -> Found:
    """An error in words; whether this process can go on."""
    inner = traceback.extract_tb(error.__traceback__)[-1]
    said = str(error).strip().splitlines() or [""]
    where = reason([f"{inner.filename}:{inner.lineno}"])
    try:
        lab.synchronize()
        last = False
    except RuntimeError:  # the GPU gave this process up
        last = True
    written = "".join(traceback.format_exception(error))[-4000:]
    return {
        "why": f"{type(error).__name__}: {said[0]} ({where})",
        "traceback": written,
        "last": last,
    }


# ---------------------------------------------------------------------- processes


class Worker:
    """A process that measures the rows that it is told.

    Args:
        script: What it runs.
        flags: Of the script.
        gpu: The one that it sees of several.
    """

    def __init__(self, script: str, flags: Sequence[str], gpu: int) -> None:
        seen = {"CUDA_VISIBLE_DEVICES": str(gpu)} if torch.cuda.device_count() > 1 else {}
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, script, "--worker", *flags],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **seen},
        )
        self._answer()  # all is imported

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def measure(self, name: str, limit: float) -> Found:
        """What was found; the row has crashed if the process ends or takes too long."""
        assert self._process.stdin is not None
        is_late = Event()

        def end() -> None:
            is_late.set()
            self._process.kill()

        timer = Timer(limit, end)
        timer.start()
        started = time.perf_counter()
        try:
            self._process.stdin.write(f"{name}\n")
            self._process.stdin.flush()
            answer = self._answer()
        except BrokenPipeError:
            answer = ""
        timer.cancel()
        if answer:
            found: Found = json.loads(answer)
            return found
        seconds = time.perf_counter() - started
        why = f"took longer than {limit:.0f} s" if is_late.is_set() else "its process ended"
        self._errors.seek(0)
        said = self._errors.read()[-4000:]
        return {
            "row": name, "scope": "crashed", "why": why, "traceback": said, "last": True,
            "seconds": seconds,
        }  # fmt: skip

    def close(self) -> None:
        """Let it end."""
        with contextlib.suppress(BrokenPipeError), self._process:
            pass
        self._errors.close()


def in_processes(
    script: str, names: Sequence[str], flags: Sequence[str], jobs: int, limit: float
) -> list[Found]:
    """Measure rows in several processes, on all GPUs in turn, and print each when it is done."""
    gpus = max(1, torch.cuda.device_count())
    waiting: SimpleQueue[str] = SimpleQueue()
    for name in names:
        waiting.put(name)

    def rows(gpu: int) -> Iterator[Found]:
        worker: Worker | None = None
        try:
            while True:
                try:
                    name = waiting.get_nowait()
                except Empty:
                    return
                worker = worker or Worker(script, flags, gpu)
                found = worker.measure(name, limit)
                print(line(found), flush=True)
                if found.get("last"):
                    worker.close()
                    worker = None
                yield found
        finally:
            if worker is not None:
                worker.close()

    with ThreadPoolExecutor(jobs) as pool:
        parts = [pool.submit(list, rows(job % gpus)) for job in range(jobs)]
        done = {found["row"]: found for part in parts for found in part.result()}
    return [done[name] for name in names]


def work(measure: Callable[[str], Found]) -> None:
    """Measure the rows that standard input names; whatever else is printed goes to the errors."""
    gc.freeze()  # what is imported: to look through it takes half a second
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    print("ready", file=answers, flush=True)
    for name in sys.stdin:
        found = measure(name.strip())
        print(json.dumps(found), file=answers, flush=True)
        if found.get("last"):
            return


# ---------------------------------------------------------------------- what is said


def line(found: Found) -> str:
    """A row in words."""
    seconds = f"{found['seconds']:5.1f} s" if "seconds" in found else ""
    said = f"{found['row']:<47}{found['scope']:<12}{seconds:>8}"
    if "differs" not in found:
        return f"{said}  {found.get('why') or found['losses']}"
    counts = f"{found['captures']:3d} captures {found['replayed']:3d} replayed"
    return f"{said} {counts}  {equality(found):<24} {found['why']}"


def equality(found: Found) -> str:
    """Whether the fit has the results of the eager one, in words."""
    if "differs" not in found:
        return ""
    if not found["differs"]:
        return "equal" if found["repeatable"] else "equal, not repeatable"
    which = f"{found['difference']:.0e}" if found["differs"] == "losses" else found["differs"]
    if found["repeatable"]:
        return f"differs ({which})"
    return "not repeatable"


def summary(
    found: Sequence[Found], *, limits: bool, not_whole: float = NOT_WHOLE_LIMIT, eager: float = 0.0
) -> list[Row]:
    """The counts that have limits, which are percentages."""
    tried = [row for row in found if row["scope"] != "unavailable"]
    counts = Counter(row["scope"] for row in tried)
    repeatable = [row for row in tried if row.get("repeatable")]
    wrong = sum(bool(row["differs"]) for row in repeatable)
    routed = [row for row in tried if row["scope"] == "submodules" and _routes(row.get("why", ""))]
    judged = len(tried) - len(routed)
    other = judged - counts["whole step"]
    share = 100 * other / max(judged, 1)
    apart = f", {len(routed)} mixtures of experts aside" if routed else ""
    nothing = 100 * counts["eager"] / max(len(tried), 1)
    limit = not_whole if limits else None
    return [
        Row("not whole steps", share, "%", limit, True, f"{other} of {judged}{apart}"),
        Row("in eager mode", nothing, "%", eager if limits else None, True),
        Row("crashed", counts["crashed"], "", 0, True),
        Row("differ", wrong, "", 0, not wrong, f"of {len(repeatable)} that repeat themselves"),
    ]


def _routes(why: str) -> bool:
    """Whether a mixture of experts reads on the host which expert gets how many tokens."""
    return "_grouped_mm" in why or "expert_size" in why


def totals(found: Sequence[Found], what: str = "architectures") -> str:
    """The counts in one sentence."""
    scopes = Counter(row["scope"] for row in found)
    repeatable = [row for row in found if row.get("repeatable")]
    equal = sum(not row["differs"] for row in repeatable)
    return (
        f"{len(found)} {what}: "
        + ", ".join(f"{count} {scope}" for scope, count in scopes.most_common())
        + f"; equal to eager training to the last bit: {equal} of {len(repeatable)} that repeat "
        "themselves"
    )


def markdown(found: Sequence[Found], environment: str) -> str:
    """All rows as tables."""
    parts = [
        "# Model zoo",
        f"{environment}. Tiny configurations, random weights, {STEPS} training steps each, "
        "with and without `GraphCapture()`: `python benchmarks/zoo.py`.",
        f"{totals(found)}.",
    ]
    families = {row["row"]: ARCHITECTURES[row["row"]].family for row in found}
    for family in dict.fromkeys(families.values()):
        rows = [row for row in found if families[row["row"]] == family]
        parts += [f"## {family[0].upper()}{family[1:]}", table("architecture", rows)]
    return "\n\n".join(parts) + "\n"


def table(what: str, rows: Sequence[Found]) -> str:
    """Rows as a table."""
    lines = [f"| {what} | graphs | captures | replays | results | why |"]
    lines.append("| --- | --- | --- | --- | --- | --- |")
    for row in rows:
        cells = (row["row"], row["scope"], row.get("captures", ""), row.get("replayed", ""))
        why = re.sub(r"([|\[\]_<])", r"\\\1", row.get("why", ""))
        lines.append(f"| {' | '.join(map(str, cells))} | {equality(row)} | {why} |")
    return "\n".join(lines)


def conclude(
    found: Sequence[Found], rows: Sequence[Row], said: str, options: argparse.Namespace, page: str
) -> str:
    """Print what was found, write the files that the options name, and return the verdict.

    Args:
        found: All rows.
        rows: The counts that have limits.
        said: The counts in one sentence.
        options: Of the command: ``json`` and ``markdown``, each a path or None.
        page: What goes to ``markdown``.
    """
    verdict = verdict_of(rows)
    print(said)
    for row in rows:
        print(f"{row.name:<24}{row.figure:>7.1f} {row.unit:<2}{row.verdict:<14}{row.detail}")
    if options.json is not None:
        written = {"environment": describe_environment(), "command": sys.argv, "rows": found}
        options.json.write_text(json.dumps({**written, "verdict": verdict}, indent=1))
    if options.markdown is not None:
        options.markdown.write_text(page)
    return verdict


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rows", default=",".join(ARCHITECTURES), help="names, commas between")
    parser.add_argument("--jobs", type=int, default=10, help="processes (default: %(default)s)")
    parser.add_argument("--limit", type=float, default=60, help="seconds for each row")
    parser.add_argument("--json", type=Path, help="write everything to this file")
    parser.add_argument("--markdown", type=Path, help="write a table to this file")
    parser.add_argument("--tiny", action="store_true", help="a rehearsal on the CPU")
    parser.add_argument("--eager", action="store_true", help="two steps without the callback")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    names = options.rows.split(",")
    if unknown := [name for name in names if name not in ARCHITECTURES]:
        parser.error(f"--rows: there is no {', '.join(unknown)}")
    if not (options.tiny or torch.cuda.is_available()):
        print("This benchmark needs a GPU; --tiny rehearses it on the CPU.")
        return 0
    if options.worker:
        step.be_quiet()
        torch.set_num_threads(1)  # there are as many processes
        work(partial(measure, lab=Lab(options.tiny), eager=options.eager))
        return 0
    environment = describe_environment()
    print(f"{environment}: {' '.join(sys.argv)}", flush=True)
    flags = [f"--{name}" for name in ("tiny", "eager") if getattr(options, name)]
    found = in_processes(__file__, names, flags, min(options.jobs, len(names)), options.limit)
    rows = summary(found, limits=not options.tiny)
    verdict = conclude(found, rows, totals(found), options, markdown(found, environment))
    return 0 if options.eager or verdict == "PASS" else 1


if __name__ == "__main__":
    sys.exit(main())
