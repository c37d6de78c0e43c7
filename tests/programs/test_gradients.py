"""Gradients of tensors that are no parameters: activations, inputs, tensors in attributes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from tests.programs.table import Promises, table
from tests.training.fits import Fit, Net, batches


def _sum(tensor: Tensor | None) -> float | None:
    return None if tensor is None else float(tensor.detach().double().sum())


class Seeing(Net):
    """Writes down gradients in hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float | None] = []
        self.start()

    def start(self) -> None:
        """What there is besides the network."""

    def hidden(self, x: Tensor) -> Tensor:
        """An activation that keeps its gradient."""
        found: Tensor = self.net[0](x)
        found.retain_grad()
        return found

    def rest(self, hidden: Tensor, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(self.net[1:](hidden), batch["y"])

    def see(self, *tensors: Tensor) -> None:
        self.seen += [_sum(tensor.grad) for tensor in tensors]


class Saliency(Seeing):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.h = self.hidden(batch["x"])
        return self.rest(self.h, batch)

    def on_after_backward(self) -> None:
        self.see(self.h)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.see(self.h)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if hasattr(self, "h"):
            self.see(self.h)


class Returned(Seeing):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hidden = self.hidden(batch["x"])
        return {"loss": self.rest(hidden, batch), "h": hidden}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.see(outputs["h"])


class InADict(Seeing):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hidden = self.hidden(batch["x"])
        loss = self.rest(hidden, batch)
        loss.retain_grad()
        self.acts = {"h": hidden, "loss": loss}
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.see(*self.acts.values())


class InAList(Seeing):
    def start(self) -> None:
        self.acts: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hidden = self.hidden(batch["x"])
        self.acts.append(hidden)
        return self.rest(hidden, batch)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.see(*self.acts)
        self.acts.clear()


class OfHooks(Seeing):
    """As Grad-CAM stores activations and gradients."""

    def start(self) -> None:
        self.net[0].register_forward_hook(self.keep)
        self.net[4].register_full_backward_hook(self.keep_gradient)

    def keep(self, _: Any, __: Any, output: Tensor) -> None:
        output.retain_grad()
        self.activation = output

    def keep_gradient(self, _: Any, __: Any, gradients: Any) -> None:
        self.gradient = gradients[0].detach()

    def on_after_backward(self) -> None:
        self.see(self.activation)
        self.seen.append(_sum(self.gradient))


class OfTheBatch(Seeing):
    """Gradients of inputs; lists of batches come again, with the gradients that they have."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        batch["x"].requires_grad_()
        return self.loss(batch)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.see(batch["x"])
        self.seen.append(float(batch["x"].requires_grad))


class Zeroed(OfTheBatch):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        batch["x"].grad = None
        return super().training_step(batch, batch_idx)


class OfACopy(Seeing):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.x = batch["x"].clone().requires_grad_()
        return self.loss({**batch, "x": self.x})

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.see(self.x)


class OfAnAttribute(Seeing):
    """A tensor that is no parameter, and whose gradient only every fourth step zeroes."""

    def start(self) -> None:
        self.token = torch.zeros(8, requires_grad=True)

    def on_fit_start(self) -> None:
        self.token = self.token.detach().to(self.device).requires_grad_()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss({**batch, "x": batch["x"] + self.token})

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.see(self.token)
        if batch_idx % 4 == 3:
            self.token.grad = None


class OfTheStepBefore(Saliency):
    """Keeps one activation of the step before."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.old = getattr(self, "h", None)
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.see(*[h for h in (self.h, self.old) if h is not None])


class OfArguments(Seeing):
    """Of what a submodule is given, and returns."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.x = batch["x"].clone().requires_grad_()
        self.logits = self.net(self.x)
        self.logits.retain_grad()
        return nn.functional.cross_entropy(self.logits, batch["y"])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.see(self.x, self.logits)


class Adversarial(Seeing):
    """Its own backward pass leaves gradients to parameters, which Lightning drops."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = batch["x"].clone().requires_grad_()
        self.loss({**batch, "x": x}).backward()
        assert x.grad is not None
        self.direction = x.grad.sign()
        return self.loss({**batch, "x": (x + self.direction / 8).detach()})

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(_sum(self.direction))


class ReadsItsOwn(OfAnAttribute):
    """Steps by hand, at the beginning of the next step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.token.grad is not None:  # read
            with torch.no_grad():
                self.token -= 0.125 * self.token.grad
        return super().training_step(batch, batch_idx)


class ReadsTheLast(Saliency):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        last = getattr(self, "h", None)
        gradient = last.grad if last is not None else None  # read
        loss = super().training_step(batch, batch_idx)
        return loss if gradient is None else loss * (1 + gradient.norm())


class ReadsInAHook(Net):
    """A hook of a backward pass inside of the step, in a thread of autograd on a GPU."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, seen = batch["x"].clone().requires_grad_(), []
        weight, logits = self.net[0].weight, self.net(x)
        logits.register_hook(lambda _: seen.append(weight.grad))  # read
        (gradient,) = torch.autograd.grad(logits.square().sum(), x, create_graph=True)
        return self.loss(batch) + gradient.square().mean() * (1 + (seen[0] is not None))


WINDOWS = "accumulated; cut; cut, accumulated"


class CancelsTheLast(Net):
    """Cancels gradients of its last layer in the first epoch, as DINO and SwAV do."""

    def on_after_backward(self) -> None:
        if self.current_epoch < 1:
            for parameter in self.net[-1].parameters():
                parameter.grad = None

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-2, fused=True)


