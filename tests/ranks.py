"""Several processes, one for each rank, that run the same function of a test."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import socket
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from tests.processes import forks, in_one_chunk

SECONDS = 120
"""How long the ranks of a test may take all in all; one that waits for ever is killed then."""


class RankError(AssertionError):
    """A rank has raised, ended, or not come to an end."""


def run_on_ranks(
    function: Callable[..., Any], *args: Any, ranks: int = 2, seconds: float = SECONDS
) -> list[Any]:
    """What ``function(rank, *args)`` returns on each rank.

    Args:
        function: A function of a module; it finds the environment that ``torchrun`` makes.
        args: Further arguments, the same for all.
        ranks: How many processes.
        seconds: How long they may take.

    Raises:
        RankError: one raised (with its traceback), died, or was still running at the end.
    """
    with _processes(function, args, ranks) as started:
        return _results(started, time.monotonic() + seconds)


@contextlib.contextmanager
def _processes(function: Callable[..., Any], args: Any, ranks: int) -> Iterator[list[Any]]:
    context = forks()
    port = _free_port()
    started = []
    try:
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_run, args=(function, args, rank, ranks, port, theirs), daemon=True
            )
            process.start()
            theirs.close()
            started.append((process, ours))
        yield started
    finally:
        for process, ours in started:
            process.kill()
            process.join()
            ours.close()


def _results(started: list[Any], deadline: float) -> list[Any]:
    found, failures = [], []
    for rank, (_, pipe) in enumerate(started):
        try:
            if not pipe.poll(max(0.0, deadline - time.monotonic())):
                raise RankError("it was still running")
            well, value = pipe.recv()
        except (EOFError, RankError) as error:
            well, value = False, str(error) or "its process has ended"
        if not well:
            failures.append(f"rank {rank}: {value}")
        found.append(value)
    for rank, (process, _) in enumerate(started):
        process.join(max(1.0, deadline - time.monotonic()))
        if process.is_alive():
            failures.append(f"rank {rank}: its process does not end")
    if failures:
        raise RankError("\n".join(failures))
    return found


def _run(
    function: Callable[..., Any], args: Any, rank: int, ranks: int, port: int, pipe: Any
) -> None:
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        GROUP_RANK="0",
        WORLD_SIZE=str(ranks),
        LOCAL_WORLD_SIZE=str(ranks),
        TORCHELASTIC_RUN_ID="test",
    )
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch.utilities.rank_zero").setLevel(logging.WARNING)
    warnings.simplefilter("ignore")
    try:
        result = in_one_chunk(function, rank, *args)
    except BaseException:
        pipe.send((False, traceback.format_exc()))
    else:
        pipe.send((True, result))
    pipe.close()


def _free_port() -> int:
    """A port that is free, and that no system gives to a connection meanwhile."""
    while True:
        port = random.SystemRandom().randrange(15_000, 32_000)  # below the ephemeral ones
        with socket.socket() as one, contextlib.suppress(OSError):
            one.bind(("127.0.0.1", port))
            return port


def state_of(module: torch.nn.Module) -> dict[str, Any]:
    """Parameters and buffers as lists, which ``==`` compares to the bit."""
    return {name: tensor.tolist() for name, tensor in module.state_dict().items()}


def in_folder(root: Path, rank: int) -> Path:
    """A folder of a rank's own."""
    folder = root / f"rank{rank}"
    folder.mkdir(exist_ok=True)
    return folder
