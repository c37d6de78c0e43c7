"""Each way to make a training step faster, next to ``GraphCapture``: milliseconds a step.

All train one model from one seed on the same batches, bf16-mixed with fused AdamW. Under Lightning:
eager, ``torch.compile`` in its modes, and ``GraphCapture`` in its scopes, also on a compiled model.
In a loop without a Trainer: torch's ``make_graphed_callables``, a graph of the whole step written
by hand, and ``CudaGraphModule`` of tensordict, if that is installed. The floor is the graph of
``GraphCapture``, replayed back to back.

Each row is measured in one process, one fit after the other: ten steps and more to warm up, then
blocks of 20 steps (``step.py`` says how they are timed). The fastest block counts. The losses of
the first steps stand beside each figure: ``equal`` to those of eager training under Lightning to
the last bit, ``close`` (within 5e-3), or ``other``, as where warm-up draws other random numbers.
Those of compiled models, which draw in another way, are compared with ``torch.compile``.

A name with a batch size, ``gpt2@8``, is a row of the sweep, which shows where graphs stop paying.

    python benchmarks/peers.py [--rows mlp,gpt2,llama,bert,vit,resnet50] [--sweep gpt2,mlp]
        [--peers lightning,step] [--json PATH] [--markdown PATH] [--plot PATH]

``--from PATH`` reads the figures of an earlier run in place of measuring.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import count, cycle, islice
from pathlib import Path
from typing import Any

import step
import torch
from harness import Lab, Row, gpu_time, measured_rows, verdict_of
from lightning.pytorch import seed_everything
from step import LOSSES_DIFFER, TIMED, WARMUP, be_quiet, whole_steps
from torch import Tensor

from lightning_graphs import GraphCapture

BLOCKS = 4
SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
SWEPT = ("lightning", "step", "floor")
LIMITS = {
    "step": ("cudagraphs", 1.0),
    "step, compiled": ("reduce-overhead", 1.0),
}
"""Of ours: the peer that it is compared with, and how much of its time it may take."""

Figures = dict[str, Any]


# ------------------ Under Lightning


def in_trainer(
    row: str,
    size: int | None,
    lab: Lab,
    *,
    graphs: Callable[[Lab], GraphCapture] | None = None,
    compiled: Mapping[str, Any] | None = None,
) -> Figures:
    made = None if graphs is None else graphs(lab)
    return step.fit(row, made, compiled=compiled, bar=False, lab=lab, size=size, blocks=BLOCKS)


def modules(lab: Lab) -> GraphCapture:
    backend = "emulated" if lab.dry else "cuda"
    return GraphCapture(scope="modules", only_if_faster=False, backend=backend)


# ------------------ In a loop without a Trainer


class Loop:
    """What such a loop has: a model, its optimizer, and batches in pinned memory."""

    def __init__(self, row: str, size: int | None, lab: Lab) -> None:
        self.lab = lab
        seed_everything(1, verbose=False)
        net, batch = step.workload(row, size, lab)
        self.items = [batch() for _ in range(4)]
        if not lab.dry:
            self.items = [tuple(t.pin_memory() for t in item) for item in self.items]
        self.net = net.to(lab.device).train()
        self.optimizer = torch.optim.AdamW(
            self.net.parameters(), lr=2.0**-13, fused=True, capturable=not lab.dry
        )
        self.loss = self.net

    def here(self, batch: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return tuple(t.to(self.lab.device, non_blocking=True) for t in batch)

    def body(self, *batch: Tensor) -> Tensor:
        """Train on a batch that is on the device."""
        with torch.autocast(self.lab.device.type, torch.bfloat16, cache_enabled=False):
            loss: Tensor = self.loss(*batch)
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return loss.detach()

    def graphed_callables(self) -> Callable[..., Tensor]:
        sample = self.here(self.items[0])
        with torch.autocast(self.lab.device.type, torch.bfloat16, cache_enabled=False):
            self.loss = self.lab.theirs.callables(self.net, sample, None)
        return lambda *batch: self.body(*self.here(batch))

    def whole_graph(self) -> Callable[..., Tensor]:
        inputs = [t.clone() for t in self.here(self.items[0])]
        graph, calls = self.lab.theirs.new_graph(), count()
        loss = torch.empty(0)

        def train(*batch: Tensor) -> Tensor:
            nonlocal loss
            for static, tensor in zip(inputs, batch, strict=True):
                static.copy_(tensor, non_blocking=True)
            number = next(calls)
            if number < 3:
                with self.lab.side_stream():
                    return self.body(*inputs)
            if number == 3:
                self.optimizer.zero_grad()
                with self.lab.theirs.capture(graph):
                    loss = self.body(*inputs)
            graph.replay()
            return loss.clone()

        return train

    def graph_module(self) -> Callable[..., Tensor]:
        from tensordict.nn import CudaGraphModule

        train = CudaGraphModule(self.body, warmup=3)
        return lambda *batch: train(*self.here(batch))


def in_loop(row: str, size: int | None, lab: Lab, *, how: str) -> Figures:
    loop = Loop(row, size, lab)
    with gpu_time(alone=True):
        lab.clean()
        train = getattr(loop, how)()
        losses, blocks = [], []
        for batch in islice(cycle(loop.items), WARMUP):
            losses.append(train(*batch).clone())
        for _ in range(BLOCKS):
            batches = list(islice(cycle(loop.items), WARMUP % 4, WARMUP % 4 + TIMED))
            losses.append(train(*batches[0]).clone())
            first = lab.moment()
            losses += [train(*batch) for batch in batches[1:]]
            blocks.append(lab.milliseconds(first, lab.moment()) / (TIMED - 1))
    return {"ms": min(blocks), "losses": torch.stack(losses).tolist()}


# ------------------ Peers

Peer = Callable[[str, int | None, Lab], Figures]

_OTHER_KERNELS = ("compile", "step, compiled", "reduce-overhead", "max-autotune")
PEERS: dict[str, Peer] = {  # compiled ones last: compiling leaves much behind in a process
    "lightning": in_trainer,
    "step": partial(in_trainer, graphs=whole_steps),
    "modules": partial(in_trainer, graphs=modules),
    "make_graphed_callables": partial(in_loop, how="graphed_callables"),
    "whole-step graph": partial(in_loop, how="whole_graph"),
    "CudaGraphModule": partial(in_loop, how="graph_module"),
    "compile": partial(in_trainer, compiled={}),
    "step, compiled": partial(in_trainer, graphs=whole_steps, compiled={}),
    "reduce-overhead": partial(in_trainer, compiled={"mode": "reduce-overhead"}),
    "cudagraphs": partial(in_trainer, compiled={"backend": "cudagraphs"}),
    "max-autotune": partial(in_trainer, compiled={"mode": "max-autotune"}),
}
HEADINGS = {
    "lightning": "Lightning",
    "compile": "`torch.compile`",
    "cudagraphs": '`backend="cudagraphs"`',
    "reduce-overhead": "`reduce-overhead`",
    "max-autotune": "`max-autotune`",
    "make_graphed_callables": "`make_graphed_callables`, loop",
    "whole-step graph": "whole-step graph, loop",
    "CudaGraphModule": "`CudaGraphModule`, loop",
    "modules": '`scope="modules"`',
    "step": "`GraphCapture`",
    "floor": "its floor",
    "step, compiled": "on `torch.compile`",
    "floor, compiled": "its floor",
}


def measure(name: str, lab: Lab, peers: Sequence[str]) -> Figures:
    """Measure all peers of one row."""
    row, _, given = name.partition("@")
    size = int(given) if given else None
    found: dict[str, Figures] = {}
    known: dict[bool, Sequence[float]] = {}  # losses of the first one, eager and compiled
    for peer in peers:
        if (given and peer not in SWEPT) or peer.startswith("floor"):
            continue
        try:
            found[peer] = PEERS[peer](row, size, lab)
        except ImportError as error:
            found[peer] = {"error": str(error)}
        except Exception as error:
            found[peer] = {"error": f"{type(error).__name__}: {error}"[:400]}
        torch._dynamo.reset()
        losses = found[peer].pop("losses", ())
        others = known.setdefault(peer in _OTHER_KERNELS, losses)
        found[peer]["losses_are"] = compared(others, losses)
        print(f"{name}: {peer} {_shown(found[peer])}", file=sys.stderr, flush=True)
    for peer in ("step", "step, compiled"):
        if "ms" in found.get(peer, ()):
            found[peer.replace("step", "floor")] = {"ms": found[peer]["floor"]}
    rows = [_row(ours, other, limit, found, lab) for ours, (other, limit) in LIMITS.items()]
    return {"row": name, "peers": found, "verdict": verdict_of([r for r in rows if r is not None])}


def _row(ours: str, other: str, limit: float, found: Mapping[str, Figures], lab: Lab) -> Row | None:
    if ours not in found:
        return None
    is_known = "ms" in found[ours] and "ms" in found.get(other, ()) and not lab.dry
    figure = found[ours]["ms"] / found[other]["ms"] if is_known else float("nan")
    correct = "ms" in found[ours] and found[ours]["losses_are"] != "other"
    return Row(f"{ours} to {other}", figure, "x", limit, correct)


def compared(known: Sequence[float], losses: Sequence[float]) -> str:
    """Say how losses compare with known ones; empty if either are missing."""
    pairs = list(zip(known, losses, strict=False))
    if not pairs:
        return ""
    if all(a == b for a, b in pairs):
        return "equal"
    return "close" if max(abs(a - b) for a, b in pairs) <= LOSSES_DIFFER else "other"


def line(found: Figures) -> str:
    """Tell in words what is printed of a row."""
    if "error" in found:
        return f"{found['row']:>12}: {found['verdict']}\n{found['error']}"
    shown = [f"{name} {_shown(figures)}" for name, figures in found["peers"].items()]
    return f"{found['row']:>12}: {found['verdict']}: {', '.join(shown)}"


def _shown(figures: Figures) -> str:
    if "ms" not in figures:
        return f"- ({figures['error']})"
    return " ".join([f"{figures['ms']:.3f}", figures.get("losses_are", "")]).strip()


# ------------------ Results


def markdown(result: Mapping[str, Any]) -> str:
    """Make a table of the rows, and one of the sweep."""
    rows = {found["row"]: found["peers"] for found in result["rows"] if "peers" in found}
    about = ", ".join(f"{name} {value}" for name, value in result["about"].items())
    tables = [f"Milliseconds a step. {about}."]
    for is_swept in (False, True):
        mine = {name: peers for name, peers in rows.items() if ("@" in name) is is_swept}
        used = [p for p in HEADINGS if any("ms" in peers.get(p, ()) for peers in mine.values())]
        if not mine:
            continue
        lines = [["row", *(HEADINGS[peer] for peer in used)], ["---"] * (len(used) + 1)]
        for name, peers in mine.items():
            lines.append([name, *(_cell(peers.get(peer, {})) for peer in used)])
        tables.append("\n".join(f"| {' | '.join(cells)} |" for cells in lines))
    return "\n\n".join(tables) + "\n"


def _cell(figures: Figures) -> str:
    if "ms" not in figures:
        return ""
    is_other = figures.get("losses_are") == "other"
    return f"{figures['ms']:.3g}" + " (other losses)" * is_other


def plot(result: Mapping[str, Any], path: Path) -> None:
    """Draw by how much steps are faster than eager ones, over the size of a batch."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    swept: dict[str, list[tuple[int, float]]] = {}
    for found in result["rows"]:
        name, _, size = found["row"].partition("@")
        if size and all("ms" in found["peers"].get(peer, ()) for peer in ("lightning", "step")):
            ms = [found["peers"][peer]["ms"] for peer in ("lightning", "step")]
            swept.setdefault(name, []).append((int(size), ms[0] / ms[1]))
    for name, points in swept.items():
        sizes, gains = zip(*sorted(points), strict=True)
        axes.plot(sizes, gains, marker="o", label=name)
    axes.axhline(1.0, color="gray", linewidth=1)
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("batch size")
    axes.set_ylabel("eager step / captured step")
    axes.set_title(", ".join(map(str, list(result["about"].values())[:3])))
    axes.legend()
    figure.savefig(path)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rows", default="mlp,gpt2,llama,bert,vit,resnet50")
    parser.add_argument("--sweep", default="gpt2,mlp", help="rows with many sizes of batches")
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)))
    parser.add_argument("--peers", default=";".join(PEERS), help="names, with semicolons between")
    parser.add_argument("--jobs", type=int, default=1, help="rows at a time (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write everything to this file")
    parser.add_argument("--markdown", type=Path, help="write tables to this file")
    parser.add_argument("--plot", type=Path, help="draw the sweep into this file (.svg, .png)")
    parser.add_argument("--from", dest="given", type=Path, help="read an earlier run's --json")
    parser.add_argument("--tiny", action="store_true", help="a rehearsal on the CPU")
    options = parser.parse_args(arguments)
    result = json.loads(options.given.read_text()) if options.given else _measured(options)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1))
    if options.markdown:
        options.markdown.write_text(markdown(result))
    if options.plot:
        plot(result, options.plot)
    return 0 if all(row["verdict"] == "PASS" for row in result["rows"]) else 1


def _measured(options: argparse.Namespace) -> dict[str, Any]:
    names = [name for name in options.rows.split(",") if name]
    names += [f"{n}@{s}" for n in options.sweep.split(",") if n for s in options.sizes.split(",")]
    be_quiet()
    heading = "bf16-mixed, fused AdamW, one logged key, no progress bar"
    flags = ["--peers", options.peers, "--sweep", "", *["--tiny"] * options.tiny]
    here = partial(measure, lab=Lab(options.tiny), peers=options.peers.split(";"))
    return measured_rows(__file__, names, flags, here, line, heading, jobs=options.jobs)


if __name__ == "__main__":
    sys.exit(main())
