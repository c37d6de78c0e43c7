"""How much a replay may differ from an eager step whose bits it has not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_graphs import VerificationError
from lightning_graphs.regions.tolerance import Tolerance, differences, sizes
from tests.training.fits import Hidden, Net, assert_nothing_left, compare, fit_twice, prepare
from tests.training.guards.test_verification import VERIFYING_ALL


class Rounding(Net):
    """Every run of its Python differs by a few roundings, as kernels with atomics do."""

    size = 2.0**-22

    def __init__(self) -> None:
        super().__init__()
        self.counted = Hidden()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.counted["runs"] += 1
        return self.loss(batch) * (1 + self.size * (self.counted["runs"] % 3))


def test_rounding_that_eager_runs_show_as_well_is_accepted(backend: str, tmp_path: Path) -> None:
    fits = fit_twice(backend, tmp_path, module=Rounding, capture=VERIFYING_ALL)
    compare(*fits, tolerance=1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
def test_difference_of_tensors(device: torch.device, dtype: torch.dtype) -> None:
    first = torch.tensor([3.0, float("nan"), float("inf"), 0.0], device=device, dtype=dtype)
    second = first.clone()
    third = second.clone()
    third[0], third[3] = 0.0, 4.0
    fourth = third.clone()
    fourth[2] = 0.0
    pairs = [(first, other) for other in (second, third, fourth, first[:2])]
    pairs += [(first[:0], second[:0]), (third[:1], first[:1])]
    found = differences(pairs)
    assert [apart.norm for apart in found] == [0.0, 5.0, float("inf"), float("inf"), 0.0, 3.0]
    assert found[1].largest == 4.0
    assert sizes([first, third, first[:0]]) == [3.0, 4.0, 0.0]


def test_the_device_is_waited_for_once(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = []
    for name in ("tolist", "item", "__float__", "__bool__"):
        own = getattr(torch.Tensor, name)
        monkeypatch.setattr(torch.Tensor, name, lambda t, own=own: (waits.append(1), own(t))[1])
    tensors = [torch.full((3,), float(i), device=device) for i in range(40)]
    assert [each.norm for each in differences([(t, t) for t in tensors])] == [0.0] * 40
    assert sizes(tensors)[:2] == [0.0, pytest.approx(3**0.5)]
    assert len(waits) == 2


def test_how_much_may_differ() -> None:
    exact, short = Tolerance("cpu", None), Tolerance("cpu", torch.bfloat16)
    single = torch.float32, 2.0  # of four ones
    assert exact.allowed(*single, 0.0) == 2 * 2.0**-17
    assert short.allowed(*single, 0.0) == 2 * 2.0**-7
    assert Tolerance("cuda", None).allowed(*single, 0.0) == 2 * 2.0**-10
    assert exact.allowed(*single, 2.0**-17) == 2.0**-16 + 4 * 2.0**-17
    assert exact.allowed(*single, 1.0) == 2.0**-16 + 4 * 8 * 2.0**-16, "no noise of any size counts"
    assert exact.allowed(*single, 0.0, gradients=32.0) == (2 + 32 / 16) * 2.0**-17
    assert exact.allowed(torch.int64, 2.0, 0.0) == 0
    assert exact.allowed_of_update(*single, 0.25, 1.0) == 1.0 + 2.0**-16 + 0.5


class Mishap(Exception):
    """What the tests raise."""


@pytest.mark.parametrize("run", [7, 8, 9, 10], ids=["watched", "eager", "again", "a third time"])
def test_an_exception_in_a_check_leaves_nothing(backend: str, tmp_path: Path, run: int) -> None:
    class Failing(Rounding):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            if self.counted["runs"] == run:
                raise Mishap(f"run {run}")
            return loss

    captured = prepare(backend, tmp_path, True, module=Failing, max_steps=6)
    with pytest.raises(Mishap, match=f"run {run}"):
        captured.run()
    assert captured.statistics.replayed == 0
    assert_nothing_left(captured)
    same = prepare(backend, tmp_path / "eager", False, module=Rounding, max_steps=5).run()
    expected = same.module.state_dict()
    assert all(torch.equal(v, expected[k]) for k, v in captured.module.state_dict().items())


class Vanishing(Rounding):
    """The gradient of a bias before a normalization is zero, but for rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0] = torch.nn.Linear(8, 16)


def test_a_gradient_of_nothing_but_rounding_is_no_mismatch(backend: str, tmp_path: Path) -> None:
    captured = prepare(backend, tmp_path, True, module=Vanishing, capture=VERIFYING_ALL).run()
    assert captured.statistics.replayed == 15
    assert captured.statistics.fallbacks == []


class HiddenInOneLayer(Net):
    """Forward values stay as they are: only the gradient of the first layer is another one."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0].weight.register_hook(lambda gradient: gradient * FACTOR["now"])

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        FACTOR["now"] = 1.0 + (self.trainer.global_step >= 9) / 64


FACTOR = Hidden()


def test_a_wrong_gradient_is_named_though_the_loss_is_right(backend: str, tmp_path: Path) -> None:
    captured = prepare(backend, tmp_path, True, module=HiddenInOneLayer, capture={"verify": 3})
    found = r"at step 9, the gradient of `net\.0\.weight` differs by up to"
    with pytest.raises(VerificationError, match=found):
        captured.run()
