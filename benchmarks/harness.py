"""What the benchmarks share: rows with a verdict, the two APIs, and a clock."""

from __future__ import annotations

import fcntl
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_graphs import core

ALONGSIDE = ("transformers", "timm", "tensordict", "nemo_toolkit", "torchtitan")
"""Packages whose version stands beside figures, where they are installed."""
PEAK_LIMIT, LAST_THIRD_LIMIT = 1.35, 1.10  # of memory, over that of eager training


@dataclass(frozen=True)
class Row:
    """One line of the result: a figure, what it may be at most, and whether results were right."""

    name: str
    figure: float
    unit: str
    limit: float | None
    correct: bool
    detail: str = ""

    @property
    def verdict(self) -> str:
        if not self.correct:
            return "WRONG RESULT"
        if self.limit is None or self.figure != self.figure:
            return ""
        return "PASS" if self.figure <= self.limit else "FAIL"


def verdict_of(rows: Sequence[Row]) -> str:
    """The worst of the verdicts."""
    verdicts = [row.verdict for row in rows]
    return next((bad for bad in ("WRONG RESULT", "FAIL") if bad in verdicts), "PASS")


class Ours:
    """This package's graphs."""

    def __init__(self, backend: core.BackendName) -> None:
        self.backend = backend

    def new_graph(self) -> Any:
        return core.CUDAGraph(backend=self.backend)

    def capture(self, graph: Any, pool: Any = None) -> AbstractContextManager[None]:
        return core.graph(graph, pool)

    def new_pool(self) -> Any:
        return core.graph_pool_handle(backend=self.backend)

    def callables(
        self, module: nn.Module, sample: tuple[Tensor, ...], pool: Any, **how: Any
    ) -> Any:
        return core.make_graphed_callables(module, sample, pool=pool, backend=self.backend, **how)


class Torchs:
    """torch's own graphs."""

    def new_graph(self) -> Any:
        return torch.cuda.CUDAGraph()

    def capture(self, graph: Any, pool: Any = None) -> AbstractContextManager[None]:
        return torch.cuda.graph(graph, pool)

    def new_pool(self) -> Any:
        return torch.cuda.graph_pool_handle()

    def callables(
        self, module: nn.Module, sample: tuple[Tensor, ...], pool: Any, **how: Any
    ) -> Any:
        return torch.cuda.make_graphed_callables(module, sample, pool=pool, **how)


class Lab:
    """Where the benchmark runs: both APIs, a clock and the sizes.

    In a dry run everything is small, runs on the CPU with the emulated backend in both places, and
    every time and every amount of memory is NaN.
    """

    def __init__(self, dry: bool) -> None:
        self.dry = dry
        if dry:
            torch.set_num_threads(1)  # tiny tensors: on a busy machine threads wait for each other
        self.device = torch.device("cpu" if dry else "cuda")
        self.ours = Ours("emulated" if dry else "cuda")
        self.theirs: Any = Ours("emulated") if dry else Torchs()
        self.rounds = 1 if dry else 4
        self.parameters = (4, 12) if dry else (100, 600)

    def calls(self, count: int) -> int:
        return min(count, 2) if self.dry else count

    def synchronize(self) -> None:
        if not self.dry:
            torch.cuda.synchronize()

    def wall(self, body: Callable[[], object], calls: int, *, drain: bool) -> float:
        """Microseconds per call; with ``drain`` until the GPU has finished, else CPU time only."""
        calls = self.calls(calls)
        self.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            body()
        if drain:
            self.synchronize()
        elapsed = time.perf_counter() - start
        self.synchronize()
        return float("nan") if self.dry else elapsed / calls * 1e6

    def moment(self) -> Any:
        """The moment at which the GPU will have done what it was given; in a dry run, now."""
        if self.dry:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def milliseconds(self, begin: Any, end: Any) -> float:
        """From one moment to another; waits for the GPU."""
        self.synchronize()
        elapsed: float = (end - begin) * 1e3 if self.dry else begin.elapsed_time(end)
        return elapsed

    def on_gpu(self, body: Callable[[], object], calls: int) -> float:
        """Microseconds per call between two CUDA events."""
        if self.dry:
            return self.wall(body, calls, drain=True)
        self.synchronize()
        begin = self.moment()
        for _ in range(calls):
            body()
        return self.milliseconds(begin, self.moment()) / calls * 1e3

    def medians(self, *measurements: Callable[[], float]) -> list[float]:
        """The median of each measurement; every second round runs them in reverse order."""
        found: list[list[float]] = [[] for _ in measurements]
        for i in range(2 * self.rounds):
            order = range(len(measurements))
            for j in reversed(order) if i % 2 else order:
                found[j].append(measurements[j]())
        return [statistics.median(values) for values in found]

    def clean(self) -> None:
        """Return what is free, and the cuBLAS workspaces: the next capture starts as any other."""
        gc.collect()
        if not self.dry:
            torch.cuda.synchronize()
            torch._C._cuda_clearCublasWorkspaces()
            torch.cuda.empty_cache()

    def reserved(self, pool: Any) -> float:
        """MiB that the allocator reserves for a private pool."""
        if self.dry:
            return float("nan")
        segments = torch.cuda.memory_snapshot()
        mine = (s["total_size"] for s in segments if tuple(s["segment_pool_id"]) == tuple(pool))
        return sum(mine) / 2**20

    @contextmanager
    def side_stream(self) -> Iterator[None]:
        if self.dry:
            yield
            return
        stream, before = torch.cuda.Stream(), torch.cuda.current_stream()
        stream.wait_stream(before)
        with torch.cuda.stream(stream):
            yield
        before.wait_stream(stream)


