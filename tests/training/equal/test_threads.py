"""Tensors that go to other threads, and come from them: these use the default stream."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from queue import Queue
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_graphs.device.cuda import joined_stream
from tests.training.fits import Net, batches, close, compare, prepare


def late(device: str) -> None:
    """Let the GPU be behind on the current stream."""
    if device == "cuda":
        torch.cuda._sleep(20_000_000)


class Late(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        late(self.device.type)
        return super().training_step(batch, batch_idx)


def test_a_thread_writes_checkpoints_of_what_was_trained(backend: str, tmp_path: Path) -> None:
    """Lightning copies a checkpoint on the stream of the steps, and hands it to an executor."""
    found = []
    for captured in (False, True):
        folder = tmp_path / str(captured)
        saving = ModelCheckpoint(folder, "{step}", every_n_train_steps=3, save_top_k=-1)
        fit = prepare(
            backend, tmp_path, captured, module=Late, validation=0, enable_checkpointing=True,
            callbacks=lambda saving=saving: [saving], plugins=[AsyncCheckpointIO()],
        ).run()  # fmt: skip
        saved = {file.name: torch.load(file, map_location="cpu") for file in folder.glob("*.ckpt")}
        found.append((fit, {name: each["state_dict"] for name, each in saved.items()}))
    (eager, expected), (replayed, written) = found
    compare(eager, replayed)
    assert len(written) == len(expected) == 6
    close(written, expected, 0.0, "checkpoints")


class Prefetched:
    """Batches that a thread moves to the device ahead of their steps."""

    def __init__(self, device: str) -> None:
        self._device = device

    def __len__(self) -> int:
        return 10

    def __iter__(self) -> Iterator[Any]:
        moved: Queue[dict[str, Tensor] | None] = Queue()

        def move() -> None:
            for batch in batches(10):
                late(self._device)
                moved.put({name: self._moved(tensor) for name, tensor in batch.items()})
            moved.put(None)

        thread = threading.Thread(target=move)
        thread.start()
        yield from iter(moved.get, None)
        thread.join()

    def _moved(self, tensor: Tensor) -> Tensor:
        """Copy it while this thread goes on."""
        if self._device == "cuda":
            tensor = tensor.pin_memory()
        return tensor.to(self._device, non_blocking=True)


def test_steps_wait_for_batches_that_a_thread_moves(backend: str, tmp_path: Path) -> None:
    device = "cuda" if backend == "cuda" else "cpu"
    data = lambda: Prefetched(device)  # noqa: E731
    fits = [prepare(backend, tmp_path, on, data=data, validation=0).run() for on in (False, True)]
    compare(*fits)


class Named:
    """In place of a stream of CUDA: notes what it waits for."""

    def __init__(self) -> None:
        self.waits: list[Named] = []

    def wait_stream(self, other: Named) -> None:
        self.waits.append(other)


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> tuple[Named, Named]:
    """The default stream, and one that a fit can run on, of a device that is not there."""
    default, own = Named(), Named()
    current: list[Any] = [default]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: current[-1])
    monkeypatch.setattr(torch.cuda, "default_stream", lambda _: default)
    monkeypatch.setattr(torch.cuda, "set_stream", current.append)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return default, own


def test_threads_of_the_package_itself_wait_for_no_stream(streams: tuple[Named, Named]) -> None:
    """They look after a device that may never end its work."""
    default, own = streams
    table = {"__name__": "lightning_graphs.regions.peers", "event": threading.Event()}
    stream: Any = own
    with joined_stream(torch.device("cuda"), stream):
        own.waits.clear()
        exec("event.set(); event.wait(); event.clear(); event.wait(0.0)", table)
        assert (default.waits, own.waits) == ([], [])
        queue = Queue[int]()
        queue.put(1)
        assert default.waits
        assert (queue.get(), {*default.waits}, own.waits) == (1, {own}, [default])
    assert default.waits.pop() is own


def test_forked_processes_wait_for_no_stream(streams: tuple[Named, Named]) -> None:
    """Workers of a loader start a thread for what they hand over; CUDA raises in them."""
    default, own = streams
    stream: Any = own
    with joined_stream(torch.device("cuda"), stream):
        worker = os.fork()
        if not worker:
            queue = Queue[int]()
            queue.put(1)
            queue.get()
            os._exit(len(default.waits))
    assert os.waitpid(worker, 0)[1] == 0


@pytest.mark.parametrize("kept", [False, True])
def test_workers_that_are_forked_within_a_fit(backend: str, tmp_path: Path, kept: bool) -> None:
    def data() -> Any:
        workers: dict[str, Any] = {"num_workers": 2, "persistent_workers": kept}
        return DataLoader(batches(8), batch_size=None, multiprocessing_context="fork", **workers)  # type: ignore[arg-type]

    fits = [prepare(backend, tmp_path, on, data=data).run() for on in (False, True)]
    compare(*fits)
    assert fits[1].statistics.replayed > 4
