"""Recipes as their authors publish them: schedules, teachers, averages of weights, optimizers.

Nothing compares their graphs with eager calls but this test.
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict, deque
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.loops.test_public import net_of, trained, update
from tests.loops.test_training import adamw, loss_of
from tests.loops.twice import Lab, twice


def cosine(start: float, end: float, count: int = 40) -> Any:
    """The values of a schedule, as DINO makes them."""
    steps = np.arange(count)
    return end + 0.5 * (start - end) * (1 + np.cos(np.pi * steps / count))


@torch.no_grad()
def follow(teacher: nn.Module, student: nn.Module, momentum: Any) -> None:
    for own, other in zip(student.parameters(), teacher.parameters(), strict=True):
        other.data.mul_(momentum).add_((1 - momentum) * own.detach().data)


class Byol(nn.Module):
    """Its momentum follows from a count that it stores, as the momentum itself."""

    def __init__(self, net: nn.Module, steps: int) -> None:
        super().__init__()
        self.online, self.target = net, copy.deepcopy(net)
        self.base = self.tau = 0.9
        self.steps, self.step = steps, 0

    def move(self) -> None:
        self.tau = 1 - (1 - self.base) * (math.cos(math.pi * self.step / self.steps) + 1) / 2
        follow(self.target, self.online, self.tau)
        self.step += 1

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = self.target(x) + 0.1
        return F.mse_loss(F.normalize(self.online(x)), F.normalize(wanted))


def byol(lab: Lab) -> Any:
    model = Byol(net_of(lab, 8, 16, 3), 40)
    optimizer = adamw(model)

    def train_step(batch: Any) -> Tensor:
        loss = update(optimizer, model(batch["x"]))
        model.move()
        return loss

    step = lab.capture(train_step, model, optimizer)
    return [step(batch) for batch in lab.batches(40)], model.tau, model.step


class Schedule:
    """DINOv2: a class that is indexed."""

    def __init__(self, values: Any, last: float) -> None:
        self.values, self.last = values, last

    def __getitem__(self, step: int) -> Any:
        if step >= len(self.values):
            return self.last
        return self.values[step]


class Distillation:
    """Momenta of a teacher, weights and temperatures, by the count of steps."""

    def __init__(self, lab: Lab, kind: Any) -> None:
        self.student, self.teacher = net_of(lab, 8, 16, 3), net_of(lab, 8, 16, 3)
        self.optimizer, self.count = adamw(self.student), 0
        self.momenta, self.weights = Schedule(kind(cosine(0.9, 1.0, 30)), 1.0), kind(cosine(1, 2))
        self.used: list[Any] = []

    def train_step(self, batch: Any, temperature: Any) -> Tensor:
        loss = F.cross_entropy(self.student(batch["x"]) / temperature, batch["y"])
        loss = update(self.optimizer, self.weights[self.count] * loss)
        momentum = self.momenta[self.count]
        follow(self.teacher, self.student, momentum)
        self.used.append(momentum)
        self.count += 1
        return loss


def distilled(lab: Lab, kind: Any = np.asarray) -> Any:
    """DINO: entries of arrays by a count, and as an argument."""
    own, temperatures = Distillation(lab, kind), cosine(1.0, 0.5).astype(np.float32)
    step = lab.capture(own.train_step, [own.student, own.teacher], own.optimizer)
    losses = [step(b, t) for b, t in zip(lab.batches(40), temperatures, strict=True)]
    return losses, own.used, [*map(type, own.used)], own.teacher.state_dict()


def of_lists(lab: Lab) -> Any:
    return distilled(lab, lambda values: [*map(float, values)])


def of_halves(lab: Lab) -> Any:
    return distilled(lab, lambda values: values.astype(np.float32))


def outside(lab: Lab) -> None:
    """The array is an enclosing variable, and ends before the loop does."""
    weights = cosine(1, 2, 30)

    def take(model: Any, optimizer: Any, batch: Any, i: int) -> Tensor:
        return update(optimizer, weights[i] * loss_of(model, batch))

    with pytest.raises(IndexError, match="out of bounds"):
        trained(lab, take)


def clipped(lab: Lab) -> Any:
    """Limits of gradients that are tightened from step to step."""

    def take(model: Any, optimizer: Any, batch: Any, i: int) -> Any:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), max(0.25, 4 / (1 + i)))
        nn.utils.clip_grad_value_(model.parameters(), 1 / (1 + i))
        optimizer.step()
        return loss.item(), norm.item()

    return trained(lab, take)


def decayed(lab: Lab) -> Any:
    """DINO: the loop moves rates and decays of groups; a teacher follows behind the update."""
    student, teacher = net_of(lab, 8, 16, 3), net_of(lab, 8, 16, 3)
    decayed = [p for p in student.parameters() if p.dim() > 1]
    others = [p for p in student.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW([{"params": decayed}, {"params": others}], fused=True)
    rates, decays, momenta = cosine(0.01, 0.0), cosine(0.04, 0.4), cosine(0.9, 1.0)

    def train_step(batch: Any, momentum: float) -> float:
        with torch.no_grad():
            wanted = teacher(batch["x"]).softmax(-1)
        loss = update(optimizer, F.cross_entropy(student(batch["x"]), wanted))
        follow(teacher, student, momentum)
        return loss.item()

    step, losses = lab.capture(train_step, [student, teacher], optimizer), []
    for it, batch in enumerate(lab.batches(40)):
        for i, group in enumerate(optimizer.param_groups):
            group["lr"] = rates[it]
            if i == 0:
                group["weight_decay"] = decays[it]
        losses.append(step(batch, momenta[it]))
    return losses


def set_inside(lab: Lab) -> Any:
    """The body of DINO's ``train_one_epoch``, with its schedules."""
    student, teacher = net_of(lab, 8, 16, 3), net_of(lab, 8, 16, 3)
    optimizer = torch.optim.AdamW(student.parameters(), fused=True)
    rates, decays, momenta = cosine(0.01, 0.0), cosine(0.04, 0.4), cosine(0.9, 1.0)

    def train_step(batch: Any, it: int) -> float:
        for i, group in enumerate(optimizer.param_groups):
            group["lr"] = rates[it]
            if i == 0:
                group["weight_decay"] = decays[it]
        with torch.no_grad():
            wanted = teacher(batch["x"]).softmax(-1)
        loss = update(optimizer, F.cross_entropy(student(batch["x"]), wanted))
        follow(teacher, student, momenta[it])
        return loss.item()

    step = lab.capture(train_step, [student, teacher], optimizer)
    losses = [step(batch, it) for it, batch in enumerate(lab.batches(40))]
    return losses, [type(group["lr"]) for group in optimizer.param_groups]