def of_trainers(lab: Lab) -> dict[str, Any]:
    """Options of a trainer on one device, in bf16, that writes and shows nothing but its bar."""
    return {
        "accelerator": "cpu" if lab.dry else "gpu",
        "devices": 1,
        "max_epochs": 1,
        "precision": "bf16-mixed",
        "logger": False,
        "enable_checkpointing": False,
        "enable_model_summary": False,
    }


# ---------------------------------------------------------------------- several processes


def measure_rows(*given: Any, path: Path | None, **how: Any) -> int:
    """Measure rows as :func:`measured_rows`, write a file, and return the exit status."""
    result = measured_rows(*given, **how)
    if path is not None:
        path.write_text(json.dumps(result, indent=1))
    return 0 if all(row["verdict"] == "PASS" for row in result["rows"]) else 1


def measured_rows(
    script: str,
    names: Sequence[str],
    flags: Sequence[str],
    measure: Callable[[str], dict[str, Any]],
    line: Callable[[dict[str, Any]], str],
    heading: str,
    *,
    jobs: int,
) -> dict[str, Any]:
    """Measure rows, print them, and return them with what they were measured on.

    Args:
        script: The benchmark: with ``--rows NAME --json PATH`` it measures one row.
        names: Names of the rows; of several, each is measured in a process of its own.
        flags: Further flags of the script.
        measure: Measures a row in this process.
        line: A row in words.
        heading: What is printed above the rows.
        jobs: Processes at a time.
    """
    environment = describe_environment()
    print(f"{environment}: {' '.join(sys.argv)}", heading, sep="\n", flush=True)
    rows = []
    alone = len(names) == 1
    for row in map(measure, names) if alone else _in_processes(script, names, flags, jobs):
        rows.append(row)
        print(line(row), flush=True)
    about = about_environment()
    return {"environment": environment, "about": about, "command": sys.argv, "rows": rows}


def _in_processes(
    script: str, names: Sequence[str], flags: Sequence[str], jobs: int
) -> Iterator[dict[str, Any]]:
    """What each row has written, in the order in which they end."""

    def run(name: str) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            written = Path(folder) / "rows.json"
            command = [sys.executable, script, "--rows", name, "--json", str(written), *flags]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if written.exists():
                found: dict[str, Any] = json.loads(written.read_text())["rows"][0]
                return found
        return {"row": name, "verdict": "CRASHED", "error": done.stderr[-2000:].strip()}

    with ThreadPoolExecutor(jobs) as pool:
        for done in as_completed([pool.submit(run, name) for name in names]):
            yield done.result()


@contextmanager
def gpu_time(*, alone: bool) -> Iterator[None]:
    """Wait until no other benchmark holds the GPU or, unless ``alone``, holds it for itself."""
    which = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    name = f"lightning-graphs-benchmarks-{os.getuid()}-{which}.lock"
    path = Path(tempfile.gettempdir()) / name
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        yield


def peak_memory() -> float:
    """MiB that torch's allocator has reserved at most since the last call; NaN without a GPU.

    Reserved is what others cannot have. What lies in the pools of graphs is no longer allocated.
    """
    if not torch.cuda.is_initialized():
        return float("nan")
    peak = torch.cuda.max_memory_reserved() / 2**20
    torch.cuda.reset_peak_memory_stats()
    return peak or float("nan")  # nothing was on the GPU


def about_environment() -> dict[str, str]:
    """Card, driver, versions and commit, to stand beside every figure."""
    has_gpu = torch.cuda.is_available()
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return {
        "card": torch.cuda.get_device_name() if has_gpu else "no GPU (rehearsal)",
        "driver": _first_line(asked) if has_gpu else "none",
        "torch": torch.__version__,
        "CUDA": str(torch.version.cuda),
        "lightning": version("lightning"),
        "Python": platform.python_version(),
        "commit": _commit(),
        **{name: version(name) for name in ALONGSIDE if _is_installed(name)},
    }


def _commit() -> str:
    here = Path(__file__).parent
    found = _first_line(["git", "-C", str(here), "rev-parse", "--short", "HEAD"])
    exported = (here / "commit.txt").read_text().strip()  # ``git archive`` fills it in
    return exported if found == "unknown" and not exported.startswith("$") else found


def _is_installed(name: str) -> bool:
    try:
        return bool(version(name))
    except PackageNotFoundError:
        return False


def _first_line(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return "unknown"
    return (done.stdout.splitlines() or ["unknown"])[0]


def describe_environment() -> str:
    """Card and versions in words."""
    about = about_environment()
    names = "driver", "torch", "CUDA", "lightning", "Python"
    return ", ".join([about["card"], *(f"{name} {about[name]}" for name in names)])
