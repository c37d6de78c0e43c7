"""Gradients that are cast together, unseen by hooks: the same as if autograd had cast each."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn, optim

from tests.programs.table import Promises, row, table
from tests.training.fits import Net, batches


class Deep(Net):
    """More weights than wait for each other."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(30)]
        self.net = nn.Sequential(*layers, self.net)


class HookOnOne(Net):
    """A hook on one parameter changes the gradients of all that have one by then."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0].weight.register_post_accumulate_grad_hook(self._halve)

    def _halve(self, _: Tensor) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)


class HookThatWrites(Net):
    """A hook on one parameter writes into the gradient that another one shares."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.full((8, 8), 0.25, dtype=torch.bfloat16))
        self.second = nn.Parameter(torch.full((8, 8), 0.25))
        self.first.register_hook(lambda gradient: gradient.mul_(0.5))

    def loss(self, batch: Any) -> Tensor:
        shifted = (batch["x"].bfloat16() + self.first) + self.second.bfloat16()
        return super().loss({**batch, "x": shifted.float()})


class HookOnNode(Net):
    """A hook on the node that accumulates a gradient, which torch lists nowhere."""

    def on_train_start(self) -> None:
        edge = torch.autograd.graph.get_gradient_edge(self.net[0].weight)
        self.node = edge.node
        self.node.register_prehook(lambda gradients: (gradients[0] * 0.5,))

    def on_train_end(self) -> None:
        del self.node


class MainGradients(Net):
    """Hooks on those nodes that add gradients up elsewhere, as those of Megatron-LM do."""

    def __init__(self) -> None:
        super().__init__()
        self.main = {name: torch.zeros_like(p) for name, p in self.named_parameters()}

    def on_fit_start(self) -> None:
        self.main = {name: value.to(self.device) for name, value in self.main.items()}
        self.nodes = []
        for name, parameter in self.named_parameters():
            node = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
            node.register_hook(partial(self._add, name, parameter))
            self.nodes.append(node)

    def _add(self, name: str, parameter: Tensor, *_: Any) -> None:
        if parameter.grad is not None:
            self.main[name].add_(parameter.grad)

    def on_train_batch_end(self, *_: Any) -> None:
        self.log("main", sum(value.sum() for value in self.main.values()))

    def on_train_end(self) -> None:
        del self.nodes


class FrozenInBackward(Net):
    """A parameter gets no gradient, though the forward pass has prepared one."""

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        weight = self.net[0].weight
        weight.requires_grad_(False)
        loss.backward()
        weight.requires_grad_(True)

    def configure_optimizers(self) -> optim.Optimizer:
        return optim.SGD(self.parameters(), lr=2**-5, fused=True)


class HookInBackward(Net):
    """The hook is registered when the forward pass is over."""

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        hook = self.net[0].weight.register_hook(lambda gradient: gradient * 0.5)
        loss.backward()
        hook.remove()


class NotDense(Net):
    """A parameter that leaves gaps in its memory."""

    def __init__(self) -> None:
        super().__init__()
        self.factors = nn.Parameter(torch.randn(32, 32).t()[::4, ::4])

    def loss(self, batch: Any) -> Tensor:
        return super().loss({**batch, "x": (batch["x"] @ self.factors).float()})

    def configure_optimizers(self) -> optim.Optimizer:
        return optim.SGD(self.parameters(), lr=2**-5, fused=True)


class NotFused(NotDense):
    """With an optimizer that would be given its fused kernel, which takes memory without gaps."""

    def configure_optimizers(self) -> optim.Optimizer:
        return optim.SGD(self.parameters(), lr=2**-5)


def three_shapes() -> list[dict[str, Tensor]]:
    """Batches of three sizes in turn."""
    sizes = (batches(4, n) for n in (8, 6, 4))
    return [batch for trio in zip(*sizes, strict=True) for batch in trio]


class Shift(nn.Module):
    """Gives one gradient to two, and a hook writes into it."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.full((8, 8), 0.125))
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.linear(x)
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: gradient.mul_(0.5))
        return hidden + self.shift.to(hidden.dtype)


class Shifted(Net):
    """A network behind a shift."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(Shift(), self.net)


BF16 = {"precision": "bf16-mixed"}
ROWS = (
    table(
        HookOnOne, HookThatWrites, HookInBackward, FrozenInBackward, NotDense, also="unverified",
        **BF16,
    )
    | table(HookOnNode, MainGradients, also="unverified", below="", **BF16)
    | {f"{kind.__name__}, plain": row(kind, below="") for kind in (HookOnNode, MainGradients)}
    | table(NotFused, said=None, replayed=1, placed=False, **BF16)
    | table(Deep, also="by threes; gradients", **BF16)
    | {
        f"shapes, window of {window}": row(
            data=three_shapes, accumulate_grad_batches=window, also="gradients", **BF16,
            capture={"max_graphs": graphs, "min_repeats": 0, "warmup_steps": 5},
        )
        for window, graphs in ((1, 3), (2, 12), (4, 12))
    }
    | {f"Shifted, {precision}": row(Shifted, below="", precision=precision)
       for precision in ("32-true", "bf16-mixed")}
)  # fmt: skip


class TestCasts(Promises):
    rows = ROWS
