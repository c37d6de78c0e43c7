"""Libraries on Lightning, untouched: is it replayed, is it right, is it fast?

Each row is a model of a library (`library_fits.py`), trained through the library's own API on data
that the row makes. Nothing of this package is named there: it is installed, and the variable works
by its entry point. A row is trained

- twice eagerly, and once eagerly with the fused kernel of its optimizer, which graphs exchange;
- once with ``LIGHTNING_GRAPHS``, captured whether that pays or not: the loss of each step, logged
  values, parameters, the optimizer's state, progress, and predictions are compared with the fit of
  the same kernel, to the last bit (all of these with deterministic algorithms, where torch has
  such);
- then timed, in turn without it, with what is captured in any case, and with the defaults:
  milliseconds of a step in the second half of the first two, and seconds of a fit, which the
  defaults leave alone if captures are not sure to be repaid.

The exit status is 1 unless 80 % of the rows are whole steps, none replays nothing, none crashes,
and every row whose eager fits are equal equals them.

    python benchmarks/libraries.py [--libraries NAME,NAME] [--rows "NAME: MODEL,..."] [--steps 200]
        [--pairs 2] [--jobs 6] [--json PATH] [--markdown PATH]

``--tiny`` rehearses it on the CPU and the emulated backend, without times.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import library_fits
import torch
import zoo
from harness import Lab, describe_environment
from library_fits import FITS
from torch import Tensor
from zoo import Found

VARIABLE = "LIGHTNING_GRAPHS"
REHEARSAL = "{backend: emulated, only_if_faster: false, warmup_steps: 2, min_repeats: 1}"
CAPTURED, DEFAULTS = "{only_if_faster: false}", "1"
NOT_WHOLE_LIMIT, EAGER_LIMIT = 20.0, 0.0  # percent
FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)


@dataclass
class Trained:
    """What a fit has computed, and the time that it has taken."""

    steps: list[dict[str, Tensor]] = field(default_factory=list)  # the loss and logged values
    end: dict[str, Any] = field(default_factory=dict)
    graphs: Any = None  # the callback
    seconds: float = 0.0
    step_ms: float = 0.0

    def differs(self, other: Trained) -> str:
        """Name the first value that is not that of the other fit; empty if all are."""
        if len(self.steps) != len(other.steps):
            return f"{len(self.steps)} steps, not {len(other.steps)}"
        for number, (mine, theirs) in enumerate(zip(self.steps, other.steps, strict=True)):
            if name := _first_difference(mine, theirs):
                return f"step {number}: {name}"
        return _first_difference(self.end, other.end)

    def difference(self, other: Trained) -> float:
        """The largest difference of a loss, relative to the largest loss."""
        pairs = zip(self.steps, other.steps, strict=False)
        both = [(a["loss"].double(), b["loss"].double()) for a, b in pairs if "loss" in a]
        largest = max((float(b.abs().max()) for _, b in both), default=0.0) or 1.0
        return max((float((a - b).abs().max()) for a, b in both), default=0.0) / largest


def _first_difference(mine: Any, theirs: Any, name: str = "") -> str:
    """Name the first place where two nested values differ; empty if none does."""
    if isinstance(mine, Tensor):
        same = isinstance(theirs, Tensor) and zoo._same(mine, theirs)
        return "" if same else name
    if type(mine) is not type(theirs):
        return name or "type"
    if isinstance(mine, dict):
        if mine.keys() != theirs.keys():
            return f"{name} keys"
        found = (_first_difference(mine[k], theirs[k], f"{name}.{k}".strip(".")) for k in mine)
        return next(filter(None, found), "")
    if isinstance(mine, list | tuple):
        if len(mine) != len(theirs):
            return f"{name} length"
        found = (
            _first_difference(a, b, f"{name}[{i}]")
            for i, (a, b) in enumerate(zip(mine, theirs, strict=True))
        )
        return next(filter(None, found), "")
    return "" if mine == theirs or mine != mine else name


def _copied(tree: Any) -> Any:
    """A copy of nested values whose tensors are on the CPU."""
    if isinstance(tree, Tensor):
        return tree.detach().to("cpu", copy=True)
    if isinstance(tree, dict):
        return {str(key): _copied(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [_copied(value) for value in tree]
    return tree if isinstance(tree, int | float | str | bool | None) else None


def _observer(base: type, trained: Trained, lab: Lab, *, fused: bool, timed: int) -> Any:
    """A callback that records each step, or takes the time of those from ``timed`` on."""
    seen, begun = 0, 0.0

    def on_train_start(self: Any, trainer: Any, module: Any) -> None:
        for optimizer in trainer.optimizers if fused else ():
            for group in optimizer.param_groups if type(optimizer) in FUSED else ():
                if not group.get("foreach") and group.get("fused") is None:
                    group["fused"] = True

    def record(self: Any, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        values = {**trainer.callback_metrics, **({"loss": loss} if loss is not None else {})}
        trained.steps.append(
            {k: v.detach().clone() for k, v in values.items() if torch.is_tensor(v)}
        )

    def take_time(self: Any, *_: Any) -> None:
        nonlocal seen, begun
        seen += 1
        if seen in (timed, 2 * timed - 4):
            lab.synchronize()
            trained.step_ms = (time.perf_counter() - begun) * 1e3 / max(1, seen - timed)
            begun = time.perf_counter()

    hooks = {"on_train_start": on_train_start, "on_train_batch_end": take_time if timed else record}
    return type("Observer", (base,), hooks)()


@contextlib.contextmanager
def observed(trained: Trained, lab: Lab, *, fused: bool, timed: int) -> Iterator[None]:
    """Observe each ``Trainer.fit`` while the body runs."""

    def observing(package: Any, original: Any) -> Any:
        def fit(trainer: Any, model: Any, *args: Any, **kwargs: Any) -> None:
            observer = _observer(package.Callback, trained, lab, fused=fused, timed=timed)
            trainer.callbacks.append(observer)
            lab.synchronize()
            started = time.perf_counter()
            original(trainer, model, *args, **kwargs)
            lab.synchronize()
            trained.seconds = time.perf_counter() - started
            kinds = (c for c in trainer.callbacks if type(c).__name__ == "GraphCapture")
            trained.graphs = next(kinds, None)
            if not timed:
                written = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
                trained.end = _copied(
                    {
                        "parameters": written["state_dict"],
                        "optimizers": [each["state"] for each in written["optimizer_states"]],
                        "schedulers": [_numbers(each) for each in written["lr_schedulers"]],
                        "progress": written["loops"]["fit_loop"],
                        "global step": written["global_step"],
                    }
                )

        return fit

    packages = [
        sys.modules[n] for n in ("lightning.pytorch", "pytorch_lightning") if n in sys.modules
    ]
    with contextlib.ExitStack() as stack:
        for package in packages:
            original = package.Trainer.fit
            package.Trainer.fit = observing(package, original)
            stack.callback(setattr, package.Trainer, "fit", original)
        yield


def _numbers(state: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in state.items() if isinstance(value, int | float | list)}


def train(
    name: str, lab: Lab, steps: int, graphs: str = "0", *, fused: bool = False, timed: bool = False
) -> Trained:
    """Train a row once.

    Args:
        name: The row.
        lab: The device.
        steps: How many steps there are, about.
        graphs: The value of the variable.
        fused: Whether the optimizer gets its fused kernel.
        timed: Take times, and record nothing.
    """
    import lightning.pytorch  # noqa: F401  # the packages that are observed

    if importlib.util.find_spec("pytorch_lightning") is not None:
        import pytorch_lightning  # noqa: F401

    trained = Trained()
    seed_all()
    os.environ[VARIABLE] = graphs
    try:
        with (
            repeatable(not timed),
            observed(trained, lab, fused=fused, timed=steps // 2 if timed else 0),
        ):
            predicted = FITS[name]("cpu" if lab.dry else "gpu", steps)
    finally:
        os.environ[VARIABLE] = "0"
    if not timed:
        trained.end["predictions"] = _copied(predicted)
    return trained


@contextlib.contextmanager
def repeatable(yes: bool) -> Iterator[None]:
    """Choose kernels whose results repeat themselves, where torch has such, if so asked."""
    torch.use_deterministic_algorithms(yes, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def seed_all() -> None:
    """Seed the generators that libraries draw from."""
    import random

    import numpy as np

    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)


def measure(name: str, lab: Lab, steps: int, pairs: int) -> Found:
    """All fits of one row."""
    lab.clean()
    started = time.perf_counter()
    found: Found = {"row": name}
    try:
        first, second = (train(name, lab, steps) for _ in range(2))
        kernel = train(name, lab, steps, fused=True)
    except Exception as error:
        return {**found, "scope": "unavailable", **zoo.failure(error, lab)}
    options = REHEARSAL if lab.dry else CAPTURED
    try:
        captured = train(name, lab, steps, options)
    except Exception as error:
        return {**found, "scope": "crashed", **zoo.failure(error, lab)}
    finite = all(bool(step["loss"].isfinite().all()) for step in first.steps if "loss" in step)
    counted = captured.graphs.report
    found |= {
        "scope": zoo.scope_of(captured.graphs, 2),
        "why": zoo.reason(counted.fallbacks),
        "captures": sum(record.captures for record in counted.graphs),
        "steps": len(first.steps),
        "replayed": counted.replayed,
        "fallbacks": list(counted.fallbacks),
        "repeatable": not second.differs(first) and finite,
        "eager differs": second.differs(first),
        "differs": captured.differs(kernel),
        "difference": captured.difference(first),
    }
    if not lab.dry:
        values = ("0", CAPTURED, DEFAULTS)
        timed: dict[str, list[Trained]] = {value: [] for value in values}
        for number in range(pairs):  # every second time in reverse order
            for value in values[:: -1 if number % 2 else 1]:
                timed[value].append(train(name, lab, steps, value, timed=True))
        for label, value in (("eager ms", "0"), ("captured ms", CAPTURED)):
            found[label] = median(each.step_ms for each in timed[value])
        for label, value in (("eager s", "0"), ("captured s", DEFAULTS)):
            found[label] = median(each.seconds for each in timed[value])
    return {**found, "seconds": time.perf_counter() - started}


def table(found: Sequence[Found]) -> str:
    """A Markdown table, one row for each model."""
    lines = [
        "| library | model | scope | replayed | equal | eager | graphs | faster | fit | why |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in found:
        library, _, model = row["row"].partition(": ")
        cells = [library, model, row["scope"], f"{row.get('replayed', 0)}/{row.get('steps', 0)}"]
        cells.append("not repeatable" if not row.get("repeatable") else row.get("differs") or "yes")
        if "eager ms" in row:
            cells += [f"{row['eager ms']:.1f} ms", f"{row['captured ms']:.2f} ms"]
            cells.append(f"{row['eager ms'] / max(row['captured ms'], 1e-9):.1f}x")
            cells.append(f"{row['captured s'] / max(row['eager s'], 1e-9):.2f}")
        else:
            cells += [""] * 4
        lines.append("| " + " | ".join([*cells, str(row.get("why", "")).replace("|", "/")]) + " |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--libraries", help="names, commas between (default: all)")
    parser.add_argument("--rows", help='"library: model", commas between (default: all)')
    parser.add_argument("--steps", type=int, default=200, help="of a fit (default: %(default)s)")
    parser.add_argument("--pairs", type=int, default=2, help="of timed fits (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=6, help="processes (default: %(default)s)")
    parser.add_argument("--limit", type=float, default=300, help="seconds for each row")
    parser.add_argument("--json", type=Path, help="write everything to this file")
    parser.add_argument("--markdown", type=Path, help="write a table to this file")
    parser.add_argument("--tiny", action="store_true", help="a rehearsal on the CPU")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if not (options.tiny or torch.cuda.is_available()):
        print("This benchmark needs a GPU; --tiny rehearses it on the CPU.")
        return 0
    steps = min(options.steps, 40) if options.tiny else options.steps
    if options.worker:
        library_fits.be_quiet()
        torch.set_num_threads(1)  # there are as many processes
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # without which cuBLAS may not repeat
        lab = Lab(options.tiny)
        zoo.work(partial(measure, lab=lab, steps=steps, pairs=options.pairs))
        return 0
    chosen = None if options.libraries is None else options.libraries.split(",")
    names = [name for name in FITS if chosen is None or name.partition(":")[0] in chosen]
    if options.rows is not None:
        names = [name.strip() for name in options.rows.split(",")]
    if unknown := [name for name in names if name not in FITS]:
        parser.error(f"--rows: there is no {', '.join(unknown)}")
    environment = describe_environment()
    print(f"{environment}: {' '.join(sys.argv)}", flush=True)
    flags = ["--steps", str(steps), "--pairs", str(options.pairs)]
    flags += ["--tiny"] if options.tiny else []
    jobs = min(options.jobs, len(names))
    found = zoo.in_processes(__file__, names, flags, jobs, options.limit)
    rows = zoo.summary(found, limits=True, not_whole=NOT_WHOLE_LIMIT, eager=EAGER_LIMIT)
    said = zoo.totals(found, "models")
    page = f"{environment}\n\n{said}.\n\n{table(found)}\n"
    verdict = zoo.conclude(found, rows, said, options, page)
    return 0 if verdict == "PASS" else 1


if __name__ == "__main__":
    sys.exit(main())
