"""Hooks for what autograd saves, entered around graphed modules and inside of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import disable_saved_tensors_hooks, save_on_cpu, saved_tensors_hooks

from lightning_graphs.core import BackendName, make_graphed_callables
from lightning_graphs.errors import CaptureError, ReplayError
from tests.training.fits import Net, adamw, batches, compare, fit_twice

SAYS = pytest.mark.filterwarnings("ignore:GraphCapture")
Context = Callable[[], AbstractContextManager[Any]]


def _coarse(tensor: Tensor) -> Any:
    """Four bits of each number."""
    if isinstance(tensor, nn.Parameter) or not tensor.is_floating_point():
        return tensor
    scale = tensor.abs().amax().clamp(min=1e-6) / 7
    return (tensor / scale).round().to(torch.int8), scale


def _fine(packed: Any) -> Tensor:
    return packed if isinstance(packed, Tensor) else packed[0].float() * packed[1]


def in_four_bits() -> AbstractContextManager[Any]:
    return saved_tensors_hooks(_coarse, _fine)


class Hooked(Net):
    """A block whose first call in a step saves what autograd needs in a way of its own."""

    def __init__(self, context: Context, every: int = 1, calls: int = 1) -> None:
        super().__init__(adamw)
        self.net = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.block = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
        self.head = nn.Linear(8, 3)
        self.context, self.every, self.calls = context, every, calls

    def loss(self, batch: Any) -> Tensor:
        x = self.net(batch["x"])
        hooked = self.training and self.trainer.global_step % self.every == 0
        with self.context() if hooked else contextlib.nullcontext():
            x = self.block(x)
        for _ in range(self.calls - 1):
            x = self.block(x)
        return nn.functional.cross_entropy(self.head(x), batch["y"])


class Counting(Hooked):
    """Counts what autograd saves of its block."""

    def __init__(self) -> None:
        super().__init__(lambda: saved_tensors_hooks(self.pack, lambda packed: packed))
        self.saved = 0

    def pack(self, tensor: Tensor) -> Tensor:
        self.saved += 1
        return tensor

    def on_train_batch_end(self, *_: Any) -> None:
        self.log("saved", float(self.saved))


class Inside(nn.Module):
    """A block that enters hooks by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Any:
        with in_four_bits():
            return self.layers(x)


class HookedInside(Hooked):
    def __init__(self) -> None:
        super().__init__(contextlib.nullcontext)
        self.block = Inside()  # type: ignore[assignment]


FITS: dict[str, Callable[[], Hooked]] = {
    "four bits": lambda: Hooked(in_four_bits),
    "on the host": lambda: Hooked(save_on_cpu),
    "disabled": lambda: Hooked(lambda: disable_saved_tensors_hooks("no hooks")),
    "every second step": lambda: Hooked(in_four_bits, every=2),
    "one call of two": lambda: Hooked(in_four_bits, calls=2),
    "counted": Counting,
    "inside": HookedInside,
}
EAGER = {"four bits", "on the host", "every second step", "one call of two", "counted"}


@SAYS
@pytest.mark.parametrize("scope", ["modules", "auto"])
@pytest.mark.parametrize("kind", FITS)
def test_what_is_saved_passes_through_hooks(
    backend: str, tmp_path: Path, kind: str, scope: str
) -> None:
    eager, captured = fit_twice(
        backend,
        tmp_path,
        module=FITS[kind],
        # That a call of a graphed module finds no graph is said after a while
        data=lambda: batches(40 if kind == "every second step" else 12),
        capture={"scope": scope, "on_failure": "eager"},
    )
    compare(eager, captured, replayed=False)
    assert captured.statistics.replayed > 0
    lines = [line.replace("_", " ") for line in captured.statistics.fallbacks]
    told = any("saved tensors hooks" in line for line in lines)
    if scope == "modules":
        assert told == (kind in EAGER)


@pytest.mark.parametrize("param_grads", ["autograd", "direct"])
def test_callables_say_so(backend: BackendName, device: torch.device, param_grads: Any) -> None:
    linear = nn.Linear(8, 8, device=device)
    x = torch.randn(4, 8, device=device)
    with in_four_bits(), pytest.raises(CaptureError, match="hooks for saved tensors"):
        make_graphed_callables(linear, (x,), param_grads=param_grads, backend=backend)
    make_graphed_callables(linear, (x,), param_grads=param_grads, backend=backend)
    with in_four_bits(), pytest.raises(ReplayError, match="hooks for saved tensors"):
        linear(x)
    with in_four_bits(), torch.no_grad():
        assert linear(x).shape == (4, 8)
    inside = Inside().to(device)
    # A gradient without repetitions, as the graphs take it: kernels add up others in other orders.
    inside(x).square().sum().backward()
    expected = [p.grad for p in inside.parameters()]
    inside.zero_grad()
    make_graphed_callables(inside, (torch.zeros_like(x),), param_grads=param_grads, backend=backend)
    inside(x).square().sum().backward()
    for mine, theirs in zip(inside.parameters(), expected, strict=True):
        assert mine.grad is not None
        assert theirs is not None
        assert torch.equal(mine.grad, theirs)
