"""Optimizers that people bring, by their public update rules: in the graph, or eager with why."""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import MethodType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn, optim

from lightning_graphs import capture
from lightning_graphs.device.trace import OperatorsSeen
from lightning_graphs.regions.tried import HostState
from lightning_graphs.report import Report
from tests.training.equal.test_optimizers import RATE, Own, in_scope, lion, muon
from tests.training.fits import Net, batches, compare, prepare


def _averages(state: Any, g: Tensor, *names: str) -> list[Tensor]:
    return [state.setdefault(name, torch.zeros_like(g)) for name in names]


def lamb(p: Tensor, g: Tensor, state: Any, group: Any) -> None:
    state["step"] = state.get("step", 0) + 1
    mean, square = _averages(state, g, "mean", "square")
    mean.lerp_(g, 0.1)
    square.mul_(0.99).addcmul_(g, g, value=0.01)
    corrected = math.sqrt(1 - 0.99 ** state["step"]) / (1 - 0.9 ** state["step"])
    update = mean / (square.sqrt() + 2**-8) * corrected + p * 2**-6
    ratio = p.norm() / update.norm()
    p.add_(update * torch.where(ratio > 0, ratio, 1.0), alpha=-group["lr"])


def adan(p: Tensor, g: Tensor, state: Any, group: Any) -> None:
    state["step"] = state.get("step", 0) + 1
    mean, change, square = _averages(state, g, "mean", "change", "square")
    previous = state.setdefault("previous", g.clone())
    difference = g - previous
    mean.mul_(0.98).add_(g, alpha=0.02)
    change.mul_(0.92).add_(difference, alpha=0.08)
    ahead = g + 0.92 * difference
    square.mul_(0.99).addcmul_(ahead, ahead, value=0.01)
    corrections = [1 - beta ** state["step"] for beta in (0.98, 0.92, 0.99)]
    denominator = (square.sqrt() / math.sqrt(corrections[2])).add_(2**-8)
    p.addcdiv_(mean, denominator, value=-group["lr"] / corrections[0])
    p.addcdiv_(change, denominator, value=-group["lr"] * 0.92 / corrections[1])
    p.div_(1 + group["lr"] * 2**-6)
    previous.copy_(g)


def adabelief(p: Tensor, g: Tensor, state: Any, group: Any) -> None:
    state["step"] = state.get("step", 0) + 1
    mean, spread = _averages(state, g, "mean", "spread")
    mean.mul_(0.9).add_(g, alpha=0.1)
    residual = g - mean
    spread.mul_(0.99).addcmul_(residual, residual, value=0.01).add_(2**-20)
    denominator = spread.sqrt().div_(math.sqrt(1 - 0.99 ** state["step"])).add_(2**-8)
    p.mul_(1 - group["lr"] * 2**-6)
    p.addcdiv_(mean, denominator, value=-group["lr"] / (1 - 0.9 ** state["step"]))


def sophia(p: Tensor, g: Tensor, state: Any, group: Any) -> None:
    """Its curvature is estimated in every fifth step: two ways, a graph each."""
    state["step"] = state.get("step", 0) + 1
    mean, curvature = _averages(state, g, "mean", "curvature")
    if state["step"] % 5 == 1:
        curvature.mul_(0.99).addcmul_(g, g, value=0.01)
    mean.mul_(0.9).add_(g, alpha=0.1)
    p.mul_(1 - group["lr"] * 2**-6)
    ratio = (mean.abs() / (curvature * 4 + 2**-20)).clamp(None, 1)
    p.addcmul_(mean.sign(), ratio, value=-group["lr"])


def schedule_free(p: Tensor, g: Tensor, state: Any, group: Any) -> None:
    """As it trains: the parameters are an average, weighted by squared rates, and the iterates."""
    z = state.setdefault("z", p.clone())
    state["sum"] = state.get("sum", 0.0) + group["lr"] ** 2
    share = group["lr"] ** 2 / state["sum"]
    p.lerp_(z, share)
    p.add_(g, alpha=group["lr"] * (0.9 * (1 - share) - 1))
    z.sub_(g, alpha=group["lr"])


def adamax(p: Tensor, g: Tensor, state: Any, group: Any) -> None:
    state["step"] = state.get("step", 0) + 1
    mean, largest = _averages(state, g, "mean", "largest")
    mean.lerp_(g, 0.1)
    torch.maximum(largest.mul_(0.99), g.abs().add_(2**-8), out=largest)
    p.addcdiv_(mean, largest, value=-group["lr"] / (1 - 0.9 ** state["step"]))


