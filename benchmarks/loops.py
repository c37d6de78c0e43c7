"""Loops without a Trainer: what a captured function gains, and whether it computes the same.

Each row trains twice from the same seed, eagerly and with ``lightning_graphs.capture``, and then
times both in turn. Every loss of every step, and all parameters at the end of the compared steps,
must be equal to the last bit.

    python benchmarks/loops.py [--rows "DreamerV3, Fabric;PPO"] [--json PATH]

``--tiny`` rehearses it on the CPU and the emulated backend: no times.

``DreamerV3, Fabric`` is a small learner as in sheeprl, whose modules Fabric wraps one by one: a
world model with a recurrent state of categorical variables, an actor that learns in imagination, a
critic with two-hot returns and a slow copy; three optimizers, gradients clipped by Fabric.
``PPO`` is a minibatch update of a small policy, as in CleanRL.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from harness import Lab, measure_rows
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.distributions import Categorical, Independent, OneHotCategoricalStraightThrough
from torch.nn import functional as F

import lightning_graphs

Found = dict[str, Any]
COMPARED = 100  # steps; the policy may wait for some dozens, since it cannot know how many follow
TIMED = 3  # times four batches, in each round
SEED = 1


@dataclass
class Learner:
    """A function that trains, what it trains, and its batches."""

    function: Callable[[dict[str, Tensor]], Any]
    models: dict[str, nn.Module]
    optimizers: list[torch.optim.Optimizer]
    batch: Callable[[int], dict[str, Tensor]]
    steps: int = 0  # that are compared


# ---------------------------------------------------------------------- DreamerV3


def mlp(inside: int, width: int, outside: int, layers: int = 2) -> nn.Sequential:
    parts: list[nn.Module] = []
    for i in range(layers):
        first = inside if i == 0 else width
        parts += [nn.Linear(first, width, bias=False), nn.LayerNorm(width), nn.SiLU()]
    return nn.Sequential(*parts, nn.Linear(width, outside))


class Recurrent(nn.Module):
    """A GRU cell with a layer norm, behind a dense layer."""

    def __init__(self, inside: int, width: int) -> None:
        super().__init__()
        self.dense = nn.Sequential(nn.Linear(inside, width, bias=False), nn.LayerNorm(width))
        self.cell = nn.Linear(2 * width, 3 * width, bias=False)
        self.norm = nn.LayerNorm(3 * width)

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        parts = self.norm(self.cell(torch.cat([h, F.silu(self.dense(x))], -1)))
        reset, candidate, update = parts.chunk(3, -1)
        candidate = torch.tanh(torch.sigmoid(reset) * candidate)
        update = torch.sigmoid(update - 1)
        return update * candidate + (1 - update) * h


class TwoHot:
    """Scalars as a distribution over bins, in symlog space."""

    def __init__(self, count: int, device: torch.device) -> None:
        self.bins = torch.linspace(-20, 20, count, device=device)

    def mean(self, logits: Tensor) -> Tensor:
        y = (logits.softmax(-1) * self.bins).sum(-1, keepdim=True)
        return torch.sign(y) * torch.expm1(y.abs())

    def log_prob(self, logits: Tensor, value: Tensor) -> Tensor:
        y = torch.sign(value) * torch.log1p(value.abs())
        width = self.bins[1] - self.bins[0]
        weights = (1 - ((y - self.bins).abs() / width)).clamp(min=0)
        return (weights * logits.log_softmax(-1)).sum(-1)


class Moments(nn.Module):
    """A running range of returns."""

    low: Tensor
    high: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("low", torch.zeros(()))
        self.register_buffer("high", torch.zeros(()))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        values = x.detach().flatten().float()
        self.low.copy_(0.99 * self.low + 0.01 * torch.quantile(values, 0.05))
        self.high.copy_(0.99 * self.high + 0.01 * torch.quantile(values, 0.95))
        return self.low, (self.high - self.low).clamp(min=1.0)


@dataclass(frozen=True)
class Sizes:
    """Sizes of the learner."""

    batch: int = 8
    length: int = 16
    horizon: int = 15
    width: int = 64
    variables: int = 8
    classes: int = 8
    observed: int = 32
    actions: int = 6
    bins: int = 63


SMALL = Sizes(2, 2, 2, 8, 2, 3, 4, 3, 7)


class Dreamer:
    """The learner, as a loop over Fabric has it."""

    def __init__(self, lab: Lab, sizes: Sizes) -> None:
        self.sizes, s = sizes, sizes
        self.fabric = fabric = Fabric(accelerator="cpu" if lab.dry else "gpu", devices=1)
        self.device = fabric.device
        state = s.variables * s.classes
        features = state + s.width
        world = nn.ModuleDict(
            {
                "encoder": mlp(s.observed, s.width, s.width),
                "recurrent": Recurrent(state + s.actions, s.width),
                "posterior": mlp(2 * s.width, s.width, state, 1),
                "prior": mlp(s.width, s.width, state, 1),
                "decoder": mlp(features, s.width, s.observed),
                "reward": mlp(features, s.width, s.bins),
                "going_on": mlp(features, s.width, 1),
            }
        )
        actor, critic = mlp(features, s.width, s.actions), mlp(features, s.width, s.bins)
        target = copy.deepcopy(critic).requires_grad_(False)
        self.world_parameters = [*world.parameters()]
        self.world = nn.ModuleDict({n: fabric.setup_module(m) for n, m in world.items()})
        self.actor, self.critic = fabric.setup_module(actor), fabric.setup_module(critic)
        self.target, self.moments = target.to(self.device), Moments().to(self.device)
        self.twohot = TwoHot(s.bins, self.device)
        made = [
            torch.optim.Adam(self.world.parameters(), lr=1e-4, eps=1e-8, fused=True),
            torch.optim.Adam(self.actor.parameters(), lr=8e-5, eps=1e-5, fused=True),
            torch.optim.Adam(self.critic.parameters(), lr=8e-5, eps=1e-5, fused=True),
        ]
        self.optimizers = [*fabric.setup_optimizers(*made)]

    def learner(self) -> Learner:
        models = {"world": self.world, "actor": self.actor, "critic": self.critic}
        models |= {"target": self.target, "moments": self.moments}
        return Learner(self.train, models, self.optimizers, self.batch)

    def batch(self, index: int) -> dict[str, Tensor]:
        s, random = self.sizes, torch.Generator().manual_seed(index)
        shape = s.length, s.batch
        data = {
            "observed": torch.randn(*shape, s.observed, generator=random),
            "action": F.one_hot(
                torch.randint(s.actions, shape, generator=random), s.actions
            ).float(),
            "reward": torch.randn(*shape, 1, generator=random),
            "going_on": (torch.rand(*shape, 1, generator=random) > 0.1).float(),
            "first": (torch.rand(*shape, 1, generator=random) < 0.1).float(),
        }
        return {name: value.to(self.device) for name, value in data.items()}

    # ------------------------------------------------------------------ the step

    def _mixed(self, logits: Tensor) -> Tensor:
        """Return logits of each categorical variable, of which one part in a hundred is uniform."""
        s = self.sizes
        logits = logits.view(*logits.shape[:-1], s.variables, s.classes)
        probabilities = 0.99 * logits.softmax(-1) + 0.01 / s.classes
        return probabilities.log()

    def _sampled(self, logits: Tensor) -> Tensor:
        drawn = OneHotCategoricalStraightThrough(logits=logits, validate_args=False)
        return drawn.rsample().flatten(-2)

    def _divergence(self, left: Tensor, right: Tensor) -> Tensor:
        kinds = [
            Independent(OneHotCategoricalStraightThrough(logits=x, validate_args=False), 1)
            for x in (left, right)
        ]
        return torch.distributions.kl_divergence(*kinds)

    def train(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Take one step of world model, actor and critic."""
        world_loss, states, ends = self._learn_world(batch)
        actor_loss, critic_loss = self._learn_behavior(states, ends)
        with torch.no_grad():
            pairs = zip(self.target.parameters(), self.critic.parameters(), strict=True)
            for slow, fast in pairs:
                slow.lerp_(fast, 0.02)
        return {"world": world_loss, "actor": actor_loss, "critic": critic_loss}

    def _learn_world(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        s, world = self.sizes, self.world
        embedded = world["encoder"](batch["observed"])
        h = torch.zeros(s.batch, s.width, device=self.device)
        z = torch.zeros(s.batch, s.variables * s.classes, device=self.device)
        found: list[tuple[Tensor, ...]] = []
        for t in range(s.length):
            goes_on = 1 - batch["first"][t]
            h, z, action = h * goes_on, z * goes_on, batch["action"][t] * goes_on
            h = world["recurrent"](torch.cat([z, action], -1), h)
            prior = self._mixed(world["prior"](h))
            posterior = self._mixed(world["posterior"](torch.cat([h, embedded[t]], -1)))
            z = self._sampled(posterior)
            found.append((h, z, prior, posterior))
        hs, zs, priors, posteriors = (torch.stack(parts) for parts in zip(*found, strict=True))
        features = torch.cat([zs, hs], -1)
        loss = F.mse_loss(world["decoder"](features), batch["observed"], reduction="none").sum(-1)
        loss = loss - self.twohot.log_prob(world["reward"](features), batch["reward"])
        ends = world["going_on"](features)
        loss = loss + F.binary_cross_entropy_with_logits(
            ends, batch["going_on"], reduction="none"
        ).squeeze(-1)
        dynamics = self._divergence(posteriors.detach(), priors).clamp(min=1.0)
        representation = self._divergence(posteriors, priors.detach()).clamp(min=1.0)
        total = (loss + 0.5 * dynamics + 0.1 * representation).mean()
        optimizer = self.optimizers[0]
        optimizer.zero_grad()
        self.fabric.backward(total)
        self.fabric.clip_gradients(world, optimizer, max_norm=1000.0)
        optimizer.step()
        return total.detach(), features.detach().flatten(0, 1), batch["going_on"].flatten(0, 1)

    def _learn_behavior(self, features: Tensor, goes_on: Tensor) -> tuple[Tensor, Tensor]:
        s, world = self.sizes, self.world
        state = s.variables * s.classes
        z, h = features[:, :state], features[:, state:]
        seen, chosen = [features], []
        for _ in range(s.horizon):
            policy = OneHotCategoricalStraightThrough(
                logits=self.actor(seen[-1].detach()), validate_args=False
            )
            action = policy.rsample()
            chosen.append((policy.log_prob(action.detach()), policy.entropy()))
            with torch.no_grad():
                h = world["recurrent"](torch.cat([z, action], -1), h)
                z = self._sampled(self._mixed(world["prior"](h)))
            seen.append(torch.cat([z, h], -1))
        imagined = torch.stack(seen)
        with torch.no_grad():
            values = self.twohot.mean(self.critic(imagined))
            rewards = self.twohot.mean(world["reward"](imagined))
            discounts = 0.997 * torch.sigmoid(world["going_on"](imagined))
            discounts[0] = 0.997 * goes_on
            returns, last = [], values[-1]
            for t in reversed(range(s.horizon)):
                mixed = 0.05 * values[t + 1] + 0.95 * last
                last = rewards[t + 1] + discounts[t + 1] * mixed
                returns.append(last)
            targets = torch.stack(returns[::-1])
            weights = torch.cumprod(discounts[:-1], 0) / 0.997
            low, span = self.moments(targets)
            advantage = (targets - low) / span - (values[:-1] - low) / span
        likely, entropy = (torch.stack(parts)[..., None] for parts in zip(*chosen, strict=True))
        actor_loss = -(weights * (likely * advantage + 3e-4 * entropy)).mean()
        self._step(1, self.actor, actor_loss)
        logits = self.critic(imagined[:-1].detach())
        with torch.no_grad():
            slow = self.twohot.mean(self.target(imagined[:-1]))
        fit = self.twohot.log_prob(logits, targets) + self.twohot.log_prob(logits, slow)
        critic_loss = -(weights.squeeze(-1) * fit).mean()
        self._step(2, self.critic, critic_loss)
        return actor_loss.detach(), critic_loss.detach()

    def _step(self, index: int, model: nn.Module, loss: Tensor) -> None:
        optimizer = self.optimizers[index]
        optimizer.zero_grad()
        self.fabric.backward(loss)
        self.fabric.clip_gradients(model, optimizer, max_norm=100.0)
        optimizer.step()


def dreamer(lab: Lab) -> Learner:
    return Dreamer(lab, SMALL if lab.dry else Sizes()).learner()


# ---------------------------------------------------------------------- PPO


def ppo(lab: Lab) -> Learner:
    """Make a minibatch update of a small policy, in plain torch."""
    width = 8 if lab.dry else 64
    actor = nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
    actor.append(nn.Linear(width, 4)).to(lab.device)
    critic = nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
    critic.append(nn.Linear(width, 1)).to(lab.device)
    parameters = [*actor.parameters(), *critic.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=2.5e-4, eps=1e-5, fused=True)

    def update(batch: dict[str, Tensor]) -> Any:
        policy = Categorical(logits=actor(batch["state"]), validate_args=False)
        change = policy.log_prob(batch["action"]) - batch["likely"]
        ratio, gain = change.exp(), batch["gain"]
        gain = (gain - gain.mean()) / (gain.std() + 1e-8)
        of_policy = torch.max(-gain * ratio, -gain * ratio.clamp(0.8, 1.2)).mean()
        of_value = 0.5 * (critic(batch["state"]).flatten() - batch["return"]).square().mean()
        loss = of_policy - 0.01 * policy.entropy().mean() + 0.5 * of_value
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 0.5)
        optimizer.step()
        with torch.no_grad():
            return {"loss": loss.detach(), "kl": ((ratio - 1) - change).mean()}

    def batch(index: int) -> dict[str, Tensor]:
        random, count = torch.Generator().manual_seed(index), 16 if lab.dry else 256
        data = {n: torch.randn(count, generator=random) for n in ("gain", "return")}
        data["likely"] = -data["gain"].abs()
        data["state"] = torch.randn(count, 8, generator=random)
        data["action"] = torch.randint(4, (count,), generator=random)
        return {name: value.to(lab.device) for name, value in data.items()}

    return Learner(update, {"actor": actor, "critic": critic}, [optimizer], batch)


