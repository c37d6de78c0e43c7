"""Graphed submodules under stress: shapes without end, odd batches, exceptions, moved memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn

from lightning_graphs.device.cuda import CudaBackend
from lightning_graphs.device.emulated import EmulatedBackend
from lightning_graphs.device.trace import Recorder
from lightning_graphs.policy.worth import CapturePolicy
from tests.training.fits import (
    Net,
    assert_nothing_left,
    batches,
    compare,
    fit_twice,
    named,
    prepare,
)
from tests.training.modules.test_equal import Block, Blocks
from tests.training.modules.test_manual import replays

BLOCKS = named("blocks.*")


def sizes(*counts: int, rounds: int = 4) -> list[dict[str, Any]]:
    """Batches of these sizes, one after the other, several times."""
    return [batches(1, size=n)[0] for _ in range(rounds) for n in counts]


class Counting(Callback):
    """Counts the graphs that are alive at the end of each batch."""

    def __init__(self) -> None:
        self.alive: list[int] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        captures = [c for c in trainer.callbacks if hasattr(c, "report")]
        self.alive += [len(c._statistics._alive) for c in captures]


@pytest.mark.filterwarnings("ignore:GraphCapture. steps run eagerly. max_graphs")
def test_shapes_that_come_and_go_never_own_more_than_their_share(
    backend: str, tmp_path: Path
) -> None:
    counting: list[Counting] = []

    def callbacks() -> list[Callback]:
        counting.append(Counting())
        return [counting[-1]]

    eager, captured = fit_twice(
        backend,
        tmp_path,
        module=Blocks,
        capture={**named("blocks.0", "blocks.1"), "max_graphs": 2, "min_repeats": 0},
        data=lambda: sizes(4, 5, 6),
        callbacks=callbacks,
        validation=0,
    )
    compare(eager, captured, replayed=False)
    # Two signatures of two modules, and the graph of the optimizer step.
    assert max(counting[1].alive) <= 2 * 2 + 1
    assert captured.statistics.captures == 2
    assert captured.statistics.replayed >= 12
    assert 'batch["x"]: f32[4,8] -> f32[5,8]' in captured.statistics.recaptures[0]
    (reason,) = captured.statistics.fallbacks
    assert "max_graphs=2 allows no more graphs; raise it, or pad" in reason


def sparse(*counts: int, rounds: int) -> list[dict[str, Any]]:
    """Batches with a sparse tensor, which have no signature."""
    return [{**batch, "of": torch.eye(3).to_sparse()} for batch in sizes(*counts, rounds=rounds)]


def test_a_batch_without_signature(backend: str, tmp_path: Path) -> None:
    eager, captured = fit_twice(
        backend,
        tmp_path,
        module=Blocks,
        capture=BLOCKS,
        data=lambda: sparse(8, rounds=10),
        validation=0,
    )
    compare(eager, captured)
    assert captured.statistics.captures == 1


def test_batches_without_signature_of_two_shapes(backend: str, tmp_path: Path) -> None:
    eager, captured = fit_twice(
        backend,
        tmp_path,
        module=Blocks,
        capture=BLOCKS,
        data=lambda: sparse(8, 6, rounds=8),
        validation=0,
    )
    compare(eager, captured)
    assert captured.statistics.captures == 1  # the batch does not tell the two kinds of steps
    assert replays(captured)["module blocks.2"] > 5


class Cropping(Blocks):
    """Takes another part of the batch in every step: the batch does not tell."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        n = 2 + batch_idx
        return self.loss({"x": batch["x"][:n], "y": batch["y"][:n]})


@pytest.mark.filterwarnings("ignore:GraphCapture")
def test_arguments_that_have_another_shape_in_each_step(backend: str, tmp_path: Path) -> None:
    eager, captured = fit_twice(
        backend,
        tmp_path,
        module=Cropping,
        capture={**named("blocks.0"), "min_repeats": 1},
        data=lambda: batches(44, size=48),
        max_epochs=1,
        validation=0,
    )
    compare(eager, captured, replayed=False)
    assert captured.statistics.captures == 1
    assert len(captured.statistics.fallbacks) == 1
    assert "a call of `blocks.0` runs eagerly: A graphed call" in captured.statistics.fallbacks[0]


