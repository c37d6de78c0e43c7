"""The benchmark of the core: its logic on the CPU, and what it says without a GPU."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

Printed = Callable[..., str]


@pytest.fixture
def printed(
    script: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Printed:
    """What ``benchmarks/core.py`` prints on a machine without a GPU."""

    def run(*arguments: str) -> str:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setattr(sys, "argv", ["core.py", *arguments])
        assert script("core").main() == 0
        return capsys.readouterr().out

    return run


def test_the_dry_run_checks_every_row_and_times_nothing(tmp_path: Path, printed: Printed) -> None:
    written = tmp_path / "rows.json"
    versions, *rows = printed("--dry-run", "--json", str(written)).splitlines()
    assert versions.startswith("card none")
    assert all(row.endswith(": results equal eager") for row in rows), rows
    names = [row.split(": results")[0] for row in rows]
    assert names[0] == "replay(): ours - torch's"
    for part in ("gradients None", "kept gradients", "MLP", "GPT-2", "capture time", "pool memory"):
        assert any(part in name for name in names), part
    assert len(set(names)) == len(names) == 23
    assert not written.exists()


def test_without_a_gpu_it_says_so_in_one_sentence(printed: Printed) -> None:
    said = "This benchmark needs a GPU: times on a CPU say nothing about CUDA graphs.\n"
    assert printed() == said