class Attacking(Net):
    """Adds the gradients of an attack on its weights in a hook, which gives them other memory."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.batch = batch
        return self.loss(batch)

    def on_after_backward(self) -> None:
        weight = self.net[0].weight
        self.attack(weight)
        self.loss(self.batch).backward()
        self.put_back(weight)

    def attack(self, weight: Tensor) -> None:
        assert weight.grad is not None
        self.kept = [weight.data.clone()]
        weight.data.add_(weight.grad, alpha=0.5)

    def put_back(self, weight: Tensor) -> None:
        weight.data = self.kept.pop()


class AttackingAsFgm(Attacking):
    """Keeps the weights in a dict of an object."""

    def __init__(self) -> None:
        super().__init__()
        self.attacker = SimpleNamespace(backup={})

    def attack(self, weight: Tensor) -> None:
        assert weight.grad is not None
        self.attacker.backup["weight"] = weight.data.clone()
        weight.data.add_(weight.grad, alpha=0.5)

    def put_back(self, weight: Tensor) -> None:
        weight.data = self.attacker.backup["weight"]
        self.attacker.backup = {}


def steps_in_graphs_again(fit: Fit) -> bool:
    return any("made the state" in reason for reason in fit.statistics.recaptures)


ROWS = (
    table(
        Saliency, Returned, InADict, InAList, OfHooks, OfTheBatch, Zeroed, OfACopy, OfAnAttribute,
        OfTheStepBefore, OfArguments, said=None, replayed=6, also=WINDOWS, data=lambda: batches(8),
        max_epochs=3, validation=0, check=lambda fit: any(fit.module.seen),
    )
    # What a backward pass of the step itself leaves is zeroed.
    | table(Adversarial, said=None, replayed=6, also="cut", validation=0)
    | table(
        ReadsItsOwn, ReadsTheLast, said=r"\.grad of a tensor in an attribute is read at .*# read",
        also="unverified", validation=0,
    )
    | table(
        CancelsTheLast, said=None, found=None, replayed=15, validation=0, max_epochs=3,
        data=lambda: batches(12), check=steps_in_graphs_again,
    )
    | table(Attacking, AttackingAsFgm, said=None, found=None, validation=0, max_epochs=3)
    | table(ReadsInAHook, said=r"\.grad of a parameter is read at .*# read", validation=0)
)  # fmt: skip


class TestGradients(Promises):
    rows = ROWS
