"""What the examples share: their flags, one fit with or without graphs, and the final table."""

from __future__ import annotations

import argparse
import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean, median
from textwrap import indent
from time import perf_counter
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lightning_graphs import GraphCapture

LOADED_AFTER = 5
"""Steps of the fit on a GPU that comes before those which are compared."""

SETTLED_AFTER = 10
"""Batches of an epoch that are not timed: warm-up, capture and the first refresh of the bar."""

EXIT_STATUS = "On a CPU the exit status is 1 if any loss differs."
"""For the descriptions of the examples; see :func:`run`."""


@dataclass
class Run:
    """What one fit showed.

    Attributes:
        losses: Loss of every training step.
        accuracy: Validation accuracy at the end, 0 to 1.
        ms_per_step: Median over the epochs; None on a CPU or where an epoch is too short for it.
        seconds: The whole fit: warm-up, captures, validation and checkpoints included.
        graphs: The callback; None for the eager fit.
    """

    losses: list[float]
    accuracy: float
    ms_per_step: float | None
    seconds: float
    graphs: GraphCapture | None


@dataclass
class Comparison:
    """The same training, eager and captured."""

    eager: Run
    captured: Run
    same_checkpoint: bool | None = None  # bit by bit; None if none was compared

    @property
    def pairs(self) -> list[tuple[float, float]]:
        return list(zip(self.eager.losses, self.captured.losses, strict=True))

    @property
    def largest_difference(self) -> float:
        return max(abs(a - b) for a, b in self.pairs)


@dataclass
class Probe(Callback):
    """Keeps the loss of every step and, on a GPU, the time of the settled part of each epoch."""

    losses: list[torch.Tensor] = field(default_factory=list)
    epochs: list[float] = field(default_factory=list)
    _started: float | None = None

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.losses.append(outputs["loss"].detach().clone())
        if pl_module.device.type == "cuda":
            self._time(trainer, batch_idx)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.progress_bar_callback is None:
            say(f"  epoch {trainer.current_epoch + 1} of {trainer.max_epochs}")

    def _time(self, trainer: Trainer, batch_idx: int) -> None:
        if batch_idx == SETTLED_AFTER:
            torch.cuda.synchronize()
            self._started = perf_counter()
            return
        # The very last batch of an epoch may be a short one.
        last = batch_idx == int(trainer.num_training_batches) - 2
        if self._started is not None and (last or trainer.global_step == trainer.max_steps):
            torch.cuda.synchronize()
            seconds = perf_counter() - self._started
            self.epochs.append(seconds / (batch_idx - SETTLED_AFTER) * 1e3)
            self._started = None


