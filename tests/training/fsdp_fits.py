"""Fits under FSDP2, as every rank runs them: with the callback and without, compared to the bit."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lightning_graphs.private.torch import local
from tests.ranks import in_folder, run_on_ranks
from tests.training.ddp_fits import of_rank
from tests.training.fits import FullTrace, GradientTrace, Net, Trace, adamw, compare, prepare
from tests.training.rank_differences import ODD, READ, Read


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


def strategy(whole: bool = True) -> ModelParallelStrategy:
    """Shards over two ranks; checkpoints are whole, or have a file of each rank."""
    return ModelParallelStrategy(
        data_parallel_size=2, tensor_parallel_size=1, save_distributed_checkpoint=not whole
    )


FSDP = {"devices": 2, "use_distributed_sampler": False, "max_epochs": 2, "module": Sharded}


def _with(**options: Any) -> Callable[[], Sharded]:
    return lambda: Sharded(**options)


class KeptTrace(Trace):
    """Keeps the gradients of a step until the next one is over."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Any] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self.note("kept", trainer, pl_module, self.kept)
        self.kept = [p.grad for p in pl_module.parameters()]


class Parallel(Net):
    """Two layers over the ranks of a tensor-parallel group, which have the same batches."""

    def __init__(self) -> None:
        super().__init__(adamw)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))

    def configure_model(self) -> None:
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(self.net, self.device_mesh["tensor_parallel"], plan)


class Counting(Sharded):
    """Writes a sharded tensor that is neither a parameter nor a buffer."""

    def configure_model(self) -> None:
        super().configure_model()
        mesh = self.device_mesh["data_parallel"]
        self.seen = distribute_tensor(torch.zeros(8, device=self.device), mesh, [Shard(0)])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.add_(1.0)
        loss = super().training_step(batch, batch_idx)
        return loss * self.seen.to_local().mean()


class Choosing(Sharded):
    """Begins with a choice of samples that no graph can hold."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        rows = torch.nonzero(batch["x"][:, 0] > -3.0).flatten()[:4]
        x, y = batch["x"][rows], batch["y"][rows]
        return super().training_step({"x": x / x.std().item(), "y": y}, batch_idx)


Case = Callable[[], dict[str, Any]]
CASES: dict[str, Case] = {
    "plain": dict,
    "gathered once a step": lambda: {"module": _with(reshard_after_forward=False)},
    "gathered twice a step": lambda: {"module": _with(reshard_after_forward=True)},
    "bf16 within units": lambda: {
        "module": _with(
            mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        )
    },
    "an optimizer that is no graph": lambda: {"module": _with(optimizers=plain_sgd)},
    "many kernels that are no graph": lambda: {"module": _with(optimizers=many_kernels)},
    "accumulation": lambda: {"accumulate_grad_batches": 3, "max_epochs": 4},
    "a uneven last batch": lambda: {"last": 3, "max_epochs": 5},
    "validation within an epoch": lambda: {
        "val_check_interval": 5,
        "max_epochs": 4,
        "module": _with(reshard_after_forward=False),
    },
    "gradients that are kept": lambda: {"trace": KeptTrace},
    "clipping": lambda: {"gradient_clip_val": 0.01},
    "clipping values": lambda: {"gradient_clip_val": 0.001, "gradient_clip_algorithm": "value"},
    "hooks that look at gradients": lambda: {"trace": GradientTrace},
    "a head": lambda: {"module": Choosing, "max_epochs": 4},
    "a sharded tensor in an attribute": lambda: {"module": Counting},
    "tensor parallelism": lambda: {
        "module": Parallel,
        "strategy": ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=2),
        "rank": 0,
    },
}

ON_A_GPU: dict[str, Case] = {
    "bf16": lambda: {"precision": "bf16-mixed"},
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
    assert all("with DTensors only a fused step" in line for line in said)
    assert bool(said) == ("no graph" in case)
    compare(*fits, replayed=not said)
    assert fits[1].statistics.captures <= 3, "what a validation gathers is no other parameter"
    return fits[1].statistics.replayed


def require_equal_fits(backend: str, root: Path, case: str) -> None:
    """Assert that fits are equal with graphs and without, and that ranks replay as often."""
    first, second = run_on_ranks(trained_twice, backend, root, case)
    assert first == second >= 10


def resumed(rank: int, backend: str, root: Path, whole: bool) -> Any:
    """Save in the middle of a fit, eagerly and captured; go on from either, either way."""
    states = []
    for is_captured in (False, True):
        saving = ModelCheckpoint(dirpath=root / str(is_captured), every_n_epochs=2, save_top_k=-1)
        given = {**FSDP, "data": partial(of_rank, rank), "enable_checkpointing": True}
        folder = in_folder(root, rank)
        prepare(
            backend,
            folder,
            is_captured,
            callbacks=lambda saving=saving: [saving],
            **given,
            strategy=strategy(whole),
        ).run()
        saved = broadcast_path(saving.best_model_path)
        for goes_on in (False, True):
            fit = prepare(
                backend, folder, goes_on, **{**given, "max_epochs": 4}, strategy=strategy(whole)
            ).run(ckpt_path=saved)
            assert fit.statistics.replayed == (35 if goes_on else 0)
            states.append([local(p).tolist() for p in fit.module.parameters()])
    return states


def broadcast_path(path: str) -> str:
    """What rank 0 has saved: only there is the path known."""
    found = [path]
    torch.distributed.broadcast_object_list(found)
    return found[0]


def require_equal_checkpoints(backend: str, root: Path, whole: bool) -> None:
    """Assert that a fit goes on as an eager one, from a checkpoint of either and in either."""
    for states in run_on_ranks(resumed, backend, root, whole):
        assert all(state == states[0] for state in states)


class ReadsOnOne(Sharded):
    """Reads a value on the host, on one rank, in the forward pass."""

    def loss(self, batch: Any) -> Tensor:
        hidden = self.net(batch["x"])
        if self.global_rank == ODD and float(hidden.sum()) > 1e9:
            hidden = -hidden
        return nn.functional.cross_entropy(hidden.float(), batch["y"])


class ReadsInBackward(Sharded):
    """Reads a value on the host, on one rank, in the middle of the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.net[1] = ReadingTanh()