class Reading(Block):
    """Reads a value on the host, in its middle."""

    def forward(self, x: Tensor, *, scale: Tensor) -> dict[str, Any]:
        hidden = self.inner(self.norm(x))
        if hidden.detach().abs().max().item() > 1e6:
            hidden = hidden * 0
        return {"hidden": (x + self.outer(hidden) * scale, None), "kind": "block"}


class PartlyReading(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1] = Reading()


@pytest.mark.filterwarnings("ignore:GraphCapture")
def test_of_a_module_that_cannot_be_captured_its_children_are(backend: str, tmp_path: Path) -> None:
    capture = {"scope": "modules", "on_failure": "eager"}
    fits = fit_twice(backend, tmp_path, module=PartlyReading, capture=capture, validation=0)
    compare(*fits, replayed=False)
    statistics = fits[1].statistics
    assert statistics.replayed > 10
    inside = [f"blocks.1.{name}" for name in ("norm", "inner", "outer")]
    assert statistics.modules == ["net", "blocks.0", *sorted(inside, key=inside.index), "blocks.2",
                                  "head"]  # fmt: skip
    assert len(statistics.fallbacks) == 1
    assert "`blocks.1` runs eagerly" in statistics.fallbacks[0]
    assert "test_limits.py:" in statistics.fallbacks[0]


def test_nothing_is_installed_where_one_capture_fails(backend: str, tmp_path: Path) -> None:
    fit = prepare(backend, tmp_path, True, module=PartlyReading, capture=BLOCKS, validation=0)
    with pytest.raises(Exception, match=r"test_limits.py:\d+"):
        fit.run()
    assert all("forward" not in vars(module) for module in fit.module.modules())
    assert fit.statistics.captures == 0
    assert fit.statistics.graphs == []
    assert fit.trainer.global_step == 6  # warm-up, the sightings and the step that was observed
    assert_nothing_left(fit)


class Boom(Exception):
    pass


class Exploding(Blocks):
    """Raises in one step, once, in or around a graphed module."""

    def __init__(self, step: int, where: str) -> None:
        super().__init__()
        self.countdown: int | None = step
        self.where = where

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        fires = self.countdown == 0
        if self.countdown is not None:
            self.countdown = None if fires else self.countdown - 1
        if fires and self.where == "before":
            raise Boom("before")
        handles = []
        if fires and self.where == "inside":
            handles.append(self.blocks[1].register_forward_pre_hook(raising))
        try:
            loss = super().training_step(batch, batch_idx)
        finally:
            for handle in handles:
                handle.remove()
        if fires:
            raise Boom("after")
        return loss


def raising(*_: Any) -> None:
    raise Boom("inside")


@pytest.mark.parametrize("where", ["before", "inside", "after"])
@pytest.mark.parametrize("step", [1, 5, 8])  # warm-up, observed, replayed
def test_an_exception_leaves_nothing_behind(
    backend: str, tmp_path: Path, step: int, where: str
) -> None:
    fits = [
        prepare(
            backend,
            tmp_path,
            captured,
            module=lambda: Exploding(step, where),
            capture=BLOCKS,
            validation=0,
        )
        for captured in (False, True)
    ]
    for fit in fits:
        with pytest.raises(Boom, match=where):
            fit.run()
    assert_nothing_left(fits[1])
    for module in fits[1].module.modules():
        assert "forward" not in vars(module)
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    for fit in fits:
        fit.trainer.fit_loop.max_epochs = 3
        fit.run()
    compare(*fits)
    assert_nothing_left(fits[1])


class Rebinding(Callback):
    """Gives a graphed module new memory between two steps."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if trainer.global_step == 10:
            weight = pl_module.blocks[1].norm.weight
            self.kept = weight.data = weight.data.clone() * 2  # else it would be brought back


class FrozenNorm(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].norm.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        trainable = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.AdamW(trainable, lr=2**-7, fused=True)


def test_memory_that_moves_is_captured_anew(backend: str, tmp_path: Path) -> None:
    eager, captured = fit_twice(
        backend,
        tmp_path,
        module=FrozenNorm,
        capture=BLOCKS,
        callbacks=lambda: [Rebinding()],
        validation=0,
    )
    compare(eager, captured)
    assert captured.statistics.captures == 2
    assert "a parameter or buffer of a graphed module has changed its memory" in (
        captured.statistics.recaptures
    )


class RebindingAlways(Callback):
    """Gives a graphed module new memory before every step."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        weight = pl_module.blocks[1].norm.weight
        self.kept = weight.data = weight.data.clone()


