"""Loops as people publish them: captured as they are, or refused with their line."""

from __future__ import annotations

import copy
import enum
import math
import os
import random
import sys
from collections import defaultdict, namedtuple
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import StepLR

from tests.loops.test_training import adamw, loss_of
from tests.loops.twice import Lab, twice


def net_of(lab: Lab, *widths: int) -> nn.Sequential:
    parts: list[nn.Module] = []
    for inside, outside in pairwise(widths):
        parts += [nn.Linear(inside, outside), nn.Tanh()]
    return nn.Sequential(*parts[:-1]).to(lab.device)


def trained(lab: Lab, take: Callable[..., Any], count: int = 36, **given: Any) -> list[Any]:
    """Train by a function ``take(model, optimizer, batch, i)``, whose step is captured."""
    model = given.get("model") or net_of(lab, 8, 16, 3)
    optimizer = given.get("optimizer", adamw)(model)

    def train_step(batch: Any, i: int) -> Any:
        return take(model, optimizer, batch, i)

    step = lab.capture(train_step, model, optimizer)
    return [step(batch, i) for i, batch in enumerate(lab.batches(count))]


def update(optimizer: Any, loss: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


class Momentum(torch.optim.Optimizer):
    """Counts in its state, and has a number of its own."""

    scale = 1.0

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(step=0, mean=torch.zeros_like(p))
                state["step"] += 1
                state["mean"].mul_(0.5).add_(p.grad)
                p.add_(state["mean"], alpha=-group["lr"] / (1 - 0.5 ** state["step"]))


def own_optimizer(lab: Lab) -> Any:
    """An optimizer of one's own counts, and the step reads a number of it."""
    model = net_of(lab, 8, 16, 3)
    optimizer = Momentum(model.parameters(), 0.1)

    def train_step(batch: Any) -> Tensor:
        return update(optimizer, optimizer.scale * loss_of(model, batch))

    step, losses = lab.capture(train_step, model, optimizer), []
    for i, batch in enumerate(lab.batches(36)):
        if i == 20:
            optimizer.scale = 0.5
        losses.append(step(batch))
    return losses


def outside_rates(lab: Lab) -> Any:
    """Functions read rates of an optimizer that the loop steps: another one, another graph."""
    model = net_of(lab, 8, 16, 3)
    optimizer = Momentum(model.parameters(), 0.1)
    scheduler = StepLR(optimizer, 12, 0.5)

    def gradients(batch: Any) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, batch) * (1 + scheduler.get_last_lr()[0])
        loss.backward()
        return loss.detach()

    @torch.no_grad()
    def evaluate(batch: Any) -> Tensor:
        return loss_of(model, batch) * optimizer.param_groups[0]["lr"]

    step, evaluating, found = lab.capture(gradients, model, []), lab.capture(evaluate, model), []
    for batch in lab.batches(36):
        found.append((step(batch), evaluating(batch)))
        optimizer.step()
        scheduler.step()
    return found


def caught(lab: Lab) -> Any:
    """The loop catches what a check raises, and goes on from the state before."""
    model = net_of(lab, 8, 16, 3)
    optimizer = adamw(model)

    def train_step(batch: Any) -> Tensor:
        loss = loss_of(model, batch)
        if not torch.isfinite(loss):
            raise FloatingPointError("not finite")
        return update(optimizer, loss)

    step, found = lab.capture(train_step, model, optimizer, on_failure="eager"), []
    for i, batch in enumerate(lab.batches(30)):
        batch["x"][0] *= float("nan") if i % 7 == 6 else 1.0
        try:
            found.append(step(batch))
        except FloatingPointError:
            found.append(None)
    return found


def own_generator(lab: Lab) -> Any:
    """Noise of a generator of one's own, ahead of the model; the head of the step draws it."""
    generator = torch.Generator(lab.device).manual_seed(3)

    def take(model: Any, optimizer: Any, batch: Any, i: int) -> Tensor:
        optimizer.zero_grad()
        noise = torch.randn(16, 8, device=batch["x"].device, generator=generator)
        loss = F.cross_entropy(model(batch["x"] + noise), batch["y"])
        return update(optimizer, loss)

    return trained(lab, take), generator.get_state()