class ReadingTanh(nn.Tanh):
    def forward(self, x: Tensor) -> Tensor:
        is_odd = torch.distributed.get_rank() == ODD
        return super().forward(Read.apply(x) if is_odd else x)


class Holds(Sharded):
    """Leaves the gradients of every other batch to the next one."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.net.set_requires_gradient_sync(batch_idx % 2 == 1)


EAGER: dict[str, tuple[Case, str]] = {
    "a forward pass that is refused": (
        lambda: {"module": ReadsOnOne},
        READ,
    ),
    "a backward pass that is refused": (
        lambda: {"module": ReadsInBackward},
        READ,
    ),
    "hooks that look before backward": (
        lambda: {"trace": FullTrace},
        "A captured step under FSDP2 cannot show parameters",
    ),
    "gradients that are left to the next batch": (
        lambda: {"module": Holds, "accumulate_grad_batches": 2},
        "leaves gradients to the next one",
    ),
    "submodules": (
        lambda: {"capture": {"scope": "modules"}},
        "gathers the parameters of submodules to new addresses",
    ),
    "two optimizers": (
        lambda: {"module": Manual, "capture": {"scope": "auto"}},
        "the module optimizes manually",
    ),
}
"""What runs eagerly on all ranks, and what is said of it."""


class Manual(Sharded):
    """Optimizes manually."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


def trained_eagerly(rank: int, backend: str, root: Path, case: str) -> Any:
    """Fit with the callback and without, where it cannot help; what it says."""
    make, said = EAGER[case]
    folder, fits = in_folder(root, rank), []
    for is_captured in (False, True):
        options = {**FSDP, "data": partial(of_rank, rank), "strategy": strategy(), **make()}
        options["capture"] = {"on_failure": "eager", **options.get("capture", {})}
        fits.append(prepare(backend, folder, is_captured, **options).run())
    compare(*fits, replayed=False)
    lines = fits[1].statistics.fallbacks
    assert len(lines) == 1, lines
    assert re.search(said, lines[0]), lines
    return fits[1].statistics.replayed


def require_eager_fits(backend: str, root: Path, case: str) -> None:
    """Assert that all ranks run eagerly, and say why."""
    assert run_on_ranks(trained_eagerly, backend, root, case) == [0, 0]
