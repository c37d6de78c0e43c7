"""What every test shares: the backend it runs on, its seed, and a check of what it left behind."""

from __future__ import annotations

import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode, _pop_mode

from lightning_graphs import GraphCapture

# A test for the GPU is absent from a CPU run rather than skipped: the count of what ran is the
# count of what was shown.
collect_ignore = [] if torch.cuda.is_available() else ["gpu"]
if torch.cuda.device_count() < 2:
    collect_ignore += ["gpu/test_ddp.py", "gpu/test_fsdp.py"]

_ROWS = 3
"""So many rows of a table of fits run on a CPU by default: eight to nine minutes on two cores."""
_BACKENDS = ["emulated"]
if torch.cuda.is_available():
    _BACKENDS.append("cuda")

# Threads that libraries start once and keep for the life of the process.
# "Dummy": a thread of C++ code that Python has met, such as autograd's; nobody can join it.
_PROCESS_THREADS = ("TMonitor", "tqdm", "InductorSubproc", "Dummy", "subproc_")
_JOIN_SECONDS = 5.0


@pytest.fixture(autouse=True)
def _nothing_was_compiled() -> None:
    """In a process that has compiled something no host half is recorded: each test begins anew."""
    if (compiler := sys.modules.get("torch._dynamo.utils")) is not None:
        compiler.counters.clear()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--every-row",
        action="store_true",
        default=torch.cuda.is_available(),
        help="run every row of the long tables of fits, as a machine with a GPU does",
    )


def pytest_report_header(config: pytest.Config) -> str:
    if config.getoption("--every-row"):
        return "tables of fits: every row"
    return f"tables of fits: {_ROWS} rows of each; --every-row, or a GPU, runs them all"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Thins out long tables, and marks what runs on a GPU: ``-m gpu`` selects exactly that."""
    here = Path(__file__).parent
    if not config.getoption("--every-row"):
        left_out = set(_further_rows(items, here))
        config.hook.pytest_deselected(items=[i for i in items if i in left_out])
        items[:] = [i for i in items if i not in left_out]
    for item in items:
        callspec = getattr(item, "callspec", None)
        on_cuda = callspec is not None and callspec.params.get("backend") == "cuda"
        if on_cuda or here / "gpu" in item.path.parents:
            item.add_marker(pytest.mark.gpu)


def _further_rows(items: list[pytest.Item], here: Path) -> Iterator[pytest.Item]:
    """Of each table of fits all rows but a few, which lie as far apart as they can."""
    tables: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.path.relative_to(here).parts[0] in ("training", "failures"):
            tables[item.nodeid.partition("[")[0]].append(item)
    for rows in tables.values():
        kept = {round(i * (len(rows) - 1) / (_ROWS - 1)) for i in range(_ROWS)}
        if len(rows) > _ROWS:
            yield from (item for i, item in enumerate(rows) if i not in kept)


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
def _captured_whether_it_pays_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests are short, and no capture would pay off in them."""
    defaults = {**(GraphCapture.__init__.__kwdefaults__ or {}), "only_if_faster": False}
    monkeypatch.setattr(GraphCapture.__init__, "__kwdefaults__", defaults)


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
        # A thread that was told to end may need a moment to do so.
        thread.join(_JOIN_SECONDS)
        if thread.is_alive():
            pytest.fail(f"the test left a thread running: {thread.name}")