def scaler_off(lab: Lab) -> Any:
    """A gradient scaler that is disabled, as in nanoGPT, and micro-batches in a list."""
    model, kind = net_of(lab, 8, 16, 3), lab.device.type
    optimizer, scaler = adamw(model), torch.amp.GradScaler(kind, enabled=False)

    def train_step(batches: list[Any]) -> Tensor:
        for batch in batches:
            loss = loss_of(model, batch) / len(batches)
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    step = lab.capture(train_step, model, optimizer)
    return [step([batch, batch]) for batch in lab.batches(20)]


def scaler_unused(lab: Lab) -> Any:
    """A gradient scaler that is named, and not used in this precision."""
    scaler, is_half = torch.amp.GradScaler(lab.device.type), False

    def take(model: Any, optimizer: Any, batch: Any, i: int) -> Tensor:
        loss = loss_of(model, batch)
        return update(optimizer, scaler.scale(loss) if is_half else loss)

    return trained(lab, take, 20)


def number_alone(lab: Lab) -> Any:
    """The number of the iteration is the only argument."""
    model, batch = net_of(lab, 8, 16, 3), next(lab.batches(1))
    optimizer = adamw(model)

    def train_step(i: int) -> Tensor:
        return update(optimizer, loss_of(model, batch) / (1 + i))

    step = lab.capture(train_step, model, optimizer)
    return [step(i) for i in range(30)]


def gradient_penalty(lab: Lab) -> Any:
    """WGAN-GP: the generator learns in every fifth step."""
    makes, judges = net_of(lab, 4, 16, 8), net_of(lab, 8, 16, 1)
    of_makes, of_judges = adamw(makes), adamw(judges)

    def train_step(real: Tensor, i: int) -> Any:
        noise = torch.randn(len(real), 4, device=real.device)
        made = makes(noise)
        share = torch.rand(len(real), 1, device=real.device)
        between = (share * real + (1 - share) * made.detach()).requires_grad_()
        (slope,) = torch.autograd.grad(judges(between).sum(), between, create_graph=True)
        penalty = ((slope.norm(2, dim=1) - 1) ** 2).mean()
        loss = judges(made.detach()).mean() - judges(real).mean() + 10 * penalty
        update(of_judges, loss)
        of_makes.zero_grad()
        return loss.detach(), update(of_makes, -judges(makes(noise)).mean()) if i % 5 == 0 else None

    step = lab.capture(train_step, [makes, judges], [of_makes, of_judges])
    return [step(batch["x"], i) for i, batch in enumerate(lab.batches(50))]


def inner_loop(lab: Lab) -> Any:
    """MAML, by functional calls."""

    def take(model: Any, optimizer: Any, batch: Any, i: int) -> float:
        total: Any = 0.0
        for part in range(2):
            x, y = batch["x"][part::2], batch["y"][part::2]
            fast = dict(model.named_parameters())
            for _ in range(2):
                loss = F.cross_entropy(torch.func.functional_call(model, fast, (x,)), y)
                slopes = torch.autograd.grad(loss, tuple(fast.values()), create_graph=True)
                pairs = zip(fast.items(), slopes, strict=True)
                fast = {name: value - 0.1 * slope for (name, value), slope in pairs}
            total = total + F.cross_entropy(torch.func.functional_call(model, fast, (x,)), y)
        return float(update(optimizer, total))

    return trained(lab, take)


def queue(lab: Lab) -> Any:
    """MoCo: keys of earlier batches in a queue, at a place that Python counts."""
    slow, keys, place = net_of(lab, 8, 16, 4), torch.randn(64, 4, device=lab.device), 0

    def take(model: Any, optimizer: Any, batch: Any, i: int) -> Tensor:
        nonlocal place
        asked = F.normalize(model(batch["x"]), dim=1)
        with torch.no_grad():
            for mine, other in zip(slow.parameters(), model.parameters(), strict=True):
                mine.data = mine.data * 0.9 + other.data * 0.1
            given = F.normalize(slow(batch["x"] + 0.1), dim=1)
        logits = torch.cat([(asked * given).sum(1, keepdim=True), asked @ keys.clone().T], 1)
        target = torch.zeros(len(logits), dtype=torch.long, device=logits.device)
        loss = update(optimizer, F.cross_entropy(logits / 0.1, target))
        keys[place : place + 16] = given
        place = (place + 16) % 64
        return loss

    losses = trained(lab, take, 48, model=net_of(lab, 8, 16, 4))
    return losses, keys, place, slow.state_dict()


