"""Manual optimization with graphed submodules: GANs, several optimizers, several calls a step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from tests.training.fits import Fit, assert_nothing_left, batches, compare, fit_twice

LOGITS = nn.functional.binary_cross_entropy_with_logits


def rates(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=2**-7, fused=True)


class Gan(LightningModule):
    """Generator and discriminator on ``{"x": f32[N, 8]}``, each called twice in a step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(
            nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8)
        )
        self.critic = nn.Sequential(
            nn.Linear(8, 16), nn.LeakyReLU(0.25), nn.Dropout(0.25), nn.Linear(16, 1)
        )

    def training_step(self, batch: Any, batch_idx: int) -> None:
        generating, judging = self.optimizers()
        real = batch["x"]
        noise = torch.randn(len(real), 4, device=real.device)
        self.toggle_optimizer(judging)
        fake = self.generator(noise).detach()
        loss = judged(self.critic(real), 1.0) + judged(self.critic(fake), 0.0)
        self.take(judging, loss)
        self.untoggle_optimizer(judging)
        self.toggle_optimizer(generating)
        self.take(generating, judged(self.critic(self.generator(noise)), 1.0))
        self.untoggle_optimizer(generating)
        self.log("judging", loss, on_step=True, on_epoch=True)

    def take(self, optimizer: Any, loss: Tensor) -> None:
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.critic(batch["x"]).mean())

    def configure_optimizers(self) -> Any:
        return rates(self.generator.parameters()), rates(self.critic.parameters())


def judged(logits: Tensor, target: float) -> Tensor:
    return LOGITS(logits.float(), torch.full_like(logits, target).float())


class Untoggled(Gan):
    """Generator first; the critic learns from the generator's loss, too, until it is zeroed."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        generating, judging = self.optimizers()
        real = batch["x"]
        fake = self.generator(torch.randn(len(real), 4, device=real.device))
        self.take(generating, judged(self.critic(fake), 1.0))
        loss = judged(self.critic(real), 1.0) + judged(self.critic(fake.detach()), 0.0)
        self.take(judging, loss)


class ToggledLate(Gan):
    """The critic judges before it is frozen; gradients come to it no more by the backward pass."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        generating, judging = self.optimizers()
        real = batch["x"]
        fake = self.generator(torch.randn(len(real), 4, device=real.device))
        judgement = judged(self.critic(fake), 1.0)
        self.toggle_optimizer(generating)
        self.take(generating, judgement)
        self.untoggle_optimizer(generating)
        self.toggle_optimizer(judging)
        loss = judged(self.critic(real), 1.0) + judged(self.critic(fake.detach()), 0.0)
        self.take(judging, loss)
        self.untoggle_optimizer(judging)


class Accumulating(Gan):
    """Optimizers step every other batch; gradients are clipped, rates scheduled by hand."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        generating, judging = self.optimizers()
        real = batch["x"]
        fake = self.generator(torch.randn(len(real), 4, device=real.device))
        self.manual_backward(judged(self.critic(real), 1.0) / 2)
        self.manual_backward(judged(self.critic(fake), 0.0) / 2)
        if batch_idx % 2:
            for optimizer in (generating, judging):
                self.clip_gradients(optimizer, 0.25, "norm")
                optimizer.step()
                optimizer.zero_grad()


class Alternating(Gan):
    """Every third batch trains the generator, the others the critic."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        generating, judging = self.optimizers()
        real = batch["x"]
        noise = torch.randn(len(real), 4, device=real.device)
        if batch_idx % 3 == 2:
            self.toggle_optimizer(generating)
            self.take(generating, judged(self.critic(self.generator(noise)), 1.0))
            self.untoggle_optimizer(generating)
            return
        self.toggle_optimizer(judging)
        with torch.no_grad():
            fake = self.generator(noise)
        self.take(judging, judged(self.critic(real), 1.0) + judged(self.critic(fake), 0.0))
        self.untoggle_optimizer(judging)


