"""Attributes that a forward sets: hooks find there what eager training would have set."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.nn.utils import parametrize

from tests.programs.table import Promises, of_sizes, row
from tests.training.fits import Net, named


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
        self.seen: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step({**batch, "x": self.block(batch["x"])}, batch_idx)
        return loss / self.block.samples

    def on_after_backward(self) -> None:
        self.seen.append(self.block.samples)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(self.block.samples)


RUNS = of_sizes(*[8] * 6, *[6] * 6, *[8, 6, 8, 6, 6, 8, 8, 6] * 2)
TURNS = of_sizes(*[8, 6] * 12)


class Twice(Net):
    """Calls a block twice, with other sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.seen: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        halves = [self.called(batch["x"][:half]) for half in (3, 5)]
        x = batch["x"] + sum(half.mean() for half in halves)
        return super().training_step({**batch, "x": x}, batch_idx)

    def called(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.block(x)
        self.seen.append(self.block.samples)
        return hidden


class Validated(Reader):
    """Its validation calls the block without autograd."""

    def on_validation_start(self) -> None:
        if self.current_epoch > 1:  # there are graphs by then
            self.block.samples = 0

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss({**batch, "x": self.block(batch["x"])}))
        self.seen.append(self.block.samples)


class Watching(Reader):
    """Looks at what its block has set; the loss stays as it is."""

    name = "samples"

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return Net.training_step(self, {**batch, "x": self.block(batch["x"])}, batch_idx)

    def on_before_backward(self, loss: Tensor) -> None:
        self.seen.append(getattr(self.block, self.name, None))

    def on_after_backward(self) -> None:
        self.seen.append(getattr(self.block, self.name, None))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(getattr(self.block, self.name, None))


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
    def of_layer(self) -> Any:
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


class WatchingLayer(Watching):
    """Looks at what the layer of its block has."""

    name = "of_layer"


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


class Moded(Net):
    """Steps of one size set what those of another read; they cannot be captured."""

    def __init__(self) -> None:
        super().__init__()
        self.mode = 1.0
        self.seen: list[float] = []

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
        self.seen.append(self.mode)


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


class BesideCompiled(Reader):
    """Another submodule is compiled."""

    def __init__(self, block: type[Block]) -> None:
        super().__init__(block)
        self.other = torch.compile(nn.Linear(8, 8), backend="eager")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step({**batch, "x": self.other(batch["x"])}, batch_idx)


class Telling(nn.Module):
    """Calls a method of another object."""

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
        self.seen: list[Any] = []

    def told(self, length: int) -> None:
        self.total += length

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step({**batch, "x": self.block(batch["x"])}, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(self.total)


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


BLOCKS = {"data": RUNS, "validation": 0, "max_epochs": 1, "modules": ("block",)}
EACH_WAY = "unverified; verified; in turn; auto; modules, unverified; modules, verified"
ROWS = {
    kind.__name__: row(partial(Reader, kind), also=EACH_WAY, below="", **BLOCKS)
    for kind in (Block, ReadAgain, ByProperty, Inside)
}
ROWS |= {
    kind.__name__: row(partial(watching, kind), said=None, also="in turn", **BLOCKS)
    for watching, kind in (
        (Watching, ThroughSuper), (Watching, Scaling), (Watching, InBackward),
        (WatchingLayer, OnLayer),
    )
}  # fmt: skip
ONCE = {"validation": 0, "max_epochs": 1, "said": None, "replayed": 1}
OF_BLOCK, OF_BOTH = named("block"), named("block", "net")
ROWS |= {
    "ReadBefore": row(partial(Reader, ReadBefore), said=None, also=EACH_WAY, **BLOCKS),
    "Twice": row(Twice, capture=OF_BOTH, also="unverified", **ONCE),
    "Validated": row(
        partial(Validated, Block), capture=OF_BOTH, also="unverified", max_epochs=4,
    ),
    "Annealing": row(
        partial(Annealing, Handed), **{**BLOCKS, "data": of_sizes(*[8] * 16)}, said=None,
        also="auto",
    ),
    # A refused capture sets nothing later.
    "Moded": row(Moded, data=of_sizes(*[6] * 6, *[8] * 14), also="unverified; verified", **ONCE),
    # A call that is not replayed sets by itself.
    "Flipping": row(
        partial(Flipping, ByFlag), capture=OF_BLOCK, data=of_sizes(*[8] * 16),
        also="unverified; verified", **ONCE,
    ),
    "BesideCompiled": row(
        partial(BesideCompiled, Block), capture=OF_BLOCK, data=TURNS,
        ignored=".*(deprecated|global hooks)", **ONCE,
    ),
    "Telling": row(
        Told, capture=OF_BOTH, said="changes total of a Told", replayed=1, found=None,
        also="unverified", check=lambda fit: fit.statistics.modules == ["net"], validation=0,
    ),
    # What another thread sets is not the step's.
    "Beating": row(
        partial(Reader, Block), capture=OF_BOTH, callbacks=lambda: [Beating()], validation=0,
        check=lambda fit: fit.statistics.modules == ["block", "net"], said=None, replayed=1,
    ),
}  # fmt: skip


class TestStores(Promises):
    rows = ROWS
