"""A Lightning training step with and without ``GraphCapture`` against its floor, on one GPU.

The floor of a step is its captured graph replayed back to back with nothing between (CUDA events
over 20 replays). Batches lie in pinned memory, as the workers of a loader deliver them. A fit has
ten blocks of 20 steps, and after each of them the floor is measured. A block is timed by CUDA
events from the end of its first step to the end of its last one: the first one finds a GPU without
work, because the benchmark has waited for it, and a fit does not. The fastest block counts, and the
fastest floor: others who use the same CPUs make steps slower, never faster. The losses of the first
steps are compared with those of an eager fit in the same process.

Memory is what the allocator reserves at most, in a whole fit and in its last third, over the same
of the eager fit.

A further fit may have graphs in two streams (``overlap=True``), which it tries soon. Its losses
must be those of the chain, to the bit, and its floor is given as a part of the chain's.

The row ``loop`` shows what the callback adds on a model of eight weights, where the CPU is all that
counts: with the callback, and with a callback that exchanges the same three methods for constants,
which is what Lightning itself costs; until all steps are on their way, without waiting for the GPU.

The row ``mask`` shows what a host half costs: a small transformer drops its mask ``if mask.all()``,
which replays ask of each batch on the CPU. It is timed by itself, after each block.

A row such as ``gpt2 validation`` is a validation by itself: a batch over the floor of its graph.

Each row is measured in a process of its own, ``--jobs`` at a time; models are made side by side,
and one fit at a time has the GPU.

    python benchmarks/step.py [--rows "mlp,gpt2 validation,..."] [--jobs 6]
        [--compiled gpt2]

``--tiny`` trains the model of eight weights in every row, on the CPU and the emulated backend; no
time means anything then.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from harness import (
    LAST_THIRD_LIMIT,
    PEAK_LIMIT,
    Lab,
    Row,
    gpu_time,
    measure_rows,
    of_trainers,
    peak_memory,
    verdict_of,
)
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor, nn
from torch.utils.data import DataLoader
from workloads import Classifier, Denoiser, Gpt2, Llama, Mlp, Transformer

from lightning_graphs import GraphCapture
from lightning_graphs.regions import overlapped

WARMUP, TIMED, BLOCKS = 30, 20, 10
LAST_THIRD = 150  # the step that it begins with
MODELS = ("mlp", "gpt2", "bert", "resnet50", "vit")
ROWS = ("loop", "mask", *MODELS)
LIMIT, VALIDATION_LIMIT = 1.02, 1.05
LIMITS = {"mlp": 1.06}
"""Of rows whose kernels end too soon to hide Lightning's loop. Where that takes longer,
even around a step that does nothing, it is the floor."""
UNFILLED = 64
"""MiB that graphs may take beyond the limits: torch's allocator takes up to 20 MiB at a time, and
the pools of a graph, of the optimizer's state and of copies each have some that are not full."""
LEAST = 2048
"""MiB that verification of a small fit may take for a while, by the default of ``memory``."""
ADDED = {1: 60, 150: 90, 450: 130}
"""Microseconds of the CPU that the callback may add, by the number of parameter tensors, where a
step of Lightning's loop takes 350."""
OVERLAP_LIMIT, OVERLAP_MEMORY = 1.01, 1.15
"""Of the same in one stream: the slower graph is never kept."""
LOOP = 350
OF_THE_LOOP = 0.15
"""The part of the time of Lightning's loop that a replayed step of one tensor takes the CPU."""
HOST_LIMIT = 30
"""Microseconds that the host half of the row ``mask`` may take, where the loop takes 350."""
LOSSES_DIFFER = 5e-3  # by more than rounding


Workload = tuple[nn.Module, Callable[[], tuple[Tensor, ...]]]
"""A model that returns its loss, and what makes a batch."""


def mlp(size: int = 256) -> Workload:
    return Mlp(12, 512), lambda: (torch.randn(size, 512), torch.randint(0, 10, (size,)))