@pytest.mark.filterwarnings("ignore:GraphCapture")
def test_memory_that_moves_in_every_step_is_not_chased(backend: str, tmp_path: Path) -> None:
    eager, captured = fit_twice(
        backend,
        tmp_path,
        module=FrozenNorm,
        capture=named("blocks.1"),
        callbacks=lambda: [RebindingAlways()],
        data=lambda: batches(140),
        max_epochs=1,
        validation=0,
    )
    compare(eager, captured, replayed=False)
    assert captured.statistics.captures == 9
    assert "has changed its memory" in captured.statistics.recaptures[0]
    (reason,) = captured.statistics.fallbacks
    assert "steps run eagerly: graphs have to be dropped before they have paid off" in reason


@pytest.mark.filterwarnings("ignore:GraphCapture")
def test_shapes_that_never_come_back_are_mentioned_once(backend: str, tmp_path: Path) -> None:
    eager, captured = fit_twice(
        backend,
        tmp_path,
        module=Blocks,
        capture={**BLOCKS, "max_graphs": 2},
        data=lambda: sizes(*range(2, 26), rounds=1),
        max_epochs=1,
        validation=0,
    )
    compare(eager, captured, replayed=False)
    (reason,) = captured.statistics.fallbacks
    assert "no batch signature came back often enough" in reason
    assert 'The last two steps differ: batch["x"]: f32[' in reason


@pytest.mark.filterwarnings("ignore:GraphCapture")
def test_steps_that_cannot_be_captured_are_not_called_rare(backend: str, tmp_path: Path) -> None:
    eager, captured = fit_twice(
        backend,
        tmp_path,
        module=PartlyReading,
        capture={**named("blocks.1"), "max_graphs": 1, "on_failure": "eager"},
        data=lambda: sizes(*[8] * 12, 6, 8, rounds=1),
        max_epochs=1,
        validation=0,
    )
    compare(eager, captured, replayed=False)
    refusal, consequence = captured.statistics.fallbacks
    assert "`blocks.1` runs eagerly" in refusal
    assert "no submodule could be captured" in consequence


class Statistical(Net):
    """BatchNorm and Dropout inside of graphs; a step that returns nothing is skipped."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx % 4 == 3 else loss


def test_buffers_random_numbers_and_skipped_steps(backend: str, tmp_path: Path) -> None:
    fits = fit_twice(backend, tmp_path, module=Statistical, capture=named("net"))
    compare(*fits)
    assert torch.equal(
        fits[0].module.net[1].num_batches_tracked, fits[1].module.net[1].num_batches_tracked
    )
    assert isinstance(fits[1].module.net, nn.Sequential)


@pytest.mark.parametrize("length", [4, 5, 6])
def test_validation_after_the_observed_step_is_no_part_of_it(
    backend: str, tmp_path: Path, length: int
) -> None:
    _, captured = fits = fit_twice(
        backend,
        tmp_path,
        capture={"scope": "modules"},
        data=lambda: batches(length),
        validation=2,
        max_epochs=4,
    )
    compare(*fits)
    assert captured.statistics.fallbacks == []
    assert captured.statistics.modules == ["net"]


class Ticking(nn.Module):
    """Counts its calls, and has layers that do not."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        hidden: Tensor = self.layers(x)
        return hidden


class Ticked(Net):
    """A step that is refused as a whole, and a block that is refused for the same reason."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Ticking()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step({**batch, "x": self.block(batch["x"])}, batch_idx)


@pytest.mark.filterwarnings("ignore:GraphCapture")
def test_what_a_refused_call_has_read_binds_no_other(backend: str, tmp_path: Path) -> None:
    capture = {"scope": "modules", "on_failure": "eager"}
    eager, captured = fit_twice(backend, tmp_path, module=Ticked, capture=capture)
    compare(eager, captured, replayed=False)
    assert captured.statistics.modules == ["block.layers", "net"]
    assert captured.statistics.captures == 1
    assert captured.statistics.replayed >= 10
    assert captured.module.block.calls == eager.module.block.calls


class Routed(nn.Module):
    """A mixture of experts: each gets the rows that a gate chooses, so many or so many."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 2)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.gate(x).argmax(-1)
        for i, expert in enumerate(self.experts):
            (rows,) = (chosen == i).nonzero(as_tuple=True)
            x = x.index_add(0, rows, expert(x[rows]))
        return x


