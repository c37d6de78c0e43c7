"""A step that is replayed does nothing else: what runs beside its graphs is counted."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import lightning_graphs
from lightning_graphs.device.emulated import EmulatedGraph
from tests.training.fits import Net, Trace, batches, prepare

PACKAGE = str(Path(lightning_graphs.__file__).parent)
TIMED = 48
"""Steps after which the callback has ended its own timing: each graph was replayed a few times."""

COUNTED = 4


class Beside(TorchDispatchMode):
    """Counts operators, tensors with memory of their own, and calls of this package's functions.

    What an emulated graph runs in a replay stands for what a GPU does: it is not counted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operators: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self.tensors = 0
        self.replays = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self.replays:
            self.operators[str(func)] += 1
            given = {t.untyped_storage().data_ptr() for t in _tensors((args, kwargs))}
            made = {t.untyped_storage().data_ptr() for t in _tensors(result)}
            self.tensors += len(made - given)
        return result

    def profile(self, frame: FrameType, event: str, _: object) -> None:
        """For ``sys.setprofile``."""
        code = frame.f_code
        if event == "call" and not self.replays and code.co_filename.startswith(PACKAGE):
            self.calls[f"{Path(code.co_filename).stem}.{code.co_name}"] += 1


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [t for v in value for t in _tensors(v)] if isinstance(value, (list, tuple)) else []


class Counting(Callback):
    """Counts from the end of one step to the end of the next, for the last steps of a fit."""

    def __init__(self) -> None:
        self.steps: list[Beside] = []
        self.now: Beside | None = None

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self.now is not None:
            sys.setprofile(None)
            self.now.__exit__(None, None, None)
            self.steps.append(self.now)
            self.now = None
        if TIMED < batch_idx <= TIMED + COUNTED:
            self.now = Beside()
            self.now.__enter__()
            sys.setprofile(self.now.profile)


class Silent(Trace):
    """Looks at nothing."""

    def note(self, *_: Any) -> None:
        """Nothing."""

    def on_train_batch_end(self, *_: Any) -> None:
        """Nothing."""


class Deep(Net):
    """As many layers as wanted in one submodule; logs, clips, and moves its learning rates."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(layers)]
        self.net = nn.Sequential(*blocks, nn.Linear(8, 3))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, prog_bar=True)
        self.log("square", loss.detach() ** 2, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        decayed = [p for p in self.parameters() if p.ndim > 1]
        others = [p for p in self.parameters() if p.ndim == 1]
        groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=2**-7, fused=True)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Reading(Deep):
    """Reads what it logs on the host, as many tutorials do."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss.item(), prog_bar=True)
        self.log("large", (loss > 1).sum().item(), on_step=True, on_epoch=True)
        return loss


class Headed(Deep):
    """Filters and draws rows ahead of the first parameter, and logs what it reads of the loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        rows = torch.nonzero(batch["x"].sum(1) > -99.0).flatten()
        rows = rows[torch.randperm(len(rows))[:6]]
        loss = self.loss({key: value[rows] for key, value in batch.items()})
        self.log("loss", loss.item(), prog_bar=True)
        return loss


def beside_the_graphs(
    backend: str,
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    scope: str,
    layers: int,
    window: int,
    kind: type[Deep] = Deep,
    **more: Any,  # options under which nothing is captured
) -> list[Beside]:
    """What ran beside the graphs in each of the last steps of a fit."""
    counting = Counting()
    original = EmulatedGraph.replay

    def replay(graph: EmulatedGraph) -> None:
        now = counting.now
        if now is not None:
            now.replays += 1
        original(graph)
        if now is not None:
            now.replays -= 1

    with monkeypatch.context() as patched:
        patched.setattr(EmulatedGraph, "replay", replay)
        fit = prepare(
            backend,
            root,
            True,
            module=lambda: kind(layers),
            data=lambda: batches(TIMED + COUNTED + 2),
            callbacks=lambda: [counting],
            trace=Silent,
            capture={
                "scope": scope,
                **({"modules": ["net"]} if scope == "modules" else {}),
                **more,
            },
            validation=0,
            max_epochs=1,
            log_every_n_steps=2,
            gradient_clip_val=0.5,
            accumulate_grad_batches=window,
        ).run()
    if more:
        assert fit.statistics.captures == 0
    else:
        assert fit.statistics.captures == (window if scope == "step" else 1)
        assert fit.statistics.fallbacks == []
    assert len(counting.steps) == COUNTED
    return counting.steps


# Whole steps: two copies of the batch, two operators for both learning rates, and Lightning's own
# for its logs, of which 2.5 has more. Submodules: the loss runs eagerly, forward and backward.
LIMITS = {"step": (26, 10, 80), "modules": (40, 18, 184)}
OLDER = 7 if lightning.__version__.startswith("2.5.") else 0


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("scope", LIMITS)
def test_what_runs_beside_a_replay_is_little_and_does_not_grow_with_the_parameters(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scope: str, window: int
) -> None:
    few, many = (
        beside_the_graphs(backend, tmp_path / str(layers), monkeypatch, scope, layers, window)
        for layers in (3, 6)
    )
    operators, tensors, calls = LIMITS[scope]
    for small, large in zip(few, many, strict=True):
        assert large.operators == small.operators
        assert large.tensors == small.tensors
        assert large.calls == small.calls
        if backend == "cuda":  # it also moves batches and mirrors the progress bar
            continue
        assert large.operators.total() <= operators + OLDER, large.operators
        assert large.tensors <= tensors, large.operators
        assert large.calls.total() <= calls, large.calls


def test_a_number_that_is_only_logged_is_not_read(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors, numbers = (
        beside_the_graphs(backend, tmp_path / kind.__name__, monkeypatch, "step", 3, 1, kind)
        for kind in (Deep, Reading)
    )
    for logged, read in zip(tensors, numbers, strict=True):
        assert read.operators == logged.operators
        assert read.calls == logged.calls


def test_a_head_takes_its_own_time_and_little_more(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in beside_the_graphs(backend, tmp_path, monkeypatch, "step", 3, 1, Headed):
        assert step.calls["loop._step"] == 1
        assert step.calls["runner.optimizer_step"] == 0
        assert backend == "cuda" or step.calls.total() <= HEADED, step.calls


HEADED = 100
WAITING = {"step": 240, "modules": 296}


@pytest.mark.filterwarnings("ignore:GraphCapture. steps run eagerly")
@pytest.mark.parametrize("scope", WAITING)
def test_what_a_step_does_that_waits_for_its_capture_does_not_grow_with_the_parameters(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scope: str
) -> None:
    few, many = (
        beside_the_graphs(
            backend, tmp_path / str(layers), monkeypatch, scope, layers, 1, min_repeats=10**6
        )
        for layers in (3, 6)
    )
    for small, large in zip(few, many, strict=True):
        if backend == "cuda":  # times are read when the GPU has come so far
            for one in (small, large):
                one.calls = Counter(
                    {name: n for name, n in one.calls.items() if not name.startswith("worth.")}
                )
        assert large.calls == small.calls
        assert backend == "cuda" or large.calls.total() <= WAITING[scope], large.calls
        looks = {"buffers.check", "own_code.exchanged"}  # at each parameter and module
        assert not looks & set(large.calls)