def finite(lab: Lab) -> Any:
    """Takes a step if the norm of the gradients is finite, as in nearly every training script."""

    def take(model: Any, optimizer: Any, batch: Any, i: int) -> Any:
        optimizer.zero_grad()
        loss = loss_of(model, batch) * batch["x"][0, 0].exp() ** (90 if i == 30 else 0)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if not torch.isfinite(norm):
            return None
        optimizer.step()
        return loss.item(), norm

    return trained(lab, take)


def clipped_objective(lab: Lab) -> Any:
    """PPO: epochs end where the policy has moved too far, behind updates."""

    def take(model: Any, optimizer: Any, batch: Any, i: int) -> Any:
        before = model(batch["x"]).log_softmax(-1).detach()
        for _ in range(3):
            for rows in torch.arange(16, device=before.device).split(8):
                moved = model(batch["x"][rows]).log_softmax(-1) - before[rows]
                distance = (moved.exp() - 1 - moved).mean().detach()
                loss = update(optimizer, -(moved.exp() * batch["x"][rows, :3]).mean())
            if distance > 0.001:
                break
        return loss.item(), distance.item()

    return trained(lab, take, 48)


def conflicts(lab: Lab) -> Any:
    """PCGrad: gradients of several losses, projected and written by hand."""

    def take(model: Any, optimizer: Any, batch: Any, i: int) -> list[float]:
        out, parameters, flat = model(batch["x"]), [*model.parameters()], []
        losses = [F.mse_loss(out[:, k], batch["x"][:, k]) for k in range(3)]
        for loss in losses:
            optimizer.zero_grad()
            loss.backward(retain_graph=True)
            flat.append(torch.cat([p.grad.flatten() for p in parameters]).clone())
        total = torch.zeros_like(flat[0])
        for mine in flat:
            for other in flat:
                dot = torch.dot(mine, other)
                mine = torch.where(dot < 0, mine - dot / other.dot(other) * other, mine)
            total += mine
        for p, part in zip(parameters, total.split([p.numel() for p in parameters]), strict=True):
            p.grad = part.view_as(p).clone()
        optimizer.step()
        return [loss.item() for loss in losses]

    return trained(lab, take)


def perturbed(lab: Lab) -> Any:
    """SAM: two backward passes, with the weights moved in between."""

    def take(model: Any, optimizer: Any, batch: Any, i: int) -> Tensor:
        loss_of(model, batch).backward()
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        with torch.no_grad():
            moves = [p.grad * 0.05 / norm for p in model.parameters()]
            for p, move in zip(model.parameters(), moves, strict=True):
                p.add_(move)
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        with torch.no_grad():
            for p, move in zip(model.parameters(), moves, strict=True):
                p.sub_(move)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return trained(lab, take)


class Meter:
    def __init__(self) -> None:
        self.sum = self.count = self.mean = 0.0

    def update(self, value: float, count: int) -> None:
        self.sum += value * count
        self.count += count
        self.mean = self.sum / self.count


def averages(lab: Lab) -> Any:
    """A trainer class of one's own, with running averages and logs of values that it reads."""
    meter, logs, total = Meter(), defaultdict(list), 0.0

    def take(model: Any, optimizer: Any, batch: Any, i: int) -> float:
        nonlocal total
        loss = update(optimizer, loss_of(model, batch))
        meter.update(loss.item(), len(batch["y"]))
        logs["loss"].append(meter.mean)
        total += loss.item()
        return meter.mean

    return trained(lab, take), vars(meter), logs, total


def mixed(lab: Lab) -> Any:
    """Mixup: NumPy draws the share; Python draws whether the batch is flipped."""
    np.random.seed(0)
    random.seed(0)

    def take(model: Any, optimizer: Any, batch: Any, i: int) -> float:
        share = np.random.beta(0.4, 0.4)
        x, y = (batch["x"], batch["y"]) if random.random() < 0.5 else (-batch["x"], batch["y"])
        other = torch.randperm(len(x), device=x.device)
        out = model(share * x + (1 - share) * x[other])
        loss = share * F.cross_entropy(out, y) + (1 - share) * F.cross_entropy(out, y[other])
        return float(update(optimizer, loss))

    return trained(lab, take), random.random(), np.random.rand()


