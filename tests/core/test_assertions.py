"""Assertions of several graphs: which of their errors is raised."""

from __future__ import annotations

import torch

from lightning_graphs.device.graph import BackendName, GraphPool
from lightning_graphs.private.callsite import CallSite
from lightning_graphs.watch.assertions import Assertions, OpenAssertions


class OfGraph:
    """Makes the error of one graph."""

    reads_late = False

    def __init__(self, name: str) -> None:
        self.name = name

    def make(self, _: object) -> BaseException:
        return ValueError(self.name)


class Several:
    """As of several ranks, which look where something becomes lasting."""

    are_one = False

    def raise_on_all(self, error: BaseException | None) -> None:
        if error is not None:
            raise error


def test_the_error_of_the_first_step_is_raised(backend: BackendName, device: torch.device) -> None:
    """... of whichever graph it is, with the last step of all."""
    pool, x, step = GraphPool(backend=backend), torch.ones((), device=device), [0]
    fit = OpenAssertions(lambda: step[0], lambda: False, pool.backend.synchronize, Several())
    fit.is_used = True
    graphs = []
    for name in ("first", "second"):
        assertions = Assertions(device)
        with pool.capture() as graph:
            assertions.require(x > 0, CallSite(), OfGraph(name))
            assertions.finish()
        graphs.append((graph, assertions.pending(fit)))
    # One graph a step, as of batches of two shapes; from the second step on all fail.
    for step[0], (graph, pending) in enumerate((graphs[0], graphs[1], graphs[0], graphs[1])):
        graph.replay()
        assert pending is not None
        pending.note()
        pending.look()
        x.fill_(-1.0)
    error = fit.find()
    assert "second" in str(error)
    assert "raised by step 1," in str(error)
    assert "updates up to step 3 have been made" in str(error)
    pool.close()