def adjusted(lab: Lab) -> Any:
    """MAE: a rate for each layer, by a fraction of the epoch; another optimizer's decays."""
    model, other = net_of(lab, 8, 16, 3), net_of(lab, 3, 3)
    groups = [{"params": [p], "scale": 0.65**i} for i, p in enumerate(model.parameters())]
    optimizer = torch.optim.AdamW(groups, fused=True)
    second = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9, fused=True)
    used: list[Any] = []

    def adjust(epoch: Any) -> Any:
        share = epoch / 2 if epoch < 2 else 0.5 * (1 + math.cos(math.pi * (epoch - 2) / 4))
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * share * group["scale"]
        return share

    def train_step(batch: Any, it: int) -> Tensor:
        used.append((second.param_groups[0]["lr"], optimizer.param_groups[0]["lr"]))
        second.param_groups[0]["lr"] *= 0.97
        share = adjust(it / 10)
        optimizer.zero_grad()
        loss = F.cross_entropy(other(model(batch["x"])), batch["y"])
        update(second, loss * (1 + second.param_groups[0]["lr"]))
        optimizer.step()
        used.append((second.param_groups[0]["lr"], optimizer.param_groups[0]["lr"], share))
        return loss.detach()

    step = lab.capture(train_step, [model, other], [optimizer, second])
    return [step(batch, it) for it, batch in enumerate(lab.batches(60))], used


def set_between(lab: Lab) -> Any:
    """Another rate for the second update of a step, which has one memory for it."""

    def take(model: Any, optimizer: Any, batch: Any, i: int) -> Tensor:
        for rate in (0.01, 0.001):
            optimizer.param_groups[0]["lr"] = rate
            loss = update(optimizer, loss_of(model, batch))
        return loss

    model = net_of(lab, 8, 16, 3)
    optimizer = adamw(model)
    step = lab.capture(partial(take, model, optimizer), model, optimizer, on_failure="eager")
    return [step(batch, i) for i, batch in enumerate(lab.batches(12))]


