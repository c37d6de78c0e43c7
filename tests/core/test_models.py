"""Models of public libraries: twenty training steps through graphs, equal to eager ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import pytest
import torch
from torch import Tensor

from lightning_graphs.core import CUDAGraph, graph, make_graphed_callables
from lightning_graphs.device.graph import BackendName
from tests.core.models import CASES, Batch, Case, Training, side_stream

STEPS, WARMUP = 20, 3
# Relative and absolute. Graph and eager code run the same kernels, all of them deterministic here.
TOLERANCE = {"emulated": (0.0, 0.0), "cuda": (0.0, 0.0)}

precisions = pytest.mark.parametrize(
    ("name", "bf16"),
    [
        *(pytest.param(name, False, id=f"{name}-fp32") for name in CASES),
        *(pytest.param(name, True, id=f"{name}-bf16") for name in ("bert", "gpt2")),
    ],
)


@pytest.fixture
def case(name: str) -> Iterator[Case]:
    chosen = CASES[name]
    with torch.backends.cudnn.flags(enabled=chosen.cudnn, benchmark=False, deterministic=True):
        yield chosen


def _train_eagerly(run: Training, batches: list[Batch]) -> list[Tensor]:
    losses = []
    for batch in batches:
        run.zero_grad()
        losses.append(run.step(batch))
    return losses


def _train_with_graph(run: Training, batches: list[Batch], backend: BackendName) -> list[Tensor]:
    """Three warm-up steps that count, then replays of one graph of the whole step."""
    with side_stream(run.device):
        losses = _train_eagerly(run, batches[:WARMUP])
    run.zero_grad()
    static = {name: torch.zeros_like(tensor) for name, tensor in batches[0].items()}
    captured = CUDAGraph(backend=backend)
    with graph(captured):
        loss = run.step(static)
    for batch in batches[WARMUP:]:
        for name, tensor in batch.items():
            static[name].copy_(tensor)
        captured.replay()
        losses.append(loss.clone())
    return losses


def _assert_equal(
    backend: str, expected: dict[str, Tensor], found: dict[str, Tensor], what: str
) -> None:
    rtol, atol = TOLERANCE[backend]
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        message = f"{what}: {name} differs"
        torch.testing.assert_close(
            found[name], tensor, rtol=rtol, atol=atol, msg=lambda m, message=message: message + m
        )


def _assert_same_training(
    backend: str, eager: Training, losses: list[Tensor], run: Training, found: list[Tensor]
) -> None:
    assert len(found) == len(losses) == STEPS
    named = [
        {f"loss of step {i}": loss for i, loss in enumerate(list_)} for list_ in (losses, found)
    ]
    _assert_equal(backend, named[0], named[1], "losses")
    _assert_equal(backend, eager.values(), run.values(), "state after training")


def _assert_it_learned(run: Training, case: Case, losses: list[Tensor]) -> None:
    """A comparison of runs in which nothing moved would show nothing."""
    fresh = Training(case, run.device)
    before = {name: p.detach() for name, p in fresh.model.named_parameters()}
    still = [n for n, p in run.model.named_parameters() if torch.equal(p.detach(), before[n])]
    assert still == []
    # bf16 has few values near 1: several losses may be equal, not many.
    assert len({loss.item() for loss in losses}) > len(losses) // 3


@precisions
def test_whole_step_as_one_graph(
    backend: BackendName, device: torch.device, case: Case, bf16: bool
) -> None:
    batches = case.batches(STEPS, device)
    eager = Training(case, device, bf16=bf16)
    losses = _train_eagerly(eager, batches)
    run = Training(case, device, bf16=bf16)
    found = _train_with_graph(run, batches, backend)
    _assert_same_training(backend, eager, losses, run, found)
    _assert_it_learned(eager, case, losses)


@precisions
@pytest.mark.parametrize("param_grads", ["autograd", "direct"])
def test_graphed_model_with_eager_optimizer(
    backend: BackendName,
    device: torch.device,
    case: Case,
    bf16: bool,
    param_grads: Literal["autograd", "direct"],
) -> None:
    batches = case.batches(STEPS, device)
    eager = Training(case, device, bf16=bf16)
    losses = _train_eagerly(eager, batches)
    run = Training(case, device, bf16=bf16)
    sample = {name: torch.zeros_like(t) for name, t in batches[0].items() if name != "target"}
    with run.autocast():
        make_graphed_callables(
            run.model, (), sample_kwargs=sample, param_grads=param_grads, backend=backend
        )
    # The seed of Training is spent on the weights; capture has given the generator back as it was.
    found = _train_eagerly(run, batches)
    _assert_same_training(backend, eager, losses, run, found)
