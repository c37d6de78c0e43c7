"""Backward passes that only some steps run: part of the gradients, twice, later, in other order."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_graphs.errors import ReplayError
from lightning_graphs.regions.body import StepBody
from tests.training.fits import Fit, Net, adamw, batches, compare, fit_twice, line, prepare

OWN = {"scope": "modules", "on_failure": "eager"}
SAYS = pytest.mark.filterwarnings("ignore:GraphCapture")


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))


class Two(LightningModule):
    """Two networks on ``{"x": f32[N, 8], "y": i64[N]}``; every fourth step is another one."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.left, self.right = layers(), layers()

    def losses(self, batch: Any) -> tuple[Tensor, Tensor]:
        entropy = nn.functional.cross_entropy
        left = entropy(self.left(batch["x"]).float(), batch["y"])
        return left, entropy(self.right(batch["x"]).float(), batch["y"])

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        left, right = self.losses(batch)
        if batch_idx % 4 == 3:
            self.rare(left, right)
        else:
            self.manual_backward(left + right)
        optimizer.step()

    def rare(self, left: Tensor, right: Tensor) -> None:
        raise NotImplementedError

    def configure_optimizers(self) -> Any:
        return adamw(self)


class SomeInputs(Two):
    def rare(self, left: Tensor, right: Tensor) -> None:
        (left + right).backward(inputs=list(self.left[2].parameters()))


class SomeGradients(Two):
    def rare(self, left: Tensor, right: Tensor) -> None:
        weights = list(self.parameters())
        found = torch.autograd.grad(left, weights, allow_unused=True)
        for weight, gradient in zip(weights, found, strict=True):
            weight.grad = gradient


class Hooked(Two):
    def rare(self, left: Tensor, right: Tensor) -> None:
        handle = self.left[0].weight.register_hook(lambda gradient: gradient * 2)
        self.manual_backward(left + right)
        handle.remove()


class Retained(Two):
    def rare(self, left: Tensor, right: Tensor) -> None:
        self.manual_backward(left + right, retain_graph=True)  # asks
        self.manual_backward(left)


class Penalized(Two):
    def rare(self, left: Tensor, right: Tensor) -> None:
        found = torch.autograd.grad(left, [*self.left.parameters()], create_graph=True)  # asks
        self.manual_backward(left + right + sum(g.square().sum() for g in found))


class OtherOrder(Two):
    def rare(self, left: Tensor, right: Tensor) -> None:
        self.manual_backward(left)
        self.manual_backward(right)


class Delayed(Two):
    """The loss of one step is gone through backwards in the next."""

    before: Tensor | None = None

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        left, right = self.losses(batch)
        if self.before is not None:
            self.manual_backward(self.before)
        self.before = left
        self.manual_backward(right)
        if batch_idx % 4 == 3:
            with torch.no_grad():
                for weight in self.right.parameters():
                    weight.sub_(weight.grad, alpha=0.125)


class LazyPenalty(Net):
    """A penalty on gradients every fourth step, in automatic optimization."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        if batch_idx % 4 == 3:
            found = torch.autograd.grad(loss, list(self.net.parameters()), create_graph=True)
            loss = loss + sum(g.square().sum() for g in found)
        return loss


def penalty_on(loss: Tensor, net: nn.Module) -> Tensor:
    found = torch.autograd.grad(loss, list(net.parameters()), create_graph=True)
    return torch.stack([g.square().sum() for g in found]).sum()


class HelpedPenalty(Net):
    """The same by a function of its module's file."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        return loss if batch_idx % 4 != 3 else loss + penalty_on(loss, self.net)


