"""The graph core against torch's own graphs, on one GPU and in one process.

Whatever is timed is also checked, in the same run, against eager results. Times are medians over
rounds, every second round in reverse order (A, B, B, A). The limits are those of the project.

    python benchmarks/core.py [--json PATH]
    python benchmarks/core.py --dry-run      # the logic alone, on a CPU: no times, no verdicts
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_graphs import core

WARMUP, CHECKED = 3, 8
REPLAY_LIMIT_US = 5.0
DIRECT_LIMIT = 0.2
INDEPENDENT_LIMIT = 1.1
FLOOR_LIMIT = 1.10
CAPTURE_LIMIT = 1.05
NEVER_SLOWER = 1.02  # 1.00, and what two medians of the same code differ by
LOSS_TOLERANCE = 2e-3  # relative; bf16 kernels of the same shapes are normally equal to the bit


@dataclass(frozen=True)
class Row:
    """One line of the result: a figure, what it may be at most, and whether results were right."""

    name: str
    figure: float
    unit: str
    limit: float | None
    correct: bool
    detail: str = ""

    @property
    def verdict(self) -> str:
        if not self.correct:
            return "WRONG RESULT"
        if self.limit is None or self.figure != self.figure:
            return ""
        return "PASS" if self.figure <= self.limit else "FAIL"


class Ours:
    """This package's graphs."""

    def __init__(self, backend: core.BackendName) -> None:
        self.backend = backend

    def new_graph(self) -> Any:
        return core.CUDAGraph(backend=self.backend)

    def capture(self, graph: Any, pool: Any = None) -> AbstractContextManager[None]:
        return core.graph(graph, pool)

    def new_pool(self) -> Any:
        return core.graph_pool_handle(backend=self.backend)

    def callables(self, module: nn.Module, sample: tuple[Tensor, ...], pool: Any, **how: Any) -> Any:
        return core.make_graphed_callables(module, sample, pool=pool, backend=self.backend, **how)


class Torchs:
    """torch's own graphs."""

    def new_graph(self) -> Any:
        return torch.cuda.CUDAGraph()

    def capture(self, graph: Any, pool: Any = None) -> AbstractContextManager[None]:
        return torch.cuda.graph(graph, pool)

    def new_pool(self) -> Any:
        return torch.cuda.graph_pool_handle()

    def callables(self, module: nn.Module, sample: tuple[Tensor, ...], pool: Any, **how: Any) -> Any:
        return torch.cuda.make_graphed_callables(module, sample, pool=pool, **how)


class Lab:
    """Where the benchmark runs: both APIs, a clock and the sizes.

    In a dry run everything is small, runs on the CPU with the emulated backend in both places, and
    every time and every amount of memory is NaN.
    """

    def __init__(self, dry: bool) -> None:
        self.dry = dry
        self.device = torch.device("cpu" if dry else "cuda")
        self.ours = Ours("emulated" if dry else "cuda")
        self.theirs: Any = Ours("emulated") if dry else Torchs()
        self.rounds = 1 if dry else 4

    def calls(self, count: int) -> int:
        return 2 if self.dry else count

    def synchronize(self) -> None:
        if not self.dry:
            torch.cuda.synchronize()

    def wall(self, body: Callable[[], object], calls: int, *, drain: bool) -> float:
        """Microseconds per call; with ``drain`` until the GPU has finished, else CPU time only."""
        calls = self.calls(calls)
        self.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            body()
        if drain:
            self.synchronize()
        elapsed = time.perf_counter() - start
        self.synchronize()
        return float("nan") if self.dry else elapsed / calls * 1e6

    def on_gpu(self, body: Callable[[], object], calls: int) -> float:
        """Microseconds per call between two CUDA events."""
        if self.dry:
            return self.wall(body, calls, drain=True)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        for _ in range(calls):
            body()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / calls * 1e3

    def medians(self, *measurements: Callable[[], float]) -> list[float]:
        """The median of each measurement; every second round runs them in reverse order."""
        found: list[list[float]] = [[] for _ in measurements]
        for i in range(2 * self.rounds):
            order = range(len(measurements))
            for j in reversed(order) if i % 2 else order:
                found[j].append(measurements[j]())
        return [statistics.median(values) for values in found]

    def clean(self) -> None:
        """Return what is free, and the cuBLAS workspaces: the next capture starts as any other."""
        gc.collect()
        if not self.dry:
            torch.cuda.synchronize()
            torch._C._cuda_clearCublasWorkspaces()
            torch.cuda.empty_cache()

    def reserved(self, pool: Any) -> float:
        """MiB that the allocator reserves for a private pool."""
        if self.dry:
            return float("nan")
        segments = torch.cuda.memory_snapshot()
        mine = (s["total_size"] for s in segments if tuple(s["segment_pool_id"]) == tuple(pool))
        return sum(mine) / 2**20

    @contextmanager
    def side_stream(self) -> Iterator[None]:
        if self.dry:
            yield
            return
        stream, before = torch.cuda.Stream(), torch.cuda.current_stream()
        stream.wait_stream(before)
        with torch.cuda.stream(stream):
            yield
        before.wait_stream(stream)


