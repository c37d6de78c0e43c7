"""Attributes that a forward sets: whoever reads them finds what eager training would have set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from tests.training.fits import Net, batches, compare, fit_twice
from tests.training.test_modules import named


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
@pytest.mark.parametrize("verify", ["first", "off", 4])
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
        refused = sizes is TURNS and scope == "step"
        assert bool(statistics.replayed) is not refused
        assert any("samples" in line for line in statistics.fallbacks) is (
            sizes is TURNS and scope != "modules"
        )


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
@pytest.mark.parametrize("verify", ["first", "off"])
def test_two_calls_in_a_step(backend: str, tmp_path: Path, verify: str) -> None:
    modules = []

    def module() -> Twice:
        modules.append(Twice())
        return modules[-1]

    capture = named("block", "net", verify=verify, on_failure="eager")
    fits = fit_twice(backend, tmp_path, module=module, capture=capture, validation=0)
    compare(*fits, replayed=False)
    assert modules[1].found == modules[0].found


@pytest.mark.parametrize("verify", ["first", "off"])
def test_calls_without_autograd(backend: str, tmp_path: Path, verify: str) -> None:
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

    capture = named("block", "net", verify=verify, eval_graphs=True)
    fits = fit_twice(backend, tmp_path, module=module, capture=capture, max_epochs=4)
    compare(*fits)
    assert modules[1].found == modules[0].found