def recurrent(lab: Lab) -> Any:
    """Truncated backpropagation: the hidden state is an enclosing variable."""
    hidden: Any = None

    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.head = nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            nonlocal hidden
            out, hidden = self.cell(x.view(4, 4, 8), hidden)
            hidden = tuple(part.detach() for part in hidden)
            found: Tensor = self.head(out).flatten(0, 1)
            return found

    def take(model: Any, optimizer: Any, batch: Any, i: int) -> Tensor:
        return update(optimizer, loss_of(model, batch))

    return trained(lab, take, model=Reader().to(lab.device)), hidden


class Mode(enum.Enum):
    WHOLE, HALF = 1, 2


def told_apart(lab: Lab) -> Any:
    """An argument is one of an enumeration, which code compares by ``is``."""
    model = net_of(lab, 8, 16, 3)
    optimizer = adamw(model)

    def train_step(batch: Any, mode: Mode) -> Tensor:
        return update(optimizer, loss_of(model, batch) * (1.0 if mode is Mode.WHOLE else 0.5))

    step = lab.capture(train_step, model, optimizer)
    modes = (Mode.WHOLE if i % 3 else Mode.HALF for i in range(40))
    return [step(batch, mode) for batch, mode in zip(lab.batches(40), modes, strict=True)]


def with_graph(lab: Lab) -> Any:
    """The batch comes with a graph behind it, through which the gradients go on."""
    encoder, decoder = net_of(lab, 8, 8), net_of(lab, 8, 3)
    of_encoder, of_decoder = adamw(encoder), adamw(decoder)

    def train_step(x: Tensor, y: Tensor) -> Tensor:
        return update(of_decoder, F.cross_entropy(decoder(x), y))

    step, losses = lab.capture(train_step, decoder, of_decoder, on_failure="eager"), []
    for batch in lab.batches(12):
        of_encoder.zero_grad()
        losses.append(step(encoder(batch["x"]), batch["y"]))
        of_encoder.step()
    return losses, encoder.state_dict()


class Normalized:
    """A layer that is no module, with a running mean."""

    def __init__(self, lab: Lab, generator: torch.Generator, inside: int, outside: int) -> None:
        made = torch.randn(inside, outside, generator=generator, device=lab.device)
        self.weight = (made / inside**0.5).requires_grad_()
        self.mean, self.out = torch.zeros(1, outside, device=lab.device), made

    def __call__(self, x: Tensor) -> Tensor:
        self.out = x @ self.weight
        mean = self.out.mean(0, keepdim=True)
        with torch.no_grad():
            self.mean = 0.9 * self.mean + 0.1 * mean
        return self.out - mean


def without_modules(lab: Lab) -> Any:
    """makemore: layers and updates of one's own; lists are filled behind a draw on the host."""
    generator = torch.Generator(lab.device).manual_seed(3)
    layers = [Normalized(lab, generator, *widths) for widths in ((12, 8), (8, 27))]
    table = torch.randn(27, 4, generator=generator, device=lab.device).requires_grad_()
    parameters, losses, ratios = [table, *(layer.weight for layer in layers)], [], []
    words = torch.randint(27, (200, 4), generator=generator, device=lab.device)

    def train_step(i: int) -> None:
        chosen = words[torch.randint(len(words), (32,), generator=generator, device=lab.device)]
        x = table[chosen[:, :3]].view(32, -1)
        for layer in layers:
            x = layer(x)
        loss = F.cross_entropy(x, chosen[:, 3])
        for p in parameters:
            p.grad = None
        loss.backward()
        rate = 0.1 if i < 20 else 0.01
        for p in parameters:
            p.data += -rate * p.grad
        losses.append(loss.log10().item())
        with torch.no_grad():
            ratios.append([(rate * p.grad.std() / p.data.std()).item() for p in parameters])

    step = lab.capture(train_step, nn.ParameterList(parameters), [])
    for i in range(40):
        step(i)
    return losses, ratios, [layer.mean for layer in layers]


Sampled = namedtuple("Sampled", ["observations", "actions", "rewards"])


