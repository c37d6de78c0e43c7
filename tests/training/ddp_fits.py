"""Fits under DDP, as every rank runs them: with the callback and without, compared to the bit."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torchmetrics.classification import MulticlassAccuracy

from tests.programs.test_mirrors import Queue, of_moco
from tests.ranks import in_folder, run_on_ranks, state_of
from tests.training.fits import (
    FullTrace,
    GradientTrace,
    Net,
    batches,
    compare,
    loader_of,
    prepare,
    sgd,
)

DDP = {"devices": 2, "strategy": "ddp", "use_distributed_sampler": False, "max_epochs": 2}


def of_rank(rank: int, **options: Any) -> list[dict[str, Any]]:
    """Batches that every rank has for itself."""
    data = batches(**{"count": 20, **options})
    for batch in data:
        batch["x"] = batch["x"] + rank
    return data


class Plain(Net):
    """Without buffers, so that a forward pass exchanges nothing."""

    def __init__(self, optimizers: Any = sgd) -> None:
        super().__init__(optimizers)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))


class Compiled(Plain):
    """Compiled by ``torch.compile``."""

    def __init__(self, optimizers: Any = sgd) -> None:
        super().__init__(optimizers)
        self.net.compile()


class Queueing(Queue):
    """Has the pointer of a queue in a buffer, which DDP sends to all ranks ahead of each step."""

    training_step = of_moco


class LogsMeans(Net):
    """Logs means over all ranks, and computes one in the step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        mean = loss.detach().clone()
        torch.distributed.all_reduce(mean)
        self.log("mean", mean, on_step=True, on_epoch=True)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss + mean


