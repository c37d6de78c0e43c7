"""A pool owns its graphs: capture, release, close."""

from __future__ import annotations

import gc
import itertools
import weakref
from functools import partial
from typing import Any

import pytest
import torch

from lightning_graphs.core import graph_pool_handle, is_current_stream_capturing
from lightning_graphs.device.cuda import CudaBackend
from lightning_graphs.device.graph import BackendName, GraphPool
from lightning_graphs.errors import CaptureError, ReplayError
from tests.pools import SharedPools


def test_graphs_of_one_pool_replay_in_order(backend: BackendName, device: torch.device) -> None:
    pool = GraphPool(backend=backend)
    x = torch.ones(2, device=device)
    with pool.capture() as first:
        y = x * 3
    with pool.capture() as second:
        z = y + 1
    x.fill_(2.0)
    first.replay()
    second.replay()
    assert z.tolist() == [7.0, 7.0]
    assert first.pool() == second.pool() == pool.handle
    pool.close()


def test_a_token_is_shared(backend: BackendName, device: torch.device) -> None:
    token = graph_pool_handle(backend=backend)
    pools = [GraphPool(token, backend=backend) for _ in range(2)]
    x = torch.ones(2, device=device)
    outputs = []
    for pool in pools:
        with pool.capture() as captured:
            outputs.append(x + 1)
        assert captured.pool() == token
        captured.replay()
    assert [y.tolist() for y in outputs] == [[2.0, 2.0]] * 2
    for pool in pools:
        pool.close()


def test_a_further_capture_leaves_the_cache_where_memory_is_plenty(
    backend: BackendName, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, x, kept = GraphPool(backend=backend), torch.ones(2, device=device), []
    prepare = pool.backend.prepare_capture

    def noting(*, keeps_cache: bool = False) -> None:
        kept.append(keeps_cache)
        prepare(keeps_cache=keeps_cache)

    monkeypatch.setattr(pool.backend, "prepare_capture", noting)
    for is_roomy in (True, True, False):
        pool.is_roomy = partial(bool, is_roomy)
        with pool.capture():
            x + 1
    assert kept == [False, True, False]
    pool.close()


def test_pools_have_tokens_of_their_own(backend: BackendName) -> None:
    assert GraphPool(backend=backend).handle != GraphPool(backend=backend).handle


def test_keep_graph(backend: BackendName, device: torch.device) -> None:
    pool = GraphPool(keep_graphs=True, backend=backend)
    x = torch.ones(2, device=device)
    with pool.capture() as captured:
        y = x * 5
    captured.instantiate()
    captured.replay()
    assert y.tolist() == [5.0, 5.0]
    pool.close()


def test_release_frees_one_graph_and_close_all(backend: BackendName, device: torch.device) -> None:
    pool = GraphPool(backend=backend)
    x = torch.ones(2, device=device)
    graphs, results = [], []
    for factor in (2, 3, 4):
        with pool.capture() as captured:
            results.append(x * factor)
        graphs.append(captured)
    pool.release(graphs[1])
    with pytest.raises(ReplayError, match=r"replay\(\) needs a finished capture"):
        graphs[1].replay()
    graphs[0].replay()
    graphs[2].replay()
    assert [results[0].tolist(), results[2].tolist()] == [[2.0, 2.0], [4.0, 4.0]]
    pool.close()
    pool.close()
    for captured in graphs:
        with pytest.raises(ReplayError, match=r"replay\(\) needs a finished capture"):
            captured.replay()


def test_a_failed_capture_leaves_the_pool_usable(
    backend: BackendName, device: torch.device
) -> None:
    pool = GraphPool(backend=backend)
    x = torch.ones(2, device=device)
    with pytest.raises(CaptureError, match=r"test_pool\.py"), pool.capture():
        x.sum().item()
    with pytest.raises(KeyError, match="body"), pool.capture():
        raise KeyError("body")
    assert not is_current_stream_capturing()
    with pool.capture() as captured:
        y = x * 2
    captured.replay()
    assert y.tolist() == [2.0, 2.0]
    pool.close()


def test_a_pool_that_is_dropped_takes_its_graphs_along(
    backend: BackendName, device: torch.device
) -> None:
    pool = GraphPool(backend=backend)
    x = torch.ones(2, device=device)
    with pool.capture() as captured:
        x * 2
    reference = weakref.ref(captured)
    del pool, captured
    gc.collect()
    assert reference() is None


def test_on_cuda_a_pool_without_graphs_is_another_one_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    handles = zip(itertools.repeat(0), itertools.count(1))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(handles))

    class Graph:
        """In the place of one that needs a GPU."""

    backend = CudaBackend()
    pool = backend.new_pool()
    used = []
    for _ in range(4):
        now = backend.usable_pool(pool)
        reset: Any = Graph()
        dropped: Any = Graph()
        for one in (reset, dropped):
            backend.add(now, one)
            assert backend.usable_pool(pool) == now
        backend.drop(now, reset)
        assert backend.usable_pool(pool) == now
        used.append(now)
        del one, dropped
    assert len(set(used)) == 4
    assert backend.usable_pool(used[-1]) == backend.usable_pool(pool) not in used


def test_a_graph_of_nothing_is_one_without_a_word(backend: BackendName) -> None:
    with GraphPool(backend=backend).capture() as captured:
        pass
    captured.replay()


def test_of_a_shared_pool_a_replay_spoils_what_later_graphs_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pools, pool = SharedPools(monkeypatch), GraphPool(backend="emulated")
    x, results = torch.ones(4), []
    for factor in (2, 3):
        with pool.capture() as captured:
            between = x * factor
            results.append((captured, between + 1))
            del between
    for captured, _ in results:
        captured.replay()
    assert [y.tolist() for _, y in results] == [[3.0] * 4, [4.0] * 4]
    results[0][0].replay()
    assert results[0][1].tolist() == [3.0] * 4
    assert results[1][1].isnan().all()  # it may lie in memory that the first one has freed
    assert list(pools.spoilt.values()) == [2 * 32 + 2 * 16]
    pool.close()
