"""A Lightning training step under DDP with and without ``GraphCapture``, on several GPUs.

As ``step.py``, with the same loop, progress bar and two logged keys, on one GPU and on ``--gpus``:
eager, captured, and the floor of the captured step, which all ranks replay back to back at the same
time. Each rank has batches of its own, always as many samples. The slowest rank counts. One process
for each GPU makes all fits, and each figure is printed as soon as it is known, those over several
GPUs first.

Weak scaling is the time of a step on one GPU over that on several. The two fits on one GPU run side
by side, each on a GPU of its own.

    python benchmarks/ddp.py [--rows gpt2,resnet50] [--compiled gpt2] [--sharded gpt2]
        [--views gpt2] [--gpus 2]
    python benchmarks/ddp.py --exchange
    python benchmarks/ddp.py --overlap

``--compiled`` measures steps of a compiled network; the captured ones are compared with eager ones,
and those of GPT-2 with ``torch.compile(mode="reduce-overhead")`` and with another eager fit, too.
``--sharded`` measures with FSDP2 in place of DDP, a unit for each block. ``--views`` measures with
``DDPStrategy(gradient_as_bucket_view=True)``, which saves the copies between gradients and buckets.

``--exchange`` measures what it costs to agree ahead of a step, on the host. ``--overlap`` traces
GPT-2 on several GPUs, and counts which part of the time of NCCL's kernels other kernels run beside
them: eagerly, captured as a whole, and by submodules. ``--tiny`` trains a model of eight weights in
every row, on the CPU and the emulated backend.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from harness import Lab, Row, describe_environment, verdict_of
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from step import LOSSES_DIFFER, TIMED, WARMUP, WORKLOADS, Batches, Probe, TalkativeModule, be_quiet
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from lightning_graphs import GraphCapture

LIMIT = 1.05
AHEAD = {"gpt2 compiled": 3.0}
"""How far captured steps of a compiled network are ahead of ``reduce-overhead``, at least."""
SECONDS = 600
STEPS = WARMUP + 3 * TIMED
TRACED = 5
_EXCHANGES = 2000

TrainingContext = tuple[str, str, int, bool]
"""Row (a workload, and maybe a variant behind it), way, number of ranks, whether it is traced."""


class ShardedModule(TalkativeModule):
    """With FSDP2: each block of a list of modules is a unit, and the whole is one."""

    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        for blocks in self.net.modules():
            if isinstance(blocks, nn.ModuleList):
                for block in blocks:
                    fully_shard(block, mesh=mesh)
        fully_shard(self.net, mesh=mesh)


class Alike(Callback):
    """Looks at the end of a fit whether all ranks have the same parameters."""

    equal = True

    def on_train_end(self, trainer: Trainer, module: Any) -> None:
        if isinstance(trainer.strategy, DDPStrategy):
            mine = nn.utils.parameters_to_vector([p.detach() for p in module.parameters()])
            first = trainer.strategy.broadcast(mine.cpu())
            self.equal = torch.equal(mine.cpu(), first)


class Overlap(Callback):
    """Traces the last steps: which part of NCCL's time other kernels run beside it."""

    part = float("nan")

    def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Any, index: int) -> None:
        if index == STEPS:
            torch.cuda.synchronize()
            kinds = [torch.profiler.ProfilerActivity.CUDA]
            self.profiler = torch.profiler.profile(activities=kinds)
            self.profiler.start()

    def on_train_end(self, trainer: Trainer, module: Any) -> None:
        torch.cuda.synchronize()
        self.profiler.stop()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            self.profiler.export_chrome_trace(str(path))
            events = json.loads(path.read_text())["traceEvents"]
        kernels = [e for e in events if e.get("cat") == "kernel"]
        spans = [(e["ts"], e["ts"] + e["dur"], "nccl" in e["name"].lower()) for e in kernels]
        self.part = beside([s[:2] for s in spans if s[2]], [s[:2] for s in spans if not s[2]])


