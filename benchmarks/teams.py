"""Processes that train together, one for each rank, and that are told one fit after another."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import queue
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from step import be_quiet

context: Any = torch.multiprocessing.get_context("spawn")
"""What starts processes; a test exchanges it for a server that has imported all of this."""
if not torch.cuda.is_available():  # a process with CUDA in use could not be forked
    context = torch.multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["lightning.pytorch", "lightning_graphs.lightning.callback"])
_starting = threading.Lock()


class TeamError(RuntimeError):
    """A rank has raised, ended, or takes too long."""


class Team:
    """As many processes as ranks, each with a GPU of its own.

    Args:
        work: A function of a module, which every rank calls with what :meth:`ask` is given.
        gpus: Their numbers among the visible ones; without GPUs, any.
    """

    def __init__(self, work: Callable[..., Any], gpus: Sequence[int]) -> None:
        self._work, self.gpus = work, gpus
        self.processes: list[Any] = []

    def start(self) -> None:
        """Start the processes, which import what they need meanwhile."""
        ranks = len(self.gpus)
        self._results = context.Queue()
        self._asked = [context.Queue() for _ in range(ranks)]
        with _starting:  # other teams exchange the variable that is read
            variables = {"CUDA_VISIBLE_DEVICES": _visible(self.gpus)}
        given = [(self._work, rank, asked, self._results) for rank, asked in enumerate(self._asked)]
        self.processes = launched(_serve, given, variables)

    def ask(self, *arguments: Any, seconds: float) -> list[Any]:
        """What ``work(rank, *arguments)`` returns on each rank.

        Raises:
            TeamError: A rank has raised or ended, or they take longer. The processes are gone then.
        """
        if not self.processes:
            self.start()
        for asked in self._asked:
            asked.put(arguments)
        found: dict[int, Any] = {}
        until = time.monotonic() + seconds
        while len(found) < len(self.processes):
            try:
                rank, well, value = self._results.get(timeout=0.5)
            except queue.Empty:
                gone = {r: p.exitcode for r, p in enumerate(self.processes) if not p.is_alive()}
                if gone or time.monotonic() > until:
                    self._say_where()
                    self.kill()
                    said = f"ranks have ended: {gone}" if gone else f"longer than {seconds:.0f} s"
                    raise TeamError(said) from None
                continue
            if not well:
                self.kill()
                raise TeamError(f"rank {rank}: {value}")
            found[rank] = value
        return [found[rank] for rank in sorted(found)]

    def _say_where(self) -> None:
        """Let the processes print where they wait."""
        for process in self.processes:
            if process.is_alive():
                os.kill(process.pid, signal.SIGUSR1)
        time.sleep(1.0)

    def kill(self) -> None:
        """End the processes; the next question starts others."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        self.processes = []

    def end(self) -> None:
        """Let the processes end by themselves."""
        for asked in self._asked if self.processes else ():
            asked.put(None)
        for process in self.processes:
            process.join(20)
        self.kill()


def launched(
    target: Callable[..., Any], given: Sequence[tuple[Any, ...]], variables: dict[str, str]
) -> list[Any]:
    """Start a process for each rank, with the variables that torchrun sets if there are several.

    Args:
        target: A function of a module.
        given: What it is called with on each rank.
        variables: Further ones.
    """
    port, started = free_port(), []
    for rank, arguments in enumerate(given):
        own = dict(variables)
        if len(given) > 1:
            own |= as_launched(rank, len(given), port)
        process = context.Process(target=_begin, args=(own, target, *arguments), daemon=True)
        with _exchanged(own):  # what a process imports may ask for the cards there are
            process.start()
        started.append(process)
    return started


def _begin(variables: dict[str, str], target: Callable[..., Any], *arguments: Any) -> None:
    for name in as_launched(0, 1, 0).keys() - variables.keys():
        os.environ.pop(name, None)  # of what this one was forked from
    os.environ.update(variables)
    if not torch.cuda.is_available():
        torch.set_num_threads(1)
    target(*arguments)


def _serve(work: Callable[..., Any], rank: int, asked: Any, results: Any) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the progress bar
    be_quiet()
    while (arguments := asked.get()) is not None:
        faulthandler.register(signal.SIGUSR1)  # the end of a fit of Lightning takes it back
        try:
            value = work(rank, *arguments)
        except BaseException:
            results.put((rank, False, traceback.format_exc()[-3000:]))
            continue  # it is ended; other ranks may wait for it
        results.put((rank, True, value))


def as_launched(rank: int, ranks: int, port: int) -> dict[str, str]:
    """The variables that torchrun sets."""
    return {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "TORCHELASTIC_RUN_ID": "benchmark",
    }


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        found: int = one.getsockname()[1]
        return found


def _visible(gpus: Sequence[int]) -> str:
    """The cards with these numbers among the visible ones; empty without GPUs."""
    if not torch.cuda.is_available():
        return ""
    known = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = known.split(",") if known else [*map(str, range(torch.cuda.device_count()))]
    return ",".join(names[gpu] for gpu in gpus)


@contextlib.contextmanager
def _exchanged(variables: dict[str, str]) -> Iterator[None]:
    with _starting:
        saved = dict(os.environ)
        os.environ.update(variables)
        try:
            yield
        finally:
            os.environ.clear()
            os.environ.update(saved)
