"""The benchmark of the core: its logic on the CPU, and what it says without a GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.processes import ROOT, environment


def _run(*arguments: str) -> str:
    """What ``benchmarks/core.py`` prints on a machine without a GPU."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "core.py"), *arguments],
        env=environment(CUDA_VISIBLE_DEVICES=""),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_dry_run_checks_every_row_and_times_nothing(tmp_path: Path) -> None:
    written = tmp_path / "rows.json"
    versions, *rows = _run("--dry-run", "--json", str(written)).splitlines()
    assert versions.startswith("card none")
    assert all(row.endswith(": results equal eager") for row in rows), rows
    names = [row.split(": results")[0] for row in rows]
    assert names[0] == "replay(): ours - torch's"
    for part in ("gradients None", "kept gradients", "MLP", "GPT-2", "capture time", "pool memory"):
        assert any(part in name for name in names), part
    assert len(set(names)) == len(names) == 23
    assert not written.exists()


def test_without_a_gpu_it_says_so_in_one_sentence() -> None:
    said = "This benchmark needs a GPU: times on a CPU say nothing about CUDA graphs.\n"
    assert _run() == said
