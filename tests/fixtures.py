"""Fixtures of every test: the backend it runs on, its seed, and a check of what it left behind.

A plugin rather than a part of ``conftest.py``: the process that hands out tests needs none of it.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities import registry
from torch.utils._python_dispatch import _get_current_dispatch_mode, _pop_mode

from lightning_graphs import GraphCapture
from lightning_graphs.policy.options import OPTIONS
from tests.processes import ROOT, in_one_chunk

_BACKENDS = ["emulated"]
if torch.cuda.is_available():
    _BACKENDS.append("cuda")

# Threads that libraries start once and keep for the life of the process.
# "Dummy": a thread of C++ code that Python has met, such as autograd's; no code can join it.
_PROCESS_THREADS = ("TMonitor", "tqdm", "InductorSubproc", "Dummy", "subproc_")
_READER = "(_read_thread)"  # of the compiler's processes, which has no name of its own on torch 2.8
_JOIN_SECONDS = 5.0


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool:
    """Runs a test as pytest does, without seeking memory for frames meanwhile."""
    runner = item.config.pluginmanager.get_plugin("runner")
    return in_one_chunk(runner.pytest_runtest_protocol, item, nextitem)


@pytest.fixture
def interrupts_as_before() -> Iterator[None]:
    """Lightning ignores SIGINT after a KeyboardInterrupt."""
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session", autouse=True)
def _packages_are_searched_once() -> Iterator[None]:
    """Each trainer reads what every installed package offers: a tenth of the time of a fit."""
    known: dict[tuple[str, ...], Any] = {}

    def found(group: str) -> Any:
        places = (group, *sys.path)
        if places not in known:
            known[places] = entry_points(group=group)
        return known[places]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(registry, "entry_points", found)
        yield


@pytest.fixture(scope="session", autouse=True)
def _absent_devices_get_no_seed() -> Iterator[None]:
    """For each of them torch keeps the stack of every call that seeds, until it is initialized."""
    with pytest.MonkeyPatch.context() as patched:
        for device in (torch.cuda, torch.xpu, torch.mtia):
            if not device.is_available():
                patched.setattr(device, "manual_seed_all", lambda _: None)
        yield


@pytest.fixture(params=_BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    """The name of the backend under test: ``emulated``, and ``cuda`` where torch sees a GPU."""
    name: str = request.param
    return name


@pytest.fixture
def device(backend: str) -> torch.device:
    """The device on which the backend under test captures."""
    return torch.device("cuda" if backend == "cuda" else "cpu")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """The models are tiny: threads would spend their time waiting for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _quiet_lightning() -> Iterator[None]:
    """Lightning introduces every trainer with several lines."""
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    before = logger.level
    logger.setLevel(logging.WARNING)
    yield
    logger.setLevel(before)


@pytest.fixture(autouse=True)
def _captured_whether_it_pays_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests are short, and no capture would pay off in them."""
    defaults = {**(GraphCapture.__init__.__kwdefaults__ or {}), "only_if_faster": False}
    monkeypatch.setattr(GraphCapture.__init__, "__kwdefaults__", defaults)
    monkeypatch.setitem(OPTIONS, "only_if_faster", False)


@pytest.fixture(autouse=True)
def _no_dispatch_mode_left() -> Iterator[None]:
    """Fails a test that leaves a dispatch mode active, and takes it off for the next test."""
    yield
    left = []
    while (mode := _get_current_dispatch_mode()) is not None:
        left.append(type(mode).__name__)
        _pop_mode()
    if left:
        pytest.fail(f"the test left dispatch modes on the stack: {', '.join(left)}")


@pytest.fixture(autouse=True)
def _default_stream_again() -> Iterator[None]:
    """Fails a test that leaves another stream current than the default one of its device."""
    yield
    if not torch.cuda.is_initialized():
        return
    device = torch.cuda.current_device()  # by itself torch looks for one, which a test may hide
    stream, default = torch.cuda.current_stream(device), torch.cuda.default_stream(device)
    if stream != default:
        torch.cuda.set_stream(default)
        pytest.fail(f"the test left {stream} as the current stream")


@pytest.fixture(autouse=True)
def _no_thread_left() -> Iterator[None]:
    """Fails a test that leaves a Python thread running."""
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        if type(thread).__name__ in _PROCESS_THREADS or thread.name.startswith(_PROCESS_THREADS):
            continue
        if thread.name.endswith(_READER):
            continue
        # A thread that was told to end may need a moment to do so.
        thread.join(_JOIN_SECONDS)
        if thread.is_alive():
            pytest.fail(f"the test left a thread running: {thread.name}")


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """Imports a script of ``benchmarks/``; what it sets for its process is set back."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    lab = import_module("harness").Lab
    monkeypatch.setattr(lab, "clean", lambda _: None)  # of the whole test run: that takes seconds
    threads = torch.get_num_threads()
    yield import_module
    torch.set_num_threads(threads)


@pytest.fixture
def lab(script: Callable[[str], Any]) -> Any:
    """Where benchmarks run small, on the CPU."""
    return script("harness").Lab(dry=True)


@pytest.fixture
def workers_are_here(
    script: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The zoo's workers measure in this process, without the imports of another one."""

    def rows(path: str, names: list[str], flags: list[str], *_: Any) -> list[Any]:
        with monkeypatch.context() as worker:
            worker.setattr(sys, "stdin", [f"{name}\n" for name in names])
            worker.setattr(os, "dup2", lambda *_: None)  # it gives its standard output to others
            assert script(Path(path).stem).main([*flags, "--worker"]) == 0
        _, _, answers = capfd.readouterr().out.partition("ready\n")
        return [json.loads(line) for line in answers.splitlines() if line.startswith("{")]

    monkeypatch.setattr(script("zoo"), "in_processes", rows)
