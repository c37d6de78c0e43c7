"""State that no attribute of a module holds: a verification puts it back."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from tests.programs.table import Promises, row
from tests.training.fits import Net

VARIABLE: ContextVar[Tensor] = ContextVar("VARIABLE")


class Keeper(nn.Module):
    """Layers, and a function that changes a tensor which something else than the module holds."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 8)
        self.change: Callable[[Tensor], Tensor] = lambda out: out

    def forward(self, x: Tensor) -> Tensor:
        return self.change(self.last(self.first(x).tanh()))


def moved(state: Tensor, out: Tensor) -> Tensor:
    """The output with a moving average of all outputs."""
    return out + state.mul_(0.5).add_(out.detach().mean(0))


def of_partial(keeper: Keeper, state: Tensor) -> None:
    keeper.change = partial(moved, state)


def of_nested_partial(keeper: Keeper, state: Tensor) -> None:
    keeper.change = partial(partial(lambda out, *, kept: moved(kept[0], out)), kept=[state])


def of_default(keeper: Keeper, state: Tensor) -> None:
    def change(out: Tensor, state: Tensor = state) -> Tensor:
        return moved(state, out)

    keeper.change = change


def of_keyword_default(keeper: Keeper, state: Tensor) -> None:
    def change(out: Tensor, *, state: Tensor = state) -> Tensor:
        return moved(state, out)

    keeper.change = change


def of_closure_without_autograd(keeper: Keeper, state: Tensor) -> None:
    def change(out: Tensor) -> Tensor:
        state.data.mul_(0.5).add_(out.detach().mean(0))
        return out + state

    keeper.change = change


def of_parameter(keeper: Keeper, state: Tensor) -> None:
    keeper.last.weight.average = state
    keeper.change = lambda out: moved(keeper.last.weight.average, out)


def of_method(keeper: Keeper, state: Tensor) -> None:
    class Teacher:
        def __init__(self) -> None:
            self.state = state

        def change(self, out: Tensor) -> Tensor:
            return moved(self.state, out)

    keeper.change = Teacher().change


def of_context(keeper: Keeper, state: Tensor) -> None:
    VARIABLE.set(state)
    keeper.change = lambda out: moved(VARIABLE.get(), out)


def of_weak_dictionary(keeper: Keeper, state: Tensor) -> None:
    table: WeakKeyDictionary[nn.Module, Tensor] = WeakKeyDictionary({keeper.last: state})
    keeper.change = lambda out: moved(table[keeper.last], out)


def of_hook_of_module(keeper: Keeper, state: Tensor) -> None:
    keeper.last.register_forward_hook(lambda module, args, out: moved(state, out))


def of_hook_of_gradient(keeper: Keeper, state: Tensor) -> None:
    keeper.last.bias.register_hook(partial(moved, state))


def of_hooks_of_gradients(keeper: Keeper, state: Tensor) -> None:
    """They share it: their order counts."""

    def change(gradient: Tensor) -> Tensor:
        return gradient / (1 + state.mul_(0.5).add_(gradient.norm()).mean())

    for parameter in keeper.parameters():
        parameter.register_hook(change)


