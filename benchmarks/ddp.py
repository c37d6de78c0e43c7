"""A Lightning training step on several GPUs with and without ``GraphCapture``.

As ``step.py``, with the same loop, progress bar and two logged keys: eager, captured, and the floor
of the captured step, which all ranks replay back to back at the same time. Each rank has batches of
its own, always as many samples. The slowest rank counts.

    python benchmarks/ddp.py [--rows gpt2,resnet50,llama] [--variants plain,fsdp2]
        [--ways eager,captured] [--sizes 4,2,1] [--trace plain,fsdp2] [--seconds 150] [--json PATH]
    python benchmarks/ddp.py --table PATH [PATH ...]
    python benchmarks/ddp.py --exchange

Variants: ``plain`` DDP, ``views`` (``gradient_as_bucket_view=True``), ``accumulated`` (over two
batches; a step is a batch), and ``fsdp2``, a unit for each block. Ways: ``eager``, ``captured``,
``reduce-overhead`` (of ``torch.compile``, without the callback), ``compiled`` (eager steps of a
compiled network) and ``captured-compiled``.

Weak scaling is the time of a step on one GPU over that on several. On one GPU there is no DDP, so
``views`` is ``plain`` there; FSDP2 shards over one rank. Sizes run one after another, the largest
first, and as many fits of a size side by side as there are GPUs for. ``--sizes 8,4,2,1`` is all of
it on eight. Each figure is printed as soon as it is known, and with ``--json`` written at once, to
what the file has from other runs; ``--table`` judges several files as one. No fit begins after
``--seconds``.

``--trace`` traces some more steps of these variants, on all ranks. Kernels of NCCL end together on
all ranks: that gives all traces one clock. By it a collective takes from the moment when its last
rank begins until it ends: which part of that do other kernels run beside (``hidden``), and how far
apart do ranks begin (``drift``)?

Losses of captured steps are those of eager ones on the same ranks, to the bit where two eager fits
equal each other; parameters of all ranks are equal, and all ranks replay the same steps.

``--exchange`` measures what it costs to agree ahead of a step, on the host. ``--tiny`` trains a
small model in every row over gloo, on the CPU and the emulated backend, and limits no time.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from harness import Lab, Row, describe_environment, peak_memory, verdict_of
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from step import LOSSES_DIFFER, WORKLOADS, TalkativeModule
from teams import Team, TeamError
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset
from workloads import Classifier, Gpt2, Llama

from lightning_graphs import GraphCapture

LIMIT = 1.03
"""Of a captured step over its floor."""
SCALES = 0.90
"""Weak scaling of captured steps, at least."""
AHEAD = {"gpt2": 3.0}
"""How far captured steps of a compiled network are ahead of ``reduce-overhead``, at least."""
SECONDS = 120
"""How long a fit may take."""
WARMUP, TIMED, BLOCKS, TRACED = 30, 20, 3, 5
"""Steps ahead of the first block, and of a block; blocks; steps that are traced."""
_EXCHANGES = 2000
VARIANTS = ("plain", "views", "accumulated", "fsdp2")
WAYS = ("eager", "captured", "compiled", "reduce-overhead", "captured-compiled")
CAPTURED = {"captured": "eager", "captured-compiled": "compiled"}
"""Ways with graphs -> without."""


def llama() -> tuple[nn.Module, Callable[[], tuple[Tensor, ...]]]:
    return Llama(12, 512, 8192), lambda: (torch.randint(0, 8192, (8, 256)),)


def gpt2_124m() -> tuple[nn.Module, Callable[[], tuple[Tensor, ...]]]:
    return Gpt2(12, 768, 50304), lambda: (torch.randint(0, 50304, (32, 256)),)


def resnet50_224() -> tuple[nn.Module, Callable[[], tuple[Tensor, ...]]]:
    import torchvision

    net = Classifier(torchvision.models.resnet50(num_classes=1000))
    return net, lambda: (torch.randn(64, 3, 224, 224), torch.randint(0, 1000, (64,)))


class Blocks(nn.Module):
    """Small, with blocks, buffers, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(2))
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.norm(x).square().mean()


