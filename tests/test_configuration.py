"""Graphs switched on from the command line and from configuration files, without code."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_graphs import GraphCapture
from tests.processes import run_script
from tests.training.fits import Net, batches, compare, loader_of, prepare

pytest.importorskip("jsonargparse")
pytest.importorskip("hydra")
OmegaConf = pytest.importorskip("omegaconf").OmegaConf
LightningCLI = import_module("lightning.pytorch.cli").LightningCLI

# What Lightning says about tiny runs without workers.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*You are using a CUDA device:UserWarning"),
]

QUIET = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
Run = Callable[..., Any]


class Small(Net):
    """A module whose arguments a command line can leave alone."""

    def __init__(self) -> None:
        super().__init__()


class Rows(LightningDataModule):
    """Ten batches of one shape."""

    def train_dataloader(self) -> DataLoader[Any]:
        return loader_of(batches())

    def val_dataloader(self) -> DataLoader[Any]:
        return loader_of(batches(2))


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, device: torch.device) -> Run:
    """Runs a LightningCLI with the arguments, as from a shell, and returns it."""
    # Lightning 2.6 names an instantiator as newer versions of jsonargparse no longer do.
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
    monkeypatch.setattr(sys, "argv", ["train.py"])
    monkeypatch.chdir(tmp_path)
    given = [
        f"--trainer.accelerator={'gpu' if device.type == 'cuda' else 'cpu'}",
        "--trainer.devices=1",
        "--trainer.max_epochs=1",
        "--trainer.log_every_n_steps=1",
        *(f"--trainer.{name}=false" for name in QUIET),
    ]

    def run(*arguments: str, kind: type = LightningCLI) -> Any:
        return kind(
            Small,
            Rows,
            args=["fit", *given, *arguments],
            save_config_callback=None,
            seed_everything_default=0,
        )

    return run


def weights(cli: Any) -> list[Tensor]:
    return [p.detach().cpu() for p in cli.model.parameters()]


def graphs_of(cli: Any) -> GraphCapture:
    [found] = [one for one in cli.trainer.callbacks if isinstance(one, GraphCapture)]
    return found


def assert_as_eager(run: Any, eager: Any) -> None:
    """Five of ten steps were replays, and nothing else changed."""
    done = graphs_of(run)._statistics
    assert (done.captures, done.replayed, done.fallbacks) == (1, 5, [])
    torch.testing.assert_close(weights(run), weights(eager), rtol=0, atol=0)


def test_a_callback_in_a_configuration_file(cli: Run, backend: str, tmp_path: Path) -> None:
    written = tmp_path / "config.yaml"
    written.write_text(
        f"""
trainer:
  callbacks:
  - class_path: lightning_graphs.GraphCapture
    init_args:
      scope: step
      backend: {backend}
