"""Objects and containers that steps and submodules are given, and that change or are changed."""

from __future__ import annotations

import datetime
import itertools
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from tests.programs.table import Promises, row, table
from tests.training.fits import Net, adamw, batches, named


class Context:
    """Settings that code hands from place to place."""

    def __init__(self, device: torch.device) -> None:
        self.scale = 1.0
        self.mask = torch.ones(16, device=device)
        self.seen: list[Tensor] = []

    def later(self) -> None:
        """Other settings, for the second half of a fit."""
        self.scale = 3.0
        self.mask = self.mask * 0.5


class Block(nn.Module):
    """A layer that is given a context."""

    def __init__(self, *, keeps: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 16)
        self.keeps = keeps

    def forward(self, x: Tensor, context: Context) -> Tensor:
        hidden = self.linear(x) * context.scale * context.mask
        if self.keeps:
            context.seen.append(hidden)
        return hidden


class Settings(Net):
    """Hands a block the same context in every step; half-way it holds other values."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.head = nn.Linear(16, 3)
        self.settings: list[Context] = []

    def context(self) -> Context:
        """The context of all steps."""
        if not self.settings:
            self.settings.append(Context(self.device))
        return self.settings[0]

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.global_step == 10:
            self.context().later()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = self.block(batch["x"], self.context())
        return nn.functional.cross_entropy(self.head(hidden).float(), batch["y"])


class GivenInBatches(Settings):
    """Finds the context in the batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = self.block(batch["x"], batch["context"])
        return nn.functional.cross_entropy(self.head(hidden).float(), batch["y"])

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return {**batch, "context": self.context()}


class Normalizer:
    """As pytorch-forecasting fits one to each sample, which its dataset and its model hold."""

    def __init__(self) -> None:
        self.center, self.method = torch.zeros(()), "standard"

    def fit(self, values: Tensor) -> None:
        self.center = values.mean()

    def __call__(self, values: Tensor, scale: Tensor) -> Tensor:
        return values * scale if self.method == "standard" else values


class Normalized(Net):
    """The step uses what its batch tells of the fit."""

    def __init__(self) -> None:
        super().__init__()
        self.normalizer = Normalizer()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.normalizer.fit(batch["x"].cpu())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.normalizer(batch["x"], batch["x"].abs().mean())
        return self.loss({**batch, "x": x})


class Centered(Normalized):
    """... and what the fit has left."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        center = getattr(self.normalizer, "".join(("cen", "ter")))
        return self.loss({**batch, "x": batch["x"] - center.to(self.device)})


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, normalizer: Normalizer) -> Tensor:
        ctx.normalizer = normalizer
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return gradient * (1 + ctx.normalizer.center.to(gradient.device)), None


class InBackward(Normalized):
    """... or its backward pass uses that, in a thread of autograd on a GPU."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return Scaled.apply(self.loss(batch), self.normalizer)  # type: ignore[no-any-return]


class InHook(Normalized):
    """... or a hook on a gradient."""

    def __init__(self) -> None:
        super().__init__()
        own = self.normalizer
        self.net[0].weight.register_hook(lambda g: g * (1 + own.center.to(g.device)))


class Stored(Normalized):
    """... or only keeps that."""

    seen: Any = None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen = self.normalizer.center
        return self.loss(batch)


class Counter:
    """Counts what it is told."""

    def __init__(self) -> None:
        self.count = 0


COUNTERS: list[Counter] = []


def with_counter() -> list[dict[str, Any]]:
    """Batches with one counter."""
    COUNTERS.append(Counter())
    return [{**batch, "counter": COUNTERS[-1]} for batch in batches()]