def tiny() -> tuple[nn.Module, Callable[[], tuple[Tensor, ...]]]:
    return Blocks(), lambda: (torch.randn(4, 8),)


MODELS = {**WORKLOADS, "llama": llama, "tiny": tiny}
MODELS |= {"gpt2-124m": gpt2_124m, "resnet50-224": resnet50_224}


class Fit(NamedTuple):
    """What one fit trains."""

    model: str
    variant: str
    how: str
    ranks: int
    traced: bool = False

    def __str__(self) -> str:
        return f"{self.model}, {self.variant}, {self.how}, {self.ranks} ranks"


@dataclass(frozen=True)
class Steps:
    """How many steps a fit has."""

    warmup: int = WARMUP
    timed: int = TIMED
    blocks: int = BLOCKS


class Batches(Dataset[tuple[Tensor, ...]]):
    def __init__(self, items: list[tuple[Tensor, ...]]) -> None:
        self._items = items

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return self._items[index % len(self._items)]


class ShardedModule(TalkativeModule):
    """With FSDP2: each block of a list of modules is a unit, and the whole is one."""

    def configure_model(self) -> None:
        shard(self.net, self.device_mesh["data_parallel"])


def shard(net: nn.Module, mesh: Any) -> None:
    lists = [m for m in net.modules() if isinstance(m, nn.ModuleList)]
    stages = [m for name, m in net.named_modules() if "layer" in name.split(".")[-1]]
    for blocks in lists or [m for m in stages if isinstance(m, nn.Sequential)]:
        for block in blocks:
            fully_shard(block, mesh=mesh)
    fully_shard(net, mesh=mesh)


class Probe(Callback):
    """Times blocks of steps and their floor, and keeps the losses of the steps ahead."""

    def __init__(self, graphs: GraphCapture | None, lab: Lab, steps: Steps) -> None:
        self._graphs, self._lab, self._steps = graphs, lab, steps
        self.losses: list[Tensor] = []
        self.blocks: list[float] = []
        self.floors: list[float] = []
        self.equal = True

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, *_: Any) -> None:
        step = trainer.fit_loop.epoch_loop.batch_idx + 1 - self._steps.warmup
        timed = self._steps.timed
        if step <= timed:
            self.losses.append(outputs["loss"].detach().clone())
        if step > 0 and step % timed == 1:
            self._first = self._lab.moment()
        if step >= 0 and step % timed == 0 and len(self.blocks) < self._steps.blocks:
            last = self._lab.moment()
            self._lab.synchronize()
            if step > 0:
                self.blocks.append(self._lab.milliseconds(self._first, last) / (timed - 1))
                if self._graphs is not None:
                    self.floors.append(self._floor(trainer.accumulate_grad_batches))

    def _floor(self, accumulated: int) -> float:
        """Milliseconds of the graphs of the last batches, back to back."""
        plans = self._graphs._handler.runner._cache.plans()[:accumulated]  # type: ignore[union-attr]
        graphs = [graph for plan in reversed(plans) for graph in plan.graphs.values()]

        def replay() -> None:
            for graph in graphs:
                graph.replay()

        return self._lab.on_gpu(replay, self._steps.timed) / 1e3 / len(plans)

    def on_train_end(self, trainer: Trainer, module: Any) -> None:
        if isinstance(trainer.strategy, DDPStrategy):
            mine = nn.utils.parameters_to_vector([p.detach() for p in module.parameters()])
            first = trainer.strategy.broadcast(mine.cpu())
            self.equal = torch.equal(mine.cpu(), first)


