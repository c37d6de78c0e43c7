"""What a program is: a module, the options of its fit, and what is expected of it.

Every file of this folder has a table ``ROWS`` of programs. The tests of :class:`Promises` run over
all of them, so that a row says what it is about and nothing of how it is tested.
"""

from __future__ import annotations

import contextlib
import inspect
import linecache
import re
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from torch import Tensor

from tests.training.fits import (
    Fit,
    FullTrace,
    GradientTrace,
    Net,
    assert_nothing_left,
    batches,
    compare,
    prepare,
)


def of_sizes(*sizes: int) -> Callable[[], list[dict[str, Tensor]]]:
    """Makes batches of these numbers of samples."""

    def data() -> list[dict[str, Tensor]]:
        return [
            {key: value[:size] for key, value in batch.items()}
            for batch, size in zip(batches(len(sizes), max(sizes)), sizes, strict=True)
        ]

    return data


OPTIONS: dict[str, dict[str, Any]] = {
    "unverified": {"capture": {"verify": False}},
    "verified": {"capture": {"verify": 3}},
    "auto": {"capture": {"scope": "auto"}},
    "modules, unverified": {"capture": {"scope": "modules", "verify": False}},
    "modules, verified": {"capture": {"scope": "modules", "verify": 3}},
    "auto, unverified": {"capture": {"scope": "auto", "verify": False}},
    "accumulated": {"accumulate_grad_batches": 2},
    "by threes": {"accumulate_grad_batches": 3},
    "gradients": {"trace": GradientTrace},
    "cut": {"trace": FullTrace},
    "cut, accumulated": {"trace": FullTrace, "accumulate_grad_batches": 2},
    "cut, by threes": {"trace": FullTrace, "accumulate_grad_batches": 3},
    "clipped": {"trace": GradientTrace, "gradient_clip_val": 0.1},
    "bf16": {"precision": "bf16-mixed"},
    "bf16-true": {"precision": "bf16-true"},
    "float64": {"precision": "64-true"},
    "in turn": {"data": of_sizes(*[8, 6] * 12), "max_epochs": 1},
}
"""Options under which programs are run again: ``Program.also`` names them."""


@dataclass(frozen=True)
class Program:
    """A module, the options of its fit, and what is expected of a fit with the callback.

    Of every program is expected that losses, parameters, logs and what its ``seen`` holds are those
    of eager training: as a whole step, by submodules, under further options, observed by the
    doctor, and resumed from a checkpoint.

    Attributes:
        module: Makes the module.
        said: "" if the whole step becomes graphs and nothing is refused; else a pattern of the
            refusal, of which the user is warned; None if either is right.
        replayed: So many steps are replayed at least. Of a program with ``said`` none may be
            replayed unless it has a number here.
        graphs: So many captures there are; a range of them; None: not counted.
        changes: Part of the reason for each further capture, in order.
        check: What is true of the captured fit besides.
        also: Names of ``OPTIONS`` under which it is run again, separated by "; ".
        modules: The submodules that a fit by submodules captures; all that can be if there is none.
        below: A fit by submodules: "" if all of them become graphs, a pattern of the refusal, None
            if either is right.
        found: The doctor: "" if it finds no obstacle; else which of "rule remedy line" of an
            obstacle are those of the refusal; None: not compared. By default "" if nothing is
            ``said``, all three if no step may be replayed.
        placed: The refusal names a line of the program's file, which ends with ``# read`` if a
            line of the module does.
        resumes: It can go on from a checkpoint.
        ignored: Pattern of warnings that are not the callback's.
        around: Makes a context that each fit runs in.
        outside: What a fit has left outside of its module.
        capture: Options of the callback.
        fit: Options of ``fits.prepare``.
    """

    module: Callable[[], Any] = Net
    said: str | None = ""
    replayed: int | None = None
    graphs: int | range | None = None
    changes: tuple[str, ...] = ()
    check: Callable[[Fit], object] = lambda fit: True
    also: str = ""
    modules: tuple[str, ...] = ()
    below: str | None = None
    found: str | None = "as said"
    placed: bool = True
    resumes: bool = True
    ignored: str = ""
    around: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext
    outside: Callable[[], object] = lambda: None
    capture: dict[str, Any] = field(default_factory=dict)
    fit: dict[str, Any] = field(default_factory=dict)

    @property
    def is_refused(self) -> bool:
        """No step of it may be replayed."""
        return bool(self.said) and self.replayed is None

    @property
    def obstacle(self) -> str | None:
        """What the doctor has to find."""
        if self.found != "as said":
            return self.found
        return "rule remedy line" if self.is_refused else ("" if self.said == "" else None)

    @property
    def by_modules(self) -> bool:
        """It is a program for submodules."""
        return self.capture.get("scope") == "modules"