def prodigy(p: Tensor, g: Tensor, state: Any, group: Any) -> None:
    """The distance is a number of the host, read from the device."""
    start = state.setdefault("start", p.clone())
    group["d"] = max(group["d"], float((g * (start - p)).sum()))
    p.sub_(g, alpha=group["d"] * group["lr"])


def shampoo(p: Tensor, g: Tensor, state: Any, group: Any) -> None:
    """As SOAP: in the eigenvectors of a second moment, which LAPACK gives to the host."""
    rows = g.reshape(len(g), -1)
    moment = state.setdefault("moment", torch.eye(len(g), device=g.device))
    moment.lerp_(rows @ rows.T, 0.05)
    _, vectors = torch.linalg.eigh(moment)
    p.sub_((vectors @ (vectors.T @ rows).sign()).reshape(p.shape), alpha=group["lr"])


def count(state: Any, name: str, **kind: Any) -> Tensor:
    """A counter as torch's own optimizers have it: in a tensor of the host."""
    return state.setdefault(name, torch.tensor(0.0, **kind))


def in_tensors(p: Tensor, g: Tensor, state: Any, group: Any) -> None:
    step, decayed = count(state, "step"), count(state, "decayed", dtype=torch.float64)
    step += 1
    state["decayed"] = decayed * 0.9 + 0.1  # another tensor in each step
    rate = group["lr"] / (1 - 0.9**step)
    p.mul_(1 - min(step.item() * 2**-10, 2**-6))
    p.addcdiv_(g, g.abs() + 1, value=-rate.item())
    p.sub_(g * torch.sqrt(step), alpha=2**-12)
    p.add_(g.sign(), alpha=-2e-4 * state["decayed"])


def by_float(p: Tensor, g: Tensor, state: Any, group: Any) -> None:
    step = count(state, "step", dtype=torch.int64).add_(1)
    if step == 15:  # once another way
        return
    p.add_(g, alpha=-group["lr"] / float(step) - math.sqrt(int(step)) * 2**-10)


def in_tensors_moved(p: Tensor, g: Tensor, state: Any, group: Any) -> None:
    step = count(state, "step")
    step.detach().add_(1)
    p.sub_(g * step.to(p.device), alpha=2**-12)
    p.sub_(g * step.to(p.device, torch.float64), alpha=2**-12)
    p.add_(g, alpha=-group["lr"] * step.item() * (2**-8 if step > 5 else 2**-7))


class Here(Own):
    """Its class is where its function is."""


def in_lists(p: Tensor, g: Tensor, state: Any, group: Any) -> None:
    """As torch's own with ``foreach``."""
    steps = [count(state, "step"), count(state, "other")]
    torch._foreach_add_(steps, torch.tensor(1.0, device="cpu"), alpha=1.0)
    corrections = [1 - 0.9 ** step.item() for step in steps]
    (mean,) = _averages(state, g, "mean")
    torch._foreach_div_([p, mean], [1 + 2**-8 * c for c in corrections])
    torch._foreach_add_([p], torch._foreach_mul([g], [-group["lr"] * corrections[0]]))
    torch._foreach_addcdiv_([p], [g], [g.abs() + 1], [c * 2**-9 for c in corrections[:1]])


def scaled(p: Tensor, g: Tensor, state: Any, group: Any) -> None:
    """As Adafactor of transformers: it takes the larger of a number and a tensor."""
    state["step"] = state.get("step", 0) + 1
    state["rms"] = p.norm(2) / p.numel() ** 0.5
    rate = max(group["floor"], state["rms"]) * min(1e-2, 1.0 / math.sqrt(state["step"]))
    p.sub_((g / (g.norm(2) / 2**-4).clamp_(min=1.0)).mul_(rate))


def by_norms(p: Tensor, g: Tensor, state: Any, group: Any) -> None:
    """Computes on the host with numbers that it reads of the device."""
    state["step"] = state.get("step", 0) + 1
    trust = math.sqrt(p.norm().item() + 1.0) / max(2**-4, float(g.norm()))
    p.sub_(g, alpha=min(trust, 2.0) * group["lr"] / state["step"])
    p.mul_(1.0 - abs(g.mean().item()) * 2**-8)


def from_device(p: Tensor, g: Tensor, state: Any, group: Any) -> None:
    """What it keeps on the host it reads from the device."""
    count(state, "norm").copy_(g.norm())
    p.sub_(g, alpha=group["lr"] / (1 + state["norm"].item()))