def gpt2(size: int = 4) -> Workload:
    return Gpt2(12, 384, 8192), lambda: (torch.randint(0, 8192, (size, 256)),)


def llama(size: int = 4) -> Workload:
    return Llama(10, 256, 8192), lambda: (torch.randint(0, 8192, (size, 256)),)


def bert(size: int = 16) -> Workload:
    from transformers import BertConfig, BertForSequenceClassification

    names = ("input_ids", "attention_mask", "labels")
    net = Transformer(BertForSequenceClassification(BertConfig(num_labels=2)), names)

    def batch() -> tuple[Tensor, ...]:
        mask = torch.ones(size, 128, dtype=torch.long)
        mask[::2, 100:] = 0
        return torch.randint(0, 30000, (size, 128)), mask, torch.randint(0, 2, (size,))

    return net, batch


def resnet50(size: int = 32) -> Workload:
    import torchvision

    net = Classifier(torchvision.models.resnet50(num_classes=100))
    return net, lambda: (torch.randn(size, 3, 64, 64), torch.randint(0, 100, (size,)))


def vit(size: int = 32) -> Workload:
    import timm

    net = Classifier(timm.create_model("vit_tiny_patch16_224", num_classes=100))
    return net, lambda: (torch.randn(size, 3, 224, 224), torch.randint(0, 100, (size,)))


def convnext(size: int = 32) -> Workload:
    import timm

    net = Classifier(timm.create_model("convnext_tiny", num_classes=100))
    return net, lambda: (torch.randn(size, 3, 64, 64), torch.randint(0, 100, (size,)))


def unet(size: int = 16) -> Workload:
    return Denoiser(64), lambda: (torch.randn(size, 3, 32, 32), torch.randn(size, 3, 32, 32))


class Tiny(nn.Module):
    def __init__(self, parameters: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.ones(8) for _ in range(parameters))

    def forward(self, x: Tensor) -> Tensor:
        return (torch.stack([*self.weights]).sum(0) * x).sum()


def tiny(parameters: int = 1) -> Workload:
    return Tiny(parameters), lambda: (torch.randn(4, 8),)


class Masked(nn.Module):
    """A transformer that attends to all tokens where there is no padding.

    Args:
        looks: Whether it looks at its mask; else it drops it.
    """

    def __init__(self, looks: bool, width: int = 32) -> None:
        super().__init__()
        self.looks = looks
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.embedding = nn.Embedding(1000, width)
        self.net = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)

    def forward(self, ids: Tensor, mask: Tensor, y: Tensor) -> Tensor:
        padding = ~mask if self.looks and not mask.all() else None
        h = self.net(self.embedding(ids), src_key_padding_mask=padding)
        return nn.functional.cross_entropy(h.mean(1), y)


def masked(looks: bool = True) -> Workload:
    ones = torch.ones(8, 128, dtype=torch.bool)
    return Masked(looks), lambda: (torch.randint(1000, (8, 128)), ones, torch.randint(32, (8,)))


WORKLOADS: dict[str, Callable[..., Workload]]
WORKLOADS = {f.__name__: f for f in (mlp, gpt2, llama, bert, resnet50, vit)}
WORKLOADS |= {f.__name__: f for f in (convnext, unet, tiny)}
WORKLOADS |= {"masked": masked, "not masked": partial(masked, looks=False)}
WORKLOADS |= {f"tiny{count}": partial(tiny, count) for count in ADDED}


def workload(row: str, size: int | None, lab: Lab) -> Workload:
    """Make the model of a row, and batches of a size, which is the row's own by default."""
    if lab.dry and "masked" not in row:
        return tiny()
    return WORKLOADS[row]() if size is None else WORKLOADS[row](size)