def table(
    *kinds: Any, each: Mapping[Any, str] | None = None, capture: Any = None, **expected: Any
) -> dict[str, Program]:
    """Rows of modules of which the same is expected, by the names of the modules.

    Args:
        kinds: Classes or functions that make modules, or whole programs.
        each: Further ones, with what each of them has ``said``.
        capture: Options of the callback.
        expected: Further attributes; those that ``Program`` does not know are options of the fit.
    """
    known = {name: expected.pop(name) for name in [*expected] if name in _ATTRIBUTES}
    rows = {}
    for kind, said in [*((kind, None) for kind in kinds), *(each or {}).items()]:
        row = kind if isinstance(kind, Program) else Program(kind)
        row = replace(row, **known, **({} if said is None else {"said": said}))
        row = replace(row, fit={**row.fit, **expected}, capture={**row.capture, **(capture or {})})
        name = getattr(row.module, "__name__", type(row.module).__name__)
        assert name not in rows, name
        rows[name] = row
    return rows


def stepping(base: type[Net], *steps: Any, **expected: Any) -> dict[str, Program]:
    """Rows of functions, each of them the ``training_step`` of a class derived from ``base``."""
    each = {}
    for step, said in [*((s, None) for s in steps), *expected.pop("each", {}).items()]:
        each[type(step.__name__, (base,), {"training_step": step, "body": step})] = said
    plain = [kind for kind, said in each.items() if said is None]
    return table(*plain, each={k: s for k, s in each.items() if s is not None}, **expected)


_ATTRIBUTES = {*Program.__dataclass_fields__} - {"module", "capture", "fit"}


def row(module: Any = Net, *, capture: Any = None, **expected: Any) -> Program:
    """One row; what ``Program`` does not know are options of the fit."""
    (found,) = table(Program(module), capture=capture, **expected).values()
    return found


# ---------------------------------------------------------------------- one fit of a program


class Run(NamedTuple):
    """A fit, and what its program has seen and left outside of its module."""

    fit: Fit
    seen: str


def run(
    program: Program, backend: str, root: Path, captured: bool, options: Any = None, **extra: Any
) -> Run:
    """A fit of ``program``, with the callback or without.

    Args:
        program: Which.
        backend: ``"emulated"`` or ``"cuda"``.
        root: Where logs go.
        captured: With the callback.
        options: Of ``fits.prepare``, in place of those of the program; those of the callback in
            ``options["capture"]`` are added to the program's.
        extra: Of ``Trainer.fit``.
    """
    options = {**program.fit, **(options or {})}
    capture = {"on_failure": "eager", **program.capture, **options.pop("capture", {})}
    if capture.get("scope") == "modules" and program.modules:
        capture["modules"] = [*program.modules]
    with program.around(), warnings.catch_warnings():
        if program.ignored:
            warnings.filterwarnings("ignore", program.ignored)
        fit = prepare(backend, root, captured, module=program.module, capture=capture, **options)
        fit.run(**extra)
        return Run(fit, repr((copied(getattr(fit.module, "seen", None)), program.outside())))


_known: dict[tuple[Any, ...], Run] = {}
_refusals: dict[tuple[int, str], list[str]] = {}  # of captured fits, by program and backend


def eager(program: Program, backend: str, root: Path, options: Any = None) -> Run:
    """The fit without the callback; tests of one program share it."""
    given = {key: value for key, value in (options or {}).items() if key != "capture"}
    key = (id(program), backend, repr(sorted(given.items())))
    if key not in _known:
        _known[key] = run(program, backend, root, False, given)
    return _known[key]


def assert_equal(reference: Run, found: Run) -> None:
    """Assert that two fits gave the same values, and that their programs saw the same."""
    compare(reference.fit, found.fit, replayed=False)
    assert found.seen == reference.seen


