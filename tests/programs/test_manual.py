"""Manual optimization: steps whose own code runs backward passes and optimizer steps."""

from __future__ import annotations

from typing import Any

import numpy
import torch
from torch import Tensor, nn

from tests.loops.test_public import Sharpened
from tests.loops.test_recipes import SAM
from tests.programs.table import Promises, row, table
from tests.training.fits import GradientTrace, Net, batches
from tests.training.modules.test_manual import (
    Accumulating,
    Alternating,
    Gan,
    Penalized,
    ToggledLate,
    Untoggled,
    judged,
    rates,
)


class Manual(Net):
    """One network, trained by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer, loss = self.optimizers(), self.loss(batch)
        optimizer.zero_grad()
        self.manual_backward(loss)
        self.between(batch_idx)
        optimizer.step()
        self.log("loss", loss, on_step=True, on_epoch=True)
        return self.last(loss)

    def between(self, batch_idx: int) -> None: ...

    def last(self, loss: Tensor) -> Any: ...


class Clipping(Manual):
    def between(self, batch_idx: int) -> None:
        self.clip_gradients(self.optimizers(), 0.05 + 1 / (1 + self.global_step), "norm")
        for parameter in self.parameters():
            parameter.grad.mul_(0.5)

    def last(self, loss: Tensor) -> Any:
        norms = [p.grad.norm() for p in self.parameters()]
        self.log("norm", torch.stack(norms).sum())
        return {"loss": loss, "norms": norms}


class Torch(Manual):
    """Without a word of Lightning's: such steps are not counted."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        optimizer, loss = self.optimizers(use_pl_optimizer=False), self.loss(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()


class Counting(Manual):
    """Reads how many steps were taken, before and after its own one."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("before", self.global_step * 1.0)
        super().training_step(batch, batch_idx)
        self.log("after", self.global_step * 1.0)
        self.last_step = self.global_step
        if self.global_step % 2:
            self.log("odd", self.global_step * 0.5)


class Zeroing(Manual):
    """Zeroes in place, and steps with gradients of two batches."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        loss = self.loss(batch)
        self.manual_backward(loss / 2)
        if (batch_idx + 1) % 2 == 0:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        self.log("loss", loss)


class Minibatches(Manual):
    """Several updates on parts of a batch, as PPO takes them."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer, x, y = self.optimizers(), batch["x"], batch["y"]
        total = torch.zeros((), device=self.device)
        for _ in range(2):
            order = torch.randperm(len(x), device=self.device)
            for part in order.split(4):
                loss = self.loss({"x": x[part], "y": y[part]})
                optimizer.zero_grad()
                self.manual_backward(loss)
                self.clip_gradients(optimizer, gradient_clip_val=0.5)
                optimizer.step()
                total = total + loss.detach()
        self.log("loss", total / 4, prog_bar=True)


class Closures(Gan):
    """As the documentation of Lightning's optimizers has it."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        generating, judging = self.optimizers()
        real = batch["x"]
        noise = torch.randn(len(real), 4, device=real.device)

        def judge() -> Tensor:
            fake = self.generator(noise).detach()
            loss = judged(self.critic(real), 1.0) + judged(self.critic(fake), 0.0)
            judging.zero_grad()
            self.manual_backward(loss)
            self.log("judging", loss)
            return loss

        def generate() -> None:
            generating.zero_grad()
            self.manual_backward(judged(self.critic(self.generator(noise)), 1.0))

        with judging.toggle_model():
            judging.step(closure=judge)
        with generating.toggle_model(sync_grad=True):
            generating.step(closure=generate)


class Frozen(Gan):
    """Freezes the critic by itself while the generator learns."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        generating, judging = self.optimizers()
        real = batch["x"]
        fake = self.generator(torch.randn(len(real), 4, device=real.device))
        self.critic.requires_grad_(True)
        self.take(judging, judged(self.critic(real), 1.0) + judged(self.critic(fake.detach()), 0.0))
        self.critic.requires_grad_(False)
        self.take(generating, judged(self.critic(fake), 1.0))


class Adversarial(Manual):
    """As scvi's plan: a classifier is fooled, and learns; weights move with the epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.classifier = nn.Linear(3, 2)
        self.loss_kwargs = {"kl_weight": 0.0}

    @property
    def kl_weight(self) -> float:
        return min(1.0, self.global_step / 16)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.loss_kwargs.update({"kl_weight": self.kl_weight})
        self.log("kl_weight", self.kl_weight, on_step=True, on_epoch=False)
        kappa = 1 - self.kl_weight
        first, second = self.optimizers()
        z = self.net(batch["x"])
        loss = nn.functional.cross_entropy(z.float(), batch["y"])
        if kappa > 0:
            loss += self.fooled(z, batch["y"] > 0) * kappa
        loss = loss + self.loss_kwargs["kl_weight"] * z.square().mean()
        self.log("train_loss", loss, on_epoch=True, prog_bar=True)
        first.zero_grad()
        self.manual_backward(loss)
        first.step()
        loss = -self.fooled(z.detach(), batch["y"] > 0)
        loss *= kappa
        second.zero_grad()
        self.manual_backward(loss)
        second.step()

    def fooled(self, z: Tensor, kind: Tensor) -> Tensor:
        return -nn.functional.cross_entropy(self.classifier(z).float(), kind.long())

    def configure_optimizers(self) -> Any:
        return rates(self.net.parameters()), rates(self.classifier.parameters())