def beside(these: list[tuple[float, float]], others: list[tuple[float, float]]) -> float:
    """Which part of the time of some intervals at least one of the others takes, too."""
    shared, reached = 0.0, [(begin, end) for begin, end in merged(others)]
    for begin, end in merged(these):
        shared += sum(max(0.0, min(end, e) - max(begin, b)) for b, e in reached)
    return shared / max(sum(end - begin for begin, end in merged(these)), 1e-9)


def merged(intervals: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The same time in intervals that do not touch."""
    found: list[tuple[float, float]] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((begin, end))
    return found


def fits(rank: int, ranks: int, plan: Sequence[TrainingContext], tiny: bool) -> Iterator[Any]:
    """Make all fits of a plan on this rank; None for those that it is not one of."""
    for row, how, number, traced in plan:
        takes_part = number > 1 or rank == (how == "captured")
        yield fit(rank, number, row, how, tiny, traced) if takes_part else None
        torch._dynamo.reset()


@contextlib.contextmanager
def _as_if_alone(ranks: int) -> Iterator[None]:
    """Without the environment of a launcher, whose number of ranks Lightning insists on."""
    saved = dict(os.environ)
    if ranks == 1:
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
            os.environ.pop(name)
    try:
        yield
    finally:
        os.environ.update(saved)


def fit(
    rank: int, ranks: int, row: str, how: str, tiny: bool, traced: bool = False
) -> dict[str, Any]:
    """Train once on this rank; see ``step.fit``.

    Args:
        rank: The rank.
        ranks: How many there are.
        row: Name of the workload, and maybe ``compiled``, ``sharded`` or ``views`` behind it.
        how: ``eager``, ``again`` (the same), ``captured``, ``modules`` or ``reduce-overhead``.
        tiny: In a rehearsal.
        traced: Trace some more steps.
    """
    lab = Lab(tiny)
    name, _, variant = row.partition(" ")
    seed_everything(1, verbose=False)
    net, batch = WORKLOADS["tiny" if tiny else name]()
    torch.manual_seed(rank)
    items = [batch() for _ in range(4)]
    kind = ShardedModule if variant == "sharded" else TalkativeModule
    module = kind(net, variant == "compiled")
    strategy: Any = "ddp" if ranks > 1 else "auto"
    if variant == "views":
        strategy = DDPStrategy(gradient_as_bucket_view=True)
    if variant == "sharded":
        strategy = ModelParallelStrategy(data_parallel_size=ranks, tensor_parallel_size=1)
    if how == "reduce-overhead":
        module.call = torch.compile(net, mode=how)
    graphs = None
    if how in ("captured", "modules"):
        graphs = GraphCapture(
            scope="step" if how == "captured" else "modules",
            on_failure="raise" if how == "captured" else "eager",
            backend="emulated" if tiny else "cuda",
            only_if_faster=False,  # so few steps may not repay a capture
        )
    probe, alike, overlap = Probe(graphs, lab), Alike(), Overlap()
    if not tiny:
        items = [tuple(t.pin_memory() for t in item) for item in items]
    with _as_if_alone(ranks):
        trainer = Trainer(
            accelerator="cpu" if tiny else "gpu",
            devices=[rank] if ranks == 1 and not tiny else ranks,
            strategy=strategy,
            use_distributed_sampler=False,
            max_epochs=1,
            limit_train_batches=STEPS + traced * TRACED,
            precision="bf16-mixed",
            logger=False,
            enable_checkpointing=False,
            enable_model_summary=False,
            enable_progress_bar=rank == 0 or ranks == 1,
            callbacks=[
                probe,
                alike,
                *([graphs] if graphs is not None else []),
                *([overlap] if traced else []),
            ],
        )
        trainer.fit(module, DataLoader(Batches(items), batch_size=None))
    return {
        "ms": min(probe.blocks),
        "usual_ms": statistics.median(probe.blocks),
        "floor": min(probe.floors, default=0.0),
        "losses": torch.stack(probe.losses).tolist(),
        "equal": alike.equal,
        "overlap": overlap.part,
    }


def exchange(rank: int, ranks: int) -> Iterator[float]:
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
    yield statistics.median(times) * 1e6


# ---------------------------------------------------------------------- processes


def on_ranks(function: Any, ranks: int, *args: Any) -> Iterator[list[Any]]:
    """What ``function(rank, ranks, *args)`` yields, one after another, on all ranks.

    Each rank has a process of its own.
    """
    context = torch.multiprocessing.get_context("spawn")
    results = context.Queue()
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    target = (function, ranks, port, args, results)
    processes = [context.Process(target=_run, args=(rank, *target)) for rank in range(ranks)]
    for process in processes:
        process.start()
    found: dict[int, list[Any]] = {rank: [] for rank in range(ranks)}
    deadline = time.monotonic() + SECONDS
    try:
        while any(found.values()) or any(process.is_alive() for process in processes):
            try:
                rank, value = results.get(timeout=1)
            except queue.Empty:
                gone = [p.exitcode for p in processes if p.exitcode not in (None, 0)]
                if gone or time.monotonic() > deadline:
                    raise RuntimeError(f"a rank has ended with {gone}, or takes too long") from None
                continue
            found[rank].append(value)
            if all(found.values()):
                yield [values.pop(0) for values in found.values()]
    finally:
        for process in processes:
            process.join(10)
            process.kill()


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
    for value in function(rank, ranks, *args):
        results.put((rank, value))


# ---------------------------------------------------------------------- rows


def plan_of(names: Sequence[str], gpus: int, tiny: bool) -> list[TrainingContext]:
    """All fits, those that compile last; variants are measured on several GPUs only."""
    plain = [name for name in names if " " not in name]
    variants = [name for name in names if name not in plain]
    ways = ("eager", "captured")
    plan = [(name, how, ranks, False) for ranks in (gpus, 1) for name in plain for how in ways]
    plan += [(name, how, gpus, False) for name in variants for how in ways]
    ahead = [name for name in variants if name in AHEAD and not tiny]
    return plan + [(n, how, gpus, False) for n in ahead for how in ("reduce-overhead", "again")]


Found = dict[tuple[str, int], list[Any]]
"""The results of the fits of a row: by way and number of ranks, those of each rank."""


def ms_of(found: Found, how: str, ranks: int) -> float:
    """Milliseconds of a step on the slowest rank."""
    return max(one["ms"] for one in found[how, ranks])


def judge(row: str, gpus: int, tiny: bool, found: Found) -> list[Row]:
    """The figures that follow from what has been found, with their limits."""
    if not {("eager", gpus), ("captured", gpus)} <= found.keys():
        return []
    captured = found["captured", gpus]
    ms, floor = ms_of(found, "captured", gpus), max(one["floor"] for one in captured)
    difference = apart(found["eager", gpus], captured)
    correct = all(one["equal"] for one in captured) and difference <= LOSSES_DIFFER
    rows = [
        Row("step over floor", ms / floor, "x", None if tiny else LIMIT, correct),
        Row("largest difference of losses", difference, "", None, correct),
    ]
    if {("eager", 1), ("captured", 1)} <= found.keys():
        eager, ours = (
            ms_of(found, how, 1) / ms_of(found, how, gpus) for how in ("eager", "captured")
        )
        limit = None if tiny else 1.0
        detail = f"{eager:.3f} over {ours:.3f}"
        rows.append(Row("weak scaling of eager over ours", eager / ours, "x", limit, True, detail))
    if ("reduce-overhead", gpus) in found:
        theirs = ms_of(found, "reduce-overhead", gpus)
        limit, detail = 1 / AHEAD[row], f"{theirs / ms:.2f} times ahead"
        rows.append(Row("over reduce-overhead", ms / theirs, "x", limit, True, detail))
    if ("again", gpus) in found:
        between = apart(found["eager", gpus], found["again", gpus])
        rows.append(Row("largest difference of losses of two eager fits", between, "", None, True))
    return rows


def apart(one: Sequence[Any], other: Sequence[Any]) -> float:
    """The largest difference of losses of two fits, on any rank."""
    ranks = zip(one, other, strict=True)
    return max(abs(a - b) for x, y in ranks for a, b in zip(x["losses"], y["losses"], strict=True))


def in_words(row: Row) -> str:
    """One figure."""
    figure = f"{row.figure:.1e}" if row.name.startswith("largest") else f"{row.figure:.3f}"
    detail = f" ({row.detail})" if row.detail else ""
    return f"{row.name} {figure}{detail} {row.verdict}".rstrip()


def measure(plan: Sequence[TrainingContext], gpus: int, tiny: bool) -> dict[str, Found]:
    """The results of all fits, which are printed as they come, with all that follows from them."""
    found: dict[str, Found] = {row: {} for row, *_ in plan}
    # On one GPU there is no DDP: a row with views has the fits of the plain one
    views = {row: row.removesuffix(" views") for row in found if row.endswith(" views")}
    said: dict[str, int] = dict.fromkeys(found, 0)
    start = time.monotonic()
    for one, results in zip(plan, on_ranks(fits, gpus, plan, tiny), strict=True):
        row, how, ranks, traced = one
        present = [result for result in results if result is not None]
        found[row][how, ranks] = present
        for other, plain in views.items():
            if plain == row and ranks == 1:
                found[other][how, ranks] = present
        words = [f"{row}, {how} on {ranks}: {ms_of(found[row], how, ranks):.3f} ms"]
        if how == "captured":
            words.append(f"floor {max(one['floor'] for one in present):.3f} ms")
        if traced:
            words.append(f"beside other kernels {present[0]['overlap']:.2f} of NCCL")
        rows = judge(row, gpus, tiny, found[row])
        words += map(in_words, rows[said[row] :])
        said[row] = len(rows)
        print(f"{', '.join(words)} ({time.monotonic() - start:.0f} s)", flush=True)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rows", default="gpt2,resnet50")
    parser.add_argument("--compiled", default="", help="rows to measure with torch.compile, too")
    parser.add_argument("--sharded", default="", help="rows to measure with FSDP2, too")
    parser.add_argument("--views", default="", help="rows to measure with views of buckets, too")
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--exchange", action="store_true", help="measure an agreement only")
    parser.add_argument("--overlap", action="store_true", help="trace NCCL's kernels only")
    parser.add_argument("--json", type=Path, help="write everything to this file")
    parser.add_argument("--tiny", action="store_true", help="a rehearsal on the CPU")
    options = parser.parse_args(arguments)
    gpus, tiny = options.gpus, options.tiny
    if options.exchange:
        (found,) = on_ranks(exchange, gpus)
        print(f"an agreement between {gpus} ranks takes {max(found):.0f} us on the host")
        return 0
    if not (tiny or torch.cuda.device_count() >= gpus):
        print(f"This benchmark needs {gpus} GPUs.")
        return 0
    environment = describe_environment()
    print(f"{environment}: {' '.join(sys.argv)}", flush=True)
    print(f"{gpus} GPUs, bf16-mixed, fused AdamW, prog_bar=True, two logged keys", flush=True)
    if options.overlap:
        measure([("gpt2", how, gpus, True) for how in ("eager", "captured", "modules")], gpus, tiny)
        return 0
    names = [name for name in options.rows.split(",") if name]
    names += [f"{name} sharded" for name in options.sharded.split(",") if name]
    names += [f"{name} views" for name in options.views.split(",") if name]
    names += [f"{name} compiled" for name in options.compiled.split(",") if name]
    results = measure(plan_of(names, gpus, tiny), gpus, tiny)
    rows = {name: judge(name, gpus, tiny, results[name]) for name in names}
    for name, figures in rows.items():
        print(f"{name:>16}: {verdict_of(figures)}: {', '.join(map(in_words, figures))}")
    if options.json is not None:
        ms = {
            name: {f"{how} on {n}": ms_of(found, how, n) for how, n in found}
            for name, found in results.items()
        }
        figures = {name: {row.name: row.figure for row in rows[name]} for name in names}
        written = {"environment": environment, "command": sys.argv, "ms": ms, "rows": figures}
        options.json.write_text(json.dumps(written, indent=1))
    return 0 if all(verdict_of(figures) == "PASS" for figures in rows.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
