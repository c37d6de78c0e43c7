"""Loops of several processes, as every rank runs them: eagerly and captured, compared by bits."""

from __future__ import annotations

import contextlib
import re
import runpy
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import lightning_graphs
from lightning_graphs.private.exchange import nothing
from lightning_graphs.private.torch import local
from tests.loops.twice import Lab, twice
from tests.processes import ROOT
from tests.ranks import run_on_ranks


@contextlib.contextmanager
def processes(rank: int, backend: str) -> Iterator[torch.device]:
    """Initialize the processes as a program does that ``torchrun`` starts; yield their device."""
    kind = "nccl" if backend == "cuda" else "gloo"
    device = torch.device("cuda", rank) if backend == "cuda" else torch.device("cpu")
    if backend == "cuda":
        torch.cuda.set_device(device)
    torch.distributed.init_process_group(kind)
    try:
        yield device
    finally:
        torch.distributed.destroy_process_group()


def wrapped(module: nn.Module, lab: Lab, **options: Any) -> DistributedDataParallel:
    ids = [lab.device.index] if lab.device.type == "cuda" else None
    return DistributedDataParallel(module, device_ids=ids, **options)


def batches(lab: Lab, count: int) -> Iterator[Any]:
    """Batches of each rank's own."""
    rank = torch.distributed.get_rank()
    for batch in lab.batches(count):
        yield {"x": batch["x"] + rank, "y": batch["y"]}


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=2**-7, fused=True)


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch["x"]).float(), batch["y"])


def plain(lab: Lab, **options: Any) -> Any:
    """With buffers, which DDP sends to all ranks, and clipping."""
    model = wrapped(lab.net(), lab, **options)
    optimizer = adamw(model)

    def train_step(batch: Any) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        return loss.detach()

    step = lab.capture(train_step, model, optimizer)
    return [step(batch) for batch in batches(lab, 30)]


def accumulated(lab: Lab, **options: Any) -> Any:
    """With ``no_sync`` in the function."""
    model = wrapped(lab.net(), lab, **options)
    optimizer = adamw(model)

    def train_step(batch: Any, last: bool) -> Tensor:
        with nullcontext() if last else model.no_sync():
            loss = loss_of(model, batch)
            (loss / 3).backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    step = lab.capture(train_step, model, optimizer)
    return [step(batch, i % 3 == 2) for i, batch in enumerate(batches(lab, 60))]


def surrounded(lab: Lab) -> Any:
    """With ``no_sync`` around calls of a function that is given no other arguments."""
    model = wrapped(lab.net(), lab)
    optimizer = adamw(model)

    def compute_gradients(batch: Any) -> Tensor:
        loss = loss_of(model, batch)
        loss.backward()
        return loss.detach()

    step, losses = lab.capture(compute_gradients, model, []), []
    for i, batch in enumerate(batches(lab, 40)):
        with model.no_sync() if i % 2 == 0 else nullcontext():
            losses.append(step(batch))
        if i % 2:
            optimizer.step()
            optimizer.zero_grad()
    return losses


def adversarial(lab: Lab) -> Any:
    """Two wrappers, two optimizers, one function; another one trains with one of both."""
    makes = wrapped(
        nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8)).to(lab.device), lab
    )
    judges = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)).to(lab.device)
    judges = wrapped(judges, lab)
    of_makes, of_judges = adamw(makes), adamw(judges)

    def judge(real: Tensor) -> Tensor:
        with torch.no_grad():
            made = makes(torch.randn(real.shape[0], 4, device=real.device))
        of_judges.zero_grad()
        loss = F.softplus(-judges(real)).mean() + F.softplus(judges(made)).mean()
        loss.backward()
        of_judges.step()
        return loss.detach()

    def train_step(real: Tensor) -> Any:
        made = makes(torch.randn(real.shape[0], 4, device=real.device))
        of_judges.zero_grad()
        (F.softplus(-judges(torch.cat([real, made.detach()]))).mean()).backward()
        of_judges.step()
        of_makes.zero_grad()
        loss = F.softplus(-judges.module(made)).mean()
        loss.backward()
        of_makes.step()
        return loss.detach(), made.detach()

    steps = [
        lab.capture(judge, [makes, judges], of_judges),
        lab.capture(train_step, [makes, judges], [of_makes, of_judges]),
    ]
    return [steps[i % 2](batch["x"]) for i, batch in enumerate(batches(lab, 60))]


