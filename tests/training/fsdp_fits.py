"""Fits under FSDP2, as every rank runs them: with the callback and without, compared to the bit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

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


def plain_sgd(module: Any) -> torch.optim.Optimizer:
    """torch has no fused kernel of it for sharded parameters."""
    return torch.optim.SGD(module.parameters(), lr=2**-5, momentum=0.5)


def many_kernels(module: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=2**-7, foreach=True)


def strategy() -> ModelParallelStrategy:
    return ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)


FSDP = {"devices": 2, "use_distributed_sampler": False, "max_epochs": 2, "module": Sharded}

def _with(**options: Any) -> Callable[[], Sharded]:
    return lambda: Sharded(**options)


class Parallel(Net):
    """Two layers over the ranks of a tensor-parallel group, which have the same batches."""

    def __init__(self) -> None:
        super().__init__(adamw)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))

    def configure_model(self) -> None:
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(self.net, self.device_mesh["tensor_parallel"], plan)


Case = Callable[[], dict[str, Any]]
CASES: dict[str, Case] = {
    "plain": dict,
    "gathered once a step": lambda: {"module": _with(reshard_after_forward=False)},
    "gathered twice a step": lambda: {"module": _with(reshard_after_forward=True)},
    "bf16 within units": lambda: {
        "module": _with(
            mp_policy=MixedPrecisionPolicy(
                param_dtype=torch.bfloat16, reduce_dtype=torch.float32
            )
        )
    },
    "an optimizer that is no graph": lambda: {"module": _with(optimizers=plain_sgd)},
    "accumulation": lambda: {"accumulate_grad_batches": 3, "max_epochs": 4},
    "a uneven last batch": lambda: {"last": 3, "max_epochs": 5},
    "validation within an epoch": lambda: {
        "val_check_interval": 5,
        "max_epochs": 4,
        "module": _with(reshard_after_forward=False),
    },
    "clipping": lambda: {"gradient_clip_val": 0.01},
    "clipping values": lambda: {"gradient_clip_val": 0.001, "gradient_clip_algorithm": "value"},
    "hooks that look at gradients": lambda: {"trace": GradientTrace},
    "hooks that look before backward": lambda: {"trace": FullTrace},
    "tensor parallelism": lambda: {
        "module": Parallel,
        "strategy": ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=2),
        "rank": 0,
    },
}

ON_A_GPU: dict[str, Case] = {
    "bf16": lambda: {"precision": "bf16-mixed"},
    "an optimizer of many kernels": lambda: {"module": _with(optimizers=many_kernels)},
}
"""What only a GPU can show."""


def trained_twice(rank: int, backend: str, root: Path, case: str) -> Any:
    """Fit with the callback and without; what was replayed."""
    folder, fits = in_folder(root, rank), []
    for is_captured in (False, True):
        options = {**FSDP, "strategy": strategy(), **(CASES | ON_A_GPU)[case]()}
        own = options.pop("rank", rank)
        data = partial(of_rank, own, last=options.pop("last", None))
        fits.append(prepare(backend, folder, is_captured, data=data, **options).run())
    said = fits[1].statistics.fallbacks
    assert all("torch has no fused SGD" in line or "neither capturable" in line for line in said)
    compare(*fits, replayed=not said)
    return fits[1].statistics.replayed, len(said)