class Trace(Callback):
    """Traces the last steps: when kernels of NCCL ran, and when any other did."""

    def __init__(self, begin: int) -> None:
        self._begin = begin
        self.found: dict[str, Any] = {}

    def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Any, index: int) -> None:
        if index == self._begin:
            torch.cuda.synchronize()
            self._profiler = torch.profiler.profile(
                activities=[torch.profiler.ProfilerActivity.CUDA]
            )
            self._profiler.start()

    def on_train_end(self, trainer: Trainer, module: Any) -> None:
        torch.cuda.synchronize()
        self._profiler.stop()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            self._profiler.export_chrome_trace(str(path))
            written = json.loads(path.read_text())
        since = int(written.get("baseTimeNanoseconds", 0)) / 1e3
        kernels = [e for e in written["traceEvents"] if e.get("cat") == "kernel"]
        of_nccl = ["nccl" in e["name"].lower() for e in kernels]
        nccl = [e for e, is_nccl in zip(kernels, of_nccl, strict=True) if is_nccl]
        rest = [e for e, is_nccl in zip(kernels, of_nccl, strict=True) if not is_nccl]
        others = [(e["ts"], e["ts"] + e["dur"]) for e in rest]
        self.found = {
            "since": since,
            "nccl": sorted((e["ts"], e["ts"] + e["dur"], e["name"]) for e in nccl),
            "others": merged(others),
        }


def train(rank: int, fit: Fit, steps: Steps, tiny: bool) -> dict[str, Any]:
    """Train once on this rank."""
    lab = Lab(tiny)
    if not tiny:
        torch.cuda.set_device(rank)
    seed_everything(1, verbose=False)
    net, batch = MODELS["tiny" if tiny else fit.model]()
    torch.manual_seed(rank)
    items = [batch() for _ in range(4)]
    if not tiny:
        items = [tuple(t.pin_memory() for t in item) for item in items]
    kind = ShardedModule if fit.variant == "fsdp2" else TalkativeModule
    compiled = {"compiled": {}, "captured-compiled": {}, "reduce-overhead": {"mode": fit.how}}
    module = kind(net, compiled.get(fit.how))
    graphs = None
    if fit.how in CAPTURED:
        graphs = GraphCapture(
            on_failure="raise",
            backend="emulated" if tiny else "cuda",
            only_if_faster=False,  # so few steps may not repay a capture
        )
    if fit.traced or fit.how == "eager":  # which takes long
        steps = replace(steps, blocks=min(steps.blocks, 0 if fit.traced else 2))
    if fit.variant == "accumulated":
        steps = replace(steps, warmup=steps.warmup + 20)  # of which half reduce gradients
    count = steps.warmup + steps.timed * steps.blocks
    probe, trace = Probe(graphs, lab, steps), Trace(count)
    lab.clean()
    peak_memory()
    trainer = Trainer(
        accelerator="cpu" if tiny else "gpu",
        devices=fit.ranks,
        strategy=_strategy(fit),
        use_distributed_sampler=False,
        max_epochs=1,
        limit_train_batches=count + TRACED * fit.traced,
        accumulate_grad_batches=2 if fit.variant == "accumulated" else 1,
        precision="bf16-mixed",
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=rank == 0,
        callbacks=[*[trace] * fit.traced, probe, *[graphs] * (graphs is not None)],
    )
    trainer.fit(module, DataLoader(Batches(items), batch_size=None))
    lab.synchronize()
    peak = peak_memory()
    torch._dynamo.reset()
    said = graphs._statistics if graphs is not None else None
    return {
        "blocks": probe.blocks,
        "floors": probe.floors,
        "losses": torch.stack(probe.losses).tolist(),
        "equal": probe.equal,
        "peak": peak,
        "trace": trace.found,
        "decisions": [said.captures, said.replayed, said.fallbacks] if said else [],
    }


def _strategy(fit: Fit) -> Any:
    if fit.variant == "fsdp2":
        return ModelParallelStrategy(data_parallel_size=fit.ranks, tensor_parallel_size=1)
    if fit.ranks == 1:
        return "auto"
    return DDPStrategy(gradient_as_bucket_view=fit.variant == "views")


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


# ---------------------------------------------------------------------- traces

Interval = tuple[float, float]


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """The same time in intervals that do not touch."""
    found: list[Interval] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((begin, end))
    return found