def replay_cost(lab: Lab) -> list[Row]:
    """CPU time of one launch of a graph that counts its own replays."""
    measurements, checks = [], []
    for api in (lab.ours, lab.theirs):
        counter = torch.zeros(4, device=lab.device)
        graph = api.new_graph()
        with api.capture(graph):
            counter.add_(1)
        replayed = [0]

        def measure(graph: Any = graph, replayed: list[int] = replayed) -> float:
            replayed[0] += lab.calls(300)
            return lab.wall(graph.replay, 300, drain=False)

        measure()
        measurements.append(measure)
        checks.append((counter, replayed))
    ours, theirs = lab.medians(*measurements)
    correct = all(counter.tolist() == [replayed[0]] * 4 for counter, replayed in checks)
    detail = f"ours {ours:.2f} us, torch's {theirs:.2f} us"
    return [Row("replay(): ours - torch's", ours - theirs, "us", REPLAY_LIMIT_US, correct, detail)]


class ManyParameters(nn.Module):
    """``x * (p0 + p1 + ...)``: hardly any work, so that what is timed is the call."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.tiny = nn.ParameterList([nn.Parameter(torch.ones(4)) for _ in range(count)])

    def forward(self, x: Tensor) -> Tensor:
        """f32[4] -> f32[4]."""
        return x * torch.stack(list(self.tiny)).sum(0)


class Calls:
    """Forward and backward of :class:`ManyParameters`, timed one by one on the CPU."""

    def __init__(self, lab: Lab, api: Any, count: int, *, kept: bool, **how: Any) -> None:
        self.lab, self.kept, self.made = lab, kept, 0
        self.x = torch.arange(1.0, 5.0, device=lab.device)
        self.seed = torch.ones(4, device=lab.device)
        self.module = ManyParameters(count).to(lab.device)
        self.parameters = list(self.module.parameters())
        self.graphed = api.callables(self.module, (self.x.clone(),), api.new_pool(), **how)
        if kept:
            # Gradients of their own: with None, torch's function would hand out its static buffers
            # and add to them afterwards (pytorch#181723), a wrong result in less time.
            for parameter in self.parameters:
                parameter.grad = torch.zeros_like(parameter)
        self()

    def __call__(self) -> float:
        """Microseconds of CPU time per forward and backward."""
        calls, elapsed = self.lab.calls(30), 0.0
        for _ in range(calls):
            if not self.kept:
                self.module.zero_grad(set_to_none=True)
            self.lab.synchronize()
            start = time.perf_counter()
            self.graphed(self.x).backward(self.seed)
            elapsed += time.perf_counter() - start
        self.made += calls
        return float("nan") if self.lab.dry else elapsed / calls * 1e6

    def correct(self) -> bool:
        expected = self.x * (self.made if self.kept else 1)
        return all(p.grad is not None and torch.equal(p.grad, expected) for p in self.parameters)


def call_cost(lab: Lab) -> list[Row]:
    """CPU time of make_graphed_callables' calls by number of parameters."""
    rows, direct_us = [], {}
    for kept in (False, True):
        gradients = "kept gradients" if kept else "gradients None"
        for count in (100, 600):
            calls = [
                Calls(lab, lab.theirs, count, kept=kept),
                Calls(lab, lab.ours, count, kept=kept, param_grads="autograd"),
                Calls(lab, lab.ours, count, kept=kept, param_grads="direct"),
            ]
            theirs, autograd, direct = lab.medians(*calls)
            direct_us[kept, count] = direct
            correct = all(call.correct() for call in calls)
            name = f"{count} parameters, {gradients}: "
            detail = f"torch's {theirs:.0f} us, autograd {autograd:.0f}, direct {direct:.0f}"
            never = NEVER_SLOWER
            limit = DIRECT_LIMIT if count == 600 else None
            rows += [
                Row(name + "autograd / torch's", autograd / theirs, "x", never, correct, detail),
                Row(name + "direct / torch's", direct / theirs, "x", limit, correct, detail),
            ]
        name = f"direct, {gradients}: 600 / 100 parameters"
        ratio = direct_us[kept, 600] / direct_us[kept, 100]
        rows.append(Row(name, ratio, "x", INDEPENDENT_LIMIT, correct))
    return rows


