"""Gradients that are cast together: seen by nobody, and the same as if autograd had cast each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from tests.training.fits import GradientTrace, Net, Trace, batches, compare, fit_twice


def nodes_of(backend: str, root: Path, **options: Any) -> int:
    """Nodes of the one graph of a fit, which trains as without the callback."""
    eager, captured = fit_twice(backend, root, **{"precision": "bf16-mixed", **options})
    compare(eager, captured)
    (nodes,) = {graph.nodes for graph in captured.capture.report.graphs if graph.replays}
    assert nodes is not None
    return nodes


def by_autograd(*_: Any) -> AbstractContextManager[None]:
    return nullcontext()


class Deep(Net):
    """More weights than wait for each other."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(30)]
        self.net = nn.Sequential(*layers, self.net)


@pytest.mark.parametrize(("module", "casts", "copies"), [(Net, 3, 1), (Deep, 63, 2)])
def test_a_captured_step_casts_gradients_together(
    backend: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    module: type[Net],
    casts: int,
    copies: int,
) -> None:
    together = nodes_of(backend, tmp_path, module=module)
    monkeypatch.setattr("lightning_graphs.lightning.trainer.cast_together", by_autograd)
    assert nodes_of(backend, tmp_path, module=module) - together == casts - copies


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
    """A hook on the node that accumulates a gradient, of which torch tells nobody."""

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


@pytest.mark.parametrize(
    "module",
    [
        *(HookOnOne, HookThatWrites, HookOnNode, MainGradients, HookInBackward),
        *(FrozenInBackward, NotDense),
    ],
)
@pytest.mark.parametrize("verify", [True, False])
def test_nobody_notices_that_gradients_are_cast_together(
    backend: str, tmp_path: Path, module: type[Net], verify: bool
) -> None:
    capture = {"verify": verify}
    compare(*fit_twice(backend, tmp_path, precision="bf16-mixed", module=module, capture=capture))


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("module", [HookOnNode, MainGradients])
def test_hooks_on_nodes_see_the_gradients_of_graphed_submodules(
    backend: str, tmp_path: Path, module: type[Net], precision: Any
) -> None:
    capture = {"scope": "modules"}
    compare(*fit_twice(backend, tmp_path, module=module, precision=precision, capture=capture))


@pytest.mark.filterwarnings("ignore:GraphCapture. the optimizer step runs eagerly")
def test_a_parameter_with_gaps_is_not_given_to_a_fused_kernel(backend: str, tmp_path: Path) -> None:
    eager, captured = fit_twice(backend, tmp_path, precision="bf16-mixed", module=NotFused)
    compare(eager, captured, replayed=False)
    assert captured.statistics.replayed > 0


@pytest.mark.parametrize("trace", [Trace, GradientTrace])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_hooks_of_lightning_see_the_gradients(
    backend: str, tmp_path: Path, trace: type[Trace], accumulate: int
) -> None:
    compare(
        *fit_twice(
            backend,
            tmp_path,
            precision="bf16-mixed",
            module=Deep,
            trace=trace,
            accumulate_grad_batches=accumulate,
        )
    )


def three_shapes() -> list[dict[str, Tensor]]:
    """Batches of three sizes in turn."""
    sizes = (batches(4, n) for n in (8, 6, 4))
    return [batch for trio in zip(*sizes, strict=True) for batch in trio]


@pytest.mark.parametrize(("accumulate", "max_graphs"), [(1, 3), (2, 12), (4, 12)])
@pytest.mark.parametrize("trace", [Trace, GradientTrace])
def test_shapes_that_take_turns(
    backend: str, tmp_path: Path, trace: type[Trace], accumulate: int, max_graphs: int
) -> None:
    compare(
        *fit_twice(
            backend,
            tmp_path,
            precision="bf16-mixed",
            data=three_shapes,
            trace=trace,
            accumulate_grad_batches=accumulate,
            capture={"max_graphs": max_graphs, "min_repeats": 0, "warmup_steps": 5},
        )
    )


@pytest.fixture
def _one_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process group of this process alone, while the test runs."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("backend", ["emulated"])  # CUDA refuses to capture its reductions
@pytest.mark.usefixtures("_one_process")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_data_parallel_training_with_one_process(backend: str, tmp_path: Path) -> None:
    compare(*fit_twice(backend, tmp_path, precision="bf16-mixed", module=Deep, strategy="ddp"))


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


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("scope", ["step", "modules"])
def test_a_hook_that_writes_into_a_gradient(
    backend: str, tmp_path: Path, precision: str, scope: str
) -> None:
    capture = {"scope": scope}
    compare(*fit_twice(backend, tmp_path, precision=precision, module=Shifted, capture=capture))
