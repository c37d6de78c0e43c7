"""Gradients that somebody keeps from one step to the next, as eager training lets them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tests.training.fits import Net, batches, compare, fit_twice


def two_shapes() -> list[dict[str, Tensor]]:
    """Batches of two sizes in turn."""
    pairs = zip(batches(8), batches(8, 6), strict=True)
    return [batch for pair in pairs for batch in pair]


class KeepsGradients(Net):
    """Compares each gradient with the one of the step before, which it has kept as it was."""

    def __init__(self) -> None:
        super().__init__()
        self.before: list[Tensor] = []
        self.products: list[float] = []

    def on_after_backward(self) -> None:
        now = [p.grad for p in self.parameters()]
        if self.before:
            pairs = zip(self.before, now, strict=True)
            self.products.append(float(sum((a * b).sum() for a, b in pairs)))
        self.before = now


class KeepsThemAtTheEnd(KeepsGradients):
    """The same in another hook, where gradients are those of the whole step."""

    def on_after_backward(self) -> None:
        """Nothing here."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        KeepsGradients.on_after_backward(self)


@pytest.mark.parametrize("data", [batches, two_shapes])
@pytest.mark.parametrize("verify", ["first", "off", 3])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("kind", [KeepsGradients, KeepsThemAtTheEnd])
def test_gradients_that_are_kept_keep_their_values(
    backend: str, tmp_path: Path, kind: type[KeepsGradients], precision: str, verify: Any, data: Any
) -> None:
    eager, captured = fit_twice(
        backend,
        tmp_path,
        module=kind,
        precision=precision,
        capture={"verify": verify},
        data=data,
        validation=0,
    )
    compare(eager, captured)
    assert captured.module.products == eager.module.products
    assert len(eager.module.products) == 2 * len(data()) - 1
