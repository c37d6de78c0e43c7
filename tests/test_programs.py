"""Programs as people write them, on the CPU: a dozen rows of the table, and that it can fail."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

WHOLE = [
    "image classification with paths",  # Python values that no step reads
    "image classification with meta data",
    "a smaller last batch",
    "named tuple with names",
    "dataclass with sources",
    "graph network",  # a batch that is an object
    "token classification with texts",
    "several tasks with learned weights",
    "siamese network",
    "LoRA by hand",
    "mixup",  # draws of NumPy
    "translation with teacher forcing",  # a branch on a draw of Python
    "speech recognition (CTC)",
    "GAN of Lightning's examples",  # manual optimization
    "GAN whose generator rests",
    "WGAN with gradient penalty",
    "actor and critic",
    "cutmix",  # its draws are a head: they choose places with 25 values
]
SUBMODULES = {
    "LBFGS": "LBFGS calls the training step several times",
    "loss weighted by path": 'batch["path"][0] is read at ',
}


@pytest.fixture
def programs(script: Any) -> Any:
    return script("programs")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [*WHOLE, *SUBMODULES])
def test_a_program(programs: Any, lab: Any, name: str) -> None:
    found = programs.measure(name, lab)
    assert found["scope"] == ("whole step" if name in WHOLE else "submodules")
    assert SUBMODULES.get(name, "") in found["why"]
    assert (found["why"] == "") == (name in WHOLE)
    assert found["repeatable"]
    assert found["differs"] == ""
    assert len(set(found["losses"])) == len(found["losses"]) >= 20
    assert found["replayed"] >= 7


@pytest.mark.filterwarnings("ignore")
def test_a_program_that_is_wrong(programs: Any, lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(name: str, lab: Any, graphs: Any = None) -> Any:
        outcome = fit(name, lab, graphs)
        if graphs is not None:
            outcome.losses[-1] += 2**-30
        return outcome

    fit = programs.fit
    monkeypatch.setattr(programs, "fit", wrong)
    found = programs.measure("autoencoder", lab)
    assert found["repeatable"]
    assert found["differs"] == "losses"


@pytest.mark.parametrize(
    ("whole", "modules", "eager", "verdict"),
    [(75, 23, 2, "PASS"), (74, 25, 1, "FAIL"), (90, 7, 3, "FAIL")],
)
def test_limits(programs: Any, whole: int, modules: int, eager: int, verdict: str) -> None:
    counts = {"whole step": whole, "submodules": modules, "eager": eager}
    rows = [
        {"scope": scope, "repeatable": True, "differs": ""}
        for scope, count in counts.items()
        for _ in range(count)
    ]
    limits = {"not_whole": programs.NOT_WHOLE_LIMIT, "eager": programs.EAGER_LIMIT}
    summary = programs.zoo.summary(rows, limits=True, **limits)
    assert import_module("harness").verdict_of(summary) == verdict


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("workers_are_here")
def test_tables(programs: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    written, table = tmp_path / "rows.json", tmp_path / "programs.md"
    flags = ["--tiny", "--jobs", "1", "--limit", "300", "--rows", "autoencoder,LBFGS"]
    assert programs.main([*flags, "--json", str(written), "--markdown", str(table)]) == 1
    found = json.loads(written.read_text())
    assert [row["scope"] for row in found["rows"]] == ["whole step", "submodules"]
    assert found["verdict"] == "FAIL"  # half of them are no whole step
    said = "2 programs: 1 whole step, 1 submodules; equal to eager training to the last bit: 2 of 2"
    assert said in capfd.readouterr().out
    text = table.read_text()
    assert said in text
    assert "| autoencoder | whole step | 1 | 19 | equal |  |" in text
    with pytest.raises(SystemExit, match="2"):
        programs.main(["--tiny", "--rows", "no such program"])
    assert "there is no no such program" in capfd.readouterr().err
