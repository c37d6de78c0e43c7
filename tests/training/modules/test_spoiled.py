"""Replays of submodules that went wrong, checks that end early, and checks without memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_graphs import VerificationError
from lightning_graphs.device.graph import CUDAGraph, is_current_stream_capturing
from lightning_graphs.regions.submodules import CallChecks
from lightning_graphs.regions.verify import Comparison, Verification, Verifier
from lightning_graphs.values.snapshot import Snapshot
from tests.training import fits
from tests.training.fits import Fit, assert_nothing_left, compare, prepare
from tests.training.modules.test_aliasing import Chain
from tests.training.modules.test_equal import Blocks
from tests.training.modules.test_verification import (
    HIDDEN,
    Normalized,
    verifying,
    wide,
    with_middle,
)


@pytest.fixture(autouse=True)
def _nothing_hidden() -> Iterator[None]:
    HIDDEN.clear()
    yield
    HIDDEN.clear()


class Spoiled:
    """Replays of graphs, each followed by a write into what one of them has written."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, spoil: Callable[[CUDAGraph], None]) -> None:
        original = CUDAGraph.replay

        def spoiling(graph: CUDAGraph) -> None:
            original(graph)
            with torch.no_grad():
                spoil(graph)

        monkeypatch.setattr(CUDAGraph, "replay", spoiling)
        launch = property(lambda graph: partial(spoiling, graph))  # what plans have prepared
        monkeypatch.setattr(CUDAGraph, "launch", launch)


