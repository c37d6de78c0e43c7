"""Attributes that a forward sets: whoever reads them finds what eager training would have set."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.nn.utils import parametrize

from tests.training.fits import Net, TrainingContext, batches, compare, fit_twice
from tests.training.modules.test_equal import named


class Block(nn.Module):
    """Sets the number of samples."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.samples = 0

    def forward(self, x: Tensor) -> Tensor:
        self.samples = len(x)
        hidden: Tensor = self.linear(x)
        return hidden


class ReadAgain(Block):
    """Reads what it has set."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / self.mean_of()

    def mean_of(self) -> int:
        return self.samples


class ByProperty(Block):
    """Sets it where a property keeps it."""

    @property
    def size(self) -> int:
        return self._size

    @size.setter
    def size(self, size: int) -> None:
        self._size = size
        self.samples = size + 1

    def forward(self, x: Tensor) -> Tensor:
        self.size = len(x)
        hidden: Tensor = self.linear(x) / self.size
        return hidden


class Inside(Block):
    """Sets an attribute of a submodule, which sets it again, and one from that."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Block()

    def forward(self, x: Tensor) -> Tensor:
        self.inner.samples = 2
        hidden: Tensor = self.inner(x)
        self.samples = self.inner.samples + 1
        return hidden * self.samples


class ReadBefore(Block):
    """Computes with what the step before has set."""

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.linear(x) * (1 + self.samples)
        self.samples = len(x)
        return hidden


class Reader(Net):
    """Divides the loss by what a block has set, and keeps what hooks find there."""

    def __init__(self, block: type[Block]) -> None:
        super().__init__()
        self.block = block()
        self.found: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step({**batch, "x": self.block(batch["x"])}, batch_idx)
        return loss / self.block.samples

    def on_after_backward(self) -> None:
        self.found.append(self.block.samples)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.found.append(self.block.samples)


RUNS = [8] * 6 + [6] * 6 + [8, 6, 8, 6, 6, 8, 8, 6] * 2
TURNS = [8, 6] * 12


def data(sizes: list[int]) -> list[dict[str, Any]]:
    """Batches of these sizes."""
    return [
        {key: value[:size] for key, value in batch.items()}
        for batch, size in zip(batches(len(sizes)), sizes, strict=True)
    ]


@pytest.mark.filterwarnings("ignore:GraphCapture")
@pytest.mark.parametrize("verify", [True, False, 4])
@pytest.mark.parametrize("sizes", [RUNS, TURNS], ids=["runs", "turns"])
@pytest.mark.parametrize("scope", ["step", "modules", "auto"])
@pytest.mark.parametrize("block", [Block, ReadAgain, ByProperty, Inside, ReadBefore])
def test_shapes_in_turn(
    backend: str, tmp_path: Path, block: type[Block], scope: str, sizes: list[int], verify: Any
) -> None:
    modules = []

    def module() -> Reader:
        modules.append(Reader(block))
        return modules[-1]

    capture = named("block") if scope == "modules" else {"scope": scope}
    fits = fit_twice(
        backend,
        tmp_path,
        module=module,
        data=lambda: data(sizes),
        capture={**capture, "verify": verify, "on_failure": "eager"},
        validation=0,
        max_epochs=1,
    )
    compare(*fits, replayed=False)
    assert modules[1].found == modules[0].found
    statistics = fits[1].statistics
    if block is not ReadBefore:
        assert statistics.replayed > 0
        assert statistics.fallbacks == []


