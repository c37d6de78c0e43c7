"""What hooks do with a module whose parts are graphed: scripts, traces, exports, introspection."""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn

from tests.training.fits import Net, assert_nothing_left, batches, compare, fit_twice, named

# torch says that scripting and tracing are on their way out, and imports its compiler.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


class Layer(nn.Module):
    """Reads a name of this file, and an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.gain: int = 3

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.relu(self.inner(x)) * self.gain


class Layered(Net):
    """Two layers of its author's and one of torch's; the LightningModule itself can be exported."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Layer(), Layer()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(self.second(self.first(x)))

    def loss(self, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(self(batch["x"]), batch["y"])


def code(module: nn.Module, x: Tensor) -> Any:
    forward: Any = module.forward
    return [
        forward.__code__.co_varnames,
        forward.__qualname__,
        forward.__self__ is module,
        inspect.getfullargspec(forward),
        str(inspect.signature(forward)),
        typing.get_type_hints(forward),
        inspect.getsource(forward),
    ]


LOOKS: dict[str, Callable[[Any, Tensor], Any]] = {
    "script": lambda module, x: torch.jit.script(module)(x),
    "trace": lambda module, x: torch.jit.trace(module, x)(x),
    "export": lambda module, x: torch.export.export(module, (x,)).module()(x),
    "symbolic": lambda module, x: torch.fx.symbolic_trace(module)(x),
    "compile": lambda module, x: torch.compile(module, backend="eager", fullgraph=True)(x),
    "code": code,
    "partial": lambda module, x: functools.partial(module.forward)(x),
}


class Look(Callback):
    """Looks at submodules and at the module itself after steps that were observed and replayed."""

    def __init__(self, looks: list[str], autograd: bool) -> None:
        self.found: list[Any] = []
        self._looks = looks
        self._autograd = autograd

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step not in (6, 10):  # an observed one, and one with graphs
            return
        x = batch["x"]
        with torch.set_grad_enabled(self._autograd):
            for name in self._looks:
                for module in (pl_module.first, pl_module.net, pl_module):
                    self.found.append(plain(LOOKS[name](module, x)))
            if "script" in self._looks:
                self.found.append(plain(pl_module.to_torchscript()(x)))
            if "trace" in self._looks:
                traced = pl_module.to_torchscript(method="trace", example_inputs=x)
                self.found.append(plain(traced(x)))


def plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, Tensor) else value


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("autograd", [True, False])
def test_hooks_find_modules_as_they_were_written(
    backend: str, tmp_path: Path, look: str, autograd: bool
) -> None:
    looks: list[Look] = []

    def callbacks() -> list[Callback]:
        looks.append(Look([look], autograd=autograd))
        return [looks[-1]]

    capture = named("first", "second", "net")
    fits = fit_twice(
        backend, tmp_path, module=Layered, capture=capture, callbacks=callbacks,
        data=lambda: batches(14), max_epochs=1,
    )  # fmt: skip
    compare(*fits)
    assert_nothing_left(fits[1])
    assert fits[1].statistics.replayed == 8
    eager, captured = looks
    assert captured.found == eager.found
    assert len(captured.found) >= 6


class Exchanging(Callback):
    """Gives a layer another forward in the middle of the fit."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if trainer.global_step == 10:
            pl_module.first.forward = doubled(pl_module.first.forward)


def doubled(forward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def twice(x: Tensor) -> Tensor:
        return forward(x) * 2

    return twice


def test_a_forward_that_is_exchanged_in_the_middle(backend: str, tmp_path: Path) -> None:
    capture = named("first", "second", "net")
    fits = fit_twice(
        backend, tmp_path, module=Layered, capture=capture, callbacks=lambda: [Exchanging()],
        data=lambda: batches(30), max_epochs=1,
    )  # fmt: skip
    compare(*fits)
    assert fits[1].statistics.recaptures == ["the forward of `first` was exchanged"]
    assert fits[1].statistics.replayed > 15
    assert vars(fits[1].module.first)["forward"].__name__ == "twice"


def test_a_forward_that_is_called_by_its_name(backend: str, tmp_path: Path) -> None:
    class Direct(Layered):
        def forward(self, x: Tensor) -> Tensor:
            return self.net.forward(self.second.forward(self.first.forward(x)))

    fits = fit_twice(backend, tmp_path, module=Direct, capture={"scope": "modules"})
    compare(*fits)
    assert fits[1].statistics.modules == ["first", "second", "net"]


class Inside(Net):
    """Batches of one size pass through a module, those of the other through a part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.outer = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 8))

    def loss(self, batch: Any) -> Tensor:
        layer = self.outer if len(batch["x"]) == 8 else self.outer[0]
        return super().loss({**batch, "x": layer(batch["x"])})

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", Net.loss(self, {**batch, "x": self.outer(batch["x"])}))


def test_graphs_of_modules_inside_of_each_other(backend: str, tmp_path: Path) -> None:
    def data() -> list[dict[str, Any]]:
        pairs = zip(batches(20), batches(20, size=4), strict=True)
        return [batch for pair in pairs for batch in pair]

    capture = {"scope": "modules", "max_graphs": 8}
    fits = fit_twice(
        backend, tmp_path, module=Inside, capture=capture, data=data, max_epochs=3, validation=6
    )
    compare(*fits)
    graphs = fits[1].statistics.graphs
    assert {"module outer", "module outer.0"} <= {record.scope for record in graphs}
    assert fits[1].statistics.evaluation["validation_step"].replayed == 13
