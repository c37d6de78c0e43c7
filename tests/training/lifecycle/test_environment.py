"""``LIGHTNING_GRAPHS``: graphs for a program that does not know of them."""

from __future__ import annotations

import json
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
from lightning.fabric import Fabric
from lightning.pytorch import Trainer

from lightning_graphs import GraphCapture
from lightning_graphs.errors import GraphError, UnsupportedError
from lightning_graphs.lightning import callback
from lightning_graphs.lightning.plugins import callbacks
from tests.test_package import run_python
from tests.training.fits import assert_nothing_left, compare, prepare

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[3]
GROUPS = {
    "lightning.pytorch": "lightning.pytorch.callbacks_factory",
    "pytorch_lightning": "pytorch_lightning.callbacks_factory",
}
FABRIC = "lightning.fabric.callbacks_factory"


@pytest.fixture(autouse=True)
def _installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The entry point as an installation would have it, also where the package is not installed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    metadata = tmp_path / "site" / "lightning_graphs-0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Name: lightning-graphs\nVersion: 0\n", encoding="utf-8")
    listed = [
        f"[{group}]\nlightning_graphs = {project['entry-points'][group]['lightning_graphs']}\n"
        for group in (*GROUPS.values(), FABRIC)
    ]
    (metadata / "entry_points.txt").write_text("".join(listed), encoding="utf-8")
    monkeypatch.syspath_prepend(str(metadata.parent))
    monkeypatch.delenv("LIGHTNING_GRAPHS", raising=False)
    monkeypatch.chdir(tmp_path)


def trainer_of(library: str = "lightning.pytorch", **options: Any) -> Trainer:
    trainer: Trainer = pytest.importorskip(library).Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        **options,
    )
    return trainer


def found(trainer: Trainer) -> list[GraphCapture]:
    return [one for one in trainer.callbacks if isinstance(one, GraphCapture)]


@pytest.mark.parametrize("library", GROUPS)
def test_every_trainer_finds_the_factory(monkeypatch: pytest.MonkeyPatch, library: str) -> None:
    points = entry_points(group=GROUPS[library])
    assert [point.load() for point in points].count(callbacks) == 1
    assert found(trainer_of(library)) == []
    monkeypatch.setenv("LIGHTNING_GRAPHS", "1")
    [one] = found(trainer_of(library))
    assert one.options == GraphCapture().options


@pytest.mark.parametrize("given", [GraphCapture, lambda: [GraphCapture()]])
def test_a_fabric_is_told_what_to_write_when_it_is_made(given: Any) -> None:
    with pytest.raises(UnsupportedError, match="Trainer") as caught:
        Fabric(accelerator="cpu", devices=1, callbacks=given())
    assert "step = lightning_graphs.capture(train_step, model, optimizer)" in caught.value.remedy


@pytest.mark.parametrize("value", ["", "1"])
def test_a_fabric_says_that_the_variable_is_for_trainers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, value: str
) -> None:
    monkeypatch.setenv("LIGHTNING_GRAPHS", value)
    with caplog.at_level("INFO"):
        Fabric(accelerator="cpu", devices=1)
    said = [m for m in caplog.messages if "lightning_graphs.capture(" in m]
    assert len(said) == len(value)


