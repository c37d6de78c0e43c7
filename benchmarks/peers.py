"""Each way to make a training step faster, next to ``GraphCapture``: milliseconds a step.

All train one model from one seed on the same batches, bf16-mixed with fused AdamW. Under Lightning:
eager, ``torch.compile`` in its modes, NeMo's ``CUDAGraphCallback``, and ``GraphCapture`` in its
scopes, also in two streams, also on a compiled model. In a loop without a Trainer (``others.py``):
torch's ``make_graphed_callables``, a graph of the whole step written by hand, tensordict's
``CudaGraphModule``, and torchtitan's wrapper. Libraries that are not installed take no part. The
floor is the graph of ``GraphCapture``, replayed back to back.

Each row is measured in one process, one fit after the other: 30 steps to warm up, then blocks of
20 steps (``step.py`` says how they are timed). The fastest block counts. The losses of the first 50
steps stand beside each figure: ``equal`` to those of eager training under Lightning to the last
bit, or by how much they differ. Those of compiled models, whose kernels round and draw in other
ways, are compared with those of ``torch.compile``.

``gpt2 sweep`` trains batches of 1 to 128, eagerly and captured: where do graphs stop paying?
``gpt2 on 2`` trains on two GPUs under DDP and FSDP2 (``ddp.py``), torchtitan's wrapper among them.

    python benchmarks/peers.py [--rows mlp,gpt2,llama,bert,vit,resnet50,convnext,unet]
        [--sweep gpt2,vit] [--ranks gpt2] [--peers "lightning;step"] [--seconds 100] [--json PATH]
        [--pages README.md benchmarks/README.md] [--plot PATH]

Compiling takes longest: ``--ahead`` does no more than that, in a process beside those that measure.
What is known is written at once, after each fit; no fit begins after ``--seconds``. ``--from``
reads figures of earlier runs in place of measuring: of each row those of the first file, and what
it lacks from the next ones. ``--pages`` puts tables between the marks of pages, and ``--plot``
draws them. All that the documentation quotes is made by

    python benchmarks/peers.py --from benchmarks/peers.json --quote
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import others
import step
import torch
from ddp import Fit, Steps, summary
from harness import Lab, Row, about_environment, measured_rows, verdict_of
from lightning.pytorch import seed_everything
from others import Figures
from step import LOSSES_DIFFER, be_quiet, soon, whole_steps
from teams import Team, TeamError

from lightning_graphs import GraphCapture

BLOCKS, BLOCKS_OF_SWEEP = 3, 2
SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
SWEPT = ("lightning", "step")
LIMITS = {
    "step": ("cudagraphs", 1.0),
    "step, FSDP2": ("torchtitan, FSDP2", 1.0),
    "step, compiled": ("reduce-overhead", 1.0),
}
"""Of ours: the peer that it is compared with, and how much of its time it may take."""
AHEAD = {"gpt2": 2.5, "llama": 2.5}
"""How far ours on a compiled model is ahead of ``reduce-overhead``, at least."""


# ------------------ Peers


def in_trainer(
    row: str,
    size: int | None,
    lab: Lab,
    *,
    blocks: int,
    graphs: Callable[[Lab], GraphCapture] | None = None,
    compiled: Mapping[str, Any] | None = None,
) -> Figures:
    made = None if graphs is None else graphs(lab)
    how: Mapping[str, Any] = {"bar": False, "lab": lab, "size": size, "blocks": blocks}
    found = step.fit(row, made, compiled=compiled, **how)
    if made is not None and made.report.eager > made.report.replayed:
        found["why"] = f"{made.report}"[:1000]
    return found


def modules(lab: Lab) -> GraphCapture:
    backend = "emulated" if lab.dry else "cuda"
    return GraphCapture(scope="modules", only_if_faster=False, backend=backend)


def two_streams(row: str, size: int | None, lab: Lab, *, blocks: int) -> Figures:
    with soon():
        return in_trainer(row, size, lab, blocks=blocks, graphs=partial(whole_steps, overlap=True))


def compile_ahead(row: str, lab: Lab, peers: Sequence[str]) -> None:
    """Fill torch's cache of compiled code with what a row's peers will need."""
    for mode in (MODES[peer] for peer in peers if peer in MODES):
        seed_everything(1, verbose=False)
        net, batch = step.workload(row, None, lab)
        module = step.Module(net.to(lab.device).train(), mode)
        with torch.autocast(lab.device.type, torch.bfloat16):
            loss = module.call(*(t.to(lab.device) for t in batch()))
        loss.backward()
        torch._dynamo.reset()


MODES: Mapping[str, Mapping[str, Any]] = {
    "compile": {},
    "reduce-overhead": {"mode": "reduce-overhead"},
    "max-autotune": {"mode": "max-autotune"},
}
Peer = Callable[..., Figures]
PEERS: dict[str, Peer] = {  # compiled ones last: compiling leaves much behind in a process
    "lightning": in_trainer,
    "step": partial(in_trainer, graphs=whole_steps),
    "two streams": two_streams,
    "modules": partial(in_trainer, graphs=modules),
    "nemo": others.nemo,
    "nemo, waiting": partial(others.nemo, waits=True),
    "make_graphed_callables": partial(others.in_loop, how="graphed_callables"),
    "whole-step graph": partial(others.in_loop, how="whole_graph"),
    "CudaGraphModule": partial(others.in_loop, how="graph_module"),
    "torchtitan": partial(others.in_loop, how="titan"),
    "cudagraphs": partial(in_trainer, compiled={"backend": "cudagraphs"}),
    "compile": partial(in_trainer, compiled=MODES["compile"]),
    "step, compiled": partial(in_trainer, graphs=whole_steps, compiled=MODES["compile"]),
    "reduce-overhead": partial(in_trainer, compiled=MODES["reduce-overhead"]),
    "max-autotune": partial(in_trainer, compiled=MODES["max-autotune"]),
}
ON_RANKS = {
    "lightning": ("plain", "eager"),
    "step": ("plain", "captured"),
    "lightning, FSDP2": ("fsdp2", "eager"),
    "torchtitan, FSDP2": ("fsdp2", "torchtitan"),
    "step, FSDP2": ("fsdp2", "captured"),
    "compile": ("plain", "compiled"),
    "step, compiled": ("plain", "captured-compiled"),
    "reduce-overhead": ("plain", "reduce-overhead"),
}
"""Peer -> variant and way of ``ddp.py``."""
SECONDS_OF_A_FIT = 90
COMPILED = ("compile", "step, compiled", "reduce-overhead", "max-autotune")
FLOORS = {"step": "floor", "step, FSDP2": "floor, FSDP2", "step, compiled": "floor, compiled"}


def measure(name: str, lab: Lab, options: argparse.Namespace) -> Figures:
    """Measure all peers of one row, and write what is known after each."""
    row, _, how = name.partition(" ")
    result: Figures = {"row": name, "about": about_environment(), "peers": {}, "verdict": ""}
    keep = partial(_keep, result, options, lab)
    if how.startswith("on "):
        on_ranks(row, int(how[3:]), result["peers"], options, keep)
        return result
    swept = how == "sweep"
    for size in options.sizes if swept else [None]:
        found = (
            result.setdefault("sizes", {}).setdefault(str(size), {}) if swept else result["peers"]
        )
        known: dict[bool, Sequence[float]] = {}  # losses of the first one, eager and compiled
        for peer in SWEPT if swept else options.peers:
            if time.monotonic() < options.began + options.seconds and not _skipped(peer, lab):
                one = found[peer] = _measured(peer, row, size, lab)
                losses = one.pop("losses", ())
                one |= compared(known.setdefault(peer in COMPILED, losses), losses)
                keep(found, peer, "" if size is None else f" {size}")
    return result


def _skipped(peer: str, lab: Lab) -> bool:
    """Rehearsals compile nothing: that takes long, and they cannot look into it."""
    return lab.dry and (peer in COMPILED or peer == "cudagraphs")


def _keep(
    result: Figures,
    options: argparse.Namespace,
    lab: Lab,
    found: Mapping[str, Figures],
    peer: str,
    size: str = "",
) -> None:
    """Judge, say and write what is known."""
    since = time.monotonic() - options.began
    result["verdict"] = verdict_of(rows_of(result["row"].partition(" ")[0], found, lab))
    shown = f"{result['row']}{size}: {peer} {_shown(found[peer])}"
    print(f"[{since:5.1f}] {shown}", file=sys.stderr, flush=True)
    if options.json:
        options.json.write_text(json.dumps({"rows": [result]}, indent=1))


def on_ranks(
    row: str,
    ranks: int,
    found: dict[str, Figures],
    options: argparse.Namespace,
    keep: Callable[[Mapping[str, Figures], str], None],
) -> None:
    """Measure a row on several GPUs: the slowest rank, and the losses of all."""
    team = Team(others.on_rank, range(ranks))
    steps = Steps(24, 4, 1) if options.tiny else Steps()
    known: dict[Any, Figures] = {}  # what the first fit of a kind has made
    for peer, (variant, how) in ON_RANKS.items():
        began = time.monotonic()
        if began > options.began + options.seconds or _skipped(peer, Lab(options.tiny)):
            continue
        try:
            fit = Fit(row, variant, how, ranks)
            one = summary(fit, team.ask(fit, steps, options.tiny, seconds=SECONDS_OF_A_FIT))
        except TeamError as error:
            found[peer] = {"error": f"{error}"[-400:]}
        else:
            first = known.setdefault((variant, peer in COMPILED), one)
            pair = [[loss for losses in made["losses"] for loss in losses] for made in (first, one)]
            found[peer] = {"ms": one["ms"], "peak": one["peak_mib"], **compared(*pair)}
            found[peer] |= {"floor": one["floor_ms"]} if one["floor_ms"] > 0 else {}
            found[peer]["seconds"] = time.monotonic() - began
        keep(found, peer)
    team.end()


def _measured(peer: str, row: str, size: int | None, lab: Lab) -> Figures:
    """Measure one peer: what came of it, or why nothing did."""
    blocks = BLOCKS if size is None else BLOCKS_OF_SWEEP
    began = time.monotonic()
    try:
        one = PEERS[peer](row, size, lab, blocks=blocks)
    except ImportError as error:
        return {"error": str(error), "missing": True}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:400]}
    finally:
        torch._dynamo.reset()
    kept = {name: one[name] for name in ("ms", "losses", "peak", "why") if name in one}
    if one.get("floor"):
        kept["floor"] = one["floor"]
    return {**kept, "seconds": time.monotonic() - began}


def compared(known: Sequence[float], losses: Sequence[float]) -> Figures:
    """Say how losses compare with known ones; nothing if either are missing."""
    pairs = list(zip(known, losses, strict=False))
    if not pairs:
        return {}
    if all(a == b for a, b in pairs):
        return {"losses": "equal"}
    apart = max(math.inf if a != a or b != b else abs(a - b) for a, b in pairs)
    return {"losses": "close" if apart <= LOSSES_DIFFER else "other", "apart": apart}


def rows_of(row: str, found: Mapping[str, Figures], lab: Lab) -> list[Row]:
    """What is compared of the peers of a row, as far as it is known."""
    made = []
    for ours, (other, limit) in LIMITS.items():
        if ours not in found or found[ours].get("missing"):
            continue
        if ours == "step, compiled":
            limit = 1 / AHEAD.get(row, 1 / limit)
        is_known = "ms" in found[ours] and "ms" in found.get(other, ()) and not lab.dry
        figure = found[ours]["ms"] / found[other]["ms"] if is_known else float("nan")
        correct = "ms" in found[ours] and found[ours].get("losses") != "other"
        made.append(Row(f"{ours} to {other}", figure, "x", limit, correct))
    return made


def line(found: Figures) -> str:
    """Tell in words what is printed of a row."""
    if "error" in found:
        return f"{found['row']:>12}: {found['verdict']}\n{found['error']}"
    of = {"": found["peers"]} | {f"{n}: ": peers for n, peers in found.get("sizes", {}).items()}
    shown = [f"{n}{p} {_shown(one)}" for n, peers in of.items() for p, one in peers.items()]
    return f"{found['row']:>12}: {found['verdict']}: {', '.join(shown)}"


def _shown(figures: Figures) -> str:
    if "ms" not in figures:
        return f"- ({figures['error']})"
    words = [f"{figures['ms']:.3f}"]
    words += [f"floor {figures['floor']:.3f}"] if "floor" in figures else []
    words += [figures.get("losses", ""), f"{figures['apart']:.1e}" if "apart" in figures else ""]
    words += [f"({figures['seconds']:.0f} s)", figures.get("why", "")]
    return " ".join(word for word in words if word)


# ------------------ Results

HEADINGS = {
    "lightning": "Lightning, eager",
    "compile": "`torch.compile`",
    "cudagraphs": '`torch.compile(backend="cudagraphs")`',
    "reduce-overhead": '`torch.compile(mode="reduce-overhead")`',
    "max-autotune": '`torch.compile(mode="max-autotune")`',
    "nemo": "NeMo's `CUDAGraphCallback`",
    "nemo, waiting": "the same, waiting for each step",
    "make_graphed_callables": "`torch.cuda.make_graphed_callables`, loop",
    "torchtitan": "torchtitan's `CUDAGraphWrapper`, loop",
    "CudaGraphModule": "tensordict's `CudaGraphModule`, loop",
    "whole-step graph": "whole-step graph by hand, loop",
    "modules": '`GraphCapture(scope="modules")`',
    "step": "`GraphCapture()`, one stream",
    "floor": "its floor",
    "two streams": "`GraphCapture()`, two streams",
    "lightning, FSDP2": "Lightning, eager, FSDP2",
    "torchtitan, FSDP2": "torchtitan's `CUDAGraphWrapper`, loop, FSDP2",
    "step, FSDP2": "`GraphCapture()`, FSDP2",
    "floor, FSDP2": "its floor",
    "step, compiled": "`GraphCapture()` on `torch.compile`",
    "floor, compiled": "its floor",
}
MODELS = {
    "mlp": "MLP 12x512, batch 256",
    "gpt2": "GPT-2 12x384, 4x256 tokens",
    "llama": "Llama 10x256, 4x256 tokens",
    "bert": "BERT-base, 16x128 tokens",
    "vit": "ViT-tiny, 32x3x224x224",
    "resnet50": "ResNet-50, 32x3x64x64",
    "convnext": "ConvNeXt-tiny, 32x3x64x64",
    "unet": "diffusion U-Net, 16x3x32x32",
}
NOTHING = "Not measured yet."
BRIEFLY = ("card", "torch", "lightning", "commit")
DRAWN = ("gpt2", "llama", "bert", "vit")
ROOT = Path(__file__).parents[1]
QUOTING = ("README.md", "docs/peers.md")
PICTURE = "docs/assets/peers.svg"
Rows = Mapping[str, Mapping[str, Any]]


def by_name(rows: Sequence[Mapping[str, Any]]) -> Rows:
    """Rows that have figures, in the order of the models.

    Of several of one name the first counts. What it lacks comes from those behind it.
    """
    known: dict[str, Mapping[str, Any]] = {}
    for row in rows:
        if "peers" in row:
            name = row["row"]
            known[name] = _with_more(known[name], row) if name in known else row
    return {name: known[name] for name in sorted(known, key=_place)}


def _with_more(row: Mapping[str, Any], later: Mapping[str, Any]) -> Mapping[str, Any]:
    mine, theirs = ({p: f for p, f in r["peers"].items() if "ms" in f} for r in (row, later))
    added = [peer for peer in theirs if peer not in mine]
    about = dict(row["about"])
    if added and about.get("commit") != later["about"].get("commit"):
        about["commit"] = f"{about.get('commit')} ({', '.join(added)}: {later['about']['commit']})"
    sizes = {**later.get("sizes", {}), **row.get("sizes", {})}
    more: dict[str, Any] = {"about": about, "peers": {**theirs, **mine}}
    return {**row, **more, **({"sizes": sizes} if sizes else {})}


def _place(name: str) -> tuple[str, int]:
    row, _, how = name.partition(" ")
    return how, [*MODELS, row].index(row)


def about(rows: Rows, parts: Sequence[str] = ()) -> str:
    """On what rows were measured, in words: all of it, or some parts."""
    together: dict[str, list[str]] = {}
    for name, row in rows.items():
        known = {k: v for k, v in row["about"].items() if not parts or k in parts}
        said = ", ".join(f"{k} {v}" if k != "card" else v for k, v in known.items())
        together.setdefault(said, []).append(name)
    if len(together) == 1:
        return f"{next(iter(together))}."
    return " ".join(f"{', '.join(names)}: {said}." for said, names in together.items())


def table(rows: Rows, how: str = "") -> str:
    """Make a table of milliseconds: ways down, models across.

    Args:
        rows: All of them.
        how: What stands behind the model in the names of those that the table has.
    """
    mine = {
        name: _with_floors(row["peers"])
        for name, row in rows.items()
        if name.partition(" ")[2].startswith(how) and bool(how) is (" " in name)
    }
    if not mine:
        return NOTHING
    used = [p for p in HEADINGS if any("ms" in peers.get(p, ()) for peers in mine.values())]
    lines = [["ms a step", *map(_named, mine)], ["---"] * (len(mine) + 1)]
    lines += [[HEADINGS[p], *(_cell(peers.get(p, {})) for peers in mine.values())] for p in used]
    return f"{_piped(lines)}\n\n{about({name: rows[name] for name in mine})}"


def _named(name: str, models: Mapping[str, str] | None = None) -> str:
    row, _, how = name.partition(" ")
    return f"{(models or {}).get(row, row)}{f', {how} GPUs' * bool(how)}"


def _with_floors(peers: Mapping[str, Figures]) -> Mapping[str, Figures]:
    floors = {
        f: {"ms": peers[p]["floor"]} for p, f in FLOORS.items() if "floor" in peers.get(p, ())
    }
    return {**peers, **floors}


def _cell(figures: Figures) -> str:
    if "ms" not in figures:
        return ""
    sign = {"close": " ≈", "other": " ≠"}.get(figures.get("losses", ""), "")
    return f"{figures['ms']:.3g}{sign}"


def _piped(lines: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def ratios(rows: Rows) -> str:
    """Make a table of how many times slower than ours peers are."""
    pairs = (("lightning", "step"), ("cudagraphs", "step"), ("reduce-overhead", "step, compiled"))
    heads = (f"{HEADINGS[theirs]} over {HEADINGS[ours]}" for theirs, ours in pairs)
    lines = [["", *heads], ["---"] * (len(pairs) + 1)]
    for name, row in rows.items():
        cells = [_ratio(row["peers"], *pair) for pair in pairs]
        lines += [[_named(name, MODELS), *cells]] if any(cells) else []
    return _piped(lines)


def _ratio(peers: Mapping[str, Figures], theirs: str, ours: str) -> str:
    known = all("ms" in peers.get(peer, ()) for peer in (theirs, ours))
    return f"{peers[theirs]['ms'] / peers[ours]['ms']:.2f}" if known else ""


def gains(rows: Rows) -> dict[str, dict[int, float]]:
    """Swept row -> size of a batch -> time of an eager step over that of a captured one."""
    found: dict[str, dict[int, float]] = {}
    for name, row in rows.items():
        for size, peers in row.get("sizes", {}).items():
            ratio = _ratio(peers, "lightning", "step")
            if ratio:
                found.setdefault(name.partition(" ")[0], {})[int(size)] = float(ratio)
    return found


def sweep(rows: Rows) -> str:
    """Make a table of the gain over sizes of batches."""
    found = gains(rows)
    if not found:
        return NOTHING
    sizes = sorted({size for of in found.values() for size in of})
    lines = [["eager over captured", *map(str, sizes)], ["---"] * (len(sizes) + 1)]
    lines += [[n, *(f"{of[s]:.2f}" if s in of else "" for s in sizes)] for n, of in found.items()]
    return f"{_piped(lines)}\n\n{about({n: row for n, row in rows.items() if 'sizes' in row})}"


def bars(rows: Rows, width: int = 37) -> str:
    """Draw eager and captured steps as text, and say on what they were measured."""
    mine = {n: rows[n] for n in DRAWN if n in rows and _ratio(rows[n]["peers"], *SWEPT)}
    longest = max((row["peers"]["lightning"]["ms"] for row in mine.values()), default=1.0)
    lines = []
    for name, row in mine.items():
        for peer, word in zip(SWEPT, ("eager", "graph"), strict=True):
            ms = row["peers"][peer]["ms"]
            head = MODELS[name] if word == "eager" else ""
            lines.append(f"{head:<27} {word} {'█' * max(1, round(ms / longest * width))} {ms:.3g}")
    drawn = ["```text", "Trainer(callbacks=[GraphCapture()])", "", *lines, "```"]
    equal = all(row["peers"]["step"].get("losses") == "equal" for row in mine.values())
    losses = "equal to the last bit" if equal else "equal up to rounding"
    said = (
        f"Milliseconds of a training step, bf16-mixed; losses are {losses}. {about(mine, BRIEFLY)}"
    )
    return "\n".join([*drawn, "", said])


PARTS: dict[str, Callable[[Rows], str]] = {
    "table": table,
    "ranks": partial(table, how="on "),
    "ratios": ratios,
    "sweep": sweep,
    "bars": bars,
    "about": about,
}


def put_into(page: Path, rows: Rows) -> None:
    """Write tables between the marks of a page, ``<!-- peers: table -->`` and its end."""
    text = page.read_text(encoding="utf-8")
    for part, make in PARTS.items():
        begin, end = f"<!-- peers: {part} -->", f"<!-- end of peers: {part} -->"
        if begin in text and end not in text:
            raise SystemExit(f"{page} has {begin} without {end}")
        if begin in text:
            before, _, rest = text.partition(begin)
            text = f"{before}{begin}\n{make(rows)}\n{end}{rest.partition(end)[2]}"
    page.write_text(text, encoding="utf-8")


def plot(rows: Rows, path: Path) -> None:
    """Draw how many times faster than eager Lightning each way is, and the sweep."""
    import matplotlib
    from matplotlib.figure import Figure

    figure, swept = Figure(figsize=(11, 4.5), layout="constrained"), gains(rows)
    widths = [2, 1] if swept else [1]
    left, *rest = figure.subplots(1, len(widths), squeeze=False, width_ratios=widths)[0]
    mine = {n: rows[n]["peers"] for n in MODELS if "lightning" in rows.get(n, {}).get("peers", ())}
    shown = ("compile", "reduce-overhead", "whole-step graph", "step", "step, compiled")
    for i, peer in enumerate(shown):
        at = [(x, p) for x, p in enumerate(mine.values()) if "ms" in p.get(peer, ())]
        heights = [peers["lightning"]["ms"] / peers[peer]["ms"] for _, peers in at]
        label = HEADINGS[peer].replace("`", "")
        left.bar([x + (i - 2) * 0.16 for x, _ in at], heights, 0.16, label=label)
    left.axhline(1.0, color="gray", linewidth=1)
    left.set_xticks(range(len(mine)), list(mine), fontsize="small")
    left.set_ylabel("eager step under Lightning / step")
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower left", ncols=3)
    for right in rest:
        for name, of in swept.items():
            right.plot([*of], [*of.values()], marker="o", label=name)
        right.axhline(1.0, color="gray", linewidth=1)
        right.set_xscale("log", base=2)
        sizes = sorted({size for of in swept.values() for size in of})
        right.set_xticks(sizes, [f"{size}" for size in sizes])
        right.set_ylim(bottom=0)
        right.set_xlabel("size of a batch")
        right.set_ylabel("eager step / captured step")
        right.legend(fontsize="small")
    cards = {row["about"]["card"] for row in rows.values()}
    figure.suptitle(", ".join(sorted(cards)))
    with matplotlib.rc_context({"svg.hashsalt": "peers"}):  # the same picture of the same figures
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    several: dict[str, Any] = {"type": lambda text: [name for name in text.split(",") if name]}
    parser.add_argument("--rows", default=",".join(MODELS), **several)
    parser.add_argument("--sweep", default="gpt2,vit", help="rows to try with sizes", **several)
    parser.add_argument("--ranks", default="gpt2", help="rows to try on all GPUs", **several)
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), **several)
    parser.add_argument("--peers", default=";".join(PEERS), help="names, with semicolons between")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no fit of a row after it")
    parser.add_argument("--jobs", type=int, default=1, help="rows at a time (default: %(default)s)")
    parser.add_argument("--ahead", action="store_true", help="compile only, into torch's cache")
    parser.add_argument("--json", type=Path, help="write everything to this file")
    parser.add_argument("--pages", type=Path, nargs="+", default=[], help="put tables into these")
    parser.add_argument("--plot", type=Path, help="draw into this file (.svg, .png)")
    parser.add_argument("--from", dest="given", type=Path, nargs="+", help="read earlier runs")
    parser.add_argument("--quote", action="store_true", help="make all that is quoted")
    parser.add_argument("--tiny", action="store_true", help="a rehearsal on the CPU")
    options = parser.parse_args(arguments)
    options.began = time.monotonic()
    flags = ["--peers", options.peers, "--sizes", ",".join(options.sizes)]
    flags += [
        "--sweep",
        "",
        "--ranks",
        "",
        "--seconds",
        str(options.seconds),
        *["--tiny"] * options.tiny,
    ]
    options.sizes = [*map(int, options.sizes)]
    options.peers = [name for name in options.peers.split(";") if name]
    if options.ahead:
        be_quiet()
        for row in options.rows:
            compile_ahead(row, Lab(options.tiny), options.peers)
        return 0
    if options.given:
        found = [row for path in options.given for row in json.loads(path.read_text())["rows"]]
        result: Any = {"rows": [*by_name(found).values()]}
    else:
        result = _all_measured(options, flags)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    rows = by_name(result["rows"])
    for page in [*options.pages, *(ROOT / page for page in QUOTING if options.quote)]:
        put_into(page, rows)
    for path in [*[options.plot] * bool(options.plot), *[ROOT / PICTURE] * options.quote]:
        plot(rows, path)
    return 0 if all(row["verdict"] == "PASS" for row in result["rows"]) else 1


def _all_measured(options: argparse.Namespace, flags: Sequence[str]) -> dict[str, Any]:
    names = [*options.rows, *(f"{name} sweep" for name in options.sweep)]
    gpus = 2 if options.tiny else torch.cuda.device_count()
    names += [f"{name} on {gpus}" for name in options.ranks if gpus > 1]
    be_quiet()
    heading = "bf16-mixed, fused AdamW, one logged key, no progress bar"
    here = partial(measure, lab=Lab(options.tiny), options=options)
    return measured_rows(__file__, names, flags, here, line, heading, jobs=options.jobs)


if __name__ == "__main__":
    sys.exit(main())