class Module(LightningModule):
    """Trains a network.

    Args:
        compiled: What ``torch.compile`` is given to compile it; None: it stays as it is.
    """

    def __init__(self, net: nn.Module, compiled: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        self.net = net
        call: Any = net if compiled is None else torch.compile(net, **compiled)
        # The next call of one with graphs overwrites what this one returns
        self.call = (lambda *batch: call(*batch).clone()) if compiled else call

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.call(*batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.call(*batch)
        self.log("loss", loss)
        return {"loss": loss}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=2.0**-13, fused=True)


class TalkativeModule(Module):
    """Shows its loss on the progress bar, where Lightning reads it every step; logs two keys."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.call(*batch)
        self.log("loss", loss, prog_bar=True)
        self.log("loss_squared", loss.detach() ** 2)
        return loss


class Probe(Callback):
    """Times blocks of steps and the floor, and keeps the losses of the first steps.

    Steps are those of a fit, or of a validation by itself.
    """

    def __init__(self, graphs: GraphCapture | None, lab: Lab) -> None:
        self.graphs, self.lab = graphs, lab
        self.losses: list[Tensor] = []
        self.blocks: list[float] = []
        self.on_cpu: list[float] = []
        self.floors: list[float] = []
        self.host: list[float] = []
        self.peak = 0.0
        self._whole_steps = graphs is not None and graphs.options.scope == "step"
        self._done = 0
        self._started = 0.0
        self._first: Any = None  # the end of a block's first step

    def on_train_batch_end(
        self, trainer: Trainer, module: Any, outputs: Any, batch: Any, *args: Any
    ) -> None:
        self._done = step = self._done + 1
        if step <= WARMUP + TIMED:
            self.losses.append(outputs["loss"].detach().clone())
        if step == LAST_THIRD:
            self.peak = peak_memory()
        if step > WARMUP and (step - WARMUP) % TIMED == 1:
            self._first = self.lab.moment()
        if step >= WARMUP and (step - WARMUP) % TIMED == 0:
            given = time.perf_counter()  # to the GPU, all of it
            last = self.lab.moment()
            self.lab.synchronize()
            if step > WARMUP:
                self.on_cpu.append((given - self._started) / TIMED * 1e6)
                self.blocks.append(self.lab.milliseconds(self._first, last) / (TIMED - 1))
                if self._whole_steps:
                    self._look_at_plan(batch)
            self._started = time.perf_counter()

    on_validation_batch_end = on_train_batch_end

    def _look_at_plan(self, batch: Sequence[Tensor]) -> None:
        """Time the replay of its graph, and what the host computes for one, in microseconds."""
        assert self.graphs is not None
        handler = self.graphs._handler or self.graphs._evaluation
        assert handler is not None
        plan, *_ = handler.runner._cache.plans()  # the one that was used last
        self.floors.append(self.lab.on_gpu(plan.graphs["forward"].replay, TIMED) / 1e3)
        run = next((m.takes[0] for m in plan.mechanisms if m.state is not None), None)
        if run is not None:  # its host program
            started = time.perf_counter()
            for _ in range(TIMED):
                assert run(batch)
            self.host.append((time.perf_counter() - started) / TIMED * 1e6)


class Constants(Callback):
    """A step that computes nothing: what remains is the time that Lightning's loop takes."""

    names: tuple[str, ...] = ("training_step", "backward", "optimizer_step")

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        self.trainer, self.module = trainer, module
        self.loss = torch.zeros((), device=module.device)
        for name in self.names:
            vars(trainer.strategy)[name] = getattr(self, name)

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        for name in self.names:
            del vars(trainer.strategy)[name]

    def training_step(self, *args: Any) -> Tensor:
        self.module.log("loss", self.loss)
        return self.loss

    def backward(self, loss: Tensor, *args: Any) -> None:
        Precision.pre_backward(self.trainer.precision_plugin, loss, self.module)
        Precision.post_backward(self.trainer.precision_plugin, loss, self.module)

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], *args: Any) -> Any:
        result = closure()
        self.trainer.precision_plugin._after_closure(self.module, optimizer)
        return result


class ConstantValidation(Constants):
    """A validation step that computes nothing."""

    names = ("validation_step",)
    on_validation_start, on_validation_end = Constants.on_train_start, Constants.on_train_end

    def validation_step(self, *args: Any) -> Any:
        return {"loss": self.training_step()}


