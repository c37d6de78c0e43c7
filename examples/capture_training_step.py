"""A training step captured once and replayed, beside the same step run eagerly.

A small network with dropout learns scikit-learn's handwritten digits twice from the same seed:
once step by step, once through a graph that holds forward, loss, backward and the optimizer step.
The losses of both are printed side by side.

    python examples/capture_training_step.py --steps 20
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter

import torch
from sklearn.datasets import load_digits

from lightning_graphs import core

WARMUP_STEPS = 3
BATCH_SIZE = 64
COLUMNS = ("step", "phase", "eager loss", "captured loss", "difference")


class TrainingStep:
    """Model, optimizer and the step; both runs make one from the same seed."""

    def __init__(self, device: torch.device) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(64, 128),
            torch.nn.ReLU(),
            torch.nn.Dropout(0.2),
            torch.nn.Linear(128, 128),
            torch.nn.ReLU(),
            torch.nn.Dropout(0.2),
            torch.nn.Linear(128, 10),
        ).to(device)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=1e-3, fused=True, capturable=device.type == "cuda"
        )

    def __call__(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = torch.nn.functional.cross_entropy(self.model(images), labels)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def drop_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)


@dataclass
class Run:
    """What one training run showed.

    Attributes:
        losses: Loss of every step.
        seconds: Wall-clock time of every step, its loss read included.
    """

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    @contextmanager
    def step(self) -> Iterator[None]:
        start = perf_counter()
        yield
        self.seconds.append(perf_counter() - start)


def batches(device: torch.device, steps: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields ``steps`` random batches: images f32[64, 64] in 0..1, labels i64[64]."""
    digits = load_digits()
    images = torch.from_numpy(digits.data).float() / 16.0
    labels = torch.from_numpy(digits.target).long()
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        chosen = torch.randint(len(images), (BATCH_SIZE,), generator=generator)
        yield images[chosen].to(device), labels[chosen].to(device)


@contextmanager
def side_stream(device: torch.device) -> Iterator[None]:
    """Runs the body on a stream of its own on a GPU; on a CPU there are no streams."""
    if device.type != "cuda":
        yield
        return
    stream, before = torch.cuda.Stream(device), torch.cuda.current_stream(device)
    stream.wait_stream(before)
    with torch.cuda.stream(stream):
        yield
    before.wait_stream(stream)


def train_eagerly(device: torch.device, steps: int) -> Run:
    """Every step runs operator by operator."""
    run, step = Run(), TrainingStep(device)
    for images, labels in batches(device, steps):
        with run.step():
            step.drop_gradients()
            run.losses.append(step(images, labels).item())
    return run


def train_captured(device: torch.device, steps: int, backend: core.BackendName) -> Run:
    """All steps but the first few are replays of one graph."""
    run, step = Run(), TrainingStep(device)
    data = batches(device, steps)

    # Warm-up steps are real training steps: what is made lazily (the optimizer's moments, library
    # workspaces) must exist before the capture.
    with side_stream(device):
        for _ in range(WARMUP_STEPS):
            with run.step():
                step.drop_gradients()
                run.losses.append(step(*next(data)).item())

    # Without gradients here, backward makes them inside the capture: they are born in the graph's
    # pool, and every replay writes them again instead of adding to the last ones.
    step.drop_gradients()
    static_images, static_labels = next(data)
    graph = core.CUDAGraph(backend=backend)
    with core.graph(graph):
        static_loss = step(static_images, static_labels)

    # Capture executed nothing, so the batch it saw is still to be trained on.
    with run.step():
        graph.replay()
        run.losses.append(static_loss.item())
    for images, labels in data:
        with run.step():
            static_images.copy_(images)
            static_labels.copy_(labels)
            graph.replay()
            run.losses.append(static_loss.item())
    return run


def print_table(rows: list[tuple[str, ...]]) -> None:
    """Prints with rich where it is installed, otherwise as aligned text."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        for row in [COLUMNS, *rows]:
            print("".join(f"{cell:>16}" for cell in row))
        return
    table = Table(title="One training step, eager and captured")
    for column in COLUMNS:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*row)
    Console().print(table)


def report(eager: Run, captured: Run, device: torch.device) -> bool:
    """Prints both runs and returns whether all losses are equal, bit for bit."""
    pairs = list(zip(eager.losses, captured.losses, strict=True))
    phases = ["warm-up"] * WARMUP_STEPS + ["replay"] * (len(pairs) - WARMUP_STEPS)
    print_table(
        [
            (str(i), phase, f"{a:.6f}", f"{b:.6f}", f"{b - a:.1e}")
            for i, (phase, (a, b)) in enumerate(zip(phases, pairs, strict=True))
        ]
    )
    if device.type == "cuda":
        times = [median(run.seconds[WARMUP_STEPS + 1 :]) * 1e3 for run in (eager, captured)]
        print(f"Median step: eager {times[0]:.3f} ms, replay {times[1]:.3f} ms.")
    else:
        print(
            "Emulated on the CPU: this shows that a replay computes what the eager step computes. "
            "Times would mean nothing here, so none are shown."
        )
    equal = sum(a == b for a, b in pairs)
    print(f"{equal} of {len(pairs)} losses equal")
    return equal == len(pairs)


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Capture a training step, replay it, and compare its losses with eager ones."
    )
    parser.add_argument("--steps", type=int, default=20, help="training steps (default: 20)")
    parser.add_argument(
        "--backend",
        choices=("auto", "cuda", "emulated"),
        default="auto",
        help="auto (default) is cuda where torch sees a GPU, otherwise emulated",
    )
    options = parser.parse_args()
    if options.steps < WARMUP_STEPS + 2:
        parser.error(f"--steps must be at least {WARMUP_STEPS + 2}: {WARMUP_STEPS} are warm-up")
    if options.backend == "cuda" and not torch.cuda.is_available():
        parser.error("--backend cuda: torch sees no GPU on this machine; use auto or emulated")

    on_gpu = options.backend != "emulated" and torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    eager = train_eagerly(device, options.steps)
    captured = train_captured(device, options.steps, options.backend)
    return 0 if report(eager, captured, device) else 1


if __name__ == "__main__":
    sys.exit(main())
