"""Gradients that user code keeps from one step to the next, as eager training lets them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn

from lightning_graphs.regions import gradients
from lightning_graphs.regions.gradients import GradientBuffers, PersistentGradients
from tests.training.fits import Net, batches, compare, fit_twice, prepare

KEPT = "a gradient of an earlier step is kept, and is copied now"
COPIES: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda gradient: gradient,
    "detached": lambda gradient: gradient.detach(),
    "a view": lambda gradient: gradient.view(-1)[1:],
    "data": lambda gradient: gradient.data,
    "an array": lambda gradient: torch.from_numpy(gradient.numpy()),
    "another library": lambda gradient: torch.from_dlpack(gradient),
}


def two_shapes() -> list[dict[str, Tensor]]:
    """Batches of two sizes in turn."""
    pairs = zip(batches(8), batches(8, 6), strict=True)
    return [batch for pair in pairs for batch in pair]


class KeepsGradients(Net):
    """Compares each gradient with the one of the step before, which it has kept as it was."""

    def __init__(self, show: Callable[[Tensor], Tensor] = COPIES["itself"]) -> None:
        super().__init__()
        self.show = show
        self.before: list[Tensor] = []
        self.products: list[float] = []

    def on_after_backward(self) -> None:
        window = self.trainer.accumulate_grad_batches
        if self.trainer.fit_loop.epoch_loop.batch_idx % window == window - 1:
            self.look()

    def look(self) -> None:
        """Compare them with those of before, and keep them."""
        now = [self.show(p.grad) for p in self.parameters() if p.grad is not None]
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
@pytest.mark.parametrize("verify", [True, False, 3])
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
    assert captured.statistics.recaptures.count(KEPT) == 1


class KeepsAllOfThem(KeepsGradients):
    """Of each micro-batch: the next one adds to what is kept."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.look()

    def on_after_backward(self) -> None:
        self.look()


class KeepsThoseBefore(KeepsGradients):
    """Keeps what it exchanges, and reads it after the step."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.raw = [self.show(p.grad) for p in self.parameters()]
        for parameter in self.parameters():
            parameter.grad = parameter.grad.clamp(-(2**-6), 2**-6)

    def on_after_backward(self) -> None:
        """Nothing here."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (batch_idx + 1) % self.trainer.accumulate_grad_batches == 0:
            self.products.append(float(sum(kept.sum() for kept in self.raw)))


@pytest.mark.parametrize("scope", ["step", "modules"])
@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize(
    "kind", [KeepsGradients, KeepsThemAtTheEnd, KeepsAllOfThem, KeepsThoseBefore]
)
@pytest.mark.parametrize("shown", COPIES)
def test_what_shows_their_memory_keeps_its_values(
    backend: str, tmp_path: Path, shown: str, kind: type[KeepsGradients], window: int, scope: str
) -> None:
    if shown == "an array" and backend == "cuda":
        shown = "detached"  # arrays are on the CPU
    eager, captured = fit_twice(
        backend,
        tmp_path,
        module=lambda: kind(COPIES[shown]),
        validation=0,
        accumulate_grad_batches=window,
        gradient_clip_val=0.5,
        max_epochs=3,
        capture={"scope": scope, **({"modules": ["net"]} if scope == "modules" else {})},
    )
    compare(eager, captured)
    assert captured.module.products == eager.module.products
    assert len(eager.module.products) >= 30 // window - 1


class TakesThemAway(Net):
    """Keeps the gradients of every fifth step, and leaves none to the parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % 5 == 4:
            self.kept += [p.grad for p in self.parameters()]
            self.zero_grad()


def test_gradients_that_are_taken_away_at_times(backend: str, tmp_path: Path) -> None:
    eager, captured = fit_twice(backend, tmp_path, module=TakesThemAway, max_epochs=3)
    compare(eager, captured)
    assert len(captured.module.kept) == 6 * len(list(captured.module.parameters()))
    for mine, theirs in zip(captured.module.kept, eager.module.kept, strict=True):
        assert torch.equal(mine, theirs)


class KeepsTheLast(Net):
    """Keeps the gradients of the last step, for after the fit."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.trainer.is_last_batch:
            self.kept = [p.grad.detach() for p in self.parameters()]