def now_and_then(lab: Lab) -> Any:
    """CleanRL's SAC: every other step trains the actor, and every tenth one writes a log.

    The number that weighs the entropy is read of the device, and used by the next step.
    """
    actor, critic, logs = net_of(lab, 4, 16, 2), net_of(lab, 6, 16, 1), []
    entropy, alpha = torch.zeros(1, device=lab.device, requires_grad=True), 1.0
    of_actor, of_critic = adamw(actor), adamw(critic)
    of_entropy = torch.optim.Adam([entropy], lr=0.01, fused=True)

    def train_step(data: Sampled, step: int) -> None:
        nonlocal alpha
        with torch.no_grad():
            noise = torch.distributions.Normal(actor(data.observations), 0.5)
            following = noise.sample()
            wanted = data.rewards - alpha * noise.log_prob(following).sum(1)
        value = critic(torch.cat([data.observations, data.actions], 1)).view(-1)
        loss = update(of_critic, F.mse_loss(value, wanted))
        if step % 2 == 0:
            noise = torch.distributions.Normal(actor(data.observations), 0.5)
            action = noise.rsample()
            chance = noise.log_prob(action).sum(1)
            gain = critic(torch.cat([data.observations, action], 1)).view(-1)
            update(of_actor, (alpha * chance - gain).mean())
            update(of_entropy, (-entropy.exp() * (chance.detach() - 2.0)).mean())
            alpha = entropy.exp().item()
        if step % 10 == 0:
            logs.append(("loss", loss.item(), step))
            logs.append(("alpha", alpha, step))

    optimizers = [of_actor, of_critic, of_entropy]
    step, generator = lab.capture(train_step, [actor, critic], optimizers), torch.Generator()
    for i in range(70):
        given = (torch.randn(16, count, generator=generator) for count in (4, 2, 1))
        observations, actions, rewards = (part.to(lab.device) for part in given)
        step(Sampled(observations, actions, rewards.view(-1)), i)
    return logs, alpha, entropy


def annealed_outside(lab: Lab) -> Any:
    """The loop moves a number that the function finds in an enclosing variable."""
    model, weight = net_of(lab, 8, 16, 3), 1.0
    optimizer = adamw(model)

    def train_step(batch: Any) -> Tensor:
        return update(optimizer, weight * loss_of(model, batch))

    step, losses = lab.capture(train_step, model, optimizer), []
    for i, batch in enumerate(lab.batches(40)):
        weight = 1 / (1 + i)
        losses.append(step(batch))
    return losses


def read_outside(lab: Lab) -> Any:
    """The loop fills a list that the function reads: it is no place that steps only fill."""
    model, history = net_of(lab, 8, 16, 3), [1.0]
    optimizer = adamw(model)

    def train_step(batch: Any) -> Tensor:
        return update(optimizer, sum(history[-3:]) * loss_of(model, batch))

    step, losses = lab.capture(train_step, model, optimizer, on_failure="eager"), []
    for i, batch in enumerate(lab.batches(60)):
        losses.append(step(batch))
        history.append(1 / (2 + i))
    return losses


def stopping(lab: Lab) -> Any:
    """MAE, DETR, DINO: a loss that is not finite ends the program, with a message."""
    meter = Meter()

    def take(model: Any, optimizer: Any, batch: Any, i: int) -> float:
        loss = loss_of(model, batch)
        value = loss.item()
        if not math.isfinite(value):
            print(f"Loss is {value}, stopping training")
            sys.exit(1)
        loss /= 2
        update(optimizer, loss)
        meter.update(value, 1)
        return value

    return trained(lab, take), vars(meter)


def environment(lab: Lab) -> Any:
    """The step reads a variable of the environment, which the loop sets."""

    def take(model: Any, optimizer: Any, batch: Any, i: int) -> Tensor:
        return update(optimizer, float(os.environ["SCALE_OF_LOSS"]) * loss_of(model, batch))

    model = net_of(lab, 8, 16, 3)
    optimizer, losses = adamw(model), []
    step = lab.capture(lambda batch: take(model, optimizer, batch, 0), model, optimizer)
    for i, batch in enumerate(lab.batches(30)):
        os.environ["SCALE_OF_LOSS"] = "1.0" if i < 15 else "0.5"
        losses.append(step(batch))
    return losses


