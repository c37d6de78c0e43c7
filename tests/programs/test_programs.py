"""Every program of the tables, trained eagerly and with the callback, in each way there is."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.programs import table
from tests.programs.table import Program, eager, quiet, run
from tests.training.fits import TrainingContext
from tests.training.leftovers import assert_nothing_left

TOPICS = sorted(
    path.stem
    for path in Path(__file__).parent.glob("*.py")
    if path.stem not in ("table", Path(__file__).stem)
)
PROGRAMS: dict[str, Program] = {
    f"{topic}: {name}": program
    for topic in TOPICS
    for name, program in import_module(f"tests.programs.{topic}").ROWS.items()
}


def programs(*wanted: Any) -> Any:
    """Parametrizes by the programs of which all of ``wanted`` is true."""
    names = [name for name, each in PROGRAMS.items() if all(want(each) for want in wanted)]
    return pytest.mark.parametrize("name", names)


def assert_as_expected(program: Program, fit: TrainingContext) -> None:
    """Assert that steps were replayed or refused as the program says."""
    statistics, said = fit.statistics, "".join(fit.statistics.fallbacks)
    if program.said is not None:
        assert bool(said) == bool(program.said), said
        assert program.is_refused == (statistics.replayed == 0), statistics
    assert statistics.replayed >= (program.replayed or 0)
    if program.graphs is not None:
        graphs = program.graphs if isinstance(program.graphs, range) else [program.graphs]
        assert statistics.captures in graphs, statistics.recaptures
    if program.said and program.placed:
        table.assert_placed(program, said)
    if program.changes:
        begun = zip(statistics.recaptures, program.changes, strict=True)
        assert all(change.startswith(begins) for change, begins in begun), statistics.recaptures


@programs()
def test_equal_or_refused_with_its_line(backend: str, tmp_path: Path, name: str) -> None:
    """... and nothing is left behind in trainer, module and optimizers."""
    program = PROGRAMS[name]
    expected = eager(program, backend, tmp_path)
    if program.said == "":
        found = run(program, backend, tmp_path, True)
    else:
        with quiet(program.said):
            found = run(program, backend, tmp_path, True)
    table.assert_equal(expected, found)
    assert_as_expected(program, found.fit)
    assert_nothing_left(found.fit)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param(name, options, id=f"{name}, {options}")
        for name, program in PROGRAMS.items()
        for options in filter(None, program.also.split("; "))
    ],
)
def test_equal_under_options(backend: str, tmp_path: Path, name: str, options: str) -> None:
    program, given = PROGRAMS[name], table.OPTIONS[options]
    expected = eager(program, backend, tmp_path, given)
    with quiet():
        found = run(program, backend, tmp_path, True, given)
    table.assert_equal(expected, found)
    if program.said == "":
        assert found.fit.statistics.replayed > 0


@programs(lambda program: not program.by_modules)
def test_submodules_agree(backend: str, tmp_path: Path, name: str) -> None:
    program = PROGRAMS[name]
    expected = eager(program, backend, tmp_path)
    with quiet(program.below):
        found = run(program, backend, tmp_path, True, {"capture": {"scope": "modules"}})
    table.assert_equal(expected, found)
    if program.below == "":
        assert found.fit.statistics.fallbacks == []
        assert found.fit.statistics.replayed > 0


@programs()
def test_the_doctor_agrees(backend: str, tmp_path: Path, name: str) -> None:
    """It finds an obstacle where a run is refused, in the same words, and changes nothing."""
    program = PROGRAMS[name]
    expected = eager(program, backend, tmp_path)
    watched = run(program, backend, tmp_path, True, {"capture": {"diagnose": True}})
    table.assert_equal(expected, watched)
    obstacles = watched.fit.capture.report.diagnosis.obstacles
    if program.obstacle == "":
        assert obstacles == []
    elif program.obstacle is not None:
        with quiet():
            refused = run(program, "emulated", tmp_path, True)
        said = "".join(refused.fit.statistics.fallbacks)
        parts = ("rule", "remedy") if program.obstacle == "agrees" else ()
        words = [
            [f":{each.line} in", *(getattr(each, part).rstrip(".") for part in parts)]
            for each in obstacles
        ]
        assert any(all(map(said.__contains__, each)) for each in words), (said, obstacles)


@programs(lambda program: program.said == "" and program.resumes)
def test_resumed(backend: str, tmp_path: Path, name: str) -> None:
    """A fit that goes on from a checkpoint of a captured one."""
    program, path = PROGRAMS[name], tmp_path / "saved.ckpt"
    first = run(program, backend, tmp_path, True, {"max_epochs": 1})
    first.fit.trainer.save_checkpoint(path)
    options = {"max_epochs": 2}
    went_on = [
        run(program, backend, tmp_path, captured, options, ckpt_path=path)
        for captured in (False, True)
    ]
    table.assert_equal(*went_on)
    assert went_on[1].fit.statistics.replayed > 0