def set_behind(lab: Lab) -> Any:
    """The rate of the next step, which this step's update must not have."""

    def take(model: Any, optimizer: Any, batch: Any, i: int) -> Tensor:
        loss = update(optimizer, loss_of(model, batch))
        optimizer.param_groups[0]["lr"] = 0.01 / (1 + i)
        return loss

    model = net_of(lab, 8, 16, 3)
    optimizer = adamw(model)
    step = lab.capture(partial(take, model, optimizer), model, optimizer, on_failure="eager")
    return [step(batch, i) for i, batch in enumerate(lab.batches(12))]


def between(lab: Lab) -> Any:
    """An optimizer that reads on the host steps twice, draws, and follows a fork."""
    model = lab.net()
    optimizer = MeasuringOnHost(model.parameters(), lr=0.1)

    def train_step(batch: Any) -> Any:
        optimizer.zero_grad(set_to_none=False)
        loss = loss_of(model, batch)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if not torch.isfinite(norm):
            return None
        optimizer.step()
        second = loss_of(model, batch)
        second.backward()
        optimizer.step()
        norms = [p.norm() + p.grad.norm() for p in model.parameters()]
        return loss.detach(), second.item(), torch.stack(norms).sum()

    step, found = lab.capture(train_step, model, optimizer), []
    for i, batch in enumerate(lab.batches(30)):
        batch["x"][0] *= float("inf") if i == 20 else 1.0
        found.append(step(batch))
    return found


def keyed(lab: Lab) -> Any:
    """Statistics in dicts whose keys are parameters, of one shape and of others."""
    norms: dict[Any, Any] = {}
    means: dict[Any, Any] = {}
    counts: dict[Any, Any] = {}

    def take(model: Any, optimizer: Any, batch: Any, i: int) -> Tensor:
        loss = update(optimizer, loss_of(model, batch))
        for p in model.parameters():
            norms[p] = p.grad.norm()
            means[p] = 0.9 * means.get(p, 0.0) + 0.1 * p.grad
            counts.setdefault(p, {"count": 0})["count"] += 1
        return loss

    model = net_of(lab, 8, 16, 16, 3)
    found = trained(lab, take, 20, model=model)
    return found, [*norms.values()], [*means.values()], [*counts.values()]


def lists(lab: Lab) -> Any:
    """Of lists that are filled: their length, and what was appended last, now and before."""
    losses: list[float] = []
    window: deque[float] = deque(maxlen=5)

    def take(model: Any, optimizer: Any, batch: Any, i: int) -> Any:
        weight = 1 / (1 + len(losses))
        if losses:
            weight = weight + 0.1 * losses[-1]
        loss = update(optimizer, weight * loss_of(model, batch))
        losses.append(loss.item())
        window.append(loss.item())
        if len(losses) > 20:
            loss = loss * 2
        return loss, losses[-1], window[-1], len(losses)

    found = trained(lab, take, 40)
    return found, losses, window