def shared(these: Iterable[Interval], others: Sequence[Interval]) -> float:
    """How long some intervals and others take at the same time; neither touch each other."""
    found, rest = 0.0, iter(others)
    other = next(rest, None)
    for begin, end in these:
        while other is not None and other[1] <= begin:
            other = next(rest, None)
        while other is not None and other[0] < end:
            found += min(end, other[1]) - max(begin, other[0])
            if other[1] > end:
                break
            other = next(rest, None)
    return found


def by_one_clock(traces: Sequence[dict[str, Any]], steps: int) -> dict[str, float]:
    """What ranks that wait for each other do not show.

    Args:
        traces: Of each rank: when kernels of NCCL began and ended, and when others ran.
        steps: How many were traced.

    Returns:
        Of NCCL the part beside which other kernels run, milliseconds of a step, and those of them
        beside which none run; the median and the largest drift between ranks in microseconds;
        and microseconds by which clocks differed.
    """
    kernels = [_numbered(trace["nccl"]) for trace in traces]
    names = sorted(set.intersection(*(set(one) for one in kernels)))
    if not names:
        return {}
    offsets = []
    for trace, one in zip(traces, kernels, strict=True):
        since = trace["since"] - traces[0]["since"]
        ends = [one[name][1] + since - kernels[0][name][1] for name in names]
        offsets.append((since, statistics.median(ends)))
    began = {
        name: [
            one[name][0] + since - late for one, (since, late) in zip(kernels, offsets, strict=True)
        ]
        for name in names
    }
    busy = hidden = 0.0
    for trace, one, (since, late) in zip(traces, kernels, offsets, strict=True):
        to_first = since - late
        spans = [(max(began[n]), one[n][1] + to_first) for n in names]
        mine = merged((b, e) for b, e in spans if e > b)
        others = [(b + to_first, e + to_first) for b, e in trace["others"]]
        busy += sum(end - begin for begin, end in mine)
        hidden += shared(mine, others)
    drifts = [max(times) - min(times) for times in began.values()]
    each = len(traces) * steps * 1e3
    return {
        "hidden": hidden / max(busy, 1e-9),
        "nccl_ms": busy / each,
        "alone_ms": (busy - hidden) / each,
        "drift_us": statistics.median(drifts),
        "largest_drift_us": max(drifts),
        "clocks_us": max(abs(late) for _, late in offsets),
    }


def _numbered(spans: Iterable[tuple[float, float, str]]) -> dict[tuple[str, int], Interval]:
    """Kernels by their name and how many of that name came before."""
    counts: dict[str, int] = defaultdict(int)
    found = {}
    for begin, end, name in spans:
        found[name, counts[name]] = (begin, end)
        counts[name] += 1
    return found


# ---------------------------------------------------------------------- figures

Found = dict[Fit, dict[str, Any]]
"""Fit -> what came of it, of all ranks together."""