class LazySlope(Net):
    """A slope, beside what a step draws, logs, counts and stores."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch["x"]
        self.seen = getattr(self, "seen", 0) + 1
        logits = self.net(x + torch.randn_like(x))
        loss = nn.functional.cross_entropy(logits.float(), batch["y"])
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("seen", float(self.seen))
        if batch_idx % 6 == 5:
            weight = self.net[0].weight
            (slope,) = torch.autograd.grad(logits.sum(), weight, create_graph=True)
            loss = loss + slope.square().mean()
        return loss


class LazyRetained(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        if batch_idx % 6 == 5:
            found = torch.autograd.grad(loss, list(self.net.parameters()), retain_graph=True)
            self.log("norm", torch.stack([g.norm() for g in found]).sum())
        return loss


class NeverCalled(Net):
    def penalty(self, loss: Tensor) -> Any:
        return torch.autograd.grad(loss, list(self.net.parameters()), create_graph=True)


class NeverInherited(NeverCalled):
    pass


class NeverTaken(Net):
    weight = 0.0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        if self.weight > 0:
            loss = loss + self.weight * penalty_on(loss, self.net)
        return loss


class Unforeseen(Net):
    """Asks for gradients in words that are not in its code."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        if batch_idx == 6:
            again = {"_".join(("retain", "graph")): True}
            grad = getattr(torch, "auto" + "grad").__dict__["grad"]
            self.found = grad(loss, list(self.net.parameters()), allow_unused=True, **again)
        return loss