class Shadow:
    """Averages of weights with a decay that warms up: as in torch_ema, diffusers and timm."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.count, self.decay = copy.deepcopy(model).requires_grad_(False), 0, 0.0

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        self.count += 1
        step = max(0, self.count - 1)
        self.decay = 0.0 if step <= 0 else min(0.7, (1 + step) / (10 + step))
        rate, power = 1 - self.decay, max(0.1, (1 + step / 1.0) ** -(2 / 3))
        pairs = [*zip(self.model.parameters(), model.parameters(), strict=True)]
        for mine, other in pairs[::2]:
            mine.sub_(rate * (mine - other))
        torch._foreach_lerp_([m for m, _ in pairs[1::2]], [o for _, o in pairs[1::2]], power)


def averaged(lab: Lab) -> Any:
    """Averages of weights by torch and by recipes, behind the update."""
    model = lab.net()
    optimizer, shadow = adamw(model), Shadow(model)
    # Without a device their counts lie on the CPU, and torch's own mean reads a share on the host
    decay = get_ema_multi_avg_fn(0.9)
    average = AveragedModel(model, lab.device, multi_avg_fn=decay, use_buffers=True)
    plain = AveragedModel(model, lab.device, avg_fn=lambda mean, p, n: mean + (p - mean) / (n + 1))

    def train_step(batch: Any) -> Tensor:
        loss = update(optimizer, loss_of(model, batch))
        for each in (average, plain):
            each.update_parameters(model)
        shadow.update(model)
        return loss

    step = lab.capture(train_step, [model, average, plain, shadow.model], optimizer)
    return [step(batch) for batch in lab.batches(50)], shadow.count, shadow.decay


class SAM(torch.optim.Optimizer):
    """As in github.com/davda54/sam: groups are shared with the optimizer that takes the steps."""

    def __init__(self, params: Any, base_optimizer: Any, rho: float = 0.05, **given: Any) -> None:
        super().__init__(params, {"rho": rho, **given})
        self.base_optimizer = base_optimizer(self.param_groups, **given)
        self.param_groups = self.base_optimizer.param_groups
        self.defaults.update(self.base_optimizer.defaults)

    @torch.no_grad()
    def first_step(self, zero_grad: bool = False) -> None:
        grad_norm = self._grad_norm()
        for group in self.param_groups:
            scale = group["rho"] / (grad_norm + 1e-12)
            for p in group["params"]:
                if p.grad is None:
                    continue
                self.state[p]["old_p"] = p.data.clone()
                p.add_(p.grad * scale.to(p))
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad: bool = False) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data = self.state[p]["old_p"]
        self.base_optimizer.step()
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        closure = torch.enable_grad()(closure)
        self.first_step(zero_grad=True)
        closure()
        self.second_step()

    def _grad_norm(self) -> Tensor:
        held = [p.grad for g in self.param_groups for p in g["params"] if p.grad is not None]
        return torch.norm(torch.stack([gradient.norm(p=2) for gradient in held]), p=2)

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        self.base_optimizer.param_groups = self.param_groups


def sharpened_twice(lab: Lab) -> Any:
    """In two steps; in between comes a batch of another size, and the rate moves."""
    model = lab.net()
    optimizer = SAM(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9, fused=True)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer.base_optimizer, 10, 0.5)

    def train_step(batch: Any) -> Tensor:
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.first_step(zero_grad=True)
        loss_of(model, batch).backward()
        optimizer.second_step(zero_grad=True)
        return loss.detach()

    step, losses = lab.capture(train_step, model, optimizer), []
    for i, batch in enumerate(lab.batches(50)):
        losses.append(step({k: v[:12] if i == 25 else v for k, v in batch.items()}))
        scheduler.step()
    return losses, optimizer.base_optimizer.state_dict()


def sharpened_by_closure(lab: Lab) -> Any:
    model = lab.net()
    optimizer = SAM(model.parameters(), torch.optim.AdamW, lr=0.01, fused=True)

    def train_step(batch: Any) -> Tensor:
        def closure() -> Tensor:
            loss = loss_of(model, batch)
            loss.backward()
            return loss

        loss = closure()
        optimizer.step(closure)
        optimizer.zero_grad()
        return loss.detach()

    step = lab.capture(train_step, model, optimizer)
    return [step(batch) for batch in lab.batches(30)], optimizer.base_optimizer.state_dict()


def aliased(lab: Lab) -> Any:
    """What a parameter was set to is its memory: code that keeps it sees its updates."""
    kept: dict[Any, Tensor] = {}

    def take(model: Any, optimizer: Any, batch: Any, i: int) -> Any:
        old = [kept[p].sum() for p in model.parameters()] if kept else []
        for p in model.parameters():
            kept[p] = p.data * 1.01
            p.data = kept[p]
        loss = update(optimizer, loss_of(model, batch))
        return loss, old, [kept[p].sum() for p in model.parameters()]

    model = net_of(lab, 8, 16, 3)
    optimizer = adamw(model)
    step = lab.capture(
        lambda batch: take(model, optimizer, batch, 0), model, optimizer, on_failure="eager"
    )
    return [step(batch) for batch in lab.batches(20)], [*kept.values()]


class Measuring(torch.optim.SGD):
    """Its step returns what it has measured."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        norm = self.param_groups[0]["params"][0].grad.norm()
        super().step()
        return self.measured(norm)

    def measured(self, norm: Tensor) -> Any:
        return norm


class MeasuringOnHost(Measuring):
    def measured(self, norm: Tensor) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(torch.randn_like(p), alpha=2**-10)
        return norm.tolist()


def returned(lab: Lab, kind: Any = Measuring, *, uses: bool = True) -> Any:
    model = net_of(lab, 8, 16, 3)
    optimizer = kind(model.parameters(), lr=0.1)

    def train_step(batch: Any) -> Any:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        if uses:
            return loss.detach(), optimizer.step()
        optimizer.step()
        return loss.detach()

    options = {"on_failure": "eager", "optimizer_kernel": "own"}
    step = lab.capture(train_step, model, optimizer, **options)
    return [step(batch) for batch in lab.batches(20)]


def returned_behind(lab: Lab) -> Any:
    return returned(lab, MeasuringOnHost)


def dropped_behind(lab: Lab) -> Any:
    return returned(lab, MeasuringOnHost, uses=False)


