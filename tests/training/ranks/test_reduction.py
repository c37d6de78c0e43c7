"""Gradients of captured steps are reduced as DDP reduces them: the same buckets, and equal bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_graphs.errors import CaptureError
from lightning_graphs.regions.reduction import BucketReduction, reduction_of
from tests.ranks import run_on_ranks

STEPS, BATCH = 4, 6


class Mixed(nn.Module):
    """Weights that are cast, used as they are, used twice, frozen, and laid out channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
        self.norm = nn.LayerNorm(5)
        self.once, self.twice = nn.Linear(5, 5), nn.Linear(5, 5)
        self.scale = nn.Parameter(torch.ones(5))
        self.frozen = nn.Parameter(torch.ones(5), requires_grad=False)
        self.left_out = nn.Parameter(torch.ones(2), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.conv(x).mean((2, 3))) * self.scale * self.frozen
        return self.twice(self.twice(self.once(h))).float().square().mean()


def _group(rank: int) -> DistributedDataParallel:
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    torch.manual_seed(0)
    return DistributedDataParallel(Mixed(), bucket_cap_mb=1e-4)


def _batch(rank: int, step: int) -> Tensor:
    torch.manual_seed(10 * step + rank)
    return torch.randn(BATCH, 3, 8, 8)


def _loss(ddp: DistributedDataParallel, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        loss: Tensor = ddp(x)
    return loss


def _gradients(ddp: DistributedDataParallel) -> dict[str, Tensor]:
    return {name: p.grad for name, p in ddp.named_parameters() if p.grad is not None}


def reduced_both_ways(rank: int, adds: bool) -> None:
    """Compare what is reduced, in its order, and what ``.grad`` is after it, with DDP's own."""
    ddp = _group(rank)
    ours: list[Tensor] = []
    theirs: list[Tensor] = []

    def begin() -> None:
        ddp.zero_grad()
        if adds:
            with ddp.no_sync():
                _loss(ddp, _batch(rank, STEPS + 1)).backward()

    def hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP reads annotations
        # As DDP does without a hook
        theirs.append(bucket.buffer().div_(2).clone())
        work = torch.distributed.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    for step in range(STEPS):  # DDP makes its buckets again after the first
        _loss(ddp, _batch(rank, step)).backward()
        ddp.zero_grad()
    x = _batch(rank, STEPS)
    begin()
    _loss(ddp, x).backward()
    expected = _gradients(ddp)
    begin()
    reduction = reduction_of(ddp, adds=adds)
    assert reduction is not None
    with reduction.unprepared():
        loss = _loss(ddp, x)
    with pytest.MonkeyPatch.context() as patch:
        all_reduce = torch.distributed.all_reduce

        def seen(flat: Tensor, **options: Any) -> Any:
            ours.append(flat.clone())
            return all_reduce(flat, **options)

        patch.setattr(torch.distributed, "all_reduce", seen)
        with reduction.reducing(loss):
            loss.backward()
    found = _gradients(ddp)
    begin()
    ddp.register_comm_hook(None, hook)
    _loss(ddp, x).backward()
    assert len(ours) > 2
    assert [flat.shape for flat in ours] == [flat.shape for flat in theirs]
    assert all(map(torch.equal, ours, theirs))
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        assert torch.equal(gradient, expected[name]), name
        assert gradient.stride() == expected[name].stride(), name
        assert gradient.untyped_storage().nbytes() == gradient.nbytes, "in memory of its own"
    assert reduction_of(ddp, adds=adds) is None, "a communication hook is DDP's to call"


def a_gradient_that_never_comes(rank: int) -> None:
    ddp = _group(rank)
    ddp.module.left_out.requires_grad_(True)
    reduction = BucketReduction(ddp, [[p for p in ddp.parameters() if p.requires_grad]])
    with reduction.unprepared():
        loss = _loss(ddp, _batch(rank, 0))
    said = "every parameter must have a gradient in a captured step(.|\\n)*`left_out` has none"
    with pytest.raises(CaptureError, match=said), reduction.reducing(loss):
        loss.backward()


def left_to_ddp(rank: int) -> list[Tensor]:
    """The reducer takes the backward pass of a forward pass that it knew nothing of."""
    ddp, found = _group(rank), []
    for is_left in (False, True):
        reduction = reduction_of(ddp, adds=False)
        assert reduction is not None
        if is_left:
            with reduction.unprepared():
                loss = _loss(ddp, _batch(rank, 0))
            reduction.leave_to_ddp()
        else:
            loss = _loss(ddp, _batch(rank, 0))
        loss.backward()
        found.append([p.grad for p in ddp.parameters() if p.grad is not None])
        ddp.zero_grad()
    assert all(map(torch.equal, *found))
    return [gradient.tolist() for gradient in found[0]]


@pytest.mark.parametrize("adds", [False, True], ids=["fresh gradients", "added to earlier ones"])
def test_buckets_and_gradients_are_those_of_ddp(adds: bool) -> None:
    run_on_ranks(reduced_both_ways, adds)


def test_a_gradient_that_never_comes_is_refused() -> None:
    run_on_ranks(a_gradient_that_never_comes)


def test_what_others_see_is_left_to_ddp() -> None:
    first, second = run_on_ranks(left_to_ddp)
    assert first == second
