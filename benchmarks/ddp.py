"""A Lightning training step under DDP with and without ``GraphCapture``, on several GPUs.

As ``step.py``, with the same loop, progress bar and two logged keys, on one GPU and on ``--gpus``:
eager, captured, for GPT-2 with ``torch.compile(mode="reduce-overhead")``, and the floor of the
captured step, which all ranks replay back to back at the same time. Each rank has batches of its
own, always as many samples. The slowest rank counts.

Weak scaling is the time of a step on one GPU over that on several.

    python benchmarks/ddp.py [--rows gpt2,resnet50] [--compiled gpt2] [--gpus 2]
    python benchmarks/ddp.py --exchange

``--exchange`` measures what it costs to agree ahead of a step, on the host. ``--tiny`` trains a
model of eight weights in every row, on the CPU and the emulated backend.
"""

from __future__ import annotations

import argparse
import itertools
import os
import queue
import socket
import statistics
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from harness import Lab, Row, measure_rows, verdict_of
from lightning.pytorch import Callback, Trainer, seed_everything
from step import (
    LOSSES_DIFFER,
    WORKLOADS,
    Batches,
    Probe,
    TalkativeModule,
    be_quiet,
    whole_steps,
)
from torch import nn
from torch.utils.data import DataLoader

LIMIT = 1.05
AHEAD = {"gpt2": 3.0}
"""How far captured steps are ahead of ``reduce-overhead``, at least."""
SECONDS = 600
_EXCHANGES = 2000


class Alike(Callback):
    """Looks at the end of a fit whether all ranks have the same parameters."""

    equal = True

    def on_train_end(self, trainer: Trainer, module: Any) -> None:
        if trainer.world_size > 1:
            mine = nn.utils.parameters_to_vector([p.detach() for p in module.parameters()])
            first = trainer.strategy.broadcast(mine.cpu())
            self.equal = torch.equal(mine.cpu(), first)


def fit(rank: int, ranks: int, row: str, how: str, tiny: bool) -> dict[str, Any]:
    """Train once on this rank; see ``step.fit``.

    Args:
        rank: The rank.
        ranks: How many there are.
        row: Name of the workload, and ``compiled`` behind it.
        how: ``eager``, ``captured`` or ``reduce-overhead``.
        tiny: In a rehearsal.
    """
    lab = Lab(tiny)
    name, _, compiled = row.partition(" ")
    seed_everything(1, verbose=False)
    net, batch = WORKLOADS["tiny" if tiny else name]()
    torch.manual_seed(rank)
    items = [batch() for _ in range(4)]
    module = TalkativeModule(net, bool(compiled))
    if how == "reduce-overhead":
        module.call = torch.compile(net, mode=how)
    graphs = whole_steps(lab) if how == "captured" else None
    probe, alike = Probe(graphs, lab), Alike()
    if not tiny:
        items = [tuple(t.pin_memory() for t in item) for item in items]
    trainer = Trainer(
        accelerator="cpu" if tiny else "gpu",
        devices=ranks,
        strategy="ddp" if ranks > 1 else "auto",
        use_distributed_sampler=False,
        max_epochs=1,
        precision="bf16-mixed",
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=rank == 0,
        callbacks=[probe, alike, *([graphs] if graphs is not None else [])],
    )
    trainer.fit(module, DataLoader(Batches(items), batch_size=None))
    return {
        "ms": min(probe.blocks),
        "usual_ms": statistics.median(probe.blocks),
        "floor": min(probe.floors, default=0.0),
        "losses": torch.stack(probe.losses).tolist(),
        "equal": alike.equal,
    }


def exchange(rank: int, ranks: int) -> float:
    """Microseconds of one agreement between the ranks, the usual one."""
    torch.distributed.init_process_group("gloo", rank=rank, world_size=ranks)
    times = []
    for _ in range(_EXCHANGES):
        start = time.perf_counter()
        numbers = torch.tensor([1, -1, 0, 0, 0])
        torch.distributed.all_reduce(numbers, torch.distributed.ReduceOp.MAX)
        numbers.tolist()
        times.append(time.perf_counter() - start)
    torch.distributed.destroy_process_group()
    return statistics.median(times) * 1e6


# ---------------------------------------------------------------------- processes


def on_ranks(function: Any, ranks: int, *args: Any) -> list[Any]:
    """What ``function(rank, ranks, *args)`` returns on each rank, in processes of their own."""
    context = torch.multiprocessing.get_context("spawn")
    results = context.Queue()
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    target = (function, ranks, port, args, results)
    processes = [context.Process(target=_run, args=(rank, *target)) for rank in range(ranks)]
    for process in processes:
        process.start()
    found: dict[int, Any] = {}
    deadline = time.monotonic() + SECONDS
    try:
        while len(found) < ranks:
            try:
                rank, value = results.get(timeout=1)
            except queue.Empty:
                gone = [p.exitcode for p in processes if p.exitcode not in (None, 0)]
                if gone or time.monotonic() > deadline:
                    raise RuntimeError(f"a rank has ended with {gone}, or takes too long") from None
                continue
            found[rank] = value
    finally:
        for process in processes:
            process.join(10)
            process.kill()
    return [found[rank] for rank in range(ranks)]