class HookedLate(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        if batch_idx == 6:
            self.net[0].weight.register_hook(lambda gradient: gradient * 2)
        return loss


def trained(
    backend: str, root: Path, module: Any, capture: dict[str, Any] = OWN
) -> tuple[Fit, Fit]:
    eager, captured = fit_twice(
        backend, root, module=module, capture=capture, validation=0, data=lambda: batches(16)
    )
    compare(eager, captured, replayed=False)
    return eager, captured


class Outputs(nn.Module):
    """Two outputs, each of layers of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = layers(), layers()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.first(x), self.second(x)


class HooksOfOutputs(Net):
    """Later steps use one output, and hooks on parameters of the other one are not called."""

    def __init__(self) -> None:
        super().__init__()
        self.pair = Outputs()
        self.calls = 0
        for parameter in self.pair.parameters():
            parameter.register_hook(self.change)

    def change(self, gradient: Tensor) -> Tensor:
        self.calls += 1
        return gradient / 2

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        first, second = self.pair(batch["x"])
        logits = first if self.current_epoch else first + second
        return nn.functional.cross_entropy(logits + self.net(batch["x"]), batch["y"])


@SAYS
def test_hooks_are_not_called_without_a_gradient(backend: str, tmp_path: Path) -> None:
    eager, captured = trained(
        backend, tmp_path, HooksOfOutputs, {**OWN, "modules": ["pair", "net"]}
    )
    # Two epochs of 16 steps, on the parameters of both halves and then of one
    assert captured.module.calls == eager.module.calls == 16 * 8 + 16 * 4
    assert captured.statistics.modules == ["net"]
    assert "call hooks on parameters only where all" in captured.statistics.fallbacks[0]


@SAYS
@pytest.mark.parametrize("module", [SomeInputs, SomeGradients, Hooked])
def test_gradients_of_some_parameters_in_some_steps(
    backend: str, tmp_path: Path, module: type[Two]
) -> None:
    _, captured = trained(backend, tmp_path, module)
    assert captured.statistics.replayed > 10
    assert captured.statistics.modules == ["left", "right"]


@SAYS
@pytest.mark.parametrize(
    ("module", "reason", "left_out"),
    [
        (Retained, "more than one backward pass through it", "left"),
        (Penalized, "is differentiated twice", "left"),
    ],
)
def test_code_that_may_go_through_a_graph_twice_shows_where_first(
    backend: str, tmp_path: Path, module: type[LightningModule], reason: str, left_out: str
) -> None:
    _, captured = trained(backend, tmp_path, module)
    notes = captured.statistics.fallbacks
    assert notes[0].startswith("steps run eagerly until one shows which module")
    assert f"test_backward.py:{line(module.rare, 'asks')} in rare" in notes[0]
    assert f"`{left_out}` is not graphed: it" in notes[1]
    assert reason in notes[1]


@SAYS
@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (LazyPenalty, "is differentiated twice"),
        (HelpedPenalty, "is differentiated twice"),
        (LazySlope, "is differentiated twice"),
        (LazyRetained, "more than one backward pass through it"),
    ],
)
def test_a_step_that_graphs_cannot_serve_is_run_again_eagerly(
    backend: str, tmp_path: Path, module: type[Net], reason: str
) -> None:
    """Its draws, logs, buffers and attributes are those of one run."""
    _, captured = trained(backend, tmp_path, module, {**OWN, "min_repeats": 0, "warmup_steps": 1})
    statistics = captured.statistics
    assert any(
        f"`net` is not graphed: it {reason}" in r or reason in r for r in statistics.fallbacks
    )
    assert not any("until one shows" in r for r in statistics.fallbacks)
    assert statistics.replayed + statistics.eager == 32
    (again,) = (r for r in statistics.recaptures if r.startswith("a step cannot be served"))
    assert re.search(r"of `net`, .*\.py:\d+ in \w+: ", again)


@pytest.mark.parametrize("module", [NeverCalled, NeverTaken, NeverInherited])
def test_words_in_code_that_does_not_run_cost_nothing(
    backend: str, tmp_path: Path, module: type[Net]
) -> None:
    _, captured = trained(backend, tmp_path, module)
    assert captured.statistics.fallbacks == []
    assert captured.statistics.replayed >= 26


@SAYS
def test_words_that_nothing_names_cost_nothing_in_manual_optimization(
    backend: str, tmp_path: Path
) -> None:
    class Unnamed(Two):
        def rare(self, left: Tensor, right: Tensor) -> None:
            self.manual_backward(left + right)

        def penalty(self, left: Tensor) -> Any:
            return torch.autograd.grad(left, list(self.parameters()), create_graph=True)

    _, captured = trained(backend, tmp_path, Unnamed)
    assert captured.statistics.fallbacks == []
    assert captured.statistics.replayed >= 26


@SAYS
def test_a_graph_that_a_later_step_goes_through_stays_eager(backend: str, tmp_path: Path) -> None:
    _, captured = trained(backend, tmp_path, Delayed)
    assert captured.statistics.modules == ["right"]
    assert captured.statistics.replayed > 10
    assert captured.statistics.fallbacks == [
        "`left` is not graphed: it has an output whose autograd graph is kept for a later step"
    ]


@SAYS
@pytest.mark.parametrize(
    ("module", "name", "observed"),
    [
        (OtherOrder, "right", "overwrote the activations"),
        (Unforeseen, "net", r"for parameters of `net`"),
        (HookedLate, "net", "a gradient hook was registered"),
    ],
)
def test_what_no_graph_can_serve_names_module_and_remedy(
    backend: str, tmp_path: Path, module: type[LightningModule], name: str, observed: str
) -> None:
    fit = prepare(
        backend, tmp_path, True, module=module, capture=OWN, validation=0, data=lambda: batches(16)
    )
    message = rf'(?s)`{name}`.*{observed}|{observed}.*exclude=\["{name}"\]'
    with pytest.raises(ReplayError, match=message) as caught:
        fit.run()
    assert f'GraphCapture(exclude=["{name}"])' in caught.value.remedy
    assert "make_graphed_callables" not in str(caught.value)


@SAYS
def test_the_remedy_helps(backend: str, tmp_path: Path) -> None:
    _, captured = trained(backend, tmp_path, OtherOrder, {**OWN, "exclude": ["right"]})
    assert captured.statistics.modules == ["left"]
    assert captured.statistics.replayed > 10


@SAYS
@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (torch.OutOfMemoryError("no more"), "needs memory of its own, .*no more"),
        (KeyError("lost"), "must run without an error.*KeyError: 'lost'"),
        (ValueError("lost\nand more"), r"ValueError: lost, at \S+test_backward.py"),
    ],
)
def test_what_is_raised_by_capturing_the_update_is_a_refusal(
    backend: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    reason: str,
) -> None:
    def update(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(StepBody, "update", update)
    _, captured = trained(backend, tmp_path, Net)
    assert captured.statistics.replayed > 10
    [note] = captured.statistics.fallbacks
    assert note.startswith("the optimizer step runs eagerly: ")
    assert re.search(reason, note, re.DOTALL)