class Mlp(nn.Module):
    def __init__(self, depth: int, width: int) -> None:
        super().__init__()
        blocks = [
            nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.GELU(), nn.Dropout(0.1))
            for _ in range(depth)
        ]
        self.net = nn.Sequential(*blocks, nn.Linear(width, 10))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.net(x), y)


class Gpt2(nn.Module):
    def __init__(self, layers: int, width: int, vocabulary: int, attention: str) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(
            n_layer=layers,
            n_embd=width,
            n_head=width // 64,
            vocab_size=vocabulary,
            use_cache=False,
            attn_implementation=attention,
            bos_token_id=0,
            eos_token_id=0,
        )
        self.net = GPT2LMHeadModel(config)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        loss: Tensor = self.net(input_ids=tokens, attention_mask=mask, labels=tokens).loss
        return loss


@dataclass(frozen=True)
class Workload:
    """A model that returns its loss, and how to draw a batch for it on the CPU."""

    name: str
    model: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, ...]]


def mlp(lab: Lab) -> Workload:
    depth, width, batch = (2, 16, 8) if lab.dry else (12, 512, 256)
    return Workload(
        f"MLP {depth}x{width}, batch {batch}",
        lambda: Mlp(depth, width),
        lambda: (torch.randn(batch, width), torch.randint(0, 10, (batch,))),
    )


def gpt2(lab: Lab) -> Workload:
    layers, width, vocabulary, shape = (2, 64, 64, (2, 8)) if lab.dry else (12, 384, 8192, (4, 256))
    attention = "eager" if lab.dry else "sdpa"

    def batch() -> tuple[Tensor, ...]:
        # A padded position: without one, transformers drops the mask in eager code, not in a
        # capture, and both would run other attention kernels with other random numbers.
        mask = torch.ones(shape, dtype=torch.long)
        mask[0, -1] = 0
        return torch.randint(0, vocabulary, shape), mask

    name = f"GPT-2 {layers}x{width}, {shape[0]}x{shape[1]} tokens"
    return Workload(name, lambda: Gpt2(layers, width, vocabulary, attention), batch)


class Eager:
    """The training step that the others must equal: bf16 autocast, fused capturable AdamW."""

    def __init__(self, lab: Lab, workload: Workload) -> None:
        torch.manual_seed(0)
        self.lab = lab
        self.model = workload.model().to(lab.device).train()
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=1e-4, fused=True, capturable=True
        )
        batches = [workload.batch() for _ in range(4)]
        self.batches = [tuple(t if lab.dry else t.pin_memory() for t in b) for b in batches]
        self.steps = 0

    def batch(self) -> tuple[Tensor, ...]:
        pinned = self.batches[self.steps % len(self.batches)]
        self.steps += 1
        return tuple(t.to(self.lab.device, non_blocking=True) for t in pinned)

    def backward(self, batch: Sequence[Tensor]) -> Tensor:
        with torch.autocast(self.lab.device.type, torch.bfloat16, cache_enabled=False):
            loss: Tensor = self.model(*batch)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        return loss.detach()

    def __call__(self) -> Tensor:
        loss = self.backward(self.batch())
        self.optimizer.step()
        return loss

    def first_losses(self) -> list[float]:
        torch.manual_seed(1)
        return [self().item() for _ in range(CHECKED)]