def frozen_and_copied(lab: Lab) -> Any:
    """A target network is replaced by a copy, and a layer is frozen in between."""
    model = net_of(lab, 8, 16, 3)
    optimizer, targets = adamw(model), {"slow": copy.deepcopy(model)}

    def train_step(batch: Any) -> float:
        with torch.no_grad():
            wanted = targets["slow"](batch["x"]).max(1).values + 1
        return float(update(optimizer, F.mse_loss(model(batch["x"]).max(1).values, wanted)))

    step, losses = lab.capture(train_step, model, optimizer), []
    for i, batch in enumerate(lab.batches(48)):
        if i % 24 == 16:
            targets["slow"] = copy.deepcopy(model)
            model[0].requires_grad_(i < 20)
        losses.append(step(batch))
    return losses


def rewards(lab: Lab) -> Any:
    """REINFORCE as published: the loop has kept logarithms with the graphs behind them."""
    policy, likely = net_of(lab, 4, 16, 2), []
    optimizer = adamw(policy)

    def finish() -> Tensor:
        loss = -torch.stack(likely).sum()
        update(optimizer, loss)
        likely.clear()
        return loss.detach()

    step, losses = lab.capture(finish, policy, optimizer, on_failure="eager"), []
    for _ in range(12):
        state = torch.zeros(4, device=lab.device)
        for _ in range(4):
            chosen = torch.distributions.Categorical(logits=policy(state), validate_args=False)
            action = chosen.sample()
            likely.append(chosen.log_prob(action))
            state = 0.9 * state + action - 0.5
        losses.append(step())
    return losses


class Called:
    """A learner that is called, and returns a parameter, which the loop writes."""

    def __init__(self, lab: Lab) -> None:
        self.model = net_of(lab, 8, 16, 3)
        self.optimizer, self.count = adamw(self.model), 0
        self.mean = torch.zeros((), device=lab.device)

    def __call__(self, batch: Any) -> Any:
        self.count += 1
        self.mean = 0.9 * self.mean + 0.1 * update(self.optimizer, loss_of(self.model, batch))
        return self.mean, self.model[0].weight


def called(lab: Lab) -> Any:
    learner, found = Called(lab), []
    step = lab.capture(learner, learner.model, learner.optimizer)
    for batch in lab.batches(24):
        mean, weight = step(batch)
        assert weight is learner.model[0].weight
        with torch.no_grad():
            weight.mul_(0.99)
        found.append(mean)
    return found, learner.count, learner.mean


def of_class(lab: Lab) -> Any:
    """A class counts, of whose method only its name is known."""

    class Counted:
        model, count = net_of(lab, 8, 16, 3), 0
        optimizer = adamw(model)

        @classmethod
        def train_step(cls, batch: Any) -> Tensor:
            cls.count += 1
            return update(cls.optimizer, loss_of(cls.model, batch))

    parts = Counted.train_step, Counted.model, Counted.optimizer
    step = lab.capture(*parts, on_failure="eager")
    return [step(batch) for batch in lab.batches(12)], Counted.count


class Callback:
    """Refers back to its trainer, and has the trainer's meter in other hands."""

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.meters, self.last = trainer, [trainer.meter], None

    def on_batch_end(self, loss: Tensor) -> None:
        self.last = loss.detach()
        if self.trainer.step % 5 == 0:
            self.trainer.rows.append(self.meters[0].mean)


class Trainer:
    """Counts, and returns its count; its callbacks refer back to it."""

    def __init__(self, model: Any) -> None:
        self.model, self.optimizer = model, adamw(model)
        self.step, self.meter, self.rows = 0, Meter(), []
        self.callbacks = [Callback(self)]

    def train_step(self, batch: Any) -> Any:
        loss = update(self.optimizer, loss_of(self.model, batch))
        self.step += 1
        self.meter.update(loss.item(), len(batch["y"]))
        for callback in self.callbacks:
            callback.on_batch_end(loss)
        return self.step, {"step": self.step, "mean": self.callbacks[0].meters[0].mean}


def callbacks(lab: Lab) -> Any:
    trainer = Trainer(net_of(lab, 8, 16, 3))

    def train_step(batch: Any) -> Any:
        return trainer.train_step(batch)

    found = []
    for function in (trainer.train_step, train_step):
        step = lab.capture(function, trainer.model, trainer.optimizer)
        found += [step(batch) for batch in lab.batches(30)]
    return found, trainer.rows, trainer.step, vars(trainer.meter), trainer.callbacks[0].last


