"""Scripts as they are written for a GPU: loaders, streams, threads, events, questions to it."""

from __future__ import annotations

import multiprocessing
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import DeviceStatsMonitor
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from tests.training.fits import Fit, Net, batches, close, compare, prepare

pytestmark = pytest.mark.gpu
STEPS = 12
GPU = torch.device("cuda")


def late() -> None:
    """Let the GPU be behind on the current stream."""
    torch.cuda._sleep(10_000_000)


# ------------------ Loaders


def samples() -> list[dict[str, Any]]:
    parts = batches(STEPS)
    return [{key: value[i] for key, value in batch.items()} for batch in parts for i in range(8)]


class Endless(IterableDataset[Any]):
    """Has no length."""

    def __iter__(self) -> Iterator[Any]:
        yield from samples()


def with_workers(**options: Any) -> DataLoader[Any]:
    options = {"num_workers": 2, "pin_memory": True, "multiprocessing_context": "fork", **options}
    return DataLoader(options.pop("data", samples()), batch_size=8, **options)


def validating(**options: Any) -> type[Net]:
    class Validating(Net):
        def val_dataloader(self) -> Any:
            return with_workers(**options)

    return Validating


class Ahead:
    """Moves the next batch on a stream of its own, as the prefetchers of timm and apex do."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()

    def __len__(self) -> int:
        return STEPS

    def __iter__(self) -> Iterator[Any]:
        ready: dict[str, Tensor] | None = None
        for batch in batches(STEPS):
            with torch.cuda.stream(self._stream):
                late()
                moved = {k: v.pin_memory().to(GPU, non_blocking=True) for k, v in batch.items()}
                moved["x"] = moved["x"].sub(0.25).div(0.5)
            if ready is not None:
                yield ready
            torch.cuda.current_stream().wait_stream(self._stream)
            ready = moved
            for tensor in moved.values():
                tensor.record_stream(torch.cuda.current_stream())
        yield ready


class InOneBuffer:
    """Fills the same memory of the GPU for every batch, as pipelines of DALI do."""

    def __init__(self) -> None:
        self._held = {key: value.to(GPU) for key, value in batches(1)[0].items()}

    def __len__(self) -> int:
        return STEPS

    def __iter__(self) -> Iterator[Any]:
        for batch in batches(STEPS):
            for key, value in batch.items():
                self._held[key].copy_(value)
            yield self._held


class MovedAside(Net):
    """Moves batches itself, on a stream of its own."""

    def on_fit_start(self) -> None:
        self.copies = torch.cuda.Stream()

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        with torch.cuda.stream(self.copies):
            late()
            moved = {k: v.pin_memory().to(device, non_blocking=True) for k, v in batch.items()}
        torch.cuda.current_stream().wait_stream(self.copies)
        return moved


class Augmented(Net):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        noise = torch.randn_like(batch["x"])
        return {**batch, "x": torch.where(noise > 1, batch["x"], batch["x"] + noise / 8)}


class Combined(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch["a"]) + self.loss(batch["b"])
        self.log("loss", loss, batch_size=8)
        return loss


LOADERS: dict[str, dict[str, Any]] = {
    "workers": {"data": with_workers},
    "workers that stay": {
        "data": lambda: with_workers(persistent_workers=True, prefetch_factor=4),
        "module": validating(persistent_workers=True),
        "val_check_interval": 5,
    },
    "workers that pin nothing": {"data": lambda: with_workers(pin_memory=False, num_workers=1)},
    "spawned workers": {
        "data": lambda: with_workers(
            num_workers=1, multiprocessing_context="spawn", persistent_workers=True
        ),
    },
    "no length": {
        "data": lambda: with_workers(data=Endless(), num_workers=1),
        "limit_train_batches": 9,
    },
    "two loaders": {
        "module": Combined,
        "data": lambda: CombinedLoader({"a": with_workers(), "b": with_workers(num_workers=1)}),
    },
    "ahead": {"data": Ahead},
    "one buffer": {"data": InOneBuffer},
    "moved aside": {"module": MovedAside},
    "augmented": {"module": Augmented},
}

# ------------------ Around the step


class Timed(Callback):
    """Times steps by events, as many scripts do for their throughput."""

    def __init__(self) -> None:
        self.ms: list[float] = []
        self._pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def on_train_batch_start(self, *_: Any) -> None:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        self._pairs.append((begin, end))

    def on_train_batch_end(self, *_: Any) -> None:
        self._pairs[-1][1].record()

    def on_train_epoch_end(self, *_: Any) -> None:
        torch.cuda.synchronize()
        self.ms += [begin.elapsed_time(end) for begin, end in self._pairs]
        assert all(0 < ms < 60_000 for ms in self.ms)
        self._pairs.clear()


class Measured(Callback):
    """Asks the card, and gives memory back."""

    def on_train_batch_start(self, *_: Any) -> None:
        torch.cuda.reset_peak_memory_stats()

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        torch.cuda.synchronize()
        assert torch.cuda.max_memory_allocated() >= torch.cuda.memory_allocated() > 0
        if batch_idx % 3 == 2:
            torch.cuda.empty_cache()
        asked = [sys.executable, "-c", "import sys; sys.stderr.write(input())"]
        done = subprocess.run(asked, input="86 C", capture_output=True, text=True, check=True)
        assert done.stderr == "86 C"


class Averaged(Callback):
    """Averages weights on a stream of its own."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self._stream = torch.cuda.Stream()
        self._means = [p.detach().clone() for p in pl_module.parameters()]

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            late()
            for mean, own in zip(self._means, pl_module.parameters(), strict=True):
                mean.lerp_(own.detach(), 0.25)
        torch.cuda.current_stream().wait_stream(self._stream)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        pl_module.found = self._means