ROWS: dict[str, tuple[Callable[[Lab], Learner], float | None]] = {
    "DreamerV3, Fabric": (dreamer, 10.0),
    "PPO": (ppo, 5.0),
}
"""Name -> what makes the learner, and how many times as fast a captured step is, at least."""


# ---------------------------------------------------------------------- measured


def compared(learner: Learner, call: Callable[..., Any]) -> Iterator[Any]:
    """Yield the losses of the compared steps, and then all parameters and buffers."""
    torch.manual_seed(SEED)
    for index in range(learner.steps):
        yield {name: value.clone() for name, value in call(learner.batch(index)).items()}
    for name, model in learner.models.items():
        yield {f"{name}.{key}": value.clone() for key, value in model.state_dict().items()}


def differing(eager: Sequence[Any], captured: Sequence[Any]) -> list[str]:
    """List the values that are not equal to the last bit."""
    pairs = zip(eager, captured, strict=True)
    found = {k for a, b in pairs for k in a if not torch.equal(a[k], b[k])}
    return sorted(found)


def measure(name: str, *, tiny: bool = False) -> Found:
    """Train a row both ways, compare, and time."""
    lab = Lab(tiny)
    torch.set_float32_matmul_precision("high")
    make, limit = ROWS[name]
    learners = []
    for _ in range(3):
        torch.manual_seed(SEED)
        learners.append(make(lab))
        learners[-1].steps = 8 if tiny else COMPARED
    eager, again, captured = learners
    backend: Any = "emulated" if tiny else "auto"
    parts = captured.function, captured.models, captured.optimizers
    step = lightning_graphs.capture(*parts, backend=backend)
    calls = zip(learners, (eager.function, again.function, step), strict=True)
    expected, repeated, values = ([*compared(one, call)] for one, call in calls)
    in_comparison = step.report.replayed
    batches = [eager.batch(index) for index in range(1 if tiny else 4)]

    def timed(call: Callable[..., Any]) -> float:
        return lab.wall(lambda: [call(batch) for batch in batches], TIMED, drain=True) / 4e3

    times = lab.medians(lambda: timed(eager.function), lambda: timed(step))
    report = step.report
    found: Found = {
        "row": name,
        "eager": times[0],
        "captured": times[1],
        "gain": times[0] / times[1],
        "limit": limit,
        "graphs": len(report.graphs),
        "nodes": sum(graph.nodes or 0 for graph in report.graphs),
        "compared": in_comparison,
        "replayed": report.replayed,
        "why": [*report.fallbacks],
        "differs": differing(expected, values),
        "repeatable": not differing(expected, repeated),
    }
    found["verdict"] = verdict(found, tiny=tiny)
    return found