class MixtureOfExperts(Net):
    def __init__(self) -> None:
        super().__init__()
        width = self.net[0].in_features
        self.before, self.routed = nn.Linear(width, 8), Routed()
        self.after = nn.Linear(8, width)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = self.after(self.routed(self.before(batch["x"])))
        return super().training_step({**batch, "x": x}, batch_idx)


def _refuse_as_cuda_does(*_: Any) -> None:
    raise RuntimeError("CUDA error: operation not permitted when stream is capturing")


@pytest.mark.filterwarnings("ignore:GraphCapture")
@pytest.mark.parametrize("scope", ["modules", "auto"])
@pytest.mark.parametrize("words", ["of the backend", "of CUDA"])
def test_calls_whose_shapes_follow_from_values_are_left_out(
    backend: str, tmp_path: Path, scope: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if words == "of CUDA":  # which names no obstacle
        monkeypatch.setattr(Recorder, "refuse", _refuse_as_cuda_does)
        monkeypatch.setattr(EmulatedBackend, "refusal", CudaBackend.refusal)
    eager, captured = fit_twice(
        backend,
        tmp_path,
        module=MixtureOfExperts,
        capture={"scope": scope, "on_failure": "eager"},
        data=lambda: batches(30),
        validation=0,
    )
    compare(eager, captured, replayed=False)
    statistics = captured.statistics
    assert statistics.modules == ["before", "routed.gate", "after", "net"]
    assert statistics.captures == 1
    assert statistics.replayed > 15
    found = replays(captured)
    assert {found[f"module {name}"] for name in statistics.modules} == {statistics.replayed}
    experts, routed = statistics.fallbacks[-2:]
    assert "`routed` and what calls it run eagerly: it contains an operator" in routed
    assert "test_limits.py:" in routed
    assert "calls of `routed.experts.0` and 3 others run eagerly" in experts


@pytest.mark.filterwarnings("ignore:GraphCapture")
@pytest.mark.parametrize("goes_on", [True, False])
def test_little_that_surely_keeps_its_shapes_is_weighed_before_more_is_looked_at(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, goes_on: bool
) -> None:
    parts: list[float] = []

    def weighed(_: CapturePolicy, part: float) -> bool:
        parts.append(part)
        return goes_on

    def why_not(*_: Any, **__: Any) -> str:
        return "" if goes_on or not parts else "too few steps are left"

    monkeypatch.setattr(CapturePolicy, "goes_on_with_part", weighed)
    monkeypatch.setattr(CapturePolicy, "why_not", why_not)
    eager, captured = fit_twice(
        backend,
        tmp_path,
        module=MixtureOfExperts,
        capture={"scope": "auto", "on_failure": "eager"},
        data=lambda: batches(30),
        validation=0,
    )
    compare(eager, captured, replayed=False)
    (part,) = parts  # of `before` and the gate, which come ahead of what takes shapes from values
    assert 0.0 < part < 0.3
    assert bool(captured.statistics.captures) is goes_on


class LossReading(Net):
    """A step that reads a value, between a layer that computes little and one that does more."""

    def __init__(self) -> None:
        super().__init__()
        width = self.net[0].in_features
        self.norm = nn.LayerNorm(width)
        layers = (nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Tanh()) for _ in range(2))
        self.more = nn.Sequential(*layers)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = self.more(self.norm(batch["x"]))
        loss = super().training_step({**batch, "x": x}, batch_idx)
        return loss * 0.5 if loss.item() > 1.0 else loss


@pytest.mark.filterwarnings("ignore:GraphCapture")
@pytest.mark.parametrize(
    ("capture", "expected"),
    [
        ({"only_if_faster": True}, ["more", "net"]),
        ({"only_if_faster": False}, ["norm", "more", "net"]),
        ({"only_if_faster": True, "modules": ["norm"]}, ["norm"]),
    ],
)
def test_calls_that_compute_too_little_for_a_graph_stay_eager(
    backend: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capture: dict[str, Any],
    expected: list[str],
) -> None:
    monkeypatch.setattr(CapturePolicy, "why_not", lambda *_, **__: "")  # whatever a step takes
    eager, captured = fit_twice(
        backend,
        tmp_path,
        module=LossReading,
        capture={"scope": "modules", "on_failure": "eager", **capture},
        validation=0,
    )
    compare(eager, captured, replayed=False)
    assert captured.statistics.modules == expected
    assert captured.statistics.replayed >= 8  # then it is known whether that is faster