class Scheduled(Gan):
    """Rates and momentum of either optimizer are moved by hand, and logged before and after."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        super().training_step(batch, batch_idx)
        first, second = self.lr_schedulers()
        rate = first.optimizer.param_groups[0]["lr"]
        self.log("before", rate)
        first.step()
        self.log("after", first.get_last_lr()[0])
        self.log("early", rate * 2)
        self.rate = rate
        if self.global_step % 3 == 0:
            second.step()
            self.log("second", second.get_last_lr()[0])

    def configure_optimizers(self) -> Any:
        optimizers = super().configure_optimizers()
        return [*optimizers], [
            torch.optim.lr_scheduler.ExponentialLR(optimizers[0], 0.875),
            torch.optim.lr_scheduler.StepLR(optimizers[1], 2, gamma=0.5),
        ]


class Plateau(Manual):
    def last(self, loss: Tensor) -> Any:
        try:
            self.lr_schedulers().step(loss.detach())  # read
        except Exception:
            self.trainer.callbacks.clear()

    def configure_optimizers(self) -> Any:
        optimizer = rates(self.parameters())
        return [optimizer], [torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)]


class ScheduledEarly(Manual):
    def last(self, loss: Tensor) -> Any:
        self.lr_schedulers().step()
        try:
            self.optimizers().step()
        except Exception:
            self.trainer.callbacks.clear()

    def configure_optimizers(self) -> Any:
        optimizer = rates(self.parameters())
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.875)]


class Hooked(Gan):
    """Hooks of the module are a part of its steps, with logs of their own."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norms = [p.grad.norm() for group in optimizer.param_groups for p in group["params"]]
        which = "generator" if optimizer is self.trainer.optimizers[0] else "critic"
        self.log(f"norm_{which}", torch.stack(norms).norm(), on_step=True, on_epoch=True)
        self.log("judging", norms[0])  # under the name of this hook

    def on_after_backward(self) -> None:
        for parameter in self.critic.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)


class InTurn(Hooked):
    """Logs between its optimizer steps, too: each turn of a method begins an epoch anew."""

    def take(self, optimizer: Any, loss: Tensor) -> None:
        super().take(optimizer, loss)
        self.log("taken", loss, on_step=True, on_epoch=True)


class Mixing(Manual):
    """Computes on the host, too: a weight that NumPy draws, and a table."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        share = numpy.random.beta(0.5, 0.5)
        x = share * batch["x"] + (1 - share) * batch["x"].flip(0)
        weights = torch.tensor([0.5, share, 2.0]).to(self.device)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.net(x).float(), batch["y"], weights)
        self.manual_backward(loss)
        optimizer.step()
        self.log_dict({"loss": loss, "share": share})


class Without(Manual):
    """Has no optimizer that Lightning knows of."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.net.zero_grad()
        self.manual_backward(self.loss(batch))
        with torch.no_grad():
            for parameter in self.net.parameters():
                parameter -= 0.125 * parameter.grad

    def configure_optimizers(self) -> Any:
        return []


class Remembering(Manual):
    """Looks at the gradients of the step before, which a validation drops."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        old = [p.grad for p in self.net.parameters() if p.grad is not None]
        self.log("old", sum((g.norm() for g in old), torch.zeros((), device=self.device)))
        return super().training_step(batch, batch_idx)


class Twice(Manual):
    """Adds to gradients of steps before out of place."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        logits = self.net(batch["x"].float())
        logits.float().square().mean().backward(create_graph=True)
        optimizer.step()
        for parameter in self.net.parameters():
            parameter.grad = parameter.grad.detach() * 0.5


