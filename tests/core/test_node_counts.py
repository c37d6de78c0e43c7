"""Nodes by kind: known of every captured graph, whether or not it kept its template."""

from __future__ import annotations

import sys
from typing import Any, cast

import pytest
import torch

from lightning_graphs import core
from lightning_graphs.device import inspect as driver
from lightning_graphs.device.graph import BackendName
from lightning_graphs.device.inspect import inspect
from lightning_graphs.errors import ReplayError
from tests.core.test_driver import GRAPH, STREAM, bindings


def captured(backend: str, device: torch.device, *, keep_graph: bool) -> core.CUDAGraph:
    """A graph of a copy and two kernels; it is counted and never replayed."""
    source = torch.ones(64, 64, device=device)
    target = torch.full((64, 64), 7.0, device=device)
    graph = core.CUDAGraph(keep_graph, backend=cast(BackendName, backend))
    with core.graph(graph):
        target.copy_(source)
        target.mul_(2).add_(1)
    return graph


def test_counts_are_those_of_the_inspection(backend: str, device: torch.device) -> None:
    graph = captured(backend, device, keep_graph=True)
    counts = dict(graph.node_counts())
    assert counts == inspect(graph).counts
    assert counts == {"kernel": 2, "memcpy": 1}
    graph.instantiate()
    assert graph.node_counts() == counts


def test_counts_need_the_template(backend: str, device: torch.device) -> None:
    graph = captured(backend, device, keep_graph=False)
    with pytest.raises(ReplayError, match="keep_graph=False drops the cudaGraph_t"):
        graph.node_counts()


def test_a_graph_without_a_capture_has_no_counts(backend: str, device: torch.device) -> None:
    graph = captured(backend, device, keep_graph=True)
    graph.reset()
    with pytest.raises(ReplayError, match=r"node_counts\(\) needs a finished capture"):
        graph.node_counts()


def test_a_second_capture_is_counted_anew(backend: str, device: torch.device) -> None:
    graph = captured(backend, device, keep_graph=True)
    graph.reset()
    cell = torch.zeros(8, device=device)
    with core.graph(graph):
        cell.add_(1)
    assert graph.node_counts() == {"kernel": 1}


def test_without_cuda_python_nothing_is_counted(
    backend: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    graph = captured(backend, device, keep_graph=True)
    assert sum(graph.node_counts().values()) == (0 if backend == "cuda" else 3)


@pytest.mark.parametrize("major", [12, 13])
def test_kinds_are_counted_without_names(monkeypatch: pytest.MonkeyPatch, major: int) -> None:
    stand_in: Any = bindings(major)
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", stand_in)
    # Names and parameters are what makes an inspection slow; no count may ask for them.
    for name in ("cuGraphKernelNodeGetParams", "cuKernelGetName", "cuFuncGetName"):
        monkeypatch.delattr(stand_in, name)
    graph, _ = driver.capture_frontier(STREAM)
    assert graph == GRAPH
    expected = {"kernel": 2, "memcpy": 1, "memset": 1, "child": 1, "alloc": 1}
    assert driver.count_kinds(graph) == expected