@pytest.mark.parametrize("value", ["", "0", " ", "false", "off", "No"])
def test_it_is_off(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("LIGHTNING_GRAPHS", value)
    assert callbacks() == []


@pytest.mark.parametrize(
    ("value", "options"),
    [
        ("true", {}),
        ("on", {}),
        ("Yes", {}),
        ("auto", {}),
        ("step", {"scope": "step"}),
        ("modules", {"scope": "modules"}),
        ("diagnose", {"diagnose": True}),
        ("doctor", {"diagnose": True}),
        ("verify: off", {"verify": False}),
    ],
)
def test_words_that_one_would_try(
    monkeypatch: pytest.MonkeyPatch, value: str, options: dict[str, Any]
) -> None:
    monkeypatch.setenv("LIGHTNING_GRAPHS", value)
    [one] = callbacks()
    assert isinstance(one, GraphCapture)
    assert one.options == GraphCapture(**options).options


def test_while_it_is_off_nothing_is_imported() -> None:
    code = (
        "import sys, lightning_graphs.lightning.plugins as p\n"
        "print(p.callbacks(), 'torch' in sys.modules, 'yaml' in sys.modules)"
    )
    assert run_python(code) == "[] False False"


def test_a_fit_with_the_variable_is_one_with_the_callback(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    eager = prepare(backend, tmp_path, False).run()
    monkeypatch.setenv("LIGHTNING_GRAPHS", f"{{backend: {backend}, on_failure: raise}}")
    captured = prepare(backend, tmp_path, False)
    [captured.capture] = found(captured.trainer)
    compare(eager, captured.run())
    assert_nothing_left(captured)


def test_an_explicit_callback_wins(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(callback, "rank_zero_info", said.append)
    eager = prepare(backend, tmp_path, False).run()
    monkeypatch.setenv("LIGHTNING_GRAPHS", "max_graphs: 1")
    captured = prepare(backend, tmp_path, True)
    other = next(one for one in found(captured.trainer) if one is not captured.capture)
    compare(eager, captured.run())
    assert found(captured.trainer) == [captured.capture]
    assert other.report.replayed == 0
    assert said[0] == (
        "LIGHTNING_GRAPHS is set, and the trainer has a GraphCapture of its own: that one is used."
    )
    assert not any("LIGHTNING_GRAPHS" in text for text in said[1:])


OPTIONS = {"scope": "step", "warmup_steps": 5, "on_failure": "raise"}
FILES = {
    "graphs.yaml": "# Options\nscope: step\nwarmup_steps: 5\non_failure: raise\n",
    "graphs.yml": "{scope: step, 'warmup_steps': 5, on_failure: raise}\n",
    "graphs.json": json.dumps(OPTIONS, indent=2),
}


@pytest.mark.parametrize("name", FILES)
def test_options_of_a_file(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    Path(name).write_text(FILES[name], encoding="utf-8")
    monkeypatch.setenv("LIGHTNING_GRAPHS", name)
    [one] = callbacks()
    assert isinstance(one, GraphCapture)
    assert one.options == GraphCapture(**OPTIONS).options  # type: ignore[arg-type]


def test_options_in_the_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_GRAPHS", "scope: step\nwarmup_steps: 5\non_failure: raise")
    [one] = callbacks()
    assert isinstance(one, GraphCapture)
    assert one.options == GraphCapture(**OPTIONS).options  # type: ignore[arg-type]


def test_an_empty_file_asks_for_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("graphs.yaml").write_text("# nothing yet\n", encoding="utf-8")
    monkeypatch.setenv("LIGHTNING_GRAPHS", "graphs.yaml")
    [one] = callbacks()
    assert isinstance(one, GraphCapture)
    assert one.options == GraphCapture().options


WRONG = [
    # An unknown option.
    ("a.yaml", "scope: step\nmax_graph: 3\n", r"a\.yaml: .*'max_graph'\n.*write 'max_graphs'"),
    ("a.yaml", "zzz: 3\n", r"a\.yaml: .*'zzz'\n  Fix: write one of scope, .*backend"),
    ("a.json", '{\n  "scope": "step",\n  "colour": 1\n}', r"a\.json: .*'colour'"),
    ("a.yaml", "validation: true\n", r"a\.yaml: .*'validation'\n.*write 'evaluation'"),
    ("a.yaml", "1: 3\n", r"write one 'name: value' a line"),
    # An impossible value.
    ("a.yaml", "scope: step\n\nmax_graphs: 0\n", r"a\.yaml: max_graphs must be .*, got 0\n"),
    ("a.yml", "{scope: step,\n warmup_steps: soon}\n", r"a\.yml: warmup_steps .*, got 'soon'"),
    ("a.json", '{"scope": "all"}', r"a\.json: scope must be .*, got 'all'"),
    # What the format itself refuses, and what only an unsafe loader would take.
    ("a.yaml", "scope: step\nmodules: [a\n", r"a\.yaml must hold .*: .* line 3, "),
    ("a.json", '{"scope":\n "step"]', r"a\.json must hold .*: .* line 2, "),
    ("a.yaml", "scope: !!python/object/apply:os.getcwd []\n", r"a\.yaml must .*: could not determ"),
    ("a.yaml", "- scope\n", r"got '- scope' in a\.yaml\n  Fix: write one 'name: value' a line"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "message"), WRONG)
def test_a_wrong_file_is_refused_by_key_and_line(
    monkeypatch: pytest.MonkeyPatch, name: str, text: str, message: str
) -> None:
    Path(name).write_text(text, encoding="utf-8")
    monkeypatch.setenv("LIGHTNING_GRAPHS", name)
    with pytest.raises(GraphError, match=message):
        callbacks()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("maybe", r"LIGHTNING_GRAPHS must be 0, 1, .*, got 'maybe'\n"),
        ("max_graphs: 0", r"LIGHTNING_GRAPHS: max_graphs must be .*, got 0\n"),
        ("graphs: 1", r"LIGHTNING_GRAPHS: .*'graphs'\n  Fix: write 'max_graphs'"),
        ("scope: [", r"LIGHTNING_GRAPHS must hold valid YAML or JSON: .* line 1, "),
        ("missing.yaml", r"missing\.yaml: .*No such file"),
    ],
)
def test_a_wrong_value_is_refused(
    monkeypatch: pytest.MonkeyPatch, value: str, message: str
) -> None:
    monkeypatch.setenv("LIGHTNING_GRAPHS", value)
    with pytest.raises(GraphError, match=message):
        trainer_of()
