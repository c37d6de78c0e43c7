"""The ``lightning-graphs`` command: each part once as a process, its errors in this one."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

import lightning_graphs
from lightning_graphs import cli
from lightning_graphs.core import driver
from lightning_graphs.errors import UnsupportedError
from lightning_graphs.reporting import Report
from tests.processes import ROOT, environment

TRAIN = """
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch.utils.data import DataLoader


class Data(LightningDataModule):
    def __init__(self, count: int = 6) -> None:
        super().__init__()
        self.count = count

    def train_dataloader(self):
        return DataLoader([{"x": torch.ones(4, 8)} for _ in range(self.count)], batch_size=None)


class Clean(LightningModule):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.net = torch.nn.Linear(8, width)

    def training_step(self, batch, batch_idx):
        return self.net(batch["x"]).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), fused=True)


class Reading(Clean):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        print("loss", loss.item())
        return loss


class Manual(Clean):
    def __init__(self, width: int = 4) -> None:
        super().__init__(width)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        self.optimizers().zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        self.optimizers().step()


class Failing(Clean):
    def training_step(self, batch, batch_idx):
        raise ValueError("no such batch")
"""

CONFIG = """\
seed_everything: 1
trainer:
  accelerator: cpu
  max_epochs: 2
  callbacks:
    - class_path: lightning_graphs.GraphCapture
      init_args: {capture_after: 1}
    - class_path: lightning.pytorch.callbacks.ModelCheckpoint
model:
  class_path: %(module)s.Clean
  init_args:
    width: 4
data:
  class_path: %(module)s.Data
