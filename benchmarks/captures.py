"""What a capture costs, phase by phase, in milliseconds and in eager steps, on one GPU.

Short fits of GPT-2 (12 layers of 384, 4 x 256 tokens, some 1,200 nodes) in one process, as
Lightning runs them: eager, captured without verification, and with it. A step is timed on the CPU
from the hook before its batch to the one behind it, where the GPU has finished; the capture's is
the first one that is replayed. Each fit is compared with the median of its own eager steps, since
the clock of a CPU moves. The first fit loads kernels and is left out. torch's own capture of the
same work in a plain loop stands beside them, and its first replay beside the second.

Phases are those of further verified fits, in which the functions of this package are timed that
they are: each with what is inside of it. Losses are compared with those of the eager fit.

    python benchmarks/captures.py [--fits 5] [--json PATH]
    python benchmarks/captures.py --tiny     # the logic alone, on a CPU: no verdicts
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from core import environment, show
from harness import Lab, Row, of_trainers
from lightning.pytorch import Callback, Trainer, seed_everything
from step import Module, be_quiet, workload
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_graphs import GraphCapture
from lightning_graphs.device.graph import CUDAGraph
from lightning_graphs.policy.worth import MemoryBudget
from lightning_graphs.private.callsite import LIBRARIES, is_library
from lightning_graphs.private.exchange import replaced
from lightning_graphs.regions import lifecycle, step, verify, whole_step
from lightning_graphs.values import snapshot
from lightning_graphs.watch import environment as surroundings

VERIFIED, UNVERIFIED, AT_LEAST = 4.0, 1.5, 100.0
"""Eager steps, and milliseconds that a capture may take however short steps are."""
TENTH = 1.05  # the first step that only replays, over the tenth; two steps differ by so much
STEPS = 18
PHASES: tuple[tuple[Any, str, str], ...] = (
    (whole_step.StepRegion, "capture", "capture"),
    (MemoryBudget, "require_room", "room in memory"),
    (step.StepCapture, "_begin", "a look at what surrounds the step"),
    (surroundings.Environment, "__init__", "what modules and functions hold"),
    (step.StepCapture, "forward", "forward under watch"),
    (step.StepCapture, "_backward", "backward, casts fused"),
    (step.StepCapture, "update", "update"),
    (CUDAGraph, "capture_end", "end of the graph's capture"),
    (lifecycle.Lifecycle, "verified", "verification"),
    (verify.Verification, "_state", "a look at the state"),
    (snapshot.RegionState, "take", "copies of the state"),
    (verify.Verification, "_eager", "the step, eagerly and watched"),
    (verify.Verification, "_call", "its forward"),
    (verify.Verification, "_backward", "its backward"),
    (verify.Verification, "update", "its update"),
    (snapshot.RegionState, "results", "lists of results"),
    (verify, "fingerprints_of", "fingerprints of results"),
    (snapshot.Snapshot, "restore", "state put back"),
    (verify.Verification, "_replayed", "instantiation and replay"),
    (torch.cuda, "empty_cache", "memory given back"),
)

_OUTSIDE = ("capture", "verification")
"""Phases that are inside of no other one."""


class Clock(Callback):
    """Times each step until the GPU has finished."""

    def __init__(self, lab: Lab, graphs: GraphCapture | None) -> None:
        self._lab, self._graphs, self._began = lab, graphs, 0.0
        self.ms: list[float] = []
        self.losses: list[Tensor] = []
        self.first: int | None = None  # the first step that is replayed

    def on_train_batch_start(self, *_: Any) -> None:
        self._lab.synchronize()
        self._began = time.perf_counter()

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, *_: Any) -> None:
        self._lab.synchronize()
        self.ms.append((time.perf_counter() - self._began) * 1e3)
        self.losses.append(outputs["loss"].detach().clone())
        if self.first is None and self._graphs is not None and self._graphs._statistics.replayed:
            self.first = len(self.ms) - 1

    @property
    def eager(self) -> float:
        return statistics.median(self.ms[2 : self.first])

    @property
    def captured(self) -> float:
        assert self.first is not None, "the step was captured"
        return self.ms[self.first]

    @property
    def first_over_tenth(self) -> float:
        assert self.first is not None, "the step was captured"
        return self.ms[self.first + 1] / self.ms[self.first + 10]


def fit(lab: Lab, verified: bool | None) -> Clock:
    """Train for a few steps; with None eagerly."""
    gc.collect()
    lab.clean()
    seed_everything(1, verbose=False)
    net, batch = workload("gpt2", None, lab)
    how: dict[str, Any] = {"only_if_faster": False, "scope": "step"}
    how["backend"] = "emulated" if lab.dry else "cuda"
    own = None if verified is None else GraphCapture(verify=verified, **how)
    clock = Clock(lab, own)
    trainer = Trainer(
        **of_trainers(lab),
        enable_progress_bar=False,
        callbacks=[clock, *([own] if own is not None else [])],
    )
    loader: Any = DataLoader([batch() for _ in range(STEPS)], batch_size=None)  # type: ignore[arg-type]
    trainer.fit(Module(net), loader)
    return clock


@contextmanager
def timed(times: dict[str, list[float]], depths: dict[str, int]) -> Iterator[None]:
    """Time the phases of captures in the body, each with how deep it is inside of others."""
    inside = [0]

    def clocked(own: Callable[..., Any], label: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if not inside[0] and label not in _OUTSIDE:  # in another step
                return own(*args, **kwargs)
            depths.setdefault(label, inside[0])
            inside[0] += 1
            began = time.perf_counter()
            try:
                return own(*args, **kwargs)
            finally:
                times[label][-1] += (time.perf_counter() - began) * 1e3
                inside[0] -= 1

        return call

    # Captures refuse what the author's own code changes next to tensors, such as these times.
    known = LIBRARIES.roots
    with ExitStack() as stack:
        stack.callback(is_library.cache_clear)
        stack.callback(setattr, LIBRARIES, "roots", known)
        LIBRARIES.roots = (*known, __file__)
        is_library.cache_clear()
        for owner, name, label in PHASES:
            stack.enter_context(replaced(owner, name, clocked(getattr(owner, name), label)))
        yield


def torchs(lab: Lab) -> dict[str, float]:
    """Milliseconds of torch's own capture of the step in a plain loop, and of its replays."""
    net, batch = workload("gpt2", None, lab)
    net = net.to(lab.device)
    adamw = torch.optim.AdamW(net.parameters(), lr=2.0**-13, fused=True, capturable=True)
    given = [tensor.to(lab.device) for tensor in batch()]

    def run() -> None:
        adamw.zero_grad(set_to_none=True)
        with torch.autocast(lab.device.type, torch.bfloat16, cache_enabled=False):
            loss = net(*given)
        loss.backward()
        adamw.step()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(4):
            run()
    torch.cuda.current_stream().wait_stream(side)
    eager = [lab.wall(run, 1, drain=True) for _ in range(5)]
    captures, replays = [], []
    for _ in range(3):
        adamw.zero_grad(set_to_none=True)
        captured = torch.cuda.CUDAGraph()

        def capture(captured: torch.cuda.CUDAGraph = captured) -> None:
            with torch.cuda.graph(captured):
                run()

        captures.append(lab.wall(capture, 1, drain=True))
        replays.append([lab.wall(captured.replay, 1, drain=True) for _ in range(10)])
        captured.reset()
    found = {"eager": eager, "capture": captures, "first replay": [r[0] for r in replays]}
    found["tenth replay"] = [r[-1] for r in replays]
    return {name: statistics.median(values) / 1e3 for name, values in found.items()}