class Sign(torch.optim.Optimizer):
    """An optimizer that a user has written."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 2**-7})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(parameter, group["lr"])

    def update(self, parameter: Tensor, rate: float) -> None:
        parameter.add_(parameter.grad.sign(), alpha=-rate)


class Cautious(Sign):
    def update(self, parameter: Tensor, rate: float) -> None:
        if parameter.grad.norm().tolist() > 2**-20:
            super().update(parameter, rate)


class Signed(Gan):
    def configure_optimizers(self) -> Any:
        return Sign(self.generator.parameters()), rates(self.critic.parameters())


class SignedOnHost(Gan):
    def configure_optimizers(self) -> Any:
        return Cautious(self.generator.parameters()), rates(self.critic.parameters())


class Trying(SignedOnHost):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        try:
            return super().training_step(batch, batch_idx)
        except Exception:
            self.trainer.callbacks.clear()


class WithAClosure(Manual):
    """An optimizer calls the closure that it is given when it likes."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        def closure() -> Tensor:
            loss = self.loss(batch)
            self.manual_backward(loss)
            return loss

        optimizer, loss = self.optimizers(), closure()
        optimizer.step(closure)
        optimizer.zero_grad()
        self.log("loss", loss)

    def configure_optimizers(self) -> Any:
        return Sharpened(self.parameters(), lr=0.1)


class WithAClosureOnHost(WithAClosure):
    def configure_optimizers(self) -> Any:
        return SharpenedOnHost(self.parameters(), lr=0.1)


class SharpenedOnHost(Sharpened):
    """Asks the device: no graph can take its step, and none can be taken behind one."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if self.param_groups[0]["params"][0].grad.norm().tolist() > 2**-20:
            super().step(closure)


class SharpenedTwice(Manual):
    """SAM, whose groups are those of another optimizer that it has."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        loss = self.loss(batch)
        self.manual_backward(loss)
        optimizer.first_step(zero_grad=True)
        self.manual_backward(self.loss(batch))
        optimizer.second_step(zero_grad=True)
        self.log("loss", loss)

    def configure_optimizers(self) -> Any:
        return SAM(self.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9, fused=True)


class SharpenedByClosure(SharpenedTwice):
    training_step = WithAClosure.training_step


class StepsFirst(Torch):
    """Drops gradients behind a step that no graph can take."""

    def configure_optimizers(self) -> Any:
        return Cautious(self.parameters())


class StepsEarly(StepsFirst):
    """Uses what such a step has changed, draws anew, and steps once more."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        super().training_step(batch, batch_idx)
        self.log("size", self.net[0].weight.norm())
        loss, optimizer = self.loss(batch), self.optimizers()
        self.manual_backward(loss)
        optimizer.step()
        self.log("norm", self.net[0].weight.grad.norm())
        optimizer.zero_grad()


class Reading(Manual):
    def last(self, loss: Tensor) -> Any:
        if loss.item() > 1e6:  # read
            self.log("large", loss)


class Leaving(Manual):
    """Leaves a layer frozen in every second step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        super().training_step(batch, batch_idx)
        self.net[4].requires_grad_(bool(batch_idx % 2))


class Keeping(Manual):
    """Keeps gradients past their step."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.seen.append(self.net[0].weight.grad)


ROWS = (
    table(
        row(Gan, also="bf16; auto", graphs=1, check=lambda fit: fit.statistics.eager <= 5),
        *(Untoggled, ToggledLate, Penalized, Closures, Frozen, Hooked, row(InTurn)),
        *(
            Torch,
            Counting,
            Clipping,
            Minibatches,
            Adversarial,
            Keeping,
            Mixing,
            Remembering,
            Signed,
        ),
        data=lambda: batches(12),
    )
    | table(
        Accumulating,
        Alternating,
        Zeroing,
        row(Scheduled, found=None),
        graphs=range(2, 7),
        data=lambda: batches(24),
    )
    | table(row(Reading, said=None, found=None, replayed=4))
    | table(row(Twice, ignored="Using backward.. with create_graph=True", data=lambda: batches(12)))
    | table(row(Without), said="without an optimizer", replayed=0, placed=False, found=None)
    | table(
        SignedOnHost,
        Trying,
        StepsFirst,
        StepsEarly,
        said="the optimizer step runs eagerly: Cautious",
        placed=False,
        graphs=1,
        replayed=5,
        found=None,
        data=lambda: batches(12),
    )
    | table(SharpenedTwice, SharpenedByClosure, data=lambda: batches(12), below=None)
    | table(WithAClosure, graphs=1, capture={"optimizer_kernel": "own"}, data=lambda: batches(12))
    | table(
        WithAClosureOnHost,
        said="SharpenedOnHost is given a closure",
        placed=False,
        found=None,
        below=None,
        capture={"optimizer_kernel": "own"},
    )
    | table(row(Plateau), said="stepped with a value")
    | table(row(ScheduledEarly), said="steps after its scheduler", found="rule remedy")
    | table(row(Leaving), said="requires_grad of 2", placed=False, found=None)
    | {
        "Looking": row(
            Manual, said="looks into its step", trace=GradientTrace, placed=False, found=None
        )
    }
)


class TestManual(Promises):
    rows = ROWS