class Sampling(Net):
    """Filters and draws ahead of its network; on each rank by itself, and not always as many."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        rows = torch.nonzero(batch["x"].sum(1) > -9.0).flatten()
        size = 6 if self.trainer.current_epoch < 3 or batch_idx % 4 else 5 + self.global_rank
        rows = rows[np.random.choice(len(rows), size)]
        loss = nn.functional.cross_entropy(self.net(batch["x"][rows]).float(), batch["y"][rows])
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss


Case = Callable[[], dict[str, Any]]
CASES: dict[str, Case] = {
    "plain": lambda: {"module": Plain},
    "buffers": dict,
    "accumulation": lambda: {"accumulate_grad_batches": 3, "max_epochs": 4},
    "accumulation of plain gradients": lambda: {"accumulate_grad_batches": 2, "module": Plain},
    "a uneven last batch": lambda: {"last": 3, "max_epochs": 5},
    "validation within an epoch": lambda: {"val_check_interval": 5, "max_epochs": 4},
    "gradients as views of buckets": lambda: {
        "strategy": DDPStrategy(gradient_as_bucket_view=True)
    },
    "accumulation in views of buckets": lambda: {
        "strategy": DDPStrategy(gradient_as_bucket_view=True),
        "accumulate_grad_batches": 3,
        "max_epochs": 4,
    },
    "small buckets": lambda: {"strategy": DDPStrategy(bucket_cap_mb=1e-4)},
    "clipping": lambda: {"gradient_clip_val": 0.01},
    "hooks that look at gradients": lambda: {"trace": GradientTrace},
    "hooks that look before backward": lambda: {"trace": FullTrace},
    "bf16": lambda: {"precision": "bf16-mixed"},
    "heads": lambda: {"module": Sampling, "max_epochs": 4},
    "heads and accumulation": lambda: {
        "module": Sampling,
        "max_epochs": 4,
        "accumulate_grad_batches": 2,
        "capture": {"verify": 5},
    },
    "means over ranks": lambda: {"module": LogsMeans},
    "a queue of keys": lambda: {"module": Queueing},
    "submodules": lambda: {"capture": {"scope": "modules"}},
    "submodules and accumulation": lambda: {
        "capture": {"scope": "modules"},
        "accumulate_grad_batches": 3,
        "max_epochs": 4,
    },
    "submodules and views of buckets": lambda: {
        "capture": {"scope": "modules"},
        "strategy": DDPStrategy(gradient_as_bucket_view=True),
    },
    "submodules and small buckets": lambda: {
        "capture": {"scope": "modules"},
        "strategy": DDPStrategy(bucket_cap_mb=1e-4),
    },
}


ON_A_GPU: dict[str, Case] = {
    # The reducer reads a number of its own on the host, which a rehearsal takes for the device's.
    "a static graph": lambda: {"strategy": DDPStrategy(static_graph=True)},
    "synchronized BatchNorm": lambda: {"sync_batchnorm": True},
    "fp16": lambda: {"precision": "16-mixed"},
    "compiled": lambda: {"module": Compiled, "precision": "bf16-mixed"},
    "compressed gradients": lambda: {"strategy": DDPStrategy(ddp_comm_hook=bf16_compress_hook)},
    "more than a hundred steps": lambda: {"module": Plain, "max_epochs": 16},
}
"""What only a GPU can show."""


def trained_twice(rank: int, backend: str, root: Path, case: str) -> Any:
    """Fit with the callback and without; the state after it, and what was replayed."""
    folder, fits = in_folder(root, rank), []
    for is_captured in (False, True):
        options = {**DDP, **(CASES | ON_A_GPU)[case]()}  # a strategy serves one trainer
        data = partial(of_rank, rank, last=options.pop("last", None))
        np.random.seed(rank)
        fits.append(prepare(backend, folder, is_captured, data=data, **options).run())
    eager, captured = fits
    compare(eager, captured)
    return state_of(captured.module), captured.statistics.replayed


def require_equal_fits(backend: str, root: Path, case: str) -> None:
    """Assert that fits are equal with graphs and without, and that ranks end with one model."""
    (first, replayed), (second, again) = run_on_ranks(trained_twice, backend, root, case)
    assert replayed == again >= 10, f"{replayed} and {again} steps were replayed"
    parameters = [name for name in first if "running" not in name and name != "queue"]
    assert [first[name] for name in parameters] == [second[name] for name in parameters]


def _by_torchrun(rank: int) -> dict[str, Any]:
    return {"GROUP_RANK": rank, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}


def _by_slurm(rank: int) -> dict[str, Any]:
    for name in ("TORCHELASTIC_RUN_ID", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        del os.environ[name]
    given = {"NTASKS": 2, "NTASKS_PER_NODE": 1, "NNODES": 2, "JOB_ID": 1, "JOB_NAME": "fit"}
    given |= {"PROCID": rank, "NODEID": rank, "LOCALID": 0}
    return {f"SLURM_{name}": value for name, value in given.items()}


LAUNCHERS = {"torchrun": _by_torchrun, "srun": _by_slurm}
"""The environment that each makes of the first process on each of two nodes."""


def trained_on_two_nodes(rank: int, root: Path, launcher: str) -> Any:
    """Fit with the callback and without, each rank as if it were alone on a node."""
    os.environ.update({name: str(value) for name, value in LAUNCHERS[launcher](rank).items()})
    options = {**DDP, "devices": 1, "num_nodes": 2, "data": partial(of_rank, rank)}
    folder = in_folder(root, rank)
    fits = [prepare("emulated", folder, captured, **options).run() for captured in (False, True)]
    compare(*fits)
    environment = fits[1].trainer.strategy.cluster_environment
    return type(environment).__name__, fits[1].trainer.node_rank, fits[1].statistics.replayed


# ---------------------------------------------------------------------- evaluations


class Evaluated(Net):
    """Logs over all ranks and of its own, with metrics; a rank has so many batches."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = MulticlassAccuracy(3)
        self.kept: list[Any] = []

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        output = self.net(batch["x"])
        loss = nn.functional.cross_entropy(output, batch["y"])
        self.log("over all", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log("mine", loss, sync_dist=True, reduce_fx="sum")
        self.accuracy(output, batch["y"])
        self.log("accuracy", self.accuracy)
        return output

    test_step = validation_step

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.kept.append(outputs)

    def val_dataloader(self) -> Any:
        rank = torch.distributed.get_rank()
        return loader_of(of_rank(rank, count=9))


class Uneven(Evaluated):
    """Has more batches on one rank, and waits for no other before the end."""

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("mine", self.loss(batch), sync_dist=True)

    def val_dataloader(self) -> Any:
        rank = torch.distributed.get_rank()
        return loader_of(of_rank(rank, count=7 + 4 * rank))


class Gathers(Evaluated):
    """Calls a collective in its steps."""

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        torch.distributed.all_reduce(loss)
        self.log("sum", loss)


EVALUATED = {"even": Evaluated, "uneven": Uneven, "gathers": Gathers}


def evaluated_twice(rank: int, backend: str, root: Path, case: str) -> Any:
    """Validate within fits and by itself; what was replayed and said, and what the doctor finds."""
    folder, found = in_folder(root, rank), []
    for is_captured in (False, True):
        capture = {"on_failure": "eager"}
        options = {**DDP, "max_epochs": 3, "capture": capture, "validation": 0}
        data = partial(of_rank, rank)
        kind = EVALUATED[case]
        fit = prepare(backend, folder, is_captured, data=data, module=kind, **options).run()
        results = [fit.csv, repr(fit.module.kept), repr(fit.trainer.callback_metrics)]
        if is_captured:
            replayed, said = _replayed(fit)
        for call in ("validate", "test")[: 1 + (case == "even")]:
            loader = fit.module.val_dataloader()
            results.append(repr(getattr(fit.trainer, call)(fit.module, loader, verbose=False)))
            if is_captured and case == "even":
                replayed += _replayed(fit, {"validate": "validation"}.get(call, call))[0]
        found.append(results)
    assert found[1] == found[0]
    options |= {"max_epochs": 1, "capture": {"diagnose": True}}
    observed = prepare(backend, folder, True, data=data, module=kind, **options).run()
    diagnosis = observed.capture.report.evaluation["validation_step"].diagnosis
    return replayed, said, [each.rule for each in diagnosis.obstacles]


def _replayed(fit: Any, stage: str = "validation") -> tuple[int, list[str]]:
    report = fit.capture.report.evaluation[f"{stage}_step"]
    return report.replayed, list(report.fallbacks)
