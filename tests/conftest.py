"""Which tests run, and where: long tables on a CPU, tests for a GPU, several processes."""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_ROWS = 1
"""How many rows of a table of fits run on a CPU by default: five minutes on two cores."""
_OF_BENCHMARKS = {
    "test_an_architecture": 3,
    "test_a_program": 4,
    "test_a_row_trains_as_eager_training_does": 2,
    "test_a_published_loop": 2,
    "test_an_image_classifier_learns_digits": 1,
}
"""How many rows of further tables run by default; all of them on a GPU."""

_FORKING = (
    "tests/test_configuration.py",
    "tests/test_examples.py",
    "tests/test_package.py",
    "tests/test_soak.py",
    "tests/training/ranks/",
)

collect_ignore: list[str] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--every-row",
        action="store_true",
        help="run every row of the long tables of fits, as a machine with a GPU does",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Brings in the fixtures, but not where pytest-xdist hands out tests: they take seconds."""
    if config.getoption("dist", "no") != "no" and not hasattr(config, "workerinput"):
        return
    gc.disable()  # until all is imported: it takes a fifth of that time, and finds nothing
    import torch

    config.pluginmanager.import_plugin("tests.fixtures")
    # A test for the GPU is absent from a CPU run rather than skipped: the count of what ran is the
    # count of what was shown.
    if not torch.cuda.is_available():
        collect_ignore.append("gpu")
    if torch.cuda.device_count() < 2:
        two = "gpu/test_ddp.py", "gpu/test_fsdp.py", "gpu/test_other_devices.py"
        collect_ignore.extend(two)
    config.option.every_row |= torch.cuda.is_available()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Hands out the tests of a file together, which share fits, and those that fork.

    Where these run is the server of the forks: another one would import it all again.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "forks" if nodeid.startswith(_FORKING) else nodeid.partition("::")[0]

    return ByFile(config, log)


def pytest_report_header() -> str:
    return f"tables of fits: {_ROWS} rows of each; --every-row, or a GPU, runs them all"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Thins out long tables, and marks what runs on a GPU: ``-m gpu`` selects exactly that."""
    here = Path(__file__).parent
    if not config.getoption("--every-row"):
        left_out = set(_further_rows(items, here))
        config.hook.pytest_deselected(items=[i for i in items if i in left_out])
        items[:] = [i for i in items if i not in left_out]
    for item in items:
        callspec = getattr(item, "callspec", None)
        on_cuda = callspec is not None and callspec.params.get("backend") == "cuda"
        if on_cuda or here / "gpu" in item.path.parents:
            item.add_marker(pytest.mark.gpu)


def _further_rows(items: list[pytest.Item], here: Path) -> Iterator[pytest.Item]:
    """Of each table of fits all rows but a few, which lie as far apart as they can.

    What a replay costs is shown in every row: no other test would notice.
    """
    tables: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        first, second = (*item.path.relative_to(here).parts, "")[:2]
        if first in ("training", "failures", "programs") and second != "costs":
            tables[item.nodeid.partition("[")[0] + _kind(item)].append(item)
        elif item.name.partition("[")[0] in _OF_BENCHMARKS:
            tables[item.nodeid.partition("[")[0]].append(item)
    for name, rows in tables.items():
        if name.endswith("::test_the_doctor_agrees"):
            rows.sort(key=lambda item: not _is_refused(item))
        most = _OF_BENCHMARKS.get(name.rpartition("::")[2], _ROWS)
        kept = {round(i * (len(rows) - 1) / max(1, most - 1)) for i in range(most)}
        if len(rows) > most:
            yield from (item for i, item in enumerate(rows) if i not in kept)


def _kind(item: pytest.Item) -> str:
    """Of each table of programs one that is refused is run, and one that is not.

    By submodules, which are captured one by one either way, the first one is; and with the doctor
    one that is refused, if there is any.
    """
    is_one = item.name.startswith(("test_submodules_agree[", "test_the_doctor_agrees["))
    return "" if is_one else str(_is_refused(item))


def _is_refused(item: pytest.Item) -> bool:
    callspec = getattr(item, "callspec", None)
    program = callspec.params.get("program") if callspec else None
    return bool(getattr(program, "said", None))


def pytest_collection_finish() -> None:
    """What is imported by now stays: the collector need not look through it again."""
    gc.freeze()
    gc.enable()