def in_containers(p: Tensor, g: Tensor, state: Any, group: Any) -> None:
    """As Shampoo, and AdaShift: lists bound anew and filled anew, a queue; one every fifth step."""
    state["step"] = state.get("step", 0) + 1
    norms = state.setdefault("norms", [torch.zeros_like(p), {"all": torch.zeros_like(p)}])
    state["norms"] = [norms[0] * 0.5 + g.abs(), {"all": norms[1]["all"] + norms[0]}]
    roots = state.setdefault("blocks", [{"roots": []}])[0]["roots"]
    if not roots or state["step"] % 5 == 0:
        roots[:] = [(norm + 1).rsqrt() for norm in (norms[0], norms[1]["all"])]
    queue = state.setdefault("queue", deque(maxlen=3))
    queue.append(g.clone())
    p.sub_(queue[0] * roots[0] * roots[1], alpha=group["lr"])


def projected(p: Tensor, g: Tensor, update: Tensor) -> tuple[Tensor, float]:
    """As AdamP: its projection asks the device, writes in place and returns a number."""
    for moment in (g.sum(), (g * p).sum()):
        if moment > 0:
            update -= p * (update * p).sum()
            update.mul_(g.abs() > 2**-4)
            return update, 0.25
    return update * 1.5, 1.0


def projection(p: Tensor, g: Tensor, state: Any, group: Any) -> None:
    state["step"] = state.get("step", 0) + 1
    update, ratio = projected(p, g, g / (1 - 0.9 ** state["step"]))
    p.mul_(1 - group["lr"] * 2**-3 * ratio)
    p.sub_(update, alpha=group["lr"])


@torch.enable_grad()
def loss_by(closure: Any) -> Any:
    return closure() if closure is not None else None


class Lars(optim.Optimizer):
    """As Lightning Bolts has it, and most libraries of self-supervised training after it."""

    def step(self, closure: Any = None) -> Any:
        loss = loss_by(closure)
        for group in self.param_groups:
            for p in group["params"]:
                d_p = p.grad
                p_norm, g_sum = torch.norm(p.data), p.grad.sum()
                if (p.ndim != 1 or not group["clips"]) and p_norm != 0 and g_sum > 0:
                    rate = p_norm / (p.grad.norm() + p_norm * 2**-10 + 2**-20)
                    rate *= 2**-6
                    if group["clips"]:
                        rate = min(rate / group["lr"], 1)
                    d_p = d_p.add(p.data, alpha=2**-10)
                    d_p *= rate
                mean = self.state[p].setdefault("mean", torch.zeros_like(p.data))
                mean.mul_(0.9).add_(d_p)
                p.data.add_(mean, alpha=-group["lr"])
        return loss


class NovoGrad(optim.Optimizer):
    """Both ways write, and their variables come back in each turn of a loop."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = loss_by(closure)
        for p in self.param_groups[0]["params"]:
            g, rate = p.grad, self.param_groups[0]["lr"]
            norm, spread = g.pow(2).sum(), self.state[p].setdefault("spread", g.new_zeros(1))
            for factor in (0.5, 0.25):
                if not (spread == 0 or g.sum() > 0) or p.dim() > 2:
                    spread.mul_(1 - factor)
                    spread.add_(norm, alpha=factor)
                    factor = factor / 2
                elif factor > 0.3:
                    spread.copy_(norm)
                else:
                    shifted = spread + factor
                    spread.add_(shifted, alpha=0.5)
                p.sub_(g / (spread.sqrt() + 1), alpha=rate * factor)
        return loss


class ByNumbers(optim.Optimizer):
    """It reads numbers of the device."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = loss_by(closure)
        for p in self.param_groups[0]["params"]:
            size, factor = p.grad.abs().sum().item(), 1.0
            if size > 2**-3:
                factor = size * 2**-6
            p.sub_(p.grad * factor, alpha=self.param_groups[0]["lr"])
        return loss


class WritingLater(optim.Optimizer):
    """On one way it writes the gradient."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = loss_by(closure)
        for p in self.param_groups[0]["params"]:
            update = p.grad
            if p.grad.sum() > 0:
                update = update * 0.5
            update.mul_(self.param_groups[0]["lr"])
            p.sub_(update)
        return loss


class Storing(optim.Optimizer):
    """As pytorch-lamb: the ratio that it keeps is a number, or a tensor."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = loss_by(closure)
        for p in self.param_groups[0]["params"]:
            ratio: Any = p.grad.norm() / p.norm()
            if p.grad.sum() > 0:
                ratio = 1.0
            self.state[p]["ratio"] = ratio
            p.sub_(p.grad * ratio, alpha=self.param_groups[0]["lr"])
        return loss