def on_gpu(options: argparse.Namespace) -> bool:
    """Whether the flags and this machine mean training on a GPU."""
    return options.backend != "emulated" and torch.cuda.is_available()


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that every example has."""
    flag = parser.add_argument
    flag("--epochs", type=int, default=4, help="epochs (default: %(default)s)")
    flag("--max-steps", type=int, default=-1, help="optimizer steps at most (default: no limit)")
    flag("--batch-size", type=int, default=32, help="examples in a batch (default: %(default)s)")
    flag("--precision", help="for the Trainer (default: bf16-mixed on a GPU, 32-true on a CPU)")
    flag("--devices", default="1", help="for the Trainer (default: 1)")
    flag("--strategy", default="auto", help="for the Trainer (default: auto)")
    flag(
        "--backend",
        choices=("auto", "cuda", "emulated"),
        default="auto",
        help="auto (default): cuda where torch sees a GPU, otherwise emulated, on the CPU",
    )
    flag("--seed", type=int, default=0, help="of both fits (default: 0)")


def run(parser: argparse.ArgumentParser, train: Callable[[argparse.Namespace], Comparison]) -> int:
    """Trains as the flags say, prints both fits, and returns the exit status.

    Args:
        parser: Has the flags of :func:`add_flags` and those of the example.
        train: Calls :func:`compare`.
    """
    options = parser.parse_args()
    check_flags(parser, options)
    prepare()
    comparison = train(options)
    gpu = on_gpu(options)
    report(comparison, gpu)
    is_other = comparison.largest_difference > 0 or comparison.same_checkpoint is False
    return 1 if not gpu and is_other else 0


def check_flags(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Ends the program with a sentence where flags cannot be met."""
    if options.backend == "cuda" and not torch.cuda.is_available():
        parser.error("--backend cuda: torch sees no GPU on this machine; use auto or emulated")
    for name in ("epochs", "batch_size"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if options.max_steps == 0 or options.max_steps < -1:
        parser.error("--max-steps must be at least 1, or -1 for no limit")


def compare(
    make_module: Callable[[], LightningModule],
    make_data: Callable[[], LightningDataModule],
    options: argparse.Namespace,
    callbacks: Callable[[], Sequence[Callback]] = tuple,
    trainer: Mapping[str, Any] | None = None,
    **capture: Any,
) -> Comparison:
    """Trains twice from the same seed, without and with :class:`GraphCapture`.

    On a GPU a few steps come before that, so that no fit is the one that loads kernels.

    Args:
        make_module: Makes the module; it logs ``val_accuracy`` in ``validation_step``.
        make_data: Makes the data; it shuffles by a generator of its own.
        options: The flags of :func:`add_flags`.
        callbacks: Makes further callbacks of a fit.
        trainer: Further options of the Trainer.
        capture: Options of :class:`GraphCapture`.
    """
    given = {"max_steps": options.max_steps, **(trainer or {})}
    backend = "cuda" if on_gpu(options) else "emulated"
    if on_gpu(options):
        short = {**given, "max_steps": LOADED_AFTER}
        _fit(make_module(), make_data(), options, list(callbacks()), short)
    runs = []
    for graphs in (None, GraphCapture(backend=backend, **capture)):
        say("\nEager ..." if graphs is None else "\nWith GraphCapture ...")
        torch.manual_seed(options.seed)
        runs.append(_fit(make_module(), make_data(), options, list(callbacks()), given, graphs))
    return Comparison(*runs)


def _fit(
    module: LightningModule,
    data: LightningDataModule,
    options: argparse.Namespace,
    callbacks: list[Callback],
    given: Mapping[str, Any],
    graphs: GraphCapture | None = None,
) -> Run:
    probe = Probe()
    saves = any(isinstance(callback, ModelCheckpoint) for callback in callbacks)
    trainer = Trainer(
        accelerator="gpu" if on_gpu(options) else "cpu",
        devices=options.devices,
        strategy=options.strategy,
        precision=options.precision or ("bf16-mixed" if on_gpu(options) else "32-true"),
        max_epochs=options.epochs,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=saves,
        enable_model_summary=False,
        # A rehearsal replays operator by operator, and its bar would look like a slower fit.
        enable_progress_bar=on_gpu(options),
        callbacks=[probe, *callbacks, *([] if graphs is None else [graphs])],
        **given,
    )
    started = perf_counter()
    trainer.fit(module, datamodule=data)
    if on_gpu(options):
        torch.cuda.synchronize()
    seconds = perf_counter() - started
    # A step limit may end the fit before the last epoch's validation.
    [result] = trainer.validate(module, datamodule=data, verbose=False)
    return Run(
        torch.stack(probe.losses).tolist(),
        result["val_accuracy"],
        median(probe.epochs) if probe.epochs else None,
        seconds,
        graphs,
    )


@rank_zero_only
def say(text: str) -> None:
    """Prints once, however many processes train."""
    print(text, flush=True)


def prepare() -> None:
    """Uses tensor cores for what stays in float32, and silences advice on larger programs."""
    torch.set_float32_matmul_precision("high")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for message in (
        ".*does not have many workers.*",
        ".*`isinstance.treespec, LeafSpec.` is deprecated.*",
        ".*`is_gradient_checkpointing` is deprecated.*",  # peft asks transformers for it
    ):
        warnings.filterwarnings("ignore", message)


@rank_zero_only
def report(comparison: Comparison, gpu: bool) -> None:
    """Prints both fits side by side, and what the graphs did."""
    eager, captured = comparison.eager, comparison.captured
    assert captured.graphs is not None
    done = captured.graphs.report
    rows = [
        ("steps", str(len(eager.losses)), str(len(captured.losses))),
        ("loss of the first steps", *(f"{mean(r.losses[:5]):.4f}" for r in (eager, captured))),
        ("loss of the last steps", *(f"{mean(r.losses[-5:]):.4f}" for r in (eager, captured))),
        ("validation accuracy", *(f"{r.accuracy:.1%}" for r in (eager, captured))),
    ]
    if eager.ms_per_step is not None and captured.ms_per_step is not None:
        rows.append(("ms per step", f"{eager.ms_per_step:.2f}", f"{captured.ms_per_step:.2f}"))
    if gpu:
        rows.append(("seconds of the fit", f"{eager.seconds:.1f}", f"{captured.seconds:.1f}"))
    rows += [
        ("captured graphs", "", str(sum(record.captures for record in done.graphs))),
        ("nodes in them", "", _nodes(captured.graphs)),
        ("replayed steps", "", str(done.replayed)),
        ("eager steps", str(len(eager.losses)), str(len(captured.losses) - done.replayed)),
    ]
    print_table(("", "eager", "GraphCapture"), rows)
    equal = sum(a == b for a, b in comparison.pairs)
    print(
        f"Losses: {equal} of {len(comparison.pairs)} equal, "
        f"largest difference {comparison.largest_difference:.1e}."
    )
    if comparison.same_checkpoint is not None:
        said = "equal, bit by bit" if comparison.same_checkpoint else "not equal"
        print(f"Checkpoints of the best epoch: {said}.")
    print("Fallbacks:" if done.fallbacks else "Fallbacks: none.")
    for reason in done.fallbacks:
        print(indent(reason, "  "))
    if not gpu:
        print(
            "Rehearsed on the CPU, which has no CUDA graphs: a replay runs operator by operator.\n"
            "Times would mean nothing here, so none are shown. On a GPU this command shows them."
        )
    elif eager.ms_per_step is not None and captured.ms_per_step is not None:
        print(f"\nms per step, {torch.cuda.get_device_name()}, torch {torch.__version__}:")
        print_bars({"eager": eager.ms_per_step, "GraphCapture": captured.ms_per_step})
        print(f"A captured step is {eager.ms_per_step / captured.ms_per_step:.2f} times as fast.")


def print_bars(times: dict[str, float], width: int = 50) -> None:
    """Prints times with a bar each, the longest as wide as ``width`` characters."""
    longest = max(times.values())
    for name, ms in times.items():
        bar = "\N{FULL BLOCK}" * max(1, round(width * ms / longest))
        print(f"  {name:<14}{bar} {ms:.2f}")


def _nodes(graphs: GraphCapture) -> str:
    """Nodes of the graphs, in the order of their capture; a dash where they cannot be counted."""
    counts = [record.nodes for record in graphs.report.graphs]
    return " + ".join(str(count) for count in counts if count is not None) or "-"


def print_table(columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    """Prints with rich where it is installed, otherwise as aligned text."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        for first, *others in [columns, *rows]:
            print(f"{first:<26}" + "".join(f"{cell:>16}" for cell in others))
        return
    table = Table()
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left")
    for row in rows:
        table.add_row(*row)
    Console().print(table)