def two_names(lab: Lab) -> Any:
    """A list is filled by one name, and read by another; the loop starts a counter again."""
    rows: list[Tensor] = []
    log, totals = {"rows": rows}, {"count": 0}
    both = [totals]

    def take(model: Any, optimizer: Any, batch: Any, i: int) -> Any:
        log["rows"].append(update(optimizer, loss_of(model, batch)))
        both[0]["count"] += 1
        return len(rows), totals["count"]

    def counting(model: Any, optimizer: Any, batch: Any, i: int) -> Any:
        both[0]["count"] += 1
        if i % 20 == 19:
            totals["count"] = 0
        return update(optimizer, both[0]["count"] * loss_of(model, batch)), totals["count"]

    return trained(lab, take, 12), trained(lab, counting), rows, totals


class Lookahead(torch.optim.Optimizer):
    """An optimizer around another one, with whose groups it shares everything."""

    def __init__(self, inner: Any) -> None:
        self.optimizer, self.count = inner, 0
        self.param_groups, self.state, self.defaults = inner.param_groups, {}, {}  # type: ignore
        self.slow = [p.detach().clone() for p in self.param_groups[0]["params"]]

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        self.optimizer.step()
        self.count += 1
        if self.count % 5 == 0:
            for mine, p in zip(self.slow, self.param_groups[0]["params"], strict=True):
                mine += 0.5 * (p - mine)
                p.copy_(mine)


def lookahead(lab: Lab) -> Any:
    model = net_of(lab, 8, 16, 3)
    inner = adamw(model)
    outer = Lookahead(inner)

    def train_step(batch: Any) -> Tensor:
        inner.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        outer.step()
        return loss.detach()

    step = lab.capture(train_step, model, inner)
    losses = [step(batch) for batch in lab.batches(40)]
    assert type(inner.state_dict()["param_groups"][0]["lr"]) is float
    return losses, outer.slow, outer.count


def scale_watched(lab: Lab) -> Any:
    """The step asks whether the scaler has lowered its scale, behind its update, and returns it."""
    model, skipped = net_of(lab, 8, 16, 3), 0
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, fused=True)
    scaler = torch.amp.GradScaler(lab.device.type, init_scale=8.0, growth_interval=7)

    def train_step(batch: Any) -> Any:
        nonlocal skipped
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        scaler.scale(loss).backward()
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() < before:
            skipped += 1
        return loss.detach(), scaler.get_scale()

    step, found = lab.capture(train_step, model, optimizer), []
    for i, batch in enumerate(lab.batches(30)):
        batch["x"][0] *= float("inf") if i == 20 else 1.0
        found.append(step(batch))
    return found, skipped, scaler.state_dict()


