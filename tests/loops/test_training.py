"""Functions that train, captured: values, state and gradients are those of eager calls."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from tests.loops.twice import Lab, twice


def adamw(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=2**-7, fused=True)


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch["x"]).float(), batch["y"])


def training(
    model: nn.Module, optimizer: torch.optim.Optimizer, read: Callable[[Tensor], Any]
) -> Callable[[Any], Any]:
    """Make a function that trains, and returns what is read of the loss."""

    def train_step(batch: Any) -> Any:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        return read(loss)

    return train_step


def scheduled(lab: Lab) -> Any:
    """With clipping, and a rate that is scheduled in the loop."""
    model = lab.net()
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)

    def train_step(batch: Any) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        return loss.detach()

    step, losses = lab.capture(train_step, model, optimizer), []
    for batch in lab.batches(30):
        losses.append(step(batch))
        scheduler.step()
    return losses


def accumulated(lab: Lab) -> Any:
    """Whether the optimizer steps is an argument; gradients stay as zeros in between."""
    model = lab.net()
    optimizer = torch.optim.SGD(model.parameters(), lr=2**-5, momentum=0.5, fused=True)

    def train_step(batch: Any, last: bool = False) -> Any:
        loss = loss_of(model, batch) / 4
        loss.backward()
        if last:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        return {"loss": loss.detach(), "last": last}

    step = lab.capture(train_step, model, optimizer)
    return [step(batch, last=i % 4 == 3) for i, batch in enumerate(lab.batches(36))]


def scaled(lab: Lab) -> Any:
    """Autocast and a gradient scaler, whose state the loop reads."""
    model = lab.net(dropout=0.0)
    optimizer = adamw(model)
    kind = lab.device.type
    scaler = torch.amp.GradScaler(kind, init_scale=2.0**10, growth_interval=4)
    dtype = torch.float16 if kind == "cuda" else torch.bfloat16

    def train_step(batch: Any) -> Tensor:
        optimizer.zero_grad()
        with torch.autocast(kind, dtype=dtype):
            loss = loss_of(model, batch)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    step = lab.capture(train_step, model, optimizer)
    return [(step(batch), scaler.get_scale()) for batch in lab.batches()]


def cyclical(lab: Lab) -> Any:
    """A schedule moves momentum, too, which fused kernels take from the host: it steps behind."""
    model, seen = lab.net(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=2**-6, momentum=0.5, fused=True)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2**-4, total_steps=40)
    optimizer.register_step_post_hook(lambda *_: seen.append(optimizer.param_groups[0]["momentum"]))

    def train_step(batch: Any) -> Tensor:
        loss = loss_of(model, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        return loss.detach()

    step = lab.capture(train_step, model, optimizer, on_failure="eager")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*the optimizer step runs eagerly: SGD has step hooks")
        losses = [step(batch) for batch in lab.batches(30)]
    return losses, seen, scheduler.get_last_lr()


def adversarial(lab: Lab) -> Any:
    """Two networks, two optimizers."""
    makes = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8)).to(lab.device)
    judges = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)).to(lab.device)
    of_makes, of_judges = adamw(makes), adamw(judges)

    def train_step(real: Tensor) -> Any:
        made = makes(torch.randn(real.shape[0], 4, device=real.device))
        of_judges.zero_grad()
        (F.softplus(-judges(real)).mean() + F.softplus(judges(made.detach())).mean()).backward()
        of_judges.step()
        of_makes.zero_grad()
        loss = F.softplus(-judges(made)).mean()
        loss.backward()
        of_makes.step()
        return loss.detach(), made.detach()

    step = lab.capture(train_step, {"g": makes, "d": judges}, [of_makes, of_judges])
    return [step(batch["x"]) for batch in lab.batches()]


def averaged(lab: Lab) -> Any:
    """An average of the weights, in a module that ``capture`` was not given."""
    model, average = lab.net(), lab.net()
    average.load_state_dict(model.state_dict())
    average.requires_grad_(False)
    optimizer = adamw(model)

    def train_step(batch: Any) -> Tensor:
        optimizer.zero_grad()
        with torch.no_grad():
            target = average(batch["x"])
        loss = loss_of(model, batch) + F.mse_loss(model(batch["x"]), target)
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for mean, parameter in zip(average.parameters(), model.parameters(), strict=True):
                mean.lerp_(parameter, 0.1)
        return loss.detach()

    step = lab.capture(train_step, model, optimizer)
    return [*(step(batch) for batch in lab.batches()), average.state_dict()]


def of_physics(lab: Lab) -> Any:
    """A loss of second derivatives."""
    model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1)).to(lab.device)
    optimizer = adamw(model)

    def train_step(x: Tensor) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        x = x.requires_grad_(True)
        u = model(x)
        (du,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        (ddu,) = torch.autograd.grad(du.sum(), x, create_graph=True)
        loss = (ddu + u).square().mean() + (model(torch.zeros_like(x[:1])) - 1).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    step = lab.capture(train_step, model, optimizer)
    return [step(batch["x"][:, :1].clone()) for batch in lab.batches()]


def by_rewards(lab: Lab) -> Any:
    """A policy, trained on what its captured evaluation has chosen; one model, two functions."""
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2)).to(lab.device)
    optimizer = adamw(model)

    @torch.no_grad()
    def act(state: Tensor) -> Any:
        distribution = torch.distributions.Categorical(logits=model(state), validate_args=False)
        action = distribution.sample()
        return action, distribution.log_prob(action)

    def learn(states: Tensor, actions: Tensor, before: Tensor, gains: Tensor) -> Tensor:
        distribution = torch.distributions.Categorical(logits=model(states), validate_args=False)
        ratio = (distribution.log_prob(actions) - before).exp()
        loss = -torch.minimum(ratio * gains, ratio.clamp(0.8, 1.2) * gains).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    acting, learning = lab.capture(act, model), lab.capture(learn, model, optimizer)
    state, losses = torch.zeros(1, 4, device=lab.device), []
    for _ in range(14):
        seen = []
        for _ in range(4):
            action, chance = acting(state)
            following = (state + action.float()[:, None] - 0.5).clamp(-2, 2)
            seen.append((state, action, chance, -following.abs().mean()[None]))
            state = following
        losses.append(learning(*(torch.cat(parts) for parts in zip(*seen, strict=True))))
    return losses


class Learner:
    """A class that is no module, with a method that trains and counters of its own."""

    def __init__(self, lab: Lab) -> None:
        self.model = lab.net()
        self.optimizer = adamw(self.model)
        self.weight = 1.0
        self.calls = self.seen = 0
        self.history: list[Any] = []

    def train_step(self, batch: Any) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.weight * loss_of(self.model, batch)
        loss.backward()
        self.optimizer.step()
        self.seen += 1
        self.history.append(loss.detach())
        return loss.detach()


def of_method(lab: Lab) -> Any:
    """A method, of whose object the loop changes what it reads, and what it does not read."""
    learner = Learner(lab)
    step, losses = lab.capture(learner.train_step, learner.model, learner.optimizer), []
    for batch in lab.batches(20):
        losses.append(step(batch))
        learner.calls += 1
        if learner.calls == 12:
            learner.weight = 0.5
    return losses, learner.seen, learner.calls, learner.history


HISTORY: list[Any] = []
COUNT = 0


def storing(lab: Lab) -> Any:
    """What a call leaves in global and enclosing variables."""
    global COUNT
    COUNT, count, totals, mean = 0, 0, {"seen": 0}, torch.zeros((), device=lab.device)
    HISTORY.clear()
    model = lab.net()
    optimizer = adamw(model)

    def train_step(batch: Any) -> Tensor:
        global COUNT
        nonlocal count, mean
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        COUNT += 1
        count += 2
        totals["seen"] += batch["x"].shape[0]
        mean = 0.9 * mean + 0.1 * loss.detach()
        HISTORY.append(loss.detach())
        return loss.detach()

    step = lab.capture(train_step, model, optimizer)
    losses = [step(batch) for batch in lab.batches()]
    return losses, COUNT, count, totals, mean, [*HISTORY]


def interrupted(lab: Lab) -> Any:
    """Other shapes, eager calls, a call that raises, and a checkpoint that is loaded."""
    model = lab.net()
    optimizer = adamw(model)

    def train_step(batch: Any, fails: bool = False) -> Tensor:
        if fails:
            raise ValueError("a broken batch")
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    step, results, saved = lab.capture(train_step, model, optimizer), [], None
    for i, batch in enumerate(lab.batches(36)):
        if i == 12:
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        if i == 24:
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
        with step.eager() if i in (15, 16) else nullcontext():
            results.append(step({key: value[: 16 - i % 2 * 8] for key, value in batch.items()}))
        with pytest.raises(ValueError, match="a broken batch"):
            step(batch, fails=True)
    return results, saved


def evaluated(lab: Lab) -> Any:
    """Epochs with an evaluation, whose results hand names of the batch on."""
    model = lab.net()
    optimizer = adamw(model)

    def train_step(batch: Any) -> Tensor:
        model.train()
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    @torch.inference_mode()
    def evaluate(batch: Any, name: str) -> Any:
        model.eval()
        return {"hits": (model(batch["x"]).argmax(-1) == batch["y"]).sum(), "name": name}

    step, evaluation, found = lab.capture(train_step, model, optimizer), None, []
    evaluation = lab.capture(evaluate, model)
    for _ in range(4):
        found += [step(batch) for batch in lab.batches(8)]
        found += [evaluation(batch, f"sample {i}") for i, batch in enumerate(lab.batches(6))]
    return found


def reading(lab: Lab) -> Any:
    """What the function reads on the host, only to return and to store it."""
    model = lab.net()
    optimizer = adamw(model)
    total, history = torch.zeros((), device=lab.device), []

    def train_step(batch: Any) -> Any:
        optimizer.zero_grad()
        out = model(batch["x"])
        loss = F.cross_entropy(out, batch["y"])
        before, first = loss.item(), model[0].weight[0, 0].item()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        total.add_(loss.detach())
        history.append(total.item())
        total.mul_(2)
        hits = (out.argmax(-1) == batch["y"]).float().mean()
        return {"loss": 2 * before, "first": first, "norm": norm.cpu(), "hits": float(hits)}

    step = lab.capture(train_step, model, optimizer)
    return [step(batch) for batch in lab.batches(24)], history


def handed_in(lab: Lab) -> Any:
    """Model, optimizer and scheduler are arguments; the rate is returned."""
    model = lab.net()
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)

    def train_step(model: Any, optimizer: Any, batch: Any, *, weight: float = 1.0) -> Any:
        optimizer.zero_grad()
        loss = weight * loss_of(model, batch)
        loss.backward()
        optimizer.step()
        scheduler.step()
        return loss.detach(), scheduler.get_last_lr()[0]

    step = lab.capture(train_step, model, optimizer)
    return [step(model, optimizer, batch, weight=0.5) for batch in lab.batches()]


def stepped_by_loop(lab: Lab) -> Any:
    """The function computes gradients; the loop zeroes them, and steps."""
    model = lab.net()
    optimizer = adamw(model)

    def compute_gradients(batch: Any) -> Tensor:
        loss = loss_of(model, batch)
        loss.backward()
        return loss.detach()

    step, losses = lab.capture(compute_gradients, model, []), []
    for i, batch in enumerate(lab.batches(36)):
        losses.append(step(batch))
        if i % 2:
            optimizer.step()
            optimizer.zero_grad()
    return losses, optimizer.state_dict()


def of_fabric(lab: Lab) -> Any:
    """Fabric's backward pass, clipping and accumulation, under autocast."""
    kind = "gpu" if lab.device.type == "cuda" else "cpu"
    fabric = Fabric(accelerator=kind, devices=1, precision="bf16-mixed")
    plain = lab.net()
    model, optimizer = fabric.setup(plain, adamw(plain))

    def train_step(batch: Any, last: bool) -> Tensor:
        with fabric.no_backward_sync(model, enabled=not last):
            loss = loss_of(model, batch)
            fabric.backward(loss)
        if last:
            fabric.clip_gradients(model, optimizer, max_norm=0.5)
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    step = lab.capture(train_step, model, optimizer)
    return [step(batch, i % 2 == 1) for i, batch in enumerate(lab.batches(36))]