class Twice(Net):
    """Calls a block twice, with other sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.found: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        halves = [self.called(batch["x"][:half]) for half in (3, 5)]
        x = batch["x"] + sum(half.mean() for half in halves)
        return super().training_step({**batch, "x": x}, batch_idx)

    def called(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.block(x)
        self.found.append(self.block.samples)
        return hidden


@pytest.mark.filterwarnings("ignore:GraphCapture")
@pytest.mark.parametrize("verify", [True, False])
def test_two_calls_in_a_step(backend: str, tmp_path: Path, verify: bool) -> None:
    modules = []

    def module() -> Twice:
        modules.append(Twice())
        return modules[-1]

    capture = named("block", "net", verify=verify, on_failure="eager")
    fits = fit_twice(backend, tmp_path, module=module, capture=capture, validation=0)
    compare(*fits, replayed=False)
    assert modules[1].found == modules[0].found


@pytest.mark.parametrize("verify", [True, False])
def test_calls_without_autograd(backend: str, tmp_path: Path, verify: bool) -> None:
    modules = []

    class Validated(Reader):
        def on_validation_start(self) -> None:
            if self.current_epoch > 1:  # there are graphs by then
                self.block.samples = 0

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val", self.loss({**batch, "x": self.block(batch["x"])}))
            self.found.append(self.block.samples)

    def module() -> Validated:
        modules.append(Validated(Block))
        return modules[-1]

    capture = named("block", "net", verify=verify, validation=True)
    fits = fit_twice(backend, tmp_path, module=module, capture=capture, max_epochs=4)
    compare(*fits)
    assert modules[1].found == modules[0].found


class Watching(Reader):
    """Looks at what its block has set; the loss stays as it is."""

    name = "samples"

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return Net.training_step(self, {**batch, "x": self.block(batch["x"])}, batch_idx)

    def on_before_backward(self, loss: Tensor) -> None:
        self.found.append(getattr(self.block, self.name, None))

    def on_after_backward(self) -> None:
        self.found.append(getattr(self.block, self.name, None))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.found.append(getattr(self.block, self.name, None))


class ThroughSuper(Block):
    def forward(self, x: Tensor) -> Tensor:
        super().__setattr__("samples", len(x))
        hidden: Tensor = self.linear(x)
        return hidden


class OnLayer(Block):
    def forward(self, x: Tensor) -> Tensor:
        self.linear.samples = len(x)
        hidden: Tensor = self.linear(x)
        return hidden

    @property
    def found(self) -> Any:
        return getattr(self.linear, "samples", None)


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


class Scaling(Block):
    """Its class is made by ``register_parametrization``."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        parametrize.register_parametrization(self, "weight", Doubled())

    def forward(self, x: Tensor) -> Tensor:
        self.samples = len(x)
        hidden: Tensor = self.linear(x) * self.weight
        return hidden


class Noting(torch.autograd.Function):
    """Sets an attribute in its backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: Block) -> Tensor:
        ctx.module = module
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.module.samples = len(gradient)
        return gradient, None


class InBackward(Block):
    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = Noting.apply(self.linear(x), self)  # type: ignore[no-untyped-call]
        return hidden


def followed(
    backend: str, root: Path, module: Any, capture: dict[str, Any], **options: Any
) -> tuple[TrainingContext, TrainingContext]:
    """Two fits with equal values, in parameters as in what the modules have found."""
    modules: list[Any] = []

    def made() -> Any:
        modules.append(module())
        return modules[-1]

    options = {"validation": 0, "max_epochs": 1, **options}
    capture = {**capture, "on_failure": "eager"}
    fits = fit_twice(backend, root, module=made, capture=capture, **options)
    compare(*fits, replayed=False)
    assert modules[1].found == modules[0].found
    return fits


@pytest.mark.filterwarnings("ignore:GraphCapture")
@pytest.mark.parametrize("sizes", [RUNS, TURNS], ids=["runs", "turns"])
@pytest.mark.parametrize("capture", [{"scope": "step"}, named("block")])
@pytest.mark.parametrize("block", [ThroughSuper, OnLayer, Scaling, InBackward])
def test_ways_to_set(
    backend: str, tmp_path: Path, block: type[Block], capture: dict[str, Any], sizes: list[int]
) -> None:
    class Module(Watching):
        name = "found" if block is OnLayer else "samples"

    followed(backend, tmp_path, lambda: Module(block), capture, data=lambda: data(sizes))


class Handed(Block):
    """Sets an object that another one holds, and reads what is in it."""

    def __init__(self) -> None:
        super().__init__()
        options = {"scale": 1.0}
        self.linear.options = options  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        self.options = self.linear.options
        hidden: Tensor = self.linear(x) * self.options["scale"]  # type: ignore[index,operator]
        return hidden


class Annealing(Watching):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 10:
            self.block.linear.options["scale"] = 2.0  # type: ignore[index,operator]


@pytest.mark.parametrize("capture", [{"scope": "step"}, named("block"), {"scope": "auto"}])
def test_what_is_inside_of_a_set_object_is_read(
    backend: str, tmp_path: Path, capture: dict[str, Any]
) -> None:
    followed(backend, tmp_path, lambda: Annealing(Handed), capture, data=lambda: data([8] * 16))


class Moded(Net):
    """Steps of one size set what those of another read; they cannot be captured."""

    def __init__(self) -> None:
        super().__init__()
        self.mode = 1.0
        self.found: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if len(batch["x"]) == 6:
            self.mode = 1.0
            if self.global_step > 100:  # a counter: the capture is refused here
                self.mode = 3.0
        return super().training_step(batch, batch_idx) * self.mode

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 14:
            self.mode = 2.0

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.found.append(self.mode)


@pytest.mark.filterwarnings("ignore:GraphCapture")
@pytest.mark.parametrize("verify", [True, False, 4])
def test_a_refused_capture_sets_nothing_later(backend: str, tmp_path: Path, verify: Any) -> None:
    capture = {"scope": "step", "verify": verify}
    fits = followed(backend, tmp_path, Moded, capture, data=lambda: data([6] * 6 + [8] * 14))
    assert fits[1].statistics.replayed > 0


class ByFlag(Block):
    def forward(self, x: Tensor) -> Tensor:
        self.samples = 3 if self.training else 5
        hidden: Tensor = self.linear(x)
        return hidden


class Flipping(Reader):
    """Runs its block in eval mode at times."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.block.train(batch_idx not in (9, 12, 15))
        try:
            return super().training_step(batch, batch_idx)
        finally:
            self.block.train()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        self.block.samples = 3