def schedule_of_numbers(lab: Lab) -> Any:
    """Consistency models: a number of levels that grows, of which one less is drawn."""

    model = net_of(lab, 8, 16, 3)
    optimizer = adamw(model)

    def train_step(batch: Any, levels: int) -> Tensor:
        level = torch.randint(0, levels - 1, (16, 1), device=batch["x"].device)
        return update(optimizer, loss_of(model, {**batch, "x": batch["x"] * level / levels}))

    step = lab.capture(train_step, model, optimizer)
    return [step(batch, 3 + i // 8) for i, batch in enumerate(lab.batches(40))]


def momentum_of_an_array(lab: Lab) -> Any:
    """DINO: entries of arrays are the teacher's momentum, and a weight that the loop sets."""
    student, teacher, weight = net_of(lab, 8, 16, 3), net_of(lab, 8, 16, 3), np.float64(1.0)
    optimizer, momenta, used = adamw(student), np.linspace(0.9, 1.0, 40), []

    def train_step(batch: Any, momentum: Any) -> Tensor:
        loss = update(optimizer, weight * loss_of(student, batch))
        with torch.no_grad():
            for own, other in zip(student.parameters(), teacher.parameters(), strict=True):
                other.data.mul_(momentum).add_((1 - momentum) * own.detach().data)
        used.append((momentum, 1 - momentum))
        return loss

    step, losses = lab.capture(train_step, [student, teacher], optimizer), []
    for batch, momentum in zip(lab.batches(40), momenta, strict=True):
        losses.append(step(batch, momentum))
        weight = weight * 0.99
    return losses, used, [type(number) for pair in used for number in pair]


class Sharpened(torch.optim.SGD):
    """Sharpness-aware minimization: its closure comes after the ascent, not ahead of the step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is not None, "it needs a closure"
        ascents = [(p, 0.05 * p.grad) for group in self.param_groups for p in group["params"]]
        for p, ascent in ascents:
            p.add_(ascent)
        self.zero_grad()
        with torch.enable_grad():
            closure()
        for p, ascent in ascents:
            p.sub_(ascent)
        super().step()


def sharpened(lab: Lab) -> Any:
    """An optimizer that calls its closure when it likes."""
    model = net_of(lab, 8, 16, 3)
    optimizer = Sharpened(model.parameters(), lr=0.1)

    def train_step(batch: Any) -> Tensor:
        def closure() -> Tensor:
            loss = loss_of(model, batch)
            loss.backward()
            return loss

        loss = closure()
        optimizer.step(closure)
        optimizer.zero_grad()
        return loss.detach()

    step = lab.capture(train_step, model, optimizer, on_failure="eager", optimizer_kernel="own")
    return [step(batch) for batch in lab.batches(20)]


ROWS: dict[str, tuple[Callable[[Lab], Any], int | str]] = {
    "own_optimizer": (own_optimizer, 20),
    "inner_loop": (inner_loop, 25),
    "queue": (queue, 35),
    "finite": (finite, 25),
    "clipped_objective": (clipped_objective, 25),
    "conflicts": (conflicts, 25),
    "outside_rates": (outside_rates, 20),
    "gradient_penalty": (gradient_penalty, 35),
    "perturbed": (perturbed, 25),
    "averages": (averages, 25),
    "caught": (caught, 10),
    "own_generator": (own_generator, 20),
    "mixed": (mixed, 20),
    "recurrent": (recurrent, 25),
    "number_alone": (number_alone, 20),
    "told_apart": (told_apart, 25),
    "with_graph": (with_graph, "an argument has a graph of autograd behind it"),
    "environment": (environment, 15),
    "without_modules": (without_modules, 15),
    "now_and_then": (now_and_then, 30),
    "stopping": (stopping, 25),
    "annealed_outside": (annealed_outside, 20),
    "read_outside": (read_outside, "compute with the list: history|structure: history"),
    "frozen_and_copied": (frozen_and_copied, 20),
    "rewards": (rewards, r"goes through .*test_public.py:\d+ in update: loss.backward\(\)"),
    "called": (called, 15),
    "of_class": (of_class, r"Counted.count, named at .*test_public.py:\d+ in train_step"),
    "callbacks": (callbacks, 15),
    "two_names": (two_names, 1),
    "lookahead": (lookahead, 30),
    "scale_watched": (scale_watched, 15),
    "schedule_of_numbers": (schedule_of_numbers, 20),
    "momentum_of_an_array": (momentum_of_an_array, 25),
    "sharpened": (sharpened, 10),
    "scaler_off": (scaler_off, 12),
    "scaler_unused": (scaler_unused, 10),
}
"""Loops, with how many calls must be replayed, or with what is said instead."""


@pytest.mark.filterwarnings("ignore:capture")
@pytest.mark.parametrize("name", ROWS)
def test_a_published_loop(name: str, backend: str, device: torch.device) -> None:
    loop, expected = ROWS[name]
    lab = twice(loop, backend, device, verify=5)
    lab.assert_replayed(expected)


@pytest.mark.parametrize("is_plain", [True, False])
def test_code_that_ends_the_program_does_so_with_its_code(
    backend: str, device: torch.device, is_plain: bool
) -> None:
    """Also where it does more ahead of that, which no capture may run."""
    lab, seen = Lab(backend, device, {"on_failure": "eager"}), []
    model = net_of(lab, 8, 16, 3)
    optimizer = adamw(model)

    def train_step(batch: Any) -> Tensor:
        loss = loss_of(model, batch)
        if loss.isnan():
            if not is_plain:
                seen.append(optimizer.param_groups.pop())
            sys.exit(3)
        return update(optimizer, loss)

    step = lab.capture(train_step, model, optimizer)

    def run() -> None:
        for i, batch in enumerate(lab.batches(30)):
            batch["x"][0] *= float("nan") if i > 19 else 1.0
            step(batch)
        step.close()

    with pytest.raises(SystemExit) as caught:
        run()
    assert caught.value.code == 3
    assert len(seen) == (not is_plain)
    assert step.report.replayed >= 10