def summary(fit: Fit, ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What came of a fit, in JSON."""
    blocks = [max(times) for times in zip(*(one["blocks"] for one in ranks), strict=True)]
    floors = [max(times) for times in zip(*(one["floors"] for one in ranks), strict=True)]
    together = len({json.dumps(one["decisions"]) for one in ranks}) == 1
    _, replayed, fallbacks = ranks[0]["decisions"] or (0, 1, [])
    return {
        "ms": min(blocks, default=math.nan),
        "usual_ms": statistics.median(blocks) if blocks else math.nan,
        "floor_ms": min(floors, default=math.nan),
        "peak_mib": max(one["peak"] for one in ranks),
        "losses": [one["losses"] for one in ranks],
        "well": together and replayed > 0 and not fallbacks and all(one["equal"] for one in ranks),
        "decisions": ranks[0]["decisions"],
        **({"trace": by_one_clock([r["trace"] for r in ranks], TRACED)} if fit.traced else {}),
    }


def alone(fit: Fit) -> Fit:
    """The same on one GPU, where DDP's options have nothing to do."""
    return fit._replace(ranks=1, variant="plain" if fit.variant == "views" else fit.variant)


def judge(fit: Fit, found: Found, tiny: bool) -> list[Row]:
    """The figures of a captured fit on several ranks, as far as they are known."""
    one, eager = found[fit], fit._replace(how=CAPTURED[fit.how])
    correct, rows = one["well"], []
    if eager in found:
        difference = apart(found[eager], one)
        again = found.get(eager._replace(how=f"{eager.how}-again"))
        between = 0.0 if again is None else apart(found[eager], again)
        repeats = not between and eager.how != "compiled"
        correct &= difference <= (0.0 if repeats else max(LOSSES_DIFFER, 10 * between))
        detail = f"two eager fits {between:.1e}" if again is not None else ""
        rows.append(Row("losses differ by", difference, "", None, correct, detail))
    limit = None if tiny else LIMIT
    rows.append(Row("step over floor", one["ms"] / one["floor_ms"], "x", limit, correct))
    if fit.ranks > 1 and alone(fit) in found:
        ours = found[alone(fit)]["ms"] / one["ms"]
        inverse = None if tiny else 1 / SCALES
        rows.append(Row("weak scaling, inverse", 1 / ours, "x", inverse, correct, f"{ours:.3f}"))
        if eager in found and alone(eager) in found:
            theirs = found[alone(eager)]["ms"] / found[eager]["ms"]
            limit, detail = None if tiny else 1.0, f"{theirs:.3f} over {ours:.3f}"
            rows.append(Row("eager's over ours", theirs / ours, "x", limit, correct, detail))
    theirs = found.get(fit._replace(how="reduce-overhead"))
    if fit.how == "captured-compiled" and theirs is not None and not tiny:
        ahead = theirs["ms"] / one["ms"]
        limit = 1 / AHEAD[fit.model] if fit.model in AHEAD else None
        rows.append(Row("over reduce-overhead", 1 / ahead, "x", limit, correct, f"{ahead:.2f}x"))
    traces = [found.get(f._replace(traced=True)) for f in (eager, fit)]
    if all(traces) and not tiny:
        theirs, ours = (trace["trace"].get("hidden", math.nan) for trace in traces)  # type: ignore[index]
        detail = f"{theirs:.2f} over {ours:.2f}"
        rows.append(Row("eager's hidden part", theirs / max(ours, 1e-9), "x", 1.0, True, detail))
    return rows


def apart(one: dict[str, Any], other: dict[str, Any]) -> float:
    """The largest difference of losses of two fits, on any rank."""
    ranks = zip(one["losses"], other["losses"], strict=True)
    pairs = [pair for x, y in ranks for pair in zip(x, y, strict=True)]
    return max(math.inf if a != a or b != b else abs(a - b) for a, b in pairs)


def in_words(row: Row) -> str:
    figure = f"{row.figure:.1e}" if row.name.startswith("losses") else f"{row.figure:.3f}"
    detail = f" ({row.detail})" if row.detail else ""
    return f"{row.name} {figure}{detail} {row.verdict}".rstrip()


def tables(found: Found) -> str:
    """All figures, as Markdown."""
    sizes = sorted({fit.ranks for fit in found})
    several = [size for size in sizes if size > 1]
    heads = ["", *(f"{n} GPU{'s' * (n > 1)}, ms" for n in sizes)]
    heads += [f"weak scaling {n}" for n in several]
    heads += ["step over floor", "peak MiB", "NCCL ms, hidden", "drift us"]
    lines = [heads, ["---"] * len(heads)]
    named = dict.fromkeys(fit._replace(ranks=0, traced=False) for fit in found)
    for name in named:
        at = {n: found.get(name._replace(ranks=n)) for n in sizes}
        if not any(at[n] for n in several) and any(at):
            at |= {n: None for n in several}
        first = found.get(alone(name))
        largest = max((n for n in sizes if at[n]), default=0)
        last = at.get(largest) or {}
        trace = found.get(name._replace(ranks=largest, traced=True), {}).get("trace", {})
        lines.append(
            [
                f"{name.model}, {name.variant}, {name.how}",
                *(f"{at[n]['ms']:.2f}" if at[n] else "" for n in sizes),  # type: ignore[index]
                *(f"{first['ms'] / at[n]['ms']:.3f}" if first and at[n] else "" for n in several),  # type: ignore[index]
                f"{last['ms'] / last['floor_ms']:.3f}"
                if last.get("floor_ms", math.nan) > 0
                else "",
                f"{last.get('peak_mib', math.nan):.0f}",
                f"{trace['nccl_ms']:.2f}, {trace['hidden']:.2f}" if trace else "",
                f"{trace['drift_us']:.0f}" if trace else "",
            ]
        )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


# ---------------------------------------------------------------------- runs


def plan_of(options: argparse.Namespace) -> list[Fit]:
    """All fits: the largest size first, traces behind what is timed."""
    plan = []
    for size in options.sizes:
        for variant in options.variants:
            if size == 1 and variant == "views" and "plain" in options.variants:
                continue
            for model in options.rows:
                fits = [
                    alone(Fit(model, variant, "", 1))
                    if size == 1
                    else Fit(model, variant, "", size)
                ]
                plan += [fit._replace(how=how) for fit in fits for how in options.ways]
        plan += [
            Fit(model, variant, how, size, True)
            for variant in options.trace
            for model in options.rows
            for how in options.ways
            if size > 1 and not options.tiny
        ]
    return plan


class Run:
    """Fits over all GPUs, until time is over; what is known is printed and written at once."""

    def __init__(self, options: argparse.Namespace, found: Found) -> None:
        self._options, self.found = options, found
        self._lock = threading.Lock()
        self._began = time.monotonic()
        self.failed: list[str] = []
        tiny = options.tiny
        self._steps = Steps(24, 4, 1) if tiny else Steps()

    def through(self, plan: Sequence[Fit]) -> None:
        """Make the fits, those of a size side by side."""
        teams = {size: self._teams(size) for size in dict.fromkeys(fit.ranks for fit in plan)}
        for size, several in teams.items():
            rest = iter([fit for fit in plan if fit.ranks == size])
            threads = [threading.Thread(target=self._work, args=(team, rest)) for team in several]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

    def _teams(self, size: int) -> list[Team]:
        gpus = range(self._options.gpus)
        count = 1 if self._options.tiny else len(gpus) // size
        teams = [Team(train, gpus[i * size : (i + 1) * size]) for i in range(count)]
        for team in teams:
            team.start()
        return teams

    def _work(self, team: Team, rest: Any) -> None:
        while (fit := self._next(rest)) is not None:
            self._make(team, fit)
            eager = fit._replace(how=CAPTURED.get(fit.how, ""))
            with self._lock:
                known = {**self.found}
            if fit in known and eager in known and not fit.traced:
                again = eager._replace(how=f"{eager.how}-again")
                if apart(known[eager], known[fit]) and again not in known and self._is_time():
                    self._make(team, again)
        team.end()

    def _is_time(self) -> bool:
        return time.monotonic() - self._began < self._options.seconds

    def _next(self, rest: Any) -> Fit | None:
        with self._lock:
            for fit in rest:
                if self._is_time():
                    return fit  # type: ignore[no-any-return]
                self._say(f"not run: {fit}")
                self.failed.append(f"{fit}: not run")
        return None

    def _make(self, team: Team, fit: Fit) -> None:
        asked = fit._replace(how=fit.how.removesuffix("-again"))
        left = self._began + self._options.seconds + SECONDS / 2 - time.monotonic()
        try:
            given = (asked, self._steps, self._options.tiny)
            ranks = team.ask(*given, seconds=min(SECONDS, max(left, 10)))
        except TeamError as error:
            with self._lock:
                self._say(f"FAILED: {fit}: {error}")
                self.failed.append(f"{fit}: failed")
            return
        with self._lock:
            self.found[fit] = summary(fit, ranks)
            self._say(f"{fit}: {self._figures(fit)}")
            write(self._options.json, self.found)

    def _figures(self, fit: Fit) -> str:
        one = self.found[fit]
        if fit.traced:
            return "traced, " + ", ".join(f"{k} {v:.3g}" for k, v in one["trace"].items())
        words = [f"{one['ms']:.3f} ms (usual {one['usual_ms']:.3f})", f"{one['peak_mib']:.0f} MiB"]
        if fit.how in CAPTURED:
            words.append(f"floor {one['floor_ms']:.3f} ms, decisions {one['decisions']}")
            words += map(in_words, judge(fit, self.found, self._options.tiny))
        return ", ".join(words)

    def _say(self, line: str) -> None:
        print(f"[{time.monotonic() - self._began:5.1f}] {line}", flush=True)


def write(path: Path | None, found: Found) -> None:
    if path is not None:
        fits = [{"fit": fit._asdict(), **one} for fit, one in found.items()]
        written = {"environment": describe_environment(), "command": sys.argv, "fits": fits}
        path.write_text(json.dumps(written))


def read(paths: Iterable[Path]) -> Found:
    """What earlier runs have written; the last file counts."""
    found: Found = {}
    for path in paths:
        for one in json.loads(path.read_text())["fits"] if path.exists() else ():
            found[Fit(**one.pop("fit"))] = one
    return found


def conclude(found: Found, failed: Sequence[str], tiny: bool) -> int:
    """Print the table and all verdicts; the exit status."""
    print(tables(found))
    verdicts = []
    for fit in found:
        if fit.how in CAPTURED and not fit.traced:
            rows = judge(fit, found, tiny)
            verdicts.append(verdict_of(rows))
            print(f"{verdicts[-1]}: {fit}: {', '.join(map(in_words, rows))}")
    for line in failed:
        print(line)
    return 0 if verdicts and not failed and {*verdicts} == {"PASS"} else 1


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    several: dict[str, Any] = {"type": lambda text: [name for name in text.split(",") if name]}
    parser.add_argument("--rows", default="gpt2,resnet50,llama", **several)
    parser.add_argument("--variants", default="plain,fsdp2", help=f"of {VARIANTS}", **several)
    parser.add_argument("--ways", default="eager,captured", help=f"of {WAYS}", **several)
    parser.add_argument("--sizes", help="numbers of ranks (default: all GPUs, and 1)", **several)
    parser.add_argument("--trace", default="", help="variants to trace, too", **several)
    parser.add_argument("--gpus", type=int, help="how many GPUs to take (default: all)")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no fit after it")
    parser.add_argument("--json", type=Path, help="write everything to this file")
    parser.add_argument("--table", type=Path, nargs="+", help="judge what these files have")
    parser.add_argument("--exchange", action="store_true", help="measure an agreement only")
    parser.add_argument("--tiny", action="store_true", help="a rehearsal on the CPU")
    options = parser.parse_args(arguments)
    if options.table:
        return conclude(read(options.table), [], options.tiny)
    options.gpus = options.gpus or (2 if options.tiny else torch.cuda.device_count())
    options.sizes = [*map(int, options.sizes or [options.gpus, 1])]
    if options.exchange:
        team = Team(exchange, range(options.gpus))
        found = team.ask(options.gpus, seconds=SECONDS)
        team.end()
        print(f"an agreement between {options.gpus} ranks takes {max(found):.0f} us on the host")
        return 0
    if not (options.tiny or torch.cuda.device_count() >= max(options.sizes)):
        print(f"This benchmark needs {max(options.sizes)} GPUs.")
        return 0
    print(f"{describe_environment()}: {' '.join(sys.argv)}", flush=True)
    print("bf16-mixed, fused AdamW, prog_bar=True, two logged keys", flush=True)
    run = Run(options, read([options.json] if options.json else []))
    run.through(plan_of(options))
    return conclude(run.found, run.failed, options.tiny)


if __name__ == "__main__":
    sys.exit(main())
