"""An overridden ``optimizer_step`` whose closure does more than Lightning's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.training.fits import Net, Trace, batches, compare, fit_twice

WRAPPED = pytest.mark.filterwarnings("ignore:GraphCapture. the optimizer step runs eagerly")


class Clipping(Net):
    """Clips gradients by itself, after Lightning's closure."""

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
    ) -> None:
        def clipped() -> Any:
            loss = optimizer_closure()
            torch.nn.utils.clip_grad_norm_(self.parameters(), 0.0625)
            return loss

        optimizer.step(closure=clipped)


class Surgery(Net):
    """Drops the gradient of one layer in every other step."""

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
    ) -> None:
        def closure() -> Any:
            loss = optimizer_closure()
            if batch_idx % 2:
                self.net[0].weight.grad = None
            return loss

        optimizer.step(closure=closure)


class Sharpness(Net):
    """Takes gradients at perturbed weights: Lightning's closure runs twice in a step."""

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
    ) -> None:
        def twice() -> Any:
            optimizer_closure()
            with torch.no_grad():
                moves = [p.grad * 0.0625 for p in self.parameters()]
                torch._foreach_add_(list(self.parameters()), moves)
            loss = optimizer_closure()
            with torch.no_grad():
                torch._foreach_sub_(list(self.parameters()), moves)
            return loss

        optimizer.step(closure=twice)


class Before(Net):
    """Calls Lightning's closure by itself, and then steps without one."""

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
    ) -> None:
        optimizer_closure()
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.0625)
        optimizer.step()


class Noisy(Clipping):
    """Wraps only some steps."""

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
    ) -> None:
        if batch_idx % 3:
            optimizer.step(closure=optimizer_closure)
        else:
            super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)


@WRAPPED
@pytest.mark.parametrize("module", [Clipping, Surgery, Sharpness, Before, Noisy])
@pytest.mark.parametrize("scope", ["step", "modules"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_what_is_around_the_closure_is_done(
    backend: str, tmp_path: Path, module: type[Net], scope: str, accumulate: int
) -> None:
    eager, captured = fit_twice(
        backend,
        tmp_path,
        module=module,
        trace=Trace,
        capture={"scope": scope, "on_failure": "eager", "warmup_steps": 2},
        data=lambda: batches(16),
        accumulate_grad_batches=accumulate,
    )
    compare(eager, captured, replayed=False)
    assert captured.statistics.replayed > 8
    said = [line for line in captured.statistics.fallbacks if "a closure of its own" in line]
    assert len(said) == (scope == "step" and module is not Before)


def test_the_closure_of_lightning_is_known(backend: str, tmp_path: Path) -> None:
    seen: list[Tensor] = []

    class Looking(Net):
        def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            super().optimizer_step(*args, **kwargs)
            seen.append(self.net[0].weight.detach().clone())

    eager, captured = fit_twice(backend, tmp_path, module=Looking)
    compare(eager, captured)
    assert captured.statistics.captures == 1
    before, after = seen[: len(seen) // 2], seen[len(seen) // 2 :]
    assert all(map(torch.equal, before, after))