def verdict(found: Found, *, tiny: bool) -> str:
    if (found["differs"] and found["repeatable"]) or not found["compared"]:
        return "WRONG RESULT"
    is_fast = tiny or found["limit"] is None or found["gain"] >= found["limit"]
    return "PASS" if is_fast else "FAIL"


def line(found: Found) -> str:
    if "gain" not in found:
        return f"{found['row']:20} {found['verdict']} {found.get('error', '')}"
    same = "equal to the bit" if not found["differs"] else f"differs: {found['differs'][:3]}"
    return (
        f"{found['row']:20} {found['eager']:9.2f} {found['captured']:9.2f} {found['gain']:6.1f}x "
        f"{found['verdict']:5} {same}; {found['nodes']} nodes, {found['replayed']} replayed "
        + "; ".join(found["why"])
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rows", help="names, separated by semicolons (default: all)")
    parser.add_argument("--json", type=Path, help="write everything to this file")
    parser.add_argument("--tiny", action="store_true", help="a rehearsal on the CPU")
    options = parser.parse_args(arguments)
    flags = ["--tiny"] if options.tiny else []
    return measure_rows(
        __file__,
        [*ROWS] if options.rows is None else options.rows.split(";"),
        flags,
        partial(measure, tiny=options.tiny),
        line,
        f"{'':20} {'eager ms':>9} {'captured':>9}",
        jobs=1,
        path=options.json,
    )


if __name__ == "__main__":
    sys.exit(main())