class CountedInTheBatch(Net):
    """Counts in an object of the batch, where hooks find it."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        batch["counter"].count += 1
        return super().training_step(batch, batch_idx)


class Collected(Net):
    """Blocks put their hidden values into a list or an object that the step reads."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block(keeps=True)
        self.head = nn.Linear(16, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        context = Context(self.device)
        hidden = self.block(batch["x"], context)
        loss = nn.functional.cross_entropy(self.head(hidden).float(), batch["y"])
        extra: list[Tensor] = [seen.square().mean() for seen in context.seen]
        return sum(extra, loss)


class BlockOfList(Block):
    """Leaves its hidden values in the list that it is given."""

    def forward(self, x: Tensor, context: Any) -> Tensor:
        hidden: Tensor = self.linear(x)
        context["hidden"].append(hidden)
        return hidden


class CollectedInList(Collected):
    """The list is in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.block = BlockOfList()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        context: dict[str, list[Tensor]] = {"hidden": []}
        hidden = self.block(batch["x"], context)
        loss = nn.functional.cross_entropy(self.head(hidden).float(), batch["y"])
        return sum([seen.square().mean() for seen in context["hidden"]], loss)


class Remembering(LightningModule):
    """A small GPT-2 as it comes, with its cache of keys and values."""

    def __init__(self, *, use_cache: bool, frozen: bool) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(
            n_layer=2, n_head=2, n_embd=8, vocab_size=16, n_positions=8, use_cache=use_cache,
            bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
        self.gpt = GPT2LMHeadModel(config)
        for name, parameter in self.gpt.named_parameters():
            parameter.requires_grad_(not frozen or "mlp" in name)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.gpt(input_ids=batch["y"][None], labels=batch["y"][None]).loss
        return loss

    def configure_optimizers(self) -> Any:
        return adamw(self)


class Stream:
    """An endless stream of factors, in an object of its author's."""

    def __init__(self) -> None:
        self.factors = itertools.cycle([1.0, 2.0, 3.0])

    def next(self) -> float:
        """The next factor."""
        return next(self.factors)


class Streaming(Net):
    """Takes a factor from a stream in every step."""

    def __init__(self, held: Callable[[], Any], take: Callable[[Any], float]) -> None:
        super().__init__()
        self.stream, self.take = held(), take

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * self.take(self.stream)


class Sampler:
    """An iterator of user code: it draws on the device, and counts."""

    def __init__(self) -> None:
        self.calls, self.scales = 0, [0.5, 0.25]

    def __iter__(self) -> Sampler:
        return self

    def __next__(self) -> Tensor:
        self.calls += 1
        return torch.rand(3).mean() + self.scales[self.calls % 2]


STREAMS: dict[str, tuple[Callable[[], Any], Callable[[Any], float]]] = {
    "in an object": (Stream, Stream.next),
    "in a list": (lambda: [itertools.cycle([1.0, 2.0, 3.0])], lambda held: next(held[0])),
    "in a dict": (lambda: {"a": iter([1.0, 2.0] * 20)}, lambda held: next(held["a"])),
}


class GivenAModule(nn.Module):
    """A block that is given another module."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, other: nn.Module) -> Tensor:
        hidden: Tensor = other(self.linear(x))
        return hidden


class OwnLayer(nn.Linear):
    """A layer of a class of one's own."""


class HandsAModule(Net):
    """Hands a registered module to a block."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.other = GivenAModule(), OwnLayer(8, 8)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step({**batch, "x": self.block(batch["x"], self.other)}, batch_idx)


class Numbered(Net):
    """Two blocks are told their number by one object."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(16, 3)
        self.down = nn.Linear(16, 8)
        self.context: list[Context] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if not self.context:
            self.context.append(Context(self.device))
        context = self.context[0]
        context.scale = 1.0
        hidden = self.down(self.blocks[0](batch["x"], context))
        context.scale = 2.0
        hidden = self.blocks[1](hidden, context)
        return nn.functional.cross_entropy(self.head(hidden).float(), batch["y"])


def values_made_anew() -> dict[str, Any]:
    return {
        "rows": slice(0, 4),
        "range": range(2),
        "share": Fraction(1, 4),
        "place": Path("/tmp") / "runs",
        "every": datetime.timedelta(minutes=1),
        "scale": partial(torch.mul, other=0.5),
        "weights": np.array([1.0, 2.0]),
        "nested": [{"device": torch.device("cpu"), "size": torch.Size([2])}],
    }


class SetAnew(Net):
    """A hook sets an attribute to an equal value ahead of each step."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.settings = values_made_anew()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        settings = self.settings
        rows = batch["x"][settings["rows"]] * float(settings["share"])
        return self.loss(batch) + settings["scale"](self.net(rows)).mean() * len(settings["range"])


SETTINGS: dict[str, Any] = {}
exec("scale = 0.5", SETTINGS)


class Configured(Net):
    """Its settings are the variables of a file that was run, Python's own functions among them."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        print(end="")  # which a capture exchanges
        return self.loss(batch) * SETTINGS["scale"]


class OtherTensor(Net):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.given = [torch.full((3,), float(batch_idx), device=self.device)]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) + (self.net(batch["x"]) * self.given[0]).mean()


