"""Fits under FSDP2, as every rank runs them: with the callback and without, compared to the bit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from tests.ranks import in_folder, run_on_ranks
from tests.training.ddp_fits import of_rank
from tests.training.fits import FullTrace, GradientTrace, Net, adamw, compare, prepare


class Sharded(Net):
    """Three units and the root, of even and uneven shards."""

    def __init__(self, optimizers: Any = adamw, **options: Any) -> None:
        super().__init__(optimizers)
        self._options = options
        self.net = nn.Sequential(
            nn.Linear(8, 16),
            nn.Tanh(),
            nn.Sequential(nn.Linear(16, 16, bias=False), nn.LayerNorm(16), nn.GELU()),
            nn.Linear(16, 3),
        )

    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        for layer in (self.net[0], self.net[2], self.net):
            fully_shard(layer, mesh=mesh, **self._options)


def strategy() -> ModelParallelStrategy:
    return ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)


FSDP = {"devices": 2, "use_distributed_sampler": False, "max_epochs": 2, "module": Sharded}

CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": dict,
}


def trained_twice(rank: int, backend: str, root: Path, case: str) -> Any:
    """Fit with the callback and without; what was replayed."""
    folder, fits = in_folder(root, rank), []
    for is_captured in (False, True):
        options = {**FSDP, "strategy": strategy(), **CASES[case]()}
        data = partial(of_rank, rank, last=options.pop("last", None))
        fits.append(prepare(backend, folder, is_captured, data=data, **options).run())
    compare(*fits)
    return fits[1].statistics.replayed
