"""A Lightning training step with and without ``GraphCapture`` against its floor, on one GPU.

The floor of a step is its captured graph replayed back to back with nothing between (CUDA events
over 50 replays). Both fits run in this process; their losses are compared in the run that is timed.
Batches lie in pinned memory, as the workers of a loader deliver them. A step's time is that of the
fastest of ten blocks of 20 steps: others who use the same CPUs make steps slower, never faster.

What the callback adds is measured on a model of eight weights, where the CPU is all that counts:
with the callback, and with a callback that exchanges the same three methods for constants, which is
what Lightning itself costs.

    python benchmarks/step.py [--rows mlp,gpt2,bert,resnet50,vit] [--compiled gpt2] [--json PATH]
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_graphs import GraphCapture

WARMUP, TIMED, BLOCKS = 30, 20, 10
LIMIT = 1.05
ADDED_LIMIT = 50


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        blocks = [
            nn.Sequential(nn.Linear(512, 512), nn.LayerNorm(512), nn.GELU(), nn.Dropout(0.1))
            for _ in range(12)
        ]
        self.net = nn.Sequential(*blocks, nn.Linear(512, 10))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.net(x), y)


class Classifier(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.net(x), y)


class Transformer(nn.Module):
    def __init__(self, net: nn.Module, names: tuple[str, ...]) -> None:
        super().__init__()
        self.net = net
        self.names = names

    def forward(self, *tensors: Tensor) -> Tensor:
        return self.net(**dict(zip(self.names, tensors, strict=True))).loss


def mlp() -> tuple[nn.Module, Callable[[], tuple[Tensor, ...]]]:
    return Mlp(), lambda: (torch.randn(256, 512), torch.randint(0, 10, (256,)))


def gpt2() -> tuple[nn.Module, Callable[[], tuple[Tensor, ...]]]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=12, n_embd=384, n_head=6, vocab_size=8192, use_cache=False)
    net = Transformer(GPT2LMHeadModel(config), ("input_ids", "labels"))
    return net, lambda: (torch.randint(0, 8192, (4, 256)),) * 2


def bert() -> tuple[nn.Module, Callable[[], tuple[Tensor, ...]]]:
    from transformers import BertConfig, BertForSequenceClassification

    names = ("input_ids", "attention_mask", "labels")
    net = Transformer(BertForSequenceClassification(BertConfig(num_labels=2)), names)

    def batch() -> tuple[Tensor, ...]:
        mask = torch.ones(16, 128, dtype=torch.long)
        mask[::2, 100:] = 0
        return torch.randint(0, 30000, (16, 128)), mask, torch.randint(0, 2, (16,))

    return net, batch


def resnet50() -> tuple[nn.Module, Callable[[], tuple[Tensor, ...]]]:
    import torchvision

    net = Classifier(torchvision.models.resnet50(num_classes=100))
    return net, lambda: (torch.randn(32, 3, 64, 64), torch.randint(0, 100, (32,)))


def vit() -> tuple[nn.Module, Callable[[], tuple[Tensor, ...]]]:
    import timm

    net = Classifier(timm.create_model("vit_tiny_patch16_224", num_classes=100))
    return net, lambda: (torch.randn(32, 3, 224, 224), torch.randint(0, 100, (32,)))


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).sum()


def tiny() -> tuple[nn.Module, Callable[[], tuple[Tensor, ...]]]:
    return Tiny(), lambda: (torch.randn(4, 8),)


ROWS = {f.__name__: f for f in (mlp, gpt2, bert, resnet50, vit, tiny)}


class Module(LightningModule):
    def __init__(self, net: nn.Module, compiled: bool) -> None:
        super().__init__()
        self.net = net
        self.call = torch.compile(net) if compiled else net

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.call(*batch)
        self.log("loss", loss)
        return loss

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
    """Times blocks of steps and keeps the losses of the first ones."""

    def __init__(self, graphs: GraphCapture | None) -> None:
        self.graphs = graphs
        self.losses: list[Tensor] = []
        self.blocks: list[float] = []
        self.floor = 0.0
        self._started = 0.0

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, *args: Any) -> None:
        step = trainer.fit_loop.epoch_loop.batch_idx + 1
        if step <= WARMUP + TIMED:
            self.losses.append(outputs["loss"].detach().clone())
        if step >= WARMUP and (step - WARMUP) % TIMED == 0:
            torch.cuda.synchronize()
            now = time.perf_counter()
            if step > WARMUP:
                self.blocks.append((now - self._started) / TIMED * 1e3)
            if step == WARMUP:
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            self._started = time.perf_counter()
        whole_steps = self.graphs is not None and self.graphs.options.scope == "step"
        if step == WARMUP + TIMED * BLOCKS and whole_steps:
            self.floor = self._measure_floor()

    def _measure_floor(self) -> float:
        assert self.graphs is not None
        assert self.graphs._runner is not None
        plan = self.graphs._runner._last
        assert plan is not None
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        measured = []
        for _ in range(5):
            torch.cuda.synchronize()
            begin.record()
            for _ in range(50):
                plan.forward.replay()
            end.record()
            torch.cuda.synchronize()
            measured.append(begin.elapsed_time(end) / 50)
        return statistics.median(measured)


class Constants(Callback):
    """A step that computes nothing: what remains is the time that Lightning's loop takes."""

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        self.trainer, self.module = trainer, module
        self.loss = torch.zeros((), device=module.device)
        self.names = ("training_step", "backward", "optimizer_step")
        for name in self.names:
            vars(trainer.strategy)[name] = getattr(self, name)

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        for name in self.names:
            del vars(trainer.strategy)[name]

    def training_step(self, *args: Any) -> Tensor:
        self.module.log("loss", self.loss, prog_bar=True)
        self.module.log("loss_squared", self.loss)
        return self.loss

    def backward(self, loss: Tensor, *args: Any) -> None:
        Precision.pre_backward(self.trainer.precision_plugin, loss, self.module)
        Precision.post_backward(self.trainer.precision_plugin, loss, self.module)

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], *args: Any) -> Any:
        result = closure()
        self.trainer.precision_plugin._after_closure(self.module, optimizer)
        return result