def drawn(p: Tensor, g: Tensor) -> Tensor:
    return torch.rand_like(p) if g.sum() > 0 else g


def asks_and_draws(p: Tensor, g: Tensor, state: Any, group: Any) -> None:
    p.sub_(drawn(p, g), alpha=group["lr"])


def of_numbers(p: Tensor, g: Tensor, state: Any, group: Any) -> None:
    """As LaProp with ``foreach``: a tensor of the device is made of numbers of the host."""
    state["step"] = state.get("step", 0) + 1
    corrections = 1 - 0.9 ** state["step"], 2.0**-2
    sizes = torch.tensor([group["lr"] / corrections[0], corrections[1]], device=p.device)
    p.sub_(g * sizes[0]).sub_(g.sign() * sizes[1], alpha=group["lr"])


class OfAll(optim.Optimizer):
    """As MADGRAD: its state has what is of no parameter, its groups have tables of options."""

    def __init__(self, params: Any) -> None:
        super().__init__([*params], {"lr": RATE, "options": {"power": 0.5}, "kinds": {"a"}})
        self.state["k"] = torch.tensor([0], dtype=torch.long)
        self.state["steps"] = 0
        self.means = [torch.zeros_like(p) for p in self.param_groups[0]["params"]]

    def step(self, closure: Any = None) -> Any:
        loss = closure() if closure is not None else None
        with torch.no_grad():
            factor = 1 + self.state["k"].item() * 2**-4
            for group in self.param_groups:
                for i, p in enumerate(group["params"]):
                    self.means[i] = self.means[i] * 0.5 + p.grad
                    rate = group["lr"] / (self.state["steps"] + 1) ** group["options"]["power"]
                    p.sub_(self.means[i], alpha=rate * factor)
        self.state["k"] += 1
        self.state["steps"] += 1
        return loss


class Lookahead(optim.Optimizer):
    """Wraps another optimizer, whose state it does not show."""

    def __init__(self, params: Any) -> None:
        super().__init__([*params], {"lr": RATE})
        self.inner = Own(self.param_groups[0]["params"], lamb)

    def step(self, closure: Any = None) -> Any:
        loss = closure() if closure is not None else None
        self.inner.step()
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                slow = self.state[p].setdefault("slow", p.clone())
                p.copy_(slow.lerp_(p, 0.5))
        return loss


class Compiled(optim.Optimizer):
    """As timm's Kron: what it holds is compiled, as one graph."""

    def __init__(self, params: Any) -> None:
        super().__init__([*params], {"lr": RATE})
        self.scaled = torch.compile(torch.mul, backend="eager", fullgraph=True)

    def step(self, closure: Any = None) -> Any:
        loss = closure() if closure is not None else None
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    p.sub_(self.scaled(p.grad, group["lr"]))
        return loss


def elsewhere(p: Tensor, g: Tensor, state: Any, group: Any) -> None:
    """As HeavyBall: a function compiles another one when it is called first."""
    if not _COMPILED:
        _COMPILED.append(torch.compile(torch.mul, backend="eager", fullgraph=True))
    p.sub_(_COMPILED[0](g, torch.full((), group["lr"], device=p.device)))


_COMPILED: list[Any] = []


class Fixed(optim.Optimizer):
    """Its groups have no learning rate."""

    def __init__(self, params: Any) -> None:
        super().__init__([*params], {})

    def step(self, closure: Any = None) -> Any:
        loss = closure() if closure is not None else None
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                p.sub_(p.grad * RATE)
        return loss


class Closing(Fixed):
    """As DoWG: its work is where it is given a closure."""

    def step(self, closure: Any = None) -> Any:
        return None if closure is None else super().step(closure)


class Row(NamedTuple):
    """An optimizer; why its step is eager, or nothing; options of the module's network."""

    make: Callable[[Any], Any]
    said: str = ""
    has_rate: bool = True
    matrices: bool = False  # it takes parameters of two dimensions alone


def own(update: Any, said: str = "", **numbers: Any) -> Row:
    return Row(lambda p: Own(p, update, **numbers), said)


READS = "not permitted when stream is capturing"
"""What CUDA says of a read on the host."""

