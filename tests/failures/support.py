"""Fits that go wrong at a chosen place, beside the eager fit that goes wrong at the same step."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.training.fits import (
    Fit,
    Hidden,
    Net,
    assert_nothing_left,
    batches,
    close,
    prepare,
)

SCOPES: dict[str, dict[str, Any]] = {
    "step": {"scope": "step"},
    "modules": {"scope": "modules", "modules": ["net"]},
}
PHASE_OF_CAPTURE = {"step": (6, 6), "modules": (7, 8)}
"""The call of a network's code that is its capture, and the eager one of that step before it."""
STEPS = 12


class Mishap(Exception):
    """What the tests raise."""


def raise_mishap() -> None:
    raise Mishap("on purpose")


class Trip:
    """Does something at one call of many; all outside of what a capture looks at."""

    def __init__(self, at: int, action: Callable[[], object]) -> None:
        self.at = at
        self._action = ContextVar("action", default=action)
        self._counted = Hidden()
        self._counted["calls"] = 0

    @property
    def calls(self) -> int:
        """How often it was passed."""
        return int(self._counted["calls"])

    def call(self) -> None:
        self._counted["calls"] += 1
        if self.calls == self.at:
            self._action.get()()


class Tripwire(nn.Module):
    """Passes a tensor on, and lets its trip look at the forward or at the backward pass."""

    def __init__(self, trip: Trip, where: str) -> None:
        super().__init__()
        self.trip = trip
        self.where = where

    def forward(self, x: Tensor) -> Tensor:
        if self.where == "backward":
            return _CallInBackward.apply(x, self.trip)
        self.trip.call()
        return x


class _CallInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, trip: Trip) -> Tensor:
        ctx.trip = trip
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.trip.call()
        return gradient, None


class Tripping(Net):
    """A network with a tripwire, and nothing that the forward pass changes for good."""

    def __init__(self, trip: Trip, where: str = "forward") -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(8, 16), Tripwire(trip, where), nn.GELU(), nn.Dropout(0.25), nn.Linear(16, 3)
        )


def tripping(
    backend: str,
    root: Path,
    scope: dict[str, Any],
    *,
    eager: int,
    captured: int,
    action: Callable[[], object],
    where: str = "forward",
    **options: Any,
) -> tuple[Fit, Fit]:
    """The fit without and with the callback, each with its tripwire; nothing runs yet.

    Args:
        backend: ``"emulated"`` or ``"cuda"``.
        root: Where logs go.
        scope: Options of the callback.
        eager: The call of the tripwire at which the fit without the callback trips.
        captured: The same with it, where captures and verifications call it as well.
        action: What happens then.
        where: In the ``"forward"`` or in the ``"backward"`` pass.
        options: Of :func:`~tests.training.fits.prepare`.
    """
    fits = [
        prepare(
            backend,
            root,
            graphs,
            module=lambda at=at: Tripping(Trip(at, action), where),
            capture=scope,
            validation=0,
            data=lambda: batches(STEPS),
            **options,
        )
        for graphs, at in ((False, eager), (True, captured))
    ]
    return fits[0], fits[1]


def assert_nothing_lost(eager: Fit, captured: Fit) -> None:
    """Assert that a captured fit that ended early is as the eager one that did so too."""
    assert captured.trainer.global_step == eager.trainer.global_step
    close(captured.module.state_dict(), eager.module.state_dict(), 0.0, "module")
    for mine, theirs in zip(captured.trainer.optimizers, eager.trainer.optimizers, strict=True):
        close(mine.state_dict(), theirs.state_dict(), 0.0, "optimizer")
    assert_nothing_left(captured)
    forwards_are_their_own(captured.module)


def forwards_are_their_own(root: nn.Module) -> None:
    """Assert that no module has another forward, or a hook, than its class gave it."""
    for module in root.modules():
        assert "forward" not in vars(module)
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


def run_again(*fits: Fit) -> None:
    """Fit once more with the trainers and modules of fits that ended early."""
    for one in fits:
        one.module.train()  # Lightning leaves a validation that raised in eval mode
        one.run()
    assert_nothing_lost(*fits)


def forget_workspaces() -> None:
    """cuBLAS keeps a workspace for every stream that it was used on."""
    torch._C._cuda_clearCublasWorkspaces()