class Batches(torch.utils.data.Dataset[tuple[Tensor, ...]]):
    def __init__(self, items: list[tuple[Tensor, ...]]) -> None:
        self.items = items

    def __len__(self) -> int:
        return WARMUP + TIMED * BLOCKS

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return self.items[index % len(self.items)]


def fit(
    row: str,
    graphs: GraphCapture | None = None,
    *,
    compiled: bool = False,
    callbacks: Sequence[Callback] = (),
    signatures: int = 1,
    bar: bool = True,
) -> dict[str, Any]:
    """Train once: milliseconds per step (fastest and usual), floor, losses, peak of memory.

    Args:
        row: Name of the workload.
        graphs: The callback; None for eager training.
        compiled: Whether ``torch.compile`` compiles the network.
        callbacks: Further callbacks.
        signatures: How many shapes the batches have.
        bar: With a progress bar and two logged keys; without, one key is logged.
    """
    seed_everything(1, verbose=False)
    net, batch = ROWS[row]()
    items = [batch() for _ in range(4)]
    for i in range(1, signatures):
        items[i] = tuple(t[: len(t) - len(t) // 4].clone() for t in items[i])
    pinned = [tuple(t.pin_memory() for t in item) for item in items]
    probe = Probe(graphs)
    trainer = Trainer(
        accelerator="gpu",
        devices=1,
        max_epochs=1,
        precision="bf16-mixed",
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=bar,
        callbacks=[probe, *([graphs] if graphs is not None else []), *callbacks],
    )
    loader = DataLoader(Batches(pinned), batch_size=None)
    trainer.fit((TalkativeModule if bar else Module)(net, compiled), loader)
    result = {
        "ms": min(probe.blocks),
        "usual_ms": statistics.median(probe.blocks),
        "floor": probe.floor,
        "losses": torch.stack(probe.losses).tolist(),
        # What the GPU cannot give to others: memory in private pools does not count as allocated.
        "peak_mib": torch.cuda.max_memory_reserved() / 2**20,
    }
    del trainer, probe, graphs, net
    gc.collect()
    torch.cuda.empty_cache()
    torch._dynamo.reset()
    return result


def measure(row: str, compiled: bool) -> dict[str, Any]:
    eager = fit(row, compiled=compiled)
    captured = fit(row, whole_steps(), compiled=compiled)
    second = fit(row, whole_steps(), compiled=compiled, signatures=2)
    pairs = zip(eager["losses"], captured["losses"], strict=True)
    return {
        "row": row + (" compiled" if compiled else ""),
        "eager_ms": eager["ms"],
        "captured_ms": captured["ms"],
        "floor_ms": captured["floor"],
        "ratio": captured["ms"] / captured["floor"],
        "largest_loss_difference": max(abs(a - b) for a, b in pairs),
        "memory_ratio": captured["peak_mib"] / eager["peak_mib"],
        "further_signature": (second["peak_mib"] - captured["peak_mib"]) / eager["peak_mib"],
    }


def whole_steps() -> GraphCapture:
    return GraphCapture(scope="step", on_failure="raise")


def cpu_time() -> tuple[float, float]:
    """Microseconds per step of Lightning's loop alone, and what the callback adds to them."""
    alone, captured = [], []
    for order in ((True, False), (False, True)):  # both orders
        for constants in order:
            if constants:
                alone.append(fit("tiny", callbacks=[Constants()])["ms"])
            else:
                captured.append(fit("tiny", whole_steps())["ms"])
    loop = statistics.mean(alone) * 1e3
    return loop, statistics.mean(captured) * 1e3 - loop


def be_quiet() -> None:
    """Say nothing but results."""
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_float32_matmul_precision("high")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default="mlp,gpt2,bert,resnet50,vit")
    parser.add_argument("--compiled", default="", help="rows to measure with torch.compile, too")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("This benchmark needs a GPU: times on a CPU say nothing about CUDA graphs.")
        return
    be_quiet()
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, lightning "
        f"{lightning.__version__}, bf16-mixed, fused AdamW, prog_bar=True, two logged keys",
        flush=True,
    )
    loop, added = cpu_time()
    verdict = "PASS" if added <= ADDED_LIMIT else "FAIL"
    print(
        f"Lightning's loop alone: {loop:.0f} us per step; CPU time that the callback adds: "
        f"{added:.0f} us {verdict} (limit {ADDED_LIMIT} us)",
        flush=True,
    )
    results = []
    jobs = [(row, False) for row in options.rows.split(",")]
    jobs += [(row, True) for row in options.compiled.split(",") if row]
    for row, compiled in jobs:
        result = measure(row, compiled)
        results.append(result)
        verdict = "PASS" if result["ratio"] <= LIMIT else "FAIL"
        print(
            f"{result['row']:>16}: eager {result['eager_ms']:7.3f} ms, captured "
            f"{result['captured_ms']:7.3f}, floor {result['floor_ms']:7.3f}, ratio "
            f"{result['ratio']:.3f} {verdict} (limit {LIMIT}), largest loss difference "
            f"{result['largest_loss_difference']:.1e}, peak memory x{result['memory_ratio']:.3f}, "
            f"a further signature +{result['further_signature']:.3f}",
            flush=True,
        )
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