def test_gradients_that_outlive_the_fit(backend: str, tmp_path: Path) -> None:
    eager, captured = fit_twice(backend, tmp_path, module=KeepsTheLast)
    compare(eager, captured)
    if backend == "cuda":
        torch.cuda.empty_cache()  # what no object owns is gone
    assert captured.module.kept
    for mine, theirs in zip(captured.module.kept, eager.module.kept, strict=True):
        assert torch.equal(mine, theirs)


class OnAGPU(Tensor):
    """A tensor whose memory may be aliased."""

    is_cuda = True


def test_who_keeps_lent_gradients_has_them_after_the_graph() -> None:
    """Those in ``.grad``, and those that have been taken away; the graph goes on with its own."""
    memory = torch.arange(8.0)  # of the graph
    buffers = [memory[:4].as_subclass(OnAGPU), memory[4:].as_subclass(OnAGPU)]
    parameters = [nn.Parameter(torch.zeros(4)) for _ in buffers]
    attached = GradientBuffers(parameters, buffers, in_pool=True)
    attached.release_ownership()
    attached.bind()
    kept = [p.grad for p in parameters]
    assert [g.data_ptr() for g in kept if g is not None] == [b.data_ptr() for b in buffers]
    parameters[1].grad = None
    attached.copy_out()
    assert parameters[0].grad is kept[0]
    assert [b.data_ptr() for b in attached.buffers] == [b.data_ptr() for b in buffers]
    memory.fill_(-1.0)  # the next step
    assert [g.tolist() for g in kept if g is not None] == [[0, 1, 2, 3], [4, 5, 6, 7]]


class KeepsThemLate(KeepsGradients):
    """Keeps gradients where the next forward pass has run already."""

    def on_after_backward(self) -> None:
        """Nothing here."""

    def on_before_zero_grad(self, optimizer: Any) -> None:
        if self.net[0].weight.grad is not None:
            KeepsGradients.on_after_backward(self)


def test_what_is_kept_too_late_is_said_and_right_from_then_on(backend: str, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="overwritten once: keep a copy"):
        eager, captured = fit_twice(backend, tmp_path, module=KeepsThemLate, validation=0)
    compare(eager, captured, replayed=False)
    pairs = list(zip(captured.module.products, eager.module.products, strict=True))
    assert sum(mine != theirs for mine, theirs in pairs) == 1


def test_what_is_kept_too_late_is_right_where_submodules_are_graphs(
    backend: str, tmp_path: Path
) -> None:
    capture = {"scope": "modules", "modules": ["net"]}
    options: dict[str, Any] = {"module": KeepsThemLate, "validation": 0, "capture": capture}
    eager, captured = fit_twice(backend, tmp_path, **options)
    compare(eager, captured)
    assert captured.module.products == eager.module.products


def _no_copies(_: Any, are_copied: bool) -> None:
    assert not are_copied


class Looks(Callback):
    """Reads gradients in every hook, and keeps none."""

    def __init__(self) -> None:
        self.norms: list[Tensor] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.norms += [p.grad.detach().view(-1).norm() for p in pl_module.parameters()]


@pytest.mark.parametrize("scope", ["step", "modules"])
@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("looks", [False, True])
def test_gradients_that_no_code_keeps_are_not_copied(
    backend: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    looks: bool,
    window: int,
    scope: str,
) -> None:
    copied: list[int] = []
    monkeypatch.setattr(gradients, "clone_all", lambda tensors: copied.append(len(tensors)))
    monkeypatch.setattr(PersistentGradients, "are_copied", property(lambda _: False, _no_copies))
    captured = prepare(
        backend,
        tmp_path,
        True,
        data=two_shapes,
        callbacks=lambda: [Looks()] if looks else [],
        accumulate_grad_batches=window,
        capture={"scope": scope, **({"modules": ["net"]} if scope == "modules" else {})},
    ).run()
    assert captured.statistics.replayed > 0
    assert KEPT not in captured.statistics.recaptures
    assert copied == []