@contextlib.contextmanager
def quiet(said: str | None = None) -> Iterator[None]:
    """Take the callback's warnings; one of them must be ``said``."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "GraphCapture")
        if not said:
            yield
            return
        with pytest.warns(UserWarning, match=f"(?s:.*){said}"):
            yield


def assert_placed(program: Program, said: str) -> None:
    """Assert that a refusal names a line of the program: the marked one if one is."""
    kind = getattr(program.module, "body", getattr(program.module, "func", program.module))
    file = inspect.getfile(kind)
    lines = [int(number) for number in re.findall(rf"{re.escape(file)}:(\d+) in ", said)]
    assert lines, said
    if "# read\n" in inspect.getsource(kind):
        assert any(linecache.getline(file, each).endswith("# read\n") for each in lines), said


def copied(value: Any) -> Any:
    """Values that a later step cannot change."""
    if isinstance(value, Tensor):
        return value.detach().tolist()
    if isinstance(value, dict):
        return {key: copied(held) for key, held in value.items()}
    if isinstance(value, (list, tuple, deque)):
        return [copied(held) for held in value]
    if isinstance(value, SimpleNamespace):
        return copied(vars(value))
    return value


# ---------------------------------------------------------------------- what is promised


def assert_as_expected(program: Program, fit: Fit) -> None:
    """Assert that steps were replayed or refused as the program says."""
    statistics, said = fit.statistics, "".join(fit.statistics.fallbacks)
    if program.said is not None:
        assert bool(said) == bool(program.said), said
        assert not program.is_refused or statistics.replayed == 0, statistics
        assert program.said or statistics.replayed > 0, statistics
    assert statistics.replayed >= (program.replayed or 0)
    if program.graphs is not None:
        graphs = program.graphs if isinstance(program.graphs, range) else [program.graphs]
        assert statistics.captures in graphs, statistics.recaptures
    if program.said and program.placed:
        assert_placed(program, said)
    if program.changes:
        reasons = zip(statistics.recaptures, program.changes, strict=True)
        assert all(part in reason for reason, part in reasons), statistics.recaptures
    assert " at 0x" not in said  # no address of an object
    assert program.check(fit), (statistics.graphs, statistics.recaptures)


class Promises:
    """What is tested of every program: a file of them derives a class with its ``rows``.

    The rows of each test are those of which ``WANTED`` is true.

    Attributes:
        rows: The programs, by name.
    """

    rows: Mapping[str, Program]

    def test_equal_or_refused_with_its_line(
        self, backend: str, tmp_path: Path, program: Program
    ) -> None:
        """... and nothing is left behind in trainer, module and optimizers."""
        expected = eager(program, backend, tmp_path)
        if program.said == "":
            found = run(program, backend, tmp_path, True)
        else:
            with quiet(program.said):
                found = run(program, backend, tmp_path, True)
        _refusals[id(program), backend] = found.fit.statistics.fallbacks
        assert_equal(expected, found)
        assert_as_expected(program, found.fit)
        assert_nothing_left(found.fit)

    def test_equal_under_options(
        self, backend: str, tmp_path: Path, program: Program, options: str
    ) -> None:
        given = OPTIONS[options]
        expected = eager(program, backend, tmp_path, given)
        with quiet():
            found = run(program, backend, tmp_path, True, given)
        assert_equal(expected, found)
        if program.said == "":
            assert found.fit.statistics.replayed > 0
            assert options != "verified" or found.fit.statistics.fallbacks == []

    def test_submodules_agree(self, backend: str, tmp_path: Path, program: Program) -> None:
        expected = eager(program, backend, tmp_path)
        with quiet(program.below):
            found = run(program, backend, tmp_path, True, {"capture": {"scope": "modules"}})
        assert_equal(expected, found)
        if program.below == "":
            assert found.fit.statistics.fallbacks == []
            assert found.fit.statistics.replayed > 0

    def test_the_doctor_agrees(self, backend: str, tmp_path: Path, program: Program) -> None:
        """It finds an obstacle where a run is refused, in the same words, and changes nothing."""
        expected = eager(program, backend, tmp_path)
        watched = run(program, backend, tmp_path, True, {"capture": {"diagnose": True}})
        assert_equal(expected, watched)
        obstacles = watched.fit.capture.report.diagnosis.obstacles
        if program.obstacle == "":
            assert obstacles == [], "\n".join(map(str, obstacles))
        elif program.obstacle is not None:
            if (id(program), "emulated") not in _refusals:  # made by another test
                with quiet():
                    refused = run(program, "emulated", tmp_path, True)
                _refusals[id(program), "emulated"] = refused.fit.statistics.fallbacks
            said = "".join(_refusals[id(program), "emulated"])
            words = [
                {"rule": each.rule, "remedy": each.remedy, "line": f":{each.line} in"}
                for each in obstacles
            ]
            parts = program.obstacle.split()
            assert any(all(each[part].rstrip(".") in said for part in parts) for each in words), (
                said
            )

    def test_resumed(self, backend: str, tmp_path: Path, program: Program) -> None:
        """A fit that goes on from a checkpoint of a captured one."""
        path, options = tmp_path / "saved.ckpt", {"max_epochs": 2}
        with quiet():  # of steps that come too seldom in fits as short as these
            first = run(program, backend, tmp_path, True, {"max_epochs": 1})
            first.fit.trainer.save_checkpoint(path)
            went_on = [
                run(program, backend, tmp_path, captured, options, ckpt_path=path)
                for captured in (False, True)
            ]
        assert_equal(*went_on)
        statistics = went_on[1].fit.statistics
        assert statistics.replayed > 0 or statistics.captures <= 1


WANTED: dict[str, Callable[[Program], bool]] = {
    "test_submodules_agree": lambda program: not program.by_modules,
    "test_resumed": lambda program: program.said == "" and program.resumes,
}
