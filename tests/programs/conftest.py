"""Each test of a program runs over the rows of its file."""

from __future__ import annotations

import pytest

from tests.programs.table import WANTED, Program, Promises


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Gives a test of :class:`Promises` its rows, and their further options to the one of them."""
    if metafunc.cls is None or not issubclass(metafunc.cls, Promises):
        return
    wanted = WANTED.get(metafunc.function.__name__, bool)
    rows = {name: each for name, each in metafunc.cls.rows.items() if wanted(each)}
    if "options" in metafunc.fixturenames:
        pairs = [(n, e, o) for n, e in rows.items() for o in e.also.split("; ") if o]
        found = [pytest.param(e, o, id=f"{n}, {o}") for n, e, o in pairs]
        metafunc.parametrize(("program", "options"), found)
    else:
        metafunc.parametrize("program", rows.values(), ids=rows.keys())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test without rows is absent rather than skipped."""
    items[:] = [item for item in items if not _is_empty(item)]


def _is_empty(item: pytest.Item) -> bool:
    if not issubclass(getattr(item, "cls", None) or object, Promises):
        return False
    return not isinstance(item.callspec.params["program"], Program)  # type: ignore[attr-defined]