def annealed(lab: Lab) -> Any:
    """Numbers that move: one is computed with, one is compared, one counts turns of a loop."""
    model = lab.net()
    optimizer = adamw(model)

    def train_step(batch: Any, i: int, weight: float, turns: int) -> Any:
        optimizer.zero_grad()
        loss = weight * sum(loss_of(model, batch) for _ in range(turns))
        if i % 8 == 0:
            loss = loss * 2
        loss.backward()
        optimizer.step()
        return loss.detach(), i

    step = lab.capture(train_step, model, optimizer)
    return [step(batch, i, 1 / (1 + i), 1 + i // 24) for i, batch in enumerate(lab.batches(48))]


@dataclasses.dataclass
class Sample:
    """A batch that is no container."""

    x: Tensor
    y: Tensor
    weight: float


def of_dataclass(lab: Lab) -> Any:
    """A batch of a class of its author's, with a number in it that changes."""
    model = lab.net()
    optimizer = adamw(model)

    def train_step(sample: Sample) -> Tensor:
        optimizer.zero_grad()
        loss = sample.weight * loss_of(model, vars(sample))
        loss.backward()
        optimizer.step()
        return loss.detach()

    step, batches = lab.capture(train_step, model, optimizer), enumerate(lab.batches(36))
    return [step(Sample(**batch, weight=1.0 if i < 16 else 0.5)) for i, batch in batches]


def shared(lab: Lab) -> Any:
    """Two functions train one model with one optimizer, by turns of different lengths."""
    model = lab.net()
    optimizer = adamw(model)

    supervise = training(model, optimizer, Tensor.detach)

    def agree(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        first, second = (model(x + 0.1 * torch.randn_like(x)).softmax(-1) for _ in range(2))
        loss = F.mse_loss(first, second.detach())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        return loss.detach()

    steps, found = [lab.capture(one, model, optimizer) for one in (supervise, agree)], []
    for i, batch in enumerate(lab.batches(44)):
        found.append(steps[1](batch["x"]) if i % 3 == 2 else steps[0](batch))
    return found


def with_heads(lab: Lab) -> Any:
    """Zeroes gradients, filters and draws ahead of the model's call; the evaluation draws, too."""
    model = lab.net()
    optimizer = adamw(model)

    def windows(batch: Any, count: int) -> Any:
        rows = torch.nonzero(batch["x"].sum(1) > -2.0).flatten()
        if len(rows) == 0:
            raise RuntimeError("no window is available")
        chosen = rows[np.random.choice(len(rows), count)]
        return {key: value[chosen] for key, value in batch.items()}

    def train_step(batch: Any, count: int = 6) -> Tensor:
        optimizer.zero_grad()
        batch = windows(batch, count)
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    @torch.no_grad()
    def evaluate(batch: Any) -> Tensor:
        return loss_of(model, windows(batch, 5))

    np.random.seed(0)
    step, evaluating = lab.capture(train_step, model, optimizer), lab.capture(evaluate, model)
    found = []
    for i, batch in enumerate(lab.batches(36)):
        found.append((step(batch, count=4 + i % 2), evaluating(batch)))
    return found, np.random.get_state()[1].tolist()


LOOPS = [
    *(shared, with_heads),
    *(annealed, of_dataclass, reading),
    *(storing, interrupted, evaluated, handed_in, stepped_by_loop, of_fabric),
    *(cyclical, scheduled, accumulated, scaled, adversarial, averaged, of_physics, by_rewards),
    of_method,
]


def test_what_an_optimizer_saves_is_that_of_an_eager_loop(
    backend: str, device: torch.device
) -> None:
    """Also where its counters are: a graph has them on the device."""

    def places(loop: Lab) -> list[Any]:
        model = loop.net()
        foreach = loop.device.type == "cuda" or None  # a rehearsal has fused kernels alone
        optimizer = torch.optim.Adam(model.parameters(), 0.01, foreach=foreach)

        def train_step(batch: dict[str, Tensor]) -> None:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(batch["x"]), batch["y"]).backward()
            optimizer.step()

        step = loop.capture(train_step, model, optimizer)
        for batch in loop.batches():
            step(batch)
        saved = tree_leaves(optimizer.state_dict())
        return [one.device if isinstance(one, Tensor) else type(one) for one in saved]

    captured = Lab(backend, device, {})
    found, hooks = places(captured), vars(captured.given[-1])["_optimizer_state_dict_post_hooks"]
    assert found == places(Lab(backend, device))
    assert captured.replayed > 0
    captured.steps[0].close()
    assert not hooks


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_a_captured_loop_computes_what_the_eager_one_does(
    loop: Callable[[Lab], Any], backend: str, device: torch.device
) -> None:
    lab = twice(loop, backend, device, verify=3)
    for step in lab.steps:
        assert step.report.replayed >= 8, step.report