ckpt_path: null
"""

Project = Callable[..., Path]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    """Makes the working directory a project; returns its configuration, with changes."""
    pytest.importorskip("jsonargparse")
    module = f"train_{tmp_path.name}"
    (tmp_path / f"{module}.py").write_text(TRAIN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", ["lightning-graphs"])
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")  # Lightning sets it, and it goes after the test

    def configuration(*changes: tuple[str, str], name: str = "config.yaml") -> Path:
        text = CONFIG % {"module": module}
        for old, new in changes:
            assert old in text
            text = text.replace(old, new)
        path = tmp_path / name
        path.write_text(text)
        return path

    return configuration


def run(*arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "lightning_graphs", *map(str, arguments)],
        cwd=cwd, env=environment(OMP_NUM_THREADS="1"), capture_output=True, text=True, check=False,
    )  # fmt: skip


class TestAsAProcess:
    def test_doctor(self, project: Project, tmp_path: Path) -> None:
        config = project((".Clean", ".Reading"))
        done = run("doctor", "--config", config, "--steps=2", "--json", cwd=tmp_path)
        assert done.returncode == cli.OBSTACLES, done.stderr
        read = json.loads(done.stdout)  # what the module prints is not among it
        assert read["steps"] == 2
        assert [row["kind"] for row in read["findings"]] == ["host-read", "python-state"]
        for row in read["findings"]:
            assert row["count"] == 2
            assert row["source"] == 'print("loss", loss.item())'
            assert Path(row["file"]).parent == tmp_path
        assert "loss" in done.stderr
        assert "Traceback" not in done.stderr
        written = {p.name for p in tmp_path.iterdir() if p.name != "__pycache__"}
        assert written == {config.name, f"train_{tmp_path.name}.py"}

    def test_inspect(self, tmp_path: Path) -> None:
        report = tmp_path / "report.json"
        report.write_text(Report(replayed=7, eager=3).to_json())
        done = run("inspect", report, cwd=tmp_path)
        assert (done.returncode, done.stderr) == (cli.CLEAN, "")
        assert "7" in done.stdout
        assert "3" in done.stdout

    def test_env(self, tmp_path: Path) -> None:
        done = run("env", "--json", cwd=tmp_path)
        assert (done.returncode, done.stderr) == (cli.CLEAN, "")
        read = json.loads(done.stdout)
        assert read["versions"]["lightning-graphs"] == lightning_graphs.__version__
        abilities = {each["name"]: each for each in read["abilities"]}
        assert abilities["capture on a GPU"]["works"] is torch.cuda.is_available()
        assert abilities["rehearsal"]["works"] is True
        if not torch.cuda.is_available():
            assert "torch.cuda.is_available() is False" in abilities["capture on a GPU"]["details"]


class TestDoctor:
    def test_nothing_in_the_way(self, project: Project, capsys: pytest.CaptureFixture[str]) -> None:
        code = cli.main(["doctor", "-c", str(project()), "--data.count=3"])
        assert code == cli.CLEAN
        assert "nothing stands in the way (3 training steps observed)" in capsys.readouterr().out

    @pytest.mark.parametrize(
        ("change", "line", "text"),
        [
            (("width: 4", "widht: 4"), 12, "widht"),
            (("width: 4", "width: four"), 12, "four"),
            (("max_epochs", "max_epoch"), 4, "max_epoch"),
            ((".Clean", ".Missing"), 10, "Missing"),
            (("capture_after: 1", "capture_aftr: 1"), 7, "capture_aftr"),
        ],
        ids=["key", "value", "option of the trainer", "class", "option of the callback"],
    )
    def test_errors_name_key_and_line(
        self,
        project: Project,
        capsys: pytest.CaptureFixture[str],
        change: tuple[str, str],
        line: int,
        text: str,
    ) -> None:
        config = project(change)
        assert cli.main(["doctor", "--config", str(config)]) == cli.BAD_INPUT
        error = capsys.readouterr().err
        assert error.startswith(f"lightning-graphs doctor: {config}, line {line}: ")
        assert text in error

    @pytest.mark.parametrize(
        ("content", "text"),
        [
            ("trainer:\n  a: [1\nmodel: x\n", "line 3, column 6: expected ',' or ']'"),
            ("- 1\n", "a configuration is a mapping"),
            (b"\xff\xfe\x00".decode("latin-1"), "special characters are not allowed"),
        ],
        ids=["syntax", "list", "binary"],
    )
    def test_files_that_are_no_configuration(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, text: str
    ) -> None:
        config = tmp_path / "config.yaml"
        config.write_text(content)
        assert cli.main(["doctor", "--config", str(config)]) == cli.BAD_INPUT
        error = capsys.readouterr().err
        assert str(config) in error
        assert text in error

    def test_a_missing_file(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["doctor", "--config", str(tmp_path / "no.yaml")]) == cli.BAD_INPUT
        assert "no.yaml: there is no such file" in capsys.readouterr().err

    def test_no_configuration(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["doctor"]) == cli.BAD_INPUT
        assert "write --config config.yaml" in capsys.readouterr().err

    def test_classes_that_only_the_program_knows(
        self, project: Project, capsys: pytest.CaptureFixture[str]
    ) -> None:
        module = f"train_{Path.cwd().name}"
        config = project(
            (f"  class_path: {module}.Clean\n  init_args:\n    width: 4", "  width: 4"),
            (f"data:\n  class_path: {module}.Data", "data:\n  count: 3"),
        )
        assert cli.main(["doctor", "--config", str(config)]) == cli.BAD_INPUT
        error = capsys.readouterr().err
        assert "Name class_path under model and data:" in error
        assert "model:\n  class_path: your_module.YourModel\n  init_args:\n    width: 4" in error
        assert "data:\n  class_path: your_module.YourData\n  init_args:\n    count: 3" in error
        assert "Union" not in error

    def test_manual_optimization_is_no_obstacle_unless_whole_steps_are_wanted(
        self, project: Project, capsys: pytest.CaptureFixture[str]
    ) -> None:
        arguments = ["doctor", "--config"]
        assert cli.main([*arguments, str(project((".Clean", ".Manual")))]) == cli.CLEAN
        assert "nothing stands in the way, 1 remark" in capsys.readouterr().out
        whole = project((".Clean", ".Manual"), ("capture_after: 1", "scope: step"))
        assert cli.main([*arguments, str(whole)]) == cli.OBSTACLES

    def test_a_file_that_is_nested_too_deeply(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        config = tmp_path / "config.yaml"
        config.write_text("[" * 5000)
        assert cli.main(["doctor", "--config", str(config)]) == cli.BAD_INPUT
        assert f"{config}: it is nested too deeply" in capsys.readouterr().err

    def test_an_exception_of_the_module(
        self, project: Project, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert cli.main(["doctor", "--config", str(project((".Clean", ".Failing")))]) == (
            cli.BAD_INPUT
        )
        error = capsys.readouterr().err
        assert "the fit failed with ValueError: no such batch, at " in error
        assert 'in training_step: raise ValueError("no such batch")' in error

    def test_a_loader_without_batches(
        self, project: Project, capsys: pytest.CaptureFixture[str]
    ) -> None:
        code = cli.main(["doctor", "--config", str(project()), "--data.count=0"])
        assert code == cli.BAD_INPUT
        assert "has the data loader any batches?" in capsys.readouterr().err

    def test_without_jsonargparse(
        self,
        project: Project,
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setitem(sys.modules, "jsonargparse", None)
        assert cli.main(["doctor", "--config", str(project())]) == cli.BAD_INPUT
        assert 'pip install "lightning-graphs[cli]"' in capsys.readouterr().err


class TestInspect:
    def test_a_page_that_is_never_overwritten(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        report, page = tmp_path / "report.json", tmp_path / "report.html"
        report.write_text(Report(replayed=7).to_json())
        arguments = ["inspect", str(report), "--html", str(page)]
        assert cli.main(arguments) == cli.CLEAN
        assert "<html" in (text := page.read_text())
        assert capsys.readouterr().out.strip() == str(page)
        assert cli.main(arguments) == cli.BAD_INPUT
        assert str(page) in capsys.readouterr().err
        assert page.read_text() == text

    @pytest.mark.parametrize(
        ("content", "text"),
        [("{", "line 1"), ("[]", "no object with version"), (None, "there is no such file")],
    )
    def test_no_report(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: Any, text: str
    ) -> None:
        report = tmp_path / "report.json"
        if content is not None:
            report.write_text(content)
        assert cli.main(["inspect", str(report)]) == cli.BAD_INPUT
        error = capsys.readouterr().err
        assert error.startswith(f"lightning-graphs inspect: {report}: ")
        assert text in error


class TestEnv:
    def test_versions_and_abilities(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["env"]) == cli.CLEAN
        lines = capsys.readouterr().out.splitlines()
        assert f"torch             {version('torch')}" in lines
        assert any(
            line.startswith("rehearsal         yes: GraphCapture(backend=") for line in lines
        )

    def test_a_version_that_is_too_old(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(importlib.metadata, "requires", lambda name: ["torch>=99"])
        assert cli.main(["env"]) == cli.CLEAN
        assert "versions          no: torch>=99 is required, found: " in capsys.readouterr().out

    def test_what_does_not_work_says_why(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
        assert cli.main(["env"]) == cli.CLEAN
        lines = capsys.readouterr().out.splitlines()
        (line,) = [each for each in lines if each.startswith("cuda-python       no: ")]
        assert 'pip install "cuda-python' in line

    def test_one_reason_is_said_once(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def missing() -> None:
            raise UnsupportedError("There is a driver.", "no library was found.", "install one")

        monkeypatch.setattr(driver, "driver", missing)
        assert cli.main(["env"]) == cli.CLEAN
        lines = capsys.readouterr().out.splitlines()
        assert "cuda-python       no: no library was found; install one" in lines
        assert "driver            no: see cuda-python" in lines

    @pytest.mark.parametrize("version", ["13.0", None])
    def test_the_remedy_is_one_for_this_build_of_torch(
        self,
        version: str | None,
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(torch.version, "cuda", version)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        assert cli.main(["env"]) == cli.CLEAN
        out = capsys.readouterr().out
        assert ("no NVIDIA driver or GPU is visible" in out) is (version is not None)
        assert ("install a CUDA build of torch" in out) is (version is None)


class TestCommandLine:
    def test_version(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit, match="0"):
            cli.main(["--version"])
        assert capsys.readouterr().out == f"lightning-graphs {lightning_graphs.__version__}\n"

    def test_a_reader_that_has_gone(self, tmp_path: Path) -> None:
        reader, writer = os.pipe()
        os.close(reader)
        done = subprocess.run(
            [sys.executable, "-m", "lightning_graphs", "env"],
            cwd=tmp_path, env=environment(),
            stdout=writer, stderr=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
        os.close(writer)
        assert (done.returncode, done.stderr) == (cli.READER_GONE, "")

    @pytest.mark.parametrize(
        ("arguments", "text"),
        [
            ([], "the following arguments are required: command"),
            (["cure"], "invalid choice: 'cure'"),
            (["env", "--colour"], "unrecognized arguments: --colour"),
            (["doctor", "--steps", "0"], "argument --steps: 0 is not at least 1"),
            (["doctor", "--steps", "few"], "argument --steps: invalid"),
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
            "import sys\nfrom lightning_graphs import cli\n"
            "try:\n    cli.main(['--help'])\n"
            "except SystemExit as done:\n    print(done.code, 'torch' in sys.modules)"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
        )
        assert done.stdout.splitlines()[-1] == "0 False"
