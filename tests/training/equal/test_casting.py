"""Gradients that are cast together: how many nodes of the graph that saves."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from tests.programs.test_casts import Deep
from tests.training.fits import Net, compare, fit_twice


def nodes_of(backend: str, root: Path, **options: Any) -> int:
    """Nodes of the one graph of a fit, which trains as without the callback."""
    eager, captured = fit_twice(backend, root, **{"precision": "bf16-mixed", **options})
    compare(eager, captured)
    (nodes,) = {graph.nodes for graph in captured.capture.report.graphs if graph.replays}
    assert nodes is not None
    return nodes


def by_autograd(*_: Any) -> AbstractContextManager[None]:
    return nullcontext()


@pytest.mark.parametrize(("module", "casts", "copies"), [(Net, 3, 1), (Deep, 63, 2)])
def test_a_captured_step_casts_gradients_together(
    backend: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    module: type[Net],
    casts: int,
    copies: int,
) -> None:
    together = nodes_of(backend, tmp_path, module=module)
    monkeypatch.setattr("lightning_graphs.lightning.trainer.cast_together", by_autograd)
    assert nodes_of(backend, tmp_path, module=module) - together == casts - copies