def rows(lab: Lab, fits: int) -> tuple[list[Row], dict[str, Any]]:
    """Measure everything, and print the phases."""
    fit(lab, True)
    eager = fit(lab, None)
    found = {kind: [fit(lab, kind) for _ in range(fits)] for kind in (False, True)}
    known = torch.stack(eager.losses).tolist()
    result: list[Row] = []
    for kind, clocks in found.items():
        correct = all(torch.stack(clock.losses).tolist() == known for clock in clocks)
        steps = statistics.median(clock.captured / clock.eager for clock in clocks)
        ms, one = (
            statistics.median(getattr(clock, part) for clock in clocks)
            for part in ("captured", "eager")
        )
        limit = VERIFIED if kind else max(UNVERIFIED, AT_LEAST / one)
        name = f"the step that captures{', verified' if kind else ''}: in eager steps"
        detail = f"{ms:.1f} ms, an eager step {one:.1f} ms"
        result.append(Row(name, float("nan") if lab.dry else steps, "x", limit, correct, detail))
    ratio = statistics.median(clock.first_over_tenth for kind in found.values() for clock in kind)
    name, figure = "the first replayed step, over the tenth", float("nan") if lab.dry else ratio
    result.append(Row(name, figure, "x", TENTH, all(row.correct for row in result), ""))
    times, depths = defaultdict[str, list[float]](list), dict[str, int]()
    for _ in range(fits):
        for _, _, label in PHASES:
            times[label].append(0.0)
        with timed(times, depths):
            clock = fit(lab, True)
        times["an eager step"].append(clock.eager)
        times["the step that captures"].append(clock.captured)
    depths |= {"an eager step": 0, "the step that captures": 0}
    phases = {label: statistics.median(times[label]) for label in depths}
    one = phases["an eager step"]
    print(f"{'phases of a verified capture':<50}{'ms':>8}{'eager steps':>13}")
    for label, ms in phases.items():
        print(f"{'  ' * depths[label] + label:<50}{ms:8.1f}{ms / one:13.2f}")
    own = {} if lab.dry else torchs(lab)
    for name, ms in own.items():
        print(f"{'torch: ' + name:<50}{ms:8.1f}{ms / own['eager']:13.2f}")
    return result, {"phases": phases, "torch": own}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--fits", type=int, default=5, help="of each kind (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write everything to this file")
    parser.add_argument("--tiny", action="store_true", help="a rehearsal on the CPU")
    options = parser.parse_args(arguments)
    if not (options.tiny or torch.cuda.is_available()):
        print("This benchmark needs a GPU: times on a CPU say nothing about CUDA graphs.")
        return 0
    be_quiet()
    lab = Lab(options.tiny)
    result, further = rows(lab, 1 if options.tiny else options.fits)
    for row in result:
        show(row, lab.dry)
    if options.json and not lab.dry:
        figures = {row.name: row.figure for row in result}
        found = {"environment": environment(), "rows": figures, **further}
        options.json.write_text(json.dumps(found, indent=1))
    return 0 if all(row.correct for row in result) else 1


if __name__ == "__main__":
    sys.exit(main())
