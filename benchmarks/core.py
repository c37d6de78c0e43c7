"""The graph core against torch's own graphs, on one GPU and in one process.

Whatever is timed is also checked, in the same run, against eager results. Times are medians over
rounds, every second round in reverse order (A, B, B, A). The limits are those of the project.

    python benchmarks/core.py [--json PATH]
    python benchmarks/core.py --dry-run      # the logic alone, on a CPU: no times, no verdicts
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from harness import Lab, Row
from torch import Tensor, nn
from workloads import Eager, Graphed, GraphedTwice, WholeStep, Workload, gpt2, mlp

REPLAY_LIMIT_US = 5.0
DIRECT_LIMIT = 0.2
INDEPENDENT_LIMIT = 1.1
FLOOR_LIMIT = 1.10
CAPTURE_LIMIT = 1.05
NEVER_SLOWER = 1.02  # 1.00, and what two medians of the same code differ by
LOSS_TOLERANCE = 2e-3  # relative; bf16 kernels of the same shapes are normally equal to the bit


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
    few, many = lab.parameters
    rows, direct_us = [], {}
    for kept in (False, True):
        gradients = "kept gradients" if kept else "gradients None"
        for count in lab.parameters:
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
            limit = DIRECT_LIMIT if count == many else None
            rows += [
                Row(name + "autograd / torch's", autograd / theirs, "x", never, correct, detail),
                Row(name + "direct / torch's", direct / theirs, "x", limit, correct, detail),
            ]
        name = f"direct, {gradients}: {many} / {few} parameters"
        ratio = direct_us[kept, many] / direct_us[kept, few]
        rows.append(Row(name, ratio, "x", INDEPENDENT_LIMIT, correct))
    return rows


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
        taken = lab.wall(capture_graph if self.plain else capture_callable, 1, drain=True)
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
