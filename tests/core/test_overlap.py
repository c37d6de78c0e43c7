"""Two streams in one graph: what runs beside, what waits for it, and that bits stay."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_graphs.autograd.backward import write_all
from lightning_graphs.device import overlap
from lightning_graphs.device.graph import BackendName, CUDAGraph, GraphPool
from lightning_graphs.device.overlap import DataFlow, Overlapping
from lightning_graphs.device.schedule import MAIN, SIDE, Schedule, Work, WorkPart, schedule

EVERYTHING = 2**40


class Tied(nn.Module):
    """Embedding and head share a weight; convolution, normalization and attention in between."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(16, 16), nn.Linear(16, 16, bias=False)
        self.head.weight = self.embedding.weight
        self.mix, self.long = nn.Conv1d(16, 16, 3, padding=1), nn.Linear(8, 8)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, norm_first=True)
            for _ in range(2)
        )

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = x + self.long(self.mix(x.mT.contiguous())).mT
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


class Trained:
    """A step with autocast, accumulation and momentum; it may clip, which all gradients enter."""

    def __init__(self, device: torch.device, *, clips: bool = True) -> None:
        self.model, self.clips = Tied().to(device), clips
        parts = [*self.model.parameters()]
        kernel = "foreach" if clips else "fused"
        self.optimizer = torch.optim.SGD(parts, lr=2**-4, momentum=0.5, **{kernel: True})
        self.tokens = torch.randint(16, (4, 8), device=device)
        self.kind = device.type
        for _ in range(2):
            self()
        state = [self.optimizer.state[p]["momentum_buffer"] for p in parts]
        self.state = [t.detach() for t in (*parts, *state)]
        self.before = [t.clone() for t in self.state]

    def __call__(self) -> Tensor:
        self.optimizer.zero_grad()
        for _ in range(2):
            with torch.autocast(self.kind, torch.bfloat16, cache_enabled=False):
                loss: Tensor = self.model(self.tokens)
            loss.backward()  # type: ignore[no-untyped-call]
        if self.clips:
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0, foreach=True)
        self.optimizer.step()
        return loss.detach()

    def captured(
        self, backend: BackendName, mode: AbstractContextManager[Any]
    ) -> tuple[CUDAGraph, Tensor]:
        self.pool = GraphPool(backend=backend, keep_graphs=True)
        with self.pool.capture() as graph, mode:
            loss = self()
        return graph, loss

    def results(self, graph: CUDAGraph, loss: Tensor) -> list[Tensor]:
        for tensor, value in zip(self.state, self.before, strict=True):
            tensor.copy_(value)
        torch.manual_seed(3)
        losses = []
        for _ in range(3):
            graph.replay()
            losses.append(loss.clone())
        return [*losses, *(tensor.clone() for tensor in self.state)]


@pytest.mark.parametrize(("room", "clips"), [(EVERYTHING, False), (0, True)])
def test_several_streams_compute_what_one_does(
    backend: BackendName, device: torch.device, room: int, clips: bool
) -> None:
    step = Trained(device, clips=clips)
    graph, loss = step.captured(backend, nullcontext())
    chain = step.results(graph, loss)
    flow = DataFlow(device.type)
    step.captured(backend, flow)
    assert not flow.why_not
    found = flow.schedule(room)
    beside = {w.name for w, stream in zip(found.works, found.streams, strict=True) if stream}
    assert {"aten::mm", "aten::sum", "aten::_to_copy"} <= beside
    assert {w.part for w in found.works} == {*WorkPart} - ({WorkPart.SHARE} if clips else set())
    assert flow.casts
    for copy in (None, write_all):
        mode = Overlapping(flow, found, device.type, copy)
        several, loss = step.captured(backend, mode)
        assert not mode.why_not
        assert all(map(torch.equal, chain, step.results(several, loss)))
        if backend == "cuda":  # the emulated one takes another order
            assert not mode.difference(graph.inspection(), several.inspection())
        graph, flow.ranges = several, mode.ranges


class Restless(Trained):
    """Between two backward passes it asks a layer, and exchanges the memory of another's weight."""

    def __init__(self, device: torch.device) -> None:
        self.probe = nn.Linear(16, 16).to(device)
        self.seen, self.other = torch.randn(4, 16, device=device), torch.randn(32, 16).to(device)
        super().__init__(device, clips=False)

    def __call__(self) -> Tensor:
        self.optimizer.zero_grad()
        weight = self.model.layers[1].linear1.weight
        self._loss().backward()  # type: ignore[no-untyped-call]
        with torch.no_grad(), torch.autocast(self.kind, torch.bfloat16, cache_enabled=False):
            seen = self.probe(self.seen).sum()
        own, weight.data = weight.data, self.other
        loss = self._loss()
        weight.data = own
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return loss.detach() + seen

    def _loss(self) -> Tensor:
        with torch.autocast(self.kind, torch.bfloat16, cache_enabled=False):
            loss: Tensor = self.model(self.tokens)
        return loss


@pytest.mark.parametrize("together", [1100, 2**26])
def test_casts_made_together_are_those_of_their_uses(
    backend: BackendName, device: torch.device, monkeypatch: pytest.MonkeyPatch, together: int
) -> None:
    step = Restless(device)
    chain = step.results(*step.captured(backend, nullcontext()))
    flow = DataFlow(device.type)
    step.captured(backend, flow)
    monkeypatch.setattr(overlap, "_CAST_AT_ONCE", together)
    found = flow.schedule(EVERYTHING)
    beside = {n for n in flow.casts if found.streams[found.of_operators()[n][0]] != MAIN}
    assert beside  # those of the layer that is asked
    mode = Overlapping(flow, found, device.type, write_all)
    forked = step.results(*step.captured(backend, mode))
    assert not mode.why_not
    assert all(map(torch.equal, chain, forked))


