"""The whole suite on the GPUs of a machine: every test file in a process of its own, side by side.

    python tests/on_gpus.py [--marked] [--jobs 26] [--seconds 400] [--logs DIRECTORY] [FILE ...]

Prints a line for each file, the tests that failed, and the sums. Exits with 1 if anything failed,
or was not done in time. ``--marked`` leaves out the tests that need no GPU: any machine runs them,
with ``pytest --every-row``. Files that need two GPUs see all of them, and run from the beginning;
the others see one. It works without pytest-timeout and pytest-xdist, too.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
OF_THE_CPU = {"test_environment.py", "test_soak.py", "test_zoo.py", "test_lightning_benchmarks.py"}
OF_MANY_ROWS = {
    f"test_{name}.py" for name in ("batches", "containers", "numbers", "schedules", "storing")
}
PROMISES = ("equal_or", "under_options", "submodules_agree", "doctor_agrees", "resumed")
"""Parts of the names of the tests of a table of programs: each has a process of its own there."""
OF_SEVERAL_GPUS = {"gpu/test_ddp.py", "gpu/test_fsdp.py", "gpu/test_other_devices.py"}
_COUNT = re.compile(r"(\d+) (passed|failed|errors?|skipped)")


def parts_of(path: Path) -> list[str]:
    """Selections of a file's tests, for one process each; "" is all of them."""
    if path.name not in OF_MANY_ROWS or path.parent.name != "programs":
        return [""]
    return [*PROMISES, f"not ({' or '.join(PROMISES)})"]


def chosen() -> list[Path]:
    """The longest files first: those of several GPUs, then by size."""
    found = [p for p in (ROOT / "tests").rglob("test_*.py") if p.name not in OF_THE_CPU]
    if torch.cuda.device_count() < 2:
        found = [path for path in found if not takes_several(path)]
    return sorted(found, key=lambda path: (not takes_several(path), -path.stat().st_size))


def takes_several(path: Path) -> bool:
    return path.relative_to(ROOT / "tests").as_posix() in OF_SEVERAL_GPUS


def run(path: Path, part: str, gpu: int, options: argparse.Namespace, until: float) -> Counter[str]:
    """Run a part of a file on one GPU, or on all of them."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    if not takes_several(path):
        environment["CUDA_VISIBLE_DEVICES"] = str(gpu)
    place = f"{path.relative_to(ROOT).as_posix().replace('/', '.')}.{part.partition(' ')[0]}"
    log = options.logs / f"{place.rstrip('.')}.log"
    command = [sys.executable, "-m", "pytest", str(path), "-q", "-p", "no:cacheprovider"]
    command += ["-m", "gpu"] if options.marked else []
    command += ["-k", part] if part else []
    started = time.monotonic()
    with log.open("w") as file:
        try:
            left = max(1.0, until - started)
            subprocess.run(
                [*command, "--tb=short"], stdout=file, stderr=file, env=environment, cwd=ROOT,
                timeout=left, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            file.write("\n1 errors: not done in time\n")
    last = log.read_text(errors="replace").rstrip().rpartition("\n")[2]
    found = Counter({kind.rstrip("s"): int(count) for count, kind in _COUNT.findall(last)})
    if not found and "deselected" not in last:
        found["error"] = 1
    name = path.relative_to(ROOT)
    print(f"{name} {part}: {last} [{time.monotonic() - started:.0f} s]", flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--marked", action="store_true", help="only the tests that need a GPU")
    parser.add_argument("--jobs", type=int, default=max(2, (os.cpu_count() or 4) * 4 // 5))
    parser.add_argument("--seconds", type=float, default=600, help="for all of them")
    parser.add_argument("--logs", type=Path, default=Path(tempfile.gettempdir()) / "suite")
    options = parser.parse_args()
    options.logs.mkdir(parents=True, exist_ok=True)
    files = [path.resolve() for path in options.files] or chosen()
    until = time.monotonic() + options.seconds
    gpus = itertools.cycle(range(max(1, torch.cuda.device_count())))
    total: Counter[str] = Counter()
    with ThreadPoolExecutor(options.jobs) as pool:
        parts = [(path, part) for path in files for part in parts_of(path)]
        for found in pool.map(lambda each, gpu: run(*each, gpu, options, until), parts, gpus):
            total += found
    for log in sorted(options.logs.glob("*.log")):
        failed = [
            x for x in log.read_text(errors="replace").splitlines() if re.match("FAILED|ERROR ", x)
        ]
        print(*failed, sep="\n", end="\n" if failed else "")
    kinds = ("passed", "failed", "error", "skipped")
    print(", ".join(f"{total[kind]} {kind}" for kind in kinds), f"in {len(files)} files")
    return int(bool(total["failed"] or total["error"]))


if __name__ == "__main__":
    sys.exit(main())