@pytest.fixture
def sites(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every graphed callable that is checked."""
    found: list[Any] = []
    original = CallChecks.check_call

    def noting(self: CallChecks, graphed_call: Any, **options: Any) -> None:
        found.append(graphed_call.callable)
        original(self, graphed_call, **options)

    monkeypatch.setattr(CallChecks, "check_call", noting)
    return found


SPOILED: dict[str, tuple[Callable[[Any], Tensor | None], str]] = {
    "output": (lambda g: g.outputs.tensors[0], "output of `net`"),
    "buffer": (lambda g: g.module[1].running_mean, r"buffer `net\.1\.running_mean`"),
    "argument": (
        lambda g: g.backward_pass.handed.buffers[0],
        r"the gradient of args\[0\] of `net`",
    ),
    "parameter": (
        lambda g: g.backward_pass.direct.buffers[1],
        r"the gradient of `net\.1\.weight`",
    ),
}


@pytest.mark.parametrize("what", SPOILED)
def test_the_first_tensor_that_differs_is_named(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sites: list[Any], what: str
) -> None:
    tensor, name = SPOILED[what]

    def spoil(graph: CUDAGraph) -> None:
        if sites and graph in (sites[-1].forward_graph, sites[-1].backward_pass.graph):
            tensor(sites[-1]).view(-1)[3] += 0.5  # type: ignore[union-attr]

    Spoiled(monkeypatch, spoil)
    capture = verifying("net", verify=True)
    captured = prepare(backend, tmp_path, True, module=Normalized, capture=capture)
    with pytest.raises(VerificationError, match=rf"at step 6, {name} differs by up to \S+; two"):
        captured.run()
    assert_nothing_left(captured)


def test_graphs_that_do_nothing_are_found(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sites: list[Any]
) -> None:
    original = CUDAGraph.replay

    def lazy(graph: CUDAGraph) -> None:
        if graph is not sites[-1].backward_pass.graph:
            original(graph)

    monkeypatch.setattr(Verification, "check_update", lambda *_: None)
    captured = prepare(backend, tmp_path, True, module=Chain, capture=verifying("blocks.*"))
    monkeypatch.setattr(CUDAGraph, "replay", lambda g: lazy(g) if sites else original(g))
    with pytest.raises(VerificationError, match=r"at step 6, the gradient of args\[0\] of `bl"):
        captured.run()


def spoil_update(fit: Fit, monkeypatch: pytest.MonkeyPatch, since: int = 0) -> None:
    """From some step on, replays outside of the backward pass write a parameter of their own."""

    def spoil(graph: CUDAGraph) -> None:
        if fit.trainer.global_step >= since and graph in updates:
            fit.module.head.weight.view(-1)[3] += 0.5

    updates: list[CUDAGraph] = []
    original = Verification.check_update

    def noting(self: Verification, replay: Any) -> bool:
        updates.extend(part.graph for part in replay.func.__self__.parts.values())
        return original(self, replay)

    monkeypatch.setattr(Verification, "check_update", noting)
    Spoiled(monkeypatch, spoil)


@pytest.mark.parametrize(("verify", "since", "step"), [(True, 0, 5), (4, 10, 12)])
def test_a_wrong_optimizer_step_is_named(
    backend: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    verify: Any,
    since: int,
    step: int,
) -> None:
    capture = verifying("blocks.*", verify=verify)
    captured = prepare(backend, tmp_path, True, module=Blocks, capture=capture)
    spoil_update(captured, monkeypatch, since)
    name = rf"at step {step}, parameter `head\.weight` differs by up to 0\.5"
    with pytest.raises(VerificationError, match=name):
        captured.run()
    assert_nothing_left(captured)


def test_instead_of_a_wrong_optimizer_step_the_eager_one_is_taken(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"module": Blocks, "validation": 0}
    eager = prepare(backend, tmp_path, False, **options).run()
    capture = verifying("blocks.*", verify=True, on_failure="eager")
    captured = prepare(backend, tmp_path, True, capture=capture, **options)
    spoil_update(captured, monkeypatch)
    message = r"the optimizer step runs eagerly: (?s:.*)parameter `head\.weight` differs"
    with pytest.warns(UserWarning, match=message) as caught:
        captured.run()
    assert sum("runs eagerly" in str(w.message) for w in caught) == 1
    compare(eager, captured, replayed=False)
    assert captured.statistics.replayed == 14


# ---------------------------------------------------------------------- interruptions and memory


@pytest.mark.usefixtures("interrupts_as_before")
@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_a_check_that_is_interrupted_leaves_nothing(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    def interrupted(self: Verifier, ways: Comparison, *_: Any) -> None:
        assert "output of `net`" in ways.eager()[0].name
        raise error("in the middle")

    monkeypatch.setattr(Verifier, "_require", interrupted)
    monkeypatch.setattr(Verification, "check_update", lambda *_: None)
    capture = verifying("net")
    captured = prepare(backend, tmp_path, True, module=Normalized, capture=capture)
    expected, match = (error, "middle") if error is not KeyboardInterrupt else (SystemExit, "1")
    with pytest.raises(expected, match=match):
        captured.run()
    assert_nothing_left(captured)
    assert captured.module.net[1].num_batches_tracked == 6
    assert all("forward" not in vars(m) for m in captured.module.modules())


@pytest.fixture
def no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Snapshot.__init__

    def take(self: Snapshot, tensors: Sequence[Tensor], *parts: Any, **options: Any) -> None:
        if any(isinstance(tensor, nn.Parameter) for tensor in tensors):
            raise torch.OutOfMemoryError("9 MiB are free")
        own(self, tensors, *parts, **options)

    monkeypatch.setattr(Snapshot, "__init__", take)


@pytest.mark.usefixtures("no_memory")
def test_without_memory_for_a_copy_it_says_so(backend: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"module": Normalized, "max_epochs": 1}
    eager = prepare(backend, tmp_path, False, **options).run()
    captured = prepare(backend, tmp_path, True, capture=verifying("net"), **options)
    with pytest.warns(UserWarning, match="verified: 9 MiB are free") as caught:
        captured.run()
    said = {str(w.message) for w in caught if "verified" in str(w.message)}
    assert said == {
        "GraphCapture: the captured optimizer step was not verified: 9 MiB are free",
        "GraphCapture: a captured module was not verified: 9 MiB are free",
    }
    assert sum("verified" in str(w.message) for w in caught) == 2
    assert {w.filename for w in caught if "verified" in str(w.message)} <= {fits.__file__, __file__}
    compare(eager, captured)


class Large(nn.Linear):
    """After its capture an eager run finds no memory beside the graph."""

    def forward(self, x: Tensor) -> Tensor:
        capturing = is_current_stream_capturing()
        if HIDDEN["captured"] == 2.0 and not capturing:
            HIDDEN["left"] -= 1
            if HIDDEN["left"] >= 0:
                raise torch.OutOfMemoryError("Tried to allocate 2 GiB.\nMore of it.")
        HIDDEN["captured"] = 2.0 if capturing else HIDDEN["captured"]
        return super().forward(x)


def test_an_eager_run_without_memory(backend: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"module": with_middle(wide(Large)), "validation": 0}
    eager = prepare(backend, tmp_path, False, **options).run()
    captured = prepare(
        backend, tmp_path, True, capture=verifying("blocks.*", verify=True), **options
    )
    HIDDEN["left"] = 1.0
    with pytest.warns(UserWarning, match="a captured module was not verified: Tried to .* GiB\\.$"):
        captured.run()
    compare(eager, captured)