def returned_scaled(lab: Lab) -> Any:
    """A scaler that skips a step returns nothing."""
    model, scaler = net_of(lab, 8, 16, 3), torch.amp.GradScaler(lab.device.type, init_scale=8.0)
    optimizer = Measuring(model.parameters(), lr=0.1)

    def train_step(batch: Any) -> Any:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        scaler.scale(loss).backward()
        norm = scaler.step(optimizer)
        scaler.update()
        return loss.detach(), norm

    options = {"on_failure": "eager", "optimizer_kernel": "own"}
    step, found = lab.capture(train_step, model, optimizer, **options), []
    for i, batch in enumerate(lab.batches(20)):
        batch["x"][0] *= float("inf") if i == 15 else 1.0
        found.append(step(batch))
    return found


def in_some_steps(lab: Lab) -> Any:
    """Half of the steps draw an augmentation that reads the device: a head, which others lack."""
    np.random.seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 3))
    model.to(lab.device)
    optimizer = adamw(model)

    def train_step(batch: Any) -> Tensor:
        optimizer.zero_grad()
        x = (batch["x"][:, None, :, None] * batch["x"][:, None, None, :]).clone()
        loss = loss_in_turn(model, x, batch["y"])
        loss.backward()
        optimizer.step()
        return loss.detach()

    step = lab.capture(train_step, model, optimizer)
    return [step(batch) for batch in lab.batches(60)]


def loss_in_turn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    if np.random.rand(1) < 0.5:
        count = int(x.abs().max().item() > 4) + np.random.randint(8)
        for _ in range(count):
            x = x * 0.9
        logits = model(x)
        loss = F.cross_entropy(logits, y)
    else:
        loss = F.cross_entropy(model(x), y)
    return loss


class Smoothed:
    """A window of numbers and their sum, as in the repositories of DETR, DeiT and MAE."""

    def __init__(self) -> None:
        self.window: deque[float] = deque(maxlen=20)
        self.total, self.count = 0.0, 0

    def update(self, value: Any) -> None:
        if isinstance(value, Tensor):
            value = value.item()
        assert isinstance(value, (float, int))
        self.window.append(value)
        self.count += 1
        self.total += value


def metered(lab: Lab) -> Any:
    """Meters look at the types of numbers: one of the device is a float, too."""
    meters: dict[str, Smoothed] = defaultdict(Smoothed)

    def take(model: Any, optimizer: Any, batch: Any, i: int) -> Tensor:
        loss = update(optimizer, loss_of(model, batch))
        for name, value in {"loss": loss, "lr": optimizer.param_groups[0]["lr"]}.items():
            meters[name].update(value)
        return loss

    found = trained(lab, take)
    return found, [(each.total, each.count, [*each.window]) for each in meters.values()]


def listed(lab: Lab) -> Any:
    """Lists of numbers next to a schedule stay the author's lists, also if the step is refused."""
    history: dict[str, Any] = defaultdict(list)
    weights = cosine(1, 2)
    model = net_of(lab, 8, 16, 3)
    optimizer, kinds = adamw(model), []

    def train_step(batch: Any, i: int) -> Tensor:
        loss = update(optimizer, weights[i] * loss_of(model, batch))
        history["loss"].append(loss.item())
        history["rate"].append(optimizer.param_groups[0]["lr"])
        history["meter"] = Smoothed()
        return loss

    step = lab.capture(train_step, model, optimizer, on_failure="eager")
    for i, batch in enumerate(lab.batches(20)):
        step(batch, i)
        kinds.append([*map(type, history.values())])
    return kinds, history["loss"], history["rate"]


def free(lab: Lab) -> Any:
    """Adversarial training for free: a perturbation is set to other memory by its ``data``."""
    delta = torch.zeros(16, 8, device=lab.device)

    def take(model: Any, optimizer: Any, batch: Any, i: int) -> Tensor:
        for _ in range(2):
            noise = delta.clone().requires_grad_(True)
            loss = F.cross_entropy(model(batch["x"] + noise), batch["y"])
            update(optimizer, loss)
            delta.data = (delta + 0.1 * noise.grad.sign()).clamp(-0.3, 0.3)  # type: ignore[union-attr]
        return loss.detach()

    return trained(lab, take), delta