class Batches(torch.utils.data.Dataset[tuple[Tensor, ...]]):
    def __init__(self, items: list[tuple[Tensor, ...]], blocks: int | None = None) -> None:
        self.items, self.blocks = items, blocks or BLOCKS

    def __len__(self) -> int:
        return WARMUP + TIMED * self.blocks

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return self.items[index % len(self.items)]


def fit(
    row: str,
    graphs: GraphCapture | None = None,
    *,
    compiled: Mapping[str, Any] | None = None,
    callbacks: Sequence[Callback] = (),
    signatures: int = 1,
    bar: bool = True,
    lab: Lab | None = None,
    size: int | None = None,
    blocks: int | None = None,
    kind: type[Module] | None = None,
    validates: bool = False,
) -> dict[str, Any]:
    """Train once: milliseconds per step (fastest and usual), floor, losses, peaks of memory in MiB.

    Args:
        row: Name of the workload.
        graphs: The callback; None for eager training.
        compiled: See :class:`Module`.
        callbacks: Further callbacks.
        signatures: How many shapes the batches have.
        bar: With a progress bar and two logged keys; without, one key is logged.
        lab: Where; by default on a GPU.
        size: Of a batch; by default that of the workload.
        blocks: How many are timed.
        kind: Of the module; by default as ``bar`` says.
        validates: The steps are those of a validation, without a fit.
    """
    lab = lab or Lab(dry=False)
    seed_everything(1, verbose=False)
    net, batch = workload(row, size, lab)
    items = [batch() for _ in range(4)]
    for i in range(1, signatures):
        items[i] = tuple(t[: len(t) - len(t) // 4].clone() for t in items[i])
    probe = Probe(graphs, lab)
    with nullcontext() if lab.dry else gpu_time(alone=True):
        if not lab.dry:
            items = [tuple(t.pin_memory() for t in item) for item in items]
        lab.clean()
        peak_memory()
        trainer = Trainer(
            **of_trainers(lab),
            enable_progress_bar=bar,
            callbacks=[probe, *([graphs] if graphs is not None else []), *callbacks],
        )
        loader = DataLoader(Batches(items, blocks), batch_size=None)
        kind = kind or (TalkativeModule if bar else Module)
        (trainer.validate if validates else trainer.fit)(kind(net, compiled), loader)
        lab.synchronize()
    torch._dynamo.reset()
    last_third = peak_memory()
    return {
        "ms": min(probe.blocks),
        "cpu_us": min(probe.on_cpu),
        "usual_ms": statistics.median(probe.blocks),
        "floor": min(probe.floors, default=0.0),
        "host_us": min(probe.host, default=0.0),
        "losses": torch.stack(probe.losses).tolist(),
        "peak": max(probe.peak, last_third),
        "last_third": last_third,
    }


def measure(row: str, lab: Lab) -> dict[str, Any]:
    """All fits of one row."""
    if row == "loop":
        return cpu_time(lab)
    if row == "mask":
        return host_time(lab)
    name, _, compiled = row.partition(" ")
    if compiled == "validation":
        return batch_time(row, name, lab)
    train = partial(fit, name, compiled={} if compiled else None, lab=lab)
    eager = train()
    captured = train(whole_steps(lab))
    second = train(whole_steps(lab), signatures=2)
    with soon():
        overlapped = captured if lab.dry else train(whole_steps(lab, overlap=True))
    pairs = zip(eager["losses"], captured["losses"], strict=True)
    differences = [abs(a - b) for a, b in pairs]
    correct = all(difference <= LOSSES_DIFFER for difference in differences)
    memory, end = (captured[part] / eager[part] for part in ("peak", "last_third"))
    limit = LIMITS.get(name, LIMIT)
    floor, unfilled = captured["floor"], UNFILLED / eager["peak"]
    if name in LIMITS:
        floor = max(floor, train(callbacks=[Constants()])["ms"])
    rows = [
        Row("ratio", captured["ms"] / floor, "x", limit, correct),
        Row("peak memory", memory, "x", max(PEAK_LIMIT, 1 + LEAST / eager["peak"]), correct),
        Row("memory of the last third", end, "x", LAST_THIRD_LIMIT + unfilled, correct),
        Row(
            "overlap",
            overlapped["floor"] / captured["floor"],
            "x",
            None if lab.dry else OVERLAP_LIMIT,
            overlapped["losses"] == captured["losses"],
        ),
        Row(
            "memory with overlap",
            overlapped["peak"] / captured["peak"],
            "x",
            OVERLAP_MEMORY + UNFILLED / captured["peak"],
            correct,
        ),
    ]
    return {
        "row": row,
        "eager_ms": eager["ms"],
        "captured_ms": captured["ms"],
        "floor_ms": floor,
        "graph_ms": captured["floor"],
        "largest_loss_difference": max(differences),
        "eager_mib": eager["peak"],
        "further_signature": (second["last_third"] - captured["last_third"]) / eager["peak"],
        **{found.name: found.figure for found in rows},
        "verdicts": {found.name: found.verdict for found in rows},
        "verdict": verdict_of(rows),
    }


@contextmanager
def soon() -> Iterator[None]:
    """Let two streams be tried among the steps whose losses are compared."""
    before = overlapped.FIRST, overlapped.PAIRS
    overlapped.FIRST, overlapped.PAIRS = 8, 12
    try:
        yield
    finally:
        overlapped.FIRST, overlapped.PAIRS = before


def whole_steps(lab: Lab, *, overlap: bool = False) -> GraphCapture:
    """The callback, which captures steps even where so few of them would not repay it."""
    backend = "emulated" if lab.dry else "cuda"
    options: dict[str, Any] = {"scope": "step", "on_failure": "raise", "backend": backend}
    return GraphCapture(**options, only_if_faster=False, overlap=overlap)


def cpu_time(lab: Lab) -> dict[str, Any]:
    """Microseconds per step of Lightning's loop alone, and what the callback adds to them."""
    loops, added, parts = [], {}, {}
    for count in ADDED:
        # Nothing reads a value on the host, so that the CPU never waits for the GPU
        measure = partial(fit, f"tiny{count}", bar=False, lab=lab)
        alone, captured = [], []
        for order in ((True, False), (False, True)):  # both orders
            for constants in order:
                if constants:
                    alone.append(measure(callbacks=[Constants()])["cpu_us"])
                else:
                    captured.append(measure(whole_steps(lab))["cpu_us"])
        loops.append(min(alone))
        added[count] = min(captured) - min(alone)
        parts[count] = min(captured) / min(alone)
    slower = max(1.0, min(loops) / LOOP)
    limits = {count: None if lab.dry else limit * slower for count, limit in ADDED.items()}
    rows = [Row(f"{n} tensors", added[n], "us", limits[n], correct=True) for n in ADDED]
    one, *_ = ADDED
    rows.append(Row("of the loop", parts[one], "x", None if lab.dry else OF_THE_LOOP, correct=True))
    return {
        "row": "loop",
        "loop_us": min(loops),
        "added_us": added,
        "of the loop": parts,
        "limits": limits,
        "verdict": verdict_of(rows),
    }


def host_time(lab: Lab) -> dict[str, Any]:
    """Microseconds that the host half of a transformer with a mask takes in each step."""
    without, with_mask = (fit(row, whole_steps(lab), lab=lab) for row in ("not masked", "masked"))
    correct = with_mask["losses"] == without["losses"] and with_mask["host_us"] > 0.0
    loop = fit("tiny1", bar=False, lab=lab, callbacks=[Constants()])["cpu_us"]
    limit = None if lab.dry else HOST_LIMIT * max(1.0, loop / LOOP)
    rows = [Row("host half", with_mask["host_us"], "us", limit, correct)]
    rows.append(Row("host half of the other", without["host_us"], "us", 0.0, correct))
    return {
        "row": "mask",
        "host_us": with_mask["host_us"],
        "limit": limit or 0.0,
        "ratio": with_mask["ms"] / without["ms"],
        "verdict": verdict_of(rows),
    }


def batch_time(row: str, name: str, lab: Lab) -> dict[str, Any]:
    """Milliseconds of a batch of a validation, and of its graph."""
    validate = partial(fit, name, validates=True, lab=lab)
    eager, captured = validate(), validate(whole_steps(lab))
    floor = captured["floor"]
    if name in LIMITS:
        floor = max(floor, validate(callbacks=[ConstantValidation()])["ms"])
    correct = captured["losses"] == eager["losses"]
    ratio = Row(
        "ratio", captured["ms"] / floor, "x", None if lab.dry else VALIDATION_LIMIT, correct
    )
    return {
        "row": row,
        "eager_ms": eager["ms"],
        "batch_ms": captured["ms"],
        "floor_ms": floor,
        "graph_ms": captured["floor"],
        "ratio": ratio.figure,
        "verdict": verdict_of([ratio]),
    }


def be_quiet() -> None:
    """Say nothing but results."""
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_float32_matmul_precision("high")


def line(found: dict[str, Any]) -> str:
    """What is printed of a row."""
    row = f"{found['row']:>16}: "
    if "error" in found:
        return f"{row}{found['verdict']}\n{found['error']}"
    if "loop_us" in found:
        shown = ", ".join(
            f"{added:.0f} with {count} parameter tensors (limit {found['limits'][count] or 0:.0f})"
            for count, added in found["added_us"].items()
        )
        parts = ", ".join(f"{part:.3f}" for part in found["of the loop"].values())
        return (
            f"{row}{found['verdict']}: Lightning's loop takes the CPU {found['loop_us']:.0f} us "
            f"per step; the callback adds {shown}; a replayed step takes {parts} of the loop "
            f"(limit {OF_THE_LOOP} of the first)"
        )
    if "host_us" in found:
        return (
            f"{row}{found['verdict']}: {found['host_us']:.1f} us of the CPU for what the host "
            f"computes (limit {found['limit']:.0f}), {found['ratio']:.3f} of the step without"
        )
    if "batch_ms" in found:
        return (
            f"{row}{found['verdict']}: eager {found['eager_ms']:.3f} ms, captured "
            f"{found['batch_ms']:.3f}, floor {found['floor_ms']:.3f} (graph alone "
            f"{found['graph_ms']:.3f}), ratio {found['ratio']:.3f} (limit {VALIDATION_LIMIT})"
        )
    shown = [f"{name} {found[name]:.3f} {which}" for name, which in found["verdicts"].items()]
    return (
        f"{row}{found['verdict']}: eager {found['eager_ms']:.3f} ms, captured "
        f"{found['captured_ms']:.3f}, floor {found['floor_ms']:.3f} (graph alone "
        f"{found['graph_ms']:.3f}), {', '.join(shown)} (of {found['eager_mib']:.0f} MiB), "
        f"a further signature +{found['further_signature']:.3f}, largest loss difference "
        f"{found['largest_loss_difference']:.1e}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rows", default=",".join([*ROWS, *(f"{n} validation" for n in MODELS)]))
    parser.add_argument("--compiled", default="", help="rows to measure with torch.compile, too")
    parser.add_argument("--jobs", type=int, default=6, help="rows at a time (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write everything to this file")
    parser.add_argument("--tiny", action="store_true", help="a rehearsal on the CPU")
    options = parser.parse_args(arguments)
    names = options.rows.split(",")
    names += [f"{name} compiled" for name in options.compiled.split(",") if name]
    if not (options.tiny or torch.cuda.is_available()):
        print("This benchmark needs a GPU: times on a CPU say nothing about CUDA graphs.")
        return 0
    be_quiet()
    heading = "bf16-mixed, fused AdamW, prog_bar=True, two logged keys"
    here = partial(measure, lab=Lab(options.tiny))
    flags = ["--tiny"] if options.tiny else []
    jobs, path = options.jobs, options.json
    return measure_rows(__file__, names, flags, here, line, heading, jobs=jobs, path=path)


if __name__ == "__main__":
    sys.exit(main())