class Graphed(Eager):
    """The model through make_graphed_callables, the optimizer eager."""

    def __init__(self, lab: Lab, workload: Workload, api: Any, **how: Any) -> None:
        super().__init__(lab, workload)
        self.api, self.pool = api, api.new_pool()
        sample = tuple(t.to(lab.device) for t in self.batches[0])
        with torch.autocast(lab.device.type, torch.bfloat16, cache_enabled=False):
            self.model = api.callables(self.model, sample, self.pool, **how)


class GraphedTwice(Graphed):
    """Direct gradients, and the optimizer step as a graph of its own in the same pool."""

    def __call__(self) -> Tensor:
        if self.steps < WARMUP:
            return super().__call__()
        if self.steps == WARMUP:  # its state exists and the gradients are the graph's buffers
            self.update = self.api.new_graph()
            with self.api.capture(self.update, self.pool):
                self.optimizer.step()
        loss = self.backward(self.batch())
        self.update.replay()
        return loss


class WholeStep(Eager):
    """Forward, backward and optimizer step as one graph; its bare replay is the floor."""

    def __call__(self) -> Tensor:
        if self.steps < WARMUP:
            with self.lab.side_stream():
                return super().__call__()
        batch = self.batch()
        if self.steps == WARMUP + 1:
            self.optimizer.zero_grad(set_to_none=True)
            self.static = [t.clone() for t in batch]
            self.graph = self.lab.ours.new_graph()
            with self.lab.ours.capture(self.graph):
                self.loss = self.backward(self.static)
                self.optimizer.step()
        torch._foreach_copy_(self.static, list(batch))
        self.graph.replay()
        return self.loss


def training(lab: Lab, workload: Workload, floor_limit: float | None) -> list[Row]:
    """Training loops in the four ways, as multiples of the whole-step floor."""
    expected = Eager(lab, workload).first_losses()
    ways = [
        WholeStep(lab, workload),
        GraphedTwice(lab, workload, lab.ours, param_grads="direct"),
        Graphed(lab, workload, lab.ours, param_grads="autograd"),
        Graphed(lab, workload, lab.theirs),
    ]
    off = [
        max(abs(a - b) / abs(a) for a, b in zip(expected, way.first_losses(), strict=True))
        for way in ways
    ]
    correct = [difference <= LOSS_TOLERANCE for difference in off]
    whole = ways[0]
    assert isinstance(whole, WholeStep)
    floor, direct, autograd, theirs = lab.medians(
        lambda: lab.on_gpu(whole.graph.replay, 50),
        *(lambda way=way: lab.wall(way, 30, drain=True) for way in ways[1:]),  # type: ignore[misc]
    )

    def row(way: str, figure: float, limit: float | None, i: int) -> Row:
        detail = f"floor {floor / 1e3:.3f} ms, direct {direct / 1e3:.3f}, autograd "
        detail += f"{autograd / 1e3:.3f}, torch's {theirs / 1e3:.3f}; "
        detail += f"loss off by {max(off[0], off[i]):.1e}"
        name = f"{workload.name}: {way}"
        return Row(name, figure, "x", limit, correct[0] and correct[i], detail)

    return [
        row("direct + optimizer graph / floor", direct / floor, floor_limit, 1),
        row("autograd + eager optimizer / floor", autograd / floor, None, 2),
        row("torch's + eager optimizer / floor", theirs / floor, None, 3),
        row("autograd / torch's", autograd / theirs, NEVER_SLOWER, 2),
    ]