class Curved(torch.optim.Optimizer):
    """Its hooks gather the curvature while modules run, as those of K-FAC."""

    def __init__(self, net: nn.Module, lr: float) -> None:
        super().__init__(net.parameters(), {"lr": lr})
        self.seen: dict[nn.Module, Tensor] = {}
        for module in net.modules():
            if isinstance(module, nn.Linear):
                module.register_forward_pre_hook(self.see)

    def see(self, module: nn.Module, given: tuple[Tensor]) -> None:
        found = given[0].detach().T @ given[0].detach() / len(given[0])
        self.seen[module] = 0.9 * self.seen[module] + found if module in self.seen else found

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for module, seen in self.seen.items():
            damped = seen + torch.eye(len(seen), device=seen.device)
            module.weight.grad @= torch.linalg.inv_ex(damped).inverse
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(parameter.grad, alpha=-group["lr"])


def curved(lab: Lab) -> Any:
    model = net_of(lab, 8, 16, 3)
    optimizer = Curved(model, 0.05)

    def train_step(batch: Any) -> Tensor:
        return update(optimizer, loss_of(model, batch))

    step = lab.capture(train_step, model, optimizer, on_failure="eager")
    return [step(batch) for batch in lab.batches(30)]


def rolled(lab: Lab) -> Any:
    """Shifts in a circle by a number that is drawn, behind a read of the batch."""
    np.random.seed(0)

    def take(model: Any, optimizer: Any, batch: Any, i: int) -> Tensor:
        count = int((batch["y"] > 0).sum())
        x = torch.roll(batch["x"], np.random.randint(0, 3), 1).roll(shifts=i % 2, dims=1)
        return update(optimizer, F.cross_entropy(model(x), batch["y"]) / count)

    return trained(lab, take, count=60)


class Warming(nn.Module):
    """An average of weights, whose decay is the smaller one of two tensors: latent diffusion."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.register_buffer("decay", torch.tensor(0.9))
        self.register_buffer("num_updates", torch.tensor(0, dtype=torch.int))
        for name, parameter in model.named_parameters():
            self.register_buffer(name.replace(".", ""), parameter.detach().clone())

    def forward(self, model: nn.Module) -> None:
        decay = self.decay
        if self.num_updates >= 0:
            self.num_updates += 1
            decay = min(self.decay, (1 + self.num_updates) / (10 + self.num_updates))
        with torch.no_grad():
            shadows = dict(self.named_buffers())
            for name, parameter in model.named_parameters():
                shadow = shadows[name.replace(".", "")]
                shadow.sub_((1.0 - decay) * (shadow - parameter))


def warmed(lab: Lab) -> Any:
    model = lab.net()
    optimizer, average = adamw(model), Warming(model).to(lab.device)

    def train_step(batch: Any) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        average(model)
        return loss.detach()

    step = lab.capture(train_step, [model, average], optimizer)
    return [step(batch) for batch in lab.batches(40)]


ROWS: dict[str, tuple[Callable[[Lab], Any], int | str]] = {
    "byol": (byol, 30),
    "distilled": (distilled, 30),
    "of_lists": (of_lists, 30),
    "of_halves": (of_halves, 30),
    "outside": (outside, 20),
    "clipped": (clipped, 25),
    "decayed": (decayed, 30),
    "between": (between, 15),
    "set_inside": (set_inside, 30),
    "adjusted": (adjusted, 50),
    "set_between": (set_between, "the step sets numbers between two updates"),
    "set_behind": (set_behind, "the step sets lr in param_groups"),
    "keyed": (keyed, 12),
    "lists": (lists, 25),
    "averaged": (averaged, 35),
    "sharpened_twice": (sharpened_twice, 30),
    "sharpened_by_closure": (sharpened_by_closure, 20),
    "aliased": (aliased, "what has the memory of a parameter is used"),
    "returned": (returned, 12),
    "returned_behind": (returned_behind, "what the step of MeasuringOnHost returns is used"),
    "dropped_behind": (dropped_behind, 10),
    "in_some_steps": (in_some_steps, 15),
    "metered": (metered, 25),
    "free": (free, 25),
    "listed": (listed, r"changes .*history\['meter'\]"),
    "curved": (curved, r"train_step changes Curved.seen\["),
    "rolled": (rolled, 25),
    "warmed": (warmed, 25),
    "returned_scaled": (returned_scaled, "what it returns is used"),
}
"""Loops, with how many calls must be replayed, or with what is said instead."""


@pytest.mark.filterwarnings("ignore:capture")
@pytest.mark.parametrize("name", ROWS)
def test_a_recipe(name: str, backend: str, device: torch.device) -> None:
    loop, expected = ROWS[name]
    lab = twice(loop, backend, device, verify=False)
    lab.assert_replayed(expected)