def test_a_capture_that_sees_something_else_goes_on_as_a_chain(
    backend: BackendName, device: torch.device
) -> None:
    step = Trained(device)
    chain = step.results(*step.captured(backend, nullcontext()))
    flow = DataFlow(device.type)
    step.captured(backend, flow)
    del flow.operators[len(flow.operators) // 2]
    mode = Overlapping(flow, flow.schedule(EVERYTHING), device.type)
    several = step.results(*step.captured(backend, mode))
    assert "is not what it was before" in mode.why_not
    assert all(map(torch.equal, chain, several))


# ------------------ Waits

GRADIENT, WEIGHT = 0, 1
"""Storages: what flows through the backward pass, and the gradient of a weight."""


def planned(*later: Work) -> Schedule:
    """A backward pass with one product beside it, and what follows."""
    back = {"in_backward": True}
    works = [
        Work(0, "aten::gelu_backward", (), born=(GRADIENT,), **back),
        Work(1, "aten::mm", (GRADIENT,), born=(WEIGHT,), **back),
        *(Work(2 + i, "aten::gelu_backward", (GRADIENT,), (GRADIENT,), **back) for i in range(6)),
        *later,
    ]
    found = schedule(works, [8] * 9, EVERYTHING)
    assert found.streams == [MAIN, SIDE, *[MAIN] * (len(works) - 2)]
    return found


def test_what_overwrites_memory_waits_for_what_reads_it_beside() -> None:
    found = planned(Work(8, "aten::_fused_sgd_", (WEIGHT,), (WEIGHT,)))
    assert found.waits[:3] == [(), (0,), (1,)]
    assert found.waits[3:] == [()] * 6
    assert found.last == ()


def test_memory_is_held_until_it_was_waited_for() -> None:
    found = planned()
    assert found.held[1] == (GRADIENT,)
    assert found.releases[2] == (1,)


def test_what_nothing_is_known_of_waits_for_everything() -> None:
    back = {"in_backward": True}
    works = [
        Work(0, "aten::gelu_backward", (), born=(0,), **back),
        Work(1, "aten::mm", (0,), born=(1,), **back),
        Work(2, "my::kernel", (0,), born=(2,), is_barrier=True, **back),
        Work(3, "aten::mm", (0,), born=(3,), **back),
        *(Work(4 + i, "aten::gelu_backward", (2 + 2 * i,), born=(4 + 2 * i,), **back)
          for i in range(6)),
    ]  # fmt: skip
    found = schedule(works, [8] * 32, EVERYTHING)
    assert found.streams[:4] == [MAIN, SIDE, MAIN, SIDE]
    assert found.waits[:4] == [(), (0,), (1,), (2,)]
    assert found.last == (3,)


@pytest.mark.parametrize(("room", "waits"), [(EVERYTHING, 0), (20, 2)])
def test_no_more_memory_is_held_than_there_is_room_for(room: int, waits: int) -> None:
    back = {"in_backward": True}
    works = [Work(0, "aten::gelu_backward", (), born=(0,), **back)]
    for i in range(6):
        works.append(Work(2 * i + 1, "aten::mm", (2 * i,), born=(2 * i + 1,), **back))
        made = 2 * i + 2
        works.append(Work(made, "aten::gelu_backward", (2 * i,), born=(made,), **back))
    works += [Work(13, "aten::gelu_backward", (12,), born=(13,), **back)] * 4
    found = schedule(works, [8] * 32, room)
    on_main = [w for s, w in zip(found.streams, found.waits, strict=True) if s == MAIN and w]
    assert len(on_main) == waits


def test_memory_that_is_used_later_takes_no_room() -> None:
    back = {"in_backward": True}
    makes = Work(0, "aten::gelu_backward", (), born=(0,), **back)
    update = Work(8, "aten::_fused_sgd_", (0, 1))
    works = [makes, Work(1, "aten::mm", (0,), born=(1,), **back)]
    works += [Work(2, "aten::gelu_backward", (0,), born=(2,), **back)]
    works += [Work(i, "aten::gelu_backward", (i - 1,), born=(i,), **back) for i in range(3, 8)]
    waits = [schedule([*works, *last], [8] * 9, 0).waits for last in ([], [update])]
    assert [[i for i, wait in enumerate(found) if wait] for found in waits] == [[1, 3], [1, 8]]


def test_a_new_allocation_beside_waits_for_what_used_the_last_one_there() -> None:
    back = {"in_backward": True}
    works = [
        Work(0, "aten::gelu_backward", (), born=(0,), **back),
        Work(1, "aten::mm", (0,), born=(1,), **back),
        Work(2, "aten::gelu_backward", (0,), born=(2,), **back),
        Work(3, "my::look", (1,), is_barrier=True, **back),  # the gradient may be gone then
        Work(4, "aten::mm", (0,), born=(4,), **back),
        *(Work(5 + i, "aten::gelu_backward", (2 + i + (i > 0) * 2,), born=(5 + i,), **back)
          for i in range(6)),
    ]  # fmt: skip
    found = schedule(works, [8] * 32, EVERYTHING)
    assert found.streams[4] == SIDE
    assert found.waits[4] == (3,)
