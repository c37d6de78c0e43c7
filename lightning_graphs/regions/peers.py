"""Ranks whose process has ended: the others end, too, and say which one it was.

torch's watchdog of NCCL knows of collectives that it has started, not of those in graphs that are
replayed. If the process of a rank ends, the device of another waits for its data in a graph for
ever, and so does the host in whatever it reads there. So a thread of each rank waits for the others
to end. It sleeps in a system call, and a replayed step does nothing for it. Where a connection is
silent, the system asks for a sign of life: a node without power is noticed, too.
"""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import selectors
import socket
import struct
import sys
import threading
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, NoReturn

import torch

from lightning_graphs.errors import GraphError

PATIENCE = 10.0
"""Seconds in which a device ends the work that it has, or the host an exchange with others, unless
it waits for a rank that is gone."""
_LOOKS = 1.0
"""Seconds between two looks whether it does."""
_ALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""Seconds of silence, and between questions of the host; how many stay without an answer."""
_TOLD = 2.0
"""Seconds in which a rank is told which one is gone, when it has noticed that one is."""
_DISTRIBUTED = str(Path(torch.distributed.__file__).parent)
_LEAVES = -1
_KEY = 16  # bytes that only the ranks know
_NUMBER = struct.Struct("!i")
_CLOSED = ("closed by peer", "reset by peer", "Broken pipe", "Socket closed")


class PartedError(Exception):
    """Some ranks have failed that others wait for: it ends the program, as a refusal does not."""

    def __init__(self, rule: str, observed: str, remedy: str) -> None:
        super().__init__(str(GraphError(rule, observed, remedy)))


class Peers:
    """Notices when another rank's process ends, and ends this one where it would wait for ever.

    Rank 0 holds a connection to each of the others, and tells them all of one that is gone. All
    ranks make this together.

    Args:
        group: The group over gloo in which they agree.
    """

    def __init__(self, group: Any) -> None:
        self.lost: int | None = None
        self._is_connected, self._is_told = threading.Event(), threading.Event()
        self._is_closed, self._is_ended = threading.Event(), False
        self._uncaught = _uncaught()  # by a cell of a notebook, that this was forked from
        self._ends = threading.Lock()
        self._program = threading.get_ident()
        self._asked: queue.SimpleQueue[threading.Event | None] = queue.SimpleQueue()
        self._device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        if self._device is not None:
            wait = partial(_wait_for_device, self._device, self._asked)
            threading.Thread(target=wait, daemon=True).start()
        self._wakes, self._woken = socket.socketpair()
        self._open = [self._wakes, self._woken]
        self._others: dict[socket.socket, int] = {}
        self._thread: threading.Thread | None = None
        _alive.add(self)
        rank = torch.distributed.get_rank(group)
        found: list[Any] = [None]
        if rank == 0:
            with contextlib.suppress(OSError):  # without connections nothing is noticed
                server = socket.create_server(("", 0))
                self._open.append(server)
                found = [(*_addresses(), server.getsockname()[1], secrets.token_bytes(_KEY))]
        first = torch.distributed.get_global_rank(group, 0)
        torch.distributed.broadcast_object_list(found, first, group)
        if found[0] is not None:
            host, address, port, key = found[0]
            run = partial(self._follow, host, address, port, _NUMBER.pack(rank) + key)
            if rank == 0:
                run = partial(self._serve, server, key)
            self._thread = threading.Thread(target=self._run, args=(run,), daemon=True)
            self._thread.start()
            self._is_connected.wait(_TOLD)

    def close(self) -> None:
        """Stop to look; others take this rank for lost if an exception is handled, or ends it."""
        error = sys.exc_info()[1] or (None if _uncaught() is self._uncaught else _uncaught())
        self._is_ended = error is None
        if error is not None and not isinstance(error, PartedError) and self._is_gone(error):
            self._say()
        self._is_closed.set()
        self._asked.put(None)
        _alive.discard(self)
        with contextlib.suppress(OSError):
            self._wakes.send(b".")
        if self._thread is not None:
            self._thread.join(_TOLD)

    def are_parted(self, error: BaseException) -> bool:
        """Tell whether ranks could not exchange data on the host since one is gone.

        The device has ended its work then, so that an exception can be handled; if it does not,
        this process ends.
        """
        is_gone = self._is_gone(error)
        if is_gone:
            self._end_if_stuck()
        return is_gone

    def _is_gone(self, error: BaseException) -> bool:
        """Tell whether a rank is known to be gone, and wait to hear which if it seems so."""
        seems = any(said in str(error) for said in _CLOSED)
        return self._is_told.wait(_TOLD if seems else 0.0) or seems

    def _say(self) -> None:
        sys.stdout.flush()
        sys.stderr.write(f"lightning_graphs: {parted(self.lost)}\n")
        sys.stderr.flush()

    # ------------------ The thread

    def _run(self, run: Callable[[], None]) -> None:
        with contextlib.suppress(OSError):
            run()
        for one in self._others if self._is_ended else ():
            _tell(one, _LEAVES)
        self._is_connected.set()
        close(self._open)

    def _serve(self, server: socket.socket, key: bytes) -> None:
        """Hear of all others, as rank 0, and tell them."""
        self._is_connected.set()
        with selectors.DefaultSelector() as ready:
            for one in (server, self._woken):
                ready.register(one, selectors.EVENT_READ)
            while not self._is_closed.is_set():
                for found, _ in ready.select():
                    one = found.fileobj  # type: ignore[assignment]
                    if one is server:
                        if (other := self._accepted(server, key)) is not None:
                            ready.register(other, selectors.EVENT_READ)
                    elif one in self._others:
                        ready.unregister(one)
                        rank, said = self._others.pop(one), _heard(one)
                        for other in self._others if said is None else ():
                            _tell(other, rank)
                        self._hear(rank if said is None else said)

    def _accepted(self, server: socket.socket, key: bytes) -> socket.socket | None:
        """Return a connection to another rank; None if it is from elsewhere."""
        one, _ = server.accept()
        self._open.append(one)
        _keep_alive(one)
        one.settimeout(_TOLD)
        rank = _heard(one)
        with contextlib.suppress(OSError):
            if rank is not None and one.recv(_KEY, socket.MSG_WAITALL) == key:
                one.sendall(key)
                self._others[one] = rank
                return one
        return None

    def _follow(self, host: str, address: str, port: int, hello: bytes) -> None:
        """Hear what rank 0 tells, and of its own end."""
        address = "127.0.0.1" if host == socket.gethostname() else address
        one = socket.create_connection((address, port))
        self._open.append(one)
        _keep_alive(one)
        one.sendall(hello)
        if one.recv(_KEY, socket.MSG_WAITALL) != hello[-_KEY:]:  # something else listens there
            return
        self._others[one] = 0
        self._is_connected.set()
        with selectors.DefaultSelector() as ready:
            for each in (one, self._woken):
                ready.register(each, selectors.EVENT_READ)
            if all(found.fileobj is one for found, _ in ready.select()):
                said = _heard(one)
                self._hear(0 if said is None else said)

    def _hear(self, rank: int) -> None:
        """Note the first rank that is gone, and see to it that this one does not wait for ever."""
        if rank != _LEAVES and self.lost is None and not self._is_closed.is_set():
            self.lost = rank
            self._is_told.set()
            threading.Thread(target=self._look, daemon=True).start()

    def _look(self) -> None:
        """Look again and again, until the program has handled it."""
        place, since = None, perf_counter()
        while not self._is_closed.wait(_LOOKS):
            self._end_if_stuck()
            before, place = place, _exchanging(self._program)
            if place is None or place != before:
                since = perf_counter()
            if perf_counter() - since > PATIENCE:
                self._end()

    def _end_if_stuck(self) -> None:
        """End this process if its device waits for what never comes."""
        if self._device is None:
            return
        ended = threading.Event()
        self._asked.put(ended)
        if not ended.wait(PATIENCE):
            self._end()

    def _end(self) -> NoReturn:
        """End this process; no state in it is whole."""
        self._ends.acquire()  # one thread says it
        try:
            self._say()
        finally:
            os._exit(1)


def parted(rank: int | None) -> PartedError:
    """Make what the others raise when a rank is gone."""
    who = "another rank" if rank is None else f"rank {rank}"
    return PartedError(
        "No rank can go on when the process of one is gone.",
        f"{who} has ended",
        f"look for the error that {who} has said, for what has killed it (memory of the host, a "
        "limit of time), or why it has run fewer steps; then go on from the last checkpoint",
    )


def _wait_for_device(device: int, asked: queue.SimpleQueue[threading.Event | None]) -> None:
    """Set each event when the device has ended the work that it had by then.

    This thread makes the device its own before anything can be stuck: while another thread waits
    in the driver, that may wait as well, and would hold Python's lock.
    """
    torch.cuda.set_device(device)
    while (ended := asked.get()) is not None:
        with contextlib.suppress(RuntimeError):  # an error of the device ends its work, too
            torch.cuda.synchronize()
        ended.set()


def _uncaught() -> BaseException | None:
    """Return the exception that ends this process, or has ended a cell of a notebook."""
    return getattr(sys, "last_value", None)


def _exchanging(thread: int) -> tuple[Any, int] | None:
    """Return the place in torch.distributed at which a thread is; None if it is elsewhere."""
    frame = sys._current_frames().get(thread)
    if frame is None or _DISTRIBUTED not in frame.f_code.co_filename:
        return None
    return frame.f_code, frame.f_lasti


def _keep_alive(one: socket.socket) -> None:
    """Let the host close a connection whose other end does not answer."""
    one.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _ALIVE.items():
        if hasattr(socket, name):  # not on every system
            one.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _addresses() -> tuple[str, str]:
    """Return the name of this host, and where ranks on other hosts find it."""
    name = socket.gethostname()
    is_main = torch.distributed.get_rank() == 0
    return name, os.environ.get("MASTER_ADDR", name) if is_main else name


def _tell(one: socket.socket, rank: int) -> None:
    with contextlib.suppress(OSError):
        one.sendall(_NUMBER.pack(rank))


def _heard(one: socket.socket) -> int | None:
    """Return the number that was sent; None if the other end is closed."""
    with contextlib.suppress(OSError):
        data = one.recv(_NUMBER.size, socket.MSG_WAITALL)
        if len(data) == _NUMBER.size:
            return int(_NUMBER.unpack(data)[0])
    return None


def close(sockets: list[socket.socket]) -> None:
    """Close what this process has of them."""
    while sockets:
        sockets.pop().close()


_alive: weakref.WeakSet[Peers] = weakref.WeakSet()


def _forget() -> None:
    """Close connections in a child process: else a rank would not seem to end while it lives."""
    for peers in _alive:
        close(peers._open)


os.register_at_fork(after_in_child=_forget)