ROWS: dict[str, Row] = {
    "Lion": own(lion, decay=0.25),
    "Muon by hand": own(muon),
    "LAMB": own(lamb),
    "Adan": own(adan),
    "AdaBelief": own(adabelief),
    "Sophia": own(sophia),
    "ScheduleFree": own(schedule_free),
    "Adamax by hand": own(adamax),
    "in tensors": own(in_tensors),
    "in tensors, by float": Row(lambda p: Here(p, by_float)),
    "in tensors, by float elsewhere": own(by_float, "step` of the optimizer, 1. is read at"),
    "in tensors, moved": own(in_tensors_moved),
    "in lists of tensors": own(in_lists),
    "scaled by norms": Row(lambda p: Here(p, scaled, floor=2.0**-3)),
    "scaled by a number": Row(lambda p: Here(p, scaled, floor=2.0**3)),
    "by norms": Row(lambda p: Here(p, by_norms)),
    "from the device": own(from_device, "`norm`|norm|read"),
    "Prodigy": own(
        prodigy, rf"test_brought_optimizers.py:\d+ in prodigy|moves d time|{READS}", d=2.0**-6
    ),
    "Shampoo": own(shampoo, "eigh|Shampoo|capture|cusolver"),
    "Lookahead": Row(Lookahead, "it computes `step` on the host", has_rate=False),
    "Muon": Row(lambda p: optim.Muon(p, lr=RATE), matrices=True),
    "Adafactor": Row(lambda p: optim.Adafactor(p, lr=RATE, weight_decay=2**-4)),
    "Adafactor, foreach": Row(lambda p: optim.Adafactor(p, lr=RATE, foreach=True)),
    "Adagrad": Row(lambda p: optim.Adagrad(p, lr=RATE, lr_decay=2**-4)),
    "Adagrad, foreach": Row(lambda p: optim.Adagrad(p, lr=RATE, lr_decay=2**-4, foreach=True)),
    "SGD, foreach": Row(lambda p: optim.SGD(p, RATE, 0.75, foreach=True)),
    "SGD, maximizing": Row(lambda p: optim.SGD(p, RATE, maximize=True, fused=False)),
    "without a rate": Row(Fixed, has_rate=False),
    "with a closure alone": Row(Closing, has_rate=False),
    "AdamP": own(projection),
    "LARS": Row(lambda p: Lars(p, {"lr": RATE, "clips": False})),
    "LARS, clipped": Row(lambda p: Lars(p, {"lr": RATE, "clips": True})),
    "NovoGrad": Row(lambda p: NovoGrad(p, {"lr": RATE})),
    "by numbers that are read": Row(lambda p: ByNumbers(p, {"lr": RATE})),
    "chosen and written": Row(lambda p: WritingLater(p, {"lr": RATE}), "is written later"),
    "chosen and stored": Row(
        lambda p: Storing(p, {"lr": RATE}),
        "`ratio` of the optimizer becomes a value of another|computes `ratio` on the host",
    ),
    "draws on one way": own(asks_and_draws, "draws on one of its ways"),
    "tensors of numbers": own(of_numbers),
    "in containers": own(in_containers),
    "of all parameters": Row(OfAll),
    "compiled elsewhere": own(elsewhere, "it runs compiled code"),
    "Kron": Row(Compiled, "it runs compiled code"),
}


def network(row: Row, moves: bool) -> Callable[[], Net]:
    class Brought(Net):
        def __init__(self) -> None:
            super().__init__()
            if row.matrices:
                layers = nn.Linear(8, 16, bias=False), nn.GELU(), nn.Linear(16, 3, bias=False)
                self.net = nn.Sequential(*layers)

        def configure_optimizers(self) -> Any:
            optimizer = row.make(self.parameters())
            if not moves:
                return optimizer
            moving = optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
            return [optimizer], [{"scheduler": moving, "interval": "step"}]

    return Brought


@pytest.mark.filterwarnings("ignore:GraphCapture")
@pytest.mark.parametrize("scope", ["step", "modules"])
@pytest.mark.parametrize("moves", [False, True])
@pytest.mark.parametrize("name", ROWS)
def test_in_the_graph_or_eager_with_a_reason(
    backend: str, tmp_path: Path, name: str, moves: bool, scope: str
) -> None:
    """Equal to the bit in either case."""
    row = ROWS[name]
    options: dict[str, Any] = {
        "module": network(row, moves and row.has_rate), "max_epochs": 3, "validation": 0,
        "capture": {**in_scope(scope)["capture"], "on_failure": "eager"},
    }  # fmt: skip
    eager = prepare(backend, tmp_path, False, **options).run()
    captured = prepare(backend, tmp_path, True, **options).run()
    compare(eager, captured, replayed=False)
    assert captured.statistics.replayed > 10
    said = "".join(captured.statistics.fallbacks)
    on_device = name == "of all parameters" and backend == "cuda"  # Lightning moves its counter
    if row.said or on_device:
        assert said.startswith("the optimizer step runs eagerly: ")
        assert re.search(READS if on_device else row.said, said), said
    else:
        assert said == ""


