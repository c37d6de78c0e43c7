"""Other libraries' CUDA graphs around the same training step, for ``peers.py``.

``Loop`` has the ways that need no Trainer. Two libraries are taken by the one file that has their
graphs, since the packages around them import much that has nothing to do with it: NeMo's callback
for Lightning (``nemo_toolkit``) and torchtitan's wrapper (``torchtitan``).

In a rehearsal, without a GPU, what they call of ``torch.cuda`` is the emulated backend.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from importlib import metadata, util
from itertools import count, cycle, islice
from types import ModuleType
from typing import Any
from unittest import mock

import ddp
import step
import torch
from ddp import Fit, Steps
from harness import Lab, gpu_time, peak_memory
from lightning.pytorch import seed_everything
from step import TIMED, WARMUP, Module
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh

Figures = dict[str, Any]
CAPTURED_AT = 12
"""The first step that NeMo's callback may capture."""


def file_of(distribution: str, path: str) -> ModuleType:
    """Import one file of an installed distribution, anew, without the packages that it lies in.

    Raises:
        ImportError: It is not installed, or has no such file.
    """
    try:
        found = metadata.distribution(distribution)
    except metadata.PackageNotFoundError:
        raise ImportError(f"{distribution} is not installed") from None
    name = f"{distribution}_file"
    spec = util.spec_from_file_location(name, str(found.locate_file(path)))
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except FileNotFoundError:
        raise ImportError(f"{distribution} {found.version} has no {path}") from None
    return module


# ------------------ Rehearsals


class _Stream:
    """One that orders nothing, as the CPU does all in order."""

    def wait_stream(self, other: object) -> None: ...


@contextmanager
def cuda_of(lab: Lab) -> Iterator[None]:
    """In a rehearsal: let ``torch.cuda`` make graphs of the emulated backend."""
    if not lab.dry:
        yield
        return
    capturing = False

    @contextmanager
    def capture(graph: Any, pool: Any = None, **_: Any) -> Iterator[None]:
        nonlocal capturing
        capturing = True
        try:
            with lab.theirs.capture(graph, pool):
                yield
        finally:
            capturing = False

    emulated = {
        "CUDAGraph": lab.theirs.new_graph,
        "graph": capture,
        "graph_pool_handle": lab.theirs.new_pool,
        "Stream": _Stream,
        "stream": lambda stream: nullcontext(),
        "current_stream": _Stream,
        "synchronize": lambda: None,
        "is_current_stream_capturing": lambda: capturing,
    }
    stays = mock.patch.object(Tensor, "cuda", lambda tensor: tensor)
    with mock.patch.multiple(torch.cuda, **emulated), stays:
        yield


# ------------------ NeMo's callback, under Lightning


