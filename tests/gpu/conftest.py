"""Tests that are processes of their own run side by side: most of their time is one of imports."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

_AT_ONCE = 4


@pytest.fixture(scope="module")
def side_by_side(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], None]]:
    """Waits for one of the ``RUNS`` of a module by name, and raises what it raised.

    All that are selected begin with the first test.
    """
    runs = request.module.RUNS
    items = [item for item in request.session.items if item.module is request.module]  # type: ignore[attr-defined]
    pool = ThreadPoolExecutor(_AT_ONCE)
    try:
        started = {
            name: pool.submit(runs[name], tmp_path_factory.mktemp("run"))
            for name in (item.callspec.params["name"] for item in items)  # type: ignore[attr-defined]
        }
        yield lambda name: started[name].result()
    finally:
        pool.shutdown(cancel_futures=True)