class SavedByAThread(Callback):
    """Copies weights to pinned memory, and lets a thread wait for them and keep them."""

    def __init__(self) -> None:
        self._jobs: queue.Queue[Any] = queue.Queue()
        self._found: list[Any] = []

    def on_fit_start(self, *_: Any) -> None:
        self._thread = threading.Thread(target=self._keep)
        self._thread.start()

    def _keep(self) -> None:
        for event, copies in iter(self._jobs.get, None):
            event.synchronize()
            self._found.append([copy.clone() for copy in copies])

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        late()
        copies = [torch.empty_like(p, device="cpu").pin_memory() for p in pl_module.parameters()]
        for copy, own in zip(copies, pl_module.parameters(), strict=True):
            copy.copy_(own.detach(), non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._jobs.put((event, copies))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._jobs.put(None)
        self._thread.join()
        pl_module.found = self._found


class SummedByThreads(Callback):
    """Hands what steps give to an executor, which works on the default stream."""

    def on_train_start(self, *_: Any) -> None:
        self._threads = ThreadPoolExecutor(2)
        self._sums: list[Any] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
        late()
        loss = outputs["loss"].detach().clone()
        self._sums.append(self._threads.submit(lambda: (loss * 2).item()))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        pl_module.found = [each.result() for each in self._sums]
        self._threads.shutdown()


class Pooled(Callback):
    """Forks processes in the middle of a fit."""

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == STEPS // 2:
            pool = multiprocessing.get_context("fork").Pool(2)
            assert pool.map(abs, [-1, 2]) == [1, 2]
            pool.close()  # not terminate(): its SIGTERM is lost in Lightning's handler at times
            pool.join()


class Seeded(Net):
    """Seeds the GPU in each epoch, and draws from a generator of its own."""

    def on_train_epoch_start(self) -> None:
        torch.cuda.manual_seed(self.current_epoch)
        self.own = torch.Generator(GPU).manual_seed(3)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        noise = torch.rand(batch["x"].shape, generator=self.own, device=self.device)
        return super().training_step({**batch, "x": batch["x"] + noise}, batch_idx)


class Ranged(Net):
    """Marks parts of a step for a profiler."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        torch.cuda.nvtx.range_push("step")
        with torch.cuda.nvtx.range("forward"), torch.profiler.record_function("forward"):
            loss = super().training_step(batch, batch_idx)
        torch.cuda.nvtx.mark("loss")
        torch.cuda.nvtx.range_pop()
        return loss


class Compiling(Net):
    """All of its step is compiled, as by ``trainer.fit(torch.compile(module))``."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss


class Waiting(Net):
    """A replay waits, too."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        torch.cuda.synchronize()
        return loss


class WaitingForTheStream(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        torch.cuda.current_stream().synchronize()
        return loss


AROUND: dict[str, dict[str, Any]] = {
    "timed": {"callbacks": lambda: [Timed()]},
    "measured": {"callbacks": lambda: [Measured()]},
    "averaged": {"callbacks": lambda: [Averaged()]},
    "saved by a thread": {"callbacks": lambda: [SavedByAThread()]},
    "summed by threads": {"callbacks": lambda: [SummedByThreads()]},
    "pooled": {"callbacks": lambda: [Pooled()]},
    "seeded": {"module": Seeded},
    "ranged": {"module": Ranged},
    "compiled": {"module": lambda: torch.compile(Compiling()), "validation": 0},
    "waiting": {"module": Waiting},
    "waiting for the stream": {"module": WaitingForTheStream},
    "two at once": {
        "callbacks": lambda: [SavedByAThread(), Measured(), Timed()], "data": with_workers,
    },
}  # fmt: skip


def both(root: Path, **options: Any) -> tuple[Fit, Fit]:
    given = {"data": lambda: batches(STEPS), **options}
    eager, captured = (prepare("cuda", root, on, **given).run() for on in (False, True))
    return eager, captured


@pytest.mark.filterwarnings("default::UserWarning")  # torch's compiler warns where it will
@pytest.mark.parametrize("row", [*LOADERS, *AROUND])
def test_equal_and_replayed(tmp_path: Path, row: str) -> None:
    eager, captured = both(tmp_path, **(LOADERS | AROUND)[row])
    compare(eager, captured)
    assert captured.statistics.replayed > STEPS // 2
    found = [vars(fit.module).get("found") for fit in (captured, eager)]
    close(*found, 0.0, "found")


def test_statistics_of_the_device(tmp_path: Path) -> None:
    """Their figures are other ones with graphs; all else is the same."""
    fits = both(tmp_path, callbacks=lambda: [DeviceStatsMonitor()])
    columns = [fit.csv.partition("\n")[0].split(",") for fit in fits]
    assert columns[0] == columns[1]
    assert any("allocated" in name for name in columns[0])
    for fit in fits:
        fit.csv = ""
    compare(*fits)


def test_a_stream_of_the_script(tmp_path: Path) -> None:
    """Results of the fit are ready on the stream that is current where it begins."""
    with torch.cuda.stream(torch.cuda.Stream()):
        compare(*both(tmp_path, callbacks=lambda: [Averaged()]))


# ------------------ What no graph can hold


class TimingTheLoss(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        loss = super().training_step(batch, batch_idx)
        end.record()
        end.synchronize()
        assert begin.elapsed_time(end) > 0
        return loss


class EmptyingTheCache(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        torch.cuda.empty_cache()
        return super().training_step(batch, batch_idx)


class OfTorchsGraphs(Net):
    """Its network has graphs of torch already."""

    def on_fit_start(self) -> None:
        example = torch.randn(8, 8, device=self.device, requires_grad=True)
        graphed: Callable[..., Any] = torch.cuda.make_graphed_callables(self.net, (example,))
        self.graphed = [graphed]

    def loss(self, batch: Any) -> Tensor:
        output = self.graphed[0](batch["x"].requires_grad_())
        return torch.nn.functional.cross_entropy(output, batch["y"])


REFUSED = {
    TimingTheLoss: r"in training_step: assert begin(.|\n)*record events in hooks",
    EmptyingTheCache: None,
    OfTorchsGraphs: "in loss: output",
}


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")  # by torch's graphs
@pytest.mark.parametrize("module", REFUSED, ids=lambda module: module.__name__)
def test_equal_or_refused_with_its_line(tmp_path: Path, module: type[Net]) -> None:
    given: dict[str, Any] = {"module": module, "data": lambda: batches(STEPS), "validation": 0}
    eager = prepare("cuda", tmp_path, False, **given).run()
    captured = prepare("cuda", tmp_path, True, capture={"on_failure": "eager"}, **given)
    said = REFUSED[module]
    if said is None:
        captured.run()
    else:
        with pytest.warns(UserWarning, match=said):
            captured.run()
    compare(eager, captured, replayed=said is None)