class Penalized(Gan):
    """The critic's slope between real and fake is kept at one, as in WGAN-GP."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        generating, judging = self.optimizers()
        real = batch["x"]
        noise = torch.randn(len(real), 4, device=real.device)
        fake = self.generator(noise).detach()
        loss = self.critic(fake).mean() - self.critic(real).mean() + self.penalty(real, fake)
        self.take(judging, loss)
        self.take(generating, -self.critic(self.generator(noise)).mean())

    def penalty(self, real: Tensor, fake: Tensor) -> Tensor:
        share = torch.rand(len(real), 1, device=real.device)
        between = (share * real + (1 - share) * fake).requires_grad_()
        scores = self.critic(between)  # the backward pass begins at them, as in published code
        ones = torch.ones_like(scores)
        (slope,) = torch.autograd.grad(scores, between, ones, create_graph=True, retain_graph=True)
        return ((slope.norm(dim=1) - 1) ** 2).mean()


MODULES = {"modules": ["generator", "critic"], "scope": "modules"}


def trained(backend: str, root: Path, module: Callable[[], Any], **options: Any) -> Fit:
    """A fit with the callback that gave the values of the one without."""
    tolerance = options.pop("tolerance", 0.0)
    options = {"capture": MODULES, "data": lambda: batches(12), **options}
    eager, captured = fit_twice(backend, root, module=module, **options)
    assert_nothing_left(captured)
    compare(eager, captured, replayed=False, tolerance=tolerance)
    assert captured.statistics.replayed > 0
    return captured


def replays(fit: Fit) -> dict[str, int]:
    """How many calls of each module were replayed."""
    counts: dict[str, int] = {}
    for record in fit.statistics.graphs:
        counts[record.scope] = counts.get(record.scope, 0) + record.replays
    return counts


@pytest.mark.parametrize("module", [Gan, Untoggled])
def test_both_networks_are_called_twice_in_a_step(
    backend: str, tmp_path: Path, module: Any
) -> None:
    fit = trained(backend, tmp_path, module)
    steps = fit.statistics.replayed
    assert steps > 10
    assert fit.statistics.captures == 1
    assert fit.statistics.fallbacks == fit.statistics.recaptures == []
    fakes = 2 if module is Gan else 1
    assert replays(fit) == {"module generator": fakes * steps, "module critic": 3 * steps}


def test_steps_that_train_now_one_and_now_the_other(backend: str, tmp_path: Path) -> None:
    fit = trained(backend, tmp_path, Alternating, data=lambda: batches(24))
    assert fit.statistics.captures == 1
    assert fit.statistics.recaptures == fit.statistics.fallbacks == []
    counts = replays(fit)
    assert counts["module generator"] > 30
    assert counts["module critic"] > 10  # of its calls in steps of the other kind none


def test_modules_that_are_named_are_taken_in_the_default_scope(
    backend: str, tmp_path: Path
) -> None:
    capture = {**MODULES, "scope": "auto"}
    fit = trained(backend, tmp_path, Gan, capture=capture)
    assert fit.statistics.modules == ["generator", "critic"]


@pytest.mark.parametrize("module", [Gan, Untoggled, ToggledLate, Accumulating])
def test_each_call_has_graphs_by_default(backend: str, tmp_path: Path, module: Any) -> None:
    fit = trained(backend, tmp_path, module, capture={"scope": "modules"})
    assert fit.statistics.modules == ["generator", "critic"]
    named = trained(backend, tmp_path / "named", module)
    assert replays(fit) == replays(named)
    assert fit.statistics.fallbacks == fit.statistics.recaptures == []


class Inside(Gan):
    """The critic is a part of another module, which is called too, and refused at first."""

    def __init__(self) -> None:
        super().__init__()
        self.pair = Pair(self.generator, self.critic)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        generating, judging = self.optimizers()
        real = batch["x"]
        noise = torch.randn(len(real), 4, device=real.device)
        self.take(generating, judged(self.pair(noise), 1.0))
        self.take(judging, judged(self.critic(real), 1.0) + judged(self.pair(noise), 0.0))


class Pair(nn.Module):
    def __init__(self, generator: nn.Module, critic: nn.Module, *, reads: bool = False) -> None:
        super().__init__()
        self.generator, self.critic, self.reads = generator, critic, reads

    def forward(self, noise: Tensor) -> Tensor:
        fake = self.generator(noise)
        if self.reads and fake.sum().item() > 1e6:
            fake = fake + 1
        judgement: Tensor = self.critic(fake)
        return judgement


class ReadingInside(Inside):
    def __init__(self) -> None:
        super().__init__()
        self.pair.reads = True


@pytest.mark.filterwarnings("ignore:GraphCapture")
@pytest.mark.parametrize("module", [Inside, ReadingInside])
def test_a_module_that_is_called_alone_and_inside_of_another(
    backend: str, tmp_path: Path, module: Any
) -> None:
    """What the graph of the outer one has inside is no call of a replay."""
    capture = {"scope": "modules", "on_failure": "eager"}
    fit = trained(backend, tmp_path, module, capture=capture)
    steps = fit.statistics.replayed
    assert steps > 10
    outer, inner = {"module pair": 2 * steps, "module critic": steps}, ["generator", "critic"]
    if module is Inside:
        assert replays(fit) == outer
    else:
        assert fit.statistics.modules == inner
        assert replays(fit) == {"module generator": 2 * steps, "module critic": 3 * steps}


@pytest.mark.parametrize("capture", [MODULES, {"scope": "modules"}])
def test_a_gradient_penalty_stays_eager(
    backend: str, tmp_path: Path, capture: dict[str, Any]
) -> None:
    reason = r"a call of `critic` stays eager: it is differentiated twice \(create_graph=True\)"
    with pytest.warns(UserWarning, match=reason):
        fit = trained(backend, tmp_path, Penalized, tolerance=1e-5, capture=capture)
    steps = fit.statistics.replayed
    assert replays(fit) == {"module generator": 2 * steps, "module critic": 3 * steps}


class TakingTurns(Gan):
    """Judges all of the batch or half of it, with the generator's backward pass still to come."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        generating, judging = self.optimizers()
        real = batch["x"][: 4 + 4 * (batch_idx % 2)]
        fake = self.generator(torch.randn(8, 4, device=real.device))
        loss = judged(self.critic(real), 1.0) + judged(self.critic(fake.detach()), 0.0)
        self.take(judging, loss)
        self.take(generating, judged(self.critic(fake), 1.0))


def test_steps_that_part_midway(backend: str, tmp_path: Path) -> None:
    capture = {"scope": "modules"}
    fit = trained(backend, tmp_path, TakingTurns, data=lambda: batches(24), capture=capture)
    assert fit.statistics.captures == 1
    assert fit.statistics.eager <= 16
    assert fit.statistics.fallbacks == []


def test_accumulation_by_hand(backend: str, tmp_path: Path) -> None:
    fit = trained(backend, tmp_path, Accumulating)
    assert fit.statistics.fallbacks == []


def test_an_unfinished_backward_spoils_nothing(backend: str, tmp_path: Path) -> None:
    class Skipping(Gan):
        """Some steps end before their backward pass."""

        def training_step(self, batch: Any, batch_idx: int) -> None:
            generating, _ = self.optimizers()
            fake = self.generator(torch.randn(8, 4, device=self.device))
            loss = judged(self.critic(fake), 1.0)
            if batch_idx % 5 != 4:
                self.take(generating, loss)

    fit = trained(backend, tmp_path, Skipping)
    assert fit.statistics.fallbacks == []