""",
        encoding="utf-8",
    )
    assert_as_eager(cli("--config", str(written)), cli())


def test_a_callback_appended_on_the_command_line(cli: Run, backend: str) -> None:
    run = cli(
        "--trainer.callbacks+=lightning.pytorch.callbacks.LambdaCallback",
        "--trainer.callbacks+=lightning_graphs.GraphCapture",
        "--trainer.callbacks.scope=step",
        f"--trainer.callbacks.backend={backend}",
    )
    assert_as_eager(run, cli())
    assert [type(one).__name__ for one in run.trainer.callbacks][:2] == [
        "LambdaCallback",
        "GraphCapture",
    ]


def test_the_short_name_works_where_the_class_was_imported(tmp_path: Path) -> None:
    # In a process of its own, which holds no other class of that name.
    program = tmp_path / "train.py"
    program.write_text(
        """
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning_graphs import GraphCapture
cli = LightningCLI(BoringModel, run=False, trainer_defaults={"accelerator": "cpu"})
print([one.options.max_graphs for one in cli.trainer.callbacks if type(one) is GraphCapture])
""",
        encoding="utf-8",
    )
    flags = ("--trainer.callbacks+=GraphCapture", "--trainer.callbacks.max_graphs=3")
    done = run_script(program, *flags)
    assert done.stdout.strip() == "[3]", done.stderr


def test_a_key_of_its_own(cli: Run, backend: str, tmp_path: Path) -> None:
    class WithGraphs(LightningCLI):
        def add_arguments_to_parser(self, parser: Any) -> None:
            parser.add_lightning_class_args(GraphCapture, "graphs")

    written = tmp_path / "config.yaml"
    written.write_text(f"graphs: {{scope: step, backend: {backend}}}\n", encoding="utf-8")
    run = cli("--config", str(written), "--graphs.max_graphs=3", kind=WithGraphs)
    assert_as_eager(run, cli())
    assert graphs_of(run).options.max_graphs == 3


def with_option(folder: Path, backend: str, option: str) -> str:
    """The path of a configuration file with one more option of the callback."""
    written = folder / "config.yaml"
    written.write_text(
        "trainer: {callbacks: [{class_path: lightning_graphs.GraphCapture, init_args: "
        f"{{backend: {backend}, scope: step, {option}}}}}]}}",
        encoding="utf-8",
    )
    return str(written)


def test_a_class_path_of_before(cli: Run, backend: str, tmp_path: Path) -> None:
    written = tmp_path / "config.yaml"
    written.write_text(
        "trainer: {callbacks: [{class_path: lightning_graphs.training.callback.GraphCapture, "
        f"init_args: {{backend: {backend}, max_graphs: 3}}}}]}}",
        encoding="utf-8",
    )
    assert graphs_of(cli("--config", str(written))).options.max_graphs == 3


def test_print_config_lists_every_option(cli: Run, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^0$"):
        cli("--trainer.callbacks+=lightning_graphs.GraphCapture", "--print_config")
    [callback] = OmegaConf.create(capsys.readouterr().out).trainer.callbacks
    assert callback.class_path == "lightning_graphs.GraphCapture"
    defaults = GraphCapture.__init__.__kwdefaults__
    assert callback.init_args == {
        name: list(value) if isinstance(value, tuple) else value for name, value in defaults.items()
    }


def test_the_help_text_is_the_docstring(cli: Run, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^0$"):
        cli("--trainer.callbacks.help=lightning_graphs.GraphCapture")
    helped = " ".join(capsys.readouterr().out.split())
    docstring = " ".join(str(GraphCapture.__doc__).split())
    assert "Real training steps that run eagerly before the first capture. (type: int" in helped
    for name in GraphCapture.__init__.__kwdefaults__:
        meaning = docstring.split(f" {name}: ")[1][:30]
        assert f"--trainer.callbacks.{name}" in helped
        assert meaning in helped, name


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("warmup_step: 3", r"Option 'warmup_step' is not accepted"),
        ("warmup_steps: soon", r'Parser key "warmup_steps":\s+Expected a <class .int.>'),
        ("scope: everything", r'Parser key "scope":\s+Expected .*Got value: everything'),
        ("max_graphs: 0", r"max_graphs must be a whole number of at least 1"),
    ],
)
def test_jsonargparse_names_what_is_wrong(
    cli: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str, said: str
) -> None:
    written = tmp_path / "config.yaml"
    written.write_text(
        "trainer: {callbacks: [{class_path: lightning_graphs.GraphCapture, "
        f"init_args: {{{option}}}}}]}}",
        encoding="utf-8",
    )
    with pytest.raises((SystemExit, ValueError), match=rf"^2$|{said}") as caught:
        cli("--config", str(written))
    assert re.search(said, capsys.readouterr().err + str(caught.value))


def test_hydra_makes_it_from_a_target(backend: str, tmp_path: Path) -> None:
    config = OmegaConf.create(
        {
            "_target_": "lightning_graphs.GraphCapture",
            "scope": "modules",
            "modules": ["net.*"],
            "exclude": ["net.1"],
            "backend": backend,
            "on_failure": "raise",
        }
    )
    eager = prepare(backend, tmp_path, False).run()
    captured = prepare(backend, tmp_path, True)
    made = import_module("hydra.utils").instantiate(config)
    captured.capture = captured.trainer.callbacks[-1] = made
    compare(eager, captured.run())
    assert list(captured.capture.options.modules) == ["net.*"]