class Capture:
    """Time and pool memory of capturing one model's forward and backward, again and again."""

    def __init__(self, lab: Lab, workload: Workload, api: Any, *, plain: bool) -> None:
        self.lab, self.workload, self.api, self.plain = lab, workload, api, plain
        self.mib: list[float] = []
        self.correct = True

    def __call__(self) -> float:
        lab, api = self.lab, self.api
        lab.clean()
        run, pool = Eager(lab, self.workload), api.new_pool()
        batch = run.batch()
        torch.manual_seed(2)
        expected = run.backward(batch).clone()
        graph = api.new_graph()

        def capture_graph() -> None:
            with api.capture(graph, pool):
                self.loss = run.backward(batch)

        def capture_callable() -> None:
            with torch.autocast(lab.device.type, torch.bfloat16, cache_enabled=False):
                api.callables(run.model, tuple(t.clone() for t in batch), pool)

        run.optimizer.zero_grad(set_to_none=True)
        taken = _once(lab, capture_graph if self.plain else capture_callable)
        self.mib.append(lab.reserved(pool))
        torch.manual_seed(2)
        if self.plain:
            graph.replay()
        else:
            self.loss = run.backward(batch)
        self.correct &= torch.allclose(self.loss, expected, rtol=LOSS_TOLERANCE)
        lab.synchronize()
        del self.loss
        return taken


def _once(lab: Lab, body: Callable[[], object]) -> float:
    lab.synchronize()
    start = time.perf_counter()
    body()
    lab.synchronize()
    return float("nan") if lab.dry else (time.perf_counter() - start) * 1e6


def capture(lab: Lab, workload: Workload) -> list[Row]:
    """Capture time and pool memory, ours / torch's, for the same work."""
    rows = []
    for plain, name in ((True, "graph"), (False, "make_graphed_callables")):
        ours, theirs = (Capture(lab, workload, api, plain=plain) for api in (lab.ours, lab.theirs))
        for warm_up in (ours, theirs):
            warm_up()
        a, b = lab.medians(ours, theirs)
        x, y = statistics.median(ours.mib), statistics.median(theirs.mib)
        correct = ours.correct and theirs.correct
        times = f"ours {a / 1e3:.1f} ms, torch's {b / 1e3:.1f} ms"
        title = f"{workload.name}, {name}: "
        rows += [
            Row(title + "capture time", a / b, "x", CAPTURE_LIMIT, correct, times),
            Row(
                title + "pool memory",
                x / y,
                "x",
                CAPTURE_LIMIT,
                correct,
                f"ours {x:.0f} MiB, torch's {y:.0f} MiB reserved",
            ),
        ]
    return rows


def sections(lab: Lab) -> Iterator[list[Row]]:
    yield replay_cost(lab)
    yield call_cost(lab)
    yield training(lab, mlp(lab), FLOOR_LIMIT)
    if importlib.util.find_spec("transformers") is None:
        print("transformers is not installed: no GPT-2 rows, capture is measured on the MLP.")
        yield capture(lab, mlp(lab))
        return
    yield training(lab, gpt2(lab), None)
    yield capture(lab, gpt2(lab))


def environment() -> dict[str, str]:
    """Card and versions, to stand beside every figure."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, check=True)
        driver = done.stdout.splitlines()[0]
    except (OSError, subprocess.CalledProcessError):
        driver = "unknown"
    return {
        "card": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "driver": driver,
        "torch": torch.__version__,
        "CUDA": torch.version.cuda or "none",
        "Python": platform.python_version(),
        "precision": "bf16 autocast, its cache off; AdamW(fused=True, capturable=True)",
    }


def show(row: Row, dry: bool) -> None:
    if dry:
        print(f"{row.name}: results {'equal eager' if row.correct else 'WRONG'}", flush=True)
        return
    limit = "" if row.limit is None else f"(limit {row.limit:g})"
    figure = f"{row.figure:8.3f} {row.unit:2}"
    print(f"{row.name:<62}{figure} {limit:<13}{row.verdict:<6}{row.detail}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", type=Path, help="write environment and rows to this file")
    parser.add_argument("--dry-run", action="store_true", help="check the logic on the CPU")
    options = parser.parse_args()
    if not options.dry_run and not torch.cuda.is_available():
        print("This benchmark needs a GPU: times on a CPU say nothing about CUDA graphs.")
        return 0
    lab, rows = Lab(options.dry_run), []
    facts = environment()
    print(", ".join(f"{key} {value}" for key, value in facts.items()))
    for section in sections(lab):
        for row in section:
            show(row, lab.dry)
        rows += section
        lab.clean()
    if options.json and not lab.dry:
        found = [{**asdict(row), "verdict": row.verdict} for row in rows]
        options.json.write_text(json.dumps({"environment": facts, "rows": found}, indent=1))
    return 0 if all(row.correct for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