def _run(rank: int, function: Any, ranks: int, port: int, args: Any, results: Any) -> None:
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        GROUP_RANK="0",
        WORLD_SIZE=str(ranks),
        LOCAL_WORLD_SIZE=str(ranks),
        TORCHELASTIC_RUN_ID="benchmark",
    )
    be_quiet()
    results.put((rank, function(rank, ranks, *args)))


# ---------------------------------------------------------------------- rows


def measure(row: str, gpus: int, tiny: bool) -> dict[str, Any]:
    """All fits of one row."""
    name = row.partition(" ")[0]
    ways = ["eager", "captured", *(["reduce-overhead"] if name in AHEAD and not tiny else [])]
    ms: dict[tuple[str, int], float] = {}
    many: dict[str, list[dict[str, Any]]] = {}
    for how, ranks in itertools.product(ways, (1, gpus)):
        if how == "reduce-overhead" and ranks == 1:
            continue
        found = on_ranks(fit, ranks, row, how, tiny)
        ms[how, ranks] = max(one["ms"] for one in found)
        many[how] = found
    differences = [
        abs(a - b)
        for eager, captured in zip(many["eager"], many["captured"], strict=True)
        for a, b in zip(eager["losses"], captured["losses"], strict=True)
    ]
    equal = all(one["equal"] for one in many["captured"])
    correct = equal and max(differences) <= LOSSES_DIFFER
    floor = max(one["floor"] for one in many["captured"])
    captured = ms["captured", gpus]
    scaling = {how: ms[how, 1] / ms[how, gpus] for how in ("eager", "captured")}
    rows = [
        Row("ratio", captured / floor, "x", None if tiny else LIMIT, correct),
        Row(
            "weak scaling of eager over ours",
            scaling["eager"] / scaling["captured"],
            "x",
            None if tiny else 1.0,
            correct,
        ),
    ]
    if "reduce-overhead" in ways:
        behind = captured / ms["reduce-overhead", gpus]
        rows.append(Row("over reduce-overhead", behind, "x", 1 / AHEAD[name], correct))
    return {
        "row": row,
        "ms": {f"{how} on {ranks}": value for (how, ranks), value in ms.items()},
        "floor_ms": floor,
        "largest_loss_difference": max(differences),
        "weak_scaling": scaling,
        **{found.name: found.figure for found in rows},
        "verdicts": {found.name: found.verdict for found in rows},
        "verdict": verdict_of(rows),
    }


def line(found: dict[str, Any]) -> str:
    """What is printed of a row."""
    row = f"{found['row']:>16}: {found['verdict']}"
    if "error" in found:
        return f"{row}\n{found['error']}"
    times = ", ".join(f"{how} {ms:.3f} ms" for how, ms in found["ms"].items())
    scaling = ", ".join(f"{how} {part:.2f}" for how, part in found["weak_scaling"].items())
    shown = [f"{name} {found[name]:.3f} {which}" for name, which in found["verdicts"].items()]
    return (
        f"{row}: {times}, floor {found['floor_ms']:.3f}, {', '.join(shown)}, weak scaling "
        f"{scaling}, largest loss difference {found['largest_loss_difference']:.1e}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rows", default="gpt2,resnet50")
    parser.add_argument("--compiled", default="", help="rows to measure with torch.compile, too")
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--exchange", action="store_true", help="measure an agreement only")
    parser.add_argument("--json", type=Path, help="write everything to this file")
    parser.add_argument("--tiny", action="store_true", help="a rehearsal on the CPU")
    options = parser.parse_args(arguments)
    if options.exchange:
        found = max(on_ranks(exchange, options.gpus))
        print(f"an agreement between {options.gpus} ranks takes {found:.0f} us on the host")
        return 0
    names = [name for name in options.rows.split(",") if name]
    names += [f"{name} compiled" for name in options.compiled.split(",") if name]
    if not (options.tiny or torch.cuda.device_count() >= options.gpus):
        print(f"This benchmark needs {options.gpus} GPUs.")
        return 0
    be_quiet()
    heading = f"{options.gpus} GPUs, bf16-mixed, fused AdamW, prog_bar=True, two logged keys"
    flags = [f"--gpus={options.gpus}", *(["--tiny"] if options.tiny else [])]
    here = partial(measure, gpus=options.gpus, tiny=options.tiny)
    return measure_rows(__file__, names, flags, here, line, heading, jobs=1, path=options.json)


if __name__ == "__main__":
    sys.exit(main())