class Shard(nn.Module):
    """Three units and the root."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.act = nn.Linear(8, 16), nn.Tanh()
        self.block = nn.Sequential(nn.Linear(16, 16, bias=False), nn.LayerNorm(16), nn.GELU())
        self.last = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        last: Tensor = self.last(self.block(self.act(self.first(x))))
        return last


def sharded(lab: Lab, *, every: int = 1, **options: Any) -> Any:
    """FSDP2, with clipping; gradients are added up over some calls."""
    model = Shard().to(lab.device)
    for part in (model.first, model.block, model):
        fully_shard(part, **options)
    optimizer = adamw(model)

    def train_step(batch: Any, last: bool) -> Tensor:
        loss = loss_of(model, batch)
        loss.backward()
        if last:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    step = lab.capture(train_step, model, optimizer)
    return [step(batch, i % every == every - 1) for i, batch in enumerate(batches(lab, 30 * every))]


def of_fabric(lab: Lab, strategy: Any) -> Any:
    """Fabric wraps the model, sums gradients up, and clips them."""
    kind = "gpu" if lab.device.type == "cuda" else "cpu"
    fabric = Fabric(accelerator=kind, devices=2, strategy=strategy(), precision="bf16-true")
    fabric.launch()
    given = Shard().to(lab.device)
    model = fabric.setup_module(given)
    optimizer = fabric.setup_optimizers(adamw(model))

    def train_step(batch: Any, last: bool) -> Tensor:
        # Fabric leaves it to FSDP2's next call then, also behind one that is not enabled
        syncs = nullcontext() if strategy is sharding else fabric.no_backward_sync(model, not last)
        with syncs:
            loss = loss_of(model, batch)
            fabric.backward(loss / 2)
        if last:
            fabric.clip_gradients(model, optimizer, max_norm=0.5, error_if_nonfinite=False)
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    step, losses = lab.capture(train_step, model, optimizer), []
    for i, batch in enumerate(batches(lab, 60)):
        losses.append(step({**batch, "x": batch["x"].to(torch.bfloat16)}, i % 2 == 1))
    return losses


def sharding() -> ModelParallelStrategy:
    def shard(model: Any, mesh: Any) -> Any:
        for part in (model.first, model.block, model):
            fully_shard(part, mesh=mesh["data_parallel"])
        return model

    return ModelParallelStrategy(shard, data_parallel_size=2, tensor_parallel_size=1)


def example(lab: Lab, *flags: str) -> Any:
    """``examples/torchrun_loop.py``, in processes that are initialized already."""
    with pytest.MonkeyPatch.context() as patched:
        for name in ("init_process_group", "destroy_process_group"):
            patched.setattr(torch.distributed, name, nothing)
        patched.setattr(sys, "argv", ["torchrun_loop.py", *flags])
        own = lightning_graphs.capture

        def capture(*given: Any, **_: Any) -> Any:
            patched.setattr(lightning_graphs, "capture", own)
            return lab.capture(*given)

        patched.setattr(lightning_graphs, "capture", capture)
        return runpy.run_path(str(ROOT / "examples/torchrun_loop.py"))["losses"]


CASES: dict[str, Callable[[Lab], Any]] = {
    "Fabric, DDP": partial(of_fabric, strategy=lambda: "ddp"),
    "Fabric, FSDP2": partial(of_fabric, strategy=sharding),
    "plain": plain,
    "no_sync around the call": surrounded,
    "no_sync": accumulated,
    "views of buckets": partial(plain, gradient_as_bucket_view=True),
    "no_sync, views of buckets": partial(accumulated, gradient_as_bucket_view=True),
    "two wrappers": adversarial,
    "example": example,
    "example, FSDP2": lambda lab: example(lab, "--fsdp"),
    "FSDP2": sharded,
    "FSDP2, added up": partial(sharded, every=2),
    "FSDP2, gathered twice": partial(sharded, reshard_after_forward=True),
}


def run_twice(rank: int, backend: str, case: str) -> Any:
    """Run a loop both ways; return what was replayed, and the state after it."""
    with processes(rank, backend) as device:
        lab = twice(CASES[case], backend, device)
        for step in lab.steps:
            assert step.report.replayed >= 8, step.report
        model = next(one for one in lab.given if isinstance(one, nn.Module))
        parameters = [p.tolist() for p in model.parameters() if p is local(p)]
        return [step.report.replayed for step in lab.steps], parameters


def require_equal(backend: str, case: str) -> None:
    """Assert that a loop is equal with graphs and without, and that ranks end with one model."""
    first, second = run_on_ranks(run_twice, backend, case)
    assert first == second


# ---------------------------------------------------------------------- decisions


def training(lab: Lab, **options: Any) -> tuple[Callable[..., Tensor], Any, Any]:
    """Make a function that trains under DDP; return it, its model and its optimizer."""
    model = wrapped(lab.net(), lab, **options)
    optimizer = adamw(model)

    def train_step(batch: Any, reads: bool = False) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        for _ in range(int(loss.item()) if reads else 0):
            loss = loss / 2
        optimizer.step()
        return loss.detach()

    return train_step, model, optimizer


def other_shapes(lab: Lab) -> Any:
    """One rank has a smaller batch in some calls, which are eager on all ranks."""
    step, rank = lab.capture(*training(lab)), torch.distributed.get_rank()
    small = {"x": slice(8), "y": slice(8)}
    cut = [
        {k: v[small[k]] for k, v in b.items()} if rank and i % 5 == 4 else b
        for i, b in enumerate(batches(lab, 40))
    ]
    return [step(batch) for batch in cut]


def reading_on_one(lab: Lab) -> Any:
    """One rank reads on the host, which no rank captures then."""
    step = lab.capture(*training(lab), on_failure="eager")
    reads = torch.distributed.get_rank() == 1
    return [step(batch, reads=reads) for batch in batches(lab, 20)]


def leaving_out(lab: Lab) -> Any:
    """DDP looks for parameters that get no gradient."""
    given = training(lab, find_unused_parameters=True)
    step = lab.capture(*given, on_failure="eager")
    return [step(batch) for batch in batches(lab, 16)]


def joined(lab: Lab) -> Any:
    """Ranks end after different numbers of calls."""
    function, model, optimizer = training(lab)
    step, rank = (
        lab.capture(function, model, optimizer, on_failure="eager"),
        torch.distributed.get_rank(),
    )
    with model.join():
        return [step(batch) for batch in batches(lab, 16 + 2 * rank)]


def gathering(lab: Lab) -> Any:
    """Gradients are summed by the function itself."""
    model = lab.net()
    optimizer = adamw(model)

    def train_step(batch: Any) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        for parameter in model.parameters():
            torch.distributed.all_reduce(parameter.grad)
        optimizer.step()
        return loss.detach()

    step = lab.capture(train_step, model, optimizer, on_failure="eager")
    return [step(batch) for batch in batches(lab, 16)]


def differing(lab: Lab) -> Any:
    """One rank reads a clock, gets another weight for some calls, and runs one eagerly."""
    model = wrapped(lab.net(), lab)
    optimizer, is_odd = adamw(model), torch.distributed.get_rank() == 1
    settings, times = SimpleNamespace(weight=1.0), []

    def train_step(batch: Any) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, batch) * settings.weight
        loss.backward()
        optimizer.step()
        if is_odd:
            times.append(time.monotonic())
        return loss.detach()

    step, losses = lab.capture(train_step, model, optimizer), []
    for i, batch in enumerate(batches(lab, 40)):
        settings.weight = 2.0 if is_odd and 20 < i < 28 else 1.0
        with step.eager() if is_odd and i == 34 else nullcontext():
            losses.append(step(batch))
    return losses, len(times)


def evaluated(lab: Lab) -> Any:
    """Each rank evaluates as many batches as it has, after some calls that train."""
    function, model, _ = training(lab)

    @torch.no_grad()
    def evaluate(batch: Any) -> Tensor:
        return loss_of(model, batch)

    evaluation, rank = lab.capture(evaluate, model), torch.distributed.get_rank()
    found = []
    for _ in range(3):
        model.train()
        found += [function(batch) for batch in batches(lab, 3)]
        model.eval()
        found += [evaluation(batch) for batch in batches(lab, 8 + 3 * rank)]
    return found


DECISIONS: dict[Callable[[Lab], Any], str] = {
    other_shapes: "",
    differing: "",
    evaluated: "",
    reading_on_one: r"on rank 1: .*in train_step: for _ in range\(int\(loss.item",
    leaving_out: "find_unused_parameters=True reads on the host.*requires_grad_",
    joined: "lets ranks end after different numbers of calls",
    gathering: "its eager calls exchange data with other processes",
}
"""Loop -> what the first rank says of why its calls are eager; empty if they are replayed."""


def decided(rank: int, backend: str) -> tuple[list[tuple[str, int, list[str]]], bool]:
    """Run loops in which ranks differ, or that are refused; return what was replayed and said.

    In the end process groups are destroyed while there are graphs: whether these were released.
    """
    found = []
    with processes(rank, backend) as device:
        for loop in DECISIONS:
            lab = twice(loop, backend, device)
            (step,) = lab.steps
            found.append((loop.__name__, step.report.replayed, [*step.report.fallbacks]))
        lab = Lab(backend, device, {})
        function, model, optimizer = training(lab)
        step = lab.capture(function, model, optimizer)
        for batch in batches(lab, 20):
            step(batch)
        had_graphs = "step" in vars(optimizer)
    return found, had_graphs and "step" not in vars(optimizer)


def require_decisions(backend: str) -> None:
    """Assert that ranks go the same way, and that the first one says why calls are eager."""
    (first, *released), (second, *others) = run_on_ranks(decided, backend)
    assert [*released, *others] == [True, True]
    for (loop, said), (name, replayed, why), (_, again, _) in zip(
        DECISIONS.items(), first, second, strict=True
    ):
        assert replayed == again or loop is evaluated, name
        assert (replayed > 8) is not bool(said), name
        assert re.search(said, "\n".join(why), re.DOTALL), (name, why)