class Odd(Net):
    """Complex, float64, frozen whole and unused parameters next to others, in groups."""

    def __init__(self, update: Any) -> None:
        super().__init__(lambda module: Own(module.groups(), update))
        self.waves = nn.Parameter(torch.ones(3, dtype=torch.complex64))
        self.exact = nn.Parameter(torch.ones(3, dtype=torch.float64))
        self.whole = nn.Parameter(torch.ones(3, dtype=torch.int32), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(3))

    def groups(self) -> Any:
        odd = [self.waves, self.exact, self.whole, self.unused]
        return [{"params": [*self.net.parameters()]}, {"params": odd, "lr": RATE / 2}]

    def loss(self, batch: Any) -> Tensor:
        factor = self.waves.abs().mean() * self.exact.mean()
        return super().loss(batch) * factor.float()

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 2:
            self.late = nn.Parameter(torch.ones(3, device=self.device))
            self.trainer.optimizers[0].add_param_group({"params": [self.late]})


def descent(p: Tensor, g: Tensor, state: Any, group: Any) -> None:
    state["step"] = state.get("step", 0) + 1
    p.sub_(g * (group["lr"] / 2))


@pytest.mark.filterwarnings("ignore:Casting complex values to real")
@pytest.mark.filterwarnings("ignore:GraphCapture")
@pytest.mark.parametrize("scope", ["step", "modules"])
@pytest.mark.parametrize("update", [descent, schedule_free])
def test_odd_parameters_of_an_optimizer_of_user_code(
    backend: str, tmp_path: Path, update: Any, scope: str
) -> None:
    capture = {**in_scope(scope)["capture"], "on_failure": "eager"}
    options: dict[str, Any] = {
        "module": lambda: Odd(update), "max_epochs": 4, "validation": 0, "capture": capture,
    }  # fmt: skip
    eager = prepare(backend, tmp_path, False, **options).run()
    captured = prepare(backend, tmp_path, True, **options).run()
    compare(eager, captured, replayed=False)
    assert captured.statistics.replayed > 10