class Sized(Net):
    """makes its tables again where the batch has another size, as temporal fusion transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.size, self.mask, self.given = -1, torch.zeros(1), torch.zeros(1)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.given = torch.full((3,), float(batch_idx), device=self.device)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if (size := len(batch["x"])) != self.size:
            self.mask = torch.tril(torch.ones(size, size, device=self.device))
            self.size = size
        mixed = self.mask @ self.net(batch["x"]) * self.given
        return self.loss(batch) + mixed.square().mean()


BLOCK, LAYERS = named("block"), named("gpt.transformer.h.*")
ROWS = {
    "Settings": row(
        Settings, graphs=2, also="unverified; modules, unverified", modules=("block",), below="",
        validation=0,
    ),
    "GivenInBatches": row(
        GivenInBatches, graphs=2, changes=('batch["context"].scale: 1.0 -> 3.0',), validation=0,
    ),
    "CountedInTheBatch": row(
        CountedInTheBatch, said=r"training_step changes batch\[\"counter\"\]", data=with_counter,
        outside=lambda: COUNTERS[-1].count, capture={"min_repeats": 0}, validation=0,
        found="rule remedy",
    ),
    **table(
        each={
            Collected: r"`block` runs eagerly: .*: the call changes args\[1\]\.seen",
            CollectedInList: r"`block` runs eagerly: .*: the call changes args\[1\]\['hidden'\]",
        },
        capture=BLOCK, validation=0, found=None,
    ),
    "HandsAModule": row(
        HandsAModule, capture=BLOCK, check=lambda fit: fit.statistics.graphs[0].replays > 0,
        validation=0,
    ),
    "Numbered": row(
        Numbered, capture=named("blocks.*"), said=None, replayed=1,
        check=lambda fit: {graph.scope for graph in fit.statistics.graphs if graph.replays}
        == {"module blocks.0", "module blocks.1"}, validation=0,
    ),
    "SetAnew": row(SetAnew, graphs=1),
    "Configured": row(Configured, graphs=1, below=None),
    "OtherTensor": row(
        OtherTensor, said=r"self.given\[0\]: another Tensor float32\[3\]", replayed=1, placed=False
    ),
    **table(Normalized, placed=False, validation=0),
    **table(
        Centered, Stored, replayed=1, found=None, placed=False, validation=0,
        said=r"self.normalizer.center: another Tensor float32\[scalar\]",
    ),
    # A GPU's thread of the backward pass is not followed: each new tensor is another key there.
    **table(
        InBackward, InHook, replayed=0, found=None, placed=False, validation=0,
        said=r"self.normalizer.center: another Tensor float32\[scalar\]",
    ),
    # Its tables are inputs of the step from the second graph on, however many epochs there are.
    "Sized": row(
        Sized, graphs=range(7), replayed=37, data=lambda: batches(10, last=5), max_epochs=6,
        check=lambda fit: fit.module.mask.shape == (5, 5),
    ),
}  # fmt: skip
ROWS |= {
    f"an iterator {place}": row(
        partial(Streaming, *how),
        said="self.stream.*, an iterator, is read",
        also="unverified",
        validation=0,
    )
    for place, how in STREAMS.items()
}
ROWS |= {
    f"an iterator of user code, {how}": row(
        partial(Streaming, Sampler, take),
        placed=False,
        validation=0,
        graphs=range(1, 3),
        also="unverified",
        check=lambda fit: fit.module.stream.calls == fit.trainer.global_step,
    )
    for how, take in {"by next": next, "by for": lambda held: next(x for x in held)}.items()
}
for frozen in (False, True):
    cached, without = (
        partial(Remembering, use_cache=used, frozen=frozen) for used in (True, False)
    )
    ROWS |= {
        f"a cache in layers, {frozen}": row(
            cached, capture=LAYERS, said="config.use_cache = False", found=None, placed=False,
            also="unverified", validation=0,
        ),
        f"layers without a cache, {frozen}": row(without, capture=LAYERS, validation=0),
        f"a cache in a step, {frozen}": row(cached, validation=0),
    }  # fmt: skip


class TestObjects(Promises):
    rows = ROWS
