"""The long run, shortened: the same code on the emulated backend, and that it can fail."""

from __future__ import annotations

import gc
import json
import random
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.processes import run_script


@pytest.fixture
def soak(script: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script as a module, on the CPU."""
    gc.collect()
    gc.freeze()  # what there is by now: it looks for garbage time and again
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return script("soak")


@pytest.mark.filterwarnings("ignore")
def test_memory_is_bounded_and_a_killed_fit_goes_on(
    soak: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(command: list[str], **_: Any) -> Any:
        _, script, *arguments = command
        return run_script(Path(script), *arguments, CUDA_VISIBLE_DEVICES="")

    monkeypatch.setattr(soak.subprocess, "run", run)
    monkeypatch.chdir(tmp_path)
    written = tmp_path / "soak.json"
    short = ["--replays", "60", "--moves", "6", "--kills", "1", "--json", str(written)]
    assert soak.main(short) == 0
    found = json.loads(written.read_text())
    assert str(torch.__version__) in found["environment"]
    rows = {row["name"]: row for row in found["rows"]}
    assert {row["verdict"] for row in rows.values()} == {"PASS"}
    assert rows["60 replays, Python's memory grew by"]["detail"].startswith("60 replays, 1 cap")
    for scope in ("step", "modules"):
        changes = rows[f"6 recaptures, scope={scope!r}, resident memory grew by"]
        assert ", 6 captures" in changes["detail"]
    assert rows["1 kills: losses unlike those of an uninterrupted fit"]["figure"] == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["soak.json"]


@pytest.mark.filterwarnings("ignore")
def test_memory_that_grows_is_a_failure(soak: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[bytes] = []
    measured = soak.memory

    def leaking() -> dict[str, float]:
        kept.append(bytes(soak.MIB))
        found: dict[str, float] = measured()
        return found

    monkeypatch.setattr(soak, "memory", leaking)
    rows = {row.name: row for row in soak.replays(40)}
    row = rows["40 replays, Python's memory grew by"]
    assert row.figure > 5
    assert row.verdict == "FAIL"


def test_losses_that_differ_are_a_failure(soak: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*_: Any, **__: Any) -> Any:
        return SimpleNamespace(returncode=-signal.SIGKILL)

    def resumed(directory: Path, steps: int, killed_at: int) -> None:
        lines = [f"{step} 0x1p+{step}" for step in range(1, steps + 1)]
        lines.insert(20, "9 0x1.8p+9")  # trained once more, with another loss
        (directory / "losses.txt").write_text("\n".join(lines))

    def whole(scope: str, shape: Any, steps: int, callbacks: Any) -> None:
        lines = [f"{step} 0x1p+{step}" for step in range(1, steps + 1)]
        callbacks[0].path.write_text("\n".join(lines))

    monkeypatch.setattr(soak.subprocess, "run", killed)
    monkeypatch.setattr(soak, "resumed", resumed)
    monkeypatch.setattr(soak, "fit", whole)
    row = soak.kills(2, random.Random(0))
    assert row.figure == 1
    assert row.verdict == "WRONG RESULT"
