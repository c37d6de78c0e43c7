"""The ``lightning-graphs`` command: each part once as a process, its errors in this one."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

import lightning_graphs
from lightning_graphs import __main__ as cli
from tests.processes import ROOT, environment


def run(*arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "lightning_graphs", *map(str, arguments)],
        cwd=cwd, env=environment(OMP_NUM_THREADS="1"), capture_output=True, text=True, check=False,
    )  # fmt: skip


class TestAsAProcess:
    def test_env(self, tmp_path: Path) -> None:
        done = run("--json", cwd=tmp_path)
        assert (done.returncode, done.stderr) == (0, "")
        read = json.loads(done.stdout)
        assert read["versions"]["lightning-graphs"] == lightning_graphs.__version__
        abilities = {each["name"]: each for each in read["abilities"]}
        assert abilities["capture on a GPU"]["works"] is torch.cuda.is_available()
        assert abilities["rehearsal"]["works"] is True
        if not torch.cuda.is_available():
            assert "torch.cuda.is_available() is False" in abilities["capture on a GPU"]["details"]


class TestEnv:
    def test_versions_and_abilities(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main([]) == 0
        out = capsys.readouterr().out
        lines = out.splitlines()
        assert f"torch             {version('torch')}" in lines
        assert any(
            line.startswith("rehearsal         yes: GraphCapture(backend=") for line in lines
        )

    def test_what_does_not_work_says_why(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
        assert cli.main([]) == 0
        lines = capsys.readouterr().out.splitlines()
        (line,) = [each for each in lines if each.startswith("kernel names      no: ")]
        assert 'pip install "cuda-python' in line

    @pytest.mark.parametrize("version", ["13.0", None])
    def test_the_remedy_is_one_for_this_build_of_torch(
        self,
        version: str | None,
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(torch.version, "cuda", version)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        assert cli.main([]) == 0
        out = capsys.readouterr().out
        assert ("no NVIDIA driver or GPU is visible" in out) is (version is not None)
        assert ("install a CUDA build of torch" in out) is (version is None)


class TestCommandLine:
    def test_version(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit, match="0"):
            cli.main(["--version"])
        assert capsys.readouterr().out == f"lightning-graphs {lightning_graphs.__version__}\n"

    @pytest.mark.parametrize(
        ("arguments", "text"),
        [
            (["cure"], "unrecognized arguments: cure"),
            (["--colour"], "unrecognized arguments: --colour"),
        ],
    )
    def test_usage_errors(
        self, arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit, match="2"):
            cli.main(arguments)
        assert text in capsys.readouterr().err

    def test_help_needs_no_torch(self, tmp_path: Path) -> None:
        code = (
            "import sys\nfrom lightning_graphs import __main__ as cli\n"
            "try:\n    cli.main(['--help'])\n"
            "except SystemExit as done:\n    print(done.code, 'torch' in sys.modules)"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
        )
        assert done.stdout.splitlines()[-1] == "0 False"