class NemoModule(Module):
    """As NeMo's callback wants it: a step of the batch alone, which logs nothing."""

    def training_step(self, batch: Any) -> Tensor:  # type: ignore[override]
        loss: Tensor = self.call(*batch)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("loss", outputs["loss"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        on_gpu = next(self.parameters()).is_cuda
        return torch.optim.AdamW(self.parameters(), lr=2.0**-13, fused=True, capturable=on_gpu)


class WaitingNemoModule(NemoModule):
    """Waits for each step: the callback copies the next batch to where a replay may yet read."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        torch.cuda.synchronize()


def nemo(row: str, size: int | None, lab: Lab, *, blocks: int, waits: bool = False) -> Figures:
    """Train with NeMo's callback."""
    theirs = file_of("nemo_toolkit", "nemo/utils/callbacks/cuda_graph.py")
    with cuda_of(lab):
        callback = theirs.CUDAGraphCallback(capture_iteration=CAPTURED_AT)
        how: Mapping[str, Any] = {"bar": False, "lab": lab, "size": size, "blocks": blocks}
        kind = WaitingNemoModule if waits else NemoModule
        return step.fit(row, callbacks=[callback], kind=kind, **how)


# ------------------ In a loop without a Trainer


class Loop:
    """What such a loop has: a model, its optimizer, and batches in pinned memory."""

    def __init__(self, net: nn.Module, items: Sequence[Sequence[Tensor]], lab: Lab) -> None:
        self.lab, self.items = lab, items
        if not lab.dry:
            self.items = [tuple(t.pin_memory() for t in item) for item in items]
        self.net = net.to(lab.device).train()
        self.optimizer = torch.optim.AdamW(
            self.net.parameters(), lr=2.0**-13, fused=True, capturable=not lab.dry
        )
        self.loss = self.net

    def here(self, batch: Sequence[Tensor]) -> tuple[Tensor, ...]:
        copy = self.lab.dry  # as if it came from the host
        return tuple(t.to(self.lab.device, non_blocking=True, copy=copy) for t in batch)

    def gradients(self, *batch: Tensor) -> Tensor:
        """Add the gradients of a batch that is on the device, and return the loss."""
        with torch.autocast(self.lab.device.type, torch.bfloat16, cache_enabled=False):
            loss: Tensor = self.loss(*batch)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def body(self, *batch: Tensor) -> Tensor:
        """Train on a batch that is on the device."""
        self.optimizer.zero_grad()
        loss = self.gradients(*batch)
        self.optimizer.step()
        return loss

    def graphed_callables(self) -> Callable[..., Tensor]:
        """torch's function around the model, which warms up on a sample, and an eager optimizer."""
        sample = self.here(self.items[0])
        autocast = torch.autocast(self.lab.device.type, torch.bfloat16, cache_enabled=False)
        with self._same_draws(), autocast:
            self.loss = self.lab.theirs.callables(self.net, sample, None)
        # The next call of the graph overwrites the loss
        return lambda *batch: self.body(*self.here(batch)).clone()

    @contextmanager
    def _same_draws(self) -> Iterator[None]:
        state = torch.get_rng_state() if self.lab.dry else torch.cuda.get_rng_state()
        yield
        (torch if self.lab.dry else torch.cuda).set_rng_state(state)  # type: ignore[attr-defined]

    def whole_graph(self) -> Callable[..., Tensor]:
        """A graph of the whole step, written by hand."""
        inputs = [t.clone() for t in self.here(self.items[0])]
        graph, calls = self.lab.theirs.new_graph(), count()
        loss = torch.empty(0)

        def train(*batch: Tensor) -> Tensor:
            nonlocal loss
            for static, tensor in zip(inputs, batch, strict=True):
                static.copy_(tensor, non_blocking=True)
            number = next(calls)
            if number < 3:
                with self.lab.side_stream():
                    return self.body(*inputs)
            if number == 3:
                self.optimizer.zero_grad()
                with self.lab.theirs.capture(graph):
                    loss = self.body(*inputs)
            graph.replay()
            return loss.clone()

        return train

    def graph_module(self) -> Callable[..., Tensor]:
        """tensordict's, around the whole step."""
        from tensordict.nn import CudaGraphModule

        train = CudaGraphModule(self.body, warmup=3)
        return lambda *batch: train(*self.here(batch))

    def titan(self) -> Callable[..., Tensor]:
        """torchtitan's, around forward and backward pass; gradients are zeroed in place."""
        theirs = file_of("torchtitan", "torchtitan/distributed/cudagraph.py")
        wrapped: Any = None

        def train(*batch: Tensor) -> Tensor:
            nonlocal wrapped
            here = self.here(batch)
            wrapped = wrapped or theirs.CUDAGraphWrapper(self.gradients, here)
            self.optimizer.zero_grad(set_to_none=False)
            loss: Tensor = wrapped(*here).clone()
            self.optimizer.step()
            return loss

        return train

    def timed(self, how: str, steps: Steps) -> tuple[list[float], list[float]]:
        """Train: milliseconds of a step in each block, and the losses of all steps."""
        losses: list[Tensor] = []
        times = []
        with cuda_of(self.lab):
            self.lab.clean()
            train = getattr(self, how)()
            for batch in islice(cycle(self.items), steps.warmup):
                losses.append(train(*batch).clone())
            begin = steps.warmup % len(self.items)
            for _ in range(steps.blocks):
                batches = list(islice(cycle(self.items), begin, begin + steps.timed))
                losses.append(train(*batches[0]).clone())
                first = self.lab.moment()
                losses += [train(*batch) for batch in batches[1:]]
                times.append(self.lab.milliseconds(first, self.lab.moment()) / (steps.timed - 1))
        return times, torch.stack(losses).tolist()


def in_loop(row: str, size: int | None, lab: Lab, *, how: str, blocks: int) -> Figures:
    """Train in a loop: milliseconds of a step in the fastest block, and the first losses."""
    seed_everything(1, verbose=False)
    net, batch = step.workload(row, size, lab)
    loop = Loop(net, [batch() for _ in range(4)], lab)
    with gpu_time(alone=True):
        times, losses = loop.timed(how, Steps(WARMUP, TIMED, blocks))
    return {"ms": min(times), "losses": losses}


# ------------------ On several GPUs


def on_rank(rank: int, fit: Fit, steps: Steps, tiny: bool) -> Figures:
    """Train on this rank as ``ddp.py`` does, or with torchtitan's wrapper in a loop under FSDP2."""
    if fit.how != "torchtitan":
        return ddp.train(rank, fit, steps, tiny)
    lab = Lab(tiny)
    if not tiny:
        torch.cuda.set_device(rank)
    if not distributed.is_initialized():
        distributed.init_process_group("gloo" if tiny else "nccl")
    seed_everything(1, verbose=False)
    net, batch = ddp.MODELS["tiny" if tiny else fit.model]()
    torch.manual_seed(rank)
    items = [batch() for _ in range(4)]
    ddp.shard(net, init_device_mesh(lab.device.type, (fit.ranks,)))
    peak_memory()
    times, losses = Loop(net, items, lab).timed("titan", steps)
    said = {"floors": [], "equal": True, "decisions": [], "trace": {}}
    losses = losses[: steps.warmup + steps.timed]
    return {"blocks": times, "losses": losses, "peak": peak_memory(), **said}