@pytest.mark.parametrize("verify", [True, False, 4])
def test_a_call_that_is_not_replayed_sets_by_itself(
    backend: str, tmp_path: Path, verify: Any
) -> None:
    capture = named("block", verify=verify)
    sizes = [8] * 16
    fits = followed(backend, tmp_path, lambda: Flipping(ByFlag), capture, data=lambda: data(sizes))
    assert fits[1].statistics.replayed > 0


class BesideCompiled(Reader):
    """Another submodule is compiled."""

    def __init__(self, block: type[Block]) -> None:
        super().__init__(block)
        self.other = torch.compile(nn.Linear(8, 8), backend="eager")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step({**batch, "x": self.other(batch["x"])}, batch_idx)


@pytest.mark.filterwarnings("ignore:GraphCapture", "ignore::DeprecationWarning")
def test_beside_a_compiled_submodule(backend: str, tmp_path: Path) -> None:
    fits = followed(
        backend, tmp_path, lambda: BesideCompiled(Block), named("block"), data=lambda: data(TURNS)
    )
    assert fits[1].statistics.replayed > 0


class Telling(nn.Module):
    """Calls a method of somebody else's."""

    def __init__(self, tell: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.tell = tell

    def forward(self, x: Tensor) -> Tensor:
        self.tell(len(x))
        hidden: Tensor = self.linear(x)
        return hidden


class Told(Net):
    """A graphed submodule counts in its parent."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0
        self.block = Telling(self.told)
        self.found: list[Any] = []

    def told(self, length: int) -> None:
        self.total += length

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step({**batch, "x": self.block(batch["x"])}, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.found.append(self.total)


@pytest.mark.filterwarnings("ignore:GraphCapture")
@pytest.mark.parametrize("verify", [True, False])
def test_what_a_submodule_changes_in_its_parent_is_refused(
    backend: str, tmp_path: Path, verify: bool
) -> None:
    fits = followed(backend, tmp_path, Told, named("block", "net", verify=verify))
    assert fits[1].statistics.modules == ["net"]
    assert "changes total of a Told" in fits[1].statistics.fallbacks[0]


class Beating(Callback):
    """A thread sets an attribute of the module all the time."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.beats = 0
        self.ends = threading.Event()
        self.thread = threading.Thread(target=self.beat, args=(pl_module,))
        self.thread.start()

    def beat(self, module: Any) -> None:
        while not self.ends.wait(0.001):
            module.beats += 1

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.ends.set()
        self.thread.join()
        assert pl_module.beats > 0


def test_what_another_thread_sets_is_not_the_step_s(backend: str, tmp_path: Path) -> None:
    capture = named("block", "net")
    fits = followed(
        backend,
        tmp_path,
        lambda: Reader(Block),
        capture,
        callbacks=lambda: [Beating()],
        max_epochs=2,
    )
    assert fits[1].statistics.modules == ["block", "net"]
    assert fits[1].statistics.replayed > 0