def of_hooks_after_accumulation(keeper: Keeper, state: Tensor) -> None:
    def change(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(state.mul_(0.5).add_(parameter.grad.norm()).mean())

    for parameter in keeper.parameters():
        parameter.register_post_accumulate_grad_hook(change)


def of_hooks_that_draw(keeper: Keeper, state: Tensor) -> None:
    for parameter in keeper.parameters():
        parameter.register_hook(lambda gradient: gradient + torch.rand_like(gradient) / 64)


def of_hooks_of_what_is_unused(keeper: Keeper, state: Tensor) -> None:
    keeper.unused = nn.Linear(8, 8, device=state.device)
    of_hooks_that_draw(keeper, state)


def of_hook_of_output(keeper: Keeper, state: Tensor) -> None:
    def change(out: Tensor) -> Tensor:
        if out.requires_grad:
            out.register_hook(partial(moved, state))
        return out * 1

    keeper.change = change


def of_function_of_autograd(keeper: Keeper, state: Tensor) -> None:
    class Moved(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, out: Tensor) -> Tensor:
            return out.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return moved(state, gradient)

    keeper.change = Moved.apply


def of_normalization(keeper: Keeper, state: Tensor) -> None:
    norm = nn.BatchNorm1d(8).to(state.device)
    keeper.change = partial(lambda norm, out: norm(out), norm)


def _stepping(make: Callable[[list[Tensor]], Optimizer], keeper: Keeper) -> None:
    optimizers = {p: make([p]) for p in keeper.last.parameters()}

    def step(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in optimizers:
        parameter.register_post_accumulate_grad_hook(step)


def of_optimizers(keeper: Keeper, state: Tensor) -> None:
    _stepping(lambda p: SGD(p, lr=2**-6, momentum=0.5), keeper)


def of_fused_optimizers(keeper: Keeper, state: Tensor) -> None:
    _stepping(lambda p: Adam(p, lr=2**-6, fused=True, capturable=state.is_cuda), keeper)


HOLDERS = {name: f for name, f in globals().items() if name.startswith("of_")}


class Counted(Net):
    """An attribute of a parameter."""

    def loss(self, batch: Any) -> Tensor:
        weight: Any = self.net[4].weight
        weight.uses = getattr(weight, "uses", 0) + 1
        return super().loss(batch) * (1 + weight.uses / 64)


class Holding(Net):
    """Has a keeper whose state something else holds."""

    def __init__(self, hold: Callable[[Keeper, Any], None]) -> None:
        super().__init__()
        self.keeper, self._hold = Keeper(), [hold]

    def on_fit_start(self) -> None:
        hold = self._hold.pop()
        counts = hold.__name__.startswith("in_")
        state = SimpleNamespace(n=0) if counts else torch.zeros(8, device=self.device)
        hold(self.keeper, state)

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + self.keeper(batch["x"]).pow(2).mean()


# ------------------------------------------------------------------ of Python


def in_partial(keeper: Keeper, count: SimpleNamespace) -> None:
    def change(count: SimpleNamespace, out: Tensor) -> Tensor:
        count.n += 1
        return out * count.n

    keeper.change = partial(change, count)


def in_default(keeper: Keeper, count: SimpleNamespace) -> None:
    def change(out: Tensor, count: SimpleNamespace = count) -> Tensor:
        count.n += 1
        return out * count.n

    keeper.change = change


def in_method(keeper: Keeper, count: SimpleNamespace) -> None:
    class Counter:
        n = 0

        def change(self, module: nn.Module, args: Any, out: Tensor) -> Tensor:
            self.n += 1
            return out * self.n

    keeper.first.register_forward_hook(Counter().change)


def in_gradient_hook(keeper: Keeper, count: SimpleNamespace) -> None:
    def change(count: SimpleNamespace, parameter: Tensor) -> None:
        assert parameter.grad is not None
        count.n += 1
        parameter.grad.mul_(count.n)

    keeper.last.weight.register_post_accumulate_grad_hook(partial(change, count))


def in_generator(keeper: Keeper, count: SimpleNamespace) -> None:
    def counted() -> Any:
        out, n = (yield), 0
        while True:
            n += 1
            out = yield out * n

    numbers = counted()
    next(numbers)
    keeper.change = partial(lambda numbers, out: numbers.send(out), numbers)


COUNTERS = {name: f for name, f in globals().items() if name.startswith("in_")}


ROWS = {name: row(partial(Holding, hold)) for name, hold in HOLDERS.items()}
ROWS["of_weak_dictionary"] = row(
    partial(Holding, of_weak_dictionary), also="verified; modules, verified"
)
# It makes a module in its first step, which a checkpoint would be loaded before.
ROWS["of_hooks_of_what_is_unused"] = row(
    partial(Holding, of_hooks_of_what_is_unused), resumes=False
)
ROWS["Counted"] = row(Counted)
# What Python keeps there is found as well: such code runs eagerly, and counts once a step.
ROWS |= {
    name: row(
        partial(Holding, hold), placed=False,
        said="A replay runs no Python code|A graph would freeze",
    )
    for name, hold in COUNTERS.items()
}  # fmt: skip


class TestElsewhere(Promises):
    rows = ROWS