def loop(optimizer: Any, net: nn.Module) -> Callable[[Tensor], Tensor]:
    def train(x: Tensor) -> Tensor:
        loss = net(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return train


@pytest.mark.parametrize("kind", [optim.Adagrad, optim.NAdam])
def test_counters_in_tensors_of_a_plain_loop(backend: str, kind: Any) -> None:
    """Its state is that of eager steps, and goes on as such; a bias has one element, too."""
    device = torch.device("cuda" if backend == "cuda" else "cpu")
    data = [torch.randn(4, 8, generator=torch.Generator().manual_seed(i)) for i in range(24)]
    found = []
    for is_captured in (False, True):
        torch.manual_seed(0)
        net = nn.Linear(8, 1).to(device)
        optimizer = kind(net.parameters(), lr=RATE, foreach=False)
        step: Any = loop(optimizer, net)
        if is_captured:
            step = capture(step, net, optimizer, backend=backend, only_if_faster=False)
        losses = [step(x.to(device)) for x in data[:16]]
        if is_captured:
            assert step.report.replayed > 5
            assert step.report.fallbacks == ()
        optimizer.load_state_dict(optimizer.state_dict())
        losses += [step(x.to(device)) for x in data[16:]]
        found.append((torch.stack(losses), *optimizer.state_dict()["state"][1].values()))
    is_own = backend == "emulated" or kind is optim.Adagrad  # NAdam has its capturable form else
    assert not is_own or all(map(torch.equal, *found))


def test_what_a_step_has_on_the_host_is_put_back_out_of_sight() -> None:
    """As on a GPU, where what records the host's half would refuse the copies, or repeat them."""
    net = nn.Linear(8, 1)
    optimizer = optim.Adagrad(net.parameters())
    step = optimizer.state[net.weight]["step"]
    seen: list[Any] = []
    with OperatorsSeen(lambda call, result: seen.append(call.func)):
        before = HostState(optimizer, torch.device("cuda"))
        assert before.moved() == []
        step.add_(1)
        assert before.moved() == ["step"]
        before.restore()
    assert (step.item(), seen) == (0, [torch.ops.aten.add_.Tensor])


Changed = Callable[[Any, nn.Module, list[float]], Callable[[], None] | None]
"""Changes an optimizer of a module, and may keep rows; what it returns is called in each step."""


def report_of_equal(backend: str, changed: Changed, count: int = 12, **options: Any) -> Report:
    """Assert that a loop is equal whose optimizer of torch code has changed; what is reported.

    Equal are losses, parameters, and the rows in which that code keeps something.
    """
    device = torch.device("cuda" if backend == "cuda" else "cpu")
    options = {"backend": backend, "only_if_faster": False, **options}
    found = []
    for is_captured in (False, True):
        torch.manual_seed(0)
        net, rows = nn.Linear(8, 1).to(device), list[float]()
        optimizer: Any = optim.AdamW(net.parameters(), lr=RATE, fused=True)
        taken, ahead = loop(optimizer, net), changed(optimizer, net, rows)

        def train(x: Tensor, taken: Any = taken, ahead: Any = ahead) -> Tensor:
            if ahead is not None:
                ahead()
            loss: Tensor = taken(x)
            return loss

        step: Any = capture(train, net, optimizer, **options) if is_captured else train
        data = torch.Generator().manual_seed(1)
        losses = [step(torch.randn(4, 8, generator=data).to(device)) for _ in range(count)]
        found.append((torch.stack(losses), torch.tensor(rows), net.weight.detach()))
    assert all(map(torch.equal, *found))
    report: Report = step.report
    return report


def _reads(optimizer: Any, net: Any, rows: list[float]) -> None:
    def stepped(own: Any = optimizer.step, net: Any = net, norms: Any = rows) -> Any:
        norms.append(net.weight.grad.norm().item())
        return own()

    optimizer.step = stepped


@pytest.mark.filterwarnings("ignore:.*the optimizer step runs eagerly. AdamW")
def test_a_step_of_a_plain_loop_that_reads_is_left_behind_the_graph(backend: str) -> None:
    """Also where the optimizer itself would have run its fused kernel in the graph."""
    report = report_of_equal(backend, _reads, 16)
    assert report.replayed > 5
    (said,) = report.fallbacks
    assert "AdamW: " + ("it computes `norms` on the host" if backend == "emulated" else "") in said


def _counts_in_a_closure(optimizer: Any, _: Any, rows: list[float]) -> None:
    own = optimizer.step

    def stepped() -> Any:
        rows.append(len(rows))
        return own()

    optimizer.step = stepped


def _counts_in_a_default(optimizer: Any, _: Any, rows: list[float]) -> None:
    def stepped(own: Any = optimizer.step, rows: Any = rows) -> Any:
        rows.append(len(rows))
        return own()

    optimizer.step = stepped


def _counts_in_an_attribute(optimizer: Any, _: Any, rows: list[float]) -> None:
    own, optimizer.rows = optimizer.step, rows

    def stepped(self: Any) -> Any:
        self.rows.append(len(self.rows))
        return own()

    optimizer.step = MethodType(stepped, optimizer)


@pytest.mark.filterwarnings("ignore:.*the optimizer step runs eagerly. AdamW")
@pytest.mark.parametrize(
    "around", [_counts_in_a_closure, _counts_in_a_default, _counts_in_an_attribute]
)
def test_what_code_puts_around_a_step_computes_in_each(backend: str, around: Changed) -> None:
    """As apex puts a step of its own on an optimizer of torch."""
    report = report_of_equal(backend, around)
    assert report.replayed > 3
    assert report.fallbacks == (
        "the optimizer step runs eagerly: AdamW: it computes `rows` on the host in every step",
    )


def _zeroes_with_a_count(optimizer: Any, _: Any, rows: list[float]) -> None:
    own = optimizer.zero_grad

    def zero_grad(*args: Any, rows: Any = rows) -> None:
        rows.append(len(rows))
        own(*args)

    optimizer.zero_grad = zero_grad


def _zeroes_in_a_class(optimizer: Any, _: Any, rows: list[float]) -> None:
    class Counting(optim.AdamW):
        def zero_grad(self, *args: Any) -> None:
            rows.append(len(rows))
            super().zero_grad(*args)

    optimizer.__class__ = Counting


def _counts_outside(optimizer: Any, _: Any, rows: list[float]) -> Callable[[], None]:
    optimizer.rows, optimizer.zeroed = rows, 0

    def count() -> None:
        optimizer.zeroed += 1
        optimizer.rows.append(optimizer.zeroed)

    return count


@pytest.mark.filterwarnings("ignore:.*a call runs eagerly")
@pytest.mark.parametrize(
    ("changed", "names"),
    [
        (_zeroes_with_a_count, "AdamW.zero_grad.rows"),
        (_zeroes_in_a_class, ""),
        (_counts_outside, "AdamW."),
    ],
)
def test_what_code_changes_of_an_optimizer_is_no_less(
    backend: str, changed: Changed, names: str
) -> None:
    report = report_of_equal(backend, changed, on_failure="eager", verify=False)
    said = " ".join(report.fallbacks)
    assert f"changes {names}" in said if names else report.replayed > 3


@pytest.mark.filterwarnings("ignore:GraphCapture")
def test_eager_steps_leave_graphs_what_they_bind_anew(backend: str, tmp_path: Path) -> None:
    row = ROWS["scaled by norms"]
    options: dict[str, Any] = {
        "module": network(row, False), "data": lambda: batches(8, last=5), "max_epochs": 4,
        "validation": 0, "capture": {"max_graphs": 1, "on_failure": "eager"},
    }  # fmt: skip
    eager = prepare(backend, tmp_path, False, **options).run()
    captured = prepare(backend, tmp_path, True, **options).run()
    compare(eager, captured, replayed=False)
    assert captured.statistics.replayed > 10
    assert captured.statistics.captures == 1


class Scaling(optim.Optimizer):
    """Is given how far it goes, as Sophia is given the size of a batch."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 2.0**-6})

    def step(self, closure: Any = None, *, scale: float = 1.0) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    p.add_(p.grad, alpha=-scale * group["lr"])
        return loss


class GivingInAHook(Net):
    def optimizer_step(
        self, epoch: Any, batch_idx: int, optimizer: Any, closure: Any = None
    ) -> None:
        optimizer.step(closure=closure, scale=1.0 + batch_idx % 3)


class GivingByHand(Net):
    def __init__(self, optimizers: Any) -> None:
        super().__init__(optimizers)
        self.automatic_optimization = False

    def scale(self, batch_idx: int) -> float:
        return 0.5

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        loss = self.loss(batch)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step(scale=self.scale(batch_idx))
        self.log("loss", loss)


class GivingInTurn(GivingByHand):
    def scale(self, batch_idx: int) -> float:
        return 0.5 if batch_idx % 2 else 2.0


@pytest.mark.filterwarnings("ignore:GraphCapture")
def test_a_step_without_a_closure_gets_none(backend: str) -> None:
    """Of a plain loop whose optimizer works only where it is given a closure."""
    device = torch.device("cuda" if backend == "cuda" else "cpu")
    data = torch.randn(24, 4, 8, generator=torch.Generator().manual_seed(0))
    found = []
    for is_captured in (False, True):
        torch.manual_seed(0)
        net = nn.Linear(8, 1).to(device)
        optimizer = Closing(net.parameters())

        def train(x: Tensor, closes: bool, net: Any = net, optimizer: Any = optimizer) -> None:
            def closure() -> Tensor:
                optimizer.zero_grad()
                loss = net(x).square().mean()
                loss.backward()
                return loss

            if closes:
                optimizer.step(closure)
            else:
                closure()
                optimizer.step()

        step: Any = train
        if is_captured:
            step = capture(train, net, optimizer, backend=backend, only_if_faster=False)
        for i, x in enumerate(data):
            step(x.to(device), i % 3 == 0)
        if is_captured:
            assert step.report.replayed > 5, step.report.fallbacks
        found.append([p.tolist() for p in net.parameters()])
    assert found[0] == found[1]


@pytest.mark.filterwarnings("ignore:GraphCapture")
@pytest.mark.parametrize("scope", ["step", "modules"])
@pytest.mark.parametrize("module", [GivingInAHook, GivingByHand, GivingInTurn])
def test_a_step_gets_what_it_is_given(
    backend: str, tmp_path: Path, module: Any, scope: str
) -> None:
    brought = lambda own: Scaling(own.parameters())  # noqa: E731
    given: dict[str, Any] = {"module": lambda: module(brought), "max_epochs": 3, "validation": 0}
    given["capture"] = {"scope": scope}
    eager, captured = (prepare(backend, tmp_path, on, **given).run() for on in (False, True))
    compare(eager, captured, replayed=False)
    assert captured.statistics.replayed > 8
    said = "gives it further arguments" in " ".join(captured.statistics.fallbacks)
    assert said == (module is GivingInAHook and scope == "step")
